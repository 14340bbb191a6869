"""Limits that the kernel enforces on this process or a child: how much it has, and the soft limit of a resource."""

from __future__ import annotations

import os
import resource
from contextlib import suppress

__all__ = ["data_bytes", "data_left_bytes", "limit_softly"]


def data_bytes(pid: int | str = "self") -> int:
    """Return the bytes of a process that RLIMIT_DATA counts: private memory that it can write to. Raises OSError."""
    with open(f"/proc/{pid}/statm", "rb") as file:
        return int(file.read().split()[5]) * os.sysconf("SC_PAGE_SIZE")


def data_left_bytes(pid: int) -> float:
    """Return how much of such memory a process may still allocate; infinity: it has no limit. Raises OSError."""
    limit, _ = resource.prlimit(pid, resource.RLIMIT_DATA)
    return float("inf") if limit == resource.RLIM_INFINITY else limit - data_bytes(pid)


def limit_softly(which: int, value: int) -> None:
    """Set the soft limit of a resource (RLIMIT_*), at most to its hard limit, which stays."""
    _, hard = resource.getrlimit(which)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    with suppress(OSError, ValueError):  # larger than the kernel's type: no limit is needed
        resource.setrlimit(which, (value, hard))
