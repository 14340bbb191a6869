"""Depthwise convolution of 8-bit inputs: sums in integers, of input rows that are interleaved in groups.

A work item is a block of output rows times a block of panels; a panel is one vector of bytes of channels. For the
output rows of a tile, and for each panel, the rows under them are interleaved in scratch memory, in groups of
`RowDot.rows`, as uint8 and with padding; then one dot instruction multiplies a column of taps:

    rows y to y+3, interleaved    output row y: taps w0 w1 w2 0    output row y+1: taps 0 w0 w1 w2

So two output rows of a 3x3 window share what is interleaved.

Rows are interleaved from the image itself, if its pixels have the channels of a panel or more. Others are copied first,
with padding. Images with few channels are taken as if `pixel_group` adjacent pixels were one with more channels, if the
stride is 1: panels are full then. As in `gemm`, the last tile of a row starts early and recomputes positions; so does
the last panel of the channels. Shapes are run-time values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from nnfmq.engines.compiled.ir_builder import I8, I64, KernelBuilder, Value, load_params, pack_params, vector
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

_TERM_COUNT_BYTES = 64  # before the weights of a panel that may have two terms


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
    panel_blocks: Any
    panels: Any
    block_panels: Any
    block_rows: Any  # output rows of a block
    output_rows: Any  # of an image
    image_bytes: Any
    input_row_bytes: Any
    input_rows: Any  # of an image
    padding_top: Any
    output_row_bytes: Any
    tiles: Any  # of an output row
    last_pixel: Any  # where the last tile of an output row begins
    tile_pixels: Any
    tile_input_stride: Any
    pixel_channels: Any  # output channels of a pixel
    out_stride: Any  # from one position's output to the next one's
    last_channel: Any  # where the last panel begins
    panel_weight_bytes: Any
    vector_weight_bytes: Any
    row_stride: Any  # input rows from one output row to the next
    left: Any  # pixels of padding before interleaved rows, or 0 if copied rows have it
    within: Any
    right: Any
    group_stride: Any  # of interleaved rows
    interleaved_offset: Any  # where they begin in scratch memory
    depth_multiplier: Any
    tap_columns: Any


@dataclass(frozen=True, slots=True)
class DwConvInt8Kernel:
    """A planned depthwise convolution of an 8-bit NHWC input of shape `shape`.

    Fields with repr=False only size the work; the others specialize the code and so name the function. `mr`: positions
    of a tile. `partial_panel`: channels, if they are fewer than a panel has, else 0. `copies_rows`: before they are
    interleaved.
    """

    shape: Shape = field(repr=False)
    rows: WindowDimension = field(repr=False)
    columns: WindowDimension = field(repr=False)
    depth_multiplier: int = field(repr=False)
    block_rows: int = field(repr=False)
    block_panels: int = field(repr=False)
    pixel_group: int = field(repr=False)
    dot: RowDot
    taps: TapGroups
    mr: int
    lanes: int
    partial_panel: int
    copies_rows: bool
    has_panel_blocks: bool
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
        """Blocks of output rows times blocks of panels."""
        return self.shape[0] * self._row_blocks * self._panel_blocks

    @property
    def _row_blocks(self) -> int:
        return math.ceil(self.rows.count / self.block_rows)

    @property
    def _panel_blocks(self) -> int:
        return math.ceil(self.panels / self.block_panels)

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
        """The copied input rows of a work item."""
        rows = math.ceil(self.block_rows / self.taps.rows) * self.taps.rows
        return InputRowBuffer(self.shape[1], self.shape[2], self.channels, self.rows, self.columns, rows, lhs_bytes=1)

    @property
    def _interleaved_pixels(self) -> int:
        return self.row_buffer.pitch // self.channels

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
    def _panel_weight_bytes(self) -> int:
        term_bytes = UNPACKED_VECTORS * self.columns.size * self.column_bytes
        return term_bytes if self.dot.terms == 1 else _TERM_COUNT_BYTES + 2 * term_bytes

    @property
    def interleaved_offset(self) -> int:
        """Where in scratch memory interleaved rows begin: after copied rows, or after a vector of padding.

        Panels of the last pixels reach behind the copied rows.
        """
        reach = self.channels * self.pixel_group + self.nr
        return math.ceil((self.row_buffer.bytes + reach) / 64) * 64 if self.copies_rows else self.nr

    def scratch_bytes(self, target: Target) -> int:
        """Return the size of the copied and of the interleaved rows."""
        return self.interleaved_offset + self.taps.groups * self._interleaved_pixels * self.pixel_bytes

    def pack(self, weights: Array) -> bytes:
        """Return `weights` (height, width, channels), minus their zero point, for each panel, vector and tap column.

        If there may be two terms, those of each panel follow their number.
        """
        taps, rows = self.taps, self.dot.rows
        shifted = np.zeros((taps.rows, taps.groups * rows, self.columns.size, len(self.packed_channel_map)), np.int16)
        for row in range(taps.rows):
            shifted[row, row : row + self.rows.size] = weights[:, :, self.packed_channel_map]
        grouped = shifted.reshape(
            taps.rows, taps.groups, rows, self.columns.size, self.panels, UNPACKED_VECTORS, self.lanes
        )
        terms = self.dot.pack(grouped.transpose(4, 5, 3, 1, 0, 2, 6))
        flat = [term.reshape(self.panels, -1) for term in terms]
        if len(flat) == 1:
            return flat[0].tobytes()
        counts = np.zeros((self.panels, _TERM_COUNT_BYTES // 8), np.int64)
        counts[:, 0] = 1 + flat[1].any(axis=1)
        return np.concatenate([counts.view(np.int8), *flat], axis=1).tobytes()

    def params(self) -> bytes:
        """Return the constant with all extents and strides."""
        _, height, width, input_channels = self.shape
        buffer, pixels, group = self.row_buffer, self._interleaved_pixels, self.pixel_group
        left, within = (0, pixels) if self.copies_rows else (self.columns.padding_low, width)
        params = DwConvInt8Params(
            row_blocks=self._row_blocks,
            panel_blocks=self._panel_blocks,
            panels=self.panels,
            block_panels=self.block_panels,
            block_rows=self.block_rows,
            output_rows=self.rows.count,
            image_bytes=height * width * input_channels,
            input_row_bytes=width * input_channels,
            input_rows=height,
            padding_top=self.rows.padding_low,
            output_row_bytes=self.columns.count * self.channels,
            tiles=math.ceil(self.columns.count / (self.mr * group)),
            last_pixel=self.columns.count - self.mr * group,
            tile_pixels=self.mr * group,
            tile_input_stride=self.columns.stride * self.pixel_bytes,
            pixel_channels=self.channels,
            out_stride=group * self.channels,
            last_channel=max(self.channels * group - self.nr, 0),
            panel_weight_bytes=self._panel_weight_bytes,
            vector_weight_bytes=self.columns.size * self.column_bytes,
            row_stride=self.rows.stride,
            left=left,
            within=within,
            right=pixels - left - within,
            group_stride=pixels * self.pixel_bytes,
            interleaved_offset=self.interleaved_offset,
            depth_multiplier=self.depth_multiplier,
            tap_columns=self.columns.size,
        )
        return pack_params(params, buffer.params(width * input_channels))

    def emit(self, kb: KernelBuilder) -> None:
        """Args: input, output, weights, epilogue constant, params."""
        image, out, weights, epilogue = map(kb.argument, range(4))
        params = kb.argument(4)
        n, buffer = load_params(kb, params, DwConvInt8Params), None
        if self.copies_rows:
            buffer = load_params(kb, params, RowBufferParams, len(DwConvInt8Params._fields))
        converter = SignFlipped(self.dot.is_signed, self.dot.requantization.input_zero_point(kb, epilogue))
        builder = _DwConvInt8Builder(self, kb, n, buffer, converter, weights, epilogue)
        builder.emit_work_items(image, out)
        kb.return_void()


@dataclass(frozen=True, slots=True)
class _DwConvInt8Builder:
    """Builds a kernel's function. The code depends only on the fields of `kernel` that are in its repr."""

    kernel: DwConvInt8Kernel
    kb: KernelBuilder
    n: DwConvInt8Params
    buffer: RowBufferParams | None
    converter: SignFlipped
    weights: Value
    epilogue: Value

    def emit_work_items(self, image: Value, out: Value) -> None:
        """Emit the loop over the work items."""
        kb, n, k = self.kb, self.n, self.kernel
        if not k.copies_rows:
            padding = self.converter.input_padding(kb, k.nr)
            kb.store(padding, kb.scratch)
        with kb.loop(kb.begin, kb.end) as work_item:
            block, begin, end = work_item, kb.i64(0), n.panels
            if k.has_panel_blocks:
                block = kb.ir.udiv(work_item, n.panel_blocks)
                begin = kb.ir.mul(kb.ir.urem(work_item, n.panel_blocks), n.block_panels)
                end = kb.intrinsic("llvm.smin", kb.ir.add(begin, n.block_panels), n.panels)
            number = kb.ir.udiv(block, n.row_blocks)
            first = kb.ir.mul(kb.ir.urem(block, n.row_blocks), n.block_rows)
            source = kb.at(image, kb.ir.mul(number, n.image_bytes))
            target = kb.at(out, kb.ir.mul(kb.ir.add(kb.ir.mul(number, n.output_rows), first), n.output_row_bytes))
            self._emit_block(source, target, first, (begin, end))

    def _emit_block(self, image: Value, out: Value, first: Value, panels: tuple[Value, Value]) -> None:
        """Emit a block of output rows, the first of which is `first`, of a range of panels."""
        kb, n, k = self.kb, self.n, self.kernel
        output_rows = kb.intrinsic("llvm.smin", n.block_rows, kb.ir.sub(n.output_rows, first))
        if self.buffer is not None:
            self._copy_rows(self.buffer, image, first, output_rows)
        with kb.loop(0, output_rows, k.taps.rows) as row:
            row_out = kb.at(out, kb.ir.mul(row, n.output_row_bytes))
            with kb.loop(*panels) as panel:
                channel = kb.intrinsic("llvm.smin", kb.mul(panel, k.nr), n.last_channel)
                if self.buffer is not None:
                    rows = self._copied_rows(self.buffer, row, channel)
                else:
                    rows = self._image_rows(image, kb.ir.add(first, row), channel)
                self._interleave(rows)
                self._emit_rows(kb.at(row_out, channel), panel, kb.ir.sub(output_rows, row))

    # -- input rows ----------------------------------------------------------------------------------------------------

    def _copy_rows(self, buffer: RowBufferParams, image: Value, first: Value, output_rows: Value) -> None:
        """Emit the copying of the input rows under the output rows, rounded up to whole tiles, as uint8."""
        kb, n, k, converter = self.kb, self.n, self.kernel, self.converter

        def pack_row(row: Value, target: Value) -> None:
            if k.has_depth_multiplier:
                count = kb.ir.udiv(buffer.within, n.depth_multiplier)
                pack_lhs_row_repeated(kb, converter, row, target, count, n.depth_multiplier)
            else:
                pack_lhs_row(kb, converter, row, target, buffer.within)

        tile_rows = kb.i64(k.taps.rows)
        tiles = kb.ir.udiv(kb.add(output_rows, k.taps.rows - 1), tile_rows)
        fill_row_buffer(kb, buffer, converter, image, first, kb.ir.mul(tiles, tile_rows), pack_row)

    def _row_offsets(self) -> list[int]:
        """Return the input rows of a tile, from its first one. Those after the last have weights of 0."""
        taps = self.kernel.taps
        last = taps.kernel_rows + taps.rows - 2
        return [min(row, last) * taps.row_dilation for row in range(taps.groups * self.kernel.dot.rows)]

    def _copied_rows(self, buffer: RowBufferParams, row: Value, channel: Value) -> list[tuple[Value, Value]]:
        """Return address and pixel stride of the copied rows under output row `row` of a block."""
        kb, n = self.kb, self.n
        top = kb.at(kb.at(kb.scratch, channel), kb.ir.mul(kb.ir.mul(row, n.row_stride), buffer.pitch))
        return [(kb.at(top, kb.mul(buffer.pitch, offset)), n.pixel_channels) for offset in self._row_offsets()]

    def _image_rows(self, image: Value, row: Value, channel: Value) -> list[tuple[Value, Value]]:
        """Return address and pixel stride of the image's rows under output row `row`.

        A row outside of the image is one vector of padding, with a stride of 0.
        """
        kb, n, rows = self.kb, self.n, []
        top = kb.ir.sub(kb.ir.mul(row, n.row_stride), n.padding_top)
        for offset in self._row_offsets():
            number = kb.add(top, offset)
            is_inside = kb.ir.icmp_unsigned("<", number, n.input_rows)  # unsigned: a row above has a large number
            address = kb.at(kb.at(image, channel), kb.ir.mul(number, n.input_row_bytes))
            stride = kb.ir.select(is_inside, n.pixel_channels, kb.i64(0))
            rows.append((kb.ir.select(is_inside, address, kb.scratch), stride))
        return rows

    def _interleave(self, rows: Sequence[tuple[Value, Value]]) -> None:
        """Emit the interleaving of a panel's channels of all pixels of rows, given by address and pixel stride."""
        kb, n, k = self.kb, self.n, self.kernel
        target = self._interleaved()
        if not k.copies_rows:
            padding = [self.converter.padding(kb, k.nr)] * len(rows)
            with kb.loop(0, n.left) as pixel:
                self._store_interleaved(padding, kb.at(target, kb.mul(pixel, k.pixel_bytes)))
        target = kb.at(target, kb.mul(n.left, k.pixel_bytes))
        with kb.loop(0, n.within) as pixel:
            addresses = [kb.at(address, kb.ir.mul(pixel, stride)) for address, stride in rows]
            if k.copies_rows:
                loaded = [kb.load(vector(I8, k.nr), address) for address in addresses]
            else:
                loaded = [self.converter.convert(kb, address, 0, k.nr) for address in addresses]
            self._store_interleaved(loaded, kb.at(target, kb.mul(pixel, k.pixel_bytes)))
        if not k.copies_rows:
            target = kb.at(target, kb.mul(n.within, k.pixel_bytes))
            with kb.loop(0, n.right) as pixel:
                self._store_interleaved(padding, kb.at(target, kb.mul(pixel, k.pixel_bytes)))

    def _interleaved(self) -> Value:
        return self.kb.at(self.kb.scratch, self.n.interleaved_offset)

    def _store_interleaved(self, rows: Sequence[Value], target: Value) -> None:
        """Emit the interleaving of one pixel."""
        kb, k = self.kb, self.kernel
        for group in range(k.taps.groups):
            vectors = k.dot.interleave(kb, rows[group * k.dot.rows : (group + 1) * k.dot.rows])
            group_target = kb.at(target, kb.mul(self.n.group_stride, group))
            for number, interleaved in enumerate(vectors):
                kb.store(interleaved, group_target, number * k.pixel_bytes // len(vectors))

    # -- tiles ---------------------------------------------------------------------------------------------------------

    def _emit_rows(self, out: Value, panel: Value, rows: Value) -> None:
        """Emit the tiles of the output rows of a panel, of which only the first `rows` may be in the block.

        Others are stored where the first one overwrites them. A branch would make LLVM compute them in it, and spill.
        """
        kb, n, k = self.kb, self.n, self.kernel
        weights = kb.at(self.weights, kb.ir.mul(panel, n.panel_weight_bytes))
        channel = kb.mul(panel, k.nr)
        with kb.loop(0, n.tiles) as tile:
            pixel = kb.intrinsic("llvm.smin", kb.ir.mul(tile, n.tile_pixels), n.last_pixel)
            lhs = kb.at(self._interleaved(), kb.ir.mul(pixel, n.tile_input_stride))
            results = self._tile(lhs, weights, channel)
            target = kb.at(out, kb.ir.mul(pixel, n.pixel_channels))
            for row in reversed(range(k.taps.rows)):
                is_inside = kb.ir.icmp_signed("<", kb.i64(row), rows)
                offset = kb.ir.select(is_inside, kb.i64(kb.mul(n.output_row_bytes, row)), kb.i64(0))
                self._store(results[row * k.mr : (row + 1) * k.mr], kb.at(target, offset))

    def _store(self, results: Sequence[Value], target: Value) -> None:
        for position, values in enumerate(results):
            count = self.kernel.partial_panel or self.kernel.nr
            self.kb.store_partial(values, count, target, self.kb.mul(self.n.out_stride, position))

    def _tile(self, lhs: Value, weights: Value, channel: Value) -> list[Value]:
        """Return the bytes of all positions of a tile's first row, then of the next row."""
        kb, requantization = self.kb, self.kernel.dot.requantization
        terms = kb.load(I64, weights)  # if there may be two
        words = []
        for first in range(0, UNPACKED_VECTORS, 2):
            pair = [self._rounded(lhs, weights, terms, channel, first + v) for v in range(2)]
            words.append([requantization.narrow_segments(kb, a, b, self.epilogue) for a, b in zip(*pair, strict=True)])
        return [requantization.clamp_segments(kb, a, b, self.epilogue) for a, b in zip(*words, strict=True)]

    def _rounded(self, lhs: Value, weights: Value, terms: Value, channel: Value, v: int) -> list[Value]:
        """Return the requantized sums of one vector of channels, for all rows and positions of a tile."""
        kb, n, k, dot = self.kb, self.n, self.kernel, self.kernel.dot
        first = kb.add(channel, v * k.lanes)
        weights = kb.at(weights, kb.ir.mul(n.vector_weight_bytes, kb.i64(v)))
        source = kb.at(lhs, v * k.vector_bytes)
        accs: Sequence[Value] = [dot.requantization.bias(kb, self.epilogue, first, k.lanes)] * (k.mr * k.taps.rows)
        if dot.terms == 1:
            accs = self._window(source, weights, accs)
        else:
            first_term = kb.at(weights, _TERM_COUNT_BYTES)
            term_bytes = kb.mul(n.vector_weight_bytes, UNPACKED_VECTORS)
            accs = kb.for_loop(
                terms, accs, lambda t, a: self._window(source, kb.at(first_term, kb.ir.mul(t, term_bytes)), a)
            )
        return [dot.requantization.rounded(kb, acc, self.epilogue, first) for acc in accs]

    def _window(self, source: Value, weights: Value, accs: Sequence[Value]) -> Sequence[Value]:
        """Emit all taps of one vector of channels."""
        taps, loaded = self.kernel.taps, dict[tuple[int, int], Value]()
        if not taps.columns:
            return self.kb.for_loop(self.n.tap_columns, accs, lambda j, a: self._column_of_loop(j, source, weights, a))
        for j in range(taps.columns):
            accs = self._column(j, source, weights, accs, loaded)
        return accs

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
