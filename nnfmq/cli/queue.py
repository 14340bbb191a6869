"""`nnfmq queue`: create, list, inspect, write, read, watch, measure and remove named queues.

This module declares the options of the actions and implements the short ones; the others are in `queue_snapshot`,
`queue_io` and `queue_bench`, which are imported when needed. An action that moved no record has exit status 1.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

from nnfmq.cli.console import at_least_one, integer, number
from nnfmq.cli.parser import CommandAction, add_actions

EXAMPLES = """\
examples:
  nnfmq queue create /frames --record-bytes 64 --count 1024
  nnfmq queue write /frames < frames.bin      # in another terminal:
  nnfmq queue read /frames --follow --hex
  nnfmq queue watch /frames
  nnfmq queue remove /frames

Only for programs that trust each other: a program that may open the memory can kill
the others (SIGBUS). A name exists until it is removed. docs/c has a C header.
`nnfmq queue ACTION --help` describes one action.
"""


class _Intermixed(argparse.ArgumentParser):
    """Accepts options between positional arguments; plain argparse would not accept DATA in `write NAME --hex DATA`."""

    _is_inside = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._is_inside:  # some versions of Python call this method recursively
            return super().parse_known_args(args, namespace)
        self._is_inside = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._is_inside = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions of `queue`, and their options."""
    add_actions(parser, _ACTIONS, parser_class=_Intermixed)


def execute(arguments: argparse.Namespace) -> int:
    """Run the action; return the exit status."""
    return _FUNCTIONS[arguments.action](arguments)


# ---- options ----


def _name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="a slash and a word, as in /frames")


def _json(parser: argparse.ArgumentParser, what: str = "print JSON") -> None:
    parser.add_argument("--json", action="store_true", help=what)


def _for_create(parser: argparse.ArgumentParser) -> None:
    _name(parser)
    parser.add_argument("--record-bytes", metavar="N", type=integer, required=True, help="size of each record")
    parser.add_argument("--count", metavar="N", type=integer, required=True, help="capacity of the ring, in records")
    parser.add_argument(
        "--unsynchronized",
        action="store_true",
        help="many readers; the writer overwrites unread records and never waits",
    )
    parser.add_argument(
        "--replace",
        action="store_true",
        help="remove an existing queue of this name first; attached programs keep the old one",
    )
    _json(parser)


def _for_info(parser: argparse.ArgumentParser) -> None:
    _name(parser)
    _json(parser)


def _for_write(parser: argparse.ArgumentParser) -> None:
    _name(parser)
    parser.add_argument("data", metavar="DATA", nargs="*", help="the bytes of whole records (default: stdin)")
    parser.add_argument("--file", metavar="FILE", help="read the records from this file")
    parser.add_argument("--hex", action="store_true", help="DATA, file or stdin are hexadecimal digits")
    _waiting(parser, "for space (default: no limit)")


def _for_read(parser: argparse.ArgumentParser) -> None:
    _name(parser)
    parser.add_argument(
        "-n", metavar="N", dest="records", type=at_least_one, default=1, help="number of records (default: 1)"
    )
    parser.add_argument("--follow", action="store_true", help="continue until Ctrl-C, or until a wait exceeds --wait")
    encoding = parser.add_mutually_exclusive_group()
    encoding.add_argument("--hex", action="store_true", help="print one record per line (default on a terminal)")
    encoding.add_argument("--raw", action="store_true", help="print the bytes unchanged (default otherwise)")
    _waiting(parser, "for a record (default: no limit)")


def _for_watch(parser: argparse.ArgumentParser) -> None:
    _name(parser)
    parser.add_argument(
        "--interval", metavar="S", type=_seconds, default=0.5, help="seconds between snapshots (default: 0.5)"
    )
    parser.add_argument(
        "--count", metavar="N", type=at_least_one, help="stop after N snapshots (default: run until Ctrl-C)"
    )
    _json(parser, "print each snapshot as a line of JSON")


def _for_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", nargs="?", help="the two queues are NAME-requests and NAME-results")
    parser.add_argument(
        "--record-bytes", metavar="N", type=at_least_one, default=64, help="size of a message (default: 64)"
    )
    parser.add_argument(
        "--round-trips", metavar="N", type=at_least_one, default=20_000, help="number of round trips (default: 20000)"
    )
    parser.add_argument(
        "--messages",
        metavar="N",
        type=at_least_one,
        default=200_000,
        help="messages sent in one direction (default: 200000)",
    )
    parser.add_argument("--window", metavar="US", type=number, default=50.0, help="polling window in µs (default: 50)")
    parser.add_argument(
        "--placement", choices=("apart", "same", "free"), default="apart",
        help="a CPU for each process (default), one CPU for both, or any CPU",
    )  # fmt: skip
    _json(parser)


