"""Comparison of outputs: integers exactly, floats within a tolerance, relative or in ULP."""

from __future__ import annotations

import math

import numpy as np
import pytest

from nnfmq.hal.errors import InvalidArgument
from nnfmq.lab.replay import DEFAULT_TOLERANCE, Tolerance, compare_output, parse_tolerance

EXACT = Tolerance(0.0)
NAN, INF = math.nan, math.inf


def floats(*values: float) -> np.ndarray:
    return np.float32(values)


def neighbour(value: float, steps: int) -> float:
    """Return the float32 that is `steps` representable values above."""
    found = np.float32(value)
    for _ in range(steps):
        found = np.nextafter(found, np.float32(INF))
    return float(found)


@pytest.mark.parametrize(
    ("text", "tolerance"),
    [("exact", EXACT), ("0", EXACT), ("1e-5", Tolerance(1e-5)), (".5", Tolerance(0.5)), ("4ulp", Tolerance(4.0, True)),
     ("12 ulp", Tolerance(12.0, True))],
)  # fmt: skip
def test_a_tolerance_is_parsed(text: str, tolerance: Tolerance) -> None:
    assert parse_tolerance(text) == tolerance


@pytest.mark.parametrize("text", ["", "1", "2e0", "-1e-5", "nan", "inf", "ulp", "1.5ulp", "1e-5ulp", "close", "1e999"])
def test_another_text_is_no_tolerance(text: str) -> None:
    with pytest.raises(InvalidArgument, match="give a relative one from 0 to below 1"):
        parse_tolerance(text)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "bool"])
def test_integers_have_to_be_equal_whatever_the_tolerance(dtype: str) -> None:
    recorded = np.array([0, 1, 1, 0], dtype)
    changed = np.array([0, 1, 0, 1], dtype)
    assert compare_output(recorded, recorded.copy(), Tolerance(0.9)).reason == ""
    difference = compare_output(recorded, changed, Tolerance(0.9))
    assert (difference.reason, difference.elements) == ("2 of 4 elements differ", 2)


@pytest.mark.parametrize(
    ("recorded", "output"),
    [(floats(1, 2), floats(1, 2, 3)), (floats(1, 2), np.float16([1, 2])), (floats(1, 2), floats(1, 2).reshape(1, 2))],
)
def test_another_shape_or_type_differs(recorded: np.ndarray, output: np.ndarray) -> None:
    assert "instead of float32 (2,)" in compare_output(recorded, output, Tolerance(0.9)).reason


def test_a_relative_tolerance_counts_in_parts_of_the_largest_magnitude() -> None:
    recorded = floats(0.0, -8.0, 4.0)
    within, beyond = floats(0.5, -8.0, 4.0), floats(0.75, -8.0, 4.0)
    assert compare_output(recorded, within, Tolerance(0.0625)).reason == ""  # 0.5 / 8
    difference = compare_output(recorded, beyond, Tolerance(0.0625))
    assert difference.reason == "1 of 3 elements differ by more than 0.0625 of the largest"
    assert (difference.relative, difference.elements) == (0.09375, 1)


def test_an_output_of_zeros_has_absolute_differences() -> None:
    assert compare_output(floats(0, 0), floats(1e-6, 0), DEFAULT_TOLERANCE).reason == ""
    assert compare_output(floats(0, 0), floats(1e-4, 0), DEFAULT_TOLERANCE).elements == 1


@pytest.mark.parametrize("value", [1.0, -3.5, 1e-40, 0.0, -1e-45])
@pytest.mark.parametrize("steps", [1, 4, 5])
def test_ulp_are_the_representable_values_between(value: float, steps: int) -> None:
    difference = compare_output(floats(value), floats(neighbour(value, steps)), Tolerance(4.0, True))
    assert difference.ulp == steps
    assert bool(difference.reason) is (steps > 4)


def test_both_zeros_are_equal() -> None:
    assert compare_output(floats(0.0), floats(-0.0), EXACT) == ("", 0.0, 0, 0)


def test_ulp_of_float16() -> None:
    output = np.nextafter(np.float16(2), np.float16(3))
    assert compare_output(np.float16([2]), np.array([output]), EXACT).ulp == 1


@pytest.mark.parametrize("special", [NAN, INF, -INF])
def test_nan_and_infinities_equal_themselves_alone(special: float) -> None:
    assert compare_output(floats(special, 1), floats(special, neighbour(1, 1)), DEFAULT_TOLERANCE).reason == ""
    assert compare_output(floats(special, 1), floats(1, 1), Tolerance(0.9)).elements == 1
    assert compare_output(floats(1, 1), floats(1, special), Tolerance(0.9)).elements == 1


def test_an_infinity_does_not_make_every_difference_small() -> None:
    assert compare_output(floats(INF, 1.0), floats(INF, 2.0), Tolerance(0.5)).elements == 1


def test_complex_numbers_are_compared_by_their_parts() -> None:
    recorded = np.complex64([1 + 2j])
    assert compare_output(recorded, np.complex64([1 + 2.000001j]), DEFAULT_TOLERANCE).reason == ""
    assert compare_output(recorded, np.complex64([1 + 3j]), DEFAULT_TOLERANCE).elements == 1
