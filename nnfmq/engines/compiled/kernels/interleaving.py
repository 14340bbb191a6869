"""Interleaving of the input rows of 8-bit depthwise convolutions, pixel by pixel of a panel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from nnfmq.base.frozen import dataclass
from nnfmq.engines.compiled.ir_builder import I8, I16, KernelBuilder, Value, vector
from nnfmq.engines.compiled.kernels.dynamic_quantization import Dequantization
from nnfmq.engines.compiled.kernels.micro_kernels import Array, SignFlipped, dot2, dot4, dot4_signed
from nnfmq.engines.compiled.kernels.packing import RowBufferParams
from nnfmq.engines.compiled.kernels.requantize import Requantization, unpack_subvectors
from nnfmq.engines.compiled.target import Target

__all__ = ["DwConvInt8Params", "RowDot", "RowInterleaver", "TapGroups"]


# ----------------------------------------------------------------------------------------------------------------------
# Interleaving of input rows for 8-bit depthwise convolutions, and the packing of sums that undoes it.
#
# A dot instruction sums two or four adjacent products in each 32-bit lane. A depthwise convolution sums products of one
# channel, which come from different input rows: interleaving puts one channel of a group of rows into one lane.
#
# The channels are then in the order of `requantize`, until their results are packed to bytes.


_MIN_S8, _MAX_S8 = -128, 127


@dataclass(frozen=True, slots=True)
class RowDot:
    """Products of 8-bit inputs of `rows` interleaved rows, summed in int32.

    4 rows: u8 or s8 times s8 (dot4). 2 rows: s16 (dot2). 1 row: s16, on targets without instructions that sum products.
    The bias contains -input zero point * (sum of the channel's weights). Sums wrap around: only the last has to fit.

    Weights that int8 does not hold are sums of two `terms`. Models have them in some channels of uint8 filters.
    """

    rows: int
    terms: int
    is_signed: bool
    requantization: Requantization | Dequantization

    @classmethod
    def of(
        cls,
        target: Target,
        weight_range: tuple[int, int],
        is_signed: bool,
        requantization: Requantization | Dequantization,
    ) -> RowDot:
        """Return the one that sums the most products per instruction."""
        low, high = weight_range
        if target.has_dot4 and low >= 2 * _MIN_S8 and high <= 2 * _MAX_S8:
            return cls(4, 1 if low >= _MIN_S8 and high <= _MAX_S8 else 2, is_signed, requantization)
        return cls(2 if target.pmaddwd is not None else 1, 1, is_signed, requantization)

    @property
    def group_bytes(self) -> int:
        """Bytes of a channel of a group of rows, as LHS or as weights."""
        return 2 if self.rows == 1 else 4

    @property
    def can_prescale(self) -> bool:
        """Whether weights may be packed doubled."""
        return self.rows < 4

    def lhs_is_signed(self, target: Target) -> bool:
        """Return whether inputs are read as int8, else as uint8."""
        return self.rows == 4 and target.dot4_is_signed(self.is_signed)

    def _kind(self, lanes: int) -> Any:
        return vector(I8, 4 * lanes) if self.rows == 4 else vector(I16, self.rows * lanes)

    def interleave(self, kb: KernelBuilder, rows: Sequence[Value]) -> list[Value]:
        """Return vectors of bytes, one for each row, as the four vectors whose lanes have one channel each.

        They are adjacent in memory; two of them may be joined in one.
        """
        if self.rows == 1:
            return [kb.ir.zext(rows[0], vector(I16, rows[0].type.count))]
        shorts, zero = vector(I16, rows[0].type.count // 2), kb.splat(I8, 0, rows[0].type.count)
        first = [unpack_subvectors(kb, rows[0], rows[1], half) for half in (0, 1)]
        if self.rows == 2:
            return [unpack_subvectors(kb, pair, zero, half) for pair in first for half in (0, 1)]
        second = [unpack_subvectors(kb, rows[2], rows[3], half) for half in (0, 1)]
        pairs = [[kb.ir.bitcast(pair, shorts) for pair in both] for both in zip(first, second, strict=True)]
        return [unpack_subvectors(kb, low, high, half) for low, high in pairs for half in (0, 1)]

    def load(self, kb: KernelBuilder, address: Value, offset: Any) -> Value:
        """Load LHS or weights of a vector of channels."""
        return kb.load(self._kind(kb.target.lanes), address, offset)

    def multiply_add(self, kb: KernelBuilder, acc: Value, lhs: Value, weights: Value) -> Value:
        """Return `acc` plus the products of a group of rows."""
        if self.rows == 4:
            return (dot4_signed if self.lhs_is_signed(kb.target) else dot4)(kb, acc, lhs, weights)
        if self.rows == 2:
            return dot2(kb, acc, lhs, weights)
        return kb.ir.add(acc, kb.ir.mul(kb.ir.sext(lhs, acc.type), kb.ir.sext(weights, acc.type)))

    def pack(self, weights: Array) -> list[Array]:
        """Return the terms of weights (panels, vectors, columns, groups, tile rows, rows of a group, lanes) as read."""
        weights = np.moveaxis(weights, -2, -1)
        if self.rows < 4:
            return [weights.astype(np.int16)]
        first = np.clip(weights, _MIN_S8, _MAX_S8)
        return [term.astype(np.int8) for term in (first, weights - first)[: self.terms]]


# ----------------------------------------------------------------------------------------------------------------------
# Interleaving of the input rows of 8-bit depthwise convolutions, pixel by pixel of a panel.


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
    tail: Any  # positions after the last tile, if each is a tile of its own
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
class RowInterleaver:
    """Emits the interleaving of the input rows under a tile, for one panel, in scratch memory or in registers.

    Rows are given by the addresses of the panel's channels of their first pixel. What is interleaved as one row are
    several, one for each of `row_tiles`: their pixels share a vector of bytes. `nr` are all bytes of it, `pixel_bytes`
    those of an interleaved pixel of a group.
    """

    kb: KernelBuilder
    n: DwConvInt8Params
    dot: RowDot
    taps: TapGroups
    nr: int
    pixel_bytes: int
    row_tiles: int
    converter: SignFlipped

    @property
    def target(self) -> Value:
        """The address of interleaved rows."""
        return self.kb.at(self.kb.scratch, self.n.interleaved_offset)

    def copied_rows(self, buffer: RowBufferParams, row: Value, channel: Value) -> list[list[Value]]:
        """Return the copied rows under output row `row` of a block."""
        kb, n = self.kb, self.n
        top = kb.at(kb.at(kb.scratch, channel), kb.ir.mul(kb.ir.mul(row, n.row_stride), buffer.pitch))
        return [[kb.at(top, kb.mul(buffer.pitch, offset))] for offset in self._row_offsets()]

    def image_rows(self, image: Value, row: Value, channel: Value) -> list[list[Value]]:
        """Return the image's rows under the tiles that begin with output row `row`."""
        kb, n = self.kb, self.n
        first = kb.at(image, channel)
        tops = [
            kb.ir.sub(kb.ir.mul(kb.add(row, tile * self.taps.rows), n.row_stride), n.padding_top)
            for tile in range(self.row_tiles)
        ]
        return [[self._image_row(first, kb.add(top, offset)) for top in tops] for offset in self._row_offsets()]

    def _image_row(self, image: Value, number: Value) -> Value:
        """Return the address of a row of the image, or of the row of padding if it is outside."""
        kb, n = self.kb, self.n
        is_inside = kb.ir.icmp_unsigned("<", number, n.input_rows)  # unsigned: a row above has a large number
        return kb.ir.select(is_inside, kb.at(image, kb.ir.mul(number, n.input_row_bytes)), kb.scratch)

    def _row_offsets(self) -> list[int]:
        """Return the input rows of a tile, from its first one. Those after the last have weights of 0."""
        last = self.taps.kernel_rows + self.taps.rows - 2
        return [min(row, last) * self.taps.row_dilation for row in range(self.taps.groups * self.dot.rows)]

    def emit_padding_row(self) -> None:
        """Emit the filling of a row of padding, which is before interleaved rows in scratch memory."""
        padding = self.converter.flipped(self.kb, self.converter.padding(self.kb, self.nr))
        with self.kb.loop(0, self.n.interleaved_offset, self.nr) as offset:
            self.kb.store(padding, self.kb.scratch, offset)

    def emit_copied(self, rows: Sequence[Sequence[Value]]) -> None:
        """Emit the interleaving of copied rows, which are converted and have padding."""
        self._emit_pixels(rows, self.target, is_converted=True)

    def emit(self, rows: Sequence[Sequence[Value]]) -> None:
        """Emit the interleaving of an image's rows, with padding."""
        kb, n = self.kb, self.n
        within = kb.at(self.target, kb.mul(n.left, self.pixel_bytes))
        self._emit_padding(n.left, self.target)
        self._emit_pixels(rows, within, is_converted=False)
        self._emit_padding(n.right, kb.at(within, kb.mul(n.within, self.pixel_bytes)))

    def _emit_padding(self, pixels: Value, target: Value) -> None:
        padding = [self.converter.padding(self.kb, self.nr)] * (self.taps.groups * self.dot.rows)
        with self.kb.loop(0, pixels) as pixel:
            self._store(padding, self.kb.at(target, self.kb.mul(pixel, self.pixel_bytes)))

    def _emit_pixels(self, rows: Sequence[Sequence[Value]], target: Value, is_converted: bool) -> None:
        kb = self.kb
        with kb.loop(0, self.n.within) as pixel:
            offset = kb.ir.mul(pixel, self.n.pixel_channels)
            loaded = [self._load(row, offset) for row in rows]
            if not is_converted:
                loaded = [self.converter.flipped(kb, values) for values in loaded]
            self._store(loaded, kb.at(target, kb.mul(pixel, self.pixel_bytes)))

    def pixel(self, rows: Sequence[Sequence[Value]], number: Value) -> list[Value]:
        """Return pixel `number` of an image's rows, interleaved, as vectors of channels. Outside it is padding.

        Only for one group of four rows. A branch skips the loads: CPUs predict it, and selecting the address of each
        row would take more instructions.
        """
        kb, n, padding = self.kb, self.n, self.converter.padding(self.kb, self.nr)
        is_inside = kb.ir.icmp_unsigned("<", number, n.within)
        before, loading, after = kb.ir.block, kb.function.append_basic_block(), kb.function.append_basic_block()
        kb.ir.cbranch(is_inside, loading, after)
        kb.ir.position_at_end(loading)
        offset, used = kb.ir.mul(number, n.pixel_channels), self.taps.kernel_rows + self.taps.rows - 1
        loaded = [self.converter.flipped(kb, self._load(row, offset)) for row in rows[:used]]
        kb.ir.branch(after)
        kb.ir.position_at_end(after)
        values = [kb.ir.phi(value.type) for value in loaded]
        for value, inside in zip(values, loaded, strict=True):
            value.add_incoming(inside, loading)
            value.add_incoming(padding, before)
        values += values[-1:] * (self.dot.rows - used)  # they have weights of 0
        return [kb.ir.bitcast(v, vector(I8, self.nr)) for v in self.dot.interleave(kb, values)]

    def _load(self, tiles: Sequence[Value], offset: Value) -> Value:
        """Load a pixel of one row of each tile."""
        kb, kind = self.kb, vector(I8, self.nr // self.row_tiles)
        parts = [kb.load(kind, address, offset) for address in tiles]
        while len(parts) > 1:
            parts = [kb.concat(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    def _store(self, rows: Sequence[Value], target: Value) -> None:
        """Emit the interleaving of one pixel."""
        kb, size = self.kb, self.dot.rows
        for group in range(self.taps.groups):
            vectors = self.dot.interleave(kb, rows[group * size : (group + 1) * size])
            group_target = kb.at(target, kb.mul(self.n.group_stride, group))
            for number, interleaved in enumerate(vectors):
                kb.store(interleaved, group_target, number * self.pixel_bytes // len(vectors))
