"""Convolutions and pooling. Images are NCHW, which the HAL accepts; images of rank 3 become rows of pixels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.hal.types import OperandType
from nnfmq.importers.onnx_operators.onnx_movement import pad
from nnfmq.importers.onnx_values import Node, Value

__all__ = ["CONVERTERS", "convolve"]

_ROW, _IMAGE = 3, 4
_QUANTIZED = (OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT8_ASYMM_SIGNED)
_WINDOW_ATTRIBUTES = ("auto_pad", "dilations", "pads", "strides")


@dataclass(slots=True)
class Window:
    """A window over an image: for each of height and width its size, stride, dilation and paddings."""

    kernel: tuple[int, int]
    strides: tuple[int, int]
    dilations: tuple[int, int]
    begin: list[int]
    end: list[int]

    def effective(self, axis: int) -> int:
        """Return the size of the dilated window."""
        return (self.kernel[axis] - 1) * self.dilations[axis] + 1

    def hal_arguments(self, node: Node) -> list[int]:
        """Return the paddings and strides as the HAL orders them."""
        (top, left), (bottom, right), (vertical, horizontal) = self.begin, self.end, self.strides
        return [node.builder.int32(number) for number in (left, right, top, bottom, horizontal, vertical)]


def _pair(node: Node, name: str, rank: int, default: int = 1) -> tuple[int, int]:
    """Return a spatial attribute for height and width; a row of pixels has height 1."""
    count = rank - 2
    numbers = node.attribute(name, (default,) * count)
    if len(numbers) != count or not all(isinstance(number, int) and 0 < number < 1 << 31 for number in numbers):
        raise InvalidArgument(f"attribute {name} is {numbers}: it must have {count} positive numbers")
    return (1, numbers[0]) if count == 1 else (numbers[0], numbers[1])


def _window(node: Node, kernel: tuple[int, int], sizes: Sequence[int], rank: int) -> Window:
    """Return the window of a node with auto_pad or pads; `sizes` are the height and width of its input."""
    window = Window(kernel, _pair(node, "strides", rank), _pair(node, "dilations", rank), [0, 0], [0, 0])
    mode, pads = node.attribute("auto_pad", "NOTSET"), node.attribute("pads", (0,) * (2 * (rank - 2)))
    if mode == "NOTSET":
        if len(pads) != 2 * (rank - 2) or not all(isinstance(n, int) and 0 <= n < 1 << 31 for n in pads):
            raise InvalidArgument(
                f"attribute pads is {pads}: it must have {2 * (rank - 2)} numbers that are not negative"
            )
        first = [0] * (_IMAGE - rank)
        window.begin, window.end = first + list(pads[: rank - 2]), first + list(pads[rank - 2 :])
    elif mode in ("SAME_UPPER", "SAME_LOWER"):
        for axis, size in enumerate(sizes):
            count = -(-size // window.strides[axis])
            total = max((count - 1) * window.strides[axis] + window.effective(axis) - size, 0)
            small, large = total // 2, total - total // 2
            window.begin[axis], window.end[axis] = (small, large) if mode == "SAME_UPPER" else (large, small)
    elif mode != "VALID":
        raise InvalidArgument(f"auto_pad {mode!r} is unknown")
    return window


def _image(node: Node, operand: int) -> tuple[int, int]:
    """Return an image of rank 4 and the original rank. Raises InvalidArgument for other ranks than 3 and 4."""
    shape = node.shape(operand)
    if len(shape) == _ROW:
        return node.reshaped(operand, (*shape[:2], 1, shape[2])), _ROW
    if len(shape) != _IMAGE:
        raise InvalidArgument(f"the input has rank {len(shape)}; supported are 3 and 4")
    return operand, _IMAGE


def _finish(node: Node, operand: int, rank: int) -> None:
    shape = node.shape(operand)
    node.result(operand, shape if rank == _IMAGE else (*shape[:2], shape[3]))


def _filter(node: Node, value: Value, shape: tuple[int, ...], permutation: tuple[int, ...]) -> int:
    """Return weights, in the shape of rank 4, as an operand in the HAL's order of dimensions."""
    if value.array is not None:
        return node.add_constant(value.array.reshape(shape).transpose(permutation))
    weights = node.reshaped(node.operand(value), shape)
    return node.emit(Op.TRANSPOSE, [weights, node.builder.int32_vector(permutation)])


