"""What pooling and reductions make of many elements: sums, means, roots of squares, the greatest, the least.

Codes are counted from their type's least, so that sums and divisions are unsigned. A combination is a few instructions:
how elements are loaded, joined, and finished.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from nnfmq.engines.compiled.ir_builder import F32, F64, I8, I16, I32, KernelBuilder, Value, vector
from nnfmq.engines.compiled.kernels.float_ops import clamp_float, fmaximum, fminimum

__all__ = [
    "FloatMeanReducer",
    "FloatMinMaxReducer",
    "FloatRmsReducer",
    "FloatSumReducer",
    "QuantizedMeanReducer",
    "QuantizedMinMaxReducer",
    "Reducer",
    "reduce_lanes",
]


class Reducer(Protocol):
    """How elements are combined. `item_bytes` of them are those of the result as well."""

    item_bytes: int

    def neutral(self, kb: KernelBuilder, lanes: int) -> Value:
        """Return what combining begins with."""
        ...

    def widened(self, kb: KernelBuilder, address: Value, offset: Any, lanes: int) -> Value:
        """Load elements in the type in which they are combined."""
        ...

    def joined(self, kb: KernelBuilder, first: Value, second: Value) -> Value:
        """Return the combination of two."""
        ...

    def result(self, kb: KernelBuilder, combined: Value, count: int | Value) -> Value:
        """Return what is stored for `count` elements, of 64 bits where it is not known at preparation."""
        ...


def _count_as(kb: KernelBuilder, count: int | Value, element: Any, lanes: int) -> Value:
    if isinstance(count, int):
        return kb.splat(element, float(count), lanes)
    return kb.broadcast(kb.ir.sitofp(kb.ir.trunc(count, I32), element), lanes)


class _OfFloats:
    item_bytes = 4

    def widened(self, kb: KernelBuilder, address: Value, offset: Any, lanes: int) -> Value:
        """Load them as they are."""
        return kb.load(vector(F32, lanes), address, offset)


class _Sum(_OfFloats):
    def neutral(self, kb: KernelBuilder, lanes: int) -> Value:
        """Return 0."""
        return kb.splat(F32, 0.0, lanes)

    def joined(self, kb: KernelBuilder, first: Value, second: Value) -> Value:
        """Return the sum."""
        return kb.ir.fadd(first, second)


@dataclass(frozen=True, slots=True)
class FloatSumReducer(_Sum):
    """The sum."""

    def result(self, kb: KernelBuilder, combined: Value, count: int | Value) -> Value:
        """Return it."""
        return combined


@dataclass(frozen=True, slots=True)
class FloatMeanReducer(_Sum):
    """The sum by the count, clamped."""

    low: float = -np.inf
    high: float = np.inf

    def result(self, kb: KernelBuilder, combined: Value, count: int | Value) -> Value:
        """Divide and clamp."""
        lanes = combined.type.count
        return clamp_float(kb, kb.ir.fdiv(combined, _count_as(kb, count, F32, lanes)), self.low, self.high)


@dataclass(frozen=True, slots=True)
class FloatRmsReducer(_Sum):
    """The square root of the mean of squares, clamped."""

    low: float
    high: float

    def widened(self, kb: KernelBuilder, address: Value, offset: Any, lanes: int) -> Value:
        """Load squares."""
        loaded = kb.load(vector(F32, lanes), address, offset)
        return kb.ir.fmul(loaded, loaded)

    def result(self, kb: KernelBuilder, combined: Value, count: int | Value) -> Value:
        """Divide, take the root, clamp."""
        mean = kb.ir.fdiv(combined, _count_as(kb, count, F32, combined.type.count))
        return clamp_float(kb, kb.intrinsic("llvm.sqrt", mean), self.low, self.high)


@dataclass(frozen=True, slots=True)
class FloatMinMaxReducer(_OfFloats):
    """The greatest element or the least, clamped; NaN wins."""

    greatest: bool
    low: float = -np.inf
    high: float = np.inf

    def neutral(self, kb: KernelBuilder, lanes: int) -> Value:
        """Return what never wins."""
        return kb.splat(F32, -np.inf if self.greatest else np.inf, lanes)

    def joined(self, kb: KernelBuilder, first: Value, second: Value) -> Value:
        """Return the one that wins."""
        return (fmaximum if self.greatest else fminimum)(kb, first, second)

    def result(self, kb: KernelBuilder, combined: Value, count: int | Value) -> Value:
        """Clamp."""
        return clamp_float(kb, combined, self.low, self.high)


@dataclass(frozen=True, slots=True)
class QuantizedMeanReducer:
    """The mean of codes: rounded half up and clamped, or rounded down.

    Sums have 16 bits where those suffice, else 32; the quotient is taken in float32 as long as that is exact.
    """

    signed: bool
    most: int
    rounded: bool
    low: int
    high: int

    item_bytes = 1

    @classmethod
    def of(cls, signed: bool, most: int, rounded: bool, low: int, high: int) -> QuantizedMeanReducer | None:
        """Return the form for `most` elements at the most, or None where 32 bits do not hold their sum."""
        return cls(signed, most, rounded, low, high) if 256 * most < 1 << 31 else None

    @property
    def _cell(self) -> Any:
        return I16 if 256 * self.most <= 1 << 16 else I32

    def neutral(self, kb: KernelBuilder, lanes: int) -> Value:
        """Return 0."""
        return kb.splat(self._cell, 0, lanes)

    def widened(self, kb: KernelBuilder, address: Value, offset: Any, lanes: int) -> Value:
        """Load codes, counted from the least."""
        return kb.ir.zext(self._turned(kb, kb.load(vector(I8, lanes), address, offset)), vector(self._cell, lanes))

    def joined(self, kb: KernelBuilder, first: Value, second: Value) -> Value:
        """Return the sum."""
        return kb.ir.add(first, second)

    def result(self, kb: KernelBuilder, combined: Value, count: int | Value) -> Value:
        """Divide, clamp and narrow.

        A quotient of whole numbers lies at least 1/count below the next whole number, which its rounding to 24 bits
        does not reach while dividend and divisor together are below 2^24; with 53 bits they always are.
        """
        lanes = combined.type.count
        real = F32 if 257 * self.most < 1 << 24 else F64
        wide = vector(I32, lanes)
        sums = combined if self._cell == I32 else kb.ir.zext(combined, wide)
        if self.rounded:
            sums = kb.ir.add(sums, self._half(kb, count, lanes))
        quotient = kb.ir.fdiv(kb.ir.sitofp(sums, vector(real, lanes)), _count_as(kb, count, real, lanes))
        codes, least = kb.ir.fptosi(quotient, wide), -128 if self.signed else 0
        held = kb.clamp(codes, kb.splat(I32, self.low - least, lanes), kb.splat(I32, self.high - least, lanes))
        return self._turned(kb, kb.ir.trunc(held, vector(I8, lanes)))

    def _half(self, kb: KernelBuilder, count: int | Value, lanes: int) -> Value:
        if isinstance(count, int):
            return kb.splat(I32, count // 2, lanes)
        return kb.broadcast(kb.ir.trunc(kb.ir.lshr(count, kb.i64(1)), I32), lanes)

    def _turned(self, kb: KernelBuilder, codes: Value) -> Value:
        return kb.ir.xor(codes, kb.splat(I8, -128, codes.type.count)) if self.signed else codes


@dataclass(frozen=True, slots=True)
class QuantizedMinMaxReducer:
    """The greatest code or the least, clamped."""

    signed: bool
    greatest: bool
    low: int
    high: int

    item_bytes = 1

    def neutral(self, kb: KernelBuilder, lanes: int) -> Value:
        """Return what never wins."""
        least, most = (-128, 127) if self.signed else (0, 255)
        return kb.splat(I8, least if self.greatest else most, lanes)

    def widened(self, kb: KernelBuilder, address: Value, offset: Any, lanes: int) -> Value:
        """Load them as they are."""
        return kb.load(vector(I8, lanes), address, offset)

    def joined(self, kb: KernelBuilder, first: Value, second: Value) -> Value:
        """Return the one that wins."""
        return self._extreme(kb, self.greatest, first, second)

    def result(self, kb: KernelBuilder, combined: Value, count: int | Value) -> Value:
        """Clamp."""
        lanes = combined.type.count
        raised = self._extreme(kb, True, combined, kb.splat(I8, self.low, lanes))
        return self._extreme(kb, False, raised, kb.splat(I8, self.high, lanes))

    def _extreme(self, kb: KernelBuilder, greatest: bool, first: Value, second: Value) -> Value:
        kind = "s" if self.signed else "u"
        return kb.intrinsic(f"llvm.{kind}{'max' if greatest else 'min'}", first, second)


def reduce_lanes(kb: KernelBuilder, combination: Reducer, combined: Value) -> Value:
    """Return a vector of one element: all lanes combined, in pairs of halves."""
    lanes = combined.type.count
    while lanes > 1:
        lanes //= 2
        first, second = (kb.shuffle(combined, combined, range(at, at + lanes)) for at in (0, lanes))
        combined = combination.joined(kb, first, second)
    return combined
