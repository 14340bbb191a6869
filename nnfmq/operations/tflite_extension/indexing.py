"""Gathers, scatters and updates by index: those of TFLite, and of single elements as ONNX has them.

Indices are data: each execution checks a private copy.

C1 an index is inside its dimension
C2 the shapes of indices, updates and values agree
C3 shapes, sizes and lengths are not negative
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nnfmq.hal.extensions import TfliteOperation
from nnfmq.operations import declaration as op
from nnfmq.operations.declaration import Array, Run, Shape, Tensor
from nnfmq.operations.gather import outside
from nnfmq.operations.kernel_adapters import stateless
from nnfmq.operations.shapes import normalize_axis, require, require_max_rank, require_size
from nnfmq.operations.tflite_extension import any_tensor_variants, declare

__all__ = [
    "DECLARATIONS",
    "batch_gather_shape",
    "checked",
    "checked_shape",
    "dynamic_update_slice_shape",
    "gather_elements_shape",
    "gather_nd",
    "gather_nd_shape",
    "one_hot_shape",
    "plan_batch_gather",
    "plan_dynamic_update_slice",
    "plan_gather_elements",
    "plan_one_hot",
    "plan_scatter_elements",
    "plan_scatter_nd",
    "plan_scatter_nd_update",
    "plan_sparse_to_dense",
    "reverse_sequence",
    "reverse_sequence_shape",
    "scatter_elements_shape",
    "scatter_nd_shape",
    "scatter_nd_update_shape",
    "sparse_to_dense_shape",
]


def checked(indices: Array, dimension: int) -> Array:
    """Return a private copy of indices that are all in [0, dimension)."""
    copy = indices.astype(np.intp)
    inside = copy.size == 0 or (int(copy.min()) >= 0 and int(copy.max()) < dimension)
    require(inside, "C1", outside(dimension))
    return copy


# -- gathers ----------------------------------------------------------------------------------------------------------


def batch_gather_shape(input: Shape, indices: Shape, *, axis: int, batch_dims: int) -> Shape:
    """Return the input's shape with that of the indices, without the batch, in place of the axis."""
    axis = normalize_axis(axis, len(input))
    fits = 0 <= batch_dims <= min(axis, len(indices)) and input[:batch_dims] == indices[:batch_dims]
    require(fits, "C2", f"{batch_dims} batch dimensions for shapes {input} and {indices}, axis {axis}")
    return input[:axis] + indices[batch_dims:] + input[axis + 1 :]


def plan_batch_gather(input: Tensor, indices: Tensor, *, output: Tensor, axis: int, batch_dims: int) -> Run:
    """Plan the slices at the indices, which each batch has its own."""
    shape, axis = input.shape, axis % len(input.shape)
    batches = math.prod(shape[:batch_dims])
    parts = (batches, math.prod(shape[batch_dims:axis]), shape[axis], math.prod(shape[axis + 1 :]))
    rows = np.arange(batches)[:, None]

    def run(array: Array, positions: Array) -> Array:
        chosen = checked(positions, shape[axis]).reshape(batches, -1)
        found = array.reshape(parts)[rows, :, chosen]  # batch, index, outer, inner
        return np.ascontiguousarray(found.transpose(0, 2, 1, 3)).reshape(output.shape)

    return run


def gather_nd_shape(input: Shape, indices: Shape) -> Shape:
    """Return the shape of the indices without their last dimension, then that of the selected slices."""
    fits = len(indices) >= 1 and 1 <= indices[-1] <= len(input)
    require(fits, "C2", f"indices of shape {indices} for an input of shape {input}")
    return indices[:-1] + input[indices[-1] :] or (1,)


def gather_nd(input: Array, indices: Array) -> Array:
    """Return the slices at the index vectors."""
    found: Array = np.asarray(input[_positions(indices, input.shape)])
    return found.reshape(gather_nd_shape(input.shape, indices.shape))


def _positions(indices: Array, shape: Shape) -> tuple[Array, ...]:
    """Return the checked indices along each of the first dimensions of `shape`."""
    return tuple(checked(indices[..., axis], shape[axis]) for axis in range(indices.shape[-1]))


# -- scatters ---------------------------------------------------------------------------------------------------------


