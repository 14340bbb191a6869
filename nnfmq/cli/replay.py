"""`nnfmq replay`: run the executions of a recording again; compare outputs and latencies with the recorded ones.

`nnfmq.lab.replay` does the work. Exit status 0: all outputs are equal within the tolerance; 1: one differs, an
execution failed, or the driver died.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nnfmq.cli.console import (
    add_connect_argument,
    console,
    microseconds,
    open_client,
    print_json,
    progress_bar,
    table,
)
from nnfmq.hal.errors import InvalidArgument

if TYPE_CHECKING:
    from rich.console import Console

    from nnfmq.lab.replay import ReplayedExecution, ReplayOptions, ReplayOutcome
    from nnfmq.recording.reader import RecordingFile

EXAMPLES = """\
examples:
  nnfmq replay calls.nnrec                              # at the recorded times
  nnfmq replay calls.nnrec --device reference --tolerance 4ulp
  nnfmq replay calls.nnrec --speed max --connect /run/user/1000/nnfmq/new.sock
  nnfmq replay calls.nnrec --rate 500 --json

Exit status: 0 equal, 1 different or failed, 2 wrong usage.
`nnfmq record` makes recordings.
"""

_ValueT = TypeVar("_ValueT")
_SHOWN = 5  # differences and failures that are listed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `replay`."""
    parser.add_argument("recording", metavar="FILE", type=Path, help="a recording of `nnfmq record`")
    add_connect_argument(parser)
    parser.add_argument("--device", metavar="NAME", help="the device (default: that of the recording)")
    pace = parser.add_mutually_exclusive_group()
    pace.add_argument(
        "--speed", metavar="original|max|FACTOR", type=_argument("parse_speed"),
        help="the recorded times (default), without waiting, or FACTOR times as fast",
    )  # fmt: skip
    pace.add_argument("--rate", metavar="R", type=_rate, dest="speed", help="R executions per second, evenly spaced")
    parser.add_argument(
        "--tolerance", metavar="X|Nulp|exact", type=_argument("parse_tolerance"),
        help="of floats: X in parts of the largest magnitude of an output, or N units in the last place "
        "(default: 1e-5); integers have to be equal",
    )  # fmt: skip
    parser.add_argument("--ignore-deadlines", action="store_true", help="let executions take any time")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _argument(name: str) -> Callable[[str], Any]:
    """Return an argparse type that calls a parser of `nnfmq.lab.replay`, which is imported only then."""

    def parse(text: str) -> Any:
        from nnfmq.lab.replay import parse_speed, parse_tolerance

        try:
            return {"parse_speed": parse_speed, "parse_tolerance": parse_tolerance}[name](text)
        except InvalidArgument as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def _rate(text: str) -> Any:
    """Argparse type: executions per second."""
    from nnfmq.lab.replay import ReplaySpeed

    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 1e-3 <= rate <= 1e6:  # written so that NaN is rejected as well
        raise argparse.ArgumentTypeError(f"{text!r} is no number of executions per second from 0.001 to 1000000")
    return ReplaySpeed("rate", rate)


def execute(arguments: argparse.Namespace) -> int:
    """Replay, print the report, and return the exit status."""
    from nnfmq.lab.conditions import file_sha256, machine
    from nnfmq.lab.replay import replay, replayable
    from nnfmq.recording.reader import RecordingFile

    options = _options(arguments)
    with RecordingFile(arguments.recording) as recording:
        if not replayable(recording):
            count = len(recording.executions)
            raise InvalidArgument(f"{recording.path}: none of its {count} executions can be replayed")
        conditions, digest = machine(), file_sha256(recording.path)
        with open_client(arguments.connect) as client, progress_bar("replaying", arguments.no_color) as progress:
            outcome = replay(client, recording, options, progress)
        report = _report(recording, outcome) | {"recording_sha256": digest, "conditions": conditions}
    if arguments.json:
        print_json(report)
    else:
        _print(console(arguments.no_color), report)
    if outcome.error is not None:
        raise outcome.error
    return 0 if report["is_equal"] else 1


def _options(arguments: argparse.Namespace) -> ReplayOptions:
    from nnfmq.lab.replay import DEFAULT_TOLERANCE, ORIGINAL_SPEED, ReplayOptions

    return ReplayOptions(
        _default(arguments.speed, ORIGINAL_SPEED),
        _default(arguments.tolerance, DEFAULT_TOLERANCE),
        arguments.device,
        not arguments.ignore_deadlines,
    )


