"""Floats that are quantized at run time, and the epilogue of their products.

`RangeKernel` finds the smallest and the largest element of each part of a tensor, `StepsKernel` the range of all, and
the byte of each element. A `Rule` says how: every operation is that of `linear_steps` or `row_steps` in
`operations.quantization`, in the same order and precision, so the results are equal. `Dequantization` takes the place
of a requantization in a matrix product whose results are floats.

If each row has a scale of its own, `RowStepsKernel` quantizes the rows, the matrix product has the sums of bytes minus
128, and `RowDequantization` makes floats of them.

Bytes follow a header of `HEADER_BYTES`: the scale in float32, then the zero point in int32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import field
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from nnfmq.base.frozen import dataclass
from nnfmq.engines.compiled.ir_builder import (
    F32,
    F64,
    I8,
    I32,
    Constant,
    KernelBuilder,
    Value,
    load_params,
    pack_params,
    vector,
)
from nnfmq.engines.compiled.kernels import Kernel
from nnfmq.engines.compiled.kernels.vector_math import clamp_float, fmaximum, fminimum
from nnfmq.operations.declaration import Array
from nnfmq.operations.quantization import SMALLEST_RANGE

__all__ = [
    "HEADER_BYTES",
    "Dequantization",
    "ExactSums",
    "RangeKernel",
    "RowDequantization",
    "RowStepsKernel",
    "Rule",
    "StepsKernel",
    "emit_quantization",
    "emit_quantized_row",
    "emit_range",
    "emit_steps",
]

Combine: TypeAlias = Callable[[KernelBuilder, Value, Value], Value]

HEADER_BYTES = 64
_SCALE, _ZERO_POINT = 0, 4
_PART = 1 << 14  # elements of a work item
_HIGHEST = 255.0
_ROW_LOWEST, _ROW_HIGHEST = -128.0, 127.0
_ZERO = 128  # the byte of the value 0 of int8
_MAGNITUDE_BITS, _INFINITY_BITS = (1 << 31) - 1, 0x7F80_0000


class Rule(Enum):
    """The rule by which floats become bytes: ONNX's, or TFLite's plus 128, with or without a zero point."""

    LINEAR = "linear"
    SYMMETRIC = "symmetric"
    ASYMMETRIC = "asymmetric"

    @property
    def ends(self) -> tuple[Combine, Combine]:
        """Functions of the minimum and the maximum of two values: NaN does not count, or is the result."""
        return (_least, _greatest) if self == Rule.LINEAR else (fminimum, fmaximum)


class _Quantization(NamedTuple):
    """Scale, zero point and, but for `Rule.LINEAR`, the inverse of the scale, as floats."""

    scale: Value
    zero_point: Value
    inverse: Value | None = None


# -- the range of elements, and their steps ----------------------------------------------------------------------------


def _widths(kb: KernelBuilder) -> tuple[int, int, int]:
    """Return the elements of a step of each loop over floats: four vectors, whose bytes are one, then one, then one."""
    return 4 * kb.target.lanes, kb.target.lanes, 1


def emit_range(kb: KernelBuilder, source: Value, count: Value, rule: Rule = Rule.LINEAR) -> tuple[Value, Value]:
    """Return the minimum and the maximum of `count` floats and 0; of `Rule.SYMMETRIC` minus and plus the largest size.

    They are NaN if an element is, unless the rule is LINEAR, where NaN does not count. Magnitudes are compared as
    integers, in whose order NaN is above infinity: that takes fewer instructions than a minimum that keeps NaN.
    """
    found: Sequence[Value] = [F32(0.0), F32(0.0), I32(0)]
    begin, needs_ends, needs_sizes = kb.i64(0), rule != Rule.SYMMETRIC, rule != Rule.LINEAR
    for lanes in _widths(kb):
        end = kb.ir.and_(count, kb.i64(-lanes))
        ends = _range_of_vectors(kb, source, begin, end, lanes, needs_ends, needs_sizes)
        found, begin = [combine(kb, *pair) for combine, *pair in zip(_COMBINE, found, ends, strict=True)], end
    low, high, size = found
    if not needs_sizes:
        return low, high
    largest = kb.ir.bitcast(size, F32)
    if not needs_ends:
        return kb.ir.fneg(largest), largest
    is_nan = kb.ir.icmp_unsigned(">", size, I32(_INFINITY_BITS))
    return kb.ir.select(is_nan, largest, low), kb.ir.select(is_nan, largest, high)


def _range_of_vectors(
    kb: KernelBuilder, source: Value, begin: Value, end: Value, lanes: int, needs_ends: bool, needs_sizes: bool
) -> list[Value]:
    """Return minimum, maximum and largest magnitude of the elements from `begin` to `end`, whole vectors.

    The magnitude is the bits of a float. What is not needed is 0.
    """
    kinds = (F32, F32, I32) if lanes == 1 else (vector(F32, lanes), vector(F32, lanes), vector(I32, lanes))
    zeros = [Constant(kind, None) if lanes > 1 else kind(0) for kind in kinds]

    def extend(index: Value, found: Sequence[Value]) -> Sequence[Value]:
        values = kb.load(kinds[0], source, kb.mul(kb.ir.add(begin, kb.mul(index, lanes)), 4))
        low, high, size = found
        if needs_ends:
            low, high = _least(kb, low, values), _greatest(kb, high, values)
        if needs_sizes:
            mask = kb.splat(I32, _MAGNITUDE_BITS, lanes) if lanes > 1 else I32(_MAGNITUDE_BITS)
            size = _umax(kb, size, kb.ir.and_(kb.ir.bitcast(values, kinds[2]), mask))
        return [low, high, size]

    count = kb.ir.udiv(kb.ir.sub(end, begin), kb.i64(lanes))
    found = kb.for_loop(count, zeros, extend, may_be_empty=True)
    return [_reduced(kb, values, combine) for values, combine in zip(found, _COMBINE, strict=True)]


def _reduced(kb: KernelBuilder, values: Value, combine: Combine) -> Value:
    """Return all lanes combined."""
    if values.type in (F32, I32):
        return values
    lanes = values.type.count
    while lanes > 1:
        lanes //= 2
        halves = (kb.shuffle(values, values, range(first, first + lanes)) for first in (0, lanes))
        values = combine(kb, *halves)
    return kb.ir.extract_element(values, kb.i64(0))


def _least(kb: KernelBuilder, found: Value, values: Value) -> Value:
    return kb.ir.select(kb.ir.fcmp_ordered("<", values, found), values, found)


def _greatest(kb: KernelBuilder, found: Value, values: Value) -> Value:
    return kb.ir.select(kb.ir.fcmp_ordered(">", values, found), values, found)


def _umax(kb: KernelBuilder, found: Value, values: Value) -> Value:
    return kb.intrinsic("llvm.umax", found, values)


_COMBINE: Sequence[Combine] = (_least, _greatest, _umax)


def emit_quantization(kb: KernelBuilder, low: Value, high: Value) -> tuple[Value, Value]:
    """Return scale and zero point of a range, as floats."""
    zero, highest = F32(0.0), F32(_HIGHEST)
    found = kb.ir.fdiv(kb.ir.fsub(high, low), highest)
    scale = kb.ir.select(kb.ir.fcmp_ordered(">", found, zero), found, F32(1.0))
    below = kb.ir.fadd(kb.intrinsic("llvm.nearbyint", kb.ir.fdiv(low, scale)), highest)
    return scale, kb.ir.fsub(highest, _limited(kb, below, zero, highest))


def _limited(kb: KernelBuilder, value: Value, low: Value, high: Value) -> Value:
    """Return a value limited to a range; NaN becomes its lower end."""
    raised = kb.ir.select(kb.ir.fcmp_ordered(">", value, low), value, low)
    return kb.ir.select(kb.ir.fcmp_ordered("<", raised, high), raised, high)


def emit_steps(kb: KernelBuilder, source: Value, target: Value, count: Value, scale: Value, zero_point: Value) -> None:
    """Store the bytes of `count` floats."""
    begin = kb.i64(0)
    for lanes in _widths(kb):
        end = kb.ir.and_(count, kb.i64(-lanes))
        scales, zero_points = kb.broadcast(scale, lanes), kb.broadcast(zero_point, lanes)
        zeros, highest = kb.splat(F32, 0.0, lanes), kb.splat(F32, _HIGHEST, lanes)
        with kb.loop(begin, end, lanes) as index:
            values = kb.load(vector(F32, lanes), source, kb.mul(index, 4))
            steps = kb.intrinsic("llvm.nearbyint", kb.ir.fdiv(values, scales))
            limited = _limited(kb, kb.ir.fadd(steps, zero_points), zeros, highest)
            kb.store(kb.ir.trunc(kb.ir.fptosi(limited, vector(I32, lanes)), vector(I8, lanes)), target, index)
        begin = end


def _emit_row_rule(kb: KernelBuilder, low: Value, high: Value, rule: Rule) -> _Quantization:
    """Return the quantization of a range as TFLite has it; NaN as the scale of a range that is not finite."""
    if rule == Rule.LINEAR:
        return _Quantization(*emit_quantization(kb, low, high))
    largest = fmaximum(kb, kb.ir.fneg(low), high)
    is_finite = kb.ir.fcmp_ordered("<", largest, F32(math.inf))
    is_usable = kb.ir.and_(is_finite, kb.ir.fcmp_ordered(">=", largest, F32(SMALLEST_RANGE)))
    make = _symmetric if rule == Rule.SYMMETRIC else _asymmetric
    scale, zero_point, inverse = make(kb, *(kb.ir.select(is_usable, end, F32(0.0)) for end in (low, high)))
    # Without a usable range all elements are taken as zeros, whatever they are.
    inverse = kb.ir.select(is_usable, inverse, F32(0.0))
    return _Quantization(kb.ir.select(is_finite, scale, F32(math.nan)), zero_point, inverse)


def _symmetric(kb: KernelBuilder, low: Value, high: Value) -> tuple[Value, Value, Value]:
    """Return scale, zero point and inverse scale."""
    largest, steps = _greatest(kb, kb.ir.fneg(low), high), F32(_ROW_HIGHEST)
    is_positive = kb.ir.fcmp_ordered(">", largest, F32(0.0))
    scale = kb.ir.select(is_positive, kb.ir.fdiv(largest, steps), F32(1.0))
    return scale, F32(0.0), kb.ir.fdiv(steps, kb.ir.select(is_positive, largest, F32(1.0)))


def _asymmetric(kb: KernelBuilder, minimum: Value, maximum: Value) -> tuple[Value, Value, Value]:
    """Return scale, zero point and inverse scale; the zero point is that of the end with the smaller error."""
    low, high = (kb.ir.fpext(end, F64) for end in (minimum, maximum))
    is_wide = kb.ir.fcmp_ordered(">", high, low)
    scale = kb.ir.select(is_wide, kb.ir.fdiv(kb.ir.fsub(high, low), F64(_ROW_HIGHEST - _ROW_LOWEST)), F64(1.0))
    below, above = kb.ir.fdiv(low, scale), kb.ir.fdiv(high, scale)
    errors = [
        kb.ir.fadd(F64(abs(limit)), kb.intrinsic("llvm.fabs", end))
        for limit, end in ((_ROW_LOWEST, below), (_ROW_HIGHEST, above))
    ]
    is_low = kb.ir.fcmp_ordered("<", *errors)
    ends = kb.ir.fsub(F64(_ROW_LOWEST), below), kb.ir.fsub(F64(_ROW_HIGHEST), above)
    chosen = kb.ir.select(is_low, *ends)
    magnitude = kb.intrinsic("llvm.floor", kb.ir.fadd(kb.intrinsic("llvm.fabs", chosen), F64(0.5)))
    limited = _limited(kb, kb.intrinsic("llvm.copysign", magnitude, chosen), F64(_ROW_LOWEST), F64(_ROW_HIGHEST))
    step = kb.ir.fptrunc(scale, F32)
    zero_point = kb.ir.fptrunc(kb.ir.select(is_wide, limited, F64(0.0)), F32)
    return step, zero_point, kb.ir.fdiv(F32(1.0), step)


def _emit_row_steps(
    kb: KernelBuilder, source: Value, target: Value, count: Value, found: _Quantization, rule: Rule
) -> None:
    """Store the bytes of `count` floats."""
    if found.inverse is None:
        emit_steps(kb, source, target, count, found.scale, found.zero_point)
        return
    begin, lowest = kb.i64(0), -_ROW_HIGHEST if rule == Rule.SYMMETRIC else _ROW_LOWEST
    for lanes in _widths(kb):
        end = kb.ir.and_(count, kb.i64(-lanes))
        inverses, zero_points = kb.broadcast(found.inverse, lanes), kb.broadcast(found.zero_point, lanes)
        half, limits = kb.splat(F32, 0.5, lanes), [kb.splat(F32, limit, lanes) for limit in (lowest, _ROW_HIGHEST)]
        with kb.loop(begin, end, lanes) as index:
            values = kb.load(vector(F32, lanes), source, kb.mul(index, 4))
            steps = kb.ir.fadd(zero_points, kb.ir.fmul(values, inverses))
            # Truncated, this is rounded with halves away from zero.
            away = kb.ir.fadd(steps, kb.intrinsic("llvm.copysign", half, steps))
            integers = kb.ir.fptosi(_limited(kb, away, *limits), vector(I32, lanes))
            kb.store(kb.ir.trunc(kb.ir.add(integers, kb.splat(I32, _ZERO, lanes)), vector(I8, lanes)), target, index)
        begin = end


def emit_quantized_row(
    kb: KernelBuilder, source: Value, target: Value, count: Value, rule: Rule
) -> tuple[Value, Value]:
    """Store the bytes of `count` floats, and return their scale and zero point."""
    found = _emit_row_rule(kb, *emit_range(kb, source, count, rule), rule)
    _emit_row_steps(kb, source, target, count, found, rule)
    return found.scale, _byte_zero_point(kb, found, rule)


def _byte_zero_point(kb: KernelBuilder, found: _Quantization, rule: Rule) -> Value:
    zero_point = kb.ir.fptosi(found.zero_point, I32)
    return zero_point if rule == Rule.LINEAR else kb.ir.add(zero_point, I32(_ZERO))


def _store_header(kb: KernelBuilder, scale: Value, zero_point: Value, target: Value) -> None:
    kb.store(scale, target, _SCALE)
    kb.store(zero_point, target, _ZERO_POINT)


class _Extents(NamedTuple):
    """Run-time parameters of both kernels."""

    count: Any  # of elements
    parts: Any


@dataclass(frozen=True, slots=True)
class _PartsKernel(Kernel):
    """A kernel whose work item is a part of `count` elements; the size is no part of the code."""

    count: int = field(repr=False)
    rule: Rule = Rule.LINEAR

    @property
    def work_items(self) -> int:
        """Parts of the tensor."""
        return math.ceil(self.count / _PART)

    def params(self) -> bytes:
        """Return the constant with the extents."""
        return pack_params(_Extents(self.count, self.work_items))

    def _part(self, kb: KernelBuilder, extents: _Extents, number: Value) -> tuple[Value, Value]:
        """Return the first element of a part, and the number of its elements."""
        first = kb.mul(number, _PART)
        return first, kb.intrinsic("llvm.smin", kb.i64(_PART), kb.ir.sub(extents.count, first))


@dataclass(frozen=True, slots=True)
class RangeKernel(_PartsKernel):
    """The minimum and maximum of each part, and of 0."""

    def emit(self, kb: KernelBuilder) -> None:
        """Args: floats, ranges, params."""
        source, out = kb.argument(0), kb.argument(1)
        extents = load_params(kb, kb.argument(2), _Extents)
        with kb.loop(kb.begin, kb.end) as number:
            first, count = self._part(kb, extents, number)
            for place, end in enumerate(emit_range(kb, kb.at(source, kb.mul(first, 4)), count, self.rule)):
                kb.store(end, out, kb.add(kb.mul(number, 8), 4 * place))
        kb.return_void()


@dataclass(frozen=True, slots=True)
class StepsKernel(_PartsKernel):
    """The bytes of all elements after their header, or with scale and zero point as floats of their own."""

    has_header: bool = True

    def emit(self, kb: KernelBuilder) -> None:
        """Args: floats, ranges of the parts, bytes, params. Scale and zero point without a header follow the bytes."""
        source, ranges, out = map(kb.argument, range(3))
        params = kb.argument(3 if self.has_header else 5)
        extents, (minimum, maximum) = load_params(kb, params, _Extents), self.rule.ends

        def extend(index: Value, found: Sequence[Value]) -> Sequence[Value]:
            low, high = (kb.load(F32, ranges, kb.add(kb.mul(index, 8), 4 * place)) for place in range(2))
            return [minimum(kb, found[0], low), maximum(kb, found[1], high)]

        low, high = kb.for_loop(extents.parts, [F32(0.0), F32(0.0)], extend)
        quantization = _emit_row_rule(kb, low, high, self.rule)
        with kb.loop(kb.begin, kb.end) as number:
            with kb.ir.if_then(kb.ir.icmp_signed("==", number, kb.i64(0))):
                if self.has_header:
                    _store_header(kb, quantization.scale, _byte_zero_point(kb, quantization, self.rule), out)
                else:
                    kb.store(quantization.scale, kb.argument(3))
                    kb.store(quantization.zero_point, kb.argument(4))
            first, count = self._part(kb, extents, number)
            target = kb.at(kb.at(out, HEADER_BYTES if self.has_header else 0), first)
            _emit_row_steps(kb, kb.at(source, kb.mul(first, 4)), target, count, quantization, self.rule)
        kb.return_void()


class _RowExtents(NamedTuple):
    """Run-time parameters of rows of floats."""

    length: Any
    headers: Any  # the offset of the rows' headers


@dataclass(frozen=True, slots=True)
class RowStepsKernel(Kernel):
    """The bytes of rows, each with a header of 8 bytes, after all bytes: scale and zero point.

    The header of all is that of a single row; of several, whose bytes are multiplied as they are, the value 0.
    """

    rows: int = field(repr=False)
    length: int = field(repr=False)
    is_single: bool
    rule: Rule

    @property
    def work_items(self) -> int:
        """Rows."""
        return self.rows

    @property
    def headers(self) -> int:
        """The offset of the rows' headers."""
        return HEADER_BYTES + math.ceil(self.rows * self.length / HEADER_BYTES) * HEADER_BYTES

    @property
    def size_bytes(self) -> int:
        """Bytes of the result."""
        return self.headers + 8 * self.rows

    def params(self) -> bytes:
        """Return the constant with the extents."""
        return pack_params(_RowExtents(self.length, self.headers))

    def emit(self, kb: KernelBuilder) -> None:
        """Args: floats, bytes, params."""
        source, out = kb.argument(0), kb.argument(1)
        extents = load_params(kb, kb.argument(2), _RowExtents)
        with kb.loop(kb.begin, kb.end) as row:
            first = kb.ir.mul(row, extents.length)
            floats = kb.at(source, kb.mul(first, 4))
            target = kb.at(kb.at(out, HEADER_BYTES), first)
            header = emit_quantized_row(kb, floats, target, extents.length, self.rule)
            if self.is_single:
                _store_header(kb, *header, out)
            else:
                with kb.ir.if_then(kb.ir.icmp_signed("==", row, kb.i64(0))):
                    _store_header(kb, F32(1.0), I32(0 if self.rule == Rule.LINEAR else _ZERO), out)
                _store_header(kb, *header, kb.at(out, kb.ir.add(extents.headers, kb.mul(row, 8))))
        kb.return_void()


