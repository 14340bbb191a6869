"""The client processes of `nnfmq stress`, started and ended together, each with its worker in one driver."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from nnfmq.measure.runner_group import RunnerProcess
from nnfmq.measure.runner_protocol import RunnerJob
from nnfmq.stress.records import RequestRecord, to_records
from nnfmq.stress.stress_protocol import StressReply, StressResult, StressTrial

__all__ = ["StressClient", "started_clients"]

_READY_S = 600.0
_LONGER_S = 120.0  # than its load: disturbances stop processes, and limit their CPU time
Tick = Callable[[], object]


@dataclass(frozen=True, slots=True)
class StressClient:
    """A client process: its pid, that of its worker and that of the driver's supervisor, and the device's name."""

    process: RunnerProcess
    pid: int
    worker: int
    driver: int
    device: str

    def begin(self, trial: StressTrial) -> None:
        """Request a trial; `finish` returns its result."""
        self.process.send(trial)

    def finish(self, trial: StressTrial, tick: Tick) -> Sequence[RequestRecord]:
        """Return the requests of the trial that was begun last; blocks until it is done.

        Raises:
            BenchmarkFailed: If the client fails.
        """
        wait_s = max(0, trial.begin_ns - time.monotonic_ns()) / 1e9
        result = self.process.receive(wait_s + trial.seconds + _LONGER_S, tick)
        assert isinstance(result, StressResult)
        rows = np.frombuffer(result.rows, np.int64).reshape(-1, len(RequestRecord._fields))
        return to_records(rows)


@contextmanager
def started_clients(
    job: RunnerJob, count: int, environment: Mapping[str, str] | None = None, tick: Tick = lambda: None
) -> Iterator[list[StressClient]]:
    """Start clients that load the model one after the other; yield them when all have. At exit they end.

    Raises:
        BenchmarkFailed: If a client fails.
    """
    with ExitStack() as stack:
        clients, processes = [], []
        try:
            for _ in range(count):
                process = RunnerProcess(job.runner, "nnfmq.stress.client_process", StressReply, environment)
                stack.callback(process.end)
                processes.append(process)
                process.send(job)
                ready = process.receive(_READY_S, tick)
                pid, worker, driver = ready.pids
                clients.append(StressClient(process, pid, worker, driver, str(ready.details["device"])))
            yield clients
        except BaseException:
            for process in processes:
                process.kill()
            raise
