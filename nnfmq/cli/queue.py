"""`nnfmq queue`: queues with a name, for foreign programs: make, list, look at, write, read, watch, measure, remove.

What the actions do lies in modules of their own (`queue_look`, `queue_records`, `queue_watch`, `queue_bench`), imported
when asked for; here are their options, and the actions that are a line or two. Errors and exit status are those of
every command; an action that moved nothing ends with status 1.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

EXAMPLES = """\
examples:
  nnfmq queue create /frames --record-bytes 64 --count 1024
  nnfmq queue write /frames < frames.bin      # in another terminal:
  nnfmq queue read /frames --follow --hex
  nnfmq queue watch /frames
  nnfmq queue remove /frames

Only for programs that trust each other: whoever may open the memory can make the
others die (SIGBUS), and a name stays until it is removed. docs/c has a C header.
`nnfmq queue ACTION --help` describes one action.
"""

Action = Callable[[argparse.ArgumentParser], None]


class _Intermixed(argparse.ArgumentParser):
    """Takes options between the words as well: in `write NAME --hex DATA` argparse itself would not see DATA."""

    _is_inside = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._is_inside:  # the way back from below, on some versions of Python
            return super().parse_known_args(args, namespace)
        self._is_inside = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._is_inside = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions of `queue`, and their options."""
    actions = parser.add_subparsers(
        title="actions", dest="action", metavar="ACTION", required=True, parser_class=_Intermixed
    )
    for name, (summary, declare, execute_action) in _ACTIONS.items():
        made = actions.add_parser(
            name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", allow_abbrev=False
        )
        made.add_argument("--no-color", action="store_true", default=argparse.SUPPRESS, help="plain text")
        declare(made)
        made.set_defaults(execute_action=execute_action)


def execute(arguments: argparse.Namespace) -> int:
    """Do one action."""
    status: int = arguments.execute_action(arguments)
    return status


# ---- options ----


def _name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="a slash and a word, as in /frames")


def _json(parser: argparse.ArgumentParser, what: str = "print JSON") -> None:
    parser.add_argument("--json", action="store_true", help=what)


def _for_create(parser: argparse.ArgumentParser) -> None:
    _name(parser)
    parser.add_argument("--record-bytes", metavar="N", type=int, required=True, help="size of each record")
    parser.add_argument("--count", metavar="N", type=int, required=True, help="how many records the ring holds")
    parser.add_argument(
        "--unsynchronized", action="store_true", help="many readers; a full ring is overwritten, nobody waits"
    )
    parser.add_argument("--replace", action="store_true", help="remove what has this name; its users keep the old one")
    _json(parser)


def _for_info(parser: argparse.ArgumentParser) -> None:
    _name(parser)
    _json(parser)


def _for_write(parser: argparse.ArgumentParser) -> None:
    _name(parser)
    parser.add_argument("data", metavar="DATA", nargs="*", help="the bytes of whole records (default: stdin)")
    parser.add_argument("--file", metavar="F", help="the bytes are in this file")
    parser.add_argument("--hex", action="store_true", help="DATA, file or stdin are hexadecimal digits")
    _waiting(parser, "for room (default: without limit)")


def _for_read(parser: argparse.ArgumentParser) -> None:
    _name(parser)
    parser.add_argument("-n", metavar="N", dest="records", type=_positive, default=1, help="how many records (1)")
    parser.add_argument("--follow", action="store_true", help="go on until Ctrl-C, or until --wait has passed")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--hex", action="store_true", help="one record a line (default on a terminal)")
    form.add_argument("--raw", action="store_true", help="the bytes as they are (default elsewhere)")
    _waiting(parser, "for a record (default: without limit)")


def _for_watch(parser: argparse.ArgumentParser) -> None:
    _name(parser)
    parser.add_argument("--interval", metavar="S", type=_seconds, default=0.5, help="seconds between looks (0.5)")
    parser.add_argument("--count", metavar="N", type=_positive, help="end after N looks (default: Ctrl-C)")
    _json(parser, "print each look as a line of JSON")


def _for_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", nargs="?", help="the two queues are NAME-requests and NAME-results")
    parser.add_argument("--record-bytes", metavar="N", type=_positive, default=64, help="size of a message (64)")
    parser.add_argument("--round-trips", metavar="N", type=_positive, default=20_000, help="there and back (20000)")
    parser.add_argument("--messages", metavar="N", type=_positive, default=200_000, help="in one direction (200000)")
    parser.add_argument("--window", metavar="US", type=float, default=50.0, help="µs of polling before sleeping (50)")
    parser.add_argument(
        "--placement", choices=("apart", "same", "free"), default="apart",
        help="the two processes have a core each (default), share one, or run where the kernel likes",
    )  # fmt: skip
    _json(parser)


def _waiting(parser: argparse.ArgumentParser, what: str) -> None:
    limit = parser.add_mutually_exclusive_group()
    limit.add_argument("--wait", metavar="S", type=_seconds, help=f"wait at most S seconds {what}")
    limit.add_argument("--no-wait", dest="wait", action="store_const", const=0.0, help="try once")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: must be 1 or more")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text}: must be seconds, 0 or more")
    return value


# ---- actions ----


def _create(arguments: argparse.Namespace) -> int:
    from nnfmq.cli import queue_snapshot
    from nnfmq.posix_shm import names
    from nnfmq.queue import SYNCHRONIZED, UNSYNCHRONIZED, create_named, remove_named

    flavor = UNSYNCHRONIZED if arguments.unsynchronized else SYNCHRONIZED
    if arguments.replace and arguments.name in names():  # also what a creator left half-made
        remove_named(arguments.name)
    with create_named(arguments.name, arguments.record_bytes, arguments.count, flavor=flavor) as queue:
        queue_snapshot.show(queue_snapshot.description(arguments.name, queue), arguments)
    return 0


def _info(arguments: argparse.Namespace) -> int:
    from nnfmq.cli import queue_snapshot
    from nnfmq.queue import open_named

    with open_named(arguments.name) as queue:
        described = queue_snapshot.description(arguments.name, queue)
        queue_snapshot.show(described | queue_snapshot.look(queue).as_json(), arguments)
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
    from nnfmq.cli import queue_watch

    return queue_watch.watch(arguments)


def _bench(arguments: argparse.Namespace) -> int:
    from nnfmq.cli import queue_bench

    return queue_bench.bench(arguments)


_ACTIONS: dict[str, tuple[str, Action, Callable[[argparse.Namespace], int]]] = {
    "create": ("make an empty queue and print its descriptor", _for_create, _create),
    "list": ("name the queues of this machine that you may open", _json, _list),
    "info": ("print descriptor, counters, fill, and whether they are possible", _for_info, _info),
    "write": ("write records from the command line, a file or stdin", _for_write, _write),
    "read": ("take records and print them", _for_read, _read),
    "watch": ("show rate, fill and counters live, without disturbing", _for_watch, _watch),
    "bench": ("measure round trips and a stream between two processes", _for_bench, _bench),
    "remove": ("remove the name; who uses the queue keeps it", _name, _remove),
}
