"""Limits on the fds that a process may open."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_more_descriptors_than(pid: int, count: int) -> Iterator[None]:
    """Limit a process (0 = this one) to fds below `count` for the duration of the block."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (count, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@contextmanager
def no_more_descriptors(but: int = 0) -> Iterator[None]:
    """Limit the number of fds that this process can open during the block, by default to none."""
    free = os.dup(0)
    os.close(free)
    with no_more_descriptors_than(0, free + but):
        yield
