"""RELU, RELU1, RELU6, LOGISTIC, TANH, ELU, HARD_SWISH and PRELU.

A function of one 8-bit code is a table of 256, computed once by the reference's fixed-point formulas: int32 for
LOGISTIC and TANH, int16 for HARD_SWISH. PRELU of codes has a table for what passes and a multiplier for what is sloped.

HARD_SWISH  C1 the output's scale is above the input's / 128
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from nnfmq.hal.types import FusedActivationFunc, OperationType
from nnfmq.operations import fixed_point, fixed_point16
from nnfmq.operations.fixed_point import Ints, ints
from nnfmq.operations.kernel_adapters import fp16_via_fp32, lut8, stateless, via_lut8
from nnfmq.operations.quantization import (
    OutputMultipliers,
    all_quantized_values,
    dtype_range,
    float_activation_range,
    quantized_activation_range,
    requantizer,
    require_quantization,
)
from nnfmq.operations.shapes import broadcast_shapes, require, same_shape, same_shape_up_to_rank_4
from nnfmq.operations.signature import (
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


def clamp(input: Array, *, low: float, high: float) -> Array:
    """Return the input held within [low, high]."""
    return np.clip(input, input.dtype.type(low), input.dtype.type(high))


def _clamped_codes(codes: Array, input: Tensor, output: Tensor, *, activation: int) -> Array:
    low, high = quantized_activation_range(activation, output)
    clamped: Array = np.clip(codes, low, high).astype(output.dtype)
    return clamped


def _unary(
    code: OperationType, in_float: Plan, in_integers: Plan, *, codes_since: int = V1_0, same_quantization: bool = False
) -> Declaration:
    return Declaration(
        code,
        since=V1_0,
        overloads=(overload(data("input")),),
        variants=(
            Variant({"T": F32}, V1_0, in_float),
            Variant({"T": Q8}, codes_since, in_integers),
            Variant({"T": F16}, V1_2, fp16_via_fp32(in_float)),
            Variant({"T": Q8S}, V1_3, in_integers),
        ),
        shape=same_shape_up_to_rank_4,
        zero_sized=True,
        same_quantization=same_quantization,
    )


def _rectifier(code: OperationType, activation: FusedActivationFunc) -> Declaration:
    low, high = float_activation_range(activation)
    in_float = stateless(partial(clamp, low=low, high=high))
    return _unary(code, in_float, via_lut8(partial(_clamped_codes, activation=activation)), same_quantization=True)


def logistic(input: Array) -> Array:
    """Return 1 / (1 + e^-x)."""
    result: Array = np.reciprocal(np.exp(-input) + input.dtype.type(1))
    return result


def _logistic_codes(codes: Array, input: Tensor, output: Tensor) -> Array:
    lowest = dtype_range(output)[0]
    require_quantization(output, 1 / 256, lowest)
    return (_in_q4(fixed_point.logistic, 23, 0, codes, input) + lowest).astype(output.dtype)


def _tanh_codes(codes: Array, input: Tensor, output: Tensor) -> Array:
    lowest = dtype_range(output)[0]
    require_quantization(output, 1 / 128, lowest + 128)
    return (_in_q4(fixed_point.tanh, 24, 128, codes, input) + lowest).astype(output.dtype)


def _in_q4(function: Callable[[Ints, int], Ints], shift_right: int, offset: int, codes: Array, input: Tensor) -> Ints:
    """Return 0 to 255: a function of Q4 to Q0 of the codes' values; beyond the radius its limits."""
    real = min(input.scale * (1 << 27), float((1 << 30) - 1))  # above, a step of one code is beyond the radius anyway
    multiplier, shift = fixed_point.quantize_multiplier_above_one(real)
    radius = fixed_point.input_radius(4, shift)
    centred = ints(codes) - input.zero_point
    inside = np.clip(centred, -radius, radius)
    value = function(fixed_point.high_mul(inside << shift, multiplier), 4)
    result = np.clip(fixed_point.rounding_shift(value, shift_right) + offset, 0, 255)
    return np.where(centred < -radius, 0, np.where(centred > radius, 255, result))


def elu(input: Array, *, alpha: float) -> Array:
    """Return x from 0 up, and alpha·(e^x - 1) below."""
    return np.where(input < 0, np.float32(alpha) * np.expm1(input), input)


def hard_swish(input: Array) -> Array:
    """Return x·relu6(x + 3) / 6."""
    return input * np.clip(input + np.float32(3), np.float32(0), np.float32(6)) * np.float32(1 / 6)


def _hard_swish_codes(codes: Array, input: Tensor, output: Tensor) -> Array:
    """HARD_SWISH in int16: the codes times 2^7 are scaled to the output, and to [0, 1] for the other factor."""
    low, high = dtype_range(output)
    hires_scale = np.float32(input.scale) / np.float32(128)
    multiplier, exponent = fixed_point.quantize_multiplier(float(hires_scale / np.float32(output.scale)))
    require(exponent <= 0, "C1", f"output scale {output.scale} is not above input scale {input.scale} / 128")
    hires = (ints(codes) - input.zero_point) << 7
    scaled = fixed_point16.high_mul(hires, _in_15_bits(multiplier))
    product = _relu_of_shifted(hires, float(hires_scale / np.float32(3 / 32768))) * scaled
    # Toward zero, as two roundings to nearest would add up to a bias.
    halves = np.sign(product) * (np.abs(product) >> 15)
    result: Array = np.clip(fixed_point.rounding_shift(halves, -exponent) + output.zero_point, low, high)
    return result.astype(output.dtype)


def _relu_of_shifted(hires: Ints, real: float) -> Ints:
    """Return relu6(x + 3) / 6 in units of 2^-15; `real` turns `hires` into x / 3 in units of 2^-15.

    Of a left shift the last bit comes after the multiplication, so that it saturates what is out of range and no more.
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
    """Plan PRELU of codes."""
    scales = np.float32(input.scale), np.float32(alpha.scale), np.float32(output.scale)
    passed = np.empty(256, output.dtype)
    centred_codes = all_quantized_values(input).astype(np.int32) - np.int32(input.zero_point)
    _scaler(float(scales[0] / scales[2]), output)(centred_codes, passed)
    scale_product = _scaler(float(scales[0] * scales[1]) / float(scales[2]), output)

    def run(codes: Array, slopes: Array) -> Array:
        centred = np.subtract(codes, input.zero_point, dtype=np.int32)
        products = centred * np.subtract(slopes, alpha.zero_point, dtype=np.int32)
        sloped = np.empty(products.shape, output.dtype)
        scale_product(products, sloped)
        return np.where(centred >= 0, lut8(passed, codes), sloped)

    return run


def _scaler(real: float, output: Tensor) -> Callable[[Array, Array], None]:
    return requantizer(OutputMultipliers.of([real]), ints([0]), 1 << 16, output, 0)


DECLARATIONS = (
    _rectifier(OperationType.RELU, FusedActivationFunc.RELU),
    _rectifier(OperationType.RELU1, FusedActivationFunc.RELU1),
    _rectifier(OperationType.RELU6, FusedActivationFunc.RELU6),
    _unary(OperationType.LOGISTIC, stateless(logistic), via_lut8(_logistic_codes)),
    _unary(OperationType.TANH, stateless(np.tanh), via_lut8(_tanh_codes), codes_since=V1_2),
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
            Variant({"T": Q8}, V1_3, via_lut8(_hard_swish_codes)),
            Variant({"T": Q8S}, V1_3, via_lut8(_hard_swish_codes)),
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
