"""Recurrent operators, all of floats: LSTM, RNN, SVDF, and those over sequences.

TFLite keeps their states in variable tensors; NNAPI takes the states as arguments and gives the new ones as results.
Hidden state and output of a step are one value in TFLite and two results here. Weights of codes for a float input
become the real numbers that they stand for, as in `weighted_ops`.
"""

from __future__ import annotations

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType
from nnfmq.hal.types import OperandType
from nnfmq.importers.tflite_file import Operator, Tensor
from nnfmq.importers.tflite_operators.conversion import FLOATS, Rule, State, Translation

__all__ = ["RULES"]

_MOST_ACTIVATIONS = 4  # NONE, RELU, RELU_N1_TO_1, RELU6 and TANH have the same codes in NNAPI
_CELL = 17  # weights and biases of one LSTM cell
_AUX = 8  # weights of an auxiliary input of two cells
_NORMS = 4


def _input(graph: Translation, operator: Operator) -> Tensor:
    x = graph.file.tensor(operator.inputs[0])
    if x.type not in FLOATS:
        raise InvalidArgument(f"{x} is {x.type.name}: only recurrent operators of floats are supported")
    return x


def _weights(graph: Translation, operator: Operator, x: Tensor, positions: range) -> list[int]:
    """Return weights and biases; which of them may be omitted is validation's business."""
    return [_weight(graph, operator, x, position) for position in positions]


def _weight(graph: Translation, operator: Operator, x: Tensor, position: int) -> int:
    index = operator.inputs[position] if position < len(operator.inputs) else -1
    if index == -1:
        return graph.builder.omitted(x.type)
    tensor = graph.file.tensor(index)
    is_hybrid = tensor.data is not None and x.type == OperandType.TENSOR_FLOAT32 != tensor.type
    return graph.widened(tensor) if is_hybrid else graph.value(index)


def _activation(graph: Translation, operator: Operator) -> int:
    code = operator.options.FusedActivationFunction()
    if not 0 <= code <= _MOST_ACTIVATIONS:
        raise InvalidArgument(f"activation {code} is not supported")
    return graph.builder.int32(code)


def _clips(graph: Translation, operator: Operator, x: Tensor) -> list[int]:
    options = operator.options
    return [graph.builder.float_scalar(x.type, float(clip)) for clip in (options.CellClip(), options.ProjClip())]


def _states(graph: Translation, operator: Operator, positions: range) -> list[State]:
    return [graph.state(operator.inputs[position]) for position in positions]


def _hidden_shape(graph: Translation, state: State) -> tuple[int, ...]:
    return graph.builder[state.before].dimensions


def _rnn(graph: Translation, operator: Operator) -> None:
    x = _input(graph, operator)
    weights = _weights(graph, operator, x, range(1, 4))
    (hidden,) = _states(graph, operator, range(4, 5))
    output = graph.result(operator.outputs[0], _hidden_shape(graph, hidden))
    arguments = [graph.value(x.index), *weights, hidden.before, _activation(graph, operator)]
    graph.builder.operation(OperationType.RNN, arguments, hidden.after, output)


def _sequence_rnn(graph: Translation, operator: Operator) -> None:
    x = _input(graph, operator)
    weights = _weights(graph, operator, x, range(1, 4))
    (hidden,) = _states(graph, operator, range(4, 5))
    arguments = [graph.value(x.index), *weights, hidden.before, _activation(graph, operator)]
    arguments.append(graph.builder.int32(int(operator.options.TimeMajor())))
    output = graph.result(operator.outputs[0])
    graph.builder.operation(OperationType.UNIDIRECTIONAL_SEQUENCE_RNN, arguments, output, hidden.after)


def _both_rnns(graph: Translation, operator: Operator) -> None:
    x = _input(graph, operator)
    arguments, states = [graph.value(x.index)], []
    for first in (1, 5):
        (hidden,) = _states(graph, operator, range(first + 3, first + 4))
        arguments += [*_weights(graph, operator, x, range(first, first + 3)), hidden.before]
        states.append(hidden.after)
    arguments += [*_weights(graph, operator, x, range(9, 12)), _activation(graph, operator)]
    _both(graph, operator, OperationType.BIDIRECTIONAL_SEQUENCE_RNN, arguments, states, time_major_first=True)


def _both(
    graph: Translation,
    operator: Operator,
    operation_type: OperationType,
    arguments: list[int],
    states: list[int],
    *,
    time_major_first: bool,
    behind: list[int] | None = None,
) -> None:
    """Add an operation in two directions, whose outputs are merged or not."""
    flags = [bool(operator.options.MergeOutputs()), bool(operator.options.TimeMajor())]
    count = 1 if flags[0] else 2
    if len(operator.outputs) != count:
        raise InvalidArgument(f"{len(operator.outputs)} outputs: {count} are needed")
    ordered = [graph.builder.boolean(flag) for flag in (reversed(flags) if time_major_first else flags)]
    outputs = [graph.result(index) for index in operator.outputs]
    graph.builder.operation(operation_type, arguments + ordered + (behind or []), *outputs, *states)


