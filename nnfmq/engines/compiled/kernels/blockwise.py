"""Rows of floats times weights of a few bits in blocks that have a scale each: BLOCKWISE_MATMUL.

Lanes are units. A word of 32 bits has adjacent numbers of one unit, and a vector those of all its lanes, so that a
shift and a mask give the numbers of one element. They become floats in registers, (q - zero point) · scale, and are
multiplied with all rows of a tile before the next word is read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field
from typing import Any, NamedTuple

import numpy as np

from nnfmq.base.frozen import dataclass
from nnfmq.engines.compiled.ir_builder import F32, I8, I32, KernelBuilder, Value, load_params, pack_params, vector
from nnfmq.engines.compiled.kernels import Kernel
from nnfmq.engines.compiled.kernels.vector_math import fmuladd
from nnfmq.engines.compiled.target import Target
from nnfmq.operations.declaration import Array

__all__ = ["BlockwiseKernel", "Extents", "Panel", "UnitTiles", "plan_blockwise", "plan_tiles"]

_WORD_BITS = 32
_WORD = np.dtype("<u4")
_INPUT, _OUTPUT, _WEIGHTS, _SCALES, _BIAS, _PARAMS, _ZERO_POINTS = range(7)  # arguments


class Extents(NamedTuple):
    """Run-time parameters."""

    words: Any  # whole words of a row
    blocks: Any
    row_tiles: Any  # with the full number of rows
    tiles: Any  # of units
    panel_bytes: Any  # of the weights of a tile of units
    row_bytes: Any
    output_bytes: Any  # of a row


class Panel(NamedTuple):
    """Addresses of what belongs to a tile of units."""

    weights: Value
    scales: Value
    zero_points: Value
    bias: Value
    output: Value
    is_last: Value


@dataclass(frozen=True, slots=True)
class UnitTiles(Kernel):
    """The products of `rows` with `units`; tiles of `vectors` vectors of `lanes` units are work items.

    `zero_points` are "middle" if all are half of the range, else "byte" or "float". A tile has `tile_rows` rows, and
    the last one `last_rows` if that is not 0; `last_units` units are in the last tile if it is not full.
    """

    bits: int
    block: int
    zero_points: str
    tile_rows: int
    last_rows: int
    vectors: int
    lanes: int
    last_units: int
    rows: int = field(repr=False)
    units: int = field(repr=False)
    length: int = field(repr=False)

    compile_cost = 4

    @property
    def tile_units(self) -> int:
        """Units of a tile."""
        return self.vectors * self.lanes

    @property
    def work_items(self) -> int:
        """Tiles of units."""
        return math.ceil(self.units / self.tile_units)

    @property
    def blocks(self) -> int:
        """Blocks of a row."""
        return math.ceil(self.length / self.block)

    @property
    def per_word(self) -> int:
        """Elements of a word."""
        return _WORD_BITS // self.bits

    @property
    def words(self) -> int:
        """Words of a packed unit."""
        raise NotImplementedError

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the first argument."""
        raise NotImplementedError

    # -- constants -----------------------------------------------------------------------------------------------------

    def params(self) -> bytes:
        """Return the constant with the extents."""
        full_words, row_tiles = self.length // self.per_word, self.rows // self.tile_rows
        panel_bytes = self.words * self.tile_units * _WORD.itemsize
        counts = full_words, self.blocks, row_tiles, self.work_items
        return pack_params(Extents(*counts, panel_bytes, self.row_bytes, self.units * 4))

    def pack_weights(self, packed: Array) -> bytes:
        """Return bytes (units, blocks, bytes of a block) as (tiles, words, units of a tile)."""
        raise NotImplementedError

    def pack_bias(self, bias: Array) -> bytes:
        """Return the bias as (tiles, units of a tile)."""
        return self.pack_columns(np.asarray(bias, np.float32).reshape(-1, 1))

    def pack_columns(self, columns: Array) -> bytes:
        """Return (units, n), filled up with 0, as (tiles, n, units of a tile)."""
        filled = np.zeros((self.work_items * self.tile_units, columns.shape[1]), columns.dtype)
        filled[: self.units] = columns
        return filled.reshape(self.work_items, self.tile_units, -1).swapaxes(1, 2).tobytes()

    # -- code ----------------------------------------------------------------------------------------------------------

    def emit(self, kb: KernelBuilder) -> None:
        """Args: input, output, weights, scales, bias, params, and zero points if they are not in the middle."""
        source, params = kb.argument(_INPUT), kb.argument(_PARAMS)
        extents = load_params(kb, params, Extents)
        with kb.loop(kb.begin, kb.end) as tile:
            panel = self._panel(kb, extents, tile)
            with kb.loop(0, extents.row_tiles) as row_tile:
                self.emit_tile(kb, extents, panel, source, kb.mul(row_tile, self.tile_rows), self.tile_rows)
            if self.last_rows:
                first = kb.mul(extents.row_tiles, self.tile_rows)
                self.emit_tile(kb, extents, panel, source, first, self.last_rows)
        kb.return_void()

    def _panel(self, kb: KernelBuilder, extents: Extents, tile: Value) -> Panel:
        def of_blocks(number: int, size: int) -> Value:
            step = kb.mul(extents.blocks, self.tile_units * size)
            return kb.at(kb.argument(number), kb.mul(tile, step))

        zero_points = None
        if self.zero_points != "middle":
            zero_points = of_blocks(_ZERO_POINTS, 1 if self.zero_points == "byte" else 4)
        first = kb.mul(tile, self.tile_units * 4)
        return Panel(
            kb.at(kb.argument(_WEIGHTS), kb.mul(tile, extents.panel_bytes)),
            of_blocks(_SCALES, 4),
            zero_points,
            kb.at(kb.argument(_BIAS), first),
            kb.at(kb.argument(_OUTPUT), first),
            kb.ir.icmp_signed("==", kb.add(tile, 1), extents.tiles),
        )

    def emit_tile(
        self, kb: KernelBuilder, extents: Extents, panel: Panel, source: Value, first: Value, count: int
    ) -> None:
        """Compute `count` rows from the row `first` on."""
        raise NotImplementedError

    def store_tile(
        self, kb: KernelBuilder, extents: Extents, panel: Panel, first: Value, accs: Sequence[Value]
    ) -> None:
        """Store the accumulators of rows from the row `first` on, plus the bias."""
        biases = [kb.load(accs[0].type, panel.bias, v * self.lanes * 4) for v in range(self.vectors)]
        output = kb.at(panel.output, kb.mul(first, extents.output_bytes))
        with kb.for_each_tile_row(accs, self.vectors, extents.output_bytes) as (offset, row):
            found = [kb.ir.fadd(acc, bias) for acc, bias in zip(row, biases, strict=True)]
            kb.store_tile_row(found, kb.at(output, offset), self.last_units, panel.is_last)


