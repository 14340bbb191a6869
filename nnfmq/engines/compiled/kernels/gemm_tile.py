"""The register tile of a GEMM: initial accumulators, the K loop, the epilogue, and row sums.

A tile is mr positions times nr output channels (BLIS: the micro-kernel). Its accumulators stay in registers during the
loop, in which the operand with fewer vectors stays in registers and the other is streamed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

from nnfmq.base.frozen import dataclass
from nnfmq.engines.compiled.ir_builder import I8, I32, I64, VOID, Constant, KernelBuilder, Value, vector
from nnfmq.engines.compiled.kernels.elementwise import EmitOperator
from nnfmq.engines.compiled.kernels.micro_kernels import (
    TILE_ROWS,
    Amx,
    AmxS8S8x64,
    Dot4,
    Epilogue,
    MicroKernel,
    exchange_halves,
)
from nnfmq.engines.compiled.kernels.packing import GROUP_LIST_ALIGNMENT
from nnfmq.engines.compiled.kernels.requantize import PANEL_VECTORS, Requantization

__all__ = [
    "TILE_PRODUCTS",
    "AmxTileBuilder",
    "EmitTap",
    "EmitTile",
    "GemmParams",
    "GemmTile",
    "TileBuilder",
    "TilePlace",
    "configured_tiles",
    "tile_instruction",
]

EmitTap: TypeAlias = Callable[[Value, Value, Sequence[Value]], Sequence[Value]]
"""Emits a tap: (its number, address of its first LHS element, accumulators) -> accumulators."""

EmitTile: TypeAlias = Callable[[Value, Sequence[Value]], Sequence[Value]]
"""Emits a tile's K loop: (address of its first position's LHS, initial accumulators) -> accumulators."""


class GemmParams(NamedTuple):
    """Run-time parameters of a GEMM. Strides, offsets and sizes are in bytes."""

    blocks: Any  # of positions, all images
    n_splits: Any
    panels: Any
    panel_bytes: Any
    positions: Any  # of a block, or of an output row
    lhs_stride: Any  # from one position's LHS to the next one's
    out_stride: Any  # from one position's output to the next one's
    tap_rows: Any
    tap_columns: Any
    k_iterations: Any  # of a tap
    k_blocks: Any
    block_iterations: Any  # of a K block, without the last one
    accumulators: Any  # offset in scratch
    accumulator_stride: Any  # in scratch, from one panel's accumulators to the next one's
    prefetch_stride: Any  # bytes of the next panel that one iteration prefetches
    kernel_row_stride: Any  # LHS, from one row of taps to the next
    kernel_column_stride: Any
    input_pixel_stride: Any
    block_elements: Any  # input elements of a block, for packed pixels
    pixels: Any  # that share weights
    blocks_per_rhs: Any
    rhs_bytes: Any
    panels_per_group: Any
    lhs_group_stride: Any
    out_group_stride: Any
    image_bytes: Any
    blocks_per_image: Any
    block_rows: Any  # output rows of a block
    output_rows: Any  # of an image
    output_row_bytes: Any
    row_sums: Any  # offset in scratch
    sum_vectors: Any  # whole vectors of a tap's LHS, without the last one
    sum_tail: Any  # elements of the last one, 1 at least


@dataclass(frozen=True, slots=True)
class GemmTile:
    """The extents of a register tile; `GemmKernel` describes them."""

    mr: int
    nr_vectors: int
    lanes: int
    row_positions: int
    nr_remainder: int
    k_unroll: int  # K groups per iteration

    @property
    def nr(self) -> int:
        """Channels of a panel."""
        return self.nr_vectors * self.lanes


class TilePlace(NamedTuple):
    """A tile's place: addresses of its row sums and of its first output element, its first packed channel.

    `column_terms` is the address of what is added to each column's accumulators, if only the run time knows it.
    """

    row_sums: Value
    channel: Value
    target: Value
    is_last_panel: Value
    column_terms: Value | None


@dataclass(frozen=True, slots=True)
class TileBuilder:
    """Emits the code of a tile in vector registers.

    `epilogue` is the address of the epilogue's constant; `emit_operator` follows the epilogue.
    """

    tile: GemmTile
    micro_kernel: MicroKernel
    kb: KernelBuilder
    n: GemmParams
    epilogue: Value
    emit_operator: EmitOperator | None

    @property
    def weight_bytes(self) -> int:
        """Bytes of a panel's weights for one iteration of the K loop."""
        return self.tile.k_unroll * self.tile.nr * self.micro_kernel.kr * self.micro_kernel.weight_bytes

    @property
    def lhs_bytes(self) -> int:
        """Bytes of a position's LHS for one iteration of the K loop."""
        return self.tile.k_unroll * self.micro_kernel.kr * self.micro_kernel.lhs_bytes

    def init_accumulators(self, place: TilePlace) -> Sequence[Value]:
        """Return the bias, plus the column's term and weight zero point * row sum of each position if there are any."""
        k, kb, biases = self.tile, self.kb, self.biases(place.channel)
        if place.column_terms is not None:
            kind = vector(I32, k.lanes)
            terms = [kb.load(kind, place.column_terms, 4 * v * k.lanes) for v in range(k.nr_vectors)]
            biases = [kb.ir.add(bias, term) for bias, term in zip(biases, terms, strict=True)]
        if not self.micro_kernel.has_weight_zero_point:
            return biases * k.mr
        corrections = [kb.broadcast(kb.load(I32, place.row_sums, 4 * r), k.lanes) for r in range(k.mr)]
        return [kb.ir.add(bias, correction) for correction in corrections for bias in biases]

    def biases(self, channel: Value) -> list[Value]:
        """Return the bias of each vector of a panel's channels."""
        k, kb, mk = self.tile, self.kb, self.micro_kernel
        lanes = k.lanes * k.row_positions
        found = [
            mk.init_accumulators(kb, self.epilogue, kb.add(channel, v * lanes), lanes) for v in range(k.nr_vectors)
        ]
        return found if k.row_positions == 1 else [kb.shuffle(bias, bias, range(k.lanes)) for bias in found]

    def load_accumulators(self, stored: Value) -> Sequence[Value]:
        """Return the accumulators that `store_accumulators` stored."""
        k = self.tile
        kind, size = vector(self.micro_kernel.accumulator_type, k.lanes), 4 * k.lanes
        return [self.kb.load(kind, stored, number * size) for number in range(k.mr * k.nr_vectors)]

    def store_accumulators(self, accs: Sequence[Value], stored: Value) -> None:
        """Store the accumulators, row by row of the tile."""
        for number, acc in enumerate(accs):
            self.kb.store(acc, stored, number * 4 * self.tile.lanes)

    def exchanged(self, accs: Sequence[Value]) -> Sequence[Value]:
        """Return the accumulators of rows as those of matrices, or the reverse, if the micro-kernel has matrices."""
        return exchange_halves(self.kb, accs, self.tile.nr_vectors) if self.micro_kernel.lhs_rows == 2 else accs

    def k_loop(
        self, lhs: Value, weights: Value, iterations: Value, accs: Sequence[Value], ahead: Value | None = None
    ) -> Sequence[Value]:
        """Emit the loop over K groups that are contiguous in memory. `ahead`: where to begin to prefetch weights."""
        k, kb, n = self.tile, self.kb, self.n
        rows = [kb.at(lhs, kb.mul(n.lhs_stride, r)) for r in range(k.mr)]
        if not isinstance(n.lhs_stride, Constant):
            rows = [kb.launder(row) for row in rows]
        group_bytes, group_weights = self.lhs_bytes // k.k_unroll, self.weight_bytes // k.k_unroll

        def emit_iteration(index: Value, accs: Sequence[Value]) -> Sequence[Value]:
            if ahead is not None:
                kb.prefetch(kb.at(ahead, kb.ir.mul(index, n.prefetch_stride)))
            first = kb.at(weights, kb.mul(index, self.weight_bytes))
            for number in range(k.k_unroll):
                offset = kb.add(kb.mul(index, self.lhs_bytes), number * group_bytes)
                accs = self._multiply(rows, offset, kb.at(first, number * group_weights), accs)
            return accs

        return kb.for_loop(iterations, accs, emit_iteration)

    def _multiply(self, lhs: Sequence[Value], offset: Value, weights: Value, accs: Sequence[Value]) -> Sequence[Value]:
        """Emit one K group of a tile: the operand with fewer vectors stays in registers, the other is streamed."""
        k, kb, mk, results = self.tile, self.kb, self.micro_kernel, list(accs)
        kind, height = mk.weight_type(k.lanes), mk.lhs_rows
        rows, columns = range(k.mr // height), range(k.nr_vectors * height)

        def load_weights(column: int) -> Value:
            return kb.load(kind, weights, column * (k.lanes * mk.kr * mk.weight_bytes // height))

        def load_lhs(row: int) -> Value:
            first, *others = (mk.load_lhs(kb, lhs[row * height + r], offset, k.lanes) for r in range(height))
            return kb.concat(first, *others) if others else first

        def multiply(row: int, column: int, left: Value, right: Value) -> None:
            number = (row * height + column % height) * k.nr_vectors + column // height
            results[number] = mk.multiply_add(kb, accs[number], left, right)

        if len(rows) < len(columns):
            all_lhs = [load_lhs(row) for row in rows]
            for column in columns:
                loaded = load_weights(column)
                for row in rows:
                    multiply(row, column, all_lhs[row], loaded)
            return results
        all_weights = [load_weights(column) for column in columns]
        for row in rows:
            loaded = load_lhs(row)
            for column in columns:
                multiply(row, column, loaded, all_weights[column])
        return results

    def group_list_tile(self, weights: Value, entry: Value) -> EmitTile:
        """Return a function that emits a tile's loop over the groups in a panel's list (`packing.pack_group_lists`).

        No register is free for weights beside the accumulators of several rows: pmaddubsw takes them from memory.
        """
        k, kb, mk, n = self.tile, self.kb, self.micro_kernel, self.n
        offsets, count = kb.at(weights, kb.load(I64, entry)), kb.load(I64, entry, 8)
        offset_bytes = kb.ir.and_(kb.add(kb.mul(count, 4), GROUP_LIST_ALIGNMENT - 1), kb.i64(-GROUP_LIST_ALIGNMENT))
        listed, kind, size = kb.at(offsets, offset_bytes), mk.weight_type(k.lanes), 4 * k.lanes

        def emit_tile(lhs: Value, accs: Sequence[Value]) -> Sequence[Value]:
            rows = [kb.at(lhs, kb.mul(n.lhs_stride, r)) for r in range(k.mr)]

            def emit_group(index: Value, accs: Sequence[Value]) -> Sequence[Value]:
                offset = kb.ir.sext(kb.load(I32, offsets, kb.mul(index, 4)), I64)
                fours, results = kb.at(listed, kb.mul(index, 2 * k.nr_vectors * size)), []
                for r in range(k.mr):
                    loaded = mk.load_lhs(kb, rows[r], offset, k.lanes)
                    for v in range(k.nr_vectors):
                        pair = tuple(kb.load_volatile(kind, fours, i * size) for i in (v, k.nr_vectors + v))
                        results.append(mk.multiply_add(kb, accs[r * k.nr_vectors + v], loaded, pair))
                return results

            return kb.for_loop(count, accs, emit_group, may_be_empty=True)

        return emit_tile

    def emit_epilogue(self, accs: Sequence[Value], place: TilePlace) -> None:
        """Emit the epilogue row by row, and the stores of full or partial rows."""
        k, kb = self.tile, self.kb
        rows, stride = self._joined_positions(accs), kb.mul(self.n.out_stride, k.row_positions)
        if self.micro_kernel.unroll_epilogue and self.emit_operator is None:
            for first in range(0, len(rows), k.nr_vectors):
                offset = kb.mul(stride, first // k.nr_vectors)
                self.store_row(rows[first : first + k.nr_vectors], kb.at(place.target, offset), place)
        else:
            with kb.for_each_tile_row(rows, k.nr_vectors, stride) as (offset, row):
                self.store_row(row, kb.at(place.target, offset), place)

    def _joined_positions(self, accs: Sequence[Value]) -> Sequence[Value]:
        """Return the accumulators, those of two positions in one vector if they are half as long."""
        lanes = self.tile.lanes
        if self.tile.row_positions == 1:
            return accs
        channels = self.tile.nr_remainder // 2 or lanes
        order = [*range(channels), *range(lanes, lanes + channels)]
        order += [lanes] * (2 * lanes - len(order))
        return [self.kb.shuffle(accs[first], accs[first + 1], order) for first in range(0, len(accs), 2)]

    def store_row(self, row: Sequence[Value], address: Value, place: TilePlace) -> None:
        """Emit the epilogue of a row of accumulators, and store its results."""
        results = self.micro_kernel.epilogue(self.kb, row, self.epilogue, place.channel)
        finished = results if self.emit_operator is None else self.emit_operator(results, address)
        self.kb.store_tile_row(finished, address, self.tile.nr_remainder, place.is_last_panel)

    def row_sum_tap(self, mk: Dot4) -> EmitTap:
        """Return a function that emits a tap's contribution to the row sums.

        A tap has `sum_vectors` whole vectors and a tail of 1 to a whole vector's elements. The tail is a masked load of
        the groups of four that begin in the tap, multiplied by 1 for the tap's own elements and by 0 for the rest.
        """
        kb, n, lanes, size = self.kb, self.n, self.tile.lanes, 4 * self.tile.lanes
        kind, ones = mk.weight_type(lanes), kb.splat(I8, 1, size)
        byte_indexes, tail = Constant(kind, list(range(size))), kb.broadcast(kb.ir.trunc(n.sum_tail, I8), size)
        tail_ones = kb.ir.select(kb.ir.icmp_unsigned("<", byte_indexes, tail), ones, Constant(kind, None))
        group_begins = Constant(vector(I32, lanes), list(range(0, size, 4)))
        mask = kb.ir.icmp_unsigned("<", group_begins, kb.broadcast(kb.ir.trunc(n.sum_tail, I32), lanes))

        def emit_tap(_: Value, first: Value, accs: Sequence[Value]) -> Sequence[Value]:
            rows = [kb.at(first, kb.mul(n.lhs_stride, number)) for number in range(len(accs))]

            def emit_vector(index: Value, accs: Sequence[Value]) -> Sequence[Value]:
                elements = [kb.load(kind, row, kb.mul(index, size)) for row in rows]
                return [mk.dot(kb, *pair, ones) for pair in zip(accs, elements, strict=True)]

            accs = kb.for_loop(n.sum_vectors, accs, emit_vector, may_be_empty=True)
            tails = [kb.masked_load(vector(I32, lanes), row, kb.mul(n.sum_vectors, size), mask) for row in rows]
            return [
                mk.dot(kb, acc, kb.ir.bitcast(elements, kind), tail_ones)
                for acc, elements in zip(accs, tails, strict=True)
            ]

        return emit_tap


# ----------------------------------------------------------------------------------------------------------------------
# The tile of a GEMM in AMX's tile registers: 16 or 32 positions times 16 or 32 channels.
#
# There are eight registers of 16 rows of 64 bytes: four accumulators, one of the LHS and two of weights. A row of an
# accumulator has 16 int32, one of the LHS 64 elements of a position, one of weights four elements of 16 channels. Tiles
# are always whole: a panel's weights are filled up with 0 to whole tiles, and a tile of positions that would be cut off
# starts early. The LHS after a tap's last element may have any value, because it is multiplied by 0.
#
# A register cannot be read but by storing it, so the epilogue reads the accumulators from the stack.


TILE_PRODUCTS = TILE_ROWS * 16 * 64
"""Products that an instruction sums."""

_LHS, _WEIGHTS = 4, 6  # the first registers of either; accumulators begin at 0
_REGISTERS, _ROW_BYTES, _CONFIG_BYTES = 8, 64, 64


@contextmanager
def configured_tiles(kb: KernelBuilder) -> Iterator[None]:
    """Emit the configuration of the registers around the `with` block's instructions.

    They are released after it: otherwise the kernel would save them in each context switch.
    """
    config = [0] * _CONFIG_BYTES
    config[0] = 1  # the palette
    config[16 : 16 + 2 * _REGISTERS : 2] = [_ROW_BYTES] * _REGISTERS
    config[48 : 48 + _REGISTERS] = [TILE_ROWS] * _REGISTERS
    kind = vector(I8, _CONFIG_BYTES)
    memory = kb.on_stack(kind, 1)
    kb.store(Constant(kind, config), memory)
    kb.call("llvm.x86.ldtilecfg", VOID, memory)
    yield
    kb.call("llvm.x86.tilerelease", VOID)


def tile_instruction(kb: KernelBuilder, name: str, register: int, *operands: Value | int) -> None:
    """Emit an instruction on a tile register; operands that are integers are registers, too."""
    arguments = [Constant(I8, value) if isinstance(value, int) else value for value in (register, *operands)]
    kb.call(f"llvm.x86.{name}", VOID, *arguments)


@dataclass(frozen=True, slots=True)
class AmxTileBuilder(TileBuilder):
    """Emits the code of a tile in tile registers. Accumulators are no values, so all sequences of them are empty."""

    @property
    def _tile_rows(self) -> range:
        return range(self.tile.mr // TILE_ROWS)

    def init_accumulators(self, place: TilePlace) -> Sequence[Value]:
        """Load the biases into the accumulators: a distance of 0 gives all rows the same ones.

        Those of a product that is not requantized may not be in memory: its epilogue adds them to the sums.
        """
        k, kb, requantization = self.tile, self.kb, self._requantization
        for row, v in itertools.product(self._tile_rows, range(k.nr_vectors)):
            accumulator = row * k.nr_vectors + v
            if isinstance(requantization, Requantization):
                channel = kb.add(place.channel, v * k.lanes)
                bias = requantization.bias_address(kb, self.epilogue, channel, k.lanes)
                tile_instruction(kb, "tileloadd64", accumulator, bias, kb.i64(0))
            else:
                tile_instruction(kb, "tilezero", accumulator)
        return []

    @property
    def _requantization(self) -> Epilogue:
        assert isinstance(self.micro_kernel, Amx), "no other micro-kernel has tiles"
        return self.micro_kernel.requantization

    def load_accumulators(self, stored: Value) -> Sequence[Value]:
        """Load the accumulators from memory."""
        self._move_accumulators("tileloadd64", stored)
        return []

    def store_accumulators(self, accs: Sequence[Value], stored: Value) -> None:
        """Store the accumulators, row by row of the tile."""
        self._move_accumulators("tilestored64", stored)

    def _move_accumulators(self, instruction: str, memory: Value) -> None:
        k, kb = self.tile, self.kb
        for row in self._tile_rows:
            for v in range(k.nr_vectors):
                address = kb.at(memory, 4 * (row * TILE_ROWS * k.nr + v * k.lanes))
                tile_instruction(kb, instruction, row * k.nr_vectors + v, address, kb.i64(4 * k.nr))

    def k_loop(
        self, lhs: Value, weights: Value, iterations: Value, accs: Sequence[Value], ahead: Value | None = None
    ) -> Sequence[Value]:
        """Emit the loop over K groups that are contiguous in memory. `ahead`: where to begin to prefetch weights."""
        kb, n = self.kb, self.n

        def emit_iteration(index: Value, accs: Sequence[Value]) -> Sequence[Value]:
            if ahead is not None:
                kb.prefetch(kb.at(ahead, kb.ir.mul(index, n.prefetch_stride)))
            first = kb.at(weights, kb.mul(index, self.weight_bytes))
            self._multiply_tiles(kb.at(lhs, kb.mul(index, self.lhs_bytes)), first)
            return accs

        return kb.for_loop(iterations, accs, emit_iteration)

    def _multiply_tiles(self, lhs: Value, weights: Value) -> None:
        """Emit one K group of a tile."""
        k, kb, stride = self.tile, self.kb, self.n.lhs_stride
        multiply = "tdpbssd" if isinstance(self.micro_kernel, AmxS8S8x64) else "tdpbusd"
        for v in range(k.nr_vectors):
            tile_instruction(kb, "tileloadd64", _WEIGHTS + v, kb.at(weights, 4 * v * k.lanes), kb.i64(4 * k.nr))
        for row in self._tile_rows:
            tile_instruction(kb, "tileloadd64", _LHS + row, kb.at(lhs, kb.mul(stride, row * TILE_ROWS)), stride)
            for v in range(k.nr_vectors):
                accumulator = row * k.nr_vectors + v
                tile_instruction(kb, multiply, accumulator, _LHS + row, _WEIGHTS + v)

    def emit_epilogue(self, accs: Sequence[Value], place: TilePlace) -> None:
        """Store the accumulators on the stack, and emit a loop over their rows."""
        k, kb, requantization = self.tile, self.kb, self._requantization
        memory = kb.on_stack(vector(I32, k.lanes), k.mr * k.nr_vectors)
        self.store_accumulators(accs, memory)
        if isinstance(requantization, Requantization):
            self._requantize_rows(requantization, memory, place)
        else:
            self._finish_rows(memory, place)

    def _finish_rows(self, memory: Value, place: TilePlace) -> None:
        """Emit a loop that adds the biases to the sums of a row, and makes results of them."""
        k, kb, kind = self.tile, self.kb, vector(I32, self.tile.lanes)
        biases = self.biases(place.channel)
        with kb.for_each_stored_row(memory, kind, k.mr, k.nr_vectors, self.n.out_stride) as (number, offset, sums):
            sums = [kb.ir.add(acc, bias) for acc, bias in zip(sums, biases, strict=True)]
            if self.micro_kernel.has_weight_zero_point:
                sums = self._corrected(sums, kb.at(place.row_sums, kb.mul(number, 4)))
            self.store_row(sums, kb.at(place.target, offset), place)

    def _requantize_rows(self, requantization: Requantization, memory: Value, place: TilePlace) -> None:
        """Emit a loop that requantizes rows that fill a vector of bytes."""
        k, kb, stride = self.tile, self.kb, self.n.out_stride
        kind, rows = vector(I32, k.lanes), PANEL_VECTORS // k.nr_vectors
        channels = [kb.add(place.channel, n % k.nr_vectors * k.lanes) for n in range(PANEL_VECTORS)]
        with kb.for_each_stored_row(memory, kind, k.mr // rows, PANEL_VECTORS, kb.mul(stride, rows)) as (
            number,
            offset,
            sums,
        ):
            if self.micro_kernel.has_weight_zero_point:
                sums = self._corrected(sums, kb.at(place.row_sums, kb.mul(number, 4 * rows)))
            results = requantization.requantize_subvectors(kb, sums, self.epilogue, channels)
            for row in range(rows):
                result = kb.shuffle(results, results, range(row * k.nr, (row + 1) * k.nr))
                address = kb.at(place.target, kb.add(offset, kb.mul(stride, row)))
                kb.store_tile_row([result], address, k.nr_remainder, place.is_last_panel)

    def _corrected(self, sums: Sequence[Value], row_sums: Value) -> list[Value]:
        """Return vectors of adjacent rows plus weight zero point * row sum."""
        k, kb = self.tile, self.kb
        rows = [kb.broadcast(kb.load(I32, row_sums, 4 * row), k.lanes) for row in range(len(sums) // k.nr_vectors)]
        return [kb.ir.add(acc, rows[number // k.nr_vectors]) for number, acc in enumerate(sums)]
