"""The report of `nnfmq bench` as one self-contained HTML page: it has no scripts and loads nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from nnfmq.lab.bench.report import ratio_text, result_names, time_text
from nnfmq.lab.page import html_page

__all__ = [
    "COLOURS",
    "conditions_list",
    "html_table",
    "latency_page",
    "legend",
    "percentile_chart",
    "render_page",
    "time_chart",
]


# ----------------------------------------------------------------------------------------------------------------------
# SVG charts of `nnfmq bench`'s page: latency by percentile, and latency by time.
#
# A chart is 480 units wide, so that its text is readable on a phone. Colours are CSS classes of the page. Both axes of
# latency are logarithmic.


COLOURS = 8
_WIDTH, _HEIGHT = 480, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 10, 40
_TICKS = (0.0, 0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999)
ToPixels = Callable[[float, float], tuple[float, float]]
Points = Sequence[tuple[float, float]]


def _svg(label: str, body: Iterable[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">{"".join(body)}</svg>'


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def duration_text(duration_ns: float) -> str:
    """Return a round duration in the unit that fits it."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if duration_ns >= size:
            return f"{duration_ns / size:g} {unit}"
    return f"{duration_ns:g} ns"


def percentile_chart(results: Sequence[Mapping[str, Any]]) -> str:
    """Return a chart with a line for each result; on the x axis equal distances divide the rest of requests by ten."""
    lines = [_percentile_points(result["percentiles"]) for result in results]
    x_end = max(x for line in lines for x, _ in line) or 1.0
    ticks = [(_nines(share), f"{100 * share:g} %") for share in _TICKS if _nines(share) <= x_end]
    return _svg("latency by percentile", _chart(lines, (0.0, x_end), ticks, "percentile of requests"))


def _nines(share: float) -> float:
    return -math.log10(1 - share)


def _percentile_points(steps: Sequence[Sequence[float]]) -> Points:
    """Return points of a staircase; the largest value is at the share of the last request but one."""
    count = steps[-1][2]
    last = 1 - 1 / (count + 1)
    return [(_nines(min(share, last)), value) for share, value, _ in steps]


def time_chart(timeline: Sequence[Mapping[str, float]]) -> str:
    """Return a chart of one result with lines for p50, p99 and max over the seconds of the measurement."""
    lines = [[(point["s"], point[f"{name}_ns"]) for point in timeline] for name in ("p50", "p99", "max")]
    x_end = max(point["s"] for point in timeline) * 1.02
    step = _round_step(x_end)
    ticks = [(number * step, f"{number * step:g} s") for number in range(int(x_end / step) + 1)]
    return _svg("latency by time", _chart(lines, (0.0, x_end), ticks, "time of the start"))


def _round_step(end: float) -> float:
    """Return a round distance for at most six ticks up to `end`."""
    power = 10.0 ** math.floor(math.log10(end))
    return next(power * part for part in (0.2, 0.5, 1.0, 2.0) if end / (power * part) <= 6)


def _chart(
    lines: Sequence[Points], x_range: tuple[float, float], ticks: Sequence[tuple[float, str]], x_label: str
) -> Iterator[str]:
    y_range = _log_range([y for line in lines for _, y in line])
    floor = _HEIGHT - _BOTTOM

    def to_pixels(x: float, y: float) -> tuple[float, float]:
        right = (x - x_range[0]) / (x_range[1] - x_range[0])
        up = (math.log10(max(y, 1.0)) - y_range[0]) / (y_range[1] - y_range[0])
        return _LEFT + right * (_WIDTH - _LEFT - _RIGHT), floor - up * (floor - _TOP)

    yield from _y_axis(y_range, to_pixels)
    for x, text in ticks:
        at, _ = to_pixels(x, 1.0)
        yield f'<path class="grid" d="M{at:.1f} {_TOP}V{floor}"/>{_text(at, floor + 15, text)}'
    yield _text((_LEFT + _WIDTH) / 2, _HEIGHT - 6, x_label)
    for number, line in enumerate(lines):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (to_pixels(*point) for point in line))
        yield f'<polyline class="line c{min(number, COLOURS - 1)}" points="{points}"/>'


def _log_range(values: Sequence[float]) -> tuple[float, float]:
    """Return the logarithms between which the values are, at least a factor of two apart."""
    low, high = math.log10(max(1.0, min(values))), math.log10(max(1.0, *values))
    margin = max(0.04 * (high - low), (math.log10(2) - (high - low)) / 2)
    return low - margin, high + margin


def _y_axis(y_range: tuple[float, float], to_pixels: ToPixels) -> Iterator[str]:
    """Draw lines at 1, 2 and 5 times the powers of ten, or at the powers alone if these are many."""
    low, high = y_range
    parts = (1, 2, 5) if high - low < 2.5 else (1,)
    for power in range(math.floor(low), math.ceil(high) + 1):
        for part in parts:
            value = part * 10.0**power
            if low <= math.log10(value) <= high:
                _, y = to_pixels(0.0, value)
                yield f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>'
                yield _text(_LEFT - 5, y + 4, duration_text(value), "end")


# ----------------------------------------------------------------------------------------------------------------------
# The report of `nnfmq bench` as one self-contained HTML page: it has no scripts and loads nothing.


