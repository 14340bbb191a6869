"""Models built operand by operand, for tests that need to know each index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from nnfmq.hal.types import Model, Operand, OperandType, Operation, OperationType
from support.small_models import INPUT, OUTPUT, TEMPORARY, graph, scalar

VECTOR = Operand(OperandType.TENSOR_FLOAT32, (4,))
HALVES = Operand(OperandType.TENSOR_FLOAT16, (4,))
ANY_LENGTH = Operand(OperandType.TENSOR_FLOAT32, (0,))
ANY_RANK = Operand(OperandType.TENSOR_FLOAT32)


class Sketch:
    """A model under construction. Each method returns the index of its operand, or of its operation."""

    def __init__(self) -> None:
        self._operands: list[Operand] = []
        self._operations: list[Operation] = []
        self._constants: dict[int, bytes] = {}

    def input(self, operand: Operand = VECTOR) -> int:
        return self._append(replace(operand, lifetime=INPUT))

    def temporary(self, operand: Operand = VECTOR) -> int:
        return self._append(replace(operand, lifetime=TEMPORARY))

    def output(self, operand: Operand = VECTOR) -> int:
        return self._append(replace(operand, lifetime=OUTPUT))

    def other(self, operand: Operand) -> int:
        """Add an operand as it is: a constant in a pool, an omitted one, or one that names a subgraph."""
        return self._append(operand)

    def constant(self, value: int | float | bool | tuple[Operand, bytes]) -> int:
        """Add a Python value, or an operand with its bytes."""
        operand, raw = value if isinstance(value, tuple) else scalar(value)
        index = self._append(operand)
        self._constants[index] = raw
        return index

    def operation(self, code: OperationType, inputs: Sequence[int], *outputs: int) -> int:
        self._operations.append(Operation(code, tuple(inputs), outputs))
        return len(self._operations) - 1

    def model(self, **rest: Any) -> Model:
        return graph(self._operands, self._operations, self._constants, **rest)

    def _append(self, operand: Operand) -> int:
        self._operands.append(operand)
        return len(self._operands) - 1


def chain(*codes: OperationType, between: Operand = VECTOR, ends: Operand = VECTOR) -> Model:
    """Return a model in which each operation of one tensor reads what the one before it wrote.

    Operand 0 is the input, operand i + 1 the result of operation i, the last one the output.
    """
    sketch = Sketch()
    last = sketch.input(ends)
    for position, code in enumerate(codes):
        is_last = position == len(codes) - 1
        result = sketch.output(ends) if is_last else sketch.temporary(between)
        sketch.operation(code, [last], result)
        last = result
    return sketch.model()
