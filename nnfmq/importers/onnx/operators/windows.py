"""HannWindow, HammingWindow, BlackmanWindow and AffineGrid: numbers that follow from sizes, which must be constants."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from nnfmq.hal.errors import InvalidArgument
from nnfmq.importers.onnx.operators.composition import Composition
from nnfmq.importers.onnx.operators.elementwise import in_float32
from nnfmq.importers.onnx.values import Array, Node, Value

__all__ = ["CONVERTERS"]

_FLOAT = 1  # the number of float32 among ONNX's element types
_FACTORS = {
    "BlackmanWindow": (0.42, 0.5, 0.08),
    "HammingWindow": (25 / 46, 21 / 46, 0.0),
    "HannWindow": (0.5, 0.5, 0.0),
}


def _window(factors: tuple[float, float, float], node: Node) -> None:
    """Make a constant of a window, computed in float64: a sum of cosines with these factors."""
    from nnfmq.importers.onnx.file import dtype_of

    size = int(node.constant(0, "size").reshape(-1)[0])
    period = size if node.attribute("periodic", 1) else size - 1
    dtype = dtype_of(node.attribute("output_datatype", _FLOAT))
    node.builder.reserve(8 * max(size, 0))  # before it exists
    angles = 2 * np.pi * np.arange(size) / np.float64(period)
    constant, first, second = factors
    node.constant_result((second * np.cos(2 * angles) - first * np.cos(angles) + constant).astype(dtype))


def _affine_grid(node: Node) -> None:
    """Multiply the matrices by the places of all pixels, which are constants."""
    compose, theta = Composition(node), node.value(0)
    batch, _, *extents = (int(extent) for extent in node.constant(1, "size"))
    rank, is_aligned = len(extents), node.attribute("align_corners", 0)
    if theta.shape != (batch, rank, rank + 1) or min(extents) < 1:
        raise InvalidArgument(f"matrices of shape {theta.shape} do not fit {batch} images of {tuple(extents)} pixels")
    if is_aligned and 1 in extents:
        raise InvalidArgument("the corners of an image of one row or column are not defined")
    node.builder.reserve(8 * rank * int(np.prod(extents)))  # before they exist
    places = np.stack(np.meshgrid(*(_places(extent, bool(is_aligned)) for extent in extents), indexing="ij")[::-1])
    points = np.concatenate([places.reshape(rank, -1), np.ones((1, places[0].size))]).astype(theta.dtype)
    found = compose.transpose(compose("MatMul", theta, Value.of(points)), 0, 2, 1)
    node.results[0] = compose.reshape(found, batch, *extents, rank)


def _places(extent: int, is_aligned: bool) -> Array:
    """Return the places of pixels between -1 and 1: those of the centers, or with those of the corners at the ends."""
    return np.linspace(-1, 1, extent) if is_aligned else (2 * np.arange(extent) + 1) / extent - 1


CONVERTERS: dict[str, Callable[[Node], None]] = {
    **{name: partial(_window, factors) for name, factors in _FACTORS.items()},
    "AffineGrid": in_float32(_affine_grid),
}
