"""`nnfmq record`: run a command, and write the executions of its processes to a file.

The recorder is part of the client library (`nnfmq.recording.writer`); this command sets its environment variables,
passes signals on, and reports on stderr what was recorded. stdin, stdout and stderr remain the command's.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from nnfmq.base import settings
from nnfmq.cli.console import new_file
from nnfmq.hal.errors import InvalidArgument

if TYPE_CHECKING:
    from nnfmq.recording.reader import RecordingFile

EXAMPLES = """\
examples:
  nnfmq record -o calls.nnrec -- python app.py --camera 0
  nnfmq record -o calls.nnrec --limit-bytes 100000000 -- python app.py
  nnfmq record -o times.nnrec --no-tensors -- ./start.sh
  nnfmq replay calls.nnrec --device reference

Exit status: that of COMMAND; 128 + N if signal N ended it; 126 or 127 if it
cannot be run; 2 wrong usage.

An application can record itself: set $NNFMQ_RECORD=FILE before it prepares its
first model.
"""

_NOT_FOUND, _NOT_EXECUTABLE = 127, 126  # as in shells


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `record`."""
    parser.usage = "%(prog)s [options] -o FILE -- COMMAND ..."
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=new_file, required=True,
        help="the recording; an earlier one is replaced. Further processes of COMMAND get FILE.PID",
    )  # fmt: skip
    parser.add_argument(
        "--limit-bytes", metavar="N", type=_limit, help="size that a file does not exceed (default: no limit)"
    )
    parser.add_argument("--no-tensors", action="store_true", help="record models and times, without inputs and outputs")
    parser.add_argument("command", metavar="COMMAND", nargs=argparse.REMAINDER, help="the application, after `--`")


def _limit(text: str) -> int:
    """Argparse type: a number of bytes of at least 4096."""
    if not text.isdecimal() or int(text[:19]) < 4096:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes of at least 4096")
    return int(text[:19])


def execute(arguments: argparse.Namespace) -> int:
    """Run the command with a recorder, report, and return the command's exit status."""
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        print("nnfmq: error: there is no COMMAND: nnfmq record -o FILE -- COMMAND ...", file=sys.stderr)
        return 2
    path = arguments.output.absolute()
    _remove_earlier(path)
    before = set(_further_files(path))
    try:
        process = start(command, _environment(arguments, path))
    except CommandNotFound as error:
        return error.report()
    with process, signals_passed_to(process):
        status = exit_status(process.wait())
    report_recordings([path, *sorted(set(_further_files(path)) - before)])
    return status


def _remove_earlier(path: Path) -> None:
    """Remove an earlier recording. Raises InvalidArgument if there is another file of that name."""
    from nnfmq.recording.format import is_recording

    if not path.exists() and not path.is_symlink():
        return
    if not path.is_file() or not is_recording(path):
        raise InvalidArgument(f"{path} exists, and is no recording: give another FILE, or remove it first")
    path.unlink()


def _environment(arguments: argparse.Namespace, path: Path) -> dict[str, str]:
    variables = {
        settings.RECORD.variable: str(path),
        settings.RECORD_TENSORS.variable: "0" if arguments.no_tensors else "1",
        settings.RECORD_LIMIT_BYTES.variable: "" if arguments.limit_bytes is None else str(arguments.limit_bytes),
    }
    return os.environ | variables


def _further_files(path: Path) -> Iterator[Path]:
    """Yield the recordings of further processes: FILE.PID."""
    prefix = f"{path.name}."
    for entry in path.parent.iterdir():
        if entry.name.startswith(prefix) and entry.name.removeprefix(prefix).isdecimal():
            yield entry


class CommandNotFound(Exception):
    """An application cannot be started."""

    def report(self) -> int:
        """Print why, and return the exit status that a shell has then."""
        print(f"nnfmq: error: {self}", file=sys.stderr)
        return _NOT_FOUND if isinstance(self.__cause__, FileNotFoundError) else _NOT_EXECUTABLE


def start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start an application. Raises CommandNotFound."""
    try:
        return subprocess.Popen(command, env=environment)
    except OSError as error:
        raise CommandNotFound(f"{command[0]} cannot be run: {error.strerror}") from error


@contextmanager
def signals_passed_to(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Pass SIGTERM on to an application; ignore SIGINT, which a terminal sends to it as well."""
    terminate = signal.signal(signal.SIGTERM, lambda number, _frame: process.send_signal(number))
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, terminate)
        signal.signal(signal.SIGINT, interrupt)


def exit_status(returncode: int) -> int:
    """Return an application's exit status as a shell has it: 128 + n if signal n ended it."""
    return returncode if returncode >= 0 else 128 - returncode


def report_recordings(paths: list[Path]) -> None:
    """Print a line about each recording on stderr."""
    from nnfmq.recording.reader import RecordingFile

    if not paths[0].exists():
        print("nnfmq: nothing was recorded: the command prepared no model with nnfmq", file=sys.stderr)
        return
    for path in paths:
        with RecordingFile(path) as recording:
            models, executions = len(recording.models), len(recording.executions)
            text = f"{executions} execution{'s' * (executions != 1)} of {models} model{'s' * (models != 1)}"
            print(f"nnfmq: recorded {text} in {path} ({path.stat().st_size:,} bytes)", file=sys.stderr)
            _report_losses(recording)


def _report_losses(recording: RecordingFile) -> None:
    end = recording.end
    if end is None:
        print("nnfmq: the application did not end orderly; its last executions may be missing", file=sys.stderr)
        return
    if end.dropped:
        print(f"nnfmq: {end.dropped} executions were dropped: they came faster than the disk", file=sys.stderr)
    if end.beyond_limit:
        print(f"nnfmq: {end.beyond_limit} executions are not recorded: the file was full", file=sys.stderr)
