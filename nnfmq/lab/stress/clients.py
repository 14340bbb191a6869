"""Client processes of `nnfmq stress`: each loads a model as a runner of `nnfmq bench` does, then records requests.

They are started and ended together, each with its worker in one driver. The counters are read between requests, not
within their time. That takes some 20 µs, so there are fewer requests than in `nnfmq bench`, and caches are a little
colder.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nnfmq.base.processes import set_name
from nnfmq.lab import placement
from nnfmq.lab.bench.loops import wait_until
from nnfmq.lab.bench.runner import READY_S, OpenRunner, RunnerJob, opened
from nnfmq.lab.bench.steps import Array
from nnfmq.lab.child_processes import FunctionProcess, started_child
from nnfmq.lab.placement import Cpus
from nnfmq.lab.stress.counters import RequestCounters
from nnfmq.lab.stress.disturbances import ApplicationWork
from nnfmq.lab.stress.records import RequestRecord, to_records

__all__ = ["CollectorTime", "StressClient", "StressTrial", "started_clients"]

Tick = Callable[[], object]
_LONGER_S = 120.0  # than its load: disturbances stop processes, and limit their CPU time


@dataclass(frozen=True, slots=True)
class StressTrial:
    """The work of a client in a trial: `seconds` of load on the given CPUs, and work within some of its requests.

    `work` is what the application does: time after the begin in ns, and a name of `disturbances.WORK`. Files for it are
    made in `folder`. `starts` are the intended starts of an open loop in ns after the begin; None: a closed loop.
    """

    seconds: float
    cpus: Cpus
    work: Sequence[tuple[int, str]]
    folder: Path
    starts: npt.NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True)
class StressClient:
    """A client process: its pid, that of its worker and that of the driver's supervisor, and the device's name."""

    process: FunctionProcess
    pid: int
    worker: int
    driver: int
    device: str

    def prepare(self, trial: StressTrial, tick: Tick) -> None:
        """Let the client prepare for a trial; blocks until it has.

        Raises:
            BenchmarkFailed: If the client fails.
        """
        self.process.send(trial)
        self.process.receive(_LONGER_S, tick)

    def begin(self, begin_ns: int) -> None:
        """Begin the trial at this time on the monotonic clock; `finish` returns its requests."""
        self.process.send(begin_ns)

    def finish(self, seconds: float, tick: Tick) -> Sequence[RequestRecord]:
        """Return the requests of the trial that was begun last, which takes `seconds`; blocks until it is done.

        Raises:
            BenchmarkFailed: If the client fails.
        """
        return to_records(self.process.receive(seconds + _LONGER_S, tick))


@contextmanager
def started_clients(
    job: RunnerJob, count: int, environment: Mapping[str, str] | None = None, tick: Tick = lambda: None
) -> Iterator[list[StressClient]]:
    """Start clients that load the model one after the other; yield them when all have. At exit they end.

    Raises:
        BenchmarkFailed: If a client fails.
    """
    with ExitStack() as stack:
        clients = []
        for _ in range(count):
            process = stack.enter_context(started_child(_serve, job, name=job.runner, environment=environment or {}))
            (pid, worker, driver), details = process.receive(READY_S, tick)
            clients.append(StressClient(process, pid, worker, driver, str(details["device"])))
        yield clients


# ----------------------------------------------------------------------------------------------------------------------
# The client's side.


ROWS = 200_000  # 25 MB; a trial ends when it has so many requests
_WARM_UP = 200
_NO_STAGES = (-1, -1, -1, -1)
_WORKER_DELAY = 6  # its place among the counters
_COUNTERS_NS = 100_000  # before a request of an open loop: the counters are read


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


def _serve(connection: Any, job: RunnerJob) -> None:
    set_name("nnfmq-client")
    with opened(job) as runner:
        connection.send((runner.pids, runner.details))
        while True:
            connection.send(_requests_of(connection, runner, job.inputs[0], connection.recv()))


def _requests_of(
    connection: Any, runner: OpenRunner, inputs: Sequence[Array], trial: StressTrial
) -> npt.NDArray[np.int64]:
    """Prepare, then record requests from the parent's begin on; return a row for each.

    Blocks until the last one is done.
    """
    worker = runner.worker_pid
    assert worker is not None
    # A process with one CPU does not poll, which it decides when a burst is created: pin it afterwards.
    placement.pin_process(0, trial.cpus.client)
    placement.pin_process(worker, trial.cpus.driver)
    work = ApplicationWork(trial.work, trial.folder)
    rows = np.full((ROWS, len(RequestRecord._fields)), -1, np.int64)  # written once: no faults later
    collector = CollectorTime()
    gc.callbacks.append(collector)
    try:
        for _ in range(_WARM_UP):
            runner.step(inputs)
        with RequestCounters(worker) as counters:
            connection.send("prepared")
            begin_ns = connection.recv()
            work.begin(begin_ns)
            time.sleep(max(0, begin_ns - time.monotonic_ns()) / 1e9)
            until_ns = begin_ns + round(trial.seconds * 1e9)
            starts = None if trial.starts is None else (trial.starts + begin_ns).tolist()
            count = _record(runner, inputs, work, counters, collector, rows, until_ns, starts)
    finally:
        gc.callbacks.remove(collector)
    return rows[:count]


def _record(
    runner: OpenRunner, inputs: Sequence[Array], work: ApplicationWork, counters: RequestCounters,
    collector: CollectorTime, rows: npt.NDArray[np.int64], until_ns: int, starts: list[int] | None,
) -> int:  # fmt: skip
    """Write a row for each request, and return their number."""
    clock, stages, parts = time.monotonic_ns, runner.stages, _NO_STAGES
    for number in range(len(rows) if starts is None else min(len(rows), len(starts))):
        if starts is not None:
            wait_until(starts[number] - _COUNTERS_NS)
        due = work.next_due(clock())
        before, delays_before = counters.read()
        collected, sent = collector.total_ns, clock() if starts is None else wait_until(starts[number])
        begin = sent if starts is None else min(sent, starts[number])
        if sent >= until_ns:
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
        rows[number] = (begin, latency, *parts, *deltas, collector.total_ns - collected, sent - begin)
    return len(rows) if starts is None else min(len(rows), len(starts))
