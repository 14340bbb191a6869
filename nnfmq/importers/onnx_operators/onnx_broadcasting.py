"""Broadcasting: the common shape of values, and an operand repeated to a shape."""

from __future__ import annotations

import math

import numpy as np

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType
from nnfmq.hal.types import OperandType
from nnfmq.importers.onnx_values import Node, Value

__all__ = ["broadcast_to", "common_shape"]


def common_shape(*values: Value) -> tuple[int, ...]:
    """Return the shape that the values have together. Raises InvalidArgument if there is none."""
    try:
        return np.broadcast_shapes(*(value.shape for value in values))
    except ValueError:
        shapes = ", ".join(str(value.shape) for value in values)
        raise InvalidArgument(f"the shapes {shapes} have no common shape") from None


def broadcast_to(node: Node, operand: int, shape: tuple[int, ...]) -> int:
    """Return an operand of `shape`, with the elements of `operand` repeated along dimensions of 1."""
    wanted = shape or (1,)
    if node.shape(operand) == wanted:
        return operand
    if node.builder[operand].type == OperandType.TENSOR_BOOL8:
        node.builder.reserve(math.prod(wanted))  # before the array exists
        nothing = node.add_constant(np.zeros(wanted, bool))
        return node.emit(OperationType.LOGICAL_OR, [operand, nothing])
    given = node.shape(operand)
    aligned = (1,) * (len(wanted) - len(given)) + given
    multiples = [size // extent for size, extent in zip(wanted, aligned, strict=True)]
    operand = node.reshaped(operand, aligned)
    return node.emit(OperationType.TILE, [operand, node.builder.int32_vector(multiples)])
