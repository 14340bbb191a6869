"""Conv, and windows over images. Images are NCHW, which the HAL accepts; those of rank 3 become rows of pixels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.hal.types import OperandType
from nnfmq.importers.onnx.operators.movement import pad, part
from nnfmq.importers.onnx.values import Node, Value

__all__ = [
    "CONVERTERS",
    "IMAGE_RANK",
    "Window",
    "bias_of",
    "convolve",
    "filter_of",
    "filter_shape",
    "finish_image",
    "image_of",
    "pair_of",
    "require_kernel_shape",
    "window_of",
]

_ROW, IMAGE_RANK = 3, 4
_MAX_GROUPS = 1024  # of dilated convolutions, each of which is an operation
_QUANTIZED = (OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT8_ASYMM_SIGNED)


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


def pair_of(node: Node, name: str, rank: int) -> tuple[int, int]:
    """Return a spatial attribute for height and width, 1 by default; a row of pixels has height 1."""
    count = rank - 2
    numbers = node.attribute(name, (1,) * count)
    if len(numbers) != count or not all(isinstance(number, int) and 0 < number < 1 << 31 for number in numbers):
        raise InvalidArgument(f"attribute {name} is {numbers}: it must have {count} positive numbers")
    return (1, numbers[0]) if count == 1 else (numbers[0], numbers[1])


def window_of(node: Node, kernel: tuple[int, int], sizes: Sequence[int], rank: int) -> Window:
    """Return the window of a node with auto_pad or pads; `sizes` are the height and width of its input."""
    window = Window(kernel, pair_of(node, "strides", rank), pair_of(node, "dilations", rank), [0, 0], [0, 0])
    mode, pads = node.attribute("auto_pad", "NOTSET"), node.attribute("pads", (0,) * (2 * (rank - 2)))
    if mode == "NOTSET":
        if len(pads) != 2 * (rank - 2) or not all(isinstance(n, int) and 0 <= n < 1 << 31 for n in pads):
            raise InvalidArgument(
                f"attribute pads is {pads}: it must have {2 * (rank - 2)} numbers that are not negative"
            )
        first = [0] * (IMAGE_RANK - rank)
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


def image_of(node: Node, operand: int) -> tuple[int, int]:
    """Return an image of rank 4 and the original rank. Raises InvalidArgument for other ranks than 3 and 4."""
    shape = node.shape(operand)
    if len(shape) == _ROW:
        return node.reshaped(operand, (*shape[:2], 1, shape[2])), _ROW
    if len(shape) != IMAGE_RANK:
        raise InvalidArgument(f"the input has rank {len(shape)}; supported are 3 and 4")
    return operand, IMAGE_RANK


def finish_image(node: Node, operand: int, rank: int) -> None:
    """Make an image the result of a node whose input has this rank."""
    shape = node.shape(operand)
    node.result(operand, shape if rank == IMAGE_RANK else (*shape[:2], shape[3]))


def filter_of(node: Node, value: Value, shape: tuple[int, ...], permutation: tuple[int, ...]) -> int:
    """Return weights, in the shape of rank 4, as an operand in the HAL's order of dimensions."""
    if value.array is not None:
        return node.add_constant(value.array.reshape(shape).transpose(permutation))
    weights = node.reshaped(node.operand(value), shape)
    return node.emit(Op.TRANSPOSE, [weights, node.builder.int32_vector(permutation)])


def require_kernel_shape(node: Node, weights: Value) -> None:
    """Require that attribute kernel_shape, if it is given, is that of the weights."""
    stated = node.attribute("kernel_shape", weights.shape[2:])
    if tuple(stated) != weights.shape[2:]:
        raise InvalidArgument(f"attribute kernel_shape is {stated}: the weights have the shape {weights.shape}")


