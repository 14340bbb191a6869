"""SVDF behind its features: the memories of filters are weighed and shifted by one, and those of a cell summed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nnfmq.engines.compiled.ir_builder import F32, KernelBuilder, Value, vector, vector_width_for
from nnfmq.engines.compiled.kernels.float_ops import fmuladd
from nnfmq.engines.compiled.kernels.normalization_kernels import AxisLoop
from nnfmq.engines.compiled.kernels.recurrent_cells import apply_activation
from nnfmq.engines.compiled.kernels.reducers import FloatSumReducer, reduce_lanes
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

    compile_cost = 1

    @property
    def work_items(self) -> int:
        """Blocks of cells of all rows."""
        return self.batch * self._blocks

    @property
    def _blocks(self) -> int:
        return math.ceil(self.cells / _BLOCK)

    def scratch_bytes(self, target: Target) -> int:
        """The sums of a block."""
        return _BLOCK * 4

    def emit(self, kb: KernelBuilder) -> None:
        """Compute block by block."""
        out, biases = kb.argument(3), kb.argument(5)
        with kb.loop(kb.begin, kb.end) as unit:
            row, block = kb.ir.udiv(unit, kb.i64(self._blocks)), kb.ir.urem(unit, kb.i64(self._blocks))
            first = kb.mul(block, _BLOCK)
            count = kb.intrinsic("llvm.smin", kb.i64(_BLOCK), kb.ir.sub(kb.i64(self.cells), first))
            with kb.loop(0, count) as number:
                cell = kb.add(first, number)
                filters = kb.add(kb.mul(row, self.cells * self.rank), kb.mul(cell, self.rank))
                bias = kb.load(F32, biases, kb.mul(cell, 4))
                (total,) = kb.for_loop(self.rank, [bias], lambda r, s: [self._filter(kb, filters, cell, r, s[0])])
                kb.store(total, kb.scratch, kb.mul(number, 4))
            with kb.loop(0, count, kb.target.lanes) as number:
                values = kb.load(vector(F32, kb.target.lanes), kb.scratch, kb.mul(number, 4))
                kb.store(apply_activation(kb, self.activation, values), kb.scratch, kb.mul(number, 4))
            kb.memcpy(kb.at(out, kb.mul(kb.add(kb.mul(row, self.cells), first), 4)), kb.scratch, kb.mul(count, 4))
        kb.return_void()

    def _filter(self, kb: KernelBuilder, filters: Value, cell: Value, number: Value, total: Value) -> Value:
        """Shift the memory of one of a cell's filters, and return `total` plus what it weighs."""
        here, pitch = kb.add(filters, number), self.memory * 4
        old, new = (kb.at(kb.argument(n), kb.mul(here, pitch)) for n in (1, 2))
        weights = kb.at(kb.argument(4), kb.mul(kb.add(kb.mul(cell, self.rank), number), pitch))
        feature, newest = kb.load(F32, kb.argument(0), kb.mul(here, 4)), pitch - 4
        if self.memory > 2:
            kb.memcpy(new, kb.at(old, 4), pitch - 8)
        if self.memory > 1:
            kb.store(feature, new, pitch - 8)
            total = kb.ir.fadd(total, self._weighed(kb, old, weights))
        kb.store(F32(0.0), new, newest)
        return fmuladd(kb, feature, kb.load(F32, weights, newest), total)

    def _weighed(self, kb: KernelBuilder, old: Value, weights: Value) -> Value:
        """Return the sum over all but the newest number, which is not there yet."""
        length = self.memory - 1
        lines, kind = AxisLoop(1, length, 1, self.lanes, 1), vector(F32, self.lanes)
        zeros = kb.splat(F32, 0.0, self.lanes)

        def add(k: Value, sums: Sequence[Value]) -> Sequence[Value]:
            place = kb.mul(lines.offset(kb, k), 4)
            product = kb.ir.fmul(kb.load(kind, old, place), kb.load(kind, weights, place))
            return [kb.ir.fadd(sums[0], lines.counted(kb, k, product, zeros))]

        (sums,) = kb.for_loop(lines.rounds, [zeros], add)
        return kb.ir.extract_element(reduce_lanes(kb, FloatSumReducer(), sums), kb.i64(0))


def plan_svdf(batch: int, cells: int, rank: int, memory: int, activation: int, target: Target) -> SvdfKernel:
    """Choose how many numbers of a memory are weighed at once."""
    return SvdfKernel(batch, cells, rank, memory, activation, vector_width_for(max(1, memory - 1), target.lanes))
