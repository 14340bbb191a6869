"""The report of `nnfmq stress` as a JSON-compatible dict, and a Chrome trace of its worst requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from nnfmq.lab.conditions import machine_text
from nnfmq.lab.page import conditions_list, html_table, latency_page
from nnfmq.lab.statistics import heading_of, shown_percentiles, summary
from nnfmq.lab.stress.attribution import SlowRequest, Thresholds, named_causes, worst_requests
from nnfmq.lab.stress.records import RequestRecord
from nnfmq.lab.stress.trial import Scenario, TrialRecords
from nnfmq.observe.causes import CAUSES, UNKNOWN

__all__ = [
    "chrome_trace",
    "condition_lines",
    "render_stress_page",
    "request_lines",
    "scenario_lines",
    "scenario_report",
]


def scenario_report(
    scenario: Scenario, found: TrialRecords | str, worst: int, thresholds: Thresholds | None = None
) -> dict[str, Any]:
    """Return the percentiles of a scenario, the causes of its slow requests, and the worst of these.

    A scenario that was not possible has only its `reason`.
    """
    named = {"scenario": scenario.text(), **scenario._asdict()}
    if isinstance(found, str):
        return named | {"reason": found}
    latencies = found.latencies()
    slow = found.slow_requests(thresholds)
    return named | {
        "requests": int(latencies.size),
        "latency_ns": summary(latencies),
        "slow_requests": len(slow),
        "causes_ns": named_causes(slow),
        "others_cpu_ns": found.others_ns,
        "without_cause": sum(not request.causes for request in slow),
        "worst": [_request_dict(request, found.begin_ns) for request in worst_requests(slow, worst)],
    }


def _request_dict(request: SlowRequest, begin_ns: int) -> dict[str, Any]:
    record = request.record
    return {
        "at_ns": record.begin - begin_ns,
        "begin_ns": record.begin,
        "latency_ns": record.latency,
        "excess_ns": request.excess,
        "stages_ns": _stages(record),
        "cause": request.causes[0].name if request.causes else UNKNOWN,
        "causes": [
            {"name": cause.name, "explained_ns": cause.explained, "evidence": cause.evidence}
            for cause in request.causes
        ],
        "counters": {
            _counter_key(name): value for name, value in record._asdict().items() if "_" in name or name == "gc"
        },
    }


def _counter_key(name: str) -> str:
    """Return the key of a counter: the times of a record are in ns, which its fields do not say."""
    return f"{name}_ns" if name.endswith(("_cpu", "_system", "_delay", "gc")) else name


def _stages(record: RequestRecord) -> dict[str, int] | None:
    """Return the application's time and the stages of the burst; None in other modes."""
    if record.burst < 0:
        return None
    late = {"late": record.late} if record.late else {}
    parts = {"queue": record.queue, "driver": record.driver, "engine": record.engine}
    return {**late, "application": record.latency - record.burst - record.late, **parts}


# ----------------------------------------------------------------------------------------------------------------------
# What the terminal and the page say in words.


def scenario_lines(scenario: Mapping[str, Any]) -> list[str]:
    """Return the lines about a scenario before its worst requests: the causes, or why it is missing."""
    if "reason" in scenario:
        return [f"{scenario['scenario']} is missing: {scenario['reason']}"]
    if not scenario["worst"]:
        return []
    causes = ", ".join(f"{name} {time / 1e6:,.0f} ms" for name, time in scenario["causes_ns"].items())
    others = f"; other programs used {scenario['others_cpu_ns'] / 1e6:,.0f} ms of CPU time" if "cpu-" in causes else ""
    return [f"{scenario['scenario']}: {causes or 'no cause'}{others}"]


def request_lines(request: Mapping[str, Any]) -> list[str]:
    """Return a slow request in words, then a line for each cause with its evidence."""
    stages = "".join(f", {name} {time / 1e6:.1f}" for name, time in (request["stages_ns"] or {}).items())
    causes = request["causes"] or ({"name": UNKNOWN, "evidence": "no counter explains it"},)
    return [
        f"{request['latency_ns'] / 1e6:,.1f} ms at {request['at_ns'] / 1e9:.2f} s{stages}",
        *(f"{each['name']}: {each['evidence']}" for each in causes),
    ]


