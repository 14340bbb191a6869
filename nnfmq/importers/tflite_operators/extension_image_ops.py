"""Convolutions of volumes, suppression of boxes, and other operators that become operations of `nnfmq.tflite`."""

from __future__ import annotations

import math

import numpy as np

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType
from nnfmq.hal.tflite_codes import TfliteOperation, operation_code
from nnfmq.hal.types import Operand, OperandType
from nnfmq.importers.tflite_file import TfliteOperator
from nnfmq.importers.tflite_operators.conversion import ConversionContext, OpConverter
from nnfmq.importers.tflite_operators.extension_elementwise_ops import of_inputs
from nnfmq.importers.tflite_operators.options import activation, padding, positive

__all__ = ["CONVERTERS"]

_FLOAT = OperandType.TENSOR_FLOAT32


def _volume_numbers(context: ConversionContext, operator: TfliteOperator) -> list[int]:
    """Return padding, strides, dilations and activation."""
    options = operator.options
    strides = {"stride_d": options.StrideD(), "stride_h": options.StrideH(), "stride_w": options.StrideW()}
    dilations = {
        "dilation_d": options.DilationDFactor(),
        "dilation_h": options.DilationHFactor(),
        "dilation_w": options.DilationWFactor(),
    }
    numbers = [*positive(context, **strides), *positive(context, **dilations)]
    return [padding(context, operator), *numbers, activation(context, operator)]


def _volume_bias(context: ConversionContext, operator: TfliteOperator, position: int, count: int) -> int:
    if len(operator.inputs) > position and operator.inputs[position] != -1:
        return context.value(operator.inputs[position])
    return context.builder.zeros(_FLOAT, 0.0, count)


def _conv_3d(context: ConversionContext, operator: TfliteOperator) -> None:
    filter = context.file.tensor(operator.inputs[1])
    if len(filter.shape) != 5:
        raise InvalidArgument(f"{filter} has rank {len(filter.shape)}: it must be 5")
    arguments = [*map(context.value, operator.inputs[:2]), _volume_bias(context, operator, 2, filter.shape[4])]
    numbers = _volume_numbers(context, operator)
    context.emit(operation_code(TfliteOperation.CONV_3D), operator, *arguments, *numbers)


def _conv_3d_transpose(context: ConversionContext, operator: TfliteOperator) -> None:
    filter = context.file.tensor(operator.inputs[1])
    if len(filter.shape) != 5:
        raise InvalidArgument(f"{filter} has rank {len(filter.shape)}: it must be 5")
    arguments = [*map(context.value, operator.inputs[:3]), _volume_bias(context, operator, 3, filter.shape[3])]
    numbers = _volume_numbers(context, operator)
    context.emit(operation_code(TfliteOperation.CONV_3D_TRANSPOSE), operator, *arguments, *numbers)


def _non_max_suppression(context: ConversionContext, operator: TfliteOperator) -> None:
    """Convert version 4, without decay and scores, and version 5."""
    is_soft = operator.name.endswith("V5")
    boxes, scores, limit, *thresholds = map(context.value, operator.inputs)
    if not is_soft:
        thresholds.append(context.builder.float_vector([0.0]))
    *others, count = operator.outputs
    results = [*map(context.result, others), context.result(count, (1,))]
    if not is_soft:
        dimensions = context.builder[results[0]].dimensions
        results.insert(1, context.builder.operand(Operand(_FLOAT, dimensions)))
    arguments = [boxes, scores, limit, *thresholds]
    context.builder.operation(operation_code(TfliteOperation.NON_MAX_SUPPRESSION), arguments, *results)


def _fake_quant(context: ConversionContext, operator: TfliteOperator) -> None:
    """Convert the range to one that contains 0 exactly, as TFLite does in float32."""
    options = operator.options
    bits, least = options.NumBits(), 1 if options.NarrowRange() else 0
    low, high = np.float32(options.Min()), np.float32(options.Max())
    if not 2 <= bits <= 16 or not low <= 0 <= high or low == high or not math.isfinite(high - low):
        raise InvalidArgument(f"{bits} bits from {low} to {high}: 2 to 16 bits and a range with 0 are required")
    most = (1 << bits) - 1
    step = (high - low) / np.float32(most - least)
    zero = np.float32(least) - low / step
    nudged = least if zero < least else most if zero > most else math.floor(float(zero) + 0.5)
    numbers = [float(np.float32(edge - nudged) * step) for edge in (least, most)]
    arguments = [context.builder.float_scalar(_FLOAT, number) for number in (*numbers, float(step))]
    value = context.value(operator.inputs[0])
    context.emit(operation_code(TfliteOperation.FAKE_QUANT), operator, value, *arguments)


def _broadcast_args(context: ConversionContext, operator: TfliteOperator) -> None:
    """Convert shapes that are constants; folding makes the result a constant, too."""
    shapes = [context.ints(index) for index in operator.inputs]
    try:
        shape = np.broadcast_shapes(*map(tuple, shapes))
    except ValueError:
        raise InvalidArgument(f"the shapes {shapes[0]} and {shapes[1]} do not broadcast") from None
    vector, rank = context.builder.int32_vector(shape), context.builder.int32_vector([len(shape)])
    context.emit(OperationType.RESHAPE, operator, vector, rank)


CONVERTERS: dict[str, OpConverter] = {
    "BITCAST": OpConverter(range(1, 2), of_inputs(TfliteOperation.BITCAST)),
    "BROADCAST_ARGS": OpConverter(range(2, 3), _broadcast_args),
    "CONV_3D": OpConverter(range(2, 4), _conv_3d, "Conv3DOptions", True),
    "CONV_3D_TRANSPOSE": OpConverter(range(3, 5), _conv_3d_transpose, "Conv3DOptions", True),
    "FAKE_QUANT": OpConverter(range(1, 2), _fake_quant, "FakeQuantOptions", True),
    "NON_MAX_SUPPRESSION_V4": OpConverter(range(5, 6), _non_max_suppression, output_counts=range(2, 3)),
    "NON_MAX_SUPPRESSION_V5": OpConverter(range(6, 7), _non_max_suppression, output_counts=range(3, 4)),
}
