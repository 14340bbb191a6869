"""RESHAPE, SQUEEZE, EXPAND_DIMS, CONCATENATION and PACK: arrays reshaped or concatenated.

The first three return views. CONCATENATION requantizes, through a table, an input with another scale or zero point than
the output.

RESHAPE        C1 the counts of elements agree   C2 at most one dimension is -1, none is less
SQUEEZE        C3 a removed dimension is 1       C4 axes are a vector
CONCATENATION  C5 all dimensions except the axis agree
PACK           C6 all shapes agree               C7 axis in [0, rank]
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from nnfmq.hal.types import Operand, OperandType, OperationType
from nnfmq.operations import declaration as op
from nnfmq.operations.declaration import Array, Plan, Run, Shape, Tensor
from nnfmq.operations.fixed_point import rounded
from nnfmq.operations.kernel_adapters import lut8, stateless
from nnfmq.operations.quantization import dtype_range
from nnfmq.operations.shapes import normalize_axis, require, require_rank


def data_movement_variants(plan: Plan, since: int, int32: int | None = None) -> tuple[op.Variant, ...]:
    """Return the variants of an operation that only moves data: one plan for all types, INT32 since level `int32`."""
    usual = op.types_since(since, plan, op.F32, op.Q8, op.F16, op.Q8S)
    return usual if int32 is None else (*usual, *op.types_since(int32, plan, op.I32))


def moved_in_extension(plan: Plan, *types: OperandType, **changes: Any) -> tuple[op.Extended, ...]:
    """Declare an operation that moves elements for further `types` and 16 bits: stored values, whatever their scales.

    `changes` are what differs from the HAL's operation: a shape rule for any rank.
    """
    return op.wider(*op.of_types(plan, *types), **changes), op.sixteen_bits(*op.of_types(plan, op.Q16S), **changes)


def reshape_shape(input: Shape, *, shape: Array) -> Shape:
    """Return `shape` with a -1 replaced by the remaining count of elements."""
    require_rank(input, range(1, 5), "input")
    return reshaped(input, shape=shape)


def reshaped(input: Shape, *, shape: Array) -> Shape:
    """Return `shape` with a -1 replaced by the remaining count of elements, for any rank of the input."""
    require(shape.ndim == 1 and len(shape) > 0, "C2", f"the new shape has shape {shape.shape}, a vector is required")
    dimensions = [int(dimension) for dimension in shape]
    require(
        min(dimensions) >= -1 and dimensions.count(-1) <= 1,
        "C2",
        f"new shape {dimensions}, at most one -1 and no smaller value is allowed",
    )
    count, known = math.prod(input), math.prod(e for e in dimensions if e != -1)
    if -1 in dimensions:
        require(known > 0, "C1", f"{count} elements do not fit shape {dimensions}")
        dimensions[dimensions.index(-1)] = count // known
    require(math.prod(dimensions) == count, "C1", f"{count} elements do not fit shape {dimensions}")
    return tuple(dimensions)


def squeeze_shape(input: Shape, *, axes: Array | None = None) -> Shape:
    """Return the input's shape without the axes (if omitted, without all dimensions of 1); at least (1,)."""
    require_rank(input, range(1, 5), "input")
    return squeezed(input, axes=axes)


def squeezed(input: Shape, *, axes: Array | None = None) -> Shape:
    """Return the same as `squeeze_shape` for any rank of the input."""
    if axes is None or axes.size == 0:
        removed = {axis for axis, dimension in enumerate(input) if dimension == 1}
    else:
        require(axes.ndim == 1, "C4", f"axes have shape {axes.shape}, a vector is required")
        removed = {normalize_axis(int(axis), len(input)) for axis in axes}
    for axis in removed:
        require(input[axis] == 1, "C3", f"axis {axis} has dimension {input[axis]}, only 1 can be removed")
    return tuple(dimension for axis, dimension in enumerate(input) if axis not in removed) or (1,)


def expand_dims_shape(input: Shape, *, axis: int) -> Shape:
    """Return the input's shape with a dimension of 1 inserted at `axis` of the output."""
    position = normalize_axis(axis, len(input) + 1)
    return (*input[:position], 1, *input[position:])


def plan_reshape(input: Tensor, *, output: Tensor, **_: Any) -> Run:
    """Plan a view of the input in the output's shape."""
    shape = output.shape
    return lambda array: array.reshape(shape)


def concatenation_shape(*inputs: Shape, axis: int) -> Shape:
    """Return the first shape with the sum of the dimensions along `axis`."""
    require_rank(inputs[0], range(1, 5), "input")
    return concatenated(*inputs, axis=axis)


def concatenated(*inputs: Shape, axis: int) -> Shape:
    """Return the first shape, of any rank, with the sum of the dimensions along `axis`."""
    first = inputs[0]
    axis = normalize_axis(axis, len(first))
    for other in inputs[1:]:
        agree = len(other) == len(first) and all(a == b for i, (a, b) in enumerate(zip(first, other)) if i != axis)  # noqa: B905
        require(agree, "C5", f"shapes {first} and {other} differ in another axis than {axis}")
    return first[:axis] + (sum(shape[axis] for shape in inputs),) + first[axis + 1 :]