@dataclass(frozen=True, slots=True)
class BlockwiseKernel(UnitTiles):
    """Products in float32. `tail` elements are after the last whole word of a row."""

    tail: int

    @property
    def words(self) -> int:
        """Words that have elements."""
        return math.ceil(self.length / self.per_word)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of floats."""
        return self.length * 4

    def pack_weights(self, packed: Array) -> bytes:
        """Return bytes (units, blocks, bytes of a block) as (tiles, words, units of a tile).

        With zero points in the middle the numbers become signed.
        """
        highest_bits = sum(1 << bit for bit in range(self.bits - 1, 8, self.bits))
        flipped = packed ^ np.uint8(highest_bits if self.zero_points == "middle" else 0)
        words = np.ascontiguousarray(flipped).reshape(self.units, -1).view(_WORD)[:, : self.words]
        return self.pack_columns(words)

    def emit_tile(
        self, kb: KernelBuilder, extents: Extents, panel: Panel, source: Value, first: Value, count: int
    ) -> None:
        """Compute `count` rows from the row `first` on."""
        rows = [kb.at(source, kb.mul(kb.add(first, row), extents.row_bytes)) for row in range(count)]
        words_of_block = self.block // self.per_word

        def accumulate_block(block: Value, accs: Sequence[Value]) -> Sequence[Value]:
            scaling, begin = self._scaling(kb, panel, block), kb.mul(block, words_of_block)
            words = kb.intrinsic("llvm.smin", kb.i64(words_of_block), kb.ir.sub(extents.words, begin))

            def accumulate_word(index: Value, accs: Sequence[Value]) -> Sequence[Value]:
                return self._with_word(kb, panel, rows, kb.add(begin, index), self.per_word, scaling, accs)

            return kb.for_loop(words, accs, accumulate_word, may_be_empty=True)

        accs: Sequence[Value] = [kb.splat(F32, 0.0, self.lanes)] * (count * self.vectors)
        accs = kb.for_loop(extents.blocks, accs, accumulate_block)
        if self.tail:
            scaling = self._scaling(kb, panel, kb.ir.sub(extents.blocks, kb.i64(1)))
            accs = self._with_word(kb, panel, rows, extents.words, self.tail, scaling, accs)
        self.store_tile(kb, extents, panel, first, accs)

    def _scaling(self, kb: KernelBuilder, panel: Panel, block: Value) -> list[tuple[Value, Value | None]]:
        """Return scales and zero points of a block, for each vector."""
        first, found = kb.mul(block, self.tile_units), []
        for v in range(self.vectors):
            place = kb.add(first, v * self.lanes)
            scales, zeros = kb.load(vector(F32, self.lanes), panel.scales, kb.mul(place, 4)), None
            if self.zero_points == "byte":
                numbers = kb.load(vector(I8, self.lanes), panel.zero_points, place)
                zeros = kb.ir.sitofp(kb.ir.zext(numbers, vector(I32, self.lanes)), scales.type)
            elif self.zero_points == "float":
                zeros = kb.load(scales.type, panel.zero_points, kb.mul(place, 4))
            found.append((scales, zeros))
        return found

    def _with_word(
        self,
        kb: KernelBuilder,
        panel: Panel,
        rows: Sequence[Value],
        word: Value,
        count: int,
        scaling: Sequence[tuple[Value, Value | None]],
        accs: Sequence[Value],
    ) -> Sequence[Value]:
        """Add the products of the first `count` elements of a word."""
        result, kind = list(accs), vector(I32, self.lanes)
        weights, inputs = kb.mul(word, self.tile_units * 4), kb.mul(word, self.per_word * 4)
        words = [kb.load(kind, panel.weights, kb.add(weights, v * self.lanes * 4)) for v in range(self.vectors)]
        for element in range(count):
            factors = [
                self._dequantized(kb, numbers, element, *scale) for numbers, scale in zip(words, scaling, strict=True)
            ]
            for row, address in enumerate(rows):
                value = kb.broadcast(kb.load(F32, address, kb.add(inputs, element * 4)), self.lanes)
                for v, factor in enumerate(factors):
                    place = row * self.vectors + v
                    result[place] = fmuladd(kb, value, factor, result[place])
        return result

    def _dequantized(self, kb: KernelBuilder, words: Value, element: int, scales: Value, zeros: Value | None) -> Value:
        """Return one element's weights of all lanes."""
        unused = _WORD_BITS - self.bits
        shift = element * self.bits
        if zeros is None:  # the numbers are signed
            numbers = kb.ir.shl(words, kb.splat(I32, unused - shift, self.lanes)) if shift < unused else words
            numbers = kb.ir.ashr(numbers, kb.splat(I32, unused, self.lanes))
            return kb.ir.fmul(kb.ir.sitofp(numbers, scales.type), scales)
        numbers = kb.ir.lshr(words, kb.splat(I32, shift, self.lanes)) if shift else words
        numbers = kb.ir.and_(numbers, kb.splat(I32, (1 << self.bits) - 1, self.lanes)) if shift < unused else numbers
        return kb.ir.fmul(kb.ir.fsub(kb.ir.sitofp(numbers, scales.type), zeros), scales)


def plan_blockwise(
    rows: int, units: int, length: int, bits: int, block: int, zero_points: str, target: Target
) -> BlockwiseKernel:
    """Plan the product: wide tiles for one row, else tiles of several rows that share what becomes of the weights."""
    most = (1, 4) if rows == 1 else (6, 2) if target.registers < 32 else (8, 2)
    tiles = plan_tiles(rows, units, *most, target.lanes)
    tail = length % (_WORD_BITS // bits)
    return BlockwiseKernel(bits, block, zero_points, *tiles, rows, units, length, tail)


def plan_tiles(rows: int, units: int, most_rows: int, most_vectors: int, lanes: int) -> tuple[int, int, int, int, int]:
    """Return the fields of `UnitTiles` from `tile_rows` to `last_units`; rows are divided evenly."""
    vectors = min(most_vectors, math.ceil(units / lanes))
    tile_rows = math.ceil(rows / math.ceil(rows / most_rows))
    return tile_rows, rows % tile_rows, vectors, lanes, units % (vectors * lanes)
