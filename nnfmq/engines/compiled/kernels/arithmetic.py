"""The arithmetics of products: float32, and codes in pairs of 16 bits or in quads of bytes, with sums of 32.

All multiply rows of an image, widened into *cells* in a thread's scratch memory, with packed weights. Of floats and
pairs the zero points are subtracted while widening and packing, so that padding is 0 and sums need no correction. Quads
are codes as they are, and what that adds to sums is taken off again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from nnfmq.engines.compiled.emission import F32, I8, I16, I32, Emitter, Value, vector
from nnfmq.engines.compiled.kernels.cells import Widening
from nnfmq.engines.compiled.kernels.float_ops import fmuladd
from nnfmq.engines.compiled.kernels.octets import GROUP, pack_lists
from nnfmq.engines.compiled.kernels.requantize import Requantization, whole
from nnfmq.engines.compiled.target import Target

__all__ = ["Arithmetic", "Codes", "FloatCodes", "Floats", "Octets", "Quads"]

Array = npt.NDArray[Any]


class Arithmetic(Protocol):
    """How a product is computed. A cell is what an element becomes in scratch memory; `group` cells are multiplied at
    once, by as many weights for each lane."""

    item_bytes: int
    output_bytes: int
    cell_bytes: int
    group: int

    @property
    def has_excess(self) -> bool:
        """Whether weights are less than they should be, and `excess` times its cells is added to a position."""
        ...

    @property
    def finishes_soon(self) -> bool:
        """Whether results take so few instructions that a loop over rows would take more."""
        ...

    @property
    def is_listed(self) -> bool:
        """Whether weights come in groups with the places of their cells, and not all groups come once."""
        ...

    def in_place(self, depth: int) -> bool:
        """Return whether pixels of `depth` elements are whole groups of cells already."""
        ...

    def products(self, target: Target) -> int:
        """Return the registers for products on their way into sums."""
        ...

    @property
    def factor(self) -> int:
        """How many times weights are to be taken."""
        ...

    def widening(self, e: Emitter, finish: Value) -> Widening:
        """Return how elements become cells, where `finish` has the numbers for that."""
        ...

    def first_sums(self, e: Emitter, finish: Value, channel: Value, lanes: int) -> Value:
        """Return what sums begin with."""
        ...

    def multiply_add(self, e: Emitter, sums: Value, cells: Value, weights: Value) -> Value:
        """Return `sums` plus a group of cells, for all lanes the same, times weights."""
        ...

    def load_group(self, e: Emitter, address: Value, offset: Value, lanes: int) -> Value:
        """Load a group of cells for all lanes."""
        ...

    def weights_type(self, lanes: int) -> Any:
        """Return the type of the weights of one group for `lanes` channels."""
        ...

    def results(self, e: Emitter, sums: Sequence[Value], finish: Value, channel: Value) -> list[Value]:
        """Return what is stored of neighbouring vectors of sums, the first of which begins with `channel`."""
        ...

    def pack(self, weights: Array, tap_places: Array) -> bytes:
        """Return weights (panels, channels, taps, cells of a tap) in the order in which they are read.

        `tap_places` are bytes from a position's first cell to that of each tap.
        """
        ...


@dataclass(frozen=True, slots=True)
class Floats:
    """float32. `low` and `high` clamp the results."""

    low: float
    high: float

    item_bytes = output_bytes = cell_bytes = 4
    group = 1
    factor = 1
    has_excess = is_listed = False
    finishes_soon = True

    def in_place(self, depth: int) -> bool:
        """Return True."""
        return True

    def products(self, target: Target) -> int:
        """None: they are added at once."""
        return 0

    def widening(self, e: Emitter, finish: Value) -> Floats:
        """They are cells already."""
        return self

    def widened(self, e: Emitter, source: Value, offset: Value, count: int) -> Value:
        """Load them as they are."""
        return e.load(vector(F32, count), source, offset)

    def zeros(self, e: Emitter, count: int) -> Value:
        """Return cells of 0."""
        return e.splat(F32, 0.0, count)

    def first_sums(self, e: Emitter, finish: Value, channel: Value, lanes: int) -> Value:
        """Return the bias."""
        return e.load(vector(F32, lanes), finish, e.mul(channel, 4))

    def load_group(self, e: Emitter, address: Value, offset: Value, lanes: int) -> Value:
        """Load one number for all lanes."""
        return e.broadcast(e.load(F32, address, offset), lanes)

    def weights_type(self, lanes: int) -> Any:
        """Return a vector of float32."""
        return vector(F32, lanes)

    def multiply_add(self, e: Emitter, sums: Value, cells: Value, weights: Value) -> Value:
        """Return sums + cells · weights."""
        return fmuladd(e, cells, weights, sums)

    def results(self, e: Emitter, sums: Sequence[Value], finish: Value, channel: Value) -> list[Value]:
        """Return the sums, clamped; NaN stays."""
        return [self._clamped(e, values) for values in sums]

    def _clamped(self, e: Emitter, sums: Value) -> Value:
        lanes = sums.type.count
        if self.low > -np.inf:
            low = e.splat(F32, self.low, lanes)
            sums = e.b.select(e.b.fcmp_ordered(">", low, sums), low, sums)  # in this order one instruction of x86
        if self.high < np.inf:
            high = e.splat(F32, self.high, lanes)
            sums = e.b.select(e.b.fcmp_ordered("<", high, sums), high, sums)
        return sums

    def pack(self, weights: Array, _: Array) -> bytes:
        """Return them with the channels of a panel last."""
        return weights.transpose(0, 2, 3, 1).astype(np.float32).tobytes()


@dataclass(frozen=True, slots=True)
class Centred:
    """Codes of 8 bits, less their zero point, as cells: whole numbers of 16 bits, or float32."""

    signed: bool
    zero_point: Value
    cell_bytes: int

    item_bytes = 1

    def widened(self, e: Emitter, source: Value, offset: Value, count: int) -> Value:
        """Load codes, less their zero point."""
        wide = vector(I16 if self.cell_bytes == 2 else I32, count)
        codes = (e.b.sext if self.signed else e.b.zext)(e.load(vector(I8, count), source, offset), wide)
        zero = self.zero_point if self.cell_bytes == 4 else e.b.trunc(self.zero_point, I16)
        centred = e.b.sub(codes, e.broadcast(zero, count))
        return e.b.sitofp(centred, vector(F32, count)) if self.cell_bytes == 4 else centred

    def zeros(self, e: Emitter, count: int) -> Value:
        """Return cells of 0."""
        return e.splat(F32, 0.0, count) if self.cell_bytes == 4 else e.splat(I16, 0, count)


@dataclass(frozen=True, slots=True)
class Codes:
    """8-bit codes, centred to 16 bits and multiplied in pairs."""

    signed: bool
    requantization: Requantization

    item_bytes = output_bytes = 1
    cell_bytes = 2
    group = 2
    has_excess = is_listed = finishes_soon = False

    def in_place(self, depth: int) -> bool:
        """Return False: they are widened."""
        return False

    def products(self, target: Target) -> int:
        """One, where no instruction adds them at once."""
        return 0 if target.pair_sum else 1

    @property
    def factor(self) -> int:
        """As the requantization says."""
        return self.requantization.rounding.factor

    def widening(self, e: Emitter, finish: Value) -> Centred:
        """Subtract the zero point."""
        return Centred(self.signed, self.requantization.centre(e, finish), self.cell_bytes)

    def first_sums(self, e: Emitter, finish: Value, channel: Value, lanes: int) -> Value:
        """Return the bias."""
        return self.requantization.bias(e, finish, channel, lanes)

    def load_group(self, e: Emitter, address: Value, offset: Value, lanes: int) -> Value:
        """Load two cells for all lanes."""
        return e.b.bitcast(e.broadcast(e.load(I32, address, offset), lanes), vector(I16, 2 * lanes))

    def weights_type(self, lanes: int) -> Any:
        """Return a vector of pairs."""
        return vector(I16, 2 * lanes)

    def multiply_add(self, e: Emitter, sums: Value, cells: Value, weights: Value) -> Value:
        """Return sums + both products."""
        return pair_sums(e, sums, cells, weights)

    def results(self, e: Emitter, sums: Sequence[Value], finish: Value, channel: Value) -> list[Value]:
        """Return the codes of the sums."""
        return self.requantization.codes(e, sums, finish, channel)

    def pack(self, weights: Array, _: Array) -> bytes:
        """Return pairs of cells of one channel side by side; an odd cell's partner is 0."""
        return _grouped(weights.astype(np.int16), self.group)


