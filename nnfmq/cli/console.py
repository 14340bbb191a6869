"""Shared by the commands: argument types, the `--connect` option, the console, JSON output.

Times are integer nanoseconds until they are printed.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nnfmq.base.settings import CLASSES, COMPILE_NOTICE, Setting

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress, ProgressColumn
    from rich.table import Table

    from nnfmq.client.connection.client import Client
    from nnfmq.client.partitioned.runtime import Runtime

_WIDTH_IN_A_FILE = 100
_PROGRESS_DELAY_S = 0.3  # what takes less time shows no progress bar
_REDRAW_S = 0.1


def add_connect_argument(parser: argparse.ArgumentParser) -> None:
    """Add --connect, which selects the driver."""
    parser.add_argument(
        "--connect",
        metavar="PATH|embedded",
        help="a driver (default: one that runs, else embedded)",
    )


def add_socket_argument(parser: argparse.ArgumentParser) -> None:
    """Add --connect of a command that needs a driver which runs already."""
    parser.add_argument("--connect", metavar="PATH", help="the socket of a driver (default: that of this user)")


_DAY_S = 86_400
_LARGEST = 2**31 - 1  # of integers among the options


def new_file(text: str) -> Path:
    """Argparse type: a path in an existing folder, to which a file can be written later."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; give the name of a file in it")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"the folder {path.parent} does not exist; create it first")
    return path


def at_least_one(text: str) -> int:
    """Argparse type: an integer of at least 1."""
    return _integer(text, 1)


def from_zero(text: str) -> int:
    """Argparse type: an integer of at least 0."""
    return _integer(text, 0)


def integer(text: str) -> int:
    """Argparse type: an integer. What is made of it checks whether it is allowed."""
    return _integer(text, -_LARGEST)


def _integer(text: str, least: int) -> int:
    if not text.removeprefix("-").isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer")
    if len(text) > len(str(-_LARGEST)) or not least <= int(text) <= _LARGEST:
        raise argparse.ArgumentTypeError(f"{text} is not between {least} and {_LARGEST}")
    return int(text)


