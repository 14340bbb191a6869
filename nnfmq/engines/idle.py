"""What engines keep from one execution for the next, and give back when their process has nothing to do.

Whoever keeps memory joins (`join`) and has `give_back`; it is forgotten with its last reference. Any thread may call
any of this.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

__all__ = ["Keeper", "give_back", "join"]


class Keeper(Protocol):
    """Something that keeps memory that it could do without."""

    def give_back(self) -> None:
        """Let go of what no execution uses; it comes again when it is needed."""
        ...


_keepers: weakref.WeakSet[Keeper] = weakref.WeakSet()
_lock = threading.Lock()


def join(keeper: Keeper) -> None:
    """Ask `keeper` from now on, as long as it lives."""
    with _lock:
        _keepers.add(keeper)


def give_back() -> None:
    """Let all keepers give back what no execution uses."""
    with _lock:
        keepers = list(_keepers)
    for keeper in keepers:
        keeper.give_back()
