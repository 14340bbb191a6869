"""Reductions along axes, and pooling: loop nests around a `Reducer`.

Adjacent dimensions that are both kept or both reduced are merged. If the innermost dimension is kept, its elements are
lanes. If it is reduced, each lane accumulates a part of the row, and the lanes are combined at the end: the order of
float sums depends on the shape and the target only.
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
from nnfmq.operations.shapes import WindowDimension

__all__ = ["PoolKernel", "ReductionKernel", "plan_pool", "plan_reduction"]

_MIN_ELEMENTS_PER_ITEM = 1 << 12
_MIN_POOL_ITEMS = 8

Dimensions = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class ReductionKernel:
    """A planned reduction. Dimensions are pairs of extent and stride, in elements, outermost first.

    `inner_size` is the extent of the innermost dimension, which is not among them; it is reduced if `reduces_inner`.
    A work item is `results_per_item` results, or rows of results if the innermost dimension is kept.
    """

    kept_dims: Dimensions
    reduced_dims: Dimensions
    inner_size: int
    reduces_inner: bool
    reducer: Reducer
    lanes: int
    results_per_item: int

    compile_cost = 1

    @property
    def _results(self) -> int:
        return math.prod(extent for extent, _ in self.kept_dims)

    @property
    def _count(self) -> int:
        """Elements of each result."""
        return math.prod(extent for extent, _ in self.reduced_dims) * (self.inner_size if self.reduces_inner else 1)

    @property
    def work_items(self) -> int:
        """Groups of results, or of rows of results."""
        return math.ceil(self._results / self.results_per_item)

    def scratch_bytes(self, target: Target) -> int:
        """Return 0: no scratch is used."""
        return 0

    def emit(self, kb: KernelBuilder) -> None:
        """Args: input, output."""
        source, out, item = kb.argument(0), kb.argument(1), self.reducer.item_bytes
        extents, strides = tuple(n for n, _ in self.kept_dims), tuple(s for _, s in self.kept_dims)
        end = kb.intrinsic("llvm.smin", kb.mul(kb.end, self.results_per_item), kb.i64(self._results))
        with kb.loop(kb.mul(kb.begin, self.results_per_item), end) as number:
            first = kb.at(source, kb.mul(strided_offset(kb, number, extents, strides), item))
            if self.reduces_inner:
                acc = self._reduce(kb, first, lambda row, values: [self._reduce_row(kb, row, values[0])])
                result = self.reducer.finalize(kb, reduce_lanes(kb, self.reducer, acc), self._count)
                kb.store(result, out, kb.mul(number, item))
            else:
                self._emit_kept_row(kb, first, kb.at(out, kb.mul(number, self.inner_size * item)))
        kb.return_void()

    def _emit_kept_row(self, kb: KernelBuilder, first: Value, out: Value) -> None:
        """Compute a row of results: lanes are neighbours in the innermost dimension."""
        reducer, item = self.reducer, self.reducer.item_bytes
        with vector_loop(kb, self.inner_size, self.lanes) as index:
            offset = kb.mul(index, item)

            def reduce_vector(row: Value, values: Sequence[Value]) -> Sequence[Value]:
                return [reducer.reduce(kb, values[0], reducer.load(kb, row, 0, self.lanes))]

            acc = self._reduce(kb, kb.at(first, offset), reduce_vector)
            kb.store(reducer.finalize(kb, acc, self._count), out, offset)

    def _reduce_row(self, kb: KernelBuilder, row: Value, acc: Value) -> Value:
        """Accumulate a contiguous row. Elements that the last vector shares with the one before count once."""
        reducer, lanes = self.reducer, self.lanes
        iterations = math.ceil(self.inner_size / lanes)

        def reduce_vector(k: Value, values: Sequence[Value]) -> Sequence[Value]:
            unmoved = index = kb.mul(k, lanes)
            if self.inner_size % lanes:
                index = kb.intrinsic("llvm.smin", unmoved, kb.i64(self.inner_size - lanes))
            value = reducer.load(kb, row, kb.mul(index, reducer.item_bytes), lanes)
            mask = unseen_lanes_mask(kb, self.inner_size, lanes, index, unmoved)
            value = value if mask is None else kb.ir.select(mask, value, reducer.init(kb, lanes))
            return [reducer.reduce(kb, values[0], value)]

        return kb.for_loop(iterations, [acc], reduce_vector)[0]

    def _reduce(self, kb: KernelBuilder, first: Value, emit_inner: Any) -> Value:
        """Emit loops over the outer reduced dimensions around `emit_inner(address, [accumulator])`."""
        item = self.reducer.item_bytes

        def nest(dimensions: Dimensions, address: Value, values: Sequence[Value]) -> Sequence[Value]:
            if not dimensions:
                return emit_inner(address, values)  # type: ignore[no-any-return]
            (extent, stride), *inner = dimensions
            return kb.for_loop(
                extent, values, lambda i, carried: nest(tuple(inner), kb.at(address, kb.mul(i, stride * item)), carried)
            )

        return nest(self.reduced_dims, first, [self.reducer.init(kb, self.lanes)])[0]


def plan_reduction(shape: tuple[int, ...], axes: Sequence[int], reducer: Reducer, target: Target) -> ReductionKernel:
    """Plan the reduction of an array of `shape` along `axes`: merge dimensions, choose lanes and work items."""
    merged: list[tuple[int, bool]] = []  # extent, and whether it is reduced
    for axis, extent in enumerate(shape):
        is_reduced = axis in axes
        if extent == 1:
            continue
        if merged and merged[-1][1] == is_reduced:
            merged[-1] = merged[-1][0] * extent, is_reduced
        else:
            merged.append((extent, is_reduced))
    if not merged:
        merged = [(1, True)]
    strides = [math.prod(extent for extent, _ in merged[number + 1 :]) for number in range(len(merged))]
    outer = [(extent, stride, is_reduced) for (extent, is_reduced), stride in zip(merged[:-1], strides, strict=False)]
    inner_size, reduces_inner = merged[-1]
    kept, reduced = (tuple((n, s) for n, s, is_reduced in outer if is_reduced == wanted) for wanted in (False, True))
    lanes = vector_width_for(inner_size, 16 * target.lanes // reducer.item_bytes)
    elements = math.prod(n for n, _ in reduced) * inner_size
    results_per_item = max(1, _MIN_ELEMENTS_PER_ITEM // elements)
    return ReductionKernel(kept, reduced, inner_size, reduces_inner, reducer, lanes, results_per_item)


# -- pooling ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PoolKernel:
    """A planned pooling of NHWC images: lanes are channels. Windows are clipped to the image.

    A work item is an output row, times one of `channel_splits` of the channels if there are few rows.
    """

    batch: int
    height: int
    width: int
    channels: int
    rows: WindowDimension
    columns: WindowDimension
    reducer: Reducer
    lanes: int
    channel_splits: int

    compile_cost = 1

    @property
    def work_items(self) -> int:
        """Output rows times splits of the channels."""
        return self.batch * self.rows.count * self.channel_splits

    def scratch_bytes(self, target: Target) -> int:
        """Return 0: no scratch is used."""
        return 0

    def emit(self, kb: KernelBuilder) -> None:
        """Args: input, output."""
        image, out, item = kb.argument(0), kb.argument(1), self.reducer.item_bytes
        with kb.loop(kb.begin, kb.end) as work_item:
            row, begin, end = self._split(kb, work_item)
            number, y = kb.ir.udiv(row, kb.i64(self.rows.count)), kb.ir.urem(row, kb.i64(self.rows.count))
            top, taps_down = _clip_window(kb, self.rows, self.height, y)
            source = kb.at(image, kb.mul(kb.add(kb.mul(number, self.height), top), self.width * self.channels * item))
            target = kb.at(out, kb.mul(row, self.columns.count * self.channels * item))
            with kb.loop(0, self.columns.count) as x:
                left, taps_across = _clip_window(kb, self.columns, self.width, x)
                window = kb.at(source, kb.mul(left, self.channels * item))
                pixel = kb.at(target, kb.mul(x, self.channels * item))
                with vector_loop(kb, self.channels, self.lanes, begin, end) as channel:
                    offset = kb.mul(channel, item)
                    result = self._reduce_window(kb, kb.at(window, offset), taps_down, taps_across)
                    kb.store(result, pixel, offset)
        kb.return_void()

    def _split(self, kb: KernelBuilder, work_item: Value) -> tuple[Value, Any, Any]:
        """Return a work item's output row, its first channel, and the end of its channels."""
        if self.channel_splits == 1:
            return work_item, 0, self.channels
        splits = kb.i64(self.channel_splits)
        row, split = kb.ir.udiv(work_item, splits), kb.ir.urem(work_item, splits)
        vectors = math.ceil(self.channels / self.lanes)
        begin, end = (kb.ir.udiv(kb.mul(kb.add(split, more), vectors), splits) for more in (0, 1))
        limit = kb.intrinsic("llvm.smin", kb.mul(end, self.lanes), kb.i64(self.channels))
        return row, kb.mul(begin, self.lanes), limit

    def _reduce_window(self, kb: KernelBuilder, window: Value, taps_down: Any, taps_across: Any) -> Value:
        reducer, item = self.reducer, self.reducer.item_bytes

        def reduce_row(i: Value, values: Any) -> Any:
            row = kb.at(window, kb.mul(i, self.width * self.channels * item))
            return kb.for_loop(taps_across, values, lambda j, inner: [reduce_tap(row, j, inner[0])])

        def reduce_tap(row: Value, j: Value, acc: Value) -> Value:
            return reducer.reduce(kb, acc, reducer.load(kb, row, kb.mul(j, self.channels * item), self.lanes))

        (acc,) = kb.for_loop(taps_down, [reducer.init(kb, self.lanes)], reduce_row)
        return reducer.finalize(kb, acc, kb.mul(taps_down, taps_across))


def _clip_window(kb: KernelBuilder, window: WindowDimension, size: int, position: Value) -> tuple[Any, Any]:
    """Return the first row (or column) of a window inside the image, and the number of its taps there."""
    start = kb.mul(position, window.stride)
    if window.padding_low == 0 and (window.count - 1) * window.stride + window.size <= size:
        return start, window.size
    start = kb.ir.sub(start, kb.i64(window.padding_low))
    end = kb.intrinsic("llvm.smin", kb.add(start, window.size), kb.i64(size))
    first = kb.intrinsic("llvm.smax", start, kb.i64(0))
    return first, kb.ir.sub(end, first)


def plan_pool(
    image: tuple[int, int, int, int],
    rows: WindowDimension,
    columns: WindowDimension,
    reducer: Reducer,
    target: Target,
) -> PoolKernel:
    """Plan the pooling of images of shape `image` (NHWC): choose lanes and splits of the channels."""
    batch, height, width, channels = image
    lanes = vector_width_for(channels, 16 * target.lanes // reducer.item_bytes)
    splits = min(math.ceil(channels / lanes), math.ceil(_MIN_POOL_ITEMS / (batch * rows.count)))
    return PoolKernel(batch, height, width, channels, rows, columns, reducer, lanes, splits)
