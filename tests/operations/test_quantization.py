"""Requantization in floating point against the integer definition, and activation ranges."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnfmq.hal.errors import GeneralFailure
from nnfmq.operations import fixed_point
from nnfmq.operations.declaration import Tensor
from nnfmq.operations.fixed_point import ints
from nnfmq.operations.quantization import OutputMultipliers, quantize, quantized_activation_range, requantizer

UINT8, INT8 = np.dtype("u1"), np.dtype("i1")


def tensor(dtype: np.dtype[np.uint8] | np.dtype[np.int8], scale: float, zero_point: int) -> Tensor:
    return Tensor((1,), dtype, scale, zero_point)


def by_definition(sums: np.ndarray, real: float, output: Tensor, activation: int) -> np.ndarray:
    multiplier, shift = fixed_point.quantize_multiplier(real)
    low, high = quantized_activation_range(activation, output)
    return np.clip(fixed_point.multiply(ints(sums), multiplier, shift) + output.zero_point, low, high)


def near_ties(real: float, output: Tensor) -> np.ndarray:
    """Return the sums whose results are nearest to the border between two codes, and their neighbours."""
    borders = (np.arange(-300, 300) + 0.5) / real
    around = np.concatenate([np.round(borders) + step for step in (-2, -1, 0, 1, 2)])
    return np.clip(around, -(1 << 30), 1 << 30).astype(np.int64)


@settings(max_examples=150, deadline=None)
@given(
    st.floats(2**-20, 1.9),
    st.integers(0, 255),
    st.integers(0, 3),
    st.sampled_from([UINT8, INT8]),
    st.integers(-(1 << 22), 1 << 22),
)
def test_requantization_equals_its_definition_at_every_border(
    real: float, zero_point: int, activation: int, dtype: np.dtype[np.uint8], bias: int
) -> None:
    output = tensor(dtype, 0.05, zero_point if dtype == UINT8 else zero_point - 128)
    sums = near_ties(real, output)
    finish = requantizer(OutputMultipliers.of([real]), ints([bias]), int(np.abs(sums - bias).max()), output, activation)
    found = np.empty(sums.shape, dtype)

    finish((sums - bias).astype(np.float64), found)

    np.testing.assert_array_equal(found, by_definition(sums, real, output, activation))


@pytest.mark.parametrize("exponent", range(1, 20))
@pytest.mark.parametrize("activation", [0, 1])
def test_requantization_takes_exact_ties_as_the_definition(exponent: int, activation: int) -> None:
    output, real = tensor(UINT8, 0.05, 100), 2.0**-exponent
    sums = (np.arange(-201, 202, 2) << exponent) >> 1
    finish = requantizer(OutputMultipliers.of([real]), ints([0]), 1 << 21, output, activation)
    found = np.empty(sums.shape, UINT8)

    finish(sums, found)

    np.testing.assert_array_equal(found, by_definition(sums, real, output, activation))


def test_each_channel_has_its_own_multiplier() -> None:
    output = tensor(UINT8, 1.0, 0)
    finish = requantizer(OutputMultipliers.of([0.5, 0.25]).rows(2), ints([0, 8, 0, 8]), 1000, output, 0)
    found = np.empty((1, 4), UINT8)

    finish(np.array([[100, 100, 10, 10]], np.float32), found)

    assert found.tolist() == [[50, 27, 5, 5]]


@pytest.mark.parametrize(("activation", "expected"), [(0, (0, 255)), (1, (128, 255)), (2, (118, 138)), (3, (128, 188))])
def test_activations_bound_codes(activation: int, expected: tuple[int, int]) -> None:
    assert quantized_activation_range(activation, tensor(UINT8, 0.1, 128)) == expected


def test_activation_bounds_stay_within_the_type() -> None:
    assert quantized_activation_range(3, tensor(INT8, 0.01, 100)) == (100, 127)


def test_halves_round_away_from_zero() -> None:
    assert [quantize(real, tensor(INT8, 1.0, 0)) for real in (0.5, 1.5, -0.5, -1.5)] == [1, 2, -1, -2]


def test_q5_an_unknown_activation_is_rejected() -> None:
    with pytest.raises(GeneralFailure, match=r"\(Q5\)$"):
        quantized_activation_range(4, tensor(UINT8, 1.0, 0))
