"""Kernels along one axis: the axis loop, SOFTMAX, LOG_SOFTMAX, L2_NORMALIZATION, ARGMAX and ARGMIN.

An array is seen as (outer, axis_size, inner). If `inner` is 1, lanes are neighbours along the axis, and are combined at
the end: `PARTIAL_RESULTS` for sums of floats, on all targets. Else lanes are neighbouring slices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from nnfmq.base.frozen import dataclass
from nnfmq.engines.compiled.ir_builder import (
    F32,
    F64,
    I8,
    I32,
    I64,
    Constant,
    KernelBuilder,
    Value,
    unseen_lanes_mask,
    vector,
    vector_loop,
    vector_width_for,
)
from nnfmq.engines.compiled.kernels import Kernel
from nnfmq.engines.compiled.kernels.reduction import (
    FloatMinMaxReducer,
    FloatSumReducer,
    QuantizedMeanReducer,
    QuantizedMinMaxReducer,
    Reducer,
    reduce_lanes,
)
from nnfmq.engines.compiled.kernels.requantize import inverse_square_root, reciprocal
from nnfmq.engines.compiled.kernels.vector_math import exp, fmaximum, fminimum, fmuladd, log
from nnfmq.engines.compiled.target import Target
from nnfmq.operations.declaration import Shape
from nnfmq.operations.fixed_point import INT32_MAX, INT32_MIN

__all__ = [
    "MAX_FLOAT_SOFTMAX_SIZE",
    "MAX_QUANTIZED_L2_NORM_SIZE",
    "MAX_QUANTIZED_SOFTMAX_SIZE",
    "ArgMinMax",
    "AxisKernel",
    "AxisLoop",
    "FloatL2Norm",
    "FloatSoftmax",
    "QuantizedL2Norm",
    "QuantizedSoftmax",
    "RowQuantization",
    "plan_axis_loop",
    "plan_quantized_softmax",
]

_MIN_ELEMENTS_PER_ITEM = 1 << 11


@dataclass(frozen=True, slots=True)
class AxisLoop:
    """Loop over the `outer` · `inner` slices along an axis. A work item is `outer_per_item` of the outer positions."""

    outer: int
    axis_size: int
    inner: int
    lanes: int
    outer_per_item: int

    @property
    def work_items(self) -> int:
        """Groups of outer positions."""
        return math.ceil(self.outer / self.outer_per_item)

    @property
    def iterations(self) -> int:
        """Vectors that cover a slice, or as many slices as there are lanes."""
        return self.axis_size if self.inner > 1 else math.ceil(self.axis_size / self.lanes)

    def for_each_slice(self, kb: KernelBuilder, emit: Callable[[Value, Value], None]) -> None:
        """Emit loops over the call's work items around `emit(first, number)`.

        `first` is the index of a slice's first element, `number` that of the slice. If lanes are slices, both are those
        of the first of as many slices as there are lanes.
        """
        end = kb.intrinsic("llvm.smin", kb.mul(kb.end, self.outer_per_item), kb.i64(self.outer))
        with kb.loop(kb.mul(kb.begin, self.outer_per_item), end) as position:
            first, number = kb.mul(position, self.axis_size * self.inner), kb.mul(position, self.inner)
            if self.inner == 1:
                emit(first, number)
            else:
                with vector_loop(kb, self.inner, self.lanes) as lane:
                    emit(kb.add(first, lane), kb.add(number, lane))

    def axis_index(self, kb: KernelBuilder, k: Value) -> Value:
        """Return the index along the axis of the first element of iteration `k`."""
        if self.inner > 1:
            return k
        unmoved = kb.mul(k, self.lanes)
        if self.axis_size % self.lanes == 0:
            return unmoved
        return kb.intrinsic("llvm.smin", unmoved, kb.i64(self.axis_size - self.lanes))

    def offset(self, kb: KernelBuilder, k: Value) -> Value:
        """Return the distance of iteration `k`'s first element from the slice's first element, in elements."""
        return kb.mul(self.axis_index(kb, k), self.inner)

    def mask_seen(self, kb: KernelBuilder, k: Value, values: Value, identity: Value) -> Value:
        """Return the values of iteration `k`, with `identity` for elements that the previous iteration had already."""
        if self.inner > 1:
            return values
        mask = unseen_lanes_mask(kb, self.axis_size, self.lanes, self.axis_index(kb, k), kb.mul(k, self.lanes))
        return values if mask is None else kb.ir.select(mask, values, identity)

    def reduce_slice(self, kb: KernelBuilder, reducer: Reducer, acc: Value) -> Value:
        """Return a slice's accumulator in all of its lanes."""
        if self.inner > 1:
            return acc
        single = reduce_lanes(kb, reducer, acc)
        return kb.broadcast(kb.ir.extract_element(single, kb.i64(0)), self.lanes)


