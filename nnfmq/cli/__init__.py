"""The `nnfmq` command: parse the arguments, import the module of the command, call it.

A command is a module of this package with `EXAMPLES`, `add_arguments(parser)` and `execute(arguments) -> int`. Only
the chosen one is imported, and functions import heavy packages (numpy, rich, Pillow, the client) when they need them,
so that `--help` is fast. Data goes to stdout, errors to stderr as one line `nnfmq: error: ...`, which a table follows
if a model has several problems. Exit status: 0 success, 1 failure, 2 wrong usage, 130 interrupted. A traceback is a bug
of nnfmq.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from nnfmq.hal.errors import NnfmqError, UnsupportedModel

COMMANDS = {
    "demo": "classify handwritten digits in a private driver; a first test of an installation",
    "run": "run a model on a photo or an array; print the top classes and the time of each stage",
    "profile": "time each operation of a model and compare it with the machine's peak; optionally as an HTML page",
    "record": "run an application and write its executions to a file",
    "replay": "run recorded executions again; compare outputs and latencies",
    "serve": "run the driver in the foreground",
    "devices": "list the devices of the driver",
    "queue": "create, inspect and use named queues, for programs that trust each other",
    "conformance": "run test models through an engine or a driver; report failures",
    "mlts": "measure accuracy and latency of real models; test whether clients can crash the driver",
    "doctor": "check this installation and machine; report what is missing and how to get it",
}

_EXAMPLES = """\
examples:
  nnfmq demo
  nnfmq run mobilenet.tflite --input photo.jpg --labels labels.txt
  nnfmq serve                        # then, in other terminals, `nnfmq devices`, `nnfmq run` ...

`nnfmq COMMAND --help` describes one command.
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
    position = next((index for index, word in enumerate(arguments) if not word.startswith("-")), len(arguments))
    before = _parser().parse_args(arguments[: position + 1])
    parser = command_parser(before.command)
    parser.set_defaults(no_color=before.no_color)
    command = importlib.import_module(f"nnfmq.cli.{before.command}")
    status: int = command.execute(parser.parse_args(arguments[position + 1 :]))
    return status


def command_parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of one command of `COMMANDS`. Imports the command's module."""
    command = importlib.import_module(f"nnfmq.cli.{name}")
    parser = _new_parser(f"nnfmq {name}", _sentence(COMMANDS[name]), command.EXAMPLES)
    command.add_arguments(parser)
    return parser


def _parser() -> argparse.ArgumentParser:
    parser = _new_parser("nnfmq", "Run neural networks in a driver process, a few microseconds away.", _EXAMPLES)
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"{name:{width}}  {summary}" for name, summary in COMMANDS.items())
    parser.add_argument("-V", "--version", action=_PrintVersion, nargs=0, help="print the version and exit")
    parser.usage = "nnfmq [-h] [-V] [--no-color] COMMAND ..."
    commands = parser.add_argument_group("commands", listing)
    commands.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    return parser


def _new_parser(prog: str, description: str, examples: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--no-color", action="store_true", help="plain text, also by $NO_COLOR")
    return parser


def _sentence(summary: str) -> str:
    return f"{summary[0].upper()}{summary[1:]}."


class _PrintVersion(argparse.Action):
    """Prints the version. It is looked up only now: importlib.metadata costs more than the rest of the parser."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib import metadata

        try:
            print(f"nnfmq {metadata.version('nnfmq')}")
        except metadata.PackageNotFoundError:
            print("nnfmq (source tree, not installed)")
        parser.exit()


def _failed(line: str) -> int:
    print(f"nnfmq: error: {line}", file=sys.stderr)
    return 1


def _unsupported(error: UnsupportedModel) -> int:
    """Print the first line of a model's problems and, if there are more, a table of all."""
    first, *more = str(error).splitlines()
    _failed(first)
    if more:
        from nnfmq.cli.problems_table import print_problems

        print_problems(error)
    return 1


def _core_problem(error: ImportError) -> str:
    """Return the error line if $NNFMQ_CORE names a core that is not available; re-raise any other error, a bug."""
    if os.environ.get("NNFMQ_CORE") and "NNFMQ_CORE" in str(error):
        return describe(error)
    raise error


def _stdout_closed() -> int:
    """Point stdout at /dev/null, so that the interpreter's flush at exit does not fail again; return the status."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
    return 1
