"""Libraries that a runtime loads as code: only files whose SHA-256 the driver's administrator has listed.

A library of custom operators comes from the client like any file of its model, in a sealed memory. Its digest is that
of a copy that this process has sealed itself, and only that copy is loaded, by its path below /proc/self/fd: nothing
changes it in between, and no name of a client's choice is opened.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from nnfmq.base import settings
from nnfmq.base.digests import sha256
from nnfmq.base.memory import Memory, write_all
from nnfmq.hal.errors import InvalidArgument

__all__ = ["Library", "is_trusted", "trusted_library"]


class Library(NamedTuple):
    """A library: the SHA-256 of its bytes, and the path by which this process loads it."""

    digest: str
    path: str


_lock = threading.Lock()
_copies: dict[str, Memory] = {}
"""The libraries that were loaded, by digest. They stay open: the loader knows a library by its path, and would take
another one with the same number of a descriptor for it."""


def is_trusted(data: memoryview) -> bool:
    """Return whether $NNFMQ_TRUSTED_FILES has the SHA-256 of these bytes."""
    trusted = settings.TRUSTED_FILES.value() or ()
    return bool(trusted) and sha256(data).hex() in trusted


def trusted_library(name: str, data: memoryview) -> Library:
    """Return a sealed copy of a library's bytes, which a runtime loads.

    Raises:
        InvalidArgument: If the driver does not trust it. The message has its digest.
        ResourceExhaustedTransient: If there is no memory for a copy.
    """
    with _lock:
        copy = Memory.create_constant(len(data), lambda fd: write_all(fd, data, 0), "nnfmq-library")
        digest = sha256(copy.view).hex()
        if digest not in (settings.TRUSTED_FILES.value() or ()):
            copy.close()
            raise InvalidArgument(
                f"library {name!r:.80} is code, which the driver loads only if its setting trusted_files "
                f"(NNFMQ_TRUSTED_FILES) has its SHA-256: {digest}"
            )
        if digest in _copies:
            copy.close()
        return Library(digest, f"/proc/self/fd/{_copies.setdefault(digest, copy).fileno()}")
