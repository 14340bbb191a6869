"""`nnfmq why`: why the slowest requests of a trace were slow, stage by stage, beside what the stages usually take."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nnfmq.cli.console import (
    add_socket_argument,
    at_least_one,
    console,
    indented,
    microseconds,
    open_running,
    print_json,
    seconds,
    share_text,
    table,
)

if TYPE_CHECKING:
    from rich.console import Console

    from nnfmq.observe.slow_requests import Explanation, Stage, ThreadEvidence
    from nnfmq.observe.trace_files import Trace

_WIDE = 60

EXAMPLES = """\
examples:
  nnfmq trace -o out.json -- python app.py && nnfmq why out.json
  nnfmq why out.json -n 10 --json
  nnfmq why --duration 5             # a running driver

* marks the stage that exceeds its median by most. Operations are indented
below the engine. "off CPU": the thread was stopped, paused, or had no CPU.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `why`."""
    parser.usage = "%(prog)s [options] (FILE | --duration S)"
    parser.add_argument("file", metavar="FILE", nargs="?", type=Path, help="a trace of `nnfmq trace` or $NNFMQ_TRACE")
    parser.add_argument("-n", metavar="N", dest="count", type=at_least_one, default=3, help="requests (default: 3)")
    add_socket_argument(parser)
    parser.add_argument("--duration", metavar="S", type=seconds, help="trace a running driver for S seconds instead")
    parser.add_argument("--json", action="store_true", help="print JSON")


def execute(arguments: argparse.Namespace) -> int:
    """Read or record a trace, and print the explanations; return the exit status."""
    if (arguments.file is None) == (arguments.duration is None):
        print("nnfmq: error: give either the file of a trace, or --duration S for a running driver", file=sys.stderr)
        return 2
    from nnfmq.observe.slow_requests import explain, requests_of

    trace = _trace(arguments)
    count, found = len(requests_of(trace)), explain(trace, arguments.count)
    if not found:
        print("nnfmq: error: the trace has no burst requests; only these have stages", file=sys.stderr)
        return 1
    if arguments.json:
        slowest = [_as_json(trace, one) for one in found]
        print_json({"unit": "ns", "requests": count, "slowest": slowest, "conditions": trace.conditions})
        return 0
    screen = console(arguments.no_color)
    screen.print(f"The slowest {len(found)} of {count:,} requests; typical is the median; * is the furthest above it.")
    for number, one in enumerate(found, 1):
        _print(screen, trace, number, one)
    return 0


def _trace(arguments: argparse.Namespace) -> Trace:
    from nnfmq.cli.trace_collection import read_file, trace_driver

    if arguments.file is not None:
        return read_file(arguments.file)
    with open_running(arguments.connect) as client:
        return trace_driver(client, arguments.duration)


def _print(screen: Console, trace: Trace, number: int, one: Explanation) -> None:
    from nnfmq.observe.trace_layout import burst_of, packet_of, worker_of

    request = one.request
    model = _model_of(trace, request.request)
    burst = f"{burst_of(request.request)} of {model}" if model else f"{burst_of(request.request)}"
    clock = f" at {_wall_clock(trace, one):%Y-%m-%d %H:%M:%S.%f}" if trace.epoch_ns else ""
    screen.print(
        f"\n{number}. {microseconds(request.total_ns)} µs{clock}: packet {packet_of(request.request)} of burst "
        f"{burst}, {_worker_text(trace, worker_of(request.request))}, "
        f"{_at_ms(trace, one):,.1f} ms after the begin."
    )
    for text in _outcome(one):
        screen.print(indented(text, 3))
    min_ns = one.request.total_ns // 100
    has_off_cpu = any(stage.off_cpu_ns > min_ns for stage in (*one.stages, *one.operations))
    columns = [">share"] if screen.width >= _WIDE else []

    def cells(stage: Stage) -> list[str]:
        share = [share_text(stage.share)] if columns else []
        off_cpu = microseconds(stage.off_cpu_ns) if stage.off_cpu_ns > min_ns else ""
        times = microseconds(stage.duration_ns), *share, microseconds(stage.typical_ns)
        return [*times, off_cpu] if has_off_cpu else [*times]

    shown = table("stage", ">µs", *columns, ">typical", *([">off CPU"] if has_off_cpu else []))
    for stage in one.stages:
        shown.add_row(f"{stage.name}{' *' if stage is one.abnormal else ''}", *cells(stage))
        if stage.name == "engine":
            for operation in one.operations:
                shown.add_row(f"  {operation.name}", *cells(operation))
    screen.print(shown)


def _outcome(one: Explanation) -> Iterator[str]:
    """Yield the causes with their evidence; without one, the stage that took longest beyond the usual."""
    for cause in one.causes:
        yield f"{cause.name}: {cause.evidence}"
    if one.causes:
        return
    worst = one.abnormal
    if worst is None:
        yield "no stage took longer than usual"
        return
    text = f"{worst.name}: {microseconds(worst.duration_ns)} µs, typically {microseconds(worst.typical_ns)}"
    yield f"{text}; nothing that was recorded explains it" if worst.excess_ns > worst.typical_ns else text


def _model_of(trace: Trace, request: int) -> str:
    """Return what the client calls the model of a request, empty if the trace does not tell."""
    from nnfmq.observe.slow_requests import models_of_bursts
    from nnfmq.observe.trace_layout import packet_of

    return models_of_bursts(trace).get(request - packet_of(request), "")


def _worker_text(trace: Trace, pid: int) -> str:
    """Return a worker with the program that it serves, if the trace tells."""
    return trace.machine.name_of(pid) if pid in trace.machine.processes else f"worker {pid}"


def _at_ms(trace: Trace, one: Explanation) -> float:
    return (one.request.begin_ns - trace.slices[0].begin_ns) / 1e6


def _wall_clock(trace: Trace, one: Explanation) -> datetime:
    """Return when a request began, in the time zone of this process."""
    return datetime.fromtimestamp((trace.epoch_ns + one.request.begin_ns) / 1e9).astimezone()


def _as_json(trace: Trace, one: Explanation) -> dict[str, Any]:
    from nnfmq.observe.causes import UNKNOWN
    from nnfmq.observe.trace_layout import burst_of, packet_of, worker_of

    request = one.request
    return {
        "client_id": worker_of(request.request),
        "worker": trace.machine.processes.get(worker_of(request.request)),
        "burst": burst_of(request.request),
        "packet": packet_of(request.request),
        "model": _model_of(trace, request.request) or None,
        "date": _wall_clock(trace, one).isoformat() if trace.epoch_ns else None,
        "begin_ns": request.begin_ns,
        "total_ns": request.total_ns,
        "excess_ns": one.excess_ns,
        "cause": one.causes[0].name if one.causes else UNKNOWN,
        "causes": [
            {"name": cause.name, "explained_ns": cause.explained, "evidence": cause.evidence} for cause in one.causes
        ],
        "abnormal": None if one.abnormal is None else one.abnormal.name,
        "stages": [_stage_as_json(stage) for stage in one.stages],
        "operations": [_stage_as_json(operation) for operation in one.operations],
        "threads": [_thread_as_json(each) for each in one.threads],
    }


def _stage_as_json(stage: Stage) -> dict[str, Any]:
    return {
        "name": stage.name,
        "duration_ns": stage.duration_ns,
        "share": stage.share,
        "typical_ns": stage.typical_ns,
        "off_cpu_ns": stage.off_cpu_ns,
    }


def _thread_as_json(found: ThreadEvidence) -> dict[str, Any]:
    pid, thread = found.thread
    return {
        "role": found.side,
        "pid": pid,
        "thread": thread,
        "stopped_ns": found.stopped_ns,
        "paused_ns": found.paused_ns,
        "waited_ns": found.waited_ns,
        "unknown_ns": found.unknown_ns,
        "holders": [holder._asdict() for holder in found.holders],
    }
