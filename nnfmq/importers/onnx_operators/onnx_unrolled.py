"""GRU and RNN, whose steps become operations of their own: the HAL has no GRU, and its RNN has one activation.

The products with the inputs of all steps are one FULLY_CONNECTED; each step then has those with the last hidden state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.importers.onnx_operators.onnx_recurrent import (
    Array,
    directions_of,
    finish_directions,
    initial_state,
    require_lengths,
    sequence_shape,
)
from nnfmq.importers.onnx_values import Node

__all__ = ["CONVERTERS"]

_MAX_STEPS = 512  # each step of a GRU is a dozen operations
_ACTIVATIONS = {"sigmoid": Op.LOGISTIC, "tanh": Op.TANH, "relu": Op.RELU}
_HIDDEN = 5


@dataclass(frozen=True, slots=True)
class _Dense:
    """x · weightsᵀ + biases, for x of shape (rows, elements). The steps share these constants."""

    node: Node
    weights: int
    biases: int

    @classmethod
    def of(cls, node: Node, weights: Array, biases: Array) -> Self:
        return cls(node, node.add_constant(weights), node.add_constant(biases))

    def __call__(self, x: int) -> int:
        return self.node.emit(Op.FULLY_CONNECTED, [x, self.weights, self.biases, self.node.builder.int32(0)])


@dataclass(frozen=True, slots=True)
class _Cell:
    """One direction of one node: the products with its inputs and with the hidden state, and its activations."""

    node: Node
    size: int
    from_inputs: _Dense
    from_hidden: Sequence[_Dense]
    activations: Sequence[Op]

    def combine(self, operation: Op, a: int, b: int) -> int:
        return self.node.emit(operation, [a, b, self.node.builder.int32(0)])

    def activate(self, place: int, x: int) -> int:
        return self.node.emit(self.activations[place], [x])

    def part(self, x: int, gate: int, count: int = 1) -> int:
        """Return the columns of a gate, or of some gates."""
        rows, vector = self.node.shape(x)[0], self.node.builder.int32_vector
        return self.node.emit(Op.SLICE, [x, vector([0, gate * self.size]), vector([rows, count * self.size])])


def _gru_step(cell: _Cell, is_linear_first: bool, x: int, hidden: int) -> int:
    """Return the next hidden state; the gates are update, reset and candidate."""
    update_and_reset, candidate = cell.from_hidden
    gates = cell.activate(0, cell.combine(Op.ADD, cell.part(x, 0, 2), update_and_reset(hidden)))
    update, reset = cell.part(gates, 0), cell.part(gates, 1)
    if is_linear_first:
        added = cell.combine(Op.MUL, reset, candidate(hidden))
    else:
        added = candidate(cell.combine(Op.MUL, reset, hidden))
    new = cell.activate(1, cell.combine(Op.ADD, cell.part(x, 2), added))
    kept = cell.combine(Op.MUL, update, cell.combine(Op.SUB, hidden, new))
    return cell.combine(Op.ADD, new, kept)


def _rnn_step(cell: _Cell, _is_linear_first: bool, x: int, hidden: int) -> int:
    (from_hidden,) = cell.from_hidden
    return cell.activate(0, cell.combine(Op.ADD, x, from_hidden(hidden)))


def _recurrent(
    gates: Sequence[int], defaults: tuple[str, ...], step: Callable[[_Cell, bool, int, int], int], node: Node
) -> None:
    """Convert a node; `gates` are the numbers of gates that each product with the hidden state computes."""
    steps, batch, _ = sequence_shape(node)
    directions = directions_of(node)
    names = tuple(str(name).lower() for name in node.attribute("activations", ())) or defaults * len(directions)
    if len(names) != len(defaults) * len(directions) or not set(names) <= _ACTIVATIONS.keys():
        raise InvalidArgument(f"activations {names} are not supported; {', '.join(_ACTIVATIONS)} are")
    require_lengths(node, steps)
    if steps > _MAX_STEPS:
        raise InvalidArgument(f"{steps} steps are not supported: at most {_MAX_STEPS} are")
    is_linear_first = bool(node.attribute("linear_before_reset", 0))
    found = []
    for place, is_reversed in enumerate(directions):
        own = [_ACTIVATIONS[name] for name in names[place * len(defaults) : (place + 1) * len(defaults)]]
        cell = _cell(node, place, gates, own)
        found.append(_one_direction(cell, place, is_reversed, partial(step, cell, is_linear_first)))
    last = (len(directions), batch, node.value(2).shape[2])
    finish_directions(node, found, ((steps, *last), last))


def _cell(node: Node, place: int, gates: Sequence[int], activations: Sequence[Op]) -> _Cell:
    weights, recurrent = (node.constant(position, "weights")[place] for position in (1, 2))
    size = recurrent.shape[1]
    count = sum(gates) * size
    if len(weights) != count or len(recurrent) != count:
        raise InvalidArgument(f"weights of {len(weights)} and {len(recurrent)} rows: {count} are required")
    both = node.constant(3, "biases")[place] if node.given(3) else np.zeros(2 * count, weights.dtype)
    ends = np.cumsum([number * size for number in gates])
    products = [
        _Dense.of(node, rows, biases)
        for rows, biases in zip(np.split(recurrent, ends[:-1]), np.split(both[count:], ends[:-1]), strict=True)
    ]
    return _Cell(node, size, _Dense.of(node, weights, both[:count]), products, activations)


def _one_direction(cell: _Cell, place: int, is_reversed: bool, step: Callable[[int, int], int]) -> tuple[int, int]:
    """Return the outputs of all steps, (steps, batch, size), and the last hidden state."""
    node = cell.node
    steps, batch, elements = node.value(0).shape
    gates = cell.from_inputs(node.reshaped(node.operand(0), (steps * batch, elements)))
    hidden = initial_state(node, _HIDDEN, place, cell.size, node.constant(1, "weights").dtype)
    vector, columns = node.builder.int32_vector, node.shape(gates)[1]
    outputs: dict[int, int] = {}
    for at in reversed(range(steps)) if is_reversed else range(steps):
        x = node.emit(Op.SLICE, [gates, vector([at * batch, 0]), vector([batch, columns])])
        outputs[at] = hidden = step(x, hidden)
    rows = [outputs[at] for at in range(steps)]
    joined = rows[0] if steps == 1 else node.emit(Op.CONCATENATION, [*rows, node.builder.int32(0)])
    return node.reshaped(joined, (steps, batch, cell.size)), hidden


def _gru(node: Node) -> None:
    _recurrent((2, 1), ("sigmoid", "tanh"), _gru_step, node)


def _rnn(node: Node) -> None:
    _recurrent((1,), ("tanh",), _rnn_step, node)


CONVERTERS: dict[str, Callable[[Node], Any]] = {"GRU": _gru, "RNN": _rnn}
