"""Generators of operations: the arguments that an operation's declaration does not determine.

The function of an `OperationGenerator` is called with the shape of the operation's first array (NHWC, as in shape
rules) and returns the other arguments by name: Python values for attributes, `OperandSpec` for arrays. The caller drops
names that the chosen overload lacks. All returned values are valid; a sample that is too large raises `Discard`, and
another one is generated. `random_operations` has the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from msgspec import Struct

from nnfmq.conformance.random_source import RandomSource, Sign
from nnfmq.conformance.testmodels import Array
from nnfmq.hal.types import OperandType
from nnfmq.operations.signature import NUMPY_TYPES, Shape

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
