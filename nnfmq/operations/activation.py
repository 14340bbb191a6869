"""RELU, RELU1, RELU6, LOGISTIC, TANH, ELU, HARD_SWISH and PRELU.

A function of one 8-bit value is a table of 256 entries, computed at preparation as in TFLite: in float32 for LOGISTIC
and TANH, in fixed point of int16 for HARD_SWISH. Quantized PRELU uses a table for inputs from 0 up and a requantizer
for the products with alpha.

HARD_SWISH  C1 the output's scale is greater than the input's / 128
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial

import numpy as np

from nnfmq.hal.types import CLAMPS, OperationType
from nnfmq.operations import declaration as op
from nnfmq.operations import fixed_point
from nnfmq.operations.declaration import Array, Plan, Run, Tensor
from nnfmq.operations.fixed_point import IN_16_BITS, INT16_MAX, Ints, ints, rounded, saturated, to_int16
from nnfmq.operations.kernel_adapters import float_variants, lut8, stateless, via_lut8
from nnfmq.operations.quantization import (
    OutputMultipliers,
    all_quantized_values,
    dtype_range,
    float_ratio,
    quantized_range,
    real_entries,
    requantizer,
    require_quantization,
    rescaling,
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
    *extended: op.Extended,
    quantized_since: int = op.V1_0,
    same_quantization: bool = False,
) -> op.Declaration:
    return op.Declaration(
        code,
        since=op.V1_0,
        overloads=(op.overload(op.data("input")),),
        variants=(
            *float_variants(in_float, level=op.V1_0),
            *op.types_since(quantized_since, in_integers, op.Q8, op.Q8S),
        ),
        shape=same_shape_up_to_rank_4,
        zero_sized=True,
        same_quantization=same_quantization,
        extended=extended,
    )


def _clamp(code: OperationType, low: float, high: float) -> op.Declaration:
    in_float = stateless(partial(clamp, low=low, high=high))
    in_integers = via_lut8(partial(_clamp_lut, low=low, high=high))
    plan = partial(plan_sixteen_bit_clamp, high)
    extended = () if low < 0 else (op.sixteen_bits(*op.of_types(plan, op.Q16S), shape=same_shape),)
    return _unary(code, in_float, in_integers, *extended, same_quantization=True)


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
    found: Array = np.clip(rounded(steps) + zero_point, *dtype_range(output)).astype(output.dtype)
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
    scaled = fixed_point.high_mul(hires, _in_15_bits(multiplier), IN_16_BITS)
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
    value = fixed_point.high_mul(saturated(hires << before, IN_16_BITS), _in_15_bits(multiplier), IN_16_BITS)
    value = fixed_point.rounding_shift(saturated(value << after, IN_16_BITS), max(-exponent, 0))
    return (value + (1 << 15)) >> 1


def _in_15_bits(multiplier: int) -> int:
    """DownScaleInt32ToInt16Multiplier: the nearest multiplier of 15 fractional bits."""
    return min((multiplier + (1 << 15)) >> 16, fixed_point.INT16_MAX)


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


# ----------------------------------------------------------------------------------------------------------------------
# 16 bits, and ELU of 8 bits, as TFLite defines them.
#
# LOGISTIC and TANH read the input in Q3.12 and interpolate a table of 1 / (1 + e^-x) in steps of 1/24, of 16 bits. ELU
# is computed in float32 and multiplied by the reciprocal of the output's scale.
#
#     Q1 ranges of real multipliers


_STEPS_PER_UNIT = 24  # of the table of the logistic function


_INTEGER_BITS = 3


@cache
def _logistic_table() -> Ints:
    """Return 1 / (1 + e^-x) for x = 0, 1/24, 2/24 ... as 16 bits after the binary point.

    The values are shifted by half of the error of linear interpolation in the middle of the next step; the last is 1.
    """
    now, middle, after = (65536 / (1 + np.exp(-(np.arange(256) + offset) / _STEPS_PER_UNIT)) for offset in (0, 0.5, 1))
    table = ints(np.rint(now - ((now + after) / 2 - middle) / 2))
    table[-1] = 65535
    return table


def _to_table_steps(scale: float) -> tuple[int, int]:
    """Return multiplier and right shift from quantized values to 1/512 of the table's steps."""
    exponent = math.log2(scale)
    left_shift = 15 - _INTEGER_BITS + round(exponent)
    if abs(exponent - round(exponent)) < 1e-3 and left_shift in (0, 1):
        return 3 << left_shift, 0
    multiplier, shift = scale * 4096 * 3, 0
    while multiplier <= 32767 / 2 and shift <= 30:
        shift, multiplier = shift + 1, multiplier * 2
    return int(multiplier), shift


def plan_sixteen_bit_logistic(input: Tensor, *, output: Tensor) -> Run:
    """Plan LOGISTIC of 16 bits; the result represents 0 to 1 as 0 to 32767."""
    multiplier, shift = _to_table_steps(input.scale)
    table = _logistic_table()

    def run(x: Array) -> Array:
        steps = _shifted(ints(x) * multiplier, shift)
        sums = _interpolated(table, np.abs(steps), 9, INT16_MAX << 10)
        mirrored = np.where(steps >= 0, sums + (1 << 9), (1 << 25) - sums + (1 << 9) - 1)
        return (mirrored >> 10).astype(np.int16)

    return run


