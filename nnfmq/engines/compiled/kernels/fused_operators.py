"""Elementwise operators of several operations, whose results between them stay in registers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nnfmq.engines.compiled.ir_builder import KernelBuilder, Value
from nnfmq.engines.compiled.kernels.elementwise_kernels import ElementwiseOperator

__all__ = ["RESULT", "FusedOperator", "operator_count"]

RESULT = -1
"""In `FusedOperator.second_inputs`: the first operator's result."""


@dataclass(frozen=True, slots=True)
class FusedOperator:
    """An operator applied to the result of another one. The inputs of both are numbered together, each once.

    Constants: the first operator's, then the second one's.
    """

    first: ElementwiseOperator
    first_inputs: tuple[int, ...]
    second: ElementwiseOperator
    second_inputs: tuple[int, ...]

    @property
    def input_types(self) -> tuple[str, ...]:
        """Element types of the inputs."""
        numbered = dict(zip(self.first_inputs, self.first.input_types, strict=True))
        numbered |= dict(zip(self.second_inputs, self.second.input_types, strict=True))
        return tuple(numbered[number] for number in sorted(numbered) if number != RESULT)

    @property
    def output_type(self) -> str:
        """Element type of the output."""
        return self.second.output_type

    @property
    def constant_count(self) -> int:
        """Constants of both operators."""
        return self.first.constant_count + self.second.constant_count

    @property
    def vectors(self) -> int:
        """Vectors of the operator that takes fewer of them."""
        return min(self.first.vectors, self.second.vectors)

    def emit(self, kb: KernelBuilder, inputs: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        count = self.first.constant_count
        result = self.first.emit(kb, [inputs[number] for number in self.first_inputs], constants[:count])
        others = [result if number == RESULT else inputs[number] for number in self.second_inputs]
        return self.second.emit(kb, others, constants[count:])


def operator_count(operator: ElementwiseOperator) -> int:
    """Return the number of operations that an operator computes."""
    if isinstance(operator, FusedOperator):
        return operator_count(operator.first) + operator_count(operator.second)
    return 1
