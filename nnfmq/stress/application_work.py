"""What an application may do within a request beside the execution, and what makes the request slow.

`gc`: a full garbage collection with many objects. `page-faults`: a new array for a frame of 33 MiB. `memory`: a read of
a mapped file, whose pages the kernel was told to reclaim before the request (MADV_PAGEOUT), as it does when memory is
scarce.
"""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

__all__ = ["WORK", "ApplicationWork", "can_reclaim"]

_MADV_RANDOM, _MADV_PAGEOUT = 1, 21  # mmap.MADV_PAGEOUT is not in CPython 3.11
_OBJECTS = 300_000
_FRAME_BYTES = 33 << 20  # more than 32 MiB: malloc then maps and unmaps it each time
_FILE_BYTES, _STRIDE = 16 << 20, 1 << 16
_PAGE = 4096


class _WorkKind(Protocol):
    def prepare(self) -> None:
        """Do what is not part of the request."""

    def work(self) -> None:
        """Do what is part of the request."""


class _Collection:
    def __init__(self, folder: Path) -> None:
        self._objects: list[list[int]] = [[number] for number in range(_OBJECTS)]

    def prepare(self) -> None:
        pass

    def work(self) -> None:
        gc.collect()


class _NewFrame:
    def __init__(self, folder: Path) -> None:
        pass

    def prepare(self) -> None:
        pass

    def work(self) -> None:
        np.empty(_FRAME_BYTES, np.uint8)[::_PAGE] = 1


class _MappedFile:
    def __init__(self, folder: Path) -> None:
        path = folder / f"mapped-{os.getpid()}"
        with path.open("wb") as file:
            file.write(os.urandom(_FILE_BYTES))
            os.fsync(file.fileno())  # dirty pages would not be reclaimed
        pages: Any = np.memmap(path, np.uint8, "r")
        path.unlink()
        pages._mmap.madvise(_MADV_RANDOM)
        self._pages = pages

    def prepare(self) -> None:
        self._pages._mmap.madvise(_MADV_PAGEOUT)

    def work(self) -> None:
        self._pages[::_STRIDE].sum()


WORK: dict[str, Callable[[Path], _WorkKind]] = {"gc": _Collection, "page-faults": _NewFrame, "memory": _MappedFile}
"""By the names of the causes."""


class _Due(NamedTuple):
    time_ns: int
    kind: _WorkKind


class ApplicationWork:
    """The work of one trial: `schedule` has times after its begin, in ns, and names of `WORK`."""

    def __init__(self, schedule: Sequence[tuple[int, str]], folder: Path) -> None:
        kinds = {name: WORK[name](folder) for name in sorted({name for _, name in schedule})}
        self._due = [_Due(time_ns, kinds[name]) for time_ns, name in sorted(schedule, reverse=True)]
        self._begin_ns = 0

    def begin(self, begin_ns: int) -> None:
        """Set the begin of the trial."""
        self._begin_ns = begin_ns

    def next_due(self, now_ns: int) -> Callable[[], None] | None:
        """Return what the next request has to do, or None. Prepares it, which is not part of the request."""
        if not self._due or self._due[-1].time_ns > now_ns - self._begin_ns:
            return None
        kind = self._due.pop().kind
        kind.prepare()
        return kind.work


def can_reclaim(folder: Path) -> bool:
    """Return True if the kernel reclaims mapped pages of a file in `folder` when told to; not on tmpfs."""
    file = _MappedFile(folder)
    for _ in range(2):  # pages that were never mapped are not reclaimed the first time
        file.work()
        file.prepare()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    file.work()
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt > before