def _waiting(parser: argparse.ArgumentParser, what: str) -> None:
    limit = parser.add_mutually_exclusive_group()
    limit.add_argument("--wait", metavar="S", type=_seconds, help=f"wait at most S seconds {what}")
    limit.add_argument("--no-wait", dest="wait", action="store_const", const=0.0, help="do not wait")


def _seconds(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text}: must be a number of seconds, at least 0")
    return value


# ---- actions ----


def _create(arguments: argparse.Namespace) -> int:
    from nnfmq.base.posix_shm import names
    from nnfmq.cli import queue_snapshot
    from nnfmq.queue import SYNCHRONIZED, UNSYNCHRONIZED, create_named, remove_named

    flavor = UNSYNCHRONIZED if arguments.unsynchronized else SYNCHRONIZED
    if arguments.replace and arguments.name in names():  # also a queue whose creator was killed half-way
        remove_named(arguments.name)
    with create_named(arguments.name, arguments.record_bytes, arguments.count, flavor=flavor) as queue:
        queue_snapshot.show(queue_snapshot.description(arguments.name, queue), arguments)
    return 0


def _info(arguments: argparse.Namespace) -> int:
    from nnfmq.cli import queue_snapshot
    from nnfmq.queue import open_named

    with open_named(arguments.name) as queue:
        description = queue_snapshot.description(arguments.name, queue)
        queue_snapshot.show(description | queue_snapshot.snapshot(queue).as_json(), arguments)
    return 0


def _list(arguments: argparse.Namespace) -> int:
    from nnfmq.cli import queue_snapshot

    queue_snapshot.show_all(arguments)
    return 0


def _remove(arguments: argparse.Namespace) -> int:
    from nnfmq.queue import remove_named

    remove_named(arguments.name)
    return 0


def _write(arguments: argparse.Namespace) -> int:
    from nnfmq.cli import queue_io

    return queue_io.write(arguments)


def _read(arguments: argparse.Namespace) -> int:
    from nnfmq.cli import queue_io

    return queue_io.read(arguments)


def _watch(arguments: argparse.Namespace) -> int:
    from nnfmq.cli import queue_snapshot

    return queue_snapshot.watch(arguments)


def _bench(arguments: argparse.Namespace) -> int:
    from nnfmq.cli import queue_bench

    return queue_bench.bench(arguments)


_ACTIONS = {
    "create": CommandAction(
        "create an empty queue and print its descriptor",
        (
            "nnfmq queue create /frames --record-bytes 64 --count 1024",
            "nnfmq queue create /prices --record-bytes 16 --count 256 --unsynchronized --replace",
        ),
        _for_create,
    ),
    "list": CommandAction(
        "list the queues of this machine that you may open", ("nnfmq queue list", "nnfmq queue list --json"), _json
    ),
    "info": CommandAction(
        "print descriptor, counters and fill, and whether the counters are valid",
        ("nnfmq queue info /frames", "nnfmq queue info /frames --json"),
        _for_info,
    ),
    "write": CommandAction(
        "write records from the command line, a file or stdin",
        ("nnfmq queue write /frames < frames.bin", "nnfmq queue write /frames --hex 0001020304050607 --wait 2"),
        _for_write,
    ),
    "read": CommandAction(
        "read records and print them",
        (
            "nnfmq queue read /frames -n 10 --wait 2",
            "nnfmq queue read /frames --follow --hex",
            "nnfmq queue read /frames --raw > frames.bin",
        ),
        _for_read,
    ),
    "watch": CommandAction(
        "show rate, fill and counters live, without changing anything",
        ("nnfmq queue watch /frames", "nnfmq queue watch /frames --interval 1 --count 10 --json"),
        _for_watch,
    ),
    "bench": CommandAction(
        "measure round trips and throughput between two processes",
        ("nnfmq queue bench", "nnfmq queue bench --record-bytes 1024 --placement same --json"),
        _for_bench,
    ),
    "remove": CommandAction(
        "remove the name; attached programs keep the queue", ("nnfmq queue remove /frames",), _name
    ),
}
_FUNCTIONS = {
    "create": _create,
    "list": _list,
    "info": _info,
    "write": _write,
    "read": _read,
    "watch": _watch,
    "bench": _bench,
    "remove": _remove,
}
