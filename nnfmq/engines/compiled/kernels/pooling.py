"""Pooling: for each window over an image, clipped to it, the combination of its cells, all channels side by side."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from nnfmq.engines.compiled.emission import Emitter, Value
from nnfmq.engines.compiled.kernels.reducers import Reducer
from nnfmq.engines.compiled.kernels.spans import fitting_lanes, spans
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

    @property
    def units(self) -> int:
        """Output rows times groups of channels."""
        return self.batch * self.rows.count * self.groups

    def scratch_bytes(self, target: Target) -> int:
        """Nothing."""
        return 0

    def emit(self, e: Emitter) -> None:
        """Table: input, output."""
        image, out, item = e.argument(0), e.argument(1), self.combination.item_bytes
        with e.loop(e.begin, e.end) as unit:
            row, begin, end = self._shared(e, unit)
            number, y = e.b.udiv(row, e.i64(self.rows.count)), e.b.urem(row, e.i64(self.rows.count))
            top, vertical = _clipped(e, self.rows, self.height, y)
            source = e.at(image, e.mul(e.add(e.mul(number, self.height), top), self.width * self.channels * item))
            target = e.at(out, e.mul(row, self.columns.count * self.channels * item))
            with e.loop(0, self.columns.count) as x:
                left, horizontal = _clipped(e, self.columns, self.width, x)
                cells = e.at(source, e.mul(left, self.channels * item))
                place = e.at(target, e.mul(x, self.channels * item))
                with spans(e, self.channels, self.lanes, begin, end) as channel:
                    offset = e.mul(channel, item)
                    result = self._window(e, e.at(cells, offset), vertical, horizontal)
                    e.store(result, place, offset)
        e.finish()

    def _shared(self, e: Emitter, unit: Value) -> tuple[Value, Any, Any]:
        """Return the row of a unit and its channels."""
        if self.groups == 1:
            return unit, 0, self.channels
        row, group = e.b.udiv(unit, e.i64(self.groups)), e.b.urem(unit, e.i64(self.groups))
        vectors = math.ceil(self.channels / self.lanes)
        begin, end = (e.b.udiv(e.mul(e.add(group, more), vectors), e.i64(self.groups)) for more in (0, 1))
        limit = e.intrinsic("llvm.smin", e.mul(end, self.lanes), e.i64(self.channels))
        return row, e.mul(begin, self.lanes), limit

    def _window(self, e: Emitter, cells: Value, vertical: Any, horizontal: Any) -> Value:
        combination, item = self.combination, self.combination.item_bytes

        def along(i: Value, sums: Any) -> Any:
            line = e.at(cells, e.mul(i, self.width * self.channels * item))
            return e.carry(horizontal, sums, lambda j, inner: [take(line, j, inner[0])])

        def take(line: Value, j: Value, sums: Value) -> Value:
            cell = combination.widened(e, line, e.mul(j, self.channels * item), self.lanes)
            return combination.joined(e, sums, cell)

        (combined,) = e.carry(vertical, [combination.neutral(e, self.lanes)], along)
        return combination.result(e, combined, e.mul(vertical, horizontal))


def _clipped(e: Emitter, window: WindowDimension, extent: int, position: Value) -> tuple[Any, Any]:
    """Return where a window begins inside the image, and how many cells it has there."""
    start = e.mul(position, window.stride)
    if window.padding_low == 0 and (window.count - 1) * window.stride + window.size <= extent:
        return start, window.size
    start = e.b.sub(start, e.i64(window.padding_low))
    end = e.intrinsic("llvm.smin", e.add(start, window.size), e.i64(extent))
    first = e.intrinsic("llvm.smax", start, e.i64(0))
    return first, e.b.sub(end, first)


def plan_pool(
    image: tuple[int, int, int, int],
    rows: WindowDimension,
    columns: WindowDimension,
    combination: Reducer,
    target: Target,
) -> PoolKernel:
    """Choose lanes and groups for a target."""
    batch, height, width, channels = image
    lanes = fitting_lanes(channels, 16 * target.lanes // combination.item_bytes)
    groups = min(math.ceil(channels / lanes), math.ceil(_UNITS / (batch * rows.count)))
    return PoolKernel(batch, height, width, channels, rows, columns, combination, lanes, groups)
