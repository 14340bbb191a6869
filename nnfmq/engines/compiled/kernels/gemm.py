"""GEMM kernel for CONV_2D, GROUPED_CONV_2D, FULLY_CONNECTED and BATCH_MATMUL (implicit im2col).

M = output positions, N = output channels, K = kernel_h * kernel_w * channels per group. Weights are packed into panels
of nr channels (BLIS). An mr x nr tile of accumulators stays in registers over the whole K loop. A work item is mc
positions (1x1 windows) or a block of output rows, times a slice of N.

The last tile of a row starts early and recomputes positions, so there is no M remainder; the N remainder is a partial
store. Both write equal bytes twice, by one thread or by two, which is harmless. Shapes and strides are loaded at run
time (`GemmParams`): layers with equal tiles share one function.

If the channels fill at most half a vector, accumulators are half a vector long. Those of two adjacent positions, whose
results are adjacent in memory, are joined for the epilogue.

Weights that do not fit the second-level cache are *streamed*.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import field
from enum import Enum

import numpy as np

from nnfmq.base.frozen import dataclass
from nnfmq.engines.compiled.ir_builder import I32, KernelBuilder, Value, load_params, pack_params
from nnfmq.engines.compiled.kernels import Kernel
from nnfmq.engines.compiled.kernels.conv_shape import ConvShape
from nnfmq.engines.compiled.kernels.elementwise import EmitOperator, EpilogueOperator
from nnfmq.engines.compiled.kernels.gemm_tile import (
    AmxTileBuilder,
    EmitTap,
    EmitTile,
    GemmParams,
    GemmTile,
    TileBuilder,
    TilePlace,
    configured_tiles,
)
from nnfmq.engines.compiled.kernels.micro_kernels import Amx, Array, Dot4, MicroKernel
from nnfmq.engines.compiled.kernels.packing import (
    OVERREAD_BYTES,
    InputRowBuffer,
    RowBufferParams,
    fill_row_buffer,
    pack_lhs_row,
)
from nnfmq.engines.compiled.target import Target

__all__ = ["GemmKernel", "LhsLayout", "emit_streamed_panels", "position_stride", "row_buffer_of"]


# ----------------------------------------------------------------------------------------------------------------------
# The loops of a GEMM whose weights do not fit the second-level cache.
#
# A block of positions is so large that each weight is loaded from memory once for many tiles. K is divided into blocks
# (BLIS: kc) whose part of a panel stays in the cache, and the tiles of a panel prefetch the next one. Accumulators wait
# in scratch memory between two K blocks.


@dataclass(frozen=True, slots=True)
class _KBlock:
    """A K block of a slice of N: its iterations, and the addresses of its LHS and of its part of panel 0."""

    is_first: Value
    is_last: Value
    iterations: Value
    lhs: Value
    weights: Value


def emit_streamed_panels(
    tile: TileBuilder,
    panels: tuple[Value, Value],
    lhs: Value,
    row_sums: Value,
    out: Value,
    weights: Value,
    column_terms: Value | None = None,
) -> None:
    """Emit the loops over K blocks and panels: all panels of a slice read the K block of the LHS from the cache.

    `panels` are the first panel of a slice of N and the end of the slice. `column_terms` are those of panel 0.
    """
    kb, n = tile.kb, tile.n
    accumulators, (first_panel, end) = kb.at(kb.scratch, n.accumulators), panels
    with kb.loop(0, n.k_blocks) as k_block:
        first = kb.ir.mul(k_block, n.block_iterations)
        iterations = kb.intrinsic("llvm.smin", n.block_iterations, kb.ir.sub(n.k_iterations, first))
        block = _KBlock(
            is_first=kb.ir.icmp_unsigned("==", k_block, kb.i64(0)),
            is_last=kb.ir.icmp_unsigned("==", kb.add(k_block, 1), n.k_blocks),
            iterations=iterations,
            lhs=kb.at(lhs, kb.mul(first, tile.lhs_bytes)),
            weights=kb.at(weights, kb.mul(first, tile.weight_bytes)),
        )
        with kb.loop(first_panel, end) as panel:
            stored = kb.at(accumulators, kb.ir.mul(kb.ir.sub(panel, first_panel), n.accumulator_stride))
            terms = None if column_terms is None else kb.at(column_terms, kb.mul(panel, 4 * tile.tile.nr))
            _emit_k_block_of_panel(tile, block, panel, row_sums, stored, out, terms)


def _emit_k_block_of_panel(
    tile: TileBuilder,
    block: _KBlock,
    panel: Value,
    row_sums: Value,
    accumulators: Value,
    out: Value,
    column_terms: Value | None,
) -> None:
    """Emit the tiles of a panel over all positions of a block; each prefetches a part of the next panel's weights.

    A prefetch may run past the constant's end: it is a hint and reads nothing.
    """
    kb, n, mr, nr = tile.kb, tile.n, tile.tile.mr, tile.tile.nr
    channel, weights = kb.mul(panel, nr), kb.at(block.weights, kb.ir.mul(panel, n.panel_bytes))
    ahead, tile_prefetch = kb.at(weights, n.panel_bytes), kb.ir.mul(block.iterations, n.prefetch_stride)
    out = kb.at(out, kb.mul(panel, nr * tile.micro_kernel.output_bytes))
    is_last_panel = kb.ir.icmp_unsigned("==", kb.add(panel, 1), n.panels_per_group)
    last = kb.ir.sub(n.positions, kb.i64(mr))
    with kb.loop(0, n.positions, mr) as begin:
        position, stored = kb.intrinsic("llvm.smin", begin, last), kb.at(accumulators, kb.mul(begin, nr * 4))
        prefetched = kb.at(ahead, kb.ir.mul(kb.ir.udiv(begin, kb.i64(mr)), tile_prefetch))
        target = kb.at(out, kb.ir.mul(position, n.out_stride))
        place = TilePlace(kb.at(row_sums, kb.mul(position, 4)), channel, target, is_last_panel, column_terms)
        accs = _initial_or_stored(tile, block, place, stored)
        row = kb.at(block.lhs, kb.ir.mul(position, n.lhs_stride))
        accs = tile.exchanged(tile.k_loop(row, weights, block.iterations, tile.exchanged(accs), prefetched))
        with kb.ir.if_else(block.is_last) as (done, more):
            with done:
                tile.emit_epilogue(accs, place)
            with more:
                tile.store_accumulators(accs, stored)


def _initial_or_stored(tile: TileBuilder, block: _KBlock, place: TilePlace, stored: Value) -> Sequence[Value]:
    """Return a tile's initial accumulators in the first K block, else those that the block before stored."""
    return tile.kb.either(block.is_first, lambda: tile.init_accumulators(place), lambda: tile.load_accumulators(stored))


