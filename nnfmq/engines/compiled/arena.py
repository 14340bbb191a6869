"""Where values lie: one memory for all that lives only during an execution, each value at a place of its own while it
is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["ALIGNMENT", "Life", "aligned", "places"]

ALIGNMENT = 64
_SLACK = 64  # between values, for what vectors read behind the last element


@dataclass(frozen=True, slots=True)
class Life:
    """A value of `size` bytes, written by step `begin` and read last by step `end`."""

    size: int
    begin: int
    end: int


def aligned(size: int) -> int:
    """Return `size` rounded up to whole cache lines."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def places(lives: Sequence[Life]) -> tuple[list[int], int]:
    """Return the offset of each value and the bytes of all; large values first, each at the lowest free place."""
    offsets, total = [0] * len(lives), 0
    placed = np.empty((4, len(lives)), np.int64)  # of those that have one: first and last step, first and last byte
    order = sorted(range(len(lives)), key=lambda n: (-lives[n].size, lives[n].begin))
    for count, number in enumerate(order):
        life, (begins, ends, firsts, lasts) = lives[number], placed[:, :count]
        beside = np.flatnonzero((begins <= life.end) & (life.begin <= ends))
        offset, need = 0, aligned(life.size + _SLACK)
        for other in beside[np.argsort(firsts[beside], kind="stable")].tolist():
            if firsts[other] - offset >= need:
                break
            offset = max(offset, int(lasts[other]))
        offsets[number] = offset
        total = max(total, offset + need)
        placed[:, count] = life.begin, life.end, offset, offset + need
    return offsets, total
