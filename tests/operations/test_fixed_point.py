"""Fixed point against the reference's definitions, written out here in plain Python integers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnfmq.hal.errors import GeneralFailure
from nnfmq.operations import fixed_point
from nnfmq.operations.fixed_point import ints

INT32 = st.integers(-(1 << 31), (1 << 31) - 1)


def toward_zero(a: int, b: int) -> int:
    return abs(a) // b * (1 if a >= 0 else -1)


def high_mul_by_definition(a: int, b: int) -> int:
    if a == b == -(1 << 31):
        return (1 << 31) - 1
    product = a * b
    nudge = 1 << 30 if product >= 0 else 1 - (1 << 30)
    return toward_zero(product + nudge, 1 << 31)


def rounding_shift_by_definition(x: int, exponent: int) -> int:
    mask = (1 << exponent) - 1
    threshold = (mask >> 1) + (1 if x < 0 else 0)
    return (x >> exponent) + (1 if x & mask > threshold else 0)


@given(INT32, INT32)
def test_high_mul_follows_its_definition(a: int, b: int) -> None:
    assert fixed_point.high_mul(ints(a), b) == high_mul_by_definition(a, b)


@pytest.mark.parametrize("a", [-(1 << 31), (1 << 31) - 1, -1, 0, 1])
@pytest.mark.parametrize("b", [-(1 << 31), (1 << 31) - 1, -1, 0, 1])
def test_high_mul_follows_its_definition_at_the_ends(a: int, b: int) -> None:
    assert fixed_point.high_mul(ints(a), b) == high_mul_by_definition(a, b)


@given(INT32, st.integers(0, 31))
def test_rounding_shift_follows_its_definition(x: int, exponent: int) -> None:
    assert fixed_point.rounding_shift(ints(x), exponent) == rounding_shift_by_definition(x, exponent)


@pytest.mark.parametrize(("x", "expected"), [(5, 3), (-5, -3), (6, 3), (-6, -3), (7, 4), (-7, -4)])
def test_rounding_shift_takes_ties_away_from_zero(x: int, expected: int) -> None:
    assert fixed_point.rounding_shift(ints(x), 1) == expected


@given(st.floats(2**-30, 2**20))
def test_quantize_multiplier_is_within_half_a_unit(real: float) -> None:
    multiplier, shift = fixed_point.quantize_multiplier(real)

    assert 1 << 30 <= multiplier < 1 << 31
    assert math.isclose(math.ldexp(multiplier, shift - 31), real, rel_tol=2**-31)


@pytest.mark.parametrize(
    ("real", "expected"), [(0.0, (0, 0)), (1.0, (1 << 30, 1)), (0.5, (1 << 30, 0)), (2**-40, (0, 0))]
)
def test_quantize_multiplier_of_special_values(real: float, expected: tuple[int, int]) -> None:
    assert fixed_point.quantize_multiplier(real) == expected


def test_quantize_multiplier_carries_when_the_fraction_rounds_up_to_one() -> None:
    assert fixed_point.quantize_multiplier(1 - 2**-40) == (1 << 30, 1)


@pytest.mark.parametrize("real", [-1.0, math.nan, math.inf, 2.0**40])
def test_q1_a_multiplier_that_cannot_be_quantized_is_rejected(real: float) -> None:
    with pytest.raises(GeneralFailure, match=r"\(Q1\)$"):
        fixed_point.quantize_multiplier(real)


@pytest.mark.parametrize("real", [0.0, 1.0, 1.5, -0.5, math.nan, 1 - 2**-40])
def test_q2_a_multiplier_outside_0_to_1_is_rejected(real: float) -> None:
    with pytest.raises(GeneralFailure, match=r"\(Q2\)$"):
        fixed_point.quantize_multiplier_below_one(real)


@pytest.mark.parametrize("real", [1.0, 0.5, math.inf, math.nan])
def test_q3_a_multiplier_of_1_or_less_is_rejected(real: float) -> None:
    with pytest.raises(GeneralFailure, match=r"\(Q3\)$"):
        fixed_point.quantize_multiplier_above_one(real)


def test_exponential_is_close_to_the_real_one() -> None:
    values = ints(np.linspace(-(1 << 31) + 1, 0, 1001))

    found = fixed_point.exp_on_negative_values(values, 5) / 2**31
    np.testing.assert_allclose(found, np.exp(values / 2**26), atol=1e-7)


def test_reciprocal_is_close_to_the_real_one() -> None:
    values = ints(np.linspace(0, (1 << 31) - 1, 1001))

    found = fixed_point.reciprocal_of_one_plus(values) / 2**31
    np.testing.assert_allclose(found, 1 / (1 + values / 2**31), atol=1e-8)


def test_input_radius_follows_its_definition() -> None:
    assert fixed_point.input_radius(4, 20) == (15 << 27) // (1 << 20)
