"""The `nnfmq` command: parse, import the one module, call it.

A command is a module here with `EXAMPLES`, `add_arguments(parser)` and `execute(arguments) -> int`. Nothing but the
chosen one is imported, and what is heavy (numpy, rich, Pillow, the client) is imported by the function that needs it.
Data goes to stdout, errors to stderr as one line `nnfmq: error: ...`. Exit status: 0 done, 1 failed, 2 usage, 130
interrupted; a traceback means a bug in nnfmq. `docs/reference/cli/index.md` describes each command.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from nnfmq.hal.errors import NnfmqError

COMMANDS = {
    "demo": "classify handwritten digits in a driver of its own: the first thing to try",
    "run": "run a model on a photo or an array; print the top classes and where the time went",
    "profile": "time each operation of a model, beside what the machine could do; a page with charts",
    "serve": "run the driver in the foreground",
    "devices": "list the devices of the driver",
    "queue": "make, look at and use queues with a name, for programs that trust each other",
    "conformance": "run test models through an engine or a driver; say what did not pass",
    "doctor": "report what this machine offers, what is missing, and the remedy",
}

_EXAMPLES = """\
examples:
  nnfmq demo
  nnfmq run mobilenet.tflite --input photo.jpg --labels labels.txt
  nnfmq serve                        # then, in other terminals, `nnfmq devices`, `nnfmq run` ...

`nnfmq COMMAND --help` describes one command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command of `argv` (default: sys.argv[1:]) and return its exit status; blocks until it is done."""
    try:
        status = _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return _reader_went_away()
    except SystemExit as ended:  # argparse: 0 after --help and --version, 2 after a usage error
        return ended.code if isinstance(ended.code, int) else 1
    except (NnfmqError, OSError) as error:
        return _failed(describe(error))
    except ImportError as error:
        return _failed(_core_problem(error))
    return status


def describe(error: BaseException) -> str:
    """Return the one line that stands for `error`: what the system refused comes with its file's name."""
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
    parser = _new_parser("nnfmq", "Neural networks in a driver process of its own, a few microseconds away.", _EXAMPLES)
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
    """Looks the version up only when asked: importlib.metadata costs more than the rest of the parser."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib import metadata

        try:
            print(f"nnfmq {metadata.version('nnfmq')}")
        except metadata.PackageNotFoundError:
            print("nnfmq, a source tree that is not installed")
        parser.exit()


def _failed(line: str) -> int:
    print(f"nnfmq: error: {line}", file=sys.stderr)
    return 1


def _core_problem(error: ImportError) -> str:
    """Return the line for a core that was demanded and is not there; any other ImportError is a bug and goes on."""
    if os.environ.get("NNFMQ_CORE") and "NNFMQ_CORE" in str(error):
        return describe(error)
    raise error


def _reader_went_away() -> int:
    """Leave stdout on /dev/null, so that the interpreter's last flush does not fail once more."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
    return 1
