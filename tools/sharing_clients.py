"""The clients of sharing_bench.py: each executes the model with one runtime, in its own process, when it is told to.

A *step* writes the input, executes the model and reads the output. All clients of a trial begin at the same time of the
monotonic clock, which the parent sends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from bench_processes import set_time_limit

import nnfmq
from nnfmq.hal.errors import MissedDeadline, NnfmqError
from nnfmq.hal.types import ExecutionPreference
from nnfmq.measure.failures import BenchmarkFailed, RunnerUnavailable
from nnfmq.measure.peers import PeerJob, opened_peer
from nnfmq.measure.steps import random_input

Step = Callable[[float | None], object]
"""Executes once; its argument is a timeout in seconds, which a runtime without deadlines ignores."""
_CONNECT_S = 60.0
_SUSTAINED = ExecutionPreference.SUSTAINED_SPEED  # machine code, without a baseline program that runs first
_WARM_UP = 5
_SEED = 7


@dataclass(frozen=True, slots=True)
class ClientJob:
    """A client's runtime, `nnfmq` or `LiteRT`, and its model; `socket` is the driver's. Sent to its process."""

    runtime: str
    model: Path
    socket: str
    limit_s: int


@dataclass(frozen=True, slots=True)
class Stream:
    """A trial: execute again and again from `begin_ns` for some seconds. The reply has the times of the steps in ns."""

    begin_ns: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Single:
    """A trial: execute once at `begin_ns`, with a timeout in seconds. The reply is the time in ns, None if missed."""

    begin_ns: int
    timeout_s: float | None


def client_main(connection: Connection, job: ClientJob) -> None:
    """Send the pid of the worker, None for LiteRT; then the reply to each trial that the parent sends. Entry point."""
    set_time_limit(job.limit_s)
    try:
        with _RUNTIMES[job.runtime](job) as (step, worker_pid), np.errstate(all="ignore"):
            for _ in range(_WARM_UP):
                step(None)
            connection.send(worker_pid)
            while True:
                set_time_limit(0)  # no limit while others compute; the connection closes when the benchmark ends
                trial = connection.recv()
                set_time_limit(job.limit_s)
                connection.send(_run(trial, step))
    except EOFError:
        pass
    except (NnfmqError, RunnerUnavailable, OSError) as error:
        connection.send(BenchmarkFailed(f"{job.runtime}: {type(error).__name__}: {error}"))
    finally:
        connection.close()


def _run(trial: Stream | Single, step: Step) -> Any:
    time.sleep(max(0, trial.begin_ns - time.monotonic_ns()) / 1e9)
    return _stream(trial, step) if isinstance(trial, Stream) else _single(trial, step)


def _stream(trial: Stream, step: Step) -> list[int]:
    clock, times = time.monotonic_ns, []
    end = trial.begin_ns + round(trial.seconds * 1e9)
    while (begin := clock()) < end:
        step(None)
        times.append(clock() - begin)
    return times


def _single(trial: Single, step: Step) -> int | None:
    try:
        step(trial.timeout_s)
    except MissedDeadline:
        return None
    return time.monotonic_ns() - trial.begin_ns


@contextmanager
def _nnfmq(job: ClientJob) -> Iterator[tuple[Step, int | None]]:
    """The device `compiled` of the driver, over a burst; arrays are written to and read from its memory."""
    with (
        nnfmq.connect(job.socket, timeout=_CONNECT_S) as client,
        client.device("compiled").prepare(
            nnfmq.load(job.model), preference=_SUSTAINED, timeout=job.limit_s
        ) as prepared,
        prepared.burst() as burst,
    ):
        random = np.random.default_rng(_SEED)
        inputs = [random_input(info, random) for info in prepared.inputs]
        writes, outputs = list(zip(burst.inputs, inputs, strict=True)), burst.outputs

        def step(timeout_s: float | None) -> object:
            for buffer, array in writes:
                buffer[...] = array
            burst.execute(out=outputs, timeout=timeout_s)
            return [array.copy() for array in outputs]

        yield step, client.worker_pid


@contextmanager
def _litert(job: ClientJob) -> Iterator[tuple[Step, int | None]]:
    """LiteRT with its default delegate, XNNPACK, and one thread, as each of many processes should have."""
    model, random = nnfmq.load(job.model), np.random.default_rng(_SEED)
    inputs = [random_input(info, random) for info in model.inputs]
    with opened_peer("LiteRT", PeerJob(job.model, model, 1)) as runner:
        (execute,) = runner.variants.values()
        yield lambda _timeout_s: execute(inputs), None


_RUNTIMES: dict[str, Callable[[ClientJob], Any]] = {"nnfmq": _nnfmq, "LiteRT": _litert}