def plan_sixteen_bit_tanh(input: Tensor, *, output: Tensor) -> Run:
    """Plan TANH of 16 bits; the result represents -1 to 1 as -32767 to 32767."""
    multiplier, shift = _to_table_steps(input.scale)
    table = _logistic_table()

    def run(x: Array) -> Array:
        steps = _shifted(ints(x) * multiplier, shift)
        sums = _interpolated(table, np.abs(steps), 8, 0xFFFF << 8)
        middle, half = 1 << 23, 1 << 7
        mirrored = np.where(steps >= 0, sums - middle + half, middle - sums + half - 1)
        return (mirrored >> 8).astype(np.int16)

    return run


def _shifted(x: Ints, shift: int) -> Ints:
    return (x + (1 << shift >> 1)) >> shift


def _interpolated(table: Ints, steps: Ints, bits: int, beyond: int) -> Ints:
    """Return 2^bits times the table at `steps` / 2^bits; `beyond` its end."""
    index = np.minimum(steps >> bits, 254)
    low, high = table[index], table[index + 1]
    return np.where(steps >> bits >= 255, beyond, (low << bits) + (steps & (1 << bits) - 1) * (high - low))


def plan_sixteen_bit_prelu(input: Tensor, alpha: Tensor, *, output: Tensor) -> Run:
    """Plan x if it is not negative, else alpha · x."""
    slope = float(np.float32(input.scale) * np.float32(alpha.scale) / np.float32(output.scale))
    multiplier, shift = fixed_point.quantize_multiplier(slope)
    rescale = rescaling(float_ratio(input, output))

    def run(x: Array, alphas: Array) -> Array:
        scaled = fixed_point.multiply(ints(x) * (ints(alphas) - alpha.zero_point), multiplier, shift)
        return to_int16(np.where(x >= 0, rescale(x), scaled))

    return run


def plan_sixteen_bit_clamp(high: float, input: Tensor, *, output: Tensor) -> Run:
    """Plan the input in the output's scale, from 0 to `high`."""
    lowest, highest = quantized_range(0.0, high, output)
    rescale = rescaling(float_ratio(input, output))
    return lambda x: np.clip(rescale(x), lowest, highest).astype(np.int16)


def _elu(x: Array) -> Array:
    return np.where(x < 0, np.expm1(x), x)


DECLARATIONS = (
    *(_clamp(code, *function.bounds) for code, function in CLAMPS.items()),
    _unary(
        OperationType.LOGISTIC,
        stateless(logistic),
        via_lut8(_logistic_lut),
        op.wider(*op.of_types(stateless(logistic), op.F64), shape=same_shape),
        op.sixteen_bits(*op.of_types(plan_sixteen_bit_logistic, op.Q16S), shape=same_shape),
    ),
    _unary(
        OperationType.TANH,
        stateless(np.tanh),
        via_lut8(_tanh_lut),
        op.wider(*op.of_types(stateless(np.tanh), op.F64), shape=same_shape),
        op.sixteen_bits(*op.of_types(plan_sixteen_bit_tanh, op.Q16S), shape=same_shape),
        quantized_since=op.V1_2,
    ),
    op.Declaration(
        OperationType.ELU,
        since=op.V1_3,
        overloads=(op.overload(op.data("input"), op.attribute("alpha", "S"), level=op.V1_3),),
        variants=float_variants(stateless(elu), "S", level=op.V1_3),
        shape=same_shape,
        extended=(
            op.tflite(
                *op.of_types(via_lut8(real_entries(_elu)), op.Q8, op.Q8S),
                overloads=(op.overload(op.data("input"), level=op.V1_2),),
                zero_sized=True,
            ),
        ),
    ),
    op.Declaration(
        OperationType.HARD_SWISH,
        since=op.V1_3,
        overloads=(op.overload(op.data("input"), level=op.V1_3),),
        variants=(
            *float_variants(stateless(hard_swish), level=op.V1_3),
            *op.types_since(op.V1_3, via_lut8(_hard_swish_lut), op.Q8, op.Q8S),
        ),
        shape=same_shape,
        zero_sized=True,
    ),
    op.Declaration(
        OperationType.PRELU,
        since=op.V1_2,
        overloads=(op.overload(op.data("input"), op.data("alpha"), level=op.V1_2),),
        variants=(
            *float_variants(stateless(prelu)),
            *op.types_since(op.V1_2, plan_quantized_prelu, op.Q8, op.Q8S),
        ),
        shape=broadcast_shapes,
        extended=(
            op.wider(*op.of_types(stateless(prelu), op.F64)),
            op.sixteen_bits(
                *op.of_types(plan_sixteen_bit_prelu, op.Q16S),
                overloads=(op.overload(op.data("input"), op.data("alpha", op.Q8S), level=op.V1_2),),
            ),
        ),
    ),
)
