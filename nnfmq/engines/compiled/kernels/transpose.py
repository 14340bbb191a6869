"""Transposes with register tiles, and interleaving of two or three planes.

*Rows* are contiguous in the source, *columns* in the target; both sides are read and written in vectors. All extents
and strides are run-time parameters, so that a model with many transposes compiles few kernels.

The rows' axis is cut into strips, and strips into tiles. The last tile of a strip starts early if the strip's length is
no multiple of the tile; only the last strip is longer than the others, so that none is shorter than a tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nnfmq.engines.compiled.ir_builder import I8, I16, I32, KernelBuilder, Value, load_params, pack_params, vector
from nnfmq.engines.compiled.kernels.strided_copy import CopyAxis, CopyRegion, coalesced_axes
from nnfmq.engines.compiled.target import Target

__all__ = ["InterleaveKernel", "TransposeKernel", "plan_transpose"]

_WORK_ITEMS = 8
_MIN_PARALLEL_BYTES = 1 << 14
_MIN_TILE = 4
_MAX_TILE = 8  # for 1 and 2 bytes. With 16, bytes take a quarter less time, but four times as long to compile.
_MAX_PLANES = 3
_INTERLEAVE_STRIP = 32  # vectors
_ELEMENT_TYPES = {1: I8, 2: I16, 4: I32}


class _TransposeParams(NamedTuple):
    """Run-time parameters; strides are in bytes. The outer and inner loop go around the strips of a row axis.

    `columns`, `step` and `column_stride` depend on the kernel: for tiles, the number of columns, the target's row
    stride and the source's column stride; for interleaving, `step` is the stride between planes.
    """

    source_offset: Value
    strips: Value
    strips_per_row_axis: Value
    strip: Value
    rows: Value
    inner_extent: Value
    outer_source_stride: Value
    outer_target_stride: Value
    inner_source_stride: Value
    inner_target_stride: Value
    columns: Value
    step: Value
    column_stride: Value


@dataclass(frozen=True, slots=True)
class TransposeKernel:
    """A transpose by square tiles of `tile_size` elements of `element_bytes`."""

    element_bytes: int
    tile_size: int
    work_items: int

    compile_cost = 1

    def scratch_bytes(self, target: Target) -> int:
        """Return 0: no scratch is used."""
        return 0

    def emit(self, kb: KernelBuilder) -> None:
        """Args: input, output, parameters."""
        _emit_strips(kb, self.work_items, self.tile_size, self._emit_tiles)

    def _emit_tiles(
        self, kb: KernelBuilder, source: Value, target: Value, row: Value, params: _TransposeParams
    ) -> None:
        """Transpose the tiles of `tile_size` rows, from `row` on, along all columns."""
        size, tile = self.element_bytes, self.tile_size
        kind, last = vector(_ELEMENT_TYPES[size], tile), kb.ir.sub(params.columns, kb.i64(tile))
        source, target = kb.at(source, kb.mul(row, size)), kb.at(target, kb.ir.mul(row, params.step))
        with kb.loop(0, params.columns, tile) as column:
            column = kb.intrinsic("llvm.smin", column, last)
            first = kb.at(source, kb.ir.mul(column, params.column_stride))
            rows = [kb.load(kind, first, kb.mul(params.column_stride, k)) for k in range(tile)]
            block = kb.at(target, kb.mul(column, size))
            for k, value in enumerate(_transpose_registers(kb, rows, size)):
                kb.store(value, block, kb.mul(params.step, k))


@dataclass(frozen=True, slots=True)
class InterleaveKernel:
    """Interleaves `planes` planes into one array if `interleaves`, else deinterleaves (XNNPACK x8-zip, NEON vld3).

    A tile is `tile_size` elements of `element_bytes` of each plane.
    """

    element_bytes: int
    tile_size: int
    planes: int
    interleaves: bool
    work_items: int

    compile_cost = 1

    def scratch_bytes(self, target: Target) -> int:
        """Return 0: no scratch is used."""
        return 0

    def emit(self, kb: KernelBuilder) -> None:
        """Args: input, output, parameters."""
        _emit_strips(kb, self.work_items, self.tile_size, self._emit_vectors)

    def _emit_vectors(
        self, kb: KernelBuilder, source: Value, target: Value, first: Value, params: _TransposeParams
    ) -> None:
        """Copy one vector of each plane, from element `first` on."""
        planar, element = (source if self.interleaves else target), _ELEMENT_TYPES[self.element_bytes]
        addresses = [
            kb.at(kb.at(planar, kb.mul(params.step, k)), kb.mul(first, self.element_bytes)) for k in range(self.planes)
        ]
        count, offset = self.tile_size, kb.mul(first, self.element_bytes * self.planes)
        if not self.interleaves:
            interleaved = kb.load(vector(element, count * self.planes), source, offset)
            for k, address in enumerate(addresses):
                plane = kb.shuffle(interleaved, interleaved, range(k, count * self.planes, self.planes))
                kb.store(plane, address)
            return
        planes = [kb.load(vector(element, count), address) for address in addresses]
        pair = kb.shuffle(planes[0], planes[1], range(2 * count))
        third = planes[2] if self.planes == 3 else planes[1]
        other = kb.shuffle(third, third, [*range(count), *[0] * count])
        mask = [k * count + n for n in range(count) for k in range(self.planes)]
        kb.store(kb.shuffle(pair, other, mask), target, offset)


def _emit_strips(
    kb: KernelBuilder,
    work_items: int,
    tile_size: int,
    emit_tile: Callable[[KernelBuilder, Value, Value, Value, _TransposeParams], None],
) -> None:
    """Emit the loops over strips and their tiles around `emit_tile`, which gets the strip's addresses and first row."""
    image, out, constant = map(kb.argument, range(3))
    params, ir = load_params(kb, constant, _TransposeParams), kb.ir
    begin, end = (ir.udiv(ir.mul(bound, params.strips), kb.i64(work_items)) for bound in (kb.begin, kb.end))
    with kb.loop(begin, end) as number:
        position, strip = ir.udiv(number, params.strips_per_row_axis), ir.urem(number, params.strips_per_row_axis)
        outer, inner = ir.udiv(position, params.inner_extent), ir.urem(position, params.inner_extent)
        source = kb.at(
            kb.at(image, params.source_offset),
            ir.add(ir.mul(outer, params.outer_source_stride), ir.mul(inner, params.inner_source_stride)),
        )
        target = kb.at(
            out, ir.add(ir.mul(outer, params.outer_target_stride), ir.mul(inner, params.inner_target_stride))
        )
        start = ir.mul(strip, params.strip)
        is_last = ir.icmp_unsigned("==", strip, ir.sub(params.strips_per_row_axis, kb.i64(1)))
        stop = ir.select(is_last, params.rows, ir.add(start, params.strip))
        with kb.loop(start, stop, tile_size) as row:
            emit_tile(kb, source, target, kb.intrinsic("llvm.smin", row, ir.sub(stop, kb.i64(tile_size))), params)
    kb.return_void()


