"""How the arguments of each operation are drawn: a table, beside what the declarations say.

Types, forms and output shapes come from the operation's declaration; a `Recipe` adds what that does not say. Its
function is called with the shape of the operation's first array (NHWC, as shape rules see it) and returns the rest by
the declaration's names: Python values for controls, `Wanted` for arrays. Names that the chosen form lacks are left
out by the caller. All that a recipe draws is legal; what is too large is `Rejected`, and drawn again.
Not drawn, as in AOSP's generator: recurrent operations, detection, LSH_PROJECTION, RANDOM_MULTINOMIAL, IF and WHILE.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from nnfmq.conformance.drawing import Draw, Rejected, Sign
from nnfmq.conformance.testmodels import Array
from nnfmq.hal.types import OperandType, OperationType
from nnfmq.operations.signature import NUMPY_TYPES, Shape

Arguments = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Wanted:
    """An array that an operation needs: its shape, and the sign of its values or the stored values themselves."""

    shape: Shape
    sign: Sign = Sign.ANY
    values: Array | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """What a recipe is asked for: the shape and type of the first array, and the type of each parameter by name."""

    shape: Shape
    type: OperandType
    types: Mapping[str, OperandType]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How an operation is drawn.

    `arguments` returns the rest; `shape` draws the first array's (NHWC) shape where any would not do, and `accepts`
    says whether an existing one does. `fixed_output`: scale and lowest-relative zero point of an output of codes.
    `fitted`: the output's scale is made for the values that come out; `keeps`: outputs that have the input's scale.
    """

    arguments: Callable[[Draw, Request], Arguments] = lambda draw, request: {}
    ranks: tuple[int, ...] = (1, 2, 3, 4)
    sign: Sign = Sign.ANY
    shape: Callable[[Draw, int], Shape] = lambda draw, rank: draw.shape(rank)
    accepts: Callable[[Shape], bool] = lambda shape: True
    fixed_output: tuple[float, int] | None = None
    fitted: bool = False
    keeps: tuple[int, ...] = ()


def _integers(values: Any) -> Array:
    return np.array(values, NUMPY_TYPES[OperandType.TENSOR_INT32])


def _axis(draw: Draw, rank: int) -> int:
    return draw.integer(-rank, rank - 1)


# ------------------------------------------------------------------------------------------------ pairs


def broadcastable(draw: Draw, shape: Shape) -> Shape:
    """Return a shape that broadcasts with `shape`: of a lower rank or the same, on some axes longer or 1."""
    kept = shape[draw.integer(0, len(shape) - 1) :]
    room = draw.limits.elements // math.prod(shape)
    extents = []
    for extent in kept:
        if extent == 1 and room > 1 and draw.chance():
            extent = draw.extent(min(room, draw.limits.extent))
            room //= extent
        extents.append(1 if draw.chance(0.25) else extent)
    return tuple(extents)


def _pair(second: str, sign: Sign = Sign.ANY) -> Callable[[Draw, Request], Arguments]:
    def arguments(draw: Draw, request: Request) -> Arguments:
        is_integer = request.type == OperandType.TENSOR_INT32
        activation = 0 if is_integer else draw.integer(0, 3)
        return {second: Wanted(broadcastable(draw, request.shape), sign), "activation": activation}

    return arguments


def _select(draw: Draw, request: Request) -> Arguments:
    return {"condition": Wanted(request.shape), "second": Wanted(request.shape)}


