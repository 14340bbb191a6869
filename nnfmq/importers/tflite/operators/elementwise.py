"""Elementwise operators: arithmetic, activations, comparisons, logic, selection, type conversion; also normalization.

Operators that the HAL does not have are composed of operations that express them exactly: SQUARE, CEIL, LEAKY_RELU ...
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.extensions import (
    TENSOR_COMPLEX64,
    TENSOR_FLOAT64,
    TENSOR_INT64,
    Scheme,
    TfliteOperation,
    extended_code,
    operation_code,
)
from nnfmq.hal.operation_type import OperationType
from nnfmq.hal.types import CLAMPS, LifeTime, Operand, OperandType
from nnfmq.importers.tflite.file import TfliteOperator, TfliteTensor
from nnfmq.importers.tflite.operators.conversion import (
    FLOAT_TYPES,
    INTEGERS,
    QUANTIZED_TYPES,
    SIXTEEN_BITS,
    ConversionContext,
    OpConverter,
)
from nnfmq.importers.tflite.operators.movement import broadcast
from nnfmq.importers.tflite.operators.options import (
    activation,
    are_quantized,
    dequantized,
    emit_clamp,
    emit_dequantized,
    emit_integers,
    have_one_quantization,
    no_activation,
    own_definition,
    own_definition_of_int8,
    passthrough,
)

__all__ = ["CONVERTERS", "of_inputs"]

Apply: TypeAlias = Callable[[ConversionContext, TfliteOperator], None]
_LAST_AXIS = -1
_LOG_SOFTMAX_ZERO_POINTS = {OperandType.TENSOR_QUANT8_ASYMM: 255, OperandType.TENSOR_QUANT8_ASYMM_SIGNED: 127}
_MAX_LOG_SOFTMAX_SIZE = 1 << 12


def _dequantizing(operation_type: OperationType) -> Apply:
    """Return the converter of an operation on floats: quantized inputs are dequantized, the result is quantized."""

    def convert(context: ConversionContext, operator: TfliteOperator) -> None:
        emit_dequantized(context, operator, operation_type, *[dequantized(context, index) for index in operator.inputs])

    return convert


def _intermediate(context: ConversionContext, operator: TfliteOperator) -> int:
    """Return an operand for an intermediate result; FLOAT32 if the output is quantized."""
    y = context.file.tensor(operator.outputs[0])
    kind = OperandType.TENSOR_FLOAT32 if y.type in QUANTIZED_TYPES else y.type
    return context.builder.operand(Operand(kind, y.shape))


def _eight_bit_or(code: OperationType, other: Apply) -> Apply:
    """Return the converter of TFLite's operation on 8-bit tensors, and of `other` for all other types."""

    def convert(context: ConversionContext, operator: TfliteOperator) -> None:
        if not are_quantized(context, *operator.inputs, *operator.outputs):
            return other(context, operator)
        return context.emit(code, operator, *map(context.value, operator.inputs))

    return convert


def _tflite(operation_type: OperationType) -> OperationType:
    return extended_code(operation_type, Scheme.TFLITE)


def _choice(operation_type: OperationType) -> Apply:
    """Return the converter of MAXIMUM or MINIMUM; TFLite's ignores scales and zero points."""

    def convert(context: ConversionContext, operator: TfliteOperator) -> None:
        code = _choice_code(context, operation_type, *operator.inputs, *operator.outputs)
        context.emit(code, operator, *map(context.value, operator.inputs))

    return convert


def _choice_code(context: ConversionContext, operation_type: OperationType, *tensors: int) -> OperationType:
    if have_one_quantization(context, *tensors):
        return operation_type
    return own_definition(context, operation_type, *tensors)


