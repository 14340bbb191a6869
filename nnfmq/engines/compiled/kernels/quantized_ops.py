"""Functions of 8-bit codes, for `elementwise`: exact, by the reference's roundings or by its tables.

Numbers that come from scales are constants in memory, so that operations of one shape share their code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nnfmq.engines.compiled.ir_builder import F32, I8, I32, I64, KernelBuilder, Value, vector
from nnfmq.engines.compiled.kernels.functions import bool_bytes, compare
from nnfmq.engines.compiled.kernels.reducers import QuantizedMinMaxReducer
from nnfmq.engines.compiled.kernels.requantize import REQUANT_ROWS, FixedPointMultiplier, requant_constants
from nnfmq.operations.quantization import OutputMultipliers, quantized_activation_range
from nnfmq.operations.signature import Tensor

__all__ = [
    "Dequantize",
    "Lut8",
    "PerTensorRequantization",
    "Quantize",
    "QuantizedAdd",
    "QuantizedClamp",
    "QuantizedCompare",
    "QuantizedMinMax",
    "QuantizedMul",
    "QuantizedPrelu",
    "QuantizedSelect",
    "per_tensor_requantization",
]

_LANES = 64  # constants are repeated to more than the widest vector


@dataclass(frozen=True, slots=True)
class PerTensorRequantization:
    """Codes of whole numbers, by one multiplier for all."""

    multiplier: FixedPointMultiplier

    def codes(self, kb: KernelBuilder, values: Value, constants: Value) -> Value:
        """Return bytes."""
        lanes = values.type.count
        if lanes == 1:  # products are taken in pairs
            pair = self.codes(kb, kb.shuffle(values, values, (0, 0)), constants)
            return kb.shuffle(pair, pair, (0,))
        if not self.multiplier.has_left_shift:
            values = kb.ir.add(values, values)
        rounded = self.multiplier.apply(kb, values, lambda row: _row(kb, constants, row, lanes))
        zero, low, high = (_row(kb, constants, REQUANT_ROWS + n, lanes) for n in range(3))
        return kb.ir.trunc(kb.clamp(kb.ir.add(rounded, zero), low, high), vector(I8, lanes))


def per_tensor_requantization(
    multiplier: tuple[int, int], bound: int, activation: int, output: Tensor
) -> tuple[PerTensorRequantization, bytes] | None:
    """Return the form and the constants for a quantized multiplier (mantissa, shift), None where 32 bits do not do.

    `bound` is on the absolute values of what is scaled to codes of `output`.
    """
    multipliers = OutputMultipliers(np.full(_LANES, multiplier[0], np.int64), np.full(_LANES, multiplier[1], np.int64))
    found = FixedPointMultiplier.of(multipliers, np.zeros(_LANES, np.int64), np.full(_LANES, bound, np.int64))
    if found is None:
        return None
    codes = repeated(output.zero_point, *quantized_activation_range(activation, output))
    return PerTensorRequantization(found), requant_constants(multipliers).tobytes() + codes


def repeated(*numbers: int) -> bytes:
    """Return whole numbers of 32 bits as rows that vectors load."""
    return np.repeat(np.array(numbers, np.int64).astype("<i4"), _LANES).tobytes()


def _row(kb: KernelBuilder, constants: Value, row: int, lanes: int) -> Value:
    return kb.load(vector(I32, lanes), constants, 4 * _LANES * row)


def _whole(kb: KernelBuilder, codes: Value, signed: bool) -> Value:
    return (kb.ir.sext if signed else kb.ir.zext)(codes, vector(I32, codes.type.count))


def lut8_lookup(kb: KernelBuilder, codes: Value, table: Value) -> Value:
    """Return table[code] for each lane, codes by their bits."""
    result = codes
    for lane in range(codes.type.count):
        code = kb.ir.zext(kb.ir.extract_element(codes, kb.i64(lane)), I64)
        result = kb.ir.insert_element(result, kb.load(I8, table, code), kb.i64(lane))
    return result


class _OfCodes:
    result = "u1"
    vectors = 2


class _OfTwo(_OfCodes):
    items: tuple[str, ...] = ("u1", "u1")


class _OfOne(_OfCodes):
    items: tuple[str, ...] = ("u1",)


@dataclass(frozen=True, slots=True)
class Lut8(_OfOne):
    """Any function of one code. Constant: 256 results, by the bits of the code."""

    constants = 1

    def emit(self, kb: KernelBuilder, values: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        return lut8_lookup(kb, values[0], constants[0])


@dataclass(frozen=True, slots=True)
class QuantizedClamp(_OfOne):
    """Codes held within two bounds."""

    signed: bool
    low: int
    high: int

    constants = 0
    vectors = 8

    def emit(self, kb: KernelBuilder, values: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        return QuantizedMinMaxReducer(self.signed, True, self.low, self.high).result(kb, values[0], 1)


@dataclass(frozen=True, slots=True)
class QuantizedAdd(_OfTwo):
    """ADD and SUB: both operands in units of a common scale / 2^20, their sum scaled.

    An operand that is `halved` has the larger scale, which is half of the common one: its multiplier is 1/2 (with the
    sign of SUB in `negated`). Others are (x·m + 2^10) >> 11 with m in two parts, then shifted with ties away from 0.
    Constants: those of the operands, zero point first; those of the sum.
    """

    signed: tuple[bool, bool]
    halved: tuple[bool, bool]
    negated: bool
    scaled: PerTensorRequantization

    constants = 3

    @staticmethod
    def operand(zero_point: int, multiplier: tuple[int, int], sign: int) -> bytes:
        """Return the constants of an operand."""
        mantissa, right = sign * multiplier[0], -multiplier[1]
        return repeated(zero_point, mantissa >> 11, mantissa & 2047, (1 << right) >> 1, right)

    def emit(self, kb: KernelBuilder, values: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        first, second = (self._addend(kb, number, values[number], constants[number]) for number in (0, 1))
        return self.scaled.codes(kb, kb.ir.add(first, second), constants[2])

    def _addend(self, kb: KernelBuilder, number: int, codes: Value, constants: Value) -> Value:
        lanes = codes.type.count
        zero_point, high, low, half, right = (_row(kb, constants, row, lanes) for row in range(5))
        centred = kb.ir.sub(_whole(kb, codes, self.signed[number]), zero_point)
        if self.halved[number]:
            shifted = kb.ir.shl(centred, kb.splat(I32, 19, lanes))
            return kb.ir.neg(shifted) if number and self.negated else shifted
        rest = kb.ir.add(kb.ir.mul(centred, low), kb.splat(I32, 1 << 10, lanes))
        value = kb.ir.add(kb.ir.mul(centred, high), kb.ir.ashr(rest, kb.splat(I32, 11, lanes)))
        tie = kb.ir.ashr(value, kb.splat(I32, 31, lanes))
        return kb.ir.ashr(kb.ir.add(kb.ir.add(value, half), tie), right)


@dataclass(frozen=True, slots=True)
class QuantizedMul(_OfTwo):
    """MUL: the product of the centred codes, scaled. Constants: both zero points; those of the product."""

    signed: tuple[bool, bool]
    scaled: PerTensorRequantization

    constants = 2

    def emit(self, kb: KernelBuilder, values: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        return self.scaled.codes(kb, kb.ir.mul(*_both_centred(kb, values, self.signed, constants[0])), constants[1])


def _both_centred(
    kb: KernelBuilder, values: Sequence[Value], signed: tuple[bool, bool], zero_points: Value
) -> tuple[Value, Value]:
    first, second = (
        kb.ir.sub(_whole(kb, value, sign), _row(kb, zero_points, row, value.type.count))
        for row, (value, sign) in enumerate(zip(values, signed, strict=True))
    )
    return first, second


@dataclass(frozen=True, slots=True)
class QuantizedPrelu(_OfTwo):
    """PRELU: what passes is scaled by one multiplier, products with a slope by another.

    Constants: both zero points; those of what passes; those of products.
    """

    signed: tuple[bool, bool]
    passed: PerTensorRequantization
    sloped: PerTensorRequantization

    constants = 3

    def emit(self, kb: KernelBuilder, values: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        centred, slopes = _both_centred(kb, values, self.signed, constants[0])
        passes = kb.ir.icmp_signed(">=", centred, kb.splat(I32, 0, centred.type.count))
        passed = self.passed.codes(kb, centred, constants[1])
        return kb.ir.select(passes, passed, self.sloped.codes(kb, kb.ir.mul(centred, slopes), constants[2]))


@dataclass(frozen=True, slots=True)
class QuantizedMinMax(_OfTwo):
    """MAXIMUM and MINIMUM; operands that are `adapted` go through a table first, which is a constant."""

    signed: bool
    greatest: bool
    adapted: tuple[bool, bool]

    @property
    def constants(self) -> int:
        """One for each that is adapted."""
        return sum(self.adapted)

    def emit(self, kb: KernelBuilder, values: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        return QuantizedMinMaxReducer(self.signed, self.greatest, 0, 0).joined(
            kb, *_adapted(kb, values, self.adapted, constants)
        )


@dataclass(frozen=True, slots=True)
class QuantizedSelect(_OfCodes):
    """SELECT; operands that are `adapted` go through a table first, which is a constant."""

    adapted: tuple[bool, bool]

    items = ("u1", "u1", "u1")

    @property
    def constants(self) -> int:
        """One for each that is adapted."""
        return sum(self.adapted)

    def emit(self, kb: KernelBuilder, values: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        chosen = kb.ir.icmp_unsigned("!=", values[0], kb.splat(I8, 0, values[0].type.count))
        return kb.ir.select(chosen, *_adapted(kb, values[1:], self.adapted, constants))


def _adapted(
    kb: KernelBuilder, values: Sequence[Value], adapted: tuple[bool, bool], constants: Sequence[Value]
) -> list[Value]:
    tables = iter(constants)
    return [
        lut8_lookup(kb, value, next(tables)) if needed else value for value, needed in zip(values, adapted, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Dequantize(_OfOne):
    """The float32 values of codes."""

    signed: bool
    zero_point: int
    scale: float

    result = "f4"
    constants = 0

    def emit(self, kb: KernelBuilder, values: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        return _real(kb, values[0], self.signed, self.zero_point, self.scale)


def _real(kb: KernelBuilder, codes: Value, signed: bool, zero_point: int, scale: float) -> Value:
    lanes = codes.type.count
    centred = kb.ir.sub(_whole(kb, codes, signed), kb.splat(I32, zero_point, lanes))
    return kb.ir.fmul(kb.ir.sitofp(centred, vector(F32, lanes)), kb.splat(F32, scale, lanes))


@dataclass(frozen=True, slots=True)
class QuantizedCompare(_OfTwo):
    """Whether the values of two codes are in an order. `operands` are (signed, zero point, scale)."""

    order: str
    operands: tuple[tuple[bool, int, float], tuple[bool, int, float]]

    constants = 0

    def emit(self, kb: KernelBuilder, values: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        first, second = (_real(kb, value, *operand) for value, operand in zip(values, self.operands, strict=True))
        return bool_bytes(kb, compare(kb, self.order, first, second))


@dataclass(frozen=True, slots=True)
class Quantize(_OfCodes):
    """Codes of float32: the quotient in float32, rounded half away from 0; NaN becomes the zero point."""

    zero_point: int
    scale: float
    low: int
    high: int

    items = ("f4",)
    constants = 0

    def emit(self, kb: KernelBuilder, values: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        lanes = values[0].type.count
        kind, wide = vector(F32, lanes), vector(I32, lanes)
        quotient = kb.ir.fdiv(values[0], kb.splat(F32, self.scale, lanes))
        size = kb.intrinsic("llvm.fabs", quotient)
        most = kb.splat(F32, 1024.0, lanes)  # beyond any code; what is below has exact halves
        held = kb.ir.select(kb.ir.fcmp_ordered("<", size, most), size, most)
        whole = kb.ir.fptosi(held, wide)
        rest = kb.ir.fsub(held, kb.ir.sitofp(whole, kind))
        up = kb.ir.zext(kb.ir.fcmp_ordered(">=", rest, kb.splat(F32, 0.5, lanes)), wide)
        steps, zero = kb.ir.add(whole, up), kb.splat(I32, 0, lanes)
        below = kb.ir.fcmp_ordered("<", quotient, kb.splat(F32, 0.0, lanes))
        signed = kb.ir.select(below, kb.ir.sub(zero, steps), steps)
        known = kb.ir.select(kb.ir.fcmp_ordered("ord", quotient, quotient), signed, zero)
        codes = kb.ir.add(known, kb.splat(I32, self.zero_point, lanes))
        return kb.ir.trunc(
            kb.clamp(codes, kb.splat(I32, self.low, lanes), kb.splat(I32, self.high, lanes)), vector(I8, lanes)
        )
