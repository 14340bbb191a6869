"""The model repository's process, as the supervisor starts it, watches it, and starts it again.

The supervisor listens at the repository's socket, and the process inherits it. So clients that connect while it starts,
or starts again, wait instead of failing. If the process dies, no client of the driver notices, except those that wait
for the reply to a request for a model. The pause before the next start doubles, and is short again for a process that
has run for long. The process and its children are a session of their own, which ends with it; the kernel kills the
process if the supervisor is killed.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from nnfmq.channel import Listener
from nnfmq.child_environment import child_environment
from nnfmq.hal.errors import GeneralFailure
from nnfmq.service.child_process import ChildProcess, fork_child
from nnfmq.service.event_loop import EventLoop

__all__ = ["PAUSE_MAX_S", "RepositoryProcess"]

PAUSE_S, PAUSE_MAX_S = 0.1, 30.0
_LONG_S = 60.0
_log = logging.getLogger("nnfmq.supervisor")


class RepositoryProcess:
    """Keeps a model repository running. Used by one thread, the only one of its process.

    Args:
        loop: The supervisor's event loop. Borrowed.
        listener: Listens at the repository's socket. Borrowed.
        socket: The driver's socket.
        directory: The directory of models.
    """

    def __init__(self, loop: EventLoop, listener: Listener, socket: Path, directory: Path) -> None:
        self._loop = loop
        self._listener = listener
        self._socket = socket.absolute()
        self._directory = directory
        self._process: ChildProcess | None = None
        self._started_s = 0.0
        self._pause_s = PAUSE_S
        self._is_ending = False

    def start(self) -> None:
        """Start the process; if that fails, try again after a pause."""
        if self._is_ending:
            return
        fd = os.dup(self._listener.fileno())  # a fork closes the listener in the child
        try:
            process = self._process = fork_child(lambda: self._execute(fd), [fd], at_parent_exit=signal.SIGKILL)
            self._started_s = time.monotonic()
            self._loop.add_reader(process.fileno(), self._on_exit)
        except (OSError, GeneralFailure) as error:
            _log.error("the model repository cannot be started: %s", error)
            self._end_process()
            self._start_later()
        finally:
            os.close(fd)

    def _execute(self, fd: int) -> None:
        """Become the repository: a forked child without this process's memory."""
        os.setsid()
        os.set_inheritable(fd, True)
        arguments = ["--serve", str(fd), str(self._socket), str(self._directory)]
        os.execve(sys.executable, [sys.executable, "-P", "-m", "nnfmq.repository", *arguments], child_environment())

    def _on_exit(self) -> None:
        status = self._end_process()
        _log.error("the model repository ended with status %d; it is started again", status)
        self._start_later()

    def _end_process(self) -> int:
        """Kill the process and its children; return its exit status. Blocks until it has ended."""
        process, self._process = self._process, None
        if process is None:
            return 0
        self._loop.remove_reader(process.fileno())
        # The process group exists as long as the process is not reaped. Children that are stopped end, too.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.send(signal.SIGKILL)  # it may not have a group of its own yet
        return process.reap()

    def _start_later(self) -> None:
        if time.monotonic() - self._started_s > _LONG_S:
            self._pause_s = PAUSE_S
        self._loop.call_at(time.monotonic() + self._pause_s, self.start)
        self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S)

    def end(self) -> None:
        """End the process and its children; it has nothing to save. Blocks until it has ended. Idempotent."""
        self._is_ending = True
        self._end_process()
