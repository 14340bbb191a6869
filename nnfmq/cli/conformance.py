"""`nnfmq conformance`: run test models through an engine or a driver, and say what did not pass.

Files are looked at before anything runs: what is not in their format ends the command with status 2, its file and its
line. A failure names the test, the operand, the index, and what was expected and came.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nnfmq.cli.output import add_connect_argument, at_least_one, console, table

if TYPE_CHECKING:
    from rich.console import Console

    from nnfmq.conformance.results import Summary
    from nnfmq.conformance.running import Settings

EXAMPLES = """\
examples:
  nnfmq conformance vts                               # a folder of test models, on the interpreter
  nnfmq conformance vts --path burst --jobs 4 --html report.html
  nnfmq conformance vts/V1_2 --filter 'conv2d.*nchw' --json report.json
  nnfmq conformance one.jsonl --path sync --connect embedded

A PATH is a file of test models (.jsonl, .jsonl.gz) or a folder of such.
"""

_SHOWN_FAILURES = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `conformance`."""
    parser.add_argument("paths", metavar="PATH", type=Path, nargs="+")
    parser.add_argument(
        "--path", choices=("interpreter", "sync", "async", "fenced", "reusable", "burst"), default="interpreter",
        help="the interpreter in this process, or one of a driver's ways to execute (default: interpreter)",
    )  # fmt: skip
    parser.add_argument("--device", metavar="NAME", default="reference", help="default: reference")
    parser.add_argument(
        "--jobs", metavar="N", type=at_least_one, default=1, help="processes that share the work (default: 1)"
    )
    parser.add_argument("--filter", metavar="REGEX", type=_pattern, default="", help="only tests whose name it finds")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write the results as a page")
    parser.add_argument("--verbose", action="store_true", help="all failures, why tests were skipped, the slowest")
    add_connect_argument(parser)


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from error
    return text


def execute(arguments: argparse.Namespace) -> int:
    """Run, write, print; the status is 0 if everything passed."""
    from nnfmq.conformance.running import Settings
    from nnfmq.conformance.testmodels import BadFormat

    settings = Settings(arguments.path, arguments.device, arguments.connect, arguments.filter)
    began_ns = time.monotonic_ns()
    try:
        summary = _run(arguments, settings)
    except BadFormat as error:
        print(f"nnfmq: error: {error}", file=sys.stderr)
        return 2
    duration_ns = time.monotonic_ns() - began_ns
    _write(arguments, summary, duration_ns)
    _print(console(arguments.no_color), summary, duration_ns, arguments.verbose)
    return 0 if summary.is_good else 1


def _run(arguments: argparse.Namespace, settings: Settings) -> Summary:
    from contextlib import closing

    from nnfmq.conformance.results import Summary
    from nnfmq.conformance.running import count, run_files
    from nnfmq.conformance.testmodels import BadFormat, find_files

    files = find_files(arguments.paths)
    total = count(files, settings.pattern)
    if not total:
        raise BadFormat(f"no test model in {', '.join(map(str, arguments.paths))} has a name with {settings.pattern!r}")
    summary = Summary()
    with _progress(arguments.no_color) as bar, closing(run_files(files, settings, arguments.jobs)) as results:
        task = bar.add_task(settings.path, total=total, failed=0)
        for result in results:
            summary.add(result)
            failed = sum(len(tally.failed) for tally in summary.kinds.values())
            bar.update(task, advance=1, failed=failed)
    return summary


def _progress(no_color: bool) -> Any:
    """Return a bar on stderr, so that stdout is the report; it leaves nothing where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    screen = Console(stderr=True, no_color=no_color or None, highlight=False, emoji=False)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed"),
    )
    return Progress(*columns, TimeRemainingColumn(), console=screen, transient=True, disable=not screen.is_terminal)


def _subject(arguments: argparse.Namespace) -> str:
    where = (
        "the interpreter" if arguments.path == "interpreter" else f"device {arguments.device}, path {arguments.path}"
    )
    return f"{', '.join(map(str, arguments.paths))} on {where}"


def _write(arguments: argparse.Namespace, summary: Summary, duration_ns: int) -> None:
    if arguments.json is not None:
        known = {"path": arguments.path, "device": arguments.device, "duration_ns": duration_ns}
        arguments.json.write_text(json.dumps({**known, **summary.as_json()}, indent=2) + "\n", encoding="utf-8")
    if arguments.html is not None:
        from nnfmq.conformance.page import render

        arguments.html.write_text(render(summary, _subject(arguments)), encoding="utf-8")


def _print(screen: Console, summary: Summary, duration_ns: int, verbose: bool) -> None:
    _print_failures(screen, summary, None if verbose else _SHOWN_FAILURES)
    counts = table("tests", ">total", ">passed", ">failed", ">skipped")
    for kind, tally in summary.kinds.items():
        numbers = tally.total, tally.passed, len(tally.failed), len(tally.skipped)
        counts.add_row(kind.replace("_", " "), *(f"{number:,}" for number in numbers))
    screen.print(counts)
    if verbose:
        _print_details(screen, summary)
    verdict = "Everything passed" if summary.is_good else "Not everything passed"
    screen.print(f"{verdict}; {duration_ns / 1e9:.1f} s.")


def _print_failures(screen: Console, summary: Summary, limit: int | None) -> None:
    failures = [(kind, *failed) for kind, tally in summary.kinds.items() for failed in tally.failed]
    for kind, name, verdict in failures[:limit]:
        screen.print(f"FAILED {name} ({kind.replace('_', ' ')}): {verdict.reason}", soft_wrap=True)
    if limit is not None and len(failures) > limit:
        screen.print(f"... and {len(failures) - limit:,} more: --verbose prints all, --json and --html write them")


def _print_details(screen: Console, summary: Summary) -> None:
    from collections import Counter

    reasons = Counter(reason for tally in summary.kinds.values() for _, reason in tally.skipped)
    for reason, number in reasons.most_common():
        screen.print(f"skipped {number:,}: {reason}", soft_wrap=True)
    slowest = table("slowest", ">ms")
    for duration_ns, name in summary.slowest:
        slowest.add_row(name, f"{duration_ns / 1e6:,.1f}")
    screen.print(slowest)