def checked_shape(shape: Array) -> Shape:
    """Return a shape from an attribute: a vector of numbers that are not negative."""
    require(shape.ndim == 1 and not (shape < 0).any(), "C3", f"{shape.tolist()[:8]} is not a shape")
    result = tuple(int(dimension) for dimension in shape)
    require_size(result, 4)
    return result


def scatter_nd_shape(indices: Shape, updates: Shape, *, shape: Array) -> Shape:
    """Return `shape`."""
    result = checked_shape(shape)
    fits = len(indices) >= 1 and 1 <= indices[-1] <= len(result)
    require(fits, "C2", f"indices of shape {indices} for a result of shape {result}")
    expected = indices[:-1] + result[indices[-1] :] or (1,)
    require(updates == expected, "C2", f"updates of shape {updates}, {expected} are required")
    return result


def plan_scatter_nd(indices: Tensor, updates: Tensor, *, output: Tensor, shape: Array) -> Run:
    """Plan zeros to which the updates are added at the index vectors."""

    def run(positions: Array, values: Array) -> Array:
        result = np.zeros(output.shape, output.dtype)
        places = _positions(positions, output.shape)
        np.add.at(result, places, values.reshape((*places[0].shape, *output.shape[len(places) :])))
        return result

    return run


def sparse_to_dense_shape(indices: Shape, values: Shape, default: Shape, *, shape: Array) -> Shape:
    """Return `shape`."""
    result = checked_shape(shape)
    count = indices[0] if indices else 1
    width = indices[1] if len(indices) == 2 else 1
    fits = len(indices) <= 2 and width == len(result) and values in ((1,), (count,)) and default == (1,)
    require(fits, "C2", f"indices {indices}, values {values} and default {default} for a result of shape {result}")
    return result


def plan_sparse_to_dense(indices: Tensor, values: Tensor, default: Tensor, *, output: Tensor, shape: Array) -> Run:
    """Plan the default, with values at the index vectors."""
    rank = len(output.shape)

    def run(positions: Array, given: Array, otherwise: Array) -> Array:
        result = np.full(output.shape, otherwise.reshape(()), output.dtype)
        result[_positions(positions.reshape(-1, rank), output.shape)] = given
        return result

    return run


def one_hot_shape(indices: Shape, on: Shape, off: Shape, *, depth: Any, axis: int) -> Shape:
    """Return the shape of the indices with `depth` inserted at the axis; -1 is the last one."""
    require(math.prod(on) == math.prod(off) == 1, "C2", f"values of shapes {on} and {off}, each must have one element")
    dimension = int(np.asarray(depth).reshape(-1)[0])
    require(dimension >= 0, "C3", f"depth {dimension}")
    position = normalize_axis(axis, len(indices) + 1)
    return (*indices[:position], dimension, *indices[position:])


def plan_one_hot(indices: Tensor, on: Tensor, off: Tensor, *, output: Tensor, depth: Any, axis: int) -> Run:
    """Plan a comparison with the positions along the axis."""
    position = axis % len(output.shape)
    along = [1] * len(output.shape)
    along[position] = output.shape[position]
    numbers = np.arange(output.shape[position]).reshape(along)
    return lambda chosen, true, false: np.where(
        np.expand_dims(chosen, position) == numbers, true.reshape(()), false.reshape(())
    )


# -- slices -----------------------------------------------------------------------------------------------------------


def dynamic_update_slice_shape(input: Shape, update: Shape, start: Shape) -> Shape:
    """Return the input's shape."""
    fits = len(input) == len(update) and start == (len(input),)
    smaller = all(small <= large for small, large in zip(update, input, strict=False))
    require(fits and smaller, "C2", f"an update of shape {update} at {start} positions for shape {input}")
    return input


def plan_dynamic_update_slice(input: Tensor, update: Tensor, start: Tensor, *, output: Tensor) -> Run:
    """Plan the input with `update` at `start`, which is moved so that the update is inside."""
    extents = [(size, total - size) for total, size in zip(input.shape, update.shape, strict=True)]

    def run(array: Array, values: Array, positions: Array) -> Array:
        result = array.copy()
        begin = (min(max(first, 0), last) for first, (_, last) in zip(positions.tolist(), extents, strict=True))
        result[tuple(slice(first, first + size) for first, (size, _) in zip(begin, extents, strict=True))] = values
        return result

    return run


