"""`nnfmq serve`: run the driver in the foreground until SIGTERM or Ctrl-C.

`nnfmq.driver.process.supervisor` does the work; this command prints the socket's path once clients can connect.
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path

from nnfmq.base import settings
from nnfmq.cli.console import at_least_one, text_of
from nnfmq.cli.service_units import UNITS, unit_text
from nnfmq.hal.errors import InvalidArgument

EXAMPLES = """\
examples:
  nnfmq serve --models ~/models         # NAME/VERSION/model.tflite, by name
  nnfmq serve --user nnfmq --worker-uids 60000-60063 --allow-group video
  nnfmq serve --print-unit service > ~/.config/systemd/user/nnfmq.service

SIGTERM and Ctrl-C let what is in progress end; a second one does not wait.
"""

_OF_RESTART = ("restart", "socket", "no_color")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `serve`."""
    parser.usage = "%(prog)s [options]"  # the generated usage fills half of the screen
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
        help="offer only these extensions ($NNFMQ_EXTENSIONS)",
    )
    parser.add_argument(
        "--runtimes",
        metavar="NAME",
        nargs="*",
        choices=settings.HOSTED,
        help="host only these runtimes ($NNFMQ_RUNTIMES)",
    )
    parser.add_argument(
        "--devices",
        metavar="FILE",
        type=Path,
        help="TOML file that lists the devices ($NNFMQ_DEVICES)",
    )
    parser.add_argument(
        "--memory",
        metavar="MIB",
        type=at_least_one,
        help="what all clients may take ($NNFMQ_MEMORY_MIB)",
    )
    parser.add_argument(
        "--sandbox",
        choices=settings.SANDBOX.type.allowed.split(", "),
        metavar="MODE",
        help=f"of workers: {settings.SANDBOX.type.allowed} ($NNFMQ_SANDBOX)",
    )
    parser.add_argument(
        "--worker-start",
        choices=settings.WORKER_START.type.allowed.split(", "),
        metavar="HOW",
        help=f"start workers by {settings.WORKER_START.type.allowed.replace(', ', ' or ')} ($NNFMQ_WORKER_START)",
    )
    _add_user_arguments(parser)
    _add_process_arguments(parser)


def _add_user_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of a driver for several users."""
    parser.add_argument(
        "--user",
        metavar="NAME",
        help="account to change to, if root starts it ($NNFMQ_USER)",
    )
    parser.add_argument(
        "--worker-uids",
        metavar="N-M",
        type=text_of(settings.WORKER_UIDS),
        help="to serve several users ($NNFMQ_WORKER_UIDS)",
    )
    parser.add_argument(
        "--allow-user",
        metavar="NAME",
        nargs="*",
        help="serve these users, too; '*': all ($NNFMQ_ALLOW_USERS)",
    )
    parser.add_argument(
        "--allow-group",
        metavar="NAME",
        nargs="*",
        help="serve members of these groups ($NNFMQ_ALLOW_GROUPS)",
    )


def _add_process_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the process: its log, its beginning, its end."""
    parser.add_argument(
        "--log-level",
        metavar="LEVEL",
        type=text_of(settings.LOG_LEVEL),
        help="debug, info, warning, error ($NNFMQ_LOG_LEVEL)",
    )
    parser.add_argument(
        "--log-format",
        choices=settings.LOG_FORMAT.type.allowed.split(", "),
        metavar="FORMAT",
        help="text or json ($NNFMQ_LOG_FORMAT)",
    )
    parser.add_argument(
        "--replace",
        action="store_true",
        help="take the place of the driver that listens there",
    )
    parser.add_argument(
        "--restart",
        action="store_true",
        help="let it start its own successor, and wait for that",
    )
    parser.add_argument(
        "--print-unit",
        metavar="UNIT",
        choices=UNITS,
        help=f"print a unit of systemd and exit: {' or '.join(UNITS)}",
    )
    parser.add_argument(
        "--exit-with",
        metavar="PID",
        type=at_least_one,
        help="exit when the parent process PID has exited",
    )
    parser.add_argument(
        "--allow-device-status",
        action="store_true",
        help="let clients set devices to BUSY or OFFLINE for all",
    )


def execute(arguments: argparse.Namespace) -> int:
    """Serve until a signal arrives; return the exit status."""
    if arguments.print_unit is not None:
        print(unit_text(arguments.print_unit, arguments), end="")
        return 0
    if arguments.restart:
        return _restart(arguments)
    from nnfmq.base import logs
    from nnfmq.base.processes import environment, set_name, use_one_blas_thread
    from nnfmq.base.upgrades import watch_package

    started_in = environment()
    set_name("nnfmq-driver")
    watch_package()
    _export_log_settings(arguments.log_level, arguments.log_format)
    logs.configure()
    use_one_blas_thread()  # the supervisor forks, and a process with threads does not
    gc.disable()  # until workers can be forked: collections take a tenth of the imports' time, and find nothing
    try:
        from nnfmq.driver.process.restart import SuccessorCommand
        from nnfmq.driver.process.supervisor import UserOptions, serve

        return serve(
            arguments.socket,
            extensions=arguments.extensions,
            runtimes=arguments.runtimes,
            devices=arguments.devices,
            allow_device_status=arguments.allow_device_status,
            memory_mib=arguments.memory,
            models=arguments.models,
            sandbox=arguments.sandbox,
            worker_start=arguments.worker_start,
            replace=arguments.replace,
            users=UserOptions(arguments.user, arguments.worker_uids, arguments.allow_user, arguments.allow_group),
            parent=arguments.exit_with,
            command=SuccessorCommand(sys.argv[1:], started_in),
            ready=_announce,
        )
    finally:
        gc.enable()


def _restart(arguments: argparse.Namespace) -> int:
    """Let the running driver start its successor, and return the exit status when that listens."""
    from nnfmq.base.paths import client_socket
    from nnfmq.driver.process.restart import request_restart

    others = [name for name, value in vars(arguments).items() if value not in (None, False) and name not in _OF_RESTART]
    if others:
        raise InvalidArgument(
            f"--restart starts the driver with the options that it has: leave out --{others[0].replace('_', '-')}, or "
            "start a driver with other options and --replace"
        )
    settings.check_all()  # the driver would say it in its log only
    path = arguments.socket or client_socket()
    print(f"nnfmq: process {request_restart(path)} listens on {path}")
    return 0


def _export_log_settings(level: str | None, form: str | None) -> None:
    """Set the settings of this process and of its children."""
    if level is not None:
        settings.LOG_LEVEL.export(level)
    if form is not None:
        settings.LOG_FORMAT.export(form)


def _announce(path: Path) -> None:
    print(f"nnfmq: listening on {path}", flush=True)
