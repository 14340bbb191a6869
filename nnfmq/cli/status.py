"""`nnfmq status`: what a driver is doing, on one screen: version, uptime, clients, models, memory, compiler, caches.

If the driver serves models by name, also which version of each, and why a newer one is not served.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from nnfmq.cli.console import add_socket_argument, console, print_json, table

if TYPE_CHECKING:
    from rich.console import Console

    from nnfmq.cli.statistics import Activity, Rows
    from nnfmq.serialize.repository_protocol import ModelEntry

_REPOSITORY_S = 2.0  # for the reply of the model repository
_SCARCE = 0.5  # a limit is shown without --limits if so much of it is in use
EXAMPLES = """\
examples:
  nnfmq status
  nnfmq status --limits
  nnfmq status --json | jq .driver.uptime_ns
  nnfmq status --connect /run/user/1000/nnfmq/lab.sock

Counts and times are those since the driver started; `nnfmq top` shows the present.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `status`."""
    add_socket_argument(parser)
    parser.add_argument("--limits", action="store_true", help="print all limits instead, with their use and settings")
    parser.add_argument("--json", action="store_true", help="print JSON")


def execute(arguments: argparse.Namespace) -> int:
    """Print a driver's state; return the exit status. Raises DeviceUnavailable if no driver runs."""
    import nnfmq
    from nnfmq.cli.limits import limits_json
    from nnfmq.cli.statistics import Activity, read_served_models, take_sample

    with nnfmq.connect(arguments.connect, embedded=False, recover=False, monitor=True) as client:
        activity = Activity(take_sample(client))
        served, problem = read_served_models(client, arguments.connect, _REPOSITORY_S)
    if arguments.json:
        entries = None if served is None else [_entry_json(entry) for entry in served]
        limits = limits_json(activity.now.statistics)
        print_json({**activity.as_json(), "limits": limits, "served": entries, "served_problem": problem or None})
    elif arguments.limits:
        _print_limits(activity, arguments.no_color)
    else:
        _print(activity, served, problem, arguments.no_color)
    return 0


def _entry_json(entry: ModelEntry) -> dict[str, object]:
    return {
        "name": entry.name,
        "state": entry.state.value,
        "version": entry.version or None,
        "device": entry.device or None,
        "changed_s": entry.changed_s or None,
        "failed_version": entry.failed_version or None,
        "reason": entry.reason or None,
    }


def _print(activity: Activity, served: list[ModelEntry] | None, problem: str, no_color: bool) -> None:
    from nnfmq.cli.limits import limit_rows
    from nnfmq.cli.statistics import client_rows, driver_lines, failure_lines, model_rows, served_rows, times_rows

    screen = console(no_color)
    for name, text in driver_lines(activity.now):
        screen.print(f"{name:9} {text}")
    if problem:
        screen.print(f"{'served':9} unknown: {problem}")
    elif served is not None:
        screen.print(f"{'served':9} {len(served)} by name")
    of_clients = (make(activity, screen.width) for make in (client_rows, model_rows, times_rows))
    scarce = limit_rows(activity.now.statistics, min_share=_SCARCE)
    for rows in (*of_clients, served_rows(served or []), scarce):
        _print_table(screen, rows)
    for line in failure_lines(served or []):
        screen.print(line)


def _print_limits(activity: Activity, no_color: bool) -> None:
    from nnfmq.cli.limits import limit_rows

    _print_table(console(no_color), limit_rows(activity.now.statistics))


def _print_table(screen: Console, found: Rows) -> None:
    headings, rows = found
    if rows:
        listing = table(*headings)
        for cells in rows:
            listing.add_row(*cells)
        screen.print(listing)