def _comparison(operation_type: OperationType) -> Apply:
    """Return the converter of a comparison; TFLite's is in fixed point, and requires scales below 1."""

    def convert(context: ConversionContext, operator: TfliteOperator) -> None:
        is_below_one = all(context.file.tensor(index).scale < 1 for index in operator.inputs)
        code = own_definition(context, operation_type, *operator.inputs) if is_below_one else operation_type
        context.emit(code, operator, *map(context.value, operator.inputs))

    return convert


def _neg(context: ConversionContext, operator: TfliteOperator) -> None:
    """Convert to TFLite's NEG of stored values where that is the negative of the real ones."""
    tensors = [context.file.tensor(index) for index in (*operator.inputs, *operator.outputs)]
    symmetric = {(tensor.type, tensor.scale, tensor.zero_point) for tensor in tensors}
    if len(symmetric) == 1 and tensors[0].type in QUANTIZED_TYPES and tensors[0].zero_point == 0:
        return context.emit(_tflite(OperationType.NEG), operator, context.value(operator.inputs[0]))
    return _dequantizing(OperationType.NEG)(context, operator)


def _clamp(operation_type: OperationType) -> Apply:
    def convert(context: ConversionContext, operator: TfliteOperator) -> None:
        x, y = context.file.tensor(operator.inputs[0]), context.file.tensor(operator.outputs[0])
        differ = (x.scale, x.zero_point) != (y.scale, y.zero_point)
        if differ and are_quantized(context, x.index, y.index):
            return emit_clamp(context, operator, *CLAMPS[operation_type].bounds)
        return context.emit(operation_type, operator, context.value(x.index))

    return convert


def _with_activation(operation_type: OperationType) -> Apply:
    """Return the converter of an operation with two inputs and an activation."""

    def convert(context: ConversionContext, operator: TfliteOperator) -> None:
        a, b = map(context.value, operator.inputs)
        if context.file.tensor(operator.outputs[0]).type in INTEGERS:
            return emit_integers(context, operator, operation_type, a, b, context.builder.int32(0))
        arguments = [a, b, activation(context, operator)]
        options = operator.options
        if context.builder[a].type == SIXTEEN_BITS and operation_type != OperationType.MUL:
            arguments.append(context.builder.boolean(options is None or bool(options.PotScaleInt16())))
        return context.emit(operation_type, operator, *arguments)

    return convert


def _ceil(context: ConversionContext, operator: TfliteOperator) -> None:
    value = context.value(operator.inputs[0])
    for step in (OperationType.NEG, OperationType.FLOOR):
        intermediate = _intermediate(context, operator)
        context.builder.operation(step, [value], intermediate)
        value = intermediate
    context.emit(OperationType.NEG, operator, value)


def _square(context: ConversionContext, operator: TfliteOperator) -> None:
    x = dequantized(context, operator.inputs[0])
    emit_dequantized(context, operator, OperationType.MUL, x, x, context.builder.int32(0))


def _squared_difference(context: ConversionContext, operator: TfliteOperator) -> None:
    none, difference = context.builder.int32(0), _intermediate(context, operator)
    terms = [dequantized(context, index) for index in operator.inputs]
    context.builder.operation(OperationType.SUB, [*terms, none], difference)
    emit_dequantized(context, operator, OperationType.MUL, difference, difference, none)


def _div(context: ConversionContext, operator: TfliteOperator) -> None:
    if context.file.tensor(operator.inputs[0]).type in INTEGERS:  # NNAPI's quotient is rounded down
        code = operation_code(TfliteOperation.TRUNCATED_DIV)
        return emit_integers(context, operator, code, *map(context.value, operator.inputs))
    if are_quantized(context, *operator.inputs, *operator.outputs):
        arguments = [*map(context.value, operator.inputs), activation(context, operator)]
        return context.emit(_tflite(OperationType.DIV), operator, *arguments)
    factors = [dequantized(context, index) for index in operator.inputs]
    return emit_dequantized(context, operator, OperationType.DIV, *factors, activation(context, operator))


