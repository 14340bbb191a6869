"""What the commands share: the connection option, the console, JSON, and latency figures.

Times stay in nanoseconds until they are printed. Percentiles are nearest-rank: each is a value that was measured,
never one between two.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from nnfmq.runtime.client import Client

_WIDTH_IN_A_FILE = 100
_PATIENCE_S = 0.3  # which nobody needs to be told
PERCENTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "p99.9": 99.9, "max": 100.0}


def add_connect_argument(parser: argparse.ArgumentParser) -> None:
    """Add --connect: which driver to talk to."""
    parser.add_argument(
        "--connect",
        metavar="PATH|embedded",
        help="the socket of a driver, or `embedded` for a private one (default: a running driver, else embedded)",
    )


def new_file(text: str) -> Path:
    """Return the path that an argument gives, to which a file can be written later; argparse names the option."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}; make it first")
    return path


def at_least_one(text: str) -> int:
    """Return the count that an argument gives; argparse names the option."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return value


def from_zero(text: str) -> int:
    """Return the number from 0 up that an argument gives; argparse names the option."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("at least 0")
    return value


def open_client(target: str | None) -> Client:
    """Connect to `target` as --connect gives it; the caller closes the client. Blocks at most connect's own limit."""
    import nnfmq

    if target == "embedded":
        return nnfmq.connect(embedded=True)
    return nnfmq.connect(target)


def console(no_color: bool, at_least: int = 0) -> Console:
    """Return a console on stdout, `at_least` so many columns wide (100 where stdout is no terminal).

    A character that stdout's encoding lacks is replaced, never an error.
    """
    from rich.console import Console

    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
    screen = Console(no_color=no_color or None, highlight=False, emoji=False, markup=False)
    if not screen.is_terminal and "COLUMNS" not in os.environ:
        at_least = max(at_least, _WIDTH_IN_A_FILE)
    screen.width = max(screen.width, at_least)
    return screen


@contextmanager
def compiling(no_color: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Lend what `Device.prepare` tells its progress: a bar on stderr, after a while; None where it is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    bars: list[Progress] = []
    begin = time.monotonic()

    def show(done: int, total: int) -> None:
        if not bars and time.monotonic() - begin >= _PATIENCE_S:
            bars.append(stack.enter_context(_bar(no_color)))
        for bar in bars:
            bar.update(bar.task_ids[0], completed=done, total=total, refresh=True)

    with ExitStack() as stack:
        yield show


def _bar(no_color: bool) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    screen = Console(stderr=True, no_color=no_color or None, highlight=False, emoji=False, markup=False)
    columns = TextColumn("compiling"), BarColumn(), MofNCompleteColumn()
    bar = Progress(*columns, console=screen, auto_refresh=False, transient=True)
    bar.add_task("")
    return bar


def table(*headings: str, title: str | None = None) -> Table:
    """Return an empty table; a heading that begins with `>` is a column of figures, aligned to the right."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE, title=title, title_justify="left", pad_edge=False)
    for heading in headings:
        figures = heading.startswith(">")
        made.add_column(heading.lstrip(">"), justify="right" if figures else "left", no_wrap=figures, overflow="fold")
    return made


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object on stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def percentile(ordered: Sequence[int], percent: float) -> int:
    """Return the nearest-rank percentile of `ordered`, which is sorted and not empty."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100.0) - 1)]


def distribution(samples: Iterable[int]) -> dict[str, int]:
    """Return p50, p90, p99, p99.9 and max of `samples` (at least one), in their own unit."""
    ordered = sorted(samples)
    return {name: percentile(ordered, percent) for name, percent in PERCENTILES.items()}


def microseconds(duration_ns: int) -> str:
    """Return a duration in µs for a table; `-` where it was not measured."""
    return "-" if duration_ns < 0 else f"{duration_ns / 1000:,.1f}"


def shape_text(shape: Iterable[int]) -> str:
    """Return a shape as 1x224x224x3; `scalar` for none."""
    return "x".join(map(str, shape)) or "scalar"
