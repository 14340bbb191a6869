"""UserCount: when to close what several objects share."""

from __future__ import annotations

import threading
from collections.abc import Callable

from nnfmq.hal.errors import BadState

__all__ = ["UserCount"]


class UserCount:
    """The number of users of something that is closed when the last one has released it. Thread-safe.

    There is one user at first. `what` names it in errors.
    """

    def __init__(self, what: str, close: Callable[[], object]) -> None:
        self._what = what
        self._close = close
        self._lock = threading.Lock()
        self._count = 1

    def acquire(self) -> None:
        """Add a user, which calls `release` once.

        Raises:
            BadState: If the last user has released it.
        """
        with self._lock:
            if not self._count:
                raise BadState(f"this {self._what} is closed")
            self._count += 1

    def release(self) -> None:
        """Remove a user; after the last one, close what they shared."""
        with self._lock:
            self._count -= 1
            is_last = self._count == 0
        if is_last:
            self._close()
