"""RESHAPE, SQUEEZE, PAD and CONCATENATION: operations that move elements.

RESHAPE        C1 the counts of elements agree   C2 at most one extent is -1, none is below
SQUEEZE        C3 a removed extent is 1
PAD            C4 paddings have shape (rank, 2) and are not negative
CONCATENATION  C5 all extents but the axis's agree
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from nnfmq.hal.types import Operand, OperationType
from nnfmq.operations.policies import direct, look_up
from nnfmq.operations.quantization import type_range
from nnfmq.operations.shapes import normal_axis, require, require_rank
from nnfmq.operations.signature import (
    AIDL_V2,
    F16,
    F32,
    I32,
    Q8,
    Q8S,
    V1_0,
    V1_1,
    V1_2,
    V1_3,
    Array,
    Declaration,
    Plan,
    Run,
    Shape,
    Tensor,
    Variant,
    control,
    data,
    form,
)


def moved_types(plan: Plan, since: int) -> tuple[Variant, ...]:
    """Return the variants of an operation that computes nothing: one plan for all types."""
    levels = ((F32, since), (Q8, since), (F16, V1_2), (Q8S, V1_3))
    return tuple(Variant({"T": type}, level, plan) for type, level in levels)


def reshape_shape(input: Shape, *, shape: Array) -> Shape:
    """Return `shape` with its -1 replaced."""
    require_rank(input, range(1, 5), "input")
    require(shape.ndim == 1 and len(shape) > 0, "C2", f"the new shape has shape {shape.shape}, a vector is needed")
    extents = [int(extent) for extent in shape]
    require(min(extents) >= -1 and extents.count(-1) <= 1, "C2", f"new shape {extents}")
    count, known = math.prod(input), math.prod(e for e in extents if e != -1)
    if -1 in extents:
        require(known > 0 and count % known == 0, "C1", f"{count} elements do not go into {extents}")
        extents[extents.index(-1)] = count // known
    require(math.prod(extents) == count, "C1", f"{count} elements do not go into {extents}")
    return tuple(extents)


def squeeze_shape(input: Shape, *, axes: Array | None = None) -> Shape:
    """Return the input's shape without the axes (all extents of 1 if omitted); (1,) if nothing is left."""
    require_rank(input, range(1, 5), "input")
    if axes is None or axes.size == 0:
        gone = {axis for axis, extent in enumerate(input) if extent == 1}
    else:
        gone = {normal_axis(int(axis), len(input)) for axis in axes.ravel()}
    for axis in gone:
        require(input[axis] == 1, "C3", f"extent {input[axis]} of axis {axis} cannot be removed")
    return tuple(extent for axis, extent in enumerate(input) if axis not in gone) or (1,)


def plan_reshape(input: Tensor, *, output: Tensor, **_: Any) -> Run:
    """Plan a view of the input in the output's shape."""
    shape = output.shape
    return lambda array: array.reshape(shape)


def pad_shape(input: Shape, *, paddings: Array) -> Shape:
    """Return the input's shape grown by the paddings."""
    require_rank(input, range(1, 5), "input")
    fits = paddings.shape == (len(input), 2) and int(paddings.min()) >= 0
    require(fits, "C4", f"paddings {paddings.tolist()} for rank {len(input)}")
    return tuple(extent + int(head) + int(tail) for extent, (head, tail) in zip(input, paddings, strict=True))


def plan_pad(input: Tensor, *, output: Tensor, paddings: Array) -> Run:
    """Plan padding with 0, which is the zero point in codes."""
    pairs = zip(input.shape, paddings, strict=True)
    inner = tuple(slice(int(head), int(head) + extent) for extent, (head, _) in pairs)

    def run(array: Array) -> Array:
        padded = np.full(output.shape, output.zero_point, output.dtype)
        padded[inner] = array
        return padded

    return run


def _pad_level(inputs: Mapping[str, Operand], output: Operand) -> int:
    source = inputs["input"]
    return V1_2 if source.type == Q8 and source.zero_point != 0 else V1_1


