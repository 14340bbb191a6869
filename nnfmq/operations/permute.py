"""TRANSPOSE, REVERSE, TILE and CHANNEL_SHUFFLE: an array's elements reordered or repeated.

TRANSPOSE        C1 the permutation has each axis once; it is omitted only for a matrix
REVERSE          C2 the axis is a vector of one element in [0, rank)
TILE             C3 multiples are a vector of the rank, and not negative
CHANNEL_SHUFFLE  C4 the number of groups is positive and divides the axis
"""

from __future__ import annotations

import numpy as np

from nnfmq.hal.types import OperationType
from nnfmq.operations import declaration as op
from nnfmq.operations.declaration import Array, Shape
from nnfmq.operations.kernel_adapters import stateless
from nnfmq.operations.reshape_concat import data_movement_variants, moved_in_extension
from nnfmq.operations.shapes import normalize_axis, require, require_rank


def transpose_shape(input: Shape, *, permutation: Array | None = None) -> Shape:
    """Return the permuted shape; without a permutation, that of a transposed matrix."""
    require_rank(input, range(1, 5), "input")
    return permuted(input, permutation=permutation)


def permuted(input: Shape, *, permutation: Array | None = None) -> Shape:
    """Return the permuted shape, of any rank; without a permutation, that of a transposed matrix."""
    if permutation is None:
        require(len(input) == 2, "C1", f"the permutation of {len(input)} axes is omitted, allowed for 2 axes only")
        return input[::-1]
    order = permutation.tolist()
    fits = permutation.ndim == 1 and sorted(order) == list(range(len(input)))
    require(fits, "C1", f"{order} is not a permutation of {len(input)} axes")
    return tuple(input[axis] for axis in order)


def transpose(input: Array, *, permutation: Array | None = None) -> Array:
    """Return the array with its axes permuted."""
    return np.ascontiguousarray(input.transpose(permutation))


def reverse_shape(input: Shape, *, axis: Array) -> Shape:
    """Return the input's shape."""
    require_rank(input, range(1, 9), "input")
    fits = axis.shape == (1,) and 0 <= int(axis[0]) < len(input)
    require(fits, "C2", f"axis {axis.tolist()}, one value in [0, {len(input)}) is required")
    return input


def reverse(input: Array, *, axis: Array) -> Array:
    """Return the array with the order along the axis reversed."""
    return np.ascontiguousarray(np.flip(input, int(axis[0])))


def tile_shape(input: Shape, *, multiples: Array) -> Shape:
    """Return each dimension times its multiple."""
    fits = multiples.shape == (len(input),) and int(multiples.min()) >= 0
    require(fits, "C3", f"multiples {multiples.tolist()}, {len(input)} values of 0 or more are required")
    return tuple(dimension * times for dimension, times in zip(input, multiples.tolist(), strict=True))


def tile(input: Array, *, multiples: Array) -> Array:
    """Return the array repeated along each axis."""
    return np.tile(input, multiples.tolist())  # Python ints: NumPy would multiply dimensions in int32 and wrap around


def channel_shuffle_shape(input: Shape, *, groups: int, axis: int) -> Shape:
    """Return the input's shape."""
    require_rank(input, range(1, 5), "input")
    dimension = input[normalize_axis(axis, len(input))]
    require(
        groups > 0 and dimension % groups == 0, "C4", f"a dimension of {dimension} does not split into {groups} groups"
    )
    return input


def channel_shuffle(input: Array, *, groups: int, axis: int) -> Array:
    """Return the array with the channels of the groups interleaved: the first of each group, then the second, ..."""
    axis %= input.ndim
    before, dimension, after = input.shape[:axis], input.shape[axis], input.shape[axis + 1 :]
    split = input.reshape(*before, groups, dimension // groups, *after)
    return np.ascontiguousarray(split.swapaxes(axis, axis + 1)).reshape(input.shape)


DECLARATIONS = (
    op.Declaration(
        OperationType.TRANSPOSE,
        since=op.V1_1,
        overloads=(op.overload(op.data("input"), op.attribute("permutation", op.I32, optional=True), level=op.V1_1),),
        variants=data_movement_variants(stateless(transpose), op.V1_1),
        shape=transpose_shape,
        zero_sized=True,
        same_quantization=True,
        extended=moved_in_extension(stateless(transpose), op.I32, op.B8, *op.WIDE, shape=permuted),
    ),
    op.Declaration(
        OperationType.REVERSE,
        since=op.AIDL_V3,
        overloads=(op.overload(op.data("input"), op.attribute("axis", op.I32), level=op.AIDL_V3),),
        variants=data_movement_variants(stateless(reverse), op.AIDL_V3, int32=op.AIDL_V3),
        shape=reverse_shape,
        same_quantization=True,
        extended=moved_in_extension(stateless(reverse), op.B8, *op.WIDE),
    ),
    op.Declaration(
        OperationType.TILE,
        since=op.V1_2,
        overloads=(op.overload(op.data("input"), op.attribute("multiples", op.I32), level=op.V1_2),),
        variants=data_movement_variants(stateless(tile), op.V1_2, int32=op.V1_2),
        shape=tile_shape,
        same_quantization=True,
        extended=moved_in_extension(stateless(tile), op.B8, *op.WIDE),
    ),
    op.Declaration(
        OperationType.CHANNEL_SHUFFLE,
        since=op.V1_2,
        overloads=(op.overload(op.data("input"), op.attribute("groups"), op.attribute("axis"), level=op.V1_2),),
        variants=data_movement_variants(stateless(channel_shuffle), op.V1_2),
        shape=channel_shuffle_shape,
        same_quantization=True,
    ),
)
