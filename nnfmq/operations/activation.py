"""RELU, RELU1, RELU6, LOGISTIC, TANH, ELU, HARD_SWISH and PRELU.

A function of one 8-bit value is a table of 256 entries, computed at preparation as in TFLite: in float32 for LOGISTIC
and TANH, in fixed point of int16 for HARD_SWISH. Quantized PRELU uses a table for inputs from 0 up and a requantizer
for the products with alpha.

HARD_SWISH  C1 the output's scale is greater than the input's / 128
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from nnfmq.hal.types import CLAMPS, OperationType
from nnfmq.operations import fixed_point, fixed_point16
from nnfmq.operations.declaration import (
    F16,
    F32,
    FLOAT16,
    FLOAT32,
    Q8,
    Q8S,
    V1_0,
    V1_2,
    V1_3,
    Array,
    Declaration,
    Plan,
    Run,
    Tensor,
    Variant,
    attribute,
    data,
    overload,
)
from nnfmq.operations.fixed_point import Ints, ints
from nnfmq.operations.kernel_adapters import fp16_via_fp32, lut8, stateless, via_lut8
from nnfmq.operations.quantization import (
    OutputMultipliers,
    all_quantized_values,
    dtype_range,
    quantized_range,
    requantizer,
    require_quantization,
)
from nnfmq.operations.shapes import broadcast_shapes, require, same_shape, same_shape_up_to_rank_4


def clamp(input: Array, *, low: float, high: float) -> Array:
    """Return the input clamped to [low, high]."""
    return np.clip(input, input.dtype.type(low), input.dtype.type(high))


def _clamp_lut(quantized: Array, input: Tensor, output: Tensor, *, low: float, high: float) -> Array:
    clamped: Array = np.clip(quantized, *quantized_range(low, high, output)).astype(output.dtype)
    return clamped


def _unary(
    code: OperationType,
    in_float: Plan,
    in_integers: Plan,
    *,
    quantized_since: int = V1_0,
    same_quantization: bool = False,
) -> Declaration:
    return Declaration(
        code,
        since=V1_0,
        overloads=(overload(data("input")),),
        variants=(
            Variant({"T": F32}, V1_0, in_float),
            Variant({"T": Q8}, quantized_since, in_integers),
            Variant({"T": F16}, V1_2, fp16_via_fp32(in_float)),
            Variant({"T": Q8S}, V1_3, in_integers),
        ),
        shape=same_shape_up_to_rank_4,
        zero_sized=True,
        same_quantization=same_quantization,
    )


def _clamp(code: OperationType, low: float, high: float) -> Declaration:
    in_float = stateless(partial(clamp, low=low, high=high))
    return _unary(code, in_float, via_lut8(partial(_clamp_lut, low=low, high=high)), same_quantization=True)


def logistic(input: Array) -> Array:
    """Return 1 / (1 + e^-x)."""
    result: Array = np.reciprocal(np.exp(-input) + input.dtype.type(1))
    return result


def _logistic_lut(quantized: Array, input: Tensor, output: Tensor) -> Array:
    return _rounded(logistic, quantized, input, output, 1 / 256, dtype_range(output)[0])


def _tanh_lut(quantized: Array, input: Tensor, output: Tensor) -> Array:
    return _rounded(np.tanh, quantized, input, output, 1 / 128, dtype_range(output)[0] + 128)


def _rounded(
    function: Callable[[Array], Array], quantized: Array, input: Tensor, output: Tensor, scale: float, zero_point: int
) -> Array:
    """Return a function of the real values, in float32, rounded to the output's fixed scale, half away from zero."""
    require_quantization(output, scale, zero_point)
    real = np.float32(input.scale) * (ints(quantized) - input.zero_point).astype(np.float32)
    steps = function(real).astype(np.float64) / scale
    rounded = np.copysign(np.floor(np.abs(steps) + 0.5), steps) + zero_point
    found: Array = np.clip(rounded, *dtype_range(output)).astype(output.dtype)
    return found


def elu(input: Array, *, alpha: float) -> Array:
    """Return x from 0 up, and alpha·(e^x - 1) below."""
    return np.where(input < 0, np.float32(alpha) * np.expm1(input), input)


def hard_swish(input: Array) -> Array:
    """Return x·relu6(x + 3) / 6."""
    gate = np.clip(input + np.float32(3), np.float32(0), np.float32(6)) * np.float32(1 / 6)
    return input * gate  # type: ignore[no-any-return]


