"""SLICE, STRIDED_SLICE and SPLIT: copies of parts of an array.

Begins, ends and strides become Python slices at preparation; a kernel is one subscript. A slice may be empty: the
result then has a dimension of 0.

SLICE          C1 begins and sizes are vectors with an element for each axis
               C2 the slice is inside the input (size -1: to the end)
STRIDED_SLICE  C1 begins, ends and strides are such vectors   C3 a stride is not 0
               C4 an axis that is shrunk has a positive stride and one element
SPLIT          C5 the count is positive and that of the outputs   C6 the dimension is a multiple of the count
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nnfmq.hal.types import OperationType
from nnfmq.operations import declaration as op
from nnfmq.operations.declaration import Array, Run, Shape, Tensor
from nnfmq.operations.kernel_adapters import stateless
from nnfmq.operations.reshape_concat import data_movement_variants, moved_in_extension
from nnfmq.operations.shapes import normalize_axis, require, require_rank


def _require_vectors(input: Shape, **vectors: Array) -> None:
    for name, vector in vectors.items():
        fits = vector.shape == (len(input),)
        require(fits, "C1", f"{name} has shape {vector.shape}, required is ({len(input)},)")


def slice_shape(input: Shape, *, begin: Array, size: Array) -> Shape:
    """Return the sizes, with -1 replaced by the remaining size."""
    _require_vectors(input, begin=begin, size=size)
    return tuple(_slice_dimension(*triple) for triple in zip(input, begin.tolist(), size.tolist(), strict=True))


def _slice_dimension(dimension: int, begin: int, size: int) -> int:
    count = dimension - begin if size == -1 else size
    inside = begin >= 0 and 0 <= count <= dimension - begin
    require(inside, "C2", f"a slice from {begin} of size {size} is not inside a dimension of {dimension}")
    return count


def plan_slice(input: Tensor, *, output: Tensor, begin: Array, size: Array) -> Run:
    """Plan a subscript of one slice for each axis."""
    pairs = zip(begin.tolist(), output.shape, strict=True)
    box = tuple(slice(first, first + dimension) for first, dimension in pairs)
    return lambda array: np.ascontiguousarray(array[box])


def strided_slice_shape(
    input: Shape, *, begin: Array, end: Array, strides: Array, begin_mask: int, end_mask: int, shrink_mask: int
) -> Shape:
    """Return the lengths of the slices without those that are shrunk; (1,) if none remains."""
    require_rank(input, range(1, 5), "input")
    return strided(
        input,
        begin=begin,
        end=end,
        strides=strides,
        begin_mask=begin_mask,
        end_mask=end_mask,
        shrink_mask=shrink_mask,
    )


def strided(
    input: Shape, *, begin: Array, end: Array, strides: Array, begin_mask: int, end_mask: int, shrink_mask: int
) -> Shape:
    """Return the lengths of the slices, of any rank, without those that are shrunk; (1,) if none remains."""
    _require_vectors(input, begin=begin, end=end, strides=strides)
    dimensions = [len(r) for r in slice_ranges(input, begin, end, strides, begin_mask, end_mask)]
    kept = [axis for axis in range(len(input)) if not shrink_mask >> axis & 1]
    for axis in set(range(len(input))) - set(kept):
        single = int(strides[axis]) > 0 and dimensions[axis] == 1
        require(
            single, "C4", f"axis {axis} has extent {dimensions[axis]} and stride {strides[axis]}, and is to be shrunk"
        )
    return tuple(dimensions[axis] for axis in kept) or (1,)


def slice_ranges(
    input: Shape, begin: Array, end: Array, strides: Array, begin_mask: int, end_mask: int
) -> Iterator[range]:
    """Yield the positions that the slice selects along each axis."""
    triples = zip(input, begin.tolist(), end.tolist(), strides.tolist(), strict=True)
    for axis, (dimension, first, last, stride) in enumerate(triples):
        require(stride != 0, "C3", f"the stride of axis {axis} is 0, it must not be")
        start = (0 if stride > 0 else dimension - 1) if begin_mask >> axis & 1 else _clamped(first, dimension, stride)
        stop = (dimension if stride > 0 else -1) if end_mask >> axis & 1 else _clamped(last, dimension, stride)
        yield range(start, stop, stride)


def _clamped(index: int, dimension: int, stride: int) -> int:
    """Return a clamped index from the front: in [0, dimension] for positive strides, in [-1, dimension) for others."""
    if stride > 0:
        return dimension if index >= dimension else max(index, -dimension) % dimension
    return -1 if index < -dimension else min(index, dimension - 1) % dimension


def plan_strided_slice(
    input: Tensor,
    *,
    output: Tensor,
    begin: Array,
    end: Array,
    strides: Array,
    begin_mask: int,
    end_mask: int,
    shrink_mask: int,
) -> Run:
    """Plan a subscript of one slice for each axis."""
    taken = tuple(map(_as_slice, slice_ranges(input.shape, begin, end, strides, begin_mask, end_mask)))
    shape = output.shape
    return lambda array: np.ascontiguousarray(array[taken]).reshape(shape)


def _as_slice(positions: range) -> slice:
    """Return a slice that selects `positions`; a stop of -1 would mean the last element there."""
    if len(positions) == 0:
        return slice(0, 0)
    stop = positions.stop if positions.step > 0 or positions.stop >= 0 else None
    return slice(positions.start, stop, positions.step)


def split_shape(input: Shape, *, axis: int, count: int, output_count: int) -> tuple[Shape, ...]:
    """Return the shape of each of `count` equal parts."""
    axis = normalize_axis(axis, len(input))
    require(count == output_count, "C5", f"{count} parts for {output_count} outputs")
    require(input[axis] % count == 0, "C6", f"a dimension of {input[axis]} does not split into {count} equal parts")
    return ((*input[:axis], input[axis] // count, *input[axis + 1 :]),) * count


def split(input: Array, *, axis: int, count: int, output_count: int) -> tuple[Array, ...]:
    """Return `count` equal parts along `axis`."""
    return tuple(map(np.ascontiguousarray, np.split(input, count, axis=axis)))


DECLARATIONS = (
    op.Declaration(
        OperationType.SLICE,
        since=op.V1_2,
        overloads=(
            op.overload(op.data("input"), op.attribute("begin", op.I32), op.attribute("size", op.I32), level=op.V1_2),
        ),
        variants=data_movement_variants(plan_slice, op.V1_2, int32=op.V1_2),
        shape=slice_shape,
        zero_sized=True,
        same_quantization=True,
        extended=moved_in_extension(plan_slice, op.B8, *op.WIDE),
    ),
    op.Declaration(
        OperationType.STRIDED_SLICE,
        since=op.V1_1,
        overloads=(
            op.overload(
                op.data("input"),
                op.attribute("begin", op.I32),
                op.attribute("end", op.I32),
                op.attribute("strides", op.I32),
                op.attribute("begin_mask"),
                op.attribute("end_mask"),
                op.attribute("shrink_mask"),
                level=op.V1_1,
            ),
        ),
        variants=data_movement_variants(plan_strided_slice, op.V1_1),
        shape=strided_slice_shape,
        same_quantization=True,
        extended=moved_in_extension(plan_strided_slice, op.I32, op.B8, *op.WIDE, shape=strided),
    ),
    op.Declaration(
        OperationType.SPLIT,
        since=op.V1_2,
        overloads=(op.overload(op.data("input"), op.attribute("axis"), op.attribute("count"), level=op.V1_2),),
        variants=data_movement_variants(stateless(split), op.V1_2, int32=op.V1_2),
        shape=split_shape,
        repeated_outputs=True,
        same_quantization=True,
        extended=moved_in_extension(stateless(split), op.B8, *op.WIDE),
    ),
)
