"""Heartbeats: how a process learns that a child of it hangs, in whatever way.

The child writes to a pipe again and again, and its parent looks whether it has. Looks are counted, not seconds: the
whole driver may have been stopped meanwhile. A look at which a signal or a debugger has stopped the child does not
count. It is a pipe because its two ends have flags of their own: a child that is not trusted could make a read of an
eventfd, which both have, wait without end (fcntl(2), O_NONBLOCK).

A worker's watcher thread writes eight times within $NNFMQ_EXECUTION_LIMIT_S. It cannot while code of a plug-in keeps
the GIL, and neither can anything else in that process which would end it. So the supervisor ends a worker that has not
written for the limit, an eighth of it, and STALL_S.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import suppress

from nnfmq.base import settings, watcher
from nnfmq.base.ownership import Closable
from nnfmq.base.processes import is_paused
from nnfmq.driver.execution.watchdog import STALL_S
from nnfmq.driver.process.event_loop import EventLoop, Timer

__all__ = ["HeartbeatWatch", "beat_for_ever", "worker_heartbeat"]

_BEATS = 8  # within the limit of an execution
_BEATS_MAX = 1 << 16  # in a pipe


class HeartbeatWatch(Closable):
    """The parent's side: the pipe, whose other end the child inherits, and the looks. Close it.

    `child_fd` is the child's end; close it with `close_child_end` when the child has it.

    Args:
        loop: The parent's event loop. Borrowed.
        look_s: The pause between two looks; 0: it never looks.
        missed_max: After so many looks without a heartbeat the child hangs.
        missed_at_start: The same before the first heartbeat.

    Raises:
        OSError: If the system lacks fds.
    """

    def __init__(self, loop: EventLoop, look_s: float, missed_max: int, missed_at_start: int) -> None:
        self._loop = loop
        self._look_s = look_s
        self._missed_max, self._allowed = missed_max, missed_at_start
        self._missed = 0
        self._timer: Timer | None = None
        self._fd, self.child_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def begin(self, pid: int, on_silence: Callable[[float], object]) -> None:
        """Look from now on; call `on_silence` once with the time, in seconds, for which the child has not written."""
        if self._look_s:
            self._timer = self._loop.call_at(time.monotonic() + self._look_s, lambda: self._look(pid, on_silence))

    def _look(self, pid: int, on_silence: Callable[[float], object]) -> None:
        if self._has_beaten():
            self._missed, self._allowed = 0, self._missed_max
        else:
            self._missed += not is_paused(pid)
        if self._missed >= self._allowed:
            on_silence(self._missed * self._look_s)
        else:
            self.begin(pid, on_silence)

    def _has_beaten(self) -> bool:
        try:
            return bool(os.read(self._fd, _BEATS_MAX))
        except BlockingIOError:
            return False

    def close_child_end(self) -> None:
        """Close the child's end in this process. Idempotent."""
        fd, self.child_fd = self.child_fd, -1
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        """Look no more. Idempotent."""
        self.close_child_end()
        timer, self._timer, fd, self._fd = self._timer, None, self._fd, -1
        if timer is not None:
            timer.cancel()
        if fd >= 0:
            os.close(fd)


def worker_heartbeat(loop: EventLoop, start_s: float = 0.0) -> HeartbeatWatch:
    """Return the watch of a new worker, which looks only if executions have a limit. Raises OSError.

    `start_s` is how long its start may take beside the limit.
    """
    look_s = _pause_s()
    if not look_s:
        return HeartbeatWatch(loop, 0, 0, 0)
    missed_max = _BEATS + 1 + math.ceil(STALL_S / look_s)
    return HeartbeatWatch(loop, look_s, missed_max, missed_max + math.ceil(start_s / look_s))


def beat_for_ever(fd: int) -> None:
    """Let the watcher thread of this process, a worker, write to its pipe as long as the process lives."""
    pause_ns = int(_pause_s() * 1e9)

    def beat() -> None:
        with suppress(OSError):  # the supervisor was killed, or is stopped and the pipe is full
            os.write(fd, b"\0")
        watcher.call_at(time.monotonic_ns() + pause_ns, beat)

    if pause_ns:
        beat()


def _pause_s() -> float:
    return settings.EXECUTION_LIMIT_S.value() / _BEATS
