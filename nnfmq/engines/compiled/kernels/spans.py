"""Going over a row of any length in vectors: the last one overlaps what was done before, so one body does for all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nnfmq.engines.compiled.emission import I32, Emitter, Value, vector

__all__ = ["fitting_lanes", "new_lanes", "offset_of", "spans"]


def fitting_lanes(length: int, most: int) -> int:
    """Return the largest power of two that exceeds neither `length` (at least 1) nor `most`, a power of two."""
    return min(most, 1 << (length.bit_length() - 1))


@contextmanager
def spans(
    e: Emitter, length: int, lanes: int, begin: int | Value = 0, end: int | Value | None = None
) -> Iterator[Value]:
    """Emit a loop around the block's instructions over the places of vectors, in elements, that cover `length`.

    `begin` is a multiple of `lanes`, `end` one too or `length`. Elements that the last vector meets twice must come out
    the same both times.
    """
    if length == lanes:
        yield e.i64(0)
        return
    with e.loop(begin, length if end is None else end, lanes) as place:
        yield place if length % lanes == 0 else e.intrinsic("llvm.smin", place, e.i64(length - lanes))


def new_lanes(e: Emitter, length: int, lanes: int, place: Value, wanted: Value) -> Value | None:
    """Return which lanes of the vector at `place` no vector before it had; None where none can overlap.

    `wanted` is the place before it was moved back to end where the row does.
    """
    if length % lanes == 0:
        return None
    kind = vector(I32, lanes)
    numbers = kind(list(range(lanes)))
    skipped = e.broadcast(e.b.trunc(e.b.sub(wanted, place), I32), lanes)
    return e.b.icmp_signed(">=", numbers, skipped)


def offset_of(e: Emitter, number: Value, extents: tuple[int, ...], strides: tuple[int, ...]) -> Value | int:
    """Return Σ index · stride for a number that counts through `extents`, the last the fastest."""
    total: Value | int = 0
    for position in reversed(range(len(extents))):
        index = number
        if position:
            index = e.b.urem(number, e.i64(extents[position]))
            number = e.b.udiv(number, e.i64(extents[position]))
        if strides[position]:
            total = e.add(total, e.mul(index, strides[position]))
    return total
