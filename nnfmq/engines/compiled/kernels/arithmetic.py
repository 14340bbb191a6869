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

from nnfmq.engines.compiled.ir_builder import F32, I8, I16, I32, KernelBuilder, Value, vector
from nnfmq.engines.compiled.kernels.cells import Widening
from nnfmq.engines.compiled.kernels.float_ops import fmuladd
from nnfmq.engines.compiled.kernels.octets import GROUP, pack_lists
from nnfmq.engines.compiled.kernels.requantize import Requantization, whole
from nnfmq.engines.compiled.target import Target

__all__ = ["Arithmetic", "Codes", "FloatCodes", "Floats", "Octets", "Quads"]

Array = npt.NDArray[Any]


class Arithmetic(Protocol):
    """How a product is computed. A cell is what an element becomes in scratch memory; `group` cells are multiplied at
    once, by as many weights for each lane.
    """

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

    def widening(self, kb: KernelBuilder, finish: Value) -> Widening:
        """Return how elements become cells, where `finish` has the numbers for that."""
        ...

    def first_sums(self, kb: KernelBuilder, finish: Value, channel: Value, lanes: int) -> Value:
        """Return what sums begin with."""
        ...

    def multiply_add(self, kb: KernelBuilder, sums: Value, cells: Value, weights: Value) -> Value:
        """Return `sums` plus a group of cells, for all lanes the same, times weights."""
        ...

    def load_group(self, kb: KernelBuilder, address: Value, offset: Value, lanes: int) -> Value:
        """Load a group of cells for all lanes."""
        ...

    def weights_type(self, lanes: int) -> Any:
        """Return the type of the weights of one group for `lanes` channels."""
        ...

    def results(self, kb: KernelBuilder, sums: Sequence[Value], finish: Value, channel: Value) -> list[Value]:
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

    def widening(self, kb: KernelBuilder, finish: Value) -> Floats:
        """They are cells already."""
        return self

    def widened(self, kb: KernelBuilder, source: Value, offset: Value, count: int) -> Value:
        """Load them as they are."""
        return kb.load(vector(F32, count), source, offset)

    def zeros(self, kb: KernelBuilder, count: int) -> Value:
        """Return cells of 0."""
        return kb.splat(F32, 0.0, count)

    def first_sums(self, kb: KernelBuilder, finish: Value, channel: Value, lanes: int) -> Value:
        """Return the bias."""
        return kb.load(vector(F32, lanes), finish, kb.mul(channel, 4))

    def load_group(self, kb: KernelBuilder, address: Value, offset: Value, lanes: int) -> Value:
        """Load one number for all lanes."""
        return kb.broadcast(kb.load(F32, address, offset), lanes)

    def weights_type(self, lanes: int) -> Any:
        """Return a vector of float32."""
        return vector(F32, lanes)

    def multiply_add(self, kb: KernelBuilder, sums: Value, cells: Value, weights: Value) -> Value:
        """Return sums + cells · weights."""
        return fmuladd(kb, cells, weights, sums)

    def results(self, kb: KernelBuilder, sums: Sequence[Value], finish: Value, channel: Value) -> list[Value]:
        """Return the sums, clamped; NaN stays."""
        return [self._clamped(kb, values) for values in sums]

    def _clamped(self, kb: KernelBuilder, sums: Value) -> Value:
        lanes = sums.type.count
        if self.low > -np.inf:
            low = kb.splat(F32, self.low, lanes)
            sums = kb.ir.select(kb.ir.fcmp_ordered(">", low, sums), low, sums)  # in this order one instruction of x86
        if self.high < np.inf:
            high = kb.splat(F32, self.high, lanes)
            sums = kb.ir.select(kb.ir.fcmp_ordered("<", high, sums), high, sums)
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

    def widened(self, kb: KernelBuilder, source: Value, offset: Value, count: int) -> Value:
        """Load codes, less their zero point."""
        wide = vector(I16 if self.cell_bytes == 2 else I32, count)
        codes = (kb.ir.sext if self.signed else kb.ir.zext)(kb.load(vector(I8, count), source, offset), wide)
        zero = self.zero_point if self.cell_bytes == 4 else kb.ir.trunc(self.zero_point, I16)
        centred = kb.ir.sub(codes, kb.broadcast(zero, count))
        return kb.ir.sitofp(centred, vector(F32, count)) if self.cell_bytes == 4 else centred

    def zeros(self, kb: KernelBuilder, count: int) -> Value:
        """Return cells of 0."""
        return kb.splat(F32, 0.0, count) if self.cell_bytes == 4 else kb.splat(I16, 0, count)


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

    def widening(self, kb: KernelBuilder, finish: Value) -> Centred:
        """Subtract the zero point."""
        return Centred(self.signed, self.requantization.centre(kb, finish), self.cell_bytes)

    def first_sums(self, kb: KernelBuilder, finish: Value, channel: Value, lanes: int) -> Value:
        """Return the bias."""
        return self.requantization.bias(kb, finish, channel, lanes)

    def load_group(self, kb: KernelBuilder, address: Value, offset: Value, lanes: int) -> Value:
        """Load two cells for all lanes."""
        return kb.ir.bitcast(kb.broadcast(kb.load(I32, address, offset), lanes), vector(I16, 2 * lanes))

    def weights_type(self, lanes: int) -> Any:
        """Return a vector of pairs."""
        return vector(I16, 2 * lanes)

    def multiply_add(self, kb: KernelBuilder, sums: Value, cells: Value, weights: Value) -> Value:
        """Return sums + both products."""
        return pair_sums(kb, sums, cells, weights)

    def results(self, kb: KernelBuilder, sums: Sequence[Value], finish: Value, channel: Value) -> list[Value]:
        """Return the codes of the sums."""
        return self.requantization.codes(kb, sums, finish, channel)

    def pack(self, weights: Array, _: Array) -> bytes:
        """Return pairs of cells of one channel side by side; an odd cell's partner is 0."""
        return _grouped(weights.astype(np.int16), self.group)


