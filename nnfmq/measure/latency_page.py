"""The report of `nnfmq bench` as one self-contained HTML page: it has no scripts and loads nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from nnfmq.html_page import html_page
from nnfmq.measure.latency_charts import COLOURS, percentile_chart, time_chart
from nnfmq.measure.report_files import ratio_text, result_names, time_text

__all__ = ["conditions_list", "html_table", "latency_page", "legend", "render_page"]

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
