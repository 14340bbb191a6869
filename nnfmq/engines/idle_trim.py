"""Trimming of cached memory in a process that has been idle (EXE-13).

The compiling engine keeps arenas for the next execution, and the C library's allocator keeps freed memory: after
MobileNet v2 was prepared, 8 of a worker's 76 MiB could be returned to the kernel, after it ran 6 of 89. `trim_memory`
returns both. The interpreter needs no entry here: it drops each temporary after its last reader.

Thread-safe.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from functools import cache
from typing import Any, Protocol

__all__ = ["Trimmable", "register", "trim_memory"]


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


@cache
def _malloc_trim() -> Any:
    """Return glibc's malloc_trim(3), or None with another C library, which has no such function."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
