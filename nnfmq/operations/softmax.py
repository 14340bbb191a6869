"""SOFTMAX and LOG_SOFTMAX: e^(beta·x) over its sum along an axis, and the logarithm of that.

Quantized SOFTMAX uses a table of exponentials, a sum and one reciprocal for each row; there is no quantized
LOG_SOFTMAX.

    C1 beta is positive
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from nnfmq.hal.extensions import Scheme
from nnfmq.hal.types import OperationType
from nnfmq.operations import declaration as op
from nnfmq.operations import fixed_point
from nnfmq.operations.declaration import Array, Run, Shape, Tensor
from nnfmq.operations.fixed_point import (
    INT16_MAX,
    INT16_MIN,
    INT32_MAX,
    INT32_MIN,
    Ints,
    bit_length,
    exp_on_negative_values,
    high_mul,
    input_radius,
    ints,
    multiply,
    quantize_multiplier_above_one,
    quantize_multiplier_below_one,
    reciprocal_of_one_plus,
    rounding_shift,
    saturated,
    to_int16,
)
from nnfmq.operations.int16_tables import LookupTable
from nnfmq.operations.kernel_adapters import float_variants, stateless
from nnfmq.operations.quantization import dtype_range, require_quantization
from nnfmq.operations.shapes import normalize_axis, require, require_rank, same_shape


def softmax_shape(input: Shape, *, beta: float, axis: int = -1) -> Shape:
    """Return the input's shape."""
    require_rank(input, range(1, 5), "input")
    return log_softmax_shape(input, beta=beta, axis=axis)


def log_softmax_shape(input: Shape, *, beta: float, axis: int) -> Shape:
    """Return the input's shape."""
    require(beta > 0, "C1", f"beta {beta}, it must be positive")
    normalize_axis(axis, len(input))
    return input


def softmax(input: Array, *, beta: float, axis: int = -1) -> Array:
    """Return e^(beta·(x - max)) over its sum along `axis`."""
    if 0 in input.shape:
        return input.copy()
    exponentials = np.exp((input - input.max(axis=axis, keepdims=True)) * np.float32(beta))
    return exponentials / exponentials.sum(axis=axis, keepdims=True)  # type: ignore[no-any-return]


def log_softmax(input: Array, *, beta: float, axis: int) -> Array:
    """Return beta·(x - max) minus the logarithm of the sum of its exponentials along `axis`."""
    scaled = (input - input.max(axis=axis, keepdims=True)) * np.float32(beta)
    return scaled - np.log(np.exp(scaled).sum(axis=axis, keepdims=True))  # type: ignore[no-any-return]


def plan_quantized_softmax(input: Tensor, *, output: Tensor, beta: float, axis: int = -1) -> Run:
    """Plan quantized SOFTMAX: Q5 differences, exponentials in Q0, their sum in Q12."""
    lowest = dtype_range(output)[0]
    require_quantization(output, 1 / 256, lowest)
    exponentials, summands = exponential_tables(input.scale, beta)
    if 0 in input.shape:
        return lambda quantized: quantized.copy()

    def run(quantized: Array) -> Array:
        wide = quantized.astype(np.int64)
        below = wide.max(axis=axis, keepdims=True) - wide
        scale, bits = reciprocal_of_sums(summands.take(below).sum(axis=axis, keepdims=True))
        shares = fixed_point.rounding_shift(fixed_point.high_mul(exponentials.take(below), scale), bits + 23)
        return (np.clip(shares, 0, 255) + lowest).astype(output.dtype)

    return run


def exponential_tables(scale: float, beta: float) -> tuple[Ints, Ints]:
    """Return e^(-beta·scale·d) for d = 0..255, in Q0 and in Q12; 0 beyond the radius."""
    real = min(beta * scale * (1 << 26), float((1 << 30) - 1))  # larger: every exponential but e^0 rounds to 0
    multiplier, shift = fixed_point.quantize_multiplier_above_one(real)
    differences = -np.arange(256, dtype=np.int64)
    inside = differences >= -fixed_point.input_radius(5, shift)
    scaled = fixed_point.high_mul(np.where(inside, differences, 0) << shift, multiplier)
    exponentials = np.where(inside, fixed_point.exp_on_negative_values(scaled, 5), 0)
    return exponentials, fixed_point.rounding_shift(exponentials, 12)


def reciprocal_of_sums(sums: Ints) -> tuple[Ints, Ints]:
    """GetReciprocal of sums in Q12: return a Q0 multiplier and the number of bits by which it exceeds one."""
    leading_zeros = 32 - fixed_point.bit_length(sums)
    return fixed_point.reciprocal_of_one_plus((sums << leading_zeros) - (1 << 31)), 12 - leading_zeros


