"""Processes below this one: adopt, interrupt and end them. Used by the benchmarks of the driver.

An orphan is adopted by the nearest ancestor that called `adopt_orphans` (PR_SET_CHILD_SUBREAPER). A benchmark that
calls it first therefore finds every process that it caused among its own descendants.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from nnfmq.observe.process_usage import descendants

_PR_SET_CHILD_SUBREAPER = 36
_END_S = 10.0


@contextmanager
def opened_pidfd(pid: int) -> Iterator[int]:
    """Yield a pidfd of a process, and close it afterwards."""
    pidfd = os.pidfd_open(pid)
    try:
        yield pidfd
    finally:
        os.close(pidfd)


def has_exited(pidfd: int, timeout_s: float) -> bool:
    """Wait up to `timeout_s` for a process to exit; return whether it has."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))


def adopt_orphans() -> None:
    """Become the parent of every descendant whose parent exits."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def interrupt_on_sigterm() -> None:
    """Let SIGTERM raise KeyboardInterrupt, as Ctrl-C does, so that a benchmark ends and removes what it made."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def end_descendants() -> None:
    """Kill and reap all descendants of this process. Waits at most 10 s."""
    end = time.monotonic() + _END_S
    while (found := descendants(os.getpid())) and time.monotonic() < end:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap()
        time.sleep(0.01)


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
