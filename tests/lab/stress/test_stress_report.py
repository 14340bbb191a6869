"""The report of a scenario, the Chrome trace and the page, from synthetic records."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest
from support.conditions import SUBJECT
from support.trace_event_rules import violations

from nnfmq.lab.stress.records import RequestRecord, StressSample
from nnfmq.lab.stress.report import chrome_trace, render_stress_page, scenario_report
from nnfmq.lab.stress.trial import Scenario, TrialRecords

MS = 1_000_000
BEGIN = 5_000 * MS
SCENARIO = Scenario("burst", 2, 50, "same", "gc")


def usual(count: int) -> list[RequestRecord]:
    return [RequestRecord(BEGIN + number * MS, 10_000, 9_000, 3_000, 2_000, 4_000) for number in range(count)]


COLLECTED = RequestRecord(BEGIN + 250 * MS, 40 * MS, 20_000, 12_000, 3_000, 5_000, client_cpu=39 * MS, gc=38 * MS)
UNKNOWN = RequestRecord(BEGIN + 300 * MS, 20 * MS)


@pytest.fixture
def report() -> dict[str, Any]:
    samples = [StressSample(time, time) for time in (BEGIN, BEGIN + 400 * MS)]
    found = TrialRecords(BEGIN, [[*usual(50), COLLECTED], [*usual(48), UNKNOWN]], [samples, samples])
    return scenario_report(SCENARIO, found, worst=5)


def test_a_scenario_is_named_by_what_is_not_the_default() -> None:
    assert SCENARIO.text() == "burst, 2 clients, 50 µs, same: gc"
    assert Scenario("sync", 1, None, "apart", "none").text() == "sync: none"


def test_the_report_has_the_percentiles_of_all_clients(report: dict[str, Any]) -> None:
    assert report["requests"] == 100
    assert report["latency_ns"]["p50"] == 10_000
    assert report["latency_ns"]["p99"] == 20 * MS
    assert report["latency_ns"]["max"] == 40 * MS


def test_the_report_has_the_causes_of_slow_requests(report: dict[str, Any]) -> None:
    assert report["slow_requests"] == 2
    assert report["without_cause"] == 1
    assert report["causes_ns"] == {"gc": 38 * MS}


def test_the_worst_requests_have_time_stages_and_evidence(report: dict[str, Any]) -> None:
    first, second = report["worst"]
    assert first["at_ns"] == 250 * MS
    assert first["stages_ns"] == {"application": 39_980_000, "queue": 12_000, "driver": 3_000, "engine": 5_000}
    assert first["cause"] == "gc"
    assert first["causes"][0]["evidence"] == "38.0 ms in the client's garbage collector (gc.callbacks)"
    assert first["counters"]["client_cpu_ns"] == 39 * MS
    assert (second["cause"], second["causes"], second["stages_ns"]) == ("unknown", [], None)


def test_a_scenario_that_was_not_possible_has_its_reason() -> None:
    report = scenario_report(SCENARIO, "no root", worst=5)
    assert report["reason"] == "no root"
    assert "requests" not in report


def test_the_trace_has_each_worst_request_with_its_stages_one_after_the_other(report: dict[str, Any]) -> None:
    trace = chrome_trace([report, {"scenario": "missing", "reason": "no root"}])
    assert violations(trace) == []
    events = trace["traceEvents"]
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert names == [SCENARIO.text(), "missing"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [span["name"] for span in spans] == ["gc", "application", "queue", "driver", "engine", "unknown"]
    assert spans[0]["ts"] == (BEGIN + 250 * MS) / 1000
    assert spans[0]["dur"] == 40_000
    assert sum(span["dur"] for span in spans[1:5]) == pytest.approx(40_000)
    assert spans[2]["ts"] == pytest.approx(spans[1]["ts"] + spans[1]["dur"])
    assert spans[0]["args"]["evidence"] == {"gc": "38.0 ms in the client's garbage collector (gc.callbacks)"}
    assert spans[0]["args"]["gc_ns"] == 38 * MS


class Cells(HTMLParser):
    """Collects the text of table cells."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self._is_cell = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self._is_cell = tag == "td"

    def handle_data(self, data: str) -> None:
        if self._is_cell:
            self.found.append(data)


def test_the_page_has_the_scenarios_and_the_evidence(report: dict[str, Any]) -> None:
    missing = scenario_report(Scenario("sync", 1, None, "apart", "throttle"), "no <root>", worst=5)
    page = render_stress_page(SUBJECT | {"model": "a/b<c.tflite", "scenarios": [report, missing]})
    assert "<title>Worst cases of b&lt;c.tflite</title>" in page
    cells = Cells(page).found
    assert "gc 38 ms" in cells
    assert '<td class="text">gc 38 ms</td>' in page
    assert "<b>gc</b>: 38.0 ms in the client&#x27;s garbage collector (gc.callbacks)" in page
    assert "40.0 ms at 0.25 s, application 40.0, queue 0.0, driver 0.0, engine 0.0" in page
    assert "no <root>" in cells
    assert "20.0 ms at 0.30 s<br><b>unknown</b>: no counter explains it" in page


def test_a_page_without_slow_requests_has_no_table_of_them() -> None:
    samples = [StressSample(BEGIN, BEGIN)]
    quiet = scenario_report(SCENARIO, TrialRecords(BEGIN, [usual(10)], [samples]), worst=5)
    assert "Worst requests" not in render_stress_page(SUBJECT | {"scenarios": [quiet]})
