"""The measured clients of the suite: processes that execute requests at their intended starts.

A client executes the model as a runner of `nnfmq bench` does, or calls a function of the user. Its outputs are compared
with its first ones between two requests, so that this is not part of their latency.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nnfmq.base import settings
from nnfmq.client.connection.client import Client
from nnfmq.client.connection.connect import connect
from nnfmq.lab.bench.loops import intended_starts, open_loop
from nnfmq.lab.bench.runner import BACKLOG_S, READY_S, TRIAL_LIMIT_S, Load, RunnerJob, Trial, opened
from nnfmq.lab.bench.steps import Array
from nnfmq.lab.child_processes import BenchmarkFailed, FunctionProcess, started_child

__all__ = [
    "QUIET",
    "OutputComparison",
    "OwnClient",
    "SuiteClients",
    "SuiteJob",
    "SuiteRequests",
    "started_suite_clients",
]

Tick = Callable[[], object]
Times = npt.NDArray[np.int64]
OwnStep = Callable[[Sequence[Array]], Any]
OwnClient = Callable[[Client, Path], OwnStep]
"""Gets a client of the driver and the model's path; returns the function that is called for each request.

That gets the inputs, and returns outputs (arrays in a sequence or a dict, or one array), which are compared with its
first ones, or None. May be a closure.
"""
Details = dict[str, str | int | float]
QUIET = {settings.COMPILE_NOTICE.variable: "0"}
"""Variables of clients that write nothing to stderr while a model is compiled for them."""
_WARM_UP_NS = 500_000_000
_STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class SuiteJob:
    """The work of the clients: `runner` as in `nnfmq bench`, or a function of the user.

    `is_compared` is False for a model with states, whose outputs depend on earlier requests. The clients ask the driver
    for `client_class`, unless it is None.
    """

    runner: RunnerJob
    own: OwnClient | None = None
    is_compared: bool = True
    client_class: str | None = None


@dataclass(frozen=True, slots=True)
class SuiteRequests:
    """The requests of one client or of all, in the order of their intended starts.

    Attributes:
        intended: The intended starts, in ns from the begin of the load.
        latencies: From the intended start, in ns; of an unsent request how long it has waited.
        unsent: The number of requests that had become due, but were not begun, because earlier ones took too long.
        wrong: The number of outputs that differ from the first ones; None: they are not compared.
    """

    intended: Times
    latencies: Times
    unsent: int
    wrong: int | None


class SuiteClients:
    """Measured clients, each of which has loaded the model.

    Attributes:
        pids: Of the clients and their workers.
        driver_pid: Of the driver.
        details: Facts about the first one's model, such as the device's name.
    """

    def __init__(self, processes: Sequence[FunctionProcess], runners: Sequence[tuple[list[int], Details]]) -> None:
        self._processes = processes
        self._found: dict[int, SuiteRequests] = {}
        self.pids = sorted(pid for (client, worker, _), _ in runners for pid in (client, worker))
        ((_, _, self.driver_pid), details), *_ = runners
        self.details = dict(details)

    def begin(self, load: Load, begin_ns: int) -> None:
        """Begin the load, which all clients share, at this time on the monotonic clock."""
        count = len(self._processes)
        for number, process in enumerate(self._processes):
            process.send(Trial(begin_ns, replace(load, client=number, clients=count)))

    def finish(self, seconds: float, tick: Tick) -> SuiteRequests:
        """Return the requests of the load, which takes `seconds`; blocks until the last one is done.

        Raises:
            BenchmarkFailed: If a client fails.
        """
        return self._results(seconds + BACKLOG_S + TRIAL_LIMIT_S, tick)

    def stop(self) -> SuiteRequests:
        """End the load, and return its requests until now. A request that has begun is finished; blocks until then.

        Raises:
            BenchmarkFailed: If a client fails, or does not stop within 10 s.
        """
        for process in self._processes:
            process.send(None)
        return self._results(_STOP_S, lambda: None)

    def _results(self, limit_s: float, tick: Tick) -> SuiteRequests:
        for number, process in enumerate(self._processes):
            if number not in self._found:
                self._found[number] = process.receive(limit_s, tick)
        return _merged(list(self._found.values()))


def _merged(parts: Sequence[SuiteRequests]) -> SuiteRequests:
    intended = np.concatenate([part.intended for part in parts])
    latencies = np.concatenate([part.latencies for part in parts])
    order = np.argsort(intended, kind="stable")
    wrong = [part.wrong for part in parts if part.wrong is not None]
    return SuiteRequests(
        intended[order], latencies[order], sum(part.unsent for part in parts), sum(wrong) if wrong else None
    )


@contextmanager
def started_suite_clients(job: SuiteJob, count: int, tick: Tick = lambda: None) -> Iterator[SuiteClients]:
    """Start clients that load the model one after the other; yield them when all have. At exit they end.

    Raises:
        BenchmarkFailed: If a client fails.
    """
    variables = QUIET if job.client_class is None else QUIET | {settings.CLIENT_CLASS.variable: job.client_class}
    with ExitStack() as stack:
        processes, runners = [], []
        for _ in range(count):
            child = started_child(_serve, job, name="a measured client", environment=variables)
            processes.append(stack.enter_context(child))
            runners.append(processes[-1].receive(READY_S, tick))
        yield SuiteClients(processes, runners)


# ----------------------------------------------------------------------------------------------------------------------
# The client's side.


class _OpenClient(NamedTuple):
    step: OwnStep
    pids: list[int]
    details: Details


def _serve(connection: Any, job: SuiteJob) -> None:
    with _opened(job) as runner, np.errstate(all="ignore"):
        comparison = OutputComparison(runner.step, job.runner.inputs[0], is_compared=job.is_compared)
        comparison.warm_up(time.monotonic_ns() + _WARM_UP_NS)
        connection.send((runner.pids, runner.details))
        connection.send(_requests_of(connection, comparison, connection.recv()))
        connection.recv()  # nothing comes: until the end


@contextmanager
def _opened(job: SuiteJob) -> Iterator[_OpenClient]:
    if job.own is None:
        with opened(job.runner) as runner:
            yield _OpenClient(runner.step, runner.pids, runner.details)
        return
    with connect(job.runner.connect, recover=False) as client:
        step = _reporting(job.own)(client, job.runner.model)
        if not callable(step):
            raise BenchmarkFailed(f"the client function returned {step!r}, not a function to call for each request")
        yield _OpenClient(_reporting(step), [os.getpid(), client.worker_pid, client.driver_pid], {})


def _reporting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of the user whose exceptions are printed with their traceback, and reported to the parent."""

    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:
            traceback.print_exc()
            raise BenchmarkFailed(f"the client function raised {type(error).__name__}: {error}") from error

    return call


