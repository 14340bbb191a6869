"""`nnfmq top`: a live view of a driver's clients, models and bursts; `--once` prints one table and ends.

If the driver serves models by name, also what all clients together execute of each.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from typing import TYPE_CHECKING

from nnfmq.cli.console import add_socket_argument, console, open_running, print_json, table

if TYPE_CHECKING:
    from nnfmq.cli.statistics import Activity, ServedModels
    from nnfmq.client.connection.client import Client

_CONNECT_S = 1.0  # to the next driver
_REPOSITORY_S = 2.0  # for the reply of the model repository
EXAMPLES = """\
examples:
  nnfmq top                               # q quits, space pauses
  nnfmq top --interval 5
  nnfmq top --once                        # what happens in one second, as plain tables
  nnfmq top --once --json | jq '.times[] | {model, p99: .times.client.p99_ns}'

The live view needs textual: pip install 'nnfmq[top]'.
"""
_INTERVALS = (0.1, 3600.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `top`."""
    add_socket_argument(parser)
    parser.add_argument(
        "--interval", metavar="S", type=_interval, default=1.0, help="seconds between two readings (default: 1)"
    )
    parser.add_argument("--once", action="store_true", help="print what happens in one interval, then exit")
    parser.add_argument("--json", action="store_true", help="with --once: print JSON")


def _interval(text: str) -> float:
    minimum, maximum = _INTERVALS
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not minimum <= seconds <= maximum:
        raise argparse.ArgumentTypeError(f"{text!r} is not between {minimum:g} and {maximum:g} seconds")
    return seconds


def execute(arguments: argparse.Namespace) -> int:
    """Show the view until the user quits, or print it once; return the exit status."""
    from nnfmq.cli.statistics import read_served_models

    problem = _usage_problem(arguments)
    if problem:
        print(f"nnfmq: error: {problem}", file=sys.stderr)
        return 2
    with open_running(arguments.connect, monitor=True, recovers=not arguments.once) as client:
        if not arguments.once:
            return _show(client, arguments)
        activity = _one_interval(client, arguments.interval)
        served = read_served_models(client, arguments.connect, _REPOSITORY_S)
    if arguments.json:
        print_json({**activity.as_json(), **_served_json(served, activity)})
    else:
        _print(activity, served, arguments.no_color)
    return 0


def _usage_problem(arguments: argparse.Namespace) -> str:
    if arguments.json and not arguments.once:
        return "--json needs --once"
    if not arguments.once and not (sys.stdin.isatty() and sys.stdout.isatty()):
        return "the live view needs a terminal; use --once, or --once --json"
    return ""


def _one_interval(client: Client, interval: float) -> Activity:
    from nnfmq.cli.statistics import Activity, take_sample

    before = take_sample(client)
    time.sleep(interval)
    return Activity(take_sample(client), before)


def _served_json(served: ServedModels, activity: Activity) -> dict[str, object]:
    from nnfmq.cli.statistics import served_activities

    rows = None if served.entries is None else [row.as_json() for row in served_activities(served.entries, activity)]
    return {"served": rows, "served_problem": served.problem or None}


def _print(activity: Activity, served: ServedModels, no_color: bool) -> None:
    from nnfmq.cli.statistics import served_activities
    from nnfmq.cli.statistics_tables import (
        burst_rows,
        client_rows,
        duration_text,
        failure_lines,
        model_rows,
        rate_text,
        served_activity_rows,
        times_rows,
    )

    screen = console(no_color)
    statistics = activity.now.statistics
    screen.print(
        f"driver {statistics.pid}, up {duration_text(statistics.uptime_ns)}, "
        f"{rate_text(activity.per_s)} executions per s"
    )
    tables = {
        "clients": client_rows(activity, screen.width),
        "models": model_rows(activity, screen.width),
        "executions": times_rows(activity, screen.width),
        "bursts": burst_rows(activity, screen.width),
    }
    if served.entries is not None:
        rows = served_activities(served.entries, activity)
        tables = {"served models": served_activity_rows(rows, screen.width), **tables}
    if served.problem:
        screen.print(f"served models unknown: {served.problem}")
    for name, (headings, rows_of_table) in tables.items():
        if not rows_of_table:
            screen.print(f"no {name}")
            continue
        listing = table(*headings)
        for cells in rows_of_table:
            listing.add_row(*cells)
        screen.print(listing)
    for line in failure_lines(served.entries or []):
        screen.print(line)


def _show(client: Client, arguments: argparse.Namespace) -> int:
    import nnfmq

    try:
        from nnfmq.cli.top_screen import TopScreen
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "textual":
            raise
        remedy = "the live view needs textual: pip install 'nnfmq[top]'; --once works without"
        print(f"nnfmq: error: {remedy}", file=sys.stderr)
        return 1
    connect_again = partial(nnfmq.connect, arguments.connect, embedded=False, timeout=_CONNECT_S, monitor=True)
    TopScreen(client, arguments.interval, arguments.connect, connect_again).run()
    return 0
