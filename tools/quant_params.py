"""The arithmetic of 8-bit quantization: real = scale × (code − zero point), for activations and for weights.

Activations are asymmetric: the range, widened to hold 0, is spread over all 256 codes, and the zero point is moved to
the nearest code so that 0 is exact. Weights are symmetric, codes −127 to 127, with one scale or one for each channel.
uint8 differs from int8 by 128 in codes and zero points and in nothing else. Quotients are float64, halves go away from
zero, scales are float32 because files hold them so. Source of the rules: TFLite's 8-bit quantization specification.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nnfmq.hal.errors import InvalidArgument

Array = npt.NDArray[Any]

LEAST_CODE, MOST_CODE, MOST_WEIGHT = -128, 127, 127
UINT8_OFFSET = 128
RANGE_BITS = 12
_BIAS_LIMIT = 2.0**30  # half of int32: the other half is for the sum
_SMALLEST = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True)
class Range:
    """The least and the largest value of a tensor; `low` <= 0 <= `high` where made by `holding`."""

    low: float
    high: float

    @classmethod
    def holding(cls, low: float, high: float) -> Range:
        """Return a range that holds `low`, `high` and 0, its ends rounded outward to RANGE_BITS significant bits.

        The rounding widens it by 1/2048 at most. It is there because float sums differ in their last bits from one
        BLAS to the next: so the same model and inputs nearly always give the same file. Raises InvalidArgument for
        infinities and NaN.
        """
        if not (math.isfinite(low) and math.isfinite(high)):
            raise InvalidArgument(f"values from {low} to {high}: a range must be finite")
        return cls(0.0 - _rounded_up(max(0.0, -low)), _rounded_up(max(0.0, high)))

    def union(self, other: Range) -> Range:
        """Return the least range that holds both."""
        return Range(min(self.low, other.low), max(self.high, other.high))


def _rounded_up(value: float) -> float:
    fraction, exponent = math.frexp(value)
    return math.ldexp(math.ceil(math.ldexp(fraction, RANGE_BITS)), exponent - RANGE_BITS)


@dataclass(frozen=True, slots=True)
class Affine:
    """How a tensor's 8-bit codes stand for real numbers; `scale` is exact in float32."""

    scale: float
    zero_point: int
    dtype: str

    @classmethod
    def spread(cls, span: Range, dtype: str) -> Affine:
        """Return the quantization of `span` (which holds 0) over all codes of "int8" or "uint8"."""
        scale = float(np.float32((span.high - span.low) / (MOST_CODE - LEAST_CODE)))
        if scale < _SMALLEST:  # nothing but 0: any scale is right
            scale = 1.0
        return cls.signed(scale, min(MOST_CODE, round_half_away(LEAST_CODE - span.low / scale)), dtype)

    @classmethod
    def signed(cls, scale: float, zero_point: int, dtype: str) -> Affine:
        """Return the quantization whose zero point would be `zero_point` if `dtype` were int8."""
        return cls(scale, zero_point + offset(dtype), dtype)

    @property
    def span(self) -> Range:
        """The reals of the least and the largest code."""
        least, most = LEAST_CODE + offset(self.dtype), MOST_CODE + offset(self.dtype)
        return Range(self.scale * (least - self.zero_point), self.scale * (most - self.zero_point))

    def codes(self, values: Array) -> Array:
        """Return the nearest codes of `values`; what is out of range gets the first or the last code."""
        info = np.iinfo(self.dtype)
        steps = rounded(values.astype(np.float64) / self.scale) + self.zero_point
        result: Array = np.clip(steps, info.min, info.max).astype(self.dtype)
        return result

    def reals(self, codes: Array) -> Array:
        """Return the float64 values that `codes` stand for."""
        result: Array = (codes.astype(np.float64) - self.zero_point) * self.scale
        return result


