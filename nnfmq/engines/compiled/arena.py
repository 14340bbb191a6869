"""Where values lie: one memory for all that lives only during an execution, each value at a place of its own while it
is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    placed: list[int] = []
    for number in sorted(range(len(lives)), key=lambda n: (-lives[n].size, lives[n].begin)):
        life = lives[number]
        taken = sorted(
            (offsets[other], offsets[other] + aligned(lives[other].size + _SLACK))
            for other in placed
            if lives[other].begin <= life.end and life.begin <= lives[other].end
        )
        offset, need = 0, aligned(life.size + _SLACK)
        for begin, end in taken:
            if begin - offset >= need:
                break
            offset = max(offset, end)
        offsets[number] = offset
        total = max(total, offset + need)
        placed.append(number)
    return offsets, total
