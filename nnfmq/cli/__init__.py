"""The `nnfmq` command: parse the arguments, import the module of the command, call it.

A command is a module of this package with `EXAMPLES`, `add_arguments(parser)` and `execute(arguments) -> int`. Only
the chosen one is imported, and functions import heavy packages (numpy, rich, Pillow, the client) when they need them,
so that `--help` is fast. Data goes to stdout, errors to stderr as one line `nnfmq: error: ...`, which a table follows
if a model has several problems. `EXIT_STATUSES` lists the exit statuses. A traceback is a bug of nnfmq.

Completion scripts, man pages and the site are generated from the parsers (`command_tree`). `parser.add_actions`
declares the actions of a command; the metavar of a value decides how it is completed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn

from nnfmq.base import settings
from nnfmq.base.packages import installed_version
from nnfmq.cli.parser import NO_COLOR, ArgumentParser, HelpFormatter, sentence
from nnfmq.hal.errors import NnfmqError, UnsupportedModel

COMMANDS = {
    "demo": "classify handwritten digits in a private driver",
    "run": "run a model on a photo or an array; print classes and times",
    "model": "look at a model, draw it, validate it by the HAL's rules",
    "bench": "measure latency under load, beside other runtimes",
    "stress": "name the causes of the worst latencies beside other load",
    "profile": "time each operation of a model beside the machine's peak",
    "trace": "record an application and its driver on one clock",
    "why": "explain the slowest requests of a trace",
    "record": "run an application and write its executions to a file",
    "replay": "run recorded executions again and compare them",
    "serve": "run the driver in the foreground",
    "gateway": "serve a driver's models to other machines: HTTP and gRPC",
    "status": "show a running driver: clients, models, memory, caches",
    "client": "list the clients of a running driver; change their classes",
    "top": "watch the clients, models and bursts of a running driver",
    "metrics": "offer a running driver's statistics to Prometheus",
    "devices": "list the devices of the driver",
    "queue": "create, inspect and use named queues between programs",
    "conformance": "run test models through an engine or a driver",
    "mlts": "measure real models beside LiteRT; test for crashes",
    "doctor": "check this installation and machine; name remedies",
    "config": "show the settings: values, sources and meaning",
    "completion": "print a script that completes nnfmq's words in a shell",
}
"""Command → summary. A summary fits a line of `nnfmq --help`."""

EXIT_STATUSES = {
    0: "success",
    1: "failure; a line on stderr has the reason",
    2: "wrong usage",
    130: "interrupted by Ctrl-C",
}

_EXAMPLES = """\
examples:
  nnfmq run mobilenet.tflite --input photo.jpg     # nnfmq run --help
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (default: sys.argv[1:]) and return its exit status. Blocks until it ends."""
    try:
        status = _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return _stdout_closed()
    except SystemExit as ended:  # argparse: 0 after --help and --version, 2 after a usage error
        return ended.code if isinstance(ended.code, int) else 1
    except UnsupportedModel as error:
        return _unsupported(error)
    except (NnfmqError, OSError) as error:
        return _failed(describe(error))
    except ImportError as error:
        return _failed(_core_problem(error))
    return status


def describe(error: BaseException) -> str:
    """Return `error` as one line; an OSError comes with its file name."""
    if isinstance(error, OSError) and not isinstance(error, NnfmqError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__


def _dispatch(arguments: list[str]) -> int:
    position = _command_position(arguments)
    before = main_parser().parse_args(arguments[: position + 1])
    parser = command_parser(before.command)
    parser.set_defaults(no_color=before.no_color)
    command = importlib.import_module(f"nnfmq.cli.{before.command}")
    with _configured(before.config):
        parsed = parser.parse_args(arguments[position + 1 :])
        with _asking_for(getattr(parsed, "client_class", None)):
            status: int = command.execute(parsed)
    return status


def _command_position(arguments: Sequence[str]) -> int:
    """Return the index of the first word that is neither an option nor the value of --config."""
    position = 0
    while position < len(arguments) and arguments[position].startswith("-"):
        position += 2 if arguments[position] == "--config" else 1
    return position


def _configured(path: str | None) -> AbstractContextManager[None]:
    """Use the configuration file `path`, also in child processes, until the context exits."""
    return nullcontext() if path is None else settings.CONFIG.exported(os.path.abspath(path))


def _asking_for(client_class: str | None) -> AbstractContextManager[None]:
    """Ask drivers for this class, also in child processes, until the context exits."""
    return nullcontext() if client_class is None else settings.CLIENT_CLASS.exported(client_class)


def command_parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of one command of `COMMANDS`. Imports the command's module, and nothing heavy."""
    command = importlib.import_module(f"nnfmq.cli.{name}")
    parser = _new_parser(f"nnfmq {name}", sentence(COMMANDS[name]), command.EXAMPLES)
    command.add_arguments(parser)
    return parser


def main_parser() -> argparse.ArgumentParser:
    """Return the parser of the words up to the command."""
    statuses = ", ".join(f"{status} {text.split(';')[0]}" for status, text in EXIT_STATUSES.items())
    description = "Run neural networks in a driver process, a few microseconds away."
    parser = _new_parser("nnfmq", description, f"{_EXAMPLES}exit status: {statuses}")
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"{name:{width}}  {summary}" for name, summary in COMMANDS.items())
    parser.add_argument("-V", "--version", action=_PrintVersion, nargs=0, help="print the version and exit")
    parser.add_argument("--config", metavar="FILE", help="read this configuration file only, also by $NNFMQ_CONFIG")
    parser.usage = "nnfmq [-h] [-V] [--no-color] [--config FILE] COMMAND ..."
    commands = parser.add_argument_group("commands", listing)
    commands.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    return parser


def _new_parser(prog: str, description: str, examples: str) -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog=prog,
        description=description,
        epilog=examples,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--no-color", action="store_true", help=NO_COLOR)
    return parser


class _PrintVersion(argparse.Action):
    """Prints the version. It is looked up only now, because that costs more than the rest of the parser."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        print(f"nnfmq {installed_version('nnfmq') or '(source tree, not installed)'}")
        parser.exit()


def _failed(line: str) -> int:
    print(f"nnfmq: error: {line}", file=sys.stderr)
    return 1


def _unsupported(error: UnsupportedModel) -> int:
    """Print the first line of a model's problems; if there are more, a table of all; and how to run the model."""
    first, *more = str(error).removesuffix(error.advice).splitlines()
    _failed(first)
    if more:
        _print_problems(error)
    for line in error.advice.splitlines():
        print(f"nnfmq: {line}", file=sys.stderr)
    return 1


def _print_problems(error: UnsupportedModel) -> None:
    """Print on stderr a row for each group of equal problems."""
    from nnfmq.cli.console import error_console, table
    from nnfmq.importers.loaded_model import grouped

    rows = table("operator", ">count", "indexes", "types", "reason")
    for group in grouped(error.problems):
        name, types = group.problem.operator or "(whole model)", group.problem.types
        rows.add_row(name, str(len(group.indexes)), group.operators, types, group.reason)
    error_console().print(rows)


def _core_problem(error: ImportError) -> str:
    """Return the error line if the setting names a core that is not available; re-raise any other error, a bug."""
    if settings.CORE.value() and settings.CORE.variable in str(error):
        return describe(error)
    raise error


def _stdout_closed() -> int:
    """Point stdout at /dev/null, so that the interpreter's flush at exit does not fail again; return the status."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
    return 1