def text_of(setting: Setting[Any]) -> Callable[[str], str]:
    """Return an argparse type: the text of a value of a setting."""

    def checked(text: str) -> str:
        try:
            setting.type.parse(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: {setting.type.allowed}") from None
        return text

    return checked


def number(text: str) -> float:
    """Argparse type: a number. What is made of it checks whether it is allowed."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def seconds(text: str) -> float:
    """Argparse type: a number of seconds above 0, at most a day."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    if not 0 < value <= _DAY_S:
        raise argparse.ArgumentTypeError(f"{text} s is not above 0 and at most {_DAY_S} (a day)")
    return value


def pattern(text: str) -> str:
    """Argparse type: a regular expression."""
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from error
    return text


def add_class_argument(parser: argparse.ArgumentParser) -> None:
    """Add --class, which the command asks its driver for."""
    parser.add_argument(
        "--class", dest="client_class", choices=CLASSES, metavar="CLASS",
        help=f"{', '.join(CLASSES[:-1])} or {CLASSES[-1]}, beside other clients",
    )  # fmt: skip


def open_client(target: str | None, *, monitor: bool = False) -> Client:
    """Connect to `target`, the value of --connect, and return the client, which the caller closes.

    The death of the driver is an error of the command. `monitor` is that of `nnfmq.connect`.
    """
    import nnfmq

    if target == "embedded":
        return nnfmq.connect(embedded=True, recover=False, monitor=monitor)
    return nnfmq.connect(target, recover=False, monitor=monitor)


def open_running(target: str | None, *, monitor: bool = False, recovers: bool = False) -> Client:
    """As `open_client`, for a command that starts no driver; `recovers`: it goes on in the next one."""
    import nnfmq

    return nnfmq.connect(target, embedded=False, recover=recovers, monitor=monitor)


def open_runtime(target: str | None) -> Runtime:
    """Return a Runtime with the devices of `target`, the value of --connect; None = all drivers, or an embedded one.

    The caller closes it.
    """
    import nnfmq

    if target is not None and target != "embedded":
        nnfmq.connect(target).close()  # raises if no driver listens there
        return nnfmq.Runtime([target])
    if target is None:
        runtime = nnfmq.Runtime()
        if any(not device.is_cpu for device in runtime.devices()):
            return runtime
        runtime.close()
    return nnfmq.Runtime([], embedded=True)


def console(no_color: bool, at_least: int = 0) -> Console:
    """Return a console on stdout, at least `at_least` columns wide (100 if stdout is not a terminal).

    Characters that stdout's encoding lacks are replaced.
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


def indented(text: str, columns: int) -> RenderableType:
    """Return a text whose lines all begin at a column."""
    from rich.padding import Padding

    return Padding(text, (0, 0, 0, columns))


def error_console(no_color: bool = True) -> Console:
    """Return a console on stderr, 100 columns wide if that is not a terminal."""
    from rich.console import Console

    screen = Console(stderr=True, no_color=no_color or None, highlight=False, emoji=False, markup=False)
    if not screen.is_terminal and "COLUMNS" not in os.environ:
        screen.width = max(screen.width, _WIDTH_IN_A_FILE)
    return screen


def compiling(no_color: bool, model: str) -> AbstractContextManager[Callable[[int, int], None] | None]:
    """Return a context whose value is a progress callback for `Device.prepare`; see `progress_bar`.

    If stderr is no terminal, it is None: then `Device.prepare` says on stderr that it compiles.
    """
    return progress_bar(f"compiling {model} for this machine, once", no_color)


@contextmanager
def progress_bar(
    label: str, no_color: bool, delay_s: float | None = None
) -> Iterator[Callable[[int, int], None] | None]:
    """Yield a callback (done, total) that draws a bar on stderr; None if stderr is not a terminal.

    The bar appears after `delay_s` seconds, 0.3 by default, and is redrawn at most ten times a second, by the thread
    that calls: a thread of its own would compete with what is measured. It disappears at the end.
    """
    if not sys.stderr.isatty():
        yield None
        return
    bars: list[Progress] = []
    drawn_at = time.monotonic() + (_PROGRESS_DELAY_S if delay_s is None else delay_s) - _REDRAW_S

    def show(done: int, total: int) -> None:
        nonlocal drawn_at
        now = time.monotonic()
        if now - drawn_at < _REDRAW_S and not (bars and done == total):
            return
        drawn_at = now
        if not bars:
            bars.append(stack.enter_context(_bar(label, no_color)))
        bars[0].update(bars[0].task_ids[0], completed=done, total=total, refresh=True)

    with ExitStack() as stack:
        yield show


def _bar(label: str, no_color: bool) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = TextColumn(label), BarColumn(), MofNCompleteColumn()
    bar = Progress(*columns, console=error_console(no_color), auto_refresh=False, transient=True)
    bar.add_task("")
    return bar


@contextmanager
def progress_line(no_color: bool, *columns: ProgressColumn) -> Iterator[Progress]:
    """Yield an empty line of these columns on stderr, which disappears at the end; without a terminal it is not drawn.

    The thread that updates it draws it: one of its own would take CPU time from what is measured. Processes that are
    started meanwhile do not write into it that they compile.
    """
    from rich.progress import Progress

    screen = error_console(no_color)
    line = Progress(*columns, console=screen, transient=True, auto_refresh=False, disable=not screen.is_terminal)
    with COMPILE_NOTICE.exported("0") if screen.is_terminal else nullcontext(), line:
        yield line


def table(*headings: str, title: str | None = None) -> Table:
    """Return an empty table. A heading that begins with `>` makes a column of numbers, aligned to the right.

    On a screen that is too narrow for the columns each row is printed as a block of lines.
    """
    from rich import box

    from nnfmq.cli.screen_table import ScreenTable

    result = ScreenTable(box=box.SIMPLE, title=title, title_justify="left", pad_edge=False)
    for heading in headings:
        is_number = heading.startswith(">")
        justify: Literal["left", "right"] = "right" if is_number else "left"
        result.add_column(heading.lstrip(">"), justify=justify, no_wrap=is_number, overflow="fold")
    return result


def print_json(value: dict[str, Any], model: Path | None = None) -> None:
    """Print a report on stdout as JSON, with the conditions of now if it has none, and the digest of the file `model`.

    What JSON has no numbers for is a string: "NaN", "Infinity", "-Infinity".
    """
    import json

    from nnfmq.base.conditions import conditions
    from nnfmq.queue.core import core_name

    if model is not None:
        from nnfmq.lab.conditions import model_identity

        value = model_identity(model) | value
    if "conditions" not in value:
        value = value | {"conditions": conditions(core_name)}
    print(json.dumps(_with_finite_numbers(value), indent=2, ensure_ascii=False, allow_nan=False))


def _with_finite_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_finite_numbers(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_finite_numbers(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def microseconds(duration_ns: float) -> str:
    """Return a duration in µs for a table; `-` if it is negative, that is, not measured."""
    return "-" if duration_ns < 0 else f"{duration_ns / 1000:,.1f}"


def short_microseconds(duration_ns: float) -> str:
    """Return a duration in µs for a narrow table: as `microseconds`, but without decimals from 1000 µs on."""
    return microseconds(duration_ns) if duration_ns < 999_950 else f"{duration_ns / 1000:,.0f}"


def share_text(share: float | None, decimals: int = 0) -> str:
    """Return a share in percent; `-` if it is unknown."""
    return "-" if share is None else f"{share * 100:.{decimals}f} %"


def shape_text(shape: Iterable[int | str]) -> str:
    """Return a shape as 1x224x224x3, an empty one as `scalar`."""
    return "x".join(map(str, shape)) or "scalar"
