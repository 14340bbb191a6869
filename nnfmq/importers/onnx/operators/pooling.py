"""Pooling: windows of pixels, and whole images.

The HAL's pools have no dilation, no plain integers and no float64: these are maxima or sums of the pixels at each
place in a window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.extensions import TENSOR_FLOAT64
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.hal.types import OperandType
from nnfmq.importers.onnx.operators import convolution
from nnfmq.importers.onnx.operators.convolution import Window, finish_image, image_of, pair_of, window_of
from nnfmq.importers.onnx.operators.elementwise import in_float32
from nnfmq.importers.onnx.operators.indexing import sliced
from nnfmq.importers.onnx.operators.movement import pad
from nnfmq.importers.onnx.values import Node, Value

__all__ = ["CONVERTERS"]

_I32 = OperandType.TENSOR_INT32
_WITHOUT_POOLS = (_I32, TENSOR_FLOAT64)
_MAX_PLACES = 1024  # in one direction of a window that becomes an operation for each place


def _pool(operation: Op, node: Node) -> None:
    image, rank = image_of(node, node.operand(0))
    if node.used(1):
        raise InvalidArgument("the output of indices is not supported")
    window = _window(node, node.shape(image)[2:], rank)
    ends = list(window.end)
    _complete(node, window, node.shape(image)[2:])
    if operation == Op.AVERAGE_POOL_2D and node.attribute("count_include_pad", 0):
        image = pad(node, image, [0, 0, *window.begin], [0, 0, *ends], 0.0)
        window.begin, window.end = [0, 0], [more - end for more, end in zip(window.end, ends, strict=True)]
    if window.dilations != (1, 1) or node.builder[image].type in _WITHOUT_POOLS:
        return finish_image(node, _by_places(node, operation, image, window), rank)
    vertical, horizontal = window.kernel
    sizes = [node.builder.int32(number) for number in (horizontal, vertical, 0)]
    arguments = [image, *window.hal_arguments(node), *sizes, node.builder.boolean(True)]
    return finish_image(node, node.emit(operation, arguments), rank)


def _window(node: Node, sizes: Sequence[int], rank: int) -> Window:
    """Return the window of a pool. Raises InvalidArgument if it may miss the image, or its paddings are unclear."""
    if "kernel_shape" not in node.attributes:
        raise InvalidArgument("attribute kernel_shape is missing")
    window = window_of(node, pair_of(node, "kernel_shape", rank), sizes, rank)
    is_same = node.attribute("auto_pad", "NOTSET") in ("SAME_UPPER", "SAME_LOWER")
    for axis, size in enumerate(sizes):
        if max(window.begin[axis], window.end[axis]) >= window.effective(axis):
            raise InvalidArgument(f"pads {window.begin} and {window.end} must be smaller than the window")
        unread = size - (-(-size // window.strides[axis]) - 1) * window.strides[axis] - window.effective(axis)
        if is_same and (window.effective(axis) > window.kernel[axis] or unread > 0):  # runtimes differ
            raise InvalidArgument("auto_pad of a dilated window, or of one smaller than its stride, is not supported")
    return window


def _complete(node: Node, window: Window, sizes: Sequence[int]) -> None:
    """With ceil_mode, extend the end's padding so that the last window, which begins inside the image, is complete."""
    for axis, size in enumerate(sizes):
        stride, kernel = window.strides[axis], window.effective(axis)
        padded = window.begin[axis] + size + window.end[axis]
        if node.attribute("ceil_mode", 0):
            count = -(-(padded - kernel) // stride) + 1
            if (count - 1) * stride >= size + window.begin[axis]:
                count -= 1
            window.end[axis] += max((count - 1) * stride + kernel - padded, 0)
        if window.begin[axis] + size + window.end[axis] < kernel:
            raise InvalidArgument(f"a window of {window.kernel} is larger than the padded image of {tuple(sizes)}")


def _by_places(node: Node, operation: Op, image: int, window: Window) -> int:
    """Return the maxima or averages of windows: those of the pixels at each place, first in columns, then in rows."""
    if max(window.kernel) > _MAX_PLACES:
        raise InvalidArgument(f"a window of {window.kernel} with a dilation is not supported: at most {_MAX_PLACES} is")
    kind, is_average = node.builder[image].type, operation == Op.AVERAGE_POOL_2D
    sizes = node.shape(image)[2:]
    lowest = float(np.iinfo(np.int32).min) if kind == _I32 else -math.inf
    image = pad(node, image, [0, 0, *window.begin], [0, 0, *window.end], 0.0 if is_average else lowest)
    counts = []
    for axis in (0, 1):
        places = [_pixels_at(window, axis, place, node.shape(image)[2 + axis]) for place in range(window.kernel[axis])]
        found, *others = (_rows(node, image, 2 + axis, pixels) for pixels in places)
        for other in others:
            arguments = [found, other, node.builder.int32(0)] if is_average else [found, other]
            found = node.emit(Op.ADD if is_average else Op.MAXIMUM, arguments)
        image = found
        inside = range(window.begin[axis], window.begin[axis] + sizes[axis])
        counts.append(np.sum([[pixel in inside for pixel in pixels] for pixels in places], axis=0))
    if not is_average:
        return image
    count = np.outer(*counts).astype(node.value(0).dtype)
    return node.emit(Op.DIV, [image, node.add_constant(count), node.builder.int32(0)])


def _pixels_at(window: Window, axis: int, place: int, extent: int) -> range:
    """Return the pixels of a padded image that are at one place of all windows."""
    stride, begin = window.strides[axis], place * window.dilations[axis]
    count = (extent - window.effective(axis)) // stride + 1
    return range(begin, begin + (count - 1) * stride + 1, stride)


def _rows(node: Node, image: int, axis: int, pixels: range) -> int:
    return sliced(node, image, [pixels if at == axis else range(n) for at, n in enumerate(node.shape(image))])


def _lp_pool(node: Node) -> None:
    """Convert to the p-th root of a convolution, with weights of 1, of the p-th powers."""
    value, power = node.value(0), _power(node)
    image, rank = image_of(node, node.operand(0))
    window = _window(node, node.shape(image)[2:], rank)
    _complete(node, window, node.shape(image)[2:])
    channels = value.shape[1]
    node.builder.reserve(4 * channels * math.prod(window.kernel))  # before the weights exist
    powers = Value(node.shape(image), value.dtype, _powers(node, image, power))
    weights = Value.of(np.ones((channels, 1, *window.kernel), value.dtype))
    pads = (*window.begin, *window.end)
    attributes = {"pads": pads, "strides": window.strides, "dilations": window.dilations, "group": channels}
    inner = Node(node.name, "Conv", node.opset, node.builder, [powers, weights], ["y"], attributes)
    convolution.CONVERTERS["Conv"](inner)
    finish_image(node, _root(node, node.operand(inner.results[0]), power), rank)


def _power(node: Node) -> int:
    power: int = node.attribute("p", 2)
    if power < 1:
        raise InvalidArgument(f"p is {power}: it must be positive")
    return power


def _powers(node: Node, x: int, power: int) -> int:
    """Return the p-th powers of absolute values."""
    if power == 2:
        return node.emit(Op.MUL, [x, x, node.builder.int32(0)])
    sizes = node.emit(Op.ABS, [x])
    return sizes if power == 1 else node.emit(Op.POW, [sizes, node.filled(node.builder[x].type, power)])


def _root(node: Node, x: int, power: int) -> int:
    if power <= 2:
        return x if power == 1 else node.emit(Op.SQRT, [x])
    return node.emit(Op.POW, [x, node.filled(node.builder[x].type, 1 / power)])


def _global_pool(operation: Op, node: Node) -> None:
    _finish_global(node, _over_pixels(node, operation, node.operand(0)))


def _global_lp_pool(node: Node) -> None:
    power = _power(node)
    total = _over_pixels(node, Op.REDUCE_SUM, _powers(node, node.operand(0), power))
    _finish_global(node, _root(node, total, power))


def _over_pixels(node: Node, operation: Op, x: int) -> int:
    """Return a reduction over all dimensions but those of images and channels, which keeps them as 1."""
    if len(node.shape(x)) < 3:
        raise InvalidArgument(f"the input has rank {len(node.shape(x))}; it needs 3 or more")
    axes = node.builder.int32_vector(range(2, len(node.shape(x))))
    return node.emit(
        operation, [x, axes, node.builder.int32(1) if operation == Op.MEAN else node.builder.boolean(True)]
    )


def _finish_global(node: Node, found: int) -> None:
    node.result(found, node.shape(found))


CONVERTERS: dict[str, Callable[[Node], Any]] = {
    "AveragePool": partial(_pool, Op.AVERAGE_POOL_2D),
    "GlobalAveragePool": partial(_global_pool, Op.MEAN),
    "GlobalLpPool": in_float32(_global_lp_pool),
    "GlobalMaxPool": partial(_global_pool, Op.REDUCE_MAX),
    "LpPool": in_float32(_lp_pool),
    "MaxPool": partial(_pool, Op.MAX_POOL_2D),
}
