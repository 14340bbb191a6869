"""A client process of `nnfmq stress`: loads a model as a runner of `nnfmq bench` does, then records requests.

The counters are read between requests, not within their time. That takes some 20 µs, so there are fewer requests than
in `nnfmq bench`, and caches are a little colder.
"""

from __future__ import annotations

import gc
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from nnfmq.hal.errors import NnfmqError
from nnfmq.lab import placement
from nnfmq.lab.bench.runner import OpenRunner, opened
from nnfmq.lab.bench.runner_protocol import BenchmarkFailed, MessagePipe, RunnerFailed, RunnerJob, RunnerReady
from nnfmq.lab.bench.steps import Array
from nnfmq.lab.stress.clients import StressBegin, StressPrepared, StressResult, StressTrial
from nnfmq.lab.stress.counters import RequestCounters
from nnfmq.lab.stress.records import RequestRecord

__all__ = ["WORK", "ApplicationWork", "CollectorTime", "can_reclaim", "main", "run_stress"]


# ----------------------------------------------------------------------------------------------------------------------
# What an application may do within a request beside the execution, and what makes the request slow.
#
# `gc`: a full garbage collection with many objects. `page-faults`: a new array for a frame of 33 MiB. `memory`: a read
# of a mapped file, whose pages the kernel was told to reclaim before the request (MADV_PAGEOUT), as it does when memory
# is scarce.


_MADV_RANDOM, _MADV_PAGEOUT = 1, 21  # mmap.MADV_PAGEOUT is not in CPython 3.11
_OBJECTS = 300_000
_FRAME_BYTES = 33 << 20  # more than 32 MiB: malloc then maps and unmaps it each time
_FILE_BYTES, _STRIDE = 16 << 20, 1 << 16
_PAGE = 4096


class _WorkKind(Protocol):
    def prepare(self) -> None:
        """Do what is not part of the request."""

    def work(self) -> None:
        """Do what is part of the request."""


class _Collection:
    def __init__(self, folder: Path) -> None:
        self._objects: list[list[int]] = [[number] for number in range(_OBJECTS)]

    def prepare(self) -> None:
        pass

    def work(self) -> None:
        gc.collect()


class _NewFrame:
    def __init__(self, folder: Path) -> None:
        pass

    def prepare(self) -> None:
        pass

    def work(self) -> None:
        np.empty(_FRAME_BYTES, np.uint8)[::_PAGE] = 1


class _MappedFile:
    def __init__(self, folder: Path) -> None:
        path = folder / f"mapped-{os.getpid()}"
        with path.open("wb") as file:
            file.write(os.urandom(_FILE_BYTES))
            os.fsync(file.fileno())  # dirty pages would not be reclaimed
        pages: Any = np.memmap(path, np.uint8, "r")
        path.unlink()
        pages._mmap.madvise(_MADV_RANDOM)
        self._pages = pages

    def prepare(self) -> None:
        self._pages._mmap.madvise(_MADV_PAGEOUT)

    def work(self) -> None:
        self._pages[::_STRIDE].sum()


WORK: dict[str, Callable[[Path], _WorkKind]] = {"gc": _Collection, "page-faults": _NewFrame, "memory": _MappedFile}
"""By the names of the causes."""


class _Due(NamedTuple):
    time_ns: int
    kind: _WorkKind


class ApplicationWork:
    """The work of one trial: `schedule` has times after its begin, in ns, and names of `WORK`."""

    def __init__(self, schedule: Sequence[tuple[int, str]], folder: Path) -> None:
        kinds = {name: WORK[name](folder) for name in sorted({name for _, name in schedule})}
        self._due = [_Due(time_ns, kinds[name]) for time_ns, name in sorted(schedule, reverse=True)]
        self._begin_ns = 0

    def begin(self, begin_ns: int) -> None:
        """Set the begin of the trial."""
        self._begin_ns = begin_ns

    def next_due(self, now_ns: int) -> Callable[[], None] | None:
        """Return what the next request has to do, or None. Prepares it, which is not part of the request."""
        if not self._due or self._due[-1].time_ns > now_ns - self._begin_ns:
            return None
        kind = self._due.pop().kind
        kind.prepare()
        return kind.work


def can_reclaim(folder: Path) -> bool:
    """Return True if the kernel reclaims mapped pages of a file in `folder` when told to; not on tmpfs."""
    file = _MappedFile(folder)
    for _ in range(2):  # pages that were never mapped are not reclaimed the first time
        file.work()
        file.prepare()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    file.work()
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt > before


# ----------------------------------------------------------------------------------------------------------------------
# A client process of `nnfmq stress`: loads a model as a runner of `nnfmq bench` does, then records requests.


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
    placement.pin_process(0, trial.client_cpu)
    placement.pin_process(worker, trial.worker_cpu)
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
