"""Activations that a file writes as several operations become one: x * RELU6(x + 3) / 6 is HARD_SWISH.

ONNX has HardSwish since opset 14; exporters for older ones write Add, Clip, Mul and Div.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.importers.graph_rewriting import GraphRewriting

__all__ = ["fuse_hard_swish"]


@dataclass(frozen=True, slots=True)
class _HardSwish:
    """The operand x, and the numbers of the operations before the last one."""

    x: int
    operations: tuple[int, ...]


def fuse_hard_swish(graph: GraphRewriting) -> None:
    """Replace the operations of each hard swish of float32 by HARD_SWISH."""
    for number, operation in enumerate(graph.operations):
        found = None if operation is None else _hard_swish(graph, number)
        if operation is not None and found is not None:
            for removed in found.operations:
                graph.operations[removed] = None
            graph.operations[number] = replace(operation, type=Op.HARD_SWISH, inputs=(found.x,))


def _hard_swish(graph: GraphRewriting, number: int) -> _HardSwish | None:
    """Return the hard swish whose last operation, a division by 6, is operation `number`."""
    divided = _operand_beside(graph, number, Op.DIV, 6)
    divided = _operand_beside(graph, number, Op.MUL, 1 / 6) if divided is None else divided
    product = None if divided is None else _writer(graph, divided, Op.MUL)
    if product is None or graph.has_activation(graph.operation(product).inputs[2]):
        return None
    first, second, _ = graph.operation(product).inputs
    for x, gate in ((first, second), (second, first)):
        clamp = _writer(graph, gate, Op.RELU6)
        total = None if clamp is None else _writer(graph, graph.operation(clamp).inputs[0], Op.ADD)
        if clamp is not None and total is not None and _operand_beside(graph, total, Op.ADD, 3) == x:
            return _HardSwish(x, (total, clamp, product))
    return None


def _writer(graph: GraphRewriting, index: int, code: Op) -> int | None:
    """Return the operation that writes an operand, if it is a `code` and its result is read only once."""
    producer = graph.producer(index)
    if producer is None or graph.only_reader(index) is None:
        return None
    operation = graph.operations[producer]
    return producer if operation is not None and operation.type == code else None


def _operand_beside(graph: GraphRewriting, number: int, code: Op, constant: float) -> int | None:
    """Return the other operand of a `code` with a float32 constant that has one element, without activation."""
    operation = graph.operation(number)
    if operation.type != code or graph.has_activation(operation.inputs[2]):
        return None
    for x, other in (operation.inputs[:2], operation.inputs[1::-1]):
        values = graph.floats(other)
        if values is not None and values.size == 1 and values.item() == np.float32(constant):
            return x if graph.shape(x) == graph.shape(operation.outputs[0]) else None
        if code == Op.DIV:
            break  # the divisor is second
    return None
