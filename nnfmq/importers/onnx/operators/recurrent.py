"""LSTM as an operation of the HAL, GRU and RNN as operations of their own for each step.

ONNX stacks the gates' weights as input, output, forget, cell; the HAL has them apart, as input, forget, cell, output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.extensions import Scheme, extended_code
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.importers.onnx.dynamic_products import ByteWeights
from nnfmq.importers.onnx.values import Node, Value

__all__ = [
    "CONVERTERS",
    "Array",
    "directions_of",
    "finish_directions",
    "initial_state",
    "require_lengths",
    "sequence_shape",
]

Array: TypeAlias = npt.NDArray[Any]
_DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
_GATES = (0, 2, 3, 1)  # the HAL's order of ONNX's gates
_PEEPHOLES = (0, 2, 1)
_TANH = 4  # NNAPI's code
_SEQUENCE_LENGTHS, _HIDDEN, _CELL, _PEEPHOLE = 4, 5, 6, 7
_DYNAMIC = "com.microsoft.DynamicQuantizeLSTM"
_QUANTIZATION = 8  # the first of four inputs of DynamicQuantizeLSTM


def _lstm(node: Node) -> None:
    steps, batch, _ = sequence_shape(node)
    directions = directions_of(node)
    _check(node, len(directions), steps)
    found = [_one_direction(node, place, is_reversed) for place, is_reversed in enumerate(directions)]
    last = (len(directions), batch, node.value(2).shape[2])
    finish_directions(node, found, ((steps, *last), last, last))


def sequence_shape(node: Node) -> tuple[int, int, int]:
    """Return the numbers of steps, of sequences and of elements. Raises InvalidArgument for another rank than 3."""
    shape = node.value(0).shape
    if len(shape) != 3:
        raise InvalidArgument(f"its sequences have the shape {shape}: (steps, batch, elements) is required")
    return shape[0], shape[1], shape[2]


def directions_of(node: Node) -> tuple[bool, ...]:
    """Return for each direction whether it goes from the last step to the first."""
    direction = node.attribute("direction", "forward")
    if direction not in _DIRECTIONS:
        raise InvalidArgument(f"direction {direction!r} is not supported")
    return _DIRECTIONS[direction]


def finish_directions(node: Node, found: Sequence[Sequence[int]], shapes: Sequence[tuple[int, ...]]) -> None:
    """Join the results of all directions: those of all steps along axis 1, the last ones along axis 0."""
    for position, shape in enumerate(shapes):
        if not node.used(position):
            continue
        axis = 1 if position == 0 else 0
        parts = [node.reshaped(results[position], (*shape[:axis], 1, *shape[axis + 1 :])) for results in found]
        joined = parts[0] if len(parts) == 1 else node.emit(Op.CONCATENATION, [*parts, node.builder.int32(axis)])
        node.result(joined, shape, position=position)


def _check(node: Node, directions: int, steps: int) -> None:
    activations = tuple(str(name).lower() for name in node.attribute("activations", ()))
    if activations not in ((), ("sigmoid", "tanh", "tanh") * directions):
        raise InvalidArgument(f"activations {activations} are not supported")
    if node.attribute("input_forget", None):
        raise InvalidArgument("attribute input_forget is not supported")
    require_lengths(node, steps)


def require_lengths(node: Node, steps: int) -> None:
    """Require that all sequences have the same length, and that no unusual attribute is given."""
    if node.attribute("layout", 0):
        raise InvalidArgument("attribute layout is not supported")
    if node.attribute("clip", None) is not None:  # 0 would limit all sums to 0
        raise InvalidArgument("attribute clip is not supported")
    _require_shapes(node)
    if node.given(_SEQUENCE_LENGTHS) and set(node.constant(_SEQUENCE_LENGTHS, "lengths").reshape(-1)) != {steps}:
        raise InvalidArgument("sequences of different lengths are not supported")


def _require_shapes(node: Node) -> None:
    """Require that weights, biases and states fit the sequences, the directions and hidden_size."""
    (_, batch, elements), recurrent = node.value(0).shape, node.value(2).shape
    size, count = recurrent[-1], len(directions_of(node))
    rows = node.value(1).shape[1] if len(node.value(1).shape) > 1 else 0
    state = (count, batch, size)
    wanted = [(count, rows, elements), (count, rows, size), (count, 2 * rows), None, state, state, (count, 3 * size)]
    if node.attribute("hidden_size", size) != size:
        raise InvalidArgument(f"hidden_size is {node.attribute('hidden_size', 0)}: the weights have {size}")
    for position, shape in enumerate(wanted, 1):
        if shape is not None and node.given(position) and node.value(position).shape != shape:
            raise InvalidArgument(f"input {position} has the shape {node.value(position).shape}: it must be {shape}")


def _one_direction(node: Node, place: int, is_reversed: bool) -> tuple[int, ...]:
    """Return the operands of the outputs, (steps, batch, size), and of the last hidden and cell state."""
    x = node.operand(0)
    time = node.builder.int32_vector([0])
    if is_reversed:
        x = node.emit(Op.REVERSE, [x, time])
    kind = node.builder[x].type
    omitted = node.builder.omitted(kind)
    weights, recurrent = (node.constant(position, "weights")[place] for position in (1, 2))
    size, dtype = recurrent.shape[1], np.dtype(np.float32) if weights.dtype.kind in "iu" else weights.dtype
    biases = _biases(node, place, 4 * size, dtype)
    peepholes = [omitted] * 3
    if node.given(_PEEPHOLE):
        rows = node.constant(_PEEPHOLE, "peepholes")[place].reshape(3, size)
        peepholes = [node.add_constant(rows[row]) for row in _PEEPHOLES]
    arguments = [
        x,
        *_weight_gates(node, 1, place, size),
        *_weight_gates(node, 2, place, size),
        *peepholes,
        *_gates(node, biases, size),
        omitted,
        omitted,
        *(initial_state(node, position, place, size, dtype) for position in (_HIDDEN, _CELL)),
        node.builder.int32(_TANH),
        *(node.builder.float_scalar(kind, 0.0) for _ in range(2)),
        node.builder.boolean(True),
        *(omitted for _ in range(4)),
    ]
    output, hidden, cell = node.emit_many(_operation(node), arguments, [kind] * 3)
    return node.emit(Op.REVERSE, [output, time]) if is_reversed else output, hidden, cell


def _operation(node: Node) -> Op:
    """Return the HAL's operation, or the one that quantizes inputs and hidden states."""
    if node.operator == _DYNAMIC:
        return extended_code(Op.UNIDIRECTIONAL_SEQUENCE_LSTM, Scheme.DYNAMIC)
    return Op.UNIDIRECTIONAL_SEQUENCE_LSTM


