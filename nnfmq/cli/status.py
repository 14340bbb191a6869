"""`nnfmq status`: what a driver is doing, on one screen: version, uptime, clients, models, memory, compiler, caches.

If the driver serves models by name, also which version of each, and why a newer one is not served.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from nnfmq.cli.console import add_socket_argument, console, open_running, print_json, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from nnfmq.cli.statistics import Activity
    from nnfmq.cli.statistics_tables import Rows
    from nnfmq.serialize.repository_protocol import ModelEntry

_REPOSITORY_S = 2.0  # for the reply of the model repository
_SCARCE = 0.5  # a limit is shown without --limits if so much of it is in use
EXAMPLES = """\
examples:
  nnfmq status
  nnfmq status --limits
  nnfmq status --times
  nnfmq status --json | jq .driver.uptime_ns
  nnfmq status --connect /run/user/1000/nnfmq/lab.sock

Counts and times are those since the driver started; `nnfmq top` shows the present.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `status`."""
    add_socket_argument(parser)
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--limits", action="store_true", help="print all limits instead, with their use and settings")
    only.add_argument("--times", action="store_true", help="print the table of times instead, all of it")
    parser.add_argument("--json", action="store_true", help="print JSON")


def execute(arguments: argparse.Namespace) -> int:
    """Print a driver's state; return the exit status. Raises DeviceUnavailable if no driver runs."""
    from nnfmq.cli.limits import limits_json
    from nnfmq.cli.statistics import Activity, read_served_models, take_sample

    with open_running(arguments.connect, monitor=True) as client:
        activity = Activity(take_sample(client))
        served, problem = read_served_models(client, arguments.connect, _REPOSITORY_S)
    if arguments.json:
        entries = None if served is None else [_entry_json(entry) for entry in served]
        limits = limits_json(activity.now.statistics)
        print_json({**activity.as_json(), "limits": limits, "served": entries, "served_problem": problem or None})
    elif arguments.limits or arguments.times:
        _print_one(activity, arguments)
    else:
        _print(activity, served, problem, arguments.no_color)
    return 0


def _entry_json(entry: ModelEntry) -> dict[str, object]:
    changed = datetime.fromtimestamp(entry.changed_s, UTC) if entry.changed_s else None
    return {
        "name": entry.name,
        "state": entry.state.value,
        "version": entry.version or None,
        "device": entry.device or None,
        "changed": None if changed is None else changed.isoformat(timespec="seconds"),
        "failed_version": entry.failed_version or None,
        "reason": entry.reason or None,
    }


def _print(activity: Activity, served: list[ModelEntry] | None, problem: str, no_color: bool) -> None:
    """Print everything; on a terminal that is too low for that, of the times those of the clients only."""
    from rich.console import Group

    from nnfmq.observe.driver_statistics import TIMES

    screen = console(no_color)
    shown = Group(*_parts(activity, served, problem, screen.width, TIMES))
    if screen.is_terminal and len(screen.render_lines(shown, pad=False)) >= screen.height:
        shown = Group(*_parts(activity, served, problem, screen.width, TIMES[:1]))
    screen.print(shown)


def _parts(
    activity: Activity, served: list[ModelEntry] | None, problem: str, width: int, times: Sequence[str]
) -> Iterator[RenderableType]:
    """Yield the lines and tables, of the times with these rows of each model."""
    from nnfmq.cli.limits import limit_rows
    from nnfmq.cli.statistics_tables import (
        client_rows,
        driver_lines,
        failure_lines,
        model_rows,
        served_rows,
        times_rows,
    )

    for name, text in driver_lines(activity.now):
        yield f"{name:9} {text}"
    if problem:
        yield f"{'served':9} unknown: {problem}"
    elif served is not None:
        yield f"{'served':9} {len(served)} by name"
    yield from _listed(client_rows(activity, width))
    yield from _listed(model_rows(activity, width))
    found = times_rows(activity, width, times)
    yield from _listed(found)
    if len(times) == 1 and found[1]:
        yield " in queue, driver and engine: nnfmq status --times"
    yield from _listed(served_rows(served or []))
    yield from _listed(limit_rows(activity.now.statistics, min_share=_SCARCE))
    yield from failure_lines(served or [])


def _print_one(activity: Activity, arguments: argparse.Namespace) -> None:
    """Print the table that an option asks for."""
    from nnfmq.cli.limits import limit_rows
    from nnfmq.cli.statistics_tables import times_rows

    screen = console(arguments.no_color)
    found = limit_rows(activity.now.statistics) if arguments.limits else times_rows(activity, screen.width)
    if not found[1]:
        screen.print("no executions")
    for part in _listed(found):
        screen.print(part)


def _listed(found: Rows) -> Iterator[RenderableType]:
    """Yield a table after an empty line; nothing if it has no rows."""
    headings, rows = found
    if rows:
        listing = table(*headings)
        listing.show_edge = False
        for cells in rows:
            listing.add_row(*cells)
        yield ""
        yield listing
