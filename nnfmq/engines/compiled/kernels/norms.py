"""L2_NORMALIZATION: a line by the root of its sum of squares; of float32, where that is at least 1e-6, and of codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nnfmq.engines.compiled.ir_builder import F32, I8, I32, I64, KernelBuilder, Value, vector
from nnfmq.engines.compiled.kernels.float_ops import fmaximum, fmuladd
from nnfmq.engines.compiled.kernels.normalization_kernels import AxisKernel, AxisLoop
from nnfmq.engines.compiled.kernels.reducers import FloatSumReducer, QuantizedMeanReducer
from nnfmq.engines.compiled.kernels.requantize import inverse_square_root

__all__ = ["LONGEST_CODES", "FloatL2Norm", "QuantizedL2Norm"]

LONGEST_CODES = (1 << 29) // 255**2  # the sum stays below 2^29

_LEAST = 1e-6


@dataclass(frozen=True, slots=True)
class FloatL2Norm(AxisKernel):
    """Lines, each by its norm."""

    lines: AxisLoop

    def emit(self, kb: KernelBuilder) -> None:
        """Table: input, output."""
        source, out = kb.argument(0), kb.argument(1)
        self.lines.for_each_slice(
            kb, lambda first, _: self._emit_line(kb, kb.at(source, kb.mul(first, 4)), kb.at(out, kb.mul(first, 4)))
        )
        kb.return_void()

    def _emit_line(self, kb: KernelBuilder, source: Value, out: Value) -> None:
        lines, kind = self.lines, vector(F32, self.lines.lanes)
        zeros = kb.splat(F32, 0.0, lines.lanes)

        def add(k: Value, values: Sequence[Value]) -> Sequence[Value]:
            loaded = kb.load(kind, source, kb.mul(lines.offset(kb, k), 4))
            counted = lines.counted(kb, k, loaded, zeros)
            return [fmuladd(kb, counted, counted, values[0])]

        (found,) = kb.for_loop(lines.rounds, [zeros], add)
        norm = kb.intrinsic("llvm.sqrt", lines.reduce_slice(kb, FloatSumReducer(), found))
        norm = fmaximum(kb, norm, kb.splat(F32, _LEAST, lines.lanes))
        with kb.loop(0, lines.rounds) as k:
            offset = kb.mul(lines.offset(kb, k), 4)
            kb.store(kb.ir.fdiv(kb.load(kind, source, offset), norm), out, offset)


@dataclass(frozen=True, slots=True)
class QuantizedL2Norm(AxisKernel):
    """Lines of codes, each by its norm, in units of 1/128 around the middle code."""

    lines: AxisLoop
    signed: bool
    zero_point: int

    def emit(self, kb: KernelBuilder) -> None:
        """Table: input, output."""
        source, out = kb.argument(0), kb.argument(1)
        self.lines.for_each_slice(kb, lambda first, _: self._emit_line(kb, kb.at(source, first), kb.at(out, first)))
        kb.return_void()

    def _emit_line(self, kb: KernelBuilder, source: Value, out: Value) -> None:
        lines, lanes = self.lines, self.lines.lanes
        zeros, sums = kb.splat(I32, 0, lanes), QuantizedMeanReducer(self.signed, LONGEST_CODES, False, 0, 0)

        def add(k: Value, values: Sequence[Value]) -> Sequence[Value]:
            counted = lines.counted(kb, k, self._centred(kb, source, k), zeros)
            return [kb.ir.add(values[0], kb.ir.mul(counted, counted))]

        (found,) = kb.for_loop(lines.rounds, [zeros], add)
        total = kb.ir.extract_element(lines.reduce_slice(kb, sums, found), kb.i64(0))
        scale, shift = inverse_square_root(kb, kb.ir.zext(total, I64))
        with kb.loop(0, lines.rounds) as k:
            codes = self._scaled(
                kb, self._centred(kb, source, k), kb.broadcast(scale, lanes), kb.broadcast(shift, lanes)
            )
            kb.store(codes, out, lines.offset(kb, k))

    def _centred(self, kb: KernelBuilder, source: Value, k: Value) -> Value:
        lanes = self.lines.lanes
        codes = kb.load(vector(I8, lanes), source, self.lines.offset(kb, k))
        whole = (kb.ir.sext if self.signed else kb.ir.zext)(codes, vector(I32, lanes))
        return kb.ir.sub(whole, kb.splat(I32, self.zero_point, lanes))

    def _scaled(self, kb: KernelBuilder, centred: Value, scale: Value, shift: Value) -> Value:
        """Return codes: both of the reference's roundings, ties away from 0 in the second."""
        lanes, kind = centred.type.count, scale.type
        wide = kb.ir.sext(kb.ir.shl(centred, kb.splat(I32, 7, lanes)), kind)
        high = kb.ir.ashr(kb.ir.add(kb.ir.mul(wide, scale), kb.splat(I64, 1 << 30, lanes)), kb.splat(I64, 31, lanes))
        half = kb.ir.lshr(kb.ir.shl(kb.splat(I64, 1, lanes), shift), kb.splat(I64, 1, lanes))
        tie = kb.ir.select(
            kb.ir.icmp_signed(">", shift, kb.splat(I64, 0, lanes)),
            kb.ir.ashr(high, kb.splat(I64, 63, lanes)),
            kb.splat(I64, 0, lanes),
        )
        steps = kb.ir.trunc(kb.ir.ashr(kb.ir.add(kb.ir.add(high, half), tie), shift), centred.type)
        middle, low, high_code = (0, -128, 127) if self.signed else (128, 0, 255)
        codes = kb.ir.add(steps, kb.splat(I32, middle, lanes))
        held = kb.clamp(codes, kb.splat(I32, low, lanes), kb.splat(I32, high_code, lanes))
        return kb.ir.trunc(held, vector(I8, lanes))
