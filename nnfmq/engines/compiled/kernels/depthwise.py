"""DEPTHWISE_CONV_2D: each channel by itself, in float32 vectors over a band of the image.

Sums of codes are exact in float32 too, as long as a filter has fewer than some hundreds of taps, and there a
multiply-add takes one instruction and no pairing of neighbours. Where the depth multiplier is above 1, widening repeats
each channel of the image. Work is cut into blocks of rows and slices of channels, whose bands stay in a near cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from nnfmq.engines.compiled.emission import F32, Emitter, Value, vector
from nnfmq.engines.compiled.kernels.arithmetic import Array, FloatCodes, Floats
from nnfmq.engines.compiled.kernels.cells import Band, BandNumbers, Widening, emit_band, widen, widen_repeated
from nnfmq.engines.compiled.kernels.float_ops import fmuladd
from nnfmq.engines.compiled.kernels.numbers import load_numbers, stored_numbers
from nnfmq.engines.compiled.target import Target
from nnfmq.operations.shapes import WindowDimension
from nnfmq.operations.signature import Shape

__all__ = ["Depthwise", "plan_depthwise"]

_SCRATCH_BYTES = 1 << 16
_UNITS = 8
_STRAIGHT_TAPS = 25
_POSITIONS = 4
_WIDENING, _PIXEL = 7, 8  # instructions for a vector, and more for each pixel of a slice


@dataclass(frozen=True, slots=True)
class Taps:
    """A filter's columns, and how far apart they and the positions are; `rows` are 0 where all are numbers."""

    rows: int
    columns: int
    stride: int
    dilation: int


class _Numbers(NamedTuple):
    """What kernels of one form differ in. Bytes but for what is counted."""

    blocks: Any
    slices: Any
    channels: Any
    slice: Any
    served: Any
    rows: Any
    image_bytes: Any
    row_out: Any
    positions: Any
    pixel: Any  # cells from one pixel to the next
    step: Any  # cells from one position to the next
    place: Any  # results from one position to the next
    filters: Any  # weights of a panel
    down: Any  # cells from one row of taps to the next
    width: Any
    pixel_in: Any
    multiplier: Any
    tap_rows: Any
    tap_columns: Any
    across: Any


