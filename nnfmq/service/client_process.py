"""The process of a client: when it has exited, and whether it has been killed but has not exited yet.

The kernel closes a process's files only after it has released the process's memory, page by page: a client that has
1 GiB mapped hangs up 50 to 150 ms after its SIGKILL, and a worker that frees the client's memory with its own then
needs 200 ms more. Long work in a worker therefore asks `was_killed` from time to time, and ends early.
"""

from __future__ import annotations

import os
import re
import select
import signal
from contextlib import suppress
from typing import Self

from nnfmq.channel import Channel
from nnfmq.uncopyable import Uncopyable

__all__ = ["CLIENT_EXIT_GRACE_S", "COMPILING_EXIT_GRACE_S", "ClientProcess"]

CLIENT_EXIT_GRACE_S = 0.02
"""After a client's exit, its worker gets this time to exit by itself; an idle one needs 1 or 2 ms."""
COMPILING_EXIT_GRACE_S = 1.0
"""The same of a worker that has asked for compile processes: it may start the process that goes on compiling."""
_SIGKILL_BIT = 1 << (signal.SIGKILL - 1)
_PID = re.compile(rb"^Pid:\t(\d+)$", re.MULTILINE)
_PENDING = re.compile(rb"^ShdPnd:\t([0-9a-f]+)$", re.MULTILINE)
_STATUS_BYTES_MAX = 8192


class ClientProcess(Uncopyable):
    """A client's process. Owns a pidfd and a file of /proc; close it."""

    def __init__(self, pidfd: int) -> None:
        self._pidfd = pidfd
        self._status_fd = _open_status(pidfd)

    @classmethod
    def of(cls, channel: Channel) -> Self | None:
        """Return the process that connected to `channel`, or None if the kernel cannot identify it."""
        pidfd = channel.open_peer_pidfd()
        return None if pidfd is None else cls(pidfd)

    def fileno(self) -> int:
        """Return the pidfd, which becomes readable when the process has exited; it stays owned by this object."""
        return self._pidfd

    def was_killed(self) -> bool:
        """Return whether the process has received SIGKILL. Takes about 0.1 ms. False if /proc does not tell.

        The signal stays pending while the process exits, and no process survives it.
        """
        try:
            pending = _PENDING.search(os.pread(self._status_fd, _STATUS_BYTES_MAX, 0))
        except OSError:  # it has exited, which the pidfd reports; or there is no such file
            return False
        return pending is not None and bool(int(pending[1], 16) & _SIGKILL_BIT)

    def close(self) -> None:
        """Close the files. Idempotent."""
        for fd in (self._pidfd, self._status_fd):
            if fd >= 0:
                os.close(fd)
        self._pidfd = self._status_fd = -1


def _open_status(pidfd: int) -> int:
    """Return an fd of /proc/PID/status; -1 if /proc does not show the process."""
    with suppress(OSError), open(f"/proc/self/fdinfo/{pidfd}", "rb") as info:
        found = _PID.search(info.read())
        if found is None:  # -1: it has exited
            return -1
        fd = os.open(b"/proc/%b/status" % found[1], os.O_RDONLY | os.O_CLOEXEC)
        if not _has_exited(pidfd):
            return fd
        os.close(fd)  # the pid may have been reused before the file was opened
    return -1


def _has_exited(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
