"""Measure the queue, compare it with the same ring in C, with iceoryx2, pipes and its targets: the table in one run.

The candidates of a row are interleaved: each round measures every candidate, in separate processes on the CPUs that the
row asks for. A baseline that is not installed is reported as missing. The machine should do nothing else meanwhile.

    python tools/queue_bench.py                        # some minutes
    python tools/queue_bench.py --rows round-trip,one-cpu --json
    python tools/queue_bench.py --quick --html bench.html

A metric of a candidate is the median over its rounds: of each round's p50, p99 and p99.9 of all round trips, in µs, or
of another value that a round measures.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from bench_support import (
    GRACE_S,
    REPORTED_PERCENTILES,
    Metrics,
    Report,
    Table,
    Tables,
    Target,
    add_common_options,
    evaluate_target,
    format_metric,
    format_metrics,
    medians,
    missed_targets,
    parser_for,
    percentiles,
    positive,
    progress,
    run,
    some_of,
    targets_table,
)
from queue_candidates import DEFAULT_NS, MEMORIES, POLLING_NS, RoundJob, Sample, measured

from nnfmq.cli.console import new_file
from nnfmq.lab.child_processes import RunnerUnavailable, call_in_child
from nnfmq.lab.page import conditions_list, html_table, latency_page, legend, percentile_chart
from nnfmq.lab.placement import PLACEMENTS, choose
from nnfmq.lab.statistics import percentile_steps

# ---- rows


ICEORYX = ("iceoryx2 pub-sub", "iceoryx2 request-response")


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the report. Its candidates are measured in turn in each round of `count` round trips."""

    name: str
    title: str
    candidates: tuple[str, ...]
    targets: tuple[Target, ...]
    placement: str = "apart"
    window_ns: int = POLLING_NS
    count: int = 20_000
    work_ns: int = 0
    think_ns: int = 0
    idle_s: float = 0
    rounds: int | None = None


SLOWER = {"os.pipe": 10, "multiprocessing.Pipe": 10, "os.pipe stream": 2}
"""Divisors of the round trips per round, for slow candidates."""


def _faster(candidate: str, times: float, per: tuple[str, ...]) -> Target:
    return Target(f"faster than {candidate}", "nnfmq", "p50", times, "×", per, is_at_least=True)


def _at_most(text: str, candidate: str, metric: str, limit: float, unit: str) -> Target:
    return Target(text, candidate, metric, limit, unit)


