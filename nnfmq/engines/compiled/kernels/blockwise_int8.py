"""BLOCKWISE_MATMUL of rows whose blocks are rounded to 8 bits: two kernels.

`BlockStepsKernel` makes a record of each block of a row: its scale in float32, the sum of its steps in int32, and the
steps, from -127 to 127, filled up with 0. `RoundedBlockwiseKernel` multiplies four adjacent steps by the packed numbers
of four elements at once. The zero point times the sum of the steps is subtracted from the exact sum, which is then
multiplied by both scales. All values but the order of the sums of floats are those of the operation's definition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field
from typing import Any, NamedTuple

import numpy as np

from nnfmq.base.frozen import dataclass
from nnfmq.engines.compiled.ir_builder import (
    F32,
    I8,
    I16,
    I32,
    Constant,
    KernelBuilder,
    Value,
    load_params,
    pack_params,
    vector,
)
from nnfmq.engines.compiled.kernels import Kernel
from nnfmq.engines.compiled.kernels.blockwise import Extents, Panel, UnitTiles, plan_tiles
from nnfmq.engines.compiled.kernels.micro_kernels import dot2, dot4
from nnfmq.engines.compiled.kernels.vector_math import clamp_float, fmaximum, fminimum, fmuladd
from nnfmq.engines.compiled.target import Target
from nnfmq.operations.declaration import Array
from nnfmq.operations.tflite_extension.blockwise import unpack_bits

__all__ = ["BlockStepsKernel", "RoundedBlockwiseKernel", "plan_rounded"]

_SCALE, _SUM, _HEADER_BYTES = 0, 4, 8
_HIGHEST = 127.0
_LARGEST_FLOAT = float(np.finfo(np.float32).max)
_GROUP = 4  # steps that are multiplied at once
_MOST_SHORTS = 8  # sums of two products of 4 bits and 127 in 16 bits


class _Rows(NamedTuple):
    """Run-time parameters of the input."""

    blocks: Any  # of a row
    length: Any  # of a row


@dataclass(frozen=True, slots=True)
class BlockStepsKernel(Kernel):
    """The records of all blocks of rows, which are work items. `has_short` rows end with a block that is not full."""

    block: int
    has_short: bool
    rows: int = field(repr=False)
    length: int = field(repr=False)

    @property
    def blocks(self) -> int:
        """Blocks of a row."""
        return math.ceil(self.length / self.block)

    @property
    def record_bytes(self) -> int:
        """Bytes of a block's record."""
        return _HEADER_BYTES + self.block

    @property
    def work_items(self) -> int:
        """Blocks of all rows."""
        return self.rows * self.blocks

    def params(self) -> bytes:
        """Return the constant with the extents."""
        return pack_params(_Rows(self.blocks, self.length))

    def emit(self, kb: KernelBuilder) -> None:
        """Args: floats, records, params."""
        source, target = kb.argument(0), kb.argument(1)
        rows = load_params(kb, kb.argument(2), _Rows)
        with kb.loop(kb.begin, kb.end) as number:
            row, block = kb.ir.udiv(number, rows.blocks), kb.ir.urem(number, rows.blocks)
            first = kb.mul(block, self.block)
            floats = kb.at(source, kb.mul(kb.add(kb.mul(row, rows.length), first), 4))
            if self.has_short:
                floats = self._filled(kb, floats, kb.ir.sub(rows.length, first))
            self._emit_record(kb, floats, kb.at(target, kb.mul(number, self.record_bytes)))
        kb.return_void()

    def _filled(self, kb: KernelBuilder, floats: Value, count: Value) -> Value:
        """Return the address of a block; of a copy that ends with 0 if less than a block is left of the row."""
        copy = kb.on_stack(F32, self.block)
        is_short = kb.ir.icmp_signed("<", count, kb.i64(self.block))
        with kb.ir.if_then(is_short):
            kb.memset(copy, 0, self.block * 4)
            kb.memcpy(copy, floats, kb.mul(count, 4))
        return kb.ir.select(is_short, copy, floats)

    def _emit_record(self, kb: KernelBuilder, floats: Value, record: Value) -> None:
        """Store the record of a whole block: `operations.tflite_extension.blockwise.input_steps`."""
        lanes = kb.target.lanes
        kind, count = vector(F32, lanes), self.block // lanes

        def extend(index: Value, found: Sequence[Value]) -> Sequence[Value]:
            values = kb.load(kind, floats, kb.mul(index, lanes * 4))
            return [fmaximum(kb, kb.intrinsic("llvm.fabs", values), found[0])]

        (largest,) = kb.for_loop(count, [kb.splat(F32, 0.0, lanes)], extend)
        for distance in (1 << n for n in range(lanes.bit_length() - 1)):
            largest = fmaximum(kb, largest, kb.shuffle(largest, largest, [lane ^ distance for lane in range(lanes)]))
        highest = kb.splat(F32, _HIGHEST, lanes)
        scales = kb.ir.fdiv(largest, highest)
        factors = fminimum(kb, kb.ir.fdiv(highest, largest), kb.splat(F32, _LARGEST_FLOAT, lanes))

        def quantize(index: Value, sums: Sequence[Value]) -> Sequence[Value]:
            steps = self._steps(kb, kb.load(kind, floats, kb.mul(index, lanes * 4)), scales, factors)
            place = kb.add(kb.mul(index, lanes), _HEADER_BYTES)
            kb.store(kb.ir.trunc(steps, vector(I8, lanes)), record, place)
            return [kb.ir.add(sums[0], steps)]

        (sums,) = kb.for_loop(count, [kb.splat(I32, 0, lanes)], quantize)
        first = Constant(I32, 0)
        kb.store(kb.ir.extract_element(scales, first), record, _SCALE)
        kb.store(kb.ir.extract_element(kb.horizontal_sums([sums]), first), record, _SUM)

    def _steps(self, kb: KernelBuilder, values: Value, scales: Value, factors: Value) -> Value:
        lanes = values.type.count
        zeros, infinities = kb.splat(F32, 0.0, lanes), kb.splat(F32, math.inf, lanes)
        is_positive = kb.ir.fcmp_ordered(">", scales, zeros)
        limits = kb.intrinsic("llvm.copysign", kb.splat(F32, _HIGHEST, lanes), values)
        is_infinite = kb.ir.fcmp_ordered("==", kb.intrinsic("llvm.fabs", values), infinities)
        steps = kb.intrinsic("llvm.nearbyint", kb.ir.select(is_infinite, limits, kb.ir.fmul(values, factors)))
        limited = clamp_float(kb, kb.ir.select(is_positive, steps, zeros), -_HIGHEST, _HIGHEST)
        return kb.ir.fptosi(limited, vector(I32, lanes))


