"""Write the results of memory_bench.py, isolation_bench.py and sharing_bench.py into driver-performance.md.

    python tools/driver_bench_page.py --memory memory.json --isolation isolation.json --sharing sharing.json
    python tools/driver_bench_page.py --memory memory.json --page test.md

Only the text between the page's markers is replaced; what is not given stays. The same reports give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_targets import allowed_text, format_metric, outcome_text
from model_bench_page import DOCS, replaced, table

BEGIN = "<!-- {name}: written by tools/driver_bench_page.py -->"
MIB = 1 << 20
Report = Mapping[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page; return 0 if it is written, 1 after an error."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name in PARTS:
        parser.add_argument(f"--{name}", metavar="FILE", type=Path, help=f"the JSON of {name}_bench.py")
    parser.add_argument("--page", metavar="FILE", type=Path, default=DOCS / "explanation" / "driver-performance.md")
    options = parser.parse_args(arguments)
    try:
        page = options.page.read_text(encoding="utf-8")
        for name, make in PARTS.items():
            file: Path | None = getattr(options, name)
            if file is not None:
                text = make(json.loads(file.read_text(encoding="utf-8")))
                page = replaced(page, text, BEGIN.format(name=name))
        options.page.write_text(page, encoding="utf-8")
    except (OSError, ValueError, KeyError) as error:
        print(f"driver_bench_page: error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def targets_table(targets: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of targets with their outcomes."""
    rows = []
    for target in targets:
        value, noise = (format_metric(target[name], target["unit"]) for name in ("value", "noise"))
        outcome = outcome_text(target).replace("missed", "**missed**")
        rows.append([target["target"], value, noise, allowed_text(target), outcome])
    return table(("target", ">measured", ">noise", ">allowed", ""), rows)


def _conditions(report: Report) -> str:
    lines = [f"* {name.replace('_', ' ')}: {_value(value)}" for name, value in report["conditions"].items()]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


# ---- memory


def memory(report: Report) -> str:
    """Return the tables of memory_bench.py as Markdown."""
    parts = [_conditions(report), targets_table([target for part in report["sections"] for target in part["targets"]])]
    for part in report["sections"]:
        groups = {title: part[name] for name, title in (("nnfmq", "nnfmq"), ("litert", "LiteRT")) if name in part}
        groups |= {f"idle, {when}": found for when, found in part["idle"].items()}
        rows = [row for title, found in groups.items() for row in _memory_rows(title, found)]
        headings = (
            f"{part['section']}: MiB",
            ">processes",
            ">PSS",
            ">Private_Dirty",
            ">anonymous",
            ">files",
            ">shared",
        )
        parts.append(table(headings, rows))
    return "\n".join(parts)


def _memory_rows(title: str, found: Mapping[str, Any]) -> list[list[str]]:
    count = sum(kind["count"] for kind in found["kinds"].values())
    kinds = {**found["kinds"], "all": {"count": count, **found["total"]}}
    names = ("pss", "private_dirty", "anonymous", "file", "shared")
    return [
        [f"{title}: {kind}", str(sizes["count"]), *(f"{sizes[name] / MIB:.1f}" for name in names)]
        for kind, sizes in kinds.items()
    ]


# ---- isolation


def isolation(report: Report) -> str:
    """Return the tables of isolation_bench.py as Markdown."""
    parts = [_conditions(report)]
    for name, make in (("connections", _connections), ("kills", _kills), ("neighbour", _neighbour)):
        if name in report:
            rows = report[name] if isinstance(report[name], list) else [report[name]]
            parts += [targets_table([target for row in rows for target in row["targets"]]), make(rows)]
    return "\n".join(parts)


def _times(found: Mapping[str, float] | None, names: Sequence[str]) -> list[str]:
    return [format_metric(found[name] if found else None, "") for name in names]


def _connections(rows: Sequence[Report]) -> str:
    (found,) = rows
    headings = ("connects, ms", ">count", ">failed", ">p50", ">p99", ">max")
    given = (("alone", "alone_ms", 0), (f"beside {found['silent']:,} silent connections", "beside_ms", found["failed"]))
    return table(
        headings,
        [
            [text, *_times(found[name], ["count"]), str(failed), *_times(found[name], ("p50", "p99", "max"))]
            for text, name, failed in given
        ],
    )


def _kills(rows: Sequence[Report]) -> str:
    headings = ("killed while", ">kills", ">work s", "status", ">exit p50 ms", ">p99", ">max", ">memory MiB",
                ">returned p99 ms")  # fmt: skip
    return table(headings, [_kill(row) for row in rows])


def _kill(row: Report) -> list[str]:
    used = f"{row['used_bytes'] / MIB:.0f}" if row["used_bytes"] > 0 else "-"
    exits, memory_ms = _times(row["exit_ms"], ("p50", "p99", "max")), _times(row["memory_ms"], ["p99"])
    return [row["phase"], str(row["kills"]), f"{row['work_s']:.2f}", row["status"], *exits, used, *memory_ms]


def _neighbour(rows: Sequence[Report]) -> str:
    headings = ("neighbour beside, µs", ">repetitions", "status", ">alone p50", ">p99", ">beside p50", ">p99", ">p99.9")
    return table(
        headings,
        [
            [row["phase"], str(row["repetitions"]), row["status"], *_times(row["alone_us"], ("p50", "p99")),
             *_times(row["beside_us"], ("p50", "p99", "p99.9"))]
            for row in rows
        ],
    )  # fmt: skip


# ---- sharing


def sharing(report: Report) -> str:
    """Return the tables of sharing_bench.py as Markdown: medians over the rounds, and sums of executions."""
    return "\n".join(
        [_conditions(report), targets_table(report["targets"]), _throughput(report["throughput"]),
         _misses(report["deadlines"])]
    )  # fmt: skip


def _throughput(rounds: Sequence[Report]) -> str:
    headings = ("runtime", ">executions per second", ">of the slowest client", ">of the fastest", ">p50 ms", ">p99",
                ">p99.9")  # fmt: skip
    rows = []
    for runtime in rounds[0]:
        each = [found[runtime] for found in rounds]
        counts = [statistics.median(found[name] for found in each) for name in ("per_second", "fewest", "most")]
        times = [statistics.median(found["ms"][name] for found in each) for name in ("p50", "p99", "p99.9")]
        rows.append([runtime, *(f"{value:,.0f}" for value in counts), *(f"{value:.2f}" for value in times)])
    return table(headings, rows)


def _misses(rounds: Sequence[Report]) -> str:
    rows = []
    for name in rounds[0]:
        each = [found[name] for found in rounds]
        runtimes = each[0]["missed"]
        missed = [sum(found["missed"][runtime] for found in each) for runtime in runtimes]
        sums = (sum(found[key] for found in each) for key in ("executions", "best"))
        rows.append([name, *map(str, sums), *map(str, missed)])
    headings = (f">missed by {runtime}" for runtime in rounds[0][next(iter(rounds[0]))]["missed"])
    return table(("deadlines", ">executions", ">missed in the best order", *headings), rows)


PARTS: dict[str, Callable[[Report], str]] = {"memory": memory, "isolation": isolation, "sharing": sharing}

if __name__ == "__main__":
    sys.exit(main())
