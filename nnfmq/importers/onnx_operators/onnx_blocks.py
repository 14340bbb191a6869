"""Col2Im: the sums of the blocks that overlap at each pixel."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.tflite_codes import TfliteOperation, operation_code
from nnfmq.importers.onnx_operators.onnx_composition import Composition
from nnfmq.importers.onnx_operators.onnx_half import in_float32
from nnfmq.importers.onnx_values import Node, Value

__all__ = ["CONVERTERS"]

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


CONVERTERS: dict[str, Callable[[Node], None]] = {"Col2Im": in_float32(_col2im)}