@dataclass(frozen=True, slots=True)
class RoundedBlockwiseKernel(UnitTiles):
    """Products of records with packed weights.

    A word has the numbers of groups of four adjacent elements: byte i has those of the elements i of each group, the
    first group in the lowest bits.
    """

    @property
    def words(self) -> int:
        """Words of all blocks."""
        return self.blocks * self._words_of_block

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of records."""
        return self.blocks * (_HEADER_BYTES + self.block)

    @property
    def _words_of_block(self) -> int:
        return self.block // self.per_word

    def pack_weights(self, packed: Array) -> bytes:
        """Return bytes (units, blocks, bytes of a block) as (tiles, words, units of a tile)."""
        groups = unpack_bits(packed.reshape(self.units, -1), self.bits).reshape(self.units, self.words, -1, _GROUP)
        found = np.zeros((self.units, self.words, _GROUP), np.uint8)
        for number in range(groups.shape[2]):
            found |= groups[:, :, number] << np.uint8(number * self.bits)
        return self.pack_columns(found.view("<u4")[..., 0])

    def emit_tile(
        self, kb: KernelBuilder, extents: Extents, panel: Panel, source: Value, first: Value, count: int
    ) -> None:
        """Compute `count` rows from the row `first` on."""
        rows = [kb.at(source, kb.mul(kb.add(first, row), extents.row_bytes)) for row in range(count)]

        def accumulate_block(block: Value, accs: Sequence[Value]) -> Sequence[Value]:
            offset = kb.mul(block, _HEADER_BYTES + self.block)
            records = [kb.at(row, offset) for row in rows]
            return self._with_block(kb, panel, block, records, accs)

        zeros: Sequence[Value] = [kb.splat(F32, 0.0, self.lanes)] * (count * self.vectors)
        accs = kb.for_loop(extents.blocks, zeros, accumulate_block)
        self.store_tile(kb, extents, panel, first, accs)

    def _with_block(
        self, kb: KernelBuilder, panel: Panel, block: Value, records: Sequence[Value], accs: Sequence[Value]
    ) -> Sequence[Value]:
        """Add the products of a block."""
        sums, scales, result = self._sums(kb, panel, block, records), self._scales(kb, panel, block), list(accs)
        for row, record in enumerate(records):
            scale = kb.broadcast(kb.load(F32, record, _SCALE), self.lanes)
            for v in range(self.vectors):
                place = row * self.vectors + v
                floats = kb.ir.sitofp(sums[place], scale.type)
                result[place] = fmuladd(kb, floats, kb.ir.fmul(scale, scales[v]), result[place])
        return result

    def _scales(self, kb: KernelBuilder, panel: Panel, block: Value) -> list[Value]:
        first = kb.at(panel.scales, kb.mul(block, self.tile_units * 4))
        return [kb.load(vector(F32, self.lanes), first, v * self.lanes * 4) for v in range(self.vectors)]

    def _sums(self, kb: KernelBuilder, panel: Panel, block: Value, records: Sequence[Value]) -> list[Value]:
        """Return the exact sums of a block for each row and vector."""
        first = kb.at(panel.weights, kb.mul(block, self._words_of_block * self.tile_units * 4))
        words = min(self._words_of_block, _MOST_SHORTS // (8 // self.bits))
        sums: Sequence[Value] = self._corrections(kb, panel, block, records)

        def accumulate(index: Value, accs: Sequence[Value]) -> Sequence[Value]:
            weights = kb.at(first, kb.mul(index, words * self.tile_units * 4))
            steps = kb.add(kb.mul(index, words * self.per_word), _HEADER_BYTES)
            return self._with_words(kb, weights, [kb.at(record, steps) for record in records], words, accs)

        return list(kb.for_loop(self._words_of_block // words, sums, accumulate))

    def _corrections(self, kb: KernelBuilder, panel: Panel, block: Value, records: Sequence[Value]) -> list[Value]:
        """Return the terms of the zero points."""
        sums = [kb.broadcast(kb.load(I32, record, _SUM), self.lanes) for record in records]
        zeros = [kb.splat(I32, 1 << (self.bits - 1), self.lanes)] * self.vectors
        if self.zero_points == "byte":
            first = kb.at(panel.zero_points, kb.mul(block, self.tile_units))
            loaded = (kb.load(vector(I8, self.lanes), first, v * self.lanes) for v in range(self.vectors))
            zeros = [kb.ir.zext(numbers, vector(I32, self.lanes)) for numbers in loaded]
        return [kb.ir.neg(kb.ir.mul(total, zero)) for total in sums for zero in zeros]

    def _with_words(
        self, kb: KernelBuilder, weights: Value, steps: Sequence[Value], words: int, accs: Sequence[Value]
    ) -> Sequence[Value]:
        """Add the products of adjacent words."""
        kind = vector(I8, _GROUP * self.lanes)
        pmaddubsw = None if self.bits == 8 or kb.target.has_dot4 else kb.target.pmaddubsw
        result: list[Value] = list(accs)
        shorts: list[Value | None] = [None] * len(accs)
        for word, number in ((word, number) for word in range(words) for number in range(8 // self.bits)):
            numbers = self._numbers(kb, weights, word, number)
            for row, address in enumerate(steps):
                four = kb.load(I32, address, word * self.per_word + number * _GROUP)
                factors = kb.ir.bitcast(kb.broadcast(four, self.lanes), kind)
                for v, matrix in enumerate(numbers):
                    place = row * self.vectors + v
                    if pmaddubsw is not None:
                        found = kb.call(pmaddubsw, vector(I16, 2 * self.lanes), matrix, factors)
                        previous = shorts[place]
                        shorts[place] = found if previous is None else kb.ir.add(previous, found)
                    else:
                        result[place] = dot4(kb, result[place], matrix, factors)
        if pmaddubsw is not None:
            ones = kb.splat(I16, 1, 2 * self.lanes)
            result = [dot2(kb, acc, short, ones) for acc, short in zip(result, shorts, strict=True)]
        return result

    def _numbers(self, kb: KernelBuilder, weights: Value, word: int, number: int) -> list[Value]:
        """Return the numbers of one group of a word as bytes, for each vector."""
        found = []
        for v in range(self.vectors):
            words = kb.load(vector(I32, self.lanes), weights, (word * self.vectors + v) * self.lanes * 4)
            words = kb.ir.lshr(words, kb.splat(I32, number * self.bits, self.lanes)) if number else words
            mask = ((1 << self.bits) - 1) * 0x01010101
            words = kb.ir.and_(words, kb.splat(I32, mask, self.lanes)) if self.bits < 8 else words
            found.append(kb.ir.bitcast(words, vector(I8, _GROUP * self.lanes)))
        return found


def plan_rounded(
    rows: int, units: int, length: int, bits: int, block: int, zero_points: str, target: Target
) -> RoundedBlockwiseKernel:
    """Plan the product of records."""
    most = (1, 4) if rows == 1 else (4, 2)
    tiles = plan_tiles(rows, units, *most, target.lanes)
    return RoundedBlockwiseKernel(bits, block, zero_points, *tiles, rows, units, length)
