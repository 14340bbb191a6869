"""What a worker gives back when it rests: the watchdog of EXE-13.

Between two executions the reference keeps nothing of a model's temporaries by name: it drops each after its last
reader. The compiling engine keeps arenas for the next execution (`engines.idle`). The C library's allocator keeps
memory, too, for quick successive runs, and of what preparing took: some MiB in each worker (measured: 8 of 76 after
MobileNet v2 was prepared, 6 of 89 after it ran).
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from nnfmq.engines import idle


@cache
def _trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; others give back by themselves


def give_back_memory() -> None:
    """Return to the kernel what engines and the allocator hold free. Takes a millisecond or so, with locks held."""
    idle.give_back()
    trim = _trim()
    if trim is not None:
        trim(0)