def _weight_gates(node: Node, position: int, place: int, size: int) -> list[int]:
    """Return the four parts of a direction's weights; bytes have the scales and zero points of DynamicQuantizeLSTM."""
    stacked = node.constant(position, "weights")[place]
    if stacked.dtype.kind == "f":
        return _gates(node, stacked, size)
    found = _bytes(node, position, place, stacked)
    assert found is not None, "`_quantized_lstm` has made floats of others"
    return [found.part(gate * size, (gate + 1) * size).operand(node.builder) for gate in _GATES]


def _bytes(node: Node, position: int, place: int, stacked: Array) -> ByteWeights | None:
    """Return a direction's weights (channels, elements); None if no operand has such ones as bytes."""
    first = _QUANTIZATION + 2 * (position - 1)
    scale, zero_point = (node.constant(number, "quantization")[place] for number in (first, first + 1))
    return ByteWeights.of(stacked, np.asarray(scale), np.asarray(zero_point), 0)


def _gates(node: Node, stacked: Array, size: int) -> list[int]:
    """Return the four parts of weights or biases, as the HAL orders them."""
    return [node.add_constant(stacked[gate * size : (gate + 1) * size]) for gate in _GATES]


def _biases(node: Node, place: int, count: int, dtype: np.dtype[Any]) -> Array:
    """Return the sum of the biases of the input and of the recurrence; zeros if they are omitted."""
    if not node.given(3):
        return np.zeros(count, dtype)
    both = node.constant(3, "biases")[place]
    total: Array = both[:count] + both[count:]
    return total