def _transpose_registers(kb: KernelBuilder, rows: Sequence[Value], element_bytes: int) -> list[Value]:
    """Return the columns of a square tile of 2^n vectors.

    Squares that fit 16 bytes are transposed by interleaving, then these squares are exchanged across the diagonal:
    x86 interleaves within 128 bits.
    """
    count = len(rows)
    square = min(count, 16 // element_bytes)
    result = list(rows)
    for first in range(0, count, square):
        result[first : first + square] = _transpose_squares(kb, result[first : first + square], square)
    step = square
    while step < count:
        for i in range(count):
            if not i & step:
                one, other = result[i], result[i + step]
                low = [count + lane - step if lane & step else lane for lane in range(count)]
                high = [count + lane if lane & step else lane + step for lane in range(count)]
                result[i], result[i + step] = kb.shuffle(one, other, low), kb.shuffle(one, other, high)
        step *= 2
    return result


def _transpose_squares(kb: KernelBuilder, rows: Sequence[Value], square: int) -> list[Value]:
    """Transpose each square of `square` lanes by log2(square) rounds of interleaving halves."""
    count, half, result = rows[0].type.count, square // 2, list(rows)

    def interleave_mask(first: int) -> list[int]:
        lanes = [block + first + k for block in range(0, count, square) for k in range(half)]
        return [index for lane in lanes for index in (lane, count + lane)]

    for _ in range(square.bit_length() - 1):
        pairs = list(zip(result[:half], result[half:], strict=True))
        result = [kb.shuffle(one, other, interleave_mask(first)) for one, other in pairs for first in (0, half)]
    return result


def plan_transpose(
    region: CopyRegion, element_bytes: int, target: Target
) -> tuple[TransposeKernel | InterleaveKernel, bytes] | None:
    """Return the kernel and parameters of a copy of one region from argument 0 to 1, or None if it is no transpose."""
    if (region.source_arg, region.target_arg) != (0, 1) or region.lut_arg is not None or region.padding_arg is not None:
        return None
    *axes, run = coalesced_axes(region)
    if run.extent != element_bytes or any(axis.index_table is not None for axis in axes):
        return None
    rows = next((axis for axis in axes[:-1] if axis.source_stride == element_bytes), None)
    if rows is None or axes[-1].target_stride != element_bytes or len(axes) > 4:
        return None
    columns = axes[-1]
    total_bytes = element_bytes * math.prod(axis.extent for axis in axes)
    work_items = _WORK_ITEMS if total_bytes >= _MIN_PARALLEL_BYTES else 1
    max_tile = target.lanes if element_bytes == 4 else _MAX_TILE
    tile = 1 << (min(rows.extent, columns.extent, max_tile).bit_length() - 1)
    kernel: TransposeKernel | InterleaveKernel | None = None
    if tile >= _MIN_TILE:
        kernel, strip = TransposeKernel(element_bytes, tile, work_items), tile
        long, step = rows, rows.target_stride
    elif (
        rows.target_stride == columns.extent * element_bytes
        and 1 < columns.extent <= _MAX_PLANES
        and rows.extent >= max_tile
    ):
        kernel = InterleaveKernel(element_bytes, max_tile, columns.extent, True, work_items)
        strip, long, step = _INTERLEAVE_STRIP * max_tile, rows, columns.source_stride
    elif (
        columns.source_stride == rows.extent * element_bytes
        and 1 < rows.extent <= _MAX_PLANES
        and columns.extent >= max_tile
    ):
        kernel = InterleaveKernel(element_bytes, max_tile, rows.extent, False, work_items)
        strip, long, step = _INTERLEAVE_STRIP * max_tile, columns, rows.target_stride
    if kernel is None:
        return None
    others = [axis for axis in axes[:-1] if axis is not rows]
    outer, inner = [CopyAxis(1, 0, 0)] * (2 - len(others)) + others
    strips_per_row_axis = max(1, long.extent // strip)
    params = _TransposeParams(
        source_offset=region.source_offset,
        strips=outer.extent * inner.extent * strips_per_row_axis,
        strips_per_row_axis=strips_per_row_axis,
        strip=strip,
        rows=long.extent,
        inner_extent=inner.extent,
        outer_source_stride=outer.source_stride,
        outer_target_stride=outer.target_stride,
        inner_source_stride=inner.source_stride,
        inner_target_stride=inner.target_stride,
        columns=columns.extent,
        step=step,
        column_stride=columns.source_stride,
    )
    return kernel, pack_params(params)
