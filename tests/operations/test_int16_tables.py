"""Functions of int16 against gemmlowp's definitions, written out in C's integer arithmetic, and against the reals."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from nnfmq.operations import int16_tables

ALL = np.arange(-(1 << 15), 1 << 15)
SAMPLES = [-32768, -32767, -16384, -4097, -4096, -1, 0, 1, 4095, 8191, 8192, 32767, *range(-32768, 32768, 509)]
POWERS = {-2: 1672461947, -1: 1302514674, 0: 790015084, 1: 290630308, 2: 39332535, 3: 720401, 4: 242}


def wrapped(x: int) -> int:
    """Return x as C's int16_t."""
    return (x + 32768) % 65536 - 32768


def held(x: int) -> int:
    return max(-32768, min(32767, x))


def product(a: int, b: int) -> int:
    """SaturatingRoundingDoublingHighMul<int16_t>."""
    if a == b == -32768:
        return 32767
    nudge = 1 << 14 if a * b >= 0 else 1 - (1 << 14)
    return wrapped(math.trunc((a * b + nudge) / (1 << 15)))


def divided(x: int, exponent: int) -> int:
    """RoundingDivideByPOT."""
    remainder, threshold = x & ((1 << exponent) - 1), ((1 << exponent) - 1) >> 1
    return (x >> exponent) + (remainder > threshold + (x < 0))


def constant(of_int32: int) -> int:
    return divided(of_int32, 16)


def exp_near_zero(a: int) -> int:
    x = a + (1 << 12)
    x2 = product(x, x)
    x3, x4 = product(x2, x), product(x2, x2)
    polynomial = divided(product(divided(x4, 2) + x3, constant(715827883)) + x2, 1)
    return held(constant(1895147668) + product(constant(1895147668), x + polynomial))


def exp(a: int, integer_bits: int) -> int:
    """exp_on_negative_values<int16_t, integer_bits>."""
    fraction_bits = 15 - integer_bits
    quarter = 1 << (fraction_bits - 2)
    inside = (a & (quarter - 1)) - quarter
    result = exp_near_zero(held(inside << integer_bits))
    for exponent, factor in POWERS.items():
        if integer_bits > exponent and (inside - a) & (1 << (fraction_bits + exponent)):
            result = product(result, constant(factor))
    if integer_bits > 5 and a < -(1 << (36 - integer_bits)) >> 16:
        result = 0
    return 32767 if a == 0 else result


def newton(a: int) -> int:
    """The iteration of one_over_one_plus_x_for_x_in_0_1, in F2."""
    half_denominator = math.trunc((a + 32767 + 1) / 2)
    x = constant(1515870810) + product(half_denominator, constant(-1010580540))
    for _ in range(3):
        error = (1 << 13) - product(half_denominator, x)
        x = x + held(product(x, error) << 2)
    return x


def logistic(a: int) -> int:
    if a == 0:
        return 1 << 14
    positive = held(newton(exp(wrapped(-abs(a)), 3)) << 1)
    return positive if a > 0 else 32767 - positive


def tanh(a: int, integer_bits: int) -> int:
    if a == 0:
        return 0
    positive = held((newton(exp(-abs(a), integer_bits + 1)) - (1 << 13)) << 2)
    return positive if a > 0 else -positive


def looked_up(table: Callable[[], np.ndarray], values: list[int]) -> list[int]:
    found: list[int] = int16_tables.lut16(table(), np.array(values)).tolist()
    return found


def test_logistic_is_gemmlowp_s_bit_for_bit() -> None:
    assert looked_up(int16_tables.logistic_table, SAMPLES) == [logistic(a) for a in SAMPLES]


@pytest.mark.parametrize("bits", range(7))
def test_tanh_is_gemmlowp_s_bit_for_bit(bits: int) -> None:
    assert looked_up(lambda: int16_tables.tanh_table(bits), SAMPLES) == [tanh(a, bits) for a in SAMPLES]


def test_logistic_is_near_the_real_function() -> None:
    found = int16_tables.lut16(int16_tables.logistic_table(), ALL) / (1 << 15)

    np.testing.assert_allclose(found, 1 / (1 + np.exp(-ALL / (1 << 12))), atol=2.0**-11)


@pytest.mark.parametrize("bits", range(7))
def test_tanh_is_near_the_real_function(bits: int) -> None:
    found = int16_tables.lut16(int16_tables.tanh_table(bits), ALL) / (1 << 15)

    np.testing.assert_allclose(found, np.tanh(ALL / (1 << (15 - bits))), atol=2.0**-11)