def reverse_sequence_shape(input: Shape, lengths: Shape, *, sequence_axis: int, batch_axis: int) -> Shape:
    """Return the input's shape."""
    require_max_rank(input, "the input")
    axes = {normalize_axis(sequence_axis, len(input)), normalize_axis(batch_axis, len(input))}
    fits = len(axes) == 2 and lengths == (input[batch_axis],)
    require(fits, "C2", f"lengths of shape {lengths} for axes {sequence_axis} and {batch_axis} of shape {input}")
    return input


def reverse_sequence(input: Array, lengths: Array, *, sequence_axis: int, batch_axis: int) -> Array:
    """Return the input with the first elements of each sequence reversed."""
    dimension = input.shape[sequence_axis]
    counts = checked(lengths, dimension + 1)[:, None]
    steps = np.arange(dimension)[None, :]
    positions = np.where(steps < counts, counts - 1 - steps, steps)
    shape = [1] * input.ndim
    shape[batch_axis], shape[sequence_axis] = positions.shape
    ordered = positions if batch_axis < sequence_axis else positions.T
    return np.take_along_axis(input, ordered.reshape(shape), axis=sequence_axis)


_INDEXING_DECLARATIONS = (
    declare(
        TfliteOperation.BATCH_GATHER,
        op.data("input"),
        op.attribute("axis"),
        op.data("indices", op.I32),
        op.attribute("batch_dims"),
        variants=any_tensor_variants(plan_batch_gather),
        shape=batch_gather_shape,
    ),
    declare(
        TfliteOperation.GATHER_ND,
        op.data("input"),
        op.data("indices", op.I32),
        variants=any_tensor_variants(stateless(gather_nd)),
        shape=gather_nd_shape,
    ),
    declare(
        TfliteOperation.SCATTER_ND,
        op.data("indices", op.I32),
        op.data("updates"),
        op.attribute("shape", op.I32),
        variants=any_tensor_variants(plan_scatter_nd),
        shape=scatter_nd_shape,
    ),
    declare(
        TfliteOperation.SPARSE_TO_DENSE,
        op.data("indices", op.I32),
        op.attribute("shape", op.I32),
        op.data("values"),
        op.data("default"),
        variants=any_tensor_variants(plan_sparse_to_dense),
        shape=sparse_to_dense_shape,
    ),
    declare(
        TfliteOperation.ONE_HOT,
        op.data("indices", op.I32),
        op.attribute("depth", op.I32),
        op.data("on"),
        op.data("off"),
        op.attribute("axis"),
        variants=any_tensor_variants(plan_one_hot),
        shape=one_hot_shape,
    ),
    declare(
        TfliteOperation.DYNAMIC_UPDATE_SLICE,
        op.data("input"),
        op.data("update"),
        op.data("start", op.I32),
        variants=any_tensor_variants(plan_dynamic_update_slice),
        shape=dynamic_update_slice_shape,
    ),
    declare(
        TfliteOperation.REVERSE_SEQUENCE,
        op.data("input"),
        op.data("lengths", op.I32),
        op.attribute("sequence_axis"),
        op.attribute("batch_axis"),
        variants=any_tensor_variants(stateless(reverse_sequence)),
        shape=reverse_sequence_shape,
    ),
)


# ----------------------------------------------------------------------------------------------------------------------
# GATHER_ELEMENTS, SCATTER_ELEMENTS and SCATTER_ND_UPDATE: operators of ONNX whose indices select single elements.
#
# Indices are not negative: an importer adds the extent to those that count from the end. They are data: each execution
# checks a private copy.
#
# C1 an index is inside its dimension C2 the shapes of input, indices and updates agree C3 the reduction is 0 (the
# update replaces the element), 1 (sum), 2 (product), 3 (maximum) or 4 (minimum)


_REDUCTIONS: tuple[Any, ...] = (None, np.add, np.multiply, np.maximum, np.minimum)


def gather_elements_shape(input: Shape, indices: Shape, *, axis: int) -> Shape:
    """Return the shape of the indices."""
    _require_inside(input, indices, axis)
    return indices


