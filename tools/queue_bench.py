"""Measure the queue, compare it with other transports and with its targets: the whole table in one run.

The candidates of a row are interleaved: each round measures every candidate, in separate processes on the CPUs that the
row asks for. A baseline that is not installed is reported as missing. The machine should do nothing else meanwhile.

    python tools/queue_bench.py                        # some minutes
    python tools/queue_bench.py --rows round-trip,one-cpu --json
    python tools/queue_bench.py --quick --html bench.html
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench_processes import receive_result, started_processes
from bench_program import positive
from bench_targets import allowed_text, format_metric, outcome_text
from queue_bench_candidates import child_main
from queue_bench_cases import ROWS, SLOWER, Row, report_row
from queue_bench_html import page
from queue_bench_server import DEFAULT_NS, POLLING_NS, RoundJob, Sample

from nnfmq.cli.console import console, new_file, print_json, table
from nnfmq.installed_version import installed_version
from nnfmq.measure import cpu_pinning
from nnfmq.measure.failures import BenchmarkFailed, RunnerUnavailable
from nnfmq.measure.load_report import cpu_model

BASELINE_PACKAGES = ("iceoryx2", "pyzmq", "grpcio")
Rounds = dict[str, list[Sample]]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit status.

    0: measured; 1: failed, or --check-targets or --require-all found something; 2: wrong usage; 130: interrupted.
    """
    arguments = _parser().parse_args(argv)
    try:
        report, samples = measure(arguments)
        if arguments.html:
            arguments.html.write_text(page(report, samples), encoding="utf-8")
    except (BenchmarkFailed, OSError) as error:
        print(f"queue_bench: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if arguments.json:
        print_json(report)
    else:
        _print(report, arguments.no_color)
    return _status(report, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    names = ", ".join(row.name for row in ROWS)
    parser.add_argument("--rows", type=_rows, default=ROWS, metavar="NAME,...", help=f"measure only these: {names}")
    parser.add_argument("--rounds", type=positive, help="interleaved rounds (default: 5, --quick: 2)")
    parser.add_argument(
        "--quick", action="store_true", help="a hundredth of the round trips: a smoke test, not a measurement"
    )
    parser.add_argument("--limit", type=positive, default=120, metavar="S", help="time limit of a candidate in seconds")
    parser.add_argument("--check-targets", action="store_true", help="exit status 1 if a target is missed")
    parser.add_argument("--require-all", action="store_true", help="exit status 1 if a baseline is missing")
    parser.add_argument(
        "--html", type=new_file, metavar="FILE", help="also write a page with plots of the distributions"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--no-color", action="store_true")
    return parser


def _rows(text: str) -> tuple[Row, ...]:
    known = {row.name: row for row in ROWS}
    unknown = [name for name in text.split(",") if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"no row {', '.join(unknown)}; there are {', '.join(known)}")
    return tuple(known[name] for name in text.split(","))


def _status(report: dict[str, Any], arguments: argparse.Namespace) -> int:
    is_missed = arguments.check_targets and report["missed"]
    is_missing = arguments.require_all and report["not_compared"]
    return 1 if is_missed or is_missing else 0


# ---- measuring ----


def measure(arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Rounds]]:
    """Return the report, as --json prints it, and the samples by row.

    Raises:
        BenchmarkFailed: If a candidate fails.
    """
    load = os.getloadavg()
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # idle threads of a BLAS would compete for the CPUs
    samples: dict[str, Rounds] = {}
    rows = []
    with tempfile.TemporaryDirectory(prefix="nnfmq-bench-") as folder, _progress(arguments) as advance:
        for row in arguments.rows:
            samples[row.name], missing = _run_row(row, arguments, Path(folder), advance)
            rows.append(report_row(row, samples[row.name], missing))
    missed = [
        f"{row['name']}: {target['target']}" for row in rows for target in row["targets"] if target["met"] is False
    ]
    not_compared = [
        f"{row['name']}: {candidate}: {reason}" for row in rows for candidate, reason in row["missing"].items()
    ]
    conditions = _conditions(load, arguments.quick)
    return {"conditions": conditions, "rows": rows, "missed": missed, "not_compared": not_compared}, samples


def _rounds(row: Row, arguments: argparse.Namespace) -> int:
    return int(row.rounds or arguments.rounds or (2 if arguments.quick else 5))


def _run_row(row: Row, arguments: argparse.Namespace, folder: Path, advance: Any) -> tuple[Rounds, dict[str, str]]:
    rounds: Rounds = {}
    missing: dict[str, str] = {}
    for number in range(_rounds(row, arguments)):
        for candidate in row.candidates:
            advance(f"{row.name}: {candidate}")
            if candidate in missing:
                continue
            try:
                sample = _run(_job(row, candidate, arguments, folder, number))
            except RunnerUnavailable as reason:
                missing[candidate] = str(reason)
            else:
                rounds.setdefault(candidate, []).append(sample)
    return rounds, missing


def _run(job: RoundJob) -> Sample:
    job.folder.mkdir()
    with started_processes([(child_main, (job,))]) as connections:
        sample: Sample = receive_result(connections[0], job.limit_s)
    return sample


def _job(row: Row, candidate: str, arguments: argparse.Namespace, folder: Path, number: int) -> RoundJob:
    count = row.count // SLOWER.get(candidate, 1) // (100 if arguments.quick else 1)
    return RoundJob(
        candidate=candidate,
        count=count,
        warm_up=min(500, max(count // 4, 5)),
        cpus=cpu_pinning.choose(row.placement, 0),
        folder=folder / f"{row.name}-{number}-{row.candidates.index(candidate)}",
        limit_s=arguments.limit,
        window_ns=row.window_ns,
        work_ns=row.work_ns,
        think_ns=row.think_ns,
        idle_s=min(row.idle_s, 0.3) if arguments.quick else row.idle_s,
    )


@contextmanager
def _progress(arguments: argparse.Namespace) -> Iterator[Any]:
    """Yield a function to call with a candidate's name before it runs; the bar is on stderr, if that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    total = sum(_rounds(row, arguments) * len(row.candidates) for row in arguments.rows)
    screen = Console(stderr=True, no_color=arguments.no_color or None)
    with Progress(console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda name: bar.update(task, advance=1, description=name)


def _conditions(load: tuple[float, float, float], is_quick: bool) -> dict[str, Any]:
    from nnfmq.queue import core

    return {
        "cpu": cpu_model(),
        "cpus_allowed": sorted(cpu_pinning.ALLOWED),
        "cpus_used": {name: asdict(cpu_pinning.choose(name, 0)) for name in cpu_pinning.PLACEMENTS},
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: installed_version(name) for name in BASELINE_PACKAGES},
        "core": core.core_name,
        "polling_window_us": {"default": DEFAULT_NS / 1000, "polling": POLLING_NS / 1000},
        "load_before": [round(value, 2) for value in load],
        "clock": "time.perf_counter_ns; in C clock_gettime(CLOCK_MONOTONIC)",
        "quick": is_quick,
    }


# ---- printing ----


def _print(report: dict[str, Any], no_color: bool) -> None:
    screen = console(no_color, at_least=100)
    for row in report["rows"]:
        screen.print(f"{row['name']}: {row['title']}", style="bold")
        _print_row(screen, row)
    for name, value in report["conditions"].items():
        screen.print(f"{name}: {value}")
    screen.print(f"\ntargets missed: {'; '.join(report['missed']) or 'none'}")
    screen.print(f"not compared: {'; '.join(report['not_compared']) or 'nothing'}")


def _print_row(screen: Any, row: dict[str, Any]) -> None:
    targets = table("target", ">measured", ">allowed", "")
    for target in row["targets"]:
        outcome = outcome_text(target)
        targets.add_row(target["target"], format_metric(target["value"], target["unit"]), allowed_text(target), outcome)
    screen.print(targets)
    for candidate, metrics in row["candidates"].items():
        screen.print(
            f"  {candidate}: " + ", ".join(f"{name} {format_metric(value, '')}" for name, value in metrics.items())
        )
    for candidate, reason in row["missing"].items():
        screen.print(f"  {candidate}: missing: {reason}")
    screen.print()


if __name__ == "__main__":
    sys.exit(main())
