"""The common parts of benchmarks: descendants, options and exit status, targets, tables, and files of results.

Does not import NumPy, because `driver_bench.py memory` measures memory. Child processes are those of
`nnfmq.lab.child_processes`. Each limits its own running time; the parent waits 5 s longer, so nothing waits forever.

An orphan is adopted by the nearest ancestor that called `adopt_orphans` (PR_SET_CHILD_SUBREAPER). A benchmark that
calls it first therefore finds every process that it caused among its own descendants.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import json
import math
import os
import platform
import select
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nnfmq.base.processes import descendants
from nnfmq.hal.errors import NnfmqError
from nnfmq.lab.child_processes import BenchmarkFailed, ChildEnded
from nnfmq.lab.placement import ALLOWED

Report = dict[str, Any]
RESULTS = Path(__file__).resolve().parents[1] / "docs" / "explanation" / "performance"
END = "<!-- end of results -->"  # of a page that a tool rewrites
REPORTED_PERCENTILES = {"p50": 50.0, "p99": 99.0, "p99.9": 99.9}
CLIENT_WINDOW = "NNFMQ_BURST_CONTROLLER_POLLING_WINDOW"
SERVER_WINDOW = "NNFMQ_BURST_SERVER_POLLING_WINDOW"
_PR_SET_CHILD_SUBREAPER = 36
_END_S = 10.0


# ---- descendants


GRACE_S = 5.0  # for which the parent waits beyond the limit of a child


@contextmanager
def opened_pidfd(pid: int) -> Iterator[int]:
    """Yield a pidfd of a process, and close it afterwards."""
    pidfd = os.pidfd_open(pid)
    try:
        yield pidfd
    finally:
        os.close(pidfd)


def has_exited(pidfd: int, timeout_s: float) -> bool:
    """Wait up to `timeout_s` for a process to exit; return whether it has."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))


def adopt_orphans() -> None:
    """Become the parent of every descendant whose parent exits."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def interrupt_on_sigterm() -> None:
    """Let SIGTERM raise KeyboardInterrupt, as Ctrl-C does, so that a benchmark ends and removes what it made."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def end_descendants() -> None:
    """Kill and reap all descendants of this process. Waits at most 10 s."""
    end = time.monotonic() + _END_S
    while (found := descendants(os.getpid())) and time.monotonic() < end:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap()
        time.sleep(0.01)


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


# ---- programs


def positive(text: str) -> int:
    """Return an option's value as an int from 1 on."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return value


def some_of(known: Collection[str], what: str = "name") -> Callable[[str], tuple[str, ...]]:
    """Return the type of an option that lists some of the `known` names, separated by commas."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"no {what} {', '.join(unknown)}; there are {', '.join(known)}")
        return names

    return parse


def parser_for(description: str | None) -> argparse.ArgumentParser:
    """Return a parser without options, whose description is the first paragraph of a module's docstring."""
    return argparse.ArgumentParser(description=(description or "").split("\n\n")[0], allow_abbrev=False)


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that every benchmark has: for targets, and how to print."""
    parser.add_argument("--report", type=Path, metavar="FILE", help="do not measure: read an earlier --json")
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FOLDER",
        help=f"also write the tables as CSV, as in {RESULTS.name}/ of the docs",
    )
    parser.add_argument("--check-targets", action="store_true", help="exit status 1 if a target is missed")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--no-color", action="store_true")


def model_file(options: argparse.Namespace, default: str, what: str) -> Path:
    """Return the path of --model, or of the file `default` in $NNFMQ_DATA; `what` needs it.

    Raises:
        BenchmarkFailed: If there is no such file.
    """
    data = os.environ.get("NNFMQ_DATA")
    path: Path | None = options.model or (Path(data) / default if data else None)
    if path is None or not path.is_file():
        raise BenchmarkFailed(f"{what} needs --model FILE, or $NNFMQ_DATA with the models")
    return path


class Table(NamedTuple):
    """A table of results: its title, its headings, of which numbers begin with `>`, and its rows."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


