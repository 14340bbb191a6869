"""Child processes of the benchmarks: start them together, receive their results over pipes, end them.

Used by latency_stress.py, queue_bench.py and model_bench.py. Each child limits its own running time with
`set_time_limit`; the parent waits 5 s longer than that, so nothing waits forever. A child sends its result, or the
exception that explains why it has none.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

from nnfmq.measure.failures import BenchmarkFailed

ProcessEntry = tuple[Callable[..., None], tuple[Any, ...]]
"""Function of a child process, and its arguments after the connection to the parent."""


_SPAWN = multiprocessing.get_context("spawn")


@contextmanager
def started_processes(
    entries: Sequence[ProcessEntry], *, duplex: bool = False, context: Any = _SPAWN
) -> Iterator[list[Connection]]:
    """Start a process for each entry; yield the parent's ends of their connections, in the same order.

    At exit the connections are closed and all processes are ended and reaped. With `duplex`, the parent can also send
    to the children. `context` is that of multiprocessing; a forkserver's starts processes faster.
    """
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
    """Limit the running time of the calling process: SIGALRM ends it after `seconds`; 0 removes the limit."""
    signal.setitimer(signal.ITIMER_REAL, seconds)


def end_process(process: multiprocessing.process.BaseProcess, connection: Connection, timeout_s: float = 10) -> None:
    """Close the connection, wait `timeout_s` for the process to exit, kill it otherwise, and reap it."""
    connection.close()
    process.join(timeout_s)
    if process.is_alive():
        process.kill()
        process.join()
    process.close()


def receive_result(connection: Connection, limit_s: int) -> Any:
    """Return the object that a child sends. Waits for `limit_s`, the child's own limit, and 5 s more.

    Raises:
        BenchmarkFailed: If nothing arrives in time, or the child exits first.
        Exception: The exception that the child sent.
    """
    if not connection.poll(limit_s + 5):
        raise BenchmarkFailed(f"a child process sent no result within {limit_s} seconds")
    try:
        result = connection.recv()
    except EOFError:
        raise BenchmarkFailed(
            f"a child process ended without a result (its limit is {limit_s} seconds: --limit)"
        ) from None
    if isinstance(result, Exception):
        raise result
    return result
