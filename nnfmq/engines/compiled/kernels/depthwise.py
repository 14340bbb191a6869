"""DEPTHWISE_CONV_2D: each channel by itself, in float32 vectors over a band of the image.

Sums of codes are exact in float32 too, as long as a filter has fewer than some hundreds of taps, and there a
multiply-add takes one instruction and no pairing of neighbours. Where the depth multiplier is above 1, widening repeats
each channel of the image.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nnfmq.engines.compiled.emission import F32, Emitter, Value, vector
from nnfmq.engines.compiled.kernels.arithmetic import Array, FloatCodes, Floats
from nnfmq.engines.compiled.kernels.cells import Band
from nnfmq.engines.compiled.kernels.floats import multiply_add
from nnfmq.engines.compiled.target import Target
from nnfmq.operations.shapes import Window
from nnfmq.operations.signature import Shape

__all__ = ["Depthwise", "plan_depthwise"]

_SCRATCH_BYTES = 1 << 17
_UNITS = 8
_STRAIGHT_TAPS = 25
_POSITIONS = 6


@dataclass(frozen=True, slots=True)
class Depthwise:
    """An image whose every channel has `multiplier` filters; `channels` are as many as there are filters.

    `tile` is positions and vectors of channels.
    """

    batch: int
    height: int
    width: int
    channels: int
    rows: Window
    columns: Window
    arithmetic: Floats | FloatCodes
    tile: tuple[int, int]
    lanes: int
    block: int
    multiplier: int

    @property
    def units(self) -> int:
        """Blocks of output rows."""
        return self.batch * self._blocks

    @property
    def _blocks(self) -> int:
        return math.ceil(self.rows.count / self.block)

    @property
    def _panel(self) -> int:
        return self.tile[1] * self.lanes

    @property
    def panels(self) -> int:
        """Panels, tiles' widths of channels."""
        return math.ceil(self.channels / self._panel)

    @property
    def _band(self) -> Band:
        return Band(self.height, self.width, self.channels, self.rows, self.columns, self.block, self.multiplier)

    def scratch_bytes(self, target: Target) -> int:
        """The band's cells, and what the last vector of channels reads behind them."""
        return self._band.bytes(4) + 4 * self._panel

    def pack(self, weights: Array) -> bytes:
        """Return `weights` (height, width, channels), zero point subtracted, panel by panel."""
        taps = self.rows.size * self.columns.size
        filled = np.zeros((taps, self.panels * self._panel), np.float32)
        filled[:, : self.channels] = weights.reshape(taps, self.channels)
        return filled.reshape(taps, self.panels, self._panel).transpose(1, 0, 2).tobytes()

    def emit(self, e: Emitter) -> None:
        """Table: input, output, weights, what finishes sums."""
        image, out, weights, finish = map(e.argument, range(4))
        a = self.arithmetic
        row = self.columns.count * self.channels * a.output_bytes
        with e.loop(e.begin, e.end) as unit:
            number, first = e.b.sdiv(unit, e.i64(self._blocks)), e.b.srem(unit, e.i64(self._blocks))
            first = e.mul(first, self.block)
            served = e.intrinsic("llvm.smin", e.i64(self.block), e.b.sub(e.i64(self.rows.count), first))
            source = e.at(
                image, e.mul(number, self.height * self.width * self.channels // self.multiplier * a.item_bytes)
            )
            self._band.emit(e, a.widening(e, finish), source, first, served)
            target = e.at(out, e.mul(e.add(e.mul(number, self.rows.count), first), row))
            with e.loop(0, served) as r:
                cells = e.at(e.scratch, e.mul(r, self.rows.stride * self._band.row_cells * 4))
                self._emit_row(e, cells, e.at(target, e.mul(r, row)), weights, finish)
        e.finish()

    def _emit_row(self, e: Emitter, cells: Value, out: Value, weights: Value, finish: Value) -> None:
        """Emit the tiles of a row: all channels of some positions, then the next, as they lie in memory."""
        (positions, _), count, a = self.tile, self.columns.count, self.arithmetic
        with e.loop(0, count, positions) as position:
            if count % positions:
                position = e.intrinsic("llvm.smin", position, e.i64(count - positions))
            first = e.mul(position, self.columns.stride * self.channels)
            with e.loop(0, self.panels) as panel:
                channel = e.mul(panel, self._panel)
                filters = e.at(weights, e.mul(channel, 4 * self.rows.size * self.columns.size))
                sums = self._emit_tile(e, e.at(cells, e.mul(e.add(first, channel), 4)), filters, finish, channel)
                place = e.at(out, e.mul(e.add(e.mul(position, self.channels), channel), a.output_bytes))
                self._emit_store(e, sums, place, finish, channel, panel)

    def _emit_tile(self, e: Emitter, cells: Value, filters: Value, finish: Value, channel: Value) -> Sequence[Value]:
        (positions, vectors), lanes = self.tile, self.lanes
        starts = [self.arithmetic.first_sums(e, finish, e.add(channel, v * lanes), lanes) for v in range(vectors)]
        sums: Sequence[Value] = starts * positions
        if self.rows.size * self.columns.size <= _STRAIGHT_TAPS:
            for i in range(self.rows.size):
                sums = self._emit_taps(e, e.at(cells, self._row_offset * i), filters, i * self.columns.size, sums)
            return sums
        return e.carry(
            self.rows.size,
            sums,
            lambda i, s: e.carry(
                self.columns.size,
                s,
                lambda j, inner: self._emit_tap(
                    e,
                    e.at(cells, e.add(e.mul(i, self._row_offset), e.mul(j, self._column_offset))),
                    e.at(filters, e.mul(e.add(e.mul(i, self.columns.size), j), 4 * self._panel)),
                    inner,
                    {},
                    0,
                ),
            ),
        )

    @property
    def _row_offset(self) -> int:
        return self.rows.dilation * self._band.row_cells * 4

    @property
    def _column_offset(self) -> int:
        return self.columns.dilation * self.channels * 4

    def _emit_taps(
        self, e: Emitter, cells: Value, filters: Value, first: int, sums: Sequence[Value]
    ) -> Sequence[Value]:
        """Emit a row of taps; cells that several positions meet are loaded once."""
        loaded: dict[int, Value] = {}
        for j in range(self.columns.size):
            weights = e.at(filters, 4 * self._panel * (first + j))
            sums = self._emit_tap(e, cells, weights, sums, loaded, j * self._column_offset)
        return sums

    def _emit_tap(
        self,
        e: Emitter,
        cells: Value,
        weights: Value,
        sums: Sequence[Value],
        loaded: dict[int, Value],
        offset: int,
    ) -> Sequence[Value]:
        (positions, vectors), kind = self.tile, vector(F32, self.lanes)
        step = self.columns.stride * self.channels * 4
        results = []
        factors = [e.load(kind, weights, 4 * v * self.lanes) for v in range(vectors)]
        for p in range(positions):
            for v in range(vectors):
                place = offset + p * step + 4 * v * self.lanes
                if place not in loaded:
                    loaded[place] = e.load(kind, cells, place)
                results.append(multiply_add(e, loaded[place], factors[v], sums[p * vectors + v]))
        return results

    def _emit_store(
        self, e: Emitter, sums: Sequence[Value], place: Value, finish: Value, channel: Value, panel: Value
    ) -> None:
        (_, vectors), lanes, a = self.tile, self.lanes, self.arithmetic
        with e.rows_of(sums, vectors) as (p, row):
            out = e.at(place, e.mul(p, self.channels * a.output_bytes))
            results = [a.results(e, row[v], finish, e.add(channel, v * lanes)) for v in range(vectors)]
            e.store_panel(results, out, a.output_bytes, self.channels, self._panel, panel)


def plan_depthwise(
    shape: Shape, multiplier: int, rows: Window, columns: Window, arithmetic: Floats | FloatCodes, target: Target
) -> Depthwise:
    """Choose the tile and the blocks for an input's shape and a target."""
    batch, height, width, channels = shape
    channels *= multiplier
    vectors = 1
    most = _POSITIONS if target.registers == 16 else 2 * _POSITIONS
    positions = min(columns.count, most)
    served, limit = 1, max(1, math.ceil(batch * rows.count / _UNITS))
    while served < limit:
        if Band(height, width, channels, rows, columns, served + 1).bytes(4) > _SCRATCH_BYTES:
            break
        served += 1
    tile, lanes = (positions, vectors), target.lanes
    return Depthwise(batch, height, width, channels, rows, columns, arithmetic, tile, lanes, served, multiplier)
