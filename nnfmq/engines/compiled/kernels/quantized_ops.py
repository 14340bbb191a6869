"""Elementwise operators on quantized values, bit-exact with `operations`: by the same roundings, or by lookup tables.

Numbers that depend on scales are constants in memory, not in the code, so that operations of one shape share code.
uint8 and int8 values have one element type, "u1": operators that interpret the sign have `is_signed`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nnfmq.base.frozen import dataclass
from nnfmq.engines.compiled.ir_builder import F32, F64, I8, I32, I64, KernelBuilder, Value, vector
from nnfmq.engines.compiled.kernels.elementwise import ElementwiseOperator
from nnfmq.engines.compiled.kernels.float_ops import bool_bytes, compare
from nnfmq.engines.compiled.kernels.reduction import QuantizedMinMaxReducer
from nnfmq.engines.compiled.kernels.requantize import REQUANT_ROWS, FixedPointMultiplier, requant_constants
from nnfmq.operations.declaration import Tensor
from nnfmq.operations.quantization import OutputMultipliers, quantized_activation_range

__all__ = [
    "Dequantize",
    "Lut8",
    "PerTensorRequantization",
    "QLinearAdd",
    "QLinearMul",
    "Quantize",
    "QuantizeLinear",
    "QuantizedAdd",
    "QuantizedClamp",
    "QuantizedCompare",
    "QuantizedMinMax",
    "QuantizedMul",
    "QuantizedPrelu",
    "QuantizedSelect",
    "int32_rows",
    "per_tensor_requantization",
]

_ROW_LANES = 64  # each number of a constant is repeated for more lanes than any vector has


@dataclass(frozen=True, slots=True)
class PerTensorRequantization:
    """Requantization of int32 values with one multiplier for the tensor, output zero point and clamp."""

    multiplier: FixedPointMultiplier

    def emit(self, kb: KernelBuilder, values: Value, constants: Value) -> Value:
        """Return 8-bit results. `constants` is the address of what `per_tensor_requantization` returned."""
        lanes = values.type.count
        if lanes == 1:  # the fixed-point multiplication needs pairs of lanes
            pair = self.emit(kb, kb.shuffle(values, values, (0, 0)), constants)
            return kb.shuffle(pair, pair, (0,))
        if not self.multiplier.has_left_shift:
            values = kb.ir.add(values, values)
        rounded = self.multiplier.apply(kb, values, lambda row: _load_row(kb, constants, row, lanes))
        zero_point, low, high = (_load_row(kb, constants, REQUANT_ROWS + n, lanes) for n in range(3))
        return kb.ir.trunc(kb.clamp(kb.ir.add(rounded, zero_point), low, high), vector(I8, lanes))


def per_tensor_requantization(
    multiplier: tuple[int, int], max_abs_value: int, activation: int, output: Tensor
) -> tuple[PerTensorRequantization, bytes] | None:
    """Return the requantization to `output` and its constants, or None if an intermediate may not fit 32 bits.

    `multiplier` is an output multiplier and shift; `max_abs_value` bounds the values that are requantized.
    """
    multipliers = OutputMultipliers(
        np.full(_ROW_LANES, multiplier[0], np.int64), np.full(_ROW_LANES, multiplier[1], np.int64)
    )
    bounds = np.full(_ROW_LANES, max_abs_value, np.int64)
    fixed_point = FixedPointMultiplier.of(multipliers, np.zeros(_ROW_LANES, np.int64), bounds)
    if fixed_point is None:
        return None
    output_rows = int32_rows(output.zero_point, *quantized_activation_range(activation, output))
    return PerTensorRequantization(fixed_point), requant_constants(multipliers).tobytes() + output_rows


def int32_rows(*values: int) -> bytes:
    """Return a constant with a row of int32 lanes for each value."""
    return np.repeat(np.array(values, np.int64).astype("<i4"), _ROW_LANES).tobytes()


def _load_row(kb: KernelBuilder, constants: Value, row: int, lanes: int) -> Value:
    return kb.load(vector(I32, lanes), constants, 4 * _ROW_LANES * row)


def _to_int32(kb: KernelBuilder, values: Value, is_signed: bool) -> Value:
    return (kb.ir.sext if is_signed else kb.ir.zext)(values, vector(I32, values.type.count))


def _subtract_zero_points(
    kb: KernelBuilder, inputs: Sequence[Value], are_signed: tuple[bool, bool], zero_points: Value
) -> tuple[Value, Value]:
    """Return two inputs as int32 less their zero points, which are the rows of a constant."""
    first, second = (
        kb.ir.sub(_to_int32(kb, values, is_signed), _load_row(kb, zero_points, row, values.type.count))
        for row, (values, is_signed) in enumerate(zip(inputs, are_signed, strict=True))
    )
    return first, second


def _lookup(kb: KernelBuilder, values: Value, table: Value) -> Value:
    """Return table[value] for each lane, of a table of 256 bytes indexed by the value's bits."""
    result = values
    for lane in range(values.type.count):
        index = kb.ir.zext(kb.ir.extract_element(values, kb.i64(lane)), I64)
        result = kb.ir.insert_element(result, kb.load(I8, table, index), kb.i64(lane))
    return result