def _softmax_level(inputs: Any, output: Any) -> int:
    return op.V1_0 if len(inputs["input"].dimensions) in (2, 4) else op.V1_2


# ----------------------------------------------------------------------------------------------------------------------
# SOFTMAX to 16 bits as TFLite defines it.
#
# That of 16 bits tabulates e^x from -10 to 0 and 1 / (1 + x) from 0 to 1; its results represent 0 to 1 as 0 to 32767.
#
#     Q1 range of the real multiplier


_LOWEST_EXPONENT = 10.0  # e^-10 counts as 0


def plan_sixteen_bit_softmax(input: Tensor, *, output: Tensor, beta: float, axis: int = -1) -> Run:
    """Plan SOFTMAX of 16 bits along `axis`."""
    position = normalize_axis(axis, len(input.shape))
    step = _LOWEST_EXPONENT / 65535
    multiplier = fixed_point.quantize_multiplier(float(np.float32(input.scale) * np.float32(beta)) / step)
    powers, inverses = _softmax_tables()

    def run(x: Array) -> Array:
        rows = ints(np.moveaxis(x, position, -1))
        scaled = fixed_point.multiply(rows - rows.max(axis=-1, keepdims=True), *multiplier)
        exponentials = powers(to_int16(scaled + INT16_MAX))
        sums = exponentials.sum(axis=-1, keepdims=True)
        bits = fixed_point.bit_length(sums)
        normalized = ((sums << (31 - bits)) + (1 << 13)) >> 14
        reciprocals = inverses(to_int16(normalized - (1 << 15) - (1 << 16)))
        right_shift = bits - 1
        results = (exponentials * reciprocals + (np.int64(1) << (right_shift - 1))) >> right_shift
        return np.moveaxis(np.clip(results, 0, INT16_MAX).astype(np.int16), -1, position)

    return run


@cache
def _softmax_tables() -> tuple[LookupTable, LookupTable]:
    """Return e^x from -10 to 0 and 1 / (1 + x) from 0 to 1; the results represent 1 as 32768."""
    unit = 2 / 65535
    powers = LookupTable.sampled(np.exp, _LOWEST_EXPONENT / 65535, INT16_MAX, unit, np.float64)
    inverses = LookupTable.sampled(lambda x: 1 / (1 + x), 1 / 65535, INT16_MIN, unit, np.float64)
    return powers, inverses


def plan_softmax_to_sixteen_bits(input: Tensor, *, output: Tensor, beta: float) -> Run:
    """Plan SOFTMAX along the last axis from 8 to 16 bits; 0 to 1 is represented as -32768 to 32767."""
    exponentials, summands = exponential_tables(input.scale, beta)

    def run(x: Array) -> Array:
        rows = ints(x)
        below = rows.max(axis=-1, keepdims=True) - rows
        scale, bits = reciprocal_of_sums(summands.take(below).sum(axis=-1, keepdims=True))
        shares = fixed_point.rounding_shift(fixed_point.high_mul(exponentials.take(below), scale), bits + 15)
        return to_int16(shares + INT16_MIN)

    return run


# ----------------------------------------------------------------------------------------------------------------------
# LOG_SOFTMAX of 8-bit tensors along the last axis, in fixed point as TFLite defines it.
#
# The output's scale is 1/16 and its zero point the highest value: it represents -255/16 to 0. Differences from a row's
# maximum have 5 integer bits, sums of their exponentials 12. The logarithm of such a sum is k ln 2 + ln r, with r near
# 2^-1/4, for which it is a rational function.
#
#     Q3 range of the real multiplier     Q6 the output's scale and zero point


_DIFFERENCE_BITS, _SUM_BITS, _RESULT_BITS = 5, 12, 4  # integer bits


_LOGARITHM_BITS = _DIFFERENCE_BITS + 1


_LN_2, _ROOT_OF_HALF, _FOURTH_ROOT_OF_HALF = 1488522236, 1518500250, 1805811301  # without integer bits, as all below


_NUMERATOR = 117049297  # 11/240 · 2^1/4


_DENOMINATOR = (1057819769, 638450708, 127690142)  # 2^3/4 - 2^1/4, 2^1/4 / 4, 2^1/4 / 20


_QUARTER = 1 << (29 - _LOGARITHM_BITS)


