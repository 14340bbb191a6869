"""Percentiles, and the steps of HdrHistogram."""

from __future__ import annotations

import numpy as np
import pytest

from nnfmq.lab.statistics import distribution, percentile, percentile_steps, summary


@pytest.mark.parametrize(("percent", "expected"), [(50, 50), (90, 90), (99, 99), (99.9, 100), (100, 100), (0, 1)])
def test_percentiles_are_nearest_rank(percent: float, expected: int) -> None:
    assert percentile(range(1, 101), percent) == expected
    assert percentile(np.arange(1, 101), percent) == expected


@pytest.mark.parametrize(("count", "percent", "rank"), [(1000, 99.9, 999), (10_000, 99.9, 9990), (10_000, 99.99, 9999)])
def test_a_percentile_that_is_a_whole_rank_is_that_rank(count: int, percent: float, rank: int) -> None:
    assert percentile(range(1, count + 1), percent) == rank


def test_one_sample_is_every_percentile() -> None:
    assert distribution([7]) == {"p50": 7, "p90": 7, "p99": 7, "p99_9": 7, "max": 7}


def test_the_distribution_does_not_depend_on_the_order() -> None:
    assert distribution([3, 1, 2]) == {"p50": 2, "p90": 3, "p99": 3, "p99_9": 3, "max": 3}


def test_a_summary_has_the_moments_too() -> None:
    found = summary(np.array([4, 2, 6, 8], np.int64))
    assert (found["min"], found["p50"], found["max"], found["mean"]) == (2, 4, 8, 5.0)
    assert found["std"] == pytest.approx(5**0.5)


@pytest.mark.parametrize(("count", "unsupported"), [(1, 5), (10, 3), (99, 2), (100, 1), (999, 1), (1000, 0)])
def test_a_summary_has_a_percentile_only_if_a_value_may_be_above_it(count: int, unsupported: int) -> None:
    found = summary(np.arange(count, dtype=np.int64))
    names = ["p50", "p90", "p95", "p99", "p99_9"]
    assert [name for name in names if found[name] is None] == names[5 - unsupported :]
    assert found["max"] == count - 1


def test_each_step_halves_the_rest_in_fifths() -> None:
    steps = percentile_steps(np.arange(1, 10_001))
    shares = [round(share, 6) for share, _, _ in steps]
    # HdrHistogram's table for five ticks per half distance begins like this.
    assert shares[:16] == [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.775, 0.8, 0.825, 0.85, 0.875]
    assert steps[5] == (0.5, 5000, 5000)
    assert steps[-1] == (1.0, 10_000, 10_000)
    assert steps[0] == (0.0, 1, 1)


def test_the_steps_end_when_one_has_the_largest_sample() -> None:
    assert percentile_steps(np.array([5])) == [(0.0, 5, 1), (1.0, 5, 1)]
    equal = percentile_steps(np.array([3, 3, 9]))
    assert equal[0] == (0.0, 3, 2)
    assert [value for _, value, _ in equal].count(9) == 2
