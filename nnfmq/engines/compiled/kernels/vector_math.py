"""Vector math for float32: functions of one vector, built from instructions.

exp, expm1, log, softplus, mish, logistic, tanh, erf and erfc are polynomials after range reduction, in vectors. Other
functions call the C library for each lane. Minimum and maximum propagate NaN (IEEE 754-2019 `minimum` and `maximum`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from nnfmq.engines.compiled.ir_builder import F32, F64, I32, I64, KernelBuilder, Value, VectorType, vector
from nnfmq.operations.unary import ERFC_POLYNOMIAL

__all__ = [
    "clamp_float",
    "erf",
    "erfc",
    "exp",
    "expm1",
    "fmaximum",
    "fminimum",
    "fmuladd",
    "log",
    "logistic",
    "mish",
    "scalarized_call",
    "softplus",
    "subnormal_exp",
    "tanh",
]


def clamp_float(kb: KernelBuilder, value: Value, low: float, high: float) -> Value:
    """Return `value` clamped to [low, high]. NaN stays NaN; infinite bounds take no instruction."""
    lanes = value.type.count
    if low > -math.inf:
        minimum = kb.splat(F32, low, lanes)
        value = kb.ir.select(kb.ir.fcmp_ordered(">", minimum, value), minimum, value)
    if high < math.inf:
        maximum = kb.splat(F32, high, lanes)
        value = kb.ir.select(kb.ir.fcmp_ordered("<", maximum, value), maximum, value)
    return value


def fmaximum(kb: KernelBuilder, first: Value, second: Value) -> Value:
    """Return the maximum of two vectors; NaN if either is NaN."""
    return _extremum(kb, ">", first, second)


def fminimum(kb: KernelBuilder, first: Value, second: Value) -> Value:
    """Return the minimum of two vectors; NaN if either is NaN."""
    return _extremum(kb, "<", first, second)


def _extremum(kb: KernelBuilder, order: str, first: Value, second: Value) -> Value:
    # An ordered comparison with NaN is false, so `second` is taken: only a NaN in `first` needs another select.
    ordered = kb.ir.select(kb.ir.fcmp_ordered(order, first, second), first, second)
    return kb.ir.select(kb.ir.fcmp_unordered("uno", first, first), first, ordered)


_LN2_HIGH = 355 / 512  # 9 significant bits: exact times any exponent
_LN2_LOW = math.log(2) - _LN2_HIGH
_ROUND_TO_INTEGER = 1.5 * 2**23  # added to |x| < 2^22, it leaves the nearest integer in the significand's last bits
_EXPM1_POLYNOMIAL = (0.499999980418, 0.16666538683, 0.041667221268, 0.008367180859, 0.001388239577)
# Coefficients of (e^r - 1 - r) / r^2 for |r| <= ln(2) / 2, lowest power first, fitted so that the relative error of
# e^r - 1 is below 2^-26.

_MIN_NORMAL_BITS, _INFINITY_BITS, _SQRT_HALF_BITS = 0x0080_0000, 0x7F80_0000, 0x3F35_04F3
_LOG_TERMS, _LOG1P_TERMS = 5, 8  # the next terms are below 2^-26 of the sum for s² up to 0.03 and 1/9

_LEAST_NORMAL_LOG = -87.33  # e^x is a normal number from here on: 1.0009 times the least one
_SUBNORMAL_LOG = -87.0  # below, x = n·ln(2) + r has n <= -126, and e^x may be subnormal


def exp(kb: KernelBuilder, value: Value) -> Value:
    """Return e^x; infinity if that is too large for float32, 0 if it is less than the least normal number.

    An instruction with a subnormal number takes about 150 cycles on many CPUs, also in what follows a softmax.
    """
    fraction, exponent = _reduced_expm1(kb, clamp_float(kb, value, _LEAST_NORMAL_LOG, 89.0))
    lanes = value.type.count
    result = _scaled(kb, kb.ir.fadd(fraction, kb.splat(F32, 1.0, lanes)), exponent)
    is_small = kb.ir.fcmp_ordered("<", value, kb.splat(F32, _LEAST_NORMAL_LOG, lanes))
    return kb.ir.select(is_small, kb.splat(F32, 0.0, lanes), result)


def subnormal_exp(kb: KernelBuilder, value: Value) -> Value:
    """Return e^x, subnormal numbers included; 0 and infinity if the result is outside of float32's range.

    A subnormal result is rounded to an integer number of 2^-149, whose bits are those of the result: no instruction
    computes with a subnormal number, which would take about 150 cycles on many CPUs.
    """
    fraction, exponent = _reduced_expm1(kb, clamp_float(kb, value, -104.0, 89.0))
    lanes, kind = value.type.count, vector(I32, value.type.count)
    one, least = kb.splat(F32, 1.0, lanes), kb.splat(I32, -126, lanes)
    significand = kb.ir.fadd(fraction, one)
    is_small = kb.ir.fcmp_ordered("<", value, kb.splat(F32, _SUBNORMAL_LOG, lanes))
    smallest = kb.ir.select(kb.ir.icmp_signed("<", exponent, least), exponent, least)
    scale = _power_of_two(kb, kb.ir.add(smallest, kb.splat(I32, 149, lanes)))
    units = kb.intrinsic("llvm.nearbyint", kb.ir.fmul(significand, scale))
    largest = kb.ir.select(is_small, kb.splat(I32, 0, lanes), exponent)
    normal = _scaled(kb, kb.ir.select(is_small, one, significand), largest)
    return kb.ir.select(is_small, kb.ir.bitcast(kb.ir.fptosi(units, kind), normal.type), normal)


def _scaled(kb: KernelBuilder, value: Value, exponent: Value) -> Value:
    """Return `value` times 2^exponent, which alone may be outside of float32's range."""
    half = kb.ir.ashr(exponent, kb.splat(I32, 1, value.type.count))
    for part in (half, kb.ir.sub(exponent, half)):
        value = kb.ir.fmul(value, _power_of_two(kb, part))
    return value