def initial_state(node: Node, position: int, place: int, size: int, dtype: np.dtype[Any]) -> int:
    """Return the initial state of a direction, (batch, size)."""
    batch = node.value(0).shape[1]
    if not node.given(position):
        return node.add_constant(np.zeros((batch, size), dtype))
    value = node.value(position)
    if value.array is not None:
        return node.add_constant(np.ascontiguousarray(value.array[place]))
    state = node.operand(position)
    if value.shape[0] > 1:
        begin, extent = node.builder.int32_vector([place, 0, 0]), node.builder.int32_vector([1, batch, size])
        state = node.emit(Op.SLICE, [state, begin, extent])
    return node.reshaped(state, (batch, size))


def _quantized_lstm(node: Node) -> None:
    """Convert DynamicQuantizeLSTM with its weights as bytes; the operation quantizes inputs and hidden states."""
    stored = [np.ascontiguousarray(node.constant(place, "weights").transpose(0, 2, 1)) for place in (1, 2)]
    places = [(n, place) for n in (0, 1) for place in range(min(map(len, stored)))]
    found = [_bytes(node, 1 + n, place, stored[n][place]) for n, place in places]
    kinds = {None if each is None else each.kind for each in found}
    weights = (
        stored
        if len(kinds) == 1 and None not in kinds
        else [_real(node, 1 + n, array) for n, array in enumerate(stored)]
    )
    _lstm(replace(node, inputs=[node.inputs[0], *map(Value.of, weights), *node.inputs[3:]]))


def _real(node: Node, position: int, stored: Array) -> Array:
    """Return weights (directions, channels, elements) as floats."""
    first = _QUANTIZATION + 2 * (position - 1)
    scale, zero_point = (node.constant(number, "quantization") for number in (first, first + 1))
    along = (len(stored), -1, 1)
    real: Array = (stored.astype(np.float32) - zero_point.astype(np.float32).reshape(along)) * scale.reshape(along)
    return real


_RECURRENT_CONVERTERS: dict[str, Callable[[Node], None]] = {
    "LSTM": _lstm,
    _DYNAMIC: _quantized_lstm,
}


# ----------------------------------------------------------------------------------------------------------------------
# GRU and RNN, whose steps become operations of their own: the HAL has no GRU, and its RNN has one activation.
#
# The products with the inputs of all steps are one FULLY_CONNECTED; each step then has those with the last hidden
# state.


_MAX_STEPS = 512  # each step of a GRU is a dozen operations
_ACTIVATIONS = {"sigmoid": Op.LOGISTIC, "tanh": Op.TANH, "relu": Op.RELU}
_UNROLLED_HIDDEN = 5


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
        found.append(_unrolled_direction(cell, place, is_reversed, partial(step, cell, is_linear_first)))
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


def _unrolled_direction(cell: _Cell, place: int, is_reversed: bool, step: Callable[[int, int], int]) -> tuple[int, int]:
    """Return the outputs of all steps, (steps, batch, size), and the last hidden state."""
    node = cell.node
    steps, batch, elements = node.value(0).shape
    gates = cell.from_inputs(node.reshaped(node.operand(0), (steps * batch, elements)))
    hidden = initial_state(node, _UNROLLED_HIDDEN, place, cell.size, node.constant(1, "weights").dtype)
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


_UNROLLED_CONVERTERS: dict[str, Callable[[Node], Any]] = {"GRU": _gru, "RNN": _rnn}

CONVERTERS: dict[str, Callable[[Node], None]] = {**_RECURRENT_CONVERTERS, **_UNROLLED_CONVERTERS}
