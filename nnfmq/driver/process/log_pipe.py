"""The pipe by which the supervisor gets the log of a child, and whatever else that writes to stdout and stderr.

A worker, the model repository, the compile server and the processes that write for workers have one each
(`log_records`). So the supervisor alone writes to the driver's log, in one format.

The child never waits for the supervisor: what does not fit into the pipe is lost, as is what it writes after the
supervisor was killed. What it wrote last is in the pipe when it has died, and is logged before its death. The
supervisor reads a limited number of bytes, and pauses long enough that a child which writes without end, or what costs
most to look at, has a small part of its time.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Final

from nnfmq.base.log_records import ChildLog
from nnfmq.base.ownership import Closable
from nnfmq.driver.process.event_loop import EventLoop, Timer

__all__ = ["LogPipe"]

_READ_BYTES: Final = 16 * 1024
_PIPE_BYTES: Final = 64 * 1024
_PAUSE_S: Final = 0.002
_PAUSES: Final = 20  # a pause is at least so many times as long as the reading before it


class LogPipe(Closable):
    """The supervisor's end of the pipe. Used by one thread. Close it.

    Borrows `loop`. `log` logs what the child, which it calls `child`, has written. `child_fd` is the child's end: call
    `begin` when the child has it.

    Raises:
        OSError: If the system lacks fds.
    """

    def __init__(self, loop: EventLoop, child: str, *, names_clients: bool = False) -> None:
        self._loop = loop
        self.log = ChildLog(child, names_clients=names_clients)
        self._fd, self.child_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._timer: Timer | None = None

    def begin(self, pid: int) -> None:
        """Name this process in the log of what it has written, and close this process's copy of its end. Idempotent."""
        self.log.pid = pid
        self._close_child_end()

    def watch(self) -> None:
        """Log from now on."""
        self._loop.add_reader(self._fd, self._on_readable)

    def _on_readable(self) -> None:
        self._loop.remove_reader(self._fd)
        begin_s = time.monotonic()
        try:
            data = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            data = None
        if data:
            self.log.write(data)
        if data != b"":  # the child's end is open
            end_s = time.monotonic()
            self._timer = self._loop.call_at(end_s + max(_PAUSE_S, _PAUSES * (end_s - begin_s)), self.watch)

    def close(self) -> None:
        """Log the rest, and close both ends. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        self._loop.remove_reader(fd)
        if self._timer is not None:
            self._timer.cancel()
        with suppress(BlockingIOError):  # a process that the child has started still has the other end
            self.log.write(os.read(fd, _PIPE_BYTES))
        self.log.end()
        os.close(fd)
        self._close_child_end()

    def _close_child_end(self) -> None:
        fd, self.child_fd = self.child_fd, -1
        if fd >= 0:
            os.close(fd)
