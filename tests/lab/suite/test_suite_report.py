"""The report of the suite: JUnit XML, page and texts, from records that the tests write. Nothing is measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import nnfmq
from nnfmq.lab.conditions import machine
from nnfmq.lab.suite.clients import SuiteRequests
from nnfmq.lab.suite.peer_death import DeathTimes
from nnfmq.lab.suite.report import (
    check_text,
    junit_xml,
    milliseconds,
    notes_of,
    render_suite_page,
    scenario_numbers,
    suite_report,
)
from nnfmq.lab.suite.run import ScenarioRecord, SuitePlan, SuiteRun
from nnfmq.lab.suite.scenarios import SCENARIOS
from nnfmq.lab.suite.thresholds import SuiteLoad, SuiteThresholds

MS = 1_000_000
LOAD = SuiteLoad(100.0, "poisson", 50.0, 8)
LIMITS: dict[str, dict[str, float]] = {name: {"p99_ms": 20} for name in SCENARIOS} | {
    "peer-death": {"seen_ms": 100},
    "soak": {"p99_9_ms": 50, "wrong_outputs": 0},
}
PLAN = SuitePlan(nnfmq.example_path("digits.tflite"), [], minutes=1.0, thresholds=SuiteThresholds(LOAD, LIMITS))


def requests(count: int, latency_ns: int = MS, **changes: Any) -> SuiteRequests:
    """Requests of one latency, the last one 60 times as long."""
    latencies = np.full(count, latency_ns, np.int64)
    latencies[-1:] = 60 * latency_ns
    return replace(SuiteRequests(np.arange(count, dtype=np.int64) * 10 * MS, latencies, 0, 0), **changes)


def record(name: str, found: SuiteRequests | None, **changes: Any) -> ScenarioRecord:
    return ScenarioRecord(SCENARIOS[name], 6.0, requests=found, wall_ns=6_100_000_000, **changes)


RECORDS = [
    record("idle", requests(2000)),
    record("busy-cores", requests(2000, 30 * MS, unsent=7)),
    record("memory", None, reason="a \x1b[1m<measured> client: & its driver has died"),
    record("compile", None, reason="no driver that compiles", is_skipped=True),
    record("many-clients", requests(50)),
    record("peer-death", requests(300), deaths=DeathTimes([3 * MS, 4 * MS], [2 * MS])),
]
"""Without the soak, which was not begun."""


def report_of(*records: ScenarioRecord) -> dict[str, Any]:
    return suite_report(SuiteRun(PLAN, machine(), list(records)))


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return report_of(*RECORDS)


def test_the_report_is_json_with_a_outcome_for_each_scenario(report: dict[str, Any]) -> None:
    again = json.loads(json.dumps(report))
    assert [(each["scenario"], each["outcome"]) for each in again["scenarios"]] == [
        ("idle", "passed"), ("busy-cores", "failed"), ("memory", "error"), ("compile", "skipped"),
        ("many-clients", "cannot tell"), ("peer-death", "passed"), ("soak", "not run"),
    ]  # fmt: skip
    assert (again["outcome"], again["is_interrupted"]) == ("failed", True)
    assert len(again["model_sha256"]) == 64 and again["load"]["rate"] == 100 and again["conditions"]["host"]


def test_deadlines_are_missed_by_what_takes_longer(report: dict[str, Any]) -> None:
    idle, busy = report["scenarios"][:2]
    assert (idle["requests"], idle["missed"], idle["latency_ns"]["max"]) == (2000, 1, 60 * MS)
    assert (busy["missed"], busy["unsent"]) == (1, 7)


def test_a_block_has_requests_enough_for_its_p99(report: dict[str, Any]) -> None:
    by_name = {each["scenario"]: each for each in report["scenarios"]}
    assert len(by_name["idle"]["blocks"]) == 20
    assert by_name["idle"]["blocks"][0] == {"p50_ns": MS, "p99_ns": MS}
    assert by_name["peer-death"]["blocks"] == []  # three blocks are too few for an interval


def test_the_junit_file_has_a_test_for_each_threshold(report: dict[str, Any]) -> None:
    root = ElementTree.fromstring(junit_xml(report))
    outcomes = {
        (suite.get("name"), case.get("name")): [child.tag for child in case]
        for suite in root.iter("testsuite")
        for case in suite.iter("testcase")
    }
    assert outcomes == {
        ("idle", "p99 at most 20 ms"): [],
        ("busy-cores", "p99 at most 20 ms"): ["failure"],
        ("memory", "measured"): ["error"],
        ("compile", "measured"): ["skipped"],
        ("many-clients", "p99 at most 20 ms"): ["skipped"],
        ("peer-death", "deaths seen within at most 100 ms"): [],
        ("soak", "measured"): ["skipped"],
    }
    (failure,) = root.iter("failure")
    assert failure.get("message") == "p99 30 ms, at most 20 ms is allowed"
    (error,) = root.iter("error")
    assert error.get("message") == "a ?[1m<measured> client: & its driver has died"


def test_the_numbers_of_the_junit_file_are_those_of_its_tests(report: dict[str, Any]) -> None:
    root = ElementTree.fromstring(junit_xml(report))
    for element in (root, *root.iter("testsuite")):
        counts = {
            "tests": len(list(element.iter("testcase"))),
            "failures": len(list(element.iter("failure"))),
            "errors": len(list(element.iter("error"))),
            "skipped": len(list(element.iter("skipped"))),
        }
        assert {name: int(element.get(name, "-1")) for name in counts} == counts
    properties = {each.get("name"): each.get("value") for each in next(root.iter("testsuite")).iter("property")}
    assert (properties["requests"], properties["p99.9 ms"], properties["max ms"]) == ("2000", "1.00", "60.0")


def test_the_page_shows_every_scenario_and_hides_no_reason(report: dict[str, Any]) -> None:
    page = render_suite_page(report)
    assert "<title>Failed: digits.tflite on " in page
    assert all(f"<td>{name}</td>" in page for name in SCENARIOS)
    assert '<td class="good">passed</td>' in page and '<td class="bad">failed</td>' in page
    assert "&lt;measured&gt; client: &amp; its driver has died" in page
    assert page.count("<figure>") == 4


def test_the_page_of_nothing_measured_is_a_page() -> None:
    assert "Not run: digits.tflite" in render_suite_page(report_of())


def test_notes_name_what_is_not_passed(report: dict[str, Any]) -> None:
    notes = list(notes_of(report))
    assert "busy-cores: failed: p99 30 ms, at most 20 ms is allowed" in notes
    assert "busy-cores: overloaded: 7 requests waited to the end, and count as long as they did" in notes
    assert "compile: skipped: no driver that compiles" in notes
    assert "peer-death: 2 clients killed, seen within 4.00 ms; 1 worker killed, seen within 2.00 ms" in notes
    assert any(note.startswith("many-clients: cannot tell: p99 cannot be told from so few requests") for note in notes)


def test_an_interrupted_scenario_says_when() -> None:
    (note,) = (
        note
        for note in notes_of(report_of(record("idle", requests(2000), is_interrupted=True)))
        if "interrupted" in note
    )
    assert note == "idle: interrupted after 6 of 6 s"


def test_percentiles_that_too_few_requests_support_are_not_shown(report: dict[str, Any]) -> None:
    by_name = {each["scenario"]: each for each in report["scenarios"]}
    names = ("p50", "p99", "p99_9", "max")
    assert scenario_numbers(by_name["many-clients"], names) == ["50", "1.00", "-", "-", "60.0", "1", "0"]
    assert scenario_numbers(by_name["memory"], names) == ["-"] * 7


def test_a_function_of_the_user_is_named(tmp_path: Path) -> None:
    def my_client(client: Any, path: Any) -> Any: ...

    assert suite_report(SuiteRun(replace(PLAN, own=my_client), machine()))["client"].endswith("my_client")


@pytest.mark.parametrize(
    ("duration_ns", "text"),
    [(1000, "0.001"), (999_400, "0.999"), (999_600, "1.00"), (9_994_000, "9.99"), (99_940_000, "99.9"),
     (99_960_000, "100"), (1_234_567_000_000, "1,234,567")],
)  # fmt: skip
def test_milliseconds_have_three_digits(duration_ns: int, text: str) -> None:
    assert milliseconds(duration_ns) == text


def test_a_check_without_a_unit_is_a_sentence() -> None:
    check = {"text": "wrong outputs", "unit": "", "limit": 0, "value": 3.0, "outcome": "failed"}
    assert check_text(check) == "wrong outputs 3, at most 0 is allowed"
