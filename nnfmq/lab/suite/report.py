"""The report of the suite: a JSON-compatible dict, and from it JUnit XML and a page. Times are in ns."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from html import escape
from typing import Any
from xml.etree import ElementTree

import numpy as np

from nnfmq.lab.bench.report import CANNOT_TELL, CLOCK, ratio_text, timeline_of
from nnfmq.lab.bench.runner import LoadResult
from nnfmq.lab.conditions import model_identity
from nnfmq.lab.page import (
    TIME_LINES,
    conditions_list,
    html_table,
    latency_page,
    legend,
    percentile_chart,
    time_chart,
)
from nnfmq.lab.statistics import REPORTED, heading_of, percentile, percentile_steps, shown_percentiles, summary
from nnfmq.lab.suite.clients import SuiteRequests
from nnfmq.lab.suite.outcomes import (
    ERROR,
    FAILED,
    NOT_RUN,
    PASSED,
    SKIPPED,
    checks_of,
    scenario_outcome,
    stability_of,
    suite_outcome,
)
from nnfmq.lab.suite.run import ScenarioRecord, SuitePlan, SuiteRun
from nnfmq.lab.suite.scenarios import SCENARIOS, seconds_of
from nnfmq.observe.statistics_layout import supports

__all__ = [
    "BLOCKS_MIN",
    "baseline_rows",
    "check_text",
    "deaths_text",
    "junit_xml",
    "milliseconds",
    "notes_of",
    "render_suite_page",
    "scenario_numbers",
    "scenario_result",
    "suite_identity",
    "suite_report",
]

_BLOCKS_MAX, _BLOCK_REQUESTS = 20, 100  # a block has so many requests at least, for its p99; as many a point of time
BLOCKS_MIN = 5
_POINTS_MIN, _POINTS_MAX = 10, 100


# ---- the dict


def suite_identity(plan: SuitePlan) -> dict[str, Any]:
    """Return the conditions that two runs must have in common to be compared."""
    client = plan.mode if plan.own is None else getattr(plan.own, "__qualname__", type(plan.own).__name__)
    return {**model_identity(plan.model), "client": client, "load": asdict(plan.thresholds.load)}


def suite_report(run: SuiteRun) -> dict[str, Any]:
    """Return the report of what was measured. Scenarios that were not begun have the outcome `not run`."""
    plan, records = run.plan, run.records
    seconds = seconds_of(plan.scenarios, plan.minutes)
    begun = {record.scenario.name: record for record in records}
    all_records = [begun.get(name) or ScenarioRecord(SCENARIOS[name], seconds[name]) for name in plan.scenarios]
    results = [scenario_result(plan, record) for record in all_records]
    return {
        **suite_identity(plan),
        "conditions": run.conditions | _options(plan),
        "outcome": suite_outcome(results),
        "is_interrupted": any(record.is_interrupted for record in records) or len(records) < len(all_records),
        "stability": stability_of(results),
        "scenarios": results,
    }


def _options(plan: SuitePlan) -> dict[str, Any]:
    return {
        "clock": CLOCK,
        "minutes": plan.minutes,
        "class": plan.client_class,
        "connect": plan.connect,
        "seed": plan.seed,
    }


def scenario_result(plan: SuitePlan, record: ScenarioRecord) -> dict[str, Any]:
    """Return the result of one scenario with its outcome."""
    requests = record.requests
    count = 0 if requests is None else requests.latencies.size
    reason = record.reason
    if requests is not None and not count and not record.is_interrupted:
        reason = f"no request became due in {record.seconds:g} s; give more --minutes or a higher rate"
    result: dict[str, Any] = {
        "scenario": record.scenario.name,
        "beside": record.scenario.meaning,
        "outcome": "",
        "reason": reason,
        "is_interrupted": record.is_interrupted,
        "duration_s": record.seconds,
        "wall_ns": record.wall_ns,
        "clients": record.clients,
        "details": record.details,
        "requests": count,
        "deaths_ns": None if record.deaths is None else asdict(record.deaths),
        "growth_bytes": record.growth_bytes,
        "others_cpu_ns": record.others_ns,
        "stolen_cpu_ns": record.stolen_ns,
        "checks": [],
    }
    if requests is not None and count:
        result |= _measured(requests, record, plan.thresholds.load.deadline_ms)
        result["checks"] = checks_of(result, plan.thresholds.limits[record.scenario.name])
    result["outcome"] = scenario_outcome(result, is_skipped=record.is_skipped)
    return result


def _measured(requests: SuiteRequests, record: ScenarioRecord, deadline_ms: float) -> dict[str, Any]:
    latencies, count = requests.latencies, requests.latencies.size
    load = LoadResult(requests.intended, requests.intended, latencies, requests.unsent, record.wall_ns, 0, 0, [])
    return {
        "unsent": requests.unsent,
        "missed": int(np.count_nonzero(latencies > 1e6 * deadline_ms)),
        "wrong_outputs": requests.wrong,
        "latency_ns": summary(latencies),
        "blocks": _parts(latencies, min(_BLOCKS_MAX, count // _BLOCK_REQUESTS)),
        "percentiles": [list(step) for step in percentile_steps(latencies)],
        "timeline": timeline_of([load], max(_POINTS_MIN, min(_POINTS_MAX, count // _BLOCK_REQUESTS))),
    }


def _parts(latencies: np.ndarray[Any, Any], count: int) -> list[dict[str, int]]:
    """Return p50 and p99 of `count` parts that follow each other, with the same number of requests; [] if too few."""
    if count < BLOCKS_MIN:
        return []
    parts = [np.sort(part) for part in np.array_split(latencies, count)]
    return [{"p50_ns": percentile(part, 50.0), "p99_ns": percentile(part, 99.0)} for part in parts]


# ---- texts


def milliseconds(duration_ns: float) -> str:
    """Return ms for a table, with three digits or all of the whole number."""
    value = duration_ns / 1e6
    digits = next((digits for limit, digits in ((0.9995, 3), (9.995, 2), (99.95, 1)) if value < limit), 0)
    return f"{value:,.{digits}f}"


def check_text(check: Mapping[str, Any]) -> str:
    """Return a check in words."""
    unit = f" {check['unit']}" if check["unit"] else ""
    if check["value"] is None:
        return f"{check['text']} cannot be told from so few requests, at most {check['limit']:g}{unit} is allowed"
    return f"{check['text']} {_number(check['value'])}{unit}, at most {check['limit']:g}{unit} is allowed"


def _number(value: float) -> str:
    """Return a number with three digits, or all of its whole ones."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def deaths_text(result: Mapping[str, Any]) -> str:
    """Return how many peers were killed in a scenario, and when that was seen; "" if it has no deaths."""
    parts = [
        f"{len(times)} {name}{'s' * (len(times) > 1)} killed, seen within {milliseconds(max(times))} ms"
        for name, times in (result["deaths_ns"] or {}).items()
        if times
    ]
    return "; ".join(parts)


