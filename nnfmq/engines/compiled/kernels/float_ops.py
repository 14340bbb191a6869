"""float32 in vectors: comparisons that keep NaN, and the exponential functions as polynomials."""

from __future__ import annotations

import math

from nnfmq.engines.compiled.emission import F32, I32, Emitter, Value, vector

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


def clamp_float(e: Emitter, value: Value, low: float, high: float) -> Value:
    """Return `value` held within [low, high]; NaN stays."""
    lanes = value.type.count
    if low > -math.inf:
        least = e.splat(F32, low, lanes)
        value = e.b.select(e.b.fcmp_ordered(">", least, value), least, value)
    if high < math.inf:
        most = e.splat(F32, high, lanes)
        value = e.b.select(e.b.fcmp_ordered("<", most, value), most, value)
    return value


def fmaximum(e: Emitter, first: Value, second: Value) -> Value:
    """Return the greater of two, or the one that is NaN."""
    return _winner(e, ">", first, second)


def fminimum(e: Emitter, first: Value, second: Value) -> Value:
    """Return the lesser of two, or the one that is NaN."""
    return _winner(e, "<", first, second)


def _winner(e: Emitter, order: str, first: Value, second: Value) -> Value:
    ordered = e.b.select(e.b.fcmp_ordered(order, first, second), first, second)
    return e.b.select(e.b.fcmp_unordered("uno", first, first), first, ordered)


_LN2_HIGH = 355 / 512  # times any exponent exact
_LN2_LOW = math.log(2) - _LN2_HIGH
_ROUNDING = 1.5 * 2**23  # added to a number below 2^22 it leaves the nearest whole number in the last bits
_TAIL = (0.001388239577, 0.008367180859, 0.041667221268, 0.16666538683, 0.499999980418)
# (e^r - 1 - r) / r^2 for |r| <= ln(2) / 2, the highest power first, fitted so that e^r - 1 is within 2^-26 of itself


def exp(e: Emitter, value: Value) -> Value:
    """Return e^x; beyond float32's range 0 and infinity."""
    small, power = _reduced(e, clamp_float(e, value, -104.0, 89.0))
    lanes = value.type.count
    half = e.b.ashr(power, e.splat(I32, 1, lanes))
    result = e.b.fadd(small, e.splat(F32, 1.0, lanes))
    for part in (half, e.b.sub(power, half)):  # the power itself may have no float32
        result = e.b.fmul(result, _power_of_two(e, part))
    return result


def expm1(e: Emitter, value: Value) -> Value:
    """Return e^x - 1 for x <= 0, also near 0 with all its bits."""
    small, power = _reduced(e, clamp_float(e, value, -30.0, 0.0))
    scale = _power_of_two(e, power)
    return fmuladd(e, scale, small, e.b.fsub(scale, e.splat(F32, 1.0, value.type.count)))


def scalarized_call(e: Emitter, name: str, *values: Value) -> Value:
    """Return what the C library makes of each element: `name` is an intrinsic without its type."""
    result = values[0]
    for lane in range(result.type.count):
        single = [e.b.extract_element(value, e.i64(lane)) for value in values]
        result = e.b.insert_element(result, e.intrinsic(name, *single), e.i64(lane))
    return result


def log(e: Emitter, value: Value) -> Value:
    """Return ln(x)."""
    return scalarized_call(e, "llvm.log", value)


def logistic(e: Emitter, value: Value) -> Value:
    """Return 1 / (1 + e^-x)."""
    one = e.splat(F32, 1.0, value.type.count)
    return e.b.fdiv(one, e.b.fadd(one, exp(e, e.b.fneg(value))))


def tanh(e: Emitter, value: Value) -> Value:
    """Return tanh(x), from (1 - e^-2|x|) / (1 + e^-2|x|)."""
    lanes = value.type.count
    doubled = e.b.fmul(e.intrinsic("llvm.fabs", value), e.splat(F32, -2.0, lanes))
    less = expm1(e, doubled)
    positive = e.b.fdiv(e.b.fneg(less), e.b.fadd(less, e.splat(F32, 2.0, lanes)))
    return e.intrinsic("llvm.copysign", positive, value)


def fmuladd(e: Emitter, first: Value, second: Value, third: Value) -> Value:
    """Return first · second + third, rounded once where the target has an instruction for it."""
    return e.intrinsic("llvm.fmuladd", first, second, third)


def _reduced(e: Emitter, value: Value) -> tuple[Value, Value]:
    """Return e^r - 1 and the whole number n of x = n·ln(2) + r."""
    lanes = value.type.count
    whole = e.splat(F32, _ROUNDING, lanes)
    shifted = fmuladd(e, value, e.splat(F32, 1 / math.log(2), lanes), whole)
    power = e.b.fsub(shifted, whole)
    rest = fmuladd(e, power, e.splat(F32, -_LN2_HIGH, lanes), value)
    rest = fmuladd(e, power, e.splat(F32, -_LN2_LOW, lanes), rest)
    tail = e.splat(F32, _TAIL[0], lanes)
    for coefficient in _TAIL[1:]:
        tail = fmuladd(e, tail, rest, e.splat(F32, coefficient, lanes))
    kind = vector(I32, lanes)
    number = e.b.sub(e.b.bitcast(shifted, kind), e.b.bitcast(whole, kind))
    return fmuladd(e, tail, e.b.fmul(rest, rest), rest), number


def _power_of_two(e: Emitter, power: Value) -> Value:
    lanes = power.type.count
    biased = e.b.add(power, e.splat(I32, 127, lanes))
    return e.b.bitcast(e.b.shl(biased, e.splat(I32, 23, lanes)), vector(F32, lanes))