def logarithm(sums: Ints) -> Ints:
    """Return ln x with 5 integer bits, for x of at least 1 with 12 integer bits."""
    zeros = 32 - bit_length(sums)
    halved = saturated(high_mul(sums << (zeros - 1), _ROOT_OF_HALF) << 1)
    zeros_of_half = 31 - bit_length(high_mul(sums, _ROOT_OF_HALF))
    whole = np.minimum(sums << zeros_of_half, INT32_MAX)
    position = 31 - _LOGARITHM_BITS
    exponents = np.maximum(
        ((_SUM_BITS - zeros) << position) + _QUARTER, ((_SUM_BITS - zeros_of_half) << position) - _QUARTER
    )
    fraction = _near_fourth_root(np.minimum(halved, whole))
    return saturated((high_mul(exponents, _LN_2) + fraction) << 1)


def _near_fourth_root(r: Ints) -> Ints:
    """Return ln r + (ln 2) / 4 with 6 integer bits, as a quotient of polynomials."""
    middle, twice = (r + _FOURTH_ROOT_OF_HALF + 1) >> 1, (r - _FOURTH_ROOT_OF_HALF) * 2
    square = high_mul(twice, twice)
    numerator = high_mul(twice, r) + high_mul(high_mul(twice, square), _NUMERATOR)
    constant, linear, quadratic = _DENOMINATOR
    inner = constant + twice + high_mul(ints(quadratic), square)
    denominator = high_mul(middle, inner) + high_mul(ints(linear), twice)
    return high_mul(rounding_shift(numerator, _LOGARITHM_BITS), reciprocal_of_one_plus(denominator))


def plan_tflite_log_softmax(input: Tensor, *, output: Tensor) -> Run:
    """Plan the logarithm of the softmax of each row."""
    lowest, highest = dtype_range(output)
    require_quantization(output, 1 / 16, highest)
    real = min(input.scale * (1 << (31 - _DIFFERENCE_BITS)), INT32_MAX)
    multiplier, shift = quantize_multiplier_above_one(real)
    reverse = quantize_multiplier_below_one((1 << (31 - shift)) / multiplier)
    least = -input_radius(_DIFFERENCE_BITS, shift)
    result_shift = 31 - _DIFFERENCE_BITS - _RESULT_BITS

    def run(x: Array) -> Array:
        differences = ints(x) - x.max(axis=-1, keepdims=True).astype(np.int64)
        reals = multiply(np.maximum(differences, least), multiplier, shift)
        powers = rounding_shift(exp_on_negative_values(reals, _DIFFERENCE_BITS), _SUM_BITS)
        sums = np.where(differences >= least, powers, 0).sum(axis=-1, keepdims=True)
        logarithms = logarithm(np.minimum(sums, INT32_MAX))
        bound = np.maximum(least - 1, multiply(logarithms + INT32_MIN, *reverse))
        codes = np.clip(rounding_shift(reals - logarithms, result_shift) + highest, lowest, highest)
        return np.where(differences > bound, codes, lowest).astype(output.dtype)

    return run


DECLARATIONS = (
    op.Declaration(
        OperationType.SOFTMAX,
        since=op.V1_0,
        overloads=(
            op.overload(
                op.data("input"), op.attribute("beta", "S"), op.attribute("axis"), level=op.V1_2, also={2: op.V1_0}
            ),
        ),
        variants=(
            *float_variants(stateless(softmax), "S", level=op.V1_0),
            *op.types_since(op.V1_0, plan_quantized_softmax, op.Q8, op.Q8S, S=op.FLOAT32),
        ),
        shape=softmax_shape,
        zero_sized=True,
        level=_softmax_level,
        extended=(
            op.sixteen_bits(*op.of_types(plan_sixteen_bit_softmax, op.Q16S, S=op.FLOAT32)),
            op.Extended(
                Scheme.TO_SIXTEEN_BITS,
                op.conversions(plan_softmax_to_sixteen_bits, (op.Q8S, op.Q16S), (op.Q8, op.Q16S)),
                changes={
                    "overloads": (op.overload(op.data("input"), op.attribute("beta", op.FLOAT32), level=op.V1_2),),
                    "shape": same_shape,
                    "outputs": ("O",),
                    "zero_sized": False,
                },
            ),
        ),
    ),
    op.Declaration(
        OperationType.LOG_SOFTMAX,
        since=op.V1_2,
        overloads=(op.overload(op.data("input"), op.attribute("beta", "S"), op.attribute("axis"), level=op.V1_2),),
        variants=float_variants(stateless(log_softmax), "S"),
        shape=log_softmax_shape,
        extended=(
            op.tflite(
                *op.of_types(plan_tflite_log_softmax, op.Q8, op.Q8S),
                overloads=(op.overload(op.data("input"), level=op.V1_2),),
                shape=same_shape,
            ),
        ),
    ),
)