def _floor_div(context: ConversionContext, operator: TfliteOperator) -> None:
    """Convert to DIV and FLOOR of float64, as in TFLite: a quotient of float32 may be rounded up to an integer."""
    factors, none = [*map(context.value, operator.inputs)], context.builder.int32(0)
    if context.file.tensor(operator.inputs[0]).type in INTEGERS:
        return context.emit(OperationType.DIV, operator, *factors, none)
    wide = [_emit_wide(context, OperationType.CAST, context.builder[factor].dimensions, factor) for factor in factors]
    shape = context.file.tensor(operator.outputs[0]).shape
    quotient = _emit_wide(context, OperationType.DIV, shape, *wide, none)
    floor = _emit_wide(context, OperationType.FLOOR, shape, quotient)
    return context.emit(extended_code(OperationType.CAST, Scheme.WIDER), operator, floor)


def _emit_wide(context: ConversionContext, code: OperationType, shape: tuple[int, ...], *arguments: int) -> int:
    """Add an operation with a result of float64, and return that."""
    result = context.builder.operand(Operand(TENSOR_FLOAT64, shape))
    context.builder.operation(code, arguments, result)
    return result


def _add_n(context: ConversionContext, operator: TfliteOperator) -> None:
    none = context.builder.int32(0)
    total, *middle, last = map(context.value, operator.inputs)
    for value in middle:
        following = _intermediate(context, operator)
        context.builder.operation(OperationType.ADD, [total, value, none], following)
        total = following
    context.emit(OperationType.ADD, operator, total, last, none)


def _leaky_relu(context: ConversionContext, operator: TfliteOperator) -> None:
    """Convert to PRELU with one slope; on quantized tensors TFLite has a definition of its own."""
    x, slope = context.file.tensor(operator.inputs[0]), float(operator.options.Alpha())
    if not math.isfinite(slope):
        raise InvalidArgument(f"the slope is {slope}: it must be a finite number")
    if x.type not in FLOAT_TYPES:
        alpha = context.builder.float_scalar(OperandType.TENSOR_FLOAT32, slope)
        code = TfliteOperation.Q16_LEAKY_RELU if x.type == SIXTEEN_BITS else TfliteOperation.Q8_LEAKY_RELU
        return context.emit(operation_code(code), operator, context.value(x.index), alpha)
    location = context.builder[context.builder.float_scalar(x.type, slope)].location
    alpha = context.builder.operand(Operand(x.type, (1,), 0.0, 0, LifeTime.CONSTANT_COPY, location))
    return context.emit(OperationType.PRELU, operator, context.value(x.index), alpha)


def _elu(context: ConversionContext, operator: TfliteOperator) -> None:
    x = dequantized(context, operator.inputs[0])
    alpha = context.builder.float_scalar(context.builder[x].type, 1.0)
    emit_dequantized(context, operator, OperationType.ELU, x, alpha)


def _softmax(context: ConversionContext, operator: TfliteOperator) -> None:
    x, beta = context.value(operator.inputs[0]), operator.options.Beta()
    if not (math.isfinite(beta) and beta > 0):
        raise InvalidArgument(f"beta is {beta}: it must be a positive number")
    y = context.file.tensor(operator.outputs[0])
    if y.type == SIXTEEN_BITS and context.builder[x].type in QUANTIZED_TYPES:
        factor = context.builder.float_scalar(OperandType.TENSOR_FLOAT32, beta)
        result = context.result(y.index, any_zero_point=True)
        return context.builder.operation(
            extended_code(OperationType.SOFTMAX, Scheme.TO_SIXTEEN_BITS), [x, factor], result
        )
    return context.emit(OperationType.SOFTMAX, operator, x, context.builder.float_scalar(context.builder[x].type, beta))


