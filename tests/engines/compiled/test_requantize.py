"""Overflow checks of the two-rounding multiplication, at the limits and for bounds that overflow int64."""

from __future__ import annotations

import numpy as np
import pytest

from nnfmq.engines.compiled.kernels.requantize import FixedPointMultiplier
from nnfmq.operations.fixed_point import INT32_MAX
from nnfmq.operations.quantization import OutputMultipliers


def multiplier_for(shift: int, bias: int, bound: int) -> FixedPointMultiplier | None:
    numbers = (np.array([number], np.int64) for number in (1 << 30, shift, bias, bound))
    multipliers, shifts, biases, bounds = numbers
    return FixedPointMultiplier.of(OutputMultipliers(multipliers, shifts), biases, bounds)


@pytest.mark.parametrize("shift", range(-30, 31))
def test_overflow_of_int32_is_rejected(shift: int) -> None:
    left, nudge = max(shift, 0), 1 << max(-shift, 0)
    max_abs_acc = (INT32_MAX - nudge) >> (left + 1)  # doubled, and nudged by half a unit of the result
    assert multiplier_for(shift, 0, max_abs_acc) is not None
    assert multiplier_for(shift, 0, max_abs_acc + 1) is None
    assert multiplier_for(shift, -1, max_abs_acc) is None


def test_a_nudge_that_overflows_is_rejected() -> None:
    assert multiplier_for(-31, 0, 0) is None


@pytest.mark.parametrize("shift", range(31))
def test_bounds_that_overflow_int64_are_rejected(shift: int) -> None:
    for bits in range(32, 63):
        assert multiplier_for(shift, 0, 1 << bits) is None
        assert multiplier_for(shift, 0, 3 << (bits - 1)) is None
