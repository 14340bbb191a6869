"""Reductions along any axes: the dimensions that stay and those that go, each from the outermost to the innermost.

Where the innermost dimension stays, its elements are lanes. Where it goes, lanes are parts of its sums, folded at the
end: how sums are grouped depends on the shape and the target alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nnfmq.engines.compiled.ir_builder import (
    KernelBuilder,
    Value,
    strided_offset,
    unseen_lanes_mask,
    vector_loop,
    vector_width_for,
)
from nnfmq.engines.compiled.kernels.reducers import Reducer, reduce_lanes
from nnfmq.engines.compiled.target import Target

__all__ = ["ReductionKernel", "plan_reduction"]

_UNIT = 1 << 12

Dimensions = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class ReductionKernel:
    """Dimensions are pairs of extent and stride, in elements. `length` is the innermost that stays, or that goes."""

    kept: Dimensions
    gone: Dimensions
    length: int
    goes: bool
    combination: Reducer
    lanes: int
    block: int

    compile_cost = 1

    @property
    def _results(self) -> int:
        return math.prod(extent for extent, _ in self.kept)

    @property
    def _count(self) -> int:
        return math.prod(extent for extent, _ in self.gone) * (self.length if self.goes else 1)

    @property
    def work_items(self) -> int:
        """Blocks of results, or of rows of them."""
        return math.ceil(self._results / self.block)

    def scratch_bytes(self, target: Target) -> int:
        """Nothing."""
        return 0

    def emit(self, kb: KernelBuilder) -> None:
        """Table: input, output."""
        source, out, item = kb.argument(0), kb.argument(1), self.combination.item_bytes
        extents, strides = tuple(n for n, _ in self.kept), tuple(s for _, s in self.kept)
        end = kb.intrinsic("llvm.smin", kb.mul(kb.end, self.block), kb.i64(self._results))
        with kb.loop(kb.mul(kb.begin, self.block), end) as number:
            first = kb.at(source, kb.mul(strided_offset(kb, number, extents, strides), item))
            if self.goes:
                combined = self._combined(kb, first, lambda row, values: [self._along(kb, row, values[0])])
                single = reduce_lanes(kb, self.combination, combined)
                kb.store(self.combination.result(kb, single, self._count), out, kb.mul(number, item))
            else:
                place = kb.at(out, kb.mul(number, self.length * item))
                self._emit_across(kb, first, place)
        kb.return_void()

    def _emit_across(self, kb: KernelBuilder, first: Value, place: Value) -> None:
        combination, item = self.combination, self.combination.item_bytes
        with vector_loop(kb, self.length, self.lanes) as lane:
            offset = kb.mul(lane, item)

            def take(row: Value, values: Sequence[Value]) -> Sequence[Value]:
                return [combination.joined(kb, values[0], combination.widened(kb, row, 0, self.lanes))]

            combined = self._combined(kb, kb.at(first, offset), take)
            kb.store(combination.result(kb, combined, self._count), place, offset)

    def _along(self, kb: KernelBuilder, row: Value, combined: Value) -> Value:
        """Combine a contiguous row into the lanes; the last vector's elements that were there before do not count."""
        c, lanes = self.combination, self.lanes
        rounds = math.ceil(self.length / lanes)

        def take(k: Value, values: Sequence[Value]) -> Sequence[Value]:
            wanted = kb.mul(k, lanes)
            place = (
                wanted if self.length % lanes == 0 else kb.intrinsic("llvm.smin", wanted, kb.i64(self.length - lanes))
            )
            value = c.widened(kb, row, kb.mul(place, c.item_bytes), lanes)
            new = unseen_lanes_mask(kb, self.length, lanes, place, wanted)
            value = value if new is None else kb.ir.select(new, value, c.neutral(kb, lanes))
            return [c.joined(kb, values[0], value)]

        return kb.for_loop(rounds, [combined], take)[0]

    def _combined(self, kb: KernelBuilder, first: Value, row: Any) -> Value:
        """Emit loops over the dimensions that go, around `row`."""
        item = self.combination.item_bytes

        def inside(dimensions: Dimensions, at: Value, values: Sequence[Value]) -> Sequence[Value]:
            if not dimensions:
                return row(at, values)  # type: ignore[no-any-return]
            (extent, stride), *rest = dimensions
            return kb.for_loop(
                extent, values, lambda i, inner: inside(tuple(rest), kb.at(at, kb.mul(i, stride * item)), inner)
            )

        return inside(self.gone, first, [self.combination.neutral(kb, self.lanes)])[0]


def plan_reduction(
    shape: tuple[int, ...], axes: Sequence[int], combination: Reducer, target: Target
) -> ReductionKernel:
    """Merge neighbouring dimensions that share their fate, and choose lanes and blocks."""
    merged: list[tuple[int, bool]] = []
    for axis, extent in enumerate(shape):
        goes = axis in axes
        if extent == 1:
            continue
        if merged and merged[-1][1] == goes:
            merged[-1] = merged[-1][0] * extent, goes
        else:
            merged.append((extent, goes))
    if not merged:
        merged = [(1, True)]
    strides = [math.prod(extent for extent, _ in merged[place + 1 :]) for place in range(len(merged))]
    outer = [(extent, stride, goes) for (extent, goes), stride in zip(merged[:-1], strides, strict=False)]
    length, goes = merged[-1]
    kept, gone = (tuple((n, s) for n, s, fate in outer if fate == wanted) for wanted in (False, True))
    lanes = vector_width_for(length, 16 * target.lanes // combination.item_bytes)
    work = math.prod(n for n, _ in gone) * length
    return ReductionKernel(kept, gone, length, goes, combination, lanes, max(1, _UNIT // work))
