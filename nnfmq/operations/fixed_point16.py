"""Fixed-point logistic and tanh of int16, bit-exact with gemmlowp, as tables of all 65,536 inputs.

The formulas are those of `fixed_point` with 16-bit constants and products: "Qn" means n integer bits and 15 - n
fractional ones here. Values are int64 arrays within int16. Results are in Q0, where 32767 represents 1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from msgspec import Struct

from nnfmq.operations.declaration import Array, Tensor
from nnfmq.operations.fixed_point import INT16_MAX, INT16_MIN, Ints, ints, rounded, rounding_shift

ONE_Q0 = INT16_MAX


def saturated(x: Ints) -> Ints:
    """Return x saturated to int16."""
    result: Ints = np.clip(x, INT16_MIN, INT16_MAX)
    return result


def high_mul(a: Ints, b: Ints | int) -> Ints:
    """SaturatingRoundingDoublingHighMul of int16: a * b / 2^15, rounded half up."""
    result: Ints = np.minimum((a * b + (1 << 14)) >> 15, INT16_MAX)
    return result


def lut16(table: Ints, values: Ints) -> Ints:
    """Return table entries for values within int16."""
    result: Ints = table.take(values & 0xFFFF)
    return result


@cache
def logistic_table() -> Ints:
    """1 / (1 + e^-a) for a in Q3."""
    a = _all_inputs()
    positive = saturated(_double_reciprocal_of_one_plus(_exp_on_negative_values(-np.abs(a), 3)) << 1)
    return np.where(a == 0, 1 << 14, np.where(a > 0, positive, ONE_Q0 - positive))


@cache
def tanh_table(integer_bits: int) -> Ints:
    """tanh(a) for a in Q`integer_bits` (0 to 6)."""
    a = _all_inputs()
    decayed = _exp_on_negative_values(-np.abs(a), integer_bits + 1)  # one integer bit more reads a as 2a
    positive = saturated((_double_reciprocal_of_one_plus(decayed) - _constant(1 << 29)) << 2)
    return np.where(a == 0, 0, np.where(a > 0, positive, -positive))


def _all_inputs() -> Ints:
    return ints(np.arange(1 << 16, dtype=np.uint16).view(np.int16))


def _constant(of_32_bits: int) -> int:
    return int(rounding_shift(ints(of_32_bits), 16))


_EXP_OF_POWERS = tuple(  # (n, e^-(2^n) in Q0)
    (exponent, _constant(factor))
    for exponent, factor in (
        (-2, 1672461947), (-1, 1302514674), (0, 790015084), (1, 290630308), (2, 39332535), (3, 720401), (4, 242),
    )
)  # fmt: skip


def _exp_on_negative_values(a: Ints, integer_bits: int) -> Ints:
    """e^a in Q0 for a ≤ 0 in Q`integer_bits` (up to 7)."""
    fraction_bits = 15 - integer_bits
    quarter = 1 << (fraction_bits - 2)
    remainder = (a & (quarter - 1)) - quarter
    result = _exp_near_zero(saturated(remainder << integer_bits))
    rest = remainder - a
    for exponent, factor in _EXP_OF_POWERS:
        if exponent < integer_bits:
            bit = rest & (1 << (fraction_bits + exponent))
            result = np.where(bit != 0, high_mul(result, factor), result)
    if integer_bits > 5:
        result = np.where(a < -(32 << fraction_bits), 0, result)
    return np.where(a == 0, ONE_Q0, result)


def _exp_near_zero(a: Ints) -> Ints:
    """e^a in Q0 for a in [-1/4, 0) in Q0: the Taylor polynomial of degree 4 around -1/8."""
    exp_of_minus_eighth, third = _constant(1895147668), _constant(715827883)
    x = a + (1 << 12)
    x2 = high_mul(x, x)
    x3 = high_mul(x2, x)
    x4_quarter = rounding_shift(high_mul(x2, x2), 2)
    tail = rounding_shift(high_mul(x4_quarter + x3, third) + x2, 1)
    return saturated(exp_of_minus_eighth + high_mul(x + tail, exp_of_minus_eighth))


def _double_reciprocal_of_one_plus(a: Ints) -> Ints:
    """2 / (1 + a) in Q2 for a in [0, 1] in Q0: three Newton steps."""
    half_denominator = (a + ONE_Q0 + 1) >> 1
    x = _constant(1515870810) + high_mul(half_denominator, _constant(-1010580540))  # 48/17 - 32/17 · d
    for _ in range(3):
        error = _constant(1 << 29) - high_mul(half_denominator, x)
        x = x + saturated(high_mul(x, error) << 2)
    return x


# ----------------------------------------------------------------------------------------------------------------------
# TFLite's table of 513 values with linear interpolation.


_STEPS = 512  # of a LookupTable


def to_int16(x: Ints) -> Array:
    """Return x as int16, clamped to its range."""
    return np.clip(x, INT16_MIN, INT16_MAX).astype(np.int16)


class LookupTable(Struct, frozen=True):
    """A function of an int16 value as 513 int16 values, between which it is linear."""

    values: Ints

    @classmethod
    def of(cls, function: Callable[[Array], Array], input: Tensor, output: Tensor) -> LookupTable:
        """Tabulate a function of real numbers, in float32 as TFLite does."""
        return cls.sampled(function, input.scale, 0, output.scale, np.float32)

    @classmethod
    def sampled(
        cls, function: Callable[[Array], Array], scale: float, zero_point: int, output_scale: float, dtype: Any
    ) -> LookupTable:
        """Tabulate a function of real numbers with the input's scale and zero point, computed in `dtype`.

        The values are shifted by half of the error in the middle of each step.
        """
        low, high = (dtype(scale) * dtype(limit - zero_point) for limit in (INT16_MIN, INT16_MAX))
        factor = dtype(1 << 16) / (dtype(output_scale) * dtype(INT16_MAX) - dtype(output_scale) * dtype(INT16_MIN))
        step = (high - low) / dtype(_STEPS)
        starts = low + np.arange(_STEPS + 1).astype(dtype) * step
        with np.errstate(all="ignore"):
            exact = function(starts) * factor
            middles = rounded(function(starts[:-1] + step / dtype(2)) * factor)
            last = rounded(function(np.array([high], dtype)) * factor)
            samples = rounded(exact[:-1])
            interpolated = rounded((exact[1:] + samples) / dtype(2))
            corrected = samples - rounded((interpolated - middles) / dtype(2))
        entries = np.clip(np.concatenate([corrected, last]), INT16_MIN, INT16_MAX)
        return cls(ints(np.nan_to_num(entries, nan=0)))

    def __call__(self, x: Array) -> Ints:
        """Return the values for int16 values."""
        wide = ints(x)
        index = 256 + (wide >> 7)
        base = self.values[index]
        slope = ints((self.values[index + 1] - base).astype(np.int16))
        result: Ints = base + ((slope * (wide & 0x7F) + 64) >> 7)
        return result
