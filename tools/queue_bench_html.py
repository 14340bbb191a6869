"""The HTML page of queue_bench.py: targets as a table, and the distribution of each row's round trips as SVG.

The page loads nothing and has no script. A curve shows the share of round trips that took at most the time on the
logarithmic axis. It is drawn through 200 percentiles of all rounds together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from bench_targets import format_metric, outcome_text
from queue_bench_server import Sample

WIDTH, HEIGHT, MARGIN = 760, 260, 40
POINTS = 200
COLORS = ("#0b63ce", "#c2410c", "#15803d", "#7e22ce", "#b91c1c", "#0e7490", "#a16207", "#475569")
_STYLE = (
    "body{font:15px system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse}td,th{padding:.2rem .8rem;text-align:left;border-bottom:1px solid #ccc}"
)


def page(report: Mapping[str, Any], samples: Mapping[str, Mapping[str, Sequence[Sample]]]) -> str:
    """Return the page for a report and its samples by row and candidate."""
    rows = "".join(_section(row, samples[row["name"]]) for row in report["rows"])
    conditions = "".join(f"<li>{escape(f'{name}: {value}')}</li>" for name, value in report["conditions"].items())
    return (
        f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>nnfmq queue benchmark</title>'
        f"<style>{_STYLE}</style><h1>nnfmq queue benchmark</h1>{rows}<h2>Conditions</h2><ul>{conditions}</ul></html>\n"
    )


def _section(row: Mapping[str, Any], rounds: Mapping[str, Sequence[Sample]]) -> str:
    targets = "".join(_target(target) for target in row["targets"])
    missing = "".join(
        f"<p>{escape(f'{candidate}: missing: {reason}')}</p>" for candidate, reason in row["missing"].items()
    )
    head = "<tr><th>target<th>measured<th>allowed<th></tr>"
    candidates = "".join(f"<li>{escape(_candidate(name, metrics))}" for name, metrics in row["candidates"].items())
    return f"<h2>{escape(row['title'])}</h2><table>{head}{targets}</table>{missing}<ul>{candidates}</ul>{_plot(rounds)}"


def _candidate(name: str, metrics: Mapping[str, float]) -> str:
    return f"{name}: " + ", ".join(f"{metric} {format_metric(value, '')}" for metric, value in metrics.items())


def _target(target: Mapping[str, Any]) -> str:
    outcome = outcome_text(target)
    allowed = f"{target['sense']} {format_metric(target['limit'], target['unit'])}"
    cells = (target["target"], format_metric(target["value"], target["unit"]), allowed, outcome)
    return "<tr>" + "".join(f"<td>{escape(cell)}" for cell in cells) + "</tr>"


def _plot(rounds: Mapping[str, Sequence[Sample]]) -> str:
    curves = {
        candidate: sorted(max(1, t) for sample in some for t in sample.times_ns) for candidate, some in rounds.items()
    }
    curves = {candidate: times for candidate, times in curves.items() if times}
    if not curves:
        return ""
    low = math.floor(math.log10(min(times[0] for times in curves.values())))
    high = math.ceil(math.log10(max(times[-1] for times in curves.values()) + 1))
    drawn = "".join(
        _curve(number, candidate, times, low, high) for number, (candidate, times) in enumerate(curves.items())
    )
    height = HEIGHT + 18 * len(curves)
    return f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">{_axes(low, high)}{drawn}</svg>'


def _x(time_ns: float, low: int, high: int) -> float:
    return MARGIN + (math.log10(time_ns) - low) / (high - low) * (WIDTH - 2 * MARGIN)


def _y(share: float) -> float:
    return HEIGHT - MARGIN - share * (HEIGHT - 2 * MARGIN)


def _axes(low: int, high: int) -> str:
    times = ((_x(10**power, low, high), f"{10**power / 1000:g} µs") for power in range(low, high + 1))
    upright = "".join(
        f'<path d="M{x:.1f} {_y(0)}V{_y(1)}" stroke="#ddd"/>{_text(x, HEIGHT - MARGIN + 16, text)}' for x, text in times
    )
    return upright + "".join(
        f'<path d="M{MARGIN} {_y(share)}H{WIDTH - MARGIN}" stroke="#ddd"/>{_text(18, _y(share) + 4, f"{share:.0%}")}'
        for share in (0, 0.5, 0.99)
    )


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="12">{escape(text)}</text>'


def _curve(number: int, candidate: str, times: Sequence[int], low: int, high: int) -> str:
    color, y = COLORS[number % len(COLORS)], HEIGHT + 18 * number
    points = " ".join(f"{_x(time, low, high):.1f},{_y(share):.1f}" for share, time in _quantiles(times))
    line = f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>'
    mark = f'<rect x="{MARGIN}" y="{y - 10}" width="12" height="12" fill="{color}"/>'
    return line + mark + _text(MARGIN + 20, y, candidate, "start")


def _quantiles(ordered: Sequence[int]) -> Iterable[tuple[float, int]]:
    for point in range(POINTS + 1):
        share = point / POINTS
        yield share, ordered[round(share * (len(ordered) - 1))]
