"""Reducers for pooling and reductions: sum, mean, root mean square, maximum and minimum.

Quantized means offset int8 to unsigned values (by flipping the sign bit), so that sums and divisions are unsigned.
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
    """An associative reduction (as Eigen's reducers): init, load, reduce and finalize, on vectors.

    `item_bytes` is the element size of both the input and the result.
    """

    item_bytes: int

    def init(self, kb: KernelBuilder, lanes: int) -> Value:
        """Return the identity: the initial accumulator."""
        ...

    def load(self, kb: KernelBuilder, address: Value, offset: Any, lanes: int) -> Value:
        """Load elements and convert them to the accumulator's type."""
        ...

    def reduce(self, kb: KernelBuilder, first: Value, second: Value) -> Value:
        """Return two accumulators combined."""
        ...

    def finalize(self, kb: KernelBuilder, acc: Value, count: int | Value) -> Value:
        """Return the results for accumulators of `count` elements each (a 64-bit value if not known at preparation)."""
        ...


def _count_splat(kb: KernelBuilder, count: int | Value, element: Any, lanes: int) -> Value:
    if isinstance(count, int):
        return kb.splat(element, float(count), lanes)
    return kb.broadcast(kb.ir.sitofp(kb.ir.trunc(count, I32), element), lanes)


class _FloatReducer:
    item_bytes = 4

    def load(self, kb: KernelBuilder, address: Value, offset: Any, lanes: int) -> Value:
        """Load elements."""
        return kb.load(vector(F32, lanes), address, offset)


class _SumReducer(_FloatReducer):
    def init(self, kb: KernelBuilder, lanes: int) -> Value:
        """Return 0."""
        return kb.splat(F32, 0.0, lanes)

    def reduce(self, kb: KernelBuilder, first: Value, second: Value) -> Value:
        """Return the sum."""
        return kb.ir.fadd(first, second)


@dataclass(frozen=True, slots=True)
class FloatSumReducer(_SumReducer):
    """Sum of float32."""

    def finalize(self, kb: KernelBuilder, acc: Value, count: int | Value) -> Value:
        """Return the sum."""
        return acc


@dataclass(frozen=True, slots=True)
class FloatMeanReducer(_SumReducer):
    """Mean of float32, clamped to [low, high]."""

    low: float = -np.inf
    high: float = np.inf

    def finalize(self, kb: KernelBuilder, acc: Value, count: int | Value) -> Value:
        """Divide and clamp."""
        lanes = acc.type.count
        return clamp_float(kb, kb.ir.fdiv(acc, _count_splat(kb, count, F32, lanes)), self.low, self.high)


@dataclass(frozen=True, slots=True)
class FloatRmsReducer(_SumReducer):
    """Root mean square of float32, clamped to [low, high]."""

    low: float
    high: float

    def load(self, kb: KernelBuilder, address: Value, offset: Any, lanes: int) -> Value:
        """Load elements and square them."""
        loaded = kb.load(vector(F32, lanes), address, offset)
        return kb.ir.fmul(loaded, loaded)

    def finalize(self, kb: KernelBuilder, acc: Value, count: int | Value) -> Value:
        """Divide, take the square root, clamp."""
        mean = kb.ir.fdiv(acc, _count_splat(kb, count, F32, acc.type.count))
        return clamp_float(kb, kb.intrinsic("llvm.sqrt", mean), self.low, self.high)


@dataclass(frozen=True, slots=True)
class FloatMinMaxReducer(_FloatReducer):
    """Maximum (`is_max`) or minimum of float32, clamped to [low, high]. NaN propagates."""

    is_max: bool
    low: float = -np.inf
    high: float = np.inf

    def init(self, kb: KernelBuilder, lanes: int) -> Value:
        """Return minus or plus infinity."""
        return kb.splat(F32, -np.inf if self.is_max else np.inf, lanes)

    def reduce(self, kb: KernelBuilder, first: Value, second: Value) -> Value:
        """Return the maximum or minimum."""
        return (fmaximum if self.is_max else fminimum)(kb, first, second)

    def finalize(self, kb: KernelBuilder, acc: Value, count: int | Value) -> Value:
        """Clamp."""
        return clamp_float(kb, acc, self.low, self.high)


@dataclass(frozen=True, slots=True)
class QuantizedMeanReducer:
    """Mean of quantized values, clamped to [low, high]; `is_rounded`: rounded half up, else rounded down.

    Accumulators have 16 bits if the sum of `max_count` values fits, else 32.
    """

    is_signed: bool
    max_count: int
    is_rounded: bool
    low: int
    high: int

    item_bytes = 1

    @classmethod
    def of(cls, is_signed: bool, max_count: int, is_rounded: bool, low: int, high: int) -> QuantizedMeanReducer | None:
        """Return the reducer for at most `max_count` values, or None if their sum does not fit 31 bits."""
        return cls(is_signed, max_count, is_rounded, low, high) if 256 * max_count < 1 << 31 else None

    @property
    def _acc_type(self) -> Any:
        return I16 if 256 * self.max_count <= 1 << 16 else I32

    def init(self, kb: KernelBuilder, lanes: int) -> Value:
        """Return 0."""
        return kb.splat(self._acc_type, 0, lanes)

    def load(self, kb: KernelBuilder, address: Value, offset: Any, lanes: int) -> Value:
        """Load values, offset to unsigned ones."""
        loaded = kb.load(vector(I8, lanes), address, offset)
        return kb.ir.zext(self._flip_sign_bit(kb, loaded), vector(self._acc_type, lanes))

    def reduce(self, kb: KernelBuilder, first: Value, second: Value) -> Value:
        """Return the sum."""
        return kb.ir.add(first, second)

    def finalize(self, kb: KernelBuilder, acc: Value, count: int | Value) -> Value:
        """Divide, round, clamp and narrow to 8 bits.

        The division is done in floating point and truncated. A quotient of integers that is no integer is at least
        1/count below the next one, so rounding it to 24 bits does not reach that while dividend and divisor are
        together below 2^24; with float64's 53 bits they always are.
        """
        lanes = acc.type.count
        real = F32 if 257 * self.max_count < 1 << 24 else F64
        wide = vector(I32, lanes)
        sums = acc if self._acc_type == I32 else kb.ir.zext(acc, wide)
        if self.is_rounded:
            if isinstance(count, int):
                half = kb.splat(I32, count // 2, lanes)
            else:
                half = kb.broadcast(kb.ir.trunc(kb.ir.lshr(count, kb.i64(1)), I32), lanes)
            sums = kb.ir.add(sums, half)
        quotient = kb.ir.fdiv(kb.ir.sitofp(sums, vector(real, lanes)), _count_splat(kb, count, real, lanes))
        mean, dtype_min = kb.ir.fptosi(quotient, wide), -128 if self.is_signed else 0
        low, high = (kb.splat(I32, bound - dtype_min, lanes) for bound in (self.low, self.high))
        return self._flip_sign_bit(kb, kb.ir.trunc(kb.clamp(mean, low, high), vector(I8, lanes)))

    def _flip_sign_bit(self, kb: KernelBuilder, values: Value) -> Value:
        """Convert int8 to uint8 plus 128, or back."""
        return kb.ir.xor(values, kb.splat(I8, -128, values.type.count)) if self.is_signed else values


@dataclass(frozen=True, slots=True)
class QuantizedMinMaxReducer:
    """Maximum (`is_max`) or minimum of quantized values, clamped to [low, high]."""

    is_signed: bool
    is_max: bool
    low: int
    high: int

    item_bytes = 1

    def init(self, kb: KernelBuilder, lanes: int) -> Value:
        """Return the dtype's minimum or maximum."""
        minimum, maximum = (-128, 127) if self.is_signed else (0, 255)
        return kb.splat(I8, minimum if self.is_max else maximum, lanes)

    def load(self, kb: KernelBuilder, address: Value, offset: Any, lanes: int) -> Value:
        """Load elements."""
        return kb.load(vector(I8, lanes), address, offset)

    def reduce(self, kb: KernelBuilder, first: Value, second: Value) -> Value:
        """Return the maximum or minimum."""
        return self._min_max(kb, self.is_max, first, second)

    def finalize(self, kb: KernelBuilder, acc: Value, count: int | Value) -> Value:
        """Clamp."""
        lanes = acc.type.count
        raised = self._min_max(kb, True, acc, kb.splat(I8, self.low, lanes))
        return self._min_max(kb, False, raised, kb.splat(I8, self.high, lanes))

    def _min_max(self, kb: KernelBuilder, is_max: bool, first: Value, second: Value) -> Value:
        sign = "s" if self.is_signed else "u"
        return kb.intrinsic(f"llvm.{sign}{'max' if is_max else 'min'}", first, second)


def reduce_lanes(kb: KernelBuilder, reducer: Reducer, acc: Value) -> Value:
    """Return a one-element vector: all lanes of an accumulator combined, halves first (a horizontal reduction)."""
    lanes = acc.type.count
    while lanes > 1:
        lanes //= 2
        first, second = (kb.shuffle(acc, acc, range(begin, begin + lanes)) for begin in (0, lanes))
        acc = reducer.reduce(kb, first, second)
    return acc
