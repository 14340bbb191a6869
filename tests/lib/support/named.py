"""Unique names for POSIX shared memory in tests, with a check that none is left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import pytest

from nnfmq.base import posix_shm

_numbers = count()


@contextmanager
def fresh_name() -> Iterator[str]:
    """Yield an unused name; remove it afterwards, and fail if other names that begin with it are left."""
    name = f"/nnfmq-test-{os.getpid()}-{next(_numbers)}"
    yield name
    left = [other for other in posix_shm.names() if other.startswith(name)]
    for other in left:
        posix_shm.unlink(other)
    if [other for other in left if other != name]:
        pytest.fail(f"left in shared memory: {', '.join(left)}", pytrace=False)
