"""A profile as one self-contained HTML page: summary, a bar for each operation, charts of arenas and the roofline.

The page has no scripts and loads nothing. Bars are p50 times relative to the longest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from nnfmq.cli.console import microseconds, shape_text
from nnfmq.cli.profile_charts import arena, colours_of, roofline
from nnfmq.cli.profile_tables import computed_by, kilobytes, percent, rate, summary
from nnfmq.html_page import html_page

__all__ = ["render"]

_STYLE = """
:root { --slow: #d97a2b; }
table { margin: .5rem 0 1.5rem; }
th, td { padding: .1rem .5rem; }
td.text, th.text { white-space: normal; }
tr > :last-child { min-width: 7rem; }
thead th { position: sticky; top: 0; background: Canvas; }
td.bar { width: 11rem; padding: .1rem 0; } .bar div { background: var(--bar); height: .9rem; min-width: 1px; }
.reference .bar div { background: var(--slow); }
svg text { font-size: 12px; }
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
    yield f'<table><thead><tr><th></th>{texts}{numbers}<th class="text">computed by</th></tr></thead><tbody>'
    longest = max((row["p50_ns"] for row in report["operations"]), default=0) or 1
    yield from (_row(row, longest) for row in report["operations"])
    yield "</tbody></table>"


def _row(row: Mapping[str, Any], longest: int) -> str:
    bar = f'<div style="width:{100 * row["p50_ns"] / longest:.1f}%"></div>' if row["p50_ns"] else ""
    output = ", ".join("?" if shape is None else shape_text(shape) for shape in row["shapes"])
    numbers = (
        *(microseconds(row["p50_ns"]), microseconds(row["min_ns"]), percent(row["share"])),
        *(rate(row["giga_operations_per_s"]), percent(row["share_of_peak"])),
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
        cells = f"<td>{one['count']}</td><td>{microseconds(one['p50_ns'])}</td><td>{percent(one['share'])}</td>"
        yield f'<tr><td class="text">{escape(one["operation"])}</td>{cells}</tr>'
    yield "</table>"


def _arenas(report: Mapping[str, Any]) -> Iterator[str]:
    for one in report["arenas"]:
        if one["values"]:
            colours = colours_of(value["producer"] for value in one["values"])
            yield f"<h2>Arena of operations {one['first_operation']} to {one['last_operation']}</h2>"
            yield "<p>Each value from the operation that produces it to the last that reads it, at its offset.</p>"
            yield arena(one, colours)
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
    yield roofline(counted, report["ceilings"], colours)
    yield _legend(colours)


def _legend(colours: Mapping[str, int]) -> str:
    items = (
        f'<li><svg viewBox="0 0 10 10"><rect class="c{colour}" width="10" height="10"/></svg>{escape(name)}</li>'
        for name, colour in colours.items()
    )
    return f'<ul class="legend">{"".join(items)}</ul>'
