"""Child processes of the benchmarks: started together, each reports over a pipe, and all are gone afterwards.

Used by latency_stress.py, queue_bench.py and model_bench.py. A child sets its own alarm, so that nothing waits without
limit; the parent waits a little longer than that. What a child reports is its result, or the exception that says why
there is none.
"""

from __future__ import annotations

import multiprocessing
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Target = tuple[Callable[..., None], tuple[Any, ...]]
"""What a process runs, and its arguments after where it reports."""


class Failed(Exception):
    """A child process reported an error, or ended without a word."""


@contextmanager
def started(targets: Sequence[Target], *, duplex: bool = False) -> Iterator[list[Connection]]:
    """Start a process for each target; yields where each one reports; afterwards all are gone.

    `duplex`: they are told something over the same connection, too.
    """
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        connections = []
        for target, more in targets:
            ours, theirs = context.Pipe(duplex)
            process = context.Process(target=target, args=(theirs, *more))
            process.start()
            stack.callback(end, process, ours)
            theirs.close()
            connections.append(ours)
        yield connections


def end(process: multiprocessing.process.BaseProcess, connection: Connection, patience_s: float = 10) -> None:
    """Close the connection, give the process `patience_s` to end by itself, then kill it; it is reaped."""
    connection.close()
    process.join(patience_s)
    if process.is_alive():
        process.kill()
        process.join()
    process.close()


def received(connection: Connection, limit_s: int) -> Any:
    """Return what a child reports, within its limit and a little more. Raises what it reports, or Failed."""
    if not connection.poll(limit_s + 5):
        raise Failed(f"a child process gave no answer for {limit_s} seconds")
    try:
        answer = connection.recv()
    except EOFError:
        raise Failed(f"a child process ended without an answer (its limit is {limit_s} seconds: --limit)") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


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
