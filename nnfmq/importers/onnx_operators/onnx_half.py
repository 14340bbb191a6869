"""Operators of float16 that are computed in float32, with their numbers, and rounded once."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
from msgspec.structs import replace

from nnfmq.hal.operation_type import OperationType
from nnfmq.hal.types import OperandType
from nnfmq.importers.onnx_values import Node, Value

__all__ = ["in_float32"]

_HALF, _SINGLE = np.dtype(np.float16), np.dtype(np.float32)


def in_float32(convert: Callable[[Node], None], kept: Collection[int] = ()) -> Callable[[Node], None]:
    """Return a converter that converts a node of float16 as one of float32; outputs at `kept` stay float32."""

    def converted(node: Node) -> None:
        if node.value(0).dtype != _HALF:
            return convert(node)
        inner = replace(node, inputs=[_widened(node, value) for value in node.inputs], results={})
        convert(inner)
        for position, value in inner.results.items():
            is_narrow = value.dtype == _SINGLE and position not in kept
            node.results[position] = _cast(node, value, _HALF, OperandType.TENSOR_FLOAT16) if is_narrow else value
        return None

    return converted


def _widened(node: Node, value: Value | None) -> Value | None:
    if value is None or value.dtype != _HALF:
        return value
    return _cast(node, value, _SINGLE, OperandType.TENSOR_FLOAT32)


def _cast(node: Node, value: Value, dtype: np.dtype[np.floating], kind: OperandType) -> Value:
    if value.array is not None:
        return Value.of(value.array.astype(dtype))
    return Value(value.shape, dtype, node.emit(OperationType.CAST, [node.operand(value)], kind))
