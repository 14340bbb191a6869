"""PAD, PAD_V2 and MIRROR_PAD: an array with a border of a constant, or of its mirrored elements.

PAD pads with the real value 0, which is the zero point of a quantized tensor. PAD_V2 pads quantized tensors with a
quantized value, which is the same number for uint8 and int8: unlike zero points, it is not shifted by 128.

    C1 paddings have shape (rank, 2) and are not negative
    C2 mirrored padding is at most the dimension (SYMMETRIC), or one less (REFLECT)
    C3 mode is REFLECT (0) or SYMMETRIC (1)
    C4 the padding value fits the type
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import numpy as np

from nnfmq.hal.types import Operand, OperationType
from nnfmq.operations.declaration import (
    AIDL_V3,
    F16,
    F32,
    FLOAT16,
    FLOAT32,
    I32,
    INT32,
    Q8,
    Q8S,
    V1_1,
    V1_2,
    V1_3,
    Array,
    Declaration,
    Run,
    Shape,
    Tensor,
    Variant,
    attribute,
    data,
    overload,
)
from nnfmq.operations.quantization import dtype_range
from nnfmq.operations.reshape_concat import data_movement_variants
from nnfmq.operations.shapes import require, require_rank


class MirrorMode(IntEnum):
    """SYMMETRIC repeats the outermost element in the border, REFLECT does not."""

    REFLECT = 0
    SYMMETRIC = 1


def padded(input: Shape, paddings: Array) -> Shape:
    """Return `input` plus `paddings` of shape (rank, 2)."""
    fits = paddings.shape == (len(input), 2) and int(paddings.min()) >= 0
    message = f"paddings {paddings.tolist()}, required are ({len(input)}, 2) values of 0 or more"
    require(fits, "C1", message)
    return tuple(dimension + low + high for dimension, (low, high) in zip(input, paddings.tolist(), strict=True))


def pad_shape(input: Shape, *, paddings: Array, value: float = 0) -> Shape:
    """Return the input's shape plus the paddings."""
    require_rank(input, range(1, 5), "input")
    return padded(input, paddings)


def plan_pad(input: Tensor, *, output: Tensor, paddings: Array) -> Run:
    """Plan padding with the real value 0: the zero point of a quantized tensor."""
    return plan_pad_v2(input, output=output, paddings=paddings, value=output.zero_point)


def plan_pad_v2(input: Tensor, *, output: Tensor, paddings: Array, value: float) -> Run:
    """Plan padding with a value of the array's type."""
    if output.dtype.kind != "f":
        low, high = dtype_range(output)
        require(low <= value <= high, "C4", f"padding value {value}, {output.dtype} allows {low} to {high}")
    pairs = zip(input.shape, paddings.tolist(), strict=True)
    inner = tuple(slice(before, before + dimension) for dimension, (before, _) in pairs)

    def run(array: Array) -> Array:
        padded = np.full(output.shape, value, output.dtype)
        padded[inner] = array
        return padded

    return run


def _pad_level(inputs: Mapping[str, Operand], output: Operand) -> int:
    source = inputs["input"]
    return V1_2 if source.type == Q8 and source.zero_point != 0 else V1_1


def mirror_pad_shape(input: Shape, *, paddings: Array, mode: int) -> Shape:
    """Return the input's shape plus the paddings."""
    known = mode in (MirrorMode.REFLECT, MirrorMode.SYMMETRIC)
    require(known, "C3", f"mode {mode}, allowed are 0 (REFLECT) and 1 (SYMMETRIC)")
    shape = padded(input, paddings)
    for dimension, pair in zip(input, paddings.tolist(), strict=True):
        limit = dimension - (mode == MirrorMode.REFLECT)
        message = f"padding {max(pair)} of a dimension of {dimension}, at most {limit} is allowed in mode {mode}"
        require(max(pair) <= limit, "C2", message)
    return shape


def plan_mirror_pad(input: Tensor, *, output: Tensor, paddings: Array, mode: int) -> Run:
    """Plan a gather along each padded axis, from a vector of input positions."""
    style: Any = "reflect" if mode == MirrorMode.REFLECT else "symmetric"
    pairs = enumerate(zip(input.shape, paddings.tolist(), strict=True))
    positions = {axis: np.pad(np.arange(dimension), pair, style) for axis, (dimension, pair) in pairs if any(pair)}

    def run(array: Array) -> Array:
        for axis, chosen in positions.items():
            array = array.take(chosen, axis=axis)
        return array

    return run


DECLARATIONS = (
    Declaration(
        OperationType.PAD,
        since=V1_1,
        overloads=(overload(data("input"), attribute("paddings", I32), level=V1_1),),
        variants=data_movement_variants(plan_pad, V1_1),
        shape=pad_shape,
        same_quantization=True,
        level=_pad_level,
    ),
    Declaration(
        OperationType.PAD_V2,
        since=V1_2,
        overloads=(overload(data("input"), attribute("paddings", I32), attribute("value", "V"), level=V1_2),),
        variants=(
            Variant({"T": F32, "V": FLOAT32}, V1_2, plan_pad_v2),
            Variant({"T": F16, "V": FLOAT16}, V1_2, plan_pad_v2),
            Variant({"T": Q8, "V": INT32}, V1_2, plan_pad_v2),
            Variant({"T": Q8S, "V": INT32}, V1_3, plan_pad_v2),
        ),
        shape=pad_shape,
        same_quantization=True,
    ),
    Declaration(
        OperationType.MIRROR_PAD,
        since=AIDL_V3,
        overloads=(overload(data("input"), attribute("paddings", I32), attribute("mode"), level=AIDL_V3),),
        variants=data_movement_variants(plan_mirror_pad, AIDL_V3, int32=AIDL_V3),
        shape=mirror_pad_shape,
        same_quantization=True,
    ),
)
