"""RESIZE_BILINEAR: rows weighted in scratch memory, then pixels of them.

Two rows of the image, times their weights, become rows of float32; each pixel of the output is the sum of four products
of these. So all is in whole vectors however few channels there are: a pixel's vector reaches into its neighbour, which
is computed after it. Products and sums are rounded one by one, in the reference's order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from nnfmq.engines.compiled.emission import F32, I8, I32, I64, Emitter, Value, vector
from nnfmq.engines.compiled.kernels.cells import in_vectors
from nnfmq.engines.compiled.target import Target

__all__ = ["BilinearResize"]

_STRAIGHT = 2
_FLIP = -0x80


@dataclass(frozen=True, slots=True)
class BilinearResize:
    """An image of float32 or of codes at another height (`rows`) and width (`columns`)."""

    batch: int
    height: int
    width: int
    channels: int
    rows: int
    columns: int
    is_float: bool
    signed: bool

    @property
    def units(self) -> int:
        """Rows of the output."""
        return self.batch * self.rows

    @property
    def _item(self) -> int:
        return 4 if self.is_float else 1

    def _row_bytes(self, target: Target, columns: int) -> int:
        """Return the bytes of a row in scratch memory, with what its last vector reaches behind it."""
        return 4 * (columns * self.channels + target.lanes)

    def scratch_bytes(self, target: Target) -> int:
        """Two weighted rows and a row of results."""
        return 2 * self._row_bytes(target, self.width) + self._row_bytes(target, self.columns)

    def emit(self, e: Emitter) -> None:
        """Table: input, output; for rows and for columns: pairs of offsets in bytes (64 bits), pairs of weights."""
        image, out, row_offsets, row_weights, column_offsets, column_weights = map(e.argument, range(6))
        pitch, width = self._row_bytes(e.target, self.width), self.width * self.channels
        length = self.columns * self.channels
        with e.loop(e.begin, e.end) as unit:
            number, row = e.b.udiv(unit, e.i64(self.rows)), e.b.urem(unit, e.i64(self.rows))
            first = e.at(image, e.mul(number, self.height * width * self._item))
            with e.loop(0, 2) as which:
                entry = e.add(e.mul(row, 2), which)
                source = e.at(first, e.load(I64, row_offsets, e.mul(entry, 8)))
                weight = e.load(F32, row_weights, e.mul(entry, 4))
                self._weigh(e, source, weight, e.at(e.scratch, e.mul(which, pitch)), width)
            results = e.at(e.scratch, 2 * pitch)
            with e.loop(0, self.columns) as column:
                offsets = e.at(column_offsets, e.mul(column, 16))
                weights = e.at(column_weights, e.mul(column, 8))
                self._emit_pixel(e, offsets, weights, pitch, e.at(results, e.mul(column, 4 * self.channels)))
            self._finish(e, results, e.at(out, e.mul(unit, length * self._item)), length)
        e.finish()

    def _weigh(self, e: Emitter, source: Value, weight: Value, place: Value, count: int) -> None:
        def move(offset: Any, lanes: int) -> None:
            weights = e.broadcast(weight, lanes)
            e.store(e.b.fmul(self._reals(e, source, offset, lanes), weights), place, e.mul(offset, 4))

        in_vectors(e, count, e.target.lanes, move)

    def _reals(self, e: Emitter, source: Value, offset: Any, lanes: int) -> Value:
        """Load elements as float32; codes as if they were unsigned."""
        if self.is_float:
            return e.load(vector(F32, lanes), source, e.mul(offset, 4))
        codes = e.load(vector(I8, lanes), source, offset)
        if self.signed:
            codes = e.b.xor(codes, e.splat(I8, _FLIP, lanes))
        return e.b.uitofp(e.b.zext(codes, vector(I32, lanes)), vector(F32, lanes))

    def _emit_pixel(self, e: Emitter, offsets: Value, weights: Value, pitch: int, place: Value) -> None:
        lanes = e.target.lanes
        kind = vector(F32, lanes)
        sides = [e.at(e.scratch, e.load(I64, offsets, 8 * n)) for n in (0, 1)]
        factors = [e.broadcast(e.load(F32, weights, 4 * n), lanes) for n in (0, 1)]

        def block(offset: Any) -> None:
            products = [
                e.b.fmul(e.load(kind, e.at(side, offset), row * pitch), factor)
                for side, factor in zip(sides, factors, strict=True)
                for row in (0, 1)
            ]
            total = products[0]
            for product in products[1:]:
                total = e.b.fadd(total, product)
            e.store(total, place, offset)

        blocks = math.ceil(self.channels / lanes)
        if blocks <= _STRAIGHT:
            for number in range(blocks):
                block(4 * lanes * number)
            return
        with e.loop(0, 4 * lanes * blocks, 4 * lanes) as offset:
            block(offset)

    def _finish(self, e: Emitter, results: Value, out: Value, count: int) -> None:
        if self.is_float:
            e.copy(out, results, 4 * count)
            return

        def move(offset: Any, lanes: int) -> None:
            reals = e.load(vector(F32, lanes), results, e.mul(offset, 4))
            nearest = e.b.fptosi(e.b.fadd(reals, e.splat(F32, 0.5, lanes)), vector(I32, lanes))
            codes = e.b.trunc(nearest, vector(I8, lanes))
            e.store(e.b.xor(codes, e.splat(I8, _FLIP, lanes)) if self.signed else codes, out, offset)

        in_vectors(e, count, e.target.lanes, move)
