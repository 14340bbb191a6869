"""Requantization and activation ranges: from exact integer accumulators to 8-bit quantized values in NumPy.

TFLite computes clamp(zero_point + shift(high_mul(sum, multiplier))) in int64 with two roundings. For 8-bit results that
is a floor of an affine function, which float64 computes exactly and several times faster:

    floor(floor(s·m / 2^31 + 1/2) / 2^e, ties away from zero) = floor(s·m / 2^(31+e) + 1/2 ± 2^-(1+e))

with + for sums ≥ 0 and - below; e = 0 has no second term. Between -2^9 and 2^9 the right side is a multiple of
2^-(31+e) and has at most 53 bits if e ≤ 12; outside, the result is clamped. `requantizer` chooses at preparation.

    Q1 a requantization scale is from 0 to 2^30          Q2 a requantization scale is in (0, 1)
    Q3 a requantization scale is greater than 1          Q4 bias scale = input scale · filter scale
    Q5 activation code 0 to 3                            Q6 the output has the operation's fixed scale and zero point
    Q7 output scale and zero point are the input's
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
from msgspec import Struct

from nnfmq.hal.types import FusedActivationFunc, Operand
from nnfmq.operations import declaration as op
from nnfmq.operations import fixed_point
from nnfmq.operations.declaration import Array, Tensor
from nnfmq.operations.fixed_point import Ints, ints, rounded
from nnfmq.operations.shapes import require

Epilogue: TypeAlias = Callable[[Array, Array], None]  # (accumulators, output): fills the output

EXACT_FLOAT32 = 1 << 24  # float32 represents all integers up to this one
_MAX_EXACT_SHIFT = 12


def require_activation(activation: int) -> None:
    """Require a FusedActivationFunc (Q5)."""
    allowed = f"allowed are 0 to {max(FusedActivationFunc):d}"
    require(activation in tuple(FusedActivationFunc), "Q5", f"activation code {activation}, {allowed}")


def float_activation_range(activation: int) -> tuple[float, float]:
    """Return the minimum and maximum of a fused activation."""
    require_activation(activation)
    return FusedActivationFunc(activation).bounds


def dtype_range(tensor: Tensor) -> tuple[int, int]:
    """Return the minimum and maximum of an integer tensor's dtype."""
    info = np.iinfo(tensor.dtype)
    return int(info.min), int(info.max)


def quantized_activation_range(activation: int, tensor: Tensor) -> tuple[int, int]:
    """Return the quantized minimum and maximum of a fused activation (TFLite's CalculateActivationRangeQuantized)."""
    return quantized_range(*float_activation_range(activation), tensor)


def quantized_range(low: float, high: float, tensor: Tensor) -> tuple[int, int]:
    """Return the quantized values of `low` and `high`, which may be infinite, limited to the range of the dtype."""
    minimum, maximum = dtype_range(tensor)
    lower = minimum if low == -np.inf else max(minimum, quantize(low, tensor))
    upper = maximum if high == np.inf else min(maximum, quantize(high, tensor))
    return min(lower, maximum), max(upper, minimum)


def quantize(real: float, tensor: Tensor) -> int:
    """Return zero point + round(real / scale), divided in float32 as in TFLite; not clamped."""
    quotient = float(np.float32(real) / np.float32(tensor.scale))
    steps = math.floor(min(abs(quotient), 2.0**31) + 0.5)  # infinite if the scale is denormal
    return tensor.zero_point + (steps if quotient >= 0 else -steps)


def all_quantized_values(tensor: Tensor) -> Array:
    """Return the 256 values of an 8-bit tensor, ordered by their bits, which index lookup tables."""
    return np.arange(256, dtype=np.uint8).view(tensor.dtype)


def dequantized_values(tensor: Tensor) -> Array:
    """Return the float32 value of each 8-bit quantized value, indexed by its bits."""
    minus_zero_point = all_quantized_values(tensor).astype(np.int32) - tensor.zero_point
    result: Array = minus_zero_point.astype(np.float32) * np.float32(tensor.scale)
    return result


def requantized_values(tensor: Tensor, output: Tensor) -> Array | None:
    """Return a table from the quantized values of `tensor` to those of `output`; None if the quantization is equal.

    Values are float32, their quotient float64; ties are rounded up in unsigned arithmetic (int8 values plus 128).
    """
    if (tensor.scale, tensor.zero_point) == (output.scale, output.zero_point):
        return None
    lowest = dtype_range(output)[0]
    quotients = dequantized_values(tensor).astype(np.float64) / float(np.float32(output.scale))
    clamped = np.clip(quotients + (output.zero_point - lowest), 0, 255)
    floored = np.floor(clamped)
    result: Array = (floored + (clamped - floored >= 0.5) + lowest).astype(output.dtype)
    return result