def _log_softmax(context: ConversionContext, operator: TfliteOperator) -> None:
    """Convert to TFLite's LOG_SOFTMAX on 8 bits; in floats if a row is too long for its sum of 32 bits."""
    given, y = context.file.tensor(operator.inputs[0]), context.file.tensor(operator.outputs[0])
    zero_point = _LOG_SOFTMAX_ZERO_POINTS.get(y.type)
    is_short = bool(given.shape) and given.shape[-1] < _MAX_LOG_SOFTMAX_SIZE
    if are_quantized(context, given.index, y.index) and (y.scale, y.zero_point) == (1 / 16, zero_point) and is_short:
        return context.emit(_tflite(OperationType.LOG_SOFTMAX), operator, context.value(given.index))
    x = dequantized(context, operator.inputs[0])
    beta = context.builder.float_scalar(context.builder[x].type, 1.0)
    return emit_dequantized(context, operator, OperationType.LOG_SOFTMAX, x, beta, context.builder.int32(_LAST_AXIS))


def _l2_normalization(context: ConversionContext, operator: TfliteOperator) -> None:
    no_activation(operator)
    code = own_definition_of_int8(context, OperationType.L2_NORMALIZATION, *operator.inputs, *operator.outputs)
    context.emit(code, operator, context.value(operator.inputs[0]))


def _local_response_normalization(context: ConversionContext, operator: TfliteOperator) -> None:
    x, options = context.value(operator.inputs[0]), operator.options
    kind = context.builder[x].type
    scalars = [context.builder.float_scalar(kind, value) for value in (options.Bias(), options.Alpha(), options.Beta())]
    radius = context.builder.int32(options.Radius())
    context.emit(OperationType.LOCAL_RESPONSE_NORMALIZATION, operator, x, radius, *scalars)


def _select(context: ConversionContext, operator: TfliteOperator) -> None:
    y = context.file.tensor(operator.outputs[0])
    condition = context.file.tensor(operator.inputs[0])
    if operator.name == "SELECT" and y.shape and condition.shape != y.shape:
        raise InvalidArgument(f"{condition} has another shape than {y}: NNAPI's SELECT has one shape")
    values = [broadcast(context, index, y.shape) if y.shape else context.value(index) for index in operator.inputs]
    code = _choice_code(context, OperationType.SELECT, *operator.inputs[1:], *operator.outputs)
    context.emit(code, operator, *values)


def _quantize(context: ConversionContext, operator: TfliteOperator) -> None:
    """Quantize floats; requantize other tensors."""
    x, y = context.file.tensor(operator.inputs[0]), context.file.tensor(operator.outputs[0])
    if x.type not in FLOAT_TYPES:
        arguments = [
            context.value(x.index, any_zero_point=True),
            *_quantization(context, x),
            *_quantization(context, y),
        ]
        result = context.result(y.index, any_zero_point=True)
        return context.builder.operation(operation_code(TfliteOperation.REQUANTIZE), arguments, result)
    return context.emit(OperationType.QUANTIZE, operator, dequantized(context, operator.inputs[0]))


def _quantization(context: ConversionContext, tensor: TfliteTensor) -> list[int]:
    """Return scale and zero point as arguments, for tensors whose operands do not have them."""
    if not 0 < tensor.file_scale < math.inf:
        raise InvalidArgument(f"{tensor} has no quantization scale, which is required here")
    scale = context.builder.float_scalar(OperandType.TENSOR_FLOAT32, tensor.file_scale)
    return [scale, context.builder.int32(tensor.zero_point)]


def _dequantize(context: ConversionContext, operator: TfliteOperator) -> None:
    """Dequantize constants at import (files store compressed weights this way); convert FLOAT16 with CAST."""
    x, y = context.file.tensor(operator.inputs[0]), context.file.tensor(operator.outputs[0])
    is_wide = y.type == OperandType.TENSOR_FLOAT32
    if x.data is not None and is_wide and not context.is_model_output(y.index):
        return context.name(y.index, context.dequantized_constant(x))
    widens = x.type in FLOAT_TYPES
    return context.emit(OperationType.CAST if widens else OperationType.DEQUANTIZE, operator, context.value(x.index))


