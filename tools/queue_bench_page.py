"""Rewrite the results in docs/explanation/queue-performance.md from the output of `queue_bench.py --json`.

    python tools/queue_bench_page.py queue.json
    python tools/queue_bench_page.py queue.json --page test.md

Only the text between the page's two markers is replaced. The same report gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_targets import allowed_text, format_metric, outcome_text
from model_bench_page import DOCS, replaced, table

BEGIN = "<!-- results: written by tools/queue_bench_page.py -->"
_TIMES = ("p50", "p99", "p99.9")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page; return 0 if it is written, 1 after an error."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("report", metavar="FILE", type=Path, help="the JSON of queue_bench.py")
    parser.add_argument("--page", metavar="FILE", type=Path, default=DOCS / "explanation" / "queue-performance.md")
    options = parser.parse_args(arguments)
    try:
        report = json.loads(options.report.read_text(encoding="utf-8"))
        page = options.page.read_text(encoding="utf-8")
        options.page.write_text(replaced(page, results(report), BEGIN), encoding="utf-8")
    except (OSError, ValueError, KeyError) as error:
        print(f"queue_bench_page: error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def results(report: Mapping[str, Any]) -> str:
    """Return the conditions and the rows of a report as Markdown."""
    return "\n".join([_conditions(report), *(_row(row) for row in report["rows"])])


def _conditions(report: Mapping[str, Any]) -> str:
    given = report["conditions"]
    packages = ", ".join(f"{name} {version or 'not installed'}" for name, version in given["packages"].items())
    windows = ", ".join(f"{name} {value:g} µs" for name, value in given["polling_window_us"].items())
    targets = [target for row in report["rows"] for target in row["targets"]]
    counts = {text: sum(outcome_text(target) == text for target in targets) for text in map(outcome_text, targets)}
    lines = [
        *(["**A quick run with few round trips, not a measurement.**\n"] if given["quick"] else []),
        f"* {given['cpu']}, {len(given['cpus_allowed'])} CPUs; Linux {given['kernel']}, Python {given['python']}, "
        f"queue core {given['core']}",
        f"* {packages}",
        f"* polling window: {windows}",
        f"* load before: {', '.join(map(str, given['load_before']))}",
        f"* clock: {given['clock']}",
        f"* targets: {', '.join(f'{count} {text}' for text, count in counts.items())}",
        f"* not compared: {'; '.join(report['not_compared']) or 'nothing'}\n",
    ]
    return "\n".join(lines)


def _row(row: Mapping[str, Any]) -> str:
    parts = [f"### {row['title'][0].upper()}{row['title'][1:]}\n"]
    timed = {name: metrics for name, metrics in row["candidates"].items() if "p50" in metrics}
    if timed:
        rounds = max(metrics["rounds"] for metrics in timed.values())
        headings = ("candidate", *(f">{name} µs" for name in _TIMES))
        parts.append(table(headings, [_candidate(name, metrics) for name, metrics in timed.items()]))
        parts.append(f"{rounds} interleaved rounds.\n")
    if row["targets"]:
        headings = ("target", ">measured", ">noise", ">allowed", "")
        parts.append(table(headings, [_target(target) for target in row["targets"]]))
    return "\n".join(parts)


def _candidate(name: str, metrics: Mapping[str, float]) -> list[str]:
    return [name, *(format_metric(metrics[each], "") for each in _TIMES)]


def _target(target: Mapping[str, Any]) -> list[str]:
    value, noise = (format_metric(target[name], target["unit"]) for name in ("value", "noise"))
    return [target["target"], value, noise, allowed_text(target), outcome_text(target).replace("missed", "**missed**")]


if __name__ == "__main__":
    sys.exit(main())