def _hard_swish_lut(quantized: Array, input: Tensor, output: Tensor) -> Array:
    """HARD_SWISH in int16: the inputs times 2^7 are scaled to the output, and to [0, 1] for the other factor."""
    low, high = dtype_range(output)
    hires_scale = np.float32(input.scale) / np.float32(128)
    multiplier, exponent = fixed_point.quantize_multiplier(float(hires_scale / np.float32(output.scale)))
    require(exponent <= 0, "C1", f"output scale {output.scale} must be greater than input scale {input.scale} / 128")
    hires = (ints(quantized) - input.zero_point) << 7
    scaled = fixed_point16.high_mul(hires, _in_15_bits(multiplier))
    product = _relu_of_shifted(hires, float(hires_scale / np.float32(3 / 32768))) * scaled
    # Truncated toward zero, because two roundings to nearest would add a bias.
    halves = np.sign(product) * (np.abs(product) >> 15)
    result: Array = np.clip(fixed_point.rounding_shift(halves, -exponent) + output.zero_point, low, high)
    return result.astype(output.dtype)


def _relu_of_shifted(hires: Ints, real: float) -> Ints:
    """Return relu6(x + 3) / 6 in units of 2^-15; `real` turns `hires` into x / 3 in units of 2^-15.

    The last bit of a left shift is applied after the multiplication, so that only values out of range saturate.
    """
    multiplier, exponent = fixed_point.quantize_multiplier(real)
    before, after = max(exponent - 1, 0), 1 if exponent > 0 else 0
    value = fixed_point16.high_mul(fixed_point16.saturated(hires << before), _in_15_bits(multiplier))
    value = fixed_point.rounding_shift(fixed_point16.saturated(value << after), max(-exponent, 0))
    return (value + (1 << 15)) >> 1


def _in_15_bits(multiplier: int) -> int:
    """DownScaleInt32ToInt16Multiplier: the nearest multiplier of 15 fractional bits."""
    return min((multiplier + (1 << 15)) >> 16, fixed_point16.INT16_MAX)


def prelu(input: Array, alpha: Array) -> Array:
    """Return x from 0 up, and alpha·x below."""
    return np.where(input >= 0, input, input * alpha)


def plan_quantized_prelu(input: Tensor, alpha: Tensor, *, output: Tensor) -> Run:
    """Plan PRELU of quantized values."""
    scales = np.float32(input.scale), np.float32(alpha.scale), np.float32(output.scale)
    passed = np.empty(256, output.dtype)
    all_minus_zero_point = all_quantized_values(input).astype(np.int32) - np.int32(input.zero_point)
    _scaler(float(scales[0] / scales[2]), output)(all_minus_zero_point, passed)
    scale_product = _scaler(float(scales[0] * scales[1]) / float(scales[2]), output)

    def run(quantized: Array, slopes: Array) -> Array:
        minus_zero_point = np.subtract(quantized, input.zero_point, dtype=np.int32)
        products = minus_zero_point * np.subtract(slopes, alpha.zero_point, dtype=np.int32)
        sloped = np.empty(products.shape, output.dtype)
        scale_product(products, sloped)
        return np.where(minus_zero_point >= 0, lut8(passed, quantized), sloped)

    return run


def _scaler(real: float, output: Tensor) -> Callable[[Array, Array], None]:
    return requantizer(OutputMultipliers.of([real]), ints([0]), 1 << 16, output, 0)


DECLARATIONS = (
    *(_clamp(code, *function.bounds) for code, function in CLAMPS.items()),
    _unary(OperationType.LOGISTIC, stateless(logistic), via_lut8(_logistic_lut)),
    _unary(OperationType.TANH, stateless(np.tanh), via_lut8(_tanh_lut), quantized_since=V1_2),
    Declaration(
        OperationType.ELU,
        since=V1_3,
        overloads=(overload(data("input"), attribute("alpha", "S"), level=V1_3),),
        variants=(
            Variant({"T": F32, "S": FLOAT32}, V1_3, stateless(elu)),
            Variant({"T": F16, "S": FLOAT16}, V1_3, fp16_via_fp32(stateless(elu))),
        ),
        shape=same_shape,
    ),
    Declaration(
        OperationType.HARD_SWISH,
        since=V1_3,
        overloads=(overload(data("input"), level=V1_3),),
        variants=(
            Variant({"T": F32}, V1_3, stateless(hard_swish)),
            Variant({"T": F16}, V1_3, fp16_via_fp32(stateless(hard_swish))),
            Variant({"T": Q8}, V1_3, via_lut8(_hard_swish_lut)),
            Variant({"T": Q8S}, V1_3, via_lut8(_hard_swish_lut)),
        ),
        shape=same_shape,
        zero_sized=True,
    ),
    Declaration(
        OperationType.PRELU,
        since=V1_2,
        overloads=(overload(data("input"), data("alpha"), level=V1_2),),
        variants=(
            Variant({"T": F32}, V1_2, stateless(prelu)),
            Variant({"T": F16}, V1_2, fp16_via_fp32(stateless(prelu))),
            Variant({"T": Q8}, V1_2, plan_quantized_prelu),
            Variant({"T": Q8S}, V1_3, plan_quantized_prelu),
        ),
        shape=broadcast_shapes,
    ),
)
