"""Recurrent operators on floats: LSTM, RNN, SVDF and their sequence operators. Those on INT8 come first.

TFLite stores their states in variable tensors; the HAL takes the states as arguments and returns the new ones. Hidden
state and output of a step are one value in TFLite and two results in the HAL. Quantized weights of a float input
belong to operations of the extension, which quantize the rows that they are multiplied by.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.extensions import MAX_DYNAMIC_PRODUCTS, Scheme, TfliteOperation, extended_code, operation_code
from nnfmq.hal.operation_type import OperationType
from nnfmq.hal.types import OperandType
from nnfmq.importers.tflite.file import TfliteOperator, TfliteTensor
from nnfmq.importers.tflite.operators.conversion import (
    FLOAT_TYPES,
    PER_CHANNEL,
    QUANTIZED_TYPES,
    ConversionContext,
    OpConverter,
    State,
)

__all__ = ["CONVERTERS", "emit_integer_lstm", "emit_integer_svdf"]


# ----------------------------------------------------------------------------------------------------------------------
# Recurrent operators on INT8: LSTM, UNIDIRECTIONAL_SEQUENCE_LSTM and SVDF, as operations of the extension.
#
# The scales of the gates and of the hidden state are those of the operator's intermediate tensors, which have no
# values.


_INT8 = OperandType.TENSOR_QUANT8_ASYMM_SIGNED
_INT16, _INT32 = OperandType.TENSOR_QUANT16_SYMM, OperandType.TENSOR_INT32
_GATE_SCALE = 2.0**-12  # of a gate's sum without layer normalization
_TANH = 4
_WEIGHTS = (*[_INT8] * 8, *[_INT16] * 3, *[_INT32] * 4, _INT8, _INT32)  # and biases; the first input is not among them
_HIDDEN, _INTEGER_CELL, _INTEGER_NORMS = 18, 19, range(20, 24)
_INTERMEDIATES = 5


def emit_integer_lstm(context: ConversionContext, operator: TfliteOperator, *, time_major: bool = False) -> None:
    """Add one step of an LSTM, or a sequence of steps, whose input, weights and output are INT8."""
    options = operator.options
    if options.FusedActivationFunction() not in (0, _TANH):
        raise InvalidArgument(f"activation {options.FusedActivationFunction()} is not supported: the gates use TANH")
    if len(operator.intermediates) != _INTERMEDIATES:
        raise InvalidArgument(f"{len(operator.intermediates)} intermediate tensors: {_INTERMEDIATES} are needed")
    hidden, cell = (context.state(operator.inputs[position]) for position in (_HIDDEN, _INTEGER_CELL))
    weights = [context.optional(operator, 1 + index, kind) for index, kind in enumerate(_WEIGHTS)]
    norms = [context.optional(operator, position, _INT16) for position in _INTEGER_NORMS]
    *gates, of_hidden = operator.intermediates
    has_norms = len(operator.inputs) > _INTEGER_NORMS[0] and operator.inputs[_INTEGER_NORMS[1]] != -1
    gate_scales = [context.file.tensor(index).scale if has_norms else _GATE_SCALE for index in gates]
    arguments = [context.value(operator.inputs[0]), *weights, hidden.before, cell.before, *norms]
    arguments += [_real(context, clip) for clip in (options.CellClip(), options.ProjClip())]
    arguments += [context.builder.boolean(time_major), *[_real(context, scale) for scale in gate_scales]]
    hidden_info = context.file.tensor(of_hidden)
    arguments += [context.builder.int32(hidden_info.zero_point), _real(context, hidden_info.scale)]
    results = (context.result(operator.outputs[0]), hidden.after, cell.after)
    context.builder.operation(operation_code(TfliteOperation.INTEGER_LSTM), arguments, *results)


def _real(context: ConversionContext, value: float) -> int:
    return context.builder.float_scalar(OperandType.TENSOR_FLOAT32, float(value))


def emit_integer_svdf(context: ConversionContext, operator: TfliteOperator) -> None:
    """Add an SVDF whose input, feature weights and output are INT8."""
    x, features, times = map(context.value, operator.inputs[:3])
    bias, state = context.optional(operator, 3, _INT32), context.state(operator.inputs[4])
    rank = context.builder.int32(operator.options.Rank())
    results = (context.result(operator.outputs[0]), state.after)
    code = operation_code(TfliteOperation.INTEGER_SVDF)
    context.builder.operation(code, [x, features, times, bias, state.before, rank], *results)


# ----------------------------------------------------------------------------------------------------------------------
# Recurrent operators on floats: LSTM, RNN, SVDF and their sequence operators. Those on INT8 come first.


_MAX_ACTIVATION = 4  # NONE, RELU, RELU_N1_TO_1, RELU6 and TANH have the same codes in NNAPI
_CELL = 17  # weights and biases of one LSTM cell
_MATRICES = (*range(1, 9), 16)  # of an LSTM cell: weights of inputs and hidden states, and the projection
_AUX = 8  # weights of an auxiliary input of two cells
_NORMS = 4
_QUANTIZED_WEIGHTS = (*QUANTIZED_TYPES, PER_CHANNEL)


def _input(context: ConversionContext, operator: TfliteOperator) -> TfliteTensor:
    x = context.file.tensor(operator.inputs[0])
    if x.type not in FLOAT_TYPES:
        raise InvalidArgument(f"{x} is {x.type.name}: only recurrent operators of floats and INT8 are supported")
    return x


class _Matrices(Struct, frozen=True):
    """Positions of the matrices by which rows are multiplied, and the type of their operands.

    Constants of 8 bits stay bytes if all matrices have one type, and sums of their products fit 32 bits.
    """

    positions: frozenset[int]
    type: OperandType

    @classmethod
    def of(
        cls, context: ConversionContext, operator: TfliteOperator, x: TfliteTensor, positions: Iterable[int]
    ) -> _Matrices:
        found = frozenset(positions)
        indexes = [operator.inputs[position] for position in found if position < len(operator.inputs)]
        tensors = [context.file.tensor(index) for index in indexes if index != -1]
        types = {tensor.type for tensor in tensors}
        is_hybrid = x.type == OperandType.TENSOR_FLOAT32 and all(map(_is_multiplied_as_bytes, tensors))
        return cls(found, types.pop() if is_hybrid and len(types) == 1 else x.type)


def _is_multiplied_as_bytes(weights: TfliteTensor) -> bool:
    is_matrix = weights.data is not None and weights.type in _QUANTIZED_WEIGHTS and len(weights.shape) == 2
    has_units = weights.channel_quant is None or weights.channel_quant.channel_dim == 0
    return is_matrix and has_units and weights.shape[1] <= MAX_DYNAMIC_PRODUCTS


def _weights(
    context: ConversionContext, operator: TfliteOperator, x: TfliteTensor, positions: range, matrices: _Matrices
) -> list[int]:
    """Return weights and biases; validation checks which of them may be omitted."""
    operands = []
    for position in positions:
        index = operator.inputs[position] if position < len(operator.inputs) else -1
        kind = matrices.type if position in matrices.positions else x.type
        if index == -1:
            operands.append(context.builder.omitted(kind))
            continue
        tensor = context.file.tensor(index)
        is_real = tensor.data is not None and kind == OperandType.TENSOR_FLOAT32 != tensor.type
        operands.append(context.dequantized_constant(tensor) if is_real else context.value(index))
    return operands


def _activation(context: ConversionContext, operator: TfliteOperator) -> int:
    code = operator.options.FusedActivationFunction()
    if not 0 <= code <= _MAX_ACTIVATION:
        raise InvalidArgument(f"activation {code} is not supported")
    return context.builder.int32(code)


def _clips(context: ConversionContext, operator: TfliteOperator, x: TfliteTensor) -> list[int]:
    options = operator.options
    return [context.builder.float_scalar(x.type, float(clip)) for clip in (options.CellClip(), options.ProjClip())]


def _states(context: ConversionContext, operator: TfliteOperator, positions: range) -> list[State]:
    return [context.state(operator.inputs[position]) for position in positions]


def _hidden_shape(context: ConversionContext, state: State) -> tuple[int, ...]:
    return context.builder[state.before].dimensions


def _is_hybrid(context: ConversionContext, operator: TfliteOperator) -> bool:
    """Return whether the weights are quantized and the input is not; the second weights are those of every form."""
    index = operator.inputs[2]
    return index != -1 and context.file.tensor(index).type in _QUANTIZED_WEIGHTS


def _emit(
    context: ConversionContext, operator: TfliteOperator, code: OperationType, arguments: list[int], *results: int
) -> None:
    """Add an operation; if the weights are quantized, the one that quantizes its rows as TFLite does."""
    if _is_hybrid(context, operator):
        asymmetric = context.builder.boolean(bool(operator.options.AsymmetricQuantizeInputs()))
        code, arguments = extended_code(code, Scheme.HYBRID), [*arguments, asymmetric]
    context.builder.operation(code, arguments, *results)


def _rnn(context: ConversionContext, operator: TfliteOperator) -> None:
    x = _input(context, operator)
    weights = _weights(context, operator, x, range(1, 4), _Matrices.of(context, operator, x, (1, 2)))
    (hidden,) = _states(context, operator, range(4, 5))
    output = context.result(operator.outputs[0], _hidden_shape(context, hidden))
    arguments = [context.value(x.index), *weights, hidden.before, _activation(context, operator)]
    _emit(context, operator, OperationType.RNN, arguments, hidden.after, output)


def _sequence_rnn(context: ConversionContext, operator: TfliteOperator) -> None:
    x = _input(context, operator)
    weights = _weights(context, operator, x, range(1, 4), _Matrices.of(context, operator, x, (1, 2)))
    (hidden,) = _states(context, operator, range(4, 5))
    arguments = [context.value(x.index), *weights, hidden.before, _activation(context, operator)]
    arguments.append(context.builder.int32(int(operator.options.TimeMajor())))
    output = context.result(operator.outputs[0])
    _emit(context, operator, OperationType.UNIDIRECTIONAL_SEQUENCE_RNN, arguments, output, hidden.after)


def _bidirectional_rnn(context: ConversionContext, operator: TfliteOperator) -> None:
    x = _input(context, operator)
    arguments, states = [context.value(x.index)], []
    matrices = _Matrices.of(context, operator, x, (1, 2, 5, 6, 10, 11))
    for first in (1, 5):
        (hidden,) = _states(context, operator, range(first + 3, first + 4))
        arguments += [*_weights(context, operator, x, range(first, first + 3), matrices), hidden.before]
        states.append(hidden.after)
    arguments += [*_weights(context, operator, x, range(9, 12), matrices), _activation(context, operator)]
    _emit_bidirectional(
        context, operator, OperationType.BIDIRECTIONAL_SEQUENCE_RNN, arguments, states, time_major_first=True
    )


def _emit_bidirectional(
    context: ConversionContext,
    operator: TfliteOperator,
    operation_type: OperationType,
    arguments: list[int],
    states: list[int],
    *,
    time_major_first: bool,
    trailing: list[int] | None = None,
) -> None:
    """Add an operation in two directions, whose outputs are merged or not."""
    flags = [bool(operator.options.MergeOutputs()), bool(operator.options.TimeMajor())]
    count = 1 if flags[0] else 2
    if len(operator.outputs) != count:
        raise InvalidArgument(f"{len(operator.outputs)} outputs: {count} are needed")
    ordered = [context.builder.boolean(flag) for flag in (reversed(flags) if time_major_first else flags)]
    outputs = [context.result(index) for index in operator.outputs]
    _emit(context, operator, operation_type, arguments + ordered + (trailing or []), *outputs, *states)


def _is_integer(context: ConversionContext, operator: TfliteOperator) -> bool:
    return context.file.tensor(operator.inputs[0]).type == OperandType.TENSOR_QUANT8_ASYMM_SIGNED


def _svdf(context: ConversionContext, operator: TfliteOperator) -> None:
    if _is_integer(context, operator):
        return emit_integer_svdf(context, operator)
    x = _input(context, operator)
    weights = _weights(context, operator, x, range(1, 4), _Matrices.of(context, operator, x, (1,)))
    (state,) = _states(context, operator, range(4, 5))
    arguments = [context.value(x.index), *weights, state.before, context.builder.int32(operator.options.Rank())]
    arguments.append(_activation(context, operator))
    output = context.result(operator.outputs[0])
    return _emit(context, operator, OperationType.SVDF, arguments, state.after, output)


def _lstm_arguments(
    context: ConversionContext, operator: TfliteOperator
) -> tuple[TfliteTensor, list[int], State, State]:
    """Return the input, the arguments from it to the clips, and the hidden and the cell state."""
    x = _input(context, operator)
    weights = _weights(context, operator, x, range(1, 1 + _CELL), _Matrices.of(context, operator, x, _MATRICES))
    hidden, cell = _states(context, operator, range(1 + _CELL, 3 + _CELL))
    arguments = [context.value(x.index), *weights, hidden.before, cell.before, _activation(context, operator)]
    return x, arguments + _clips(context, operator, x), hidden, cell


def _norms(context: ConversionContext, operator: TfliteOperator, x: TfliteTensor) -> list[int]:
    return _weights(context, operator, x, range(3 + _CELL, 3 + _CELL + _NORMS), _Matrices.of(context, operator, x, ()))


def _lstm(context: ConversionContext, operator: TfliteOperator) -> None:
    if operator.options.KernelType():
        raise InvalidArgument("the basic kernel (weights of all gates in one tensor) is not supported")
    if _is_integer(context, operator):
        return emit_integer_lstm(context, operator)
    x, arguments, hidden, cell = _lstm_arguments(context, operator)
    has_norms = any(index != -1 for index in operator.inputs[3 + _CELL :])
    arguments += _norms(context, operator, x) if has_norms or _is_hybrid(context, operator) else []
    batch, cells = _hidden_shape(context, cell) if len(_hidden_shape(context, cell)) == 2 else (0, 0)
    gates = 3 if operator.inputs[1] == -1 else 4
    scratch = context.temporary(x, (batch, gates * cells))
    output = context.result(operator.outputs[0], _hidden_shape(context, hidden))
    return _emit(context, operator, OperationType.LSTM, arguments, scratch, hidden.after, cell.after, output)


def _sequence_lstm(context: ConversionContext, operator: TfliteOperator) -> None:
    if operator.options.DiagonalRecurrentTensors():
        raise InvalidArgument("diagonal recurrent weights are not supported: NNAPI has none")
    if _is_integer(context, operator):
        return emit_integer_lstm(context, operator, time_major=bool(operator.options.TimeMajor()))
    x, arguments, hidden, cell = _lstm_arguments(context, operator)
    arguments += [context.builder.boolean(bool(operator.options.TimeMajor())), *_norms(context, operator, x)]
    output = context.result(operator.outputs[0])
    code = OperationType.UNIDIRECTIONAL_SEQUENCE_LSTM
    return _emit(context, operator, code, arguments, output, hidden.after, cell.after)


def _bidirectional_lstm(context: ConversionContext, operator: TfliteOperator) -> None:
    x = _input(context, operator)
    first_state = 1 + 2 * _CELL
    states = _states(context, operator, range(first_state, first_state + 4))
    aux = range(first_state + 4, first_state + 4 + 1 + _AUX)
    positions = (*_MATRICES, *(_CELL + position for position in _MATRICES), *aux[1:])
    matrices = _Matrices.of(context, operator, x, positions)
    arguments = [context.value(x.index), *_weights(context, operator, x, range(1, first_state), matrices)]
    arguments += [state.before for state in states]
    arguments += _weights(context, operator, x, aux, matrices)
    arguments += [_activation(context, operator), *_clips(context, operator, x)]
    trailing = [context.builder.omitted(x.type) for _ in range(2 * _NORMS)]
    after = [state.after for state in states]
    code = OperationType.BIDIRECTIONAL_SEQUENCE_LSTM
    _emit_bidirectional(context, operator, code, arguments, after, time_major_first=False, trailing=trailing)


_FIVE = range(5, 6)
_LSTM_INPUTS = range(20, 25, 4)  # with and without layer normalization
_ONE_OR_TWO = range(1, 3)

CONVERTERS: dict[str, OpConverter] = {
    "BIDIRECTIONAL_SEQUENCE_LSTM": OpConverter(
        range(48, 49), _bidirectional_lstm, "BidirectionalSequenceLSTMOptions", True, _ONE_OR_TWO
    ),
    "BIDIRECTIONAL_SEQUENCE_RNN": OpConverter(
        range(12, 13), _bidirectional_rnn, "BidirectionalSequenceRNNOptions", True, _ONE_OR_TWO
    ),
    "LSTM": OpConverter(_LSTM_INPUTS, _lstm, "LSTMOptions", True),
    "RNN": OpConverter(_FIVE, _rnn, "RNNOptions", True),
    "SVDF": OpConverter(_FIVE, _svdf, "SVDFOptions", True),
    "UNIDIRECTIONAL_SEQUENCE_LSTM": OpConverter(
        _LSTM_INPUTS, _sequence_lstm, "UnidirectionalSequenceLSTMOptions", True
    ),
    "UNIDIRECTIONAL_SEQUENCE_RNN": OpConverter(_FIVE, _sequence_rnn, "SequenceRNNOptions", True),
}
