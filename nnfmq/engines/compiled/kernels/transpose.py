"""Elements whose neighbours in memory change: square tiles, transposed in registers, and two or three planes woven.

What is contiguous in the source are the *rows* of the target's tiles, what is contiguous in the target their *columns*;
both sides are read and written in vectors. All extents and steps are constants in memory and not in the code, so that
a model that has many such operations has these kernels once.

Work is cut into strips of one axis, and strips into vectors. The last vector of a strip begins earlier where its length
is no multiple; only the last strip is longer than the others, so that none is shorter than a vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from nnfmq.engines.compiled.ir_builder import I8, I16, I32, I64, KernelBuilder, Value, vector
from nnfmq.engines.compiled.kernels.strided_copy import CopyAxis, CopyRegion, coalesced_axes
from nnfmq.engines.compiled.target import Target

__all__ = ["InterleaveKernel", "TransposeKernel", "plan_transpose"]

_UNITS = 8
_LEAST_BYTES = 1 << 14
_LEAST_EDGE = 4
_MOST_EDGE = 8  # twice of it for bytes takes a quarter off the time, but compiles four times as long
_MOST_PLANES = 3
_LONG_STRIP = 32  # vectors
_NUMBERS = 13
_ELEMENTS = {1: I8, 2: I16, 4: I32}


@dataclass(frozen=True, slots=True)
class TransposeKernel:
    """Tiles of `edge` times `edge` elements of `size` bytes."""

    size: int
    edge: int
    work_items: int

    compile_cost = 1

    def scratch_bytes(self, target: Target) -> int:
        """None."""
        return 0

    def emit(self, kb: KernelBuilder) -> None:
        """Table: input, output, the numbers that `plan_transposing` made."""
        _emit_strips(kb, self.work_items, self.edge, self._emit_strip)

    def _emit_strip(self, kb: KernelBuilder, source: Value, target: Value, row: Value, steps: Sequence[Value]) -> None:
        columns, row_step, column_step = steps
        kind, last = vector(_ELEMENTS[self.size], self.edge), kb.ir.sub(columns, kb.i64(self.edge))
        source, target = kb.at(source, kb.mul(row, self.size)), kb.at(target, kb.ir.mul(row, row_step))
        with kb.loop(0, columns, self.edge) as column:
            column = kb.intrinsic("llvm.smin", column, last)
            first = kb.at(source, kb.ir.mul(column, column_step))
            read = [kb.load(kind, first, kb.mul(column_step, k)) for k in range(self.edge)]
            place = kb.at(target, kb.mul(column, self.size))
            for k, value in enumerate(transposed(kb, read, self.size)):
                kb.store(value, place, kb.mul(row_step, k))


@dataclass(frozen=True, slots=True)
class InterleaveKernel:
    """So many `planes` with `edge` elements of `size` bytes from each: side by side on one side, a step apart on the
    other, which is the target's unless it `joins` them.
    """

    size: int
    edge: int
    planes: int
    joins: bool
    work_items: int

    compile_cost = 1

    def scratch_bytes(self, target: Target) -> int:
        """None."""
        return 0

    def emit(self, kb: KernelBuilder) -> None:
        """Table: input, output, the numbers that `plan_transposing` made."""
        _emit_strips(kb, self.work_items, self.edge, self._emit_vectors)

    def _emit_vectors(
        self, kb: KernelBuilder, source: Value, target: Value, first: Value, steps: Sequence[Value]
    ) -> None:
        apart, step, element = (source if self.joins else target), steps[1], _ELEMENTS[self.size]
        places = [kb.at(kb.at(apart, kb.mul(step, k)), kb.mul(first, self.size)) for k in range(self.planes)]
        count, whole = self.edge, kb.mul(first, self.size * self.planes)
        if not self.joins:
            woven = kb.load(vector(element, count * self.planes), source, whole)
            for k, place in enumerate(places):
                kb.store(kb.shuffle(woven, woven, range(k, count * self.planes, self.planes)), place)
            return
        planes = [kb.load(vector(element, count), place) for place in places]
        pair = kb.shuffle(planes[0], planes[1], range(2 * count))
        third = planes[2] if self.planes == 3 else planes[1]
        other = kb.shuffle(third, third, [*range(count), *[0] * count])
        order = [k * count + n for n in range(count) for k in range(self.planes)]
        kb.store(kb.shuffle(pair, other, order), target, whole)


def _emit_strips(
    kb: KernelBuilder,
    work_items: int,
    edge: int,
    body: Callable[[KernelBuilder, Value, Value, Value, Sequence[Value]], None],
) -> None:
    """Emit the loops over strips and their vectors: `body` gets the tile's source and target, and the first element."""
    image, out, numbers = map(kb.argument, range(3))
    loaded, b = [kb.load(I64, numbers, 8 * n) for n in range(_NUMBERS)], kb.ir
    offset, strips, of_one, length, extent, inner, far_source, far_target, near_source, near_target = loaded[:10]
    begin, end = (b.udiv(b.mul(bound, strips), kb.i64(work_items)) for bound in (kb.begin, kb.end))
    with kb.loop(begin, end) as number:
        outer, strip = b.udiv(number, of_one), b.urem(number, of_one)
        far, near = b.udiv(outer, inner), b.urem(outer, inner)
        source = kb.at(kb.at(image, offset), b.add(b.mul(far, far_source), b.mul(near, near_source)))
        target = kb.at(out, b.add(b.mul(far, far_target), b.mul(near, near_target)))
        start = b.mul(strip, length)
        is_last = b.icmp_unsigned("==", strip, b.sub(of_one, kb.i64(1)))
        stop = b.select(is_last, extent, b.add(start, length))
        with kb.loop(start, stop, edge) as first:
            body(kb, source, target, kb.intrinsic("llvm.smin", first, b.sub(stop, kb.i64(edge))), loaded[10:])
    kb.return_void()


