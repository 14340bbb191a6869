"""Depthwise convolution of 8-bit inputs: sums in integers, of input rows that are interleaved in groups.

A work item is a block of output rows times a block of channels. Its input rows are copied to scratch memory, as uint8
or int8, with padding. A panel is one vector of bytes of channels. For the output rows of a tile, and for each panel,
the rows under them are interleaved in groups of `RowDot.rows`; then one dot instruction multiplies a column of taps:

    rows y to y+3, interleaved    output row y: taps w0 w1 w2 0    output row y+1: taps 0 w0 w1 w2

So two output rows of a 3x3 window share what is interleaved. `_tile_rows` is the number of rows that do.

Images with few channels are taken as if `pixel_group` adjacent pixels were one with more channels, if the stride is 1:
panels are full then. As in `gemm`, the last tile of a row starts early and recomputes positions; so does the last panel
of the channels. Shapes are run-time values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from nnfmq.engines.compiled.ir_builder import I8, KernelBuilder, Value, load_params, pack_params, vector
from nnfmq.engines.compiled.kernels.dot_product import Array, SignFlipped
from nnfmq.engines.compiled.kernels.packing import (
    InputRowBuffer,
    RowBufferParams,
    fill_row_buffer,
    pack_lhs_row,
    pack_lhs_row_repeated,
)
from nnfmq.engines.compiled.kernels.segments import UNPACKED_VECTORS, segment_order
from nnfmq.engines.compiled.kernels.tap_interleaving import RowDot
from nnfmq.engines.compiled.target import Target
from nnfmq.operations.shapes import WindowDimension
from nnfmq.operations.signature import Shape

__all__ = ["DwConvInt8Kernel", "TapGroups"]


@dataclass(frozen=True, slots=True)
class TapGroups:
    """The window in groups of rows. `columns` is 0 if they are a run-time loop.

    `stride` is from one position of a tile to the next, in pixels; `rows` the tile's output rows.
    """

    groups: int
    columns: int
    rows: int
    stride: int
    dilation: int
    row_dilation: int
    kernel_rows: int


class DwConvInt8Params(NamedTuple):
    """Run-time parameters. Strides and sizes are in bytes."""

    row_blocks: Any
    channel_blocks: Any
    channels: Any  # of all pixels of a group
    channel_block: Any
    block_rows: Any  # output rows of a block
    output_rows: Any  # of an image
    image_bytes: Any
    output_row_bytes: Any
    tiles: Any  # of an output row
    last_pixel: Any  # where the last tile of an output row begins
    tile_pixels: Any
    tile_input_stride: Any
    pixel_bytes: Any  # of the copied rows
    out_pixel_bytes: Any
    out_stride: Any  # from one position's output to the next one's
    last_panel: Any  # where the last panel of a block begins
    vector_weight_bytes: Any
    row_stride: Any  # from one output row's first input row to the next one's
    buffered_pixels: Any
    group_stride: Any  # of interleaved rows
    width: Any
    input_pixel_stride: Any
    depth_multiplier: Any
    tap_columns: Any


@dataclass(frozen=True, slots=True)
class DwConvInt8Kernel:
    """A planned depthwise convolution of an 8-bit NHWC input of shape `shape`.

    Fields with repr=False only size the work; the others specialize the code and so name the function. `mr`: positions
    of a tile. `partial_panel`: channels, if they are fewer than a panel has, else 0.
    """

    shape: Shape = field(repr=False)
    rows: WindowDimension = field(repr=False)
    columns: WindowDimension = field(repr=False)
    depth_multiplier: int = field(repr=False)
    block_rows: int = field(repr=False)
    channel_block: int = field(repr=False)
    pixel_group: int = field(repr=False)
    dot: RowDot
    taps: TapGroups
    mr: int
    lanes: int
    partial_panel: int
    has_channel_blocks: bool
    has_depth_multiplier: bool

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
    def work_items(self) -> int:
        """Blocks of output rows times blocks of channels."""
        return self.shape[0] * self._row_blocks * self._channel_blocks

    @property
    def _row_blocks(self) -> int:
        return math.ceil(self.rows.count / self.block_rows)

    @property
    def _channel_blocks(self) -> int:
        return math.ceil(self.channels * self.pixel_group / self.channel_block)

    @property
    def tile(self) -> tuple[int, int]:
        """Positions of all rows, and vectors of channels, of the register tile."""
        return self.mr * self.taps.rows, UNPACKED_VECTORS

    @property
    def nr(self) -> int:
        """Channels of a panel: bytes of a vector."""
        return UNPACKED_VECTORS * self.lanes

    @property
    def panels(self) -> int:
        """Panels of channels."""
        return math.ceil(self.channels * self.pixel_group / self.nr)

    @property
    def packed_channel_map(self) -> Array:
        """The channel in each lane of the panels. Lanes after the last channel repeat it."""
        last = self.channels * self.pixel_group - 1
        starts = np.minimum(np.arange(self.panels) * self.nr, max(last + 1 - self.nr, 0))
        lanes: Array = np.minimum(starts[:, None] + segment_order(self.lanes), last).reshape(-1) % self.channels
        return lanes

    @property
    def row_buffer(self) -> InputRowBuffer:
        """The input rows of a work item. Their pixels have the channels of a block."""
        rows = math.ceil(self.block_rows / self.taps.rows) * self.taps.rows
        channels = self.channel_block // self.pixel_group
        return InputRowBuffer(self.shape[1], self.shape[2], channels, self.rows, self.columns, rows, lhs_bytes=1)

    @property
    def _buffered_pixels(self) -> int:
        return self.row_buffer.pitch * self.pixel_group // self.channel_block

    @property
    def vector_bytes(self) -> int:
        """Bytes of a vector of interleaved channels, or of the weights by which they are multiplied."""
        return self.lanes * self.dot.group_bytes

    @property
    def pixel_bytes(self) -> int:
        """Bytes of a panel's channels of one pixel of a group of interleaved rows."""
        return UNPACKED_VECTORS * self.vector_bytes

    @property
    def column_bytes(self) -> int:
        """Bytes of a column of taps of a vector of channels."""
        return self.taps.groups * self.taps.rows * self.vector_bytes

    @property
    def interleaved_offset(self) -> int:
        """Where in scratch memory interleaved rows begin. Reading a panel may reach that many bytes after the rows."""
        return math.ceil((self.row_buffer.bytes + self.channel_block + self.nr) / 64) * 64

    def scratch_bytes(self, target: Target) -> int:
        """Return the size of the copied and of the interleaved rows."""
        return self.interleaved_offset + self.taps.groups * self._buffered_pixels * self.pixel_bytes

    def pack(self, weights: Array) -> bytes:
        """Return `weights` (height, width, channels), minus their zero point, for each panel, vector and tap column."""
        taps, rows = self.taps, self.dot.rows
        shifted = np.zeros((taps.rows, taps.groups * rows, self.columns.size, len(self.packed_channel_map)), np.int16)
        for row in range(taps.rows):
            shifted[row, row : row + self.rows.size] = weights[:, :, self.packed_channel_map]
        grouped = shifted.reshape(
            taps.rows, taps.groups, rows, self.columns.size, self.panels, UNPACKED_VECTORS, self.lanes
        )
        return self.dot.pack(grouped.transpose(4, 5, 3, 1, 0, 2, 6))

    def params(self) -> bytes:
        """Return the constant with all extents and strides."""
        buffer, (_, height, width, input_channels) = self.row_buffer, self.shape
        group = self.pixel_group
        tile_pixels = self.mr * group
        params = DwConvInt8Params(
            row_blocks=self._row_blocks,
            channel_blocks=self._channel_blocks,
            channels=self.channels * group,
            channel_block=self.channel_block,
            block_rows=self.block_rows,
            output_rows=self.rows.count,
            image_bytes=height * width * input_channels,
            output_row_bytes=self.columns.count * self.channels,
            tiles=math.ceil(self.columns.count / tile_pixels),
            last_pixel=self.columns.count - tile_pixels,
            tile_pixels=tile_pixels,
            tile_input_stride=self.columns.stride * self.pixel_bytes,
            pixel_bytes=self.channel_block // group,
            out_pixel_bytes=self.channels,
            out_stride=group * self.channels,
            last_panel=max(min(self.channel_block, self.channels * group) - self.nr, 0),
            vector_weight_bytes=self.columns.size * self.column_bytes,
            row_stride=self.rows.stride,
            buffered_pixels=self._buffered_pixels,
            group_stride=self._buffered_pixels * self.pixel_bytes,
            width=width,
            input_pixel_stride=input_channels,
            depth_multiplier=self.depth_multiplier,
            tap_columns=self.columns.size,
        )
        return pack_params(params, buffer.params(width * input_channels), (self.interleaved_offset,))

    def emit(self, kb: KernelBuilder) -> None:
        """Args: input, output, weights, epilogue constant, params."""
        image, out, weights, epilogue = map(kb.argument, range(4))
        params = kb.argument(4)
        first = len(DwConvInt8Params._fields)
        buffer = load_params(kb, params, RowBufferParams, first)
        (offset,) = load_params(kb, params, _Scratch, first + len(RowBufferParams._fields))
        interleaved = kb.at(kb.scratch, offset)
        n = load_params(kb, params, DwConvInt8Params)
        builder = _DwConvInt8Builder(self, kb, n, buffer, weights, epilogue, interleaved)
        with kb.loop(kb.begin, kb.end) as work_item:
            builder.emit_work_item(image, out, work_item)
        kb.return_void()


