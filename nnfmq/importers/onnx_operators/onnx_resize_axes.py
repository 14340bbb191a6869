"""How Resize and Upsample read each axis: sizes, scales, coordinates in the input, and the weights of interpolation.

Places are computed in float32 in the order of ONNX Runtime's arithmetic, so that the nearest element is the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from nnfmq.hal.errors import InvalidArgument
from nnfmq.importers.onnx_operators.onnx_movement import axis_of
from nnfmq.importers.onnx_values import Node

__all__ = [
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
    """How one axis is resized; `region` are the first and last coordinate of the input, as shares of its extent."""

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
    """Return how each axis is resized.

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
