"""SVDF from the features' matrix product on."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nnfmq.base.frozen import dataclass
from nnfmq.engines.compiled.ir_builder import F32, KernelBuilder, Value, vector, vector_width_for
from nnfmq.engines.compiled.kernels import Kernel
from nnfmq.engines.compiled.kernels.normalization import AxisLoop
from nnfmq.engines.compiled.kernels.recurrent import apply_activation
from nnfmq.engines.compiled.kernels.reduction import PARTIAL_RESULTS, FloatSumReducer, reduce_lanes
from nnfmq.engines.compiled.kernels.vector_math import fmuladd
from nnfmq.engines.compiled.target import Target

__all__ = ["SvdfKernel", "plan_svdf"]

_UNITS_PER_ITEM = 32


@dataclass(frozen=True, slots=True)
class SvdfKernel(Kernel):
    """SVDF after the feature product: each filter's memory is weighed and shifted, and each unit sums its filters.

    A unit has `rank` filters, each with a memory of `memory_size` features, the newest last. A work item is a block of
    units of a batch row.

    Args: features, memories, new memories, outputs, time weights (in the order of a row's memories), biases.
    """

    batch: int
    units: int
    rank: int
    memory_size: int
    activation: int
    lanes: int

    @property
    def work_items(self) -> int:
        """Blocks of units of all rows."""
        return self.batch * self._blocks

    @property
    def _blocks(self) -> int:
        return math.ceil(self.units / _UNITS_PER_ITEM)

    def scratch_bytes(self, target: Target) -> int:
        """Return the size of a block's sums."""
        return _UNITS_PER_ITEM * 4

    def emit(self, kb: KernelBuilder) -> None:
        """Compute block by block."""
        out, biases = kb.argument(3), kb.argument(5)
        with kb.loop(kb.begin, kb.end) as work_item:
            row, block = kb.ir.udiv(work_item, kb.i64(self._blocks)), kb.ir.urem(work_item, kb.i64(self._blocks))
            first = kb.mul(block, _UNITS_PER_ITEM)
            count = kb.intrinsic("llvm.smin", kb.i64(_UNITS_PER_ITEM), kb.ir.sub(kb.i64(self.units), first))
            with kb.loop(0, count) as number:
                unit = kb.add(first, number)
                filters = kb.add(kb.mul(row, self.units * self.rank), kb.mul(unit, self.rank))
                bias = kb.load(F32, biases, kb.mul(unit, 4))
                (total,) = kb.for_loop(
                    self.rank, [bias], lambda r, accs: [self._emit_filter(kb, filters, unit, r, accs[0])]
                )
                kb.store(total, kb.scratch, kb.mul(number, 4))
            with kb.loop(0, count, kb.target.lanes) as number:
                values = kb.load(vector(F32, kb.target.lanes), kb.scratch, kb.mul(number, 4))
                kb.store(apply_activation(kb, self.activation, values), kb.scratch, kb.mul(number, 4))
            results = kb.at(out, kb.mul(kb.add(kb.mul(row, self.units), first), 4))
            kb.memcpy(results, kb.scratch, kb.mul(count, 4))
        kb.return_void()

    def _emit_filter(self, kb: KernelBuilder, filters: Value, unit: Value, number: Value, total: Value) -> Value:
        """Shift the memory of a unit's filter `number`, and return `total` plus the weighed memory.

        The new memory is the old one without its oldest feature, then the new feature, then 0: the place of the next
        one. The weighed sum is over the old memory, with the new feature in the last place.
        """
        position, pitch = kb.add(filters, number), self.memory_size * 4
        old, new = (kb.at(kb.argument(n), kb.mul(position, pitch)) for n in (1, 2))
        weights = kb.at(kb.argument(4), kb.mul(kb.add(kb.mul(unit, self.rank), number), pitch))
        feature, newest = kb.load(F32, kb.argument(0), kb.mul(position, 4)), pitch - 4
        if self.memory_size > 2:
            kb.memcpy(new, kb.at(old, 4), pitch - 8)
        if self.memory_size > 1:
            kb.store(feature, new, pitch - 8)
            total = kb.ir.fadd(total, self._weigh_old(kb, old, weights))
        kb.store(F32(0.0), new, newest)
        return fmuladd(kb, feature, kb.load(F32, weights, newest), total)

    def _weigh_old(self, kb: KernelBuilder, old: Value, weights: Value) -> Value:
        """Return the weighed sum of all features but the newest."""
        loop, kind = AxisLoop(1, self.memory_size - 1, 1, self.lanes, 1), vector(F32, self.lanes)
        zeros = kb.splat(F32, 0.0, self.lanes)

        def add_products(k: Value, accs: Sequence[Value]) -> Sequence[Value]:
            offset = kb.mul(loop.offset(kb, k), 4)
            product = kb.ir.fmul(kb.load(kind, old, offset), kb.load(kind, weights, offset))
            return [kb.ir.fadd(accs[0], loop.mask_seen(kb, k, product, zeros))]

        (acc,) = kb.for_loop(loop.iterations, [zeros], add_products)
        return kb.ir.extract_element(reduce_lanes(kb, FloatSumReducer(), acc), kb.i64(0))


def plan_svdf(batch: int, units: int, rank: int, memory_size: int, activation: int) -> SvdfKernel:
    """Plan the kernel: choose the vector width along a memory."""
    lanes = vector_width_for(max(1, memory_size - 1), PARTIAL_RESULTS)
    return SvdfKernel(batch, units, rank, memory_size, activation, lanes)