def _joined(draw: Draw, request: Request) -> Arguments:
    rank, count = len(request.shape), draw.integer(1, 5)
    axis = _axis(draw, rank)
    along = math.prod(request.shape) // request.shape[axis]
    room = max(1, min(draw.limits.elements // along // count, draw.limits.extent))
    others = []
    for _ in range(count - 1):
        shape = list(request.shape)
        shape[axis] = draw.extent(room)
        others.append(Wanted(tuple(shape)))
    return {"inputs": others, "axis": axis}


def _packed(draw: Draw, request: Request) -> Arguments:
    others = [Wanted(request.shape)] * draw.integer(0, 3)
    return {"inputs": others, "axis": draw.integer(0, len(request.shape))}


def _matrices(draw: Draw, request: Request) -> Arguments:
    left, right = draw.chance(), draw.chance()
    length = request.shape[-2 if left else -1]
    rows = math.prod(request.shape) // length
    columns = draw.extent(max(1, min(draw.limits.extent, draw.limits.elements // max(rows, length))))
    shape = (columns, length) if right else (length, columns)
    return {"right": Wanted((*request.shape[:-2], *shape)), "adjoint_left": left, "adjoint_right": right}


# ------------------------------------------------------------------------------------------------ one array


def _elu(draw: Draw, request: Request) -> Arguments:
    return {"alpha": draw.real(0.0, 10.0)}


def _with_axis(draw: Draw, request: Request) -> Arguments:
    return {"axis": _axis(draw, len(request.shape))}


def _softmax(draw: Draw, request: Request) -> Arguments:
    return {"beta": draw.real(0.1, 10.0), "axis": _axis(draw, len(request.shape))}


def _local_response(draw: Draw, request: Request) -> Arguments:
    factors = {"bias": draw.real(0.5, 10.0), "alpha": draw.real(0.0, 10.0), "beta": draw.real(0.0, 1.0)}
    return {"radius": draw.integer(0, 10), **factors, "axis": _axis(draw, len(request.shape))}


def _instance(draw: Draw, request: Request) -> Arguments:
    return {"gamma": draw.real(-2.0, 2.0), "beta": draw.real(-2.0, 2.0), "epsilon": draw.real(0.01, 1.0)}


def _reduction(draw: Draw, request: Request) -> Arguments:
    rank = len(request.shape)
    axes = [_axis(draw, rank) for _ in range(draw.integer(1, 10))]
    return {"axes": _integers(axes), "keep_dimensions": draw.integer(0, 1)}


def _reshape(draw: Draw, request: Request) -> Arguments:
    rest, extents = math.prod(request.shape), []
    for _ in range(draw.integer(0, 3)):
        extents.append(draw.divisor(rest))
        rest //= extents[-1]
    extents.append(rest)
    if draw.chance():
        extents[draw.integer(0, len(extents) - 1)] = -1
    return {"shape": _integers(extents)}


def _squeeze(draw: Draw, request: Request) -> Arguments:
    ones = [axis for axis, extent in enumerate(request.shape) if extent == 1]
    rank = len(request.shape)
    chosen = [axis - rank * draw.integer(0, 1) for axis in ones if draw.chance()]
    return {"axes": _integers(chosen) if chosen else None}


def _with_ones(draw: Draw, rank: int) -> Shape:
    return tuple(1 if draw.chance(0.4) else extent for extent in draw.shape(rank))


def _expand(draw: Draw, request: Request) -> Arguments:
    return {"axis": _axis(draw, len(request.shape) + 1)}


def _transpose(draw: Draw, request: Request) -> Arguments:
    rank = len(request.shape)
    return {"permutation": None if rank == 2 and draw.chance(0.25) else _integers(draw.order(rank))}


def _reverse(draw: Draw, request: Request) -> Arguments:
    return {"axis": _integers([draw.integer(0, len(request.shape) - 1)])}


def _tile(draw: Draw, request: Request) -> Arguments:
    room, multiples = draw.limits.elements // math.prod(request.shape), []
    for _ in request.shape:
        multiples.append(draw.integer(1, min(room, 10)))
        room //= multiples[-1]
    return {"multiples": _integers(multiples)}


def _shuffle(draw: Draw, request: Request) -> Arguments:
    axis = _axis(draw, len(request.shape))
    return {"groups": draw.divisor(request.shape[axis]), "axis": axis}


def _paddings(draw: Draw, request: Request) -> Arguments:
    low, high = -128, 127
    if request.type == OperandType.TENSOR_QUANT8_ASYMM:
        low, high = 0, 255
    is_real = request.type in (OperandType.TENSOR_FLOAT32, OperandType.TENSOR_FLOAT16)
    pairs = [(draw.integer(0, 5), draw.integer(0, 5)) for _ in request.shape]
    return {"paddings": _integers(pairs), "value": draw.real(-2.0, 2.0) if is_real else draw.integer(low, high)}


def _mirrored(draw: Draw, request: Request) -> Arguments:
    mode = draw.integer(0, 1)
    most = [min(5, extent - (mode == 0)) for extent in request.shape]
    pairs = [(draw.integer(0, limit), draw.integer(0, limit)) for limit in most]
    return {"paddings": _integers(pairs), "mode": mode}


def _slice(draw: Draw, request: Request) -> Arguments:
    begins = [draw.integer(0, extent - 1) for extent in request.shape]
    sizes = [draw.integer(1, extent - begin) for extent, begin in zip(request.shape, begins, strict=True)]
    sizes = [-1 if draw.chance(0.1) else size for size in sizes]
    return {"begin": _integers(begins), "size": _integers(sizes)}


def _strided_slice(draw: Draw, request: Request) -> Arguments:
    shrink, begin_mask, end_mask = 0, 0, 0
    ranges = []
    for axis, extent in enumerate(request.shape):
        low, high = sorted((draw.integer(0, extent - 1), draw.integer(0, extent - 1)))
        if draw.chance(0.1):
            shrink |= 1 << axis
            ranges.append((low, low + 1, 1))
            continue
        stride = draw.integer(1, 3)
        begin_mask |= draw.chance(0.1) << axis
        end_mask |= draw.chance(0.1) << axis
        backwards = (high, low - 1 - extent, -stride)  # an end before element 0 is counted from the back
        forwards = (low - extent * draw.integer(0, 1), high + 1, stride)
        ranges.append(backwards if draw.chance(0.25) else forwards)
    begins, ends, strides = (_integers(column) for column in zip(*ranges, strict=True))
    masks = {"begin_mask": begin_mask, "end_mask": end_mask, "shrink_mask": shrink}
    return {"begin": begins, "end": ends, "strides": strides, **masks}


def _split(draw: Draw, request: Request) -> Arguments:
    axis = _axis(draw, len(request.shape))
    return {"axis": axis, "count": draw.divisor(request.shape[axis], most=10)}


def _gather(draw: Draw, request: Request) -> Arguments:
    axis = _axis(draw, len(request.shape))
    room = draw.limits.elements // (math.prod(request.shape) // request.shape[axis])
    indices = draw.shape(draw.integer(1, 2) if len(request.shape) < 4 else 1, max(1, room))
    return {"axis": axis, "indices": _indices(draw, indices, request.shape[axis])}


def _indices(draw: Draw, shape: Shape, count: int) -> Array:
    return _integers(np.floor(draw.fractions(math.prod(shape)) * count).reshape(shape))


def _lookups(draw: Draw, request: Request) -> Arguments:
    room = draw.limits.elements // (math.prod(request.shape) // request.shape[0])
    count = draw.extent(max(1, min(room, draw.limits.extent)))
    keys = np.cumsum(1 + np.floor(draw.fractions(request.shape[0]) * 2))  # ascending, with gaps that miss
    if "keys" in request.types:
        return {"lookups": _indices(draw, (count,), int(keys[-1]) + 2), "keys": _integers(keys)}
    return {"lookups": _indices(draw, (count,), request.shape[0])}


def _top(draw: Draw, request: Request) -> Arguments:
    return {"k": draw.integer(1, request.shape[-1])}


def _fill(draw: Draw, request: Request) -> Arguments:
    is_integer = request.type == OperandType.TENSOR_INT32
    value = draw.integer(-1000, 1000) if is_integer else draw.real(-2.0, 2.0)
    return {"dimensions": _integers(request.shape), "value": value}


# ------------------------------------------------------------------------------------------------ images


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
    return geometry | {"padding_scheme": scheme, "activation": draw.integer(0, 3)}, tuple(sizes)


def _pool(draw: Draw, request: Request) -> Arguments:
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


def _convolution(draw: Draw, request: Request) -> Arguments:
    batch, height, width, depth = request.shape
    geometry, sizes = _window(draw, request, (height, width), (12, 12))
    channels = _channels(draw, request)
    products = batch * height * width * math.prod(sizes) * depth * channels
    arguments = _bounded(draw, request, (channels, *sizes, depth), geometry, products)
    return arguments | {"bias": Wanted((channels,))}


def _depthwise(draw: Draw, request: Request) -> Arguments:
    batch, height, width, depth = request.shape
    geometry, sizes = _window(draw, request, (height, width), (12, 12))
    multiplier = draw.integer(1, 4)
    channels = depth * multiplier
    products = batch * height * width * math.prod(sizes) * channels
    arguments = _bounded(draw, request, (1, *sizes, channels), geometry, products)
    return arguments | {"bias": Wanted((channels,)), "depth_multiplier": multiplier}


def _grouped(draw: Draw, request: Request) -> Arguments:
    batch, height, width, depth = request.shape
    geometry, sizes = _window(draw, request, (height, width), (12, 12))
    groups = draw.divisor(depth)
    channels = groups * max(1, _channels(draw, request) // groups)
    products = batch * height * width * math.prod(sizes) * depth * channels // groups
    arguments = _bounded(draw, request, (channels, *sizes, depth // groups), geometry, products)
    return arguments | {"bias": Wanted((channels,)), "groups": groups}


def _transposed(draw: Draw, request: Request) -> Arguments:
    batch, height, width, depth = request.shape
    geometry, new, sizes = {"padding_scheme": draw.integer(1, 2), "activation": draw.integer(0, 3)}, [], []
    for extent, side, head, tail in ((height, "height", "top", "bottom"), (width, "width", "left", "right")):
        size, stride = draw.integer(1, 8), draw.integer(1, 3)
        geometry |= {f"stride_{side}": stride, f"padding_{head}": draw.integer(0, (size - 1) // 2)}
        geometry |= {f"padding_{tail}": draw.integer(0, (size - 1) // 2)}
        new.append(extent * stride if geometry["padding_scheme"] == 1 else (extent - 1) * stride + size)
        sizes.append(size)
    channels = _channels(draw, request)
    products = batch * height * width * math.prod(sizes) * depth * channels
    arguments = _bounded(draw, request, (channels, *sizes, depth), geometry, products)
    return arguments | {"bias": Wanted((channels,)), "output_shape": _integers([batch, *new, channels])}


def _fully_connected(draw: Draw, request: Request) -> Arguments:
    length = math.prod(request.shape[draw.integer(1, len(request.shape) - 1) :])
    rows = math.prod(request.shape) // length
    units = draw.extent(max(1, min(draw.limits.elements // max(length, rows), draw.limits.extent)))
    return {"weights": Wanted((units, length)), "bias": Wanted((units,)), "activation": draw.integer(0, 3)}


def _depth_to_space(draw: Draw, request: Request) -> Arguments:
    return {"block": draw.choice([b for b in range(1, 11) if request.shape[3] % (b * b) == 0])}


def _space_to_depth(draw: Draw, request: Request) -> Arguments:
    return {"block": draw.divisor(math.gcd(*request.shape[1:3]), most=10)}


def _batch_to_space(draw: Draw, request: Request) -> Arguments:
    rows = draw.divisor(request.shape[0], most=10)
    return {"block": _integers([rows, draw.divisor(request.shape[0] // rows, most=10)])}


def _space_to_batch(draw: Draw, request: Request) -> Arguments:
    blocks = [draw.integer(1, 5), draw.integer(1, 5)]
    heads = [draw.integer(0, 3), draw.integer(0, 3)]
    sums = zip(request.shape[1:3], heads, blocks, strict=True)
    tails = [-(extent + head) % block for extent, head, block in sums]
    return {"block": _integers(blocks), "paddings": _integers(list(zip(heads, tails, strict=True)))}


def _image_of(multiple: Callable[[int], Shape]) -> Callable[[Draw, int], Shape]:
    """Draw images whose extents are multiples of what a block size between 1 and 5 asks for."""

    def shape(draw: Draw, rank: int) -> Shape:
        factors = multiple(draw.integer(1, 5))
        room = max(1, draw.limits.elements // math.prod(factors))
        pairs = zip(draw.shape(rank, room), factors, strict=True)
        return tuple(max(1, min(extent, draw.limits.extent // factor)) * factor for extent, factor in pairs)

    return shape


def _resize(draw: Draw, request: Request) -> Arguments:
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


def _regions(draw: Draw, request: Request) -> Arguments:
    batch, height, width, depth = request.shape
    rows, columns = draw.integer(1, 6), draw.integer(1, 6)
    room = max(1, draw.limits.elements // (rows * columns * depth))
    count, unit = draw.extent(min(room, 50)), draw.choice((1, 2))
    batches = np.sort(_indices(draw, (count,), batch))
    return {
        "regions": _boxes(draw, request.types["regions"], count, height, width, unit),
        "batches": Wanted((count,), values=batches),
        "height": rows, "width": columns, "height_stride": float(unit), "width_stride": float(unit),
        "height_ratio": draw.integer(0, 4), "width_ratio": draw.integer(0, 4),
    }  # fmt: skip


def _keypoints(draw: Draw, request: Request) -> Arguments:
    count, size = request.shape[:2]
    return {"boxes": _boxes(draw, request.types["boxes"], count, size, size, 1)}


def _square(draw: Draw, rank: int) -> Shape:
    size = draw.integer(2, min(draw.limits.extent, 30))
    count, keypoints = draw.shape(2, draw.limits.elements // (size * size))
    return count, size, size, keypoints


def _is_square(shape: Shape) -> bool:
    return shape[1] == shape[2] >= 2


# ------------------------------------------------------------------------------------------------ the table

_IMAGE = (4,)
_same = Recipe()
_image = partial(Recipe, ranks=_IMAGE)

RECIPES: dict[OperationType, Recipe] = {
    **dict.fromkeys(
        (OperationType[name] for name in ("FLOOR", "RELU", "RELU1", "RELU6", "HARD_SWISH", "ABS", "EXP", "NEG", "SIN")),
        _same,
    ),
    **dict.fromkeys((OperationType[name] for name in ("LOGICAL_NOT", "QUANTIZE", "DEQUANTIZE", "CAST", "RANK")), _same),
    OperationType.LOGISTIC: Recipe(fixed_output=(1 / 256, 0)),
    OperationType.TANH: Recipe(fixed_output=(1 / 128, 128)),
    OperationType.ELU: Recipe(_elu),
    OperationType.LOG: Recipe(sign=Sign.POSITIVE),
    OperationType.RSQRT: Recipe(sign=Sign.POSITIVE),
    OperationType.SQRT: Recipe(sign=Sign.NOT_NEGATIVE),
    **dict.fromkeys((OperationType.ADD, OperationType.SUB), Recipe(_pair("second"))),
    OperationType.MUL: Recipe(_pair("second"), fitted=True),
    OperationType.DIV: Recipe(_pair("second", Sign.NOT_ZERO)),
    OperationType.POW: Recipe(_pair("exponent"), sign=Sign.NOT_NEGATIVE),
    OperationType.PRELU: Recipe(_pair("alpha")),
    **dict.fromkeys(
        (OperationType[name] for name in ("MAXIMUM", "MINIMUM", "LOGICAL_AND", "LOGICAL_OR")), Recipe(_pair("second"))
    ),
    **dict.fromkeys(
        (
            OperationType[name]
            for name in ("EQUAL", "NOT_EQUAL", "GREATER", "GREATER_EQUAL", "LESS", "LESS_EQUAL")
        ),
        Recipe(_pair("second")),
    ),
    OperationType.SELECT: Recipe(_select),
    OperationType.CONCATENATION: Recipe(_joined),
    OperationType.PACK: Recipe(_packed, ranks=(1, 2, 3)),
    OperationType.BATCH_MATMUL: Recipe(_matrices, ranks=(2, 3, 4), fitted=True),
    OperationType.SOFTMAX: Recipe(_softmax, fixed_output=(1 / 256, 0)),
    OperationType.LOG_SOFTMAX: Recipe(_softmax),
    OperationType.L2_NORMALIZATION: Recipe(_with_axis, fixed_output=(1 / 128, 128)),
    OperationType.LOCAL_RESPONSE_NORMALIZATION: Recipe(_local_response),
    OperationType.INSTANCE_NORMALIZATION: _image(_instance),
    **dict.fromkeys(
        (
            OperationType[name]
            for name in ("MEAN", "REDUCE_ALL", "REDUCE_ANY", "REDUCE_MAX", "REDUCE_MIN", "REDUCE_PROD", "REDUCE_SUM")
        ),
        Recipe(_reduction),
    ),
    **dict.fromkeys((OperationType.ARGMAX, OperationType.ARGMIN), Recipe(_with_axis)),
    OperationType.RESHAPE: Recipe(_reshape),
    OperationType.SQUEEZE: Recipe(_squeeze, shape=_with_ones),
    OperationType.EXPAND_DIMS: Recipe(_expand),
    OperationType.TRANSPOSE: Recipe(_transpose),
    OperationType.REVERSE: Recipe(_reverse),
    OperationType.TILE: Recipe(_tile),
    OperationType.CHANNEL_SHUFFLE: Recipe(_shuffle),
    **dict.fromkeys((OperationType.PAD, OperationType.PAD_V2), Recipe(_paddings)),
    OperationType.MIRROR_PAD: Recipe(_mirrored),
    OperationType.SLICE: Recipe(_slice),
    OperationType.STRIDED_SLICE: Recipe(_strided_slice),
    OperationType.SPLIT: Recipe(_split),
    OperationType.GATHER: Recipe(_gather),
    OperationType.EMBEDDING_LOOKUP: Recipe(_lookups, ranks=(2, 3, 4)),
    OperationType.HASHTABLE_LOOKUP: Recipe(_lookups, ranks=(2, 3, 4), keeps=(0,)),
    OperationType.TOPK_V2: Recipe(_top, keeps=(0,)),
    OperationType.FILL: Recipe(_fill),
    **dict.fromkeys(
        (OperationType.AVERAGE_POOL_2D, OperationType.L2_POOL_2D, OperationType.MAX_POOL_2D), _image(_pool)
    ),
    OperationType.CONV_2D: _image(_convolution, fitted=True),
    OperationType.DEPTHWISE_CONV_2D: _image(_depthwise, fitted=True),
    OperationType.GROUPED_CONV_2D: _image(_grouped, fitted=True),
    OperationType.TRANSPOSE_CONV_2D: _image(_transposed, fitted=True),
    OperationType.FULLY_CONNECTED: Recipe(_fully_connected, ranks=(2, 3, 4), fitted=True),
    OperationType.DEPTH_TO_SPACE: _image(_depth_to_space, shape=_image_of(lambda block: (1, 1, 1, block * block))),
    OperationType.SPACE_TO_DEPTH: _image(_space_to_depth, shape=_image_of(lambda block: (1, block, block, 1))),
    OperationType.BATCH_TO_SPACE_ND: _image(_batch_to_space, shape=_image_of(lambda block: (block * block, 1, 1, 1))),
    OperationType.SPACE_TO_BATCH_ND: _image(_space_to_batch),
    **dict.fromkeys((OperationType.RESIZE_BILINEAR, OperationType.RESIZE_NEAREST_NEIGHBOR), _image(_resize)),
    OperationType.ROI_ALIGN: _image(_regions),
    OperationType.ROI_POOLING: _image(_regions, keeps=(0,)),
    OperationType.HEATMAP_MAX_KEYPOINT: _image(_keypoints, shape=_square, accepts=_is_square),
}  # fmt: skip
"""Every operation that is drawn."""