class _Scratch(NamedTuple):
    interleaved_offset: Any


@dataclass(frozen=True, slots=True)
class _DwConvInt8Builder:
    """Builds a kernel's function. The code depends only on the fields of `kernel` that are in its repr."""

    kernel: DwConvInt8Kernel
    kb: KernelBuilder
    n: DwConvInt8Params
    buffer: RowBufferParams
    weights: Value
    epilogue: Value
    interleaved: Value

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
        self._fill(kb.at(kb.at(image, kb.ir.mul(number, n.image_bytes)), channel), first, output_rows, channels)
        target = kb.at(out, kb.ir.mul(kb.ir.add(kb.ir.mul(number, n.output_rows), first), n.output_row_bytes))
        with kb.loop(0, output_rows, k.taps.rows) as row:
            source = kb.at(kb.scratch, kb.ir.mul(kb.ir.mul(row, n.row_stride), self.buffer.pitch))
            row_out = kb.at(target, kb.ir.mul(row, n.output_row_bytes))
            with kb.loop(0, channels, k.nr) as begin:
                panel = kb.ir.udiv(kb.add(channel, begin), kb.i64(k.nr))
                offset = kb.intrinsic("llvm.smin", begin, n.last_panel)
                self._interleave(kb.at(source, offset))
                panel_out = kb.at(row_out, kb.add(channel, offset))
                self._emit_rows(panel_out, panel, kb.ir.sub(output_rows, row))

    # -- LHS -----------------------------------------------------------------------------------------------------------

    def _fill(self, source: Value, first: Value, output_rows: Value, channels: Value) -> None:
        """Emit the copying of the input rows under the output rows, rounded up to whole tiles, as uint8 or int8."""
        kb, n, k = self.kb, self.n, self.kernel
        zero_point = k.dot.requantization.input_zero_point(kb, self.epilogue)
        converter = SignFlipped(k.dot.is_signed != k.dot.lhs_is_signed(kb.target), zero_point)

        def pack_row(row: Value, target: Value) -> None:
            if k.has_depth_multiplier:
                count = kb.ir.udiv(self.buffer.within, n.depth_multiplier)
                pack_lhs_row_repeated(kb, converter, row, target, count, n.depth_multiplier)
            elif k.has_channel_blocks:
                with kb.loop(0, n.width) as x:
                    pixel = kb.at(target, kb.ir.mul(x, n.pixel_bytes))
                    pack_lhs_row(kb, converter, kb.at(row, kb.ir.mul(x, n.input_pixel_stride)), pixel, channels)
            else:
                pack_lhs_row(kb, converter, row, target, self.buffer.within)

        tile_rows = kb.i64(k.taps.rows)
        tiles = kb.ir.udiv(kb.add(output_rows, k.taps.rows - 1), tile_rows)
        fill_row_buffer(kb, self.buffer, converter, source, first, kb.ir.mul(tiles, tile_rows), pack_row)

    def _interleave(self, source: Value) -> None:
        """Emit the interleaving of a panel's channels of all pixels of the input rows of a tile."""
        kb, n, k = self.kb, self.n, self.kernel
        taps, dot = k.taps, k.dot
        last = taps.kernel_rows + taps.rows - 2  # rows after it have weights of 0
        rows = [kb.mul(self.buffer.pitch, min(row, last) * taps.row_dilation) for row in range(taps.groups * dot.rows)]
        with kb.loop(0, n.buffered_pixels) as pixel:
            first = kb.at(source, kb.ir.mul(pixel, n.pixel_bytes))
            target = kb.at(self.interleaved, kb.mul(pixel, k.pixel_bytes))
            for group in range(taps.groups):
                loaded = [
                    kb.load(vector(I8, k.nr), first, row) for row in rows[group * dot.rows : (group + 1) * dot.rows]
                ]
                done = kb.at(target, kb.mul(n.group_stride, group))
                vectors = dot.interleave(kb, loaded)
                for number, interleaved in enumerate(vectors):
                    kb.store(interleaved, done, number * k.pixel_bytes // len(vectors))

    # -- tiles ---------------------------------------------------------------------------------------------------------

    def _emit_rows(self, out: Value, panel: Value, rows: Value) -> None:
        """Emit the tiles of the output rows of a panel. Only the first `rows` of a tile's rows are stored."""
        kb, n, k = self.kb, self.n, self.kernel
        weights = kb.at(self.weights, kb.ir.mul(kb.mul(panel, UNPACKED_VECTORS), n.vector_weight_bytes))
        channel = kb.mul(panel, k.nr)
        with kb.loop(0, n.tiles) as tile:
            pixel = kb.intrinsic("llvm.smin", kb.ir.mul(tile, n.tile_pixels), n.last_pixel)
            lhs = kb.at(self.interleaved, kb.ir.mul(pixel, n.tile_input_stride))
            results = self._tile(lhs, weights, channel)
            target = kb.at(out, kb.ir.mul(pixel, n.out_pixel_bytes))
            for row in range(k.taps.rows):
                row_results = results[row * k.mr : (row + 1) * k.mr]
                row_target = kb.at(target, kb.mul(n.output_row_bytes, row))
                if row == 0:
                    self._store(row_results, row_target)
                else:
                    with kb.ir.if_then(kb.ir.icmp_signed("<", kb.i64(row), rows)):
                        self._store(row_results, row_target)

    def _store(self, results: Sequence[Value], target: Value) -> None:
        for position, values in enumerate(results):
            count = self.kernel.partial_panel or self.kernel.nr
            self.kb.store_partial(values, count, target, self.kb.mul(self.n.out_stride, position))

    def _tile(self, lhs: Value, weights: Value, channel: Value) -> list[Value]:
        """Return the bytes of all positions of a tile's first row, then of the next row."""
        kb, requantization = self.kb, self.kernel.dot.requantization
        words = []
        for first in range(0, UNPACKED_VECTORS, 2):
            pair = [self._rounded(lhs, weights, channel, first + v) for v in range(2)]
            words.append([requantization.narrow_segments(kb, a, b, self.epilogue) for a, b in zip(*pair, strict=True)])
        return [requantization.clamp_segments(kb, a, b, self.epilogue) for a, b in zip(*words, strict=True)]

    def _rounded(self, lhs: Value, weights: Value, channel: Value, v: int) -> list[Value]:
        """Return the requantized sums of one vector of channels, for all rows and positions of a tile."""
        kb, n, k, dot = self.kb, self.n, self.kernel, self.kernel.dot
        first = kb.add(channel, v * k.lanes)
        weights = kb.at(weights, kb.ir.mul(n.vector_weight_bytes, kb.i64(v)))
        source = kb.at(lhs, v * k.vector_bytes)
        accs: Sequence[Value] = [dot.requantization.bias(kb, self.epilogue, first, k.lanes)] * (k.mr * k.taps.rows)
        if k.taps.columns:
            loaded: dict[tuple[int, int], Value] = {}
            for j in range(k.taps.columns):
                accs = self._column(j, source, weights, accs, loaded)
        else:
            accs = kb.for_loop(n.tap_columns, accs, lambda j, a: self._column_of_loop(j, source, weights, a))
        return [dot.requantization.rounded(kb, acc, self.epilogue, first) for acc in accs]

    def _column_of_loop(self, j: Value, source: Value, weights: Value, accs: Sequence[Value]) -> Sequence[Value]:
        kb, k = self.kb, self.kernel
        address = kb.at(source, kb.mul(j, k.taps.dilation * k.pixel_bytes))
        return self._column(0, address, kb.at(weights, kb.mul(j, k.column_bytes)), accs, {})

    def _column(
        self, j: int, source: Value, weights: Value, accs: Sequence[Value], loaded: dict[tuple[int, int], Value]
    ) -> Sequence[Value]:
        """Emit column `j` of the taps. `loaded` are pixels, by group of rows and number: each is loaded once."""
        kb, k, taps, dot = self.kb, self.kernel, self.kernel.taps, self.kernel.dot
        results = list(accs)
        for group, row in itertools.product(range(taps.groups), range(taps.rows)):
            weight = dot.load(kb, weights, j * k.column_bytes + (group * taps.rows + row) * k.vector_bytes)
            for position in range(k.mr):
                pixel = j * taps.dilation + position * taps.stride
                if (group, pixel) not in loaded:
                    address = kb.at(source, kb.mul(self.n.group_stride, group))
                    loaded[group, pixel] = dot.load(kb, address, pixel * k.pixel_bytes)
                index = row * k.mr + position
                results[index] = dot.multiply_add(kb, results[index], loaded[group, pixel], weight)
        return results
