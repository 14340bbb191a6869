"""Reductions along any axes: the dimensions that stay and those that go, each from the outermost to the innermost.

Where the innermost dimension stays, its elements are lanes. Where it goes, lanes are parts of its sums, folded at the
end: how sums are grouped depends on the shape and the target alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nnfmq.engines.compiled.emission import Emitter, Value
from nnfmq.engines.compiled.kernels.reducers import Reducer, reduce_lanes
from nnfmq.engines.compiled.kernels.spans import fitting_lanes, new_lanes, offset_of, spans
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

    @property
    def _results(self) -> int:
        return math.prod(extent for extent, _ in self.kept)

    @property
    def _count(self) -> int:
        return math.prod(extent for extent, _ in self.gone) * (self.length if self.goes else 1)

    @property
    def units(self) -> int:
        """Blocks of results, or of rows of them."""
        return math.ceil(self._results / self.block)

    def scratch_bytes(self, target: Target) -> int:
        """Nothing."""
        return 0

    def emit(self, e: Emitter) -> None:
        """Table: input, output."""
        source, out, item = e.argument(0), e.argument(1), self.combination.item_bytes
        extents, strides = tuple(n for n, _ in self.kept), tuple(s for _, s in self.kept)
        end = e.intrinsic("llvm.smin", e.mul(e.end, self.block), e.i64(self._results))
        with e.loop(e.mul(e.begin, self.block), end) as number:
            first = e.at(source, e.mul(offset_of(e, number, extents, strides), item))
            if self.goes:
                combined = self._combined(e, first, lambda row, values: [self._along(e, row, values[0])])
                single = reduce_lanes(e, self.combination, combined)
                e.store(self.combination.result(e, single, self._count), out, e.mul(number, item))
            else:
                place = e.at(out, e.mul(number, self.length * item))
                self._emit_across(e, first, place)
        e.finish()

    def _emit_across(self, e: Emitter, first: Value, place: Value) -> None:
        combination, item = self.combination, self.combination.item_bytes
        with spans(e, self.length, self.lanes) as lane:
            offset = e.mul(lane, item)

            def take(row: Value, values: Sequence[Value]) -> Sequence[Value]:
                return [combination.joined(e, values[0], combination.widened(e, row, 0, self.lanes))]

            combined = self._combined(e, e.at(first, offset), take)
            e.store(combination.result(e, combined, self._count), place, offset)

    def _along(self, e: Emitter, row: Value, combined: Value) -> Value:
        """Combine a contiguous row into the lanes; the last vector's elements that were there before do not count."""
        c, lanes = self.combination, self.lanes
        rounds = math.ceil(self.length / lanes)

        def take(k: Value, values: Sequence[Value]) -> Sequence[Value]:
            wanted = e.mul(k, lanes)
            place = wanted if self.length % lanes == 0 else e.intrinsic("llvm.smin", wanted, e.i64(self.length - lanes))
            value = c.widened(e, row, e.mul(place, c.item_bytes), lanes)
            new = new_lanes(e, self.length, lanes, place, wanted)
            value = value if new is None else e.b.select(new, value, c.neutral(e, lanes))
            return [c.joined(e, values[0], value)]

        return e.carry(rounds, [combined], take)[0]

    def _combined(self, e: Emitter, first: Value, row: Any) -> Value:
        """Emit loops over the dimensions that go, around `row`."""
        item = self.combination.item_bytes

        def inside(dimensions: Dimensions, at: Value, values: Sequence[Value]) -> Sequence[Value]:
            if not dimensions:
                return row(at, values)  # type: ignore[no-any-return]
            (extent, stride), *rest = dimensions
            return e.carry(
                extent, values, lambda i, inner: inside(tuple(rest), e.at(at, e.mul(i, stride * item)), inner)
            )

        return inside(self.gone, first, [self.combination.neutral(e, self.lanes)])[0]


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
    lanes = fitting_lanes(length, 16 * target.lanes // combination.item_bytes)
    work = math.prod(n for n, _ in gone) * length
    return ReductionKernel(kept, gone, length, goes, combination, lanes, max(1, _UNIT // work))
