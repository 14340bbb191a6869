"""The report of `nnfmq stress` as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from nnfmq.measure.latency_page import conditions_list, html_page, html_table
from nnfmq.stress.records import CAUSES

__all__ = ["render_stress_page"]

_PERCENTILES = ("p50", "p99", "p99.9", "max")


def render_stress_page(report: Mapping[str, Any]) -> str:
    """Return the page of a report of `nnfmq stress --json`."""
    title = f"Worst cases of {escape(report['model'].rsplit('/', 1)[-1])}"
    return html_page(title, [*_scenarios(report["scenarios"]), *_worst(report["scenarios"]), *_conditions(report)])


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
    yield html_table(("scenario", *_PERCENTILES, "requests", "slow", "causes of slow requests"), rows)


def _worst(scenarios: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    rows = []
    for each in scenarios:
        for request in each.get("worst", ()):
            stages = request["stages_ns"]
            parts = ", ".join(f"{name} {time / 1e6:.1f}" for name, time in (stages or {}).items())
            evidence = "; ".join(f"{cause['name']}: {cause['evidence']}" for cause in request["causes"])
            time = f"{request['latency_ns'] / 1e6:,.1f}"
            rows.append([each["scenario"], f"{request['at_s']:.2f}", time, parts, evidence or request["cause"]])
    if rows:
        yield "<h2>Worst requests</h2>"
        yield html_table(("scenario", "at s", "ms", "stages, ms", "causes and evidence"), rows)
        meanings = (f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in CAUSES.items())
        yield f"<dl>{''.join(meanings)}</dl>"


def _conditions(report: Mapping[str, Any]) -> Iterator[str]:
    yield from conditions_list(report["conditions"])
