"""Quantiles of a histogram, against the sorted durations."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnfmq.observe import statistics_layout as layout
from nnfmq.observe.statistics_layout import LatencyHistogram

DURATIONS = st.lists(st.integers(1_000, 10**10), min_size=1, max_size=50)


def histogram(durations: list[int]) -> LatencyHistogram:
    counts = [0] * layout.BUCKETS
    for duration in durations:
        counts[layout.bucket_of(duration)] += 1
    return LatencyHistogram(tuple(counts))


@given(DURATIONS, st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_is_within_a_sixteenth_of_the_nearest_rank(durations: list[int], fraction: float) -> None:
    exact = sorted(durations)[max(1, math.ceil(len(durations) * fraction)) - 1]
    found = histogram(durations).quantile_ns(fraction)
    assert found is not None
    assert abs(found - exact) <= exact / 16 + 1


def test_nothing_has_no_quantile() -> None:
    assert LatencyHistogram().quantile_ns(0.5) is None


@given(DURATIONS, DURATIONS)
def test_what_came_later_is_the_difference(first: list[int], second: list[int]) -> None:
    whole = histogram(first) + histogram(second)
    assert whole == histogram(first + second)
    assert whole.since(histogram(first)) == histogram(second)


def test_a_count_that_went_back_is_no_difference() -> None:
    assert histogram([5_000]).since(histogram([5_000, 5_000])).total == 0


def test_bounds_are_powers_of_two_microseconds() -> None:
    bounds = histogram([500, 999, 1_000, 3_999, 4_000, 10**12]).below_powers_of_two()
    assert [bound for bound, _ in bounds] == pytest.approx([1e-6 * 2**power for power in range(27)], rel=1e-12)
    assert [count for _, count in bounds] == [2, 3, 4, *[5] * 24]
