"""Operators on images, NHWC: pools, resizing, and the exchange of space for channels or for the batch."""

from __future__ import annotations

import math
from collections.abc import Callable

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType
from nnfmq.importers.tflite_file import Operator
from nnfmq.importers.tflite_operators.conversion import Rule, Translation
from nnfmq.importers.tflite_operators.options import activation, as_they_are, padding, positive, size_of, strides

__all__ = ["RULES"]


def _pool_2d(operation_type: OperationType) -> Callable[[Translation, Operator], None]:
    def apply(graph: Translation, operator: Operator) -> None:
        options = operator.options
        arguments = [graph.value(operator.inputs[0]), padding(graph, operator), *strides(graph, operator)]
        arguments += positive(graph, filter_w=options.FilterWidth(), filter_h=options.FilterHeight())
        graph.emit(operation_type, operator, *arguments, activation(graph, operator))

    return apply


def _resize(operation_type: OperationType) -> Callable[[Translation, Operator], None]:
    def apply(graph: Translation, operator: Operator) -> None:
        options, y = operator.options, graph.file.tensor(operator.outputs[0])
        size = size_of(graph, operator.inputs[1], y.shape[1:3])
        if len(size) != 2:
            raise InvalidArgument(f"a size of {len(size)} elements: height and width are needed")
        arguments = [graph.value(operator.inputs[0]), *positive(graph, width=size[1], height=size[0])]
        flags = (False, bool(options.AlignCorners()), bool(options.HalfPixelCenters()))  # the first: NHWC
        wanted = flags if any(flags) else flags[:1]
        graph.emit(operation_type, operator, *arguments, *map(graph.builder.boolean, wanted))

    return apply


def _block(operation_type: OperationType) -> Callable[[Translation, Operator], None]:
    def apply(graph: Translation, operator: Operator) -> None:
        block = positive(graph, block_size=operator.options.BlockSize())
        graph.emit(operation_type, operator, graph.value(operator.inputs[0]), *block)

    return apply


def _batch_to_space_nd(graph: Translation, operator: Operator) -> None:
    """NNAPI's has no crops: what TFLite would crop, a SLICE behind it cuts off."""
    x = graph.file.tensor(operator.inputs[0])
    value, block = map(graph.value, operator.inputs[:2])
    crops = graph.ints(operator.inputs[2])
    if not any(crops):
        return graph.emit(OperationType.BATCH_TO_SPACE_ND, operator, value, block)
    whole, (begin, size) = _uncropped(x.shape, graph.ints(operator.inputs[1]), crops)
    between = graph.temporary(x, whole)
    graph.builder.operation(OperationType.BATCH_TO_SPACE_ND, [value, block], between)
    vectors = [graph.builder.int32_vector(values) for values in (begin, size)]
    return graph.emit(OperationType.SLICE, operator, between, *vectors)


def _uncropped(
    shape: tuple[int, ...], block: list[int], crops: list[int]
) -> tuple[tuple[int, ...], tuple[list[int], list[int]]]:
    """Return the shape before the crops, and begin and size of what is left of it."""
    if len(shape) != 4 or len(block) != 2 or len(crops) != 4 or min(*block, *crops, 1) < 0 or 0 in block:
        raise InvalidArgument(f"blocks {block} and crops {crops} for shape {list(shape)}: only images can be cropped")
    batch, height, width, depth = shape
    whole = (batch // math.prod(block), height * block[0], width * block[1], depth)
    size = [whole[0], whole[1] - crops[0] - crops[1], whole[2] - crops[2] - crops[3], depth]
    return whole, ([0, crops[0], crops[2], 0], size)


_ONE, _TWO, _THREE = range(1, 2), range(2, 3), range(3, 4)

RULES: dict[str, Rule] = {
    **{
        name: Rule(_ONE, _pool_2d(OperationType[name]), "Pool2DOptions", True)
        for name in ("AVERAGE_POOL_2D", "L2_POOL_2D", "MAX_POOL_2D")
    },
    "BATCH_TO_SPACE_ND": Rule(_THREE, _batch_to_space_nd),
    "DEPTH_TO_SPACE": Rule(_ONE, _block(OperationType.DEPTH_TO_SPACE), "DepthToSpaceOptions", True),
    "RESIZE_BILINEAR": Rule(_TWO, _resize(OperationType.RESIZE_BILINEAR), "ResizeBilinearOptions", True),
    "RESIZE_NEAREST_NEIGHBOR": Rule(
        _TWO, _resize(OperationType.RESIZE_NEAREST_NEIGHBOR), "ResizeNearestNeighborOptions", True
    ),
    "SPACE_TO_BATCH_ND": Rule(_THREE, as_they_are(OperationType.SPACE_TO_BATCH_ND)),
    "SPACE_TO_DEPTH": Rule(_ONE, _block(OperationType.SPACE_TO_DEPTH), "SpaceToDepthOptions", True),
}
