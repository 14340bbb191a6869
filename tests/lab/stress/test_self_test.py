"""The arithmetic of the self-test: plans from seeds, the confusion matrix, and its share of right runs."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from nnfmq.lab.stress.disturbances import DisturbancePlan, draw_plan
from nnfmq.lab.stress.records import DISTURBANCES, RequestRecord
from nnfmq.lab.stress.self_test import ConfusionMatrix, NamedCause, _undisturbed, combinations_of
from nnfmq.lab.stress.trial import TrialRecords

SECONDS = 1.2


def drawn(*names: str, seed: int = 0) -> DisturbancePlan:
    return draw_plan(names, SECONDS, (4, 5), random.Random(seed))


def test_there_is_a_run_with_nothing_with_each_disturbance_and_with_each_pair() -> None:
    assert combinations_of(["gc", "stops", "memory"]) == [
        (), ("gc",), ("stops",), ("memory",), ("gc", "stops"), ("gc", "memory"), ("stops", "memory"),
    ]  # fmt: skip


def test_a_plan_follows_from_its_seed() -> None:
    assert drawn(*DISTURBANCES, seed=3) == drawn(*DISTURBANCES, seed=3)
    assert drawn(*DISTURBANCES, seed=3) != drawn(*DISTURBANCES, seed=4)


def test_nothing_happens_in_a_plan_without_disturbances() -> None:
    assert drawn() == DisturbancePlan()


@pytest.mark.parametrize("seed", range(20))
def test_everything_happens_within_the_trial(seed: int) -> None:
    plan = drawn(*DISTURBANCES, "churn", seed=seed)
    assert {name for _, name in plan.work} == {"gc", "page-faults", "memory"}
    assert all(0 <= at_ns < SECONDS * 1e9 for at_ns, _ in plan.work)
    assert plan.stops
    assert all(0 <= begin < end < SECONDS and target in ("client", "worker") for begin, end, target in plan.stops)
    assert plan.limit is not None and 0 <= plan.limit[0] < plan.limit[1] < SECONDS
    assert {load.kind for load in plan.loads} == {"cpu", "compilation", "churn"}
    assert all(0 <= load.begin_s < load.end_s < SECONDS for load in plan.loads)


@pytest.mark.parametrize(("name", "cpu"), [("cpu-client", 4), ("cpu-worker", 5)])
def test_cpu_hogs_are_on_the_cpu_of_their_side(name: str, cpu: int) -> None:
    assert {(load.kind, load.cpu) for load in drawn(name).loads} == {("cpu", cpu)}


def test_only_one_stop_happens_at_a_time() -> None:
    stops = drawn("stops").stops
    assert all(early[1] < late[0] for early, late in pairwise(stops))


# ---- the matrix


def named(*causes: str) -> dict[str, NamedCause]:
    return {cause: NamedCause(12_000_000, f"evidence of {cause}") for cause in causes}


def matrix() -> ConfusionMatrix:
    """Return three runs of `gc`, two of them right, two of `stops` and `gc`, one right, and one of nothing, right."""
    found = ConfusionMatrix(skipped={"throttling": "no root"})
    found.add(["gc"], named("gc"))
    found.add(["gc"], named("gc", "stops"))
    found.add(["gc"], named("gc"))
    found.add(["stops", "gc"], named("gc", "stops"))
    found.add(["gc", "stops"], {})
    found.add([], {})
    return found


def test_right_is_a_run_for_which_exactly_its_disturbances_are_named_in_any_order() -> None:
    assert matrix().right(["gc"]) == (2, 3)
    assert matrix().right(["gc", "stops"]) == (1, 2)
    assert matrix().right([]) == (1, 1)
    assert matrix().right(["memory"]) == (0, 0)


def test_a_row_counts_in_how_many_runs_each_cause_was_named() -> None:
    assert matrix().counts(["gc"]) == {"gc": 3, "stops": 1}
    assert matrix().counts(["stops", "gc"]) == {"gc": 1, "stops": 1, "none": 1}
    assert matrix().counts([]) == {"none": 1}


def test_the_share_counts_runs_with_disturbances_only() -> None:
    assert matrix().share() == pytest.approx(3 / 5)
    assert ConfusionMatrix().share() == 1.0


def test_the_report_has_a_row_for_each_combination() -> None:
    report = matrix().report()
    assert [row["disturbances"] for row in report["rows"]] == [["gc"], ["gc", "stops"], []]
    assert report["rows"][0] == {"disturbances": ["gc"], "runs": 3, "right": 2, "named": {"gc": 3, "stops": 1}}
    assert report["skipped"] == {"throttling": "no root"}


def test_the_report_has_the_evidence_of_causes_that_were_not_brought_about() -> None:
    found = matrix()
    found.add([], named("cpu-client"))
    assert found.report()["unexpected"] == [
        {"disturbances": ["gc"], "cause": "stops", "explained_ns": 12_000_000, "evidence": "evidence of stops"},
        {"disturbances": [], "cause": "cpu-client", "explained_ns": 12_000_000, "evidence": "evidence of cpu-client"},
    ]


# ---- runs without a disturbance


def test_a_run_without_a_disturbance_is_repeated_until_other_processes_leave_it_alone() -> None:
    """The records of each trial name a cause, which does not decide whether it counts."""
    slow = [RequestRecord(at, 20_000_000 if at else 1000, gc=20_000_000 if at else 0) for at in (0, 1000)]
    trials = [TrialRecords(0, [slow], [[]], others_ns) for others_ns in (30_000_000, 10_000_000, 9_999_999)]
    found = [_undisturbed(iter(trials[first:]).__next__) for first in range(3)]
    assert [repetitions for _, repetitions in found] == [2, 1, 0]
    assert all(causes is not None and set(causes) == {"gc"} for causes, _ in found)


def test_a_run_that_other_processes_disturb_each_time_is_excluded() -> None:
    found, disturbed = matrix(), TrialRecords(0, [[]], [[]], 10_000_000)
    found.add([], *_undisturbed(lambda: disturbed))
    assert (found.excluded, found.repeated, found.right([])) == (1, 9, (1, 1))
    assert {name: found.report()[name] for name in ("excluded", "repeated")} == {"excluded": 1, "repeated": 9}
