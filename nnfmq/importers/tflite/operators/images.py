"""Operators on images and volumes: pooling, resizing, blocks, and suppression of boxes."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.extensions import TfliteOperation, operation_code
from nnfmq.hal.operation_type import OperationType
from nnfmq.hal.types import Operand, OperandType
from nnfmq.importers.tflite.file import TfliteOperator, TfliteTensor
from nnfmq.importers.tflite.operators.conversion import ConversionContext, OpConverter
from nnfmq.importers.tflite.operators.elementwise import of_inputs
from nnfmq.importers.tflite.operators.options import (
    activation,
    own_definition_of_int8,
    padding,
    passthrough,
    positive,
    size_argument,
    strides,
)

__all__ = ["CONVERTERS"]

_IMAGE_RANK = 4
_AVERAGING = (OperationType.AVERAGE_POOL_2D, OperationType.RESIZE_BILINEAR)


def _pool_2d(operation_type: OperationType) -> Callable[[ConversionContext, TfliteOperator], None]:
    def convert(context: ConversionContext, operator: TfliteOperator) -> None:
        options = operator.options
        arguments = [context.value(operator.inputs[0]), padding(context, operator), *strides(context, operator)]
        arguments += positive(context, filter_w=options.FilterWidth(), filter_h=options.FilterHeight())
        code = _definition(context, operator, operation_type)
        context.emit(code, operator, *arguments, activation(context, operator))

    return convert


def _definition(context: ConversionContext, operator: TfliteOperator, operation_type: OperationType) -> OperationType:
    if operation_type not in _AVERAGING:
        return operation_type
    return own_definition_of_int8(context, operation_type, operator.inputs[0], *operator.outputs)


def _resize(operation_type: OperationType) -> Callable[[ConversionContext, TfliteOperator], None]:
    def convert(context: ConversionContext, operator: TfliteOperator) -> None:
        options = operator.options
        size = size_argument(context, operator, 1, slice(1, 3))
        if len(size) != 2:
            raise InvalidArgument(f"a size of {len(size)} elements: height and width are needed")
        arguments = [context.value(operator.inputs[0]), *positive(context, width=size[1], height=size[0])]
        flags = (False, bool(options.AlignCorners()), bool(options.HalfPixelCenters()))  # the first: NHWC
        wanted = flags if any(flags) else flags[:1]
        code = _definition(context, operator, operation_type)
        context.emit(code, operator, *arguments, *map(context.builder.boolean, wanted))

    return convert


def _block(operation_type: OperationType) -> Callable[[ConversionContext, TfliteOperator], None]:
    def convert(context: ConversionContext, operator: TfliteOperator) -> None:
        block = positive(context, block_size=operator.options.BlockSize())
        context.emit(operation_type, operator, context.value(operator.inputs[0]), *block)

    return convert


def _batch_to_space_nd(context: ConversionContext, operator: TfliteOperator) -> None:
    """Convert crops, which the HAL's operation does not have, to a SLICE after it."""
    x = context.file.tensor(operator.inputs[0])
    value, block = map(context.value, operator.inputs[:2])
    crops = context.ints(operator.inputs[2])
    if not any(crops):
        _require_image(x)
        return context.emit(OperationType.BATCH_TO_SPACE_ND, operator, value, block)
    whole, (begin, size) = _uncropped(x.shape, context.ints(operator.inputs[1]), crops)
    intermediate = context.temporary(x, whole)
    context.builder.operation(OperationType.BATCH_TO_SPACE_ND, [value, block], intermediate)
    vectors = [context.builder.int32_vector(values) for values in (begin, size)]
    return context.emit(OperationType.SLICE, operator, intermediate, *vectors)


def _uncropped(
    shape: tuple[int, ...], block: list[int], crops: list[int]
) -> tuple[tuple[int, ...], tuple[list[int], list[int]]]:
    """Return the shape before the crops, and begin and size of the remaining slice."""
    if len(shape) != 4 or len(block) != 2 or len(crops) != 4 or min(*block, *crops, 1) < 0 or 0 in block:
        raise InvalidArgument(f"blocks {block} and crops {crops} for shape {list(shape)}: only images can be cropped")
    batch, height, width, depth = shape
    whole = (batch // math.prod(block), height * block[0], width * block[1], depth)
    size = [whole[0], whole[1] - crops[0] - crops[1], whole[2] - crops[2] - crops[3], depth]
    return whole, ([0, crops[0], crops[2], 0], size)


def _require_image(x: TfliteTensor) -> None:
    if len(x.shape) not in (0, _IMAGE_RANK):
        raise InvalidArgument(f"an image of rank {len(x.shape)}: only rank {_IMAGE_RANK} is supported")


def _space_to_batch(context: ConversionContext, operator: TfliteOperator) -> None:
    _require_image(context.file.tensor(operator.inputs[0]))
    passthrough(OperationType.SPACE_TO_BATCH_ND)(context, operator)


_ONE, _TWO, _THREE = range(1, 2), range(2, 3), range(3, 4)

_IMAGE_CONVERTERS: dict[str, OpConverter] = {
    **{
        name: OpConverter(_ONE, _pool_2d(OperationType[name]), "Pool2DOptions", True)
        for name in ("AVERAGE_POOL_2D", "L2_POOL_2D", "MAX_POOL_2D")
    },
    "BATCH_TO_SPACE_ND": OpConverter(_THREE, _batch_to_space_nd),
    "DEPTH_TO_SPACE": OpConverter(_ONE, _block(OperationType.DEPTH_TO_SPACE), "DepthToSpaceOptions", True),
    "RESIZE_BILINEAR": OpConverter(_TWO, _resize(OperationType.RESIZE_BILINEAR), "ResizeBilinearOptions", True),
    "RESIZE_NEAREST_NEIGHBOR": OpConverter(
        _TWO, _resize(OperationType.RESIZE_NEAREST_NEIGHBOR), "ResizeNearestNeighborOptions", True
    ),
    "SPACE_TO_BATCH_ND": OpConverter(_THREE, _space_to_batch),
    "SPACE_TO_DEPTH": OpConverter(_ONE, _block(OperationType.SPACE_TO_DEPTH), "SpaceToDepthOptions", True),
}


# ----------------------------------------------------------------------------------------------------------------------
# Convolutions of volumes, suppression of boxes, and other operators that become operations of `nnfmq.tflite`.


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


_EXTENSION_IMAGE_CONVERTERS: dict[str, OpConverter] = {
    "BITCAST": OpConverter(range(1, 2), of_inputs(TfliteOperation.BITCAST)),
    "BROADCAST_ARGS": OpConverter(range(2, 3), _broadcast_args),
    "CONV_3D": OpConverter(range(2, 4), _conv_3d, "Conv3DOptions", True),
    "CONV_3D_TRANSPOSE": OpConverter(range(3, 5), _conv_3d_transpose, "Conv3DOptions", True),
    "FAKE_QUANT": OpConverter(range(1, 2), _fake_quant, "FakeQuantOptions", True),
    "NON_MAX_SUPPRESSION_V4": OpConverter(range(5, 6), _non_max_suppression, output_counts=range(2, 3)),
    "NON_MAX_SUPPRESSION_V5": OpConverter(range(6, 7), _non_max_suppression, output_counts=range(3, 4)),
}

CONVERTERS: dict[str, OpConverter] = {**_IMAGE_CONVERTERS, **_EXTENSION_IMAGE_CONVERTERS}
