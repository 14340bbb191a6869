"""What one core of this machine can do at most: multiply-adds a second from registers, bytes a second from memory.

Two loops of machine code, made like the compiling engine's kernels. *Multiplying* keeps as many independent sums as
there are registers beside two operands; of 16 bits it takes the instruction that the engine takes, the sum of two
products, or none where the target has no such. *Reading* adds up 64-byte lines of an array one after the other: far
larger than the caches, or as large as half of a second-level one. The best of some runs counts.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir

from nnfmq.engines.compiled.emission import F32, I16, I32, Emitter, Value, vector
from nnfmq.engines.compiled.kernels.kernel import name_of
from nnfmq.engines.compiled.objects import Linker, compile_kernels, host_target
from nnfmq.engines.compiled.target import Target

MEMORY_BYTES, CACHE_BYTES = 1 << 28, 1 << 17
_RUNS, _LINE = 15, 64
_FLOATS, _PAIRS = "float32", "16-bit pairs"
Following = Callable[[int, Value, Value], Value]
"""From a sum's number, the sum and the unit, the next sum."""


@dataclass(frozen=True, slots=True)
class Multiplying:
    """A loop of multiply-adds; a unit is one for each register that is left."""

    what: str
    units: int = 1 << 16

    def sums(self, target: Target) -> int:
        """Return how many vectors are summed up side by side."""
        return target.registers - 4

    def multiply_adds(self, target: Target) -> int:
        """Return how many multiply-adds a unit is."""
        return self.sums(target) * target.lanes * (1 if self.what == _FLOATS else 2)

    def scratch_bytes(self, target: Target) -> int:
        """None."""
        return 0

    def emit(self, e: Emitter) -> None:
        """Write the loop. Pairs are products of the sums themselves, which nothing can take out of the loop."""
        kind = vector(F32 if self.what == _FLOATS else I32, e.target.lanes)
        place = e.argument(0)
        factor = e.load(kind, place)
        _summing(e, kind, self.sums(e.target), place, lambda *given: self._next(e, factor, given[1]))

    def _next(self, e: Emitter, factor: Value, total: Value) -> Value:
        if self.what == _FLOATS:
            return e.intrinsic("llvm.fma", factor, factor, total)
        assert e.target.pair_product is not None
        pairs = vector(I16, 2 * e.target.lanes)
        both = [e.b.bitcast(value, pairs) for value in (total, factor)]
        return e.b.add(e.call(e.target.pair_product, total.type, *both), total)


@dataclass(frozen=True, slots=True)
class Reading:
    """A loop over an array; a unit is four cache lines."""

    units: int

    def scratch_bytes(self, target: Target) -> int:
        """None."""
        return 0

    def emit(self, e: Emitter) -> None:
        """Write the loop: every vector of the unit goes to a sum of its own."""
        kind = vector(I32, e.target.lanes)
        size = 4 * e.target.lanes
        place, count = e.argument(0), 4 * _LINE // size

        def following(number: int, total: Value, index: Value) -> Value:
            offset = e.add(e.mul(index, 4 * _LINE), number * size)
            return e.b.add(total, e.load(kind, place, offset))

        _summing(e, kind, count, e.argument(1), following)


def _summing(e: Emitter, kind: Any, count: int, place: Value, following: Following) -> None:
    """Emit a loop over the units that carries `count` sums, and store them at `place` in the end."""
    entered = e.b.block
    body, after = (e.function.append_basic_block(name) for name in ("body", "after"))
    e.b.branch(body)
    e.b.position_at_end(body)
    index = e.b.phi(e.begin.type)
    index.add_incoming(e.begin, entered)
    sums = [e.b.phi(kind) for _ in range(count)]
    made = [following(number, total, index) for number, total in enumerate(sums)]
    for total, new in zip(sums, made, strict=True):
        total.add_incoming(ir.Constant(kind, None), entered)
        total.add_incoming(new, body)
    more = e.b.add(index, e.i64(1))
    index.add_incoming(more, body)
    e.b.cbranch(e.b.icmp_signed("<", more, e.end), body, after)
    e.b.position_at_end(after)
    for number, new in enumerate(made):
        e.store(new, place, number * 4 * e.target.lanes)
    e.b.ret_void()


def measured() -> dict[str, float | None]:
    """Return the peaks of the core that this thread runs on: multiply-adds and bytes a second; blocks for a second."""
    target = host_target()
    words = np.zeros(4096, np.uint8)
    words[:64].view(np.float32)[:] = 0.5
    return {
        "float32_multiply_adds_per_s": _multiplying(Multiplying(_FLOATS), target, words),
        "pair_multiply_adds_per_s": _multiplying(Multiplying(_PAIRS), target, words) if target.pair_product else None,
        "memory_bytes_per_s": _reading(MEMORY_BYTES, target),
        "cache_bytes_per_s": _reading(CACHE_BYTES, target),
    }


def _multiplying(kernel: Multiplying, target: Target, words: Any) -> float:
    seconds = _best(kernel, target, [words.ctypes.data], 1)
    return kernel.units * kernel.multiply_adds(target) / seconds


def _reading(size: int, target: Target) -> float:
    array, result = np.ones(size, np.uint8), np.zeros(4096, np.uint8)
    times = max(1, (1 << 24) // size)
    kernel = Reading(size // (4 * _LINE))
    return times * size / _best(kernel, target, [array.ctypes.data, result.ctypes.data], times)


def _best(kernel: Any, target: Target, table: Sequence[int], times: int) -> float:
    """Return the seconds of the quickest run of `times` calls."""
    linker = Linker(compile_kernels([kernel], target), target)
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)(
        linker.address(name_of(kernel))
    )
    addresses = (ctypes.c_int64 * len(table))(*table)
    best = float("inf")
    for _ in range(_RUNS):
        begin = time.perf_counter_ns()
        for _ in range(times):
            function(ctypes.addressof(addresses), 0, kernel.units, None)
        best = min(best, (time.perf_counter_ns() - begin) / 1e9)
    return best
