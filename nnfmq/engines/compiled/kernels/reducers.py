"""Reducers for pooling and reductions: sum, mean, root mean square, maximum and minimum.

Quantized means offset int8 to unsigned values (by flipping the sign bit), so that sums and divisions are unsigned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from nnfmq.engines.compiled.ir_builder import F32, F64, I8, I16, I32, I64, KernelBuilder, Value, vector
from nnfmq.engines.compiled.kernels.vector_math import clamp_float, fmaximum, fminimum

__all__ = [
    "FloatMeanReducer",
    "FloatMinMaxReducer",
    "FloatRmsReducer",
    "FloatSumReducer",
    "QuantizedMeanReducer",
    "QuantizedMinMaxReducer",
    "Reducer",
    "RequantizedSumReducer",
    "SignedMeanReducer",
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
class _QuantizedSumReducer:
    """Sum of at most `max_count` quantized values. Accumulators have 16 bits if that fits, else 32."""

    is_signed: bool
    max_count: int

    item_bytes = 1

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

    def _wide_sums(self, kb: KernelBuilder, acc: Value) -> Value:
        return acc if self._acc_type == I32 else kb.ir.zext(acc, vector(I32, acc.type.count))

    def _narrowed(self, kb: KernelBuilder, values: Value, low: int, high: int) -> Value:
        """Clamp int32 values, which are offset to unsigned ones, to the quantized values `low` to `high`."""
        lanes, dtype_min = values.type.count, -128 if self.is_signed else 0
        bounds = (kb.splat(I32, bound - dtype_min, lanes) for bound in (low, high))
        return self._flip_sign_bit(kb, kb.ir.trunc(kb.clamp(values, *bounds), vector(I8, lanes)))

    def _flip_sign_bit(self, kb: KernelBuilder, values: Value) -> Value:
        """Convert int8 to uint8 plus 128, or back."""
        return kb.ir.xor(values, kb.splat(I8, -128, values.type.count)) if self.is_signed else values


@dataclass(frozen=True, slots=True)
class QuantizedMeanReducer(_QuantizedSumReducer):
    """Mean of quantized values, clamped to [low, high]; `is_rounded`: rounded half up, else rounded down."""

    is_rounded: bool
    low: int
    high: int

    @classmethod
    def of(cls, is_signed: bool, max_count: int, is_rounded: bool, low: int, high: int) -> QuantizedMeanReducer | None:
        """Return the reducer for at most `max_count` values, or None if their sum does not fit 31 bits."""
        return cls(is_signed, max_count, is_rounded, low, high) if 256 * max_count < 1 << 31 else None

    def finalize(self, kb: KernelBuilder, acc: Value, count: int | Value) -> Value:
        """Divide, round, clamp and narrow to 8 bits.

        The division is done in floating point and truncated. A quotient of integers that is no integer is at least
        1/count below the next one, so rounding it to 24 bits does not reach that while dividend and divisor are
        together below 2^24; with float64's 53 bits they always are.
        """
        lanes = acc.type.count
        real = F32 if 257 * self.max_count < 1 << 24 else F64
        sums = self._wide_sums(kb, acc)
        if self.is_rounded:
            if isinstance(count, int):
                half = kb.splat(I32, count // 2, lanes)
            else:
                half = kb.broadcast(kb.ir.trunc(kb.ir.lshr(count, kb.i64(1)), I32), lanes)
            sums = kb.ir.add(sums, half)
        quotient = kb.ir.fdiv(kb.ir.sitofp(sums, vector(real, lanes)), _count_splat(kb, count, real, lanes))
        return self._narrowed(kb, kb.ir.fptosi(quotient, vector(I32, lanes)), self.low, self.high)


@dataclass(frozen=True, slots=True)
class SignedMeanReducer(_QuantizedSumReducer):
    """Mean of int8, rounded half away from zero and clamped to [low, high]: TFLite's."""

    low: int
    high: int

    @classmethod
    def of(cls, max_count: int, low: int, high: int) -> SignedMeanReducer | None:
        """Return the reducer for at most `max_count` values, or None if their sum does not fit 31 bits."""
        return cls(True, max_count, low, high) if 256 * max_count < 1 << 31 else None

    def finalize(self, kb: KernelBuilder, acc: Value, count: int | Value) -> Value:
        """Divide the magnitude of the sum, as `QuantizedMeanReducer` does, restore its sign and clamp."""
        lanes = acc.type.count
        real = F32 if 257 * self.max_count < 1 << 24 else F64
        counts = _integer_splat(kb, count, lanes)
        offset = kb.ir.shl(counts, kb.splat(I32, 7, lanes))
        sums = kb.ir.sub(self._wide_sums(kb, acc), offset)
        sign = kb.ir.ashr(sums, kb.splat(I32, 31, lanes))  # -1 if negative
        half = kb.ir.lshr(counts, kb.splat(I32, 1, lanes))
        dividend = kb.ir.add(kb.ir.sub(kb.ir.xor(sums, sign), sign), half)
        quotient = kb.ir.fdiv(kb.ir.sitofp(dividend, vector(real, lanes)), _count_splat(kb, count, real, lanes))
        magnitude = kb.ir.fptosi(quotient, vector(I32, lanes))
        mean = kb.ir.sub(kb.ir.xor(magnitude, sign), sign)
        return self._narrowed(kb, kb.ir.add(mean, kb.splat(I32, 128, lanes)), self.low, self.high)


