"""`nnfmq serve`: run the driver in the foreground until SIGTERM or Ctrl-C.

`nnfmq.driver.process.supervisor` does the work; this command prints the socket's path once clients can connect.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from nnfmq.cli.console import at_least_one

EXAMPLES = """\
examples:
  nnfmq serve                             # at the path that clients use by default
  nnfmq serve --socket /run/user/1000/nnfmq/lab.sock
  nnfmq serve --runtimes onnxruntime      # and no other runtime, whatever is installed
  nnfmq serve --models ~/models           # serve ~/models/NAME/VERSION/model.tflite by name

Exit status 0 after SIGTERM or Ctrl-C; every client then gets DeadObject.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `serve`."""
    parser.add_argument(
        "--socket",
        metavar="PATH",
        type=Path,
        help="path of the socket (default: $NNFMQ_SOCKET)",
    )
    parser.add_argument(
        "--models",
        metavar="DIR",
        type=Path,
        help="serve its models by name (default: $NNFMQ_MODELS)",
    )
    parser.add_argument(
        "--extensions",
        metavar="NAME",
        nargs="*",
        help="offer only these extensions, or none (default: $NNFMQ_EXTENSIONS, or all)",
    )
    parser.add_argument(
        "--runtimes",
        metavar="NAME",
        nargs="*",
        help="host only these runtimes, or none (default: $NNFMQ_RUNTIMES, or all)",
    )
    parser.add_argument(
        "--devices",
        metavar="FILE",
        type=Path,
        help="TOML file that lists the devices to offer (default: $NNFMQ_DEVICES, or the packaged one)",
    )
    parser.add_argument(
        "--memory",
        metavar="MIB",
        type=at_least_one,
        help="what all clients together may take; one may take half of it, see $NNFMQ_CLIENT_MEMORY_MIB (default: "
        "$NNFMQ_MEMORY_MIB, or a quarter of the machine's)",
    )
    parser.add_argument(
        "--exit-with",
        metavar="PID",
        type=at_least_one,
        help="exit as soon as the process PID, the parent of this one, has exited",
    )
    parser.add_argument(
        "--allow-device-status",
        action="store_true",
        help="let clients set devices to BUSY or OFFLINE for all others (`nnfmq devices --set`)",
    )


def execute(arguments: argparse.Namespace) -> int:
    """Serve until a signal arrives; return the exit status."""
    from nnfmq.base.processes import use_one_blas_thread

    use_one_blas_thread()  # the supervisor forks, and a process with threads does not
    from nnfmq.driver.process.supervisor import serve

    return serve(
        arguments.socket,
        extensions=arguments.extensions,
        runtimes=arguments.runtimes,
        devices=arguments.devices,
        allow_device_status=arguments.allow_device_status,
        memory_mib=arguments.memory,
        models=arguments.models,
        parent=arguments.exit_with,
        ready=_announce,
    )


def _announce(path: Path) -> None:
    print(f"nnfmq: listening on {path}", flush=True)