def expm1(kb: KernelBuilder, value: Value) -> Value:
    """Return e^x - 1 for x <= 0, with full relative precision near 0."""
    fraction, exponent = _reduced_expm1(kb, clamp_float(kb, value, -30.0, 0.0))
    scale = _power_of_two(kb, exponent)
    return fmuladd(kb, scale, fraction, kb.ir.fsub(scale, kb.splat(F32, 1.0, value.type.count)))


def scalarized_call(kb: KernelBuilder, name: str, *values: Value) -> Value:
    """Call a function of the C library, such as `sinf`, for each lane."""
    result = values[0]
    for lane in range(result.type.count):
        scalars = [kb.ir.extract_element(value, kb.i64(lane)) for value in values]
        result = kb.ir.insert_element(result, kb.call(name, F32, *scalars), kb.i64(lane))
    return result


def log(kb: KernelBuilder, value: Value) -> Value:
    """Return the natural logarithm. No instruction computes with a subnormal number, which would be slow."""
    lanes, kind = value.type.count, value.type
    bits = kb.ir.bitcast(value, vector(I32, lanes))
    is_subnormal = kb.ir.icmp_unsigned("<", bits, kb.splat(I32, _MIN_NORMAL_BITS, lanes))
    scaled = kb.ir.bitcast(kb.ir.sitofp(bits, kind), vector(I32, lanes))  # x · 2^149
    bits = kb.ir.select(is_subnormal, scaled, bits)
    # x = 2^n · m with m from √½ to √2; log(m) is a series of (m - 1) / (m + 1).
    distance = kb.ir.sub(bits, kb.splat(I32, _SQRT_HALF_BITS, lanes))
    exponent = kb.ir.ashr(distance, kb.splat(I32, 23, lanes))
    significand = kb.ir.bitcast(kb.ir.sub(bits, kb.ir.shl(exponent, kb.splat(I32, 23, lanes))), kind)
    bias = kb.ir.select(is_subnormal, kb.splat(I32, 149, lanes), kb.splat(I32, 0, lanes))
    power = kb.ir.sitofp(kb.ir.sub(exponent, bias), kind)
    result = _log_near_one(kb, kb.ir.fsub(significand, kb.splat(F32, 1.0, lanes)), _LOG_TERMS)
    result = fmuladd(kb, power, kb.splat(F32, _LN2_LOW, lanes), result)
    result = fmuladd(kb, power, kb.splat(F32, _LN2_HIGH, lanes), result)
    return _with_special_values_of_log(kb, value, result)


def _with_special_values_of_log(kb: KernelBuilder, value: Value, result: Value) -> Value:
    """Return `result` with the logarithms of 0, of negative numbers, of infinity and of NaN."""
    lanes = value.type.count
    bits, zero = kb.ir.bitcast(value, vector(I32, lanes)), kb.splat(I32, 0, lanes)
    special = kb.ir.fadd(value, value)  # infinity, or NaN
    is_special = kb.ir.icmp_signed(">=", bits, kb.splat(I32, _INFINITY_BITS, lanes))
    result = kb.ir.select(is_special, special, result)
    result = kb.ir.select(kb.ir.icmp_signed("<", bits, zero), kb.splat(F32, math.nan, lanes), result)
    is_zero = kb.ir.icmp_signed("==", kb.ir.shl(bits, kb.splat(I32, 1, lanes)), zero)
    return kb.ir.select(is_zero, kb.splat(F32, -math.inf, lanes), result)


