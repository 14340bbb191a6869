"""AOSP's table of a trace: how long each layer was in each phase, overall and by itself.

Slices nest on a thread; calls to lower layers are nested in calls of upper ones. Each moment of a thread counts for
the innermost slice (`self`), and for each layer and phase of the slices around it (`overall`), with these exceptions:

* A phase that is nested in another one does not count for that: initialization inside preparation. Parts of an
  execution (PIO, PTR, PCO, PR) count for PE as well. PO, PWU and PBM count all that is nested in them.
* LU (utility) and names without a tag count for the slice around them.
* `[SW]` ends the slice around it: the scope goes on in another phase.
* `[SUB]` does not count for the layer of the slice around it.

`wait` of a client contains the driver's `request` in another process, which is therefore subtracted from LI's own
time. (OBS-7, source of the rules: NNAPI's Tracing.h and the tests of its systrace parser)
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from nnfmq.observe.trace_files import Slice, Trace

__all__ = ["LAYERS", "PHASES", "PhaseTable", "Tag", "phase_table", "tag_of"]

LAYERS = {
    "LA": "application",
    "LR": "runtime",
    "LI": "IPC",
    "LD": "driver",
    "LC": "engine",
    "LO": "other",
    "LU": "utility",
}
PHASES = {
    "PO": "overall",
    "PWU": "warm-up",
    "PBM": "benchmark",
    "PI": "initialization",
    "PP": "preparation",
    "PC": "compilation",
    "PE": "execution",
    "PIO": "inputs, outputs",
    "PTR": "transformation",
    "PCO": "computation",
    "PR": "results",
    "PT": "termination",
    "PU": "unspecified",
}
_PARTS = ("PIO", "PTR", "PCO", "PR")
_AROUND_ALL = ("PO", "PWU", "PBM")
_TAG = re.compile(r"(\[SW\]|\[SUB\])?\[NN_(\w+?)_(\w+)\]")


class Tag(NamedTuple):
    """Layer, phase and form ("", "SW" or "SUB") of a name."""

    layer: str
    phase: str
    form: str = ""

    @property
    def main_phase(self) -> str:
        """The phase; PE for a part of it."""
        return "PE" if self.phase in _PARTS else self.phase


def tag_of(name: str) -> Tag | None:
    """Return the tag at the begin of a name, or None if it has none that AOSP defines."""
    match = _TAG.match(name)
    if match is None or match[2] not in LAYERS or match[3] not in PHASES:
        return None
    return Tag(match[2], match[3], (match[1] or "").strip("[]"))


@dataclass(slots=True)
class PhaseTable:
    """Nanoseconds by (layer, phase), and how many slices there are of each."""

    overall: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    own: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    counts: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))


@dataclass(slots=True)
class _Open:
    """A slice that has begun; `has_switched` once a [SW] has begun inside it."""

    end_ns: int
    tag: Tag | None
    has_switched: bool = False


def phase_table(trace: Trace) -> PhaseTable:
    """Return the table of all threads."""
    table = PhaseTable()
    threads: dict[tuple[int, int], list[Slice]] = defaultdict(list)
    for one in trace.slices:
        threads[one.pid, one.thread].append(one)
        tag = tag_of(one.name)
        if tag is not None:
            table.counts[tag.layer, tag.phase] += 1
    for slices in threads.values():
        _add_thread(table, slices)
    _subtract_driver(table, trace.slices)
    return table


def _add_thread(table: PhaseTable, slices: Iterable[Slice]) -> None:
    """Add the slices of one thread, which are in order."""
    stack: list[_Open] = []
    now_ns = 0
    for one in slices:
        now_ns = _close(table, stack, now_ns, one.begin_ns)
        _add_time(table, stack, one.begin_ns - now_ns)
        now_ns, tag = one.begin_ns, tag_of(one.name)
        if tag is not None and tag.form == "SW" and stack:
            stack[-1].has_switched = True
        end_ns = min(one.end_ns, stack[-1].end_ns) if stack else one.end_ns
        stack.append(_Open(end_ns, tag))
    _close(table, stack, now_ns, None)


def _close(table: PhaseTable, stack: list[_Open], now_ns: int, until_ns: int | None) -> int:
    """Close the slices that end before `until_ns` (None: all); return the time until which everything is added."""
    while stack and (until_ns is None or stack[-1].end_ns <= until_ns):
        end_ns = stack[-1].end_ns
        _add_time(table, stack, end_ns - now_ns)
        now_ns = end_ns
        stack.pop()
    return now_ns


def _add_time(table: PhaseTable, stack: Sequence[_Open], duration_ns: int) -> None:
    """Add a time during which the slices in `stack` are open, the innermost last."""
    if duration_ns <= 0:
        return
    around = list(_counting(stack))
    if not around:
        return
    innermost = around[0]
    for key in {(innermost.layer, innermost.phase), (innermost.layer, innermost.main_phase)}:
        table.own[key] += duration_ns
    keys: set[tuple[str, str]] = set()
    for tag in around:
        if tag.main_phase == innermost.main_phase or tag.phase in _AROUND_ALL:
            keys |= {(tag.layer, tag.phase), (tag.layer, tag.main_phase)}
    for key in keys:
        table.overall[key] += duration_ns


def _counting(stack: Sequence[_Open]) -> Iterator[Tag]:
    """Yield the tags that count now, from the innermost on."""
    subtracted: set[str] = set()
    is_subtracting = False
    for one in reversed(stack):
        tag = one.tag
        if tag is None or tag.layer == "LU" or one.has_switched:
            continue
        if is_subtracting:
            subtracted.add(tag.layer)
            is_subtracting = False
        if tag.layer not in subtracted:
            yield tag
        is_subtracting = tag.form == "SUB"


def _subtract_driver(table: PhaseTable, slices: Iterable[Slice]) -> None:
    """Subtract the driver's time of each request from the client's own time of waiting for it."""
    waits, requests = {}, {}
    for one in slices:
        tag = tag_of(one.name)
        if not one.request or tag is None:
            continue
        if tag.layer == "LI":
            waits[one.request] = one, tag
        elif tag.layer == "LD" and tag.phase not in _PARTS:
            requests[one.request] = one
    for request, (wait, tag) in waits.items():
        driver = requests.get(request)
        if driver is not None:
            inside = min(wait.end_ns, driver.end_ns) - max(wait.begin_ns, driver.begin_ns)
            for key in {(tag.layer, tag.phase), (tag.layer, tag.main_phase)}:
                table.own[key] -= max(0, min(inside, table.own[key]))
