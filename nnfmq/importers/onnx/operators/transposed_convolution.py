"""ConvTranspose: TRANSPOSE_CONV_2D; with groups or dilations, a convolution of the image with zeros between pixels.

Weights that may be infinite are multiplied one by one: 0 times infinity is no number.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.extensions import TfliteOperation, operation_code
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.importers.onnx.operators import convolution
from nnfmq.importers.onnx.operators.composition import Composition
from nnfmq.importers.onnx.operators.convolution import (
    IMAGE_RANK,
    Window,
    bias_of,
    filter_of,
    filter_shape,
    finish_image,
    image_of,
    require_kernel_shape,
    window_of,
)
from nnfmq.importers.onnx.operators.elementwise import in_float32
from nnfmq.importers.onnx.operators.movement import pad
from nnfmq.importers.onnx.values import Node, Value

__all__ = ["CONVERTERS", "transposed_convolution"]

_MAX_TAPS = 64
_FLOAT, _HALF = 1, 10  # the numbers of ONNX's element types


def _conv_transpose(node: Node) -> None:
    image, rank = image_of(node, node.operand(0))
    weights, groups = node.value(1), node.attribute("group", 1)
    channels = node.shape(image)[1]
    if len(weights.shape) != rank or weights.shape[0] != channels or groups < 1 or channels % groups:
        shape = node.value(0).shape
        raise InvalidArgument(f"weights of {weights.shape} in {groups} groups do not fit an input of shape {shape}")
    require_kernel_shape(node, weights)
    kernel = filter_shape(weights.shape, rank)[2:]
    window = _window(node, (kernel[0], kernel[1]), node.shape(image)[2:], rank)
    if groups > 1 or window.dilations != (1, 1) or min(window.begin) < 0:
        x = Value(node.shape(image), node.value(0).dtype, image)
        four = Composition(node).reshape(weights, *filter_shape(weights.shape, rank))
        is_finite = weights.array is not None and bool(np.isfinite(weights.array).all())
        convert = transposed_convolution if is_finite else _by_tap
        found = convert(node, x, four, node.value(2) if node.given(2) else None, window, groups)
        return finish_image(node, node.operand(found), rank)
    filter = filter_of(node, weights, filter_shape(weights.shape, rank), (1, 2, 3, 0))
    arguments = [image, filter, bias_of(node, weights.shape[1]), *window.hal_arguments(node)]
    operands = [*arguments, node.builder.int32(0), node.builder.boolean(True)]
    return finish_image(node, node.emit(Op.TRANSPOSE_CONV_2D, operands), rank)


def _window(node: Node, kernel: tuple[int, int], sizes: Sequence[int], rank: int) -> Window:
    """Return the window; its paddings are cut off from the result, and negative ones are added to it."""
    window = window_of(node, kernel, sizes, rank)
    count, unused = rank - 2, (0,) * (IMAGE_RANK - rank)
    extra = node.attribute("output_padding", (0,) * count)
    wanted = node.attribute("output_shape", ())[-count:]
    if len(extra) != count or (wanted and len(wanted) != count):
        raise InvalidArgument(f"output_padding {extra} or output_shape {wanted} does not have {count} numbers")
    mode = node.attribute("auto_pad", "NOTSET")
    window.end = [end - more for end, more in zip(window.end, (*unused, *extra), strict=True)]
    if wanted or mode in ("SAME_UPPER", "SAME_LOWER"):
        _fit(window, sizes, (*unused, *extra), (1,) * len(unused) + tuple(wanted) if wanted else None, mode)
    for axis, size in enumerate(sizes):
        result = (size - 1) * window.strides[axis] + window.effective(axis) - window.begin[axis] - window.end[axis]
        if result < 1 or not 0 <= (*unused, *extra)[axis] < max(window.strides[axis], window.dilations[axis]):
            raise InvalidArgument(f"a result of {result} pixels, or output_padding {extra}, is not possible")
    return window


def _fit(window: Window, sizes: Sequence[int], extra: Sequence[int], wanted: Sequence[int] | None, mode: str) -> None:
    """Choose the paddings so that the result has the wanted size, or that of the input times the stride."""
    for axis, size in enumerate(sizes):
        stride = window.strides[axis]
        target = size * stride if wanted is None else wanted[axis]
        total = (size - 1) * stride + window.effective(axis) + extra[axis] - target
        if total <= -stride or (total < 0 and wanted is None):
            raise InvalidArgument(f"a result of {target} pixels from {size} is not possible")
        less, more = total // 2, total - total // 2
        begin, end = (less, more) if mode == "SAME_UPPER" else (more, less)
        begin, end = (0, total) if total < 0 else (begin, end)
        window.begin[axis], window.end[axis] = begin, end - extra[axis]


def transposed_convolution(
    node: Node, x: Value, weights: Value, bias: Value | None, window: Window, groups: int
) -> Value:
    """Return the convolution of an image with zeros between its pixels; `weights` (inputs, outputs, height, width).

    The weights must be finite: products with the zeros are 0 then.
    """
    compose = Composition(node)
    stuffed = _with_zeros_between(node, x, window)
    begin = [window.effective(axis) - 1 - window.begin[axis] for axis in (0, 1)]
    end = [window.effective(axis) - window.end[axis] - window.strides[axis] for axis in (0, 1)]
    stuffed = pad(node, stuffed, [0, 0, *begin], [0, 0, *end], 0.0)
    image = Value(node.shape(stuffed), x.dtype, stuffed)
    attributes = {"group": groups, "dilations": window.dilations}
    inputs = [image, _flipped(compose, weights, groups), *([] if bias is None else [bias])]
    inner = Node(node.name, "Conv", node.opset, node.builder, list(inputs), ["y"], attributes)
    convolution.CONVERTERS["Conv"](inner)
    return inner.results[0]


def _with_zeros_between(node: Node, x: Value, window: Window) -> int:
    """Return an image with strides - 1 zeros after each of its pixels."""
    (batch, channels, height, width), (down, across) = x.shape, window.strides
    stuffed = node.reshaped(node.operand(x), (batch * channels * height, 1, width, 1))
    stuffed = pad(node, stuffed, [0] * 4, [0, down - 1, 0, across - 1], 0.0)
    return node.reshaped(stuffed, (batch, channels, height * down, width * across))


def _by_tap(node: Node, x: Value, weights: Value, bias: Value | None, window: Window, groups: int) -> Value:
    """Return the sum of the products with each weight of the kernel, which may be infinite, at their places."""
    compose, dtype, (inputs, outputs, *kernel) = Composition(node), x.dtype, weights.shape
    count = math.prod(kernel)
    if count > _MAX_TAPS:
        raise InvalidArgument(f"a kernel of {count} weights, in groups or dilated, is supported if they are finite")
    x, weights = (compose("Cast", value, to=_FLOAT) for value in (x, weights))
    flat = compose.reshape(weights, groups, inputs // groups, outputs, count)
    total: Value | None = None
    for tap, at in enumerate(itertools.product(*map(range, kernel))):
        ordered = compose.transpose(compose.part(flat, 3, tap, tap + 1), 0, 2, 1, 3)
        filter = compose.reshape(ordered, groups * outputs, inputs // groups, 1, 1)
        product = compose("Conv", x, filter, group=groups)
        placed = _placed(node, product, window, at)
        if placed is not None:
            total = placed if total is None else compose("Add", total, placed)
    if total is None:
        raise InvalidArgument("no weight of the kernel reaches the result")
    if bias is not None:
        added = compose.reshape(compose("Cast", bias, to=_FLOAT), groups * outputs, 1, 1)
        total = compose("Add", total, added)
    return compose("Cast", total, to=_HALF) if dtype == np.float16 else total


def _placed(node: Node, product: Value, window: Window, at: Sequence[int]) -> Value | None:
    """Return the products with one weight where they are in the result, and zeros elsewhere; None if they are not."""
    begin, end = [], []
    for axis, place in enumerate(at):
        size, stride = product.shape[2 + axis], window.strides[axis]
        first = place * window.dilations[axis] - window.begin[axis]
        result = (size - 1) * stride + window.effective(axis) - window.begin[axis] - window.end[axis]
        if first >= result or first + size * stride <= 0:
            return None
        begin.append(first)
        end.append(result - size * stride - first)
    found = pad(node, _with_zeros_between(node, product, window), [0, 0, *begin], [0, 0, *end], 0.0)
    return Value(node.shape(found), product.dtype, found)


def _flipped(compose: Composition, weights: Value, groups: int) -> Value:
    """Return the weights of the convolution: (outputs of all groups, inputs of one, height, width), turned by 180°."""
    inputs, outputs, *kernel = weights.shape
    flat = compose.reshape(weights, groups, inputs // groups, outputs, math.prod(kernel))
    ordered = compose.transpose(compose.backwards(flat, 3), 0, 2, 1, 3)
    return compose.reshape(ordered, groups * outputs, inputs // groups, *kernel)


_TRANSPOSED_CONVOLUTION_CONVERTERS: dict[str, Callable[[Node], None]] = {"ConvTranspose": _conv_transpose}


# ----------------------------------------------------------------------------------------------------------------------
# Col2Im: the sums of the blocks that overlap at each pixel.


_SUM = 0  # of UNSORTED_SEGMENT


def _col2im(node: Node) -> None:
    """Convert to a sum of segments, in which the elements of all blocks for a pixel have its number."""
    shape = node.value(0).shape
    sizes, block = (node.integers(name, place) or () for place, name in ((1, "image_shape"), (2, "block_shape")))
    if len(shape) != 3 or not sizes or len(block) != len(sizes) or min(*sizes, *block) < 1:
        raise InvalidArgument(f"blocks of {block} in images of {sizes} from a tensor of shape {shape}")
    pixels = _pixels(node, sizes, block)
    channels = shape[1] // pixels.shape[0]
    if not pixels.size or shape[1:] != (channels * pixels.shape[0], pixels.shape[1]):
        raise InvalidArgument(f"{shape[2]} blocks of {shape[1]} elements are not those of images of {sizes}")
    compose = Composition(node)
    images = shape[0] * channels
    x = compose.transpose(compose.reshape(node.value(0), images, *pixels.shape), 1, 2, 0)
    arguments = [node.operand(x), node.add_constant(pixels), node.builder.int32_vector([math.prod(sizes)])]
    sums = node.emit(operation_code(TfliteOperation.UNSORTED_SEGMENT), [*arguments, node.builder.int32(_SUM)])
    found = compose.transpose(Value((math.prod(sizes), images), node.value(0).dtype, sums), 1, 0)
    node.result(node.operand(found), (shape[0], channels, *sizes))


def _pixels(node: Node, sizes: Sequence[int], block: Sequence[int]) -> npt.NDArray[np.int32]:
    """Return the number of the pixel of each element of a block, for each block; -1 in the padding."""
    rank = len(sizes)
    dilations, strides = (node.attribute(name, (1,) * rank) for name in ("dilations", "strides"))
    pads = node.attribute("pads", (0,) * 2 * rank)
    if not len(dilations) == len(strides) == rank or len(pads) != 2 * rank or min(*dilations, *strides) < 1:
        raise InvalidArgument(f"dilations {dilations}, strides {strides} or pads {pads} do not fit {rank} dimensions")
    numbers: Any = np.zeros((1,) * 2 * rank, np.int64)
    is_inside: Any = np.ones((1,) * 2 * rank, np.bool_)
    for axis, (size, extent) in enumerate(zip(sizes, block, strict=True)):
        count = (size + pads[axis] + pads[rank + axis] - dilations[axis] * (extent - 1) - 1) // strides[axis] + 1
        within = np.arange(extent) * dilations[axis] - pads[axis]
        places = within[:, np.newaxis] + np.arange(max(count, 0)) * strides[axis]
        spread = [1] * 2 * rank
        spread[axis], spread[rank + axis] = places.shape
        places = places.reshape(spread)
        numbers, is_inside = numbers * size + places, is_inside & (places >= 0) & (places < size)
    return np.where(is_inside, numbers, -1).astype(np.int32).reshape(math.prod(block), -1)


_BLOCKS_CONVERTERS: dict[str, Callable[[Node], None]] = {"Col2Im": in_float32(_col2im)}

CONVERTERS: dict[str, Callable[[Node], None]] = {**_TRANSPOSED_CONVOLUTION_CONVERTERS, **_BLOCKS_CONVERTERS}