def notes_of(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each threshold that was not kept, each scenario without a result, and what else is to know."""
    for result in report["scenarios"]:
        name = result["scenario"]
        for check in result["checks"]:
            if check["outcome"] != PASSED:
                yield f"{name}: {check['outcome']}: {check_text(check)}"
        if result["reason"]:
            yield f"{name}: {result['outcome']}: {result['reason']}"
        if result["is_interrupted"] and result["requests"]:
            yield f"{name}: interrupted after {result['wall_ns'] / 1e9:.0f} of {result['duration_s']:.0f} s"
        if deaths_text(result):
            yield f"{name}: {deaths_text(result)}"
        if result["requests"] and result["unsent"]:
            yield f"{name}: overloaded: {result['unsent']:,} requests waited to the end, and count as long as they did"
    if "baseline" in report:
        yield from _baseline_notes(report["baseline"])
    else:
        yield from (f"not stable: {reason}" for reason in report["stability"]["reasons"])


def _baseline_notes(baseline: Mapping[str, Any]) -> Iterator[str]:
    yield f"baseline: of {baseline['date']} on {baseline['host']}"
    yield from (f"baseline: {difference}" for difference in baseline["differences"])
    if not baseline["rows"]:
        yield f"baseline: no scenario has {BLOCKS_MIN * _BLOCK_REQUESTS} requests in both runs, so none is compared"
    elif any(row["outcome"] == CANNOT_TELL for row in baseline["rows"]):
        yield f"baseline: {CANNOT_TELL}: measure both on the same machine, when it is idle"


# ---- JUnit XML


_NOT_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_xml(report: Mapping[str, Any]) -> str:
    """Return the report as JUnit XML: a suite for each scenario, with a test for each of its thresholds.

    A scenario without a result has one test, which is an error or skipped. What cannot be told is skipped, too.
    """
    root = ElementTree.Element("testsuites", name="nnfmq stress --suite")
    totals: Counter[str] = Counter()
    for result in report["scenarios"]:
        suite = ElementTree.SubElement(root, "testsuite", name=result["scenario"])
        properties = ElementTree.SubElement(suite, "properties")
        for name, value in _properties(report, result):
            ElementTree.SubElement(properties, "property", name=name, value=_xml_text(value))
        counts = Counter({"tests": 0, "failures": 0, "errors": 0, "skipped": 0})
        for name, kind, text in _tests(result):
            case = ElementTree.SubElement(suite, "testcase", classname=f"nnfmq.{result['scenario']}", name=name)
            counts["tests"] += 1
            if kind:
                counts[_PLURALS[kind]] += 1
                ElementTree.SubElement(case, kind, message=_xml_text(text))
        conditions = report["conditions"]
        time_of = {
            "time": f"{result['wall_ns'] / 1e9:.3f}",
            "timestamp": conditions["date"],
            "hostname": conditions["host"],
        }
        suite.attrib |= {name: str(count) for name, count in counts.items()} | time_of
        totals += counts
    root.attrib |= {name: str(totals[name]) for name in ("tests", "failures", "errors", "skipped")}
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


_PLURALS = {"failure": "failures", "error": "errors", "skipped": "skipped"}
_KINDS = {PASSED: "", FAILED: "failure", ERROR: "error", SKIPPED: "skipped", NOT_RUN: "skipped", CANNOT_TELL: "skipped"}


def _tests(result: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield name, the element of the outcome ("" if passed) and the text of each test of a scenario."""
    for check in result["checks"]:
        yield (
            f"{check['text']} at most {check['limit']:g} {check['unit']}".strip(),
            _KINDS[check["outcome"]],
            check_text(check),
        )
    if not result["checks"]:
        yield "measured", _KINDS[result["outcome"]], result["reason"] or result["outcome"]


def _properties(report: Mapping[str, Any], result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "model", report["model"]
    yield "beside", result["beside"]
    yield "requests", str(result["requests"])
    if result["requests"]:
        for name in _COLUMNS:
            if supports(result["requests"], REPORTED[name] / 100):
                yield f"{heading_of(name)} ms", milliseconds(result["latency_ns"][name])
        yield "missed deadlines", str(result["missed"])


def _xml_text(text: str) -> str:
    """Return a text without the characters that XML does not allow."""
    return _NOT_XML.sub("?", text)


# ---- the page


_COLUMNS = ("p50", "p99", "p99_9", "max")
_STYLES = {PASSED: "good", FAILED: "bad", ERROR: "bad", "regression": "bad", "improvement": "good"}
"""Outcome → class of its cell."""


def render_suite_page(report: Mapping[str, Any]) -> str:
    """Return the page of a report."""
    title = f"{report['outcome'].capitalize()}: {os.path.basename(report['model'])} on {report['conditions']['host']}"
    measured = [result for result in report["scenarios"] if result["requests"]]
    parts = [*_scenario_table(report), *_notes(report), *_baseline_table(report), *_charts(measured)]
    parts += [*_threshold_table(report), *_meanings(report)]
    load = {f"load: {name}": value for name, value in report["load"].items()}
    parts += conditions_list(report, {"client": report["client"], **load})
    return latency_page(title, parts)


def _scenario_table(report: Mapping[str, Any]) -> Iterator[str]:
    load = report["load"]
    yield (
        f"<p>{load['rate']:g} requests/s, {escape(load['arrivals'])} arrivals. Latencies in ms, from the intended "
        f"start of each request; its deadline is {load['deadline_ms']:g} ms later.</p>"
    )
    heads = ("scenario", "outcome", "requests", *map(heading_of, _COLUMNS), "missed", "wrong")
    rows = [[each["scenario"], each["outcome"], *scenario_numbers(each, _COLUMNS)] for each in report["scenarios"]]
    yield html_table(heads, rows, styles=_STYLES)


def scenario_numbers(result: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Return the texts of a row: requests, these percentiles in ms, missed deadlines, wrong outputs."""
    if not result["requests"]:
        return ["-"] * (len(names) + 3)
    wrong = "-" if result["wrong_outputs"] is None else f"{result['wrong_outputs']:,}"
    times = shown_percentiles(result, names, milliseconds)
    return [f"{result['requests']:,}", *times, f"{result['missed']:,}", wrong]


def _notes(report: Mapping[str, Any]) -> Iterator[str]:
    found = "".join(f"<li>{escape(note)}</li>" for note in notes_of(report))
    if found:
        yield f"<ul>{found}</ul>"


def _threshold_table(report: Mapping[str, Any]) -> Iterator[str]:
    rows = [
        [
            f"{result['scenario']}: {check['text']}",
            f"{check['limit']:g} {check['unit']}",
            _measured_text(check),
            check["outcome"],
        ]
        for result in report["scenarios"]
        for check in result["checks"]
    ]
    if rows:
        yield "<h2>Thresholds</h2>"
        yield html_table(("", "at most", "measured", ""), rows, styles=_STYLES)


def _measured_text(check: Mapping[str, Any]) -> str:
    return "-" if check["value"] is None else f"{_number(check['value'])} {check['unit']}"


def _meanings(report: Mapping[str, Any]) -> Iterator[str]:
    yield "<h2>Beside the measured clients</h2>"
    rows = (f"<dt>{escape(each['scenario'])}</dt><dd>{escape(each['beside'])}</dd>" for each in report["scenarios"])
    yield f"<dl>{''.join(rows)}</dl>"


def _baseline_table(report: Mapping[str, Any]) -> Iterator[str]:
    rows = baseline_rows(report)
    if rows:
        yield "<h2>Beside the baseline</h2>"
        yield html_table(("", "ratio", "95 % interval from", "to", ""), rows, styles=_STYLES)


def baseline_rows(report: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of the comparison with a baseline: scenario and metric, ratio, its interval, outcome."""
    return [
        [
            f"{row['scenario']}: {row['metric']}",
            *map(ratio_text, (row["ratio"], row["low"], row["high"])),
            row["outcome"],
        ]
        for row in report.get("baseline", {}).get("rows", ())
    ]


def _charts(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not results:
        return
    yield "<h2>Latency by percentile</h2>"
    yield legend([result["scenario"] for result in results])
    yield f'<div class="wide">{percentile_chart(results)}</div>'
    yield "<h2>Latency by time</h2>"
    yield legend(TIME_LINES)
    drawn = (
        f"<figure>{time_chart(result['timeline'])}<figcaption>{escape(result['scenario'])}</figcaption></figure>"
        for result in results
    )
    yield f'<div class="charts">{"".join(drawn)}</div>'