def _grouped(weights: Array, group: int) -> bytes:
    """Return weights (blocks, channels, taps, cells) with groups of cells side by side, filled up with 0."""
    blocks, lanes, taps, cells = weights.shape
    filled = np.zeros((blocks, lanes, taps, math.ceil(cells / group) * group), weights.dtype)
    filled[..., :cells] = weights
    return filled.reshape(blocks, lanes, taps, -1, group).transpose(0, 2, 3, 1, 4).tobytes()


def pair_sums(e: Emitter, sums: Value, cells: Value, weights: Value) -> Value:
    """Return `sums` plus the products of neighbours of 16 bits."""
    if e.target.pair_sum is not None and sums.type.count == e.target.lanes:
        return e.call(e.target.pair_sum, sums.type, sums, *(e.b.bitcast(v, sums.type) for v in (cells, weights)))
    return e.b.add(sums, _pair_products(e, cells, weights))


def _pair_products(e: Emitter, cells: Value, weights: Value) -> Value:
    lanes = weights.type.count // 2
    if e.target.pair_product is not None and lanes == e.target.lanes:
        return e.call(e.target.pair_product, vector(I32, lanes), cells, weights)
    wide = vector(I32, 2 * lanes)
    products = e.b.mul(e.b.sext(cells, wide), e.b.sext(weights, wide))
    even, odd = (e.shuffle(products, products, range(first, 2 * lanes, 2)) for first in (0, 1))
    return e.b.add(even, odd)


