"""Child processes of the benchmarks: started together, each reports over a pipe, and all are gone afterwards.

Used by latency_stress.py, queue_bench.py and model_bench.py. A child sets its own alarm, so that nothing waits without
limit; the parent waits a little longer than that. What a child reports is its result, or the exception that says why
there is none.
"""

from __future__ import annotations

import multiprocessing
import platform
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ProcessEntry = tuple[Callable[..., None], tuple[Any, ...]]
"""What a process runs, and its arguments after where it reports."""


class BenchmarkFailed(Exception):
    """A child process reported an error, or ended without a word."""


@contextmanager
def started_processes(entries: Sequence[ProcessEntry], *, duplex: bool = False) -> Iterator[list[Connection]]:
    """Start a process for each target; yields where each one reports; afterwards all are gone.

    `duplex`: they are told something over the same connection, too.
    """
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        connections = []
        for function, arguments in entries:
            parent_end, child_end = context.Pipe(duplex)
            process = context.Process(target=function, args=(child_end, *arguments))
            process.start()
            stack.callback(end_process, process, parent_end)
            child_end.close()
            connections.append(parent_end)
        yield connections


def set_time_limit(seconds: int) -> None:
    """End the calling process with SIGALRM after `seconds`; 0 cancels that."""
    signal.setitimer(signal.ITIMER_REAL, seconds)


def end_process(process: multiprocessing.process.BaseProcess, connection: Connection, timeout_s: float = 10) -> None:
    """Close the connection, give the process `patience_s` to end by itself, then kill it; it is reaped."""
    connection.close()
    process.join(timeout_s)
    if process.is_alive():
        process.kill()
        process.join()
    process.close()


def receive_result(connection: Connection, limit_s: int) -> Any:
    """Return what a child reports, within its limit and a little more. Raises what it reports, or Failed."""
    if not connection.poll(limit_s + 5):
        raise BenchmarkFailed(f"a child process gave no answer for {limit_s} seconds")
    try:
        result = connection.recv()
    except EOFError:
        raise BenchmarkFailed(
            f"a child process ended without an answer (its limit is {limit_s} seconds: --limit)"
        ) from None
    if isinstance(result, Exception):
        raise result
    return result


def package_version(name: str) -> str | None:
    """Return the version of an installed package, None where there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def cpu_model() -> str:
    """Return the processor's name, or the machine's type where the kernel does not tell."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
