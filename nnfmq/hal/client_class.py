"""ClientClass: which of several clients of a driver goes first."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["ClientClass"]


class ClientClass(IntEnum):
    """The rank of a client among those of a driver: a higher one goes first.

    The HAL's `Priority` orders the models of one client among each other, and has no part in this.
    """

    BATCH = 1
    NORMAL = 2
    INTERACTIVE = 3
