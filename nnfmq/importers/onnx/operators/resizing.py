"""Resize and Upsample: nearest with GATHER along each axis, all else with weighted neighbours.

Linear resizing of integers adds the weighted neighbours in ONNX Runtime's order, and cuts the fraction off as it does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.extensions import TfliteOperation, operation_code
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.hal.types import OperandType
from nnfmq.importers.onnx.operators.movement import axis_of, pad
from nnfmq.importers.onnx.values import Node, Value

__all__ = [
    "CONVERTERS",
    "ResizedAxis",
    "coordinate_mode",
    "coordinates",
    "fixed_point_matrix",
    "kernel_matrix",
    "kernel_taps",
    "linear_taps",
    "nearest_indices",
    "resized_axes",
]


# ----------------------------------------------------------------------------------------------------------------------
# How Resize and Upsample read each axis: sizes, scales, coordinates in the input, and the weights of interpolation.
#
# Places are computed in float32 in the order of ONNX Runtime's arithmetic, so that the nearest element is the same one.


Array: TypeAlias = npt.NDArray[Any]
Floats: TypeAlias = npt.NDArray[np.float32]
_ONE_SCALES_INPUT = 10  # from opset 11 on the inputs are roi, scales, sizes
_MAX_EXTENT = 1 << 24
_SUPPORT = {"linear": 1, "cubic": 2}  # how far from its center a kernel is not 0
_POLICIES: dict[str, Callable[[Sequence[np.float32]], np.float32]] = {"not_larger": min, "not_smaller": max}
_TIE = 1e-6  # how far from a half a fraction may be that counts as one
_HALF, _ONE = np.float32(0.5), np.float32(1)


@dataclass(frozen=True, slots=True)
class ResizedAxis:
    """The resizing of one axis; `region` are the first and last coordinate of the input, as shares of its extent."""

    extent: int
    size: int
    scale: np.float32
    region: tuple[float, float] = (0.0, 1.0)

    @property
    def is_unchanged(self) -> bool:
        """Whether the result is the input."""
        return self.size == self.extent and self.scale == 1 and self.region == (0.0, 1.0)

    @property
    def is_whole(self) -> bool:
        """Whether the scale gives the size without rounding."""
        return abs(self.extent * float(self.scale) - self.size) < 1e-4

    def is_outside(self, coordinates: Floats) -> npt.NDArray[np.bool_]:
        """Return which coordinates of the input are beyond its edges."""
        return (coordinates < 0) | (coordinates > self.extent - 1)


def resized_axes(node: Node) -> list[ResizedAxis]:
    """Return the resizing of each axis.

    Raises:
        InvalidArgument: If the sizes or scales are missing, are no constants, or do not fit the input.
    """
    shape, is_old = node.value(0).shape, node.opset <= _ONE_SCALES_INPUT
    at = 1 if is_old else 2
    chosen = [axis_of(int(axis), len(shape)) for axis in node.attribute("axes", tuple(range(len(shape))))]
    extents = [shape[axis] for axis in chosen]
    if node.given(3) and node.constant(3, "sizes").size:
        scales, sizes = _of_sizes(node, [int(size) for size in node.constant(3, "sizes").reshape(-1)], extents)
    elif node.given(at) or "scales" in node.attributes:
        found = node.constant(at, "scales").reshape(-1) if node.given(at) else node.attribute("scales", ())
        scales = [np.float32(scale) for scale in found]
        sizes = [int(np.float32(extent) * scale) for extent, scale in zip(extents, scales, strict=False)]
    else:
        raise InvalidArgument("neither sizes nor scales are given")
    if len(scales) != len(chosen) or not all(0 < size < _MAX_EXTENT for size in sizes):
        raise InvalidArgument(f"the shape {shape} cannot be resized to {sizes}")
    axes = [ResizedAxis(extent, extent, _ONE) for extent in shape]
    for axis, size, scale, region in zip(chosen, sizes, scales, _regions(node, len(chosen)), strict=True):
        axes[axis] = ResizedAxis(shape[axis], size, scale, region)
    return axes


def _of_sizes(node: Node, sizes: list[int], extents: list[int]) -> tuple[list[np.float32], list[int]]:
    """Return the scales and sizes that follow from the sizes in the file."""
    scales = [np.float32(size) / np.float32(extent) for size, extent in zip(sizes, extents, strict=False)]
    policy = node.attribute("keep_aspect_ratio_policy", "stretch")
    if policy == "stretch" or len(sizes) != len(extents):
        return scales, sizes
    if policy not in _POLICIES:
        raise InvalidArgument(f"keep_aspect_ratio_policy {policy!r} is unknown")
    scale = _POLICIES[policy](scales)
    return [scale] * len(sizes), [int(np.floor(scale * np.float32(extent) + _HALF)) for extent in extents]


def _regions(node: Node, count: int) -> list[tuple[float, float]]:
    """Return the region of each axis, which only tf_crop_and_resize has."""
    if coordinate_mode(node) != "tf_crop_and_resize":
        return [(0.0, 1.0)] * count
    region = [float(coordinate) for coordinate in node.constant(1, "roi").reshape(-1)]
    if len(region) != 2 * count:
        raise InvalidArgument(f"roi has {len(region)} numbers for {count} axes")
    return list(zip(region[:count], region[count:], strict=True))


def coordinate_mode(node: Node) -> str:
    """Return the name of the rule that gives each element of the result a coordinate in the input."""
    if node.opset <= _ONE_SCALES_INPUT:
        return "asymmetric"
    return str(node.attribute("coordinate_transformation_mode", "half_pixel"))


# -- coordinates ------------------------------------------------------------------------------------------------------


def coordinates(node: Node, axis: ResizedAxis) -> Floats:
    """Return the coordinate in the input of each element of an axis of the result."""
    mode = coordinate_mode(node)
    if mode not in _COORDINATES:
        raise InvalidArgument(f"coordinate_transformation_mode {mode!r} is not supported")
    found = _COORDINATES[mode](np.arange(axis.size, dtype=np.float32), axis)
    return np.asarray(found, np.float32)


def _align_corners(x: Floats, axis: ResizedAxis) -> Array:
    if not axis.is_whole:
        raise InvalidArgument(
            "align_corners with scales that give no whole sizes: ONNX's text and its tests differ; give sizes instead"
        )
    return x * np.float32(axis.extent - 1) / np.float32(axis.size - 1) if axis.size > 1 else np.zeros_like(x)


def _half_pixel(x: Floats, axis: ResizedAxis) -> Array:
    return (x + _HALF) / axis.scale - _HALF


def _half_pixel_of_several(x: Floats, axis: ResizedAxis) -> Array:
    return _half_pixel(x, axis) if axis.size > 1 else np.zeros_like(x)


def _half_pixel_symmetric(x: Floats, axis: ResizedAxis) -> Array:
    extent = np.float32(axis.extent)
    offset = extent / np.float32(2) * (_ONE - np.float32(axis.size) / (axis.scale * extent))
    return float(offset) + (x.astype(np.float64) + 0.5) / float(axis.scale) - 0.5


def _in_region(x: Floats, axis: ResizedAxis) -> Array:
    (begin, end), last = map(np.float32, axis.region), np.float32(axis.extent - 1)
    if axis.size > 1:
        return begin * last + x * (end - begin) * last / np.float32(axis.size - 1)
    return np.full(x.shape, 0.5 * float(begin + end) * float(last))


_COORDINATES: dict[str, Callable[[Floats, ResizedAxis], Array]] = {
    "align_corners": _align_corners,
    "asymmetric": lambda x, axis: x / axis.scale,
    "half_pixel": _half_pixel,
    "half_pixel_symmetric": _half_pixel_symmetric,
    "pytorch_half_pixel": _half_pixel_of_several,
    "tf_crop_and_resize": _in_region,
    "tf_half_pixel_for_nn": lambda x, axis: (x + _HALF) / axis.scale,
}


# -- the nearest element -----------------------------------------------------------------------------------------------


def nearest_indices(node: Node, axis: ResizedAxis) -> tuple[npt.NDArray[np.int32], Floats]:
    """Return the index of the nearest element for each element of the result, and its coordinate in the input."""
    found = coordinates(node, axis)
    return np.clip(_rounding(node, axis)(found), 0, axis.extent - 1).astype(np.int32), found


def _rounding(node: Node, axis: ResizedAxis) -> Callable[[Floats], Floats]:
    if node.opset <= _ONE_SCALES_INPUT:  # before there was the attribute
        node.attribute("nearest_mode", None)
        return np.ceil if axis.scale < 1 else np.floor
    mode = node.attribute("nearest_mode", "round_prefer_floor")
    if mode not in _ROUNDINGS:
        raise InvalidArgument(f"nearest_mode {mode!r} is unknown")
    return _ROUNDINGS[mode]


def _round(x: Floats, is_up: bool) -> Floats:
    """Return the nearest integers; of two that are equally near, the upper one if `is_up`."""
    low = np.floor(x)
    rest = x - low
    is_tie = np.abs(rest - _HALF) <= _TIE
    found: Floats = low + np.where(is_tie, is_up, rest > _HALF).astype(np.float32)
    return found


_ROUNDINGS: dict[str, Callable[[Floats], Floats]] = {
    "round_prefer_floor": lambda x: _round(x, is_up=False),
    "round_prefer_ceil": lambda x: _round(x, is_up=True),
    "floor": np.floor,
    "ceil": np.ceil,
}


# -- interpolation -----------------------------------------------------------------------------------------------------


def linear_taps(node: Node, axis: ResizedAxis) -> tuple[tuple[Array, Array], tuple[Floats, Floats], Floats]:
    """Return the indexes of the lower and upper neighbours, their weights, and the coordinates, within the input."""
    one = np.arange(axis.size, dtype=np.float32)
    found = one if axis.is_unchanged else np.clip(coordinates(node, axis), 0, np.float32(axis.extent - 1))
    lower = found.astype(np.int32)
    upper = np.minimum(lower + 1, axis.extent - 1).astype(np.int32)
    weights = np.abs(found - upper.astype(np.float32)), np.abs(found - lower.astype(np.float32))
    is_edge = lower == upper
    first, second = (np.where(is_edge, _HALF, weight).astype(np.float32) for weight in weights)
    return (lower, upper), (first, second), found


def kernel_matrix(node: Node, mode: str, axis: ResizedAxis) -> Array:
    """Return the weights of each input for each output: those beyond an edge are added to the edge's."""
    centers = coordinates(node, axis).astype(np.float64)
    scale = float(axis.scale)
    stretch = min(scale, 1.0) if node.attribute("antialias", 0) else 1.0
    reach = int(np.ceil(_SUPPORT[mode] / stretch))
    nearby = np.floor(centers)[:, None] + np.arange(-reach, reach + 2)
    node.builder.reserve(nearby.nbytes)
    distances = np.abs(nearby - centers[:, None]) * stretch
    weights = np.maximum(1 - distances, 0) if mode == "linear" else _cubic(node, distances)
    if node.attribute("exclude_outside", 0):
        weights[(nearby < 0) | (nearby >= axis.extent)] = 0
    weights /= weights.sum(axis=1, keepdims=True)
    matrix = np.zeros((axis.size, axis.extent))
    rows = np.broadcast_to(np.arange(axis.size)[:, None], nearby.shape)
    np.add.at(matrix, (rows, np.clip(nearby, 0, axis.extent - 1).astype(np.int64)), weights)
    return matrix