def rescaling(real: float) -> Callable[[Array], Ints]:
    """Return the function that multiplies by `real`, and rounds twice. Requires Q1 of `real`."""
    multiplier, shift = fixed_point.quantize_multiplier(real)
    return lambda x: fixed_point.multiply(ints(x), multiplier, shift)


def float_ratio(input: Tensor, output: Tensor) -> float:
    """Return the quotient of the scales, rounded to float32 as in most of TFLite's functions of one value."""
    return float(np.float32(input.scale) / np.float32(output.scale))


def clamped(values: Ints, output: Tensor) -> Array:
    """Return values without a zero point in the output's type, limited to its range."""
    return np.clip(values + output.zero_point, *dtype_range(output)).astype(output.dtype)


def scaled(values: Ints, real: float) -> Ints:
    """Return `real` times values, rounded twice; where TFLite's 32 bits would wrap around, what clamps to 8 bits."""
    return multiplied(values, *fixed_point.quantize_multiplier(real))


def multiplied(values: Ints, multiplier: int, exponent: int) -> Ints:
    """Return values times the fixed-point number multiplier / 2^31 * 2^exponent, limited as in `scaled`."""
    limit = fixed_point.INT32_MAX >> max(exponent, 0)
    return fixed_point.multiply(np.clip(values, -limit, limit), multiplier, exponent)


def real_entries(function: Callable[[Array], Array]) -> Callable[[Array, Tensor, Tensor], Array]:
    """Return a function that tabulates `function` of reals, computed in float64 and rounded to float32."""

    def entries(quantized: Array, input: Tensor, output: Tensor) -> Array:
        with np.errstate(all="ignore"):
            reals = function(dequantized_values(input).astype(np.float64)).astype(np.float32)
            steps = (reals * (np.float32(1) / np.float32(output.scale))).astype(np.float64)
        return clamped(ints(np.clip(rounded(steps), -512, 512)), output)

    return entries


def require_quantization(tensor: Tensor, scale: float, zero_point: int) -> None:
    """Require the fixed scale and zero point of the operation's output (Q6)."""
    matches = tensor.scale == scale and tensor.zero_point == zero_point
    actual = f"scale {tensor.scale} and zero point {tensor.zero_point}"
    require(matches, "Q6", f"the output has {actual}, required are {scale} and {zero_point}")


def output_scale_level(inputs: Mapping[str, Operand], output: Operand) -> int:
    """Return HAL 1.2 if a uint8 output scale is not greater than input scale · filter scale, as 1.0 and 1.1 require."""
    source, filter = inputs["input"], inputs.get("filter") or inputs["weights"]
    return op.V1_2 if source.type == op.Q8 and output.scale <= source.scale * filter.scale else op.V1_0


def requantization_scales(input: Tensor, filter: Tensor, bias: Tensor, output: Tensor) -> list[float]:
    """Return one requantization scale, or one for each output channel (TFLite's GetQuantizedConvolutionMultiplier)."""
    if filter.channel_quant is None:
        product = float(np.float32(input.scale) * np.float32(filter.scale))
        tolerance = 1e-6 * min(product, bias.scale)
        require(abs(product - bias.scale) <= tolerance, "Q4", f"bias scale {bias.scale} is not {product}")
        return [product / float(np.float32(output.scale))]
    products = np.float32(input.scale) * np.asarray(filter.channel_quant.scales, np.float32)
    return [float(product) / float(np.float32(output.scale)) for product in products]


def real_scales(input: Tensor, weights: Tensor, output: Tensor) -> list[float]:
    """Return input scale times weights' scale over output scale, computed in float64: one, or one for each channel."""
    scales = [weights.scale] if weights.channel_quant is None else weights.channel_quant.scales
    factor, divisor = float(np.float32(input.scale)), float(np.float32(output.scale))
    return [factor * float(np.float32(scale)) / divisor for scale in scales]


class OutputMultipliers(Struct, frozen=True):
    """Output multipliers and shifts, one or one for each channel: scale ≈ multiplier / 2^31 · 2^shift."""

    multipliers: Ints
    shifts: Ints

    @classmethod
    def of(cls, reals: list[float]) -> OutputMultipliers:
        """Quantize real multipliers."""
        pairs = [fixed_point.quantize_multiplier(real) for real in reals]
        return cls(fixed_point.ints([m for m, _ in pairs]), fixed_point.ints([s for _, s in pairs]))

    def of_channels(self, channels: Array) -> OutputMultipliers:
        """Return the multipliers of `channels`, by number."""
        return OutputMultipliers(self.multipliers[channels], self.shifts[channels])

    def rows(self, repeat: int) -> OutputMultipliers:
        """Return per-channel multipliers repeated to the length of a row; a single one stays single."""
        if len(self.multipliers) == 1:
            return self
        return OutputMultipliers(np.tile(self.multipliers, repeat), np.tile(self.shifts, repeat))


