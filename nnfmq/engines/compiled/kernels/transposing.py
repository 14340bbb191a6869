"""Elements whose neighbours in memory change: square tiles, transposed in registers.

What is contiguous in the source are the *rows* of the target's tiles, what is contiguous in the target their *columns*;
both sides are read and written in vectors. All extents and steps are constants in memory and not in the code, so that
a model that has many such operations has this kernel once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nnfmq.engines.compiled.emission import I8, I16, I32, I64, Emitter, Value, vector
from nnfmq.engines.compiled.kernels.moving import Axis, Piece, merged_axes
from nnfmq.engines.compiled.target import Target

__all__ = ["Transposing", "plan_transposing"]

_UNITS = 8
_LEAST_BYTES = 1 << 14
_LEAST_EDGE = 4
_ELEMENTS = {1: I8, 2: I16, 4: I32}
_MOST_EDGE = 8  # twice of it for bytes takes a quarter off the time, but compiles four times as long
_NUMBERS = 12


@dataclass(frozen=True, slots=True)
class Transposing:
    """Tiles of `edge` times `edge` elements of `size` bytes."""

    size: int
    edge: int
    units: int

    def scratch_bytes(self, target: Target) -> int:
        """None."""
        return 0

    def emit(self, e: Emitter) -> None:
        """Table: input, output, the numbers that `plan_transposing` made."""
        image, out, numbers = map(e.argument, range(3))
        loaded = [e.load(I64, numbers, 8 * n) for n in range(_NUMBERS)]
        offset, strips, of_one, inner, far_source, near_source, far_target, near_target = loaded[:8]
        rows, row_step, columns, column_step = loaded[8:]
        source, b = e.at(image, offset), e.b
        begin, end = (b.udiv(b.mul(bound, strips), e.i64(self.units)) for bound in (e.begin, e.end))
        rest = b.icmp_unsigned("<", b.mul(of_one, e.i64(self.edge)), rows)
        with e.loop(begin, end) as number:
            outer, strip = b.udiv(number, of_one), b.urem(number, of_one)
            far, near = b.udiv(outer, inner), b.urem(outer, inner)
            plane = e.at(source, b.add(b.mul(far, far_source), b.mul(near, near_source)))
            place = e.at(out, b.add(b.mul(far, far_target), b.mul(near, near_target)))
            is_last = b.and_(rest, b.icmp_unsigned("==", strip, b.sub(of_one, e.i64(1))))
            # the rows beside the last whole tile, in the same share of the work as the rows they have in common
            with e.loop(0, b.select(is_last, e.i64(2), e.i64(1))) as more:
                row = b.mul(b.add(strip, more), e.i64(self.edge))
                row = e.intrinsic("llvm.smin", row, b.sub(rows, e.i64(self.edge)))
                first = e.at(place, b.mul(row, row_step))
                self._emit_strip(e, e.at(plane, e.mul(row, self.size)), first, row_step, columns, column_step)
        e.finish()

    def _emit_strip(
        self, e: Emitter, source: Value, target: Value, row_step: Value, columns: Value, column_step: Value
    ) -> None:
        kind, last = vector(_ELEMENTS[self.size], self.edge), e.b.sub(columns, e.i64(self.edge))
        with e.loop(0, columns, self.edge) as column:
            column = e.intrinsic("llvm.smin", column, last)
            first = e.at(source, e.b.mul(column, column_step))
            read = [e.load(kind, first, e.mul(column_step, k)) for k in range(self.edge)]
            place = e.at(target, e.mul(column, self.size))
            for k, value in enumerate(transposed(e, read, self.size)):
                e.store(value, place, e.mul(row_step, k))


def transposed(e: Emitter, rows: Sequence[Value], size: int) -> list[Value]:
    """Return the columns of a square of vectors of a power of two elements.

    First squares within 16 bytes, by interleaving; then these squares change places.
    """
    count = len(rows)
    within = min(count, 16 // size)
    result = list(rows)
    for first in range(0, count, within):
        result[first : first + within] = _interleaved(e, result[first : first + within], within)
    step = within
    while step < count:
        for i in range(count):
            if not i & step:
                one, other = result[i], result[i + step]
                low = [count + lane - step if lane & step else lane for lane in range(count)]
                high = [count + lane if lane & step else lane + step for lane in range(count)]
                result[i], result[i + step] = e.shuffle(one, other, low), e.shuffle(one, other, high)
        step *= 2
    return result


def _interleaved(e: Emitter, rows: Sequence[Value], within: int) -> list[Value]:
    """Transpose each square of `within` lanes."""
    count, half, result = rows[0].type.count, within // 2, list(rows)

    def order(first: int) -> list[int]:
        firsts = [block + first + k for block in range(0, count, within) for k in range(half)]
        return [lane for one in firsts for lane in (one, count + one)]

    for _ in range(within.bit_length() - 1):
        pairs = list(zip(result[:half], result[half:], strict=True))
        result = [e.shuffle(one, other, order(first)) for one, other in pairs for first in (0, half)]
    return result


def plan_transposing(piece: Piece, size: int, target: Target) -> tuple[Transposing, bytes] | None:
    """Return the kernel of a piece and its numbers, or None where no tile fits. It is alone, from argument 0 to 1."""
    if piece.source is None or piece.codes is not None or piece.filler is not None:
        return None
    *axes, run = merged_axes(piece)
    if run.extent != size or any(axis.table is not None for axis in axes):
        return None
    rows = next((axis for axis in axes[:-1] if axis.source == size), None)
    if rows is None or axes[-1].target != size or len(axes) > 4:
        return None
    columns = axes[-1]
    most = min(rows.extent, columns.extent, target.lanes if size == 4 else _MOST_EDGE)
    edge = 1 << (most.bit_length() - 1)
    if edge < _LEAST_EDGE:
        return None
    outer = [axis for axis in axes[:-1] if axis is not rows]
    far, near = [Axis(1, 0, 0)] * (2 - len(outer)) + outer
    strips = rows.extent // edge
    numbers = (
        *(piece.source_offset, far.extent * near.extent * strips, strips, near.extent),
        *(far.source, near.source, far.target, near.target),
        *(rows.extent, rows.target, columns.extent, columns.source),
    )
    total = size * math.prod(axis.extent for axis in axes)
    return Transposing(size, edge, _UNITS if total >= _LEAST_BYTES else 1), np.array(numbers, "<i8").tobytes()