def kernel_taps(matrix: Array) -> tuple[Array, Array]:
    """Return the indices and the weights of the neighbours of each output: (outputs, neighbours).

    An output with fewer neighbours than others has its first one several times, with parts of its weight.
    """
    is_near = matrix != 0
    counts = is_near.sum(axis=1)
    width, first = int(counts.max()), is_near.argmax(axis=1)[:, None]
    order = np.argsort(~is_near, axis=1, kind="stable")[:, :width]
    order = np.where(np.arange(width) < counts[:, None], order, first)
    times = np.where(order == first, 1 + width - counts[:, None], 1)
    return order, np.take_along_axis(matrix, order, axis=1) / times


def fixed_point_matrix(node: Node, mode: str, axis: ResizedAxis, bits: int) -> npt.NDArray[np.int32]:
    """Return the weights of an antialiased axis as integers, computed in float32 in ONNX Runtime's order."""
    centers = _HALF + coordinates(node, axis)
    step, reach = _ONE / axis.scale, np.float32(_SUPPORT[mode])
    support, inverse = (reach * step, _ONE / step) if step >= 1 else (reach, _ONE)
    first, end = (np.floor(centers + side + _HALF) for side in (-support, support))
    total, sums = np.zeros(axis.size, np.float32), np.zeros((axis.size, axis.extent), np.float32)
    rows, excludes = np.arange(axis.size), node.attribute("exclude_outside", 0)
    for tap in range(int((end - first).max())):
        nearby = first + np.float32(tap)
        distance = np.abs((nearby - centers + _HALF) * inverse)
        weight = np.maximum(_ONE - distance, 0) if mode == "linear" else _cubic(node, distance).astype(np.float32)
        is_outside = (nearby < 0) | (nearby >= axis.extent)
        weight = np.where((nearby >= end) | (is_outside & bool(excludes)), np.float32(0), weight)
        total += weight
        sums[rows, np.clip(nearby, 0, axis.extent - 1).astype(np.int64)] += weight
    found = sums * (_ONE / np.where(total == 0, _ONE, total))[:, None] * np.float32(1 << bits)
    result: npt.NDArray[np.int32] = np.copysign(np.floor(np.abs(found.astype(np.float64)) + 0.5), found).astype(
        np.int32
    )
    return result


def _cubic(node: Node, t: Array) -> Array:
    """Return the cubic convolution kernel of Keys at distances `t`."""
    a = t.dtype.type(node.attribute("cubic_coeff_a", -0.75))
    near = ((a + 2) * t - (a + 3)) * t * t + 1
    far = ((t - 5) * t + 8) * t * a - 4 * a
    found: Array = np.where(t <= 1, near, np.where(t < _SUPPORT["cubic"], far, 0.0))
    return found


# ----------------------------------------------------------------------------------------------------------------------
# Resize and Upsample: nearest with GATHER along each axis, all else with weighted neighbours.


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
    """Return the largest distance of RESIZE_BILINEAR's coordinates from ONNX Runtime's."""
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