def _cast(context: ConversionContext, operator: TfliteOperator) -> None:
    """Convert to CAST; the real parts of complex numbers are left of them, and the limits of floats beyond INT64."""
    x, y = context.file.tensor(operator.inputs[0]), context.file.tensor(operator.outputs[0])
    if x.type in FLOAT_TYPES and y.type == TENSOR_INT64:
        return context.emit(operation_code(TfliteOperation.SATURATE), operator, context.value(x.index))
    if x.type != TENSOR_COMPLEX64:
        return context.emit(OperationType.CAST, operator, context.value(x.index))
    return context.emit(operation_code(TfliteOperation.REAL), operator, context.value(x.index))


_ONE, _TWO, _THREE = range(1, 2), range(2, 3), range(3, 4)
_MANY = range(2, 1 << 16)
_UNARY = ("HARD_SWISH", "LOGICAL_NOT", "LOGISTIC", "TANH")
_UNARY_OF_REALS = ("ABS", "EXP", "LOG", "SQRT")
_BINARY = (
    "LOGICAL_AND", "LOGICAL_OR", "POW", "PRELU",
)  # fmt: skip
_COMPARISONS = ("EQUAL", "GREATER", "GREATER_EQUAL", "LESS", "LESS_EQUAL", "NOT_EQUAL")

_ELEMENTWISE_CONVERTERS: dict[str, OpConverter] = {
    **{name: OpConverter(_ONE, passthrough(OperationType[name])) for name in _UNARY},
    **{
        name: OpConverter(_ONE, _eight_bit_or(_tflite(OperationType[name]), _dequantizing(OperationType[name])))
        for name in _UNARY_OF_REALS
    },
    **{name: OpConverter(_ONE, _dequantizing(OperationType[name])) for name in ("FLOOR", "SIN")},
    **{name: OpConverter(_TWO, passthrough(OperationType[name])) for name in _BINARY},
    **{name: OpConverter(_TWO, _choice(OperationType[name])) for name in ("MAXIMUM", "MINIMUM")},
    **{name: OpConverter(_TWO, _comparison(OperationType[name])) for name in _COMPARISONS},
    **{
        name: OpConverter(_TWO, _with_activation(OperationType[name]), f"{name.title()}Options")
        for name in ("ADD", "MUL", "SUB")
    },
    "ADD_N": OpConverter(_MANY, _add_n),
    "CAST": OpConverter(_ONE, _cast),
    "CEIL": OpConverter(_ONE, _ceil),
    "DEQUANTIZE": OpConverter(_ONE, _dequantize),
    "DIV": OpConverter(_TWO, _div, "DivOptions"),
    "ELU": OpConverter(_ONE, _eight_bit_or(_tflite(OperationType.ELU), _elu)),
    "FLOOR_DIV": OpConverter(_TWO, _floor_div),
    "L2_NORMALIZATION": OpConverter(_ONE, _l2_normalization, "L2NormOptions"),
    "LEAKY_RELU": OpConverter(_ONE, _leaky_relu, "LeakyReluOptions", True),
    "LOCAL_RESPONSE_NORMALIZATION": OpConverter(
        _ONE, _local_response_normalization, "LocalResponseNormalizationOptions", True
    ),
    "LOG_SOFTMAX": OpConverter(_ONE, _log_softmax),
    "QUANTIZE": OpConverter(_ONE, _quantize),
    "NEG": OpConverter(_ONE, _neg),
    "RELU": OpConverter(_ONE, _clamp(OperationType.RELU)),
    "RELU6": OpConverter(_ONE, _clamp(OperationType.RELU6)),
    "RELU_N1_TO_1": OpConverter(_ONE, _clamp(OperationType.RELU1)),
    "RSQRT": OpConverter(_ONE, _eight_bit_or(_tflite(OperationType.RSQRT), passthrough(OperationType.RSQRT))),
    "SELECT": OpConverter(_THREE, _select),
    "SELECT_V2": OpConverter(_THREE, _select),
    "SOFTMAX": OpConverter(_ONE, _softmax, "SoftmaxOptions", True),
    "SQUARE": OpConverter(_ONE, _square),
    "SQUARED_DIFFERENCE": OpConverter(
        _TWO, _eight_bit_or(operation_code(TfliteOperation.Q8_SQUARED_DIFFERENCE), _squared_difference)
    ),
}


