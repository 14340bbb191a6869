"""An elementwise operator in the epilogue of a matrix product: applied to results before they are stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from nnfmq.engines.compiled.ir_builder import I64, KernelBuilder, Value, size_of, vector
from nnfmq.engines.compiled.kernels.elementwise_kernels import ELEMENT_TYPES, ElementwiseOperator

__all__ = ["EmitOperator", "EpilogueInput", "EpilogueOperator"]

EmitOperator: TypeAlias = Callable[[Sequence[Value], Value], "Sequence[Value]"]
"""Emits the operator: (adjacent vectors of results, the address to which they are stored) -> final results."""


class EpilogueInput(Enum):
    """An input of the operator: the results themselves, an array of the output's shape, or one element for all."""

    RESULT = "result"
    ARRAY = "array"
    ELEMENT = "element"


@dataclass(frozen=True, slots=True)
class EpilogueOperator:
    """The operator, and what its inputs are. Elements of results and of arrays have one size."""

    operator: ElementwiseOperator
    inputs: tuple[EpilogueInput, ...]

    @property
    def operand_count(self) -> int:
        """Operands beside the results; they come after the kernel's other inputs in the argument array."""
        return len(self.inputs) - 1

    @property
    def reads_arrays(self) -> bool:
        """Whether whole vectors of another operand are read, which must not be partial ones at the end of a row."""
        return EpilogueInput.ARRAY in self.inputs

    def bind(self, kb: KernelBuilder, out: Value, first_operand: int, first_constant: int) -> EmitOperator:
        """Return the function that emits it. Operands and constants are arguments from these numbers on."""
        operands = [kb.argument(first_operand + number) for number in range(self.operand_count)]
        constants = [kb.argument(first_constant + number) for number in range(self.operator.constant_count)]

        def emit_operator(results: Sequence[Value], address: Value) -> Sequence[Value]:
            offset, finished = _distance(kb, out, address), []
            for result in results:
                finished.append(self.operator.emit(kb, self._values(kb, result, operands, offset), constants))
                offset = kb.add(offset, result.type.count * size_of(result.type.element))
            return finished

        return emit_operator

    def _values(self, kb: KernelBuilder, result: Value, operands: Sequence[Value], offset: Value) -> list[Value]:
        """Return the operator's inputs for one vector of results, `offset` bytes after the output's begin."""
        values, unread, lanes = [], iter(operands), result.type.count
        for kind, element_type in zip(self.inputs, self.operator.input_types, strict=True):
            if kind is EpilogueInput.RESULT:
                values.append(result)
            elif kind is EpilogueInput.ARRAY:
                values.append(kb.load(vector(ELEMENT_TYPES[element_type], lanes), next(unread), offset))
            else:
                values.append(kb.broadcast(kb.load(ELEMENT_TYPES[element_type], next(unread)), lanes))
        return values


def _distance(kb: KernelBuilder, begin: Value, end: Value) -> Value:
    """Return the bytes between two addresses."""
    return kb.ir.sub(kb.ir.ptrtoint(end, I64), kb.ir.ptrtoint(begin, I64))