def requantizer(multipliers: OutputMultipliers, bias: Ints, bound: int, output: Tensor, activation: int) -> Epilogue:
    """Return an epilogue that adds `bias` to rows of accumulators and requantizes them to `output`.

    `bound` is the largest absolute accumulator before the bias. Accumulators are exact integers of any numeric dtype.
    """
    low, high = quantized_activation_range(activation, output)
    if int(np.max(-multipliers.shifts, initial=0)) > _MAX_EXACT_SHIFT:
        return _integer_requantizer(multipliers, bias, low, high, output.zero_point)
    right = np.maximum(-multipliers.shifts, 0)
    scales = np.ldexp(multipliers.multipliers.astype(np.float64), (multipliers.shifts - 31).astype(np.int32))
    nudges = np.where(right > 0, np.ldexp(0.5, -right.astype(np.int32)), 0.0)
    if low >= output.zero_point:
        offset = output.zero_point + 0.5 + nudges
        folded = _folded_bias(multipliers, bias, bound, offset)
        if folded is not None:
            return _affine(scales, folded, low, high)
        return _rectified(scales, bias, offset, low, high)
    return _signed(scales, bias, nudges, output.zero_point + 0.5, low, high)


def _folded_bias(multipliers: OutputMultipliers, bias: Ints, bound: int, offset: Array) -> Array | None:
    """Return bias · scale + offset if adding it to sum · scale is exact in float64, else None."""
    right = np.maximum(-multipliers.shifts, 0)
    left = np.maximum(multipliers.shifts, 0)
    units = np.ldexp(offset, (right + 31).astype(np.int32)).astype(np.int64)
    limit = 1 << 52
    exact = bound * (1 << 31 + int(left.max())) < limit << 1 and int(np.abs(bias).max(initial=0)) < 1 << 21
    if not exact or int(left.max()) > 0:
        return None
    total = bias * multipliers.multipliers + units
    return np.ldexp(total.astype(np.float64), -(right + 31).astype(np.int32)) if np.abs(total).max() < limit else None


def _scalar_if_one(values: Array) -> Any:
    return values[0] if len(values) == 1 else values


def _affine(scales: Array, offset: Array, low: int, high: int) -> Epilogue:
    scale = _scalar_if_one(scales)

    def epilogue(sums: Array, out: Array) -> None:
        y = np.multiply(sums, scale, dtype=np.float64)
        np.add(y, offset, out=y)
        _store(y, out, low, high)

    return epilogue


def _rectified(scales: Array, bias: Ints, offset: Array, low: int, high: int) -> Epilogue:
    scale, shift, real_bias = _scalar_if_one(scales), _scalar_if_one(offset), bias.astype(np.float64)

    def epilogue(sums: Array, out: Array) -> None:
        y = np.add(sums, real_bias, dtype=np.float64)
        np.multiply(y, scale, out=y)
        np.add(y, shift, out=y)
        _store(y, out, low, high)

    return epilogue


def _signed(scales: Array, bias: Ints, nudges: Array, offset: float, low: int, high: int) -> Epilogue:
    scale, nudge, real_bias = _scalar_if_one(scales), _scalar_if_one(nudges), bias.astype(np.float64)

    def epilogue(sums: Array, out: Array) -> None:
        y = np.add(sums, real_bias, dtype=np.float64)
        np.multiply(y, scale, out=y)
        np.add(y, np.copysign(nudge, y), out=y)
        np.add(y, offset, out=y)
        _store(y, out, low, high)

    return epilogue


def _store(y: Array, out: Array, low: int, high: int) -> None:
    """Clamp, floor and convert. The cast truncates, which is a floor for values that are not negative."""
    np.maximum(y, low, out=y)
    np.minimum(y, high, out=y)
    if low < 0:
        np.floor(y, out=y)
    np.copyto(out, y, casting="unsafe")


def _integer_requantizer(multipliers: OutputMultipliers, bias: Ints, low: int, high: int, zero_point: int) -> Epilogue:
    """Return the definition in int64, for multipliers below 2^-12."""

    def epilogue(sums: Array, out: Array) -> None:
        scaled = fixed_point.multiply(sums.astype(np.int64) + bias, multipliers.multipliers, multipliers.shifts)
        np.copyto(out, np.clip(scaled + zero_point, low, high), casting="unsafe")

    return epilogue


# ----------------------------------------------------------------------------------------------------------------------
# Rows of floats as values of 8 bits represent them: with a scale of their own, found at each execution.


