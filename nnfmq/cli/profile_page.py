"""A profile as one self-contained HTML page: summary, a bar for each operation, charts of arenas and the roofline.

The page has no scripts and loads nothing. Bars are p50 times relative to the longest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from nnfmq.cli.console import microseconds, shape_text, share_text
from nnfmq.cli.profile_report import computed_by, kilobytes, rate, summary, value_name
from nnfmq.lab.page import html_page

__all__ = ["COLOURS", "arena", "colours_of", "render", "roofline"]


# ----------------------------------------------------------------------------------------------------------------------
# SVG charts of `nnfmq profile`'s page: the arena, and the roofline.
#
# Colours are CSS classes of the page. Each shape has a `<title>`, which browsers show as a tooltip.


COLOURS = 8
_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 960, 74, 16, 12, 44
_ARENA_HEIGHT, _ROOF_HEIGHT = 380, 440
_ROOFS = {"memory": "memory", "cache": "cache"}


def colours_of(names: Iterable[str]) -> dict[str, int]:
    """Return a colour for each name, in order of first occurrence; names beyond the last colour share it."""
    return {name: min(number, COLOURS - 1) for number, name in enumerate(dict.fromkeys(names))}


def _svg(height: int, label: str, body: Iterable[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(label)}">{"".join(body)}</svg>'


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


# -- the arena --------------------------------------------------------------------------------------------------------


def arena(one: Mapping[str, Any], colours: Mapping[str, int]) -> str:
    """Return the chart of an arena: operations on the x axis, offsets on the y axis."""
    first, last, size = one["first_operation"], one["last_operation"], max(1, one["bytes"])
    column = (_WIDTH - _LEFT - _RIGHT) / (last - first + 1)
    unit = (_ARENA_HEIGHT - _TOP - _BOTTOM) / size
    floor = _ARENA_HEIGHT - _BOTTOM
    edges = _edges(one["kernels"])

    def body() -> Iterator[str]:
        for offset in _ticks(size):
            y = floor - offset * unit
            yield f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>'
            yield _text(_LEFT - 6, y + 4, f"{offset / 1000:,.0f} KB", "end")
        every = max(1, math.ceil((last - first + 1) / 32))
        for number in range(first, last + 1, every):
            yield _text(_LEFT + (number - first + 0.5) * column, floor + 16, str(number))
        yield _text((_LEFT + _WIDTH) / 2, _ARENA_HEIGHT - 8, "operation")
        for value in one["values"]:
            begin, end = edges[value["from_kernel"]][0], edges[value["to_kernel"]][1]
            end = last + 1 if value["is_read_later"] else end
            x, width = _LEFT + (begin - first) * column, (end - begin) * column
            y, height = floor - (value["offset"] + value["bytes"]) * unit, max(1.0, value["bytes"] * unit)
            yield from _block(value, (x, y, width, height), colours[value["producer"]])

    return _svg(_ARENA_HEIGHT, "memory of the arena over the operations", body())


def _edges(kernels: Sequence[int]) -> list[tuple[float, float]]:
    """Return the x range of each kernel; the kernels of an operation share its column."""
    edges = []
    for number, operation in enumerate(kernels):
        first, count = kernels.index(operation), kernels.count(operation)
        edges.append((operation + (number - first) / count, operation + (number - first + 1) / count))
    return edges


def _block(value: Mapping[str, Any], box: tuple[float, float, float, float], colour: int) -> Iterator[str]:
    x, y, width, height = box
    stays = ", and later" if value["is_read_later"] else ""
    title = (
        f"{value_name(value)} of {value['producer']}: {value['bytes']:,} bytes at {value['offset']:,}, "
        f"operations {value['from_operation']} to {value['to_operation']}{stays}"
    )
    yield (
        f'<rect class="value c{colour}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}">'
        f"<title>{escape(title)}</title></rect>"
    )
    name = "" if value["operand"] is None else str(value["operand"])
    if height >= 13 and width >= 8 * len(name):
        yield _text(x + width / 2, y + height / 2 + 4, name)


def _ticks(size: int) -> list[int]:
    """Return round offsets from 0 to `size`, four to ten of them."""
    step = 10 ** math.floor(math.log10(max(size, 10)))
    step = next(step // part for part in (1, 2, 5, 10) if size // (step // part) >= 4 or part == 10)
    return list(range(0, size + 1, max(1, step)))


# -- the roofline -----------------------------------------------------------------------------------------------------


def roofline(operations: Sequence[Mapping[str, Any]], ceilings: Mapping[str, Any], colours: Mapping[str, int]) -> str:
    """Return the roofline chart: operations by arithmetic intensity and rate, below the measured ceilings."""
    points = [(one["multiply_adds"] * 2 / one["bytes"], one["giga_operations_per_s"], one) for one in operations]
    roofs = {kind: ceilings[kind]["all_threads"] for kind in dict.fromkeys(one["arithmetic"] for one in operations)}
    slopes = {name: ceilings[key]["all_threads"] for key, name in _ROOFS.items()}
    x_range = _powers([x for x, *_ in points] + [roof / slope for roof in roofs.values() for slope in slopes.values()])
    y_range = _powers([y for _, y, _ in points] + list(roofs.values()))

    def place(x: float, y: float) -> tuple[float, float]:
        right = (math.log10(x) - x_range[0]) / (x_range[1] - x_range[0])
        up = (math.log10(y) - y_range[0]) / (y_range[1] - y_range[0])
        floor = _ROOF_HEIGHT - _BOTTOM
        return _LEFT + right * (_WIDTH - _LEFT - _RIGHT), floor - up * (floor - _TOP)

    def body() -> Iterator[str]:
        yield from _log_grid(x_range, y_range, place)
        for kind, roof in roofs.items():
            yield from _flat_roof(kind, roof, max(slopes.values()), x_range, place)
        for name, slope in slopes.items():
            yield from _slanted_roof(name, slope, max(roofs.values()), x_range, y_range, place)
        for x, y, one in points:
            yield from _point(place(x, y), one, colours[one["operation"]])

    return _svg(_ROOF_HEIGHT, "roofline", body())


def _powers(values: Iterable[float]) -> tuple[int, int]:
    """Return the powers of ten around all values."""
    logarithms = [math.log10(value) for value in values]
    low, high = math.floor(min(logarithms)), math.ceil(max(logarithms))
    return low, max(high, low + 1)


def _log_grid(x_range: tuple[int, int], y_range: tuple[int, int], place: Any) -> Iterator[str]:
    floor = _ROOF_HEIGHT - _BOTTOM
    for power in range(x_range[0], x_range[1] + 1):
        x, _ = place(10.0**power, 10.0 ** y_range[0])
        yield f'<path class="grid" d="M{x:.1f} {_TOP}V{floor}"/>{_text(x, floor + 16, f"{10.0**power:g}")}'
    for power in range(y_range[0], y_range[1] + 1):
        _, y = place(10.0 ** x_range[0], 10.0**power)
        yield f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>'
        yield _text(_LEFT - 6, y + 4, f"{10.0**power:g}", "end")
    yield _text((_LEFT + _WIDTH) / 2, _ROOF_HEIGHT - 8, "operations per byte of inputs, outputs and constants")
    yield f'<g transform="rotate(-90 16 {_ROOF_HEIGHT / 2:.0f})">{_text(16, _ROOF_HEIGHT / 2, "Gop/s")}</g>'


def _flat_roof(kind: str, roof: float, steepest: float, x_range: tuple[int, int], place: Any) -> Iterator[str]:
    (x, y), (end, _) = place(max(roof / steepest, 10.0 ** x_range[0]), roof), place(10.0 ** x_range[1], roof)
    yield f'<path class="roof" d="M{x:.1f} {y:.1f}H{end:.1f}"/>'
    yield _text(end - 4, y - 5, f"{kind}: {roof:.0f} Gop/s", "end")


def _slanted_roof(
    name: str, slope: float, roof: float, x_range: tuple[int, int], y_range: tuple[int, int], place: Any
) -> Iterator[str]:
    first = max(10.0 ** x_range[0], 10.0 ** y_range[0] / slope)
    (x, y), (end, top) = place(first, first * slope), place(roof / slope, roof)
    yield f'<path class="roof" d="M{x:.1f} {y:.1f}L{end:.1f} {top:.1f}"/>'
    middle, height = x + (end - x) / 4, y + (top - y) / 4
    angle = math.degrees(math.atan2(top - y, end - x))
    rotation = f"rotate({angle:.1f} {middle:.1f} {height:.1f})"
    yield f'<g transform="{rotation}">{_text(middle, height - 5, f"{name}: {slope:.0f} GB/s")}</g>'


def _point(at: tuple[float, float], one: Mapping[str, Any], colour: int) -> Iterator[str]:
    x, y = at
    title = (
        f"{one['number']} {one['operation']}: {one['giga_operations_per_s']:.1f} Gop/s, "
        f"{one['p50_ns'] / 1000:.1f} µs, {share_text(one['share'], 1)} of the time"
    )
    radius = 3 + 14 * math.sqrt(one["share"])
    yield f'<circle class="value c{colour}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"><title>{escape(title)}</title>'
    yield "</circle>"
    if one["share"] >= 0.03:
        yield _text(x, y + 4, str(one["number"]))


# ----------------------------------------------------------------------------------------------------------------------
# A profile as one self-contained HTML page: summary, a bar for each operation, charts of arenas and the roofline.


_STYLE = """
:root { --slow: #d97a2b; }
table { margin: .5rem 0 1.5rem; }
th, td { padding: .1rem .5rem; }
td.text, th.text { white-space: normal; }
tr > :last-child { min-width: 7rem; }
thead th { position: sticky; top: 0; background: Canvas; }
td.bar { width: 11rem; padding: .1rem 0; } .bar div { background: var(--bar); height: .9rem; min-width: 1px; }
.reference .bar div { background: var(--slow); }
.scroll svg { min-width: 50rem; } svg text { font-size: 12px; }
@media (min-width: 60rem) { .scroll { overflow-x: visible; } }
.roof { stroke: CanvasText; stroke-width: 1.5; fill: none; }
.value { stroke: CanvasText; stroke-width: .5; fill-opacity: .75; }
.c0 { fill: #6ba3e8; } .c1 { fill: #f0a35e; } .c2 { fill: #7cc07c; } .c3 { fill: #c99be0; }
.c4 { fill: #e88585; } .c5 { fill: #62c2c8; } .c6 { fill: #d6bf57; } .c7 { fill: #a9a9a9; }
.legend svg { width: .8rem; height: .8rem; margin-right: .3rem; }
"""


def render(report: Mapping[str, Any]) -> str:
    """Return the page of a report of `profile_report.build`."""
    name = report["model"].rsplit("/", 1)[-1]
    paragraphs = [f"<p>{escape(line)}</p>" for line in summary(report)]
    parts = [*paragraphs, *_operations(report), *_types(report), *_arenas(report), *_roofline(report)]
    return html_page(f"Profile: {name}", parts, _STYLE)


def _operations(report: Mapping[str, Any]) -> Iterator[str]:
    texts = "".join(f'<th class="text">{head}</th>' for head in ("operation", "output", "time"))
    heads = ("p50 µs", "min µs", "share", "Gop/s", "of peak", "KB", "GB/s", "threads")
    numbers = "".join(f"<th>{head}</th>" for head in heads)
    yield "<h2>Operations</h2>"
    heading = f'<tr><th></th>{texts}{numbers}<th class="text">computed by</th></tr>'
    yield f'<div class="scroll"><table><thead>{heading}</thead><tbody>'
    longest = max((row["p50_ns"] for row in report["operations"]), default=0) or 1
    yield from (_row(row, longest) for row in report["operations"])
    yield "</tbody></table></div>"


def _row(row: Mapping[str, Any], longest: int) -> str:
    bar = f'<div style="width:{100 * row["p50_ns"] / longest:.1f}%"></div>' if row["p50_ns"] else ""
    output = ", ".join("?" if shape is None else shape_text(shape) for shape in row["shapes"])
    numbers = (
        *(microseconds(row["p50_ns"]), microseconds(row["min_ns"]), share_text(row["share"], 1)),
        *(rate(row["giga_operations_per_s"]), share_text(row["share_of_peak"], 1)),
        *(kilobytes(row["bytes"]), rate(row["gigabytes_per_s"]), str(row["threads"])),
    )
    cells = "".join(f"<td>{escape(text)}</td>" for text in numbers)
    return (
        f'<tr class="{row["computed_by"]}"><td>{row["number"]}</td><td class="text">{escape(row["operation"])}</td>'
        f'<td class="text">{escape(output)}</td><td class="bar">{bar}</td>{cells}'
        f'<td class="text">{escape(computed_by(row))}</td></tr>'
    )


def _types(report: Mapping[str, Any]) -> Iterator[str]:
    yield "<h2>Operation types</h2>"
    yield '<table><thead><tr><th class="text">operation</th><th>count</th><th>p50 µs</th><th>share</th></tr></thead>'
    for one in report["types"]:
        cells = f"<td>{one['count']}</td><td>{microseconds(one['p50_ns'])}</td><td>{share_text(one['share'], 1)}</td>"
        yield f'<tr><td class="text">{escape(one["operation"])}</td>{cells}</tr>'
    yield "</table>"


def _arenas(report: Mapping[str, Any]) -> Iterator[str]:
    for one in report["arenas"]:
        if one["values"]:
            colours = colours_of(value["producer"] for value in one["values"])
            yield f"<h2>Arena of operations {one['first_operation']} to {one['last_operation']}</h2>"
            yield "<p>Each value from the operation that produces it to the last that reads it, at its offset.</p>"
            yield _scrolled(arena(one, colours))
            yield _legend(colours)


def _roofline(report: Mapping[str, Any]) -> Iterator[str]:
    counted = [one for one in report["operations"] if one["giga_operations_per_s"]]
    if not counted or report["ceilings"] is None:
        return
    colours = colours_of(one["operation"] for one in counted)
    yield "<h2>Roofline</h2>"
    yield (
        "<p>Each circle is an operation; its size is its share of the time. The lines are measured ceilings: sloped "
        "ones are bandwidth (memory, or cache, where most of an arena stays), level ones are arithmetic.</p>"
    )
    yield _scrolled(roofline(counted, report["ceilings"], colours))
    yield _legend(colours)


def _scrolled(chart: str) -> str:
    """Return a chart that scrolls by itself on a narrow screen, where its text would be too small otherwise."""
    return f'<div class="scroll">{chart}</div>'


def _legend(colours: Mapping[str, int]) -> str:
    items = (
        f'<li><svg viewBox="0 0 10 10"><rect class="c{colour}" width="10" height="10"/></svg>{escape(name)}</li>'
        for name, colour in colours.items()
    )
    return f'<ul class="legend">{"".join(items)}</ul>'