def _svdf(graph: Translation, operator: Operator) -> None:
    x = _input(graph, operator)
    weights = _weights(graph, operator, x, range(1, 4))
    (state,) = _states(graph, operator, range(4, 5))
    arguments = [graph.value(x.index), *weights, state.before, graph.builder.int32(operator.options.Rank())]
    output = graph.result(operator.outputs[0])
    graph.builder.operation(OperationType.SVDF, [*arguments, _activation(graph, operator)], state.after, output)


def _cell_arguments(graph: Translation, operator: Operator) -> tuple[Tensor, list[int], State, State]:
    """Return the input, the arguments from it to the clips, and the hidden and the cell state."""
    x = _input(graph, operator)
    weights = _weights(graph, operator, x, range(1, 1 + _CELL))
    hidden, cell = _states(graph, operator, range(1 + _CELL, 3 + _CELL))
    arguments = [graph.value(x.index), *weights, hidden.before, cell.before, _activation(graph, operator)]
    return x, arguments + _clips(graph, operator, x), hidden, cell


def _norms(graph: Translation, operator: Operator, x: Tensor) -> list[int]:
    return _weights(graph, operator, x, range(3 + _CELL, 3 + _CELL + _NORMS))


def _lstm(graph: Translation, operator: Operator) -> None:
    if operator.options.KernelType():
        raise InvalidArgument("the basic kernel (weights of all gates in one tensor) is not supported")
    x, arguments, hidden, cell = _cell_arguments(graph, operator)
    has_norms = any(index != -1 for index in operator.inputs[3 + _CELL :])
    arguments += _norms(graph, operator, x) if has_norms else []
    batch, cells = _hidden_shape(graph, cell) if len(_hidden_shape(graph, cell)) == 2 else (0, 0)
    gates = 3 if operator.inputs[1] == -1 else 4
    scratch = graph.temporary(x, (batch, gates * cells))
    output = graph.result(operator.outputs[0], _hidden_shape(graph, hidden))
    graph.builder.operation(OperationType.LSTM, arguments, scratch, hidden.after, cell.after, output)


def _sequence_lstm(graph: Translation, operator: Operator) -> None:
    if operator.options.DiagonalRecurrentTensors():
        raise InvalidArgument("diagonal recurrent weights are not supported: NNAPI has none")
    x, arguments, hidden, cell = _cell_arguments(graph, operator)
    arguments += [graph.builder.boolean(bool(operator.options.TimeMajor())), *_norms(graph, operator, x)]
    output = graph.result(operator.outputs[0])
    code = OperationType.UNIDIRECTIONAL_SEQUENCE_LSTM
    graph.builder.operation(code, arguments, output, hidden.after, cell.after)


def _both_lstms(graph: Translation, operator: Operator) -> None:
    x = _input(graph, operator)
    first_state = 1 + 2 * _CELL
    states = _states(graph, operator, range(first_state, first_state + 4))
    arguments = [graph.value(x.index), *_weights(graph, operator, x, range(1, first_state))]
    arguments += [state.before for state in states]
    arguments += _weights(graph, operator, x, range(first_state + 4, first_state + 4 + 1 + _AUX))
    arguments += [_activation(graph, operator), *_clips(graph, operator, x)]
    behind = [graph.builder.omitted(x.type) for _ in range(2 * _NORMS)]
    after = [state.after for state in states]
    code = OperationType.BIDIRECTIONAL_SEQUENCE_LSTM
    _both(graph, operator, code, arguments, after, time_major_first=False, behind=behind)


_FIVE = range(5, 6)
_LSTM_INPUTS = range(20, 25, 4)  # with and without layer normalization
_ONE_OR_TWO = range(1, 3)

RULES: dict[str, Rule] = {
    "BIDIRECTIONAL_SEQUENCE_LSTM": Rule(
        range(48, 49), _both_lstms, "BidirectionalSequenceLSTMOptions", True, _ONE_OR_TWO
    ),
    "BIDIRECTIONAL_SEQUENCE_RNN": Rule(range(12, 13), _both_rnns, "BidirectionalSequenceRNNOptions", True, _ONE_OR_TWO),
    "LSTM": Rule(_LSTM_INPUTS, _lstm, "LSTMOptions", True),
    "RNN": Rule(_FIVE, _rnn, "RNNOptions", True),
    "SVDF": Rule(_FIVE, _svdf, "SVDFOptions", True),
    "UNIDIRECTIONAL_SEQUENCE_LSTM": Rule(_LSTM_INPUTS, _sequence_lstm, "UnidirectionalSequenceLSTMOptions", True),
    "UNIDIRECTIONAL_SEQUENCE_RNN": Rule(_FIVE, _sequence_rnn, "SequenceRNNOptions", True),
}
