"""Scale and zero point of 8-bit quantized tensors, real = scale · (q − zero_point), for activations and for weights.

Activations are quantized asymmetrically: the range of their values, extended to contain 0, is mapped to all 256
quantized values, and the zero point is rounded to the nearest integer so that 0 is exact. Weights are quantized
symmetrically, to −127..127, with one scale for the tensor or one for each channel. uint8 has the same scales as int8;
its quantized values and zero points are higher by 128. Quotients are float64 and halves are rounded away from zero.
Scales are float32, as in .tflite files. The rules are those of TFLite's 8-bit quantization specification.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nnfmq.hal.errors import InvalidArgument

Array = npt.NDArray[Any]

QMIN, QMAX, WEIGHT_QMAX = -128, 127, 127
"""The int8 limits of activations, and the largest magnitude of a quantized weight."""
UINT8_OFFSET = 128
RANGE_BITS = 12
_MAX_BIAS = 2.0**30  # half of int32's range; the other half is left for the sum of products
_MIN_SCALE = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True)
class Range:
    """The minimum and the maximum of a tensor's values; `low` <= 0 <= `high` if created by `from_min_max`."""

    low: float
    high: float

    @classmethod
    def from_min_max(cls, low: float, high: float) -> Range:
        """Return a range that contains `low`, `high` and 0, its bounds rounded outward to RANGE_BITS significant bits.

        The rounding widens the range by 1/2048 at most. Float sums differ in their last bits between BLAS
        implementations; with rounded bounds the same model and inputs nearly always produce the same file.

        Raises:
            InvalidArgument: If a bound is infinite or NaN.
        """
        if not (math.isfinite(low) and math.isfinite(high)):
            raise InvalidArgument(f"values from {low} to {high}: a range must be finite")
        return cls(0.0 - _round_up(max(0.0, -low)), _round_up(max(0.0, high)))

    def union(self, other: Range) -> Range:
        """Return the smallest range that contains both."""
        return Range(min(self.low, other.low), max(self.high, other.high))


def _round_up(value: float) -> float:
    """Round up to RANGE_BITS significant bits."""
    fraction, exponent = math.frexp(value)
    return math.ldexp(math.ceil(math.ldexp(fraction, RANGE_BITS)), exponent - RANGE_BITS)


@dataclass(frozen=True, slots=True)
class QuantParams:
    """Scale, zero point and data type ("int8" or "uint8") of a quantized tensor; `scale` is exact in float32."""

    scale: float
    zero_point: int
    dtype: str

    @classmethod
    def from_int8(cls, scale: float, zero_point: int, dtype: str) -> QuantParams:
        """Return the parameters for `dtype` that correspond to `zero_point` of an int8 tensor."""
        return cls(scale, zero_point + zero_point_offset(dtype), dtype)

    @property
    def representable_range(self) -> Range:
        """The real numbers that the minimum and the maximum of the data type represent."""
        offset = zero_point_offset(self.dtype)
        low, high = (self.scale * (limit + offset - self.zero_point) for limit in (QMIN, QMAX))
        return Range(low, high)

    def quantize(self, values: Array) -> Array:
        """Return the nearest quantized values; those out of range saturate."""
        limits = np.iinfo(self.dtype)
        nearest = round_half_away(values.astype(np.float64) / self.scale) + self.zero_point
        result: Array = np.clip(nearest, limits.min, limits.max).astype(self.dtype)
        return result

    def dequantize(self, quantized: Array) -> Array:
        """Return the real numbers that `quantized` represents, as float64."""
        result: Array = (quantized.astype(np.float64) - self.zero_point) * self.scale
        return result


def choose_quant_params(value_range: Range, dtype: str) -> QuantParams:
    """Return the parameters that map `value_range`, which must contain 0, to all values of "int8" or "uint8"."""
    scale = float(np.float32((value_range.high - value_range.low) / (QMAX - QMIN)))
    if scale < _MIN_SCALE:  # all values are 0, which every scale represents
        scale = 1.0
    zero_point = int(round_half_away(np.float64(QMIN - value_range.low / scale)))
    return QuantParams.from_int8(scale, min(QMAX, zero_point), dtype)


