"""Kernels without arithmetic: strided copies, and transposes with register tiles.

A kernel is a list of `CopyRegion`s with disjoint destinations. A region is a loop nest of (extent, source stride,
target stride) in bytes around a contiguous run; along an axis, source offsets may also come from an index table (a
gather). Work is split along the outermost axis. Transposes, in which no long run is contiguous on both sides, use
register tiles instead (`transpose`). `StridedView` describes arrays for lowering rules; `copy_region` makes a region of
two views.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from nnfmq.base.frozen import dataclass
from nnfmq.engines.compiled.ir_builder import I8, I16, I32, I64, KernelBuilder, Value, load_params, pack_params, vector
from nnfmq.engines.compiled.target import Target
from nnfmq.operations.declaration import Shape, Tensor

__all__ = [
    "PADDING_OFFSET",
    "AffineRequant",
    "CopyAxis",
    "CopyRegion",
    "InterleaveKernel",
    "StridedCopy",
    "StridedView",
    "TransposeKernel",
    "coalesced_axes",
    "copy_region",
    "estimate_copy_ns",
    "plan_strided_copy",
    "plan_transpose",
]

T = TypeVar("T")

PADDING_OFFSET = -(1 << 40)
"""An offset in an index table for which the region's padding run is read. Added to any offset it stays negative."""

_MIN_BYTES_PER_ITEM = 1 << 13
_MAX_WORK_ITEMS = 16
_MAX_UNROLLED_EXTENT = 4  # of an innermost loop


@dataclass(frozen=True, slots=True)
class CopyAxis:
    """A loop of a region: `extent` iterations, with strides in bytes.

    With an `index_table`, an argument index, the source offsets are 64-bit integers in that constant, from byte
    `source_stride` on.
    """

    extent: int
    source_stride: int
    target_stride: int
    index_table: int | None = None


@dataclass(frozen=True, slots=True)
class AffineRequant:
    """A fixed-point affine map equal to a requantization table: (value · slope + offset) >> shift, clamped to a byte.

    Signed values are mapped as unsigned ones, with the sign bit flipped before and after.
    """

    slope: int
    offset: int
    shift: int
    is_signed: bool


@dataclass(frozen=True, slots=True)
class CopyRegion:
    """A loop nest that copies runs of `run_bytes`, axes outermost first. `..._arg` are indexes of the argument array.

    Without a source, runs are filled with `fill_byte`. With `lut_arg`, each byte goes through that table of 256 bytes;
    `affine` is an equal map, if there is one. `padding_arg` is a run that is read for entries of index tables that are
    PADDING_OFFSET.
    """

    source_arg: int | None
    target_arg: int
    source_offset: int
    target_offset: int
    axes: tuple[CopyAxis, ...]
    run_bytes: int
    fill_byte: int = 0
    lut_arg: int | None = None
    affine: AffineRequant | None = None
    padding_arg: int | None = None

    @property
    def bytes(self) -> int:
        """Number of bytes that the region writes."""
        return self.run_bytes * math.prod(axis.extent for axis in self.axes)


@dataclass(frozen=True, slots=True)
class StridedCopy:
    """The regions of a copy. Each work item copies a share of every region."""

    regions: tuple[CopyRegion, ...]
    work_items: int

    compile_cost = 1

    def scratch_bytes(self, target: Target) -> int:
        """Return 0: no scratch is used."""
        return 0

    def emit(self, kb: KernelBuilder) -> None:
        """Args: as the regions number them."""
        for region in self.regions:
            args = {axis.index_table for axis in region.axes} | {region.lut_arg, region.padding_arg}
            tables = {arg: kb.argument(arg) for arg in sorted(arg for arg in args if arg is not None)}
            _RegionBuilder(kb, region, self.work_items, tables).emit()
        kb.return_void()


