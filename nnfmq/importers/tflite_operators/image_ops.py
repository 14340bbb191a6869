"""Operators on NHWC images: pooling, resizing, and blocks of pixels to or from channels or batch."""

from __future__ import annotations

import math
from collections.abc import Callable

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType
from nnfmq.importers.tflite_file import TfliteOperator, TfliteTensor
from nnfmq.importers.tflite_operators.conversion import ConversionContext, OpConverter
from nnfmq.importers.tflite_operators.options import (
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
        options, y = operator.options, context.file.tensor(operator.outputs[0])
        size = size_argument(context, operator.inputs[1], y.shape[1:3])
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

CONVERTERS: dict[str, OpConverter] = {
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
