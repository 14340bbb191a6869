"""What a child of the supervisor writes to stderr, beside its log: texts of hosted runtimes, of LLVM, of C libraries.

The stderr of a worker, of the model repository with its imports, and of the compile server is a pipe, and the
supervisor logs what comes out of it, at the level `warning`: that of a worker with its client. So each line of the
driver's log has one format. The child's own log goes to the driver's stderr directly (`logs.move_stderr`).

The child never waits for the supervisor: what does not fit into the pipe is lost, as is what it writes after the
supervisor was killed. What it wrote last is in the pipe when it has died, and is logged before its death.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Final

from nnfmq.base.logs import LoggedClient, about, rate_limited
from nnfmq.base.ownership import Closable
from nnfmq.driver.process.event_loop import EventLoop, Timer

__all__ = ["ChildErrors"]

_READ_BYTES: Final = 16 * 1024
_LINE_BYTES_MAX: Final = 4096
_PAUSE_S: Final = 0.05  # a child that writes without end must not keep the supervisor busy
_log = rate_limited("nnfmq.stderr")


class ChildErrors(Closable):
    """The supervisor's end of the pipe: logs the lines that come out of it. Used by one thread. Close it.

    Borrows `loop`. `child` names the process in the log. `child_fd` is its end, which the caller closes when the child
    has it. `client` is a worker's; set it before the loop runs.
    """

    def __init__(self, loop: EventLoop, child: str) -> None:
        self._loop = loop
        self._format = f"{child} wrote to stderr: %s"  # each kind of child has its own limit of the rate
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
            _log.warning(self._format, text, extra=about(self.client))

    def close(self) -> None:
        """Log what is left, and close both ends. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        self._loop.remove_reader(fd)
        if self._timer is not None:
            self._timer.cancel()
        with suppress(BlockingIOError):  # a process that the child has started still has the other end
            self._partial_line += os.read(fd, _READ_BYTES * 4)
        self._log_text(self._partial_line)
        os.close(fd)
        self.close_child_end()

    def close_child_end(self) -> None:
        """Close the child's end in this process. Idempotent."""
        fd, self.child_fd = self.child_fd, -1
        if fd >= 0:
            os.close(fd)
