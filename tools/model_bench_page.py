"""Rewrite the results in docs/explanation/performance.md, tables and plots, from the output of `model_bench.py --json`.

    python tools/model_bench_page.py performance.json                 # docs/explanation/performance.md and its plots
    python tools/model_bench_page.py performance.json --page test.md --plots test

Only the text between the page's two markers is replaced. A section that was not measured has no tables and no plots.
The same report gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_targets import format_metric, outcome_text
from model_bench_metrics import TAIL_RATIOS, targets_of
from model_bench_plots import draw

DOCS = Path(__file__).resolve().parents[1] / "docs"
BEGIN, END = "<!-- results: written by tools/model_bench_page.py -->", "<!-- end of results -->"
Table = list[str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page and its plots; return 0 if they are written, 1 after an error."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("report", metavar="FILE", type=Path, help="the JSON of model_bench.py")
    parser.add_argument("--page", metavar="FILE", type=Path, default=DOCS / "explanation" / "performance.md")
    parser.add_argument(
        "--plots", metavar="FOLDER", type=Path, help="folder for the plots (default: next to the page, with its name)"
    )
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


def replaced(page: str, text: str, begin_marker: str = BEGIN) -> str:
    """Return the page with `text` between its markers, of which the second one is `END`.

    Raises:
        ValueError: If the page has no markers.
    """
    before, begin, rest = page.partition(begin_marker)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {begin_marker} … {END}")
    return f"{before}{begin_marker}\n\n{text.strip()}\n\n{END}{after}"


def results(report: Mapping[str, Any], plots: Mapping[str, str]) -> str:
    """Return tables and plots of a report as Markdown."""
    parts = [_conditions(report)]
    for name, (title, make) in _SECTIONS.items():
        if report.get(name):
            parts.append(f"### {title}\n")
            parts += make(report[name], plots)
    return "\n".join(parts)


def _conditions(report: Mapping[str, Any]) -> str:
    given, targets = report["conditions"], targets_of(report)
    packages = ", ".join(f"{name} {version or 'not installed'}" for name, version in given["packages"].items())
    used = "; ".join(f"{name}: {_placed(cpus)}" for name, cpus in given["cpus_used"].items())
    shares = ", which shares them with the computing threads" if given["client_shares_cpus"] else ""
    lines = [
        *(["**A quick run with few steps, not a measurement.**\n"] if given["quick"] else []),
        f"* {given['cpu']}, {len(given['cpus_allowed'])} CPUs, code for {given['target']}; Linux {given['kernel']}, "
        f"Python {given['python']}, queue core {given['core']}",
        f"* {packages}",
        f"* CPUs: {used}{shares}",
        *(f"* polling window, {name}: {window}" for name, window in given["polling_window"].items()),
        f"* load before: {', '.join(map(str, given['load_before']))}",
        f"* targets: {sum(target['met'] is True for _, target in targets)} of {len(targets)} met",
        f"* not compared: {'; '.join(report['not_compared']) or 'nothing'}\n",
    ]
    return "\n".join(lines)


def _placed(cpus: Mapping[str, Sequence[int]]) -> str:
    computing, client = (",".join(map(str, cpus[name])) for name in ("computing", "client"))
    return f"computing on {computing}, the burst's client on {client}"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown; a heading that begins with `>` is a column of numbers, aligned right."""
    names = " | ".join(heading.lstrip(">") for heading in headings)
    rules = "|".join("---:" if heading.startswith(">") else "---" for heading in headings)
    return "\n".join([f"| {names} |", f"|{rules}|", *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def _plot(plots: Mapping[str, str], name: str, text: str) -> Table:
    return [f"![{text}]({plots[name]})\n"] if name in plots else []


def _target(target: Mapping[str, Any]) -> tuple[str, str, str]:
    outcome = outcome_text(target).replace("missed", "**missed**")
    return format_metric(target["value"], target["unit"]), format_metric(target["limit"], target["unit"]), outcome


def _models(rows: Sequence[Mapping[str, Any]], plots: Mapping[str, str]) -> Iterator[str]:
    metrics = [column for name in ("p50", *TAIL_RATIOS) for column in (f">{name}", ">target", "")]
    headings = ("model", "runner", ">threads", *metrics, ">µs", ">best baseline µs", "best baseline")
    yield table(headings, [_ratio_row(row) for found in rows for row in found["comparisons"]])
    yield from _plot(plots, "models", "p50 of each runner over p50 of the best baseline, with 1 and 2 threads")
    for row in rows:
        unit = "quantized steps" if row["is_quantized"] else "relative"
        heads = (f"{row['model']}", ">p50 µs", ">p99", ">p99.9", f">difference ({unit})", "API variant")
        yield table(heads, [_runner_row(name, runner) for name, runner in row["runners"].items()])
        yield f"{row['rounds']} rounds of {row['count']} executions.\n"


def _transformers(rows: Sequence[Mapping[str, Any]], _: Mapping[str, str]) -> Iterator[str]:
    return _models(rows, {})


def _ratio_row(row: Mapping[str, Any]) -> list[str]:
    times = (format_metric(row[name], "") for name in ("subject_us", "baseline_us"))
    targets = [column for target in row["targets"] for column in _target(target)]
    return [row["model"], row["subject"], str(row["threads"]), *targets, *times, row["best_baseline"] or "-"]


def _runner_row(name: str, runner: Mapping[str, Any]) -> list[str]:
    times = (format_metric(runner[metric], "") for metric in ("p50", "p99", "p99.9"))
    return [name, *times, f"{runner['output_difference']:.2g}", runner["api_variant"]]


def _cost(rows: Sequence[Mapping[str, Any]], plots: Mapping[str, str]) -> Iterator[str]:
    headings = ("model", ">threads", ">cost", ">target", "", ">burst µs", ">in process µs", ">transfer µs")
    lines = [[row["model"], str(row["threads"]), *_target(row["targets"][0]), *_cost_times(row)] for row in rows]
    yield table(headings, lines)
    yield from _plot(plots, "cost", "cost of the burst over the same engine in another process, in µs")


def _cost_times(row: Mapping[str, Any]) -> list[str]:
    return [*_point(row), format_metric(row["transfer_us"], "")]


def _compiling(rows: Sequence[Mapping[str, Any]], _: Mapping[str, str]) -> Iterator[str]:
    headings = ("burst of", "while this is compiled", ">p99 / unloaded", ">target", "", ">p99 µs", ">unloaded µs")
    yield table(headings, [_compiling_row(row) for row in rows])


def _compiling_row(row: Mapping[str, Any]) -> list[str]:
    times = (format_metric(row["metrics"][name]["p99"], "") for name in ("under_load", "unloaded"))
    return [row["model"], row["compiled"], *_target(row["targets"][0]), *times]


def _scaling(found: Mapping[str, Any], plots: Mapping[str, str]) -> Iterator[str]:
    at = found["at"]
    for what, title in (("size", f"{at['channels']} channels"), ("channels", f"{at['size']} × {at['size']} pixels")):
        yield _scaling_table(found[what], what, title)
        yield from _plot(plots, what, f"latency by {what}, {title}")
    for series in found["threads"]:
        headings = (f"{series['model']}: threads", ">burst µs", ">in process µs")
        yield table(headings, [[str(p["threads"]), *_point(p)] for p in series["points"]])


def _scaling_table(rows: Sequence[Mapping[str, Any]], what: str, title: str) -> str:
    values = [str(point[what]) for point in rows[0]["points"]]
    of = "pixels" if what == "size" else what
    headings = (f"burst µs, {title}; {what}:", *(f">{value}" for value in values), f">exponent of the {of}")
    lines = [
        [f"{row['operation']}, {row['type']}", *(format_metric(p["burst_us"], "") for p in row["points"]),
         f"{row['exponents']['burst_us']:.2f}"]
        for row in rows
    ]  # fmt: skip
    return table(headings, lines)


def _point(point: Mapping[str, Any]) -> tuple[str, str]:
    return format_metric(point["burst_us"], ""), format_metric(point["in_process_us"], "")


def _roofline(found: Mapping[str, Any], plots: Mapping[str, str]) -> Iterator[str]:
    ceilings = (
        (name, "-" if ceiling is None else f"{ceiling / 1e9:.1f}") for name, ceiling in found["ceilings"].items()
    )
    yield table(
        ("one CPU", ">G / s"), [[name.removesuffix("_per_s").replace("_", " "), ceiling] for name, ceiling in ceilings]
    )
    headings = ("model", ">M operations", ">MB", ">operations / byte", ">G operations / s", ">share of the roofline")
    yield table(headings, [_roofline_row(row) for row in found["models"]])
    yield from _plot(plots, "roofline", "operations per second by operations per byte")


def _roofline_row(row: Mapping[str, Any]) -> list[str]:
    metrics = (row["operations"] / 1e6, row["bytes"] / 1e6, row["intensity"], row["operations_per_s"] / 1e9)
    share = "-" if row["roofline_share"] is None else f"{row['roofline_share']:.0%}"
    return [row["model"], *(format_metric(value, "") for value in metrics), share]


_SECTIONS: dict[str, tuple[str, Any]] = {
    "models": ("Models compared with other runtimes", _models),
    "transformers": ("Transformer blocks and products", _transformers),
    "cost": ("Cost of the burst", _cost),
    "compiling": ("While another model is compiled", _compiling),
    "scaling": ("Scaling", _scaling),
    "roofline": ("Roofline", _roofline),
}

if __name__ == "__main__":
    sys.exit(main())
