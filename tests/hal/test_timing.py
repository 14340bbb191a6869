"""Durations and limits are converted at the edges as the interfaces define them."""

from __future__ import annotations

import math

import pytest

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.timing import (
    HIDL_NO_TIME,
    NO_TIME,
    NO_TIMING,
    Timing,
    from_limit_field,
    from_microseconds,
    from_seconds,
    from_unsigned,
    to_limit_field,
    to_microseconds,
    to_unsigned,
    truncate_to_microseconds,
)


@pytest.mark.parametrize(("ns", "us"), [(-1, (1 << 64) - 1), (0, 0), (5_000, 5)])
def test_TIM_2_times_in_microseconds(ns: int, us: int) -> None:
    assert (to_microseconds(ns), from_microseconds(us)) == (us, ns)


def test_microseconds_are_rounded_down() -> None:
    assert to_microseconds(1_999) == 1
    assert truncate_to_microseconds(Timing(1_999, 2_000)) == Timing(1_000, 2_000)
    assert truncate_to_microseconds(NO_TIMING) == NO_TIMING


@pytest.mark.parametrize(("ns", "word"), [(NO_TIME, HIDL_NO_TIME), (0, 0), (2**63, 2**63)])
def test_statistics_have_unsigned_durations(ns: int, word: int) -> None:
    assert (to_unsigned(ns), from_unsigned(word)) == (word, ns)


@pytest.mark.parametrize(("limit_ns", "field"), [(None, -1), (0, 0), (2**63 - 1, 2**63 - 1)])
def test_the_limit_field_of_a_message_is_minus_one_without_a_limit(limit_ns: int | None, field: int) -> None:
    assert (to_limit_field(limit_ns), from_limit_field(field)) == (field, limit_ns)


def test_N_VAL_23_N_RQX_14_a_limit_field_below_minus_one_is_rejected() -> None:
    with pytest.raises(InvalidArgument, match="got -2"):
        from_limit_field(-2)


@pytest.mark.parametrize(
    ("seconds", "ns"), [(None, None), (0, 0), (0.5, 500_000_000), (1e-9, 1), (math.inf, 9 * 10**18)]
)
def test_seconds_become_nanoseconds_that_fit_a_message(seconds: float | None, ns: int | None) -> None:
    assert from_seconds(seconds) == ns


@pytest.mark.parametrize("seconds", [-1, -1e-12, math.nan, -math.inf])
def test_negative_seconds_and_nan_are_rejected(seconds: float) -> None:
    with pytest.raises(InvalidArgument, match="a loop timeout is 0 or more seconds"):
        from_seconds(seconds, "a loop timeout")
