"""`nnfmq queue watch`: a live view of a named queue, which changes no counter and clears no event flag bit.

On a terminal one table is redrawn; otherwise each snapshot is a line of text or JSON. Rates are computed from two
successive snapshots, so the first has none. Ctrl-C ends the command.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from nnfmq.cli.console import console, table
from nnfmq.cli.queue_snapshot import QueueSnapshot, bits_text, snapshot
from nnfmq.queue import MessageQueue, open_named

_BAR_WIDTH = 30
_BESIDE_BAR = 32  # columns of the screen


@dataclass(frozen=True, slots=True)
class Sample:
    """A snapshot, its time, and the rates since the previous one; None for the first."""

    state: QueueSnapshot
    at_ns: int
    written_per_s: float | None
    read_per_s: float | None

    def as_json(self) -> dict[str, Any]:
        """Return a line of `watch --json`."""
        rates = {"written_per_s": self.written_per_s, "read_per_s": self.read_per_s}
        return {"monotonic_ns": self.at_ns, **rates, **self.state.as_json()}


def watch(arguments: argparse.Namespace) -> int:
    """Show snapshots until the count is reached; return the exit status."""
    with ExitStack() as stack:
        queue = stack.enter_context(open_named(arguments.name))
        show = _view(arguments, stack)
        for sample in _samples(queue, arguments.interval, arguments.count):
            show(sample)
    return 0


def _samples(queue: MessageQueue, interval: float, count: int | None) -> Iterator[Sample]:
    state, at_ns = snapshot(queue), time.monotonic_ns()
    yield Sample(state, at_ns, None, None)
    while count is None or (count := count - 1):
        time.sleep(interval)
        last, last_ns = state, at_ns
        state, at_ns = snapshot(queue), time.monotonic_ns()
        seconds = max(at_ns - last_ns, 1) / 1e9
        written = _rate(last.w, state.w, state.quantum, seconds)
        yield Sample(state, at_ns, written, _rate(last.r, state.r, state.quantum, seconds))


def _rate(before: int | None, after: int | None, quantum: int, seconds: float) -> float | None:
    """Return records per second; None without a counter, or if a new user has reset it."""
    if before is None or after is None or after < before:
        return None
    return (after - before) / quantum / seconds


def _view(arguments: argparse.Namespace, stack: ExitStack) -> Callable[[Sample], None]:
    """Return a function that shows a sample: as a line of JSON or text, or in a table that `stack` closes."""
    if arguments.json:
        return lambda sample: print(json.dumps(sample.as_json()), flush=True)
    screen = console(arguments.no_color)
    if not screen.is_terminal:
        return lambda sample: print(_line(sample), flush=True)
    from rich.live import Live

    # Without rich's refresh thread, which would redraw between two snapshots and take the GIL.
    live = stack.enter_context(Live(console=screen, auto_refresh=False))
    bar_width = min(max(screen.width - _BESIDE_BAR, 0), _BAR_WIDTH)
    return lambda sample: live.update(_drawn(arguments.name, sample, bar_width), refresh=True)


def _line(sample: Sample) -> str:
    state = sample.state
    return (
        f"written {_per_second(sample.written_per_s)}  read {_per_second(sample.read_per_s)}  "
        f"fill {state.fill:4.0%}  bits {bits_text(state.event_bits)}  {state.state}"
    )


def _drawn(name: str, sample: Sample, bar_width: int) -> Any:
    state = sample.state
    view = table("queue", name)
    view.add_row("written", f"{_per_second(sample.written_per_s)}   counter {state.w:,}")
    if state.r is not None:
        view.add_row("read", f"{_per_second(sample.read_per_s)}   counter {state.r:,}")
    filled = round(state.fill * bar_width)
    count, capacity = state.used_bytes // state.quantum, state.ring_bytes // state.quantum
    view.add_row("fill", f"{'█' * filled}{'░' * (bar_width - filled)} {count:,} of {capacity:,}")
    view.add_row("event bits", bits_text(state.event_bits))
    view.add_row("state", state.state)
    return view


def _per_second(rate: float | None) -> str:
    return f"{'-' if rate is None else f'{rate:,.0f}':>12} records/s"
