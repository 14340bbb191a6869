"""Resize and Upsample: nearest with GATHER along each axis, linear with RESIZE_BILINEAR, all else with matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.importers.onnx_operators.onnx_linear_maps import mapped
from nnfmq.importers.onnx_operators.onnx_movement import axis_of
from nnfmq.importers.onnx_values import Node

__all__ = ["CONVERTERS"]

Array: TypeAlias = npt.NDArray[Any]
_ONE_SCALES_INPUT = 10  # from opset 11 on the inputs are roi, scales, sizes
_MAX_EXTENT = 1 << 24
_SUPPORT = {"linear": 1, "cubic": 2}  # how far from its center a kernel is not 0
_POLICIES: dict[str, Callable[[Sequence[float]], float]] = {"not_larger": min, "not_smaller": max}


@dataclass(frozen=True, slots=True)
class _Axis:
    """How one axis is resized; `region` are the first and last place of the input, as shares of its extent."""

    extent: int
    size: int
    scale: float
    region: tuple[float, float] = (0.0, 1.0)

    @property
    def is_whole(self) -> bool:
        """Whether the scale gives the size without rounding."""
        return abs(self.extent * self.scale - self.size) < 1e-4

    @property
    def is_unchanged(self) -> bool:
        """Whether the result is the input."""
        return self.size == self.extent and self.scale == 1.0 and self.region == (0.0, 1.0)


def _resize(node: Node) -> None:
    node.attribute("nearest_mode", None)  # linear does not use it
    mode, axes = node.attribute("mode", "nearest"), _target(node)
    options = [node.attribute(name, 0) for name in ("antialias", "exclude_outside")]
    if mode == "nearest":
        if any(options):
            raise InvalidArgument("antialias and exclude_outside are not supported with nearest")
        _nearest(node, axes)
    elif mode == "linear" and not any(options) and _is_bilinear(node, axes):
        _bilinear(node, axes)
    elif mode in _SUPPORT:
        _with_matrices(node, mode, axes)
    else:
        raise InvalidArgument(f"mode {mode!r} is not supported")


def _target(node: Node) -> list[_Axis]:
    """Return how each axis is resized."""
    shape, is_old = node.value(0).shape, node.opset <= _ONE_SCALES_INPUT
    at = 1 if is_old else 2
    chosen = [axis_of(int(axis), len(shape)) for axis in node.attribute("axes", tuple(range(len(shape))))]
    extents = [shape[axis] for axis in chosen]
    if node.given(3) and node.constant(3, "sizes").size:
        scales, sizes = _scales(node, [int(size) for size in node.constant(3, "sizes")], extents)
    elif node.given(at) or "scales" in node.attributes:
        found = node.constant(at, "scales") if node.given(at) else node.attribute("scales", ())
        scales = [float(scale) for scale in found]
        sizes = [int(np.floor(extent * scale)) for extent, scale in zip(extents, scales, strict=False)]
    else:
        raise InvalidArgument("neither sizes nor scales are given")
    if len(scales) != len(chosen) or not all(0 < size < _MAX_EXTENT for size in sizes):
        raise InvalidArgument(f"the shape {shape} cannot be resized to {sizes}")
    regions = _regions(node, len(chosen))
    axes = [_Axis(extent, extent, 1.0) for extent in shape]
    for axis, size, scale, region in zip(chosen, sizes, scales, regions, strict=True):
        axes[axis] = _Axis(shape[axis], size, scale, region)
    return axes


def _scales(node: Node, sizes: list[int], extents: list[int]) -> tuple[list[float], list[int]]:
    """Return the scales and sizes that follow from the sizes in the file."""
    scales = [size / extent for size, extent in zip(sizes, extents, strict=False)]
    policy = node.attribute("keep_aspect_ratio_policy", "stretch")
    if policy == "stretch" or len(sizes) != len(extents):
        return scales, sizes
    if policy not in _POLICIES:
        raise InvalidArgument(f"keep_aspect_ratio_policy {policy!r} is unknown")
    scale = _POLICIES[policy](scales)
    return [scale] * len(sizes), [int(scale * extent + 0.5) for extent in extents]


def _regions(node: Node, count: int) -> list[tuple[float, float]]:
    """Return the region of each axis, which only tf_crop_and_resize has."""
    if node.attribute("coordinate_transformation_mode", "half_pixel") != "tf_crop_and_resize":
        return [(0.0, 1.0)] * count
    region = [float(place) for place in node.constant(1, "roi")]
    if len(region) != 2 * count:
        raise InvalidArgument(f"roi has {len(region)} numbers for {count} axes")
    return list(zip(region[:count], region[count:], strict=True))


def _coordinates(node: Node, axis: _Axis) -> npt.NDArray[np.float32]:
    """Return the position in the input of each element of an axis of the result."""
    x, wide, half = np.arange(axis.size, dtype=np.float32), np.float32(axis.scale), np.float32(0.5)
    mode = _coordinate_mode(node)
    begin, end = axis.region
    if mode == "asymmetric":
        found = x / wide
    elif mode == "align_corners":
        found = x * np.float32((axis.extent - 1) / (axis.size - 1)) if axis.size > 1 else np.zeros_like(x)
    elif mode == "tf_crop_and_resize":
        step = (end - begin) * (axis.extent - 1) / (axis.size - 1) if axis.size > 1 else 0.0
        first = begin if axis.size > 1 else (begin + end) / 2
        found = x * np.float32(step) + np.float32(first * (axis.extent - 1))
    elif mode == "half_pixel" or (mode == "pytorch_half_pixel" and axis.size > 1):
        found = (x + half) / wide - half
    elif mode == "half_pixel_symmetric":
        offset = axis.extent / 2 * (1 - axis.size / (axis.scale * axis.extent))
        found = np.float32(offset) + (x + half) / wide - half
    elif mode == "pytorch_half_pixel":
        found = np.zeros_like(x)
    else:
        raise InvalidArgument(f"coordinate_transformation_mode {mode!r} is not supported")
    return np.asarray(found, np.float32)


def _coordinate_mode(node: Node) -> str:
    if node.opset <= _ONE_SCALES_INPUT:
        return "asymmetric"
    return str(node.attribute("coordinate_transformation_mode", "half_pixel"))


_ROUNDINGS: dict[str, Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]]] = {
    "round_prefer_floor": lambda x: np.ceil(x - np.float32(0.5)),
    "round_prefer_ceil": lambda x: np.floor(x + np.float32(0.5)),
    "floor": np.floor,
    "ceil": np.ceil,
}


def _nearest(node: Node, axes: list[_Axis]) -> None:
    default = "floor" if node.opset <= _ONE_SCALES_INPUT else "round_prefer_floor"
    rounding, x = _ROUNDINGS.get(node.attribute("nearest_mode", default)), node.operand(0)
    if rounding is None or _coordinate_mode(node) == "tf_crop_and_resize":
        raise InvalidArgument("nearest_mode is unknown, or a region is given")
    for place, axis in enumerate(axes):
        if axis.is_unchanged:
            continue
        indices = np.clip(rounding(_coordinates(node, axis)), 0, axis.extent - 1).astype(np.int32)
        x = node.emit(Op.GATHER, [x, node.builder.int32(place), node.add_constant(indices)])
    node.result(x, tuple(axis.size for axis in axes))


def _is_bilinear(node: Node, axes: list[_Axis]) -> bool:
    """Return whether RESIZE_BILINEAR computes this."""
    is_image = len(axes) == 4 and all(axis.is_unchanged for axis in axes[:2]) and all(axis.is_whole for axis in axes)
    return is_image and _coordinate_mode(node) in ("half_pixel", "asymmetric", "align_corners")


def _bilinear(node: Node, axes: list[_Axis]) -> None:
    mode = _coordinate_mode(node)
    flags = [node.builder.boolean(flag) for flag in (True, mode == "align_corners", mode == "half_pixel")]
    extents = [node.builder.int32(axes[place].size) for place in (3, 2)]
    found = node.emit(Op.RESIZE_BILINEAR, [node.operand(0), *extents, *flags])
    node.result(found, tuple(axis.size for axis in axes))


def _with_matrices(node: Node, mode: str, axes: list[_Axis]) -> None:
    """Multiply by a matrix along each axis; places outside a region become the extrapolation value."""
    x, outside_value = node.operand(0), node.attribute("extrapolation_value", 0.0)
    if _coordinate_mode(node) == "align_corners" and not all(axis.is_whole for axis in axes):
        raise InvalidArgument("align_corners is supported with scales that give whole sizes")
    for place, axis in enumerate(axes):
        if axis.is_unchanged:
            continue
        node.builder.reserve(4 * axis.size * axis.extent)  # before the matrix exists
        matrix, bias = _matrix(node, mode, axis), np.zeros(axis.size)
        if _coordinate_mode(node) == "tf_crop_and_resize":
            positions = _coordinates(node, axis)
            is_outside = (positions < 0) | (positions > axis.extent - 1)
            matrix[is_outside], bias[is_outside] = 0, outside_value
        x = mapped(node, x, place, matrix, bias)
    node.result(x, tuple(axis.size for axis in axes))


def _matrix(node: Node, mode: str, axis: _Axis) -> Array:
    """Return the weights of each input for each output: those beyond an edge are added to the edge's."""
    centers = _coordinates(node, axis).astype(np.float64)
    stretch = min(axis.scale, 1.0) if node.attribute("antialias", 0) else 1.0
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


def _cubic(node: Node, t: Array) -> Array:
    """Return the cubic convolution kernel of Keys at distances `t`."""
    a = node.attribute("cubic_coeff_a", -0.75)
    near = ((a + 2) * t - (a + 3)) * t * t + 1
    far = ((t - 5) * t + 8) * t * a - 4 * a
    found: Array = np.where(t <= 1, near, np.where(t < _SUPPORT["cubic"], far, 0.0))
    return found


CONVERTERS: dict[str, Callable[[Node], None]] = {"Resize": _resize, "Upsample": _resize}