def _integer_splat(kb: KernelBuilder, count: int | Value, lanes: int) -> Value:
    if isinstance(count, int):
        return kb.splat(I32, count, lanes)
    return kb.broadcast(kb.ir.trunc(count, I32), lanes)


@dataclass(frozen=True, slots=True)
class RequantizedSumReducer(_QuantizedSumReducer):
    """Sum of `max_count` quantized values less their zero points, times multiplier / 2^31 · 2^exponent, rounded twice.

    `input_zero_point` and `output_zero_point` are those of unsigned values, to which int8 is offset.
    """

    input_zero_point: int
    multiplier: int
    exponent: int
    output_zero_point: int

    @classmethod
    def of(
        cls, is_signed: bool, count: int, zero_points: tuple[int, int], multiplier: int, exponent: int
    ) -> RequantizedSumReducer | None:
        """Return the reducer for the input's and the output's zero points, or None if a product may not fit 64 bits."""
        if 256 * count << max(exponent, 0) >= 1 << 30:
            return None
        offset = 128 if is_signed else 0
        return cls(is_signed, count, zero_points[0] + offset, multiplier, exponent, zero_points[1] + offset)

    def finalize(self, kb: KernelBuilder, acc: Value, count: int | Value) -> Value:
        """Multiply, round, add the zero point, clamp and narrow to 8 bits.

        The rounding is that of `requantize`: a nudge contains the halves of both roundings.
        """
        lanes, left, right = acc.type.count, max(self.exponent, 0), max(-self.exponent, 0)
        sums = kb.ir.sub(self._wide_sums(kb, acc), kb.splat(I32, self.input_zero_point * self.max_count, lanes))
        shifted = kb.ir.shl(kb.ir.sext(sums, vector(I64, lanes)), kb.splat(I64, left + 1, lanes))
        nudge = (1 << 31) + ((1 << right >> 1) << 32)
        product = kb.ir.add(kb.ir.mul(shifted, kb.splat(I64, self.multiplier, lanes)), kb.splat(I64, nudge, lanes))
        high = kb.ir.trunc(kb.ir.ashr(product, kb.splat(I64, 32, lanes)), sums.type)
        if right:
            minus_one_if_negative = kb.ir.ashr(sums, kb.splat(I32, 31, lanes))
            high = kb.ir.ashr(kb.ir.add(high, minus_one_if_negative), kb.splat(I32, right, lanes))
        dtype_range = (-128, 127) if self.is_signed else (0, 255)
        return self._narrowed(kb, kb.ir.add(high, kb.splat(I32, self.output_zero_point, lanes)), *dtype_range)


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
