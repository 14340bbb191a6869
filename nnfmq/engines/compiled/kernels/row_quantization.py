"""DYNAMIC_QUANTIZE: the range of each row, then its elements rounded to the 8-bit values of that range.

Every operation is that of `operations.tflite_extension.dynamic_quantization`, in the same order and precision: the
results are equal to its.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llvmlite import ir

from nnfmq.engines.compiled.ir_builder import F32, F64, KernelBuilder, Value, vector
from nnfmq.engines.compiled.kernels.normalization_kernels import AxisKernel, AxisLoop
from nnfmq.engines.compiled.kernels.reducers import FloatMinMaxReducer
from nnfmq.engines.compiled.kernels.vector_math import fmaximum, fminimum

__all__ = ["RowQuantization"]

_LOWEST, _HIGHEST = -128.0, 127.0


@dataclass(frozen=True, slots=True)
class RowQuantization(AxisKernel):
    """DYNAMIC_QUANTIZE of the rows of an `axis_loop`, whose elements are neighbours in memory."""

    axis_loop: AxisLoop
    is_asymmetric: bool

    def emit(self, kb: KernelBuilder) -> None:
        """Args: input, output."""
        source, out = kb.argument(0), kb.argument(1)
        self.axis_loop.for_each_slice(
            kb, lambda first, _: self._emit_row(kb, kb.at(source, kb.mul(first, 4)), kb.at(out, kb.mul(first, 4)))
        )
        kb.return_void()

    def _emit_row(self, kb: KernelBuilder, source: Value, out: Value) -> None:
        loop, lanes = self.axis_loop, self.axis_loop.lanes
        low, high = self._range(kb, source)
        if self.is_asymmetric:
            scale, inverse, zero_point = self._asymmetric(kb, low, high)
        else:
            scale, inverse, zero_point = self._symmetric(kb, fmaximum(kb, kb.ir.fneg(low), high))
        lowest = kb.splat(F32, _LOWEST if self.is_asymmetric else -_HIGHEST, lanes)
        with kb.loop(0, loop.iterations) as k:
            offset = kb.mul(loop.offset(kb, k), 4)
            scaled = kb.ir.fmul(kb.load(vector(F32, lanes), source, offset), inverse)
            steps = _rounded(kb, kb.ir.fadd(zero_point, scaled), kb.splat(F32, 0.5, lanes))
            limited = fminimum(kb, fmaximum(kb, steps, lowest), kb.splat(F32, _HIGHEST, lanes))
            kb.store(kb.ir.fmul(kb.ir.fsub(limited, zero_point), scale), out, offset)

    def _range(self, kb: KernelBuilder, source: Value) -> tuple[Value, Value]:
        """Return the minimum and the maximum of a row and 0, in all lanes."""
        loop, zeros = self.axis_loop, kb.splat(F32, 0.0, self.axis_loop.lanes)

        def extend(k: Value, found: Sequence[Value]) -> Sequence[Value]:
            values = kb.load(vector(F32, loop.lanes), source, kb.mul(loop.offset(kb, k), 4))
            return [fminimum(kb, found[0], values), fmaximum(kb, found[1], values)]

        low, high = kb.for_loop(loop.iterations, [zeros, zeros], extend)
        reducers = FloatMinMaxReducer(False), FloatMinMaxReducer(True)
        return loop.reduce_slice(kb, reducers[0], low), loop.reduce_slice(kb, reducers[1], high)

    def _symmetric(self, kb: KernelBuilder, largest: Value) -> tuple[Value, Value, Value]:
        """Return scale, inverse scale and zero point."""
        lanes = self.axis_loop.lanes
        zeros, ones, steps = (kb.splat(F32, value, lanes) for value in (0.0, 1.0, _HIGHEST))
        is_positive = kb.ir.fcmp_ordered(">", largest, zeros)
        scale = kb.ir.select(is_positive, kb.ir.fdiv(largest, steps), ones)
        return scale, kb.ir.fdiv(steps, kb.ir.select(is_positive, largest, ones)), zeros

    def _asymmetric(self, kb: KernelBuilder, lows: Value, highs: Value) -> tuple[Value, Value, Value]:
        """Return scale, inverse scale and zero point, which is computed for the end with the smaller error."""
        low, high = (kb.ir.fpext(kb.ir.extract_element(ends, kb.i64(0)), F64) for ends in (lows, highs))
        is_wide = kb.ir.fcmp_ordered(">", high, low)
        step = kb.ir.fdiv(kb.ir.fsub(high, low), _real(_HIGHEST - _LOWEST))
        scale = kb.ir.select(is_wide, step, _real(1.0))
        below, above = kb.ir.fdiv(low, scale), kb.ir.fdiv(high, scale)
        errors = [
            kb.ir.fadd(_real(abs(limit)), kb.intrinsic("llvm.fabs", end))
            for limit, end in ((_LOWEST, below), (_HIGHEST, above))
        ]
        is_low = kb.ir.fcmp_ordered("<", *errors)
        from_low, from_high = kb.ir.fsub(_real(_LOWEST), below), kb.ir.fsub(_real(_HIGHEST), above)
        chosen = _rounded(kb, kb.ir.select(is_low, from_low, from_high), _real(0.5))
        limited = fminimum(kb, fmaximum(kb, chosen, _real(_LOWEST)), _real(_HIGHEST))
        zero_point = kb.ir.fptrunc(kb.ir.select(is_wide, limited, _real(0.0)), F32)
        lanes = self.axis_loop.lanes
        scales = kb.broadcast(kb.ir.fptrunc(scale, F32), lanes)
        return scales, kb.ir.fdiv(kb.splat(F32, 1.0, lanes), scales), kb.broadcast(zero_point, lanes)


def _real(value: float) -> Value:
    return ir.Constant(F64, value)


def _rounded(kb: KernelBuilder, value: Value, half: Value) -> Value:
    """Return floats rounded to integers, halves away from zero."""
    magnitude = kb.intrinsic("llvm.floor", kb.ir.fadd(kb.intrinsic("llvm.fabs", value), half))
    return kb.intrinsic("llvm.copysign", magnitude, value)