def _log_near_one(kb: KernelBuilder, less: Value, terms: int) -> Value:
    """Return log(1 + x) = 2s · (1 + s²/3 + s⁴/5 + ...) for x from √½ - 1 to 1, with s = x / (2 + x)."""
    lanes = less.type.count
    ratio = kb.ir.fdiv(less, kb.ir.fadd(less, kb.splat(F32, 2.0, lanes)))
    square = kb.ir.fmul(ratio, ratio)
    series = kb.splat(F32, float(np.float32(2 / (2 * terms - 1))), lanes)
    for number in range(terms - 2, -1, -1):
        series = fmuladd(kb, series, square, kb.splat(F32, float(np.float32(2 / (2 * number + 1))), lanes))
    return kb.ir.fmul(ratio, series)


def softplus(kb: KernelBuilder, value: Value) -> Value:
    """Return log(1 + e^x), as max(x, 0) + log(1 + e^-|x|)."""
    power = exp(kb, kb.ir.fneg(kb.intrinsic("llvm.fabs", value)))
    return kb.ir.fadd(clamp_float(kb, value, 0.0, math.inf), _log_near_one(kb, power, _LOG1P_TERMS))


def mish(kb: KernelBuilder, value: Value) -> Value:
    """Return x · tanh(softplus(x)), from the smaller one of e^x and e^-x."""
    lanes = value.type.count
    one, two = kb.splat(F32, 1.0, lanes), kb.splat(F32, 2.0, lanes)
    power = exp(kb, kb.ir.fneg(kb.intrinsic("llvm.fabs", value)))
    is_negative = kb.ir.fcmp_ordered("<", value, kb.splat(F32, 0.0, lanes))
    rising = kb.ir.fmul(power, kb.ir.fadd(power, two))
    above = kb.ir.select(is_negative, rising, fmuladd(kb, two, power, one))
    complement = kb.ir.select(is_negative, two, kb.ir.fmul(two, kb.ir.fmul(power, power)))
    return kb.ir.fmul(value, kb.ir.fdiv(above, kb.ir.fadd(above, complement)))


def logistic(kb: KernelBuilder, value: Value) -> Value:
    """Return 1 / (1 + e^-x)."""
    one = kb.splat(F32, 1.0, value.type.count)
    return kb.ir.fdiv(one, kb.ir.fadd(one, exp(kb, kb.ir.fneg(value))))


def tanh(kb: KernelBuilder, value: Value) -> Value:
    """Return the hyperbolic tangent, as (1 - e^-2|x|) / (1 + e^-2|x|) with the sign of x."""
    lanes = value.type.count
    exponent = kb.ir.fmul(kb.intrinsic("llvm.fabs", value), kb.splat(F32, -2.0, lanes))
    less = expm1(kb, exponent)
    positive = kb.ir.fdiv(kb.ir.fneg(less), kb.ir.fadd(less, kb.splat(F32, 2.0, lanes)))
    return kb.intrinsic("llvm.copysign", positive, value)


_ERF_SERIES = tuple((-1) ** k / (math.factorial(k) * (2 * k + 1)) * 2 / math.sqrt(math.pi) for k in range(6))
# The Taylor series of erf(x) / x in x²: to 1e-7 for |x| < 1/2.


def erf(kb: KernelBuilder, value: Value) -> Value:
    """Return the error function, to 3e-7 of itself."""
    lanes = value.type.count
    size = kb.intrinsic("llvm.fabs", value)
    far = kb.ir.fsub(kb.splat(F32, 1.0, lanes), erfc(kb, size))
    near = kb.ir.fmul(size, polynomial(kb, kb.ir.fmul(size, size), _ERF_SERIES))
    is_near = kb.ir.fcmp_ordered("<", size, kb.splat(F32, 0.5, lanes))
    return kb.intrinsic("llvm.copysign", kb.ir.select(is_near, near, far), value)