# ----------------------------------------------------------------------------------------------------------------------
# Elementwise operators that become operations of the extension `nnfmq.tflite`, and those of the complex type.


_STORAGE = {
    OperandType.TENSOR_FLOAT32: "<f4",
    OperandType.TENSOR_FLOAT16: "<f2",
    **INTEGERS,
    OperandType.TENSOR_QUANT8_ASYMM: "u1",
    OperandType.TENSOR_QUANT8_ASYMM_SIGNED: "i1",
    OperandType.TENSOR_QUANT16_SYMM: "<i2",
    OperandType.TENSOR_BOOL8: "u1",
}


_MAX_SHIFT_OF_UINT8 = 7


def of_inputs(operation: TfliteOperation) -> Callable[[ConversionContext, TfliteOperator], None]:
    """Return the converter of an operation whose arguments are the operator's inputs."""

    def convert(context: ConversionContext, operator: TfliteOperator) -> None:
        context.emit(operation_code(operation), operator, *map(context.value, operator.inputs))

    return convert


def _gelu(context: ConversionContext, operator: TfliteOperator) -> None:
    approximate = operator.options is not None and bool(operator.options.Approximate())
    arguments = [context.value(operator.inputs[0]), context.builder.boolean(approximate)]
    context.emit(operation_code(TfliteOperation.GELU), operator, *arguments)


def _vector(context: ConversionContext, like: TfliteTensor, value: float) -> int:
    """Return a constant of one element, typed and quantized like a tensor."""
    data = np.array([value], _STORAGE[like.type]).tobytes()
    location = context.builder.constant(data)
    return context.builder.operand(
        Operand(like.type, (1,), like.scale, like.zero_point, LifeTime.CONSTANT_COPY, location)
    )


def _relu_0_to_1(context: ConversionContext, operator: TfliteOperator) -> None:
    """Convert to MAXIMUM with 0 and MINIMUM with 1, or to CLAMP if the output is quantized in another way."""
    x, y = context.file.tensor(operator.inputs[0]), context.file.tensor(operator.outputs[0])
    if (x.scale, x.zero_point) != (y.scale, y.zero_point):
        return emit_clamp(context, operator, 0.0, 1.0)
    if x.type in FLOAT_TYPES:
        low, high = (_real(context, x.type, bound) for bound in (0.0, 1.0))
    else:
        steps = math.floor(np.float32(1) / np.float32(x.scale) + 0.5)
        top = min(x.zero_point + steps, np.iinfo(_STORAGE[x.type]).max)
        low, high = _vector(context, x, x.zero_point), _vector(context, x, top)
    value = context.value(x.index)
    operand = context.builder[value]
    positive = context.builder.operand(Operand(operand.type, operand.dimensions, operand.scale, operand.zero_point))
    context.builder.operation(OperationType.MAXIMUM, [value, low], positive)
    return context.emit(OperationType.MINIMUM, operator, positive, high)


def _real(context: ConversionContext, kind: OperandType, value: float) -> int:
    location = context.builder[context.builder.float_scalar(kind, value)].location
    return context.builder.operand(Operand(kind, (1,), lifetime=LifeTime.CONSTANT_COPY, location=location))


