"""`nnfmq trace`: record an application and its driver on one clock, as JSON for ui.perfetto.dev; or print a table."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nnfmq.cli.console import add_socket_argument, console, new_file, open_running, print_json, seconds, table

if TYPE_CHECKING:
    from nnfmq.observe.phase_table import PhaseTable
    from nnfmq.observe.trace_files import Trace

EXAMPLES = """\
examples:
  nnfmq trace -o out.json -- python app.py   # with its processes and drivers
  nnfmq trace -o out.json --duration 10      # a running driver, all clients
  nnfmq trace --table out.json               # each layer in each phase
  NNFMQ_TRACE=out.json python app.py         # the same, written at exit

Open out.json in ui.perfetto.dev. `nnfmq why out.json` explains slow requests.
"""

_USAGE = """\
%(prog)s -o FILE -- COMMAND ...
       %(prog)s -o FILE [--connect PATH] --duration S
       %(prog)s [--json] --table FILE"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `trace`."""
    parser.usage = _USAGE
    parser.add_argument("-o", "--output", metavar="FILE", type=new_file, help="write the trace to FILE")
    add_socket_argument(parser)
    parser.add_argument("--duration", metavar="S", type=seconds, help="trace a running driver for S seconds")
    parser.add_argument("--table", metavar="FILE", type=Path, help="print the layer × phase table of a trace")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.add_argument("command", metavar="COMMAND", nargs="*", help="a command to run and trace, after `--`")


def execute(arguments: argparse.Namespace) -> int:
    """Record, or print the table; return the exit status: that of the command, if there is one."""
    if problem := _misuse(arguments):
        print(f"nnfmq: error: {problem}", file=sys.stderr)
        return 2
    if arguments.table is not None:
        return _print_table(arguments)
    from nnfmq.cli.record import CommandNotFound

    try:
        trace, status = _recorded(arguments)
    except CommandNotFound as error:
        return error.report()
    from nnfmq.observe.trace_files import write_trace

    write_trace(trace, arguments.output)
    print(_summary(trace, arguments.output), file=sys.stderr)
    return status


def _misuse(arguments: argparse.Namespace) -> str:
    if arguments.table is not None:
        others = arguments.output or arguments.command or arguments.duration or arguments.connect
        return "--table reads a trace: give no other option than --json with it" if others else ""
    if arguments.json:
        return "--json prints a table: give --table FILE with it"
    if arguments.output is None:
        return "give -o FILE to record a trace, or --table FILE to read one"
    if arguments.command and (arguments.duration is not None or arguments.connect is not None):
        return "give either a command to trace, or --duration with --connect to trace a running driver"
    if not arguments.command and arguments.duration is None:
        return "give `-- COMMAND ...` to trace a command, or --duration S to trace a running driver"
    return ""


def _recorded(arguments: argparse.Namespace) -> tuple[Trace, int]:
    from nnfmq.cli.trace_collection import trace_command, trace_driver

    if arguments.command:
        return trace_command(arguments.command)
    with open_running(arguments.connect) as client:
        return trace_driver(client, arguments.duration), 0


def _summary(trace: Trace, path: Path) -> str:
    count, lost = len(trace.slices), f", {trace.lost:,} earlier ones lost" if trace.lost else ""
    if not count:
        return f"nnfmq: {path} has no slices: nothing used nnfmq meanwhile"
    processes = f"{len(trace.processes)} process{'es' * (len(trace.processes) != 1)}"
    return f"nnfmq: {count:,} slices of {processes}{lost}: {path}, for ui.perfetto.dev"


# -- the table --------------------------------------------------------------------------------------------------------


def _print_table(arguments: argparse.Namespace) -> int:
    from nnfmq.cli.trace_collection import read_file
    from nnfmq.observe.phase_table import phase_table

    trace = read_file(arguments.table)
    found = phase_table(trace)
    if arguments.json:
        print_json({"unit": "ns", "rows": _rows(found), "conditions": trace.conditions})
        return 0
    if not found.counts:
        print(f"nnfmq: error: {arguments.table} has no slices with NNAPI's tags", file=sys.stderr)
        return 1
    from nnfmq.observe.phase_table import LAYERS, PHASES

    screen = console(arguments.no_color)
    shown = table("layer", "phase", ">slices", ">ms", ">self ms")
    for row in _rows(found):
        layer, phase = (f"{row[key]} {names[row[key]]}" for key, names in (("layer", LAYERS), ("phase", PHASES)))
        if screen.width < _NARROW:
            layer, phase = row["layer"], row["phase"]
        shown.add_row(layer, phase, f"{row['slices']:,}", _ms(row["overall_ns"]), _ms(row["self_ns"]))
    screen.print(shown)
    return 0


_NARROW = 70


def _ms(ns: int) -> str:
    return f"{ns / 1e6:,.3f}"


def _rows(found: PhaseTable) -> list[dict[str, Any]]:
    """Return a row for each layer and phase with a time or a slice, in AOSP's order."""
    from nnfmq.observe.phase_table import LAYERS, PHASES

    keys = [(layer, phase) for layer in LAYERS for phase in PHASES]
    return [
        {
            "layer": layer,
            "phase": phase,
            "slices": found.counts.get((layer, phase), 0),
            "overall_ns": found.overall.get((layer, phase), 0),
            "self_ns": found.own.get((layer, phase), 0),
        }
        for layer, phase in keys
        if (layer, phase) in found.counts or (layer, phase) in found.overall
    ]