def _rescale(
    kb: KernelBuilder, inputs: Sequence[Value], needs_lut: tuple[bool, bool], constants: Sequence[Value]
) -> list[Value]:
    """Return inputs requantized to the output's scale, by a table for each input that needs it."""
    tables = iter(constants)
    return [
        _lookup(kb, values, next(tables)) if needs else values for values, needs in zip(inputs, needs_lut, strict=True)
    ]


def _dequantize(kb: KernelBuilder, values: Value, is_signed: bool, zero_point: int, scale: float) -> Value:
    lanes = values.type.count
    difference = kb.ir.sub(_to_int32(kb, values, is_signed), kb.splat(I32, zero_point, lanes))
    return kb.ir.fmul(kb.ir.sitofp(difference, vector(F32, lanes)), kb.splat(F32, scale, lanes))


class _QuantizedOperator(ElementwiseOperator):
    __slots__ = ()
    output_type = "u1"


class _BinaryOperator(_QuantizedOperator):
    __slots__ = ()
    input_types: tuple[str, ...] = ("u1", "u1")


class _UnaryOperator(_QuantizedOperator):
    __slots__ = ()
    input_types: tuple[str, ...] = ("u1",)


@dataclass(frozen=True, slots=True)
class Lut8(_UnaryOperator):
    """Any function of one quantized value, as a lookup table. Constant: 256 results, by the bits of the value."""

    constant_count = 1

    def emit(self, kb: KernelBuilder, inputs: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        return _lookup(kb, inputs[0], constants[0])


@dataclass(frozen=True, slots=True)
class QuantizedClamp(_UnaryOperator):
    """RELU and its variants, of one scale: values clamped to [low, high]."""

    is_signed: bool
    low: int
    high: int

    vectors = 8

    def emit(self, kb: KernelBuilder, inputs: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        return QuantizedMinMaxReducer(self.is_signed, True, self.low, self.high).finalize(kb, inputs[0], 1)


@dataclass(frozen=True, slots=True)
class QuantizedAdd(_BinaryOperator):
    """ADD and SUB: both inputs rescaled to a common scale / 2^20, then their sum requantized.

    The common scale is twice the larger input scale. An input `has_half_multiplier` if it has the larger scale: its
    multiplier is 1/2, with SUB's sign if it is the second one and `is_sub`. Other multipliers m are applied in 32 bits,
    as (x·m + 2^10) >> 11 with m split into two parts, then shifted, rounding half away from 0.

    Constants: those of each input (`input_constants`), then the requantization's.
    """

    are_signed: tuple[bool, bool]
    has_half_multiplier: tuple[bool, bool]
    is_sub: bool
    requantization: PerTensorRequantization

    constant_count = 3

    @staticmethod
    def input_constants(zero_point: int, multiplier: tuple[int, int], sign: int) -> bytes:
        """Return an input's constant for its output multiplier and shift; `sign` is -1 for SUB's second input."""
        factor, right = sign * multiplier[0], -multiplier[1]
        return int32_rows(zero_point, factor >> 11, factor & 2047, (1 << right) >> 1, right)

    def emit(self, kb: KernelBuilder, inputs: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        first, second = (self._rescaled(kb, number, inputs[number], constants[number]) for number in (0, 1))
        return self.requantization.emit(kb, kb.ir.add(first, second), constants[2])

    def _rescaled(self, kb: KernelBuilder, number: int, values: Value, constants: Value) -> Value:
        lanes = values.type.count
        zero_point, high, low, half, right = (_load_row(kb, constants, row, lanes) for row in range(5))
        difference = kb.ir.sub(_to_int32(kb, values, self.are_signed[number]), zero_point)
        if self.has_half_multiplier[number]:
            shifted = kb.ir.shl(difference, kb.splat(I32, 19, lanes))
            return kb.ir.neg(shifted) if number and self.is_sub else shifted
        low_product = kb.ir.add(kb.ir.mul(difference, low), kb.splat(I32, 1 << 10, lanes))
        product = kb.ir.add(kb.ir.mul(difference, high), kb.ir.ashr(low_product, kb.splat(I32, 11, lanes)))
        tie = kb.ir.ashr(product, kb.splat(I32, 31, lanes))
        return kb.ir.ashr(kb.ir.add(kb.ir.add(product, half), tie), right)


@dataclass(frozen=True, slots=True)
class QuantizedMul(_BinaryOperator):
    """MUL: the product of the inputs less their zero points, requantized. Constants: zero points; requantization's."""

    are_signed: tuple[bool, bool]
    requantization: PerTensorRequantization

    constant_count = 2

    def emit(self, kb: KernelBuilder, inputs: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        first, second = _subtract_zero_points(kb, inputs, self.are_signed, constants[0])
        return self.requantization.emit(kb, kb.ir.mul(first, second), constants[1])


@dataclass(frozen=True, slots=True)
class QuantizedPrelu(_BinaryOperator):
    """PRELU: x >= 0 requantized with one multiplier, x · slope with another.

    Constants: both zero points; those of `positive`; those of `negative`.
    """

    are_signed: tuple[bool, bool]
    positive: PerTensorRequantization
    negative: PerTensorRequantization

    constant_count = 3

    def emit(self, kb: KernelBuilder, inputs: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        values, slopes = _subtract_zero_points(kb, inputs, self.are_signed, constants[0])
        is_positive = kb.ir.icmp_signed(">=", values, kb.splat(I32, 0, values.type.count))
        positive = self.positive.emit(kb, values, constants[1])
        return kb.ir.select(is_positive, positive, self.negative.emit(kb, kb.ir.mul(values, slopes), constants[2]))


@dataclass(frozen=True, slots=True)
class QuantizedMinMax(_BinaryOperator):
    """MAXIMUM (`is_max`) and MINIMUM. Constants: a requantization table for each input that `needs_lut`."""

    is_signed: bool
    is_max: bool
    needs_lut: tuple[bool, bool]

    @property
    def constant_count(self) -> int:
        """One for each input with a table."""
        return sum(self.needs_lut)

    def emit(self, kb: KernelBuilder, inputs: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        reducer = QuantizedMinMaxReducer(self.is_signed, self.is_max, 0, 0)
        return reducer.reduce(kb, *_rescale(kb, inputs, self.needs_lut, constants))


@dataclass(frozen=True, slots=True)
class QuantizedSelect(_QuantizedOperator):
    """SELECT. Constants: a requantization table for each operand that `needs_lut`."""

    needs_lut: tuple[bool, bool]

    input_types = ("u1", "u1", "u1")

    @property
    def constant_count(self) -> int:
        """One for each operand with a table."""
        return sum(self.needs_lut)

    def emit(self, kb: KernelBuilder, inputs: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        is_true = kb.ir.icmp_unsigned("!=", inputs[0], kb.splat(I8, 0, inputs[0].type.count))
        return kb.ir.select(is_true, *_rescale(kb, inputs[1:], self.needs_lut, constants))


@dataclass(frozen=True, slots=True)
class QuantizedCompare(_BinaryOperator):
    """A comparison of the real values. `quantization` has (is_signed, zero_point, scale) of both inputs."""

    order: str
    quantization: tuple[tuple[bool, int, float], tuple[bool, int, float]]

    def emit(self, kb: KernelBuilder, inputs: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        first, second = (_dequantize(kb, values, *q) for values, q in zip(inputs, self.quantization, strict=True))
        return bool_bytes(kb, compare(kb, self.order, first, second))


@dataclass(frozen=True, slots=True)
class Dequantize(_UnaryOperator):
    """DEQUANTIZE to float32."""

    is_signed: bool
    zero_point: int
    scale: float

    output_type = "f4"

    def emit(self, kb: KernelBuilder, inputs: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        return _dequantize(kb, inputs[0], self.is_signed, self.zero_point, self.scale)


@dataclass(frozen=True, slots=True)
class Quantize(_QuantizedOperator):
    """QUANTIZE of float32: the float32 quotient rounded half away from 0. NaN becomes the zero point."""

    zero_point: int
    scale: float
    low: int
    high: int

    input_types = ("f4",)

    def emit(self, kb: KernelBuilder, inputs: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results.

        |quotient| is limited to 1024, which is beyond any quantized value, so that its integer part fits int32 and its
        fraction is exact.
        """
        lanes = inputs[0].type.count
        kind, wide = vector(F32, lanes), vector(I32, lanes)
        quotient = kb.ir.fdiv(inputs[0], kb.splat(F32, self.scale, lanes))
        magnitude = kb.intrinsic("llvm.fabs", quotient)
        limit = kb.splat(F32, 1024.0, lanes)
        limited = kb.ir.select(kb.ir.fcmp_ordered("<", magnitude, limit), magnitude, limit)
        integer = kb.ir.fptosi(limited, wide)
        fraction = kb.ir.fsub(limited, kb.ir.sitofp(integer, kind))
        round_up = kb.ir.zext(kb.ir.fcmp_ordered(">=", fraction, kb.splat(F32, 0.5, lanes)), wide)
        rounded, zero = kb.ir.add(integer, round_up), kb.splat(I32, 0, lanes)
        is_negative = kb.ir.fcmp_ordered("<", quotient, kb.splat(F32, 0.0, lanes))
        signed = kb.ir.select(is_negative, kb.ir.sub(zero, rounded), rounded)
        without_nan = kb.ir.select(kb.ir.fcmp_ordered("ord", quotient, quotient), signed, zero)
        shifted = kb.ir.add(without_nan, kb.splat(I32, self.zero_point, lanes))
        return kb.ir.trunc(
            kb.clamp(shifted, kb.splat(I32, self.low, lanes), kb.splat(I32, self.high, lanes)), vector(I8, lanes)
        )


# ----------------------------------------------------------------------------------------------------------------------
# Elementwise operators of `operations.tflite_extension.quantization`, with equal results.


_LIMIT = 1024.0  # beyond any quantized value; integers up to it fit int32


def _limited(kb: KernelBuilder, values: Value) -> Value:
    """Return float32 numbers from -1024 to 1024; NaN becomes the lowest."""
    lowest, highest = (kb.splat(F32, limit, values.type.count) for limit in (-_LIMIT, _LIMIT))
    above = kb.ir.select(kb.ir.fcmp_ordered(">", values, lowest), values, lowest)
    return kb.ir.select(kb.ir.fcmp_ordered("<", above, highest), above, highest)


def _rounded(kb: KernelBuilder, values: Value) -> Value:
    return kb.ir.fptosi(kb.intrinsic("llvm.nearbyint", _limited(kb, values)), vector(I32, values.type.count))


def _as_bytes(kb: KernelBuilder, values: Value, is_signed: bool) -> Value:
    limits = (-128, 127) if is_signed else (0, 255)
    low, high = (kb.splat(I32, limit, values.type.count) for limit in limits)
    return kb.ir.trunc(kb.clamp(values, low, high), vector(I8, values.type.count))


@dataclass(frozen=True, slots=True)
class QuantizeLinear(_QuantizedOperator):
    """QUANTIZE_LINEAR of float32: the float32 quotient rounded half to even. NaN becomes the lowest value."""

    zero_point: int
    scale: float
    is_signed: bool
    adds_first: bool

    input_types = ("f4",)

    def emit(self, kb: KernelBuilder, inputs: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        lanes = inputs[0].type.count
        quotient = kb.ir.fdiv(inputs[0], kb.splat(F32, self.scale, lanes))
        if self.adds_first:
            quotient = kb.ir.fadd(quotient, kb.splat(F32, float(self.zero_point), lanes))
            return _as_bytes(kb, _rounded(kb, quotient), self.is_signed)
        steps = kb.ir.add(_rounded(kb, quotient), kb.splat(I32, self.zero_point, lanes))
        return _as_bytes(kb, steps, self.is_signed)


@dataclass(frozen=True, slots=True)
class QLinearAdd(_BinaryOperator):
    """QLINEAR_ADD: `factors` of both inputs, and the `offset`; products are exact in float64."""

    factors: tuple[float, float]
    offset: float
    is_signed: bool

    vectors = 1

    def emit(self, kb: KernelBuilder, inputs: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        lanes = inputs[0].type.count
        wide, total = vector(F64, lanes), kb.splat(F32, self.offset, lanes)
        for values, factor in reversed(list(zip(inputs, self.factors, strict=True))):
            product = kb.ir.fmul(
                kb.ir.sitofp(_to_int32(kb, values, self.is_signed), wide), kb.splat(F64, factor, lanes)
            )
            total = kb.ir.fptrunc(kb.ir.fadd(product, kb.ir.fpext(total, wide)), vector(F32, lanes))
        return _as_bytes(kb, _rounded(kb, total), self.is_signed)


@dataclass(frozen=True, slots=True)
class QLinearMul(_BinaryOperator):
    """QLINEAR_MUL: the product of both inputs less their zero points, times `factor`, plus the output's zero point."""

    zero_points: tuple[int, int]
    factor: float
    output_zero_point: int
    is_signed: bool

    vectors = 1

    def emit(self, kb: KernelBuilder, inputs: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        lanes = inputs[0].type.count
        first, second = (
            kb.ir.sub(_to_int32(kb, values, self.is_signed), kb.splat(I32, zero_point, lanes))
            for values, zero_point in zip(inputs, self.zero_points, strict=True)
        )
        product = kb.ir.sitofp(kb.ir.mul(first, second), vector(F32, lanes))
        scaled = kb.ir.fmul(product, kb.splat(F32, self.factor, lanes))
        steps = kb.ir.fadd(scaled, kb.splat(F32, float(self.output_zero_point), lanes))
        return _as_bytes(kb, _rounded(kb, steps), self.is_signed)
