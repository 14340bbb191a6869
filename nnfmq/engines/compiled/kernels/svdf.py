"""SVDF behind its features: the memories of filters are weighed and shifted by one, and those of a cell summed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nnfmq.engines.compiled.emission import F32, Emitter, Value, vector
from nnfmq.engines.compiled.kernels.float_ops import fmuladd
from nnfmq.engines.compiled.kernels.normalization_kernels import AxisLoop
from nnfmq.engines.compiled.kernels.recurrent_cells import apply_activation
from nnfmq.engines.compiled.kernels.reducers import FloatSumReducer, reduce_lanes
from nnfmq.engines.compiled.kernels.spans import fitting_lanes
from nnfmq.engines.compiled.target import Target

__all__ = ["SvdfKernel", "plan_svdf"]

_BLOCK = 32


@dataclass(frozen=True, slots=True)
class SvdfKernel:
    """Rows of cells, each with `rank` filters, which have `memory` numbers, the newest last.

    Table: features, memories, new memories, results, weights as the memories of a row are, biases.
    """

    batch: int
    cells: int
    rank: int
    memory: int
    activation: int
    lanes: int

    @property
    def units(self) -> int:
        """Blocks of cells of all rows."""
        return self.batch * self._blocks

    @property
    def _blocks(self) -> int:
        return math.ceil(self.cells / _BLOCK)

    def scratch_bytes(self, target: Target) -> int:
        """The sums of a block."""
        return _BLOCK * 4

    def emit(self, e: Emitter) -> None:
        """Compute block by block."""
        out, biases = e.argument(3), e.argument(5)
        with e.loop(e.begin, e.end) as unit:
            row, block = e.b.udiv(unit, e.i64(self._blocks)), e.b.urem(unit, e.i64(self._blocks))
            first = e.mul(block, _BLOCK)
            count = e.intrinsic("llvm.smin", e.i64(_BLOCK), e.b.sub(e.i64(self.cells), first))
            with e.loop(0, count) as number:
                cell = e.add(first, number)
                filters = e.add(e.mul(row, self.cells * self.rank), e.mul(cell, self.rank))
                bias = e.load(F32, biases, e.mul(cell, 4))
                (total,) = e.carry(self.rank, [bias], lambda r, s: [self._filter(e, filters, cell, r, s[0])])
                e.store(total, e.scratch, e.mul(number, 4))
            with e.loop(0, count, e.target.lanes) as number:
                values = e.load(vector(F32, e.target.lanes), e.scratch, e.mul(number, 4))
                e.store(apply_activation(e, self.activation, values), e.scratch, e.mul(number, 4))
            e.copy(e.at(out, e.mul(e.add(e.mul(row, self.cells), first), 4)), e.scratch, e.mul(count, 4))
        e.finish()

    def _filter(self, e: Emitter, filters: Value, cell: Value, number: Value, total: Value) -> Value:
        """Shift the memory of one of a cell's filters, and return `total` plus what it weighs."""
        here, pitch = e.add(filters, number), self.memory * 4
        old, new = (e.at(e.argument(n), e.mul(here, pitch)) for n in (1, 2))
        weights = e.at(e.argument(4), e.mul(e.add(e.mul(cell, self.rank), number), pitch))
        feature, newest = e.load(F32, e.argument(0), e.mul(here, 4)), pitch - 4
        if self.memory > 2:
            e.copy(new, e.at(old, 4), pitch - 8)
        if self.memory > 1:
            e.store(feature, new, pitch - 8)
            total = e.b.fadd(total, self._weighed(e, old, weights))
        e.store(F32(0.0), new, newest)
        return fmuladd(e, feature, e.load(F32, weights, newest), total)

    def _weighed(self, e: Emitter, old: Value, weights: Value) -> Value:
        """Return the sum over all but the newest number, which is not there yet."""
        length = self.memory - 1
        lines, kind = AxisLoop(1, length, 1, self.lanes, 1), vector(F32, self.lanes)
        zeros = e.splat(F32, 0.0, self.lanes)

        def add(k: Value, sums: Sequence[Value]) -> Sequence[Value]:
            place = e.mul(lines.offset(e, k), 4)
            product = e.b.fmul(e.load(kind, old, place), e.load(kind, weights, place))
            return [e.b.fadd(sums[0], lines.counted(e, k, product, zeros))]

        (sums,) = e.carry(lines.rounds, [zeros], add)
        return e.b.extract_element(reduce_lanes(e, FloatSumReducer(), sums), e.i64(0))


def plan_svdf(batch: int, cells: int, rank: int, memory: int, activation: int, target: Target) -> SvdfKernel:
    """Choose how many numbers of a memory are weighed at once."""
    return SvdfKernel(batch, cells, rank, memory, activation, fitting_lanes(max(1, memory - 1), target.lanes))