@dataclass(frozen=True, slots=True)
class _RegionBuilder:
    """Emits one region. `tables` are the addresses of its constants, by argument index."""

    kb: KernelBuilder
    region: CopyRegion
    work_items: int
    tables: Mapping[int, Value]

    def emit(self) -> None:
        kb, region = self.kb, self.region
        source = None if region.source_arg is None else kb.at(kb.argument(region.source_arg), region.source_offset)
        target = kb.at(kb.argument(region.target_arg), region.target_offset)
        if region.axes:
            self._emit_axis(0, source, 0, target)
            return
        begin, end = self._share(region.run_bytes)
        self._copy_run(source, begin, kb.at(target, begin), kb.ir.sub(end, begin))

    def _share(self, extent: int) -> tuple[Value, Value]:
        """Return the range of the outermost `extent` iterations that belongs to the call's work items."""
        kb = self.kb
        begin, end = (kb.ir.udiv(kb.mul(bound, extent), kb.i64(self.work_items)) for bound in (kb.begin, kb.end))
        return begin, end

    def _emit_axis(self, number: int, source: Value, offset: Value, target: Value) -> None:
        """Emit the loop along axis `number` and the loops inside; `offset` is relative to `source`."""
        kb, region = self.kb, self.region
        if number == len(region.axes):
            self._copy_run(source, offset, target, region.run_bytes)
            return
        axis = region.axes[number]

        def body(index: Value) -> None:
            if axis.index_table is None:
                inner_offset = kb.add(offset, kb.mul(index, axis.source_stride))
            else:
                entry = kb.add(axis.source_stride, kb.mul(index, 8))
                inner_offset = kb.add(offset, kb.load(I64, self.tables[axis.index_table], entry))
            self._emit_axis(number + 1, source, inner_offset, kb.at(target, kb.mul(index, axis.target_stride)))

        if number and number == len(region.axes) - 1 and axis.extent <= _MAX_UNROLLED_EXTENT:
            for index in range(axis.extent):
                body(index)
            return
        begin, end = self._share(axis.extent) if number == 0 else (0, axis.extent)
        with kb.loop(begin, end) as index:
            body(index)

    def _copy_run(self, source: Value, offset: Value, target: Value, count: int | Value) -> None:
        kb, region = self.kb, self.region
        if source is None:
            kb.memset(target, region.fill_byte, count)
            return
        run = kb.at(source, offset)
        if region.padding_arg is not None:
            is_padding = kb.ir.icmp_signed("<", kb.i64(offset), kb.i64(0))
            run = kb.ir.select(is_padding, self.tables[region.padding_arg], run)
        if region.lut_arg is None:
            kb.memcpy(target, run, count)
            return
        self._requantize_run(self.tables[region.lut_arg], run, target, count)

    def _requantize_run(self, lut: Value, run: Value, target: Value, count: int | Value) -> None:
        """Map each byte: whole vectors by the affine map, if there is one, the others by the table."""
        kb, affine, lanes = self.kb, self.region.affine, 2 * self.kb.target.lanes
        aligned_count: int | Value = 0
        if affine is not None:
            aligned_count = count - count % lanes if isinstance(count, int) else kb.ir.and_(count, kb.i64(-lanes))
            with kb.loop(0, aligned_count, lanes) as index:
                kb.store(_apply_affine(kb, affine, kb.load(vector(I8, lanes), run, index)), target, index)
        with kb.loop(aligned_count, count) as index:
            value = kb.ir.zext(kb.load(I8, run, index), I64)
            kb.store(kb.load(I8, lut, value), target, index)


def _apply_affine(kb: KernelBuilder, affine: AffineRequant, values: Value) -> Value:
    lanes = values.type.count
    flip, wide = kb.splat(I8, -0x80 if affine.is_signed else 0, lanes), vector(I32, lanes)
    scaled = kb.ir.mul(kb.ir.zext(kb.ir.xor(values, flip), wide), kb.splat(I32, affine.slope, lanes))
    shifted = kb.ir.ashr(kb.ir.add(scaled, kb.splat(I32, affine.offset, lanes)), kb.splat(I32, affine.shift, lanes))
    clamped = kb.clamp(shifted, kb.splat(I32, 0, lanes), kb.splat(I32, 255, lanes))
    return kb.ir.xor(kb.ir.trunc(clamped, vector(I8, lanes)), flip)


# -- planning ---------------------------------------------------------------------------------------------------------


