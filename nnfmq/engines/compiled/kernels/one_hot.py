"""ONE_HOT along the last axis: rows of one value, with another one at an index."""

from __future__ import annotations

import math
from typing import Any

from nnfmq.base.frozen import dataclass
from nnfmq.engines.compiled.ir_builder import I32, I64, Constant, KernelBuilder, for_each_vector, integer
from nnfmq.engines.compiled.kernels import Kernel

__all__ = ["OneHot"]


@dataclass(frozen=True, slots=True)
class OneHot(Kernel):
    """Rows of `depth` elements, one for each of `count` indices. A work item is `rows_per_item` rows.

    A row has "on" at its index, if that is inside, and "off" elsewhere. Each index is read once, so that no change of
    it by another process leads to a store outside of its row.
    """

    count: int
    depth: int
    element_bytes: int
    rows_per_item: int

    @property
    def work_items(self) -> int:
        """Groups of rows."""
        return math.ceil(self.count / self.rows_per_item)

    def emit(self, kb: KernelBuilder) -> None:
        """Args: indices (int32), on, off, rows."""
        indices, on, off, out = map(kb.argument, range(4))
        size, kind = self.element_bytes, integer(8 * self.element_bytes)
        chosen, other = kb.load(kind, on), kb.load(kind, off)
        end = kb.intrinsic("llvm.smin", kb.mul(kb.end, self.rows_per_item), kb.i64(self.count))
        with kb.loop(kb.mul(kb.begin, self.rows_per_item), end) as number:
            row, index = kb.at(out, kb.mul(number, self.depth * size)), kb.load(I32, indices, kb.mul(number, 4))

            def fill(offset: Any, lanes: int, row: Any = row) -> None:
                kb.store(kb.broadcast(other, lanes), row, kb.mul(offset, size))

            for_each_vector(kb, self.depth, 4 * kb.target.lanes // size, fill)
            is_inside = kb.ir.icmp_unsigned("<", index, Constant(I32, self.depth))
            with kb.ir.if_then(is_inside):
                kb.store(chosen, row, kb.mul(kb.ir.zext(index, I64), size))
        kb.return_void()
