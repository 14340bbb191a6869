"""Outcomes of scenarios and runs, from numbers that the tests write. Nothing is measured."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from nnfmq.hal.errors import InvalidArgument
from nnfmq.lab.suite.outcomes import (
    checks_of,
    compare_with_earlier,
    require_comparable,
    scenario_outcome,
    stability_of,
    suite_outcome,
)

MS = 1_000_000


def result(**changes: Any) -> dict[str, Any]:
    """A scenario with 2,000 requests of 1 ms, of which 20 took 8 ms and the last one 40 ms."""
    usual = {
        "scenario": "idle", "requests": 2000, "missed": 3, "wrong_outputs": 0, "reason": "", "wall_ns": 20_000 * MS,
        "latency_ns": {"p50": MS, "p90": MS, "p99": 8 * MS, "p99_9": 9 * MS, "max": 40 * MS}, "growth_bytes": 3 << 20,
        "deaths_ns": None, "others_cpu_ns": 0, "stolen_cpu_ns": 0, "blocks": [{"p50_ns": MS, "p99_ns": 8 * MS}] * 20,
        "checks": [],
    }  # fmt: skip
    return usual | changes


def checked(found: dict[str, Any], **limits: float) -> dict[str, str]:
    return {check["key"]: check["outcome"] for check in checks_of(found, limits)}


def test_a_value_at_its_limit_is_within_it_and_one_above_is_not() -> None:
    assert checked(result(), p50_ms=1, p99_ms=7.99, max_ms=40, missed_percent=0.15, growth_mib=2.9) == {
        "p50_ms": "passed", "p99_ms": "failed", "max_ms": "passed", "missed_percent": "passed", "growth_mib": "failed"
    }  # fmt: skip
    assert checked(result(missed=4), missed_percent=0.15) == {"missed_percent": "failed"}
    assert checked(result(wrong_outputs=1), wrong_outputs=0) == {"wrong_outputs": "failed"}


def test_outputs_that_are_not_compared_have_no_check() -> None:
    assert checked(result(wrong_outputs=None), wrong_outputs=0) == {}


def test_a_percentile_of_too_few_requests_is_within_its_limit_only_if_the_longest_request_is() -> None:
    few = result(requests=99)
    assert checked(few, p99_ms=40) == {"p99_ms": "passed"}
    assert checked(few, p99_ms=39) == {"p99_ms": "cannot tell"}
    assert checks_of(few, {"p99_ms": 39})[0]["value"] is None
    assert checked(result(requests=100), p99_ms=39) == {"p99_ms": "passed"}


def test_the_slowest_death_counts_and_without_one_it_cannot_be_told() -> None:
    deaths = {"client": [3 * MS, 120 * MS], "worker": [MS]}
    assert checked(result(deaths_ns=deaths), seen_ms=100) == {"seen_ms": "failed"}
    assert checked(result(deaths_ns=deaths), seen_ms=120) == {"seen_ms": "passed"}
    assert checked(result(deaths_ns={"client": [], "worker": []}), seen_ms=100) == {"seen_ms": "cannot tell"}


@pytest.mark.parametrize(
    ("checks", "changes", "is_skipped", "outcome"),
    [
        (("passed", "cannot tell", "failed"), {}, False, "failed"),
        (("passed", "cannot tell"), {}, False, "cannot tell"),
        (("passed",), {}, False, "passed"),
        ((), {}, False, "passed"),
        ((), {"reason": "it died"}, False, "error"),
        ((), {"reason": "not allowed here"}, True, "skipped"),
        ((), {"requests": 0}, False, "not run"),
    ],
)
def test_the_outcome_of_a_scenario_is_its_worst_check(
    checks: tuple[str, ...], changes: dict[str, Any], is_skipped: bool, outcome: str
) -> None:
    found = result(checks=[{"outcome": each} for each in checks], **changes)
    assert scenario_outcome(found, is_skipped=is_skipped) == outcome


def test_the_outcome_of_the_suite_is_its_worst_scenario_without_those_that_were_skipped() -> None:
    def suite(*each: str) -> str:
        return suite_outcome([{"outcome": outcome} for outcome in each])

    assert suite("passed", "skipped") == "passed"
    assert suite("passed", "cannot tell", "error") == "error"
    assert suite("not run", "passed") == "not run"


# ---- stability


def test_an_idle_machine_is_stable() -> None:
    assert stability_of([result()]) == {"is_stable": True, "reasons": []}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"others_cpu_ns": 1_010_000_000}, "other programs used 5 % of a CPU"),
        ({"stolen_cpu_ns": 410_000_000}, "the hypervisor gave other machines 2 % of a CPU"),
        (
            {"blocks": [{"p50_ns": MS}] * 10 + [{"p50_ns": 2 * MS}] * 10},
            "p50 of the scenario idle varied from 1 to 2 ms",
        ),
        ({"blocks": []}, "too few requests"),
        ({"requests": 0}, "was not measured"),
        ({"scenario": "soak"}, "was not measured"),
    ],
)
def test_what_makes_a_machine_unstable_is_named(changes: dict[str, Any], reason: str) -> None:
    found = stability_of([result(**changes)])
    assert not found["is_stable"]
    assert reason in found["reasons"][0]


# ---- the baseline


def report(factor: float = 1.0, **changes: Any) -> dict[str, Any]:
    """A report whose blocks vary by 2 %, times a factor."""
    noise = np.random.default_rng(1).uniform(0.98, 1.02, 20)
    blocks = [{"p50_ns": factor * MS * each, "p99_ns": factor * 8 * MS * each} for each in noise]
    return {
        "model": "a.tflite", "model_sha256": "1" * 64, "client": "burst", "load": {"rate": 100},
        "conditions": {"date": "2026-01-01", "host": "here", "cpu": "EPYC", "cpus_allowed": [0, 1]},
        "stability": {"is_stable": True, "reasons": []}, "scenarios": [result(blocks=blocks)],
    } | changes  # fmt: skip


def outcomes(new: dict[str, Any], old: dict[str, Any]) -> list[str]:
    return [row["outcome"] for row in compare_with_earlier(new, old, 25)["rows"]]


@pytest.mark.parametrize(
    ("factor", "outcome"), [(1.0, "no change"), (1.2, "no change"), (1.4, "regression"), (0.6, "improvement")]
)
def test_a_change_beyond_the_tolerance_is_told(factor: float, outcome: str) -> None:
    assert outcomes(report(factor), report()) == [outcome, outcome]


UNSTABLE = {"is_stable": False, "reasons": ["other programs used 50 % of a CPU"]}


@pytest.mark.parametrize("is_new", [True, False])
def test_a_change_cannot_be_told_if_one_of_the_machines_was_not_stable(is_new: bool) -> None:
    new, old = report(1.4, **({"stability": UNSTABLE} if is_new else {})), report()
    if not is_new:
        old["stability"] = UNSTABLE
    found = compare_with_earlier(new, old, 25)
    assert [row["outcome"] for row in found["rows"]] == ["cannot tell"] * 2
    name = "this run" if is_new else "the earlier one"
    assert found["differences"] == [f"{name} was not stable: other programs used 50 % of a CPU"]
    assert outcomes(report(1.0, stability=UNSTABLE), report()) == ["no change"] * 2


def test_another_host_is_named_and_a_change_cannot_be_told() -> None:
    old = report()
    old["conditions"] = old["conditions"] | {"host": "there"}
    found = compare_with_earlier(report(1.4), old, 25)
    assert found["differences"] == ["it has another host: there, not here"]
    assert [row["outcome"] for row in found["rows"]] == ["cannot tell"] * 2
    assert (found["host"], found["date"]) == ("there", "2026-01-01")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_sha256": "2" * 64}, "the baseline is of another model"),
        ({"client": "two_stages"}, "the baseline has another client: two_stages, not burst"),
        ({"load": {"rate": 50}}, "the baseline has another load: rate 50, not rate 100"),
    ],
)
def test_an_incomparable_baseline_is_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        require_comparable(report(), report(**changes))


@pytest.mark.parametrize("baseline", [[], {}, {"results": []}, 3, None])
def test_what_is_no_report_is_rejected(baseline: Any) -> None:
    with pytest.raises(InvalidArgument, match="no report of nnfmq stress --suite --json"):
        require_comparable(report(), baseline)


def test_a_damaged_report_is_rejected() -> None:
    damaged = copy.deepcopy(report())
    del damaged["scenarios"][0]["blocks"]
    with pytest.raises(InvalidArgument, match="no report of nnfmq stress --suite --json"):
        compare_with_earlier(report(), damaged, 25)


def test_scenarios_with_too_few_requests_are_not_compared() -> None:
    assert outcomes(report(), report(scenarios=[result(blocks=[])])) == []
