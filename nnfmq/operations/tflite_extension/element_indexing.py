"""GATHER_ELEMENTS, SCATTER_ELEMENTS and SCATTER_ND_UPDATE: operators of ONNX whose indices select single elements.

Indices are not negative: an importer adds the extent to those that count from the end. They are data: each execution
checks a private copy.

C1 an index is inside its dimension
C2 the shapes of input, indices and updates agree
C3 the reduction is 0 (the update replaces the element), 1 (sum), 2 (product), 3 (maximum) or 4 (minimum)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nnfmq.hal.tflite_codes import WIDE_TYPES, TfliteOperation
from nnfmq.operations.shapes import normalize_axis, require
from nnfmq.operations.signature import (
    F16,
    F32,
    I32,
    V1_2,
    Array,
    Declaration,
    Run,
    Shape,
    Tensor,
    attribute,
    data,
    overload,
)
from nnfmq.operations.tflite_extension.declaring import any_tensor_variants, own_code, variants_of
from nnfmq.operations.tflite_extension.indexing import checked

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


DECLARATIONS = (
    Declaration(
        own_code(TfliteOperation.GATHER_ELEMENTS),
        since=V1_2,
        overloads=(overload(data("input"), data("indices", I32), attribute("axis"), level=V1_2),),
        variants=any_tensor_variants(plan_gather_elements),
        shape=gather_elements_shape,
    ),
    Declaration(
        own_code(TfliteOperation.SCATTER_ELEMENTS),
        since=V1_2,
        overloads=(
            overload(
                *(data("input"), data("indices", I32), data("updates"), attribute("axis"), attribute("reduction")),
                level=V1_2,
            ),
        ),
        variants=variants_of((F32, F16, I32, *WIDE_TYPES), plan_scatter_elements),
        shape=scatter_elements_shape,
    ),
    Declaration(
        own_code(TfliteOperation.SCATTER_ND_UPDATE),
        since=V1_2,
        overloads=(
            overload(*(data("input"), data("indices", I32), data("updates"), attribute("reduction")), level=V1_2),
        ),
        variants=variants_of((F32, F16, I32, *WIDE_TYPES), plan_scatter_nd_update),
        shape=scatter_nd_update_shape,
    ),
)