def _require_inside(input: Shape, indices: Shape, axis: int) -> None:
    """Require that the indices' other dimensions are no larger than the input's."""
    axis = normalize_axis(axis, len(input))
    pairs = enumerate(zip(indices, input, strict=False))
    fits = len(indices) == len(input) and all(small <= large for at, (small, large) in pairs if at != axis)
    require(fits, "C2", f"indices of shape {indices} along axis {axis} of shape {input}")


def _places(indices: Array, axis: int, shape: Shape) -> tuple[Array, ...]:
    """Return the position of the element that each index selects: its own, but along the axis the checked index."""
    places: list[Any] = list(np.indices(indices.shape, sparse=True))
    places[axis] = checked(indices, shape[axis])
    return tuple(places)


def plan_gather_elements(input: Tensor, indices: Tensor, *, output: Tensor, axis: int) -> Run:
    """Plan the elements at the indices along the axis."""
    axis %= len(input.shape)
    return lambda array, positions: array[_places(positions, axis, input.shape)]


def scatter_elements_shape(input: Shape, indices: Shape, updates: Shape, *, axis: int, reduction: int) -> Shape:
    """Return the input's shape."""
    _require_inside(input, indices, axis)
    require(updates == indices, "C2", f"updates of shape {updates} for indices of shape {indices}")
    _require_reduction(reduction)
    return input


def _require_reduction(reduction: int) -> None:
    require(0 <= reduction < len(_REDUCTIONS), "C3", f"reduction {reduction}")


def plan_scatter_elements(
    input: Tensor, indices: Tensor, updates: Tensor, *, output: Tensor, axis: int, reduction: int
) -> Run:
    """Plan a copy of the input whose elements at the indices are replaced, or combined with the updates."""
    axis %= len(input.shape)

    def run(array: Array, positions: Array, values: Array) -> Array:
        return _updated(array, _places(positions, axis, input.shape), values, reduction)

    return run


def _updated(array: Array, places: tuple[Array, ...], values: Array, reduction: int) -> Array:
    result = array.copy()
    if reduction == 0:
        result[places] = values
    else:
        _REDUCTIONS[reduction].at(result, places, values)
    return result


def scatter_nd_update_shape(input: Shape, indices: Shape, updates: Shape, *, reduction: int) -> Shape:
    """Return the input's shape."""
    fits = len(indices) >= 1 and 1 <= indices[-1] <= len(input)
    require(fits, "C2", f"indices of shape {indices} for an input of shape {input}")
    expected = indices[:-1] + input[indices[-1] :] or (1,)
    require(updates == expected, "C2", f"updates of shape {updates}, {expected} are required")
    _require_reduction(reduction)
    return input


def plan_scatter_nd_update(input: Tensor, indices: Tensor, updates: Tensor, *, output: Tensor, reduction: int) -> Run:
    """Plan a copy of the input whose slices at the index vectors are replaced, or combined with the updates."""

    def run(array: Array, positions: Array, values: Array) -> Array:
        places = tuple(checked(positions[..., at], input.shape[at]) for at in range(positions.shape[-1]))
        return _updated(array, places, values.reshape((*places[0].shape, *input.shape[len(places) :])), reduction)

    return run


_ELEMENT_INDEXING_DECLARATIONS = (
    declare(
        TfliteOperation.GATHER_ELEMENTS,
        op.data("input"),
        op.data("indices", op.I32),
        op.attribute("axis"),
        variants=any_tensor_variants(plan_gather_elements),
        shape=gather_elements_shape,
    ),
    declare(
        TfliteOperation.SCATTER_ELEMENTS,
        *(
            op.data("input"),
            op.data("indices", op.I32),
            op.data("updates"),
            op.attribute("axis"),
            op.attribute("reduction"),
        ),
        variants=op.of_types(plan_scatter_elements, op.F32, op.F16, op.I32, *op.WIDE),
        shape=scatter_elements_shape,
    ),
    declare(
        TfliteOperation.SCATTER_ND_UPDATE,
        *(op.data("input"), op.data("indices", op.I32), op.data("updates"), op.attribute("reduction")),
        variants=op.of_types(plan_scatter_nd_update, op.F32, op.F16, op.I32, *op.WIDE),
        shape=scatter_nd_update_shape,
    ),
)

DECLARATIONS = (*_INDEXING_DECLARATIONS, *_ELEMENT_INDEXING_DECLARATIONS)