def concatenation(*inputs: Array, axis: int) -> Array:
    """Return the inputs concatenated along `axis`."""
    return np.concatenate(inputs, axis=axis)


def plan_quantized_concatenation(*inputs: Tensor, output: Tensor, axis: int) -> Run:
    """Plan a concatenation that requantizes inputs of another scale or zero point through a table."""
    tables = [concat_requant_lut(tensor, output) for tensor in inputs]

    def run(*arrays: Array) -> Array:
        pairs = zip(arrays, tables, strict=True)
        return np.concatenate([a if t is None else lut8(t, a) for a, t in pairs], axis=axis)

    return run


def concat_requant_lut(tensor: Tensor, output: Tensor) -> Array | None:
    """Return a table from the quantized values of `tensor` to those of `output`; None if the quantization is equal.

    As in TFLite, int8 is computed like uint8.
    """
    if (tensor.scale, tensor.zero_point) == (output.scale, output.zero_point):
        return None
    lowest = dtype_range(tensor)[0]
    quantized = np.arange(256, dtype=np.uint8).view(tensor.dtype).astype(np.float32) - np.float32(lowest)
    scale = np.float32(tensor.scale) * (np.float32(1) / np.float32(output.scale))
    bias = np.float32(-(tensor.zero_point - lowest)) * scale
    reals = (quantized * scale + bias).astype(np.float64)
    steps = rounded(reals) + (output.zero_point - lowest)
    result: Array = (np.clip(steps, 0, 255) + lowest).astype(output.dtype)
    return result


def pack_shape(*inputs: Shape, axis: int) -> Shape:
    """Return the inputs' shape with their count inserted at `axis`."""
    first = inputs[0]
    for other in inputs[1:]:
        require(other == first, "C6", f"shapes {first} and {other} differ")
    require(0 <= axis <= len(first), "C7", f"axis {axis} is outside [0, {len(first)}]")
    return (*first[:axis], len(inputs), *first[axis:])


def pack(*inputs: Array, axis: int) -> Array:
    """Return the inputs stacked along a new axis."""
    return np.stack(inputs, axis=axis)


def _concatenation_level(inputs: Mapping[str, Operand], output: Operand) -> int:
    equal = all(
        (o.scale, o.zero_point) == (output.scale, output.zero_point) for o in inputs.values() if o.type == op.Q8
    )
    return op.V1_0 if equal else op.V1_2


DECLARATIONS = (
    op.Declaration(
        OperationType.RESHAPE,
        since=op.V1_0,
        overloads=(op.overload(op.data("input"), op.attribute("shape", op.I32)),),
        variants=data_movement_variants(plan_reshape, op.V1_0, int32=op.AIDL_V2),
        shape=reshape_shape,
        same_quantization=True,
        extended=moved_in_extension(plan_reshape, op.B8, *op.WIDE, op.C64, shape=reshaped),
    ),
    op.Declaration(
        OperationType.SQUEEZE,
        since=op.V1_1,
        overloads=(op.overload(op.data("input"), op.attribute("axes", op.I32, optional=True), level=op.V1_1),),
        variants=data_movement_variants(plan_reshape, op.V1_1),
        shape=squeeze_shape,
        same_quantization=True,
        extended=moved_in_extension(plan_reshape, op.I32, op.B8, *op.WIDE, op.C64, shape=squeezed),
    ),
    op.Declaration(
        OperationType.EXPAND_DIMS,
        since=op.V1_2,
        overloads=(op.overload(op.data("input"), op.attribute("axis"), level=op.V1_2),),
        variants=data_movement_variants(plan_reshape, op.V1_2, int32=op.V1_2),
        shape=expand_dims_shape,
        same_quantization=True,
        extended=moved_in_extension(plan_reshape, op.B8, *op.WIDE, op.C64),
    ),
    op.Declaration(
        OperationType.CONCATENATION,
        since=op.V1_0,
        overloads=(op.overload(op.data("inputs", repeated=True), op.attribute("axis")),),
        variants=(
            *op.types_since(op.V1_0, stateless(concatenation), op.F32, op.F16),
            *op.types_since(op.V1_0, plan_quantized_concatenation, op.Q8, op.Q8S),
        ),
        shape=concatenation_shape,
        zero_sized=True,
        level=_concatenation_level,
        extended=moved_in_extension(stateless(concatenation), op.I32, op.B8, *op.WIDE, shape=concatenated),
    ),
    op.Declaration(
        OperationType.PACK,
        since=op.AIDL_V2,
        overloads=(op.overload(op.attribute("axis"), op.data("inputs", repeated=True), level=op.AIDL_V2),),
        variants=data_movement_variants(stateless(pack), op.AIDL_V2, int32=op.AIDL_V2),
        shape=pack_shape,
        same_quantization=True,
        extended=moved_in_extension(stateless(pack), op.B8, *op.WIDE),
    ),
)
