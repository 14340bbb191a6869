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

from nnfmq.engines.compiled.ir_builder import F32, KernelBuilder, Value, load_params, pack_params, vector
from nnfmq.engines.compiled.kernels.arithmetic import Array, FloatCodes, Floats
from nnfmq.engines.compiled.kernels.cells import Band, BandNumbers, Widening, emit_band, widen, widen_repeated
from nnfmq.engines.compiled.kernels.float_ops import fmuladd
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

    compile_cost = 2

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
    def work_items(self) -> int:
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
        return pack_params(own, band.numbers(row_in))

    def emit(self, kb: KernelBuilder) -> None:
        """Table: input, output, weights, what finishes sums, numbers."""
        image, out, weights, finish = map(kb.argument, range(4))
        numbers = kb.argument(4)
        band = load_params(kb, numbers, BandNumbers, len(_Numbers._fields))
        emission = _Emission(self, kb, load_params(kb, numbers, _Numbers), band, weights, finish)
        with kb.loop(kb.begin, kb.end) as unit:
            emission.emit_unit(image, out, unit)
        kb.return_void()


@dataclass(frozen=True, slots=True)
class _Emission:
    """The instructions of a kernel, which depend on what shows in its `repr` only."""

    kernel: Depthwise
    kb: KernelBuilder
    n: _Numbers
    band: BandNumbers
    weights: Value
    finish: Value

    def emit_unit(self, image: Value, out: Value, unit: Value) -> None:
        """Emit one block of one slice."""
        kb, n, k = self.kb, self.n, self.kernel
        block, channel = unit, kb.i64(0)
        if k.is_sliced:
            block, channel = kb.ir.udiv(unit, n.slices), kb.ir.mul(kb.ir.urem(unit, n.slices), n.slice)
        number, first = kb.ir.udiv(block, n.blocks), kb.ir.mul(kb.ir.urem(block, n.blocks), n.served)
        served = kb.intrinsic("llvm.smin", n.served, kb.ir.sub(n.rows, first))
        here = kb.intrinsic("llvm.smin", n.slice, kb.ir.sub(n.channels, channel))
        a = k.arithmetic
        source = kb.at(kb.at(image, kb.ir.mul(number, n.image_bytes)), kb.mul(channel, a.item_bytes))
        emit_band(
            kb,
            self.band,
            a.widening(kb, self.finish),
            source,
            first,
            served,
            lambda row, place: self._widen_row(row, place, here),
        )
        target = kb.at(out, kb.ir.mul(kb.ir.add(kb.ir.mul(number, n.rows), first), n.row_out))
        down = kb.ir.mul(self.band.stride, self.band.pitch)
        with kb.loop(0, served) as row:
            cells, place = kb.at(kb.scratch, kb.ir.mul(row, down)), kb.at(target, kb.ir.mul(row, n.row_out))
            self._emit_row(cells, place, channel, here)

    def _widen_row(self, row: Value, place: Value, here: Value) -> None:
        kb, n, k = self.kb, self.n, self.kernel
        widening = k.arithmetic.widening(kb, self.finish)
        if k.is_repeated:
            widen_repeated(kb, widening, row, place, kb.ir.udiv(self.band.within, n.multiplier), n.multiplier)
        elif k.is_sliced:
            with kb.loop(0, n.width) as x:
                source, cells = kb.at(row, kb.ir.mul(x, n.pixel_in)), kb.at(place, kb.ir.mul(x, n.pixel))
                if k.rest:
                    widen(kb, widening, source, cells, here)
                else:
                    self._widen_panels(widening, source, cells, here)
        else:
            widen(kb, widening, row, place, self.band.within)

    def _widen_panels(self, widening: Widening, source: Value, cells: Value, count: Value) -> None:
        kb, k = self.kb, self.kernel
        with kb.loop(0, count, k.panel) as panel:
            for v in range(k.tile[1]):
                first = kb.add(panel, v * k.lanes)
                value = widening.widened(kb, source, kb.mul(first, widening.item_bytes), k.lanes)
                kb.store(value, cells, kb.mul(first, widening.cell_bytes))

    def _emit_row(self, cells: Value, out: Value, first: Value, here: Value) -> None:
        """Emit the tiles of a row: all channels of some positions, then the next, as they lie in memory."""
        kb, n, (positions, vectors), a = self.kb, self.n, self.kernel.tile, self.kernel.arithmetic
        width, last = vectors * self.kernel.lanes, kb.ir.sub(n.positions, kb.i64(positions))
        with kb.loop(0, n.positions, positions) as position:
            position = kb.intrinsic("llvm.smin", position, last)
            source, target = kb.at(cells, kb.ir.mul(position, n.step)), kb.at(out, kb.ir.mul(position, n.place))
            with kb.loop(0, here, width) as offset:
                channel = kb.ir.add(first, offset)
                sums = self._emit_tile(kb.at(source, kb.mul(offset, 4)), channel)
                is_last = kb.ir.icmp_signed(">", kb.add(channel, width), n.channels)
                first_place = kb.at(target, kb.mul(channel, a.output_bytes))
                with kb.for_each_tile_row(sums, vectors, n.place) as (along, row):
                    results = a.results(kb, row, self.finish, channel)
                    kb.store_tile_row(results, kb.at(first_place, along), self.kernel.rest, is_last)

    def _emit_tile(self, cells: Value, channel: Value) -> Sequence[Value]:
        """Emit a tile's sums, vector by vector, and return them position by position."""
        positions, vectors = self.kernel.tile
        columns = [self._emit_vector(cells, channel, v) for v in range(vectors)]
        return [columns[v][p] for p in range(positions) for v in range(vectors)]

    def _emit_vector(self, cells: Value, channel: Value, v: int) -> Sequence[Value]:
        (positions, _), lanes, kb, n, taps = self.kernel.tile, self.kernel.lanes, self.kb, self.n, self.kernel.taps
        first = kb.add(channel, v * lanes)
        filters = kb.at(self.weights, kb.ir.mul(kb.ir.udiv(first, kb.i64(lanes)), n.filters))
        source = kb.at(cells, 4 * v * lanes)
        sums: Sequence[Value] = [self.kernel.arithmetic.first_sums(kb, self.finish, first, lanes)] * positions
        if taps.rows:
            for i in range(taps.rows):
                sums = self._emit_taps(kb.at(source, kb.mul(n.down, i)), filters, i * taps.columns, sums)
            return sums
        return kb.for_loop(n.tap_rows, sums, lambda i, s: self._emit_far_taps(source, filters, i, s))

    def _emit_taps(self, cells: Value, filters: Value, first: int, sums: Sequence[Value]) -> Sequence[Value]:
        """Emit a row of taps; cells that several positions meet are loaded once."""
        kb, taps, lanes, loaded = self.kb, self.kernel.taps, self.kernel.lanes, dict[int, Value]()
        for j in range(taps.columns):
            factor, results = kb.load(vector(F32, lanes), filters, 4 * lanes * (first + j)), []
            for p, value in enumerate(sums):
                pixel = j * taps.dilation + p * taps.stride
                if pixel not in loaded:
                    loaded[pixel] = kb.load(factor.type, cells, kb.mul(self.n.pixel, pixel))
                results.append(fmuladd(kb, loaded[pixel], factor, value))
            sums = results
        return sums

    def _emit_far_taps(self, source: Value, filters: Value, i: Value, sums: Sequence[Value]) -> Sequence[Value]:
        """Emit a row of a filter that has many taps, as a loop."""
        kb, n, lanes = self.kb, self.n, self.kernel.lanes
        cells, kind = kb.at(source, kb.ir.mul(i, n.down)), vector(F32, lanes)

        def tap(j: Value, sums: Sequence[Value]) -> Sequence[Value]:
            first = kb.at(cells, kb.ir.mul(j, n.across))
            factor = kb.load(kind, filters, kb.mul(kb.ir.add(kb.ir.mul(i, n.tap_columns), j), 4 * lanes))
            return [fmuladd(kb, kb.load(kind, first, kb.mul(n.step, p)), factor, value) for p, value in enumerate(sums)]

        return kb.for_loop(n.tap_columns, sums, tap)


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
