"""The runner processes of one candidate: one for each client, started and ended together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from nnfmq.lab.bench.runner import TRIAL_LIMIT_S
from nnfmq.lab.bench.runner_protocol import (
    BenchmarkFailed,
    Load,
    MessagePipe,
    Reply,
    RunnerFailed,
    RunnerJob,
    RunnerReady,
    RunnerUnavailable,
    Trial,
    TrialResult,
)
from nnfmq.lab.placement import memory_of, wait_until_idle

__all__ = ["LoadResult", "RunnerGroup", "RunnerProcess", "runner_environment", "started_group"]

Times = npt.NDArray[np.int64]
Tick = Callable[[], object]
_READY_S = 600.0
_END_S = 10.0
_LEAD_NS = 20_000_000  # from the request for a trial to its begin, so that all clients have received it


@dataclass(frozen=True, slots=True)
class LoadResult:
    """All clients' requests in one trial, in ns: intended and real start from the trial's begin, and latency.

    `unsent` requests of an open loop were not begun, because the backlog was too long. `wall_ns` is the time from the
    begin to the last client's end. `stages_ns` is empty if they were not measured.
    """

    intended: Times
    started: Times
    latencies: Times
    unsent: int
    wall_ns: int
    client_cpu_ns: int
    driver_cpu_ns: int
    stages_ns: list[float]


class RunnerProcess:
    """One runner process and the pipes to it: `python -m MODULE`, whose replies are of the types `replies`."""

    def __init__(
        self, name: str, module: str = "nnfmq.lab.bench.runner", replies: Any = Reply,
        environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._name = name
        # -P: it must not import modules from the working directory. A session: Ctrl-C interrupts only the parent.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
            env=runner_environment() | dict(environment or {}),
        )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        self._pipe = MessagePipe(self._process.stdout.fileno(), self._process.stdin.fileno(), replies)

    def send(self, message: Any) -> None:
        """Send a job or a trial."""
        try:
            self._pipe.send(message)
        except BrokenPipeError:
            pass  # `receive` reports why the process has ended

    def receive(self, timeout_s: float, tick: Tick) -> Any:
        """Return the reply.

        Raises:
            RunnerUnavailable: If the runner cannot run here.
            BenchmarkFailed: If it failed, has ended, or does not reply within `timeout_s`.
        """
        try:
            reply = self._pipe.receive(timeout_s, tick)
        except EOFError:
            status = self._process.wait()
            reason = f": a request took more than {TRIAL_LIMIT_S:g} s" if status == -signal.SIGALRM else ""
            raise BenchmarkFailed(
                f"{self._name}: its process ended with status {status} before a result{reason}"
            ) from None
        if isinstance(reply, RunnerFailed):
            if reply.is_unavailable:
                raise RunnerUnavailable(reply.message)
            raise BenchmarkFailed(f"{self._name}: {reply.message}")
        return reply

    def end(self) -> None:
        """Close the pipe; kill the process if it has not exited 10 s later."""
        self._close(self._process.stdin)
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        finally:
            self._close(self._process.stdout)

    def kill(self) -> None:
        """Kill the process; an embedded driver exits with it."""
        self._process.kill()

    @staticmethod
    def _close(file: Any) -> None:
        try:
            file.close()
        except BrokenPipeError:
            pass


def runner_environment() -> dict[str, str]:
    """Return the environment of a runner: one BLAS thread, since idle ones spin, and this copy of nnfmq."""
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    root = str(Path(__file__).parents[3])
    # The application's folders first: of an installed package, the root also has the other runtimes.
    path = os.pathsep.join([*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), root])
    return {**os.environ, **dict.fromkeys(names, "1"), "PYTHONPATH": path}


class RunnerGroup:
    """The clients of one candidate, each of which has loaded the model. `details` are those of the first."""

    def __init__(self, processes: Sequence[RunnerProcess], replies: Sequence[RunnerReady]) -> None:
        self._processes = processes
        self.pids = sorted({pid for reply in replies for pid in reply.pids})
        self.details = dict(replies[0].details)

    def run(self, load: Load, *, stages: int = 0, tick: Tick = lambda: None) -> LoadResult:
        """Run one trial with all clients together and return its times; blocks until it is done.

        Raises:
            BenchmarkFailed: If a client fails.
        """
        begin_ns, count = time.monotonic_ns() + _LEAD_NS, len(self._processes)
        for number, process in enumerate(self._processes):
            own = msgspec.structs.replace(load, client=number, clients=count, count=_share(load.count, number, count))
            process.send(Trial(begin_ns, own, stages))
        limit_s = load.seconds + 2 * TRIAL_LIMIT_S
        return _merged([process.receive(limit_s, tick) for process in self._processes])

    def wait_until_idle(self) -> None:
        """Return when no process of the group computes.

        Raises:
            BenchmarkFailed: If one still computes after 10 s.
        """
        wait_until_idle(self.pids)

    def pss_bytes(self) -> int:
        """Return the proportional set size of all processes of the group: clients, workers and driver."""
        return sum(memory.pss for pid in self.pids if (memory := memory_of(pid)) is not None)


def _share(count: int | None, number: int, clients: int) -> int | None:
    """Return how many of `count` requests the client with this number makes."""
    return None if count is None else len(range(number, count, clients))


def _merged(results: Sequence[TrialResult]) -> LoadResult:
    def joined(name: str) -> Times:
        return np.concatenate([np.frombuffer(getattr(result, name), np.int64) for result in results])

    order = np.argsort(joined("intended"), kind="stable")
    return LoadResult(
        joined("intended")[order],
        joined("started")[order],
        joined("latencies")[order],
        sum(result.unsent for result in results),
        max(result.wall_ns for result in results),
        sum(result.client_cpu_ns for result in results),
        sum(result.driver_cpu_ns for result in results),
        results[0].stages_ns,
    )


@contextmanager
def started_group(name: str, jobs: Sequence[RunnerJob], tick: Tick = lambda: None) -> Iterator[RunnerGroup]:
    """Start a process for each job, and yield them when all have loaded the model; at exit they are ended and reaped.

    The jobs load one after the other, because a preparation occupies CPUs. After an error the processes are killed.

    Raises:
        RunnerUnavailable: If the runner cannot run here.
        BenchmarkFailed: If a process fails.
    """
    with ExitStack() as stack:
        processes, replies = [], []
        try:
            for job in jobs:
                process = RunnerProcess(name)
                stack.callback(process.end)
                processes.append(process)
                process.send(job)
                replies.append(process.receive(_READY_S, tick))
            yield RunnerGroup(processes, replies)
        except BaseException:
            for process in processes:
                process.kill()
            raise
