"""`nnfmq queue watch`: a live view of a named queue. It only looks: no counter is changed, no event bit taken.

On a terminal one table is drawn again and again; elsewhere each look is a line, or a line of JSON. Rates are between
two looks; the first one has none. Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nnfmq.cli.console import console, table
from nnfmq.cli.queue_snapshot import Look, bits_text, look
from nnfmq.queue import MessageQueue, open_named

if TYPE_CHECKING:
    from rich.console import Console

_BAR_CELLS = 30


@dataclass(frozen=True, slots=True)
class Sample:
    """One look, when it was, and records a second since the one before (None: there was none)."""

    seen: Look
    at_ns: int
    written_per_s: float | None
    read_per_s: float | None

    def as_json(self) -> dict[str, Any]:
        """Return a line of `watch --json`."""
        rates = {"written_per_s": self.written_per_s, "read_per_s": self.read_per_s}
        return {"monotonic_ns": self.at_ns, **rates, **self.seen.as_json()}


def watch(arguments: argparse.Namespace) -> int:
    """Look again and again."""
    with ExitStack() as stack:
        queue = stack.enter_context(open_named(arguments.name))
        show = _as_json if arguments.json else _view(arguments, console(arguments.no_color), stack)
        for sample in _samples(queue, arguments.interval, arguments.count):
            show(sample)
    return 0


def _samples(queue: MessageQueue, interval: float, count: int | None) -> Iterator[Sample]:
    last = Sample(look(queue), time.monotonic_ns(), None, None)
    yield last
    while count is None or (count := count - 1):
        time.sleep(interval)
        last = _next(last, look(queue), time.monotonic_ns())
        yield last


def _next(last: Sample, seen: Look, now_ns: int) -> Sample:
    seconds = max(now_ns - last.at_ns, 1) / 1e9
    written = _rate(last.seen.w, seen.w, seen.quantum, seconds)
    return Sample(seen, now_ns, written, _rate(last.seen.r, seen.r, seen.quantum, seconds))


def _rate(before: int | None, after: int | None, quantum: int, seconds: float) -> float | None:
    """Return records a second; None for what has no counter, or whose counter was set back by a new user."""
    if before is None or after is None or after < before:
        return None
    return (after - before) / quantum / seconds


def _as_json(sample: Sample) -> None:
    print(json.dumps(sample.as_json()), flush=True)


def _view(arguments: argparse.Namespace, screen: Console, stack: ExitStack) -> Callable[[Sample], None]:
    if not screen.is_terminal:
        return lambda sample: print(_line(sample), flush=True)
    from rich.live import Live

    # Without its thread: it would draw between two looks, and hold the interpreter while doing so.
    live = stack.enter_context(Live(console=screen, auto_refresh=False))
    return lambda sample: live.update(_drawn(arguments.name, sample), refresh=True)


def _line(sample: Sample) -> str:
    seen = sample.seen
    return (
        f"written {_per_second(sample.written_per_s)}  read {_per_second(sample.read_per_s)}  "
        f"fill {seen.fill:4.0%}  bits {bits_text(seen.event_bits)}  {seen.state}"
    )


def _drawn(name: str, sample: Sample) -> Any:
    seen = sample.seen
    view = table("queue", name)
    view.add_row("written", f"{_per_second(sample.written_per_s)}   counter {seen.w:,}")
    if seen.r is not None:
        view.add_row("read", f"{_per_second(sample.read_per_s)}   counter {seen.r:,}")
    cells = round(seen.fill * _BAR_CELLS)
    count, capacity = seen.used_bytes // seen.quantum, seen.ring_bytes // seen.quantum
    view.add_row("fill", f"{'█' * cells}{'░' * (_BAR_CELLS - cells)} {count:,} of {capacity:,}")
    view.add_row("event bits", bits_text(seen.event_bits))
    view.add_row("state", seen.state)
    return view


def _per_second(rate: float | None) -> str:
    return f"{'-' if rate is None else f'{rate:,.0f}':>12} records/s"