@dataclass(frozen=True, slots=True)
class Depthwise:
    """An image whose every channel has `multiplier` filters; `channels` are as many as there are filters.

    What decides its code shows in its `repr`: the tile, positions and vectors of channels; how many channels the last
    panel has, if not all (`rest`); whether the channels are sliced, or repeated.
    """

    shape: Shape = field(repr=False)
    rows: WindowDimension = field(repr=False)
    columns: WindowDimension = field(repr=False)
    multiplier: int = field(repr=False)
    block: int = field(repr=False)
    slice: int = field(repr=False)
    arithmetic: Floats | FloatCodes
    taps: Taps
    tile: tuple[int, int]
    lanes: int
    rest: int
    is_sliced: bool
    is_repeated: bool

    @property
    def channels(self) -> int:
        """As many as there are filters."""
        return self.shape[3] * self.multiplier

    @property
    def multiplications(self) -> int:
        """How many the whole takes."""
        positions = self.shape[0] * self.rows.count * self.columns.count
        return positions * self.channels * self.rows.size * self.columns.size

    @property
    def units(self) -> int:
        """Blocks of output rows times slices of channels."""
        return self.shape[0] * self._blocks * self._slices

    @property
    def _blocks(self) -> int:
        return math.ceil(self.rows.count / self.block)

    @property
    def _slices(self) -> int:
        return math.ceil(self.channels / self.slice)

    @property
    def panel(self) -> int:
        """Channels of a tile."""
        return self.tile[1] * self.lanes

    @property
    def panels(self) -> int:
        """Panels, tiles' widths of channels."""
        return math.ceil(self.channels / self.panel)

    @property
    def order(self) -> Array:
        """The channel at each place of the panels; beside the last one it is repeated."""
        places: Array = np.minimum(np.arange(self.panels * self.panel), self.channels - 1)
        return places

    @property
    def band(self) -> Band:
        """A unit's cells."""
        return Band(self.shape[1], self.shape[2], self.slice, self.rows, self.columns, self.block, 4)

    def scratch_bytes(self, target: Target) -> int:
        """The band's cells, and what the last vectors of channels read behind them."""
        return self.band.bytes + 4 * self.panel

    def pack(self, weights: Array) -> bytes:
        """Return `weights` (height, width, channels), zero point subtracted, vector by vector."""
        taps, vectors = self.rows.size * self.columns.size, self.panels * self.tile[1]
        filled = np.zeros((taps, vectors * self.lanes), np.float32)
        filled[:, : self.channels] = weights.reshape(taps, self.channels)
        return filled.reshape(taps, vectors, self.lanes).transpose(1, 0, 2).tobytes()

    def numbers(self) -> bytes:
        """Return the constant with all extents."""
        a, band, (_, height, width, depth) = self.arithmetic, self.band, self.shape
        row_in, place = width * depth * a.item_bytes, self.channels * a.output_bytes
        own = _Numbers(
            blocks=self._blocks,
            slices=self._slices,
            channels=self.channels,
            slice=self.slice,
            served=self.block,
            rows=self.rows.count,
            image_bytes=height * row_in,
            row_out=self.columns.count * place,
            positions=self.columns.count,
            pixel=self.slice * 4,
            step=self.columns.stride * self.slice * 4,
            place=place,
            filters=self.rows.size * self.columns.size * self.lanes * 4,
            down=self.rows.dilation * band.pitch,
            width=width,
            pixel_in=depth * a.item_bytes,
            multiplier=self.multiplier,
            tap_rows=self.rows.size,
            tap_columns=self.columns.size,
            across=self.columns.dilation * self.slice * 4,
        )
        return stored_numbers(own, band.numbers(row_in))

    def emit(self, e: Emitter) -> None:
        """Table: input, output, weights, what finishes sums, numbers."""
        image, out, weights, finish = map(e.argument, range(4))
        numbers = e.argument(4)
        band = load_numbers(e, numbers, BandNumbers, len(_Numbers._fields))
        emission = _Emission(self, e, load_numbers(e, numbers, _Numbers), band, weights, finish)
        with e.loop(e.begin, e.end) as unit:
            emission.emit_unit(image, out, unit)
        e.finish()


