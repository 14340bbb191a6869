"""Which sums 32 bits hold between the two roundings, told by bounds of any size."""

from __future__ import annotations

import numpy as np
import pytest

from nnfmq.engines.compiled.kernels.requantize import FixedPointMultiplier
from nnfmq.operations.fixed_point import INT32_MAX
from nnfmq.operations.quantization import OutputMultipliers


def rounding(shift: int, bias: int, bound: int) -> FixedPointMultiplier | None:
    numbers = (np.array([number], np.int64) for number in (1 << 30, shift, bias, bound))
    multipliers, shifts, biases, bounds = numbers
    return FixedPointMultiplier.of(OutputMultipliers(multipliers, shifts), biases, bounds)


@pytest.mark.parametrize("shift", range(-30, 31))
def test_what_32_bits_do_not_hold_is_declined(shift: int) -> None:
    left, nudge = max(shift, 0), 1 << max(-shift, 0)
    most = (INT32_MAX - nudge) >> (left + 1)  # sums are doubled, and nudged by half a unit of the result
    assert rounding(shift, 0, most) is not None
    assert rounding(shift, 0, most + 1) is None
    assert rounding(shift, -1, most) is None


def test_no_sum_is_held_where_its_nudge_is_not() -> None:
    assert rounding(-31, 0, 0) is None


@pytest.mark.parametrize("shift", range(31))
def test_bounds_that_64_bits_do_not_hold_either_are_declined(shift: int) -> None:
    for bits in range(32, 63):
        assert rounding(shift, 0, 1 << bits) is None
        assert rounding(shift, 0, 3 << (bits - 1)) is None
