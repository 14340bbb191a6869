"""Fixed-point arithmetic, bit-exact with gemmlowp, over NumPy int64 arrays.

Every value is an int32 in an int64, so that products do not overflow; saturation is explicit where gemmlowp saturates.
"Qn" below means n integer bits and 31 - n fractional ones. Requantization has two roundings (a doubling high
multiplication, then a rounding shift); TFLite built with single rounding gives different last bits.

Functions with the parameter `bits`, the fractional bits of Q0, do the same for values of INT16 if it is `IN_16_BITS`.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from nnfmq.operations.declaration import Array
from nnfmq.operations.shapes import require

Ints: TypeAlias = npt.NDArray[np.int64]

IN_32_BITS, IN_16_BITS = 31, 15
INT16_MIN, INT16_MAX = -(1 << 15), (1 << 15) - 1
INT32_MIN, INT32_MAX = -(1 << 31), (1 << 31) - 1
ONE_Q2 = 1 << 29


def ints(values: Any) -> Ints:
    """Return `values` as int64."""
    return np.asarray(values, dtype=np.int64)


def bit_length(values: Ints) -> Ints:
    """Return the number of bits of each value, of at most 53 bits and not negative; that of 0 is 0."""
    return ints(np.frexp(values.astype(np.float64))[1])


def high_mul(a: Ints, b: Ints | int, bits: int = IN_32_BITS) -> Ints:
    """SaturatingRoundingDoublingHighMul: a * b / 2^bits, rounded half up."""
    # gemmlowp truncates (p + nudge) / 2^31, with a nudge that depends on the sign: that is floor(p / 2^31 + 1/2).
    result: Ints = np.minimum((a * b + (1 << (bits - 1))) >> bits, (1 << bits) - 1)
    return result


def rounding_shift(x: Ints, exponent: Ints | int) -> Ints:
    """RoundingDivideByPOT: x / 2^exponent, ties away from zero. `exponent` is not negative."""
    exponent = ints(exponent)
    half = (np.int64(1) << exponent) >> 1
    tie = np.where(exponent > 0, x >> 63, 0)  # -1 for negative values, so that their ties round away from zero
    return (x + half + tie) >> exponent


def saturated(x: Ints, bits: int = IN_32_BITS) -> Ints:
    """Return x saturated to int32, or to int16."""
    result: Ints = np.clip(x, -(1 << bits), (1 << bits) - 1)
    return result


def to_int16(x: Ints) -> Array:
    """Return x as int16, clamped to its range."""
    return np.clip(x, INT16_MIN, INT16_MAX).astype(np.int16)


def multiply(x: Ints, multiplier: Ints | int, shift: Ints | int) -> Ints:
    """MultiplyByQuantizedMultiplier: x * multiplier / 2^31 * 2^shift with two roundings."""
    shift = ints(shift)
    return rounding_shift(high_mul(x << np.maximum(shift, 0), multiplier), np.maximum(-shift, 0))


def multiply_wide(x: Ints, multiplier: Ints | int, shift: Ints | int) -> Ints:
    """Return x * multiplier / 2^31 * 2^shift, with 16 bits of the multiplier and one rounding; |x| is below 2^47."""
    total_shift = 15 - ints(shift)
    result: Ints = (x * reduced_multiplier(multiplier) + (np.int64(1) << (total_shift - 1))) >> total_shift
    return result


def reduced_multiplier(multiplier: Ints | int) -> Ints:
    """Return the upper 16 bits of multipliers, rounded and saturated."""
    reduced: Ints = np.minimum((ints(multiplier) + (1 << 15)) >> 16, INT16_MAX)
    return reduced


def rounded(x: Array) -> Array:
    """Return floats rounded to integers, halves away from zero."""
    result: Array = np.copysign(np.floor(np.abs(x) + x.dtype.type(0.5)), x)
    return result


def quantize_multiplier(real: float) -> tuple[int, int]:
    """QuantizeMultiplier: return (multiplier in [2^30, 2^31), shift) with real ≈ multiplier / 2^31 * 2^shift."""
    finite = math.isfinite(real) and real >= 0
    require(finite, "Q1", f"requantization scale {real}, it must be finite and not negative")
    fraction, exponent = math.frexp(real)
    multiplier = math.floor(fraction * (1 << 31) + 0.5)
    if multiplier == 1 << 31:
        multiplier, exponent = multiplier // 2, exponent + 1
    require(exponent <= 30, "Q1", f"requantization scale {real}, at most 2^30 is allowed")
    return (0, 0) if multiplier == 0 or exponent < -31 else (multiplier, exponent)


def quantize_multiplier_of_mean(real: float, count: int) -> tuple[int, int]:
    """Return `quantize_multiplier` of `real`, divided by a count of values after as many more bits as that has."""
    multiplier, exponent = quantize_multiplier(real)
    more = min(count.bit_length() - 1, 32, 31 + exponent)
    return (multiplier << more) // count, exponent - more


def quantize_multiplier_below_one(real: float) -> tuple[int, int]:
    """QuantizeMultiplierSmallerThanOneExp: as `quantize_multiplier`, for 0 < real < 1 only (Q2)."""
    require(0 < real < 1, "Q2", f"requantization scale {real}, it must be in (0, 1)")
    multiplier, shift = quantize_multiplier(real)
    require(shift <= 0, "Q2", f"requantization scale {real} rounds to 1, it must be in (0, 1)")
    return multiplier, shift


def quantize_multiplier_above_one(real: float) -> tuple[int, int]:
    """QuantizeMultiplierGreaterThanOne: for real > 1 only (Q3); the shift is a left shift."""
    above = math.isfinite(real) and real > 1
    require(above, "Q3", f"requantization scale {real}, it must be greater than 1")
    return quantize_multiplier(real)


def input_radius(integer_bits: int, left_shift: int) -> int:
    """CalculateInputRadius: the largest input that still fits `integer_bits` after the shift."""
    return ((1 << integer_bits) - 1) * (1 << (31 - integer_bits)) >> left_shift


def exp_on_negative_values(a: Ints, integer_bits: int, bits: int = IN_32_BITS) -> Ints:
    """e^a in Q0 for a ≤ 0 in Q`integer_bits` (up to 5; up to 7 in 16 bits)."""
    fraction_bits = bits - integer_bits
    quarter = 1 << (fraction_bits - 2)
    remainder = (a & (quarter - 1)) - quarter
    result = _exp_near_zero(saturated(remainder << integer_bits, bits), bits)
    rest = remainder - a
    for exponent, factor in _EXP_OF_POWERS:
        if exponent < integer_bits:
            bit = rest & (1 << (fraction_bits + exponent))
            result = np.where(bit != 0, high_mul(result, _constant(factor, bits), bits), result)
    if integer_bits > 5:
        result = np.where(a < -(32 << fraction_bits), 0, result)
    return np.where(a == 0, (1 << bits) - 1, result)


_EXP_OF_POWERS = (  # (n, e^-(2^n) in Q0)
    (-2, 1672461947), (-1, 1302514674), (0, 790015084), (1, 290630308), (2, 39332535), (3, 720401), (4, 242),
)  # fmt: skip


def _constant(of_32_bits: int, bits: int) -> int:
    return int(rounding_shift(ints(of_32_bits), IN_32_BITS - bits))


def _exp_near_zero(a: Ints, bits: int) -> Ints:
    """e^a in Q0 for a in [-1/4, 0) in Q0: the Taylor polynomial of degree 4 around -1/8."""
    exp_of_minus_eighth, third = _constant(1895147668, bits), _constant(715827883, bits)
    x = a + (1 << (bits - 3))
    x2 = high_mul(x, x, bits)
    x3 = high_mul(x2, x, bits)
    x4_quarter = rounding_shift(high_mul(x2, x2, bits), 2)
    tail = rounding_shift(high_mul(x4_quarter + x3, third, bits) + x2, 1)
    return saturated(exp_of_minus_eighth + high_mul(x + tail, exp_of_minus_eighth, bits), bits)


def reciprocal_of_one_plus(a: Ints) -> Ints:
    """1 / (1 + a) in Q0 for a in [0, 1] in Q0."""
    return saturated(double_reciprocal_of_one_plus(a) << 1)


def double_reciprocal_of_one_plus(a: Ints, bits: int = IN_32_BITS) -> Ints:
    """2 / (1 + a) in Q2 for a in [0, 1] in Q0: three Newton steps."""
    half_denominator = (a + (1 << bits)) >> 1
    one_q2 = 1 << (bits - 2)
    x = _constant(1515870810, bits) + high_mul(
        half_denominator, _constant(-1010580540, bits), bits
    )  # 48/17 - 32/17 · d
    for _ in range(3):
        error = one_q2 - high_mul(half_denominator, x, bits)
        x = x + saturated(high_mul(x, error, bits) << 2, bits)
    return x