_STYLE = """
body { margin: 1rem auto; max-width: 60rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
th:first-child, td:first-child { text-align: left; }
td.text { min-width: 12rem; white-space: normal; }
.wide svg { display: block; max-width: 42rem; }
.charts { grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
figcaption { font-size: .9rem; }
.line { fill: none; stroke-width: 1.6; }
.c0 { stroke: #3b7dd8; } .c1 { stroke: #d97a2b; } .c2 { stroke: #4c9a4c; } .c3 { stroke: #9a5fc0; }
.c4 { stroke: #cc4b4b; } .c5 { stroke: #2f9aa3; } .c6 { stroke: #a98f1c; } .c7 { stroke: #808080; }
.legend { font-size: .9rem; }
.legend svg { width: 1.4rem; height: .7rem; margin-right: .35rem; } .legend .line { stroke-width: 4; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; font-size: .9rem; }
dt { color: GrayText; } dd { margin: 0; }
"""
_PERCENTILES = ("p50", "p90", "p95", "p99", "p99.9", "max")
_HEADINGS = ("", *_PERCENTILES, "requests/s", "CPU s", "PSS MiB", "stable")
_TIME_LINES = ("p50", "p99", "max")


def render_page(report: Mapping[str, Any]) -> str:
    """Return the page of a report of `load_report.build_report`."""
    title = f"Latency of {report['model'].rsplit('/', 1)[-1]}"
    parts = [*_results(report["results"]), *_ratios(report), *_missing(report), *_charts(report["results"])]
    parts += conditions_list(
        {**report["conditions"], **{f"load: {key}": value for key, value in report["load"].items()}}
    )
    return latency_page(title, parts)


def latency_page(title: str, parts: Iterable[str]) -> str:
    """Return a page with this title and body, with the style of the tables and charts of latencies."""
    return html_page(title, parts, _STYLE)


def html_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, ends_with_words: bool = False) -> str:
    """Return a table that scrolls by itself on a narrow screen. The lines of a last column of words are broken."""

    def cells(tag: str, texts: Sequence[str]) -> str:
        parts = [f"<{tag}>{escape(text)}</{tag}>" for text in texts]
        if ends_with_words:
            parts[-1] = f'<{tag} class="text">{escape(texts[-1])}</{tag}>'
        return "".join(parts)

    head, body = cells("th", headings), "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _results(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    rows = []
    for name, result in zip(result_names(results), results, strict=True):
        times = [time_text(result["latency_ns"][each]) for each in _PERCENTILES]
        cpu_s = result["cpu_s"]["client"] + result["cpu_s"]["driver"]
        stable = {True: "yes", False: "no", None: "-"}[result["is_stable"]]
        use = [f"{result['throughput_per_s']:,.0f}", f"{cpu_s:.2f}", f"{result['pss_bytes'] / 2**20:,.1f}", stable]
        rows.append([name, *times, *use])
    yield "<p>Latencies in µs. In an open loop they count from the intended start of each request.</p>"
    yield html_table(_HEADINGS, rows)


def _ratios(report: Mapping[str, Any]) -> Iterator[str]:
    for key, title in (("baseline", "Beside the baseline"), ("ratios", "Beside the first runner")):
        compared = report.get(key, ())
        rows = [
            [f"{name}: {row['metric']}", *map(ratio_text, (row["ratio"], row["low"], row["high"])),
             row.get("outcome", "")]
            for name, row in zip(result_names(compared), compared, strict=True)
        ]  # fmt: skip
        if rows:
            yield f"<h2>{title}</h2>"
            yield html_table(("", "ratio", "95 % interval from", "to", ""), rows)


def _missing(report: Mapping[str, Any]) -> Iterator[str]:
    for runner, reason in report["missing"].items():
        yield f"<p>{escape(runner)} is missing: {escape(reason)}</p>"


def _charts(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "<h2>Latency by percentile</h2>"
    yield legend(result_names(results))
    yield f'<div class="wide">{percentile_chart(results)}</div>'
    yield "<h2>Latency by time</h2>"
    yield legend(_TIME_LINES)
    charts = (
        f"<figure>{time_chart(result['timeline'])}<figcaption>{escape(name)}</figcaption></figure>"
        for name, result in zip(result_names(results), results, strict=True)
    )
    yield f'<div class="charts">{"".join(charts)}</div>'


def legend(names: Sequence[str]) -> str:
    """Return a list of the names of the lines of a chart, in their colours."""
    items = (
        f'<li><svg viewBox="0 0 20 10"><path class="line c{min(number, COLOURS - 1)}" d="M0 5H20"/></svg>'
        f"{escape(name)}</li>"
        for number, name in enumerate(names)
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def conditions_list(named: Mapping[str, Any]) -> Iterator[str]:
    """Yield the conditions of a measurement as a list."""
    yield "<h2>Conditions</h2>"
    rows = (
        f"<dt>{escape(name.replace('_', ' '))}</dt><dd>{escape(_value(value))}</dd>" for name, value in named.items()
    )
    yield f"<dl>{''.join(rows)}</dl>"


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else "-" if value is None else str(value)
