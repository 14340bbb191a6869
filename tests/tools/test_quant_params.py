"""Quantization against its definition, real = scale · (q − zero_point), computed with exact fractions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quantize import QuantParams, Range, choose_quant_params, quantize_weights, round_half_away, sqnr_db

from nnfmq.hal.errors import InvalidArgument

DTYPES = pytest.mark.parametrize("dtype", ["int8", "uint8"])
BOUNDS = st.floats(0, 1e6, width=32)
INPUT_PARAMS = QuantParams(0.25, 3, "int8")


def real(q: int, params: QuantParams) -> Fraction:
    return Fraction(params.scale) * (q - params.zero_point)


@DTYPES
@given(low=BOUNDS, high=BOUNDS, part=st.floats(0, 1))
def test_the_error_of_a_value_in_range_is_at_most_half_a_scale(
    dtype: str, low: float, high: float, part: float
) -> None:
    params = choose_quant_params(Range.from_min_max(-low, high), dtype)
    bounds = max(params.representable_range.low, -low), min(params.representable_range.high, high)
    value = min(max(bounds[0] + part * (bounds[1] - bounds[0]), bounds[0]), bounds[1])

    q = int(params.quantize(np.array(value)))

    assert abs(real(q, params) - Fraction(value)) <= Fraction(params.scale) / 2 * (1 + Fraction(1, 2**20))
    assert params.dequantize(np.array(q)) == pytest.approx(float(real(q, params)), rel=1e-15)


@DTYPES
@given(low=BOUNDS, high=BOUNDS)
def test_zero_is_exact_and_the_range_is_represented_except_for_half_a_scale(
    dtype: str, low: float, high: float
) -> None:
    params = choose_quant_params(Range.from_min_max(-low, high), dtype)
    info = np.iinfo(dtype)
    assert info.min <= params.zero_point <= info.max
    assert params.dequantize(params.quantize(np.zeros(1))) == 0
    assert real(info.min, params) <= Fraction(-low) + Fraction(params.scale) / 2 * (1 + Fraction(1, 2**16))
    assert real(info.max, params) >= Fraction(high) - Fraction(params.scale) / 2 * (1 + Fraction(1, 2**16))


@given(low=BOUNDS, high=BOUNDS)
def test_a_range_is_rounded_outward_by_at_most_a_2048th(low: float, high: float) -> None:
    value_range = Range.from_min_max(-low, high)
    assert -low * (1 + 2**-11) <= value_range.low <= -low
    assert high <= value_range.high <= high * (1 + 2**-11)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-1, 1), (0, 6), (-3.5, 255), (-1 / 256, 1023)])
def test_a_range_whose_bounds_have_few_bits_is_not_rounded(low: float, high: float) -> None:
    assert Range.from_min_max(low, high) == Range(low, high)


@pytest.mark.parametrize(("low", "high"), [(2.0, 3.0), (-3.0, -2.0), (0.0, 0.0)])
def test_a_range_always_contains_zero(low: float, high: float) -> None:
    assert Range.from_min_max(low, high) == Range(min(low, 0.0), max(high, 0.0))


@pytest.mark.parametrize(("low", "high"), [(float("nan"), 1.0), (0.0, float("nan")), (float("-inf"), 0.0)])
def test_an_infinite_range_is_rejected(low: float, high: float) -> None:
    with pytest.raises(InvalidArgument, match="must be finite"):
        Range.from_min_max(low, high)


@pytest.mark.parametrize(
    ("low", "high", "scale", "zero_point"),
    [
        (0, 255, 1, -128),
        (-255, 0, 1, 127),
        (-128, 127, 1, 0),
        (-1, 254, 1, -127),
        (0, 0, 1, -128),
        (-1, 1, 2 / 255, -1),  # -128 + 127.5 = -0.5: the half is rounded away from zero
        (-64, 191, 1, -64),
    ],
)
def test_quantized_values_cover_the_range(low: float, high: float, scale: float, zero_point: int) -> None:
    expected = float(np.float32(scale))
    assert choose_quant_params(Range(low, high), "int8") == QuantParams(expected, zero_point, "int8")
    assert choose_quant_params(Range(low, high), "uint8") == QuantParams(expected, zero_point + 128, "uint8")


@pytest.mark.parametrize(("value", "expected"), [(0.5, 1), (-0.5, -1), (1.4999, 1), (-2.5, -3), (0.0, 0)])
def test_halves_are_rounded_away_from_zero(value: float, expected: int) -> None:
    assert round_half_away(value) == expected
    assert QuantParams(1.0, 0, "int8").quantize(np.array([value])).tolist() == [expected]


@DTYPES
def test_values_out_of_range_saturate(dtype: str) -> None:
    info = np.iinfo(dtype)
    quantized = QuantParams(1.0, 0, dtype).quantize(np.array([-1e30, 1e30], np.float32))
    assert quantized.tolist() == [info.min, info.max]
    assert quantized.dtype == dtype


def random_values(shape: tuple[int, ...], seed: int = 5) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 0.3, shape).astype(np.float32)


@pytest.mark.parametrize("axis", [0, 3])
def test_the_scale_of_a_channel_is_its_largest_magnitude_over_127(axis: int) -> None:
    weights = random_values((4, 3, 3, 5))
    result = quantize_weights(weights, None, axis, INPUT_PARAMS)
    for channel in range(weights.shape[axis]):
        values, quantized = weights.take(channel, axis), result.values.take(channel, axis).astype(int)
        scale = max(abs(float(value)) for value in values.ravel()) / 127
        assert result.scales[channel] == np.float32(scale)
        assert np.abs(quantized).max() == 127
        assert np.abs(values - quantized * float(result.scales[channel])).max() <= scale / 2 * (1 + 1e-6)
        np.testing.assert_allclose(result.dequantize().take(channel, axis), quantized * scale, rtol=1e-6)


def test_without_channels_there_is_one_scale() -> None:
    weights = random_values((6, 7))
    result = quantize_weights(weights, None, None, INPUT_PARAMS)
    assert result.scales.tolist() == [np.float32(np.abs(weights).max() / np.float64(127))]
    assert result.bias is None


def test_the_bias_scale_is_the_product_of_scales_and_its_error_at_most_half_a_scale() -> None:
    bias = random_values((4,), 6)
    result = quantize_weights(random_values((4, 1, 1, 5)), bias, 0, INPUT_PARAMS)
    assert result.bias is not None
    assert result.bias.dtype == np.int32
    assert result.bias_scales.tolist() == [np.float32(0.25) * scale for scale in result.scales]
    assert (np.abs(result.bias * result.bias_scales.astype(float) - bias) <= result.bias_scales / 2 * (1 + 1e-6)).all()


@pytest.mark.parametrize("axis", [0, None])
def test_a_bias_much_larger_than_its_weights_fits_int32(axis: int | None) -> None:
    result = quantize_weights(np.full((2, 1, 1, 3), 1e-20, np.float32), np.float32([3, -7]), axis, INPUT_PARAMS)
    assert result.bias is not None
    assert np.abs(result.bias.astype(np.int64)).max() <= 2**30 + 128
    np.testing.assert_allclose(result.bias * result.bias_scales.astype(float), [3, -7], rtol=1e-6)


def test_weights_that_are_all_zero_stay_zero() -> None:
    result = quantize_weights(np.zeros((2, 1, 1, 3), np.float32), np.zeros(2, np.float32), 0, INPUT_PARAMS)
    assert not result.values.any()
    assert (result.scales > 0).all()


def test_uint8_is_int8_plus_128() -> None:
    weights, bias, values = random_values((3, 4)), random_values((3,)), random_values((50,)) * 10
    signed, unsigned = (choose_quant_params(Range(-2, 5), dtype) for dtype in ("int8", "uint8"))
    assert (signed.quantize(values).astype(int) + 128 == unsigned.quantize(values)).all()
    one, other = (quantize_weights(weights, bias, None, params) for params in (signed, unsigned))
    assert (one.values.astype(int) + 128 == other.values).all()
    assert (one.zero_point, other.zero_point) == (0, 128)
    assert one.bias is not None
    np.testing.assert_array_equal(one.bias, other.bias)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_rejected(bad: float) -> None:
    with pytest.raises(InvalidArgument, match="finite"):
        quantize_weights(np.float32([[1, bad]]), None, None, INPUT_PARAMS)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_scales_whose_product_is_not_a_float32_are_rejected(size: float) -> None:
    with pytest.raises(InvalidArgument, match="too far from 1"):
        quantize_weights(np.float32([[1, 2]]) * np.float32(size), None, None, QuantParams(size, 0, "int8"))


def test_decibels_are_ten_times_the_logarithm_of_a_ratio_of_powers() -> None:
    assert sqnr_db(1000.0, 1.0) == pytest.approx(30.0)
    assert sqnr_db(1.0, 0.0) is None
    assert sqnr_db(0.0, 1.0) is None