def filter_shape(shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Return the shape of weights in rank 4."""
    if len(shape) != rank:
        raise InvalidArgument(f"the weights have rank {len(shape)}, the input has rank {rank}")
    return shape if rank == IMAGE_RANK else (*shape[:2], 1, shape[2])


def bias_of(node: Node, count: int) -> int:
    """Return the bias of a convolution with `count` channels: zeros if it is omitted."""
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
    weights, groups = node.value(1), node.attribute("group", 1)
    is_dilated = any(number != 1 for number in node.attribute("dilations", ()))
    if is_dilated and 1 < groups < node.value(0).shape[1]:
        return _conv_by_group(node, groups)
    return convolve(node, partial(filter_of, node, weights), bias_of(node, weights.shape[0]))


def _conv_by_group(node: Node, groups: int) -> None:
    """Convert a dilated convolution in groups to one for each group: the HAL's GROUPED_CONV_2D is not dilated."""
    x, weights = node.value(0), node.value(1)
    if groups > _MAX_GROUPS or x.shape[1] % groups or weights.shape[0] % groups:
        raise InvalidArgument(f"{groups} groups of {x.shape[1]} channels and {weights.shape[0]} filters, dilated")
    bias = node.value(2) if node.given(2) else None
    found: list[int] = []
    for group in range(groups):
        inputs = [_group_of(node, x, 1, group, groups), _group_of(node, weights, 0, group, groups)]
        inputs += [] if bias is None else [_group_of(node, bias, 0, group, groups)]
        inner = Node(node.name, "Conv", node.opset, node.builder, [*inputs], ["y"], {**node.attributes, "group": 1})
        _conv(inner)
        node.attributes_read |= inner.attributes_read
        found.append(node.operand(inner.results[0]))
    joined = node.emit(Op.CONCATENATION, [*found, node.builder.int32(1)])
    node.result(joined, node.shape(joined))


def _group_of(node: Node, value: Value, axis: int, group: int, groups: int) -> Value:
    count = value.shape[axis] // groups
    return part(node, value, axis, group * count, (group + 1) * count)


def convolve(
    node: Node,
    filter: Callable[[tuple[int, ...], tuple[int, ...]], int],
    bias: int,
    quantization: tuple[float, int] | None = None,
    operation: Op = Op.CONV_2D,
    more: Sequence[int] = (),
    kind: OperandType | None = None,
) -> None:
    """Convert a convolution. `filter` returns the weights as an operand, given their shape and a permutation of it.

    `quantization`: scale and zero point of the result of a quantized convolution. `operation` computes a convolution
    without groups, and has the operands `more` after those of CONV_2D. `kind` is the type of the result, if it is not
    the image's.
    """
    image, rank = image_of(node, node.operand(0))
    weights, groups = node.value(1), node.attribute("group", 1)
    channels = node.shape(image)[1]
    if len(weights.shape) != rank or groups < 1 or weights.shape[1] * groups != channels or weights.shape[0] % groups:
        raise InvalidArgument(
            f"weights of {weights.shape} in {groups} groups do not fit an input of {channels} channels"
        )
    require_kernel_shape(node, weights)
    kernel = weights.shape[2:] if rank == IMAGE_RANK else (1, *weights.shape[2:])
    window = window_of(node, (kernel[0], kernel[1]), node.shape(image)[2:], rank)
    image = _padded_outside(node, image, window)
    is_depthwise = groups > 1 and groups == channels
    weights_operand = filter(filter_shape(weights.shape, rank), (1, 2, 3, 0) if is_depthwise else (0, 2, 3, 1))
    arguments = [image, weights_operand, bias, *window.hal_arguments(node)]
    vertical, horizontal = window.dilations
    tail = [node.builder.int32(0), node.builder.boolean(True), *map(node.builder.int32, (horizontal, vertical)), *more]
    if is_depthwise:
        operation, tail = Op.DEPTHWISE_CONV_2D, [node.builder.int32(weights.shape[0] // groups), *tail]
    elif groups > 1 and window.dilations != (1, 1):
        raise InvalidArgument("a dilated convolution in groups is not supported")
    elif groups > 1:
        operation, tail = Op.GROUPED_CONV_2D, [node.builder.int32(groups), *tail[:2]]
    finish_image(node, node.emit(operation, [*arguments, *tail], kind, quantization), rank)


CONVERTERS: dict[str, Callable[[Node], Any]] = {"Conv": _conv}
