"""Elementwise operators of `operations.tflite_extension.linear_quantization`, with equal results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nnfmq.engines.compiled.ir_builder import F32, F64, I8, I32, KernelBuilder, Value, vector

__all__ = ["QLinearAdd", "QLinearMul", "QuantizeLinear"]

_LIMIT = 1024.0  # beyond any quantized value; integers up to it fit int32


def _limited(kb: KernelBuilder, values: Value) -> Value:
    """Return float32 numbers from -1024 to 1024; NaN becomes the lowest."""
    lowest, highest = (kb.splat(F32, limit, values.type.count) for limit in (-_LIMIT, _LIMIT))
    above = kb.ir.select(kb.ir.fcmp_ordered(">", values, lowest), values, lowest)
    return kb.ir.select(kb.ir.fcmp_ordered("<", above, highest), above, highest)


def _rounded(kb: KernelBuilder, values: Value) -> Value:
    return kb.ir.fptosi(kb.intrinsic("llvm.nearbyint", _limited(kb, values)), vector(I32, values.type.count))


def _as_bytes(kb: KernelBuilder, values: Value, is_signed: bool) -> Value:
    limits = (-128, 127) if is_signed else (0, 255)
    low, high = (kb.splat(I32, limit, values.type.count) for limit in limits)
    return kb.ir.trunc(kb.clamp(values, low, high), vector(I8, values.type.count))


@dataclass(frozen=True, slots=True)
class QuantizeLinear:
    """QUANTIZE_LINEAR of float32: the float32 quotient rounded half to even. NaN becomes the lowest value."""

    zero_point: int
    scale: float
    is_signed: bool
    adds_first: bool

    input_types = ("f4",)
    output_type = "u1"
    vectors = 2
    constant_count = 0

    def emit(self, kb: KernelBuilder, inputs: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        lanes = inputs[0].type.count
        quotient = kb.ir.fdiv(inputs[0], kb.splat(F32, self.scale, lanes))
        if self.adds_first:
            quotient = kb.ir.fadd(quotient, kb.splat(F32, float(self.zero_point), lanes))
            return _as_bytes(kb, _rounded(kb, quotient), self.is_signed)
        steps = kb.ir.add(_rounded(kb, quotient), kb.splat(I32, self.zero_point, lanes))
        return _as_bytes(kb, steps, self.is_signed)


class _Binary:
    input_types: tuple[str, ...] = ("u1", "u1")
    output_type = "u1"
    vectors = 1
    constant_count = 0


def _to_int32(kb: KernelBuilder, values: Value, is_signed: bool) -> Value:
    return (kb.ir.sext if is_signed else kb.ir.zext)(values, vector(I32, values.type.count))


@dataclass(frozen=True, slots=True)
class QLinearAdd(_Binary):
    """QLINEAR_ADD: `factors` of both inputs, and the `offset`; products are exact in float64."""

    factors: tuple[float, float]
    offset: float
    is_signed: bool

    def emit(self, kb: KernelBuilder, inputs: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        lanes = inputs[0].type.count
        wide, total = vector(F64, lanes), kb.splat(F32, self.offset, lanes)
        for values, factor in reversed(list(zip(inputs, self.factors, strict=True))):
            product = kb.ir.fmul(
                kb.ir.sitofp(_to_int32(kb, values, self.is_signed), wide), kb.splat(F64, factor, lanes)
            )
            total = kb.ir.fptrunc(kb.ir.fadd(product, kb.ir.fpext(total, wide)), vector(F32, lanes))
        return _as_bytes(kb, _rounded(kb, total), self.is_signed)


@dataclass(frozen=True, slots=True)
class QLinearMul(_Binary):
    """QLINEAR_MUL: the product of both inputs less their zero points, times `factor`, plus the output's zero point."""

    zero_points: tuple[int, int]
    factor: float
    output_zero_point: int
    is_signed: bool

    def emit(self, kb: KernelBuilder, inputs: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        lanes = inputs[0].type.count
        first, second = (
            kb.ir.sub(_to_int32(kb, values, self.is_signed), kb.splat(I32, zero_point, lanes))
            for values, zero_point in zip(inputs, self.zero_points, strict=True)
        )
        product = kb.ir.sitofp(kb.ir.mul(first, second), vector(F32, lanes))
        scaled = kb.ir.fmul(product, kb.splat(F32, self.factor, lanes))
        steps = kb.ir.fadd(scaled, kb.splat(F32, float(self.output_zero_point), lanes))
        return _as_bytes(kb, _rounded(kb, steps), self.is_signed)
