"""Reductions along axes, and pooling: loop nests around a `Reducer`.

Adjacent dimensions that are both kept or both reduced are merged. If the innermost dimension is kept, its elements are
lanes. If it is reduced, each lane accumulates a part of the row, and the lanes are combined at the end. Results are
floats with the same bits on all targets: a row of floats has `PARTIAL_RESULTS` lanes, however long vectors are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from nnfmq.base.frozen import dataclass
from nnfmq.engines.compiled.ir_builder import (
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    KernelBuilder,
    Value,
    strided_offset,
    unseen_lanes_mask,
    vector,
    vector_loop,
    vector_width_for,
)
from nnfmq.engines.compiled.kernels import Kernel
from nnfmq.engines.compiled.kernels.vector_math import clamp_float, fmaximum, fminimum
from nnfmq.engines.compiled.target import Target
from nnfmq.operations.shapes import WindowDimension

__all__ = [
    "PARTIAL_RESULTS",
    "FloatMeanReducer",
    "FloatMinMaxReducer",
    "FloatRmsReducer",
    "FloatSumReducer",
    "PoolKernel",
    "QuantizedMeanReducer",
    "QuantizedMinMaxReducer",
    "Reducer",
    "ReductionKernel",
    "RequantizedSumReducer",
    "SignedMeanReducer",
    "plan_pool",
    "plan_reduction",
    "reduce_lanes",
]


# ----------------------------------------------------------------------------------------------------------------------
# Reducers for pooling and reductions: sum, mean, root mean square, maximum and minimum.
#
# Quantized means offset int8 to unsigned values (by flipping the sign bit), so that sums and divisions are unsigned.


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


class _SumReducer:
    """Sums of float32 in float64: the rounding errors of a float32 sum add up to 20 units in the last place of 960."""

    item_bytes = 4

    def init(self, kb: KernelBuilder, lanes: int) -> Value:
        """Return 0."""
        return kb.splat(F64, 0.0, lanes)

    def load(self, kb: KernelBuilder, address: Value, offset: Any, lanes: int) -> Value:
        """Load elements."""
        return kb.ir.fpext(kb.load(vector(F32, lanes), address, offset), vector(F64, lanes))

    def _mean(self, kb: KernelBuilder, acc: Value, count: int | Value) -> Value:
        """Return float32 means of sums of `count` elements each."""
        return _narrowed(kb, kb.ir.fdiv(acc, _count_splat(kb, count, F64, acc.type.count)))

    def reduce(self, kb: KernelBuilder, first: Value, second: Value) -> Value:
        """Return the sum."""
        return kb.ir.fadd(first, second)


def _narrowed(kb: KernelBuilder, values: Value) -> Value:
    return kb.ir.fptrunc(values, vector(F32, values.type.count))


@dataclass(frozen=True, slots=True)
class FloatSumReducer(_SumReducer):
    """Sum of float32."""

    def finalize(self, kb: KernelBuilder, acc: Value, count: int | Value) -> Value:
        """Return the sum."""
        return _narrowed(kb, acc)


@dataclass(frozen=True, slots=True)
class FloatMeanReducer(_SumReducer):
    """Mean of float32, clamped to [low, high]."""

    low: float = -np.inf
    high: float = np.inf

    def finalize(self, kb: KernelBuilder, acc: Value, count: int | Value) -> Value:
        """Divide and clamp."""
        return clamp_float(kb, self._mean(kb, acc, count), self.low, self.high)


@dataclass(frozen=True, slots=True)
class FloatRmsReducer(_SumReducer):
    """Root mean square of float32, clamped to [low, high]."""

    low: float
    high: float

    def load(self, kb: KernelBuilder, address: Value, offset: Any, lanes: int) -> Value:
        """Load elements and square them."""
        loaded = _SumReducer.load(self, kb, address, offset, lanes)
        return kb.ir.fmul(loaded, loaded)

    def finalize(self, kb: KernelBuilder, acc: Value, count: int | Value) -> Value:
        """Divide, take the square root, clamp."""
        root = kb.intrinsic("llvm.sqrt", self._mean(kb, acc, count))
        return clamp_float(kb, root, self.low, self.high)


@dataclass(frozen=True, slots=True)
class FloatMinMaxReducer:
    """Maximum (`is_max`) or minimum of float32, clamped to [low, high]. NaN propagates."""

    is_max: bool
    low: float = -np.inf
    high: float = np.inf
    item_bytes = 4

    def load(self, kb: KernelBuilder, address: Value, offset: Any, lanes: int) -> Value:
        """Load elements."""
        return kb.load(vector(F32, lanes), address, offset)

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


PARTIAL_RESULTS = 32
"""Lanes that accumulate a row of floats, or as many as the largest power of two that is not above its length."""


def reduce_lanes(kb: KernelBuilder, reducer: Reducer, acc: Value) -> Value:
    """Return a one-element vector: all lanes of an accumulator combined, halves first (a horizontal reduction)."""
    lanes = acc.type.count
    while lanes > 1:
        lanes //= 2
        first, second = (kb.shuffle(acc, acc, range(begin, begin + lanes)) for begin in (0, lanes))
        acc = reducer.reduce(kb, first, second)
    return acc


# ----------------------------------------------------------------------------------------------------------------------
# Reductions along axes, and pooling: loop nests around a `Reducer`.


_MIN_ELEMENTS_PER_ITEM = 1 << 12
_MIN_POOL_ITEMS = 8

Dimensions = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class ReductionKernel(Kernel):
    """A planned reduction. Dimensions are pairs of extent and stride, in elements, outermost first.

    `inner_size` is the extent of the innermost dimension, which is not among them; it is reduced if `reduces_inner`.
    A work item is `results_per_item` results, or rows of results if the innermost dimension is kept.
    """

    kept_dims: Dimensions
    reduced_dims: Dimensions
    inner_size: int
    reduces_inner: bool
    reducer: Reducer
    lanes: int
    results_per_item: int

    @property
    def _results(self) -> int:
        return math.prod(extent for extent, _ in self.kept_dims)

    @property
    def _count(self) -> int:
        """Elements of each result."""
        return math.prod(extent for extent, _ in self.reduced_dims) * (self.inner_size if self.reduces_inner else 1)

    @property
    def work_items(self) -> int:
        """Groups of results, or of rows of results."""
        return math.ceil(self._results / self.results_per_item)

    def emit(self, kb: KernelBuilder) -> None:
        """Args: input, output."""
        source, out, item = kb.argument(0), kb.argument(1), self.reducer.item_bytes
        extents, strides = tuple(n for n, _ in self.kept_dims), tuple(s for _, s in self.kept_dims)
        end = kb.intrinsic("llvm.smin", kb.mul(kb.end, self.results_per_item), kb.i64(self._results))
        with kb.loop(kb.mul(kb.begin, self.results_per_item), end) as number:
            first = kb.at(source, kb.mul(strided_offset(kb, number, extents, strides), item))
            if self.reduces_inner:
                acc = self._reduce(kb, first, lambda row, values: [self._reduce_row(kb, row, values[0])])
                result = self.reducer.finalize(kb, reduce_lanes(kb, self.reducer, acc), self._count)
                kb.store(result, out, kb.mul(number, item))
            else:
                self._emit_kept_row(kb, first, kb.at(out, kb.mul(number, self.inner_size * item)))
        kb.return_void()

    def _emit_kept_row(self, kb: KernelBuilder, first: Value, out: Value) -> None:
        """Compute a row of results: lanes are neighbours in the innermost dimension."""
        reducer, item = self.reducer, self.reducer.item_bytes
        with vector_loop(kb, self.inner_size, self.lanes) as index:
            offset = kb.mul(index, item)

            def reduce_vector(row: Value, values: Sequence[Value]) -> Sequence[Value]:
                return [reducer.reduce(kb, values[0], reducer.load(kb, row, 0, self.lanes))]

            acc = self._reduce(kb, kb.at(first, offset), reduce_vector)
            kb.store(reducer.finalize(kb, acc, self._count), out, offset)

    def _reduce_row(self, kb: KernelBuilder, row: Value, acc: Value) -> Value:
        """Accumulate a contiguous row. Elements that the last vector shares with the one before count once."""
        reducer, lanes = self.reducer, self.lanes
        iterations = math.ceil(self.inner_size / lanes)

        def reduce_vector(k: Value, values: Sequence[Value]) -> Sequence[Value]:
            unmoved = index = kb.mul(k, lanes)
            if self.inner_size % lanes:
                index = kb.intrinsic("llvm.smin", unmoved, kb.i64(self.inner_size - lanes))
            value = reducer.load(kb, row, kb.mul(index, reducer.item_bytes), lanes)
            mask = unseen_lanes_mask(kb, self.inner_size, lanes, index, unmoved)
            value = value if mask is None else kb.ir.select(mask, value, reducer.init(kb, lanes))
            return [reducer.reduce(kb, values[0], value)]

        return kb.for_loop(iterations, [acc], reduce_vector)[0]

    def _reduce(self, kb: KernelBuilder, first: Value, emit_inner: Any) -> Value:
        """Emit loops over the outer reduced dimensions around `emit_inner(address, [accumulator])`."""
        item = self.reducer.item_bytes

        def nest(dimensions: Dimensions, address: Value, values: Sequence[Value]) -> Sequence[Value]:
            if not dimensions:
                return emit_inner(address, values)  # type: ignore[no-any-return]
            (extent, stride), *inner = dimensions
            return kb.for_loop(
                extent, values, lambda i, carried: nest(tuple(inner), kb.at(address, kb.mul(i, stride * item)), carried)
            )

        return nest(self.reduced_dims, first, [self.reducer.init(kb, self.lanes)])[0]


def plan_reduction(shape: tuple[int, ...], axes: Sequence[int], reducer: Reducer, target: Target) -> ReductionKernel:
    """Plan the reduction of an array of `shape` along `axes`: merge dimensions, choose lanes and work items."""
    merged: list[tuple[int, bool]] = []  # extent, and whether it is reduced
    for axis, extent in enumerate(shape):
        is_reduced = axis in axes
        if extent == 1:
            continue
        if merged and merged[-1][1] == is_reduced:
            merged[-1] = merged[-1][0] * extent, is_reduced
        else:
            merged.append((extent, is_reduced))
    if not merged:
        merged = [(1, True)]
    strides = [math.prod(extent for extent, _ in merged[number + 1 :]) for number in range(len(merged))]
    outer = [(extent, stride, is_reduced) for (extent, is_reduced), stride in zip(merged[:-1], strides, strict=False)]
    inner_size, reduces_inner = merged[-1]
    kept, reduced = (tuple((n, s) for n, s, is_reduced in outer if is_reduced == wanted) for wanted in (False, True))
    is_row_of_floats = reduces_inner and reducer.item_bytes == 4
    max_lanes = PARTIAL_RESULTS if is_row_of_floats else 16 * target.lanes // reducer.item_bytes
    lanes = vector_width_for(inner_size, max_lanes)
    elements = math.prod(n for n, _ in reduced) * inner_size
    results_per_item = max(1, _MIN_ELEMENTS_PER_ITEM // elements)
    return ReductionKernel(kept, reduced, inner_size, reduces_inner, reducer, lanes, results_per_item)


# -- pooling ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PoolKernel(Kernel):
    """A planned pooling of NHWC images: lanes are channels. Windows are clipped to the image.

    A work item is an output row, times one of `channel_splits` of the channels if there are few rows.
    """

    batch: int
    height: int
    width: int
    channels: int
    rows: WindowDimension
    columns: WindowDimension
    reducer: Reducer
    lanes: int
    channel_splits: int

    @property
    def work_items(self) -> int:
        """Output rows times splits of the channels."""
        return self.batch * self.rows.count * self.channel_splits

    def emit(self, kb: KernelBuilder) -> None:
        """Args: input, output."""
        image, out, item = kb.argument(0), kb.argument(1), self.reducer.item_bytes
        with kb.loop(kb.begin, kb.end) as work_item:
            row, begin, end = self._split(kb, work_item)
            number, y = kb.ir.udiv(row, kb.i64(self.rows.count)), kb.ir.urem(row, kb.i64(self.rows.count))
            top, taps_down = _clip_window(kb, self.rows, self.height, y)
            source = kb.at(image, kb.mul(kb.add(kb.mul(number, self.height), top), self.width * self.channels * item))
            target = kb.at(out, kb.mul(row, self.columns.count * self.channels * item))
            with kb.loop(0, self.columns.count) as x:
                left, taps_across = _clip_window(kb, self.columns, self.width, x)
                window = kb.at(source, kb.mul(left, self.channels * item))
                pixel = kb.at(target, kb.mul(x, self.channels * item))
                with vector_loop(kb, self.channels, self.lanes, begin, end) as channel:
                    offset = kb.mul(channel, item)
                    result = self._reduce_window(kb, kb.at(window, offset), taps_down, taps_across)
                    kb.store(result, pixel, offset)
        kb.return_void()

    def _split(self, kb: KernelBuilder, work_item: Value) -> tuple[Value, Any, Any]:
        """Return a work item's output row, its first channel, and the end of its channels."""
        if self.channel_splits == 1:
            return work_item, 0, self.channels
        splits = kb.i64(self.channel_splits)
        row, split = kb.ir.udiv(work_item, splits), kb.ir.urem(work_item, splits)
        vectors = math.ceil(self.channels / self.lanes)
        begin, end = (kb.ir.udiv(kb.mul(kb.add(split, more), vectors), splits) for more in (0, 1))
        limit = kb.intrinsic("llvm.smin", kb.mul(end, self.lanes), kb.i64(self.channels))
        return row, kb.mul(begin, self.lanes), limit

    def _reduce_window(self, kb: KernelBuilder, window: Value, taps_down: Any, taps_across: Any) -> Value:
        reducer, item = self.reducer, self.reducer.item_bytes

        def reduce_row(i: Value, values: Any) -> Any:
            row = kb.at(window, kb.mul(i, self.width * self.channels * item))
            return kb.for_loop(taps_across, values, lambda j, inner: [reduce_tap(row, j, inner[0])])

        def reduce_tap(row: Value, j: Value, acc: Value) -> Value:
            return reducer.reduce(kb, acc, reducer.load(kb, row, kb.mul(j, self.channels * item), self.lanes))

        (acc,) = kb.for_loop(taps_down, [reducer.init(kb, self.lanes)], reduce_row)
        return reducer.finalize(kb, acc, kb.mul(taps_down, taps_across))


def _clip_window(kb: KernelBuilder, window: WindowDimension, size: int, position: Value) -> tuple[Any, Any]:
    """Return the first row (or column) of a window inside the image, and the number of its taps there."""
    start = kb.mul(position, window.stride)
    if window.padding_low == 0 and (window.count - 1) * window.stride + window.size <= size:
        return start, window.size
    start = kb.ir.sub(start, kb.i64(window.padding_low))
    end = kb.intrinsic("llvm.smin", kb.add(start, window.size), kb.i64(size))
    first = kb.intrinsic("llvm.smax", start, kb.i64(0))
    return first, kb.ir.sub(end, first)


def plan_pool(
    image: tuple[int, int, int, int],
    rows: WindowDimension,
    columns: WindowDimension,
    reducer: Reducer,
    target: Target,
) -> PoolKernel:
    """Plan the pooling of images of shape `image` (NHWC): choose lanes and splits of the channels."""
    batch, height, width, channels = image
    lanes = vector_width_for(channels, 16 * target.lanes // reducer.item_bytes)
    splits = min(math.ceil(channels / lanes), math.ceil(_MIN_POOL_ITEMS / (batch * rows.count)))
    return PoolKernel(batch, height, width, channels, rows, columns, reducer, lanes, splits)
