"""Types and the forked server process that all candidates of queue_bench.py use in their child process.

The server is pinned before it starts, reports over its own connection that it is ready, and is reaped. It is killed
when the candidate is done, when the process that forked it exits, or at its time limit.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench_processes import end_process, set_time_limit

from nnfmq import settings
from nnfmq.hal.errors import NnfmqError
from nnfmq.measure import cpu_pinning
from nnfmq.measure.failures import BenchmarkFailed

DEFAULT_NS = settings.BURST_SERVER_POLLING_WINDOW.default * 1000
POLLING_NS = 100_000_000
_PR_SET_PDEATHSIG = 1
Serve = Callable[[Callable[[], None], Connection], None]
"""A server's loop; arguments: a function to call when it is ready, and the connection to the client."""


@dataclass(frozen=True, slots=True)
class RoundJob:
    """One round of one candidate; sent to the child process."""

    candidate: str
    count: int
    warm_up: int
    cpus: cpu_pinning.Cpus
    folder: Path
    limit_s: int
    window_ns: int = DEFAULT_NS
    work_ns: int = 0
    think_ns: int = 0
    idle_s: float = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """The measurements of one round: times of round trips in ns, and other metrics by name."""

    times_ns: list[int] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


@contextmanager
def forked(job: RoundJob, cpu: int | None, serve: Serve) -> Iterator[Any]:
    """Fork a process that is pinned to `cpu` and runs `serve`; yield it and its connection as soon as it is ready.

    Raises:
        BenchmarkFailed: If it is not ready within the job's limit, or fails.
    """
    context = multiprocessing.get_context("fork")
    subject, baseline = context.Pipe()
    process = context.Process(target=_serve, args=(baseline, job.limit_s, cpu, os.getpid(), serve))
    process.start()
    baseline.close()
    try:
        if not subject.poll(job.limit_s):
            raise BenchmarkFailed(f"the server of {job.candidate} was not ready within {job.limit_s} seconds")
        receive_report(subject, job.candidate)
        yield process, subject
    finally:
        process.kill()
        end_process(process, subject)


def _serve(results: Connection, limit_s: int, cpu: int | None, parent: int, serve: Serve) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    set_time_limit(limit_s)
    if os.getppid() != parent:
        return
    cpu_pinning.pin_process(0, cpu)
    try:
        serve(lambda: results.send(None), results)
    except (NnfmqError, ImportError, OSError) as error:
        results.send(BenchmarkFailed(f"{type(error).__name__}: {error}"))


def receive_report(results: Connection, candidate: str) -> Any:
    """Return the object that the server sends.

    Raises:
        BenchmarkFailed: If the server exited.
        Exception: The exception that the server sent.
    """
    try:
        report = results.recv()
    except EOFError:
        raise BenchmarkFailed(f"the server of {candidate} ended") from None
    if isinstance(report, Exception):
        raise report
    return report
