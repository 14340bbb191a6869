"""A client process of `nnfmq stress`: loads a model as a runner of `nnfmq bench` does, then records requests.

The counters are read between requests, not within their time. That takes some 20 µs, so there are fewer requests than
in `nnfmq bench`, and caches are a little colder.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path

import numpy as np

from nnfmq.hal.errors import NnfmqError
from nnfmq.measure import cpu_pinning
from nnfmq.measure.failures import BenchmarkFailed
from nnfmq.measure.runner_process import OpenRunner, opened
from nnfmq.measure.runner_protocol import MessagePipe, RunnerFailed, RunnerJob, RunnerReady
from nnfmq.measure.steps import Array
from nnfmq.stress.application_work import ApplicationWork
from nnfmq.stress.process_counters import RequestCounters
from nnfmq.stress.records import RequestRecord
from nnfmq.stress.stress_protocol import StressBegin, StressPrepared, StressResult, StressTrial

ROWS = 200_000  # 25 MB; a trial ends when it has so many requests
_WARM_UP = 200
_NO_STAGES = (-1, -1, -1, -1)
_WORKER_DELAY = 6  # its place among the counters


class CollectorTime:
    """The CPU time of this thread in the garbage collector; a callback of `gc.callbacks`."""

    def __init__(self) -> None:
        self.total_ns = self._begin_ns = 0

    def __call__(self, phase: str, info: object) -> None:
        """Add the CPU time from a collection's start to its stop."""
        if phase == "start":
            self._begin_ns = time.thread_time_ns()
        else:
            self.total_ns += time.thread_time_ns() - self._begin_ns


def main() -> int:
    """Serve the parent's requests until it closes the pipe; return 0."""
    replies = os.dup(1)
    os.dup2(2, 1)
    pipe = MessagePipe(0, replies, RunnerJob | StressTrial | StressBegin)
    try:
        _serve(pipe)
    except (EOFError, BrokenPipeError):
        pass  # the parent has ended, or does not need this client any more
    except (NnfmqError, BenchmarkFailed, OSError, RuntimeError, ValueError) as error:
        pipe.send(RunnerFailed(" ".join(str(error).split()) or type(error).__name__))
    return 0


def _serve(pipe: MessagePipe) -> None:
    job = pipe.receive()
    assert isinstance(job, RunnerJob)
    inputs = [data.array() for data in job.inputs[0]]
    with opened(job, inputs) as runner:
        pipe.send(RunnerReady(runner.pids, runner.details))
        while True:
            trial = pipe.receive()
            assert isinstance(trial, StressTrial)
            pipe.send(run_stress(pipe, runner, inputs, trial))


def run_stress(pipe: MessagePipe, runner: OpenRunner, inputs: list[Array], trial: StressTrial) -> StressResult:
    """Prepare, then record requests in a closed loop from the parent's begin on. Blocks until the last one is done."""
    worker = runner.worker_pid
    assert worker is not None
    # A process with one CPU does not poll, which it decides when a burst is created: pin it afterwards.
    cpu_pinning.pin_process(0, trial.client_cpu)
    cpu_pinning.pin_process(worker, trial.worker_cpu)
    work = ApplicationWork(trial.work, Path(trial.folder))
    rows = np.full((ROWS, len(RequestRecord._fields)), -1, np.int64)  # written once: no faults later
    collector = CollectorTime()
    gc.callbacks.append(collector)
    try:
        for _ in range(_WARM_UP):
            runner.step(inputs)
        with RequestCounters(worker) as counters:
            pipe.send(StressPrepared())
            begin = pipe.receive()
            assert isinstance(begin, StressBegin)
            work.begin(begin.begin_ns)
            time.sleep(max(0, begin.begin_ns - time.monotonic_ns()) / 1e9)
            until_ns = begin.begin_ns + round(trial.seconds * 1e9)
            count = _record(runner, inputs, work, counters, collector, rows, until_ns)
    finally:
        gc.callbacks.remove(collector)
    return StressResult(rows[:count].tobytes())


def _record(
    runner: OpenRunner, inputs: list[Array], work: ApplicationWork, counters: RequestCounters,
    collector: CollectorTime, rows: np.ndarray[tuple[int, int], np.dtype[np.int64]], until_ns: int,
) -> int:  # fmt: skip
    """Write a row for each request, and return their number."""
    clock, stages, parts = time.monotonic_ns, runner.stages, _NO_STAGES
    for number in range(len(rows)):
        due = work.next_due(clock())
        before, delays_before = counters.read()
        collected, begin = collector.total_ns, clock()
        if begin >= until_ns:
            return number
        if due is not None:
            due()
        if stages is None:
            runner.step(inputs)
        else:
            parts = stages(inputs)
        latency = clock() - begin
        after, delays_after = counters.read()
        deltas = [late - early for early, late in zip(before, after, strict=True)]
        delay = max(late - early for early, late in zip(delays_before, delays_after, strict=True))
        deltas.insert(_WORKER_DELAY, max(0, delay))
        rows[number] = (begin, latency, *parts, *deltas, collector.total_ns - collected)
    return len(rows)


if __name__ == "__main__":
    sys.exit(main())