@dataclass(frozen=True, slots=True)
class _Emission:
    """The instructions of a kernel, which depend on what shows in its `repr` only."""

    kernel: Depthwise
    e: Emitter
    n: _Numbers
    band: BandNumbers
    weights: Value
    finish: Value

    def emit_unit(self, image: Value, out: Value, unit: Value) -> None:
        """Emit one block of one slice."""
        e, n, k = self.e, self.n, self.kernel
        block, channel = unit, e.i64(0)
        if k.is_sliced:
            block, channel = e.b.udiv(unit, n.slices), e.b.mul(e.b.urem(unit, n.slices), n.slice)
        number, first = e.b.udiv(block, n.blocks), e.b.mul(e.b.urem(block, n.blocks), n.served)
        served = e.intrinsic("llvm.smin", n.served, e.b.sub(n.rows, first))
        here = e.intrinsic("llvm.smin", n.slice, e.b.sub(n.channels, channel))
        a = k.arithmetic
        source = e.at(e.at(image, e.b.mul(number, n.image_bytes)), e.mul(channel, a.item_bytes))
        emit_band(
            e,
            self.band,
            a.widening(e, self.finish),
            source,
            first,
            served,
            lambda row, place: self._widen_row(row, place, here),
        )
        target = e.at(out, e.b.mul(e.b.add(e.b.mul(number, n.rows), first), n.row_out))
        down = e.b.mul(self.band.stride, self.band.pitch)
        with e.loop(0, served) as row:
            cells, place = e.at(e.scratch, e.b.mul(row, down)), e.at(target, e.b.mul(row, n.row_out))
            self._emit_row(cells, place, channel, here)

    def _widen_row(self, row: Value, place: Value, here: Value) -> None:
        e, n, k = self.e, self.n, self.kernel
        widening = k.arithmetic.widening(e, self.finish)
        if k.is_repeated:
            widen_repeated(e, widening, row, place, e.b.udiv(self.band.within, n.multiplier), n.multiplier)
        elif k.is_sliced:
            with e.loop(0, n.width) as x:
                source, cells = e.at(row, e.b.mul(x, n.pixel_in)), e.at(place, e.b.mul(x, n.pixel))
                if k.rest:
                    widen(e, widening, source, cells, here)
                else:
                    self._widen_panels(widening, source, cells, here)
        else:
            widen(e, widening, row, place, self.band.within)

    def _widen_panels(self, widening: Widening, source: Value, cells: Value, count: Value) -> None:
        e, k = self.e, self.kernel
        with e.loop(0, count, k.panel) as panel:
            for v in range(k.tile[1]):
                first = e.add(panel, v * k.lanes)
                value = widening.widened(e, source, e.mul(first, widening.item_bytes), k.lanes)
                e.store(value, cells, e.mul(first, widening.cell_bytes))

    def _emit_row(self, cells: Value, out: Value, first: Value, here: Value) -> None:
        """Emit the tiles of a row: all channels of some positions, then the next, as they lie in memory."""
        e, n, (positions, vectors), a = self.e, self.n, self.kernel.tile, self.kernel.arithmetic
        width, last = vectors * self.kernel.lanes, e.b.sub(n.positions, e.i64(positions))
        with e.loop(0, n.positions, positions) as position:
            position = e.intrinsic("llvm.smin", position, last)
            source, target = e.at(cells, e.b.mul(position, n.step)), e.at(out, e.b.mul(position, n.place))
            with e.loop(0, here, width) as offset:
                channel = e.b.add(first, offset)
                sums = self._emit_tile(e.at(source, e.mul(offset, 4)), channel)
                is_last = e.b.icmp_signed(">", e.add(channel, width), n.channels)
                first_place = e.at(target, e.mul(channel, a.output_bytes))
                with e.rows_of(sums, vectors, n.place) as (along, row):
                    results = a.results(e, row, self.finish, channel)
                    e.store_panel(results, e.at(first_place, along), self.kernel.rest, is_last)

    def _emit_tile(self, cells: Value, channel: Value) -> Sequence[Value]:
        """Emit a tile's sums, vector by vector, and return them position by position."""
        positions, vectors = self.kernel.tile
        columns = [self._emit_vector(cells, channel, v) for v in range(vectors)]
        return [columns[v][p] for p in range(positions) for v in range(vectors)]

    def _emit_vector(self, cells: Value, channel: Value, v: int) -> Sequence[Value]:
        (positions, _), lanes, e, n, taps = self.kernel.tile, self.kernel.lanes, self.e, self.n, self.kernel.taps
        first = e.add(channel, v * lanes)
        filters = e.at(self.weights, e.b.mul(e.b.udiv(first, e.i64(lanes)), n.filters))
        source = e.at(cells, 4 * v * lanes)
        sums: Sequence[Value] = [self.kernel.arithmetic.first_sums(e, self.finish, first, lanes)] * positions
        if taps.rows:
            for i in range(taps.rows):
                sums = self._emit_taps(e.at(source, e.mul(n.down, i)), filters, i * taps.columns, sums)
            return sums
        return e.carry(n.tap_rows, sums, lambda i, s: self._emit_far_taps(source, filters, i, s))

    def _emit_taps(self, cells: Value, filters: Value, first: int, sums: Sequence[Value]) -> Sequence[Value]:
        """Emit a row of taps; cells that several positions meet are loaded once."""
        e, taps, lanes, loaded = self.e, self.kernel.taps, self.kernel.lanes, dict[int, Value]()
        for j in range(taps.columns):
            factor, results = e.load(vector(F32, lanes), filters, 4 * lanes * (first + j)), []
            for p, value in enumerate(sums):
                pixel = j * taps.dilation + p * taps.stride
                if pixel not in loaded:
                    loaded[pixel] = e.load(factor.type, cells, e.mul(self.n.pixel, pixel))
                results.append(fmuladd(e, loaded[pixel], factor, value))
            sums = results
        return sums

    def _emit_far_taps(self, source: Value, filters: Value, i: Value, sums: Sequence[Value]) -> Sequence[Value]:
        """Emit a row of a filter that has many taps, as a loop."""
        e, n, lanes = self.e, self.n, self.kernel.lanes
        cells, kind = e.at(source, e.b.mul(i, n.down)), vector(F32, lanes)

        def tap(j: Value, sums: Sequence[Value]) -> Sequence[Value]:
            first = e.at(cells, e.b.mul(j, n.across))
            factor = e.load(kind, filters, e.mul(e.b.add(e.b.mul(i, n.tap_columns), j), 4 * lanes))
            return [fmuladd(e, e.load(kind, first, e.mul(n.step, p)), factor, value) for p, value in enumerate(sums)]

        return e.carry(n.tap_columns, sums, tap)