def concatenation_shape(*inputs: Shape, axis: int) -> Shape:
    """Return the first shape with the extents along `axis` summed."""
    first = inputs[0]
    require_rank(first, range(1, 5), "input")
    axis = normal_axis(axis, len(first))
    for other in inputs[1:]:
        agree = len(other) == len(first) and all(a == b for i, (a, b) in enumerate(zip(first, other)) if i != axis)  # noqa: B905
        require(agree, "C5", f"shapes {first} and {other} differ beside axis {axis}")
    return first[:axis] + (sum(shape[axis] for shape in inputs),) + first[axis + 1 :]


def concatenation(*inputs: Array, axis: int) -> Array:
    """Return the inputs one after the other along `axis`."""
    return np.concatenate(inputs, axis=axis)


def plan_quantized_concatenation(*inputs: Tensor, output: Tensor, axis: int) -> Run:
    """Plan a concatenation in which inputs of another scale or zero point are requantized, through a table each."""
    tables = [_requantized_codes(tensor, output) for tensor in inputs]

    def run(*arrays: Array) -> Array:
        pairs = zip(arrays, tables, strict=True)
        return np.concatenate([a if t is None else look_up(t, a) for a, t in pairs], axis=axis)

    return run


def _requantized_codes(tensor: Tensor, output: Tensor) -> Array | None:
    """Return the output's code for each code (in uint8 arithmetic also for int8, as the reference); None if equal."""
    if (tensor.scale, tensor.zero_point) == (output.scale, output.zero_point):
        return None
    lowest = type_range(tensor)[0]
    codes = np.arange(256, dtype=np.uint8).view(tensor.dtype).astype(np.float32) - np.float32(lowest)
    scale = np.float32(tensor.scale) * (np.float32(1) / np.float32(output.scale))
    bias = np.float32(-(tensor.zero_point - lowest)) * scale
    reals = (codes * scale + bias).astype(np.float64)
    rounded = np.copysign(np.floor(np.abs(reals) + 0.5), reals) + (output.zero_point - lowest)
    result: Array = (np.clip(rounded, 0, 255) + lowest).astype(output.dtype)
    return result


def _concatenation_level(inputs: Mapping[str, Operand], output: Operand) -> int:
    equal = all((o.scale, o.zero_point) == (output.scale, output.zero_point) for o in inputs.values() if o.type == Q8)
    return V1_0 if equal else V1_2


DECLARATIONS = (
    Declaration(
        OperationType.RESHAPE,
        since=V1_0,
        forms=(form(data("input"), control("shape", I32)),),
        variants=(*moved_types(plan_reshape, V1_0), Variant({"T": I32}, AIDL_V2, plan_reshape)),
        shape=reshape_shape,
        same_quantization=True,
    ),
    Declaration(
        OperationType.SQUEEZE,
        since=V1_1,
        forms=(form(data("input"), control("axes", I32, optional=True), level=V1_1),),
        variants=moved_types(plan_reshape, V1_1),
        shape=squeeze_shape,
        same_quantization=True,
    ),
    Declaration(
        OperationType.PAD,
        since=V1_1,
        forms=(form(data("input"), control("paddings", I32), level=V1_1),),
        variants=moved_types(plan_pad, V1_1),
        shape=pad_shape,
        same_quantization=True,
        level=_pad_level,
    ),
    Declaration(
        OperationType.CONCATENATION,
        since=V1_0,
        forms=(form(data("inputs", repeated=True), control("axis")),),
        variants=(
            Variant({"T": F32}, V1_0, direct(concatenation)),
            Variant({"T": Q8}, V1_0, plan_quantized_concatenation),
            Variant({"T": F16}, V1_2, direct(concatenation)),
            Variant({"T": Q8S}, V1_3, plan_quantized_concatenation),
        ),
        shape=concatenation_shape,
        zero_sized=True,
        level=_concatenation_level,
    ),
)
