"""Elementwise operators: arithmetic, activations, comparisons, logic, selection, and changes of the element type.

What NNAPI lacks and others of its operations express exactly is written with those: SQUARE, CEIL, LEAKY_RELU …
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType
from nnfmq.hal.types import LifeTime, Operand, OperandType
from nnfmq.importers.tflite_file import Operator, Tensor
from nnfmq.importers.tflite_operators.conversion import CODES, FLOATS, Rule, Translation
from nnfmq.importers.tflite_operators.data_movement_ops import broadcast
from nnfmq.importers.tflite_operators.options import (
    activation,
    as_they_are,
    emit_reals,
    keeping_codes,
    no_activation,
    reals,
)

__all__ = ["RULES"]

Apply: TypeAlias = Callable[[Translation, Operator], None]
_LAST_AXIS = -1


def _of_reals(operation_type: OperationType) -> Apply:
    """Operations of floats: codes become the real numbers that they stand for, and the results codes again."""

    def apply(graph: Translation, operator: Operator) -> None:
        emit_reals(graph, operator, operation_type, *[reals(graph, index) for index in operator.inputs])

    return apply


def _between(graph: Translation, operator: Operator) -> int:
    """Return an operand for an intermediate result, of real numbers where the output has codes."""
    y = graph.file.tensor(operator.outputs[0])
    kind = OperandType.TENSOR_FLOAT32 if y.type in CODES else y.type
    return graph.builder.operand(Operand(kind, y.shape))


def _clipped(operation_type: OperationType) -> Apply:
    def apply(graph: Translation, operator: Operator) -> None:
        keeping_codes(graph, operator, operation_type)

    return apply


def _fused(operation_type: OperationType) -> Apply:
    """Operations of two inputs and an activation."""

    def apply(graph: Translation, operator: Operator) -> None:
        a, b = map(graph.value, operator.inputs)
        graph.emit(operation_type, operator, a, b, activation(graph, operator))

    return apply


def _ceil(graph: Translation, operator: Operator) -> None:
    value = graph.value(operator.inputs[0])
    for step in (OperationType.NEG, OperationType.FLOOR):
        between = _between(graph, operator)
        graph.builder.operation(step, [value], between)
        value = between
    graph.emit(OperationType.NEG, operator, value)


def _square(graph: Translation, operator: Operator) -> None:
    x = reals(graph, operator.inputs[0])
    emit_reals(graph, operator, OperationType.MUL, x, x, graph.builder.int32(0))


def _squared_difference(graph: Translation, operator: Operator) -> None:
    none, difference = graph.builder.int32(0), _between(graph, operator)
    terms = [reals(graph, index) for index in operator.inputs]
    graph.builder.operation(OperationType.SUB, [*terms, none], difference)
    emit_reals(graph, operator, OperationType.MUL, difference, difference, none)


def _div(graph: Translation, operator: Operator) -> None:
    if graph.file.tensor(operator.inputs[0]).type == OperandType.TENSOR_INT32:
        raise InvalidArgument("a quotient of integers is not supported: NNAPI rounds it down, TFLite towards zero")
    factors = [reals(graph, index) for index in operator.inputs]
    emit_reals(graph, operator, OperationType.DIV, *factors, activation(graph, operator))


def _floor_div(graph: Translation, operator: Operator) -> None:
    factors = [*map(graph.value, operator.inputs), graph.builder.int32(0)]
    if graph.file.tensor(operator.inputs[0]).type == OperandType.TENSOR_INT32:
        return graph.emit(OperationType.DIV, operator, *factors)
    quotient = _between(graph, operator)
    graph.builder.operation(OperationType.DIV, factors, quotient)
    return graph.emit(OperationType.FLOOR, operator, quotient)


def _add_n(graph: Translation, operator: Operator) -> None:
    none = graph.builder.int32(0)
    total, *middle, last = map(graph.value, operator.inputs)
    for value in middle:
        following = _between(graph, operator)
        graph.builder.operation(OperationType.ADD, [total, value, none], following)
        total = following
    graph.emit(OperationType.ADD, operator, total, last, none)


def _leaky_relu(graph: Translation, operator: Operator) -> None:
    """Write it as PRELU with one slope; of codes it is one step from the zero point, as large as the slope."""
    x, slope = graph.file.tensor(operator.inputs[0]), float(operator.options.Alpha())
    if not math.isfinite(slope):
        raise InvalidArgument(f"the slope is {slope}: it must be a finite number")
    alpha = _one_float(graph, x, slope) if x.type in FLOATS else _one_code(graph, x, slope)
    graph.emit(OperationType.PRELU, operator, graph.value(x.index), alpha)


def _one_float(graph: Translation, x: Tensor, value: float) -> int:
    scalar = graph.builder[graph.builder.float_scalar(x.type, value)]
    return graph.builder.operand(Operand(x.type, (1,), lifetime=LifeTime.CONSTANT_COPY, location=scalar.location))


def _one_code(graph: Translation, x: Tensor, value: float) -> int:
    zero_point = 1 if value < 0 else 0
    location = graph.builder.constant(bytes([1 - zero_point if value else 0]))
    scale = abs(value) or 1.0
    return graph.builder.operand(Operand(x.type, (1,), scale, zero_point, LifeTime.CONSTANT_COPY, location))


def _elu(graph: Translation, operator: Operator) -> None:
    x = reals(graph, operator.inputs[0])
    alpha = graph.builder.float_scalar(graph.builder[x].type, 1.0)
    emit_reals(graph, operator, OperationType.ELU, x, alpha)


def _softmax(graph: Translation, operator: Operator) -> None:
    x, beta = graph.value(operator.inputs[0]), operator.options.Beta()
    if not (math.isfinite(beta) and beta > 0):
        raise InvalidArgument(f"beta is {beta}: it must be a positive number")
    graph.emit(OperationType.SOFTMAX, operator, x, graph.builder.float_scalar(graph.builder[x].type, beta))


def _log_softmax(graph: Translation, operator: Operator) -> None:
    x = reals(graph, operator.inputs[0])
    beta = graph.builder.float_scalar(graph.builder[x].type, 1.0)
    emit_reals(graph, operator, OperationType.LOG_SOFTMAX, x, beta, graph.builder.int32(_LAST_AXIS))


def _l2_normalization(graph: Translation, operator: Operator) -> None:
    no_activation(operator)
    graph.emit(OperationType.L2_NORMALIZATION, operator, graph.value(operator.inputs[0]))


def _local_response_normalization(graph: Translation, operator: Operator) -> None:
    x, options = graph.value(operator.inputs[0]), operator.options
    kind = graph.builder[x].type
    scalars = [graph.builder.float_scalar(kind, value) for value in (options.Bias(), options.Alpha(), options.Beta())]
    radius = graph.builder.int32(options.Radius())
    graph.emit(OperationType.LOCAL_RESPONSE_NORMALIZATION, operator, x, radius, *scalars)


def _select(graph: Translation, operator: Operator) -> None:
    condition, *choices = operator.inputs
    y = graph.file.tensor(operator.outputs[0])
    if y.shape and graph.file.tensor(condition).shape != y.shape:
        raise InvalidArgument(
            f"{graph.file.tensor(condition)} has another shape than {y}: NNAPI's SELECT has one shape"
        )
    values = [broadcast(graph, index, y.shape) if y.shape else graph.value(index) for index in choices]
    graph.emit(OperationType.SELECT, operator, graph.value(condition), *values)


def _quantize(graph: Translation, operator: Operator) -> None:
    """Quantize floats; other codes by way of the real numbers that they stand for."""
    graph.emit(OperationType.QUANTIZE, operator, reals(graph, operator.inputs[0]))


def _dequantize(graph: Translation, operator: Operator) -> None:
    """Constants become floats here and now: compressed weights are kept so in files. Halves are widened by CAST."""
    x, y = graph.file.tensor(operator.inputs[0]), graph.file.tensor(operator.outputs[0])
    is_wide = y.type == OperandType.TENSOR_FLOAT32
    if x.data is not None and is_wide and not graph.is_model_output(y.index):
        return graph.name(y.index, graph.widened(x))
    widens = x.type in FLOATS
    return graph.emit(OperationType.CAST if widens else OperationType.DEQUANTIZE, operator, graph.value(x.index))


_ONE, _TWO, _THREE = range(1, 2), range(2, 3), range(3, 4)
_MANY = range(2, 1 << 16)
_UNARY = ("CAST", "HARD_SWISH", "LOGICAL_NOT", "LOGISTIC", "RSQRT", "TANH")
_UNARY_OF_REALS = ("ABS", "EXP", "FLOOR", "LOG", "NEG", "SIN", "SQRT")
_BINARY = (
    "EQUAL", "GREATER", "GREATER_EQUAL", "LESS", "LESS_EQUAL", "LOGICAL_AND", "LOGICAL_OR", "MAXIMUM", "MINIMUM",
    "NOT_EQUAL", "POW", "PRELU",
)  # fmt: skip

RULES: dict[str, Rule] = {
    **{name: Rule(_ONE, as_they_are(OperationType[name])) for name in _UNARY},
    **{name: Rule(_ONE, _of_reals(OperationType[name])) for name in _UNARY_OF_REALS},
    **{name: Rule(_TWO, as_they_are(OperationType[name])) for name in _BINARY},
    **{name: Rule(_TWO, _fused(OperationType[name]), f"{name.title()}Options") for name in ("ADD", "MUL", "SUB")},
    "ADD_N": Rule(_MANY, _add_n),
    "CEIL": Rule(_ONE, _ceil),
    "DEQUANTIZE": Rule(_ONE, _dequantize),
    "DIV": Rule(_TWO, _div, "DivOptions"),
    "ELU": Rule(_ONE, _elu),
    "FLOOR_DIV": Rule(_TWO, _floor_div),
    "L2_NORMALIZATION": Rule(_ONE, _l2_normalization, "L2NormOptions"),
    "LEAKY_RELU": Rule(_ONE, _leaky_relu, "LeakyReluOptions", True),
    "LOCAL_RESPONSE_NORMALIZATION": Rule(
        _ONE, _local_response_normalization, "LocalResponseNormalizationOptions", True
    ),
    "LOG_SOFTMAX": Rule(_ONE, _log_softmax),
    "QUANTIZE": Rule(_ONE, _quantize),
    "RELU": Rule(_ONE, _clipped(OperationType.RELU)),
    "RELU6": Rule(_ONE, _clipped(OperationType.RELU6)),
    "RELU_N1_TO_1": Rule(_ONE, _clipped(OperationType.RELU1)),
    "SELECT": Rule(_THREE, _select),
    "SELECT_V2": Rule(_THREE, _select),
    "SOFTMAX": Rule(_ONE, _softmax, "SoftmaxOptions", True),
    "SQUARE": Rule(_ONE, _square),
    "SQUARED_DIFFERENCE": Rule(_TWO, _squared_difference),
}
