"""Deaths beside the measured clients: neighbours, which are other clients of the driver, and workers are killed.

A neighbour executes the model again and again from 20 ms before the kill on. When the client is killed, the time counts
until its worker has exited, and with it everything that the driver had for the client. When the worker is killed, the
time counts until the client's execution has raised DeadObject.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from nnfmq.hal.errors import DeadObject
from nnfmq.lab.bench.runner import READY_S, RunnerJob, opened
from nnfmq.lab.bench.steps import Array, Step
from nnfmq.lab.child_processes import BenchmarkFailed, FunctionProcess, RunnerUnavailable, started_child
from nnfmq.lab.suite.clients import QUIET

__all__ = ["DeathTimes", "Neighbours", "deaths_in", "started_neighbours"]

_EVERY_S = 6.0  # a client and a worker
_DEATHS_MAX = 8  # of each
_EXECUTING_S = 0.02
_SEEN_S = 10.0


def deaths_in(seconds: float) -> int:
    """Return how many clients, and how many workers, are killed in a load of so many seconds."""
    return max(1, min(_DEATHS_MAX, int(seconds / _EVERY_S)))


@dataclass(slots=True)
class DeathTimes:
    """Times from a death until the other side has seen it, in ns: of killed clients, and of killed workers."""

    client: list[int] = field(default_factory=list)
    worker: list[int] = field(default_factory=list)


class Neighbours:
    """Clients that wait to be killed: `kill_due` kills one, or its worker, when its time has come."""

    def __init__(self, clients: list[tuple[FunctionProcess, int]]) -> None:
        """`clients` are their processes with the pids of their workers; only the worker of the last one is killed."""
        self.times = DeathTimes()
        self._clients = clients
        self._due: list[int] = []

    def begin(self, begin_ns: int, seconds: float) -> None:
        """Distribute the deaths over a load: clients and workers in turn."""
        count = 2 * (len(self._clients) - 1)
        self._due = [begin_ns + round(seconds * 1e9 * (number + 0.5) / count) for number in range(count)]

    def kill_due(self) -> None:
        """Kill the next client or worker if it is time; blocks until the other side has seen it.

        Raises:
            BenchmarkFailed: If the other side does not see it within 10 s.
            RunnerUnavailable: If this user cannot kill the worker.
        """
        if self._due and time.monotonic_ns() >= self._due[0]:
            self._due.pop(0)
            if len(self._due) % 2:
                self.times.client.append(_kill_client(*self._clients.pop(0)))
            else:
                self.times.worker.append(self._kill_worker())

    def _kill_worker(self) -> int:
        """Kill the worker of the last neighbour; return the time until its client, which then gets another, saw it."""
        process, worker = self._clients.pop()
        self._clients.append((process, 0))  # the next one is known when it connected again
        worker = worker or process.receive(READY_S)
        _let_execute(process)
        killed_ns = time.monotonic_ns()
        try:
            os.kill(worker, signal.SIGKILL)
        except (PermissionError, ProcessLookupError) as error:
            raise RunnerUnavailable(f"worker {worker} of the driver cannot be killed: {error.strerror}") from None
        noticed_ns: int = process.receive(_SEEN_S)
        return noticed_ns - killed_ns


def _let_execute(process: FunctionProcess) -> None:
    process.send("execute")
    process.receive(READY_S)
    time.sleep(_EXECUTING_S)


def _kill_client(process: FunctionProcess, worker: int) -> int:
    """Kill a neighbour; return the time until its worker has exited."""
    try:
        pidfd = os.pidfd_open(worker)
    except ProcessLookupError:
        raise RunnerUnavailable(f"worker {worker} of the driver cannot be watched from here") from None
    try:
        _let_execute(process)
        killed_ns = time.monotonic_ns()
        process.kill()
        if not select.select([pidfd], [], [], _SEEN_S)[0]:
            raise BenchmarkFailed(f"worker {worker} of a killed client still runs after {_SEEN_S:g} s")
        return time.monotonic_ns() - killed_ns
    finally:
        os.close(pidfd)


@contextmanager
def started_neighbours(job: RunnerJob, count: int, tick: Callable[[], object]) -> Iterator[Neighbours]:
    """Start `count` clients to be killed, and one whose workers are; yield them when all have loaded the model.

    At exit they end. With a count of 0 there is none.

    Raises:
        BenchmarkFailed: If one fails.
    """
    with ExitStack() as stack:
        started = [
            started_child(_serve, job, name="a neighbour", environment=QUIET) for _ in range(count + 1 if count else 0)
        ]
        processes = [stack.enter_context(each) for each in started]
        yield Neighbours([(process, process.receive(READY_S, tick)) for process in processes])


# ----------------------------------------------------------------------------------------------------------------------
# The neighbour's side.


def _serve(connection: Any, job: RunnerJob) -> None:
    while True:
        with opened(job) as runner:
            connection.send(runner.worker_pid)
            connection.recv()
            connection.send("executing")
            connection.send(_death_ns(runner.step, job.inputs[0]))


def _death_ns(step: Step, inputs: Sequence[Array]) -> int:
    """Execute again and again; return the time at which an execution found that the worker has died."""
    try:
        while True:
            step(inputs)
    except DeadObject:
        return time.monotonic_ns()