_LOWEST, _HIGHEST = -128, 127
_BYTE = 255
SMALLEST_RANGE = 2.0**-100
"""Rows of a smaller range are taken as zeros in `row_steps`: the inverse of their scale may exceed float32."""


def quantize_rows(rows: Array, asymmetric: bool) -> Array:
    """Return the values of `rows` (..., length), in float32, as 8 bits can represent them."""
    if rows.size == 0:
        return rows.copy()
    steps, scale = _steps(rows, asymmetric)
    result: Array = steps * scale
    return result


def row_steps(rows: Array, asymmetric: bool) -> tuple[Array, Array]:
    """Return the bytes of `rows` (..., length) less their zero points, as float32, and the scales (..., 1).

    Bytes cannot represent NaN and infinities: the scale of a row that has some is NaN. That of a row without elements
    is 1.
    """
    if rows.size == 0:
        return rows.copy(), np.ones((*rows.shape[:-1], 1), np.float32)
    ends = (limit(rows, axis=-1, keepdims=True) for limit in (np.min, np.max))
    low, high = (np.asarray(end, np.float32) for end in ends)
    is_finite = np.isfinite(low) & np.isfinite(high)
    is_wide = np.maximum(np.minimum(low, 0) * np.float32(-1), high) >= np.float32(SMALLEST_RANGE)
    steps, scale = _steps(np.where(is_finite & is_wide, rows, np.float32(0)), asymmetric)
    return steps, np.where(is_finite, scale, np.float32(np.nan))


def _steps(rows: Array, asymmetric: bool) -> tuple[Array, Array]:
    """Return the quantized values of rows, less their zero points, and the scales."""
    scale, zero_point = _asymmetric_ranges(rows) if asymmetric else _symmetric_ranges(rows)
    steps = rounded(zero_point + rows * (np.float32(1) / scale if asymmetric else _inverse(rows)))
    lowest = _LOWEST if asymmetric else -_HIGHEST
    return np.clip(steps, np.float32(lowest), np.float32(_HIGHEST)) - zero_point, scale


def _symmetric_ranges(rows: Array) -> tuple[Array, Array]:
    largest = np.abs(rows).max(axis=-1, keepdims=True)
    return np.where(largest > 0, largest / np.float32(_HIGHEST), np.float32(1)), np.zeros_like(largest)


def _inverse(rows: Array) -> Array:
    largest = np.abs(rows).max(axis=-1, keepdims=True)
    return np.float32(_HIGHEST) / np.where(largest > 0, largest, np.float32(1))


def _asymmetric_ranges(rows: Array) -> tuple[Array, Array]:
    """Return the scale of each row and its zero point, chosen for the end of the range with the smaller error."""
    low = np.minimum(rows.min(axis=-1, keepdims=True), 0).astype(np.float64)
    high = np.maximum(rows.max(axis=-1, keepdims=True), 0).astype(np.float64)
    scale = np.where(high > low, (high - low) / (_HIGHEST - _LOWEST), 1.0)
    from_low, from_high = _LOWEST - low / scale, _HIGHEST - high / scale
    is_low = -_LOWEST + np.abs(low / scale) < _HIGHEST + np.abs(high / scale)
    zero_point = np.clip(rounded(np.where(is_low, from_low, from_high)), _LOWEST, _HIGHEST)
    return scale.astype(np.float32), np.where(high > low, zero_point, 0).astype(np.float32)


def linear_steps(values: Array) -> tuple[Array, np.float32]:
    """Return the bytes of ONNX's DynamicQuantizeLinear less their zero point, as float32, and their scale.

    As in ONNX Runtime, the range contains 0; NaN does not count in it, and its byte is 0. The scale of zeros is 1.
    """
    codes, scale, zero_point = linear_codes(values)
    steps: Array = codes - zero_point
    return steps, scale


def linear_codes(values: Array) -> tuple[Array, np.float32, Array]:
    """Return these bytes, as float32, their scale and their zero point."""
    with np.errstate(all="ignore"):  # of infinities, and of ranges beyond float32
        low, high = (limit.reduce(values, axis=None, initial=np.float32(0)) for limit in (np.fmin, np.fmax))
        found = np.float32((high - low) / np.float32(_BYTE))
        scale = found if found > 0 else np.float32(1)
        zero_point = np.float32(_BYTE) - _bytes(np.rint(low / scale) + np.float32(_BYTE))
        return _bytes(np.rint(values / scale) + zero_point), scale, zero_point


def _bytes(values: Array) -> Array:
    """Return numbers limited to those of a byte; NaN becomes 0."""
    limited: Array = np.fmin(np.fmax(values, np.float32(0)), np.float32(_BYTE))
    return limited
