"""Depthwise convolution (DEPTHWISE_CONV_2D) of float32: each channel by itself, over an input row buffer.

If the depth multiplier is above 1, packing repeats each input channel. A work item is a block of output rows times a
block of channels, whose row buffer stays in a near cache.

As in `gemm`, the last tile of a row starts early and recomputes positions, and shapes are run-time values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field, replace
from typing import Any, NamedTuple

import numpy as np

from nnfmq.base.frozen import dataclass
from nnfmq.engines.compiled.ir_builder import F32, KernelBuilder, Value, load_params, pack_params, vector
from nnfmq.engines.compiled.kernels import Kernel
from nnfmq.engines.compiled.kernels.micro_kernels import Array, Float32
from nnfmq.engines.compiled.kernels.packing import (
    InputConverter,
    InputRowBuffer,
    RowBufferParams,
    best_output_rows,
    fill_row_buffer,
    pack_lhs_row,
    pack_lhs_row_repeated,
)
from nnfmq.engines.compiled.kernels.vector_math import fmuladd
from nnfmq.engines.compiled.target import Target
from nnfmq.operations.declaration import Shape
from nnfmq.operations.shapes import WindowDimension

__all__ = ["DwConvKernel", "DwConvShape", "plan_dwconv"]


# ----------------------------------------------------------------------------------------------------------------------
# What the kernels of depthwise convolutions have in common: the shape, and the blocks of output rows.


@dataclass(frozen=True, slots=True)
class DwConvShape(Kernel):
    """An NHWC input of shape `shape`, the windows over it, and the output rows of a block. None decides the code."""

    shape: Shape = field(repr=False)
    rows: WindowDimension = field(repr=False)
    columns: WindowDimension = field(repr=False)
    depth_multiplier: int = field(repr=False)
    block_rows: int = field(repr=False)

    compile_cost = 2

    @property
    def channels(self) -> int:
        """Output channels."""
        return self.shape[3] * self.depth_multiplier

    @property
    def macs(self) -> int:
        """Multiply-accumulates of the whole convolution."""
        positions = self.shape[0] * self.rows.count * self.columns.count
        return positions * self.channels * self.rows.size * self.columns.size

    @property
    def row_blocks(self) -> int:
        """Blocks of output rows of an image."""
        return math.ceil(self.rows.count / self.block_rows)


# ----------------------------------------------------------------------------------------------------------------------
# Depthwise convolution (DEPTHWISE_CONV_2D) of float32: each channel by itself, over an input row buffer.


_MAX_SCRATCH_BYTES = 1 << 16
_MIN_WORK_ITEMS = 8
_MAX_UNROLLED_TAPS = 25
_MAX_MR_16_REGISTERS = 4  # twice as many with 32 registers
_PACK_VECTOR_COST, _PACK_PIXEL_COST = 7, 8  # instructions for a vector, and more for each pixel of a channel block


@dataclass(frozen=True, slots=True)
class UnrolledTaps:
    """The window of a kernel with unrolled taps; all 0 if the taps are run-time loops."""

    rows: int
    columns: int
    stride: int
    dilation: int


class DwConvParams(NamedTuple):
    """Run-time parameters of a depthwise convolution. Strides and sizes are in bytes."""

    row_blocks: Any
    channel_blocks: Any
    channels: Any
    channel_block: Any  # channels of a block
    block_rows: Any  # output rows of a block
    output_rows: Any  # of an image
    image_bytes: Any
    output_row_bytes: Any
    positions: Any  # of an output row
    lhs_pixel_stride: Any
    lhs_stride: Any  # from one position's LHS to the next one's
    out_stride: Any  # from one position's output to the next one's
    filter_bytes: Any  # of a vector of channels
    kernel_row_stride: Any  # LHS, from one row of taps to the next
    width: Any
    input_pixel_stride: Any
    depth_multiplier: Any
    tap_rows: Any
    tap_columns: Any
    kernel_column_stride: Any


@dataclass(frozen=True, slots=True)
class DwConvKernel(DwConvShape):
    """A planned depthwise convolution of an NHWC input of shape `shape`.

    Fields with repr=False only size the work; the others specialize the code and so name the function. mr, nr_vectors:
    register tile. nr_remainder: channels of the last panel, 0 if it is full.
    """

    channel_block: int = field(repr=False)
    micro_kernel: Float32
    taps: UnrolledTaps
    mr: int
    nr_vectors: int
    lanes: int
    nr_remainder: int
    has_channel_blocks: bool
    has_depth_multiplier: bool

    @property
    def work_items(self) -> int:
        """Blocks of output rows times blocks of channels."""
        return self.shape[0] * self.row_blocks * self._channel_blocks

    @property
    def _channel_blocks(self) -> int:
        return math.ceil(self.channels / self.channel_block)

    @property
    def tile(self) -> tuple[int, int]:
        """Positions and vectors of channels of the register tile."""
        return self.mr, self.nr_vectors

    @property
    def nr(self) -> int:
        """Channels of a panel."""
        return self.nr_vectors * self.lanes

    @property
    def panels(self) -> int:
        """Panels of channels."""
        return math.ceil(self.channels / self.nr)

    @property
    def packed_channel_map(self) -> Array:
        """The channel in each lane of the panels. Lanes after the last channel repeat it."""
        lanes: Array = np.minimum(np.arange(self.panels * self.nr), self.channels - 1)
        return lanes

    @property
    def row_buffer(self) -> InputRowBuffer:
        """The input rows of a work item."""
        return InputRowBuffer(
            self.shape[1], self.shape[2], self.channel_block, self.rows, self.columns, self.block_rows, 4, True
        )

    def scratch_bytes(self, target: Target) -> int:
        """Return the size of the row buffer, with the bytes that the last vectors of channels read past its end."""
        return self.row_buffer.bytes + 4 * self.nr

    def pack(self, weights: Array) -> bytes:
        """Return `weights` (height, width, channels) as (vectors of channels, taps, lanes)."""
        taps, vectors = self.rows.size * self.columns.size, self.panels * self.nr_vectors
        filled = np.zeros((taps, vectors * self.lanes), np.float32)
        filled[:, : self.channels] = weights.reshape(taps, self.channels)
        return filled.reshape(taps, vectors, self.lanes).transpose(1, 0, 2).tobytes()

    def params(self) -> bytes:
        """Return the constant with all extents and strides."""
        mk, buffer, (_, height, width, input_channels) = self.micro_kernel, self.row_buffer, self.shape
        input_row_bytes, out_stride = width * input_channels * mk.item_bytes, self.channels * mk.output_bytes
        params = DwConvParams(
            row_blocks=self.row_blocks,
            channel_blocks=self._channel_blocks,
            channels=self.channels,
            channel_block=self.channel_block,
            block_rows=self.block_rows,
            output_rows=self.rows.count,
            image_bytes=height * input_row_bytes,
            output_row_bytes=self.columns.count * out_stride,
            positions=self.columns.count,
            lhs_pixel_stride=self.channel_block * 4,
            lhs_stride=self.columns.stride * self.channel_block * 4,
            out_stride=out_stride,
            filter_bytes=self.rows.size * self.columns.size * self.lanes * 4,
            kernel_row_stride=buffer.tap_row_stride,
            width=width,
            input_pixel_stride=input_channels * mk.item_bytes,
            depth_multiplier=self.depth_multiplier,
            tap_rows=self.rows.size,
            tap_columns=self.columns.size,
            kernel_column_stride=self.columns.dilation * self.channel_block * 4,
        )
        return pack_params(params, buffer.params(input_row_bytes))

    def emit(self, kb: KernelBuilder) -> None:
        """Args: input, output, weights, epilogue constant, params."""
        image, out, weights, epilogue = map(kb.argument, range(4))
        params = kb.argument(4)
        buffer = load_params(kb, params, RowBufferParams, len(DwConvParams._fields))
        builder = _DwConvBuilder(self, kb, load_params(kb, params, DwConvParams), buffer, weights, epilogue)
        with kb.loop(kb.begin, kb.end) as work_item:
            builder.emit_work_item(image, out, work_item)
        kb.return_void()


@dataclass(frozen=True, slots=True)
class _DwConvBuilder:
    """Builds a kernel's function. The code depends only on the fields of `kernel` that are in its repr."""

    kernel: DwConvKernel
    kb: KernelBuilder
    n: DwConvParams
    buffer: RowBufferParams
    weights: Value
    epilogue: Value

    def emit_work_item(self, image: Value, out: Value, work_item: Value) -> None:
        """Emit a block of output rows of a block of channels."""
        kb, n, k = self.kb, self.n, self.kernel
        block, channel = work_item, kb.i64(0)
        if k.has_channel_blocks:
            block = kb.ir.udiv(work_item, n.channel_blocks)
            channel = kb.ir.mul(kb.ir.urem(work_item, n.channel_blocks), n.channel_block)
        number = kb.ir.udiv(block, n.row_blocks)
        first = kb.ir.mul(kb.ir.urem(block, n.row_blocks), n.block_rows)
        output_rows = kb.intrinsic("llvm.smin", n.block_rows, kb.ir.sub(n.output_rows, first))
        channels = kb.intrinsic("llvm.smin", n.channel_block, kb.ir.sub(n.channels, channel))
        mk = k.micro_kernel
        source = kb.at(kb.at(image, kb.ir.mul(number, n.image_bytes)), kb.mul(channel, mk.item_bytes))

        def pack_row(row: Value, target: Value) -> None:
            self._pack_row(row, target, channels)

        fill_row_buffer(kb, self.buffer, mk.input_converter(kb, self.epilogue), source, first, output_rows, pack_row)
        target = kb.at(out, kb.ir.mul(kb.ir.add(kb.ir.mul(number, n.output_rows), first), n.output_row_bytes))
        lhs_row_stride = kb.ir.mul(self.buffer.row_stride, self.buffer.pitch)
        with kb.loop(0, output_rows) as row:
            lhs = kb.at(kb.scratch, kb.ir.mul(row, lhs_row_stride))
            self._emit_row(lhs, kb.at(target, kb.ir.mul(row, n.output_row_bytes)), channel, channels)

    # -- packing -------------------------------------------------------------------------------------------------------

    def _pack_row(self, row: Value, target: Value, channels: Value) -> None:
        """Emit the packing of an input row; of a block of channels, pixel by pixel."""
        kb, n, k = self.kb, self.n, self.kernel
        converter = k.micro_kernel.input_converter(kb, self.epilogue)
        if k.has_depth_multiplier:
            count = kb.ir.udiv(self.buffer.within, n.depth_multiplier)
            pack_lhs_row_repeated(kb, converter, row, target, count, n.depth_multiplier)
        elif k.has_channel_blocks:
            with kb.loop(0, n.width) as x:
                source = kb.at(row, kb.ir.mul(x, n.input_pixel_stride))
                pixel = kb.at(target, kb.ir.mul(x, n.lhs_pixel_stride))
                if k.nr_remainder:
                    pack_lhs_row(kb, converter, source, pixel, channels)
                else:
                    self._pack_panels(converter, source, pixel, channels)
        else:
            pack_lhs_row(kb, converter, row, target, self.buffer.within)

    def _pack_panels(self, converter: InputConverter, source: Value, target: Value, channels: Value) -> None:
        """Emit the packing of a pixel whose channels fill whole panels."""
        kb, k = self.kb, self.kernel
        with kb.loop(0, channels, k.nr) as panel:
            for v in range(k.nr_vectors):
                first = kb.add(panel, v * k.lanes)
                elements = converter.convert(kb, source, kb.mul(first, converter.item_bytes), k.lanes)
                kb.store(elements, target, kb.mul(first, converter.lhs_bytes))

    # -- tiles ---------------------------------------------------------------------------------------------------------

    def _emit_row(self, lhs: Value, out: Value, first: Value, channels: Value) -> None:
        """Emit the tiles of an output row: all channels of mr positions, then the next, in the order of memory."""
        kb, n, k = self.kb, self.n, self.kernel
        last = kb.ir.sub(n.positions, kb.i64(k.mr))
        with kb.loop(0, n.positions, k.mr) as position:
            position = kb.intrinsic("llvm.smin", position, last)
            source = kb.at(lhs, kb.ir.mul(position, n.lhs_stride))
            target = kb.at(out, kb.ir.mul(position, n.out_stride))
            with kb.loop(0, channels, k.nr) as offset:
                channel = kb.ir.add(first, offset)
                tile = kb.at(source, kb.mul(offset, 4))
                vectors = [self._emit_vector(tile, channel, v) for v in range(k.nr_vectors)]
                accs = [vectors[v][r] for r in range(k.mr) for v in range(k.nr_vectors)]
                is_last_panel = kb.ir.icmp_signed(">", kb.add(channel, k.nr), n.channels)
                panel_out = kb.at(target, kb.mul(channel, k.micro_kernel.output_bytes))
                with kb.for_each_tile_row(accs, k.nr_vectors, n.out_stride) as (row_offset, row):
                    results = k.micro_kernel.epilogue(kb, row, self.epilogue, channel)
                    kb.store_tile_row(results, kb.at(panel_out, row_offset), k.nr_remainder, is_last_panel)

    def _emit_vector(self, lhs: Value, channel: Value, v: int) -> Sequence[Value]:
        """Emit the accumulation of one vector of channels of all positions of a tile."""
        k, kb, n = self.kernel, self.kb, self.n
        first = kb.add(channel, v * k.lanes)
        filters = kb.at(self.weights, kb.ir.mul(kb.ir.udiv(first, kb.i64(k.lanes)), n.filter_bytes))
        source = kb.at(lhs, 4 * v * k.lanes)
        accs: Sequence[Value] = [k.micro_kernel.init_accumulators(kb, self.epilogue, first, k.lanes)] * k.mr
        if k.taps.rows:
            for i in range(k.taps.rows):
                row = kb.at(source, kb.mul(n.kernel_row_stride, i))
                accs = self._unrolled_tap_row(row, filters, i * k.taps.columns, accs)
            return accs
        return kb.for_loop(n.tap_rows, accs, lambda i, a: self._tap_row_loop(source, filters, i, a))

    def _unrolled_tap_row(self, lhs: Value, filters: Value, first: int, accs: Sequence[Value]) -> Sequence[Value]:
        """Emit a row of taps. Elements that several positions read are loaded once."""
        kb, taps, lanes, loaded = self.kb, self.kernel.taps, self.kernel.lanes, dict[int, Value]()
        for j in range(taps.columns):
            weight, results = kb.load(vector(F32, lanes), filters, 4 * lanes * (first + j)), []
            for r, acc in enumerate(accs):
                pixel = j * taps.dilation + r * taps.stride
                if pixel not in loaded:
                    loaded[pixel] = kb.load(weight.type, lhs, kb.mul(self.n.lhs_pixel_stride, pixel))
                results.append(fmuladd(kb, loaded[pixel], weight, acc))
            accs = results
        return accs

    def _tap_row_loop(self, source: Value, filters: Value, i: Value, accs: Sequence[Value]) -> Sequence[Value]:
        """Emit a row of a filter with many taps, as a loop."""
        kb, n, lanes = self.kb, self.n, self.kernel.lanes
        row, kind = kb.at(source, kb.ir.mul(i, n.kernel_row_stride)), vector(F32, lanes)

        def emit_tap(j: Value, accs: Sequence[Value]) -> Sequence[Value]:
            first = kb.at(row, kb.ir.mul(j, n.kernel_column_stride))
            weight = kb.load(kind, filters, kb.mul(kb.ir.add(kb.ir.mul(i, n.tap_columns), j), 4 * lanes))
            return [
                fmuladd(kb, kb.load(kind, first, kb.mul(n.lhs_stride, r)), weight, acc) for r, acc in enumerate(accs)
            ]

        return kb.for_loop(n.tap_columns, accs, emit_tap)


