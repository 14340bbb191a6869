"""The report of `nnfmq stress` as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from nnfmq.measure.latency_page import conditions_list, html_table, latency_page
from nnfmq.stress.records import CAUSES

__all__ = ["render_stress_page"]

_PERCENTILES = ("p50", "p99", "p99.9", "max")


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
        times = [f"{each['latency_ns'][name] / 1000:,.1f}" for name in _PERCENTILES]
        causes = ", ".join(f"{name} {time / 1e6:,.0f} ms" for name, time in each["causes_ns"].items())
        rows.append([each["scenario"], *times, f"{each['requests']:,}", f"{each['slow_requests']:,}", causes])
    yield "<p>Latencies in µs. The causes are named from evidence, whatever the load was.</p>"
    yield html_table(
        ("scenario", *_PERCENTILES, "requests", "slow", "causes of slow requests"), rows, ends_with_words=True
    )


def _worst(scenarios: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    found = [each for each in scenarios if each.get("worst")]
    if not found:
        return
    yield "<h2>Worst requests</h2>"
    for each in found:
        yield f"<h3>{escape(each['scenario'])}</h3>"
        yield f"<ul>{''.join(map(_request, each['worst']))}</ul>"
    meanings = (f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in CAUSES.items())
    yield f"<dl>{''.join(meanings)}</dl>"


def _request(request: Mapping[str, Any]) -> str:
    stages = "".join(f", {name} {time / 1e6:.1f}" for name, time in (request["stages_ns"] or {}).items())
    causes = [f"<b>{escape(each['name'])}</b>: {escape(each['evidence'])}" for each in request["causes"]]
    lines = "".join(f"<br>{cause}" for cause in causes or (f"<b>{request['cause']}</b>: no counter explains it",))
    return f"<li>{request['latency_ns'] / 1e6:,.1f} ms at {request['at_s']:.2f} s{stages}{lines}</li>"


def _conditions(report: Mapping[str, Any]) -> Iterator[str]:
    yield from conditions_list(report["conditions"])
