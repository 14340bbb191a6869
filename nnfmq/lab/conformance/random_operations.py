"""Table of the operations in random graphs, with their generators.

Types, overloads and output shapes come from the operation's declaration; the generators of
this module make the rest. As in AOSP's generator there are no recurrent operations, detection, LSH_PROJECTION,
RANDOM_MULTINOMIAL, IF and WHILE.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from msgspec import Struct

from nnfmq.hal.types import CLAMPS, OperandType, OperationType
from nnfmq.lab.conformance.random_source import Discard, RandomSource, Sign
from nnfmq.lab.conformance.testmodels import Array
from nnfmq.operations.declaration import NUMPY_TYPES, Shape

__all__ = [
    "ArgumentRequest",
    "OperandSpec",
    "OperationGenerator",
    "batch_to_space",
    "broadcastable",
    "concatenation",
    "convolution",
    "depth_to_space",
    "depthwise",
    "elu",
    "expand",
    "fill",
    "fully_connected",
    "gather",
    "grouped",
    "image_of",
    "indices",
    "instance",
    "integers",
    "is_square",
    "keypoints",
    "local_response",
    "lookups",
    "matrices",
    "mirror_pad",
    "one_axis",
    "pack",
    "paddings",
    "pair_with",
    "pool",
    "reduction",
    "regions",
    "reshape",
    "resize",
    "reverse",
    "select",
    "shuffle",
    "slice_of",
    "softmax",
    "space_to_batch",
    "space_to_depth",
    "split",
    "square_image",
    "squeeze",
    "strided_slice",
    "tile",
    "top_k",
    "transpose",
    "transposed",
    "with_ones",
]


# ----------------------------------------------------------------------------------------------------------------------
# Generators of operations: the arguments that an operation's declaration does not determine.
#
# The function of an `OperationGenerator` is called with the shape of the operation's first array (NHWC, as in shape
# rules) and returns the other arguments by name: Python values for attributes, `OperandSpec` for arrays. The caller
# drops names that the chosen overload lacks. All returned values are valid; a sample that is too large raises
# `Discard`, and another one is generated. `random_operations` has the table.


Arguments = dict[str, Any]

_MAX_RANK = 4  # of arithmetic with a fused activation


class OperandSpec(Struct, frozen=True):
    """An array that an operation needs: its shape, and the sign of its real values or the stored values themselves."""

    shape: Shape
    sign: Sign = Sign.ANY
    values: Array | None = None


class ArgumentRequest(Struct, frozen=True):
    """Input of a generator: shape and type of the first array, and the type of each parameter by name."""

    shape: Shape
    type: OperandType
    types: Mapping[str, OperandType]


class OperationGenerator(Struct, frozen=True):
    """Generator of one operation's arguments.

    `arguments` returns all arguments except the first array. `shape` generates the first array's shape (NHWC) if not
    every shape is valid, and `accepts` returns whether an existing shape is. `fixed_output` is the scale and zero point
    that a uint8 output must have (int8: 128 lower). `fits_output_scale`: the output's scale is derived from the
    result. `same_quantization`: indexes of outputs that have the input's scale and zero point.
    """

    arguments: Callable[[RandomSource, ArgumentRequest], Arguments] = lambda rng, request: {}
    ranks: tuple[int, ...] = (1, 2, 3, 4)
    sign: Sign = Sign.ANY
    shape: Callable[[RandomSource, int], Shape] = lambda rng, rank: rng.shape(rank)
    accepts: Callable[[Shape], bool] = lambda shape: True
    fixed_output: tuple[float, int] | None = None
    fits_output_scale: bool = False
    same_quantization: tuple[int, ...] = ()


def integers(values: Any) -> Array:
    """Return an int32 array."""
    return np.array(values, NUMPY_TYPES[OperandType.TENSOR_INT32])


def _random_axis(rng: RandomSource, rank: int) -> int:
    return rng.integer(-rank, rank - 1)


# ------------------------------------------------------------------------------------------------ several arrays


def broadcastable(rng: RandomSource, shape: Shape) -> Shape:
    """Return a shape that broadcasts with `shape`: of any rank up to 4, with other sizes where either is 1."""
    trailing = shape[rng.integer(0, len(shape) - 1) :]
    max_growth = rng.limits.elements // math.prod(shape)
    dimensions = []
    for dimension in trailing:
        if dimension == 1 and max_growth > 1 and rng.chance():
            dimension = rng.dimension(min(max_growth, rng.limits.dimension))
            max_growth //= dimension
        dimensions.append(1 if rng.chance(0.25) else dimension)
    if len(trailing) == len(shape) < _MAX_RANK and rng.chance(0.25):
        dimensions.insert(0, rng.dimension(max(1, min(max_growth, rng.limits.dimension))))
    return tuple(dimensions)


def pair_with(second: str, sign: Sign = Sign.ANY) -> Callable[[RandomSource, ArgumentRequest], Arguments]:
    """Return a generator of the second array of a pair, with values of this sign, and of the activation."""

    def arguments(rng: RandomSource, request: ArgumentRequest) -> Arguments:
        is_integer = request.type == OperandType.TENSOR_INT32
        activation = 0 if is_integer else rng.activation()
        return {second: OperandSpec(broadcastable(rng, request.shape), sign), "activation": activation}

    return arguments


def select(rng: RandomSource, request: ArgumentRequest) -> Arguments:
    """Generate the condition and the other array."""
    return {"condition": OperandSpec(request.shape), "second": OperandSpec(request.shape)}


def concatenation(rng: RandomSource, request: ArgumentRequest) -> Arguments:
    """Generate up to four further arrays, and the concatenation axis."""
    rank, count = len(request.shape), rng.integer(1, 5)
    axis = _random_axis(rng, rank)
    slice_size = math.prod(request.shape) // request.shape[axis]
    max_dimension = max(1, min(rng.limits.elements // slice_size // count, rng.limits.dimension))
    others = []
    for _ in range(count - 1):
        shape = list(request.shape)
        shape[axis] = rng.dimension(max_dimension)
        others.append(OperandSpec(tuple(shape)))
    return {"inputs": others, "axis": axis}


def pack(rng: RandomSource, request: ArgumentRequest) -> Arguments:
    """Generate up to three further arrays of the same shape."""
    others = [OperandSpec(request.shape)] * rng.integer(0, 3)
    return {"inputs": others, "axis": rng.integer(0, len(request.shape))}


def matrices(rng: RandomSource, request: ArgumentRequest) -> Arguments:
    """Generate the right-hand matrices."""
    adjoint_left, adjoint_right = rng.chance(), rng.chance()
    length = request.shape[-2 if adjoint_left else -1]
    rows = math.prod(request.shape) // length
    columns = rng.dimension(max(1, min(rng.limits.dimension, rng.limits.elements // max(rows, length))))
    shape = (columns, length) if adjoint_right else (length, columns)
    return {
        "right": OperandSpec((*request.shape[:-2], *shape)),
        "adjoint_left": adjoint_left,
        "adjoint_right": adjoint_right,
    }


# ------------------------------------------------------------------------------------------------ one array


def elu(rng: RandomSource, request: ArgumentRequest) -> Arguments:
    """Generate the slope."""
    return {"alpha": rng.real(0.0, 10.0)}


def one_axis(rng: RandomSource, request: ArgumentRequest) -> Arguments:
    """Generate an axis."""
    return {"axis": _random_axis(rng, len(request.shape))}


def softmax(rng: RandomSource, request: ArgumentRequest) -> Arguments:
    """Generate beta and axis."""
    return {"beta": rng.real(0.1, 10.0), "axis": _random_axis(rng, len(request.shape))}


def local_response(rng: RandomSource, request: ArgumentRequest) -> Arguments:
    """Generate radius and factors."""
    factors = {"bias": rng.real(0.5, 10.0), "alpha": rng.real(0.0, 10.0), "beta": rng.real(0.0, 1.0)}
    return {"radius": rng.integer(0, 10), **factors, "axis": _random_axis(rng, len(request.shape))}


def instance(rng: RandomSource, request: ArgumentRequest) -> Arguments:
    """Generate gamma, beta and epsilon."""
    return {"gamma": rng.real(-2.0, 2.0), "beta": rng.real(-2.0, 2.0), "epsilon": rng.real(0.01, 1.0)}


def reduction(rng: RandomSource, request: ArgumentRequest) -> Arguments:
    """Generate axes, some of them twice."""
    rank = len(request.shape)
    axes = [_random_axis(rng, rank) for _ in range(rng.integer(1, 10))]
    return {"axes": integers(axes), "keep_dimensions": rng.integer(0, 1)}


def reshape(rng: RandomSource, request: ArgumentRequest) -> Arguments:
    """Generate dimensions with the same product."""
    remaining, dimensions = math.prod(request.shape), []
    for _ in range(rng.integer(0, 3)):
        dimensions.append(rng.divisor(remaining))
        remaining //= dimensions[-1]
    dimensions.append(remaining)
    if rng.chance():
        dimensions[rng.integer(0, len(dimensions) - 1)] = -1
    return {"shape": integers(dimensions)}


def squeeze(rng: RandomSource, request: ArgumentRequest) -> Arguments:
    """Generate axes among those of size 1."""
    ones = [axis for axis, dimension in enumerate(request.shape) if dimension == 1]
    rank = len(request.shape)
    axes = [axis - rank * rng.integer(0, 1) for axis in ones if rng.chance()]
    return {"axes": integers(axes) if axes else None}


def with_ones(rng: RandomSource, rank: int) -> Shape:
    """Generate a shape in which dimensions of 1 are frequent."""
    return tuple(1 if rng.chance(0.4) else dimension for dimension in rng.shape(rank))


def expand(rng: RandomSource, request: ArgumentRequest) -> Arguments:
    """Generate the position of a new axis."""
    return {"axis": _random_axis(rng, len(request.shape) + 1)}


def transpose(rng: RandomSource, request: ArgumentRequest) -> Arguments:
    """Generate a permutation."""
    rank = len(request.shape)
    return {"permutation": None if rank == 2 and rng.chance(0.25) else integers(rng.permutation(rank))}


def reverse(rng: RandomSource, request: ArgumentRequest) -> Arguments:
    """Generate one axis."""
    return {"axis": integers([rng.integer(0, len(request.shape) - 1)])}


def tile(rng: RandomSource, request: ArgumentRequest) -> Arguments:
    """Generate multiples."""
    max_multiple, multiples = rng.limits.elements // math.prod(request.shape), []
    for _ in request.shape:
        multiples.append(rng.integer(1, min(max_multiple, 10)))
        max_multiple //= multiples[-1]
    return {"multiples": integers(multiples)}


def shuffle(rng: RandomSource, request: ArgumentRequest) -> Arguments:
    """Generate axis and groups."""
    axis = _random_axis(rng, len(request.shape))
    return {"groups": rng.divisor(request.shape[axis]), "axis": axis}


def paddings(rng: RandomSource, request: ArgumentRequest) -> Arguments:
    """Generate paddings, and the value of PAD_V2."""
    low, high = -128, 127
    if request.type == OperandType.TENSOR_QUANT8_ASYMM:
        low, high = 0, 255
    is_real = request.type in (OperandType.TENSOR_FLOAT32, OperandType.TENSOR_FLOAT16)
    pairs = [(rng.integer(0, 5), rng.integer(0, 5)) for _ in request.shape]
    return {"paddings": integers(pairs), "value": rng.real(-2.0, 2.0) if is_real else rng.integer(low, high)}


def mirror_pad(rng: RandomSource, request: ArgumentRequest) -> Arguments:
    """Generate paddings that do not exceed the input."""
    mode = rng.integer(0, 1)
    max_paddings = [min(5, dimension - (mode == 0)) for dimension in request.shape]
    pairs = [(rng.integer(0, limit), rng.integer(0, limit)) for limit in max_paddings]
    return {"paddings": integers(pairs), "mode": mode}


def slice_of(rng: RandomSource, request: ArgumentRequest) -> Arguments:
    """Generate begin and size of a box inside the input."""
    begins = [rng.integer(0, dimension - 1) for dimension in request.shape]
    sizes = [rng.integer(1, dimension - begin) for dimension, begin in zip(request.shape, begins, strict=True)]
    sizes = [-1 if rng.chance(0.1) else size for size in sizes]
    return {"begin": integers(begins), "size": integers(sizes)}


def strided_slice(rng: RandomSource, request: ArgumentRequest) -> Arguments:
    """Generate ranges of at least one element, forwards and backwards."""
    shrink, begin_mask, end_mask = 0, 0, 0
    ranges = []
    for axis, dimension in enumerate(request.shape):
        low, high = sorted((rng.integer(0, dimension - 1), rng.integer(0, dimension - 1)))
        if rng.chance(0.1):
            shrink |= 1 << axis
            ranges.append((low, low + 1, 1))
            continue
        stride = rng.integer(1, 3)
        begin_mask |= rng.chance(0.1) << axis
        end_mask |= rng.chance(0.1) << axis
        backwards = (high, low - 1 - dimension, -stride)  # a negative end is relative to the dimension
        forwards = (low - dimension * rng.integer(0, 1), high + 1, stride)
        ranges.append(backwards if rng.chance(0.25) else forwards)
    begins, ends, strides = (integers(values) for values in zip(*ranges, strict=True))
    masks = {"begin_mask": begin_mask, "end_mask": end_mask, "shrink_mask": shrink}
    return {"begin": begins, "end": ends, "strides": strides, **masks}


def split(rng: RandomSource, request: ArgumentRequest) -> Arguments:
    """Generate axis and count."""
    axis = _random_axis(rng, len(request.shape))
    return {"axis": axis, "count": rng.divisor(request.shape[axis], max_divisor=10)}


def gather(rng: RandomSource, request: ArgumentRequest) -> Arguments:
    """Generate axis and indices."""
    axis = _random_axis(rng, len(request.shape))
    max_elements = rng.limits.elements // (math.prod(request.shape) // request.shape[axis])
    shape = rng.shape(rng.integer(1, 2) if len(request.shape) < 4 else 1, max(1, max_elements))
    return {"axis": axis, "indices": indices(rng, shape, request.shape[axis])}


def indices(rng: RandomSource, shape: Shape, count: int) -> Array:
    """Return random indices below `count`."""
    return integers(np.floor(rng.fractions(math.prod(shape)) * count).reshape(shape))


def lookups(rng: RandomSource, request: ArgumentRequest) -> Arguments:
    """Generate row indices, or keys and the keys to look up."""
    max_count = rng.limits.elements // (math.prod(request.shape) // request.shape[0])
    count = rng.dimension(max(1, min(max_count, rng.limits.dimension)))
    keys = np.cumsum(
        1 + np.floor(rng.fractions(request.shape[0]) * 2)
    )  # ascending, with gaps, so that some lookups fail
    if "keys" in request.types:
        return {"lookups": indices(rng, (count,), int(keys[-1]) + 2), "keys": integers(keys)}
    return {"lookups": indices(rng, (count,), request.shape[0])}


def top_k(rng: RandomSource, request: ArgumentRequest) -> Arguments:
    """Generate k."""
    return {"k": rng.integer(1, request.shape[-1])}


def fill(rng: RandomSource, request: ArgumentRequest) -> Arguments:
    """Generate the value; the dimensions are the shape."""
    is_integer = request.type == OperandType.TENSOR_INT32
    value = rng.integer(-1000, 1000) if is_integer else rng.real(-2.0, 2.0)
    return {"dimensions": integers(request.shape), "value": value}


# ----------------------------------------------------------------------------------------------------------------------
# Generators of operations on images and of matrix products: windows, filters, blocks, boxes.


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


# ----------------------------------------------------------------------------------------------------------------------
# Table of the operations in random graphs, with their generators.


_IMAGE = (4,)
_MATRICES = (2, 3, 4)
_NO_ARGUMENTS = OperationGenerator()
_PAIR = OperationGenerator(pair_with("second"))
_ONE_AXIS = OperationGenerator(one_axis)
_REDUCTION = OperationGenerator(reduction)
_POOL = OperationGenerator(pool, _IMAGE)
_RESIZE = OperationGenerator(resize, _IMAGE)

_BY_NAME: dict[str, OperationGenerator] = {
    **dict.fromkeys((code.name for code in CLAMPS), _NO_ARGUMENTS),
    **dict.fromkeys(("FLOOR", "HARD_SWISH", "ABS", "EXP", "NEG", "SIN"), _NO_ARGUMENTS),
    **dict.fromkeys(("LOGICAL_NOT", "QUANTIZE", "DEQUANTIZE", "CAST", "RANK"), _NO_ARGUMENTS),
    "LOGISTIC": OperationGenerator(fixed_output=(1 / 256, 0)),
    "TANH": OperationGenerator(fixed_output=(1 / 128, 128)),
    "ELU": OperationGenerator(elu),
    "LOG": OperationGenerator(sign=Sign.POSITIVE),
    "RSQRT": OperationGenerator(sign=Sign.POSITIVE),
    "SQRT": OperationGenerator(sign=Sign.NOT_NEGATIVE),
    **dict.fromkeys(("ADD", "SUB", "MAXIMUM", "MINIMUM", "LOGICAL_AND", "LOGICAL_OR"), _PAIR),
    **dict.fromkeys(("EQUAL", "NOT_EQUAL", "GREATER", "GREATER_EQUAL", "LESS", "LESS_EQUAL"), _PAIR),
    "MUL": OperationGenerator(pair_with("second"), fits_output_scale=True),
    "DIV": OperationGenerator(pair_with("second", Sign.NOT_ZERO)),
    "POW": OperationGenerator(pair_with("exponent"), sign=Sign.NOT_NEGATIVE),
    "PRELU": OperationGenerator(pair_with("alpha")),
    "SELECT": OperationGenerator(select),
    "CONCATENATION": OperationGenerator(concatenation),
    "PACK": OperationGenerator(pack, (1, 2, 3)),
    "BATCH_MATMUL": OperationGenerator(matrices, _MATRICES, fits_output_scale=True),
    "SOFTMAX": OperationGenerator(softmax, fixed_output=(1 / 256, 0)),
    "LOG_SOFTMAX": OperationGenerator(softmax),
    "L2_NORMALIZATION": OperationGenerator(one_axis, fixed_output=(1 / 128, 128)),
    "LOCAL_RESPONSE_NORMALIZATION": OperationGenerator(local_response),
    "INSTANCE_NORMALIZATION": OperationGenerator(instance, _IMAGE),
    **dict.fromkeys(
        ("MEAN", "REDUCE_ALL", "REDUCE_ANY", "REDUCE_MAX", "REDUCE_MIN", "REDUCE_PROD", "REDUCE_SUM"), _REDUCTION
    ),
    **dict.fromkeys(("ARGMAX", "ARGMIN"), _ONE_AXIS),
    "RESHAPE": OperationGenerator(reshape),
    "SQUEEZE": OperationGenerator(squeeze, shape=with_ones),
    "EXPAND_DIMS": OperationGenerator(expand),
    "TRANSPOSE": OperationGenerator(transpose),
    "REVERSE": OperationGenerator(reverse),
    "TILE": OperationGenerator(tile),
    "CHANNEL_SHUFFLE": OperationGenerator(shuffle),
    **dict.fromkeys(("PAD", "PAD_V2"), OperationGenerator(paddings)),
    "MIRROR_PAD": OperationGenerator(mirror_pad),
    "SLICE": OperationGenerator(slice_of),
    "STRIDED_SLICE": OperationGenerator(strided_slice),
    "SPLIT": OperationGenerator(split),
    "GATHER": OperationGenerator(gather),
    "EMBEDDING_LOOKUP": OperationGenerator(lookups, _MATRICES),
    "HASHTABLE_LOOKUP": OperationGenerator(lookups, _MATRICES, same_quantization=(0,)),
    "TOPK_V2": OperationGenerator(top_k, same_quantization=(0,)),
    "FILL": OperationGenerator(fill),
    **dict.fromkeys(("AVERAGE_POOL_2D", "L2_POOL_2D", "MAX_POOL_2D"), _POOL),
    "CONV_2D": OperationGenerator(convolution, _IMAGE, fits_output_scale=True),
    "DEPTHWISE_CONV_2D": OperationGenerator(depthwise, _IMAGE, fits_output_scale=True),
    "GROUPED_CONV_2D": OperationGenerator(grouped, _IMAGE, fits_output_scale=True),
    "TRANSPOSE_CONV_2D": OperationGenerator(transposed, _IMAGE, fits_output_scale=True),
    "FULLY_CONNECTED": OperationGenerator(fully_connected, _MATRICES, fits_output_scale=True),
    "DEPTH_TO_SPACE": OperationGenerator(depth_to_space, _IMAGE, shape=image_of(lambda b: (1, 1, 1, b * b))),
    "SPACE_TO_DEPTH": OperationGenerator(space_to_depth, _IMAGE, shape=image_of(lambda b: (1, b, b, 1))),
    "BATCH_TO_SPACE_ND": OperationGenerator(batch_to_space, _IMAGE, shape=image_of(lambda b: (b * b, 1, 1, 1))),
    "SPACE_TO_BATCH_ND": OperationGenerator(space_to_batch, _IMAGE),
    **dict.fromkeys(("RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR"), _RESIZE),
    "ROI_ALIGN": OperationGenerator(regions, _IMAGE),
    "ROI_POOLING": OperationGenerator(regions, _IMAGE, same_quantization=(0,)),
    "HEATMAP_MAX_KEYPOINT": OperationGenerator(
        keypoints, _IMAGE, shape=square_image, accepts=is_square, same_quantization=(0,)
    ),
}

GENERATORS: dict[OperationType, OperationGenerator] = {
    OperationType[name]: generator for name, generator in _BY_NAME.items()
}
"""The generator of each operation that random graphs contain."""
