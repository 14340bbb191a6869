"""LOG_SOFTMAX of 8-bit tensors along the last axis, in fixed point as TFLite defines it.

The output's scale is 1/16 and its zero point the highest value: it represents -255/16 to 0. Differences from a row's
maximum have 5 integer bits, sums of their exponentials 12. The logarithm of such a sum is k ln 2 + ln r, with r near
2^-1/4, for which it is a rational function.

    Q3 range of the real multiplier     Q6 the output's scale and zero point
"""

from __future__ import annotations

import numpy as np

from nnfmq.hal.tflite_codes import TfliteOperation
from nnfmq.operations.fixed_point import (
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
    saturating_shift_left,
)
from nnfmq.operations.quantization import dtype_range, require_quantization
from nnfmq.operations.shapes import same_shape
from nnfmq.operations.signature import Q8, Q8S, V1_2, Array, Declaration, Run, Tensor, data, overload
from nnfmq.operations.tflite_extension.declaring import own_code, variants_of

_DIFFERENCE_BITS, _SUM_BITS, _RESULT_BITS = 5, 12, 4  # integer bits
_LOGARITHM_BITS = _DIFFERENCE_BITS + 1
_LN_2, _ROOT_OF_HALF, _FOURTH_ROOT_OF_HALF = 1488522236, 1518500250, 1805811301  # without integer bits, as all below
_NUMERATOR = 117049297  # 11/240 · 2^1/4
_DENOMINATOR = (1057819769, 638450708, 127690142)  # 2^3/4 - 2^1/4, 2^1/4 / 4, 2^1/4 / 20
_QUARTER = 1 << (29 - _LOGARITHM_BITS)


def logarithm(sums: Ints) -> Ints:
    """Return ln x with 5 integer bits, for x of at least 1 with 12 integer bits."""
    zeros = 32 - bit_length(sums)
    halved = saturating_shift_left(high_mul(sums << (zeros - 1), _ROOT_OF_HALF), 1)
    zeros_of_half = 31 - bit_length(high_mul(sums, _ROOT_OF_HALF))
    whole = np.minimum(sums << zeros_of_half, INT32_MAX)
    position = 31 - _LOGARITHM_BITS
    exponents = np.maximum(
        ((_SUM_BITS - zeros) << position) + _QUARTER, ((_SUM_BITS - zeros_of_half) << position) - _QUARTER
    )
    fraction = _near_fourth_root(np.minimum(halved, whole))
    return saturating_shift_left(high_mul(exponents, _LN_2) + fraction, 1)


def _near_fourth_root(r: Ints) -> Ints:
    """Return ln r + (ln 2) / 4 with 6 integer bits, as a quotient of polynomials."""
    middle, twice = (r + _FOURTH_ROOT_OF_HALF + 1) >> 1, (r - _FOURTH_ROOT_OF_HALF) * 2
    square = high_mul(twice, twice)
    numerator = high_mul(twice, r) + high_mul(high_mul(twice, square), _NUMERATOR)
    constant, linear, quadratic = _DENOMINATOR
    inner = constant + twice + high_mul(ints(quadratic), square)
    denominator = high_mul(middle, inner) + high_mul(ints(linear), twice)
    return high_mul(rounding_shift(numerator, _LOGARITHM_BITS), reciprocal_of_one_plus(denominator))


def plan_log_softmax(input: Tensor, *, output: Tensor) -> Run:
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
    Declaration(
        own_code(TfliteOperation.Q8_LOG_SOFTMAX),
        since=V1_2,
        overloads=(overload(data("input"), level=V1_2),),
        variants=variants_of((Q8, Q8S), plan_log_softmax),
        shape=same_shape,
    ),
)