# ----------------------------------------------------------------------------------------------------------------------
# GEMM kernel for CONV_2D, GROUPED_CONV_2D, FULLY_CONNECTED and BATCH_MATMUL (implicit im2col).


_CACHE_LINE = 64
_SUMMED_ROWS = 8  # at a time, for the weight zero point


class LhsLayout(Enum):
    """LHS layout: the input read in place, converted pixels in scratch, or converted rows with padding in scratch.

    SPACED are unconverted pixels in scratch with a cache line between them: if they were a multiple of 4 KiB apart,
    the same element of all of them would compete for one set of the first-level cache.
    """

    DIRECT = "direct"
    PACKED = "packed"
    SPACED = "spaced"
    ROW_BUFFER = "row buffer"


@dataclass(frozen=True, slots=True)
class GemmKernel(Kernel):
    """A planned GEMM. Fields with repr=False only size the work; the others specialize the code and name the function.

    mc: positions of a work item, or output rows if the LHS is a row buffer. n_splits: slices of N. mr, nr_vectors:
    register tile. lanes: of an accumulator. row_positions: positions that are joined for the epilogue, 1 or 2.
    nr_remainder: elements of an output row in a group's last panel, 0 if it is full. k_unroll: K groups per
    iteration. constant_stride: bytes from one position's LHS to the next one's, if the code is for that stride only;
    else 0. streams_weights: see the module; pixel blocks of one group only. k_blocks: 1 unless weights are streamed.
    operator: what is applied to the results, if there is more than the micro-kernel's epilogue.
    """

    shape: ConvShape = field(repr=False)
    mc: int = field(repr=False)
    n_splits: int = field(repr=False)
    k_blocks: int = field(repr=False)
    micro_kernel: MicroKernel
    mr: int
    nr_vectors: int
    lanes: int
    row_positions: int
    nr_remainder: int
    lhs_layout: LhsLayout
    is_grouped: bool
    has_batched_rhs: bool
    k_unroll: int
    constant_stride: int
    streams_weights: bool
    operator: EpilogueOperator | None = None

    compile_cost = 3

    @property
    def work_items(self) -> int:
        """Blocks of positions times slices of N."""
        return self._blocks * self.n_splits

    @property
    def tile(self) -> tuple[int, int]:
        """Positions and vectors of channels of the register tile."""
        return self.mr, self.nr_vectors

    @property
    def has_tiles(self) -> bool:
        """Whether accumulators are in tile registers."""
        return isinstance(self.micro_kernel, Amx)

    @property
    def has_column_terms(self) -> bool:
        """Whether the RHS is packed at run time with terms of the zero points, which no constant contains."""
        return self.has_batched_rhs and isinstance(self.micro_kernel, Dot4)

    @property
    def nr(self) -> int:
        """Channels of a panel."""
        return self.nr_vectors * self.lanes

    @property
    def panels(self) -> int:
        """Panels of all groups."""
        return self.shape.groups * self._panels_per_group

    @property
    def packed_channel_map(self) -> Array:
        """The output channel in each lane of the epilogue's vectors. Lanes after a group's last channel repeat it."""
        channels = np.tile(np.arange(self.shape.output_channels_per_group), self.row_positions)
        count = self._panels_per_group * self.nr * self.row_positions
        lanes = channels[np.minimum(np.arange(count), len(channels) - 1)]
        groups = np.arange(self.shape.groups)[:, None]
        result: Array = (groups * self.shape.output_channels_per_group + lanes).reshape(-1)
        return result

    @property
    def _panels_per_group(self) -> int:
        return math.ceil(self.shape.output_channels_per_group / self.nr)

    @property
    def _row_buffer(self) -> InputRowBuffer:
        return row_buffer_of(self.shape, self.micro_kernel, self.mc)

    @property
    def _blocks_per_image(self) -> int:
        return math.ceil(self.shape.rows.count / self.mc)

    @property
    def _blocks_per_rhs(self) -> int:
        return math.ceil(self.shape.pixels / self.mc)

    @property
    def _blocks(self) -> int:
        s = self.shape
        if s.is_pointwise:
            return self._blocks_per_rhs * (s.batch if s.has_batched_rhs else 1)
        return s.batch * self._blocks_per_image

    def scratch_bytes(self, target: Target) -> int:
        """Return the size of a block's LHS, of an int32 row sum for each position if there are any, of accumulators."""
        slice_panels = math.ceil(self.panels / self.n_splits) if self.k_blocks > 1 else 0
        return self._accumulators + slice_panels * self._accumulator_stride

    @property
    def _accumulators(self) -> int:
        """The offset of the accumulators in scratch memory."""
        if not self.micro_kernel.has_weight_zero_point:
            return self._lhs_bytes
        rows = self.shape.columns.count if self.lhs_layout == LhsLayout.ROW_BUFFER else 1
        return self._lhs_bytes + 4 * self.mc * rows

    @property
    def _accumulator_stride(self) -> int:
        """Bytes of the accumulators of a panel: of whole tiles, because the last one overlaps the one before it."""
        return math.ceil(self.mc / self.mr) * self.mr * self.nr * 4

    @property
    def _lhs_bytes(self) -> int:
        if self.lhs_layout == LhsLayout.DIRECT:
            return 0
        if self.lhs_layout == LhsLayout.ROW_BUFFER:
            return self._row_buffer.bytes
        return self.mc * self._lhs_stride + OVERREAD_BYTES

    @property
    def _lhs_stride(self) -> int:
        """Bytes from one position's LHS to the next one's."""
        spacing = _CACHE_LINE if self.lhs_layout == LhsLayout.SPACED else 0
        return position_stride(self.shape, self.micro_kernel) + spacing

    # -- constants -----------------------------------------------------------------------------------------------------

    def pack(self, weights: Array) -> bytes:
        """Return `weights` (output channels, height, width, channels per group), minus their zero point, in panels."""
        tap_rows, tap_columns, k = self.shape.taps
        groups, channels, taps = self.shape.groups, self.shape.output_channels_per_group, tap_rows * tap_columns
        filled = np.zeros((groups, self._panels_per_group * self.nr, taps, k), weights.dtype)
        filled[:, :channels] = weights.reshape(groups, channels, taps, k)
        return self.micro_kernel.pack(filled.reshape(self.panels, self.nr, taps, k), self._tap_offsets)

    @property
    def _tap_offsets(self) -> Array:
        """Bytes from a position's first LHS element to the first of each tap."""
        rows, columns, _ = self.shape.taps
        row_offsets, column_offsets = (
            np.arange(rows)[:, None] * self._kernel_row_stride,
            np.arange(columns) * self._kernel_column_stride,
        )
        result: Array = (row_offsets + column_offsets).reshape(-1)
        return result

    @property
    def _kernel_row_stride(self) -> int:
        return self._row_buffer.tap_row_stride

    @property
    def _kernel_column_stride(self) -> int:
        return self.shape.columns.dilation * self.shape.channels * self.micro_kernel.lhs_bytes

    def params(self) -> bytes:
        """Return the constant with all extents and strides."""
        s, mk = self.shape, self.micro_kernel
        tap_rows, tap_columns, k = s.taps
        k_groups, elements_per_vector = math.ceil(k / mk.kr), 4 * self.lanes // mk.lhs_bytes
        panel_bytes = tap_rows * tap_columns * k_groups * self.nr * mk.kr * mk.weight_bytes
        k_iterations, iteration_bytes = k_groups // self.k_unroll, self.k_unroll * self.nr * mk.kr * mk.weight_bytes
        iteration_prefetch = math.ceil(iteration_bytes / math.ceil(self.mc / self.mr))
        out_stride, pixel = s.output_channels * mk.output_bytes, s.channels * mk.item_bytes
        params = GemmParams(
            blocks=self._blocks,
            n_splits=self.n_splits,
            panels=self.panels,
            panel_bytes=panel_bytes,
            positions=s.columns.count if self.lhs_layout == LhsLayout.ROW_BUFFER else self.mc,
            lhs_stride=self._lhs_stride,
            out_stride=out_stride,
            tap_rows=tap_rows,
            tap_columns=tap_columns,
            k_iterations=k_iterations,
            k_blocks=math.ceil(k_iterations / math.ceil(k_iterations / self.k_blocks)),
            block_iterations=math.ceil(k_iterations / self.k_blocks),
            accumulators=self._accumulators,
            accumulator_stride=self._accumulator_stride,
            # One line for an iteration in tile registers: the second-level cache's own prefetcher loads the others.
            prefetch_stride=iteration_prefetch if self.has_tiles else min(_CACHE_LINE, iteration_prefetch),
            kernel_row_stride=self._kernel_row_stride,
            kernel_column_stride=self._kernel_column_stride,
            input_pixel_stride=pixel,
            block_elements=self.mc * s.channels,
            pixels=s.pixels,
            blocks_per_rhs=self._blocks_per_rhs,
            rhs_bytes=self.panels * (panel_bytes + 4 * self.nr * self.has_column_terms),
            panels_per_group=self._panels_per_group,
            lhs_group_stride=s.channels_per_group * mk.lhs_bytes,
            out_group_stride=s.output_channels_per_group * mk.output_bytes,
            image_bytes=s.height * s.width * pixel,
            blocks_per_image=self._blocks_per_image,
            block_rows=self.mc,
            output_rows=s.rows.count,
            output_row_bytes=s.columns.count * out_stride,
            row_sums=self._lhs_bytes,
            sum_vectors=(k - 1) // elements_per_vector,
            sum_tail=(k - 1) % elements_per_vector + 1,
        )
        return pack_params(params, self._row_buffer.params(s.width * pixel))

    def emit(self, kb: KernelBuilder) -> None:
        """Args: inputs, output, weights, epilogue constant, params, the operator's constants.

        Inputs are the image, then the operator's operands, or a batched RHS, which takes the place of the weights.
        """
        first = 1 + self._operand_count
        image, out, weights, epilogue = map(
            kb.argument, (0, 2, 1, 3) if self.has_batched_rhs else (0, *range(first, first + 3))
        )
        image = kb.at(image, self.micro_kernel.input_offset)
        emit_operator = None if self.operator is None else self.operator.bind(kb, out, 1, self.params_argument + 1)
        n = self.load_params(kb, kb.argument(self.params_argument))
        builder = self._builder(kb, n, weights, epilogue, emit_operator)
        with configured_tiles(kb) if self.has_tiles else nullcontext(), kb.loop(kb.begin, kb.end) as work_item:
            builder.emit_work_item(image, out, work_item)
        kb.return_void()

    def load_params(self, kb: KernelBuilder, address: Value) -> GemmParams:
        """Return the parameters that `params` has packed at an address."""
        n = load_params(kb, address, GemmParams)
        return n._replace(lhs_stride=kb.i64(self.constant_stride)) if self.constant_stride else n

    def emit_block(
        self, kb: KernelBuilder, n: GemmParams, weights: Value, epilogue: Value, lhs: Value, out: Value
    ) -> None:
        """Emit all panels of a block of mc positions, read in place, for a kernel that computes more than the product.

        `weights` are the panels of the block's RHS; `lhs` and `out` are addresses of its first position. The kernel has
        neither row sums nor tile registers, and one slice of N.
        """
        builder = self._builder(kb, n, weights, epilogue, None)
        with kb.loop(0, n.panels) as panel:
            builder.emit_positions(lhs, kb.scratch, out, weights, panel)

    def _builder(
        self, kb: KernelBuilder, n: GemmParams, weights: Value, epilogue: Value, emit_operator: EmitOperator | None
    ) -> _GemmBuilder:
        extents = GemmTile(self.mr, self.nr_vectors, self.lanes, self.row_positions, self.nr_remainder, self.k_unroll)
        tile_class = AmxTileBuilder if self.has_tiles else TileBuilder
        tile = tile_class(extents, self.micro_kernel, kb, n, epilogue, emit_operator)
        return _GemmBuilder(self, kb, n, weights, epilogue, tile)

    @property
    def _operand_count(self) -> int:
        return 0 if self.operator is None else self.operator.operand_count

    @property
    def params_argument(self) -> int:
        """Number of the argument that is the params."""
        return 4 + self._operand_count


