"""Operators that converters express by operators of ONNX: `applied` adds one of those and returns its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nnfmq.importers.onnx.operators import (
    convolution,
    elementwise,
    indexing,
    movement,
    normalization,
    pooling,
    products,
    reduction,
)
from nnfmq.importers.onnx.operators.movement import part, reversed_along
from nnfmq.importers.onnx.values import Node, Value

__all__ = ["Composition", "applied", "number"]

_CONVERTERS = {
    **convolution.CONVERTERS,
    **elementwise.CONVERTERS,
    **indexing.CONVERTERS,
    **movement.CONVERTERS,
    **normalization.CONVERTERS,
    **pooling.CONVERTERS,
    **products.CONVERTERS,
    **reduction.CONVERTERS,
}
_OPSET = 18


def applied(
    node: Node, operator: str, values: Sequence[Value | None], attributes: Mapping[str, Any] | None = None
) -> Value:
    """Return the result of an operator; without `attributes` it has those of `node`, and the opset of its model."""
    given = node.attributes if attributes is None else dict(attributes)
    opset = node.opset if attributes is None else _OPSET
    inner = Node(node.name, operator, opset, node.builder, list(values), ["y"], given)
    _CONVERTERS[operator](inner)
    if attributes is None:
        node.attributes_read |= inner.attributes_read
    return inner.computed(0)


def number(value: float) -> Value:
    """Return a constant of rank 0."""
    return Value.of(np.array(value, np.float32))


class Composition:
    """Operators for one node under conversion; methods take and return values."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def __call__(self, operator: str, *values: Value | None, **attributes: Any) -> Value:
        """Return the result of an operator with these attributes."""
        return applied(self._node, operator, values, attributes)

    def reshape(self, value: Value, *shape: int) -> Value:
        """Return a value in another shape; a constant stays one."""
        if value.array is not None:
            return Value.of(value.array.reshape(shape))
        return Value(shape, value.dtype, self._node.reshaped(self._node.operand(value), shape))

    def transpose(self, value: Value, *permutation: int) -> Value:
        """Return a value with permuted dimensions; a constant stays one."""
        if value.array is not None:
            return Value.of(value.array.transpose(permutation))
        return self("Transpose", value, perm=permutation)

    def part(self, value: Value, axis: int, begin: int, end: int) -> Value:
        """Return the elements from `begin` to `end` along an axis; a constant stays one."""
        return part(self._node, value, axis, begin, end)

    def backwards(self, value: Value, axis: int) -> Value:
        """Return the elements in reverse order along an axis; a constant stays one."""
        if value.array is not None:
            return Value.of(np.flip(value.array, axis))
        found = reversed_along(self._node, self._node.operand(value), axis)
        return Value(value.shape, value.dtype, found)

    def like(self, value: float, other: Value) -> Value:
        """Return a constant of rank 0 and of another value's type."""
        return Value.of(np.array(value, other.dtype))
