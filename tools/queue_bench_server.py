"""What the parties of queue_bench.py share in their child process: the job, its sample, and a forked server.

The server is pinned before it begins, says when it is ready, and reports over a connection of its own; it dies with the
process that forked it, by its own alarm, or when the party is done, and is reaped.
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

import cpu_pinning
from bench_processes import BenchmarkFailed, end_process, set_time_limit

from nnfmq.hal.errors import NnfmqError
from nnfmq.queue.hybrid_polling import DEFAULT_WINDOW_US

DEFAULT_NS = DEFAULT_WINDOW_US * 1000
POLLING_NS = 100_000_000
_PR_SET_PDEATHSIG = 1
Serve = Callable[[Callable[[], None], Connection], None]
"""A server's loop: told how to say that it is ready, and where it may report more."""


@dataclass(frozen=True, slots=True)
class RoundJob:
    """One round of one party; sent to the child process."""

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
    """What a round measured."""

    times_ns: list[int] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


@contextmanager
def forked(job: RoundJob, cpu: int | None, serve: Serve) -> Iterator[Any]:
    """Run `serve` in a process of its own on `cpu`; yields its process and connection once it is ready."""
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
    """Return what the server reports. Raises what it raised, or Failed."""
    try:
        report = results.recv()
    except EOFError:
        raise BenchmarkFailed(f"the server of {candidate} ended") from None
    if isinstance(report, Exception):
        raise report
    return report