@dataclass(frozen=True, slots=True)
class Unsigned:
    """Codes of 8 bits as cells without sign: signed ones plus 128. Padding is the zero point."""

    signed: bool
    zero_point: Value

    item_bytes = cell_bytes = 1

    def widened(self, e: Emitter, source: Value, offset: Value, count: int) -> Value:
        """Load codes."""
        codes = e.load(vector(I8, count), source, offset)
        return e.b.xor(codes, e.splat(I8, -128, count)) if self.signed else codes

    def zeros(self, e: Emitter, count: int) -> Value:
        """Return cells of padding."""
        return e.broadcast(e.b.trunc(self.zero_point, I8), count)


@dataclass(frozen=True, slots=True)
class _Bytes:
    """8-bit codes without sign, multiplied with weights of 8 bits.

    Sums begin with a bias that takes off what the image's zero point adds.
    """

    signed: bool
    requantization: Requantization

    item_bytes = output_bytes = cell_bytes = 1
    group = 4
    factor = 1
    finishes_soon = False

    def in_place(self, depth: int) -> bool:
        """Return whether they are without sign, and no group goes beyond a pixel."""
        return not self.signed and depth % self.group == 0

    def widening(self, e: Emitter, finish: Value) -> Unsigned:
        """Take off the sign."""
        return Unsigned(self.signed, self.requantization.centre(e, finish))

    def first_sums(self, e: Emitter, finish: Value, channel: Value, lanes: int) -> Value:
        """Return the bias."""
        return self.requantization.bias(e, finish, channel, lanes)

    def weights_type(self, lanes: int) -> Any:
        """Return a vector of quads."""
        return vector(I8, 4 * lanes)

    def results(self, e: Emitter, sums: Sequence[Value], finish: Value, channel: Value) -> list[Value]:
        """Return the codes of the sums."""
        return self.requantization.codes(e, sums, finish, channel)


@dataclass(frozen=True, slots=True)
class Quads(_Bytes):
    """Bytes in quads, which are added in 32 bits.

    Weights that do not fit are made less by a number, their *excess*: each position has the sum of its cells times that
    added.
    """

    has_excess: bool

    is_listed = False

    def excess(self, e: Emitter, finish: Value) -> Value:
        """Return what is in the constants."""
        return self.requantization.excess(e, finish)

    def products(self, target: Target) -> int:
        """None: they are added at once."""
        return 0

    def load_group(self, e: Emitter, address: Value, offset: Value, lanes: int) -> Value:
        """Load four cells for all lanes."""
        return load_quad(e, address, offset, lanes)

    def multiply_add(self, e: Emitter, sums: Value, cells: Value, weights: Value) -> Value:
        """Return sums + four products."""
        return quad_sums(e, sums, cells, weights)

    def pack(self, weights: Array, _: Array) -> bytes:
        """Return quads of cells of one channel side by side; missing ones are 0."""
        return _grouped(weights.astype(np.int8), self.group)