class AxisKernel(Kernel):
    """Base of the kernels over an `axis_loop`, whose inputs and outputs have one shape and one size of elements.

    ArgMinMax has other outputs.
    """

    __slots__ = ()
    axis_loop: AxisLoop
    item_bytes = 4
    """Size of an element."""

    @property
    def work_items(self) -> int:
        """The axis loop's work items."""
        return self.axis_loop.work_items

    def emit(self, kb: KernelBuilder) -> None:
        """Args: input, output."""
        source, out, size = kb.argument(0), kb.argument(1), self.item_bytes

        def emit_slice(first: Value, _: Value) -> None:
            self.emit_slice(kb, kb.at(source, kb.mul(first, size)), kb.at(out, kb.mul(first, size)))

        self.axis_loop.for_each_slice(kb, emit_slice)
        kb.return_void()

    def emit_slice(self, kb: KernelBuilder, source: Value, out: Value) -> None:
        """Emit the computation of the slice at these addresses, or of as many slices as there are lanes."""
        raise NotImplementedError


def plan_axis_loop(shape: Shape, axis: int, slice_lanes: int, row_lanes: int) -> AxisLoop:
    """Plan the loop over the slices of an array of `shape` along `axis`.

    There are at most `slice_lanes` lanes that are slices, or `row_lanes` that are neighbours along the axis.
    """
    outer, axis_size, inner = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    lanes = vector_width_for(inner, slice_lanes) if inner > 1 else vector_width_for(axis_size, row_lanes)
    return AxisLoop(outer, axis_size, inner, lanes, max(1, _MIN_ELEMENTS_PER_ITEM // (axis_size * inner)))


# -- softmax ----------------------------------------------------------------------------------------------------------
#
# Float kernels keep the exponentials (or the exponents, for LOG_SOFTMAX) in scratch until the sum is known. Quantized
# kernels use two tables of the reference, indexed by the difference to the slice's maximum: exponentials as Q0.31, and
# the same as Q12.19 for the sum. A slice then takes one fixed-point reciprocal, with the reference's steps, and a
# multiplication for each element; for long slices, these products are tabulated.

MAX_QUANTIZED_SOFTMAX_SIZE = (1 << 13) - 1
"""Maximum axis size of `QuantizedSoftmax`: the sum fits 32 bits."""

MAX_FLOAT_SOFTMAX_SIZE = 1 << 18
"""Maximum axis size of `FloatSoftmax`, which needs that many floats of scratch."""

_MIN_TABULATED_SIZE = 64


@dataclass(frozen=True, slots=True)
class FloatSoftmax(AxisKernel):
    """SOFTMAX of float32 slices times `beta`, or LOG_SOFTMAX if `is_log`."""

    axis_loop: AxisLoop
    beta: float
    is_log: bool

    def scratch_bytes(self, target: Target) -> int:
        """Return the size of a slice, in whole vectors."""
        return 4 * self.axis_loop.iterations * self.axis_loop.lanes

    def emit_slice(self, kb: KernelBuilder, source: Value, out: Value) -> None:
        """See `AxisKernel`."""
        loop, lanes = self.axis_loop, self.axis_loop.lanes
        kind, zeros = vector(F32, lanes), kb.splat(F32, 0.0, lanes)

        def find_max(k: Value, values: Sequence[Value]) -> Sequence[Value]:
            loaded = kb.load(kind, source, kb.mul(loop.offset(kb, k), 4))
            return [kb.ir.select(kb.ir.fcmp_ordered(">", loaded, values[0]), loaded, values[0])]

        def add_exponentials(k: Value, values: Sequence[Value]) -> Sequence[Value]:
            loaded = kb.load(kind, source, kb.mul(loop.offset(kb, k), 4))
            exponent = kb.ir.fmul(kb.ir.fsub(loaded, maximum), kb.splat(F32, self.beta, lanes))
            power = exp(kb, exponent)
            kb.store(exponent if self.is_log else power, kb.scratch, kb.mul(k, 4 * lanes))
            return [kb.ir.fadd(values[0], loop.mask_seen(kb, k, power, zeros))]

        max_reducer = FloatMinMaxReducer(True)
        (acc,) = kb.for_loop(loop.iterations, [max_reducer.init(kb, lanes)], find_max)
        maximum = loop.reduce_slice(kb, max_reducer, acc)
        (acc,) = kb.for_loop(loop.iterations, [zeros], add_exponentials)
        total = loop.reduce_slice(kb, FloatSumReducer(), acc)
        total = log(kb, total) if self.is_log else total
        with kb.loop(0, loop.iterations) as k:
            stored = kb.load(kind, kb.scratch, kb.mul(k, 4 * lanes))
            result = kb.ir.fsub(stored, total) if self.is_log else kb.ir.fdiv(stored, total)
            kb.store(result, out, kb.mul(loop.offset(kb, k), 4))


@dataclass(frozen=True, slots=True)
class QuantizedSoftmax(Kernel):
    """SOFTMAX of quantized values, bit-exact with `operations`: `outer` · `inner` slices of `axis_size` elements.

    A work item is `slices_per_item` slices. `lanes` is the vector width of the tabulation.
    """

    outer: int
    axis_size: int
    inner: int
    is_signed: bool
    lanes: int
    slices_per_item: int

    @property
    def work_items(self) -> int:
        """Groups of slices."""
        return math.ceil(self.outer * self.inner / self.slices_per_item)

    def scratch_bytes(self, target: Target) -> int:
        """Return the size of a table of 256 results."""
        return 256

    def emit(self, kb: KernelBuilder) -> None:
        """Args: input, output, table of exponentials (Q0.31), table of summands (Q12.19)."""
        source, out, exponentials, summands = map(kb.argument, range(4))
        end = kb.intrinsic("llvm.smin", kb.mul(kb.end, self.slices_per_item), kb.i64(self.outer * self.inner))
        with kb.loop(kb.mul(kb.begin, self.slices_per_item), end) as number:
            position, lane = kb.ir.udiv(number, kb.i64(self.inner)), kb.ir.urem(number, kb.i64(self.inner))
            offset = kb.add(kb.mul(position, self.axis_size * self.inner), lane)
            first, target = kb.at(source, offset), kb.at(out, offset)
            maximum = self._max(kb, first)
            multiplier, shift = reciprocal(kb, self._sum(kb, first, maximum, summands))
            if self.axis_size < _MIN_TABULATED_SIZE:
                with kb.loop(0, self.axis_size) as k:
                    entry = kb.mul(self._difference(kb, first, k, maximum), 4)
                    result = self._requantize(kb, kb.load(vector(I32, 1), exponentials, entry), multiplier, shift)
                    kb.store(result, target, kb.mul(k, self.inner))
            else:
                with kb.loop(0, 256, self.lanes) as entry:  # the results of all differences
                    values = kb.load(vector(I32, self.lanes), exponentials, kb.mul(entry, 4))
                    kb.store(self._requantize(kb, values, multiplier, shift), kb.scratch, entry)
                with kb.loop(0, self.axis_size) as k:
                    result = kb.load(I8, kb.scratch, self._difference(kb, first, k, maximum))
                    kb.store(result, target, kb.mul(k, self.inner))
        kb.return_void()

    def _max(self, kb: KernelBuilder, first: Value) -> Value:
        reducer = QuantizedMinMaxReducer(self.is_signed, True, 0, 0)
        lanes = vector_width_for(self.axis_size, 8 * kb.target.lanes) if self.inner == 1 else 1
        last = self.axis_size - lanes

        def find_max(k: Value, values: Sequence[Value]) -> Sequence[Value]:
            offset = kb.mul(k, self.inner)
            if lanes > 1:
                offset = kb.intrinsic("llvm.smin", kb.mul(k, lanes), kb.i64(last))
            return [reducer.reduce(kb, values[0], reducer.load(kb, first, offset, lanes))]

        (acc,) = kb.for_loop(math.ceil(self.axis_size / lanes), [reducer.init(kb, lanes)], find_max)
        return kb.ir.extract_element(reduce_lanes(kb, reducer, acc), kb.i64(0))

    def _difference(self, kb: KernelBuilder, first: Value, k: Value, maximum: Value) -> Value:
        """Return maximum - element `k`, 0 to 255.

        The 8-bit difference stays in the tables' range even if another process changed the input after the maximum was
        found.
        """
        element = kb.load(I8, first, kb.mul(k, self.inner))
        return kb.ir.zext(kb.ir.sub(maximum, element), I64)

    def _sum(self, kb: KernelBuilder, first: Value, maximum: Value, summands: Value) -> Value:
        def add(k: Value, values: Sequence[Value]) -> Sequence[Value]:
            summand = kb.load(I32, summands, kb.mul(self._difference(kb, first, k, maximum), 4))
            return [kb.ir.add(values[0], kb.ir.zext(summand, I64))]

        return kb.for_loop(self.axis_size, [kb.i64(0)], add)[0]

    def _requantize(self, kb: KernelBuilder, exponentials: Value, multiplier: Value, shift: Value) -> Value:
        """Return exponentials · multiplier · 2^-31 >> shift, saturated. No factor is negative: halves round up."""
        lanes = exponentials.type.count
        wide = vector(I64, lanes)
        factor = kb.ir.zext(kb.broadcast(kb.ir.trunc(multiplier, I32), lanes), wide)
        product = kb.ir.add(kb.ir.mul(kb.ir.zext(exponentials, wide), factor), kb.splat(I64, 1 << 30, lanes))
        high = kb.ir.lshr(product, kb.splat(I64, 31, lanes))
        half = kb.broadcast(kb.ir.shl(kb.i64(1), kb.ir.sub(shift, kb.i64(1))), lanes)
        scaled = kb.ir.lshr(kb.ir.add(high, half), kb.broadcast(shift, lanes))
        narrow = kb.ir.trunc(scaled, vector(I32, lanes))  # at most 2^9
        result = kb.ir.trunc(kb.intrinsic("llvm.umin", narrow, kb.splat(I32, 255, lanes)), vector(I8, lanes))
        return kb.ir.xor(result, kb.splat(I8, -128, lanes)) if self.is_signed else result


def plan_quantized_softmax(outer: int, axis_size: int, inner: int, is_signed: bool, target: Target) -> QuantizedSoftmax:
    """Plan the softmax of an array (outer, axis_size, inner): choose lanes and work items."""
    slices_per_item = max(1, _MIN_ELEMENTS_PER_ITEM // axis_size)
    return QuantizedSoftmax(outer, axis_size, inner, is_signed, target.lanes, slices_per_item)


# -- L2 normalization -------------------------------------------------------------------------------------------------

MAX_QUANTIZED_L2_NORM_SIZE = (1 << 29) // 255**2
"""Maximum axis size of `QuantizedL2Norm`: the sum of squares stays below 2^29."""

_MIN_NORM = 1e-6


@dataclass(frozen=True, slots=True)
class FloatL2Norm(AxisKernel):
    """L2_NORMALIZATION of float32: each slice divided by max(norm, 1e-6)."""

    axis_loop: AxisLoop

    def emit_slice(self, kb: KernelBuilder, source: Value, out: Value) -> None:
        """See `AxisKernel`."""
        loop, kind = self.axis_loop, vector(F32, self.axis_loop.lanes)
        zeros = kb.splat(F32, 0.0, loop.lanes)

        def add_squares(k: Value, values: Sequence[Value]) -> Sequence[Value]:
            loaded = kb.load(kind, source, kb.mul(loop.offset(kb, k), 4))
            unseen = loop.mask_seen(kb, k, loaded, zeros)
            return [fmuladd(kb, unseen, unseen, values[0])]

        (acc,) = kb.for_loop(loop.iterations, [zeros], add_squares)
        norm = kb.intrinsic("llvm.sqrt", loop.reduce_slice(kb, FloatSumReducer(), acc))
        norm = fmaximum(kb, norm, kb.splat(F32, _MIN_NORM, loop.lanes))
        with kb.loop(0, loop.iterations) as k:
            offset = kb.mul(loop.offset(kb, k), 4)
            kb.store(kb.ir.fdiv(kb.load(kind, source, offset), norm), out, offset)


@dataclass(frozen=True, slots=True)
class QuantizedL2Norm(AxisKernel):
    """L2_NORMALIZATION of quantized values, bit-exact with `operations`. The output's scale is 1/128."""

    axis_loop: AxisLoop
    is_signed: bool
    zero_point: int

    item_bytes = 1

    def emit_slice(self, kb: KernelBuilder, source: Value, out: Value) -> None:
        """See `AxisKernel`."""
        loop, lanes = self.axis_loop, self.axis_loop.lanes
        zeros = kb.splat(I32, 0, lanes)
        # The mean's reducer adds 32-bit integers; it is never finalized here.
        sums = QuantizedMeanReducer(self.is_signed, MAX_QUANTIZED_L2_NORM_SIZE, False, 0, 0)

        def add_squares(k: Value, values: Sequence[Value]) -> Sequence[Value]:
            unseen = loop.mask_seen(kb, k, self._subtract_zero_point(kb, source, k), zeros)
            return [kb.ir.add(values[0], kb.ir.mul(unseen, unseen))]

        (acc,) = kb.for_loop(loop.iterations, [zeros], add_squares)
        total = kb.ir.extract_element(loop.reduce_slice(kb, sums, acc), kb.i64(0))
        multiplier, shift = inverse_square_root(kb, kb.ir.zext(total, I64))
        with kb.loop(0, loop.iterations) as k:
            values = self._subtract_zero_point(kb, source, k)
            result = self._requantize(kb, values, kb.broadcast(multiplier, lanes), kb.broadcast(shift, lanes))
            kb.store(result, out, loop.offset(kb, k))

    def _subtract_zero_point(self, kb: KernelBuilder, source: Value, k: Value) -> Value:
        """Load the values of iteration `k` as int32 less the zero point."""
        lanes = self.axis_loop.lanes
        loaded = kb.load(vector(I8, lanes), source, self.axis_loop.offset(kb, k))
        int32_values = (kb.ir.sext if self.is_signed else kb.ir.zext)(loaded, vector(I32, lanes))
        return kb.ir.sub(int32_values, kb.splat(I32, self.zero_point, lanes))

    def _requantize(self, kb: KernelBuilder, values: Value, multiplier: Value, shift: Value) -> Value:
        """Return values · 128 · multiplier · 2^-31 >> shift, with the reference's two roundings, saturated.

        The high half is rounded half up; the shift rounds half away from 0.
        """
        lanes, kind = values.type.count, multiplier.type
        wide = kb.ir.sext(kb.ir.shl(values, kb.splat(I32, 7, lanes)), kind)
        product = kb.ir.add(kb.ir.mul(wide, multiplier), kb.splat(I64, 1 << 30, lanes))
        high = kb.ir.ashr(product, kb.splat(I64, 31, lanes))
        half = kb.ir.lshr(kb.ir.shl(kb.splat(I64, 1, lanes), shift), kb.splat(I64, 1, lanes))
        tie = kb.ir.select(
            kb.ir.icmp_signed(">", shift, kb.splat(I64, 0, lanes)),
            kb.ir.ashr(high, kb.splat(I64, 63, lanes)),
            kb.splat(I64, 0, lanes),
        )
        scaled = kb.ir.trunc(kb.ir.ashr(kb.ir.add(kb.ir.add(high, half), tie), shift), values.type)
        zero_point, low, high_bound = (0, -128, 127) if self.is_signed else (128, 0, 255)
        shifted = kb.ir.add(scaled, kb.splat(I32, zero_point, lanes))
        clamped = kb.clamp(shifted, kb.splat(I32, low, lanes), kb.splat(I32, high_bound, lanes))
        return kb.ir.trunc(clamped, vector(I8, lanes))


# -- arg-min and arg-max ----------------------------------------------------------------------------------------------

_ELEMENT_TYPES = {"f4": F32, "i4": I32, "u1": I8, "i1": I8}


@dataclass(frozen=True, slots=True)
class ArgMinMax(AxisKernel):
    """ARGMAX (`is_max`) or ARGMIN: the index of the extremum along the axis, the first of equal ones.

    Elements, of NumPy's type letters `element_type`, become int32 keys with the same order. NaN has the greatest key,
    so that the first NaN is the result.
    """

    axis_loop: AxisLoop
    element_type: str
    is_max: bool

    def emit(self, kb: KernelBuilder) -> None:
        """Args: input, output."""
        source, out, size = kb.argument(0), kb.argument(1), int(self.element_type[1])

        def emit_slice(first: Value, number: Value) -> None:
            index = self._arg_extremum(kb, kb.at(source, kb.mul(first, size)))
            kb.store(index, out, kb.mul(number, 4))

        self.axis_loop.for_each_slice(kb, emit_slice)
        kb.return_void()

    def _arg_extremum(self, kb: KernelBuilder, source: Value) -> Value:
        loop, lanes, size = self.axis_loop, self.axis_loop.lanes, int(self.element_type[1])
        lane_indexes = vector(I32, lanes)([0] * lanes if loop.inner > 1 else list(range(lanes)))

        def compare(k: Value, values: Sequence[Value]) -> Sequence[Value]:
            loaded = kb.load(vector(_ELEMENT_TYPES[self.element_type], lanes), source, kb.mul(loop.offset(kb, k), size))
            index = kb.broadcast(kb.ir.trunc(loop.axis_index(kb, k), I32), lanes)
            return _select_greater(kb, values, (self._keys(kb, loaded), kb.ir.add(index, lane_indexes)), in_order=True)

        found = kb.for_loop(loop.iterations, [kb.splat(I32, INT32_MIN, lanes), lane_indexes], compare)
        while loop.inner == 1 and found[0].type.count > 1:
            half = found[0].type.count // 2
            low, high = ([kb.shuffle(v, v, range(begin, begin + half)) for v in found] for begin in (0, half))
            found = _select_greater(kb, low, high, in_order=False)
        return found[1]

    def _keys(self, kb: KernelBuilder, values: Value) -> Value:
        """Return int32 keys in the elements' order, in the reverse order for a minimum."""
        lanes = values.type.count
        kind, int32_min = vector(I32, lanes), kb.splat(I32, INT32_MIN, lanes)
        if self.element_type == "f4":
            # Positive floats are ordered as their bits; negative ones in reverse, so -0 and 0 get the same key 0.
            bits = kb.ir.bitcast(values, kind)
            is_negative = kb.ir.icmp_signed("<", bits, kb.splat(I32, 0, lanes))
            keys = kb.ir.select(is_negative, kb.ir.sub(int32_min, bits), bits)
        elif self.element_type == "i4":
            keys = values
        else:
            keys = (kb.ir.sext if self.element_type == "i1" else kb.ir.zext)(values, kind)
        keys = keys if self.is_max else kb.ir.not_(keys)
        if self.element_type == "f4":
            is_nan = kb.ir.fcmp_unordered("uno", values, values)
            keys = kb.ir.select(is_nan, kb.splat(I32, INT32_MAX, lanes), keys)
        return keys


def _select_greater(kb: KernelBuilder, first: Sequence[Value], second: Sequence[Value], in_order: bool) -> list[Value]:
    """Return the (keys, indexes) of the greater keys; of equal keys the first, or the lower index if not `in_order`."""
    wins = kb.ir.icmp_signed(">", second[0], first[0])
    if not in_order:
        is_equal, is_lower = kb.ir.icmp_signed("==", second[0], first[0]), kb.ir.icmp_signed("<", second[1], first[1])
        wins = kb.ir.or_(wins, kb.ir.and_(is_equal, is_lower))
    return [kb.ir.select(wins, b, a) for a, b in zip(first, second, strict=True)]


# ----------------------------------------------------------------------------------------------------------------------
# DYNAMIC_QUANTIZE: the range of each row, then its elements rounded to the 8-bit values of that range.
#
# Every operation is that of `operations.quantization.quantize_rows`, in the same order and precision: the
# results are equal to its.


_LOWEST, _HIGHEST = -128.0, 127.0


@dataclass(frozen=True, slots=True)
class RowQuantization(AxisKernel):
    """DYNAMIC_QUANTIZE of the rows of an `axis_loop`, whose elements are neighbours in memory."""

    axis_loop: AxisLoop
    is_asymmetric: bool

    def emit_slice(self, kb: KernelBuilder, source: Value, out: Value) -> None:
        """See `AxisKernel`."""
        loop, lanes = self.axis_loop, self.axis_loop.lanes
        low, high = self._range(kb, source)
        if self.is_asymmetric:
            scale, inverse, zero_point = self._asymmetric(kb, low, high)
        else:
            scale, inverse, zero_point = self._symmetric(kb, fmaximum(kb, kb.ir.fneg(low), high))
        lowest = kb.splat(F32, _LOWEST if self.is_asymmetric else -_HIGHEST, lanes)
        with kb.loop(0, loop.iterations) as k:
            offset = kb.mul(loop.offset(kb, k), 4)
            scaled = kb.ir.fmul(kb.load(vector(F32, lanes), source, offset), inverse)
            steps = _rounded(kb, kb.ir.fadd(zero_point, scaled), kb.splat(F32, 0.5, lanes))
            limited = fminimum(kb, fmaximum(kb, steps, lowest), kb.splat(F32, _HIGHEST, lanes))
            kb.store(kb.ir.fmul(kb.ir.fsub(limited, zero_point), scale), out, offset)

    def _range(self, kb: KernelBuilder, source: Value) -> tuple[Value, Value]:
        """Return the minimum and the maximum of a row and 0, in all lanes."""
        loop, zeros = self.axis_loop, kb.splat(F32, 0.0, self.axis_loop.lanes)

        def extend(k: Value, found: Sequence[Value]) -> Sequence[Value]:
            values = kb.load(vector(F32, loop.lanes), source, kb.mul(loop.offset(kb, k), 4))
            return [fminimum(kb, found[0], values), fmaximum(kb, found[1], values)]

        low, high = kb.for_loop(loop.iterations, [zeros, zeros], extend)
        reducers = FloatMinMaxReducer(False), FloatMinMaxReducer(True)
        return loop.reduce_slice(kb, reducers[0], low), loop.reduce_slice(kb, reducers[1], high)

    def _symmetric(self, kb: KernelBuilder, largest: Value) -> tuple[Value, Value, Value]:
        """Return scale, inverse scale and zero point."""
        lanes = self.axis_loop.lanes
        zeros, ones, steps = (kb.splat(F32, value, lanes) for value in (0.0, 1.0, _HIGHEST))
        is_positive = kb.ir.fcmp_ordered(">", largest, zeros)
        scale = kb.ir.select(is_positive, kb.ir.fdiv(largest, steps), ones)
        return scale, kb.ir.fdiv(steps, kb.ir.select(is_positive, largest, ones)), zeros

    def _asymmetric(self, kb: KernelBuilder, lows: Value, highs: Value) -> tuple[Value, Value, Value]:
        """Return scale, inverse scale and zero point, which is computed for the end with the smaller error."""
        low, high = (kb.ir.fpext(kb.ir.extract_element(ends, kb.i64(0)), F64) for ends in (lows, highs))
        is_wide = kb.ir.fcmp_ordered(">", high, low)
        step = kb.ir.fdiv(kb.ir.fsub(high, low), _real(_HIGHEST - _LOWEST))
        scale = kb.ir.select(is_wide, step, _real(1.0))
        below, above = kb.ir.fdiv(low, scale), kb.ir.fdiv(high, scale)
        errors = [
            kb.ir.fadd(_real(abs(limit)), kb.intrinsic("llvm.fabs", end))
            for limit, end in ((_LOWEST, below), (_HIGHEST, above))
        ]
        is_low = kb.ir.fcmp_ordered("<", *errors)
        from_low, from_high = kb.ir.fsub(_real(_LOWEST), below), kb.ir.fsub(_real(_HIGHEST), above)
        chosen = _rounded(kb, kb.ir.select(is_low, from_low, from_high), _real(0.5))
        limited = fminimum(kb, fmaximum(kb, chosen, _real(_LOWEST)), _real(_HIGHEST))
        zero_point = kb.ir.fptrunc(kb.ir.select(is_wide, limited, _real(0.0)), F32)
        lanes = self.axis_loop.lanes
        scales = kb.broadcast(kb.ir.fptrunc(scale, F32), lanes)
        return scales, kb.ir.fdiv(kb.splat(F32, 1.0, lanes), scales), kb.broadcast(zero_point, lanes)


def _real(value: float) -> Value:
    return Constant(F64, value)


def _rounded(kb: KernelBuilder, value: Value, half: Value) -> Value:
    """Return floats rounded to integers, halves away from zero."""
    magnitude = kb.intrinsic("llvm.floor", kb.ir.fadd(kb.intrinsic("llvm.fabs", value), half))
    return kb.intrinsic("llvm.copysign", magnitude, value)
