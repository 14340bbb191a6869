"""The names of this process's compiled kernels for perf(1): the file /tmp/perf-PID.map, a line for each function.

    ADDRESS SIZE NAME     address and size in hexadecimal

That is perf's own interface for code that is generated at run time (`tools/perf/Documentation/jit-interface.txt` of
Linux); the pid is that in the process's own PID namespace. A sandbox lets a worker open and remove no files, so the
file is opened before, and the supervisor removes it. If that was killed, the next driver does: the first line says that
the file is nnfmq's, and of which PID namespace the pid is. Lines are only added: perf reads the file after it has
sampled, and only for code in anonymous memory, not for that of a memfd.
"""

from __future__ import annotations

import logging
import os
import select
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from nnfmq.base import settings
from nnfmq.base.paths import perf_map_path
from nnfmq.base.processes import pid_namespace

__all__ = ["PERF_MAP", "open_perf_map", "remove_left_perf_maps"]

_log = logging.getLogger("nnfmq.perf")


def _first_line() -> bytes:
    """Return a function that nobody calls, at address 0, whose name says whose file it is."""
    return b"0 1 nnfmq_in_pid_namespace_%d\n" % pid_namespace()


class _PerfMap:
    """The file of this process, once it is open. Used by any thread."""

    def __init__(self) -> None:
        self._fd = -1

    def open(self) -> None:
        """Create the file; functions that are loaded from now on are in it.

        Raises:
            OSError: If it cannot be created: another user has a file of this name, for example.
        """
        path = perf_map_path(os.getpid())
        with suppress(FileNotFoundError):
            os.unlink(path)  # of an earlier process with this pid
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.write(self._fd, _first_line())

    @property
    def is_open(self) -> bool:
        """Whether functions that are loaded now are in it."""
        return self._fd >= 0

    def add(self, functions: Iterable[tuple[int, int, str]]) -> None:
        """Add functions: address, size in bytes, and name. Does nothing if the file is not open."""
        if self._fd >= 0:
            text = "".join(f"{address:x} {size:x} {name}\n" for address, size, name in functions)
            with suppress(OSError):  # the disk is full
                os.write(self._fd, text.encode())

    def close(self) -> None:
        """Close the file, and remove it if this process may. Idempotent."""
        if self._fd >= 0:
            self.forget()
            with suppress(OSError):  # a sandbox; the supervisor does
                os.unlink(perf_map_path(os.getpid()))

    def forget(self) -> None:
        """Close the file in a forked child: it is the parent's."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


PERF_MAP = _PerfMap()
"""That of this process."""
os.register_at_fork(after_in_child=PERF_MAP.forget)


def open_perf_map() -> None:
    """Create the file of this process if the setting says so; if that fails, log why."""
    if settings.PERF_MAP.value():
        try:
            PERF_MAP.open()
        except OSError as error:
            _log.warning("perf does not learn the names of compiled kernels: %s", error)


def remove_left_perf_maps() -> None:
    """Remove this user's files of processes that have ended, of this PID namespace."""
    named = Path(perf_map_path(0))
    for path in named.parent.glob(named.name.replace("0", "*")):
        with suppress(OSError, ValueError):  # it has gone, or is another user's
            pid = int(path.stem.rpartition("-")[2])
            if _has_exited(pid) and _is_own(path):
                path.unlink()


def _has_exited(pid: int) -> bool:
    """Return whether no process with this pid runs; also of one that nobody has reaped. Raises OSError."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(pidfd)


def _is_own(path: Path) -> bool:
    """Return whether a regular file of this user begins as those of this module. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found, expected = os.fstat(fd), _first_line()
        is_regular = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
        return is_regular and os.pread(fd, len(expected), 0) == expected
    finally:
        os.close(fd)