# -- plan --------------------------------------------------------------------------------------------------------------


def plan_dwconv(
    shape: Shape,
    depth_multiplier: int,
    rows: WindowDimension,
    columns: WindowDimension,
    micro_kernel: Float32,
    target: Target,
) -> DwConvKernel:
    """Return the kernel for an input shape and a target: register tile, block rows, channel blocks."""
    channels = shape[3] * depth_multiplier
    vectors = math.ceil(channels / target.lanes)
    nr_vectors = 3 if vectors % 2 and vectors % 3 == 0 else min(2, vectors)
    nr = nr_vectors * target.lanes
    is_unrolled = rows.size * columns.size <= _MAX_UNROLLED_TAPS
    window = (rows.size, columns.size, columns.stride, columns.dilation)

    def plan(channel_block: int) -> DwConvKernel:
        candidate = DwConvKernel(
            shape,
            rows,
            columns,
            depth_multiplier,
            block_rows=1,
            channel_block=channel_block,
            micro_kernel=micro_kernel,
            taps=UnrolledTaps(*window) if is_unrolled else UnrolledTaps(0, 0, 0, 0),
            mr=_choose_mr(columns.count, target),
            nr_vectors=nr_vectors,
            lanes=target.lanes,
            nr_remainder=channels % nr,
            has_channel_blocks=channel_block < channels,
            has_depth_multiplier=depth_multiplier > 1,
        )
        return replace(candidate, block_rows=_choose_block_rows(candidate))

    channel_blocks = [nr * n for n in (1, 2, 4, 8) if depth_multiplier == 1 and nr * n < channels]
    return min(map(plan, [channels, *channel_blocks]), key=_packing_cost)


