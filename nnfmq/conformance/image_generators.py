"""Generators of operations on images and of matrix products: windows, filters, blocks, boxes."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from nnfmq.conformance.operation_generators import ArgumentRequest, Arguments, OperandSpec, indices, integers
from nnfmq.conformance.random_source import Discard, RandomSource
from nnfmq.hal.types import OperandType
from nnfmq.operations.signature import NUMPY_TYPES, Shape


def _window(
    rng: RandomSource, request: ArgumentRequest, dimensions: Shape, max_sizes: Shape
) -> tuple[dict[str, int], Shape]:
    """Return strides, dilations, padding and activation by name, and the window's height and width.

    The output has at least one pixel.
    """
    attributes: dict[str, int] = {}
    scheme = rng.integer(1, 2)
    sizes = []
    sides = (("height", "top", "bottom"), ("width", "left", "right"))
    for dimension, max_size, (side, before, after) in zip(dimensions, max_sizes, sides, strict=True):
        size = rng.integer(1, max(1, min(dimension, max_size)))
        dilations = [d for d in (1, 2, 3) if (size - 1) * d < dimension] if f"dilation_{side}" in request.types else [1]
        dilation = rng.choice(dilations)
        effective_size = (size - 1) * dilation + 1
        attributes |= {f"stride_{side}": rng.integer(1, 3), f"dilation_{side}": dilation}
        attributes |= {f"padding_{before}": rng.integer(0, min(3, effective_size - 1))}
        attributes |= {f"padding_{after}": rng.integer(0, min(3, effective_size - 1))}
        sizes.append(size)
    return attributes | {"padding_scheme": scheme, "activation": rng.activation()}, tuple(sizes)


def pool(rng: RandomSource, request: ArgumentRequest) -> Arguments:
    """Generate the attributes of a pooling window."""
    attributes, (height, width) = _window(rng, request, request.shape[1:3], (30, 30))
    return attributes | {"filter_height": height, "filter_width": width}


def _filter_arguments(
    rng: RandomSource, request: ArgumentRequest, filter: Shape, attributes: dict[str, int], macs: int
) -> Arguments:
    """Return the attributes and the filter. `macs` is the number of multiply-accumulates."""
    elements = math.prod(filter)
    if elements > rng.limits.elements or macs > rng.limits.macs:
        raise Discard("a filter with too many elements or multiply-accumulates")
    return {**attributes, "filter": OperandSpec(filter)}


def _channels(rng: RandomSource, request: ArgumentRequest) -> int:
    pixels = request.shape[0] * request.shape[1] * request.shape[2]
    return rng.dimension(max(1, min(rng.limits.elements // pixels, rng.limits.dimension)))


def convolution(rng: RandomSource, request: ArgumentRequest) -> Arguments:
    """Generate a filter and its bias."""
    batch, height, width, depth = request.shape
    attributes, sizes = _window(rng, request, (height, width), (12, 12))
    channels = _channels(rng, request)
    macs = batch * height * width * math.prod(sizes) * depth * channels
    arguments = _filter_arguments(rng, request, (channels, *sizes, depth), attributes, macs)
    return arguments | {"bias": OperandSpec((channels,))}


def depthwise(rng: RandomSource, request: ArgumentRequest) -> Arguments:
    """Generate a filter for each channel."""
    batch, height, width, depth = request.shape
    attributes, sizes = _window(rng, request, (height, width), (12, 12))
    multiplier = rng.integer(1, 4)
    channels = depth * multiplier
    macs = batch * height * width * math.prod(sizes) * channels
    arguments = _filter_arguments(rng, request, (1, *sizes, channels), attributes, macs)
    return arguments | {"bias": OperandSpec((channels,)), "depth_multiplier": multiplier}


def grouped(rng: RandomSource, request: ArgumentRequest) -> Arguments:
    """Generate groups and a filter."""
    batch, height, width, depth = request.shape
    attributes, sizes = _window(rng, request, (height, width), (12, 12))
    groups = rng.divisor(depth)
    channels = groups * max(1, _channels(rng, request) // groups)
    macs = batch * height * width * math.prod(sizes) * depth * channels // groups
    arguments = _filter_arguments(rng, request, (channels, *sizes, depth // groups), attributes, macs)
    return arguments | {"bias": OperandSpec((channels,)), "groups": groups}


def transposed(rng: RandomSource, request: ArgumentRequest) -> Arguments:
    """Generate a filter and the output shape."""
    batch, height, width, depth = request.shape
    attributes, output_size, sizes = {"padding_scheme": rng.integer(1, 2), "activation": rng.activation()}, [], []
    for dimension, side, before, after in ((height, "height", "top", "bottom"), (width, "width", "left", "right")):
        size, stride = rng.integer(1, 8), rng.integer(1, 3)
        attributes |= {f"stride_{side}": stride, f"padding_{before}": rng.integer(0, (size - 1) // 2)}
        attributes |= {f"padding_{after}": rng.integer(0, (size - 1) // 2)}
        output_size.append(dimension * stride if attributes["padding_scheme"] == 1 else (dimension - 1) * stride + size)
        sizes.append(size)
    channels = _channels(rng, request)
    macs = batch * height * width * math.prod(sizes) * depth * channels
    arguments = _filter_arguments(rng, request, (channels, *sizes, depth), attributes, macs)
    return arguments | {"bias": OperandSpec((channels,)), "output_shape": integers([batch, *output_size, channels])}


def fully_connected(rng: RandomSource, request: ArgumentRequest) -> Arguments:
    """Generate weights and bias."""
    length = math.prod(request.shape[rng.integer(1, len(request.shape) - 1) :])
    rows = math.prod(request.shape) // length
    units = rng.dimension(max(1, min(rng.limits.elements // max(length, rows), rng.limits.dimension)))
    return {"weights": OperandSpec((units, length)), "bias": OperandSpec((units,)), "activation": rng.activation()}


def depth_to_space(rng: RandomSource, request: ArgumentRequest) -> Arguments:
    """Generate a block size that divides the channels."""
    return {"block": rng.choice([b for b in range(1, 11) if request.shape[3] % (b * b) == 0])}


def space_to_depth(rng: RandomSource, request: ArgumentRequest) -> Arguments:
    """Generate a block size that divides height and width."""
    return {"block": rng.divisor(math.gcd(*request.shape[1:3]), max_divisor=10)}


def batch_to_space(rng: RandomSource, request: ArgumentRequest) -> Arguments:
    """Generate a block size that divides the batch."""
    rows = rng.divisor(request.shape[0], max_divisor=10)
    return {"block": integers([rows, rng.divisor(request.shape[0] // rows, max_divisor=10)])}


def space_to_batch(rng: RandomSource, request: ArgumentRequest) -> Arguments:
    """Generate a block size, and paddings to a multiple of it."""
    blocks = [rng.integer(1, 5), rng.integer(1, 5)]
    padding_before = [rng.integer(0, 3), rng.integer(0, 3)]
    sizes = zip(request.shape[1:3], padding_before, blocks, strict=True)
    padding_after = [-(dimension + before) % block for dimension, before, block in sizes]
    return {"block": integers(blocks), "paddings": integers(list(zip(padding_before, padding_after, strict=True)))}


def image_of(multiple: Callable[[int], Shape]) -> Callable[[RandomSource, int], Shape]:
    """Return a generator of image shapes whose dimensions are multiples for a block size from 1 to 5."""

    def shape(rng: RandomSource, rank: int) -> Shape:
        factors = multiple(rng.integer(1, 5))
        max_elements = max(1, rng.limits.elements // math.prod(factors))
        pairs = zip(rng.shape(rank, max_elements), factors, strict=True)
        return tuple(max(1, min(dimension, rng.limits.dimension // factor)) * factor for dimension, factor in pairs)

    return shape


def resize(rng: RandomSource, request: ArgumentRequest) -> Arguments:
    """Generate the new size, or its factors."""
    batch, height, width, depth = request.shape
    max_pixels = max(1, rng.limits.elements // (batch * depth))
    rows = rng.dimension(min(max_pixels, rng.limits.dimension))
    columns = rng.dimension(max(1, min(max_pixels // rows, rng.limits.dimension)))
    align, half = rng.choice(((0, 0), (0, 1), (1, 0)))
    new_size: tuple[float, float] = (rows, columns)
    if request.types["height"] != OperandType.INT32:  # factors; the product is truncated to an integer
        new_size = ((rows + 0.5) / height, (columns + 0.5) / width)
    return {"height": new_size[0], "width": new_size[1], "align_corners": align, "half_pixel_centers": half}


def _boxes(rng: RandomSource, type: OperandType, count: int, height: int, width: int, unit: int) -> OperandSpec:
    """Generate boxes (x1, y1, x2, y2) inside an image, in pixels of an image `unit` times as large."""
    sides = []
    for dimension in (width, height):
        bounds = np.sort(np.floor(rng.fractions(2 * count).reshape(count, 2) * (dimension + 1)), axis=1)
        sides.append(bounds * unit)
    boxes = np.stack([sides[0][:, 0], sides[1][:, 0], sides[0][:, 1], sides[1][:, 1]], axis=1)
    steps = 8 if type == OperandType.TENSOR_QUANT16_ASYMM else 1
    return OperandSpec((count, 4), values=(boxes * steps).astype(NUMPY_TYPES[type]))


def regions(rng: RandomSource, request: ArgumentRequest) -> Arguments:
    """Generate regions of interest and their sampling."""
    batch, height, width, depth = request.shape
    rows, columns = rng.integer(1, 6), rng.integer(1, 6)
    max_count = max(1, rng.limits.elements // (rows * columns * depth))
    count, unit = rng.dimension(min(max_count, rng.limits.dimension, 50)), rng.choice((1, 2))
    batches = np.sort(indices(rng, (count,), batch))
    return {
        "regions": _boxes(rng, request.types["regions"], count, height, width, unit),
        "batches": OperandSpec((count,), values=batches),
        "height": rows, "width": columns, "height_stride": float(unit), "width_stride": float(unit),
        "height_ratio": rng.integer(0, 4), "width_ratio": rng.integer(0, 4),
    }  # fmt: skip


def keypoints(rng: RandomSource, request: ArgumentRequest) -> Arguments:
    """Generate the boxes of heatmaps."""
    count, size = request.shape[:2]
    return {"boxes": _boxes(rng, request.types["boxes"], count, size, size, 1)}


def square_image(rng: RandomSource, rank: int) -> Shape:
    """Generate the shape of square heatmaps."""
    size = rng.integer(2, min(rng.limits.dimension, 30))
    count, keypoints = rng.shape(2, rng.limits.elements // (size * size))
    return count, size, size, keypoints


def is_square(shape: Shape) -> bool:
    """Return whether heatmaps may have this shape."""
    return shape[1] == shape[2] >= 2
