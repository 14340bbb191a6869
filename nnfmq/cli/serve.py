"""`nnfmq serve`: the driver in the foreground, until SIGTERM or Ctrl-C.

Everything happens in `nnfmq.service.supervisor`; this prints where it listens, when clients can connect.
"""

from __future__ import annotations

import argparse
from pathlib import Path

EXAMPLES = """\
examples:
  nnfmq serve                             # where clients look by default
  nnfmq serve --socket /run/user/1000/nnfmq/lab.sock
  nnfmq serve --extensions com.example.fibonacci

Ends with status 0 after SIGTERM or Ctrl-C; every client then gets DEAD_OBJECT.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `serve`."""
    parser.add_argument("--socket", metavar="PATH", type=Path, help="where to listen (default: the runtime directory)")
    parser.add_argument(
        "--extensions",
        metavar="NAME",
        nargs="*",
        help="offer these extensions alone, or none without a NAME (default: $NNFMQ_EXTENSIONS, or all installed)",
    )
    parser.add_argument(
        "--devices", metavar="FILE", type=Path, help="the devices to offer (default: $NNFMQ_DEVICES, or nnfmq's own)"
    )


def execute(arguments: argparse.Namespace) -> int:
    """Serve until a signal ends it."""
    from nnfmq.service.supervisor import serve

    return serve(arguments.socket, extensions=arguments.extensions, devices=arguments.devices, ready=_announce)


def _announce(path: Path) -> None:
    print(f"nnfmq: listening on {path}", flush=True)
