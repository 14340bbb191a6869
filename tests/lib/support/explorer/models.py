"""Memory models: how far a machine may delay a thread's stores and payload loads.

SEQUENTIAL performs each immediately. TSO (x86-64) keeps stores in a FIFO buffer per thread, which its own loads
read first. WEAK lets a buffered store pass earlier ones to other places unless it is a release store; lets the
loads of payload (which decide nothing) happen any time later, until a release store of the thread has to come after
them; and lets them have happened any time before, back to the thread's last acquire load. Read-modify-writes and futex
calls are barriers. Not modelled: counters that are loaded early, which would only be seen as older than they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

Store = tuple[int, int, bool]
"""Place, value, whether it is a release store."""

Copy = tuple[int, int]
"""A payload load: place, and the value or PENDING."""

Stale = tuple[int, int]
"""A value that a payload byte had since the thread's last acquire load: place, value."""

PENDING = -1


class Model(Enum):
    """How far accesses may be delayed."""

    SEQUENTIAL = "sequential"
    TSO = "tso"
    WEAK = "weak"

    @property
    def buffers(self) -> bool:
        """True if stores are delayed."""
        return self is not Model.SEQUENTIAL

    @property
    def defers(self) -> bool:
        """True if payload loads happen late or early."""
        return self is Model.WEAK

    def leaving(self, buffer: tuple[Store, ...], copies: tuple[Copy, ...]) -> Iterator[int]:
        """Yield the buffered stores that may reach memory next."""
        if self is Model.WEAK:
            yield from (i for i in range(len(buffer)) if _may_leave(buffer, i, copies))
        elif buffer:
            yield 0


def _may_leave(buffer: tuple[Store, ...], i: int, copies: tuple[Copy, ...]) -> bool:
    place, _, is_release = buffer[i]
    pending = [copied for copied, value in copies if value == PENDING]
    if is_release:
        return i == 0 and not pending
    return place not in pending and all(earlier[0] != place for earlier in buffer[:i])
