"""RESIZE_BILINEAR: rows weighted in scratch memory, then pixels of them.

Two rows of the image, times their weights, become rows of float32; each pixel of the output is the sum of four products
of these. So all is in whole vectors however few channels there are: a pixel's vector reaches into its neighbour, which
is computed after it. Products and sums are rounded one by one, in the reference's order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from nnfmq.engines.compiled.ir_builder import F32, I8, I32, I64, KernelBuilder, Value, for_each_vector, vector
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

    compile_cost = 1

    @property
    def work_items(self) -> int:
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

    def emit(self, kb: KernelBuilder) -> None:
        """Table: input, output; for rows and for columns: pairs of offsets in bytes (64 bits), pairs of weights."""
        image, out, row_offsets, row_weights, column_offsets, column_weights = map(kb.argument, range(6))
        pitch, width = self._row_bytes(kb.target, self.width), self.width * self.channels
        length = self.columns * self.channels
        with kb.loop(kb.begin, kb.end) as unit:
            number, row = kb.ir.udiv(unit, kb.i64(self.rows)), kb.ir.urem(unit, kb.i64(self.rows))
            first = kb.at(image, kb.mul(number, self.height * width * self._item))
            with kb.loop(0, 2) as which:
                entry = kb.add(kb.mul(row, 2), which)
                source = kb.at(first, kb.load(I64, row_offsets, kb.mul(entry, 8)))
                weight = kb.load(F32, row_weights, kb.mul(entry, 4))
                self._weigh(kb, source, weight, kb.at(kb.scratch, kb.mul(which, pitch)), width)
            results = kb.at(kb.scratch, 2 * pitch)
            with kb.loop(0, self.columns) as column:
                offsets = kb.at(column_offsets, kb.mul(column, 16))
                weights = kb.at(column_weights, kb.mul(column, 8))
                self._emit_pixel(kb, offsets, weights, pitch, kb.at(results, kb.mul(column, 4 * self.channels)))
            self._finish(kb, results, kb.at(out, kb.mul(unit, length * self._item)), length)
        kb.return_void()

    def _weigh(self, kb: KernelBuilder, source: Value, weight: Value, place: Value, count: int) -> None:
        def move(offset: Any, lanes: int) -> None:
            weights = kb.broadcast(weight, lanes)
            kb.store(kb.ir.fmul(self._reals(kb, source, offset, lanes), weights), place, kb.mul(offset, 4))

        for_each_vector(kb, count, kb.target.lanes, move)

    def _reals(self, kb: KernelBuilder, source: Value, offset: Any, lanes: int) -> Value:
        """Load elements as float32; codes as if they were unsigned."""
        if self.is_float:
            return kb.load(vector(F32, lanes), source, kb.mul(offset, 4))
        codes = kb.load(vector(I8, lanes), source, offset)
        if self.signed:
            codes = kb.ir.xor(codes, kb.splat(I8, _FLIP, lanes))
        return kb.ir.uitofp(kb.ir.zext(codes, vector(I32, lanes)), vector(F32, lanes))

    def _emit_pixel(self, kb: KernelBuilder, offsets: Value, weights: Value, pitch: int, place: Value) -> None:
        lanes = kb.target.lanes
        kind = vector(F32, lanes)
        sides = [kb.at(kb.scratch, kb.load(I64, offsets, 8 * n)) for n in (0, 1)]
        factors = [kb.broadcast(kb.load(F32, weights, 4 * n), lanes) for n in (0, 1)]

        def block(offset: Any) -> None:
            products = [
                kb.ir.fmul(kb.load(kind, kb.at(side, offset), row * pitch), factor)
                for side, factor in zip(sides, factors, strict=True)
                for row in (0, 1)
            ]
            total = products[0]
            for product in products[1:]:
                total = kb.ir.fadd(total, product)
            kb.store(total, place, offset)

        blocks = math.ceil(self.channels / lanes)
        if blocks <= _STRAIGHT:
            for number in range(blocks):
                block(4 * lanes * number)
            return
        with kb.loop(0, 4 * lanes * blocks, 4 * lanes) as offset:
            block(offset)

    def _finish(self, kb: KernelBuilder, results: Value, out: Value, count: int) -> None:
        if self.is_float:
            kb.memcpy(out, results, 4 * count)
            return

        def move(offset: Any, lanes: int) -> None:
            reals = kb.load(vector(F32, lanes), results, kb.mul(offset, 4))
            nearest = kb.ir.fptosi(kb.ir.fadd(reals, kb.splat(F32, 0.5, lanes)), vector(I32, lanes))
            codes = kb.ir.trunc(nearest, vector(I8, lanes))
            kb.store(kb.ir.xor(codes, kb.splat(I8, _FLIP, lanes)) if self.signed else codes, out, offset)

        for_each_vector(kb, count, kb.target.lanes, move)