def load_quad(e: Emitter, address: Value, offset: Value, lanes: int) -> Value:
    """Return four bytes, the same for all lanes."""
    return e.b.bitcast(e.broadcast(e.load(I32, address, offset), lanes), vector(I8, 4 * lanes))


def quad_sums(e: Emitter, sums: Value, cells: Value, weights: Value) -> Value:
    """Return `sums` plus the products of four neighbours, cells without sign and weights with it."""
    lanes = sums.type.count
    if e.target.quad_sum is not None and lanes == e.target.lanes:
        return e.call(e.target.quad_sum, sums.type, sums, *(e.b.bitcast(v, sums.type) for v in (cells, weights)))
    shorts, byte = vector(I16, 2 * lanes), e.splat(I16, 8, 2 * lanes)
    cells, weights = (e.b.bitcast(v, shorts) for v in (cells, weights))
    even = e.b.and_(cells, e.splat(I16, 255, 2 * lanes)), e.b.ashr(e.b.shl(weights, byte), byte)
    odd = e.b.lshr(cells, byte), e.b.ashr(weights, byte)
    return pair_sums(e, pair_sums(e, sums, *even), *odd)


@dataclass(frozen=True, slots=True)
class Octets(_Bytes):
    """Bytes in groups of eight, four products of which are added in 16 bits; their weights are listed (`octets`)."""

    group = GROUP
    has_excess = False
    is_listed = True

    def products(self, target: Target) -> int:
        """Two on their way, and the ones with which neighbours are added."""
        return 3

    def load_group(self, e: Emitter, address: Value, offset: Value, lanes: int) -> tuple[Value, Value]:
        """Load eight cells for all lanes, as two quads."""
        place = e.at(address, offset)
        return load_quad(e, place, 0, lanes), load_quad(e, place, 4, lanes)

    def multiply_add(
        self, e: Emitter, sums: Value, cells: tuple[Value, Value], weights: tuple[Value, Value]
    ) -> Value:  # fmt: skip
        """Return sums + eight products."""
        return octet_sums(e, sums, cells, weights)

    def pack(self, weights: Array, tap_places: Array) -> bytes:
        """Return lists."""
        return pack_lists(weights, tap_places)


def octet_sums(e: Emitter, sums: Value, cells: tuple[Value, Value], weights: tuple[Value, Value]) -> Value:
    """Return `sums` plus the products of eight, two and two quads; 16 bits hold the sum of any four that are added."""
    first, second = (byte_products(e, *pair) for pair in zip(cells, weights, strict=True))
    return pair_sums(e, sums, e.b.add(first, second), e.splat(I16, 1, 2 * sums.type.count))


def byte_products(e: Emitter, cells: Value, weights: Value) -> Value:
    """Return sums of two neighbours' products, cells without sign and weights with it, which 16 bits hold."""
    assert e.target.byte_products is not None, "asked for where there is one"
    return e.call(e.target.byte_products, vector(I16, cells.type.count // 2), cells, weights)


@dataclass(frozen=True, slots=True)
class FloatCodes:
    """8-bit codes whose sums float32 holds exactly, for filters that are as wide as the image is deep."""

    signed: bool
    requantization: Requantization

    item_bytes = output_bytes = 1
    cell_bytes = 4

    @property
    def factor(self) -> int:
        """As the requantization says."""
        return self.requantization.rounding.factor

    def widening(self, e: Emitter, finish: Value) -> Centred:
        """Subtract the zero point."""
        return Centred(self.signed, self.requantization.centre(e, finish), self.cell_bytes)

    def first_sums(self, e: Emitter, finish: Value, channel: Value, lanes: int) -> Value:
        """Return 0: a bias may be too large for float32."""
        return e.splat(F32, 0.0, lanes)

    def results(self, e: Emitter, sums: Sequence[Value], finish: Value, channel: Value) -> list[Value]:
        """Return the codes of the sums and the bias."""
        lanes = sums[0].type.count
        biases = [self.requantization.bias(e, finish, e.add(channel, n * lanes), lanes) for n in range(len(sums))]
        totals = [e.b.add(whole(e, value), bias) for value, bias in zip(sums, biases, strict=True)]
        return self.requantization.codes(e, totals, finish, channel)