def zero_point_offset(dtype: str) -> int:
    """Return the difference between the zero points, and the quantized values, of `dtype` and of int8."""
    return UINT8_OFFSET if dtype == "uint8" else 0


def round_half_away(values: Array | np.float64 | float) -> Array:
    """Return the nearest integers as float64; halves are rounded away from zero."""
    result: Array = np.copysign(np.floor(np.abs(values) + 0.5), values)
    return result


@dataclass(frozen=True, slots=True)
class QuantizedWeights:
    """Quantized weights and bias of one operator.

    `values` (int8 or uint8) has the shape of the weights. `scales` (float32) has one element, or one for each channel
    along `channel_axis`. `bias` (int32, or None) is quantized with `bias_scales`, which has as many elements.
    """

    values: Array
    scales: Array
    channel_axis: int | None
    zero_point: int
    bias: Array | None
    bias_scales: Array

    def dequantize(self) -> Array:
        """Return the weights that the quantized values represent, as float64."""
        scales = _broadcast_scales(self.scales, self.channel_axis, self.values.ndim)
        result: Array = (self.values.astype(np.float64) - self.zero_point) * scales
        return result


def quantize_weights(
    weights: Array, bias: Array | None, channel_axis: int | None, input_params: QuantParams
) -> QuantizedWeights:
    """Quantize float32 weights and bias for an input that has `input_params`.

    With a `channel_axis` each channel has a scale, otherwise the tensor has one. A scale is the largest magnitude /
    127. It is larger if the bias, whose scale is input scale · weight scale, would otherwise exceed 30 bits: this
    happens if the weights of a channel are tiny and its bias is not.

    Raises:
        InvalidArgument: If a value is not finite, or a product of scales is not a normal float32.
    """
    if not (np.isfinite(weights).all() and (bias is None or np.isfinite(bias).all())):
        raise InvalidArgument("weights or bias are not all finite")
    other_axes = None if channel_axis is None else tuple(n for n in range(weights.ndim) if n != channel_axis)
    magnitudes = np.abs(weights).max(axis=other_axes).reshape(-1).astype(np.float64)
    scales = np.maximum(magnitudes / WEIGHT_QMAX, _min_scales_for_bias(bias, len(magnitudes), input_params))
    scales = np.where(scales < _MIN_SCALE, 1.0, scales).astype(np.float32)

    nearest = round_half_away(weights.astype(np.float64) / _broadcast_scales(scales, channel_axis, weights.ndim))
    zero_point = zero_point_offset(input_params.dtype)
    values = (np.clip(nearest, -WEIGHT_QMAX, WEIGHT_QMAX) + zero_point).astype(input_params.dtype)

    bias_scales = _multiply_scales(input_params.scale, scales)
    bias_values = None if bias is None else round_half_away(bias.astype(np.float64) / bias_scales).astype(np.int32)
    return QuantizedWeights(values, scales, channel_axis, zero_point, bias_values, bias_scales)


def _min_scales_for_bias(bias: Array | None, count: int, input_params: QuantParams) -> Array:
    """Return, for each of `count` weight scales, the smallest with which the bias fits."""
    if bias is None:
        return np.zeros(count)
    magnitudes = np.abs(bias.astype(np.float64))
    result: Array = (magnitudes if count > 1 else magnitudes.max(keepdims=True)) / (input_params.scale * _MAX_BIAS)
    return result


def _multiply_scales(input_scale: float, scales: Array) -> Array:
    with np.errstate(over="ignore", under="ignore"):
        products: Array = np.float32(input_scale) * scales
    if not (np.isfinite(products) & (products >= _MIN_SCALE)).all():
        raise InvalidArgument(
            f"an input scale of {input_scale:g} and weight scales from {scales.min():g} are too far from 1"
        )
    return products


def _broadcast_scales(scales: Array, axis: int | None, rank: int) -> Array:
    """Return `scales` as float64, in a shape that broadcasts along `axis`."""
    shape = [1] * rank
    if axis is not None:
        shape[axis] = len(scales)
    return scales.astype(np.float64).reshape(shape)


def sqnr_db(signal: float, noise: float) -> float | None:
    """Return the ratio of two sums of squares in decibels, or None if one of them is 0."""
    return 10.0 * math.log10(signal / noise) if signal > 0 and noise > 0 else None