def erfc(kb: KernelBuilder, value: Value) -> Value:
    """Return 1 - erf(x) for x >= 0, to 1e-5 of itself while it is a normal number."""
    lanes = value.type.count
    one = kb.splat(F32, 1.0, lanes)
    t = kb.ir.fdiv(one, fmuladd(kb, value, kb.splat(F32, 0.5, lanes), one))
    exponent = fmuladd(kb, kb.ir.fneg(value), value, polynomial(kb, t, ERFC_POLYNOMIAL))
    return kb.ir.fmul(t, exp(kb, exponent))


def polynomial(kb: KernelBuilder, value: Value, coefficients: Sequence[float]) -> Value:
    """Return a polynomial with these coefficients, the lowest power's first."""
    lanes = value.type.count
    *lower, result = (kb.splat(F32, float(np.float32(number)), lanes) for number in coefficients)
    for coefficient in reversed(lower):
        result = fmuladd(kb, result, value, coefficient)
    return result


def fmuladd(kb: KernelBuilder, first: Value, second: Value, addend: Value) -> Value:
    """Return first · second + addend, rounded once; on a target that neither has nor emulates FMA, rounded twice."""
    if kb.target.has_fma:
        return kb.intrinsic("llvm.fma", first, second, addend)
    if not kb.target.emulates_fma:
        return kb.ir.fadd(kb.ir.fmul(first, second), addend)
    if not isinstance(addend.type, VectorType):
        vectors = (kb.broadcast(value, 1) for value in (first, second, addend))
        return kb.ir.extract_element(_emulated_fma(kb, *vectors), kb.i64(0))
    return _emulated_fma(kb, first, second, addend)


def _emulated_fma(kb: KernelBuilder, first: Value, second: Value, addend: Value) -> Value:
    """Return float32 first · second + addend, rounded once.

    The product is exact in float64. The sum is rounded to odd there: it has so many more bits than float32 that the
    second rounding then gives what a single one would (Boldo and Melquiond, Emulation of a FMA and correctly rounded
    sums, 2008). Its error is known exactly (Knuth's TwoSum). Infinities and NaN have no error that compares with 0.
    """
    lanes = addend.type.count
    wide, bits = vector(F64, lanes), vector(I64, lanes)
    zero, one = kb.splat(I64, 0, lanes), kb.splat(I64, 1, lanes)
    left, right, added = (kb.ir.fpext(value, wide) for value in (first, second, addend))
    product = kb.ir.fmul(left, right)
    total = kb.ir.fadd(product, added)
    part = kb.ir.fsub(total, product)
    error = kb.ir.fadd(kb.ir.fsub(product, kb.ir.fsub(total, part)), kb.ir.fsub(added, part))
    found = kb.ir.bitcast(total, bits)
    is_inexact = kb.ir.fcmp_ordered("!=", error, kb.splat(F64, 0.0, lanes))
    is_even = kb.ir.icmp_signed("==", kb.ir.and_(found, one), zero)
    away = kb.ir.or_(kb.ir.ashr(kb.ir.xor(found, kb.ir.bitcast(error, bits)), kb.splat(I64, 63, lanes)), one)
    step = kb.ir.select(kb.ir.and_(is_inexact, is_even), away, zero)
    return kb.ir.fptrunc(kb.ir.bitcast(kb.ir.add(found, step), wide), addend.type)


def _reduced_expm1(kb: KernelBuilder, value: Value) -> tuple[Value, Value]:
    """Return e^r - 1 and the integer n of x = n·ln(2) + r with |r| <= ln(2) / 2."""
    lanes = value.type.count
    rounding = kb.splat(F32, _ROUND_TO_INTEGER, lanes)
    shifted = fmuladd(kb, value, kb.splat(F32, 1 / math.log(2), lanes), rounding)
    power = kb.ir.fsub(shifted, rounding)
    remainder = fmuladd(kb, power, kb.splat(F32, -_LN2_HIGH, lanes), value)
    remainder = fmuladd(kb, power, kb.splat(F32, -_LN2_LOW, lanes), remainder)
    series = polynomial(kb, remainder, _EXPM1_POLYNOMIAL)
    kind = vector(I32, lanes)
    exponent = kb.ir.sub(kb.ir.bitcast(shifted, kind), kb.ir.bitcast(rounding, kind))
    return fmuladd(kb, series, kb.ir.fmul(remainder, remainder), remainder), exponent


def _power_of_two(kb: KernelBuilder, exponent: Value) -> Value:
    """Return 2^n for integers n from -126 to 127."""
    lanes = exponent.type.count
    biased = kb.ir.add(exponent, kb.splat(I32, 127, lanes))
    return kb.ir.bitcast(kb.ir.shl(biased, kb.splat(I32, 23, lanes)), vector(F32, lanes))
