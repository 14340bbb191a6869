"""`nnfmq why`: why the slowest requests of a trace were slow, stage by stage, beside what the stages usually take."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nnfmq.cli.console import (
    add_connect_argument,
    at_least_one,
    console,
    microseconds,
    open_client,
    print_json,
    seconds,
    table,
)

if TYPE_CHECKING:
    from rich.console import Console

    from nnfmq.observe.trace_analysis import Explanation, Stage
    from nnfmq.observe.trace_files import Trace

_WIDE = 60

EXAMPLES = """\
examples:
  nnfmq trace -o out.json -- python app.py && nnfmq why out.json
  nnfmq why out.json -n 10 --json
  nnfmq why --duration 5             # a running driver; its stages only

* marks the stage that exceeds its median by most. Operations are indented
below the engine.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `why`."""
    parser.usage = "%(prog)s [options] (FILE | --duration S)"
    parser.add_argument("file", metavar="FILE", nargs="?", type=Path, help="a trace of `nnfmq trace` or $NNFMQ_TRACE")
    parser.add_argument("-n", metavar="N", dest="count", type=at_least_one, default=3, help="requests (default: 3)")
    add_connect_argument(parser)
    parser.add_argument("--duration", metavar="S", type=seconds, help="trace a running driver for S seconds instead")
    parser.add_argument("--json", action="store_true", help="print JSON")


def execute(arguments: argparse.Namespace) -> int:
    """Read or record a trace, and print the explanations; return the exit status."""
    if (arguments.file is None) == (arguments.duration is None):
        print("nnfmq: error: give either the file of a trace, or --duration S for a running driver", file=sys.stderr)
        return 2
    from nnfmq.observe.trace_analysis import explain, requests_of

    trace = _trace(arguments)
    count, found = len(requests_of(trace)), explain(trace, arguments.count)
    if not found:
        print("nnfmq: error: the trace has no burst requests; only these have stages", file=sys.stderr)
        return 1
    if arguments.json:
        print_json({"unit": "ns", "requests": count, "slowest": [_as_json(trace, one) for one in found]})
        return 0
    screen = console(arguments.no_color)
    screen.print(f"The slowest {len(found)} of {count:,} requests; typical is the median.")
    for number, one in enumerate(found, 1):
        _print(screen, trace, number, one)
    return 0


def _trace(arguments: argparse.Namespace) -> Trace:
    from nnfmq.cli.trace_collection import read_file, trace_driver

    if arguments.file is not None:
        return read_file(arguments.file)

    with open_client(arguments.connect) as client:
        return trace_driver(client, arguments.duration)


def _print(screen: Console, trace: Trace, number: int, one: Explanation) -> None:
    from nnfmq.observe.trace_layout import burst_of, packet_of, worker_of

    request, worst = one.request, one.abnormal
    screen.print(
        f"\n{number}. {microseconds(request.total_ns)} µs: packet {packet_of(request.request)} of burst "
        f"{burst_of(request.request)}, worker {worker_of(request.request)}, {_at_ms(trace, one):,.1f} ms after the "
        f"begin.\n   {worst.name}: {microseconds(worst.duration_ns)} µs, typically {microseconds(worst.typical_ns)}"
    )
    is_wide = screen.width >= _WIDE
    shown = table("stage", ">µs", *([">share"] if is_wide else []), ">typical")
    for stage in one.stages:
        _add_row(shown, f"{stage.name}{' *' if stage is worst else ''}", stage, is_wide)
        if stage.name == "engine":
            for operation in one.operations:
                _add_row(shown, f"  {operation.name}", operation, is_wide)
    screen.print(shown)
    for text in _waits(one):
        screen.print(f"   {text}")


def _add_row(shown: Any, name: str, stage: Stage, is_wide: bool) -> None:
    share = [f"{stage.share:.0%}"] if is_wide else []
    shown.add_row(name, microseconds(stage.duration_ns), *share, microseconds(stage.typical_ns))


def _at_ms(trace: Trace, one: Explanation) -> float:
    return (one.request.begin_ns - trace.slices[0].begin_ns) / 1e6


def _waits(one: Explanation) -> Iterable[str]:
    for wait in one.waits:
        period_ns = wait.end_ns - wait.begin_ns
        yield (
            f"Thread {wait.thread} had no CPU for {microseconds(wait.waited_ns)} µs of the "
            f"{microseconds(period_ns)} µs around."
        )


def _as_json(trace: Trace, one: Explanation) -> dict[str, Any]:
    from nnfmq.observe.trace_layout import burst_of, packet_of, worker_of

    request = one.request
    return {
        "worker_pid": worker_of(request.request),
        "burst": burst_of(request.request),
        "packet": packet_of(request.request),
        "begin_ns": request.begin_ns,
        "total_ns": request.total_ns,
        "abnormal": one.abnormal.name,
        "stages": [_stage_as_json(stage) for stage in one.stages],
        "operations": [_stage_as_json(operation) for operation in one.operations],
        "cpu_waits": [
            {
                "pid": wait.pid,
                "thread": wait.thread,
                "period_ns": wait.end_ns - wait.begin_ns,
                "waited_ns": wait.waited_ns,
            }
            for wait in one.waits
        ],
    }


def _stage_as_json(stage: Stage) -> dict[str, Any]:
    return {"name": stage.name, "ns": stage.duration_ns, "share": stage.share, "typical_ns": stage.typical_ns}
