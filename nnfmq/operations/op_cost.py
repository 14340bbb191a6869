"""Op cost: the multiply-accumulates and elements of an operation, from its shapes alone.

Rates such as GFLOP/s are relative to these numbers. Counted are the multiply-accumulates of convolutions, matrix
products and recurrent cells; activations, requantization, clipping and elementwise gates are not. Every other operation
has only the count of its output elements. The numbers are those of the operation, not of an engine's implementation:
taps over padding count, recomputed work does not, and each input pixel of a transposed convolution counts all taps,
including those outside the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from nnfmq.hal.types import OperationType
from nnfmq.operations.signature import Match, Shape

__all__ = ["MULTIPLY_ADDS", "OpCost", "compute_op_cost"]

_Rule: TypeAlias = Callable[[Mapping[str, Shape], Shape], int]  # (argument shapes by name, first output) -> MACs


@dataclass(frozen=True, slots=True)
class OpCost:
    """Multiply-accumulates (None if the operation multiplies no matrices) and output elements of one execution."""

    multiply_adds: int | None
    elements: int

    @property
    def arithmetic_operations(self) -> int | None:
        """Multiplications plus additions: twice the multiply-accumulates."""
        return None if self.multiply_adds is None else 2 * self.multiply_adds


def compute_op_cost(match: Match, inputs: Sequence[Shape | None], outputs: Sequence[Shape]) -> OpCost:
    """Return the cost of a matched operation with these argument shapes (None: omitted) and output shapes."""
    named = {p.name: shape for p, shape in zip(match.parameters, inputs, strict=True) if shape is not None}
    rule = MULTIPLY_ADDS.get(match.declaration.code)
    return OpCost(rule(named, outputs[0]) if rule else None, sum(map(math.prod, outputs)))


def _convolution(shapes: Mapping[str, Shape], output: Shape) -> int:
    """A filter has shape (filters, height, width, channels per group), for grouped convolutions too."""
    return math.prod(output) * math.prod(shapes["filter"][1:])


def _depthwise(shapes: Mapping[str, Shape], output: Shape) -> int:
    _, height, width, _ = shapes["filter"]
    return math.prod(output) * height * width


def _transposed(shapes: Mapping[str, Shape], _output: Shape) -> int:
    return math.prod(shapes["input"]) * math.prod(shapes["filter"][:-1])


def _fully_connected(shapes: Mapping[str, Shape], output: Shape) -> int:
    return math.prod(output) * shapes["weights"][1]


def _batch_matmul(shapes: Mapping[str, Shape], output: Shape) -> int:
    """K is the axis of the left matrix that is not the output's rows; `adjoint_left` decides which one that is."""
    left = shapes["left"]
    rows = output[-2]
    return math.prod(output) * left[-2] * left[-1] // rows if rows else 0


def _recurrent(shapes: Mapping[str, Shape], _output: Shape) -> int:
    """All weight matrices, once for each step of each sequence; peepholes and layer norm weights are vectors."""
    weights = (math.prod(shape) for name, shape in shapes.items() if "weights" in name and len(shape) == 2)
    return math.prod(shapes["input"][:-1]) * sum(weights)


MULTIPLY_ADDS: Mapping[OperationType, _Rule] = {
    OperationType.CONV_2D: _convolution,
    OperationType.GROUPED_CONV_2D: _convolution,
    OperationType.DEPTHWISE_CONV_2D: _depthwise,
    OperationType.TRANSPOSE_CONV_2D: _transposed,
    OperationType.FULLY_CONNECTED: _fully_connected,
    OperationType.BATCH_MATMUL: _batch_matmul,
    OperationType.RNN: _recurrent,
    OperationType.UNIDIRECTIONAL_SEQUENCE_RNN: _recurrent,
    OperationType.BIDIRECTIONAL_SEQUENCE_RNN: _recurrent,
    OperationType.LSTM: _recurrent,
    OperationType.UNIDIRECTIONAL_SEQUENCE_LSTM: _recurrent,
    OperationType.BIDIRECTIONAL_SEQUENCE_LSTM: _recurrent,
    OperationType.QUANTIZED_LSTM: _recurrent,
    OperationType.QUANTIZED_16BIT_LSTM: _recurrent,
    OperationType.SVDF: _recurrent,
}