def plan_depthwise(
    shape: Shape,
    multiplier: int,
    rows: WindowDimension,
    columns: WindowDimension,
    arithmetic: Floats | FloatCodes,
    target: Target,
) -> Depthwise:
    """Choose the tile, the blocks and the slices for an input's shape and a target."""
    channels = shape[3] * multiplier
    needed = math.ceil(channels / target.lanes)
    vectors = 3 if needed % 2 and needed % 3 == 0 else min(2, needed)
    panel = vectors * target.lanes
    straight = rows.size * columns.size <= _STRAIGHT_TAPS
    taps = Taps(rows.size, columns.size, columns.stride, columns.dilation) if straight else Taps(0, 0, 0, 0)
    tile = (_best_positions(columns.count, target), vectors)

    def cut(slice: int) -> Depthwise:
        sliced, repeated, rest = slice < channels, multiplier > 1, channels % panel
        draft = Depthwise(
            shape, rows, columns, multiplier, 1, slice, arithmetic, taps, tile, target.lanes, rest, sliced, repeated
        )
        return replace(draft, block=_most_rows(draft))

    slices = [panel * n for n in (1, 2, 4, 8) if multiplier == 1 and panel * n < channels]
    return min(map(cut, [channels, *slices]), key=_widening)


def _best_positions(count: int, target: Target) -> int:
    """Return the positions of a tile: the fewest computed twice, and of these the most that share cells."""
    most = _POSITIONS if target.registers == 16 else 2 * _POSITIONS
    choices = range(min(count, 3), min(count, most) + 1)
    return min(choices, key=lambda positions: math.ceil(count / positions) * (positions + 0.6))


def _most_rows(kernel: Depthwise) -> int:
    """Return how many output rows a block can have: the band fits, and there is work for all threads."""
    most = max(1, kernel.shape[0] * kernel.rows.count * math.ceil(kernel.channels / kernel.slice) // _UNITS)
    block = 1
    while block < min(most, kernel.rows.count) and replace(kernel, block=block + 1).band.bytes <= _SCRATCH_BYTES:
        block += 1
    return block


def _widening(kernel: Depthwise) -> float:
    """Return how many instructions it takes to widen what a vector of channels needs."""
    blocks = math.ceil(kernel.rows.count / kernel.block)
    rows = blocks * ((kernel.block - 1) * kernel.rows.stride + kernel.rows.effective_kernel_size)
    return rows * (_WIDENING + (_PIXEL * kernel.lanes / kernel.slice if kernel.is_sliced else 0))