def condition_lines(report: Mapping[str, Any]) -> list[str]:
    """Return under what conditions a report of scenarios, or of the self-test, was measured."""
    of = report["conditions"]
    if "duration_s" not in of:
        return [machine_text(of)]
    rate = "a closed loop" if of["rate"] is None else f"{of['rate']:g} requests/s"
    load = f"{of['duration_s']:g} s of each scenario, {rate}, seed {of['seed']}"
    return [f"{load}; slow: {of['slow_ms']:g} ms above the usual latency", machine_text(of)]


def chrome_trace(scenarios: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the worst requests of a report in the JSON that chrome://tracing and Perfetto open.

    A scenario is a process there. The stages of a request follow each other in the order of `stages_ns`: their lengths
    are measured, their positions are not.
    """
    events: list[dict[str, Any]] = []
    for pid, scenario in enumerate(scenarios, 1):
        name = {"name": scenario["scenario"]}
        events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 1, "args": name})
        for request in scenario.get("worst", ()):
            begin_us = request["begin_ns"] / 1000
            evidence = {each["name"]: each["evidence"] for each in request["causes"]}
            events.append(
                _event(
                    request["cause"], pid, begin_us, request["latency_ns"], {"evidence": evidence} | request["counters"]
                )
            )
            for stage, length_ns in (request["stages_ns"] or {}).items():
                events.append(_event(stage, pid, begin_us, length_ns, {}))
                begin_us += length_ns / 1000
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(name: str, pid: int, begin_us: float, length_ns: int, details: Mapping[str, Any]) -> dict[str, Any]:
    event = {"ph": "X", "name": name, "cat": "request", "pid": pid, "tid": 1, "ts": begin_us, "dur": length_ns / 1000}
    return event | {"args": dict(details)}


# ----------------------------------------------------------------------------------------------------------------------
# The report of `nnfmq stress` as one self-contained HTML page.


_PERCENTILES = ("p50", "p99", "p99_9", "max")


def render_stress_page(report: Mapping[str, Any]) -> str:
    """Return the page of a report of `nnfmq stress --json`."""
    title = f"Worst cases of {report['model'].rsplit('/', 1)[-1]}"
    return latency_page(title, [*_scenarios(report["scenarios"]), *_worst(report["scenarios"]), *_conditions(report)])


def _scenarios(scenarios: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    rows = []
    for each in scenarios:
        if "reason" in each:
            rows.append([each["scenario"], *["-"] * (len(_PERCENTILES) + 2), each["reason"]])
            continue
        times = shown_percentiles(each, _PERCENTILES, lambda ns: f"{ns / 1000:,.1f}")
        causes = ", ".join(f"{name} {time / 1e6:,.0f} ms" for name, time in each["causes_ns"].items())
        rows.append([each["scenario"], *times, f"{each['requests']:,}", f"{each['slow_requests']:,}", causes])
    yield "<p>Latencies in µs. The causes are named from evidence, whatever the load was.</p>"
    yield html_table(
        ("scenario", *map(heading_of, _PERCENTILES), "requests", "slow", "causes of slow requests"),
        rows,
        ends_with_words=True,
    )


def _worst(scenarios: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    found = [each for each in scenarios if each.get("worst")]
    if not found:
        return
    yield "<h2>Worst requests</h2>"
    for each in found:
        yield from (f"<h3>{escape(line)}</h3>" for line in scenario_lines(each))
        yield f"<ul>{''.join(map(_request, each['worst']))}</ul>"
    meanings = (f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in CAUSES.items())
    yield f"<dl>{''.join(meanings)}</dl>"


def _request(request: Mapping[str, Any]) -> str:
    first, *causes = request_lines(request)
    pairs = (line.partition(": ") for line in causes)
    named = (f"<br><b>{escape(name)}</b>: {escape(text)}" for name, _, text in pairs)
    return f"<li>{escape(first)}{''.join(named)}</li>"


def _conditions(report: Mapping[str, Any]) -> Iterator[str]:
    yield from conditions_list(report)
