"""SOFTMAX and LOG_SOFTMAX along one dimension: rows of `length` elements that lie `inner` from each other.

Of floats the exponentials (or their powers) wait in scratch memory for the sum. Of codes there are two tables of the
reference's, indexed by how far a code is below the row's greatest: exponentials with no whole bits, and with 12 of
them for the sum. What remains for a row is the reciprocal of the sum, in the reference's steps, and a product for each
code; long rows tabulate that too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nnfmq.engines.compiled.ir_builder import F32, I8, I32, I64, KernelBuilder, Value, vector, vector_width_for
from nnfmq.engines.compiled.kernels.float_ops import exp, log
from nnfmq.engines.compiled.kernels.normalization_kernels import AxisKernel, AxisLoop
from nnfmq.engines.compiled.kernels.reducers import (
    FloatMinMaxReducer,
    FloatSumReducer,
    QuantizedMinMaxReducer,
    reduce_lanes,
)
from nnfmq.engines.compiled.kernels.requantize import reciprocal
from nnfmq.engines.compiled.target import Target

__all__ = ["LONGEST_CODES", "LONGEST_FLOATS", "FloatSoftmax", "QuantizedSoftmax", "plan_quantized_softmax"]

LONGEST_CODES = (1 << 13) - 1  # the sum has 32 bits
LONGEST_FLOATS = 1 << 18
_UNIT = 1 << 11
_TABULATED = 64


@dataclass(frozen=True, slots=True)
class FloatSoftmax(AxisKernel):
    """Lines of float32; with `logarithm` LOG_SOFTMAX. In scratch memory is what each element adds to the result."""

    lines: AxisLoop
    beta: float
    log: bool

    def scratch_bytes(self, target: Target) -> int:
        """A vector for each round."""
        return 4 * self.lines.rounds * self.lines.lanes

    def emit(self, kb: KernelBuilder) -> None:
        """Table: input, output."""
        source, out = kb.argument(0), kb.argument(1)
        self.lines.for_each_slice(
            kb, lambda first, _: self._emit_line(kb, kb.at(source, kb.mul(first, 4)), kb.at(out, kb.mul(first, 4)))
        )
        kb.return_void()

    def _emit_line(self, kb: KernelBuilder, source: Value, out: Value) -> None:
        lines, lanes = self.lines, self.lines.lanes
        kind, zeros = vector(F32, lanes), kb.splat(F32, 0.0, lanes)

        def compare(k: Value, values: Sequence[Value]) -> Sequence[Value]:
            loaded = kb.load(kind, source, kb.mul(lines.offset(kb, k), 4))
            return [kb.ir.select(kb.ir.fcmp_ordered(">", loaded, values[0]), loaded, values[0])]

        def sum_up(k: Value, values: Sequence[Value]) -> Sequence[Value]:
            loaded = kb.load(kind, source, kb.mul(lines.offset(kb, k), 4))
            below = kb.ir.fmul(kb.ir.fsub(loaded, greatest), kb.splat(F32, self.beta, lanes))
            power = exp(kb, below)
            kb.store(below if self.log else power, kb.scratch, kb.mul(k, 4 * lanes))
            return [kb.ir.fadd(values[0], lines.counted(kb, k, power, zeros))]

        extreme = FloatMinMaxReducer(True)
        (found,) = kb.for_loop(lines.rounds, [extreme.neutral(kb, lanes)], compare)
        greatest = lines.reduce_slice(kb, extreme, found)
        (found,) = kb.for_loop(lines.rounds, [zeros], sum_up)
        total = lines.reduce_slice(kb, FloatSumReducer(), found)
        total = log(kb, total) if self.log else total
        with kb.loop(0, lines.rounds) as k:
            kept = kb.load(kind, kb.scratch, kb.mul(k, 4 * lanes))
            result = kb.ir.fsub(kept, total) if self.log else kb.ir.fdiv(kept, total)
            kb.store(result, out, kb.mul(lines.offset(kb, k), 4))


@dataclass(frozen=True, slots=True)
class QuantizedSoftmax:
    """Rows of codes, `rows` times `inner` of them."""

    rows: int
    length: int
    inner: int
    signed: bool
    lanes: int
    block: int

    compile_cost = 1

    @property
    def work_items(self) -> int:
        """Blocks of rows."""
        return math.ceil(self.rows * self.inner / self.block)

    def scratch_bytes(self, target: Target) -> int:
        """A table of results."""
        return 256

    def emit(self, kb: KernelBuilder) -> None:
        """Table: input, output, exponentials, the same for the sum."""
        source, out, exponentials, summands = map(kb.argument, range(4))
        end = kb.intrinsic("llvm.smin", kb.mul(kb.end, self.block), kb.i64(self.rows * self.inner))
        with kb.loop(kb.mul(kb.begin, self.block), end) as number:
            row, lane = kb.ir.udiv(number, kb.i64(self.inner)), kb.ir.urem(number, kb.i64(self.inner))
            offset = kb.add(kb.mul(row, self.length * self.inner), lane)
            first, place = kb.at(source, offset), kb.at(out, offset)
            greatest = self._greatest(kb, first)
            scale, exponent = reciprocal(kb, self._sum(kb, first, greatest, summands))
            if self.length < _TABULATED:
                with kb.loop(0, self.length) as k:
                    at = kb.mul(self._below(kb, first, k, greatest), 4)
                    share = self._shares(kb, kb.load(vector(I32, 1), exponentials, at), scale, exponent)
                    kb.store(share, place, kb.mul(k, self.inner))
            else:
                self._emit_table(kb, exponentials, scale, exponent)
                with kb.loop(0, self.length) as k:
                    share = kb.load(I8, kb.scratch, self._below(kb, first, k, greatest))
                    kb.store(share, place, kb.mul(k, self.inner))
        kb.return_void()

    def _greatest(self, kb: KernelBuilder, first: Value) -> Value:
        extreme = QuantizedMinMaxReducer(self.signed, True, 0, 0)
        lanes = vector_width_for(self.length, 8 * kb.target.lanes) if self.inner == 1 else 1
        last = self.length - lanes

        def compare(k: Value, values: Sequence[Value]) -> Sequence[Value]:
            place = kb.mul(k, self.inner) if lanes == 1 else kb.intrinsic("llvm.smin", kb.mul(k, lanes), kb.i64(last))
            return [extreme.joined(kb, values[0], extreme.widened(kb, first, place, lanes))]

        (found,) = kb.for_loop(math.ceil(self.length / lanes), [extreme.neutral(kb, lanes)], compare)
        return kb.ir.extract_element(reduce_lanes(kb, extreme, found), kb.i64(0))

    def _below(self, kb: KernelBuilder, first: Value, k: Value, greatest: Value) -> Value:
        """Return by how much an element is below the greatest: 0 to 255 whatever memory says by now."""
        code = kb.load(I8, first, kb.mul(k, self.inner))
        return kb.ir.zext(kb.ir.sub(greatest, code), I64)

    def _sum(self, kb: KernelBuilder, first: Value, greatest: Value, summands: Value) -> Value:
        def add(k: Value, values: Sequence[Value]) -> Sequence[Value]:
            summand = kb.load(I32, summands, kb.mul(self._below(kb, first, k, greatest), 4))
            return [kb.ir.add(values[0], kb.ir.zext(summand, I64))]

        return kb.for_loop(self.length, [kb.i64(0)], add)[0]

    def _emit_table(self, kb: KernelBuilder, exponentials: Value, scale: Value, exponent: Value) -> None:
        with kb.loop(0, 256, self.lanes) as entry:
            values = kb.load(vector(I32, self.lanes), exponentials, kb.mul(entry, 4))
            kb.store(self._shares(kb, values, scale, exponent), kb.scratch, entry)

    def _shares(self, kb: KernelBuilder, exponentials: Value, scale: Value, exponent: Value) -> Value:
        """Return the codes of exponentials times `scale`; all is positive, so both roundings are half up."""
        lanes = exponentials.type.count
        wide = vector(I64, lanes)
        factor = kb.ir.zext(kb.broadcast(kb.ir.trunc(scale, I32), lanes), wide)
        product = kb.ir.add(kb.ir.mul(kb.ir.zext(exponentials, wide), factor), kb.splat(I64, 1 << 30, lanes))
        high = kb.ir.lshr(product, kb.splat(I64, 31, lanes))
        half = kb.broadcast(kb.ir.shl(kb.i64(1), kb.ir.sub(exponent, kb.i64(1))), lanes)
        shares = kb.ir.lshr(kb.ir.add(high, half), kb.broadcast(exponent, lanes))
        few = kb.ir.trunc(shares, vector(I32, lanes))  # none is above 2^9
        codes = kb.ir.trunc(kb.intrinsic("llvm.umin", few, kb.splat(I32, 255, lanes)), vector(I8, lanes))
        return kb.ir.xor(codes, kb.splat(I8, -128, lanes)) if self.signed else codes


def plan_quantized_softmax(rows: int, length: int, inner: int, signed: bool, target: Target) -> QuantizedSoftmax:
    """Choose lanes and blocks."""
    return QuantizedSoftmax(rows, length, inner, signed, target.lanes, max(1, _UNIT // length))
