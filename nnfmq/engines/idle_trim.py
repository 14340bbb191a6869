"""Trimming of cached memory in a process that has been idle (EXE-13).

The compiling engine keeps arenas for the next execution, and the C library's allocator keeps freed memory.
`trim_memory` returns both. The interpreter needs no entry here: it drops each temporary after its last reader.

glibc gives threads separate heaps, and malloc_trim(3) never returns what is free at the end of such a heap: 25 MiB
after MobileNet v2 was compiled. So a process that is to be trimmed uses one heap for all threads (`use_one_heap`).

Thread-safe.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from functools import cache
from typing import Any, Protocol

__all__ = ["Trimmable", "register", "trim_memory", "use_one_heap"]

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
