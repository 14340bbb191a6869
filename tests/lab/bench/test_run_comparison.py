"""Comparisons of runs: ratios, intervals, outcomes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nnfmq.hal.errors import InvalidArgument
from nnfmq.lab.bench.report import CANNOT_TELL, bootstrap_ratio, compare_runners, compare_with_baseline
from nnfmq.lab.statistics import shown_percentiles


def result(
    p50: float, p99: float = 1000, per_second: float = 100, spread: float = 0.02, **level: Any
) -> dict[str, Any]:
    """Return a result of 20 blocks whose values are spread evenly around those given."""
    factors = np.linspace(1 - spread, 1 + spread, 20)
    blocks = [{"p50_ns": p50 * f, "p99_ns": p99 * f, "throughput_per_s": per_second * f} for f in factors]
    conditions = {"is_stable": True, "others_cpu_share": 0.0}
    return {"runner": "burst", "clients": 1, "rate": None, **conditions, "blocks": blocks} | level


def report(*results: dict[str, Any], cpu: str = "a cpu", digest: str = "12" * 32) -> dict[str, Any]:
    identity = {"model": "net.tflite", "model_sha256": digest, "conditions": {"cpu": cpu}}
    return identity | {"results": list(results)}


def outcomes(new: dict[str, Any], old: dict[str, Any], tolerance: float = 5) -> dict[str, str]:
    return {row["metric"]: row["outcome"] for row in compare_with_baseline(report(new), report(old), tolerance)}


def test_equal_blocks_have_the_ratio_one_exactly() -> None:
    assert bootstrap_ratio([5.0] * 20, [5.0] * 20) == (1.0, 1.0, 1.0)
    assert bootstrap_ratio([6.0] * 20, [5.0] * 20) == pytest.approx((1.2, 1.2, 1.2))


def test_an_interval_contains_the_ratio_and_narrows_with_the_number_of_blocks() -> None:
    random = np.random.default_rng(1)
    few, many = (random.normal(100, 10, (2, count)) for count in (10, 1000))
    wide, narrow = bootstrap_ratio(*few), bootstrap_ratio(*many)
    assert wide.low < wide.ratio < wide.high
    assert narrow.high - narrow.low < (wide.high - wide.low) / 3


def test_the_interval_covers_the_true_ratio_in_about_19_of_20_runs() -> None:
    random = np.random.default_rng(2)
    runs = [bootstrap_ratio(*random.normal(100, 5, (2, 20))) for _ in range(200)]
    covered = sum(found.low <= 1 <= found.high for found in runs)
    assert covered >= 180  # 190 are expected; the bootstrap of a median of 20 values errs on the wide side


@pytest.mark.parametrize(
    ("p50", "tolerance", "expected"),
    [
        (100, 5, "no change"),
        (103, 5, "no change"),
        (120, 5, "regression"),
        (80, 5, "improvement"),
        (120, 25, "no change"),
    ],
)
def test_a_change_beyond_the_tolerance_has_an_outcome(p50: float, tolerance: float, expected: str) -> None:
    assert outcomes(result(p50), result(100), tolerance)["p50"] == expected


def test_a_change_within_the_noise_is_none() -> None:
    assert outcomes(result(110, spread=0.9), result(100, spread=0.9))["p50"] == "no change"


def test_that_there_is_no_change_cannot_be_told_from_unstable_runs_that_vary_more_than_the_tolerance() -> None:
    unstable = result(100, spread=0.9, is_stable=False)
    assert outcomes(unstable, result(100, spread=0.9))["p50"] == CANNOT_TELL
    assert outcomes(unstable, result(100, spread=0.9), 500)["p50"] == "no change"
    assert outcomes(result(100, is_stable=False), result(100))["p50"] == "no change"


@pytest.mark.parametrize("unstable", [0, 1])
@pytest.mark.parametrize("p50", [80, 120])
def test_a_change_between_runs_of_which_one_was_not_stable_cannot_be_told(p50: float, unstable: int) -> None:
    runs = [result(p50, is_stable=unstable != 0), result(100, is_stable=unstable != 1)]
    assert outcomes(*runs) == {"p50": CANNOT_TELL, "p99": "no change", "throughput_per_s": "no change"}


@pytest.mark.parametrize("busy", [0, 1])
@pytest.mark.parametrize(("share", "expected"), [(0.049, "regression"), (0.051, CANNOT_TELL)])
def test_a_change_between_runs_of_which_one_was_beside_other_programs_cannot_be_told(
    share: float, expected: str, busy: int
) -> None:
    runs = [result(p50, others_cpu_share=share * (busy == number)) for number, p50 in enumerate((120, 100))]
    assert outcomes(*runs) == {"p50": expected, "p99": "no change", "throughput_per_s": "no change"}


def test_a_change_on_another_cpu_cannot_be_told() -> None:
    rows = compare_with_baseline(report(result(120)), report(result(100), cpu="another"), 5)
    assert rows[0]["outcome"] == CANNOT_TELL


def test_a_fixed_warm_up_says_nothing_of_stability() -> None:
    assert outcomes(result(120, is_stable=None), result(100, is_stable=None))["p50"] == "regression"


def test_a_baseline_of_another_model_is_rejected() -> None:
    with pytest.raises(InvalidArgument, match=r"another model: net.tflite with SHA-256 343434343434…, not net.tflite"):
        compare_with_baseline(report(result(100)), report(result(100), digest="34" * 32), 5)


def test_less_throughput_is_a_regression() -> None:
    assert outcomes(result(1, per_second=80), result(1, per_second=100))["throughput_per_s"] == "regression"
    assert outcomes(result(1, per_second=120), result(1, per_second=100))["throughput_per_s"] == "improvement"


def test_the_throughput_of_an_open_loop_is_not_compared() -> None:
    assert set(outcomes(result(1, rate=50.0), result(1, rate=50.0))) == {"p50", "p99"}


def test_only_results_that_both_runs_have_are_compared() -> None:
    new = report(result(100), result(7, runner="sync"))
    old = report(result(100, clients=2), result(7, runner="sync"), result(9, runner="LiteRT"))
    assert {row["runner"] for row in compare_with_baseline(new, old, 5)} == {"sync"}


def test_a_baseline_without_a_common_result_is_rejected_with_what_it_has() -> None:
    with pytest.raises(InvalidArgument, match="other runners, clients or rates: burst, 2 clients, 50/s"):
        compare_with_baseline(report(result(100)), report(result(100, clients=2, rate=50.0)), 5)


@pytest.mark.parametrize("baseline", [{}, [], {"results": [{}]}, {"results": [{"runner": "burst"}]}, 3])
def test_a_baseline_that_is_no_report_is_rejected(baseline: Any) -> None:
    with pytest.raises(InvalidArgument, match="no report of nnfmq bench --json"):
        compare_with_baseline(report(result(100)), baseline, 5)


@pytest.mark.parametrize(
    ("requests", "shown"), [(1, "--7"), (2, "3-7"), (99, "3-7"), (999, "3-7"), (1000, "357")], ids=str
)
def test_a_percentile_that_too_few_requests_support_is_not_shown(requests: int, shown: str) -> None:
    found = {"requests": requests, "latency_ns": {"p50": 3, "p99_9": 5, "max": 7}}
    assert "".join(shown_percentiles(found, ("p50", "p99_9", "max"), str)) == shown


def test_runners_are_compared_with_the_first_one_of_the_same_level() -> None:
    found = [result(10), result(40, runner="LiteRT"), result(20, clients=2), result(30, runner="LiteRT", clients=2)]
    rows = [row for row in compare_runners(found) if row["metric"] == "p50"]
    assert [(row["runner"], row["clients"], row["over"], round(row["ratio"], 6)) for row in rows] == [
        ("LiteRT", 1, "burst", 4.0),
        ("LiteRT", 2, "burst", 1.5),
    ]