def _filter_shape(shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Return the shape of weights in rank 4."""
    if len(shape) != rank:
        raise InvalidArgument(f"the weights have rank {len(shape)}, the input has rank {rank}")
    return shape if rank == _IMAGE else (*shape[:2], 1, shape[2])


def _bias(node: Node, count: int) -> int:
    return node.operand(2) if node.given(2) else node.add_constant(np.zeros(count, node.value(0).dtype))


def _padded_outside(node: Node, image: int, window: Window) -> int:
    """Pad the image by an operation of its own if the HAL's window does not accept the paddings."""
    sides = zip(window.begin, window.end, strict=True)
    if all(max(pair) < window.effective(axis) for axis, pair in enumerate(sides)):
        return image
    if node.builder[image].type in _QUANTIZED:
        raise InvalidArgument("a padding as large as the window is not supported for integers")
    image = pad(node, image, [0, 0, *window.begin], [0, 0, *window.end], 0.0)
    window.begin, window.end = [0, 0], [0, 0]
    return image


def _conv(node: Node) -> None:
    weights = node.value(1)
    convolve(node, partial(_filter, node, weights), _bias(node, weights.shape[0]))


def convolve(
    node: Node,
    filter: Callable[[tuple[int, ...], tuple[int, ...]], int],
    bias: int,
    quantization: tuple[float, int] | None = None,
) -> None:
    """Convert a convolution. `filter` returns the weights as an operand, given their shape and a permutation of it.

    `quantization`: scale and zero point of the result of a quantized convolution.
    """
    image, rank = _image(node, node.operand(0))
    weights, groups = node.value(1), node.attribute("group", 1)
    channels = node.shape(image)[1]
    if len(weights.shape) != rank or groups < 1 or weights.shape[1] * groups != channels or weights.shape[0] % groups:
        raise InvalidArgument(
            f"weights of {weights.shape} in {groups} groups do not fit an input of {channels} channels"
        )
    kernel = weights.shape[2:] if rank == _IMAGE else (1, *weights.shape[2:])
    window = _window(node, (kernel[0], kernel[1]), node.shape(image)[2:], rank)
    image = _padded_outside(node, image, window)
    is_depthwise = groups > 1 and groups == channels
    weights_operand = filter(_filter_shape(weights.shape, rank), (1, 2, 3, 0) if is_depthwise else (0, 2, 3, 1))
    arguments = [image, weights_operand, bias, *window.hal_arguments(node)]
    vertical, horizontal = window.dilations
    tail = [node.builder.int32(0), node.builder.boolean(True), *map(node.builder.int32, (horizontal, vertical))]
    operation = Op.CONV_2D
    if is_depthwise:
        operation, tail = Op.DEPTHWISE_CONV_2D, [node.builder.int32(weights.shape[0] // groups), *tail]
    elif groups > 1 and window.dilations != (1, 1):
        raise InvalidArgument("a dilated convolution in groups is not supported")
    elif groups > 1:
        operation, tail = Op.GROUPED_CONV_2D, [node.builder.int32(groups), *tail[:2]]
    _finish(node, node.emit(operation, [*arguments, *tail], quantization=quantization), rank)


def _conv_transpose(node: Node) -> None:
    image, rank = _image(node, node.operand(0))
    weights = node.value(1)
    if len(weights.shape) != rank or weights.shape[0] != node.shape(image)[1]:
        raise InvalidArgument(f"weights of {weights.shape} do not fit an input of shape {node.value(0).shape}")
    if node.attribute("group", 1) != 1 or any(number != 1 for number in node.attribute("dilations", ())):
        raise InvalidArgument("groups and dilations are not supported")
    if node.attribute("auto_pad", "NOTSET") not in ("NOTSET", "VALID") or "output_shape" in node.attributes:
        raise InvalidArgument("auto_pad and output_shape are not supported")
    kernel = weights.shape[2:] if rank == _IMAGE else (1, *weights.shape[2:])
    window = _window(node, (kernel[0], kernel[1]), node.shape(image)[2:], rank)
    extra = node.attribute("output_padding", (0,) * (rank - 2))
    extra = (0,) * (_IMAGE - rank) + tuple(extra)
    window.end = [end - more for end, more in zip(window.end, extra, strict=True)]
    if min(window.end) < 0:
        raise InvalidArgument("an output_padding larger than the padding is not supported")
    filter = _filter(node, weights, _filter_shape(weights.shape, rank), (1, 2, 3, 0))
    arguments = [image, filter, _bias(node, weights.shape[1]), *window.hal_arguments(node)]
    found = node.emit(Op.TRANSPOSE_CONV_2D, [*arguments, node.builder.int32(0), node.builder.boolean(True)])
    _finish(node, found, rank)


def _pool(operation: Op, node: Node) -> None:
    image, rank = _image(node, node.operand(0))
    if node.used(1):
        raise InvalidArgument("the output of indices is not supported")
    if "kernel_shape" not in node.attributes:
        raise InvalidArgument("attribute kernel_shape is missing")
    window = _window(node, _pair(node, "kernel_shape", rank), node.shape(image)[2:], rank)
    if window.dilations != (1, 1):
        raise InvalidArgument("a dilated window is not supported")
    counts_padding = node.attribute("count_include_pad", 0)
    if operation == Op.AVERAGE_POOL_2D and counts_padding and any(window.begin + window.end):
        if node.attribute("ceil_mode", 0):
            raise InvalidArgument("count_include_pad and ceil_mode together are not supported")
        image = pad(node, image, [0, 0, *window.begin], [0, 0, *window.end], 0.0)
        window.begin, window.end = [0, 0], [0, 0]
    if node.attribute("ceil_mode", 0):
        _round_up(window, node.shape(image)[2:])
    vertical, horizontal = window.kernel
    sizes = [node.builder.int32(number) for number in (horizontal, vertical, 0)]
    arguments = [image, *window.hal_arguments(node), *sizes, node.builder.boolean(True)]
    _finish(node, node.emit(operation, arguments), rank)


def _round_up(window: Window, sizes: Sequence[int]) -> None:
    """Extend the end's padding so that the last window, which begins inside the padded image, is complete."""
    for axis, size in enumerate(sizes):
        stride, kernel = window.strides[axis], window.effective(axis)
        padded = window.begin[axis] + size + window.end[axis]
        count = -(-(padded - kernel) // stride) + 1
        if (count - 1) * stride >= size + window.begin[axis]:
            count -= 1
        window.end[axis] += max((count - 1) * stride + kernel - padded, 0)


def _lp_pool(node: Node) -> None:
    """Convert to the p-th root of a convolution, with weights of 1, of the p-th powers."""
    value, power = node.value(0), node.attribute("p", 2)
    kernel = node.attribute("kernel_shape", ())
    if node.attribute("ceil_mode", 0) or power < 1 or len(kernel) != len(value.shape) - 2 or min(kernel) < 1:
        raise InvalidArgument("ceil_mode is not supported, and p and kernel_shape must be positive")
    kind, channels = node.builder[node.operand(0)].type, value.shape[1]
    node.builder.reserve(4 * channels * math.prod(kernel))  # before the weights exist
    powers = node.emit(Op.POW, [node.emit(Op.ABS, [node.operand(0)]), node.filled(kind, power)])
    weights = Value.of(np.ones((channels, 1, *kernel), value.dtype))
    attributes = {name: node.attributes[name] for name in _WINDOW_ATTRIBUTES if name in node.attributes}
    inputs: list[Value | None] = [Value(value.shape, value.dtype, powers), weights]
    inner = Node(node.name, "Conv", node.opset, node.builder, inputs, ["y"], {**attributes, "group": channels})
    _conv(inner)
    node.attributes_read |= inner.attributes_read
    found = inner.results[0]
    node.result(node.emit(Op.POW, [node.operand(found), node.filled(kind, 1 / power)]), found.shape)


def _global_pool(operation: Op, node: Node) -> None:
    x = node.operand(0)
    axes = node.builder.int32_vector(range(2, len(node.shape(x))))
    keeps = node.builder.int32(1) if operation == Op.MEAN else node.builder.boolean(True)
    found = node.emit(operation, [x, axes, keeps])
    node.result(found, node.shape(found))


CONVERTERS: dict[str, Callable[[Node], Any]] = {
    "AveragePool": partial(_pool, Op.AVERAGE_POOL_2D),
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "GlobalAveragePool": partial(_global_pool, Op.MEAN),
    "GlobalMaxPool": partial(_global_pool, Op.REDUCE_MAX),
    "LpPool": _lp_pool,
    "MaxPool": partial(_pool, Op.MAX_POOL_2D),
}
