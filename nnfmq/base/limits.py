"""Limits that the kernel enforces on this process: how much it has, and the soft limit of a resource."""

from __future__ import annotations

import os
import resource
from contextlib import suppress

__all__ = ["data_bytes", "limit_softly"]


def data_bytes() -> int:
    """Return what RLIMIT_DATA counts of this process."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[5]) * os.sysconf("SC_PAGE_SIZE")


def limit_softly(which: int, value: int) -> None:
    """Set the soft limit of a resource (RLIMIT_*), at most to its hard limit, which stays."""
    _, hard = resource.getrlimit(which)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    with suppress(OSError, ValueError):  # larger than the kernel's type: no limit is needed
        resource.setrlimit(which, (value, hard))
