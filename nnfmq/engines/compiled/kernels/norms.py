"""L2_NORMALIZATION: a line by the root of its sum of squares; of float32, where that is at least 1e-6, and of codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nnfmq.engines.compiled.emission import F32, I8, I32, I64, Emitter, Value, vector
from nnfmq.engines.compiled.kernels.fixed_point import inverse_square_root
from nnfmq.engines.compiled.kernels.float_ops import fmaximum, fmuladd
from nnfmq.engines.compiled.kernels.normalization_kernels import AxisKernel, AxisLoop
from nnfmq.engines.compiled.kernels.reducers import FloatSumReducer, QuantizedMeanReducer

__all__ = ["LONGEST_CODES", "FloatL2Norm", "QuantizedL2Norm"]

LONGEST_CODES = (1 << 29) // 255**2  # the sum stays below 2^29

_LEAST = 1e-6


@dataclass(frozen=True, slots=True)
class FloatL2Norm(AxisKernel):
    """Lines, each by its norm."""

    lines: AxisLoop

    def emit(self, e: Emitter) -> None:
        """Table: input, output."""
        source, out = e.argument(0), e.argument(1)
        self.lines.for_each_slice(
            e, lambda first, _: self._emit_line(e, e.at(source, e.mul(first, 4)), e.at(out, e.mul(first, 4)))
        )
        e.finish()

    def _emit_line(self, e: Emitter, source: Value, out: Value) -> None:
        lines, kind = self.lines, vector(F32, self.lines.lanes)
        zeros = e.splat(F32, 0.0, lines.lanes)

        def add(k: Value, values: Sequence[Value]) -> Sequence[Value]:
            loaded = e.load(kind, source, e.mul(lines.offset(e, k), 4))
            counted = lines.counted(e, k, loaded, zeros)
            return [fmuladd(e, counted, counted, values[0])]

        (found,) = e.carry(lines.rounds, [zeros], add)
        norm = e.intrinsic("llvm.sqrt", lines.reduce_slice(e, FloatSumReducer(), found))
        norm = fmaximum(e, norm, e.splat(F32, _LEAST, lines.lanes))
        with e.loop(0, lines.rounds) as k:
            offset = e.mul(lines.offset(e, k), 4)
            e.store(e.b.fdiv(e.load(kind, source, offset), norm), out, offset)


@dataclass(frozen=True, slots=True)
class QuantizedL2Norm(AxisKernel):
    """Lines of codes, each by its norm, in units of 1/128 around the middle code."""

    lines: AxisLoop
    signed: bool
    zero_point: int

    def emit(self, e: Emitter) -> None:
        """Table: input, output."""
        source, out = e.argument(0), e.argument(1)
        self.lines.for_each_slice(e, lambda first, _: self._emit_line(e, e.at(source, first), e.at(out, first)))
        e.finish()

    def _emit_line(self, e: Emitter, source: Value, out: Value) -> None:
        lines, lanes = self.lines, self.lines.lanes
        zeros, sums = e.splat(I32, 0, lanes), QuantizedMeanReducer(self.signed, LONGEST_CODES, False, 0, 0)

        def add(k: Value, values: Sequence[Value]) -> Sequence[Value]:
            counted = lines.counted(e, k, self._centred(e, source, k), zeros)
            return [e.b.add(values[0], e.b.mul(counted, counted))]

        (found,) = e.carry(lines.rounds, [zeros], add)
        total = e.b.extract_element(lines.reduce_slice(e, sums, found), e.i64(0))
        scale, shift = inverse_square_root(e, e.b.zext(total, I64))
        with e.loop(0, lines.rounds) as k:
            codes = self._scaled(e, self._centred(e, source, k), e.broadcast(scale, lanes), e.broadcast(shift, lanes))
            e.store(codes, out, lines.offset(e, k))

    def _centred(self, e: Emitter, source: Value, k: Value) -> Value:
        lanes = self.lines.lanes
        codes = e.load(vector(I8, lanes), source, self.lines.offset(e, k))
        whole = (e.b.sext if self.signed else e.b.zext)(codes, vector(I32, lanes))
        return e.b.sub(whole, e.splat(I32, self.zero_point, lanes))

    def _scaled(self, e: Emitter, centred: Value, scale: Value, shift: Value) -> Value:
        """Return codes: both of the reference's roundings, ties away from 0 in the second."""
        lanes, kind = centred.type.count, scale.type
        wide = e.b.sext(e.b.shl(centred, e.splat(I32, 7, lanes)), kind)
        high = e.b.ashr(e.b.add(e.b.mul(wide, scale), e.splat(I64, 1 << 30, lanes)), e.splat(I64, 31, lanes))
        half = e.b.lshr(e.b.shl(e.splat(I64, 1, lanes), shift), e.splat(I64, 1, lanes))
        tie = e.b.select(
            e.b.icmp_signed(">", shift, e.splat(I64, 0, lanes)),
            e.b.ashr(high, e.splat(I64, 63, lanes)),
            e.splat(I64, 0, lanes),
        )
        steps = e.b.trunc(e.b.ashr(e.b.add(e.b.add(high, half), tie), shift), centred.type)
        middle, low, high_code = (0, -128, 127) if self.signed else (128, 0, 255)
        codes = e.b.add(steps, e.splat(I32, middle, lanes))
        held = e.clamp(codes, e.splat(I32, low, lanes), e.splat(I32, high_code, lanes))
        return e.b.trunc(held, vector(I8, lanes))