def _default(value: _ValueT | None, default: _ValueT) -> _ValueT:
    return default if value is None else value


def _report(recording: RecordingFile, outcome: ReplayOutcome) -> dict[str, Any]:
    """Return the report as JSON has it."""
    from nnfmq.hal.errors import ErrorStatus
    from nnfmq.lab.replay import replayable
    from nnfmq.lab.statistics import distribution

    wanted = replayable(recording)
    done = sorted(outcome.executions, key=lambda execution: execution.recorded.record)
    successful = [execution for execution in done if execution.status is ErrorStatus.NONE]
    failures = Counter(execution.status.name for execution in done if execution.status is not ErrorStatus.NONE)
    different = [execution for execution in successful if not execution.is_equal]
    recorded = [execution.recorded.row for execution in successful]
    return {
        "recording": str(recording.path),
        "is_complete": recording.end is not None and not (recording.end.dropped or recording.end.beyond_limit),
        "executions": {
            "recorded": len(recording.executions),
            "not_replayable": len(recording.executions) - len(wanted),
            "replayed": len(done),
            "equal": sum(bool(execution.differences) and execution.is_equal for execution in successful),
            "different": len(different),
            "not_compared": sum(not execution.differences for execution in successful),
            "failed": dict(failures),
        },
        "is_equal": len(done) == len(wanted) and len(different) == 0 and not failures,
        "largest_difference": _largest(successful),
        "different": [_difference_line(execution) for execution in different[:_SHOWN]],
        "failed": [_failure_line(execution) for execution in done if execution.message][:_SHOWN],
        "latency_ns": None
        if not successful
        else {
            "recorded": distribution(row.end_ns - row.intended_ns for row in recorded),
            "replayed": distribution(execution.latency_ns for execution in successful),
            "late": distribution(execution.late_ns for execution in successful),
        },
    }


def _largest(executions: Sequence[ReplayedExecution]) -> dict[str, float]:
    """Return the largest differences of floats among all outputs, 0 if all are equal."""
    found = [difference for execution in executions for difference in execution.differences]
    return {
        "relative": max((difference.relative for difference in found), default=0.0),
        "ulp": max((difference.ulp for difference in found), default=0),
    }


def _difference_line(execution: ReplayedExecution) -> str:
    index, reason = next((i, d.reason) for i, d in enumerate(execution.differences) if d.reason)
    return f"record {execution.recorded.record}, output {index}: {reason}"


def _failure_line(execution: ReplayedExecution) -> str:
    return f"record {execution.recorded.record}: {execution.status.name}: {' '.join(execution.message.split())}"


def _print(screen: Console, report: dict[str, Any]) -> None:
    counts = report["executions"]
    if not report["is_complete"]:
        screen.print("The recording is not complete: the application was killed, or executions were left out.")
    line = f"{counts['replayed']} of {counts['recorded']} executions replayed: {counts['equal']} equal"
    more = {"different": counts["different"], "not compared": counts["not_compared"]} | counts["failed"]
    screen.print(", ".join([line, *(f"{count} {name}" for name, count in more.items() if count)]))
    if counts["not_replayable"]:
        screen.print(f"Not replayed: {counts['not_replayable']}, which had failed, or lack inputs")
    largest = report["largest_difference"]
    if largest["ulp"]:
        screen.print(f"Largest difference of floats: {largest['relative']:.2g} relative, {largest['ulp']:,} ULP")
    for text in (*report["different"], *report["failed"]):
        screen.print(text)
    if report["latency_ns"] is not None:
        _print_latencies(screen, report["latency_ns"])


def _print_latencies(screen: Console, latencies: dict[str, dict[str, int]]) -> None:
    from nnfmq.lab.statistics import heading_of

    rows = table(">µs", ">recorded", ">replayed", ">ratio", title="Latency")
    for name in latencies["recorded"]:
        before, now = latencies["recorded"][name], latencies["replayed"][name]
        ratio = f"{now / before:,.2f}" if before else "-"
        rows.add_row(heading_of(name), microseconds(before), microseconds(now), ratio)
    screen.print(rows)
    if 2 * latencies["late"]["p50"] > latencies["replayed"]["p50"]:
        screen.print(
            "Most calls came late, because executions took longer than in the recording; the wait is part of "
            "these latencies. Use --speed max to compare executions alone."
        )
