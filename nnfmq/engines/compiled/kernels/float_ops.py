"""The elementwise operators of float32, INT32 and booleans."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nnfmq.base.frozen import dataclass
from nnfmq.engines.compiled.ir_builder import F16, F32, F64, I8, I32, I64, KernelBuilder, Value, vector
from nnfmq.engines.compiled.kernels.elementwise import ElementwiseOperator
from nnfmq.engines.compiled.kernels.vector_math import (
    clamp_float,
    erf,
    erfc,
    exp,
    expm1,
    fmaximum,
    fminimum,
    log,
    logistic,
    mish,
    scalarized_call,
    softplus,
    subnormal_exp,
    tanh,
)

__all__ = [
    "LIBRARY_NAMES",
    "Cast",
    "Compare",
    "FloatBinary",
    "FloatClamp",
    "FloatUnary",
    "Int32Binary",
    "Int32Unary",
    "Logical",
    "Saturate",
    "Select",
    "bool_bytes",
    "compare",
]


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
    """Return x times the normal distribution, or its approximation by tanh, (1 + tanh(u)) / 2 = 1 / (1 + e^-2u)."""
    if is_approximate:
        cube = kb.ir.fmul(kb.ir.fmul(x, _splat_like(kb, x, 0.044715)), kb.ir.fmul(x, x))
        exponent = kb.ir.fmul(kb.ir.fadd(x, cube), _splat_like(kb, x, -2 * math.sqrt(2 / math.pi)))
        return kb.ir.fdiv(x, kb.ir.fadd(exp(kb, exponent), _splat_like(kb, x, 1)))
    half = _splat_like(kb, x, 0.5)
    outside = kb.ir.fmul(half, erfc(kb, kb.ir.fmul(kb.intrinsic("llvm.fabs", x), _splat_like(kb, x, math.sqrt(0.5)))))
    inside = kb.ir.fsub(_splat_like(kb, x, 1), outside)
    return kb.ir.fmul(x, kb.ir.select(kb.ir.fcmp_ordered("<", x, _splat_like(kb, x, 0)), outside, inside))


def _prelu(kb: KernelBuilder, x: Value, slope: Value) -> Value:
    return kb.ir.select(kb.ir.fcmp_ordered(">=", x, _splat_like(kb, x, 0)), x, kb.ir.fmul(x, slope))


def _floor_div(kb: KernelBuilder, a: Value, b: Value) -> Value:
    """Return floor(a / b) of INT32; 0 if b is 0."""
    lanes, zero = a.type.count, kb.splat(I32, 0, a.type.count)
    by_zero = kb.ir.icmp_signed("==", b, zero)
    quotient = _quotient(kb, "llvm.floor", a, kb.ir.select(by_zero, kb.splat(I32, 1, lanes), b))
    return kb.ir.select(by_zero, zero, quotient)


def _quotient(kb: KernelBuilder, rounding: str, a: Value, b: Value) -> Value:
    """Return a / b of INT32, b not 0, rounded by an intrinsic.

    The quotient is no integer or differs from the next one by at least 2^-31 of itself, which float64 resolves.
    """
    lanes, real = a.type.count, vector(F64, a.type.count)
    quotient = kb.intrinsic(rounding, kb.ir.fdiv(kb.ir.sitofp(a, real), kb.ir.sitofp(b, real)))
    return kb.ir.trunc(kb.ir.fptosi(quotient, vector(I64, lanes)), a.type)  # -2^31 / -1 wraps around


def _floor_mod(kb: KernelBuilder, a: Value, b: Value) -> Value:
    """Return the rest of floor(a / b) of INT32; b is not 0."""
    return kb.ir.sub(a, kb.ir.mul(_quotient(kb, "llvm.floor", a, b), b))


def _intrinsic(name: str) -> _Unary:
    return lambda kb, x, _: kb.intrinsic(name, x)


def _sign(kb: KernelBuilder, x: Value, _: float) -> Value:
    """Return -1, 0 or 1, and NaN of NaN."""
    sign = kb.intrinsic("llvm.copysign", _splat_like(kb, x, 1), x)
    is_number = kb.ir.fcmp_ordered("!=", x, _splat_like(kb, x, 0))
    return kb.ir.select(is_number, sign, x)


def _library(name: str) -> _Unary:
    return lambda kb, x, _: scalarized_call(kb, name, x)


LIBRARY_NAMES = ("acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "sin", "sinh", "tan")
"""Functions of one number that the C library computes; POW is another function of its."""


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
    "mish": (1, lambda kb, x, _: mish(kb, x)),
    "neg": (2, lambda kb, x, _: kb.ir.fneg(x)),
    "round": (2, _intrinsic("llvm.nearbyint")),
    "rsqrt": (1, lambda kb, x, _: kb.ir.fdiv(_splat_like(kb, x, 1), kb.intrinsic("llvm.sqrt", x))),
    "sign": (2, _sign),
    "softplus": (1, lambda kb, x, _: softplus(kb, x)),
    "sqrt": (1, _intrinsic("llvm.sqrt")),
    "tanh": (1, lambda kb, x, _: tanh(kb, x)),
    **{name: (1, _library(f"{name}f")) for name in LIBRARY_NAMES},
}

_FLOAT_BINARY: dict[str, _Binary] = {
    "add": lambda kb, a, b: kb.ir.fadd(a, b),
    "div": lambda kb, a, b: kb.ir.fdiv(a, b),
    "maximum": fmaximum,
    "minimum": fminimum,
    "mul": lambda kb, a, b: kb.ir.fmul(a, b),
    "pow": lambda kb, a, b: scalarized_call(kb, "powf", a, b),
    "prelu": _prelu,
    "sub": lambda kb, a, b: kb.ir.fsub(a, b),
}

_INT32_BINARY: dict[str, _Binary] = {
    "add": lambda kb, a, b: kb.ir.add(a, b),
    "div": _floor_div,
    "floor_mod": _floor_mod,
    "maximum": lambda kb, a, b: kb.intrinsic("llvm.smax", a, b),
    "minimum": lambda kb, a, b: kb.intrinsic("llvm.smin", a, b),
    "mul": lambda kb, a, b: kb.ir.mul(a, b),
    "sub": lambda kb, a, b: kb.ir.sub(a, b),
    "truncated_div": lambda kb, a, b: _quotient(kb, "llvm.trunc", a, b),
}


@dataclass(frozen=True, slots=True)
class FloatUnary(ElementwiseOperator):
    """A float32 function of one input, by name. `parameter`: ELU's alpha, or 1 for the approximation of GELU."""

    name: str
    parameter: float = 0.0

    input_types = ("f4",)
    output_type = "f4"

    @property
    def vectors(self) -> int:
        """1 if the function needs many registers, else 2."""
        return _FLOAT_UNARY[self.name][0]

    def emit(self, kb: KernelBuilder, inputs: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        return _FLOAT_UNARY[self.name][1](kb, inputs[0], self.parameter)


@dataclass(frozen=True, slots=True)
class FloatClamp(ElementwiseOperator):
    """A float32 input clamped to [low, high]."""

    low: float
    high: float

    input_types = ("f4",)
    output_type = "f4"

    def emit(self, kb: KernelBuilder, inputs: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        return clamp_float(kb, inputs[0], self.low, self.high)


@dataclass(frozen=True, slots=True)
class FloatBinary(ElementwiseOperator):
    """A float32 function of two inputs, by name, with a fused clamp to [low, high]."""

    name: str
    low: float = -np.inf
    high: float = np.inf

    input_types = ("f4", "f4")
    output_type = "f4"

    def emit(self, kb: KernelBuilder, inputs: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        return clamp_float(kb, _FLOAT_BINARY[self.name](kb, *inputs), self.low, self.high)


@dataclass(frozen=True, slots=True)
class Int32Unary(ElementwiseOperator):
    """ABS or NEG of INT32, by name; both wrap around at -2^31."""

    name: str

    input_types = ("i4",)
    output_type = "i4"

    def emit(self, kb: KernelBuilder, inputs: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        negated = kb.ir.sub(kb.splat(I32, 0, inputs[0].type.count), inputs[0])
        return negated if self.name == "neg" else kb.intrinsic("llvm.smax", inputs[0], negated)


@dataclass(frozen=True, slots=True)
class Int32Binary(ElementwiseOperator):
    """An INT32 function of two inputs, by name; results wrap around."""

    name: str

    input_types = ("i4", "i4")
    output_type = "i4"

    def emit(self, kb: KernelBuilder, inputs: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        return _INT32_BINARY[self.name](kb, *inputs)


@dataclass(frozen=True, slots=True)
class Cast:
    """CAST between float32 and INT32, uint8 or float16. Integers saturate, and NaN becomes 0, unless `is_truncated`.

    Then numbers that INT32 does not have become its minimum, and bytes are the low bits of INT32.
    """

    input_type: str
    output_type: str
    is_truncated: bool = False

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
        if self.input_type == "f2":
            return kb.ir.fpext(value, vector(F32, lanes))
        if self.output_type == "f2":
            return kb.ir.fptrunc(value, vector(F16, lanes))
        if self.input_type == "f4":
            real = value
            value = kb.call(f"llvm.fptosi.sat.v{lanes}i32.v{lanes}f32", vector(I32, lanes), value)
            if self.is_truncated:
                fits = kb.ir.fcmp_ordered("<", real, kb.splat(F32, float(1 << 31), lanes))
                value = kb.ir.select(fits, value, kb.splat(I32, -1 << 31, lanes))
        elif self.input_type == "u1":
            value = kb.ir.zext(value, vector(I32, lanes))
        if self.output_type == "u1":
            if not self.is_truncated:
                value = kb.clamp(value, kb.splat(I32, 0, lanes), kb.splat(I32, 255, lanes))
            return kb.ir.trunc(value, vector(I8, lanes))
        return value if self.output_type == "i4" else kb.ir.sitofp(value, vector(F32, lanes))


@dataclass(frozen=True, slots=True)
class Saturate:
    """SATURATE: 64-bit integers as INT32, whose limits those beyond it become."""

    input_types = ("i8",)
    output_type = "i4"
    constant_count = 0
    vectors = 2

    def emit(self, kb: KernelBuilder, inputs: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        (value,) = inputs
        lanes = value.type.count
        low, high = (kb.splat(I64, limit, lanes) for limit in (-1 << 31, (1 << 31) - 1))
        return kb.ir.trunc(kb.clamp(value, low, high), vector(I32, lanes))


@dataclass(frozen=True, slots=True)
class Compare(ElementwiseOperator):
    """A comparison of two float32 or two INT32 inputs; the result is a byte, 0 or 1. NaN is only not equal."""

    order: str
    element_type: str

    output_type = "u1"

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
class Logical(ElementwiseOperator):
    """A function of booleans, bytes of which any but 0 is true: "and", "or", "not", or a comparison."""

    name: str

    output_type = "u1"
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
class Select(ElementwiseOperator):
    """SELECT between elements of one type of 1 or 4 bytes."""

    element_type: str

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
