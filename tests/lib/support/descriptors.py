"""Processes that are short of descriptors."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_more_descriptors_than(pid: int, count: int) -> Iterator[None]:
    """Let a process (0 = this one) open no descriptor that is `count` or more, for a block."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (count, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@contextmanager
def no_more_descriptors(but: int = 0) -> Iterator[None]:
    """Let this process open none for a block, or so many at most."""
    free = os.dup(0)
    os.close(free)
    with no_more_descriptors_than(0, free + but):
        yield
