"""Snapshots of a named queue: descriptor, counters, and whether the counters are valid.

A snapshot changes nothing and wakes no waiter. The two counters cannot be loaded atomically, so an invalid pair is
loaded again before it is reported. Used by `nnfmq queue create`, `info`, `list` and `watch`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from nnfmq.base.posix_shm import path_of
from nnfmq.cli.console import console, print_json, share_text, table
from nnfmq.hal.errors import NnfmqError
from nnfmq.queue import NOT_EMPTY, NOT_FULL, SYNCHRONIZED, MessageQueue, named_queues, open_named
from nnfmq.queue.layout import EVENT_FLAG, EVENT_FLAG_BYTES

__all__ = ["QueueSnapshot", "Sample", "bits_text", "description", "show", "show_all", "snapshot", "watch"]

_PARTS = ("read_counter", "write_counter", "ring", "event_word")
_FLAVORS = {1: "synchronized", 2: "unsynchronized"}
_BITS = {NOT_FULL: "NOT_FULL", NOT_EMPTY: "NOT_EMPTY"}
_RETRIES = 5


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """Counters of a queue at one moment, in bytes; `r` is None for an unsynchronized queue with unknown readers."""

    w: int
    r: int | None
    event_bits: int | None
    ring_bytes: int
    quantum: int

    @property
    def used_bytes(self) -> int:
        """Bytes of unread records; in an unsynchronized queue of all records that can still be read."""
        used = self.w if self.r is None else self.w - self.r
        return min(max(used, 0), self.ring_bytes)

    @property
    def fill(self) -> float:
        """`used_bytes` as a fraction of the ring, 0 to 1."""
        return self.used_bytes / self.ring_bytes

    @property
    def state(self) -> str:
        """`ok`, how many records were overwritten, or why the counters are invalid."""
        for name, counter in (("write", self.w), ("read", self.r or 0)):
            if counter % self.quantum:
                return f"corrupted: the {name} counter is not a multiple of the record size"
        if self.r is None:
            lost = max(self.w - self.ring_bytes, 0) // self.quantum
            return f"ok; records overwritten: {lost:,}" if lost else "ok"
        if self.w < self.r:
            return "corrupted: the read counter is ahead of the write counter"
        return "ok" if self.w - self.r <= self.ring_bytes else "corrupted: more bytes are unread than the ring has"

    def as_json(self) -> dict[str, Any]:
        """Return the counters and what follows from them, as in `info --json` and `watch --json`."""
        records = self.used_bytes // self.quantum
        return {
            "counters": {"write": self.w, "read": self.r},
            "readable": records,
            "writable": self.ring_bytes // self.quantum - (0 if self.r is None else records),
            "fill": self.fill,
            "event_bits": self.event_bits,
            "state": self.state,
        }


def snapshot(queue: MessageQueue) -> QueueSnapshot:
    """Return the state of `queue` now."""
    state = _load(queue)
    for _ in range(_RETRIES):
        if not state.state.startswith("corrupted"):
            break
        state = _load(queue)
    return state


def _load(queue: MessageQueue) -> QueueSnapshot:
    w, r = queue.counters()
    has_reader = queue.flavor == SYNCHRONIZED
    event_bits, grantors = None, queue.descriptor.grantors
    if len(grantors) > EVENT_FLAG:
        at = grantors[EVENT_FLAG].offset
        event_bits = int(queue.memory.view[at : at + EVENT_FLAG_BYTES].cast("I")[0])
    return QueueSnapshot(w, r if has_reader else None, event_bits, queue.count * queue.quantum, queue.quantum)


def bits_text(bits: int | None) -> str:
    """Return the names of the set event flag bits; unknown bits as a hexadecimal number."""
    if bits is None:
        return "no event flag word"
    known = [name for bit, name in _BITS.items() if bits & bit]
    unknown = bits & ~(NOT_FULL | NOT_EMPTY)
    return " ".join([*known, *([f"{unknown:#x}"] if unknown else [])]) or "none"


def description(name: str, queue: MessageQueue) -> dict[str, Any]:
    """Return the description with which a program attaches to the queue, as `create --json` prints it."""
    parts = (
        {"offset": grantor.offset, "extent": grantor.extent} for grantor in queue.descriptor.grantors[: len(_PARTS)]
    )
    return {
        "name": name,
        "path": str(path_of(name)),
        "flavor": _FLAVORS[queue.flavor],
        "record_bytes": queue.quantum,
        "count": queue.count,
        "memory_bytes": queue.memory.size_bytes,
        **dict(zip_longest(_PARTS, parts)),
    }


def show(description: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Print a description, with or without a snapshot, as JSON or as tables."""
    if arguments.json:
        print_json(description)
        return
    screen = console(arguments.no_color)
    screen.print(_facts(description))
    parts = table("part", ">offset", ">extent")
    for part in _PARTS:
        if description[part] is not None:
            parts.add_row(part.replace("_", " "), *(f"{number:,}" for number in description[part].values()))
    screen.print(parts)


def _facts(description: dict[str, Any]) -> Any:
    facts = table("queue", description["name"])
    facts.add_row("path", description["path"])
    facts.add_row("flavor", description["flavor"])
    facts.add_row("records", f"{description['count']:,} of {description['record_bytes']:,} bytes")
    facts.add_row("memory", f"{description['memory_bytes']:,} bytes")
    if "state" in description:  # it contains a snapshot
        w, r = description["counters"]["write"], description["counters"]["read"]
        facts.add_row("written", f"{w:,} bytes")
        facts.add_row("read", "each reader has its own position" if r is None else f"{r:,} bytes")
        facts.add_row(
            "readable", f"{description['readable']:,} records ({share_text(description['fill'])} of the ring)"
        )
        facts.add_row("event bits", bits_text(description["event_bits"]))
        facts.add_row("state", description["state"])
    return facts


def show_all(arguments: argparse.Namespace) -> None:
    """Print the named queues of this machine that can be opened."""
    found: list[dict[str, Any]] = []
    for name in named_queues():
        try:
            with open_named(name) as queue:
                found.append(description(name, queue) | snapshot(queue).as_json())
        except (NnfmqError, OSError):
            continue  # removed since it was listed, or not a valid queue
    if arguments.json:
        print_json({"queues": found})
        return
    screen = console(arguments.no_color)
    if not found:
        screen.print("no queues; `nnfmq queue create NAME --record-bytes N --count N` creates one")
        return
    listing = table("queue", "flavor", ">record bytes", ">count", ">readable", "state")
    for one in found:
        numbers = (f"{one[key]:,}" for key in ("record_bytes", "count", "readable"))
        listing.add_row(one["name"], one["flavor"], *numbers, one["state"])
    screen.print(listing)


# ----------------------------------------------------------------------------------------------------------------------
# `nnfmq queue watch`: a live view of a named queue, which changes no counter and clears no event flag bit.
#
# On a terminal one table is redrawn; otherwise each snapshot is a line of text or JSON. Rates are computed from two
# successive snapshots, so the first has none. Ctrl-C ends the command.


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
        f"fill {share_text(state.fill):>5}  bits {bits_text(state.event_bits)}  {state.state}"
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