def plan_strided_copy(regions: Sequence[CopyRegion]) -> StridedCopy:
    """Plan the copy: coalesce axes, choose an outermost axis for each region, and the number of work items."""
    planned = []
    for region in regions:
        if region.bytes:
            *axes, run = coalesced_axes(region)
            planned.append(replace(region, axes=tuple(_with_outermost(axes)), run_bytes=run.extent))
    total_bytes = sum(region.bytes for region in planned)
    return StridedCopy(tuple(planned), max(1, min(_MAX_WORK_ITEMS, total_bytes // _MIN_BYTES_PER_ITEM)))


def coalesced_axes(region: CopyRegion) -> list[CopyAxis]:
    """Return as few axes as possible, in the region's order; the last one is the run, one byte per iteration."""
    axes: list[CopyAxis] = []
    run = CopyAxis(region.run_bytes, 1, 1)
    for axis in (*(a for a in region.axes if a.extent > 1 or a.index_table is not None), run):
        last = axes[-1] if axes else None
        if last and _are_contiguous(last, axis, region.source_arg is None):
            axes[-1] = CopyAxis(last.extent * axis.extent, axis.source_stride, axis.target_stride)
        else:
            axes.append(axis)
    return axes


def _are_contiguous(outer: CopyAxis, inner: CopyAxis, is_fill: bool) -> bool:
    """Return True if two loops visit the same addresses as one loop with the inner strides."""
    if outer.index_table is not None or inner.index_table is not None:
        return False
    source_fits = is_fill or outer.source_stride == inner.extent * inner.source_stride
    return outer.target_stride == inner.extent * inner.target_stride and source_fits


def _with_outermost(axes: list[CopyAxis]) -> list[CopyAxis]:
    """Return the axes with the longest one first, if the first is too short to be shared among threads.

    The innermost axis stays, because its iterations are neighbours in memory.
    """
    if not axes or axes[0].extent >= _MAX_WORK_ITEMS:
        return axes
    longest = max(range(len(axes)), key=lambda number: axes[number].extent)
    if longest == len(axes) - 1 and len(axes) > 1:
        return axes
    return [axes[longest], *axes[:longest], *axes[longest + 1 :]]


def estimate_copy_ns(kernel: StridedCopy) -> int:
    """Return the estimated single-thread time: 1 ns for each run, and for each byte by the way it takes."""

    def estimate(region: CopyRegion) -> float:
        byte_ns = 1 / 16 if region.lut_arg is None else 1 / 4 if region.affine is not None else 1
        return region.bytes * (1 / region.run_bytes + byte_ns)

    return int(sum(map(estimate, kernel.regions)))


# -- views ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StridedView:
    """An array as offset, shape and strides in bytes (as MLIR's strided memref).

    Along an axis with an entry (argument index, offset) in `index_tables`, offsets come from that table instead.
    """

    offset: int
    shape: Shape
    strides: tuple[int, ...]
    index_tables: tuple[tuple[int, int] | None, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> StridedView:
        """Return the view of a whole tensor."""
        return cls.contiguous(tensor.shape, tensor.dtype.itemsize)

    @classmethod
    def contiguous(cls, shape: Shape, element_bytes: int) -> StridedView:
        """Return the view of a C-contiguous array."""
        strides = tuple(element_bytes * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        return cls(0, tuple(shape), strides, (None,) * len(shape))

    def permute(self, permutation: Sequence[int]) -> StridedView:
        """Return the view with its axes in the order of `permutation`."""
        return StridedView(
            self.offset,
            tuple(self.shape[axis] for axis in permutation),
            tuple(self.strides[axis] for axis in permutation),
            tuple(self.index_tables[axis] for axis in permutation),
        )

    def slice(self, axis: int, positions: range) -> StridedView:
        """Return the elements at `positions` along an axis."""
        offset = self.offset + (positions.start * self.strides[axis] if len(positions) else 0)
        return replace(
            self,
            offset=offset,
            shape=_with(self.shape, axis, len(positions)),
            strides=_with(self.strides, axis, self.strides[axis] * positions.step),
        )

    def subview(self, starts: Sequence[int], shape: Shape) -> StridedView:
        """Return the box of `shape` whose first element is at `starts`."""
        offset = self.offset + sum(start * stride for start, stride in zip(starts, self.strides, strict=True))
        return replace(self, offset=offset, shape=tuple(shape))

    def split(self, axis: int, *extents: int) -> StridedView:
        """Return the view with an axis split into several, the last one the fastest."""
        assert math.prod(extents) == self.shape[axis]
        inner = StridedView.contiguous(extents, self.strides[axis])
        after = axis + 1
        return StridedView(
            self.offset,
            (*self.shape[:axis], *inner.shape, *self.shape[after:]),
            (*self.strides[:axis], *inner.strides, *self.strides[after:]),
            (*self.index_tables[:axis], *inner.index_tables, *self.index_tables[after:]),
        )

    def repeat(self, axis: int, count: int) -> StridedView:
        """Return the view with a new axis of stride 0 before `axis`."""
        return StridedView(
            self.offset,
            (*self.shape[:axis], count, *self.shape[axis:]),
            (*self.strides[:axis], 0, *self.strides[axis:]),
            (*self.index_tables[:axis], None, *self.index_tables[axis:]),
        )

    def gather(self, axis: int, extent: int, arg: int, offset: int = 0) -> StridedView:
        """Return the view with the offsets along an axis taken from the constant `arg`, from byte `offset` on."""
        return replace(
            self,
            shape=_with(self.shape, axis, extent),
            strides=_with(self.strides, axis, offset),
            index_tables=_with(self.index_tables, axis, (arg, offset)),
        )


def _with(values: tuple[T, ...], axis: int, value: T) -> tuple[T, ...]:
    return (*values[:axis], value, *values[axis + 1 :])


def copy_region(
    source: StridedView | None,
    target: StridedView,
    element_bytes: int,
    *,
    source_arg: int | None = 0,
    target_arg: int = 1,
    fill_byte: int = 0,
    lut_arg: int | None = None,
    affine: AffineRequant | None = None,
    padding_arg: int | None = None,
) -> CopyRegion:
    """Return the loop nest that copies `source` to `target`, which have one shape; without `source` it fills `target`.

    Args:
        source: The view that is read; None to fill with `fill_byte`.
        target: The view that is written.
        element_bytes: Size of an element.
        source_arg: Index of the source's address among the kernel's arguments.
        target_arg: Index of the target's address among the kernel's arguments.
        fill_byte: Value of each byte that is filled.
        lut_arg: Index of the address of a table of 256 bytes through which each element passes.
        affine: A requantization that each element passes through instead of a table.
        padding_arg: Index of the address from which entries PADDING_OFFSET of a gather read.
    """
    read = source or target
    assert read.shape == target.shape, (read.shape, target.shape)
    axes = tuple(
        CopyAxis(extent, table[1] if table else stride, target_stride, table[0] if table else None)
        for extent, stride, table, target_stride in zip(
            read.shape, read.strides, read.index_tables, target.strides, strict=True
        )
    )
    return CopyRegion(
        None if source is None else source_arg,
        target_arg,
        source.offset if source else 0,
        target.offset,
        axes,
        element_bytes,
        fill_byte,
        lut_arg,
        affine,
        padding_arg,
    )


# ----------------------------------------------------------------------------------------------------------------------
# Transposes with register tiles, and interleaving of two or three planes.
#
# *Rows* are contiguous in the source, *columns* in the target; both sides are read and written in vectors. All extents
# and strides are run-time parameters, so that a model with many transposes compiles few kernels.
#
# The rows' axis is cut into strips, and strips into tiles. The last tile of a strip starts early if the strip's length
# is no multiple of the tile; only the last strip is longer than the others, so that none is shorter than a tile.


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
    has_index = any(axis.index_table is not None for axis in axes)
    if element_bytes not in _ELEMENT_TYPES or run.extent != element_bytes or has_index:
        return None
    rows = next((axis for axis in axes[:-1] if axis.source_stride == element_bytes), None)
    if rows is None or axes[-1].target_stride != element_bytes or len(axes) > 4:
        return None
    columns = axes[-1]
    total_bytes = element_bytes * math.prod(axis.extent for axis in axes)
    chosen = _choose_strips(rows, columns, element_bytes, target, is_parallel=total_bytes >= _MIN_PARALLEL_BYTES)
    if chosen is None:
        return None
    others = [axis for axis in axes[:-1] if axis is not rows]
    outer, inner = [CopyAxis(1, 0, 0)] * (2 - len(others)) + others
    strips_per_row_axis = max(1, chosen.long.extent // chosen.strip)
    params = _TransposeParams(
        source_offset=region.source_offset,
        strips=outer.extent * inner.extent * strips_per_row_axis,
        strips_per_row_axis=strips_per_row_axis,
        strip=chosen.strip,
        rows=chosen.long.extent,
        inner_extent=inner.extent,
        outer_source_stride=outer.source_stride,
        outer_target_stride=outer.target_stride,
        inner_source_stride=inner.source_stride,
        inner_target_stride=inner.target_stride,
        columns=columns.extent,
        step=chosen.step,
        column_stride=columns.source_stride,
    )
    return chosen.kernel, pack_params(params)


class _Strips(NamedTuple):
    """A kernel that transposes in strips of `strip` elements along the axis `long`, which are `step` bytes apart."""

    kernel: TransposeKernel | InterleaveKernel
    strip: int
    long: CopyAxis
    step: int


def _choose_strips(
    rows: CopyAxis, columns: CopyAxis, element_bytes: int, target: Target, *, is_parallel: bool
) -> _Strips | None:
    """Return the kernel for these axes: of tiles, or, if one axis is a few planes, of whole planes; None if neither."""
    work_items = _WORK_ITEMS if is_parallel else 1
    max_tile = target.lanes if element_bytes == 4 else _MAX_TILE
    tile = 1 << (min(rows.extent, columns.extent, max_tile).bit_length() - 1)
    if tile >= _MIN_TILE:
        return _Strips(TransposeKernel(element_bytes, tile, work_items), tile, rows, rows.target_stride)
    strip = _INTERLEAVE_STRIP * max_tile
    joins_planes = rows.target_stride == columns.extent * element_bytes and 1 < columns.extent <= _MAX_PLANES
    if joins_planes and rows.extent >= max_tile:
        kernel = InterleaveKernel(element_bytes, max_tile, columns.extent, True, work_items)
        return _Strips(kernel, strip, rows, columns.source_stride)
    splits_planes = columns.source_stride == rows.extent * element_bytes and 1 < rows.extent <= _MAX_PLANES
    if splits_planes and columns.extent >= max_tile:
        kernel = InterleaveKernel(element_bytes, max_tile, rows.extent, False, work_items)
        return _Strips(kernel, strip, columns, rows.target_stride)
    return None
