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
from nnfmq.operations import declaration as op
from nnfmq.operations.declaration import Array, Run, Shape, Tensor
from nnfmq.operations.quantization import dtype_range
from nnfmq.operations.reshape_concat import data_movement_variants, moved_in_extension
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


def pad_shape_of_any_rank(input: Shape, *, paddings: Array, value: float = 0) -> Shape:
    """Return the input's shape, of any rank, plus the paddings."""
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
    return op.V1_2 if source.type == op.Q8 and source.zero_point != 0 else op.V1_1


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
    op.Declaration(
        OperationType.PAD,
        since=op.V1_1,
        overloads=(op.overload(op.data("input"), op.attribute("paddings", op.I32), level=op.V1_1),),
        variants=data_movement_variants(plan_pad, op.V1_1),
        shape=pad_shape,
        same_quantization=True,
        level=_pad_level,
        extended=moved_in_extension(plan_pad, op.I32, op.B8, *op.WIDE, shape=pad_shape_of_any_rank),
    ),
    op.Declaration(
        OperationType.PAD_V2,
        since=op.V1_2,
        overloads=(
            op.overload(op.data("input"), op.attribute("paddings", op.I32), op.attribute("value", "V"), level=op.V1_2),
        ),
        variants=(
            op.Variant({"T": op.F32, "V": op.FLOAT32}, op.V1_2, plan_pad_v2),
            op.Variant({"T": op.F16, "V": op.FLOAT16}, op.V1_2, plan_pad_v2),
            *op.types_since(op.V1_2, plan_pad_v2, op.Q8, op.Q8S, V=op.INT32),
        ),
        shape=pad_shape,
        same_quantization=True,
        extended=(
            op.wider(*op.of_types(plan_pad_v2, op.I32, op.B8, V=op.INT32), shape=pad_shape_of_any_rank),
            op.sixteen_bits(*op.of_types(plan_pad_v2, op.Q16S, V=op.INT32), shape=pad_shape_of_any_rank),
        ),
    ),
    op.Declaration(
        OperationType.MIRROR_PAD,
        since=op.AIDL_V3,
        overloads=(
            op.overload(op.data("input"), op.attribute("paddings", op.I32), op.attribute("mode"), level=op.AIDL_V3),
        ),
        variants=data_movement_variants(plan_mirror_pad, op.AIDL_V3, int32=op.AIDL_V3),
        shape=mirror_pad_shape,
        same_quantization=True,
        extended=moved_in_extension(plan_mirror_pad, op.B8, *op.WIDE),
    ),
)
