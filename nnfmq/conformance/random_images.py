"""The arguments of operations on images, and of products: windows, filters, blocks, boxes. See `random_recipes`."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from nnfmq.conformance.drawing import Draw, Rejected
from nnfmq.conformance.random_recipes import Arguments, Request, Wanted, indices, integers
from nnfmq.hal.types import OperandType
from nnfmq.operations.signature import NUMPY_TYPES, Shape


def _window(draw: Draw, request: Request, extents: Shape, most: Shape) -> tuple[dict[str, int], Shape]:
    """Return geometry by name, and the filter's height and width, of which each has at least one position."""
    geometry: dict[str, int] = {}
    scheme = draw.integer(1, 2)
    sizes = []
    sides = (("height", "top", "bottom"), ("width", "left", "right"))
    for extent, limit, (side, head, tail) in zip(extents, most, sides, strict=True):
        size = draw.integer(1, max(1, min(extent, limit)))
        dilations = [d for d in (1, 2, 3) if (size - 1) * d < extent] if f"dilation_{side}" in request.types else [1]
        dilation = draw.choice(dilations)
        reach = (size - 1) * dilation + 1
        geometry |= {f"stride_{side}": draw.integer(1, 3), f"dilation_{side}": dilation}
        geometry |= {f"padding_{head}": draw.integer(0, min(3, reach - 1))}
        geometry |= {f"padding_{tail}": draw.integer(0, min(3, reach - 1))}
        sizes.append(size)
    return geometry | {"padding_scheme": scheme, "activation": draw.activation()}, tuple(sizes)


def pool(draw: Draw, request: Request) -> Arguments:
    """Draw a window."""
    geometry, (height, width) = _window(draw, request, request.shape[1:3], (30, 30))
    return geometry | {"filter_height": height, "filter_width": width}


def _bounded(draw: Draw, request: Request, filter: Shape, geometry: dict[str, int], products: int) -> Arguments:
    elements = math.prod(filter)
    if elements > draw.limits.elements or products > draw.limits.products:
        raise Rejected("a filter that makes too much work")
    return {**geometry, "filter": Wanted(filter)}


