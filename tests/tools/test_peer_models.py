"""Results of other runtimes: how they are compared."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from peer_models import difference


@pytest.mark.parametrize(
    ("found", "expected", "result"),
    [
        (np.float32([1, 2]), np.float32([1, 4]), 0.5),
        (np.int8([1, 2]), np.int8([1, 4]), 2.0),
        (np.float32([np.nan, 2]), np.float32([np.nan, 2]), 0.0),
        (np.float32([np.nan, 2]), np.float32([1, 2]), math.inf),
        (np.float32([np.inf, 2]), np.float32([-np.inf, 2]), math.inf),
        (np.float32([1]), np.float32([1, 1]), math.inf),
        (np.float32([[1, 2]]), np.float32([1, 2]), 0.0),
        (np.float32([]), np.float32([]), 0.0),
    ],
)
def test_a_difference_is_relative_to_the_largest_float_and_absolute_for_integers(
    found: Any, expected: Any, result: float
) -> None:
    assert difference([found], [expected]) == result


def test_smaller_outputs_than_the_floor_are_compared_as_if_they_were_as_large() -> None:
    found, expected = [np.array([1e-7])], [np.array([2e-7])]
    assert difference(found, expected) == pytest.approx(0.5)
    assert difference(found, expected, 1e-6) == pytest.approx(0.1)
