"""float32 in vectors: comparisons that keep NaN, and the exponential functions as polynomials."""

from __future__ import annotations

import math

from nnfmq.engines.compiled.ir_builder import F32, I32, KernelBuilder, Value, vector

__all__ = [
    "clamp_float",
    "exp",
    "expm1",
    "fmaximum",
    "fminimum",
    "fmuladd",
    "log",
    "logistic",
    "scalarized_call",
    "tanh",
]


def clamp_float(kb: KernelBuilder, value: Value, low: float, high: float) -> Value:
    """Return `value` held within [low, high]; NaN stays."""
    lanes = value.type.count
    if low > -math.inf:
        least = kb.splat(F32, low, lanes)
        value = kb.ir.select(kb.ir.fcmp_ordered(">", least, value), least, value)
    if high < math.inf:
        most = kb.splat(F32, high, lanes)
        value = kb.ir.select(kb.ir.fcmp_ordered("<", most, value), most, value)
    return value


def fmaximum(kb: KernelBuilder, first: Value, second: Value) -> Value:
    """Return the greater of two, or the one that is NaN."""
    return _winner(kb, ">", first, second)


def fminimum(kb: KernelBuilder, first: Value, second: Value) -> Value:
    """Return the lesser of two, or the one that is NaN."""
    return _winner(kb, "<", first, second)


def _winner(kb: KernelBuilder, order: str, first: Value, second: Value) -> Value:
    ordered = kb.ir.select(kb.ir.fcmp_ordered(order, first, second), first, second)
    return kb.ir.select(kb.ir.fcmp_unordered("uno", first, first), first, ordered)


_LN2_HIGH = 355 / 512  # times any exponent exact
_LN2_LOW = math.log(2) - _LN2_HIGH
_ROUNDING = 1.5 * 2**23  # added to a number below 2^22 it leaves the nearest whole number in the last bits
_TAIL = (0.001388239577, 0.008367180859, 0.041667221268, 0.16666538683, 0.499999980418)
# (e^r - 1 - r) / r^2 for |r| <= ln(2) / 2, the highest power first, fitted so that e^r - 1 is within 2^-26 of itself


def exp(kb: KernelBuilder, value: Value) -> Value:
    """Return e^x; beyond float32's range 0 and infinity."""
    small, power = _reduced(kb, clamp_float(kb, value, -104.0, 89.0))
    lanes = value.type.count
    half = kb.ir.ashr(power, kb.splat(I32, 1, lanes))
    result = kb.ir.fadd(small, kb.splat(F32, 1.0, lanes))
    for part in (half, kb.ir.sub(power, half)):  # the power itself may have no float32
        result = kb.ir.fmul(result, _power_of_two(kb, part))
    return result


def expm1(kb: KernelBuilder, value: Value) -> Value:
    """Return e^x - 1 for x <= 0, also near 0 with all its bits."""
    small, power = _reduced(kb, clamp_float(kb, value, -30.0, 0.0))
    scale = _power_of_two(kb, power)
    return fmuladd(kb, scale, small, kb.ir.fsub(scale, kb.splat(F32, 1.0, value.type.count)))


def scalarized_call(kb: KernelBuilder, name: str, *values: Value) -> Value:
    """Return what the C library makes of each element: `name` is an intrinsic without its type."""
    result = values[0]
    for lane in range(result.type.count):
        single = [kb.ir.extract_element(value, kb.i64(lane)) for value in values]
        result = kb.ir.insert_element(result, kb.intrinsic(name, *single), kb.i64(lane))
    return result


def log(kb: KernelBuilder, value: Value) -> Value:
    """Return ln(x)."""
    return scalarized_call(kb, "llvm.log", value)


def logistic(kb: KernelBuilder, value: Value) -> Value:
    """Return 1 / (1 + e^-x)."""
    one = kb.splat(F32, 1.0, value.type.count)
    return kb.ir.fdiv(one, kb.ir.fadd(one, exp(kb, kb.ir.fneg(value))))


def tanh(kb: KernelBuilder, value: Value) -> Value:
    """Return tanh(x), from (1 - e^-2|x|) / (1 + e^-2|x|)."""
    lanes = value.type.count
    doubled = kb.ir.fmul(kb.intrinsic("llvm.fabs", value), kb.splat(F32, -2.0, lanes))
    less = expm1(kb, doubled)
    positive = kb.ir.fdiv(kb.ir.fneg(less), kb.ir.fadd(less, kb.splat(F32, 2.0, lanes)))
    return kb.intrinsic("llvm.copysign", positive, value)


def fmuladd(kb: KernelBuilder, first: Value, second: Value, third: Value) -> Value:
    """Return first · second + third, rounded once where the target has an instruction for it."""
    return kb.intrinsic("llvm.fmuladd", first, second, third)


def _reduced(kb: KernelBuilder, value: Value) -> tuple[Value, Value]:
    """Return e^r - 1 and the whole number n of x = n·ln(2) + r."""
    lanes = value.type.count
    whole = kb.splat(F32, _ROUNDING, lanes)
    shifted = fmuladd(kb, value, kb.splat(F32, 1 / math.log(2), lanes), whole)
    power = kb.ir.fsub(shifted, whole)
    rest = fmuladd(kb, power, kb.splat(F32, -_LN2_HIGH, lanes), value)
    rest = fmuladd(kb, power, kb.splat(F32, -_LN2_LOW, lanes), rest)
    tail = kb.splat(F32, _TAIL[0], lanes)
    for coefficient in _TAIL[1:]:
        tail = fmuladd(kb, tail, rest, kb.splat(F32, coefficient, lanes))
    kind = vector(I32, lanes)
    number = kb.ir.sub(kb.ir.bitcast(shifted, kind), kb.ir.bitcast(whole, kind))
    return fmuladd(kb, tail, kb.ir.fmul(rest, rest), rest), number


def _power_of_two(kb: KernelBuilder, power: Value) -> Value:
    lanes = power.type.count
    biased = kb.ir.add(power, kb.splat(I32, 127, lanes))
    return kb.ir.bitcast(kb.ir.shl(biased, kb.splat(I32, 23, lanes)), vector(F32, lanes))
