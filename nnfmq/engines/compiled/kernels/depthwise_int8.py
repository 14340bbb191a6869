"""Depthwise convolution of 8-bit inputs: sums in integers, of input rows that are interleaved in groups.

Results have 8 bits, or are floats if the input is quantized at run time.

A work item is a block of output rows times a block of panels; a panel is one vector of bytes of channels. For the
output rows of a tile, and for each panel, the rows under them are interleaved in groups of `RowDot.rows`, as uint8 or
int8 and with padding; then one dot instruction multiplies a column of taps:

    rows y to y+3, interleaved    output row y: taps w0 w1 w2 0    output row y+1: taps 0 w0 w1 w2

So two output rows of a 3x3 window share what is interleaved, if its stride is 1. Rows are interleaved in registers,
just before they are multiplied (in registers), or in scratch memory if windows are large or vectors short.

Rows are interleaved from the image itself. If its channels are few, or not a multiple of a vector's bytes, a panel may
have a half or a quarter of them, and the rows of as many `row_tiles` below each other share a vector. Images whose
pixels have fewer channels than that are copied first, with padding, and taken as if `pixel_group` adjacent pixels were
one with more channels, if the stride is 1: panels are full then.

As in `gemm`, the last tile of a row starts early and recomputes positions; so does the last panel of the channels.
Shapes are run-time values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import field, replace
from functools import partial

import numpy as np

from nnfmq.base.frozen import dataclass
from nnfmq.engines.compiled.ir_builder import I64, KernelBuilder, Value, load_params, pack_params
from nnfmq.engines.compiled.kernels.depthwise import DwConvShape
from nnfmq.engines.compiled.kernels.dynamic_quantization import Dequantization
from nnfmq.engines.compiled.kernels.interleaving import DwConvInt8Params, RowDot, RowInterleaver, TapGroups
from nnfmq.engines.compiled.kernels.micro_kernels import Array, SignFlipped
from nnfmq.engines.compiled.kernels.packing import (
    InputRowBuffer,
    RowBufferParams,
    fill_row_buffer,
    pack_lhs_row,
    pack_lhs_row_repeated,
)
from nnfmq.engines.compiled.kernels.requantize import PANEL_VECTORS, subvector_order
from nnfmq.engines.compiled.target import Target
from nnfmq.operations.declaration import Shape
from nnfmq.operations.shapes import WindowDimension

__all__ = ["DwConvInt8Kernel", "RegisterTiles", "plan_dwconv_int8"]


# ----------------------------------------------------------------------------------------------------------------------
# Tiles of 8-bit depthwise convolutions whose input rows are interleaved in registers, not in scratch memory.
#
# The pixels that a tile's last window shares with the next tile's first one stay in registers. So only results are
# stored, and the CPU multiplies and requantizes while it interleaves: shuffles take one of its ports. In scratch memory
# a pixel of 64 channels takes 256 bytes, and a wide image's row most of the first-level cache.


@dataclass(frozen=True, slots=True)
class RegisterTiles:
    """Emits the tiles of the output rows of a panel.

    `rows` are the input rows under them, and `biases` the sums' first values, one for each vector of channels. `store`
    gets the number of a tile's first position, and for each vector of channels the sums of all rows and positions.
    `terms` is the number of terms of the panel's weights, which begin at `weights`.
    """

    interleaver: RowInterleaver
    rows: Sequence[Sequence[Value]]
    weights: Value
    terms: int | Value
    biases: Callable[[], list[Value]]
    store: Callable[[Value, list[list[Value]]], None]

    @property
    def _kb(self) -> KernelBuilder:
        return self.interleaver.kb

    @property
    def _kept(self) -> int:
        """Pixels of the window that the next tile's first window has, too."""
        return self.interleaver.taps.columns - self.interleaver.taps.stride

    def first_pixels(self) -> list[Value]:
        """Emit the pixels that an output row's first tile has of the one before."""
        left = self._kb.ir.neg(self.interleaver.n.left)
        return _flat([self._pixel(left, number) for number in range(self._kept)])

    def emit(self, begin: Value, positions: int, tiles: Value, kept: Sequence[Value]) -> Sequence[Value]:
        """Emit a loop over tiles of some positions, from `begin` on; return the pixels kept for the next one."""
        return self._kb.for_loop(tiles, kept, partial(self._tile, begin, positions), may_be_empty=True)

    def _tile(self, begin: Value, positions: int, number: Value, kept: Sequence[Value]) -> list[Value]:
        """Emit a tile, given the pixels kept from the one before. Returns those to be kept."""
        kb, taps, n = self._kb, self.interleaver.taps, self.interleaver.n
        # Otherwise LLVM would look for the best way to advance the address of each load, for a quarter of its time.
        first = kb.ir.add(begin, kb.mul(kb.launder(number), positions))
        left = kb.ir.sub(kb.mul(first, taps.stride), n.left)
        biases = [bias for bias in self.biases() for _ in range(taps.rows * positions)]

        def add_term(term: Value, carried: Sequence[Value]) -> list[Value]:
            """Add the products with a term of the weights. A second term finds no pixels: few panels have one."""
            sums, pixels = _split(carried[: len(biases)], PANEL_VECTORS), _split(kept, self._kept)
            weights = kb.at(self.weights, kb.ir.mul(term, kb.mul(n.vector_weight_bytes, PANEL_VECTORS)))
            self._add_products(weights, left, sums, pixels, positions)
            return [*_flat(sums), *_flat(pixels[len(pixels) - self._kept :])]

        results = kb.for_loop(self.terms, [*biases, *kept], add_term)
        self.store(first, _split(results[: len(biases)], PANEL_VECTORS))
        return list(results[len(biases) :])

    def _pixel(self, first: Value, number: int) -> list[Value]:
        return self.interleaver.pixel(self.rows, self._kb.add(first, number))

    def _add_products(
        self, weights: Value, first: Value, sums: list[list[Value]], pixels: list[list[Value]], positions: int
    ) -> None:
        """Add a tile's products to `sums`. Its first pixel is `first`; those that `pixels` lacks are appended."""
        taps = self.interleaver.taps
        for pixel in range(taps.columns + (positions - 1) * taps.stride):
            if pixel >= self._kept:
                pixels.append(self._pixel(first, pixel))
            for position in range(positions):
                column = pixel - position * taps.stride
                if 0 <= column < taps.columns:
                    self._multiply_add(weights, sums, pixels[pixel], column, slice(position, None, positions))

    def _multiply_add(
        self, weights: Value, sums: list[list[Value]], pixel: list[Value], column: int, of_position: slice
    ) -> None:
        """Add the products of a pixel with a column of taps to the sums of a position, in all output rows."""
        kb, dot, taps, n = self._kb, self.interleaver.dot, self.interleaver.taps, self.interleaver.n
        vector_bytes = self.interleaver.pixel_bytes // PANEL_VECTORS
        for v, lhs in enumerate(pixel):
            results = sums[v][of_position]
            address = kb.at(weights, kb.ir.mul(n.vector_weight_bytes, kb.i64(v)))
            for row in range(taps.rows):
                tap = dot.load(kb, address, (column * taps.rows + row) * vector_bytes)
                results[row] = dot.multiply_add(kb, results[row], lhs, tap)
            sums[v][of_position] = results