ROWS = (
    Row(
        "round-trip", "round trip 512 B + 64 B, one CPU each, polling",
        ("nnfmq", "C spin", *ICEORYX, "multiprocessing.Pipe"),
        (
            Target("p50 against the same ring in C", "nnfmq", "p50", 1.4, "×", ("C spin",)),
            _faster("iceoryx2, the faster of its two kinds", 5.5, ICEORYX),
            _faster("multiprocessing.Pipe", 60, ("multiprocessing.Pipe",)),
            Target("p99 / p50", "nnfmq", "p99", 1.5, "×", ("nnfmq",), "p50"),
        ),
    ),
    Row(
        "one-cpu", "round trip, both on one CPU, default window", ("nnfmq", "C futex", "os.pipe"),
        (
            Target("p50 against C futex", "nnfmq", "p50", 1.1, "×", ("C futex",)),
            _faster("os.pipe", 1.3, ("os.pipe",)),
        ),
        placement="same", window_ns=DEFAULT_NS, count=4_000,
    ),
    Row(
        "busy-cpu", "round trip under load: a process keeps one CPU busy; default window, not pinned",
        ("nnfmq under load", "os.pipe under load"),
        (
            Target("p99 / os.pipe's", "nnfmq under load", "p99", 1, "×", ("os.pipe under load",), is_strict=True),
        ),
        placement="free", window_ns=DEFAULT_NS, count=4_000,
    ),
    Row(
        "stream", "messages of 512 bytes one way, one CPU each", ("nnfmq stream", "os.pipe stream"),
        (
            Target("messages over os.pipe's", "nnfmq stream", "per_second", 2.5, "×", ("os.pipe stream",),
                   is_at_least=True),
        ),
        count=200_000,
    ),
    Row(
        "batches", "records of 24 bytes in batches of 64 one way, one CPU each", ("nnfmq batches",),
        (
            Target("records a second", "nnfmq batches", "per_second", 5e6, "/s", is_at_least=True),
            Target("checksums are equal (1 = yes)", "nnfmq batches", "checksums_equal", 1, "", is_at_least=True),
        ),
        count=20_000,
    ),
    Row(
        "work", "200 µs of server work, one CPU each, default window", ("nnfmq with work",),
        (
            _at_most("overhead, p50", "nnfmq with work", "p50", 12, "µs"),
            _at_most("client's CPU", "nnfmq with work", "client_cpu_percent", 20, "%"),
        ),
        window_ns=DEFAULT_NS, count=2_000, work_ns=200_000,
    ),
    Row(
        "think", "200 µs of server work and 100 µs of client think time", ("nnfmq with work",),
        (_at_most("overhead, p50", "nnfmq with work", "p50", 15, "µs"),),
        window_ns=DEFAULT_NS, count=2_000, work_ns=200_000, think_ns=100_000,
    ),
    Row(
        "idle", "a process that waits, after its default window, over 5 s", ("nnfmq idle",),
        (
            _at_most("CPU seconds", "nnfmq idle", "cpu_seconds", 0.0049, "s"),
            _at_most("wake-ups", "nnfmq idle", "wake_ups", 0, ""),
        ),
        window_ns=DEFAULT_NS, count=0, idle_s=5, rounds=1,
    ),
    Row(
        "codec", "a packet of 20 records, with validation", ("codec",),
        (
            _at_most("encode", "codec", "encode request µs", 0.35, "µs"),
            _at_most("decode", "codec", "decode request µs", 0.5, "µs"),
        ),
        count=0,
    ),
    Row(
        "memories", "bursts of the null model over one memory, or several in turn, with the default window",
        tuple(f"burst, {count} memories" for count in MEMORIES), (),
        placement="free", window_ns=DEFAULT_NS, count=2_000,
    ),
    Row(
        "burst", "a whole burst execution of the null model, one CPU each, polling",
        ("burst in place", "burst copied", *ICEORYX),
        (
            _at_most("p50, arrays in place", "burst in place", "p50", 4, "µs"),
            Target("against iceoryx2's bare message", "burst in place", "p50", 1, "×", ICEORYX, is_strict=True),
        ),
    ),
    Row(
        "python", "the Python core, one CPU each, polling", ("python, libatomic", "python, FUTEX_WAKE_OP", "C spin"),
        (
            Target("with libatomic, against C", "python, libatomic", "p50", 4, "×", ("C spin",)),
            Target("with FUTEX_WAKE_OP, against C", "python, FUTEX_WAKE_OP", "p50", 8, "×", ("C spin",)),
        ),
    ),
)  # fmt: skip


def metrics_of(sample: Sample) -> Metrics:
    """Return the metrics of a round; percentiles in µs."""
    return percentiles(sample.times_ns, 1000) | sample.metrics


def report_row(row: Row, rounds: Mapping[str, Sequence[Sample]], missing: Mapping[str, str]) -> dict[str, Any]:
    """Return a row of the report, as --json prints it."""
    found = {candidate: [metrics_of(sample) for sample in samples] for candidate, samples in rounds.items()}
    metrics = {candidate: medians(each) for candidate, each in found.items()}
    by_round = [dict(zip(found, each, strict=True)) for each in zip(*found.values(), strict=False)]
    return {
        "name": row.name,
        "title": row.title,
        "targets": [evaluate_target(target, metrics, by_round) for target in row.targets],
        "candidates": {candidate: values | {"rounds": len(rounds[candidate])} for candidate, values in metrics.items()},
        "missing": dict(missing),
    }


# ---- measuring


