"""Weights that come with the request, packed for a product as `Product.pack` packs those of the model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir

from nnfmq.engines.compiled.ir_builder import F32, I8, I16, I32, KernelBuilder, Value, vector
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

    compile_cost = 1

    @property
    def work_items(self) -> int:
        """Panels of all matrices."""
        return self.batch * self._panels

    @property
    def bytes(self) -> int:
        """How much it makes."""
        return self.work_items * self._rows * self.width * 4

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

    def emit(self, kb: KernelBuilder) -> None:
        """Table: matrices, panels."""
        matrices, out = map(kb.argument, range(2))
        pitch, item = self.columns * self._item, self._item
        with kb.loop(kb.begin, kb.end) as unit:
            number, panel = kb.ir.udiv(unit, kb.i64(self._panels)), kb.ir.urem(unit, kb.i64(self._panels))
            first = kb.mul(panel, self.width)
            here = kb.intrinsic("llvm.smin", kb.i64(self.width), kb.ir.sub(kb.i64(self.columns), first))
            source = kb.at(matrices, kb.add(kb.mul(number, self.length * pitch), kb.mul(first, item)))
            place = kb.at(out, kb.mul(unit, self._rows * self.width * 4))
            with kb.loop(0, self.length // self._group) as row:
                self._emit_row(
                    kb, kb.at(source, kb.mul(row, self._group * pitch)), kb.at(place, kb.mul(row, self.width * 4)), here
                )
            if self.length % self._group:
                last = kb.at(place, (self._rows - 1) * self.width * 4)
                self._emit_row(kb, kb.at(source, (self.length - 1) * pitch), last, here, alone=True)
        kb.return_void()

    def _emit_row(self, kb: KernelBuilder, source: Value, place: Value, here: Value, alone: bool = False) -> None:
        """Emit the columns of a row, or of two; vectors first, then one by one, then 0."""
        lanes = kb.target.lanes
        whole = kb.ir.and_(here, kb.i64(-lanes))

        def columns(begin: Value, end: Value, step: int, cells: Callable[[Value, int], Value]) -> None:
            with kb.loop(begin, end, step) as column:
                kb.store(cells(column, step), place, kb.mul(column, 4))

        def loaded(column: Value, count: int) -> Value:
            return self._cells(kb, source, column, count, alone)

        columns(kb.i64(0), whole, lanes, loaded)
        columns(whole, here, 1, loaded)
        columns(here, kb.i64(self.width), 1, lambda column, count: ir.Constant(I32, 0))

    def _cells(self, kb: KernelBuilder, source: Value, column: Value, count: int, alone: bool) -> Value:
        if self.is_float:
            return kb.load(vector(F32, count), source, kb.mul(column, 4))
        first = self._centred(kb, source, column, count)
        second = kb.splat(I16, 0, count) if alone else self._centred(kb, kb.at(source, self.columns), column, count)
        return kb.shuffle(first, second, [lane for n in range(count) for lane in (n, count + n)])

    def _centred(self, kb: KernelBuilder, source: Value, column: Value, count: int) -> Value:
        wide = kb.ir.sext(kb.load(vector(I8, count), source, column), vector(I16, count))
        centred = kb.ir.sub(wide, kb.splat(I16, self.zero_point, count))
        return kb.ir.mul(centred, kb.splat(I16, self.factor, count))