def _channels(draw: Draw, request: Request) -> int:
    cells = request.shape[0] * request.shape[1] * request.shape[2]
    return draw.extent(max(1, min(draw.limits.elements // cells, draw.limits.extent)))


def convolution(draw: Draw, request: Request) -> Arguments:
    """Draw a filter and its bias."""
    batch, height, width, depth = request.shape
    geometry, sizes = _window(draw, request, (height, width), (12, 12))
    channels = _channels(draw, request)
    products = batch * height * width * math.prod(sizes) * depth * channels
    arguments = _bounded(draw, request, (channels, *sizes, depth), geometry, products)
    return arguments | {"bias": Wanted((channels,))}


def depthwise(draw: Draw, request: Request) -> Arguments:
    """Draw a filter for each channel."""
    batch, height, width, depth = request.shape
    geometry, sizes = _window(draw, request, (height, width), (12, 12))
    multiplier = draw.integer(1, 4)
    channels = depth * multiplier
    products = batch * height * width * math.prod(sizes) * channels
    arguments = _bounded(draw, request, (1, *sizes, channels), geometry, products)
    return arguments | {"bias": Wanted((channels,)), "depth_multiplier": multiplier}


def grouped(draw: Draw, request: Request) -> Arguments:
    """Draw groups and a filter."""
    batch, height, width, depth = request.shape
    geometry, sizes = _window(draw, request, (height, width), (12, 12))
    groups = draw.divisor(depth)
    channels = groups * max(1, _channels(draw, request) // groups)
    products = batch * height * width * math.prod(sizes) * depth * channels // groups
    arguments = _bounded(draw, request, (channels, *sizes, depth // groups), geometry, products)
    return arguments | {"bias": Wanted((channels,)), "groups": groups}


def transposed(draw: Draw, request: Request) -> Arguments:
    """Draw a filter and what it spreads."""
    batch, height, width, depth = request.shape
    geometry, new, sizes = {"padding_scheme": draw.integer(1, 2), "activation": draw.activation()}, [], []
    for extent, side, head, tail in ((height, "height", "top", "bottom"), (width, "width", "left", "right")):
        size, stride = draw.integer(1, 8), draw.integer(1, 3)
        geometry |= {f"stride_{side}": stride, f"padding_{head}": draw.integer(0, (size - 1) // 2)}
        geometry |= {f"padding_{tail}": draw.integer(0, (size - 1) // 2)}
        new.append(extent * stride if geometry["padding_scheme"] == 1 else (extent - 1) * stride + size)
        sizes.append(size)
    channels = _channels(draw, request)
    products = batch * height * width * math.prod(sizes) * depth * channels
    arguments = _bounded(draw, request, (channels, *sizes, depth), geometry, products)
    return arguments | {"bias": Wanted((channels,)), "output_shape": integers([batch, *new, channels])}


def fully_connected(draw: Draw, request: Request) -> Arguments:
    """Draw weights and bias."""
    length = math.prod(request.shape[draw.integer(1, len(request.shape) - 1) :])
    rows = math.prod(request.shape) // length
    units = draw.extent(max(1, min(draw.limits.elements // max(length, rows), draw.limits.extent)))
    return {"weights": Wanted((units, length)), "bias": Wanted((units,)), "activation": draw.activation()}


def depth_to_space(draw: Draw, request: Request) -> Arguments:
    """Draw a block that the channels hold."""
    return {"block": draw.choice([b for b in range(1, 11) if request.shape[3] % (b * b) == 0])}


def space_to_depth(draw: Draw, request: Request) -> Arguments:
    """Draw a block that the image is made of."""
    return {"block": draw.divisor(math.gcd(*request.shape[1:3]), most=10)}


def batch_to_space(draw: Draw, request: Request) -> Arguments:
    """Draw a block that the batch holds."""
    rows = draw.divisor(request.shape[0], most=10)
    return {"block": integers([rows, draw.divisor(request.shape[0] // rows, most=10)])}


def space_to_batch(draw: Draw, request: Request) -> Arguments:
    """Draw a block, and paddings to a multiple of it."""
    blocks = [draw.integer(1, 5), draw.integer(1, 5)]
    heads = [draw.integer(0, 3), draw.integer(0, 3)]
    sums = zip(request.shape[1:3], heads, blocks, strict=True)
    tails = [-(extent + head) % block for extent, head, block in sums]
    return {"block": integers(blocks), "paddings": integers(list(zip(heads, tails, strict=True)))}


def image_of(multiple: Callable[[int], Shape]) -> Callable[[Draw, int], Shape]:
    """Draw images whose extents are multiples of what a block size between 1 and 5 asks for."""

    def shape(draw: Draw, rank: int) -> Shape:
        factors = multiple(draw.integer(1, 5))
        room = max(1, draw.limits.elements // math.prod(factors))
        pairs = zip(draw.shape(rank, room), factors, strict=True)
        return tuple(max(1, min(extent, draw.limits.extent // factor)) * factor for extent, factor in pairs)

    return shape


def resize(draw: Draw, request: Request) -> Arguments:
    """Draw a new size, or the factors to it."""
    batch, height, width, depth = request.shape
    room = max(1, draw.limits.elements // (batch * depth))
    rows = draw.extent(min(room, draw.limits.extent))
    columns = draw.extent(max(1, min(room // rows, draw.limits.extent)))
    align, half = draw.choice(((0, 0), (0, 1), (1, 0)))
    new: tuple[float, float] = (rows, columns)
    if request.types["height"] != OperandType.INT32:  # factors, of which the product is cut to an integer
        new = ((rows + 0.5) / height, (columns + 0.5) / width)
    return {"height": new[0], "width": new[1], "align_corners": align, "half_pixel_centers": half}


def _boxes(draw: Draw, type: OperandType, count: int, height: int, width: int, unit: int) -> Wanted:
    """Draw boxes (x1, y1, x2, y2) inside an image, in whole pixels of an image `unit` times as large."""
    sides = []
    for extent in (width, height):
        ends = np.sort(np.floor(draw.fractions(2 * count).reshape(count, 2) * (extent + 1)), axis=1)
        sides.append(ends * unit)
    boxes = np.stack([sides[0][:, 0], sides[1][:, 0], sides[0][:, 1], sides[1][:, 1]], axis=1)
    steps = 8 if type == OperandType.TENSOR_QUANT16_ASYMM else 1
    return Wanted((count, 4), values=(boxes * steps).astype(NUMPY_TYPES[type]))


def regions(draw: Draw, request: Request) -> Arguments:
    """Draw regions of interest and how they are sampled."""
    batch, height, width, depth = request.shape
    rows, columns = draw.integer(1, 6), draw.integer(1, 6)
    room = max(1, draw.limits.elements // (rows * columns * depth))
    count, unit = draw.extent(min(room, draw.limits.extent, 50)), draw.choice((1, 2))
    batches = np.sort(indices(draw, (count,), batch))
    return {
        "regions": _boxes(draw, request.types["regions"], count, height, width, unit),
        "batches": Wanted((count,), values=batches),
        "height": rows, "width": columns, "height_stride": float(unit), "width_stride": float(unit),
        "height_ratio": draw.integer(0, 4), "width_ratio": draw.integer(0, 4),
    }  # fmt: skip


def keypoints(draw: Draw, request: Request) -> Arguments:
    """Draw the boxes of heatmaps."""
    count, size = request.shape[:2]
    return {"boxes": _boxes(draw, request.types["boxes"], count, size, size, 1)}


def square_image(draw: Draw, rank: int) -> Shape:
    """Draw the shape of square heatmaps."""
    size = draw.integer(2, min(draw.limits.extent, 30))
    count, keypoints = draw.shape(2, draw.limits.elements // (size * size))
    return count, size, size, keypoints


def is_square(shape: Shape) -> bool:
    """Return True for a shape that heatmaps may have."""
    return shape[1] == shape[2] >= 2
