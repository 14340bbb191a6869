"""Elementwise operators that become operations of the extension `nnfmq.tflite`, and those of the complex type."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType
from nnfmq.hal.tflite_codes import TfliteOperation, operation_code
from nnfmq.hal.types import LifeTime, Operand, OperandType
from nnfmq.importers.tflite_file import TfliteOperator, TfliteTensor
from nnfmq.importers.tflite_operators.conversion import FLOAT_TYPES, INTEGERS, ConversionContext, OpConverter
from nnfmq.importers.tflite_operators.options import emit_clamp

__all__ = ["CONVERTERS", "of_inputs"]

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


_ONE, _TWO = range(1, 2), range(2, 3)

CONVERTERS: dict[str, OpConverter] = {
    **{
        name: OpConverter(_ONE, of_inputs(TfliteOperation[name]))
        for name in ("COMPLEX_ABS", "COS", "IMAG", "REAL", "ROUND", "SIGN")
    },
    **{name: OpConverter(_TWO, of_inputs(TfliteOperation[name])) for name in ("ATAN2", "BITWISE_XOR", "FLOOR_MOD")},
    "BUCKETIZE": OpConverter(_ONE, _bucketize, "BucketizeOptions", True),
    "GELU": OpConverter(_ONE, _gelu, "GeluOptions"),
    "RELU_0_TO_1": OpConverter(_ONE, _relu_0_to_1),
    "RFFT2D": OpConverter(_TWO, of_inputs(TfliteOperation.RFFT2D)),
    "RIGHT_SHIFT": OpConverter(_TWO, _right_shift),
    "ZEROS_LIKE": OpConverter(_ONE, _zeros_like),
}
