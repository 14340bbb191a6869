"""What a recipe for drawing an operation is, and the arguments of operations on arrays of any kind.

A `Recipe` adds to an operation's declaration what that does not say. Its function is called with the shape of the
operation's first array (NHWC, as shape rules see it) and returns the rest by the declaration's names: Python values
for controls, `Wanted` for arrays. Names that the chosen form lacks are left out by the caller. All that is returned
is legal; what is too large is `Rejected`, and drawn again. `random_operations` has the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from nnfmq.conformance.drawing import Draw, Sign
from nnfmq.conformance.testmodels import Array
from nnfmq.hal.types import OperandType
from nnfmq.operations.signature import NUMPY_TYPES, Shape

Arguments = dict[str, Any]

_MOST_RANK = 4  # of arithmetic with a fused activation


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
    says whether an existing one does. `fixed_output`: scale and zero point that an output of uint8 has to have (int8:
    128 lower). `fitted`: the output's scale is made for the values that come out; `keeps`: outputs, by number, that
    have the input's scale and zero point.
    """

    arguments: Callable[[Draw, Request], Arguments] = lambda draw, request: {}
    ranks: tuple[int, ...] = (1, 2, 3, 4)
    sign: Sign = Sign.ANY
    shape: Callable[[Draw, int], Shape] = lambda draw, rank: draw.shape(rank)
    accepts: Callable[[Shape], bool] = lambda shape: True
    fixed_output: tuple[float, int] | None = None
    fitted: bool = False
    keeps: tuple[int, ...] = ()


def integers(values: Any) -> Array:
    """Return an int32 array."""
    return np.array(values, NUMPY_TYPES[OperandType.TENSOR_INT32])


def _axis(draw: Draw, rank: int) -> int:
    return draw.integer(-rank, rank - 1)


# ------------------------------------------------------------------------------------------------ pairs


def broadcastable(draw: Draw, shape: Shape) -> Shape:
    """Return a shape that broadcasts with `shape`: of any rank up to 4, on some axes longer or 1."""
    kept = shape[draw.integer(0, len(shape) - 1) :]
    room = draw.limits.elements // math.prod(shape)
    extents = []
    for extent in kept:
        if extent == 1 and room > 1 and draw.chance():
            extent = draw.extent(min(room, draw.limits.extent))
            room //= extent
        extents.append(1 if draw.chance(0.25) else extent)
    if len(kept) == len(shape) < _MOST_RANK and draw.chance(0.25):
        extents.insert(0, draw.extent(max(1, min(room, draw.limits.extent))))
    return tuple(extents)


def pair_with(second: str, sign: Sign = Sign.ANY) -> Callable[[Draw, Request], Arguments]:
    """Return what draws the other array of a pair, of values with this sign, and the activation."""

    def arguments(draw: Draw, request: Request) -> Arguments:
        is_integer = request.type == OperandType.TENSOR_INT32
        activation = 0 if is_integer else draw.activation()
        return {second: Wanted(broadcastable(draw, request.shape), sign), "activation": activation}

    return arguments


def select(draw: Draw, request: Request) -> Arguments:
    """Draw the condition and the other array."""
    return {"condition": Wanted(request.shape), "second": Wanted(request.shape)}


def joined(draw: Draw, request: Request) -> Arguments:
    """Draw up to four arrays more, and the axis that joins them."""
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


def packed(draw: Draw, request: Request) -> Arguments:
    """Draw up to three arrays more of the same shape."""
    others = [Wanted(request.shape)] * draw.integer(0, 3)
    return {"inputs": others, "axis": draw.integer(0, len(request.shape))}


