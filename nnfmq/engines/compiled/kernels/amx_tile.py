"""The tile of a GEMM in AMX's tile registers: 16 or 32 positions times 16 or 32 channels.

There are eight registers of 16 rows of 64 bytes: four accumulators, one of the LHS and two of weights. A row of an
accumulator has 16 int32, one of the LHS 64 elements of a position, one of weights four elements of 16 channels. Tiles
are always whole: a panel's weights are filled up with 0 to whole tiles, and a tile of positions that would be cut off
starts early. The LHS after a tap's last element may have any value, because it is multiplied by 0.

A register cannot be read but by storing it, so the epilogue reads the accumulators from the stack.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from llvmlite import ir

from nnfmq.engines.compiled.ir_builder import I8, I32, KernelBuilder, Value, vector
from nnfmq.engines.compiled.kernels.gemm_tile import TileBuilder, TilePlace
from nnfmq.engines.compiled.kernels.matrix_product import TILE_ROWS, Amx, AmxS8S8x64
from nnfmq.engines.compiled.kernels.requantize import Requantization
from nnfmq.engines.compiled.kernels.subvectors import PANEL_VECTORS

__all__ = ["TILE_PRODUCTS", "AmxTileBuilder", "configured_tiles", "tile_instruction"]

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
    kb.store(ir.Constant(kind, config), memory)
    kb.call("llvm.x86.ldtilecfg", ir.VoidType(), memory)
    yield
    kb.call("llvm.x86.tilerelease", ir.VoidType())


def tile_instruction(kb: KernelBuilder, name: str, register: int, *operands: Value | int) -> None:
    """Emit an instruction on a tile register; operands that are integers are registers, too."""
    arguments = [ir.Constant(I8, value) if isinstance(value, int) else value for value in (register, *operands)]
    kb.call(f"llvm.x86.{name}", ir.VoidType(), *arguments)


@dataclass(frozen=True, slots=True)
class AmxTileBuilder(TileBuilder):
    """Emits the code of a tile in tile registers. Accumulators are no values, so all sequences of them are empty."""

    @property
    def _tile_rows(self) -> range:
        return range(self.tile.mr // TILE_ROWS)

    def init_accumulators(self, place: TilePlace) -> Sequence[Value]:
        """Load the biases into the accumulators: a distance of 0 gives all rows the same ones."""
        k, kb, requantization = self.tile, self.kb, self._requantization
        for v in range(k.nr_vectors):
            bias = requantization.bias_address(kb, self.epilogue, kb.add(place.channel, v * k.lanes), k.lanes)
            for row in self._tile_rows:
                tile_instruction(kb, "tileloadd64", row * k.nr_vectors + v, bias, kb.i64(0))
        return []

    @property
    def _requantization(self) -> Requantization:
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
        """Store the accumulators on the stack, and emit a loop that requantizes rows that fill a vector of bytes."""
        k, kb, stride = self.tile, self.kb, self.n.out_stride
        kind, rows = vector(I32, k.lanes), PANEL_VECTORS // k.nr_vectors
        memory = kb.on_stack(kind, k.mr * k.nr_vectors)
        self.store_accumulators(accs, memory)
        channels = [kb.add(place.channel, n % k.nr_vectors * k.lanes) for n in range(PANEL_VECTORS)]
        with kb.for_each_stored_row(memory, kind, k.mr // rows, PANEL_VECTORS, kb.mul(stride, rows)) as (
            number,
            offset,
            sums,
        ):
            if self.micro_kernel.has_weight_zero_point:
                sums = self._corrected(sums, kb.at(place.row_sums, kb.mul(number, 4 * rows)))
            results = self._requantization.requantize_subvectors(kb, sums, self.epilogue, channels)
            for row in range(rows):
                result = kb.shuffle(results, results, range(row * k.nr, (row + 1) * k.nr))
                address = kb.at(place.target, kb.add(offset, kb.mul(stride, row)))
                kb.store_tile_row([result], address, k.nr_remainder, place.is_last_panel)

    def _corrected(self, sums: Sequence[Value], row_sums: Value) -> list[Value]:
        """Return vectors of adjacent rows plus weight zero point * row sum."""
        k, kb = self.tile, self.kb
        rows = [kb.broadcast(kb.load(I32, row_sums, 4 * row), k.lanes) for row in range(len(sums) // k.nr_vectors)]
        return [kb.ir.add(acc, rows[number // k.nr_vectors]) for number, acc in enumerate(sums)]