def _zeros_like(context: ConversionContext, operator: TfliteOperator) -> None:
    """Convert to FILL; of other types than the HAL's to a TILE of one element."""
    x = context.file.tensor(operator.inputs[0])
    shape = x.shape or (1,)
    if 0 in shape:
        raise InvalidArgument("zeros like a tensor of unknown shape are not supported")
    dimensions = context.builder.int32_vector(shape)
    if x.type == OperandType.TENSOR_INT32:
        return context.emit(OperationType.FILL, operator, dimensions, context.builder.int32(0), shape=shape)
    if x.type in FLOAT_TYPES:
        zero = context.builder.float_scalar(x.type, 0.0)
        return context.emit(OperationType.FILL, operator, dimensions, zero, shape=shape)
    location = context.builder.constant(np.zeros(1, _STORAGE[x.type]).tobytes())
    ones = (1,) * len(shape)
    zero = context.builder.operand(Operand(x.type, ones, x.scale, x.zero_point, LifeTime.CONSTANT_COPY, location))
    return context.emit(OperationType.TILE, operator, zero, dimensions, shape=shape)


def _right_shift(context: ConversionContext, operator: TfliteOperator) -> None:
    """Convert to RIGHT_SHIFT; TFLite shifts UINT8, too, by 7 bits at most."""
    x, bits = (context.file.tensor(index) for index in operator.inputs)
    shift = context.value(bits.index)
    if x.type == OperandType.TENSOR_QUANT8_ASYMM:
        given, limit = context.builder[shift], _vector(context, bits, _MAX_SHIFT_OF_UINT8)
        limited = context.builder.operand(Operand(given.type, given.dimensions, given.scale, given.zero_point))
        context.builder.operation(OperationType.MINIMUM, [shift, limit], limited)
        shift = limited
    context.emit(operation_code(TfliteOperation.RIGHT_SHIFT), operator, context.value(x.index), shift)


def _bucketize(context: ConversionContext, operator: TfliteOperator) -> None:
    if not operator.options.BoundariesLength():
        raise InvalidArgument("it has no boundaries: one or more are required")
    boundaries = np.asarray(operator.options.BoundariesAsNumpy(), "<f4")
    location = context.builder.constant(boundaries.tobytes())
    kind = OperandType.TENSOR_FLOAT32
    operand = Operand(kind, (len(boundaries),), lifetime=LifeTime.CONSTANT_COPY, location=location)
    arguments = [context.value(operator.inputs[0]), context.builder.operand(operand)]
    context.emit(operation_code(TfliteOperation.BUCKETIZE), operator, *arguments)


_EXTENSION_OF_ONE, _EXTENSION_OF_TWO = range(1, 2), range(2, 3)

_EXTENSION_ELEMENTWISE_CONVERTERS: dict[str, OpConverter] = {
    **{
        name: OpConverter(_EXTENSION_OF_ONE, of_inputs(TfliteOperation[name]))
        for name in ("COMPLEX_ABS", "COS", "IMAG", "REAL", "ROUND", "SIGN")
    },
    **{
        name: OpConverter(_EXTENSION_OF_TWO, of_inputs(TfliteOperation[name]))
        for name in ("ATAN2", "BITWISE_XOR", "FLOOR_MOD")
    },
    "BUCKETIZE": OpConverter(_EXTENSION_OF_ONE, _bucketize, "BucketizeOptions", True),
    "GELU": OpConverter(_EXTENSION_OF_ONE, _gelu, "GeluOptions"),
    "RELU_0_TO_1": OpConverter(_EXTENSION_OF_ONE, _relu_0_to_1),
    "RFFT2D": OpConverter(_EXTENSION_OF_TWO, of_inputs(TfliteOperation.RFFT2D)),
    "RIGHT_SHIFT": OpConverter(_EXTENSION_OF_TWO, _right_shift),
    "ZEROS_LIKE": OpConverter(_EXTENSION_OF_ONE, _zeros_like),
}

CONVERTERS: dict[str, OpConverter] = {**_ELEMENTWISE_CONVERTERS, **_EXTENSION_ELEMENTWISE_CONVERTERS}
