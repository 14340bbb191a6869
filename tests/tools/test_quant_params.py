"""Codes, scales and zero points against their definition: real = scale × (code − zero point), computed in fractions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quant_params import Affine, Range, quantized_weights, round_half_away, sqnr_db

from nnfmq.hal.errors import InvalidArgument

DTYPES = pytest.mark.parametrize("dtype", ["int8", "uint8"])
ENDS = st.floats(0, 1e6, width=32)
INPUT = Affine(0.25, 3, "int8")


def real(code: int, how: Affine) -> Fraction:
    return Fraction(how.scale) * (code - how.zero_point)


@DTYPES
@given(low=ENDS, high=ENDS, part=st.floats(0, 1))
def test_a_value_of_the_range_is_at_most_half_a_scale_from_its_code(
    dtype: str, low: float, high: float, part: float
) -> None:
    how = Affine.spread(Range.holding(-low, high), dtype)
    inside = max(how.span.low, -low), min(how.span.high, high)
    value = min(max(inside[0] + part * (inside[1] - inside[0]), inside[0]), inside[1])

    code = int(how.codes(np.array(value)))

    assert abs(real(code, how) - Fraction(value)) <= Fraction(how.scale) / 2 * (1 + Fraction(1, 2**20))
    assert how.reals(np.array(code)) == pytest.approx(float(real(code, how)), rel=1e-15)


@DTYPES
@given(low=ENDS, high=ENDS)
def test_zero_has_a_code_of_its_own_and_the_codes_hold_the_range_but_half_a_scale(
    dtype: str, low: float, high: float
) -> None:
    how = Affine.spread(Range.holding(-low, high), dtype)
    info = np.iinfo(dtype)
    assert info.min <= how.zero_point <= info.max
    assert how.reals(how.codes(np.zeros(1))) == 0
    assert real(info.min, how) <= Fraction(-low) + Fraction(how.scale) / 2 * (1 + Fraction(1, 2**16))
    assert real(info.max, how) >= Fraction(high) - Fraction(how.scale) / 2 * (1 + Fraction(1, 2**16))


@given(low=ENDS, high=ENDS)
def test_a_range_is_rounded_outward_by_at_most_a_2048th(low: float, high: float) -> None:
    span = Range.holding(-low, high)
    assert -low * (1 + 2**-11) <= span.low <= -low
    assert high <= span.high <= high * (1 + 2**-11)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-1, 1), (0, 6), (-3.5, 255), (-1 / 256, 1023)])
def test_a_range_of_few_bits_stays_as_it_is(low: float, high: float) -> None:
    assert Range.holding(low, high) == Range(low, high)


@pytest.mark.parametrize(("low", "high"), [(2.0, 3.0), (-3.0, -2.0), (0.0, 0.0)])
def test_a_range_always_holds_zero(low: float, high: float) -> None:
    assert Range.holding(low, high) == Range(min(low, 0.0), max(high, 0.0))


@pytest.mark.parametrize(("low", "high"), [(float("nan"), 1.0), (0.0, float("nan")), (float("-inf"), 0.0)])
def test_a_range_without_end_is_refused(low: float, high: float) -> None:
    with pytest.raises(InvalidArgument, match="must be finite"):
        Range.holding(low, high)


@pytest.mark.parametrize(
    ("low", "high", "scale", "zero_point"),
    [
        (0, 255, 1, -128),
        (-255, 0, 1, 127),
        (-128, 127, 1, 0),
        (-1, 254, 1, -127),
        (0, 0, 1, -128),
        (-1, 1, 2 / 255, -1),  # -128 + 127.5 = -0.5: half a step is moved away from zero
        (-64, 191, 1, -64),
    ],
)
def test_codes_are_spread_over_the_range(low: float, high: float, scale: float, zero_point: int) -> None:
    expected = float(np.float32(scale))
    assert Affine.spread(Range(low, high), "int8") == Affine(expected, zero_point, "int8")
    assert Affine.spread(Range(low, high), "uint8") == Affine(expected, zero_point + 128, "uint8")


@pytest.mark.parametrize(("value", "expected"), [(0.5, 1), (-0.5, -1), (1.4999, 1), (-2.5, -3), (0.0, 0)])
def test_halves_are_rounded_away_from_zero(value: float, expected: int) -> None:
    assert round_half_away(value) == expected
    assert Affine(1.0, 0, "int8").codes(np.array([value])).tolist() == [expected]


@DTYPES
def test_what_is_out_of_range_gets_the_first_or_last_code(dtype: str) -> None:
    info = np.iinfo(dtype)
    codes = Affine(1.0, 0, dtype).codes(np.array([-1e30, 1e30], np.float32))
    assert codes.tolist() == [info.min, info.max]
    assert codes.dtype == dtype


def drawn(shape: tuple[int, ...], seed: int = 5) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 0.3, shape).astype(np.float32)


@pytest.mark.parametrize("axis", [0, 3])
def test_the_scale_of_a_channel_is_its_largest_magnitude_over_127(axis: int) -> None:
    weights = drawn((4, 3, 3, 5))
    made = quantized_weights(weights, None, axis, INPUT)
    for channel in range(weights.shape[axis]):
        values, codes = weights.take(channel, axis), made.codes.take(channel, axis).astype(int)
        scale = max(abs(float(value)) for value in values.ravel()) / 127
        assert made.scales[channel] == np.float32(scale)
        assert np.abs(codes).max() == 127
        assert np.abs(values - codes * float(made.scales[channel])).max() <= scale / 2 * (1 + 1e-6)
        np.testing.assert_allclose(made.reals().take(channel, axis), codes * scale, rtol=1e-6)


def test_without_channels_there_is_one_scale() -> None:
    weights = drawn((6, 7))
    made = quantized_weights(weights, None, None, INPUT)
    assert made.scales.tolist() == [np.float32(np.abs(weights).max() / np.float64(127))]
    assert made.bias is None


def test_the_bias_has_the_scale_of_a_product_and_is_at_most_half_of_it_away() -> None:
    bias = drawn((4,), 6)
    made = quantized_weights(drawn((4, 1, 1, 5)), bias, 0, INPUT)
    assert made.bias is not None
    assert made.bias.dtype == np.int32
    assert made.bias_scales.tolist() == [np.float32(0.25) * scale for scale in made.scales]
    assert (np.abs(made.bias * made.bias_scales.astype(float) - bias) <= made.bias_scales / 2 * (1 + 1e-6)).all()


@pytest.mark.parametrize("axis", [0, None])
def test_a_bias_that_dwarfs_its_weights_still_fits(axis: int | None) -> None:
    made = quantized_weights(np.full((2, 1, 1, 3), 1e-20, np.float32), np.float32([3, -7]), axis, INPUT)
    assert made.bias is not None
    assert np.abs(made.bias.astype(np.int64)).max() <= 2**30 + 128
    np.testing.assert_allclose(made.bias * made.bias_scales.astype(float), [3, -7], rtol=1e-6)


def test_weights_of_nothing_but_zeros_stay_zero() -> None:
    made = quantized_weights(np.zeros((2, 1, 1, 3), np.float32), np.zeros(2, np.float32), 0, INPUT)
    assert not made.codes.any()
    assert (made.scales > 0).all()


def test_uint8_is_int8_and_128() -> None:
    weights, bias, values = drawn((3, 4)), drawn((3,)), drawn((50,)) * 10
    signed, unsigned = (Affine.spread(Range(-2, 5), dtype) for dtype in ("int8", "uint8"))
    assert (signed.codes(values).astype(int) + 128 == unsigned.codes(values)).all()
    one, other = (quantized_weights(weights, bias, None, how) for how in (signed, unsigned))
    assert (one.codes.astype(int) + 128 == other.codes).all()
    assert (one.zero_point, other.zero_point) == (0, 128)
    assert one.bias is not None
    np.testing.assert_array_equal(one.bias, other.bias)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_no_numbers_are_refused(bad: float) -> None:
    with pytest.raises(InvalidArgument, match="finite"):
        quantized_weights(np.float32([[1, bad]]), None, None, INPUT)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_scales_whose_product_is_no_float32_are_refused(size: float) -> None:
    with pytest.raises(InvalidArgument, match="too far from 1"):
        quantized_weights(np.float32([[1, 2]]) * np.float32(size), None, None, Affine(size, 0, "int8"))


def test_decibels_are_ten_times_the_logarithm_of_a_ratio_of_powers() -> None:
    assert sqnr_db(1000.0, 1.0) == pytest.approx(30.0)
    assert sqnr_db(1.0, 0.0) is None
    assert sqnr_db(0.0, 1.0) is None