def offset(dtype: str) -> int:
    """Return what a code of `dtype` is above int8's."""
    return UINT8_OFFSET if dtype == "uint8" else 0


def round_half_away(value: float) -> int:
    """Return the nearest integer, of two the one further from zero."""
    return int(math.copysign(math.floor(abs(value) + 0.5), value))


def rounded(values: Array) -> Array:
    """Return each of `values` (float64) as `round_half_away` does."""
    result: Array = np.copysign(np.floor(np.abs(values) + 0.5), values)
    return result


@dataclass(frozen=True, slots=True)
class Weights:
    """Quantized weights and bias of one operator.

    `codes` have the weights' shape; `scales` (float32) has one element, or one for each channel along `axis`; `bias`
    are int32 codes at `bias_scales`, of which there are as many, or None.
    """

    codes: Array
    scales: Array
    axis: int | None
    zero_point: int
    bias: Array | None
    bias_scales: Array

    def reals(self) -> Array:
        """Return the float64 weights that the codes stand for."""
        result: Array = (self.codes.astype(np.float64) - self.zero_point) * _along(
            self.scales, self.axis, self.codes.ndim
        )
        return result


def quantized_weights(weights: Array, bias: Array | None, axis: int | None, input: Affine) -> Weights:
    """Quantize float32 `weights`, by channel along `axis` or (None) as a whole, for an input quantized as `input`.

    A scale is the largest magnitude / 127, or more where the bias, whose scale is input scale × weight scale, would not
    fit 30 bits: a channel of nearly nothing but bias. Raises InvalidArgument for values that are not finite, and for
    products of scales that are no float32.
    """
    if not (np.isfinite(weights).all() and (bias is None or np.isfinite(bias).all())):
        raise InvalidArgument("weights or bias are not all finite")
    others = None if axis is None else tuple(n for n in range(weights.ndim) if n != axis)
    largest = np.abs(weights).max(axis=others).reshape(-1).astype(np.float64)
    scales = np.maximum(largest / MOST_WEIGHT, _least_scales(bias, len(largest), input))
    scales = np.where(scales < _SMALLEST, 1.0, scales).astype(np.float32)
    steps = rounded(weights.astype(np.float64) / _along(scales, axis, weights.ndim))
    zero_point = offset(input.dtype)
    codes = (np.clip(steps, -MOST_WEIGHT, MOST_WEIGHT) + zero_point).astype(input.dtype)
    bias_scales = _product_scales(input.scale, scales)
    bias_codes = None if bias is None else rounded(bias.astype(np.float64) / bias_scales).astype(np.int32)
    return Weights(codes, scales, axis, zero_point, bias_codes, bias_scales)


def _least_scales(bias: Array | None, count: int, input: Affine) -> Array:
    """Return for each scale the least one at which the bias fits."""
    if bias is None:
        return np.zeros(count)
    magnitudes = np.abs(bias.astype(np.float64))
    result: Array = (magnitudes if count > 1 else magnitudes.max(keepdims=True)) / (input.scale * _BIAS_LIMIT)
    return result


def _product_scales(input_scale: float, scales: Array) -> Array:
    with np.errstate(over="ignore", under="ignore"):
        products: Array = np.float32(input_scale) * scales
    if not (np.isfinite(products) & (products >= _SMALLEST)).all():
        raise InvalidArgument(
            f"an input scale of {input_scale:g} and weight scales from {scales.min():g} are too far from 1"
        )
    return products


def _along(scales: Array, axis: int | None, rank: int) -> Array:
    """Return `scales` as float64 in a shape that broadcasts along `axis`."""
    shape = [1] * rank
    if axis is not None:
        shape[axis] = len(scales)
    return scales.astype(np.float64).reshape(shape)


def sqnr_db(signal: float, noise: float) -> float | None:
    """Return the ratio of two sums of squares in decibels; None where one of them is 0."""
    return 10.0 * math.log10(signal / noise) if signal > 0 and noise > 0 else None
