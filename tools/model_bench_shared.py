"""The runner `nnfmq shared memory` of model_bench.py: the least that two processes can do.

The engine runs in a process of its own, with its inputs and outputs in memory that both processes map. Each side polls
a counter of the other's in Python; there is no queue, no packet and no driver. So its time above that of the engine in
process is what it costs to move the arrays between the caches of two CPUs, and a burst's time above this runner's is
what the burst itself costs. The stores are ordered as x86-64 orders them; elsewhere results may be wrong.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from model_bench_jobs import RunnerJob, inputs_for, load_source

from nnfmq.measure import cpu_pinning
from nnfmq.measure.failures import BenchmarkFailed
from nnfmq.measure.steps import Array, Runner, make_step, states_of

_LINE = 128  # bytes between values that two CPUs write
_POLLING_NS = 100_000_000  # after a request; then the engine's process sleeps, so that it is idle during other trials
_POLLS = 1000  # between two looks at the clock
_IDLE_S = 0.01
_END = 2**63 - 1


@dataclass(frozen=True, slots=True)
class _SharedArrays:
    """Counters of requests and results, and the model's inputs and outputs, states included, in shared memory."""

    requests: memoryview
    results: memoryview
    inputs: list[Array]
    outputs: list[Array]

    @classmethod
    def for_arrays(cls, inputs: Sequence[Array], outputs: Sequence[Array]) -> _SharedArrays:
        arrays = [*inputs, *outputs]
        sizes = [-(-array.nbytes // _LINE) * _LINE for array in arrays]
        memory = mmap.mmap(-1, 2 * _LINE + sum(sizes))
        offsets = np.cumsum([2 * _LINE, *sizes])
        views = [
            np.frombuffer(memory, array.dtype, array.size, int(offset)).reshape(array.shape)
            for array, offset in zip(arrays, offsets, strict=False)
        ]
        words = memoryview(memory).cast("q")
        return cls(words[:1], words[_LINE // 8 : _LINE // 8 + 1], views[: len(inputs)], views[len(inputs) :])


@contextmanager
def shared_memory(job: RunnerJob) -> Iterator[Runner]:
    """The engine in another process; its arrays are in shared memory."""
    model = load_source(job.source)
    inputs, states = inputs_for(model.inputs), states_of(model)
    outputs = [*(np.zeros(i.shape, i.dtype) for i in model.outputs), *map(np.zeros_like, states)]
    shared = _SharedArrays.for_arrays([*inputs, *states], outputs)
    child = os.fork()
    if not child:
        _compute(job, model, shared)
    try:
        _wait(shared, child, job.limit_s)
        step = make_step(len(inputs), shared.inputs, shared.outputs, lambda: _request(shared))
        for buffer, state in zip(shared.inputs[len(inputs) :], states, strict=True):
            buffer[...] = state
        yield Runner({"in place": step}, (child,), {"threads": len(job.cpus)})
    finally:
        shared.requests[0] = _END
        os.waitpid(child, 0)


def _wait(shared: _SharedArrays, child: int, limit_s: int) -> None:
    """Wait until the engine has computed once.

    Raises:
        BenchmarkFailed: If it does not within `limit_s`, or its process ends.
    """
    deadline = time.monotonic() + limit_s
    shared.requests[0] = 1
    while shared.results[0] != 1:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) or time.monotonic() > deadline:
            raise BenchmarkFailed("the engine's process has ended, or is too slow")
        time.sleep(_IDLE_S)


def _request(shared: _SharedArrays) -> None:
    requests, results = shared.requests, shared.results
    number = requests[0] + 1
    requests[0] = number
    while results[0] != number:
        pass


def _compute(job: RunnerJob, model: Any, shared: _SharedArrays) -> None:
    """Execute the model for each request until the parent ends. Does not return."""
    from nnfmq.engines.compiled.partition import prepare

    parent, status = os.getppid(), 1
    try:
        cpu_pinning.pin_to(0, job.cpus)
        execution = prepare(model.model).bind(shared.inputs, shared.outputs)
        seen = 0
        with np.errstate(all="ignore"):
            while (seen := _next_request(shared.requests, seen, parent)) != _END:
                execution.run()
                shared.results[0] = seen
        status = 0
    finally:
        os._exit(status)


def _next_request(requests: memoryview, seen: int, parent: int) -> int:
    """Return the number of the next request, or _END if the parent has ended."""
    polling_until = time.monotonic_ns() + _POLLING_NS
    while True:
        for _ in range(_POLLS):
            if requests[0] != seen:
                return requests[0]
        if os.getppid() != parent:
            return _END
        if time.monotonic_ns() > polling_until:
            time.sleep(_IDLE_S)
