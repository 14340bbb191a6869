"""The page in which the workers of a driver process show what they have of the cores, as a test sees and changes it.

The layout is that of `service.core_shares`, written down again: arrays with an entry for each worker.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.drivers import Daemon

SLOTS = 64  # clients that a driver may have
IDLE, WAITING, RUNNING = 0, 1, 2
FAR_NS = 1 << 61
_TURNS, _TIMES = 2 * SLOTS, 7 * SLOTS
_DUE, _HAS_DEADLINE, _VIRTUAL, _EXPECTED, _UNTIL = range(5)
_CLASSES = _TIMES + 8 * (5 * SLOTS + 1)
_USES, _PAUSED = _CLASSES + SLOTS, _CLASSES + 2 * SLOTS
_USERS = _CLASSES + 3 * SLOTS + 8


class Page:
    """The page of a driver process, by its file. The first worker has entry 0."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @property
    def busy(self) -> bytes:
        """The busy bytes."""
        return os.pread(self._fd, SLOTS, 0)

    @property
    def turns(self) -> bytes:
        """The turn of each worker."""
        return os.pread(self._fd, SLOTS, _TURNS)

    @property
    def classes(self) -> bytes:
        """The class of each worker's client."""
        return os.pread(self._fd, SLOTS, _CLASSES)

    @property
    def uses(self) -> bytes:
        """How many threads the last run of each worker used."""
        return os.pread(self._fd, SLOTS, _USES)

    @property
    def users(self) -> bytes:
        """The number of the user of each worker's client."""
        return os.pread(self._fd, SLOTS, _USERS)

    @property
    def paused(self) -> bytes:
        """Whether each worker pauses."""
        return os.pread(self._fd, SLOTS, _PAUSED)

    def compute(self, number: int, client_class: int, threads: int) -> None:
        """Let another worker compute, whose client has a class, and whose last run used so many threads."""
        os.pwrite(self._fd, bytes([client_class]), _CLASSES + number)
        os.pwrite(self._fd, bytes([threads]), _USES + number)
        self.set_busy(number, 1)

    def end(self, number: int) -> None:
        """Let that worker end, without a wake-up."""
        self.set_busy(number, 0)
        os.pwrite(self._fd, bytes(1), _CLASSES + number)

    def set_busy(self, number: int, value: int) -> None:
        """Write a busy byte, as if a worker did."""
        os.pwrite(self._fd, bytes([value]), number)

    def set_turn(self, number: int, turn: int) -> None:
        """Write a turn, as if a worker did that has a deadline, has used the cores for ages, and never ends."""
        for field, value in ((_DUE, FAR_NS), (_HAS_DEADLINE, 1), (_VIRTUAL, FAR_NS), (_UNTIL, 2 * FAR_NS)):
            self._set(field, number, value)
        os.pwrite(self._fd, bytes([turn]), _TURNS + number)

    def write_largest_times(self) -> None:
        """Write the largest number into all times, as a worker could that was taken over."""
        os.pwrite(self._fd, struct.pack("=q", (1 << 63) - 1) * ((_CLASSES - _TIMES) // 8), _TIMES)

    def clear_deadline(self, number: int) -> None:
        """Let a worker's execution have no deadline."""
        self._set(_HAS_DEADLINE, number, 0)

    def hold_forever(self, number: int) -> None:
        """Let the turn of a worker count forever."""
        self._set(_UNTIL, number, 2 * FAR_NS)

    def _set(self, field: int, number: int, value: int) -> None:
        os.pwrite(self._fd, struct.pack("=q", value), _TIMES + 8 * (SLOTS * field + number))


@contextmanager
def opened_page(daemon: Daemon) -> Iterator[Page]:
    """Open the page of a driver process."""
    folder = Path(f"/proc/{daemon.process.pid}/fd")
    entry = next(entry for entry in folder.iterdir() if "nnfmq-cores" in os.readlink(entry))
    fd = os.open(entry, os.O_RDWR | os.O_CLOEXEC)
    try:
        yield Page(fd)
    finally:
        os.close(fd)
