"""Arithmetic of float16 that follows other arithmetic is computed in float32: what leaves it is rounded once.

The square of an element above 255 is beyond float16, and the normalization that takes its root is not. ONNX Runtime
computes chains of float16 operators on CPUs in the same way. An operation alone stays what it is: engines compute
each one in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from nnfmq.hal.operation_type import OperationType
from nnfmq.hal.tflite_codes import TfliteOperation, operation_code
from nnfmq.hal.types import LifeTime, Operand, OperandType, Operation
from nnfmq.importers.graph_rewriting import GraphRewriting

__all__ = ["widen_half_precision"]

_F16, _F32 = OperandType.TENSOR_FLOAT16, OperandType.TENSOR_FLOAT32


def _codes(names: str) -> frozenset[OperationType]:
    """Return the operations of these names, of the HAL and of the extension."""
    found = {OperationType[name] for name in names.split() if name in OperationType.__members__}
    own = (TfliteOperation[name] for name in names.split() if name in TfliteOperation.__members__)
    return frozenset(found.union(map(operation_code, own)))


_ARITHMETIC = _codes(
    "ABS ACOS ACOSH ADD ASIN ASINH ATAN ATANH COS COSH DIV ELU ERF EXP FLOOR GELU HARD_SWISH L2_NORMALIZATION "
    "LOCAL_RESPONSE_NORMALIZATION LOG LOGISTIC LOG_SOFTMAX MAXIMUM MEAN MINIMUM MISH MUL NEG POW PRELU REDUCE_MAX "
    "REDUCE_MIN REDUCE_PROD REDUCE_SUM RELU RELU1 RELU6 ROUND RSQRT SELECT SIGN SIN SINH SOFTMAX SOFTPLUS SQRT SUB TAN "
    "TANH"
)
"""Comparisons are not among them: equal numbers of float16 may differ before they are rounded."""
_MOVEMENT = _codes("CONCATENATION EXPAND_DIMS RESHAPE SLICE SPLIT SQUEEZE STRIDED_SLICE TILE TRANSPOSE")


def widen_half_precision(graph: GraphRewriting) -> None:
    """Compute the float16 arithmetic of a subgraph in float32 where operations follow each other.

    The numbers of operations change: no other pass can follow.
    """
    numbers = _connected(graph)
    if numbers:
        graph.operations = list(_Widening(graph, numbers).run())


def _connected(graph: GraphRewriting) -> frozenset[int]:
    """Return the arithmetic that reads or feeds other arithmetic, and the movements of elements between."""
    kinds = {
        number: operation.type
        for number, operation in enumerate(graph.operations)
        if operation is not None and operation.type in _ARITHMETIC | _MOVEMENT and _is_half(graph, operation)
    }
    sources = {
        number: {producer for index in _halves(graph, number) if (producer := graph.producer(index)) in kinds}
        for number in kinds
    }
    after_arithmetic: set[int] = set()
    before_arithmetic: set[int] = set()
    for number in kinds:  # in the order of execution
        if any(kinds[source] in _ARITHMETIC or source in after_arithmetic for source in sources[number]):
            after_arithmetic.add(number)
    for number in reversed(kinds):
        if kinds[number] in _ARITHMETIC or number in before_arithmetic:
            before_arithmetic |= sources[number]
    is_between = after_arithmetic & before_arithmetic
    ends = {number for number in after_arithmetic ^ before_arithmetic if kinds[number] in _ARITHMETIC}
    return frozenset(is_between | ends)


def _is_half(graph: GraphRewriting, operation: Operation) -> bool:
    return graph.builder[operation.outputs[0]].type == _F16


def _halves(graph: GraphRewriting, number: int) -> list[int]:
    return [index for index in graph.operation(number).inputs if graph.builder[index].type == _F16]


class _Widening:
    """The operations of a subgraph again, those in `numbers` for float32, with conversions around them."""

    def __init__(self, graph: GraphRewriting, numbers: frozenset[int]) -> None:
        self._graph, self._numbers = graph, numbers
        self._wide: dict[int, int] = {}  # operands of float32 with the values of those of float16
        self._operations: list[Operation] = []

    def run(self) -> Sequence[Operation]:
        """Return the operations."""
        for number, operation in enumerate(self._graph.operations):
            if operation is None:
                continue
            if number not in self._numbers:
                self._operations.append(operation)
                continue
            inputs = tuple(map(self._widened, operation.inputs))
            outputs = tuple(map(self._float32_copy, operation.outputs))
            self._operations.append(replace(operation, inputs=inputs, outputs=outputs))
            for narrow, wide in zip(operation.outputs, outputs, strict=True):
                if not self._graph.is_read_only_by(narrow, self._numbers):
                    self._operations.append(Operation(OperationType.CAST, (wide,), (narrow,)))
        return self._operations

    def _widened(self, index: int) -> int:
        """Return the operand of float32 for an input; a constant is converted now, and a result before it is read."""
        builder, operand = self._graph.builder, self._graph.builder[index]
        if operand.type == OperandType.FLOAT16:
            return builder.float_scalar(_F32, float(np.frombuffer(builder.content(index), np.float16)[0]))
        if operand.type != _F16:
            return index
        if index not in self._wide and operand.lifetime == LifeTime.CONSTANT_COPY:
            values = np.frombuffer(builder.content(index), np.float16).astype(np.float32)
            location = builder.stored(values.tobytes())
            self._wide[index] = builder.operand(replace(operand, type=_F32, location=location))
        elif index not in self._wide:
            self._operations.append(Operation(OperationType.CAST, (index,), (self._float32_copy(index),)))
        return self._wide[index]

    def _float32_copy(self, index: int) -> int:
        """Return a new intermediate result with the shape of an operand."""
        self._wide[index] = self._graph.builder.operand(Operand(_F32, self._graph.shape(index)))
        return self._wide[index]
