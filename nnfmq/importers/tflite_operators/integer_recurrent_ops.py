"""Recurrent operators on INT8: LSTM, UNIDIRECTIONAL_SEQUENCE_LSTM and SVDF, as operations of the extension.

The scales of the gates and of the hidden state are those of the operator's intermediate tensors, which have no values.
"""

from __future__ import annotations

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.tflite_codes import TfliteOperation, operation_code
from nnfmq.hal.types import OperandType
from nnfmq.importers.tflite_file import TfliteOperator
from nnfmq.importers.tflite_operators.conversion import ConversionContext

__all__ = ["emit_integer_lstm", "emit_integer_svdf"]

_INT8 = OperandType.TENSOR_QUANT8_ASYMM_SIGNED
_INT16, _INT32 = OperandType.TENSOR_QUANT16_SYMM, OperandType.TENSOR_INT32
_GATE_SCALE = 2.0**-12  # of a gate's sum without layer normalization
_TANH = 4
_WEIGHTS = (*[_INT8] * 8, *[_INT16] * 3, *[_INT32] * 4, _INT8, _INT32)  # and biases; the first input is not among them
_HIDDEN, _CELL, _NORMS = 18, 19, range(20, 24)
_INTERMEDIATES = 5


def emit_integer_lstm(context: ConversionContext, operator: TfliteOperator, *, time_major: bool = False) -> None:
    """Add one step of an LSTM, or a sequence of steps, whose input, weights and output are INT8."""
    options = operator.options
    if options.FusedActivationFunction() not in (0, _TANH):
        raise InvalidArgument(f"activation {options.FusedActivationFunction()} is not supported: the gates use TANH")
    if len(operator.intermediates) != _INTERMEDIATES:
        raise InvalidArgument(f"{len(operator.intermediates)} intermediate tensors: {_INTERMEDIATES} are needed")
    hidden, cell = (context.state(operator.inputs[position]) for position in (_HIDDEN, _CELL))
    weights = [context.optional(operator, 1 + index, kind) for index, kind in enumerate(_WEIGHTS)]
    norms = [context.optional(operator, position, _INT16) for position in _NORMS]
    *gates, of_hidden = operator.intermediates
    has_norms = len(operator.inputs) > _NORMS[0] and operator.inputs[_NORMS[1]] != -1
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
