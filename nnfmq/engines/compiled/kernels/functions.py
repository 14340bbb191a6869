"""Functions of float32, INT32 and truth values, for `elementwise`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nnfmq.engines.compiled.ir_builder import F32, F64, I8, I32, I64, KernelBuilder, Value, vector
from nnfmq.engines.compiled.kernels.float_ops import (
    clamp_float,
    exp,
    expm1,
    fmaximum,
    fminimum,
    log,
    logistic,
    scalarized_call,
    tanh,
)

__all__ = ["Cast", "Compare", "FloatBinary", "FloatUnary", "Int32Binary", "Int32Unary", "Logical", "Select"]

_Unary = Callable[[KernelBuilder, Value, float], Value]
_Binary = Callable[[KernelBuilder, Value, Value], Value]


def _splat(kb: KernelBuilder, like: Value, number: float) -> Value:
    return kb.splat(F32, float(np.float32(number)), like.type.count)


def _hard_swish(kb: KernelBuilder, x: Value, _: float) -> Value:
    gate = clamp_float(kb, kb.ir.fadd(x, _splat(kb, x, 3)), 0.0, 6.0)
    return kb.ir.fmul(kb.ir.fmul(x, gate), _splat(kb, x, 1 / 6))


def _elu(kb: KernelBuilder, x: Value, alpha: float) -> Value:
    below = kb.ir.fmul(expm1(kb, x), _splat(kb, x, alpha))
    return kb.ir.select(kb.ir.fcmp_ordered("<", x, _splat(kb, x, 0)), below, x)


def _prelu(kb: KernelBuilder, x: Value, slope: Value) -> Value:
    return kb.ir.select(kb.ir.fcmp_ordered(">=", x, _splat(kb, x, 0)), x, kb.ir.fmul(x, slope))


def _quotient(kb: KernelBuilder, a: Value, b: Value) -> Value:
    """Return a / b rounded down, which float64 has exactly before and after; what is divided by 0 becomes 0."""
    lanes, real, zero = a.type.count, vector(F64, a.type.count), kb.splat(I32, 0, a.type.count)
    by_nothing = kb.ir.icmp_signed("==", b, zero)
    divisor = kb.ir.select(by_nothing, kb.splat(I32, 1, lanes), b)
    quotient = kb.intrinsic("llvm.floor", kb.ir.fdiv(kb.ir.sitofp(a, real), kb.ir.sitofp(divisor, real)))
    wrapped = kb.ir.trunc(kb.ir.fptosi(quotient, vector(I64, lanes)), a.type)
    return kb.ir.select(by_nothing, zero, wrapped)


def _intrinsic(name: str) -> _Unary:
    return lambda kb, x, _: kb.intrinsic(name, x)


_FLOAT_UNARY: dict[str, tuple[int, _Unary]] = {
    "abs": (2, _intrinsic("llvm.fabs")),
    "elu": (1, _elu),
    "exp": (1, lambda kb, x, _: exp(kb, x)),
    "floor": (2, _intrinsic("llvm.floor")),
    "hard_swish": (2, _hard_swish),
    "log": (1, lambda kb, x, _: log(kb, x)),
    "logistic": (1, lambda kb, x, _: logistic(kb, x)),
    "neg": (2, lambda kb, x, _: kb.ir.fneg(x)),
    "relu": (2, lambda kb, x, _: clamp_float(kb, x, 0.0, np.inf)),
    "relu1": (2, lambda kb, x, _: clamp_float(kb, x, -1.0, 1.0)),
    "relu6": (2, lambda kb, x, _: clamp_float(kb, x, 0.0, 6.0)),
    "rsqrt": (1, lambda kb, x, _: kb.ir.fdiv(_splat(kb, x, 1), kb.intrinsic("llvm.sqrt", x))),
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

_WHOLE_BINARY: dict[str, _Binary] = {
    "add": lambda kb, a, b: kb.ir.add(a, b),
    "div": _quotient,
    "maximum": lambda kb, a, b: kb.intrinsic("llvm.smax", a, b),
    "minimum": lambda kb, a, b: kb.intrinsic("llvm.smin", a, b),
    "mul": lambda kb, a, b: kb.ir.mul(a, b),
    "sub": lambda kb, a, b: kb.ir.sub(a, b),
}


@dataclass(frozen=True, slots=True)
class FloatUnary:
    """A function of one float32, by name; `parameter` is ELU's alpha."""

    name: str
    parameter: float = 0.0

    items = ("f4",)
    result = "f4"
    constants = 0

    @property
    def vectors(self) -> int:
        """Fewer for what takes many registers."""
        return _FLOAT_UNARY[self.name][0]

    def emit(self, kb: KernelBuilder, values: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        return _FLOAT_UNARY[self.name][1](kb, values[0], self.parameter)


@dataclass(frozen=True, slots=True)
class FloatBinary:
    """A function of two float32, by name, clamped."""

    name: str
    low: float = -np.inf
    high: float = np.inf

    items = ("f4", "f4")
    result = "f4"
    constants = 0
    vectors = 2

    def emit(self, kb: KernelBuilder, values: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        return clamp_float(kb, _FLOAT_BINARY[self.name](kb, *values), self.low, self.high)


@dataclass(frozen=True, slots=True)
class Int32Unary:
    """The absolute value or the opposite of INT32, which wraps around."""

    name: str

    items = ("i4",)
    result = "i4"
    constants = 0
    vectors = 2

    def emit(self, kb: KernelBuilder, values: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        opposite = kb.ir.sub(kb.splat(I32, 0, values[0].type.count), values[0])
        return opposite if self.name == "neg" else kb.intrinsic("llvm.smax", values[0], opposite)


@dataclass(frozen=True, slots=True)
class Int32Binary:
    """A function of two INT32, which wrap around, by name."""

    name: str

    items = ("i4", "i4")
    result = "i4"
    constants = 0
    vectors = 2

    def emit(self, kb: KernelBuilder, values: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        return _WHOLE_BINARY[self.name](kb, *values)


@dataclass(frozen=True, slots=True)
class Cast:
    """From one of float32, INT32 and bytes without sign to another; what does not fit becomes the nearest, NaN 0."""

    source: str
    result: str

    constants = 0
    vectors = 2

    @property
    def items(self) -> tuple[str, ...]:
        """The one source."""
        return (self.source,)

    def emit(self, kb: KernelBuilder, values: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        (value,) = values
        lanes = value.type.count
        if self.source == "f4":
            name = f"llvm.fptosi.sat.v{lanes}i32.v{lanes}f32"
            value = kb.call(name, vector(I32, lanes), value)
        elif self.source == "u1":
            value = kb.ir.zext(value, vector(I32, lanes))
        if self.result == "u1":
            held = kb.clamp(value, kb.splat(I32, 0, lanes), kb.splat(I32, 255, lanes))
            return kb.ir.trunc(held, vector(I8, lanes))
        return value if self.result == "i4" else kb.ir.sitofp(value, vector(F32, lanes))


@dataclass(frozen=True, slots=True)
class Compare:
    """Whether two float32 or two INT32 are in an order, as bytes of 0 and 1. NaN only differs."""

    order: str
    item: str

    result = "u1"
    constants = 0
    vectors = 2

    @property
    def items(self) -> tuple[str, ...]:
        """Two of a type."""
        return (self.item, self.item)

    def emit(self, kb: KernelBuilder, values: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        return bool_bytes(kb, compare(kb, self.order, *values))


def compare(kb: KernelBuilder, order: str, first: Value, second: Value) -> Value:
    """Return one bit for each lane."""
    if first.type.element != F32:
        return kb.ir.icmp_signed(order, first, second)
    compare = kb.ir.fcmp_unordered if order == "!=" else kb.ir.fcmp_ordered
    return compare(order, first, second)


def bool_bytes(kb: KernelBuilder, bits: Value) -> Value:
    """Return bits as bytes of 0 and 1."""
    return kb.ir.zext(bits, vector(I8, bits.type.count))


@dataclass(frozen=True, slots=True)
class Logical:
    """A function of truth values, any byte but 0 being true: "and", "or", "not", or an order."""

    name: str

    result = "u1"
    constants = 0
    vectors = 4

    @property
    def items(self) -> tuple[str, ...]:
        """One or two bytes."""
        return ("u1",) if self.name == "not" else ("u1", "u1")

    def emit(self, kb: KernelBuilder, values: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        zero = kb.splat(I8, 0, values[0].type.count)
        if self.name == "not":
            return bool_bytes(kb, kb.ir.icmp_unsigned("==", values[0], zero))
        bits: Any = [bool_bytes(kb, kb.ir.icmp_unsigned("!=", value, zero)) for value in values]
        if self.name in ("and", "or"):
            return (kb.ir.and_ if self.name == "and" else kb.ir.or_)(*bits)
        return bool_bytes(kb, kb.ir.icmp_unsigned(self.name, *bits))


@dataclass(frozen=True, slots=True)
class Select:
    """SELECT of elements of any type of 1 or 4 bytes."""

    item: str

    constants = 0
    vectors = 2

    @property
    def items(self) -> tuple[str, ...]:
        """The condition and both operands."""
        return ("u1", self.item, self.item)

    @property
    def result(self) -> str:
        """The operands' type."""
        return self.item

    def emit(self, kb: KernelBuilder, values: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        condition, first, second = values
        chosen = kb.ir.icmp_unsigned("!=", condition, kb.splat(I8, 0, condition.type.count))
        return kb.ir.select(chosen, first, second)
