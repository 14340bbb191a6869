"""Elements at other places: nests of loops around runs of bytes, which serve all that only copies.

A kernel is made of *pieces* that write disjoint parts of the outputs. A piece goes along its axes, each a step of so
many bytes in what is read and another in what is written, and moves a run at each point. Work is cut along each
piece's outermost axis. Where what is contiguous on one side is not on the other, square tiles are transposed in
registers, so that both sides are read and written in vectors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nnfmq.engines.compiled.ir_builder import I8, I32, I64, KernelBuilder, Value, vector
from nnfmq.engines.compiled.target import Target

__all__ = [
    "PADDING_OFFSET",
    "AffineRequant",
    "CopyAxis",
    "CopyRegion",
    "StridedCopy",
    "coalesced_axes",
    "estimate_copy_ns",
    "plan_strided_copy",
]

PADDING_OFFSET = -(1 << 40)  # an offset in a table for which the piece's filler is read

_UNIT_BYTES = 1 << 13
_MOST_UNITS = 16
_STRAIGHT = 4  # rounds of an innermost loop that are written one after the other


@dataclass(frozen=True, slots=True)
class CopyAxis:
    """`extent` steps, each of so many bytes.

    With a `table` the source's offsets are there, as 64-bit numbers from byte `source` of that entry in the kernel's
    table of addresses on.
    """

    extent: int
    source: int
    target: int
    table: int | None = None


@dataclass(frozen=True, slots=True)
class AffineRequant:
    """What 256 codes may be as well: (code · slope + offset) >> shift, held in a byte; signed codes as if unsigned."""

    slope: int
    offset: int
    shift: int
    signed: bool


@dataclass(frozen=True, slots=True)
class CopyRegion:
    """Runs of `run` bytes from one array to another, by their places in the table of addresses; axes outermost first.

    `source` None: bytes of `fill`. `codes`: the place of 256 codes through which each byte goes, and which `line` tells
    if there is one. `filler`: the place of a run that is read where tables say NOWHERE.
    """

    source: int | None
    target: int
    source_offset: int
    target_offset: int
    axes: tuple[CopyAxis, ...]
    run: int
    fill: int = 0
    codes: int | None = None
    line: AffineRequant | None = None
    filler: int | None = None

    @property
    def bytes(self) -> int:
        """How much it writes."""
        return self.run * math.prod(axis.extent for axis in self.axes)


@dataclass(frozen=True, slots=True)
class StridedCopy:
    """All pieces of a kernel."""

    pieces: tuple[CopyRegion, ...]
    work_items: int

    compile_cost = 1

    def scratch_bytes(self, target: Target) -> int:
        """None."""
        return 0

    def emit(self, kb: KernelBuilder) -> None:
        """Table: as the pieces say."""
        for piece in self.pieces:
            places = {axis.table for axis in piece.axes} | {piece.codes, piece.filler}
            tables = {place: kb.argument(place) for place in sorted(place for place in places if place is not None)}
            _Emission(kb, piece, self.work_items, tables).emit()
        kb.return_void()


@dataclass(frozen=True, slots=True)
class _Emission:
    kb: KernelBuilder
    piece: CopyRegion
    work_items: int
    tables: Mapping[int, Value]

    def emit(self) -> None:
        kb, piece = self.kb, self.piece
        source = None if piece.source is None else kb.at(kb.argument(piece.source), piece.source_offset)
        target = kb.at(kb.argument(piece.target), piece.target_offset)
        if piece.axes:
            self._along(0, source, 0, target)
            return
        begin, end = self._share(piece.run)
        self._move(source, begin, kb.at(target, begin), kb.ir.sub(end, begin))

    def _share(self, extent: int) -> tuple[Value, Value]:
        """Return which of `extent` rounds this call is to do."""
        kb = self.kb
        begin, end = (kb.ir.udiv(kb.mul(bound, extent), kb.i64(self.work_items)) for bound in (kb.begin, kb.end))
        return begin, end

    def _along(self, number: int, source: Value, offset: Value, target: Value) -> None:
        """Emit the loop along axis `number` and what is in it; `offset` is the way from `source` so far."""
        kb, piece = self.kb, self.piece
        if number == len(piece.axes):
            self._move(source, offset, target, piece.run)
            return
        axis = piece.axes[number]

        def step(index: Value) -> None:
            self._along(
                number + 1, source, self._further(axis, offset, index), kb.at(target, kb.mul(index, axis.target))
            )

        if number and number == len(piece.axes) - 1 and axis.extent <= _STRAIGHT:
            for index in range(axis.extent):
                step(index)
            return
        begin, end = self._share(axis.extent) if number == 0 else (0, axis.extent)
        with kb.loop(begin, end) as index:
            step(index)

    def _further(self, axis: CopyAxis, offset: Value, index: Value) -> Value:
        kb = self.kb
        if axis.table is None:
            return kb.add(offset, kb.mul(index, axis.source))
        place = kb.add(axis.source, kb.mul(index, 8))
        return kb.add(offset, kb.load(I64, self.tables[axis.table], place))

    def _move(self, source: Value, offset: Value, target: Value, count: int | Value) -> None:
        kb, piece = self.kb, self.piece
        if source is None:
            kb.memset(target, piece.fill, count)
            return
        place = kb.at(source, offset)
        if piece.filler is not None:
            nowhere = kb.ir.icmp_signed("<", kb.i64(offset), kb.i64(0))
            place = kb.ir.select(nowhere, self.tables[piece.filler], place)
        if piece.codes is None:
            kb.memcpy(target, place, count)
            return
        self._recode(self.tables[piece.codes], place, target, count)

    def _recode(self, codes: Value, place: Value, target: Value, count: int | Value) -> None:
        """Emit the way of each byte through the codes: in vectors along the line, and what is left by the table."""
        kb, line, lanes = self.kb, self.piece.line, 2 * self.kb.target.lanes
        whole = (
            0
            if line is None
            else count - count % lanes
            if isinstance(count, int)
            else kb.ir.and_(count, kb.i64(-lanes))
        )
        if line is not None:
            with kb.loop(0, whole, lanes) as index:
                kb.store(_along_line(kb, line, kb.load(vector(I8, lanes), place, index)), target, index)
        with kb.loop(whole, count) as index:
            code = kb.ir.zext(kb.load(I8, place, index), I64)
            kb.store(kb.load(I8, codes, code), target, index)


def _along_line(kb: KernelBuilder, line: AffineRequant, codes: Value) -> Value:
    lanes = codes.type.count
    flip, wide = kb.splat(I8, -0x80 if line.signed else 0, lanes), vector(I32, lanes)
    scaled = kb.ir.mul(kb.ir.zext(kb.ir.xor(codes, flip), wide), kb.splat(I32, line.slope, lanes))
    shifted = kb.ir.ashr(kb.ir.add(scaled, kb.splat(I32, line.offset, lanes)), kb.splat(I32, line.shift, lanes))
    held = kb.clamp(shifted, kb.splat(I32, 0, lanes), kb.splat(I32, 255, lanes))
    return kb.ir.xor(kb.ir.trunc(held, vector(I8, lanes)), flip)


def plan_strided_copy(pieces: Sequence[CopyRegion]) -> StridedCopy:
    """Merge what is contiguous, choose an outermost axis for each piece, and the number of units."""
    shaped = tuple(_shaped(piece) for piece in pieces if piece.bytes)
    work_items = max(1, min(_MOST_UNITS, sum(piece.bytes for piece in shaped) // _UNIT_BYTES))
    return StridedCopy(shaped, work_items)


def _shaped(piece: CopyRegion) -> CopyRegion:
    *axes, run = coalesced_axes(piece)
    return replace(piece, axes=tuple(_outermost(axes)), run=run.extent)


def coalesced_axes(piece: CopyRegion) -> list[CopyAxis]:
    """Return as few axes as possible, in the target's order as the piece's are; the last one is the run, of bytes."""
    axes: list[CopyAxis] = []
    for axis in (*(a for a in piece.axes if a.extent > 1 or a.table is not None), CopyAxis(piece.run, 1, 1)):
        last = axes[-1] if axes else None
        if last and _continues(last, axis, piece.source is None):
            axes[-1] = CopyAxis(last.extent * axis.extent, axis.source, axis.target)
        else:
            axes.append(axis)
    return axes


def _continues(outer: CopyAxis, inner: CopyAxis, fills: bool) -> bool:
    if outer.table is not None or inner.table is not None:
        return False
    return outer.target == inner.extent * inner.target and (fills or outer.source == inner.extent * inner.source)


def _outermost(axes: list[CopyAxis]) -> list[CopyAxis]:
    """Return the axes with one in front that is long enough to be shared out, where there is one."""
    if not axes or axes[0].extent >= _MOST_UNITS:
        return axes
    longest = max(range(len(axes)), key=lambda number: axes[number].extent)
    if longest == len(axes) - 1 and len(axes) > 1:
        return axes  # the innermost one goes along neighbours
    return [axes[longest], *axes[:longest], *axes[longest + 1 :]]


def estimate_copy_ns(kernel: StridedCopy) -> int:
    """Return about how long it takes one thread."""

    def cost(piece: CopyRegion) -> float:
        each = 1 / 16 if piece.codes is None else 1 / 4 if piece.line is not None else 1
        return piece.bytes * (1 / piece.run + each)

    return int(sum(map(cost, kernel.pieces)))
