"""Conversion of options that many operators share: fused activations, padding, strides, axes, positive numbers.

Functions take TFLite's options and return operand indexes, or validated Python values.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.extensions import Scheme, TfliteOperation, extended_code, operation_code
from nnfmq.hal.operation_type import OperationType
from nnfmq.hal.types import FusedActivationFunc, LifeTime, Operand, OperandType, PaddingScheme
from nnfmq.importers.tflite.file import TfliteOperator, TfliteTensor
from nnfmq.importers.tflite.operators.conversion import INTEGERS, QUANTIZED_TYPES, ConversionContext, computed_size

__all__ = [
    "activation",
    "are_quantized",
    "dequantized",
    "dilation",
    "dynamically_quantized",
    "emit_clamp",
    "emit_dequantized",
    "emit_integers",
    "emit_reshape",
    "emit_same_quantization",
    "have_one_quantization",
    "no_activation",
    "normalized_axis",
    "own_definition",
    "own_definition_of_int8",
    "padding",
    "passthrough",
    "positive",
    "size_argument",
    "strides",
]

_PADDINGS = {0: PaddingScheme.SAME, 1: PaddingScheme.VALID}


def activation(context: ConversionContext, operator: TfliteOperator) -> int:
    """Return the fused activation; NONE if the operator has no options."""
    return context.builder.int32(_activation(operator))


def _activation(operator: TfliteOperator) -> FusedActivationFunc:
    """Return the fused activation: TFLite and the HAL have the same codes."""
    code = operator.options.FusedActivationFunction() if operator.options is not None else 0
    if code not in tuple(FusedActivationFunc):
        raise InvalidArgument(f"fused activation {code} is not supported: NONE, RELU, RELU_N1_TO_1 and RELU6 are")
    return FusedActivationFunc(code)


def no_activation(operator: TfliteOperator) -> None:
    """Raise InvalidArgument if the operator has a fused activation; the HAL's operation has none."""
    if operator.options is not None and operator.options.FusedActivationFunction():
        raise InvalidArgument("a fused activation is not supported here")


def padding(context: ConversionContext, operator: TfliteOperator) -> int:
    """Return the padding scheme."""
    code = operator.options.Padding()
    if code not in _PADDINGS:
        raise InvalidArgument(f"padding {code} is neither SAME (0) nor VALID (1)")
    return context.builder.int32(_PADDINGS[code])


def positive(context: ConversionContext, **values: int) -> list[int]:
    """Return operands of values that must be positive; the parameter names are used in the message."""
    for name, value in values.items():
        if value < 1:
            raise InvalidArgument(f"{name} is {value}: it must be positive")
    return [context.builder.int32(value) for value in values.values()]


def strides(context: ConversionContext, operator: TfliteOperator) -> list[int]:
    """Return the strides, width before height."""
    options = operator.options
    return positive(context, stride_w=options.StrideW(), stride_h=options.StrideH())


def dilation(context: ConversionContext, operator: TfliteOperator) -> list[int]:
    """Return the arguments after the activation: none without dilation, else layout (NHWC) and both factors."""
    width, height = operator.options.DilationWFactor(), operator.options.DilationHFactor()
    if (width, height) == (1, 1):
        return []
    return [context.builder.boolean(False), *positive(context, dilation_w=width, dilation_h=height)]


def normalized_axis(axis: int, rank: int) -> int:
    """Return `axis` as a non-negative index."""
    if not -rank <= axis < rank:
        raise InvalidArgument(f"axis {axis} is not in {-rank}..{rank - 1}")
    return axis % rank


def passthrough(operation_type: OperationType) -> Callable[[ConversionContext, TfliteOperator], None]:
    """Return the converter of operations whose HAL arguments are TFLite's inputs unchanged."""

    def convert(context: ConversionContext, operator: TfliteOperator) -> None:
        context.emit(operation_type, operator, *map(context.value, operator.inputs))

    return convert


def dequantized(context: ConversionContext, index: int) -> int:
    """Return a tensor's operand, dequantized if the tensor is quantized."""
    tensor = context.file.tensor(index)
    if tensor.type not in QUANTIZED_TYPES:
        return context.value(index)
    if tensor.data is not None:
        return context.dequantized_constant(tensor)
    real = context.builder.operand(Operand(OperandType.TENSOR_FLOAT32, tensor.shape))
    context.builder.operation(OperationType.DEQUANTIZE, [context.value(index)], real)
    return real


def dynamically_quantized(context: ConversionContext, x: TfliteTensor, row_length: int, asymmetric: bool) -> int:
    """Return float tensor `x` as 8 bits can represent it: what operators with quantized weights compute with.

    Each row of `row_length` elements, or each element of the first dimension if that is 0, has a scale of its own.
    """
    represented = context.temporary(x, x.shape)
    arguments = [context.value(x.index), context.builder.int32(row_length), context.builder.boolean(asymmetric)]
    context.builder.operation(operation_code(TfliteOperation.DYNAMIC_QUANTIZE), arguments, represented)
    return represented


