"""Resize and Upsample: nearest with GATHER along each axis, linear with RESIZE_BILINEAR."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.importers.onnx_values import Node

__all__ = ["CONVERTERS"]

_ONE_SCALES_INPUT = 10  # from opset 11 on the inputs are roi, scales, sizes
_UNSUPPORTED = ("antialias", "exclude_outside", "axes", "keep_aspect_ratio_policy")
_MAX_EXTENT = 1 << 24


def _resize(node: Node) -> None:
    for name in _UNSUPPORTED:
        if node.attribute(name, None) not in (None, 0, "stretch"):
            raise InvalidArgument(f"attribute {name} is not supported")
    node.attribute("nearest_mode", None)  # linear does not use it
    sizes, scales = _target(node)
    mode = node.attribute("mode", "nearest")
    if mode == "nearest":
        _nearest(node, sizes, scales)
    elif mode == "linear":
        _linear(node, sizes, scales)
    else:
        raise InvalidArgument(f"mode {mode!r} is not supported")


def _target(node: Node) -> tuple[list[int], list[float]]:
    """Return the result's shape and the scale of each axis."""
    shape, is_old = node.value(0).shape, node.opset <= _ONE_SCALES_INPUT
    at = 1 if is_old else 2
    if node.given(3) and node.constant(3, "sizes").size:
        sizes = [int(size) for size in node.constant(3, "sizes")]
        scales = [size / extent for size, extent in zip(sizes, shape, strict=False)]
    elif node.given(at) or "scales" in node.attributes:
        found = node.constant(at, "scales") if node.given(at) else node.attribute("scales", ())
        scales = [float(scale) for scale in found]
        sizes = [int(np.floor(extent * scale)) for extent, scale in zip(shape, scales, strict=False)]
    else:
        raise InvalidArgument("neither sizes nor scales are given")
    if len(scales) != len(shape) or not all(0 < size < _MAX_EXTENT for size in sizes):
        raise InvalidArgument(f"the shape {shape} cannot be resized to {sizes}")
    return sizes, scales


def _coordinates(node: Node, extent: int, size: int, scale: float) -> npt.NDArray[np.float32]:
    """Return the position in the input of each element of an axis of the result."""
    x, wide = np.arange(size, dtype=np.float32), np.float32(scale)
    mode = "asymmetric" if node.opset <= _ONE_SCALES_INPUT else node.attribute(
        "coordinate_transformation_mode", "half_pixel"
    )  # fmt: skip
    if mode == "asymmetric":
        found = x / wide
    elif mode == "align_corners":
        found = x * np.float32((extent - 1) / (size - 1)) if size > 1 else np.zeros_like(x)
    elif mode == "half_pixel" or (mode == "pytorch_half_pixel" and size > 1):
        found = (x + np.float32(0.5)) / wide - np.float32(0.5)
    elif mode == "pytorch_half_pixel":
        found = np.zeros_like(x)
    else:
        raise InvalidArgument(f"coordinate_transformation_mode {mode!r} is not supported")
    return np.asarray(found, np.float32)


_ROUNDINGS: dict[str, Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]]] = {
    "round_prefer_floor": lambda x: np.ceil(x - np.float32(0.5)),
    "round_prefer_ceil": lambda x: np.floor(x + np.float32(0.5)),
    "floor": np.floor,
    "ceil": np.ceil,
}


def _nearest(node: Node, sizes: list[int], scales: list[float]) -> None:
    default = "floor" if node.opset <= _ONE_SCALES_INPUT else "round_prefer_floor"
    rounding, x = _ROUNDINGS.get(node.attribute("nearest_mode", default)), node.operand(0)
    if rounding is None:
        raise InvalidArgument("nearest_mode is unknown")
    for axis, (extent, size, scale) in enumerate(zip(node.value(0).shape, sizes, scales, strict=True)):
        if size == extent and scale == 1.0:
            continue
        indices = np.clip(rounding(_coordinates(node, extent, size, scale)), 0, extent - 1).astype(np.int32)
        x = node.emit(Op.GATHER, [x, node.builder.int32(axis), node.add_constant(indices)])
    node.result(x, tuple(sizes))


def _linear(node: Node, sizes: list[int], scales: list[float]) -> None:
    shape = node.value(0).shape
    mode = "asymmetric" if node.opset <= _ONE_SCALES_INPUT else node.attribute(
        "coordinate_transformation_mode", "half_pixel"
    )  # fmt: skip
    if mode not in ("half_pixel", "asymmetric", "align_corners"):
        raise InvalidArgument(f"coordinate_transformation_mode {mode!r} is not supported")
    is_exact = all(abs(extent * scale - size) < 1e-4 for extent, scale, size in zip(shape, scales, sizes, strict=True))
    if len(shape) != 4 or sizes[:2] != list(shape[:2]) or not is_exact:
        raise InvalidArgument("supported are images, with scales that give whole sizes")
    flags = [node.builder.boolean(flag) for flag in (True, mode == "align_corners", mode == "half_pixel")]
    extents = [node.builder.int32(size) for size in (sizes[3], sizes[2])]
    node.result(node.emit(Op.RESIZE_BILINEAR, [node.operand(0), *extents, *flags]), tuple(sizes))


CONVERTERS: dict[str, Callable[[Node], None]] = {"Resize": _resize, "Upsample": _resize}
