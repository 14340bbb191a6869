"""SOFTMAX and LOG_SOFTMAX along one axis.

Float kernels keep the exponentials (or the exponents, for LOG_SOFTMAX) in scratch until the sum is known. Quantized
kernels use two tables of the reference, indexed by the difference to the slice's maximum: exponentials as Q0.31, and
the same as Q12.19 for the sum. A slice then takes one fixed-point reciprocal, with the reference's steps, and a
multiplication for each element; for long slices, these products are tabulated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nnfmq.engines.compiled.ir_builder import F32, I8, I32, I64, KernelBuilder, Value, vector, vector_width_for
from nnfmq.engines.compiled.kernels.float_ops import exp, log
from nnfmq.engines.compiled.kernels.normalization_kernels import AxisKernel, AxisLoop
from nnfmq.engines.compiled.kernels.reducers import (
    FloatMinMaxReducer,
    FloatSumReducer,
    QuantizedMinMaxReducer,
    reduce_lanes,
)
from nnfmq.engines.compiled.kernels.requantize import reciprocal
from nnfmq.engines.compiled.target import Target

__all__ = [
    "MAX_FLOAT_SOFTMAX_SIZE",
    "MAX_QUANTIZED_SOFTMAX_SIZE",
    "FloatSoftmax",
    "QuantizedSoftmax",
    "plan_quantized_softmax",
]

MAX_QUANTIZED_SOFTMAX_SIZE = (1 << 13) - 1
"""Maximum axis size of `QuantizedSoftmax`: the sum fits 32 bits."""

MAX_FLOAT_SOFTMAX_SIZE = 1 << 18
"""Maximum axis size of `FloatSoftmax`, which needs that many floats of scratch."""

_MIN_ELEMENTS_PER_ITEM = 1 << 11
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

    def emit(self, kb: KernelBuilder) -> None:
        """Args: input, output."""
        source, out = kb.argument(0), kb.argument(1)
        self.axis_loop.for_each_slice(
            kb, lambda first, _: self._emit_slice(kb, kb.at(source, kb.mul(first, 4)), kb.at(out, kb.mul(first, 4)))
        )
        kb.return_void()

    def _emit_slice(self, kb: KernelBuilder, source: Value, out: Value) -> None:
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
class QuantizedSoftmax:
    """SOFTMAX of quantized values, bit-exact with `operations`: `outer` · `inner` slices of `axis_size` elements.

    A work item is `slices_per_item` slices. `lanes` is the vector width of the tabulation.
    """

    outer: int
    axis_size: int
    inner: int
    is_signed: bool
    lanes: int
    slices_per_item: int

    compile_cost = 1

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
                self._tabulate(kb, exponentials, multiplier, shift)
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

    def _tabulate(self, kb: KernelBuilder, exponentials: Value, multiplier: Value, shift: Value) -> None:
        """Store the results of all 256 differences in scratch."""
        with kb.loop(0, 256, self.lanes) as entry:
            values = kb.load(vector(I32, self.lanes), exponentials, kb.mul(entry, 4))
            kb.store(self._requantize(kb, values, multiplier, shift), kb.scratch, entry)

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
