"""`nnfmq status`: what a driver is doing, on one screen: version, uptime, clients, models, memory, compiler, caches."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from nnfmq.cli.console import console, print_json, table

if TYPE_CHECKING:
    from nnfmq.cli.statistics_sample import Activity

EXAMPLES = """\
examples:
  nnfmq status
  nnfmq status --json | jq .driver.uptime_ns
  nnfmq status --connect /run/user/1000/nnfmq/lab.sock

Rates and latencies are those since each client connected; `nnfmq top` shows the present.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `status`."""
    parser.add_argument("--connect", metavar="PATH", help="the socket of a driver (default: that of this user)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def execute(arguments: argparse.Namespace) -> int:
    """Print a driver's state; return the exit status. Raises DeviceUnavailable if no driver runs."""
    import nnfmq
    from nnfmq.cli.statistics_sample import Activity, take_sample

    with nnfmq.connect(arguments.connect, embedded=False) as client:
        activity = Activity(take_sample(client))
    if arguments.json:
        print_json(activity.as_json())
    else:
        _print(activity, arguments.no_color)
    return 0


def _print(activity: Activity, no_color: bool) -> None:
    from nnfmq.cli.statistics_tables import client_rows, driver_lines, model_rows

    screen = console(no_color)
    for name, text in driver_lines(activity.now):
        screen.print(f"{name:9} {text}")
    for headings, rows in (client_rows(activity, screen.width), model_rows(activity, screen.width)):
        if rows:
            listing = table(*headings)
            for cells in rows:
                listing.add_row(*cells)
            screen.print(listing)
