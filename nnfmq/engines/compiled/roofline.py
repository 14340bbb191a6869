"""What this machine can do at most, measured in a fraction of a second: multiply-adds, and copies of memory.

Each peak is the best of many short runs, by one thread and by the whole team. They are what generated code reaches,
with this target's instructions: another one may do more a cycle.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from nnfmq.engines.compiled.executor import CompiledPartition
from nnfmq.engines.compiled.jit import Kernel, LoadedCode, compile_kernels, host_target
from nnfmq.engines.compiled.kernels.peaks import CopyBandwidth, FmaThroughput
from nnfmq.engines.compiled.memory_plan import ArraySpec, PartitionLaunch, plan_partition
from nnfmq.engines.compiled.target import Target
from nnfmq.engines.compiled.thread_pool import ThreadPool
from nnfmq.engines.execution import DEFAULT_RUN_OPTIONS

__all__ = ["Ceiling", "measure_ceilings", "roofline_kernels"]

_ROUNDS, _UNITS = 1 << 12, 64
_MEMORY_PART, _MEMORY_PARTS = 1 << 20, 32
_CACHE_PART, _CACHE_ROUNDS = 1 << 17, 32
_LIMITS_NS = 20_000_000, 40_000_000  # of one thread, and of all, which seldom have all processors to themselves
_LEAST_RUNS = 4
_SHARED_NS = 1 << 30


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Billions a second, of operations or of bytes: by one thread, and by all."""

    one_thread: float
    team: float


def measure_ceilings(team: ThreadPool) -> dict[str, Ceiling]:
    """Return the peaks: `float32` and `codes` in operations, `memory` and `cache` in bytes read and written.

    Blocks for about a third of a second. Memory is copied from 32 MiB to 32 MiB, cache from 128 KiB to 128 KiB for each
    thread. Runs on `team`, whose helpers stay.
    """
    target = host_target()
    kernels = roofline_kernels(target, team.worker_count + 1)
    segment, scope = _bound(list(kernels.values()), team, target)
    segment(scope)
    run = segment.range_runner(scope)
    peaks = {}
    for number, (name, kernel) in enumerate(kernels.items()):
        amount = kernel.operations if isinstance(kernel, FmaThroughput) else kernel.moved_bytes
        alone = amount / _best_ns(run, 2 * number, _LIMITS_NS[0])
        shared = amount / _best_ns(run, 2 * number + 1, _LIMITS_NS[1]) if team.worker_count else alone
        peaks[name] = Ceiling(alone, max(alone, shared))
    return peaks


def roofline_kernels(target: Target, threads: int) -> dict[str, FmaThroughput | CopyBandwidth]:
    """Return the kernel of each peak."""
    sums = 12 if target.registers == 16 else 24
    codes: Literal["pairs", "quads", "octets"] = (
        "quads" if target.has_dot4 else "octets" if target.pmaddubsw else "pairs"
    )
    return {
        "float32": FmaThroughput("float32", sums, target.lanes, _ROUNDS, _UNITS),
        "codes": FmaThroughput(codes, sums, target.lanes, _ROUNDS, _UNITS),
        "memory": CopyBandwidth(_MEMORY_PART, 1, _MEMORY_PARTS),
        "cache": CopyBandwidth(_CACHE_PART, _CACHE_ROUNDS, threads),
    }


def _bound(kernels: Sequence[Kernel], team: ThreadPool, target: Target) -> tuple[CompiledPartition, list[Any]]:
    """Return a segment with two steps for each kernel, for one thread and for the team, and its scope."""
    source, made = 0, 1 + len(kernels)
    size = max(_MEMORY_PART * _MEMORY_PARTS, _CACHE_PART * (team.worker_count + 1))
    values = {made + number: ArraySpec(np.dtype(np.uint8), (size,)) for number in range(len(kernels))}
    calls = [
        PartitionLaunch(kernel, (source,), (made + number,), (), work)
        for number, kernel in enumerate(kernels)
        for work in (0, _SHARED_NS)
    ]
    plan = plan_partition(calls, values, {}, [source], [], target)
    slot = made + len(kernels)
    segment = CompiledPartition(
        plan, np.zeros(1, np.uint8), LoadedCode([compile_kernels(kernels, target)], target), team, slot
    )
    scope: list[Any] = [None] * (slot + 1)
    scope[source] = np.full(size // 4, 0.25, np.float32).view(np.uint8)
    return segment, [*scope, DEFAULT_RUN_OPTIONS]


def _best_ns(run: Callable[[int, int], None], number: int, limit_ns: int) -> int:
    """Return how long the step took when nothing was in its way."""
    times: list[int] = []
    while sum(times) < limit_ns or len(times) < _LEAST_RUNS:
        begin_ns = time.perf_counter_ns()
        run(number, number + 1)
        times.append(time.perf_counter_ns() - begin_ns)
    return min(times)
