"""Elements repeated one by one, and rows: what enlarges images with channels first by integers."""

from __future__ import annotations

import math
from dataclasses import field
from typing import Any, NamedTuple

from nnfmq.base.frozen import dataclass
from nnfmq.engines.compiled.ir_builder import I8, I16, I32, I64, KernelBuilder, Value, load_params, pack_params, vector
from nnfmq.engines.compiled.kernels import Kernel

__all__ = ["MAX_REPETITIONS", "RepeatedElements"]

MAX_REPETITIONS = 8
"""How often elements, and rows, may be repeated: the kernel has stores for each."""

_TYPES = {1: I8, 2: I16, 4: I32, 8: I64}


class _Extents(NamedTuple):
    """Run-time parameters, in elements."""

    count: Any  # of the input
    length: Any  # of a work item


@dataclass(frozen=True, slots=True)
class RepeatedElements(Kernel):
    """An array of `count` elements, each of which the result has `times` in a row.

    With `row_times` it has each row of `length` elements as often. A work item is a row, or if rows are not repeated
    any part of the elements.
    """

    count: int = field(repr=False)
    element_bytes: int
    times: int
    row_times: int = 1
    length: int = field(default=1 << 12, repr=False)

    @property
    def work_items(self) -> int:
        """Rows or parts."""
        return math.ceil(self.count / self.length)

    def params(self) -> bytes:
        """Return the constant with the extents."""
        return pack_params(_Extents(self.count, self.length))

    def emit(self, kb: KernelBuilder) -> None:
        """Args: input, output, params."""
        source, out = map(kb.argument, range(2))
        n = load_params(kb, kb.argument(2), _Extents)
        result_bytes = self.element_bytes * self.times
        with kb.loop(kb.begin, kb.end) as item:
            first = kb.ir.mul(item, n.length)
            length = kb.intrinsic("llvm.smin", n.length, kb.ir.sub(n.count, first))
            target = kb.at(out, kb.mul(first, result_bytes * self.row_times))
            self._emit_row(kb, kb.at(source, kb.mul(first, self.element_bytes)), target, length)
        kb.return_void()

    def _emit_row(self, kb: KernelBuilder, source: Value, target: Value, length: Value) -> None:
        """Store the results of `length` elements, in all rows that are equal."""
        size, kind, begin = self.element_bytes, _TYPES[self.element_bytes], kb.i64(0)
        full_lanes = 4 * kb.target.lanes // size
        row_bytes = kb.mul(length, size * self.times)
        for lanes in sorted({full_lanes, min(full_lanes, 4), 1}, reverse=True):
            end = kb.ir.and_(length, kb.i64(-lanes))
            with kb.loop(begin, end, lanes) as index:
                values, place = (
                    kb.load(vector(kind, lanes), source, kb.mul(index, size)),
                    kb.mul(index, size * self.times),
                )
                for number in range(self.times):
                    taken = [(number * lanes + lane) // self.times for lane in range(lanes)]
                    repeated, offset = kb.shuffle(values, values, taken), kb.add(place, number * lanes * size)
                    for row in range(self.row_times):
                        kb.store(repeated, target, kb.add(offset, kb.mul(row_bytes, row)))
            begin = end
