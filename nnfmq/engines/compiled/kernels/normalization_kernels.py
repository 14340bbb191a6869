"""Lines along one dimension of an array: `length` elements that lie `inner` from each other, combined into one value.

Lanes are neighbours in a line where `inner` is 1, else elements of as many lines.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from nnfmq.engines.compiled.ir_builder import KernelBuilder, Value, unseen_lanes_mask, vector_loop, vector_width_for
from nnfmq.engines.compiled.kernels.reducers import Reducer, reduce_lanes
from nnfmq.engines.compiled.target import Target
from nnfmq.operations.signature import Shape

__all__ = ["AxisKernel", "AxisLoop", "plan_axis_loop"]

_UNIT = 1 << 11


@dataclass(frozen=True, slots=True)
class AxisLoop:
    """`rows` times `inner` lines. A unit is a block of rows."""

    rows: int
    length: int
    inner: int
    lanes: int
    block: int

    @property
    def work_items(self) -> int:
        """Blocks of rows."""
        return math.ceil(self.rows / self.block)

    @property
    def rounds(self) -> int:
        """How many vectors cover a line."""
        return self.length if self.inner > 1 else math.ceil(self.length / self.lanes)

    def for_each_slice(self, kb: KernelBuilder, emit: Callable[[Value, Value], None]) -> None:
        """Emit loops over the kernel's share; `emit` gets a line's first element and the line's number.

        Across lines these are the first of as many as there are lanes.
        """
        end = kb.intrinsic("llvm.smin", kb.mul(kb.end, self.block), kb.i64(self.rows))
        with kb.loop(kb.mul(kb.begin, self.block), end) as row:
            first, number = kb.mul(row, self.length * self.inner), kb.mul(row, self.inner)
            if self.inner == 1:
                emit(first, number)
            else:
                with vector_loop(kb, self.inner, self.lanes) as lane:
                    emit(kb.add(first, lane), kb.add(number, lane))

    def place(self, kb: KernelBuilder, k: Value) -> Value:
        """Return where the elements of round `k` begin, counted along the line."""
        if self.inner > 1:
            return k
        wanted = kb.mul(k, self.lanes)
        if self.length % self.lanes == 0:
            return wanted
        return kb.intrinsic("llvm.smin", wanted, kb.i64(self.length - self.lanes))

    def offset(self, kb: KernelBuilder, k: Value) -> Value:
        """Return where the elements of round `k` begin, in elements from the line's first."""
        return kb.mul(self.place(kb, k), self.inner)

    def counted(self, kb: KernelBuilder, k: Value, values: Value, neutral: Value) -> Value:
        """Return the values of round `k`, `neutral` in the place of those that the round before had already."""
        if self.inner > 1:
            return values
        new = unseen_lanes_mask(kb, self.length, self.lanes, self.place(kb, k), kb.mul(k, self.lanes))
        return values if new is None else kb.ir.select(new, values, neutral)

    def reduce_slice(self, kb: KernelBuilder, combination: Reducer, values: Value) -> Value:
        """Return the combination of a line, in all of its lanes."""
        if self.inner > 1:
            return values
        single = reduce_lanes(kb, combination, values)
        return kb.broadcast(kb.ir.extract_element(single, kb.i64(0)), self.lanes)


class AxisKernel:
    """What kernels over `lines` share: their units, and no scratch memory."""

    __slots__ = ()
    lines: AxisLoop

    compile_cost = 1

    @property
    def work_items(self) -> int:
        """Those of the lines."""
        return self.lines.work_items

    def scratch_bytes(self, target: Target) -> int:
        """Nothing."""
        return 0


def plan_axis_loop(shape: Shape, axis: int, most_lanes: int) -> AxisLoop:
    """Choose lanes and blocks for lines along `axis`."""
    rows, length, inner = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    lanes = vector_width_for(inner if inner > 1 else length, most_lanes)
    return AxisLoop(rows, length, inner, lanes, max(1, _UNIT // (length * inner)))