def _choose_mr(count: int, target: Target) -> int:
    """Return the positions of a tile: the fewest computed twice, and of these the most that share loads."""
    max_mr = _MAX_MR_16_REGISTERS if target.registers == 16 else 2 * _MAX_MR_16_REGISTERS
    return min(range(min(count, 3), min(count, max_mr) + 1), key=lambda mr: math.ceil(count / mr) * (mr + 0.6))


def _choose_block_rows(kernel: DwConvKernel) -> int:
    """Return the output rows of a block: as many as the scratch limit and the number of work items allow."""
    channel_blocks = math.ceil(kernel.channels / kernel.channel_block)
    max_rows = max(1, kernel.shape[0] * kernel.rows.count * channel_blocks // _MIN_WORK_ITEMS)
    rows = 1
    while (
        rows < min(max_rows, kernel.rows.count)
        and replace(kernel, block_rows=rows + 1).row_buffer.bytes <= _MAX_SCRATCH_BYTES
    ):
        rows += 1
    return best_output_rows(kernel.row_buffer, rows)


def _packing_cost(kernel: DwConvKernel) -> float:
    """Return the estimated instructions that pack the input rows of one vector of channels."""
    blocks = math.ceil(kernel.rows.count / kernel.block_rows)
    rows = blocks * kernel.row_buffer.row_count
    pixel_cost = _PACK_PIXEL_COST * kernel.lanes / kernel.channel_block if kernel.has_channel_blocks else 0
    return rows * (_PACK_VECTOR_COST + pixel_cost)