def emit_dequantized(
    context: ConversionContext,
    operator: TfliteOperator,
    operation_type: OperationType,
    *inputs: int,
    shape: tuple[int, ...] = (),
) -> None:
    """Add an operation on floats that writes the operator's only output, followed by QUANTIZE if that is quantized."""
    y = context.file.tensor(operator.outputs[0])
    if y.type not in QUANTIZED_TYPES:
        return context.emit(operation_type, operator, *inputs, shape=shape)
    real = context.builder.operand(Operand(OperandType.TENSOR_FLOAT32, y.shape or shape))
    context.builder.operation(operation_type, inputs, real)
    return context.emit(OperationType.QUANTIZE, operator, real, shape=shape)


def emit_integers(
    context: ConversionContext, operator: TfliteOperator, operation_type: OperationType, *inputs: int
) -> None:
    """Add an operation on integers that writes the operator's only output.

    The HAL's have no fused activation: MAXIMUM and MINIMUM take its place.
    """
    low, high = _activation(operator).bounds
    y = context.file.tensor(operator.outputs[0])
    for choice, bound in ((OperationType.MAXIMUM, low), (OperationType.MINIMUM, high)):
        if math.isfinite(bound):
            unbounded = context.temporary(y, y.shape)
            context.builder.operation(operation_type, inputs, unbounded)
            location = context.builder.stored(np.array([bound], INTEGERS[y.type]).tobytes())
            limit = Operand(y.type, (1,), lifetime=LifeTime.CONSTANT_COPY, location=location)
            operation_type, inputs = choice, (unbounded, context.builder.operand(limit))
    context.emit(operation_type, operator, *inputs)


def are_quantized(context: ConversionContext, *tensors: int) -> bool:
    """Return True if all tensors have the same type of 8 bits, as TFLite's operators on them require."""
    types = {context.file.tensor(index).type for index in tensors}
    return len(types) == 1 and types <= set(QUANTIZED_TYPES)


def own_definition(context: ConversionContext, operation: OperationType, *tensors: int) -> OperationType:
    """Return TFLite's definition of an operation on 8-bit tensors if the import follows TFLite, else the HAL's."""
    if not (context.file.follows_tflite and are_quantized(context, *tensors)):
        return operation
    return extended_code(operation, Scheme.TFLITE)


def own_definition_of_int8(context: ConversionContext, operation: OperationType, *tensors: int) -> OperationType:
    """Return `own_definition` of an operation that the HAL and TFLite define alike on UINT8."""
    types = {context.file.tensor(index).type for index in tensors}
    is_int8 = types == {OperandType.TENSOR_QUANT8_ASYMM_SIGNED}
    return own_definition(context, operation, *tensors) if is_int8 else operation


def have_one_quantization(context: ConversionContext, *tensors: int) -> bool:
    """Return True if the tensors have the same scale and zero point."""
    found = [context.file.tensor(index) for index in tensors]
    return len({(tensor.scale, tensor.zero_point) for tensor in found}) == 1


def emit_clamp(context: ConversionContext, operator: TfliteOperator, low: float, high: float) -> None:
    """Add the operation that limits 8-bit values and converts them to the output's quantization."""
    kind = OperandType.TENSOR_FLOAT32
    bounds = [context.builder.float_scalar(kind, bound) for bound in (low, high)]
    context.emit(operation_code(TfliteOperation.Q8_CLAMP), operator, context.value(operator.inputs[0]), *bounds)


def emit_same_quantization(
    context: ConversionContext,
    operator: TfliteOperator,
    operation_type: OperationType,
    *rest: int,
    shape: tuple[int, ...] = (),
) -> None:
    """Add an operation whose output must have its input's quantization in the HAL; if it differs, compute in floats.

    `rest` are the arguments after the first input, `shape` is as for `emit`.
    """
    x, y = context.file.tensor(operator.inputs[0]), context.file.tensor(operator.outputs[0])
    if (x.scale, x.zero_point) == (y.scale, y.zero_point):
        return context.emit(operation_type, operator, context.value(x.index), *rest, shape=shape)
    return emit_dequantized(context, operator, operation_type, dequantized(context, x.index), *rest, shape=shape)


def size_argument(
    context: ConversionContext, operator: TfliteOperator, position: int, axes: slice = slice(None)
) -> list[int]:
    """Return a constant size argument; if it follows from shapes, the size that the file states for the output's axes.

    Raises:
        InvalidArgument: If the file leaves that open, or the size follows from data.
    """
    (output,) = operator.outputs
    declared = context.file.tensor(output).shape[axes]
    if not declared or computed_size(context.file, operator) is None:
        return context.ints(operator.inputs[position])
    if -1 in context.file.signature(output)[axes]:
        raise InvalidArgument("a size that the model computes is not supported if the file does not state the output's")
    return list(declared)


def emit_reshape(context: ConversionContext, operator: TfliteOperator, flat: int, shape: tuple[int, ...]) -> None:
    """Add the RESHAPE of `flat` to `shape`, that of the operator's only output."""
    context.emit(OperationType.RESHAPE, operator, flat, context.builder.int32_vector(shape), shape=shape)
