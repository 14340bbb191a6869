"""HTML reports: the frame of every page, tables, lists, and charts of latencies. A page has no scripts, loads nothing.

It is light or dark as the browser, wide tables scroll inside an element of the class `scroll`, and colours are
variables: `--line`, `--good`, `--bad`, `--bar`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from types import MappingProxyType
from typing import Any

from nnfmq.observe.statistics_layout import supports

__all__ = [
    "COLOURS",
    "TIME_LINES",
    "conditions_list",
    "html_page",
    "html_table",
    "latency_page",
    "legend",
    "percentile_chart",
    "time_chart",
]

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --good: #2a83; --bad: #d338; --bar: #3b7dd8; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 78rem; padding: 0 1rem; }
h1, h2, h3, li, p, dd, summary, figcaption { overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { border-bottom: 1px solid var(--line); padding: .15rem .5rem; text-align: right; white-space: nowrap; }
td.text, th.text { text-align: left; }
@media (max-width: 40rem) { td.text, th.text { white-space: normal; } }
thead th { font-weight: 600; }
.good, .better { background: var(--good); } .bad, .worse { background: var(--bad); }
figure { margin: 0; } figcaption { font-size: .85rem; }
svg { width: 100%; height: auto; } svg text { font: 11px system-ui, sans-serif; fill: CanvasText; }
.grid { stroke: var(--line); fill: none; }
.charts { display: grid; gap: 1rem; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; list-style: none; padding: 0; font-size: .85rem; }
"""


_NO_STYLES: Mapping[str, str] = MappingProxyType({})


def html_page(title: str, parts: Iterable[str], style: str = "") -> str:
    """Return a page. The title, which is also its heading, is text; the parts of the body are HTML.

    `style` has the rules of this page, which take precedence over the common ones.
    """
    heading = escape(title)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{heading}</title><style>{_STYLE}{style.lstrip()}</style></head><body>\n<h1>{heading}</h1>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def html_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, ends_with_words: bool = False,
    styles: Mapping[str, str] = _NO_STYLES,
) -> str:  # fmt: skip
    """Return a table that scrolls by itself on a narrow screen. The lines of a last column of words are broken.

    `styles` has the class of cells with certain texts.
    """

    def cells(tag: str, texts: Sequence[str]) -> str:
        classes = [f' class="{styles[text]}"' if text in styles else "" for text in texts]
        parts = [f"<{tag}{each}>{escape(text)}</{tag}>" for each, text in zip(classes, texts, strict=True)]
        if ends_with_words:
            parts[-1] = f'<{tag} class="text">{escape(texts[-1])}</{tag}>'
        return "".join(parts)

    head, body = cells("th", headings), "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def conditions_list(report: Mapping[str, Any], others: Mapping[str, Any] = MappingProxyType({})) -> Iterator[str]:
    """Yield which model a report is about, if it is about one, and under which conditions and `others`, as a list."""
    model = {"model": report["model"], "SHA-256": report["model_sha256"]} if "model" in report else {}
    named = {**model, **others, **report["conditions"]}
    yield "<h2>Conditions</h2>"
    rows = (
        f"<dt>{escape(name.replace('_', ' '))}</dt><dd>{escape(_value(value))}</dd>" for name, value in named.items()
    )
    yield f"<dl>{''.join(rows)}</dl>"


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else "-" if value is None else str(value)


# ----------------------------------------------------------------------------------------------------------------------
# Pages about latencies, and their SVG charts: latency by percentile, and latency by time.
#
# A chart is 480 units wide, so that its text is readable on a phone. Colours are CSS classes of the page. Both axes of
# latency are logarithmic.


COLOURS = 8
_WIDTH, _HEIGHT = 480, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 10, 40
_TICKS = (0.0, 0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999)
ToPixels = Callable[[float, float], tuple[float, float]]
Points = Sequence[tuple[float, float]]
_LATENCY_STYLE = """
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


def latency_page(title: str, parts: Iterable[str]) -> str:
    """Return a page with this title and body, with the style of the tables and charts of latencies."""
    return html_page(title, parts, _LATENCY_STYLE)


def legend(names: Sequence[str]) -> str:
    """Return a list of the names of the lines of a chart, in their colours."""
    items = (
        f'<li><svg viewBox="0 0 20 10"><path class="line c{min(number, COLOURS - 1)}" d="M0 5H20"/></svg>'
        f"{escape(name)}</li>"
        for number, name in enumerate(names)
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


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


TIME_LINES = ("p50", "p99, where 100 requests or more support it", "max")


def time_chart(timeline: Sequence[Mapping[str, float]]) -> str:
    """Return a chart of one result with lines for p50, p99 and max over the seconds of the measurement.

    That of p99 has the points that enough requests support. `TIME_LINES` are the names for the legend.
    """
    lines = [
        [(point["at_ns"] / 1e9, point[f"{name}_ns"]) for point in timeline if supports(int(point["requests"]), share)]
        for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
    ]
    x_end = max(point["at_ns"] for point in timeline) / 1e9 * 1.02
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
