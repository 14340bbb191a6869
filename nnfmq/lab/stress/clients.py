"""The client processes of `nnfmq stress`, started and ended together, each with its worker in one driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import numpy as np

from nnfmq.lab.bench.runner_group import RunnerProcess
from nnfmq.lab.bench.runner_protocol import RunnerFailed, RunnerJob, RunnerReady
from nnfmq.lab.stress.records import RequestRecord, to_records

__all__ = [
    "StressBegin",
    "StressClient",
    "StressPrepared",
    "StressReply",
    "StressResult",
    "StressTrial",
    "started_clients",
]


# ----------------------------------------------------------------------------------------------------------------------
# Messages between `nnfmq stress` and its client processes, beside those of `measure.runner_protocol`.


class StressTrial(msgspec.Struct, tag=True):
    """A request to prepare for `seconds` of load on the given CPUs (None: any); the reply is StressPrepared.

    `work` is what the application does within some of its requests: time after the begin in ns, and a name of
    `application_work.WORK`. Files for it are made in `folder`.
    """

    seconds: float
    client_cpu: int | None
    worker_cpu: int | None
    work: list[tuple[int, str]]
    folder: str


class StressPrepared(msgspec.Struct, tag=True):
    """The client waits for StressBegin."""


class StressBegin(msgspec.Struct, tag=True):
    """The begin of the load on the monotonic clock, in ns; the reply is StressResult."""

    begin_ns: int


class StressResult(msgspec.Struct, tag=True):
    """The requests, as int64 rows of RequestRecord."""

    rows: bytes


StressReply: TypeAlias = RunnerReady | StressPrepared | StressResult | RunnerFailed


# ----------------------------------------------------------------------------------------------------------------------
# The client processes of `nnfmq stress`, started and ended together, each with its worker in one driver.


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

    def prepare(self, trial: StressTrial, tick: Tick) -> None:
        """Let the client prepare for a trial; blocks until it has.

        Raises:
            BenchmarkFailed: If the client fails.
        """
        self.process.send(trial)
        self.process.receive(_LONGER_S, tick)

    def begin(self, begin_ns: int) -> None:
        """Begin the trial at this time; `finish` returns its requests."""
        self.process.send(StressBegin(begin_ns))

    def finish(self, seconds: float, tick: Tick) -> Sequence[RequestRecord]:
        """Return the requests of the trial that was begun last, which takes `seconds`; blocks until it is done.

        Raises:
            BenchmarkFailed: If the client fails.
        """
        result = self.process.receive(seconds + _LONGER_S, tick)
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
                process = RunnerProcess(job.runner, "nnfmq.lab.stress.recording_client", StressReply, environment)
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
