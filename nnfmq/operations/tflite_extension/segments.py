"""CUMSUM, SEGMENT_SUM, UNSORTED_SEGMENT, MATRIX_DIAG, MATRIX_SET_DIAG and BUCKETIZE.

C1 segment ids ascend, are not negative, and are fewer than the segments
C2 the shapes of ids, diagonals and matrices agree
C3 the reduction is 0 (sum), 1 (product), 2 (maximum) or 3 (minimum)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nnfmq.hal.extensions import TfliteOperation
from nnfmq.operations import declaration as op
from nnfmq.operations.declaration import Array, Run, Shape, Tensor
from nnfmq.operations.kernel_adapters import stateless
from nnfmq.operations.shapes import normalize_axis, require, require_size, same_shape
from nnfmq.operations.tflite_extension import any_tensor_variants, declare

_UFUNCS: tuple[Any, ...] = (np.add, np.multiply, np.maximum, np.minimum)


def cumsum_shape(input: Shape, *, axis: Any, exclusive: bool, reverse: bool) -> Shape:
    """Return the input's shape."""
    normalize_axis(_number(axis), len(input))
    return input


def cumsum(input: Array, *, axis: Any, exclusive: bool, reverse: bool) -> Array:
    """Return the sums of the elements up to each position of the axis, without it if `exclusive`."""
    axis = _number(axis)
    ordered = np.flip(input, axis) if reverse else input
    sums = np.cumsum(ordered, axis=axis, dtype=input.dtype)
    if exclusive:
        sums = np.roll(sums, 1, axis)
        np.moveaxis(sums, axis, 0)[0] = 0
    return np.ascontiguousarray(np.flip(sums, axis) if reverse else sums)


def _number(value: Any) -> int:
    return int(np.asarray(value).reshape(-1)[0])


def segment_sum_shape(input: Shape, *, ids: Array) -> Shape:
    """Return the input's shape with the number of segments, one more than the last id, as first dimension."""
    require(ids.shape == input[:1], "C2", f"ids of shape {ids.shape} for an input of shape {input}")
    ordered = bool((np.diff(ids) >= 0).all()) and int(ids[0]) >= 0
    require(ordered, "C1", "the ids must ascend from 0 or more")
    shape = (int(ids[-1]) + 1, *input[1:])
    require_size(shape, 4)
    return shape


def plan_segment_sum(input: Tensor, *, output: Tensor, ids: Array) -> Run:
    """Plan the sums of the rows of each segment."""
    rows = ids.astype(np.intp)

    def run(array: Array) -> Array:
        result = np.zeros(output.shape, output.dtype)
        np.add.at(result, rows, array)
        return result

    return run


def unsorted_segment_shape(input: Shape, ids: Shape, *, count: Any, reduction: int) -> Shape:
    """Return the input's shape with the number of segments in place of the dimensions of the ids."""
    require(0 <= reduction < len(_UFUNCS), "C3", f"reduction {reduction}")
    require(len(ids) > 0 and ids == input[: len(ids)], "C2", f"ids of shape {ids} for shape {input}")
    require(_number(count) >= 0, "C1", f"{_number(count)} segments")
    return (_number(count), *input[len(ids) :])


def plan_unsorted_segment(input: Tensor, ids: Tensor, *, output: Tensor, count: Any, reduction: int) -> Run:
    """Plan the reduction of each segment; elements with a negative id are left out."""
    ufunc, segments = _UFUNCS[reduction], output.shape[0]
    limits: Any = np.finfo(output.dtype) if output.dtype.kind == "f" else np.iinfo(output.dtype)
    initial = (0, 1, limits.min, limits.max)[reduction]

    def run(array: Array, numbers: Array) -> Array:
        places = numbers.astype(np.intp).reshape(-1)
        require(places.size == 0 or int(places.max()) < segments, "C1", f"an id is {segments} or more")
        result = np.full(output.shape, initial, output.dtype)
        kept = places >= 0
        ufunc.at(result, places[kept], array.reshape(-1, *output.shape[1:])[kept])
        return result

    return run


def matrix_diag_shape(diagonal: Shape) -> Shape:
    """Return the shape of the diagonals with their last dimension repeated."""
    return (*diagonal, diagonal[-1])


def matrix_diag(diagonal: Array) -> Array:
    """Return matrices of zeros with these diagonals."""
    result = np.zeros((*diagonal.shape, diagonal.shape[-1]), diagonal.dtype)
    along = np.arange(diagonal.shape[-1])
    result[..., along, along] = diagonal
    return result


def matrix_set_diag_shape(matrix: Shape, diagonal: Shape) -> Shape:
    """Return the shape of the matrices."""
    fits = len(matrix) >= 2 and diagonal == (*matrix[:-2], min(matrix[-2:]))
    require(fits, "C2", f"diagonals of shape {diagonal} for matrices of shape {matrix}")
    return matrix


def matrix_set_diag(matrix: Array, diagonal: Array) -> Array:
    """Return the matrices with these diagonals."""
    result = matrix.copy()
    along = np.arange(diagonal.shape[-1])
    result[..., along, along] = diagonal
    return result


def bucketize(input: Array, *, boundaries: Array) -> Array:
    """Return how many boundaries, which ascend, are not above each value."""
    return np.searchsorted(boundaries, input, side="right").astype(np.int32)


DECLARATIONS = (
    declare(
        TfliteOperation.CUMSUM,
        op.data("input"),
        op.attribute("axis", op.I32),
        op.attribute("exclusive", op.BOOL),
        op.attribute("reverse", op.BOOL),
        variants=op.of_types(stateless(cumsum), op.F32, op.I32, *op.WIDE),
        shape=cumsum_shape,
    ),
    declare(
        TfliteOperation.SEGMENT_SUM,
        op.data("input"),
        op.attribute("ids", op.I32),
        variants=op.of_types(plan_segment_sum, op.F32, op.I32, *op.WIDE),
        shape=segment_sum_shape,
    ),
    declare(
        TfliteOperation.UNSORTED_SEGMENT,
        op.data("input"),
        op.data("ids", op.I32),
        op.attribute("count", op.I32),
        op.attribute("reduction"),
        variants=op.of_types(plan_unsorted_segment, op.F32, op.I32, *op.WIDE),
        shape=unsorted_segment_shape,
    ),
    declare(
        TfliteOperation.MATRIX_DIAG,
        op.data("diagonal"),
        variants=any_tensor_variants(stateless(matrix_diag)),
        shape=matrix_diag_shape,
    ),
    declare(
        TfliteOperation.MATRIX_SET_DIAG,
        op.data("matrix"),
        op.data("diagonal"),
        variants=any_tensor_variants(stateless(matrix_set_diag)),
        shape=matrix_set_diag_shape,
    ),
    declare(
        TfliteOperation.BUCKETIZE,
        op.data("input"),
        op.attribute("boundaries", op.F32),
        variants=op.of_types(stateless(bucketize), op.F32, op.I32),
        shape=same_shape,
        outputs=(op.I32,),
    ),
)