Tables = dict[str, Table]
"""By the names of their files."""


def run(
    options: argparse.Namespace,
    measure: Callable[[argparse.Namespace, Path], Report],
    tables: Callable[[Report], Tables],
    name: str,
    draw: Callable[[Report, Path], object] = lambda report, folder: None,
) -> int:
    """Measure, print and write; return the exit status.

    0: measured; 1: failed, or --check-targets or --require-all found something; 130: interrupted. Then the report, if
    there is one, has `interrupted`, and what had been measured is printed. `measure` gets a folder, which is removed
    when all processes have ended, also after Ctrl-C; the machine and its load before are added to the conditions in its
    report. `name` is the program's, for errors.
    `draw` adds plots to the folder of --results.
    """
    try:
        report = _earlier(options.report) if options.report else _measured(options, measure)
        made = tables(report)
        if options.results:
            write_tables(options.results, name.removesuffix("_bench"), report, made)
            draw(report, options.results)
    except (BenchmarkFailed, NnfmqError, OSError, ValueError, KeyError) as error:
        text = f"{type(error).__name__}: {error}" if isinstance(error, ValueError | KeyError) else str(error)
        is_late = isinstance(error, ChildEnded) and error.status == -signal.SIGALRM
        print(f"{name}: error: {text}{': it took longer than --limit' if is_late else ''}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        print_tables(report, made, options.no_color)
    if report.get("interrupted"):
        print(f"{name}: interrupted: the rest was not measured", file=sys.stderr)
        return 130
    is_missed = options.check_targets and report["missed"]
    is_missing = getattr(options, "require_all", False) and report["not_compared"]
    return 1 if is_missed or is_missing else 0


def _earlier(path: Path) -> Report:
    report = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(report, dict) or not {"conditions", "missed"} <= report.keys():
        raise ValueError(f"{path} is not a report of a benchmark")
    return report


def _measured(options: argparse.Namespace, measure: Callable[[argparse.Namespace, Path], Report]) -> Report:
    adopt_orphans()
    interrupt_on_sigterm()
    # A short name: Ray puts sockets there, and processes that it has started may still write.
    load = [round(value, 2) for value in os.getloadavg()]
    with tempfile.TemporaryDirectory(prefix="nq-", ignore_cleanup_errors=True) as folder:
        try:
            report = measure(options, Path(folder))
        finally:
            end_descendants()
    return report | {"conditions": report["conditions"] | _machine() | {"load_before": load}}


def _machine() -> Report:
    from nnfmq.base.conditions import cpu_model

    return {
        "cpu": cpu_model(), "cpus_allowed": sorted(ALLOWED), "kernel": platform.release(),
        "python": platform.python_version(),
    }  # fmt: skip


def print_tables(report: Report, tables: Tables, no_color: bool) -> None:
    """Print tables, conditions, and what was missed or not compared."""
    from nnfmq.cli.console import console, table

    screen = console(no_color, at_least=170)
    for made in tables.values():
        screen.print(made.title, style="bold")
        rows = table(*made.headings)
        for row in made.rows:
            rows.add_row(*row)
        screen.print(rows)
    for name, value in report["conditions"].items():
        screen.print(f"{name}: {value}")
    screen.print(f"\ntargets missed: {'; '.join(report['missed']) or 'none'}")
    if "not_compared" in report:
        screen.print(f"not compared: {'; '.join(report['not_compared']) or 'nothing'}")


def write_tables(folder: Path, name: str, report: Report, tables: Tables) -> None:
    """Write each table as NAME-TABLE.csv, and the conditions as NAME.json. The same report gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    for key, made in tables.items():
        with (folder / f"{name}-{key}.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow([heading.lstrip(">") for heading in made.headings])
            writer.writerows(made.rows)
    kept = {key: report[key] for key in ("conditions", "missed", "not_compared") if key in report}
    (folder / f"{name}.json").write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


def replaced(page: str, text: str, begin_marker: str) -> str:
    """Return the page with `text` between its markers, of which the second one is `END`.

    Raises:
        ValueError: If the page has no markers.
    """
    before, begin, rest = page.partition(begin_marker)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {begin_marker} … {END}")
    return f"{before}{begin_marker}\n\n{text.strip()}\n\n{END}{after}"


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown; a heading that begins with `>` is a column of numbers, aligned right."""
    names = " | ".join(heading.lstrip(">") for heading in headings)
    rules = "|".join("---:" if heading.startswith(">") else "---" for heading in headings)
    return "\n".join([f"| {names} |", f"|{rules}|", *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


@contextmanager
def progress(total: int, no_color: bool) -> Iterator[Callable[[str], object]]:
    """Yield a function to call with the name of each part before it runs; the bar is on stderr, if it is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    screen = Console(stderr=True, no_color=no_color or None)
    with Progress(console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda name: bar.update(task, advance=1, description=name)


# ---- targets

Metrics = dict[str, float]


def percentiles(samples: Iterable[int], per: float, percents: Mapping[str, float] = REPORTED_PERCENTILES) -> Metrics:
    """Return percentiles of `samples`, each divided by `per`; an empty dict without samples."""
    from nnfmq.lab.statistics import percentile  # imports NumPy

    ordered = sorted(samples)
    return {name: percentile(ordered, percent) / per for name, percent in percents.items()} if ordered else {}


def medians(rounds: Sequence[Metrics]) -> Metrics:
    """Return the median of each metric over the rounds, of which there is at least one."""
    return {name: statistics.median(metrics[name] for metrics in rounds) for name in rounds[0]}


@dataclass(frozen=True, slots=True)
class Target:
    """A limit for `metric` of `candidate`, or for its ratio to the fastest of the baselines `per`.

    The baseline's metric is `per_metric`, or the same one if that is empty.
    """

    text: str
    candidate: str
    metric: str
    limit: float
    unit: str
    per: tuple[str, ...] = ()
    per_metric: str = ""
    is_at_least: bool = False
    is_strict: bool = False

    def value(self, metrics: Mapping[str, Metrics]) -> float | None:
        """Return the metric or ratio; None if the metric of the candidate or of all baselines is missing."""
        value = metrics.get(self.candidate, {}).get(self.metric)
        if value is None or not self.per:
            return value
        per_metric = self.per_metric or self.metric
        below = [metrics[name][per_metric] for name in self.per if per_metric in metrics.get(name, {})]
        if not below:
            return None
        # A time that is to be so many times shorter is a speed-up: the baseline's time over the candidate's.
        is_speed_up = self.is_at_least and self.metric in REPORTED_PERCENTILES
        return min(below) / value if is_speed_up else value / min(below)


def evaluate_target(
    target: Target, metrics: Mapping[str, Metrics], by_round: Sequence[Mapping[str, Metrics]] = ()
) -> Report:
    """Return a target of a report. `metrics` are medians over the rounds; `by_round` are those of each round."""
    values = [found for each in by_round if (found := target.value(each)) is not None]
    sense = "at least" if target.is_at_least else "below" if target.is_strict else "at most"
    return _evaluated(target.text, values, target.value(metrics), target.limit, target.unit, sense)


def _evaluated(text: str, values: Sequence[float], value: float | None, limit: float, unit: str, sense: str) -> Report:
    """Return a target's value, limit, noise and outcome.

    The noise is the range of the value over the rounds or readings. `met` is None if there is no value, or it differs
    from its limit by less than the noise, because another run could have the opposite outcome.
    """
    noise = max(values) - min(values) if values else 0.0
    met = None
    if value is not None and abs(value - limit) >= noise:
        met = {"at least": value >= limit, "at most": value <= limit, "below": value < limit}[sense]
    return {"target": text, "value": value, "unit": unit, "limit": limit, "noise": noise, "sense": sense, "met": met}


MIN_ROUNDS = 6
"""The fewest rounds whose range is a 95 % interval of a median."""


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of a 95 % interval of the median of what `values` are a sample of; the interval covers no less.

    Its ends are two of the values (order statistics), whatever the distribution is: all of n values are on one side of
    the median with the probability 2 / 2ⁿ. Fewer than MIN_ROUNDS values do not suffice: their range covers less.
    """
    ordered, count = sorted(values), len(values)
    outside, cut = 0.0, 0  # the probability that the median is outside, if `cut` values are cut off at each end
    while (outside := outside + 2 * math.comb(count, cut) / 2**count) <= 0.05 and 2 * cut < count - 1:
        cut += 1
    at = max(0, cut - 1)
    return ordered[at], ordered[-1 - at]


def interval_limit(text: str, values: Sequence[float], value: float | None, limit: float) -> Report:
    """Return a target for a ratio: `value` is to be at most `limit`. `values` are those of the rounds.

    `met` is None if the limit is within the interval of `values`, because another run could have the opposite outcome,
    or if there are too few rounds for an interval.
    """
    low, high = median_interval(values) if value is not None and len(values) >= MIN_ROUNDS else (None, None)
    met = None if low is None or high is None or low <= limit < high else high <= limit
    return {"target": text, "value": value, "unit": "×", "limit": limit, "interval": [low, high],
            "sense": "at most", "met": met}  # fmt: skip


def upper_limit(text: str, values: Sequence[float], value: float, limit: float, unit: str) -> Report:
    """Return a target: `value` is to be at most `limit`. `values` are those of the rounds."""
    return _evaluated(text, values, value, limit, unit, "at most")


def lower_limit(text: str, values: Sequence[float], value: float, limit: float, unit: str) -> Report:
    """Return a target: `value` is to be at least `limit`. `values` are those of the rounds."""
    return _evaluated(text, values, value, limit, unit, "at least")


def failed(text: str, limit: float, unit: str) -> Report:
    """Return a target that is missed without a value, because what it limits failed."""
    return _evaluated(text, (), None, limit, unit, "at most") | {"met": False}


def outcome_text(target: Mapping[str, Any]) -> str:
    """Return "met", "missed", "not measured" (within the noise) or "not compared" (no value) for a reported target."""
    if target["met"] is None:
        return "not compared" if target["value"] is None else "not measured"
    return "met" if target["met"] else "missed"


def missed_targets(targets: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the texts of the targets that are missed."""
    return [target["target"] for target in targets if target["met"] is False]


def format_threads(threads: int) -> str:
    """Return a number of threads in words."""
    return f"{threads} thread{'s' if threads > 1 else ''}"


def format_metric(value: float | None, unit: str = "") -> str:
    """Return a value with its unit for tables; `-` for None, which means that it was not measured."""
    if value is None:
        return "-"
    digits = 0 if value >= 1000 or value == int(value) else 2
    return f"{value:,.{digits}f} {unit}".strip()


def format_metrics(found: Mapping[str, float] | None, names: Sequence[str]) -> list[str]:
    """Return some metrics for a table; `-` for each if there are none."""
    return [format_metric(found[name] if found else None) for name in names]


def ratio_columns(target: Mapping[str, Any]) -> list[str]:
    """Return the ratio of a target of `interval_limit`, its interval, and its outcome with the limit, for tables."""
    low, high = target["interval"]
    interval = "-" if low is None else f"{low:.2f}-{high:.2f}"
    return [format_metric(target["value"]), interval, f"{outcome_text(target)} (≤ {target['limit']:.2f})"]


def targets_table(targets: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of targets with their outcomes."""
    rows = []
    for target in targets:
        value, noise, limit = (format_metric(target[name], target["unit"]) for name in ("value", "noise", "limit"))
        rows.append([target["target"], value, noise, f"{target['sense']} {limit}", outcome_text(target)])
    return Table("targets", ("target", ">measured", ">noise", ">allowed", ""), rows)