# -- the epilogue of products ------------------------------------------------------------------------------------------


_SUMS, _FACTORS, _BIASES, _ROWS = range(4)
_MAX_BIAS = float(1 << 30)


@dataclass(frozen=True, slots=True)
class Dequantization:
    """Products of bytes with int8 weights as floats: (sum · input scale · weight scale) + bias, clamped.

    With `rounds_bias` the bias is added to the sum, in its units and rounded down. `lhs_is_signed`: bytes are read as
    x - 128. The input is a GEMM's first argument: bytes after a header. Constants are a header with the weight zero
    point, then rows for each vector of channels. With `keeps_sums` the results are the sums, as int32.
    """

    low: float
    high: float
    rounds_bias: bool
    lhs_is_signed: bool
    keeps_sums: bool = False

    output_bytes = 4
    input_offset = HEADER_BYTES
    weight_prescale = 1
    is_short = True

    def constants(self, sums: Array, factors: Array, biases: Array, weight_zero_point: int, lanes: int) -> bytes:
        """Return the constant, for channels that fill whole vectors."""
        header = np.zeros(HEADER_BYTES // 4, np.int32)
        header[0] = weight_zero_point
        rows = np.stack(
            [
                sums.astype(np.int64).astype(np.int32),
                *(np.asarray(row, np.float32).view(np.int32) for row in (factors, biases)),
            ]
        )
        return header.tobytes() + rows.reshape(_ROWS, -1, lanes).swapaxes(0, 1).tobytes()

    def input_zero_point(self, kb: KernelBuilder, constants: Value) -> Value:
        """Load the zero point of the bytes as they are read."""
        zero_point = kb.load(I32, kb.argument(0), _ZERO_POINT)
        return kb.ir.sub(zero_point, I32(128)) if self.lhs_is_signed else zero_point

    def weight_zero_point(self, kb: KernelBuilder, constants: Value) -> Value:
        """Load the residual zero point of the weights."""
        return kb.load(I32, constants)

    def bias(self, kb: KernelBuilder, constants: Value, channel: Value, lanes: int) -> Value:
        """Return the initial accumulators: what the input's zero point contributes, and a rounded bias."""
        row = self._rows(kb, constants, channel, lanes)
        zero_points = kb.broadcast(self.input_zero_point(kb, constants), lanes)
        initial = kb.ir.neg(kb.ir.mul(zero_points, row(_SUMS)))
        if not self.rounds_bias:
            return initial
        kind = vector(F32, lanes)
        found = kb.intrinsic("llvm.floor", kb.ir.fdiv(kb.ir.bitcast(row(_BIASES), kind), self._factors(kb, row, lanes)))
        limits = (kb.splat(F32, limit, lanes) for limit in (-_MAX_BIAS, _MAX_BIAS))
        return kb.ir.add(initial, kb.ir.fptosi(_limited(kb, found, *limits), initial.type))

    def requantize(self, kb: KernelBuilder, accs: Sequence[Value], constants: Value, channel: Value) -> list[Value]:
        """Return adjacent vectors of accumulators, the first at `channel`, as floats."""
        if self.keeps_sums:
            return list(accs)
        return [self.finished(kb, acc, constants, kb.add(channel, n * acc.type.count)) for n, acc in enumerate(accs)]

    def finished(self, kb: KernelBuilder, acc: Value, constants: Value, channel: Value) -> Value:
        """Return a vector of accumulators, the first at `channel`, as floats."""
        lanes = acc.type.count
        row = self._rows(kb, constants, channel, lanes)
        value = kb.ir.fmul(kb.ir.sitofp(acc, vector(F32, lanes)), self._factors(kb, row, lanes))
        if not self.rounds_bias:
            value = kb.ir.fadd(value, kb.ir.bitcast(row(_BIASES), value.type))
        return clamp_float(kb, value, self.low, self.high)

    def _factors(self, kb: KernelBuilder, row: Callable[[int], Value], lanes: int) -> Value:
        scale = kb.broadcast(kb.load(F32, kb.argument(0), _SCALE), lanes)
        return kb.ir.fmul(scale, kb.ir.bitcast(row(_FACTORS), vector(F32, lanes)))

    def _rows(self, kb: KernelBuilder, constants: Value, channel: Value, lanes: int) -> Callable[[int], Value]:
        """Return a function that loads a row of the vector of channels that begins at `channel`."""
        first = kb.at(kb.at(constants, HEADER_BYTES), kb.mul(channel, 4 * _ROWS))
        return lambda number: kb.load(vector(I32, lanes), first, 4 * lanes * number)


@dataclass(frozen=True, slots=True)
class ExactSums:
    """Products of bytes with int8 weights as int32, plus biases in which the input's zero point is folded.

    Constants are a header with both zero points, then a bias for each channel.
    """

    output_bytes = 4
    input_offset = 0
    weight_prescale = 1
    is_short = True

    def constants(self, biases: Array, weight_zero_point: int, input_zero_point: int) -> bytes:
        """Return the constant, for channels that fill whole vectors; the input's zero point is of bytes as read."""
        header = np.zeros(HEADER_BYTES // 4, np.int32)
        header[:2] = weight_zero_point, input_zero_point
        return header.tobytes() + biases.astype(np.int64).astype(np.int32).tobytes()

    def weight_zero_point(self, kb: KernelBuilder, constants: Value) -> Value:
        """Load the residual zero point of the weights."""
        return kb.load(I32, constants)

    def input_zero_point(self, kb: KernelBuilder, constants: Value) -> Value:
        """Load the zero point of the bytes as they are read."""
        return kb.load(I32, constants, 4)

    def bias(self, kb: KernelBuilder, constants: Value, channel: Value, lanes: int) -> Value:
        """Load the biases."""
        return kb.load(vector(I32, lanes), kb.at(constants, HEADER_BYTES), kb.mul(channel, 4))

    def requantize(self, kb: KernelBuilder, accs: Sequence[Value], constants: Value, channel: Value) -> list[Value]:
        """Return the accumulators."""
        return list(accs)


# -- products of rows that have scales of their own --------------------------------------------------------------------


class _ProductExtents(NamedTuple):
    """Run-time parameters of products of rows."""

    channels: Any
    headers: Any  # the offset of the rows' headers


@dataclass(frozen=True, slots=True)
class RowDequantization(Kernel):
    """Products of rows as floats, from their sums; zero point and scale are the row's, all else as in `Dequantization`.

    Constants are rows for all channels: the sums of their weights, their scales and the bias.
    """

    low: float
    high: float
    rows: int = field(repr=False)
    channels: int = field(repr=False)
    headers: int = field(repr=False)

    @property
    def work_items(self) -> int:
        """Rows."""
        return self.rows

    def params(self) -> bytes:
        """Return the constant with the extents."""
        return pack_params(_ProductExtents(self.channels, self.headers))

    @staticmethod
    def constants(sums: Array, factors: Array, biases: Array) -> bytes:
        """Return the constant with what belongs to the channels."""
        floats = (np.asarray(row, np.float32).tobytes() for row in (factors, biases))
        return sums.astype(np.int32).tobytes() + b"".join(floats)

    def emit(self, kb: KernelBuilder) -> None:
        """Args: sums, bytes with the rows' headers, floats, constants of channels, params."""
        sums, steps, out, constants = map(kb.argument, range(4))
        extents = load_params(kb, kb.argument(4), _ProductExtents)
        row_bytes = kb.mul(extents.channels, 4)
        factors = kb.at(constants, row_bytes)
        biases = kb.at(factors, row_bytes)
        with kb.loop(kb.begin, kb.end) as row:
            header = kb.at(steps, kb.ir.add(extents.headers, kb.mul(row, 8)))
            scale = kb.load(F32, header, _SCALE)
            zero_point = kb.ir.sub(kb.load(I32, header, _ZERO_POINT), I32(_ZERO))
            first, begin = kb.ir.mul(row, row_bytes), kb.i64(0)
            source, target = kb.at(sums, first), kb.at(out, first)
            for lanes in (kb.target.lanes, 1):
                end = kb.ir.and_(extents.channels, kb.i64(-lanes))
                scales, zero_points = kb.broadcast(scale, lanes), kb.broadcast(zero_point, lanes)
                with kb.loop(begin, end, lanes) as channel:
                    offset = kb.mul(channel, 4)
                    floats, integers = vector(F32, lanes), vector(I32, lanes)
                    correction = kb.ir.mul(zero_points, kb.load(integers, constants, offset))
                    sum_ = kb.ir.sub(kb.load(integers, source, offset), correction)
                    factor = kb.ir.fmul(scales, kb.load(floats, factors, offset))
                    value = kb.ir.fadd(kb.ir.fmul(kb.ir.sitofp(sum_, floats), factor), kb.load(floats, biases, offset))
                    kb.store(clamp_float(kb, value, self.low, self.high), target, offset)
                begin = end
        kb.return_void()
