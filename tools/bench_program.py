"""What the benchmarks of a driver have in common as programs: options, exit status, and the end of all processes.

Used by isolation_bench.py, memory_bench.py, ray_bench.py and sharing_bench.py. Imports neither NumPy nor more of nnfmq
than errors, because memory_bench.py measures memory.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from process_tree import adopt_orphans, end_descendants, interrupt_on_sigterm

from nnfmq.hal.errors import NnfmqError
from nnfmq.measure.failures import BenchmarkFailed

Report = dict[str, Any]


def positive(text: str) -> int:
    """Return an option's value as an int from 1 on."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return value


def some_of(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """Return the type of an option that lists some of the `known` names, separated by commas."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if not set(names) <= set(known):
            raise argparse.ArgumentTypeError(f"there are {', '.join(known)}")
        return names

    return parse


def parser_for(description: str | None) -> argparse.ArgumentParser:
    """Return a parser without options, whose description is the first paragraph of a module's docstring."""
    return argparse.ArgumentParser(description=(description or "").split("\n\n")[0], allow_abbrev=False)


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the parser, and those that every benchmark has: for targets, and how to print."""
    parser.add_argument("--check-targets", action="store_true", help="exit status 1 if a target is missed")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--no-color", action="store_true")
    return parser.parse_args(argv)


def model_file(options: argparse.Namespace, default: str, what: str) -> Path:
    """Return the path of --model, or of the file `default` in $NNFMQ_DATA; `what` needs it.

    Raises:
        BenchmarkFailed: If there is no such file.
    """
    data = os.environ.get("NNFMQ_DATA")
    path: Path | None = options.model or (Path(data) / default if data else None)
    if path is None or not path.is_file():
        raise BenchmarkFailed(f"{what} needs --model FILE, or $NNFMQ_DATA with the models")
    return path


def run(
    options: argparse.Namespace,
    measure: Callable[[argparse.Namespace, Path], Report],
    show: Callable[[Report, bool], None],
    name: str,
) -> int:
    """Measure and print; return 0 if all was measured, 1 after a failure or a missed target, 130 if interrupted.

    `measure` gets a folder, which is removed when all processes have ended, also after Ctrl-C. `show` gets its report
    and whether to print plain text. `name` is the program's, for errors.
    """
    adopt_orphans()
    interrupt_on_sigterm()
    try:
        # A short name: Ray puts sockets there, and processes that it has started may still write.
        with tempfile.TemporaryDirectory(prefix="nq-", ignore_cleanup_errors=True) as folder:
            try:
                report = measure(options, Path(folder))
            finally:
                end_descendants()
    except (BenchmarkFailed, NnfmqError, OSError) as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        show(report, options.no_color)
    return 1 if options.check_targets and report["missed"] else 0
