"""Divisors that come with the request: the kernel that reports those of 0, before integers are divided."""

from __future__ import annotations

import math

from nnfmq.base.frozen import dataclass
from nnfmq.engines.compiled.ir_builder import (
    I32,
    Constant,
    KernelBuilder,
    integer,
    vector,
    vector_loop,
    vector_width_for,
)
from nnfmq.engines.compiled.kernels import Kernel

__all__ = ["CheckedDivisors"]

_PART = 1 << 12  # elements of a work item


@dataclass(frozen=True, slots=True)
class CheckedDivisors(Kernel):
    """A copy of `count` divisors of INT32 with 1 in place of 0. The last output has for each work item if one was 0."""

    count: int

    @property
    def work_items(self) -> int:
        """Parts of the array."""
        return math.ceil(self.count / _PART)

    def emit(self, kb: KernelBuilder) -> None:
        """Args: divisors, copies, errors."""
        source, copies, errors = map(kb.argument, range(3))
        lanes = vector_width_for(self.count, kb.target.lanes)
        kind, zeros, ones = vector(I32, lanes), kb.splat(I32, 0, lanes), kb.splat(I32, 1, lanes)
        with kb.loop(kb.begin, kb.end) as item:
            error = kb.at(errors, kb.mul(item, 4))
            kb.store(Constant(I32, 0), error)
            first = kb.mul(item, _PART)
            end = kb.intrinsic("llvm.smin", kb.add(first, _PART), kb.i64(self.count))
            with vector_loop(kb, self.count, lanes, first, end) as index:
                offset = kb.mul(index, 4)
                values = kb.load(kind, source, offset)
                are_zero = kb.ir.icmp_signed("==", values, zeros)
                kb.store(kb.ir.select(are_zero, ones, values), copies, offset)
                any_zero = kb.ir.icmp_unsigned("!=", kb.ir.bitcast(are_zero, integer(lanes)), integer(lanes)(0))
                with kb.ir.if_then(any_zero):
                    kb.store(Constant(I32, 1), error)
        kb.return_void()
