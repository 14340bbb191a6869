"""Vector math for float32, and the elementwise operators of float32, INT32 and booleans.

exp, expm1, logistic, tanh and erf are polynomials after Cody-Waite range reduction, in vectors. log, sin and pow call
the C library for each lane. Minimum and maximum propagate NaN (IEEE 754-2019 `minimum` and `maximum`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nnfmq.engines.compiled.ir_builder import F32, F64, I8, I32, I64, KernelBuilder, Value, vector

__all__ = [
    "Cast",
    "Compare",
    "FloatBinary",
    "FloatClamp",
    "FloatUnary",
    "Int32Binary",
    "Int32Unary",
    "Logical",
    "Select",
    "bool_bytes",
    "clamp_float",
    "compare",
    "erf",
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


# -- vector math ------------------------------------------------------------------------------------------------------


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
_EXPM1_POLYNOMIAL = (0.001388239577, 0.008367180859, 0.041667221268, 0.16666538683, 0.499999980418)
# Coefficients of (e^r - 1 - r) / r^2 for |r| <= ln(2) / 2, highest power first, fitted so that the relative error of
# e^r - 1 is below 2^-26.


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
    """Call an intrinsic, `name` without type suffix, for each lane; LLVM lowers it to a call of the C library."""
    result = values[0]
    for lane in range(result.type.count):
        scalars = [kb.ir.extract_element(value, kb.i64(lane)) for value in values]
        result = kb.ir.insert_element(result, kb.intrinsic(name, *scalars), kb.i64(lane))
    return result


def log(kb: KernelBuilder, value: Value) -> Value:
    """Return the natural logarithm."""
    return scalarized_call(kb, "llvm.log", value)


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


_ERF_P = 0.3275911
_ERF_POLYNOMIAL = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
# Abramowitz and Stegun, 7.1.26: erf(x) = 1 - t * polynomial(t) * e^(-x^2), t = 1 / (1 + px), to 1.5e-7 for x >= 0.


def erf(kb: KernelBuilder, value: Value) -> Value:
    """Return the error function, to 3e-7."""
    lanes = value.type.count
    one, size = kb.splat(F32, 1.0, lanes), kb.intrinsic("llvm.fabs", value)
    t = kb.ir.fdiv(one, fmuladd(kb, size, kb.splat(F32, _ERF_P, lanes), one))
    polynomial = kb.splat(F32, _ERF_POLYNOMIAL[0], lanes)
    for coefficient in _ERF_POLYNOMIAL[1:]:
        polynomial = fmuladd(kb, polynomial, t, kb.splat(F32, coefficient, lanes))
    decay = exp(kb, kb.ir.fneg(kb.ir.fmul(size, size)))
    remainder = kb.ir.fmul(kb.ir.fmul(polynomial, t), decay)
    return kb.intrinsic("llvm.copysign", kb.ir.fsub(one, remainder), value)


def fmuladd(kb: KernelBuilder, first: Value, second: Value, addend: Value) -> Value:
    """Return first · second + addend, rounded once if the target has FMA instructions."""
    return kb.intrinsic("llvm.fmuladd", first, second, addend)


def _reduced_expm1(kb: KernelBuilder, value: Value) -> tuple[Value, Value]:
    """Return e^r - 1 and the integer n of x = n·ln(2) + r with |r| <= ln(2) / 2."""
    lanes = value.type.count
    rounding = kb.splat(F32, _ROUND_TO_INTEGER, lanes)
    shifted = fmuladd(kb, value, kb.splat(F32, 1 / math.log(2), lanes), rounding)
    power = kb.ir.fsub(shifted, rounding)
    remainder = fmuladd(kb, power, kb.splat(F32, -_LN2_HIGH, lanes), value)
    remainder = fmuladd(kb, power, kb.splat(F32, -_LN2_LOW, lanes), remainder)
    polynomial = kb.splat(F32, _EXPM1_POLYNOMIAL[0], lanes)
    for coefficient in _EXPM1_POLYNOMIAL[1:]:
        polynomial = fmuladd(kb, polynomial, remainder, kb.splat(F32, coefficient, lanes))
    kind = vector(I32, lanes)
    exponent = kb.ir.sub(kb.ir.bitcast(shifted, kind), kb.ir.bitcast(rounding, kind))
    return fmuladd(kb, polynomial, kb.ir.fmul(remainder, remainder), remainder), exponent


def _power_of_two(kb: KernelBuilder, exponent: Value) -> Value:
    """Return 2^n for integers n from -126 to 127."""
    lanes = exponent.type.count
    biased = kb.ir.add(exponent, kb.splat(I32, 127, lanes))
    return kb.ir.bitcast(kb.ir.shl(biased, kb.splat(I32, 23, lanes)), vector(F32, lanes))


# -- operators --------------------------------------------------------------------------------------------------------


_Unary = Callable[[KernelBuilder, Value, float], Value]
_Binary = Callable[[KernelBuilder, Value, Value], Value]


def _splat_like(kb: KernelBuilder, like: Value, number: float) -> Value:
    return kb.splat(F32, float(np.float32(number)), like.type.count)


def _hard_swish(kb: KernelBuilder, x: Value, _: float) -> Value:
    gate = clamp_float(kb, kb.ir.fadd(x, _splat_like(kb, x, 3)), 0.0, 6.0)
    return kb.ir.fmul(x, kb.ir.fmul(gate, _splat_like(kb, x, 1 / 6)))


def _elu(kb: KernelBuilder, x: Value, alpha: float) -> Value:
    negative = kb.ir.fmul(expm1(kb, x), _splat_like(kb, x, alpha))
    return kb.ir.select(kb.ir.fcmp_ordered("<", x, _splat_like(kb, x, 0)), negative, x)


def _gelu(kb: KernelBuilder, x: Value, is_approximate: float) -> Value:
    """Return x times the normal distribution, or its approximation by tanh."""
    if is_approximate:
        cube = kb.ir.fmul(kb.ir.fmul(x, _splat_like(kb, x, 0.044715)), kb.ir.fmul(x, x))
        function = tanh(kb, kb.ir.fmul(kb.ir.fadd(x, cube), _splat_like(kb, x, math.sqrt(2 / math.pi))))
    else:
        function = erf(kb, kb.ir.fmul(x, _splat_like(kb, x, math.sqrt(0.5))))
    return kb.ir.fmul(kb.ir.fmul(x, _splat_like(kb, x, 0.5)), kb.ir.fadd(function, _splat_like(kb, x, 1)))


def _prelu(kb: KernelBuilder, x: Value, slope: Value) -> Value:
    return kb.ir.select(kb.ir.fcmp_ordered(">=", x, _splat_like(kb, x, 0)), x, kb.ir.fmul(x, slope))


def _floor_div(kb: KernelBuilder, a: Value, b: Value) -> Value:
    """Return floor(a / b) of INT32; 0 if b is 0.

    The quotient is no integer or differs from the next one by at least 2^-31 of itself, which float64 resolves.
    """
    lanes, real, zero = a.type.count, vector(F64, a.type.count), kb.splat(I32, 0, a.type.count)
    by_zero = kb.ir.icmp_signed("==", b, zero)
    divisor = kb.ir.select(by_zero, kb.splat(I32, 1, lanes), b)
    quotient = kb.intrinsic("llvm.floor", kb.ir.fdiv(kb.ir.sitofp(a, real), kb.ir.sitofp(divisor, real)))
    wrapped = kb.ir.trunc(kb.ir.fptosi(quotient, vector(I64, lanes)), a.type)  # -2^31 / -1 wraps around
    return kb.ir.select(by_zero, zero, wrapped)


def _intrinsic(name: str) -> _Unary:
    return lambda kb, x, _: kb.intrinsic(name, x)


_FLOAT_UNARY: dict[str, tuple[int, _Unary]] = {  # vectors of a step (fewer if many registers are live), function
    "abs": (2, _intrinsic("llvm.fabs")),
    "elu": (1, _elu),
    "erf": (1, lambda kb, x, _: erf(kb, x)),
    "exp": (1, lambda kb, x, _: subnormal_exp(kb, x)),
    "floor": (2, _intrinsic("llvm.floor")),
    "gelu": (1, _gelu),
    "hard_swish": (2, _hard_swish),
    "log": (1, lambda kb, x, _: log(kb, x)),
    "logistic": (1, lambda kb, x, _: logistic(kb, x)),
    "neg": (2, lambda kb, x, _: kb.ir.fneg(x)),
    "round": (2, _intrinsic("llvm.nearbyint")),
    "rsqrt": (1, lambda kb, x, _: kb.ir.fdiv(_splat_like(kb, x, 1), kb.intrinsic("llvm.sqrt", x))),
    "sin": (1, lambda kb, x, _: scalarized_call(kb, "llvm.sin", x)),
    "sqrt": (1, _intrinsic("llvm.sqrt")),
    "tanh": (1, lambda kb, x, _: tanh(kb, x)),
}

_FLOAT_BINARY: dict[str, _Binary] = {
    "add": lambda kb, a, b: kb.ir.fadd(a, b),
    "div": lambda kb, a, b: kb.ir.fdiv(a, b),
    "maximum": fmaximum,
    "minimum": fminimum,
    "mul": lambda kb, a, b: kb.ir.fmul(a, b),
    "pow": lambda kb, a, b: scalarized_call(kb, "llvm.pow", a, b),
    "prelu": _prelu,
    "sub": lambda kb, a, b: kb.ir.fsub(a, b),
}

_INT32_BINARY: dict[str, _Binary] = {
    "add": lambda kb, a, b: kb.ir.add(a, b),
    "div": _floor_div,
    "maximum": lambda kb, a, b: kb.intrinsic("llvm.smax", a, b),
    "minimum": lambda kb, a, b: kb.intrinsic("llvm.smin", a, b),
    "mul": lambda kb, a, b: kb.ir.mul(a, b),
    "sub": lambda kb, a, b: kb.ir.sub(a, b),
}


@dataclass(frozen=True, slots=True)
class FloatUnary:
    """A float32 function of one input, by name. `parameter`: ELU's alpha, or 1 for the approximation of GELU."""

    name: str
    parameter: float = 0.0

    input_types = ("f4",)
    output_type = "f4"
    constant_count = 0

    @property
    def vectors(self) -> int:
        """1 if the function needs many registers, else 2."""
        return _FLOAT_UNARY[self.name][0]

    def emit(self, kb: KernelBuilder, inputs: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        return _FLOAT_UNARY[self.name][1](kb, inputs[0], self.parameter)


@dataclass(frozen=True, slots=True)
class FloatClamp:
    """A float32 input clamped to [low, high]."""

    low: float
    high: float

    input_types = ("f4",)
    output_type = "f4"
    constant_count = 0
    vectors = 2

    def emit(self, kb: KernelBuilder, inputs: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        return clamp_float(kb, inputs[0], self.low, self.high)


@dataclass(frozen=True, slots=True)
class FloatBinary:
    """A float32 function of two inputs, by name, with a fused clamp to [low, high]."""

    name: str
    low: float = -np.inf
    high: float = np.inf

    input_types = ("f4", "f4")
    output_type = "f4"
    constant_count = 0
    vectors = 2

    def emit(self, kb: KernelBuilder, inputs: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        return clamp_float(kb, _FLOAT_BINARY[self.name](kb, *inputs), self.low, self.high)


@dataclass(frozen=True, slots=True)
class Int32Unary:
    """ABS or NEG of INT32, by name; both wrap around at -2^31."""

    name: str

    input_types = ("i4",)
    output_type = "i4"
    constant_count = 0
    vectors = 2

    def emit(self, kb: KernelBuilder, inputs: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        negated = kb.ir.sub(kb.splat(I32, 0, inputs[0].type.count), inputs[0])
        return negated if self.name == "neg" else kb.intrinsic("llvm.smax", inputs[0], negated)


@dataclass(frozen=True, slots=True)
class Int32Binary:
    """An INT32 function of two inputs, by name; results wrap around."""

    name: str

    input_types = ("i4", "i4")
    output_type = "i4"
    constant_count = 0
    vectors = 2

    def emit(self, kb: KernelBuilder, inputs: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        return _INT32_BINARY[self.name](kb, *inputs)


@dataclass(frozen=True, slots=True)
class Cast:
    """CAST between float32, INT32 and uint8. Values out of range saturate; NaN becomes 0."""

    input_type: str
    output_type: str

    constant_count = 0
    vectors = 2

    @property
    def input_types(self) -> tuple[str, ...]:
        """The type of the only input."""
        return (self.input_type,)

    def emit(self, kb: KernelBuilder, inputs: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        (value,) = inputs
        lanes = value.type.count
        if self.input_type == "f4":
            value = kb.call(f"llvm.fptosi.sat.v{lanes}i32.v{lanes}f32", vector(I32, lanes), value)
        elif self.input_type == "u1":
            value = kb.ir.zext(value, vector(I32, lanes))
        if self.output_type == "u1":
            saturated = kb.clamp(value, kb.splat(I32, 0, lanes), kb.splat(I32, 255, lanes))
            return kb.ir.trunc(saturated, vector(I8, lanes))
        return value if self.output_type == "i4" else kb.ir.sitofp(value, vector(F32, lanes))


@dataclass(frozen=True, slots=True)
class Compare:
    """A comparison of two float32 or two INT32 inputs; the result is a byte, 0 or 1. NaN is only not equal."""

    order: str
    element_type: str

    output_type = "u1"
    constant_count = 0
    vectors = 2

    @property
    def input_types(self) -> tuple[str, ...]:
        """Both inputs have one type."""
        return (self.element_type, self.element_type)

    def emit(self, kb: KernelBuilder, inputs: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        return bool_bytes(kb, compare(kb, self.order, *inputs))


def compare(kb: KernelBuilder, order: str, first: Value, second: Value) -> Value:
    """Return one bit for each lane: whether `first order second` (==, !=, <, <=, >, >=)."""
    if first.type.element != F32:
        return kb.ir.icmp_signed(order, first, second)
    fcmp = kb.ir.fcmp_unordered if order == "!=" else kb.ir.fcmp_ordered
    return fcmp(order, first, second)


def bool_bytes(kb: KernelBuilder, bits: Value) -> Value:
    """Return bits as bytes of 0 and 1, the HAL's TENSOR_BOOL8."""
    return kb.ir.zext(bits, vector(I8, bits.type.count))


@dataclass(frozen=True, slots=True)
class Logical:
    """A function of booleans, bytes of which any but 0 is true: "and", "or", "not", or a comparison."""

    name: str

    output_type = "u1"
    constant_count = 0
    vectors = 4

    @property
    def input_types(self) -> tuple[str, ...]:
        """One or two bytes."""
        return ("u1",) if self.name == "not" else ("u1", "u1")

    def emit(self, kb: KernelBuilder, inputs: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        zero = kb.splat(I8, 0, inputs[0].type.count)
        if self.name == "not":
            return bool_bytes(kb, kb.ir.icmp_unsigned("==", inputs[0], zero))
        bits: Any = [bool_bytes(kb, kb.ir.icmp_unsigned("!=", value, zero)) for value in inputs]
        if self.name in ("and", "or"):
            return (kb.ir.and_ if self.name == "and" else kb.ir.or_)(*bits)
        return bool_bytes(kb, kb.ir.icmp_unsigned(self.name, *bits))


@dataclass(frozen=True, slots=True)
class Select:
    """SELECT between elements of one type of 1 or 4 bytes."""

    element_type: str

    constant_count = 0
    vectors = 2

    @property
    def input_types(self) -> tuple[str, ...]:
        """The condition and both operands."""
        return ("u1", self.element_type, self.element_type)

    @property
    def output_type(self) -> str:
        """The operands' type."""
        return self.element_type

    def emit(self, kb: KernelBuilder, inputs: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        condition, first, second = inputs
        is_true = kb.ir.icmp_unsigned("!=", condition, kb.splat(I8, 0, condition.type.count))
        return kb.ir.select(is_true, first, second)
