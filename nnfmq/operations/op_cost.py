"""How much an operation computes, by its shapes alone: what rates such as GFLOP/s are of.

Counted are the multiply-adds of products: of convolutions, matrices and recurrent cells. What goes on beside them
(activations, requantization, clipping, element-wise gates) is not. All other operations have the elements that they
make. The numbers are the operation's, whatever an engine does for it: taps over padding count, work done twice does
not, and a transposed convolution spreads each of its inputs, also where that falls outside of the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from nnfmq.hal.types import OperationType
from nnfmq.operations.signature import Match, Shape

__all__ = ["MULTIPLY_ADDS", "Work", "work_of"]

_Rule: TypeAlias = Callable[[Mapping[str, Shape], Shape], int]  # arguments' shapes by name, the first output's


@dataclass(frozen=True, slots=True)
class Work:
    """What one execution of an operation takes; `multiply_adds` is None where it is no product."""

    multiply_adds: int | None
    elements: int

    @property
    def operations(self) -> int | None:
        """Multiplications and additions, each by itself."""
        return None if self.multiply_adds is None else 2 * self.multiply_adds


def work_of(match: Match, inputs: Sequence[Shape | None], outputs: Sequence[Shape]) -> Work:
    """Return the work of a matched operation. Shapes are the arguments' in order (None: omitted), then the outputs'."""
    named = {p.name: shape for p, shape in zip(match.parameters, inputs, strict=True) if shape is not None}
    rule = MULTIPLY_ADDS.get(match.declaration.code)
    return Work(rule(named, outputs[0]) if rule else None, sum(map(math.prod, outputs)))


def _convolution(shapes: Mapping[str, Shape], output: Shape) -> int:
    """Return each output's taps; a filter is (filters, height, width, channels it sees), grouped or not."""
    return math.prod(output) * math.prod(shapes["filter"][1:])


def _depthwise(shapes: Mapping[str, Shape], output: Shape) -> int:
    _, height, width, _ = shapes["filter"]
    return math.prod(output) * height * width


def _transposed(shapes: Mapping[str, Shape], _output: Shape) -> int:
    return math.prod(shapes["input"]) * math.prod(shapes["filter"][:-1])


def _fully_connected(shapes: Mapping[str, Shape], output: Shape) -> int:
    return math.prod(output) * shapes["weights"][1]


def _matrices(shapes: Mapping[str, Shape], output: Shape) -> int:
    """Return each output's length of sums; which axis of the left matrix that is depends on `adjoint_left`."""
    left = shapes["left"]
    rows = output[-2]
    return math.prod(output) * left[-2] * left[-1] // rows if rows else 0


def _recurrent(shapes: Mapping[str, Shape], _output: Shape) -> int:
    """Return all matrices of weights, once for each step of each sequence; peepholes and norms are vectors."""
    weights = (math.prod(shape) for name, shape in shapes.items() if "weights" in name and len(shape) == 2)
    return math.prod(shapes["input"][:-1]) * sum(weights)


MULTIPLY_ADDS: Mapping[OperationType, _Rule] = {
    OperationType.CONV_2D: _convolution,
    OperationType.GROUPED_CONV_2D: _convolution,
    OperationType.DEPTHWISE_CONV_2D: _depthwise,
    OperationType.TRANSPOSE_CONV_2D: _transposed,
    OperationType.FULLY_CONNECTED: _fully_connected,
    OperationType.BATCH_MATMUL: _matrices,
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