def _grouped(weights: Array, group: int) -> bytes:
    """Return weights (blocks, channels, taps, cells) with groups of cells side by side, filled up with 0."""
    blocks, lanes, taps, cells = weights.shape
    filled = np.zeros((blocks, lanes, taps, math.ceil(cells / group) * group), weights.dtype)
    filled[..., :cells] = weights
    return filled.reshape(blocks, lanes, taps, -1, group).transpose(0, 2, 3, 1, 4).tobytes()


def pair_sums(kb: KernelBuilder, sums: Value, cells: Value, weights: Value) -> Value:
    """Return `sums` plus the products of neighbours of 16 bits."""
    if kb.target.pair_sum is not None and sums.type.count == kb.target.lanes:
        return kb.call(kb.target.pair_sum, sums.type, sums, *(kb.ir.bitcast(v, sums.type) for v in (cells, weights)))
    return kb.ir.add(sums, _pair_products(kb, cells, weights))


def _pair_products(kb: KernelBuilder, cells: Value, weights: Value) -> Value:
    lanes = weights.type.count // 2
    if kb.target.pair_product is not None and lanes == kb.target.lanes:
        return kb.call(kb.target.pair_product, vector(I32, lanes), cells, weights)
    wide = vector(I32, 2 * lanes)
    products = kb.ir.mul(kb.ir.sext(cells, wide), kb.ir.sext(weights, wide))
    even, odd = (kb.shuffle(products, products, range(first, 2 * lanes, 2)) for first in (0, 1))
    return kb.ir.add(even, odd)


@dataclass(frozen=True, slots=True)
class Unsigned:
    """Codes of 8 bits as cells without sign: signed ones plus 128. Padding is the zero point."""

    signed: bool
    zero_point: Value

    item_bytes = cell_bytes = 1

    def widened(self, kb: KernelBuilder, source: Value, offset: Value, count: int) -> Value:
        """Load codes."""
        codes = kb.load(vector(I8, count), source, offset)
        return kb.ir.xor(codes, kb.splat(I8, -128, count)) if self.signed else codes

    def zeros(self, kb: KernelBuilder, count: int) -> Value:
        """Return cells of padding."""
        return kb.broadcast(kb.ir.trunc(self.zero_point, I8), count)


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

    def widening(self, kb: KernelBuilder, finish: Value) -> Unsigned:
        """Take off the sign."""
        return Unsigned(self.signed, self.requantization.centre(kb, finish))

    def first_sums(self, kb: KernelBuilder, finish: Value, channel: Value, lanes: int) -> Value:
        """Return the bias."""
        return self.requantization.bias(kb, finish, channel, lanes)

    def weights_type(self, lanes: int) -> Any:
        """Return a vector of quads."""
        return vector(I8, 4 * lanes)

    def results(self, kb: KernelBuilder, sums: Sequence[Value], finish: Value, channel: Value) -> list[Value]:
        """Return the codes of the sums."""
        return self.requantization.codes(kb, sums, finish, channel)


