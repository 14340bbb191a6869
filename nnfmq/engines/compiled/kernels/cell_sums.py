"""Sums of the cells under positions: what products add whose weights are less than they should be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from llvmlite import ir

from nnfmq.engines.compiled.ir_builder import I8, I32, KernelBuilder, Value, vector
from nnfmq.engines.compiled.kernels.arithmetic import Arithmetic

__all__ = ["Tap", "counting"]

Tap: TypeAlias = Callable[[Value, Value, Sequence[Value]], Sequence[Value]]
"""What emits a tap: it gets the tap's number, its first cells, and the sums so far, and returns the next ones."""


def counting(kb: KernelBuilder, a: Arithmetic, lanes: int, step: Value, vectors: Value, rest: Value) -> Tap:
    """Return what adds the cells of a tap, which are bytes, to the sums of positions that are `step` bytes apart.

    A tap has so many whole `vectors` and `rest` cells, 1 at least and a vector at most: of these only the groups that
    begin in the tap are read, and only the tap's own cells count.
    """
    kind, size = a.weights_type(lanes), 4 * lanes
    every = kb.splat(I8, 1, size)
    numbers, short = ir.Constant(kind, list(range(size))), kb.broadcast(kb.ir.trunc(rest, I8), size)
    own = kb.ir.select(kb.ir.icmp_unsigned("<", numbers, short), every, ir.Constant(kind, None))
    begins = ir.Constant(vector(I32, lanes), list(range(0, size, a.group)))
    groups = kb.ir.icmp_unsigned("<", begins, kb.broadcast(kb.ir.trunc(rest, I32), lanes))

    def counted(_: Value, first: Value, sums: Sequence[Value]) -> Sequence[Value]:
        places = [kb.at(first, kb.mul(step, number)) for number in range(len(sums))]

        def whole(k: Value, sums: Sequence[Value]) -> Sequence[Value]:
            cells = [kb.load(kind, place, kb.mul(k, size)) for place in places]
            return [a.multiply_add(kb, *pair, every) for pair in zip(sums, cells, strict=True)]

        sums = kb.for_loop(vectors, sums, whole, may_be_empty=True)
        last = [kb.masked_load(vector(I32, lanes), place, kb.mul(vectors, size), groups) for place in places]
        return [
            a.multiply_add(kb, value, kb.ir.bitcast(cells, kind), own) for value, cells in zip(sums, last, strict=True)
        ]

    return counted