class OutputComparison:
    """Executes requests, and compares their outputs with the first ones between requests."""

    def __init__(self, step: OwnStep, inputs: Sequence[Array], *, is_compared: bool) -> None:
        self._step = step
        self._inputs = inputs
        self._last: Sequence[Array] | None = None
        first = step(inputs)
        self._expected = None if first is None or not is_compared else [np.array(output) for output in _arrays(first)]
        self._wrong = 0

    @property
    def wrong(self) -> int | None:
        """The number of outputs that differed; None: they are not compared."""
        return None if self._expected is None else self._wrong

    def warm_up(self, until_ns: int) -> None:
        """Execute requests until this time on the monotonic clock; their outputs are not compared."""
        while time.monotonic_ns() < until_ns:
            self._step(self._inputs)

    def step(self, inputs: Sequence[Array]) -> None:
        """Execute a request."""
        self._last = self._step(inputs)

    def inputs(self, is_stopped: Callable[[], bool]) -> Iterator[Sequence[Array]]:
        """Yield the inputs of one request after the other until `is_stopped`, and compare the outputs in between."""
        while not is_stopped():
            yield self._inputs
            self._compare()

    def finish(self) -> None:
        """Compare the outputs of the last request."""
        self._compare()

    def _compare(self) -> None:
        last, self._last = self._last, None
        if self._expected is None or last is None:
            return
        outputs = _arrays(last)
        is_equal = len(outputs) == len(self._expected) and all(map(_is_same, outputs, self._expected))
        self._wrong += not is_equal


def _arrays(outputs: Any) -> Sequence[Any]:
    """Return outputs of a function of the user as a sequence: it may return one array, or a dict of them."""
    if isinstance(outputs, Mapping):
        return list(outputs.values())
    return outputs if isinstance(outputs, Sequence) else [outputs]


def _is_same(output: Array, expected: Array) -> bool:
    found = np.asarray(output)
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    return bool(np.array_equal(found, expected)) or found.tobytes() == expected.tobytes()  # NaN is not equal to itself


def _requests_of(connection: Any, comparison: OutputComparison, trial: Trial) -> SuiteRequests:
    """Execute a request at each intended start, until the parent sends something; return all that have become due."""
    load, begin_ns = trial.load, trial.begin_ns
    assert load.rate is not None
    due = begin_ns + intended_starts(
        load.rate, load.seconds, load.distribution, load.client, load.clients, load.seed
    )  # fmt: skip
    until_ns = begin_ns + round((load.seconds + BACKLOG_S) * 1e9)
    time.sleep(max(0, begin_ns - time.monotonic_ns()) / 1e9)
    times = open_loop(comparison.step, comparison.inputs(connection.poll), due.tolist(), until_ns)
    end_ns = time.monotonic_ns()
    comparison.finish()
    done = len(times.latencies)
    waiting = due[done : np.searchsorted(due, end_ns)]
    latencies = np.concatenate([np.array(times.latencies, np.int64), end_ns - waiting])
    return SuiteRequests(due[: latencies.size] - begin_ns, latencies, waiting.size, comparison.wrong)
