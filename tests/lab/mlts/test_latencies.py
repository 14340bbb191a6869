"""Statistics of durations, against arithmetic by hand."""

from __future__ import annotations

import math

from nnfmq.lab.statistics import BUCKETS, summarize


def test_mean_deviation_and_percentiles_are_those_of_all_durations() -> None:
    block = summarize([40, 10, 20, 30])
    assert (block.iterations, block.total_ns, block.mean_ns, block.p50_ns, block.p99_ns) == (4, 100, 25.0, 20, 40)
    assert math.isclose(block.std_dev_ns, math.sqrt(125))


def test_a_percentile_is_a_measured_value() -> None:
    block = summarize(list(range(1, 201)))
    assert (block.p50_ns, block.p99_ns) == (100, 198)


def test_each_duration_is_in_one_bucket_of_the_histogram() -> None:
    block = summarize([0, 1, 99, 100, 3199, 3200])
    assert (block.start_ns, block.step_ns, len(block.counts)) == (0.0, 100.0, BUCKETS)
    assert (block.counts[0], block.counts[1], block.counts[31], sum(block.counts)) == (3, 1, 2, 6)


def test_equal_durations_have_a_histogram_with_a_positive_step() -> None:
    block = summarize([7, 7, 7])
    assert (block.start_ns, block.step_ns, block.counts) == (7.0, 1.0, (3, *[0] * 31))
    assert block.as_json()["std_dev_ns"] == 0.0
