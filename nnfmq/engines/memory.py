"""Memory of executions: the budget that they charge, and the trimming of what an idle process caches.

A driver process serves one client and sets that client's quota as the budget (`use_budget`); other processes, which
execute their own models, have none. Operand values whose shapes are known when a model is prepared are charged once,
when a request is bound; those whose shapes come with the request are charged through a `FrameLedger` of the execution.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Iterable
from functools import cache
from typing import Any, Protocol

__all__ = [
    "Budget",
    "Charge",
    "FrameLedger",
    "Trimmable",
    "charge",
    "is_scarce",
    "register",
    "trim_heap",
    "trim_memory",
    "use_budget",
    "use_one_heap",
]


class Charge(Protocol):
    """Bytes that count against a budget until `close`, or until this object is garbage-collected."""

    def close(self) -> None:
        """Return the bytes to the budget. Idempotent."""
        ...


class Budget(Protocol):
    """The limit of the memory of this process's executions. Thread-safe."""

    def charge(self, size: int) -> Charge:
        """Charge `size` bytes.

        Raises:
            ResourceExhausted: If that would exceed a limit.
        """
        ...

    @property
    def is_scarce(self) -> bool:
        """Whether less than half of the limit is left."""
        ...


class _Process:
    """The objects of which a process has one."""

    budget: Budget | None = None


def use_budget(budget: Budget | None) -> None:
    """Charge all further memory of executions to `budget`; None: to nothing."""
    _Process.budget = budget


def charge(size: int) -> Charge | None:
    """Charge `size` bytes to the budget of this process; return None if it has none.

    Raises:
        ResourceExhausted: If that would exceed a limit.
    """
    budget = _Process.budget
    return None if budget is None or size == 0 else budget.charge(size)


def is_scarce() -> bool:
    """Return whether less than half of this process's budget is left: then nothing is kept that can be made again."""
    return _Process.budget is not None and _Process.budget.is_scarce


class FrameLedger:
    """The operand values of one execution whose shapes came with the request. Used by one thread at a time.

    The charge grows to the largest sum of values that exist at the same time, and stays until the execution is freed:
    a run that needs no more than earlier ones charges nothing.
    """

    __slots__ = ("_charged", "_charges", "_live", "_sizes")

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._live = self._charged = 0
        self._charges: list[Charge | None] = []

    def record(self, index: int, size: int) -> None:
        """Count the value that operand `index` is about to get; its last value exists until then.

        Raises:
            ResourceExhausted: If the budget does not allow it.
        """
        live = self._live + size
        if live > self._charged:
            self._charges.append(charge(live - self._charged))
            self._charged = live
        self._live = live - self._sizes.get(index, 0)
        self._sizes[index] = size

    def release(self, indexes: Iterable[int]) -> None:
        """Count the values of these operands no longer."""
        for index in indexes:
            self._live -= self._sizes.pop(index, 0)


# ----------------------------------------------------------------------------------------------------------------------
# Trimming of cached memory in a process that has been idle (EXE-13).
#
# The compiling engine keeps arenas for the next execution, and the C library's allocator keeps freed memory.
# `trim_memory` returns both. The interpreter needs no entry here: it drops each temporary after its last reader.
#
# glibc gives threads separate heaps, and malloc_trim(3) never returns what is free at the end of such a heap: 25 MiB
# after MobileNet v2 was compiled. So a process that is to be trimmed uses one heap for all threads (`use_one_heap`).
#
# Thread-safe.


_M_ARENA_MAX = -8  # of <malloc.h>


class Trimmable(Protocol):
    """An object that caches memory which it can allocate again."""

    def trim(self) -> None:
        """Release the memory that no execution uses."""
        ...


_registered: weakref.WeakSet[Trimmable] = weakref.WeakSet()
_lock = threading.Lock()


def register(cache_owner: Trimmable) -> None:
    """Include `cache_owner` in every later `trim_memory`. Only a weak reference is kept."""
    with _lock:
        _registered.add(cache_owner)


def trim_memory() -> None:
    """Release what the registered objects cache, then the allocator's free memory.

    Takes about a millisecond, during which glibc holds the locks of its arenas.
    """
    with _lock:
        owners = list(_registered)  # copied: `trim` takes other locks
    for owner in owners:
        owner.trim()
    trim_heap()


def trim_heap() -> None:
    """Release the allocator's free memory: of glibc's; with another C library, nothing."""
    malloc_trim = _malloc_trim()
    if malloc_trim is not None:
        malloc_trim(0)


def use_one_heap() -> None:
    """Let all threads that this process starts allocate from the main heap. With another C library, do nothing.

    Hardly anything waits for the heap's lock: threads hold the GIL when they allocate, except in some NumPy functions.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


@cache
def _malloc_trim() -> Any:
    """Return glibc's malloc_trim(3), or None with another C library, which has no such function."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
