"""What a worker gives back when it rests: the watchdog of EXE-13.

Between two executions nothing of a model's temporaries is kept by name: the engine drops each after its last reader.
The C library's allocator keeps memory, though, for quick successive runs, and of what preparing took: some MiB in each
worker (measured: 8 of 76 after MobileNet v2 was prepared, 6 of 89 after it ran).
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


@cache
def _trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; others give back by themselves


def give_back_memory() -> None:
    """Let the allocator return what it holds free to the kernel. Takes a millisecond or so, with its locks held."""
    trim = _trim()
    if trim is not None:
        trim(0)