def transposed(kb: KernelBuilder, rows: Sequence[Value], size: int) -> list[Value]:
    """Return the columns of a square of vectors of a power of two elements.

    First squares within 16 bytes, by interleaving; then these squares change places.
    """
    count = len(rows)
    within = min(count, 16 // size)
    result = list(rows)
    for first in range(0, count, within):
        result[first : first + within] = _interleaved(kb, result[first : first + within], within)
    step = within
    while step < count:
        for i in range(count):
            if not i & step:
                one, other = result[i], result[i + step]
                low = [count + lane - step if lane & step else lane for lane in range(count)]
                high = [count + lane if lane & step else lane + step for lane in range(count)]
                result[i], result[i + step] = kb.shuffle(one, other, low), kb.shuffle(one, other, high)
        step *= 2
    return result


def _interleaved(kb: KernelBuilder, rows: Sequence[Value], within: int) -> list[Value]:
    """Transpose each square of `within` lanes."""
    count, half, result = rows[0].type.count, within // 2, list(rows)

    def order(first: int) -> list[int]:
        firsts = [block + first + k for block in range(0, count, within) for k in range(half)]
        return [lane for one in firsts for lane in (one, count + one)]

    for _ in range(within.bit_length() - 1):
        pairs = list(zip(result[:half], result[half:], strict=True))
        result = [kb.shuffle(one, other, order(first)) for one, other in pairs for first in (0, half)]
    return result


def plan_transpose(
    piece: CopyRegion, size: int, target: Target
) -> tuple[TransposeKernel | InterleaveKernel, bytes] | None:
    """Return the kernel of a piece that is alone, from argument 0 to 1, and its numbers; None where none fits."""
    if (piece.source, piece.target) != (0, 1) or piece.codes is not None or piece.filler is not None:
        return None
    *axes, run = coalesced_axes(piece)
    if run.extent != size or any(axis.table is not None for axis in axes):
        return None
    rows = next((axis for axis in axes[:-1] if axis.source == size), None)
    if rows is None or axes[-1].target != size or len(axes) > 4:
        return None
    columns = axes[-1]
    total = size * math.prod(axis.extent for axis in axes)
    work_items = _UNITS if total >= _LEAST_BYTES else 1
    most = target.lanes if size == 4 else _MOST_EDGE
    edge = 1 << (min(rows.extent, columns.extent, most).bit_length() - 1)
    kernel: TransposeKernel | InterleaveKernel | None = None
    if edge >= _LEAST_EDGE:
        kernel, strip, long, step = TransposeKernel(size, edge, work_items), edge, rows, rows.target
    elif rows.target == columns.extent * size and 1 < columns.extent <= _MOST_PLANES and rows.extent >= most:
        kernel, strip = InterleaveKernel(size, most, columns.extent, True, work_items), _LONG_STRIP * most
        long, step = rows, columns.source
    elif columns.source == rows.extent * size and 1 < rows.extent <= _MOST_PLANES and columns.extent >= most:
        kernel, strip = InterleaveKernel(size, most, rows.extent, False, work_items), _LONG_STRIP * most
        long, step = columns, rows.target
    if kernel is None:
        return None
    outer = [axis for axis in axes[:-1] if axis is not rows]
    far, near = [CopyAxis(1, 0, 0)] * (2 - len(outer)) + outer
    of_one = max(1, long.extent // strip)
    numbers = (
        *(piece.source_offset, far.extent * near.extent * of_one, of_one, strip, long.extent, near.extent),
        *(far.source, far.target, near.source, near.target, columns.extent, step, columns.source),
    )
    return kernel, np.array(numbers, "<i8").tobytes()
