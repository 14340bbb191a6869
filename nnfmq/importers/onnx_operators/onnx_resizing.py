"""Resize and Upsample: nearest with GATHER along each axis, all else with weighted neighbours.

Linear resizing of integers adds the weighted neighbours in ONNX Runtime's order, and cuts the fraction off as it does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import reduce

import numpy as np

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.hal.tflite_codes import TfliteOperation, operation_code
from nnfmq.hal.types import OperandType
from nnfmq.importers.onnx_operators.onnx_movement import pad
from nnfmq.importers.onnx_operators.onnx_resize_axes import (
    Array,
    Floats,
    ResizedAxis,
    coordinate_mode,
    coordinates,
    fixed_point_matrix,
    kernel_matrix,
    kernel_taps,
    linear_taps,
    nearest_indices,
    resized_axes,
)
from nnfmq.importers.onnx_values import Node, Value

__all__ = ["CONVERTERS"]

_F32, _I32 = OperandType.TENSOR_FLOAT32, OperandType.TENSOR_INT32
_COORDINATE_TOLERANCE = (
    1e-5  # in which RESIZE_BILINEAR's coordinates may differ: results then differ by that of two neighbours
)
_STEPS = 1 << 10  # of ONNX Runtime's weights for 8-bit images whose channels are last
_ANTIALIAS_BITS = 22  # of its weights for antialiased images of 8 bits


def _resize(node: Node) -> None:
    node.attribute("nearest_mode", None)  # linear does not use it
    mode, axes = node.attribute("mode", "nearest"), resized_axes(node)
    coordinate_mode(node)  # which axes that stay the same do not use
    options = [node.attribute(name, 0) for name in ("antialias", "exclude_outside")]
    if all(axis.is_unchanged for axis in axes):
        node.results[0] = node.value(0)
    elif mode == "nearest":
        if any(options):
            raise InvalidArgument("antialias and exclude_outside are not supported with nearest")
        _finish(node, _nearest(node, axes), axes)
    elif mode in ("linear", "cubic"):
        _finish(node, _interpolated(node, mode, axes), axes)
    else:
        raise InvalidArgument(f"mode {mode!r} is not supported")


def _finish(node: Node, operand: int, axes: list[ResizedAxis]) -> None:
    shape = tuple(axis.size for axis in axes)
    node.results[0] = Value(shape, node.value(0).dtype, node.reshaped(operand, shape))


def _nearest(node: Node, axes: list[ResizedAxis]) -> int:
    x = node.operand(0)
    if node.builder[x].type == OperandType.TENSOR_BOOL8:
        raise InvalidArgument("elements of bool are not supported")
    for position, axis in enumerate(axes):
        if not axis.is_unchanged:
            indices, found = nearest_indices(node, axis)
            x = _extrapolated(node, _gathered(node, x, position, indices), position, axis, found)
    return x


def _gathered(node: Node, x: int, position: int, indices: Array) -> int:
    """Return the elements with these indexes along an axis."""
    if np.array_equal(indices, np.arange(node.shape(x)[position])):
        return x
    return node.emit(Op.GATHER, [x, node.builder.int32(position), node.add_constant(indices.astype(np.int32))])


def _extrapolated(node: Node, x: int, position: int, axis: ResizedAxis, found: Floats) -> int:
    """Return elements of which those from coordinates outside of the input are the extrapolation value."""
    value, is_outside = node.attribute("extrapolation_value", 0.0), axis.is_outside(found)
    if coordinate_mode(node) != "tf_crop_and_resize" or not is_outside.any():
        return x
    if node.builder[x].type not in (_F32, _I32, OperandType.TENSOR_FLOAT16):
        raise InvalidArgument("a region of a quantized tensor is not supported")
    rank = len(node.shape(x))
    number = value if node.value(0).dtype.kind == "f" else int(value)
    padded = pad(node, x, [0] * rank, [int(at == position) for at in range(rank)], number)
    return _gathered(node, padded, position, np.where(is_outside, axis.size, np.arange(axis.size)))


# -- interpolation -----------------------------------------------------------------------------------------------------


def _interpolated(node: Node, mode: str, axes: list[ResizedAxis]) -> int:
    """Return floats, float16 by way of float32, or integers."""
    is_antialiased, excludes_outside = (node.attribute(name, 0) for name in ("antialias", "exclude_outside"))
    is_plain = not is_antialiased and (mode == "linear" or not excludes_outside)  # of two neighbours one is inside
    dtype = node.value(0).dtype
    if dtype == np.float64:
        raise InvalidArgument("mode 'nearest' alone is supported for float64; Cast to float32 before it")
    if dtype.kind != "f":
        return _integers(node, mode, axes, is_plain)
    x = node.operand(0)
    kind = node.builder[x].type
    x = x if kind == _F32 else node.emit(Op.CAST, [x], _F32)
    if mode == "linear" and is_plain:
        found = _bilinear(node, x, axes) if _is_bilinear(node, axes) else _linear(node, x, axes)
    else:
        found = _weighted(node, mode, x, axes)
    return found if kind == _F32 else node.emit(Op.CAST, [found], kind)


def _integers(node: Node, mode: str, axes: list[ResizedAxis], is_plain: bool) -> int:
    """Return interpolated integers as INT32."""
    dtype, x = node.value(0).dtype, node.operand(0)
    if mode == "linear" and is_plain and dtype.name in ("uint8", "int8", "int32"):
        if dtype.itemsize == 1 and _has_channels_last(axes):
            return _in_fixed_point(node, _as(node, x, _I32), axes)
        found = _linear(node, _as(node, x, _F32), axes)
        return node.emit(Op.CAST, [found], _I32)
    if node.attribute("antialias", 0) and dtype == np.uint8 and coordinate_mode(node) != "tf_crop_and_resize":
        return _antialiased(node, mode, _as(node, x, _I32), axes)
    raise InvalidArgument(f"mode {mode!r} is not supported for elements of {dtype.name} with these attributes")


def _as(node: Node, x: int, kind: OperandType) -> int:
    """Return integers, quantized ones without regard to their scale, as an operand of a type."""
    return x if node.builder[x].type == kind else node.emit(Op.CAST, [x], kind)


def _is_bilinear(node: Node, axes: list[ResizedAxis]) -> bool:
    """Return whether RESIZE_BILINEAR computes this: its coordinates are nearly the same."""
    is_image = len(axes) == 4 and all(axis.is_unchanged for axis in axes[:2]) and all(axis.is_whole for axis in axes)
    mode = coordinate_mode(node)
    if not is_image or mode not in ("half_pixel", "asymmetric", "align_corners"):
        return False
    return all(_differs_by(node, mode, axis) <= _COORDINATE_TOLERANCE for axis in axes[2:])


def _differs_by(node: Node, mode: str, axis: ResizedAxis) -> float:
    """Return how far at most RESIZE_BILINEAR's coordinates are from ONNX Runtime's."""
    x, offset = np.arange(axis.size, dtype=np.float32), np.float32(0.5 if mode == "half_pixel" else 0.0)
    is_aligned = mode == "align_corners" and axis.size > 1
    pair = (axis.extent - 1, axis.size - 1) if is_aligned else (axis.extent, axis.size)
    found = (x + offset) * (np.float32(pair[0]) / np.float32(pair[1])) - offset
    wanted = linear_taps(node, axis)[2]
    return float(np.abs(np.clip(found, 0, axis.extent - 1) - wanted).max())


def _bilinear(node: Node, x: int, axes: list[ResizedAxis]) -> int:
    mode = coordinate_mode(node)
    flags = [node.builder.boolean(flag) for flag in (True, mode == "align_corners", mode == "half_pixel")]
    extents = [node.builder.int32(axes[position].size) for position in (3, 2)]
    return node.emit(Op.RESIZE_BILINEAR, [x, *extents, *flags])


def _linear(node: Node, x: int, axes: list[ResizedAxis]) -> int:
    """Return the sums of the weighted neighbours; the weights are products of those of the axes, the last one first."""
    resized = _resized(node, axes)
    taps = {position: linear_taps(node, axes[position]) for position in resized}

    def weight(corner: Sequence[int]) -> Array:
        parts = [
            _along(taps[position][1][side], position, len(axes)) for position, side in zip(resized, corner, strict=True)
        ]
        return reduce(np.multiply, parts[::-1])

    found = _sum_of_corners(node, x, {position: taps[position][0] for position in resized}, weight)
    for position in resized:
        if not axes[position].is_unchanged:
            found = _extrapolated(node, found, position, axes[position], coordinates(node, axes[position]))
    return found


def _resized(node: Node, axes: list[ResizedAxis]) -> list[int]:
    """Return the axes with neighbours: for integers all that ONNX Runtime interpolates, whatever their sizes."""
    changed = [position for position, axis in enumerate(axes) if not axis.is_unchanged]
    known = {2: (0, 1), 3: (0, 1, 2), 4: (1, 2) if _has_channels_last(axes) else (2, 3), 5: (2, 3, 4)}
    wanted = known.get(len(axes), ()) if node.value(0).dtype.kind != "f" else ()
    return list(wanted) if set(changed) <= set(wanted) else changed


def _has_channels_last(axes: list[ResizedAxis]) -> bool:
    return len(axes) == 4 and axes[1].scale != 1 and axes[3].scale == 1


def _along(numbers: Array, position: int, rank: int) -> Array:
    """Return numbers that go along one of `rank` axes."""
    return numbers.reshape([-1 if at == position else 1 for at in range(rank)])


def _sum_of_corners(
    node: Node, x: int, indices: dict[int, tuple[Array, Array]], weight: Callable[[Sequence[int]], Array]
) -> int:
    """Return the sum of weighted elements, each with its lower or upper index along the axes."""
    none, total = node.builder.int32(0), None
    for corner in itertools.product((0, 1), repeat=len(indices)):
        element = x
        for (position, pair), side in zip(indices.items(), corner, strict=True):
            element = _gathered(node, element, position, pair[side])
        node.builder.reserve(4 * math.prod(len(pair[0]) for pair in indices.values()))  # before the weights exist
        factor = node.add_constant(np.ascontiguousarray(weight(corner)))
        term = node.emit(Op.MUL, [element, factor, none])
        total = term if total is None else node.emit(Op.ADD, [total, term, none])
    assert total is not None, "an axis is resized"
    return total


def _in_fixed_point(node: Node, x: int, axes: list[ResizedAxis]) -> int:
    """Return 8-bit images whose channels are last, with weights of 10 bits for each axis."""
    indices, weights = {}, {}
    for position in (1, 2):
        (lower, upper), _, found = linear_taps(node, axes[position])
        steps = (found * np.float32(_STEPS)).astype(np.int32)
        pair = np.abs(steps - upper * _STEPS), np.abs(steps - lower * _STEPS)
        weights[position] = [np.where(lower == upper, _STEPS // 2, each).astype(np.int32) for each in pair]
        indices[position] = lower, upper
    total = _sum_of_corners(
        node, x, indices, lambda corner: _along(weights[2][corner[1]], 2, 4) * _along(weights[1][corner[0]], 1, 4)
    )
    divided = operation_code(TfliteOperation.TRUNCATED_DIV)
    x = node.emit(divided, [total, node.filled(_I32, _STEPS * _STEPS)])
    for position in (1, 2):
        if not axes[position].is_unchanged:
            x = _extrapolated(node, x, position, axes[position], coordinates(node, axes[position]))
    return x


def _weighted(node: Node, mode: str, x: int, axes: list[ResizedAxis]) -> int:
    """Add weighted neighbours along each axis; coordinates outside a region become the extrapolation value."""
    for position, axis in enumerate(axes):
        if not axis.is_unchanged:
            node.builder.reserve(8 * axis.size * axis.extent)  # before the weights exist
            x = _sum_of_neighbours(node, x, position, *kernel_taps(kernel_matrix(node, mode, axis)))
    for position, axis in enumerate(axes):
        if not axis.is_unchanged:
            x = _extrapolated(node, x, position, axis, coordinates(node, axis))
    return x


def _sum_of_neighbours(node: Node, x: int, position: int, indices: Array, weights: Array) -> int:
    """Return the sums of the elements with these indices along an axis, times weights; both (outputs, neighbours).

    An infinite element reaches only the results that it is a neighbour of, which a product of matrices does not keep.
    """
    shape, (outputs, count) = node.shape(x), weights.shape
    flat = (math.prod(shape[:position]), shape[position], math.prod(shape[position + 1 :]))
    near = node.emit(
        Op.GATHER, [node.reshaped(x, flat), node.builder.int32(1), node.add_constant(indices.astype(np.int32))]
    )
    factors = node.add_constant(weights.astype(np.float32).reshape(1, outputs, count, 1))
    terms = node.emit(Op.MUL, [near, factors, node.builder.int32(0)])
    total = node.emit(Op.REDUCE_SUM, [terms, node.builder.int32_vector([2]), node.builder.boolean(False)])
    return node.reshaped(total, (*shape[:position], outputs, *shape[position + 1 :]))


def _antialiased(node: Node, mode: str, x: int, axes: list[ResizedAxis]) -> int:
    """Return bytes whose weights are integers of 22 bits: each axis, the last one first, is rounded to bytes."""
    for position, axis in reversed(list(enumerate(axes))):
        if not axis.is_unchanged:
            node.builder.reserve(8 * axis.size * axis.extent)  # before the matrix exists
            x = _rounded_products(node, x, position, fixed_point_matrix(node, mode, axis, _ANTIALIAS_BITS))
    return x


def _rounded_products(node: Node, x: int, position: int, weights: Array) -> int:
    """Return sums of products along an axis, shifted and limited to bytes: a product for each weight of a row."""
    order = np.argsort(weights == 0, axis=1, kind="stable")  # the weights of a row that are not 0 come first
    count, rank, none = int((weights != 0).sum(axis=1).max()), len(node.shape(x)), node.builder.int32(0)
    total = node.filled(_I32, 1 << (_ANTIALIAS_BITS - 1))
    for tap in range(count):
        indices = order[:, tap]
        factor = node.add_constant(_along(weights[np.arange(len(weights)), indices], position, rank))
        term = node.emit(Op.MUL, [_gathered(node, x, position, indices), factor, none])
        total = node.emit(Op.ADD, [term, total, none])
    shift = node.filled(_I32, _ANTIALIAS_BITS)
    found = node.emit(operation_code(TfliteOperation.RIGHT_SHIFT), [total, shift])
    low, high = (node.filled(_I32, limit) for limit in (0, 255))
    return node.emit(Op.MINIMUM, [node.emit(Op.MAXIMUM, [found, low]), high])


CONVERTERS: dict[str, Callable[[Node], None]] = {"Resize": _resize, "Upsample": _resize}
