"""The limit of a worker's private memory that the kernel enforces (RLIMIT_DATA), also of what no quota is charged with.

It is the client's limit and UNCHARGED_BYTES, beside what the process has when its session begins. Where memory is
missing, an allocation fails: Python raises MemoryError, and the call gets RESOURCE_EXHAUSTED. The kernel counts private
writable memory when it is mapped, not when it is used, so each burst's thread adds its stack.
"""

from __future__ import annotations

import os
import resource
import threading
from contextlib import suppress
from pathlib import Path

__all__ = ["STACK_BYTES", "UNCHARGED_BYTES", "add_to_limit", "limit_private_memory"]

UNCHARGED_BYTES = 384 << 20
"""One message of 256 MiB while it is received, stacks of the session's threads, buffers of BLAS, and programs."""
STACK_BYTES = 2 << 20
"""Of each thread. LLVM in a worker that has no compile process needs the most."""

_lock = threading.Lock()


def limit_private_memory(quota_bytes: int) -> None:
    """Set the limit of this process, whose client's limit is `quota_bytes`. Call it before threads are started."""
    threading.stack_size(STACK_BYTES)
    _set_limit(_data_bytes() + quota_bytes + UNCHARGED_BYTES)


def add_to_limit(size_bytes: int) -> None:
    """Allow this process `size_bytes` more; less if negative. Does nothing if it has no limit. Thread-safe."""
    with _lock:
        soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
        if soft != resource.RLIM_INFINITY:
            _set_limit(soft + size_bytes)


def _set_limit(size_bytes: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        size_bytes = min(size_bytes, hard)
    with suppress(OSError, ValueError):  # larger than the kernel's type: no limit is needed
        resource.setrlimit(resource.RLIMIT_DATA, (size_bytes, hard))


def _data_bytes() -> int:
    """Return what the kernel counts of this process."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")