def position_stride(shape: ConvShape, micro_kernel: MicroKernel) -> int:
    """Return the bytes from one position's LHS to the next one's, if nothing is between pixels."""
    return shape.columns.stride * shape.channels * micro_kernel.lhs_bytes


def row_buffer_of(shape: ConvShape, micro_kernel: MicroKernel, output_rows: int) -> InputRowBuffer:
    """Return the input rows under `output_rows` output rows."""
    s = shape
    return InputRowBuffer(s.height, s.width, s.channels, s.rows, s.columns, output_rows, micro_kernel.lhs_bytes, True)


@dataclass(frozen=True, slots=True)
class _GemmBuilder:
    """Builds a GEMM's function. The code depends only on the fields of `kernel` that are in its repr."""

    kernel: GemmKernel
    kb: KernelBuilder
    n: GemmParams
    weights: Value
    epilogue: Value
    tile: TileBuilder

    @property
    def _mk(self) -> MicroKernel:
        return self.kernel.micro_kernel

    # -- blocks of positions -------------------------------------------------------------------------------------------

    def emit_work_item(self, image: Value, out: Value, work_item: Value) -> None:
        """Emit one slice of N for one block of positions."""
        kb, n = self.kb, self.n
        n_split, block = kb.ir.udiv(work_item, n.blocks), kb.ir.urem(work_item, n.blocks)
        if self.kernel.lhs_layout == LhsLayout.ROW_BUFFER:
            self._emit_row_block(image, out, n_split, block)
        else:
            self._emit_pixel_block(image, out, n_split, block)

    def _emit_pixel_block(self, image: Value, out: Value, n_split: Value, block: Value) -> None:
        """Emit a block of pixels of pointwise windows. The last block starts early, so that all have mc positions."""
        kb, n = self.kb, self.n
        weights, first = self.weights, kb.ir.mul(block, n.positions)
        if self.kernel.has_batched_rhs:
            number = kb.ir.udiv(block, n.blocks_per_rhs)
            weights = kb.at(weights, kb.ir.mul(number, n.rhs_bytes))
            first = kb.ir.mul(kb.ir.urem(block, n.blocks_per_rhs), n.positions)
        first = kb.intrinsic("llvm.smin", first, kb.ir.sub(n.pixels, n.positions))
        if self.kernel.has_batched_rhs:
            first = kb.ir.add(first, kb.ir.mul(number, n.pixels))
        lhs, target = kb.at(image, kb.ir.mul(first, n.input_pixel_stride)), kb.at(out, kb.ir.mul(first, n.out_stride))
        if self.kernel.lhs_layout != LhsLayout.DIRECT:
            self._emit_packed_pixels(lhs)
            lhs = kb.scratch
        row_sums = kb.at(kb.scratch, n.row_sums)
        if self._mk.has_weight_zero_point:
            self._emit_row_sums(lhs, row_sums)
        if self.kernel.streams_weights:
            panels = self._first_panel(n_split), self._first_panel(kb.add(n_split, 1))
            emit_streamed_panels(self.tile, panels, lhs, row_sums, target, weights, self._column_terms(weights))
            return
        with self._panels(n_split) as panel:
            self.emit_positions(lhs, row_sums, target, weights, panel)

    def _column_terms(self, weights: Value) -> Value | None:
        """Return the address of the column terms of an RHS, which follow its panels; None if it has none."""
        kb, n = self.kb, self.n
        return kb.at(weights, kb.ir.mul(n.panels, n.panel_bytes)) if self.kernel.has_column_terms else None

    def _emit_packed_pixels(self, source: Value) -> None:
        """Emit the copy of a block of pixels to scratch memory, converted if they are packed."""
        kb, n = self.kb, self.n
        if self.kernel.lhs_layout == LhsLayout.PACKED:
            pack_lhs_row(kb, self._mk.input_converter(kb, self.epilogue), source, kb.scratch, n.block_elements)
            return
        with kb.loop(0, n.positions) as position:
            pixel = kb.at(source, kb.ir.mul(position, n.input_pixel_stride))
            kb.memcpy(kb.at(kb.scratch, kb.ir.mul(position, n.lhs_stride)), pixel, n.input_pixel_stride)

    def _emit_row_block(self, image: Value, out: Value, n_split: Value, block: Value) -> None:
        """Emit a block of output rows: their input rows are packed once, then read by all panels of the slice."""
        kb, n, mk = self.kb, self.n, self._mk
        buffer = load_params(kb, kb.argument(self.kernel.params_argument), RowBufferParams, len(GemmParams._fields))
        number = kb.ir.udiv(block, n.blocks_per_image)
        first = kb.ir.mul(kb.ir.urem(block, n.blocks_per_image), n.block_rows)
        output_rows = kb.intrinsic("llvm.smin", n.block_rows, kb.ir.sub(n.output_rows, first))
        converter = mk.input_converter(kb, self.epilogue)
        source = kb.at(image, kb.ir.mul(number, n.image_bytes))

        def pack_row(row: Value, target: Value) -> None:
            pack_lhs_row(kb, converter, row, target, buffer.within)

        fill_row_buffer(kb, buffer, converter, source, first, output_rows, pack_row)
        target = kb.at(out, kb.ir.mul(kb.ir.add(kb.ir.mul(number, n.output_rows), first), n.output_row_bytes))
        lhs_row_stride = kb.ir.mul(buffer.row_stride, buffer.pitch)
        row_sums, sums_row_stride = kb.at(kb.scratch, n.row_sums), kb.mul(n.positions, 4)
        if mk.has_weight_zero_point:
            with kb.loop(0, output_rows) as row:
                self._emit_row_sums(
                    kb.at(kb.scratch, kb.ir.mul(row, lhs_row_stride)), kb.at(row_sums, kb.ir.mul(row, sums_row_stride))
                )
        with self._panels(n_split) as panel, kb.loop(0, output_rows) as row:
            lhs = kb.at(kb.scratch, kb.ir.mul(row, lhs_row_stride))
            row_out = kb.at(target, kb.ir.mul(row, n.output_row_bytes))
            sums = kb.at(row_sums, kb.ir.mul(row, sums_row_stride))
            self.emit_positions(lhs, sums, row_out, self.weights, panel)

    def _panels(self, n_split: Value) -> AbstractContextManager[Value]:
        """Return the loop over the panels of a slice of N."""
        kb = self.kb
        return kb.loop(self._first_panel(n_split), self._first_panel(kb.add(n_split, 1)))

    def _first_panel(self, n_split: Value) -> Value:
        return self.kb.ir.udiv(self.kb.ir.mul(n_split, self.n.panels), self.n.n_splits)

    # -- tiles ---------------------------------------------------------------------------------------------------------

    def emit_positions(self, lhs: Value, row_sums: Value, out: Value, weights: Value, panel: Value) -> None:
        """Emit the tiles of a panel over all positions of a row or block. The last one starts early."""
        kb, n, mr, nr = self.kb, self.n, self.kernel.mr, self.kernel.nr
        channel = kb.mul(panel, nr)
        if self._mk.is_group_sparse:
            emit_tile = self.tile.group_list_tile(weights, kb.at(weights, kb.mul(panel, 16)))
        else:
            emit_tile = self._dense_tile(kb.at(weights, kb.ir.mul(panel, n.panel_bytes)))
        if self.kernel.is_grouped:
            group, panel = kb.ir.udiv(panel, n.panels_per_group), kb.ir.urem(panel, n.panels_per_group)
            lhs = kb.at(lhs, kb.ir.mul(group, n.lhs_group_stride))
            out = kb.at(out, kb.ir.mul(group, n.out_group_stride))
        out = kb.at(out, kb.mul(panel, nr * self._mk.output_bytes))
        terms = self._column_terms(weights)
        terms = None if terms is None else kb.at(terms, kb.mul(panel, 4 * nr))
        is_last_panel = kb.ir.icmp_unsigned("==", panel, kb.ir.sub(n.panels_per_group, kb.i64(1)))
        last = kb.ir.sub(n.positions, kb.i64(mr))
        with kb.loop(0, n.positions, mr) as position:
            position = kb.intrinsic("llvm.smin", position, last)
            target = kb.at(out, kb.ir.mul(position, n.out_stride))
            place = TilePlace(kb.at(row_sums, kb.mul(position, 4)), channel, target, is_last_panel, terms)
            initial = self.tile.exchanged(self.tile.init_accumulators(place))
            accs = emit_tile(kb.at(lhs, kb.ir.mul(position, n.lhs_stride)), initial)
            self.tile.emit_epilogue(self.tile.exchanged(accs), place)

    def _dense_tile(self, panel: Value) -> EmitTile:
        """Return a function that emits a tile's loop over all K groups of all taps."""
        kb, n = self.kb, self.n

        def emit_tap(number: Value, first: Value, accs: Sequence[Value]) -> Sequence[Value]:
            tap_weights = kb.at(panel, kb.ir.mul(number, kb.mul(n.k_iterations, self.tile.weight_bytes)))
            return self.tile.k_loop(first, tap_weights, n.k_iterations, accs)

        return lambda lhs, accs: self._over_taps(lhs, accs, emit_tap)

    def _over_taps(self, lhs: Value, accs: Sequence[Value], emit_tap: EmitTap) -> Sequence[Value]:
        """Emit the loops over the taps of a window; pixel blocks have one tap."""
        kb, n = self.kb, self.n
        if self.kernel.lhs_layout != LhsLayout.ROW_BUFFER:
            return emit_tap(kb.i64(0), lhs, accs)

        def emit_tap_row(i: Value, accs: Sequence[Value]) -> Sequence[Value]:
            row, first = kb.at(lhs, kb.ir.mul(i, n.kernel_row_stride)), kb.ir.mul(i, n.tap_columns)

            def emit_column(j: Value, accs: Sequence[Value]) -> Sequence[Value]:
                return emit_tap(kb.ir.add(first, j), kb.at(row, kb.ir.mul(j, n.kernel_column_stride)), accs)

            return kb.for_loop(n.tap_columns, accs, emit_column)

        return kb.for_loop(n.tap_rows, accs, emit_tap_row)

    # -- row sums ------------------------------------------------------------------------------------------------------

    def _emit_row_sums(self, lhs: Value, row_sums: Value) -> None:
        """Emit weight zero point * sum(x) of each position of a row or block, in int32.

        Weights outside int8 are stored as w' = w - zp, so sum(x * w) = sum(x * w') + zp * sum(x). The sums are dot
        products with ones, once per work item and shared by its panels (ruy: `sums`; oneDNN: zero-point compensation).
        The last rows start early, as in `emit_positions`. They are fewer than in a tile of tile registers: more of them
        would be more code, and would not fit the vector registers.
        """
        kb, n, mk, lanes = self.kb, self.n, self._mk, self.kernel.lanes
        rows = min(self.kernel.mr, _SUMMED_ROWS)
        assert isinstance(mk, Dot4), "no other micro-kernel has a weight zero point"
        emit_tap, zeros = self.tile.row_sum_tap(mk), kb.splat(I32, 0, lanes)
        zero_point, last = mk.weight_zero_point(kb, self.epilogue), kb.ir.sub(n.positions, kb.i64(rows))
        with kb.loop(0, n.positions, rows) as position:
            position = kb.intrinsic("llvm.smin", position, last)
            accs = self._over_taps(kb.at(lhs, kb.ir.mul(position, n.lhs_stride)), [zeros] * rows, emit_tap)
            sums = kb.horizontal_sums(accs)
            corrections = kb.ir.mul(sums, kb.broadcast(zero_point, sums.type.count))
            kb.store_partial(corrections, rows, row_sums, kb.mul(position, 4))
