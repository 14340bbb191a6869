"""Processes that a process of a test starts and leaves, as a driver its successor: none outlives the test."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.drivers import Process

__all__ = ["adopted"]

_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def adopted() -> Iterator[None]:
    """Become the parent of what descendants leave in the block; end what is left after it, and fail if there is any."""
    with Process(os.getpid()) as this:
        before = this.children()
        _adopt(True)
        try:
            yield
        finally:
            left = list(_ended(this, before))
            _adopt(False)
    if left:
        pytest.fail(f"left by the test, and ended now: {', '.join(left)}", pytrace=False)


def _adopt(adopts: bool) -> None:
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")


def _ended(this: Process, others: Container[int]) -> Iterator[str]:
    """Kill and reap the children of this process but `others`; yield the command of each that still ran."""
    while found := [pid for pid in this.children() if pid not in others]:
        for pid in found:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                os.kill(pid, signal.SIGKILL)
                yield f"process {pid} ({' '.join(words).strip()})"
            os.waitpid(pid, 0)