@dataclass(frozen=True, slots=True)
class Quads(_Bytes):
    """Bytes in quads, which are added in 32 bits.

    Weights that do not fit are made less by a number, their *excess*: each position has the sum of its cells times that
    added.
    """

    has_excess: bool

    is_listed = False

    def excess(self, kb: KernelBuilder, finish: Value) -> Value:
        """Return what is in the constants."""
        return self.requantization.excess(kb, finish)

    def products(self, target: Target) -> int:
        """None: they are added at once."""
        return 0

    def load_group(self, kb: KernelBuilder, address: Value, offset: Value, lanes: int) -> Value:
        """Load four cells for all lanes."""
        return load_quad(kb, address, offset, lanes)

    def multiply_add(self, kb: KernelBuilder, sums: Value, cells: Value, weights: Value) -> Value:
        """Return sums + four products."""
        return quad_sums(kb, sums, cells, weights)

    def pack(self, weights: Array, _: Array) -> bytes:
        """Return quads of cells of one channel side by side; missing ones are 0."""
        return _grouped(weights.astype(np.int8), self.group)


def load_quad(kb: KernelBuilder, address: Value, offset: Value, lanes: int) -> Value:
    """Return four bytes, the same for all lanes."""
    return kb.ir.bitcast(kb.broadcast(kb.load(I32, address, offset), lanes), vector(I8, 4 * lanes))


def quad_sums(kb: KernelBuilder, sums: Value, cells: Value, weights: Value) -> Value:
    """Return `sums` plus the products of four neighbours, cells without sign and weights with it."""
    lanes = sums.type.count
    if kb.target.quad_sum is not None and lanes == kb.target.lanes:
        return kb.call(kb.target.quad_sum, sums.type, sums, *(kb.ir.bitcast(v, sums.type) for v in (cells, weights)))
    shorts, byte = vector(I16, 2 * lanes), kb.splat(I16, 8, 2 * lanes)
    cells, weights = (kb.ir.bitcast(v, shorts) for v in (cells, weights))
    even = kb.ir.and_(cells, kb.splat(I16, 255, 2 * lanes)), kb.ir.ashr(kb.ir.shl(weights, byte), byte)
    odd = kb.ir.lshr(cells, byte), kb.ir.ashr(weights, byte)
    return pair_sums(kb, pair_sums(kb, sums, *even), *odd)


@dataclass(frozen=True, slots=True)
class Octets(_Bytes):
    """Bytes in groups of eight, four products of which are added in 16 bits; their weights are listed (`octets`)."""

    group = GROUP
    has_excess = False
    is_listed = True

    def products(self, target: Target) -> int:
        """Two on their way, and the ones with which neighbours are added."""
        return 3

    def load_group(self, kb: KernelBuilder, address: Value, offset: Value, lanes: int) -> tuple[Value, Value]:
        """Load eight cells for all lanes, as two quads."""
        place = kb.at(address, offset)
        return load_quad(kb, place, 0, lanes), load_quad(kb, place, 4, lanes)

    def multiply_add(
        self, kb: KernelBuilder, sums: Value, cells: tuple[Value, Value], weights: tuple[Value, Value]
    ) -> Value:  # fmt: skip
        """Return sums + eight products."""
        return octet_sums(kb, sums, cells, weights)

    def pack(self, weights: Array, tap_places: Array) -> bytes:
        """Return lists."""
        return pack_lists(weights, tap_places)


def octet_sums(kb: KernelBuilder, sums: Value, cells: tuple[Value, Value], weights: tuple[Value, Value]) -> Value:
    """Return `sums` plus the products of eight, two and two quads; 16 bits hold the sum of any four that are added."""
    first, second = (byte_products(kb, *pair) for pair in zip(cells, weights, strict=True))
    return pair_sums(kb, sums, kb.ir.add(first, second), kb.splat(I16, 1, 2 * sums.type.count))


def byte_products(kb: KernelBuilder, cells: Value, weights: Value) -> Value:
    """Return sums of two neighbours' products, cells without sign and weights with it, which 16 bits hold."""
    assert kb.target.byte_products is not None, "asked for where there is one"
    return kb.call(kb.target.byte_products, vector(I16, cells.type.count // 2), cells, weights)


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

    def widening(self, kb: KernelBuilder, finish: Value) -> Centred:
        """Subtract the zero point."""
        return Centred(self.signed, self.requantization.centre(kb, finish), self.cell_bytes)

    def first_sums(self, kb: KernelBuilder, finish: Value, channel: Value, lanes: int) -> Value:
        """Return 0: a bias may be too large for float32."""
        return kb.splat(F32, 0.0, lanes)

    def results(self, kb: KernelBuilder, sums: Sequence[Value], finish: Value, channel: Value) -> list[Value]:
        """Return the codes of the sums and the bias."""
        lanes = sums[0].type.count
        biases = [self.requantization.bias(kb, finish, kb.add(channel, n * lanes), lanes) for n in range(len(sums))]
        totals = [kb.ir.add(whole(kb, value), bias) for value, bias in zip(sums, biases, strict=True)]
        return self.requantization.codes(kb, totals, finish, channel)
