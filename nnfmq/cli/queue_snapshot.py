"""One look at a named queue: its descriptor, its counters, and whether they are possible.

Nothing is changed and nobody is woken. The two counters cannot be taken at once, so what looks impossible is looked at
again before it is believed. Used by `nnfmq queue create`, `info`, `list` and `watch`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from nnfmq.cli.console import console, print_json, table
from nnfmq.hal.errors import NnfmqError
from nnfmq.posix_shm import path_of
from nnfmq.queue import NOT_EMPTY, NOT_FULL, SYNCHRONIZED, MessageQueue, named_queues, open_named
from nnfmq.queue.layout import EVENT_WORD, EVENT_WORD_BYTES

_PARTS = ("read_counter", "write_counter", "ring", "event_word")
_FLAVORS = {1: "synchronized", 2: "unsynchronized"}
_BITS = {NOT_FULL: "NOT_FULL", NOT_EMPTY: "NOT_EMPTY"}
_LOOKS = 5


@dataclass(frozen=True, slots=True)
class Look:
    """What a queue's memory says at one moment. Of an unsynchronized queue nobody knows the readers: `r` is None."""

    w: int
    r: int | None
    event_bits: int | None
    ring_bytes: int
    quantum: int

    @property
    def used_bytes(self) -> int:
        """Bytes of the ring that hold records: unread ones, or (unsynchronized) any that can still be read."""
        used = self.w if self.r is None else self.w - self.r
        return min(max(used, 0), self.ring_bytes)

    @property
    def fill(self) -> float:
        """That, as a part of the ring: 0 to 1."""
        return self.used_bytes / self.ring_bytes

    @property
    def state(self) -> str:
        """`ok`, what was overwritten, or what is impossible."""
        for name, counter in (("write", self.w), ("read", self.r or 0)):
            if counter % self.quantum:
                return f"corrupted: the {name} counter is within a record"
        if self.r is None:
            lost = max(self.w - self.ring_bytes, 0) // self.quantum
            return f"ok; records overwritten: {lost:,}" if lost else "ok"
        if self.w < self.r:
            return "corrupted: more was read than written"
        return "ok" if self.w - self.r <= self.ring_bytes else "corrupted: more is unread than the ring holds"

    def as_json(self) -> dict[str, Any]:
        """Return the live part of `info --json`, and a line of `watch --json`."""
        records = self.used_bytes // self.quantum
        return {
            "counters": {"write": self.w, "read": self.r},
            "readable": records,
            "writable": self.ring_bytes // self.quantum - (0 if self.r is None else records),
            "fill": self.fill,
            "event_bits": self.event_bits,
            "state": self.state,
        }


def look(queue: MessageQueue) -> Look:
    """Look at `queue` now."""
    seen = _look_once(queue)
    for _ in range(_LOOKS):
        if not seen.state.startswith("corrupted"):
            break
        seen = _look_once(queue)
    return seen


def _look_once(queue: MessageQueue) -> Look:
    w, r = queue.counters()
    own = queue.flavor == SYNCHRONIZED
    return Look(w, r if own else None, _event_bits(queue), queue.count * queue.quantum, queue.quantum)


def _event_bits(queue: MessageQueue) -> int | None:
    grantors = queue.descriptor.grantors
    if len(grantors) <= EVENT_WORD:
        return None
    at = grantors[EVENT_WORD].offset
    return int(queue.memory.view[at : at + EVENT_WORD_BYTES].cast("I")[0])


def bits_text(bits: int | None) -> str:
    """Return the bits of an event word by name, the others as a number."""
    if bits is None:
        return "no event word"
    known = [name for bit, name in _BITS.items() if bits & bit]
    rest = bits & ~(NOT_FULL | NOT_EMPTY)
    return " ".join([*known, *([f"{rest:#x}"] if rest else [])]) or "none"


def description(name: str, queue: MessageQueue) -> dict[str, Any]:
    """Return what another program must know, as `create --json` prints it."""
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


def show(described: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Print a description, with or without a look, as JSON or as tables."""
    if arguments.json:
        print_json(described)
        return
    screen = console(arguments.no_color)
    screen.print(_facts(described))
    parts = table("part", ">offset", ">extent")
    for part in _PARTS:
        if described[part] is not None:
            parts.add_row(part.replace("_", " "), *(f"{number:,}" for number in described[part].values()))
    screen.print(parts)


def _facts(described: dict[str, Any]) -> Any:
    facts = table("queue", described["name"])
    facts.add_row("path", described["path"])
    facts.add_row("flavour", described["flavor"])
    facts.add_row("records", f"{described['count']:,} of {described['record_bytes']:,} bytes")
    facts.add_row("memory", f"{described['memory_bytes']:,} bytes")
    if "state" in described:
        _add_look(facts, described)
    return facts


def _add_look(facts: Any, described: dict[str, Any]) -> None:
    w, r = described["counters"]["write"], described["counters"]["read"]
    facts.add_row("written", f"{w:,} bytes")
    facts.add_row("read", "each reader has a position of its own" if r is None else f"{r:,} bytes")
    facts.add_row("readable", f"{described['readable']:,} records ({described['fill']:.0%} of the ring)")
    facts.add_row("event bits", bits_text(described["event_bits"]))
    facts.add_row("state", described["state"])


def show_all(arguments: argparse.Namespace) -> None:
    """Print all queues of this machine."""
    found = list(_every())
    if arguments.json:
        print_json({"queues": found})
        return
    screen = console(arguments.no_color)
    if not found:
        screen.print("no queues: `nnfmq queue create NAME --record-bytes N --count N` makes one")
        return
    listing = table("queue", "flavour", ">record bytes", ">count", ">readable", "state")
    for one in found:
        numbers = (f"{one[key]:,}" for key in ("record_bytes", "count", "readable"))
        listing.add_row(one["name"], one["flavor"], *numbers, one["state"])
    screen.print(listing)


def _every() -> Any:
    for name in named_queues():
        try:
            with open_named(name) as queue:
                yield description(name, queue) | look(queue).as_json()
        except (NnfmqError, OSError):
            continue  # removed meanwhile