def matrices(draw: Draw, request: Request) -> Arguments:
    """Draw the matrices on the right."""
    left, right = draw.chance(), draw.chance()
    length = request.shape[-2 if left else -1]
    rows = math.prod(request.shape) // length
    columns = draw.extent(max(1, min(draw.limits.extent, draw.limits.elements // max(rows, length))))
    shape = (columns, length) if right else (length, columns)
    return {"right": Wanted((*request.shape[:-2], *shape)), "adjoint_left": left, "adjoint_right": right}


# ------------------------------------------------------------------------------------------------ one array


def elu(draw: Draw, request: Request) -> Arguments:
    """Draw the slope."""
    return {"alpha": draw.real(0.0, 10.0)}


def one_axis(draw: Draw, request: Request) -> Arguments:
    """Draw an axis."""
    return {"axis": _axis(draw, len(request.shape))}


def softmax(draw: Draw, request: Request) -> Arguments:
    """Draw beta and axis."""
    return {"beta": draw.real(0.1, 10.0), "axis": _axis(draw, len(request.shape))}


def local_response(draw: Draw, request: Request) -> Arguments:
    """Draw radius and factors."""
    factors = {"bias": draw.real(0.5, 10.0), "alpha": draw.real(0.0, 10.0), "beta": draw.real(0.0, 1.0)}
    return {"radius": draw.integer(0, 10), **factors, "axis": _axis(draw, len(request.shape))}


def instance(draw: Draw, request: Request) -> Arguments:
    """Draw gamma, beta and epsilon."""
    return {"gamma": draw.real(-2.0, 2.0), "beta": draw.real(-2.0, 2.0), "epsilon": draw.real(0.01, 1.0)}


def reduction(draw: Draw, request: Request) -> Arguments:
    """Draw axes, some of them twice."""
    rank = len(request.shape)
    axes = [_axis(draw, rank) for _ in range(draw.integer(1, 10))]
    return {"axes": integers(axes), "keep_dimensions": draw.integer(0, 1)}


def reshape(draw: Draw, request: Request) -> Arguments:
    """Draw extents of the same product."""
    rest, extents = math.prod(request.shape), []
    for _ in range(draw.integer(0, 3)):
        extents.append(draw.divisor(rest))
        rest //= extents[-1]
    extents.append(rest)
    if draw.chance():
        extents[draw.integer(0, len(extents) - 1)] = -1
    return {"shape": integers(extents)}


def squeeze(draw: Draw, request: Request) -> Arguments:
    """Draw axes among those of extent 1."""
    ones = [axis for axis, extent in enumerate(request.shape) if extent == 1]
    rank = len(request.shape)
    chosen = [axis - rank * draw.integer(0, 1) for axis in ones if draw.chance()]
    return {"axes": integers(chosen) if chosen else None}


def with_ones(draw: Draw, rank: int) -> Shape:
    """Draw a shape in which extents of 1 are frequent."""
    return tuple(1 if draw.chance(0.4) else extent for extent in draw.shape(rank))


def expand(draw: Draw, request: Request) -> Arguments:
    """Draw where an axis is inserted."""
    return {"axis": _axis(draw, len(request.shape) + 1)}


def transpose(draw: Draw, request: Request) -> Arguments:
    """Draw a permutation."""
    rank = len(request.shape)
    return {"permutation": None if rank == 2 and draw.chance(0.25) else integers(draw.order(rank))}


def reverse(draw: Draw, request: Request) -> Arguments:
    """Draw one axis."""
    return {"axis": integers([draw.integer(0, len(request.shape) - 1)])}


def tile(draw: Draw, request: Request) -> Arguments:
    """Draw multiples."""
    room, multiples = draw.limits.elements // math.prod(request.shape), []
    for _ in request.shape:
        multiples.append(draw.integer(1, min(room, 10)))
        room //= multiples[-1]
    return {"multiples": integers(multiples)}


def shuffle(draw: Draw, request: Request) -> Arguments:
    """Draw axis and groups."""
    axis = _axis(draw, len(request.shape))
    return {"groups": draw.divisor(request.shape[axis]), "axis": axis}


def paddings(draw: Draw, request: Request) -> Arguments:
    """Draw paddings, and the value of PAD_V2."""
    low, high = -128, 127
    if request.type == OperandType.TENSOR_QUANT8_ASYMM:
        low, high = 0, 255
    is_real = request.type in (OperandType.TENSOR_FLOAT32, OperandType.TENSOR_FLOAT16)
    pairs = [(draw.integer(0, 5), draw.integer(0, 5)) for _ in request.shape]
    return {"paddings": integers(pairs), "value": draw.real(-2.0, 2.0) if is_real else draw.integer(low, high)}


def mirrored(draw: Draw, request: Request) -> Arguments:
    """Draw paddings that the input can fill."""
    mode = draw.integer(0, 1)
    most = [min(5, extent - (mode == 0)) for extent in request.shape]
    pairs = [(draw.integer(0, limit), draw.integer(0, limit)) for limit in most]
    return {"paddings": integers(pairs), "mode": mode}


def part(draw: Draw, request: Request) -> Arguments:
    """Draw a box inside."""
    begins = [draw.integer(0, extent - 1) for extent in request.shape]
    sizes = [draw.integer(1, extent - begin) for extent, begin in zip(request.shape, begins, strict=True)]
    sizes = [-1 if draw.chance(0.1) else size for size in sizes]
    return {"begin": integers(begins), "size": integers(sizes)}


def strided_slice(draw: Draw, request: Request) -> Arguments:
    """Draw ranges that hold at least one element, forwards and backwards."""
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
    begins, ends, strides = (integers(column) for column in zip(*ranges, strict=True))
    masks = {"begin_mask": begin_mask, "end_mask": end_mask, "shrink_mask": shrink}
    return {"begin": begins, "end": ends, "strides": strides, **masks}


def pieces(draw: Draw, request: Request) -> Arguments:
    """Draw axis and count."""
    axis = _axis(draw, len(request.shape))
    return {"axis": axis, "count": draw.divisor(request.shape[axis], most=10)}


def gather(draw: Draw, request: Request) -> Arguments:
    """Draw axis and indices."""
    axis = _axis(draw, len(request.shape))
    room = draw.limits.elements // (math.prod(request.shape) // request.shape[axis])
    shape = draw.shape(draw.integer(1, 2) if len(request.shape) < 4 else 1, max(1, room))
    return {"axis": axis, "indices": indices(draw, shape, request.shape[axis])}


def indices(draw: Draw, shape: Shape, count: int) -> Array:
    """Return random indices into `count` things."""
    return integers(np.floor(draw.fractions(math.prod(shape)) * count).reshape(shape))


def lookups(draw: Draw, request: Request) -> Arguments:
    """Draw row numbers, or keys and what is looked up among them."""
    room = draw.limits.elements // (math.prod(request.shape) // request.shape[0])
    count = draw.extent(max(1, min(room, draw.limits.extent)))
    keys = np.cumsum(1 + np.floor(draw.fractions(request.shape[0]) * 2))  # ascending, with gaps that miss
    if "keys" in request.types:
        return {"lookups": indices(draw, (count,), int(keys[-1]) + 2), "keys": integers(keys)}
    return {"lookups": indices(draw, (count,), request.shape[0])}


def largest(draw: Draw, request: Request) -> Arguments:
    """Draw k."""
    return {"k": draw.integer(1, request.shape[-1])}


def fill(draw: Draw, request: Request) -> Arguments:
    """Draw the value; the dimensions are the shape."""
    is_integer = request.type == OperandType.TENSOR_INT32
    value = draw.integer(-1000, 1000) if is_integer else draw.real(-2.0, 2.0)
    return {"dimensions": integers(request.shape), "value": value}
