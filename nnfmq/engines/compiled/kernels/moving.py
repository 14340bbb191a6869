"""Elements at other places: nests of loops around runs of bytes, which serve all that only copies.

A kernel is made of *pieces* that write disjoint parts of the outputs. A piece goes along its axes, each a step of so
many bytes in what is read and another in what is written, and moves a run at each point. Work is cut along each
piece's outermost axis. Where what is contiguous on one side is not on the other, square tiles are transposed in
registers, so that both sides are read and written in vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from nnfmq.engines.compiled.emission import I8, I64, Emitter, Value
from nnfmq.engines.compiled.target import Target

__all__ = ["NOWHERE", "Axis", "Moving", "Piece", "merged_axes", "nanoseconds", "plan_moving"]

NOWHERE = -(1 << 40)  # an offset in a table for which the piece's filler is read

_UNIT_BYTES = 1 << 13
_MOST_UNITS = 16
_STRAIGHT = 4  # rounds of an innermost loop that are written one after the other


@dataclass(frozen=True, slots=True)
class Axis:
    """`extent` steps, each of so many bytes.

    With a `table` the source's offsets are there, as 64-bit numbers from byte `source` of that entry in the kernel's
    table of addresses on.
    """

    extent: int
    source: int
    target: int
    table: int | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """Runs of `run` bytes from one array to another, by their places in the table of addresses; axes outermost first.

    `source` None: bytes of `fill`. `codes`: the place of 256 codes through which each byte goes. `filler`: the place
    of a run that is read where tables say NOWHERE.
    """

    source: int | None
    target: int
    source_offset: int
    target_offset: int
    axes: tuple[Axis, ...]
    run: int
    fill: int = 0
    codes: int | None = None
    filler: int | None = None

    @property
    def bytes(self) -> int:
        """How much it writes."""
        return self.run * math.prod(axis.extent for axis in self.axes)


@dataclass(frozen=True, slots=True)
class Moving:
    """All pieces of a kernel."""

    pieces: tuple[Piece, ...]
    units: int

    def scratch_bytes(self, target: Target) -> int:
        """None."""
        return 0

    def emit(self, e: Emitter) -> None:
        """Table: as the pieces say."""
        for piece in self.pieces:
            places = {axis.table for axis in piece.axes} | {piece.codes, piece.filler}
            tables = {place: e.argument(place) for place in sorted(place for place in places if place is not None)}
            _Emission(e, piece, self.units, tables).emit()
        e.finish()


@dataclass(frozen=True, slots=True)
class _Emission:
    e: Emitter
    piece: Piece
    units: int
    tables: Mapping[int, Value]

    def emit(self) -> None:
        e, piece = self.e, self.piece
        source = None if piece.source is None else e.at(e.argument(piece.source), piece.source_offset)
        target = e.at(e.argument(piece.target), piece.target_offset)
        if piece.axes:
            self._along(0, source, 0, target)
            return
        begin, end = self._share(piece.run)
        self._move(source, begin, e.at(target, begin), e.b.sub(end, begin))

    def _share(self, extent: int) -> tuple[Value, Value]:
        """Return which of `extent` rounds this call is to do."""
        e = self.e
        begin, end = (e.b.udiv(e.mul(bound, extent), e.i64(self.units)) for bound in (e.begin, e.end))
        return begin, end

    def _along(self, number: int, source: Value, offset: Value, target: Value) -> None:
        """Emit the loop along axis `number` and what is in it; `offset` is the way from `source` so far."""
        e, piece = self.e, self.piece
        if number == len(piece.axes):
            self._move(source, offset, target, piece.run)
            return
        axis = piece.axes[number]

        def step(index: Value) -> None:
            self._along(number + 1, source, self._further(axis, offset, index), e.at(target, e.mul(index, axis.target)))

        if number and number == len(piece.axes) - 1 and axis.extent <= _STRAIGHT:
            for index in range(axis.extent):
                step(index)
            return
        begin, end = self._share(axis.extent) if number == 0 else (0, axis.extent)
        with e.loop(begin, end) as index:
            step(index)

    def _further(self, axis: Axis, offset: Value, index: Value) -> Value:
        e = self.e
        if axis.table is None:
            return e.add(offset, e.mul(index, axis.source))
        place = e.add(axis.source, e.mul(index, 8))
        return e.add(offset, e.load(I64, self.tables[axis.table], place))

    def _move(self, source: Value, offset: Value, target: Value, count: int | Value) -> None:
        e, piece = self.e, self.piece
        if source is None:
            e.fill(target, piece.fill, count)
            return
        place = e.at(source, offset)
        if piece.filler is not None:
            nowhere = e.b.icmp_signed("<", e.i64(offset), e.i64(0))
            place = e.b.select(nowhere, self.tables[piece.filler], place)
        if piece.codes is None:
            e.copy(target, place, count)
            return
        codes = self.tables[piece.codes]
        with e.loop(0, count) as index:
            code = e.b.zext(e.load(I8, place, index), I64)
            e.store(e.load(I8, codes, code), target, index)


def plan_moving(pieces: Sequence[Piece]) -> Moving:
    """Merge what is contiguous, choose an outermost axis for each piece, and the number of units."""
    shaped = tuple(_shaped(piece) for piece in pieces if piece.bytes)
    units = max(1, min(_MOST_UNITS, sum(piece.bytes for piece in shaped) // _UNIT_BYTES))
    return Moving(shaped, units)


def _shaped(piece: Piece) -> Piece:
    *axes, run = merged_axes(piece)
    return replace(piece, axes=tuple(_outermost(axes)), run=run.extent)


def merged_axes(piece: Piece) -> list[Axis]:
    """Return as few axes as possible, in the target's order as the piece's are; the last one is the run, of bytes."""
    axes: list[Axis] = []
    for axis in (*(a for a in piece.axes if a.extent > 1 or a.table is not None), Axis(piece.run, 1, 1)):
        last = axes[-1] if axes else None
        if last and _continues(last, axis, piece.source is None):
            axes[-1] = Axis(last.extent * axis.extent, axis.source, axis.target)
        else:
            axes.append(axis)
    return axes


def _continues(outer: Axis, inner: Axis, fills: bool) -> bool:
    if outer.table is not None or inner.table is not None:
        return False
    return outer.target == inner.extent * inner.target and (fills or outer.source == inner.extent * inner.source)


def _outermost(axes: list[Axis]) -> list[Axis]:
    """Return the axes with one in front that is long enough to be shared out, where there is one."""
    if not axes or axes[0].extent >= _MOST_UNITS:
        return axes
    longest = max(range(len(axes)), key=lambda number: axes[number].extent)
    if longest == len(axes) - 1 and len(axes) > 1:
        return axes  # the innermost one goes along neighbours
    return [axes[longest], *axes[:longest], *axes[longest + 1 :]]


def nanoseconds(kernel: Moving) -> int:
    """Return about how long it takes one thread."""

    def cost(piece: Piece) -> float:
        per_run: Callable[[int], float] = (lambda run: run) if piece.codes is not None else (lambda run: 1 + run / 16)
        return piece.bytes / piece.run * per_run(piece.run)

    return int(sum(map(cost, kernel.pieces)))
