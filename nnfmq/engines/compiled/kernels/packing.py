"""Weights that come with the request, packed for a product as `Product.pack` packs those of the model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir

from nnfmq.engines.compiled.emission import F32, I8, I16, I32, Emitter, Value, vector
from nnfmq.engines.compiled.target import Target

__all__ = ["Packing"]


@dataclass(frozen=True, slots=True)
class Packing:
    """Matrices (batch, length, columns) of float32, or of codes of which pairs of rows are joined, centred to 16 bits.

    Codes are taken `factor` times.

    A panel are `width` columns, those beside the last one 0; panels follow each other, and in each the rows.
    """

    batch: int
    length: int
    columns: int
    width: int
    is_float: bool
    zero_point: int
    factor: int

    @property
    def units(self) -> int:
        """Panels of all matrices."""
        return self.batch * self._panels

    @property
    def bytes(self) -> int:
        """How much it makes."""
        return self.units * self._rows * self.width * 4

    @property
    def _panels(self) -> int:
        return math.ceil(self.columns / self.width)

    @property
    def _group(self) -> int:
        return 1 if self.is_float else 2

    @property
    def _rows(self) -> int:
        return math.ceil(self.length / self._group)

    @property
    def _item(self) -> int:
        return 4 if self.is_float else 1

    def scratch_bytes(self, target: Target) -> int:
        """None."""
        return 0

    def emit(self, e: Emitter) -> None:
        """Table: matrices, panels."""
        matrices, out = map(e.argument, range(2))
        pitch, item = self.columns * self._item, self._item
        with e.loop(e.begin, e.end) as unit:
            number, panel = e.b.udiv(unit, e.i64(self._panels)), e.b.urem(unit, e.i64(self._panels))
            first = e.mul(panel, self.width)
            here = e.intrinsic("llvm.smin", e.i64(self.width), e.b.sub(e.i64(self.columns), first))
            source = e.at(matrices, e.add(e.mul(number, self.length * pitch), e.mul(first, item)))
            place = e.at(out, e.mul(unit, self._rows * self.width * 4))
            with e.loop(0, self.length // self._group) as row:
                self._emit_row(
                    e, e.at(source, e.mul(row, self._group * pitch)), e.at(place, e.mul(row, self.width * 4)), here
                )
            if self.length % self._group:
                last = e.at(place, (self._rows - 1) * self.width * 4)
                self._emit_row(e, e.at(source, (self.length - 1) * pitch), last, here, alone=True)
        e.finish()

    def _emit_row(self, e: Emitter, source: Value, place: Value, here: Value, alone: bool = False) -> None:
        """Emit the columns of a row, or of two; vectors first, then one by one, then 0."""
        lanes = e.target.lanes
        whole = e.b.and_(here, e.i64(-lanes))

        def columns(begin: Value, end: Value, step: int, cells: Callable[[Value, int], Value]) -> None:
            with e.loop(begin, end, step) as column:
                e.store(cells(column, step), place, e.mul(column, 4))

        def loaded(column: Value, count: int) -> Value:
            return self._cells(e, source, column, count, alone)

        columns(e.i64(0), whole, lanes, loaded)
        columns(whole, here, 1, loaded)
        columns(here, e.i64(self.width), 1, lambda column, count: ir.Constant(I32, 0))

    def _cells(self, e: Emitter, source: Value, column: Value, count: int, alone: bool) -> Value:
        if self.is_float:
            return e.load(vector(F32, count), source, e.mul(column, 4))
        first = self._centred(e, source, column, count)
        second = e.splat(I16, 0, count) if alone else self._centred(e, e.at(source, self.columns), column, count)
        return e.shuffle(first, second, [lane for n in range(count) for lane in (n, count + n)])

    def _centred(self, e: Emitter, source: Value, column: Value, count: int) -> Value:
        wide = e.b.sext(e.load(vector(I8, count), source, column), vector(I16, count))
        centred = e.b.sub(wide, e.splat(I16, self.zero_point, count))
        return e.b.mul(centred, e.splat(I16, self.factor, count))
