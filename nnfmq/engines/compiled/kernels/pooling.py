"""Pooling: for each window over an image, clipped to it, the combination of its cells, all channels side by side."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from nnfmq.engines.compiled.ir_builder import KernelBuilder, Value, vector_loop, vector_width_for
from nnfmq.engines.compiled.kernels.reducers import Reducer
from nnfmq.engines.compiled.target import Target
from nnfmq.operations.shapes import WindowDimension

__all__ = ["PoolKernel", "plan_pool"]

_UNITS = 8


@dataclass(frozen=True, slots=True)
class PoolKernel:
    """Windows over NHWC images. The channels of an output row are shared out in `groups`."""

    batch: int
    height: int
    width: int
    channels: int
    rows: WindowDimension
    columns: WindowDimension
    combination: Reducer
    lanes: int
    groups: int

    compile_cost = 1

    @property
    def work_items(self) -> int:
        """Output rows times groups of channels."""
        return self.batch * self.rows.count * self.groups

    def scratch_bytes(self, target: Target) -> int:
        """Nothing."""
        return 0

    def emit(self, kb: KernelBuilder) -> None:
        """Table: input, output."""
        image, out, item = kb.argument(0), kb.argument(1), self.combination.item_bytes
        with kb.loop(kb.begin, kb.end) as unit:
            row, begin, end = self._shared(kb, unit)
            number, y = kb.ir.udiv(row, kb.i64(self.rows.count)), kb.ir.urem(row, kb.i64(self.rows.count))
            top, vertical = _clipped(kb, self.rows, self.height, y)
            source = kb.at(image, kb.mul(kb.add(kb.mul(number, self.height), top), self.width * self.channels * item))
            target = kb.at(out, kb.mul(row, self.columns.count * self.channels * item))
            with kb.loop(0, self.columns.count) as x:
                left, horizontal = _clipped(kb, self.columns, self.width, x)
                cells = kb.at(source, kb.mul(left, self.channels * item))
                place = kb.at(target, kb.mul(x, self.channels * item))
                with vector_loop(kb, self.channels, self.lanes, begin, end) as channel:
                    offset = kb.mul(channel, item)
                    result = self._window(kb, kb.at(cells, offset), vertical, horizontal)
                    kb.store(result, place, offset)
        kb.return_void()

    def _shared(self, kb: KernelBuilder, unit: Value) -> tuple[Value, Any, Any]:
        """Return the row of a unit and its channels."""
        if self.groups == 1:
            return unit, 0, self.channels
        row, group = kb.ir.udiv(unit, kb.i64(self.groups)), kb.ir.urem(unit, kb.i64(self.groups))
        vectors = math.ceil(self.channels / self.lanes)
        begin, end = (kb.ir.udiv(kb.mul(kb.add(group, more), vectors), kb.i64(self.groups)) for more in (0, 1))
        limit = kb.intrinsic("llvm.smin", kb.mul(end, self.lanes), kb.i64(self.channels))
        return row, kb.mul(begin, self.lanes), limit

    def _window(self, kb: KernelBuilder, cells: Value, vertical: Any, horizontal: Any) -> Value:
        combination, item = self.combination, self.combination.item_bytes

        def along(i: Value, sums: Any) -> Any:
            line = kb.at(cells, kb.mul(i, self.width * self.channels * item))
            return kb.for_loop(horizontal, sums, lambda j, inner: [take(line, j, inner[0])])

        def take(line: Value, j: Value, sums: Value) -> Value:
            cell = combination.widened(kb, line, kb.mul(j, self.channels * item), self.lanes)
            return combination.joined(kb, sums, cell)

        (combined,) = kb.for_loop(vertical, [combination.neutral(kb, self.lanes)], along)
        return combination.result(kb, combined, kb.mul(vertical, horizontal))


def _clipped(kb: KernelBuilder, window: WindowDimension, extent: int, position: Value) -> tuple[Any, Any]:
    """Return where a window begins inside the image, and how many cells it has there."""
    start = kb.mul(position, window.stride)
    if window.padding_low == 0 and (window.count - 1) * window.stride + window.size <= extent:
        return start, window.size
    start = kb.ir.sub(start, kb.i64(window.padding_low))
    end = kb.intrinsic("llvm.smin", kb.add(start, window.size), kb.i64(extent))
    first = kb.intrinsic("llvm.smax", start, kb.i64(0))
    return first, kb.ir.sub(end, first)


def plan_pool(
    image: tuple[int, int, int, int],
    rows: WindowDimension,
    columns: WindowDimension,
    combination: Reducer,
    target: Target,
) -> PoolKernel:
    """Choose lanes and groups for a target."""
    batch, height, width, channels = image
    lanes = vector_width_for(channels, 16 * target.lanes // combination.item_bytes)
    groups = min(math.ceil(channels / lanes), math.ceil(_UNITS / (batch * rows.count)))
    return PoolKernel(batch, height, width, channels, rows, columns, combination, lanes, groups)
