"""What pooling and reductions make of many elements: sums, means, roots of squares, the greatest, the least.

Codes are counted from their type's least, so that sums and divisions are unsigned. A combination is a few instructions:
how elements are loaded, joined, and finished.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from nnfmq.engines.compiled.emission import F32, F64, I8, I16, I32, Emitter, Value, vector
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

    def neutral(self, e: Emitter, lanes: int) -> Value:
        """Return what combining begins with."""
        ...

    def widened(self, e: Emitter, address: Value, offset: Any, lanes: int) -> Value:
        """Load elements in the type in which they are combined."""
        ...

    def joined(self, e: Emitter, first: Value, second: Value) -> Value:
        """Return the combination of two."""
        ...

    def result(self, e: Emitter, combined: Value, count: int | Value) -> Value:
        """Return what is stored for `count` elements, of 64 bits where it is not known at preparation."""
        ...


def _count_as(e: Emitter, count: int | Value, element: Any, lanes: int) -> Value:
    if isinstance(count, int):
        return e.splat(element, float(count), lanes)
    return e.broadcast(e.b.sitofp(e.b.trunc(count, I32), element), lanes)


class _OfFloats:
    item_bytes = 4

    def widened(self, e: Emitter, address: Value, offset: Any, lanes: int) -> Value:
        """Load them as they are."""
        return e.load(vector(F32, lanes), address, offset)


class _Sum(_OfFloats):
    def neutral(self, e: Emitter, lanes: int) -> Value:
        """Return 0."""
        return e.splat(F32, 0.0, lanes)

    def joined(self, e: Emitter, first: Value, second: Value) -> Value:
        """Return the sum."""
        return e.b.fadd(first, second)


@dataclass(frozen=True, slots=True)
class FloatSumReducer(_Sum):
    """The sum."""

    def result(self, e: Emitter, combined: Value, count: int | Value) -> Value:
        """Return it."""
        return combined


@dataclass(frozen=True, slots=True)
class FloatMeanReducer(_Sum):
    """The sum by the count, clamped."""

    low: float = -np.inf
    high: float = np.inf

    def result(self, e: Emitter, combined: Value, count: int | Value) -> Value:
        """Divide and clamp."""
        lanes = combined.type.count
        return clamp_float(e, e.b.fdiv(combined, _count_as(e, count, F32, lanes)), self.low, self.high)


@dataclass(frozen=True, slots=True)
class FloatRmsReducer(_Sum):
    """The square root of the mean of squares, clamped."""

    low: float
    high: float

    def widened(self, e: Emitter, address: Value, offset: Any, lanes: int) -> Value:
        """Load squares."""
        loaded = e.load(vector(F32, lanes), address, offset)
        return e.b.fmul(loaded, loaded)

    def result(self, e: Emitter, combined: Value, count: int | Value) -> Value:
        """Divide, take the root, clamp."""
        mean = e.b.fdiv(combined, _count_as(e, count, F32, combined.type.count))
        return clamp_float(e, e.intrinsic("llvm.sqrt", mean), self.low, self.high)


@dataclass(frozen=True, slots=True)
class FloatMinMaxReducer(_OfFloats):
    """The greatest element or the least, clamped; NaN wins."""

    greatest: bool
    low: float = -np.inf
    high: float = np.inf

    def neutral(self, e: Emitter, lanes: int) -> Value:
        """Return what never wins."""
        return e.splat(F32, -np.inf if self.greatest else np.inf, lanes)

    def joined(self, e: Emitter, first: Value, second: Value) -> Value:
        """Return the one that wins."""
        return (fmaximum if self.greatest else fminimum)(e, first, second)

    def result(self, e: Emitter, combined: Value, count: int | Value) -> Value:
        """Clamp."""
        return clamp_float(e, combined, self.low, self.high)


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

    def neutral(self, e: Emitter, lanes: int) -> Value:
        """Return 0."""
        return e.splat(self._cell, 0, lanes)

    def widened(self, e: Emitter, address: Value, offset: Any, lanes: int) -> Value:
        """Load codes, counted from the least."""
        return e.b.zext(self._turned(e, e.load(vector(I8, lanes), address, offset)), vector(self._cell, lanes))

    def joined(self, e: Emitter, first: Value, second: Value) -> Value:
        """Return the sum."""
        return e.b.add(first, second)

    def result(self, e: Emitter, combined: Value, count: int | Value) -> Value:
        """Divide, clamp and narrow.

        A quotient of whole numbers lies at least 1/count below the next whole number, which its rounding to 24 bits
        does not reach while dividend and divisor together are below 2^24; with 53 bits they always are.
        """
        lanes = combined.type.count
        real = F32 if 257 * self.most < 1 << 24 else F64
        wide = vector(I32, lanes)
        sums = combined if self._cell == I32 else e.b.zext(combined, wide)
        if self.rounded:
            sums = e.b.add(sums, self._half(e, count, lanes))
        quotient = e.b.fdiv(e.b.sitofp(sums, vector(real, lanes)), _count_as(e, count, real, lanes))
        codes, least = e.b.fptosi(quotient, wide), -128 if self.signed else 0
        held = e.clamp(codes, e.splat(I32, self.low - least, lanes), e.splat(I32, self.high - least, lanes))
        return self._turned(e, e.b.trunc(held, vector(I8, lanes)))

    def _half(self, e: Emitter, count: int | Value, lanes: int) -> Value:
        if isinstance(count, int):
            return e.splat(I32, count // 2, lanes)
        return e.broadcast(e.b.trunc(e.b.lshr(count, e.i64(1)), I32), lanes)

    def _turned(self, e: Emitter, codes: Value) -> Value:
        return e.b.xor(codes, e.splat(I8, -128, codes.type.count)) if self.signed else codes


@dataclass(frozen=True, slots=True)
class QuantizedMinMaxReducer:
    """The greatest code or the least, clamped."""

    signed: bool
    greatest: bool
    low: int
    high: int

    item_bytes = 1

    def neutral(self, e: Emitter, lanes: int) -> Value:
        """Return what never wins."""
        least, most = (-128, 127) if self.signed else (0, 255)
        return e.splat(I8, least if self.greatest else most, lanes)

    def widened(self, e: Emitter, address: Value, offset: Any, lanes: int) -> Value:
        """Load them as they are."""
        return e.load(vector(I8, lanes), address, offset)

    def joined(self, e: Emitter, first: Value, second: Value) -> Value:
        """Return the one that wins."""
        return self._extreme(e, self.greatest, first, second)

    def result(self, e: Emitter, combined: Value, count: int | Value) -> Value:
        """Clamp."""
        lanes = combined.type.count
        raised = self._extreme(e, True, combined, e.splat(I8, self.low, lanes))
        return self._extreme(e, False, raised, e.splat(I8, self.high, lanes))

    def _extreme(self, e: Emitter, greatest: bool, first: Value, second: Value) -> Value:
        kind = "s" if self.signed else "u"
        return e.intrinsic(f"llvm.{kind}{'max' if greatest else 'min'}", first, second)


def reduce_lanes(e: Emitter, combination: Reducer, combined: Value) -> Value:
    """Return a vector of one element: all lanes combined, in pairs of halves."""
    lanes = combined.type.count
    while lanes > 1:
        lanes //= 2
        first, second = (e.shuffle(combined, combined, range(at, at + lanes)) for at in (0, lanes))
        combined = combination.joined(e, first, second)
    return combined
