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

from nnfmq.engines.compiled.emission import F32, I8, I32, I64, Emitter, Value, vector
from nnfmq.engines.compiled.kernels.fixed_point import reciprocal
from nnfmq.engines.compiled.kernels.float_ops import exp, log
from nnfmq.engines.compiled.kernels.normalization_kernels import AxisKernel, AxisLoop
from nnfmq.engines.compiled.kernels.reducers import (
    FloatMinMaxReducer,
    FloatSumReducer,
    QuantizedMinMaxReducer,
    reduce_lanes,
)
from nnfmq.engines.compiled.kernels.spans import fitting_lanes
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

    def emit(self, e: Emitter) -> None:
        """Table: input, output."""
        source, out = e.argument(0), e.argument(1)
        self.lines.for_each_slice(
            e, lambda first, _: self._emit_line(e, e.at(source, e.mul(first, 4)), e.at(out, e.mul(first, 4)))
        )
        e.finish()

    def _emit_line(self, e: Emitter, source: Value, out: Value) -> None:
        lines, lanes = self.lines, self.lines.lanes
        kind, zeros = vector(F32, lanes), e.splat(F32, 0.0, lanes)

        def compare(k: Value, values: Sequence[Value]) -> Sequence[Value]:
            loaded = e.load(kind, source, e.mul(lines.offset(e, k), 4))
            return [e.b.select(e.b.fcmp_ordered(">", loaded, values[0]), loaded, values[0])]

        def sum_up(k: Value, values: Sequence[Value]) -> Sequence[Value]:
            loaded = e.load(kind, source, e.mul(lines.offset(e, k), 4))
            below = e.b.fmul(e.b.fsub(loaded, greatest), e.splat(F32, self.beta, lanes))
            power = exp(e, below)
            e.store(below if self.log else power, e.scratch, e.mul(k, 4 * lanes))
            return [e.b.fadd(values[0], lines.counted(e, k, power, zeros))]

        extreme = FloatMinMaxReducer(True)
        (found,) = e.carry(lines.rounds, [extreme.neutral(e, lanes)], compare)
        greatest = lines.reduce_slice(e, extreme, found)
        (found,) = e.carry(lines.rounds, [zeros], sum_up)
        total = lines.reduce_slice(e, FloatSumReducer(), found)
        total = log(e, total) if self.log else total
        with e.loop(0, lines.rounds) as k:
            kept = e.load(kind, e.scratch, e.mul(k, 4 * lanes))
            result = e.b.fsub(kept, total) if self.log else e.b.fdiv(kept, total)
            e.store(result, out, e.mul(lines.offset(e, k), 4))


@dataclass(frozen=True, slots=True)
class QuantizedSoftmax:
    """Rows of codes, `rows` times `inner` of them."""

    rows: int
    length: int
    inner: int
    signed: bool
    lanes: int
    block: int

    @property
    def units(self) -> int:
        """Blocks of rows."""
        return math.ceil(self.rows * self.inner / self.block)

    def scratch_bytes(self, target: Target) -> int:
        """A table of results."""
        return 256

    def emit(self, e: Emitter) -> None:
        """Table: input, output, exponentials, the same for the sum."""
        source, out, exponentials, summands = map(e.argument, range(4))
        end = e.intrinsic("llvm.smin", e.mul(e.end, self.block), e.i64(self.rows * self.inner))
        with e.loop(e.mul(e.begin, self.block), end) as number:
            row, lane = e.b.udiv(number, e.i64(self.inner)), e.b.urem(number, e.i64(self.inner))
            offset = e.add(e.mul(row, self.length * self.inner), lane)
            first, place = e.at(source, offset), e.at(out, offset)
            greatest = self._greatest(e, first)
            scale, exponent = reciprocal(e, self._sum(e, first, greatest, summands))
            if self.length < _TABULATED:
                with e.loop(0, self.length) as k:
                    at = e.mul(self._below(e, first, k, greatest), 4)
                    share = self._shares(e, e.load(vector(I32, 1), exponentials, at), scale, exponent)
                    e.store(share, place, e.mul(k, self.inner))
            else:
                self._emit_table(e, exponentials, scale, exponent)
                with e.loop(0, self.length) as k:
                    share = e.load(I8, e.scratch, self._below(e, first, k, greatest))
                    e.store(share, place, e.mul(k, self.inner))
        e.finish()

    def _greatest(self, e: Emitter, first: Value) -> Value:
        extreme = QuantizedMinMaxReducer(self.signed, True, 0, 0)
        lanes = fitting_lanes(self.length, 8 * e.target.lanes) if self.inner == 1 else 1
        last = self.length - lanes

        def compare(k: Value, values: Sequence[Value]) -> Sequence[Value]:
            place = e.mul(k, self.inner) if lanes == 1 else e.intrinsic("llvm.smin", e.mul(k, lanes), e.i64(last))
            return [extreme.joined(e, values[0], extreme.widened(e, first, place, lanes))]

        (found,) = e.carry(math.ceil(self.length / lanes), [extreme.neutral(e, lanes)], compare)
        return e.b.extract_element(reduce_lanes(e, extreme, found), e.i64(0))

    def _below(self, e: Emitter, first: Value, k: Value, greatest: Value) -> Value:
        """Return by how much an element is below the greatest: 0 to 255 whatever memory says by now."""
        code = e.load(I8, first, e.mul(k, self.inner))
        return e.b.zext(e.b.sub(greatest, code), I64)

    def _sum(self, e: Emitter, first: Value, greatest: Value, summands: Value) -> Value:
        def add(k: Value, values: Sequence[Value]) -> Sequence[Value]:
            summand = e.load(I32, summands, e.mul(self._below(e, first, k, greatest), 4))
            return [e.b.add(values[0], e.b.zext(summand, I64))]

        return e.carry(self.length, [e.i64(0)], add)[0]

    def _emit_table(self, e: Emitter, exponentials: Value, scale: Value, exponent: Value) -> None:
        with e.loop(0, 256, self.lanes) as entry:
            values = e.load(vector(I32, self.lanes), exponentials, e.mul(entry, 4))
            e.store(self._shares(e, values, scale, exponent), e.scratch, entry)

    def _shares(self, e: Emitter, exponentials: Value, scale: Value, exponent: Value) -> Value:
        """Return the codes of exponentials times `scale`; all is positive, so both roundings are half up."""
        lanes = exponentials.type.count
        wide = vector(I64, lanes)
        factor = e.b.zext(e.broadcast(e.b.trunc(scale, I32), lanes), wide)
        product = e.b.add(e.b.mul(e.b.zext(exponentials, wide), factor), e.splat(I64, 1 << 30, lanes))
        high = e.b.lshr(product, e.splat(I64, 31, lanes))
        half = e.broadcast(e.b.shl(e.i64(1), e.b.sub(exponent, e.i64(1))), lanes)
        shares = e.b.lshr(e.b.add(high, half), e.broadcast(exponent, lanes))
        few = e.b.trunc(shares, vector(I32, lanes))  # none is above 2^9
        codes = e.b.trunc(e.intrinsic("llvm.umin", few, e.splat(I32, 255, lanes)), vector(I8, lanes))
        return e.b.xor(codes, e.splat(I8, -128, lanes)) if self.signed else codes


def plan_quantized_softmax(rows: int, length: int, inner: int, signed: bool, target: Target) -> QuantizedSoftmax:
    """Choose lanes and blocks."""
    return QuantizedSoftmax(rows, length, inner, signed, target.lanes, max(1, _UNIT // length))
