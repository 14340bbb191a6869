"""What passes over a finished subgraph share: its operations, some of which they remove, and who reads each operand."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from nnfmq.hal.types import LifeTime, OperandType, Operation
from nnfmq.importers.graph_builder import GraphBuilder

__all__ = ["GraphRewriting"]

Array: TypeAlias = npt.NDArray[Any]


class GraphRewriting:
    """The operations of a subgraph by number, None for one that a pass has removed."""

    def __init__(self, builder: GraphBuilder, outputs: Sequence[int]) -> None:
        self.builder = builder
        self.operations: list[Operation | None] = list(builder.operations)
        self._outputs = frozenset(outputs)
        self._readers: dict[int, list[int]] = {}
        self._producers: dict[int, int] = {}
        for number, operation in enumerate(builder.operations):
            self._producers.update(dict.fromkeys(operation.outputs, number))
            for index in operation.inputs:
                self._readers.setdefault(index, []).append(number)

    def remove_unread(self) -> None:
        """Remove the operations whose results nothing reads, those included that only such operations read."""
        for number, operation in reversed(list(enumerate(self.operations))):
            if operation is None or any(o in self._outputs or self._readers.get(o) for o in operation.outputs):
                continue
            for index in operation.inputs:
                self._readers[index].remove(number)
            self.operations[number] = None

    def finish(self) -> None:
        """Give the builder the operations that remain."""
        self.builder.replace_operations([operation for operation in self.operations if operation is not None])

    def operation(self, number: int) -> Operation:
        """Return an operation that was not removed."""
        operation = self.operations[number]
        assert operation is not None, "a pass removes only what nothing else reads"
        return operation

    def producer(self, index: int) -> int | None:
        """Return the operation that writes an operand."""
        return self._producers.get(index)

    def reader_count(self, index: int) -> int:
        """Return how often operations read an operand."""
        return len(self._readers.get(index, ()))

    def only_reader(self, index: int) -> int | None:
        """Return the operation that alone reads an operand, once; None if the operand is an output, too."""
        is_alone = self.reader_count(index) == 1 and index not in self._outputs
        return self._readers[index][0] if is_alone else None

    def is_read_only_by(self, index: int, numbers: Collection[int]) -> bool:
        """Return whether no operations but those of `numbers` read an operand, and it is no output."""
        return index not in self._outputs and all(reader in numbers for reader in self._readers.get(index, ()))

    def shape(self, index: int) -> tuple[int, ...]:
        """Return the shape of an operand."""
        return self.builder[index].dimensions

    def has_activation(self, index: int) -> bool:
        """Return whether the constant scalar `index` is another activation than NONE."""
        return any(self.builder.content(index))

    def is_float_constant(self, index: int) -> bool:
        """Return whether an operand is a constant tensor of float32."""
        operand = self.builder[index]
        return operand.type == OperandType.TENSOR_FLOAT32 and operand.lifetime == LifeTime.CONSTANT_COPY

    def floats(self, index: int) -> Array | None:
        """Return the value of a float32 constant, as float64; None for all other operands."""
        if not self.is_float_constant(index):
            return None
        content = np.frombuffer(self.builder.content(index), np.float32)
        return content.reshape(self.shape(index)).astype(np.float64)
