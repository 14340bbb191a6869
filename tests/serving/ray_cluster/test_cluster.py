"""Three nodes on this machine: no wrong and no lost answer while parts of the cluster are killed or replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.ray_cluster import ray_report, require_ray

PROGRAM = Path(__file__).parent / "failures.py"
RECOVERY_S = 5.0
EVENTS = ("driver", "owner", "replica", "broken", "version", "node")
DIED = ("DeadObject", "DeviceUnavailable", "MissedDeadlineTransient", "ActorDiedError", "ActorUnavailableError")
DIED_OVER_HTTP = ("HttpError500", "HttpError503", "HttpError504")
"""Parts of the names of errors with which a request may fail: what computed it has died, or its successor is late."""


@pytest.mark.full
def test_killed_and_replaced_parts_of_a_cluster_cost_no_answer() -> None:
    require_ray()
    # What else runs on the machine decides how long a recovery takes.
    check(ray_report(PROGRAM, "500", "25", *EVENTS, limit_s=280), 500)


@pytest.mark.deep
def test_killed_and_replaced_parts_of_a_busy_cluster_cost_no_answer() -> None:
    require_ray()
    report = ray_report(PROGRAM, "10000", "100", *EVENTS, limit_s=900)
    check(report, 10_000)
    late = [event for event in report["events"] if event["recovery_s"] > RECOVERY_S and event["event"] != "owner"]
    assert late == []  # Ray starts a process for the owner


def check(report: dict[str, Any], requests: int) -> None:
    print(report)
    assert report["all_threads_ended"]
    assert report["requests"] == report["answers"] >= requests
    assert (report["lost"], report["wrong"], report["answered_twice"]) == ([], [], [])
    assert report["failed_before_all_events"] == 0
    assert min(report["replies"]["handle"], report["replies"]["HTTP"]) > requests / 10
    assert [event["event"] for event in report["events"]] == list(EVENTS)
    by_name = {event["event"]: event for event in report["events"]}
    for event in by_name.values():
        assert all(any(part in error for part in (*DIED, *DIED_OVER_HTTP)) for error in event["failures"]), event
    for name in ("broken", "version"):
        assert not by_name[name]["failures"], by_name[name]
    assert set(by_name["broken"]["answers_by_version"]) == {"1"}
    assert set(by_name["node"]["answers_by_version"]) == {"3"}