Rounds = dict[str, list[Sample]]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit status as `bench_support.run`."""
    return run(_parser().parse_args(argv), measure, tables, "queue_bench")


def _parser() -> argparse.ArgumentParser:
    parser = parser_for(__doc__)
    known = {row.name: row for row in ROWS}
    parser.add_argument("--rows", type=some_of(known, "row"), default=tuple(known), metavar="NAME,...",
                        help=f"measure only these: {', '.join(known)}")  # fmt: skip
    parser.add_argument("--rounds", type=positive, help="interleaved rounds (default: 5, --quick: 2)")
    parser.add_argument(
        "--quick", action="store_true", help="a hundredth of the round trips: a smoke test, not a measurement"
    )
    parser.add_argument("--limit", type=positive, default=120, metavar="S", help="time limit of a candidate in seconds")
    parser.add_argument("--require-all", action="store_true", help="exit status 1 if a baseline is missing")
    parser.add_argument(
        "--html", type=new_file, metavar="FILE", help="also write a page with plots of the distributions"
    )
    add_common_options(parser)
    return parser


def measure(arguments: argparse.Namespace, folder: Path) -> Report:
    """Return the report, as --json prints it; write the page of --html. `folder` is for the candidates' files.

    Raises:
        BenchmarkFailed: If a candidate fails.
    """
    chosen, samples, rows = [row for row in ROWS if row.name in arguments.rows], {}, []
    total = sum(_rounds(row, arguments) * len(row.candidates) for row in chosen)
    with progress(total, arguments.no_color) as advance:
        for row in chosen:
            samples[row.name], missing = _run_row(row, arguments, folder, advance)
            rows.append(report_row(row, samples[row.name], missing))
    missed = [f"{row['name']}: {text}" for row in rows for text in missed_targets(row["targets"])]
    not_compared = [
        f"{row['name']}: {candidate}: {reason}" for row in rows for candidate, reason in row["missing"].items()
    ]
    conditions = _conditions(arguments.quick)
    report = {"conditions": conditions, "rows": rows, "missed": missed, "not_compared": not_compared}
    if arguments.html:
        arguments.html.write_text(page(report, samples), encoding="utf-8")
    return report


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
    sample: Sample = call_in_child(measured, job, limit_s=job.limit_s + GRACE_S, name=job.candidate)
    return sample


def _job(row: Row, candidate: str, arguments: argparse.Namespace, folder: Path, number: int) -> RoundJob:
    count = row.count // SLOWER.get(candidate, 1) // (100 if arguments.quick else 1)
    return RoundJob(
        candidate=candidate,
        count=count,
        warm_up=min(500, max(count // 4, 5)),
        cpus=choose(row.placement, 0),
        folder=folder / f"{row.name}-{number}-{row.candidates.index(candidate)}",
        limit_s=arguments.limit,
        window_ns=row.window_ns,
        work_ns=row.work_ns,
        think_ns=row.think_ns,
        idle_s=min(row.idle_s, 0.3) if arguments.quick else row.idle_s,
    )


def _conditions(is_quick: bool) -> dict[str, Any]:
    from nnfmq.queue import core

    return {
        "cpus_used": {name: asdict(choose(name, 0)) for name in PLACEMENTS},
        "core": core.core_name,
        "polling_window_us": {"default": DEFAULT_NS / 1000, "polling": POLLING_NS / 1000},
        "clock": "time.perf_counter_ns; in C clock_gettime(CLOCK_MONOTONIC)",
        "quick": is_quick,
    }


# ---- results


def tables(report: Report) -> Tables:
    """Return a table of all targets, of the percentiles of all round trips in µs, and of other metrics."""
    times, others, targets = [], [], []
    for row in report["rows"]:
        targets += [{**target, "target": f"{row['name']}: {target['target']}"} for target in row["targets"]]
        for candidate, metrics in row["candidates"].items():
            if "p50" in metrics:
                times.append([row["name"], candidate, *format_metrics(metrics, list(REPORTED_PERCENTILES))])
            others += [
                [row["name"], candidate, name, format_metric(value)]
                for name, value in metrics.items()
                if name not in (*REPORTED_PERCENTILES, "rounds")
            ]
    return {
        "targets": targets_table(targets),
        "times": Table("round trips, µs", ("row", "candidate", *(f">{name}" for name in REPORTED_PERCENTILES)), times),
        "metrics": Table("other metrics", ("row", "candidate", "metric", ">value"), others),
    }


def page(report: Report, samples: Mapping[str, Rounds]) -> str:
    """Return the HTML page of --html: targets and distributions of each row, and the conditions. It loads nothing."""
    parts: list[str] = []
    for row in report["rows"]:
        targets = targets_table(row["targets"])
        parts.append(f"<h2>{escape(row['title'])}</h2>")
        parts.append(html_table([text.lstrip(">") for text in targets.headings], targets.rows))
        parts += [f"<p>{escape(f'{candidate}: missing: {reason}')}</p>" for candidate, reason in row["missing"].items()]
        times = {name: [time for each in some for time in each.times_ns] for name, some in samples[row["name"]].items()}
        drawn = {name: {"percentiles": percentile_steps(np.array(each))} for name, each in times.items() if each}
        if drawn:
            parts += [legend(list(drawn)), percentile_chart(list(drawn.values()))]
    return latency_page("nnfmq queue benchmark", [*parts, *conditions_list(report)])


if __name__ == "__main__":
    sys.exit(main())
