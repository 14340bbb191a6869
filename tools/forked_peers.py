"""A forked process as the other end of a measurement: it inherits what both ends share; and a process that is stopped.

The forked one is killed when the measurement is over, when the process that forked it exits, and at its time limit.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from nnfmq.base.processes import request_signal_at_parent_exit
from nnfmq.hal.errors import NnfmqError
from nnfmq.lab import placement
from nnfmq.lab.child_processes import BenchmarkFailed, set_time_limit

Serve = Callable[[Callable[[], None], Connection], object]
"""What the peer does; arguments: a function to call when it is ready, and the connection to its parent."""


def stop_process(pid: int) -> None:
    """Stop all threads of a process (SIGSTOP): one that runs on another CPU meanwhile would answer the next request."""
    os.kill(pid, signal.SIGSTOP)
    while any(_state_of(task) not in "Tt" for task in Path(f"/proc/{pid}/task").iterdir()):
        os.sched_yield()


def _state_of(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


@contextmanager
def forked(name: str, serve: Serve, limit_s: int, cpu: int | None = None) -> Iterator[tuple[Any, Connection]]:
    """Fork a process that is pinned to `cpu` and runs `serve`; yield it and its connection as soon as it is ready.

    Raises:
        BenchmarkFailed: If it is not ready within the limit, or fails.
    """
    context = multiprocessing.get_context("fork")
    subject, baseline = context.Pipe()
    process = context.Process(target=_serve, args=(baseline, limit_s, cpu, os.getpid(), serve))
    process.start()
    baseline.close()
    try:
        if not subject.poll(limit_s):
            raise BenchmarkFailed(f"the server of {name} was not ready within {limit_s} seconds")
        receive_report(subject, name)
        yield process, subject
    finally:
        process.kill()
        process.join()
        subject.close()


def _serve(results: Connection, limit_s: int, cpu: int | None, parent: int, serve: Serve) -> None:
    request_signal_at_parent_exit(signal.SIGKILL)
    set_time_limit(limit_s)
    if os.getppid() != parent:
        return
    placement.pin_process(0, cpu)
    try:
        serve(lambda: results.send(None), results)
    except (NnfmqError, ImportError, OSError) as error:
        results.send(BenchmarkFailed(f"{type(error).__name__}: {error}"))


def receive_report(results: Connection, name: str) -> Any:
    """Return the object that the server sends.

    Raises:
        BenchmarkFailed: If the server exited.
        Exception: The exception that the server sent.
    """
    try:
        report = results.recv()
    except EOFError:
        raise BenchmarkFailed(f"the server of {name} ended") from None
    if isinstance(report, Exception):
        raise report
    return report


def iceoryx2_service(name: str) -> tuple[Any, Any]:
    """Return a node of iceoryx2, which removes the files of dead ones, and the builder of its service `name`."""
    import iceoryx2

    iceoryx2.set_log_level(iceoryx2.LogLevel.Fatal)
    node = iceoryx2.NodeBuilder.new().create(iceoryx2.ServiceType.Ipc)
    return node, node.service_builder(iceoryx2.ServiceName.new(name))