def _split(values: Sequence[Value], parts: int) -> list[list[Value]]:
    """Return the values in parts of equal length."""
    return [list(values[i * len(values) // parts : (i + 1) * len(values) // parts]) for i in range(parts)]


def _flat(pixels: Sequence[Sequence[Value]]) -> list[Value]:
    return list(itertools.chain.from_iterable(pixels))


# ----------------------------------------------------------------------------------------------------------------------
# Depthwise convolution of 8-bit inputs: sums in integers, of input rows that are interleaved in groups.


_TERM_COUNT_BYTES = 64  # before the weights of a panel that may have two terms


@dataclass(frozen=True, slots=True)
class DwConvInt8Kernel(DwConvShape):
    """A planned depthwise convolution of an 8-bit NHWC input of shape `shape`.

    Fields with repr=False only size the work; the others specialize the code and so name the function. `mr`: positions
    of a tile. `partial_panel`: channels, if they are fewer than a panel has, else 0. `copies_rows`: before they are
    interleaved. `uses_registers`: to interleave rows, not scratch memory.
    """

    block_panels: int = field(repr=False)
    pixel_group: int = field(repr=False)
    dot: RowDot
    taps: TapGroups
    mr: int
    lanes: int
    partial_panel: int
    row_tiles: int
    copies_rows: bool
    uses_registers: bool
    has_depth_multiplier: bool

    compile_cost = 6

    @property
    def work_items(self) -> int:
        """Blocks of output rows times blocks of panels."""
        return self.shape[0] * self.row_blocks * self._panel_blocks

    @property
    def output_bytes(self) -> int:
        """Bytes of an output element."""
        return self.dot.requantization.output_bytes

    @property
    def _panel_blocks(self) -> int:
        return math.ceil(self.panels / self.block_panels)

    @property
    def tile(self) -> tuple[int, int]:
        """Positions of all rows, and vectors of channels, of the register tile."""
        return self.mr * self.tile_rows, PANEL_VECTORS

    @property
    def tile_rows(self) -> int:
        """Output rows of a tile."""
        return self.taps.rows * self.row_tiles

    @property
    def nr(self) -> int:
        """Bytes of a vector: the channels of a panel, of all row tiles."""
        return PANEL_VECTORS * self.lanes

    @property
    def panel_channels(self) -> int:
        """Channels of a panel."""
        return self.nr // self.row_tiles

    @property
    def panels(self) -> int:
        """Panels of channels."""
        return math.ceil(self.channels * self.pixel_group / self.panel_channels)

    @property
    def packed_channel_map(self) -> Array:
        """The channel in each lane of the panels. Lanes after the last channel repeat it."""
        last, size = self.channels * self.pixel_group - 1, self.panel_channels
        starts = np.minimum(np.arange(self.panels) * size, max(last + 1 - size, 0))
        lanes: Array = np.minimum(starts[:, None] + subvector_order(self.lanes) % size, last)
        return lanes.reshape(-1) % self.channels

    @property
    def row_buffer(self) -> InputRowBuffer:
        """The copied input rows of a work item."""
        rows = math.ceil(self.block_rows / self.tile_rows) * self.tile_rows
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
        return PANEL_VECTORS * self.vector_bytes

    @property
    def column_bytes(self) -> int:
        """Bytes of a column of taps of a vector of channels."""
        return self.taps.groups * self.taps.rows * self.vector_bytes

    @property
    def _panel_weight_bytes(self) -> int:
        term_bytes = PANEL_VECTORS * self.columns.size * self.column_bytes
        return term_bytes if self.dot.terms == 1 else _TERM_COUNT_BYTES + 2 * term_bytes

    @property
    def interleaved_offset(self) -> int:
        """The offset of interleaved rows in scratch memory: after copied rows, or after a row of padding.

        Panels of the last pixels reach behind the copied rows.
        """
        reach = self.channels * self.pixel_group + self.nr
        size = self.row_buffer.bytes + reach if self.copies_rows else self.shape[2] * self.channels
        return math.ceil(size / 64) * 64

    def scratch_bytes(self, target: Target) -> int:
        """Return the size of the copied and of the interleaved rows."""
        pixels = 0 if self.uses_registers else self._interleaved_pixels
        return self.interleaved_offset + self.taps.groups * pixels * self.pixel_bytes

    def pack(self, weights: Array) -> bytes:
        """Return `weights` (height, width, channels), minus their zero point, for each panel, vector and tap column.

        If there may be two terms, those of each panel follow their number.
        """
        taps, rows = self.taps, self.dot.rows
        shifted = np.zeros((taps.rows, taps.groups * rows, self.columns.size, len(self.packed_channel_map)), np.int16)
        for row in range(taps.rows):
            shifted[row, row : row + self.rows.size] = weights[:, :, self.packed_channel_map]
        grouped = shifted.reshape(
            taps.rows, taps.groups, rows, self.columns.size, self.panels, PANEL_VECTORS, self.lanes
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
        count = self.columns.count
        left, within = (0, pixels) if self.copies_rows else (self.columns.padding_low, width)
        params = DwConvInt8Params(
            row_blocks=self.row_blocks,
            panel_blocks=self._panel_blocks,
            panels=self.panels,
            block_panels=self.block_panels,
            block_rows=self.block_rows,
            output_rows=self.rows.count,
            image_bytes=height * width * input_channels,
            input_row_bytes=width * input_channels,
            input_rows=height,
            padding_top=self.rows.padding_low,
            output_row_bytes=self.columns.count * self.channels * self.output_bytes,
            tiles=count // self.mr if self.uses_registers else math.ceil(count / (self.mr * group)),
            tail=count % self.mr,
            last_pixel=count - self.mr * group,
            tile_pixels=self.mr * group,
            tile_input_stride=self.columns.stride * self.pixel_bytes,
            pixel_channels=self.channels,
            out_stride=group * self.channels * self.output_bytes,
            last_channel=max(self.channels * group - self.panel_channels, 0),
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
        zero_point = self.dot.requantization.input_zero_point(kb, epilogue)
        converter = SignFlipped(self.dot.is_signed != self.dot.lhs_is_signed(kb.target), zero_point)
        interleaver = RowInterleaver(kb, n, self.dot, self.taps, self.nr, self.pixel_bytes, self.row_tiles, converter)
        builder = _DwConvInt8Builder(self, kb, n, buffer, interleaver, weights, epilogue)
        builder.emit_work_items(kb.at(image, self.dot.requantization.input_offset), out)
        kb.return_void()


@dataclass(frozen=True, slots=True)
class _DwConvInt8Builder:
    """Builds a kernel's function. The code depends only on the fields of `kernel` that are in its repr."""

    kernel: DwConvInt8Kernel
    kb: KernelBuilder
    n: DwConvInt8Params
    buffer: RowBufferParams | None
    interleaver: RowInterleaver
    weights: Value
    epilogue: Value

    def emit_work_items(self, image: Value, out: Value) -> None:
        """Emit the loop over the work items."""
        kb, n, k = self.kb, self.n, self.kernel
        if not k.copies_rows:
            self.interleaver.emit_padding_row()
        with kb.loop(kb.begin, kb.end) as work_item:
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
        with kb.loop(0, output_rows, k.tile_rows) as row:
            row_out, rows_left = kb.at(out, kb.ir.mul(row, n.output_row_bytes)), kb.ir.sub(output_rows, row)
            with kb.loop(*panels) as panel:
                channel = kb.intrinsic("llvm.smin", kb.mul(panel, k.panel_channels), n.last_channel)
                panel_out = kb.at(row_out, kb.mul(channel, k.output_bytes))
                if self.buffer is not None:
                    self.interleaver.emit_copied(self.interleaver.copied_rows(self.buffer, row, channel))
                    self._emit_rows(panel_out, panel, rows_left)
                else:
                    image_rows = self.interleaver.image_rows(image, kb.ir.add(first, row), channel)
                    self._emit_image_rows(image_rows, panel_out, panel, rows_left)

    def _copy_rows(self, buffer: RowBufferParams, image: Value, first: Value, output_rows: Value) -> None:
        """Emit the copying of the input rows under the output rows, rounded up to whole tiles, as uint8 or int8."""
        kb, n, k, converter = self.kb, self.n, self.kernel, self.interleaver.converter

        def pack_row(row: Value, target: Value) -> None:
            if k.has_depth_multiplier:
                count = kb.ir.udiv(buffer.within, n.depth_multiplier)
                pack_lhs_row_repeated(kb, converter, row, target, count, n.depth_multiplier)
            else:
                pack_lhs_row(kb, converter, row, target, buffer.within)

        tile_rows = kb.i64(k.tile_rows)
        tiles = kb.ir.udiv(kb.add(output_rows, k.tile_rows - 1), tile_rows)
        fill_row_buffer(kb, buffer, converter, image, first, kb.ir.mul(tiles, tile_rows), pack_row)

    # -- tiles ---------------------------------------------------------------------------------------------------------

    def _emit_image_rows(
        self, image_rows: Sequence[Sequence[Value]], out: Value, panel: Value, rows_left: Value
    ) -> None:
        """Emit the tiles of the output rows of a panel, and the interleaving of the image's rows under them."""
        if not self.kernel.uses_registers:
            self.interleaver.emit(image_rows)
            self._emit_rows(out, panel, rows_left)
            return
        kb, n, k = self.kb, self.n, self.kernel
        weights, terms = self._panel_weights(panel)
        channel = kb.mul(panel, k.nr)  # packed

        def store(first: Value, sums: list[list[Value]]) -> None:
            results = self._packed(lambda v: self._requantized(sums[v], channel, v))
            self._store_rows(results, kb.at(out, kb.ir.mul(first, n.out_stride)), rows_left)

        tiles = RegisterTiles(self.interleaver, image_rows, weights, terms, partial(self._biases, channel), store)
        kept = tiles.emit(kb.i64(0), k.mr, n.tiles, tiles.first_pixels())
        if k.mr > 1:  # the few positions that are left
            tiles.emit(kb.ir.mul(n.tiles, kb.i64(k.mr)), 1, n.tail, kept)

    def _panel_weights(self, panel: Value) -> tuple[Value, int | Value]:
        """Return the address of a panel's weights, and how many terms they have."""
        kb = self.kb
        weights = kb.at(self.weights, kb.ir.mul(panel, self.n.panel_weight_bytes))
        if self.kernel.dot.terms == 1:
            return weights, 1
        return kb.at(weights, _TERM_COUNT_BYTES), kb.load(I64, weights)

    def _emit_rows(self, out: Value, panel: Value, rows_left: Value) -> None:
        """Emit the tiles of the output rows of a panel, whose input rows are interleaved in scratch memory."""
        kb, n, k = self.kb, self.n, self.kernel
        weights, terms = self._panel_weights(panel)
        channel = kb.mul(panel, k.nr)  # packed
        with kb.loop(0, n.tiles) as tile:
            pixel = kb.intrinsic("llvm.smin", kb.ir.mul(tile, n.tile_pixels), n.last_pixel)
            lhs = kb.at(self.interleaver.target, kb.ir.mul(pixel, n.tile_input_stride))
            results = self._packed(partial(self._rounded, lhs, weights, terms, channel))
            pixel_bytes = kb.mul(n.pixel_channels, k.output_bytes)
            self._store_rows(results, kb.at(out, kb.ir.mul(pixel, pixel_bytes)), rows_left)

    def _store_rows(self, results: Sequence[Value], target: Value, rows_left: Value) -> None:
        """Emit the storing of the results of a tile's first row, then of the next row.

        Only the first `rows_left` rows may be in the block. Others are stored where the first one overwrites them. A
        branch would make LLVM compute them in it, and spill.
        """
        kb, n, k = self.kb, self.n, self.kernel
        positions = len(results) // k.taps.rows
        for row in reversed(range(k.tile_rows)):
            is_inside = kb.ir.icmp_signed("<", kb.i64(row), rows_left)
            offset = kb.ir.select(is_inside, kb.i64(kb.mul(n.output_row_bytes, row)), kb.i64(0))
            part, tile_row = divmod(row, k.taps.rows)
            self._store(results[tile_row * positions : (tile_row + 1) * positions], part, kb.at(target, offset))

    def _store(self, results: Sequence[Value], part: int, target: Value) -> None:
        """Emit the storing of the elements that row tile `part` has in each of `results`."""
        kb, size = self.kb, self.kernel.panel_channels
        for position, values in enumerate(results):
            row = kb.shuffle(values, values, range(part * size, (part + 1) * size))
            kb.store_partial(row, self.kernel.partial_panel or size, target, kb.mul(self.n.out_stride, position))

    def _packed(self, rounded: Callable[[int], list[Value]]) -> list[Value]:
        """Return the results of all positions of a tile's first row, then of the next row.

        `rounded` returns the requantized sums, or their floats, of one of the vectors of channels.
        """
        kb, requantization, constants = self.kb, self.kernel.dot.requantization, self.epilogue
        if isinstance(requantization, Dequantization):
            return [self._in_order(parts) for parts in zip(*map(rounded, range(PANEL_VECTORS)), strict=True)]
        words = []
        for v in range(0, PANEL_VECTORS, 2):
            pairs = zip(rounded(v), rounded(v + 1), strict=True)
            words.append([requantization.narrow_subvectors(kb, low, high, constants) for low, high in pairs])
        return [requantization.clamp_subvectors(kb, low, high, constants) for low, high in zip(*words, strict=True)]

    def _in_order(self, parts: Sequence[Value]) -> Value:
        """Return the vectors of a panel's channels as one, with the channels in their order."""
        kb = self.kb
        joined = kb.concat(kb.concat(*parts[:2]), kb.concat(*parts[2:]))
        return kb.shuffle(joined, joined, np.argsort(subvector_order(self.kernel.lanes)).tolist())

    def _biases(self, channel: Value) -> list[Value]:
        """Return the biases of the panel that begins at packed channel `channel`."""
        lanes, requantization = self.kernel.lanes, self.kernel.dot.requantization
        firsts = [self.kb.add(channel, v * lanes) for v in range(PANEL_VECTORS)]
        return [requantization.bias(self.kb, self.epilogue, first, lanes) for first in firsts]

    def _requantized(self, sums: Sequence[Value], channel: Value, v: int) -> list[Value]:
        first, requantization = self.kb.add(channel, v * self.kernel.lanes), self.kernel.dot.requantization
        if isinstance(requantization, Dequantization):
            return [requantization.finished(self.kb, acc, self.epilogue, first) for acc in sums]
        return [requantization.rounded(self.kb, acc, self.epilogue, first) for acc in sums]

    def _rounded(self, lhs: Value, weights: Value, terms: int | Value, channel: Value, v: int) -> list[Value]:
        """Return the requantized sums of one vector of channels, for all rows and positions of a tile."""
        kb, n, k, dot = self.kb, self.n, self.kernel, self.kernel.dot
        first = kb.add(channel, v * k.lanes)
        weights = kb.at(weights, kb.ir.mul(n.vector_weight_bytes, kb.i64(v)))
        source = kb.at(lhs, v * k.vector_bytes)
        accs: Sequence[Value] = [dot.requantization.bias(kb, self.epilogue, first, k.lanes)] * (k.mr * k.taps.rows)
        term_bytes = kb.mul(n.vector_weight_bytes, PANEL_VECTORS)
        accs = kb.for_loop(terms, accs, lambda t, a: self._window(source, kb.at(weights, kb.ir.mul(t, term_bytes)), a))
        return self._requantized(accs, channel, v)

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


# ----------------------------------------------------------------------------------------------------------------------
# Planning of 8-bit depthwise convolutions: tile, blocks, pixels of a group.


_MAX_ROWS_BYTES = 1 << 16
_MIN_WORK_ITEMS, _MAX_WORK_ITEMS = 8, 64
_MAX_UNROLLED_DOTS = 16  # of one accumulator
_TILE_VECTORS_16_REGISTERS, _TILE_VECTORS_32_REGISTERS = 4, 10  # accumulators of a vector of channels
_MIN_LANES_FOR_REGISTERS = 16
_MAX_SMALL_WIDTH = 16  # pixels for each row tile of a panel; measured with AVX512-VNNI
_MAX_KEPT_PIXELS = 2  # from one tile to the next one, in 8 registers
_MAX_REGISTER_COLUMNS = 5  # of a window: all of them are unrolled
_MAX_PIXEL_GROUP = 8
_SUBVECTOR_BYTES = 16  # of a vector: the channels of a panel fill at least one
_ROW_TILE_COSTS = {1: 1.0, 2: 1.1, 4: 1.75}  # of a panel, by row tiles that share it; measured with AVX512-VNNI
_TILE_COST, _INTERLEAVING_COST = 50, 8  # instructions for a position and a panel, in one output row


def plan_dwconv_int8(
    shape: Shape,
    depth_multiplier: int,
    rows: WindowDimension,
    columns: WindowDimension,
    dot: RowDot,
    target: Target,
) -> DwConvInt8Kernel:
    """Return the kernel for an input shape and a target: tile, blocks, pixels of a group."""
    channels, nr = shape[3] * depth_multiplier, PANEL_VECTORS * target.lanes
    groups = math.ceil(rows.size / dot.rows)
    tile_rows = groups * dot.rows - rows.size + 1 if rows.stride == rows.dilation == 1 else 1
    tile_rows = min(tile_rows, rows.count)
    copies_rows = depth_multiplier > 1 or channels < min(nr, _SUBVECTOR_BYTES)
    pixel_group = _choose_pixel_group(channels, columns, nr) if copies_rows else 1
    row_tiles = 1 if copies_rows else _choose_row_tiles(channels, math.ceil(rows.count / tile_rows), nr)
    is_unrolled = groups * columns.size <= _MAX_UNROLLED_DOTS
    uses_registers = (
        not copies_rows
        and _fits_registers(groups, columns, dot, target)
        and _saves_memory(row_tiles, shape[2], columns)
    )
    mr = _choose_mr(columns.count // pixel_group, tile_rows, target)
    if uses_registers:
        mr = 2 if tile_rows <= 2 else 1  # at most 16 of 32 registers are sums

    kernel = DwConvInt8Kernel(
        shape,
        rows,
        columns,
        depth_multiplier,
        block_rows=tile_rows * row_tiles,
        block_panels=math.ceil(channels * pixel_group * row_tiles / nr),
        pixel_group=pixel_group,
        dot=dot,
        taps=TapGroups(
            groups,
            columns.size if is_unrolled else 0,
            tile_rows,
            pixel_group * columns.stride,
            columns.dilation,
            rows.dilation,
            rows.size,
        ),
        mr=mr,
        lanes=target.lanes,
        partial_panel=channels * pixel_group if copies_rows and channels * pixel_group < nr else 0,
        row_tiles=row_tiles,
        copies_rows=copies_rows,
        uses_registers=uses_registers,
        has_depth_multiplier=depth_multiplier > 1,
    )
    return replace(kernel, block_rows=_choose_block_rows(kernel)) if copies_rows else _in_blocks(kernel)


def _in_blocks(kernel: DwConvInt8Kernel) -> DwConvInt8Kernel:
    """Return a kernel that copies no rows, in blocks small enough that all threads have some.

    Blocks of panels do not overlap: there are none if the last panel starts early.
    """
    tile_rows, panels = kernel.tile_rows, kernel.panels
    tiles = kernel.shape[0] * math.ceil(kernel.rows.count / tile_rows)
    if tiles < _MIN_WORK_ITEMS and kernel.channels % kernel.panel_channels == 0 and panels > 1:
        block_panels = math.ceil(panels / math.ceil(_MIN_WORK_ITEMS / tiles))
        return replace(kernel, block_panels=block_panels)
    return replace(kernel, block_rows=max(1, tiles // _MAX_WORK_ITEMS) * tile_rows)


def _choose_row_tiles(channels: int, tiles: int, nr: int) -> int:
    """Return how many row tiles share a vector, so that little of it is unused."""

    def cost(row_tiles: int) -> float:
        panels = math.ceil(channels * row_tiles / nr)
        return math.ceil(tiles / row_tiles) * panels * _ROW_TILE_COSTS[row_tiles]

    return min((n for n in _ROW_TILE_COSTS if _SUBVECTOR_BYTES <= nr // n <= channels), key=cost)


def _choose_pixel_group(channels: int, columns: WindowDimension, nr: int) -> int:
    """Return how many adjacent pixels are taken as one. Each pixel's panel is interleaved as often as that."""
    if columns.stride > 1 or channels >= nr:
        return 1

    def cost(group: int) -> float:
        panels = math.ceil(channels * group / nr)
        return panels * (math.ceil(columns.count / group) * _TILE_COST + columns.count * _INTERLEAVING_COST)

    return min(range(1, min(_MAX_PIXEL_GROUP, columns.count) + 1), key=cost)


def _fits_registers(groups: int, columns: WindowDimension, dot: RowDot, target: Target) -> bool:
    """Return whether rows can be interleaved in registers, of which vectors are long enough to gain from it.

    With vectors of 16 bytes it takes as many instructions as in scratch memory, where rows take less memory, too.
    """
    if target.lanes < _MIN_LANES_FOR_REGISTERS or groups > 1 or dot.rows < 4 or columns.dilation > 1:
        return False
    return columns.stride <= columns.size <= min(columns.stride + _MAX_KEPT_PIXELS, _MAX_REGISTER_COLUMNS)


def _saves_memory(row_tiles: int, width: int, columns: WindowDimension) -> bool:
    """Return whether interleaved rows had better not be in scratch memory.

    Pixels of several row tiles take more instructions to load, which only a wide row is worth if windows share most
    pixels.
    """
    return columns.stride > 1 or row_tiles == 1 or width > row_tiles * _MAX_SMALL_WIDTH


def _choose_mr(count: int, tile_rows: int, target: Target) -> int:
    """Return the positions of a tile: the fewest computed twice, and of these the most that share loads."""
    vectors = _TILE_VECTORS_16_REGISTERS if target.registers == 16 else _TILE_VECTORS_32_REGISTERS
    max_mr = max(1, min(count, vectors // tile_rows))
    return min(range(1, max_mr + 1), key=lambda mr: math.ceil(count / mr) * (mr + 0.35))


def _choose_block_rows(kernel: DwConvInt8Kernel) -> int:
    """Return the output rows of a block: as many as the scratch limit and the number of work items allow."""
    tile_rows = kernel.taps.rows
    max_rows = max(tile_rows, kernel.shape[0] * kernel.rows.count // _MIN_WORK_ITEMS)
    rows = tile_rows
    while (
        rows + tile_rows <= min(max_rows, kernel.rows.count + tile_rows - 1)
        and replace(kernel, block_rows=rows + tile_rows).row_buffer.bytes <= _MAX_ROWS_BYTES
    ):
        rows += tile_rows
    return rows
