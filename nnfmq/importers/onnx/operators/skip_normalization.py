"""Normalizations of ONNX Runtime: by the root of the mean square, of sums, of embeddings, and of groups of channels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.importers.onnx.operators.composition import Composition
from nnfmq.importers.onnx.operators.elementwise import in_float32
from nnfmq.importers.onnx.operators.movement import axis_of
from nnfmq.importers.onnx.values import Node, Value

__all__ = ["CONVERTERS", "embeddings"]

_SUM = 3  # the position of the output that is not normalized
_EPSILON = 1e-12


def _simplified(node: Node) -> None:
    if node.attribute("stash_type", 1) != 1:
        raise InvalidArgument(f"stash_type {node.attribute('stash_type', 1)} is not supported: it must be 1, float32")
    axis = axis_of(node.attribute("axis", -1), len(node.value(0).shape))
    node.results[0], node.results[1] = _by_mean_square(node, node.value(0), node.value(1), axis, 1e-5)


def _by_mean_square(node: Node, x: Value, scale: Value, axis: int, default: float) -> tuple[Value, Value]:
    """Return x / √(mean(x²) + epsilon) · scale, and the factor of x; means are over the axes from `axis` on."""
    compose = Composition(node)
    epsilon = compose.like(node.attribute("epsilon", default), x)
    mean = compose("ReduceMean", compose("Mul", x, x), axes=tuple(range(axis, len(x.shape))))
    shifted = compose("Add", mean, epsilon)
    factor = Value(shifted.shape, x.dtype, node.emit(Op.RSQRT, [node.operand(shifted)]))
    return compose("Mul", compose("Mul", x, factor), scale), factor


def _skip(is_simplified: bool, node: Node) -> None:
    """Convert the normalization of input + skip + bias; the sum is an output, too."""
    compose, bias = Composition(node), 3 if is_simplified else 4
    total = compose("Add", node.value(0), node.value(1))
    if node.given(bias):
        total = compose("Add", total, node.value(bias))
    if is_simplified:
        found, _ = _by_mean_square(node, total, node.value(2), len(total.shape) - 1, _EPSILON)
    else:
        found = _layer_normalized(node, total, 2)
    node.results[0], node.results[_SUM] = found, total


def _layer_normalized(node: Node, x: Value, position: int) -> Value:
    """Return x, normalized along the last axis, with the scale at `position` and the bias after it."""
    beta = node.value(position + 1) if node.given(position + 1) else None
    epsilon = node.attribute("epsilon", _EPSILON)
    return Composition(node)("LayerNormalization", x, node.value(position), beta, epsilon=epsilon)


def embeddings(node: Node) -> None:
    """Convert the normalization of the sum of the embeddings of words, positions and segments.

    Raises:
        InvalidArgument: If the words are no matrix.
    """
    compose, ids = Composition(node), node.value(0)
    if len(ids.shape) != 2:
        raise InvalidArgument(f"words of the shape {ids.shape} are not supported: rank 2 is")
    batch, length = ids.shape
    total = compose("Gather", node.value(2), ids)
    if node.given(8):
        total = compose("Add", total, compose("Gather", node.value(3), node.value(8)))
    else:
        total = compose("Add", total, compose.part(node.value(3), 0, 0, length))
    if node.given(1) and node.given(4):
        total = compose("Add", total, compose("Gather", node.value(4), node.value(1)))
    node.results[0], node.results[2] = _layer_normalized(node, total, 5), total
    node.attribute("mask_index_type", 0)
    if node.given(7):
        node.results[1] = compose("ReduceSum", node.value(7), axes=(1,), keepdims=0)
    else:
        node.results[1] = Value.of(np.zeros(batch, np.int32))


def _groups(node: Node) -> None:
    """Convert for images of rank 4, channels last unless an attribute says otherwise."""
    compose, x, count = Composition(node), node.value(0), node.attribute("groups", 0)
    is_last = bool(node.attribute("channels_last", 1))
    x = compose.transpose(x, 0, 3, 1, 2) if is_last else x
    batch, channels, height, width = x.shape
    if count < 1 or channels % count:
        raise InvalidArgument(f"{channels} channels in {count} groups")
    flat = compose.reshape(x, batch * count, channels // count * height * width)
    ones, zeros = (Value.of(np.full(flat.shape[-1], number, x.dtype)) for number in (1, 0))
    flat = compose("LayerNormalization", flat, ones, zeros, epsilon=node.attribute("epsilon", 1e-5))
    found = compose.reshape(flat, *x.shape)
    gamma, beta = (compose.reshape(node.value(position), channels, 1, 1) for position in (1, 2))
    found = compose("Add", compose("Mul", found, gamma), beta)
    if node.attribute("activation", 0):
        found = compose("Mul", found, compose("Sigmoid", found))
    node.results[0] = compose.transpose(found, 0, 2, 3, 1) if is_last else found


_MICROSOFT = "com.microsoft."
CONVERTERS: dict[str, Callable[[Node], None]] = {
    "RMSNormalization": in_float32(_simplified),
    "SimplifiedLayerNormalization": in_float32(_simplified, kept=(1,)),
    f"{_MICROSOFT}EmbedLayerNormalization": embeddings,
    f"{_MICROSOFT}GroupNorm": in_float32(_groups),
    f"{_MICROSOFT}SkipLayerNormalization": in_float32(partial(_skip, False)),
    f"{_MICROSOFT}SkipSimplifiedLayerNormalization": in_float32(partial(_skip, True)),
}
