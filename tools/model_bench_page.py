"""Rewrite the results in docs/explanation/performance.md, tables and plots, from what `model_bench.py --json` printed.

    python tools/model_bench_page.py performance.json                 # docs/explanation/performance.md and its plots
    python tools/model_bench_page.py performance.json --page trial.md --plots trial

Only what is between the page's two marks is replaced. A section that was not measured has no tables and no plots. The
same report gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from model_bench_metrics import goals_of
from model_bench_plots import draw
from queue_bench_cases import shown

DOCS = Path(__file__).resolve().parents[1] / "docs"
BEGIN, END = "<!-- results: written by tools/model_bench_page.py -->", "<!-- end of results -->"
Table = list[str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page and its plots; 0 written, 1 failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("report", metavar="FILE", type=Path, help="the JSON of model_bench.py")
    parser.add_argument("--page", metavar="FILE", type=Path, default=DOCS / "explanation" / "performance.md")
    parser.add_argument("--plots", metavar="FOLDER", type=Path, help="(default: beside the page, called as it is)")
    parser.add_argument("--format", choices=("svg", "png"), default="svg")
    options = parser.parse_args(arguments)
    folder = options.plots or options.page.with_suffix("")
    try:
        report = json.loads(options.report.read_text(encoding="utf-8"))
        page = options.page.read_text(encoding="utf-8")
        folder.mkdir(exist_ok=True)
        plots = {name: f"{folder.name}/{file}" for name, file in draw(report, folder, options.format).items()}
        options.page.write_text(replaced(page, results(report, plots)), encoding="utf-8")
    except (OSError, ValueError, KeyError) as error:
        print(f"model_bench_page: error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def replaced(page: str, text: str) -> str:
    """Return the page with `text` between its marks. Raises ValueError for a page without them."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} … {END}")
    return f"{before}{BEGIN}\n\n{text.strip()}\n\n{END}{after}"


def results(report: Mapping[str, Any], plots: Mapping[str, str]) -> str:
    """Return tables and plots of a report as Markdown."""
    parts = [_conditions(report)]
    for name, (title, make) in _SECTIONS.items():
        if report.get(name):
            parts.append(f"### {title}\n")
            parts += make(report[name], plots)
    return "\n".join(parts)


def _conditions(report: Mapping[str, Any]) -> str:
    given, goals = report["conditions"], goals_of(report)
    packages = ", ".join(f"{name} {version or 'not installed'}" for name, version in given["packages"].items())
    used = "; ".join(f"{name}: {_placed(cpus)}" for name, cpus in given["cpus_used"].items())
    shares = ", which has no core of its own then" if given["client_shares_cores"] else ""
    lines = [
        *(["**A trial with few steps: no measurement.**\n"] if given["quick"] else []),
        f"* {given['cpu']}, {len(given['cpus_allowed'])} cores, code for {given['target']}; Linux {given['kernel']}, "
        f"Python {given['python']}, queue core {given['core']}",
        f"* {packages}",
        f"* computing on, and the burst's client: {used}{shares}",
        *(f"* polling window, {name}: {window}" for name, window in given["polling_window"].items()),
        f"* load before: {', '.join(map(str, given['load_before']))}",
        f"* goals: {sum(goal['met'] is True for _, goal in goals)} of {len(goals)} met; which, the tables say",
        f"* not compared: {'; '.join(report['not_compared']) or 'nothing'}\n",
    ]
    return "\n".join(lines)


