"""What a worker writes to stderr, beside its log: texts of hosted runtimes, of LLVM, of Python and of C libraries.

The worker's stderr is a pipe, and the supervisor logs what comes out of it, with the client, at the level `warning`. So
each line of the driver's log has one format. The worker's own log goes to the driver's stderr directly.

The worker never waits for the supervisor: what does not fit into the pipe is lost, as is what it writes after the
supervisor was killed. What it wrote last is in the pipe when it has died, and is logged before its death.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Final

from nnfmq.base.logs import LoggedClient, about, keep_stderr, rate_limited
from nnfmq.base.ownership import Closable
from nnfmq.driver.process.event_loop import EventLoop, Timer

__all__ = ["WorkerErrors", "write_errors_to"]

_READ_BYTES: Final = 16 * 1024
_LINE_BYTES_MAX: Final = 4096
_PAUSE_S: Final = 0.05  # a worker that writes without end must not keep the supervisor busy
_STDERR: Final = 2
_log = rate_limited("nnfmq.stderr")


class WorkerErrors(Closable):
    """The supervisor's end of the pipe: logs the lines that come out of it. Used by one thread. Close it.

    Borrows `loop`. `child_fd` is the worker's end, which the caller closes when the worker has it. `client` names the
    worker and its client in the log; set it before the loop runs.
    """

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._fd, self.child_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._partial_line = b""  # a line without its end
        self._timer: Timer | None = None
        self.client: LoggedClient | None = None

    def watch(self) -> None:
        """Log from now on. Raises OSError if the system lacks memory for another registration."""
        self._loop.add_reader(self._fd, self._on_readable)

    def _on_readable(self) -> None:
        self._loop.remove_reader(self._fd)
        if self._read():
            self._timer = self._loop.call_at(time.monotonic() + _PAUSE_S, self.watch)

    def _read(self) -> bool:
        """Log what is in the pipe; return whether more may come."""
        try:
            data = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return True
        if not data:
            return False
        lines, separator, self._partial_line = (self._partial_line + data).rpartition(b"\n")
        if separator:
            self._log_text(lines)
        if len(self._partial_line) > _LINE_BYTES_MAX:
            self._log_text(self._partial_line)
            self._partial_line = b""
        return True

    def _log_text(self, data: bytes) -> None:
        text = data.decode("utf-8", "replace").strip("\n")
        if text:
            _log.warning("a worker wrote to stderr: %s", text, extra=about(self.client))

    def close(self) -> None:
        """Log what is left, and close both ends. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        self._loop.remove_reader(fd)
        if self._timer is not None:
            self._timer.cancel()
        with suppress(BlockingIOError):  # a process that the worker has started still has the other end
            self._partial_line += os.read(fd, _READ_BYTES * 4)
        self._log_text(self._partial_line)
        os.close(fd)
        self.close_child_end()

    def close_child_end(self) -> None:
        """Close the worker's end in this process. Idempotent."""
        fd, self.child_fd = self.child_fd, -1
        if fd >= 0:
            os.close(fd)


def write_errors_to(fd: int) -> None:
    """Let this process, a worker, write what is not its log to `fd`, a pipe, of which it takes ownership."""
    keep_stderr()
    os.dup2(fd, _STDERR)
    os.close(fd)
