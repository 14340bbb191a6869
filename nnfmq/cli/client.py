"""`nnfmq client`: list the clients of a running driver with their classes, and change the class of one."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from nnfmq.base.settings import CLASSES
from nnfmq.cli.console import add_socket_argument, console, open_running, print_json, table
from nnfmq.cli.parser import CommandAction, add_actions

if TYPE_CHECKING:
    from nnfmq.cli.statistics import ClientActivity

EXAMPLES = """\
examples:
  nnfmq client list
  nnfmq client set 4711 --class batch       # until the client leaves

`nnfmq client ACTION --help` describes one action.
"""
_DIGITS_MAX = 10  # of a pid
_HEADINGS = (">id", ">pid", "client", ">uid", "class", ">executed", ">calls")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions of `client`, and their options."""
    add_actions(parser, _ACTIONS)


def execute(arguments: argparse.Namespace) -> int:
    """Perform the action; return the exit status. Raises DeviceUnavailable if no driver runs."""
    from nnfmq.cli.statistics import Activity, take_sample

    with open_running(arguments.connect, monitor=True) as client:
        if arguments.action == "set":
            for row in _chosen(Activity(take_sample(client)).clients, arguments.id):
                client.set_client_class(arguments.set_class, row.client.worker_pid)
        rows = Activity(take_sample(client)).clients
    if arguments.action == "set":
        rows = [row for row in rows if arguments.id in _ids(row)]
    _print(rows, arguments)
    return 0


def _ids(row: ClientActivity) -> tuple[int, int]:
    return row.client.worker_pid, row.client.pid


def _chosen(rows: list[ClientActivity], number: int) -> list[ClientActivity]:
    """Return the client with this id, or else those of the process with this pid.

    Raises:
        InvalidArgument: If there is none.
    """
    from nnfmq.hal.errors import InvalidArgument

    for kind in range(2):
        found = [row for row in rows if _ids(row)[kind] == number]
        if found:
            return found
    known = ", ".join(str(row.client.worker_pid) for row in rows) or "it has no clients"
    raise InvalidArgument(
        f"this driver has no client {number}; allowed are an id or a pid of `nnfmq client list`: {known}"
    )


def _print(rows: list[ClientActivity], arguments: argparse.Namespace) -> None:
    from nnfmq.cli.statistics_tables import pid_text

    if arguments.json:
        print_json({"clients": [row.as_json() for row in rows]})
        return
    if not rows:
        print("no clients")
        return
    listing = table(*_HEADINGS)
    for row in rows:
        client = row.client
        listing.add_row(
            str(client.worker_pid), pid_text(client.pid), row.name, str(client.uid), row.class_name,
            f"{client.executions:,}", str(client.open_calls),
        )  # fmt: skip
    console(arguments.no_color).print(listing)


def _for_list(parser: argparse.ArgumentParser) -> None:
    add_socket_argument(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _id(text: str) -> int:
    """Argparse type: the id of a client, or the pid of its process."""
    if not text.isdecimal() or len(text) > _DIGITS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is neither an id nor a pid; `nnfmq client list` shows them")
    return int(text)


def _for_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "id",
        type=_id,
        metavar="ID",
        help="a client's id of `nnfmq client list`; or a pid, for all clients of a process",
    )
    parser.add_argument(
        "--class", dest="set_class", choices=CLASSES, required=True, metavar="CLASS",
        help=f"{', '.join(CLASSES[:-1])} or {CLASSES[-1]}",
    )  # fmt: skip
    _for_list(parser)


_ACTIONS = {
    "list": CommandAction(
        "print the clients of a driver: ids, programs, users, classes",
        ("nnfmq client list", "nnfmq client list --json | jq '.clients[].class'"),
        _for_list,
    ),
    "set": CommandAction(
        "give a client another class, until it is closed; print the client",
        ("nnfmq client set 4711 --class batch", "nnfmq client set 4711 --class normal --connect lab.sock"),
        _for_set,
    ),
}