def _placed(cpus: Mapping[str, Sequence[int]]) -> str:
    computing, client = (",".join(map(str, cpus[name])) for name in ("computing", "client"))
    return f"cpu {computing}, client on {client}"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown; a heading that begins with `>` is a column of figures."""
    names = " | ".join(heading.lstrip(">") for heading in headings)
    rules = "|".join("---:" if heading.startswith(">") else "---" for heading in headings)
    return "\n".join([f"| {names} |", f"|{rules}|", *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def _plot(plots: Mapping[str, str], name: str, text: str) -> Table:
    return [f"![{text}]({plots[name]})\n"] if name in plots else []


def _goal(row: Mapping[str, Any]) -> tuple[str, str, str]:
    goal = row["goals"][0]
    verdict = {True: "met", False: "**missed**", None: "not compared"}[goal["met"]]
    return shown(goal["value"], goal["unit"]), shown(goal["limit"], goal["unit"]), verdict


def _models(rows: Sequence[Mapping[str, Any]], plots: Mapping[str, str]) -> Iterator[str]:
    headings = ("model", ">burst / best peer", ">goal", "", ">burst µs", ">best peer µs", "best peer")
    yield table(headings, [_ratio_row(row) for row in rows])
    yield from _plot(plots, "models", "p50 of each party over the best peer's")
    for row in rows:
        unit = "codes" if row["is_quantized"] else "relative"
        heads = (f"{row['model']}", ">p50 µs", ">p99", ">p99.9", f">apart ({unit})", "way")
        yield table(heads, [_party_row(name, party) for name, party in row["parties"].items()])
        yield f"{row['rounds']} rounds of {row['count']} executions.\n"


def _ratio_row(row: Mapping[str, Any]) -> list[str]:
    times = (shown(row["p50_us"][name], "") for name in ("ours", "theirs"))
    return [row["model"], *_goal(row), *times, row["best_peer"] or "-"]


def _party_row(name: str, party: Mapping[str, Any]) -> list[str]:
    times = (shown(party[figure], "") for figure in ("p50", "p99", "p99.9"))
    return [name, *times, f"{party['apart']:.2g}", party["way"]]


def _cost(rows: Sequence[Mapping[str, Any]], plots: Mapping[str, str]) -> Iterator[str]:
    headings = ("model", ">threads", ">cost", ">goal", "", ">burst µs", ">in process µs")
    times = ("burst_us", "in_process_us")
    lines = [[r["model"], str(r["threads"]), *_goal(r), *(shown(r[name], "") for name in times)] for r in rows]
    yield table(headings, lines)
    yield from _plot(plots, "cost", "cost of the burst over the model, in µs")


def _compiling(rows: Sequence[Mapping[str, Any]], _: Mapping[str, str]) -> Iterator[str]:
    headings = ("burst of", "while this is compiled", ">p99 / p99 alone", ">goal", "", ">p99 µs", ">alone µs")
    yield table(headings, [_compiling_row(row) for row in rows])


def _compiling_row(row: Mapping[str, Any]) -> list[str]:
    times = (shown(row["figures"][name]["p99"], "") for name in ("beside", "alone"))
    return [row["model"], row["compiled"], *_goal(row), *times]


def _growth(found: Mapping[str, Any], plots: Mapping[str, str]) -> Iterator[str]:
    at = found["at"]
    for what, title in (("size", f"{at['channels']} channels"), ("channels", f"{at['size']} × {at['size']} pixels")):
        yield _growth_table(found[what], what, title)
        yield from _plot(plots, what, f"latency against {what}, {title}")
    for series in found["threads"]:
        headings = (f"{series['model']}: threads", ">burst µs", ">in process µs")
        yield table(headings, [[str(p["threads"]), *_point(p)] for p in series["points"]])


def _growth_table(rows: Sequence[Mapping[str, Any]], what: str, title: str) -> str:
    values = [str(point[what]) for point in rows[0]["points"]]
    of = "pixels" if what == "size" else what
    headings = (f"burst µs, {title}; {what}:", *(f">{value}" for value in values), f">power of the {of}")
    lines = [
        [f"{row['operation']}, {row['type']}", *(shown(p["burst_us"], "") for p in row["points"]),
         f"{row['exponents']['burst_us']:.2f}"]
        for row in rows
    ]  # fmt: skip
    return table(headings, lines)


def _point(point: Mapping[str, Any]) -> tuple[str, str]:
    return shown(point["burst_us"], ""), shown(point["in_process_us"], "")


def _roofline(found: Mapping[str, Any], plots: Mapping[str, str]) -> Iterator[str]:
    peaks = ((name, "-" if peak is None else f"{peak / 1e9:.1f}") for name, peak in found["peaks"].items())
    yield table(("one core", ">G / s"), [[name.removesuffix("_per_s").replace("_", " "), peak] for name, peak in peaks])
    headings = ("model", ">M operations", ">MB", ">operations / byte", ">G operations / s", ">share of the roof")
    yield table(headings, [_roofline_row(row) for row in found["models"]])
    yield from _plot(plots, "roofline", "operations a second against operations for each byte")


def _roofline_row(row: Mapping[str, Any]) -> list[str]:
    figures = (row["operations"] / 1e6, row["bytes"] / 1e6, row["intensity"], row["operations_per_s"] / 1e9)
    share = "-" if row["share_of_roof"] is None else f"{row['share_of_roof']:.0%}"
    return [row["model"], *(shown(value, "") for value in figures), share]


_SECTIONS: dict[str, tuple[str, Any]] = {
    "models": ("Models, beside the peers", _models),
    "cost": ("Cost over the model", _cost),
    "compiling": ("While another model is compiled", _compiling),
    "growth": ("How cost grows", _growth),
    "roofline": ("Roofline", _roofline),
}

if __name__ == "__main__":
    sys.exit(main())
