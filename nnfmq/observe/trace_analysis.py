"""Evaluation of traces: the stages of slow requests, and AOSP's table of layers and phases.

    client write → request wake-up → decode → bind → queue for cores → engine → reply → result wake-up → client read

The client's slices have the first and the last, the driver's slices the others; the wake-ups are the times between. If
the trace has only the driver's side, the client's stages are missing. A request's operations are the slices on the
thread of its engine, within it. (OBS-7)
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import NamedTuple

from nnfmq.observe.trace_files import CpuWait, Slice, Trace
from nnfmq.observe.trace_layout import STANDARD_NAMES

__all__ = [
    "LAYERS",
    "PHASES",
    "STAGES",
    "Explanation",
    "PhaseTable",
    "RequestStages",
    "Stage",
    "Tag",
    "explain",
    "phase_table",
    "requests_of",
    "tag_of",
]

STAGES = (
    "client write",
    "request wake-up",
    "decode",
    "bind",
    "queue for cores",
    "engine",
    "reply",
    "result wake-up",
    "client read",
)
_REQUEST, _DECODE, _ENGINE, _EXECUTE, _WRITE, _WAIT, _READ, _BIND = STANDARD_NAMES[:8]
_OPERATION = "[NN_LC_PCO]"
_SLOWEST_OPERATIONS = 3


@dataclass(slots=True)
class RequestStages:
    """The stages of one request in ns, the slices from which they come, and its slowest operations.

    Attributes:
        request: The request id.
        begin_ns: When the first of its slices begins.
        total_ns: From the begin to the end of the client's `execute`, or of the driver's `request`.
        stages: Those that the trace has.
        threads: Its threads: (pid, thread).
        engine: The engine's slice.
    """

    request: int
    begin_ns: int
    total_ns: int
    stages: dict[str, int]
    threads: tuple[tuple[int, int], ...]
    engine: Slice | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage or an operation of a slow request: its time, its share, and the median of all requests."""

    name: str
    duration_ns: int
    share: float
    typical_ns: int

    @property
    def excess_ns(self) -> int:
        """By how much it exceeds the median."""
        return self.duration_ns - self.typical_ns


@dataclass(slots=True)
class Explanation:
    """A slow request, its stages, its slowest operations, and how long its threads waited for a CPU around it."""

    request: RequestStages
    stages: list[Stage]
    operations: list[Stage] = field(default_factory=list)
    waits: list[CpuWait] = field(default_factory=list)

    @property
    def abnormal(self) -> Stage:
        """The stage that exceeds its median by most."""
        return max(self.stages, key=lambda stage: stage.excess_ns)


def requests_of(trace: Trace) -> list[RequestStages]:
    """Return the stages of each request that the trace has completely, on at least one side."""
    slices: dict[int, dict[str, Slice]] = defaultdict(dict)
    for one in trace.slices:
        if one.request:
            slices[one.request][one.name] = one
    found = (_stages(request, by_name) for request, by_name in slices.items())
    return [request for request in found if request is not None]


def _stages(request: int, by_name: dict[str, Slice]) -> RequestStages | None:
    driver, execute = by_name.get(_REQUEST), by_name.get(_EXECUTE)
    write, wait, read, engine = (by_name.get(name) for name in (_WRITE, _WAIT, _READ, _ENGINE))
    if driver is None and execute is None:
        return None
    stages: dict[str, int] = {}
    if write is not None:  # the driver may have the request before the client's call that wakes it has returned
        end_ns = write.end_ns if driver is None else min(write.end_ns, driver.begin_ns)
        stages["client write"] = max(0, end_ns - write.begin_ns)
    if driver is not None and wait is not None:
        stages["request wake-up"] = max(0, driver.begin_ns - wait.begin_ns)
    if driver is not None:
        reply_end_ns = driver.end_ns if wait is None else min(driver.end_ns, wait.end_ns)
        stages |= _driver_stages(driver, engine, by_name.get(_DECODE), by_name.get(_BIND), reply_end_ns)
    elif wait is not None:
        stages["driver"] = wait.duration_ns
    if driver is not None and wait is not None:
        stages["result wake-up"] = max(0, wait.end_ns - max(driver.end_ns, wait.begin_ns))
    if read is not None:
        stages["client read"] = read.duration_ns
    whole = execute or driver
    assert whole is not None
    threads = tuple(dict.fromkeys((one.pid, one.thread) for one in (execute, driver) if one is not None))
    return RequestStages(request, whole.begin_ns, whole.duration_ns, stages, threads, engine)


def _driver_stages(
    driver: Slice, engine: Slice | None, decode: Slice | None, bind: Slice | None, reply_end_ns: int
) -> dict[str, int]:
    """Return the driver's stages. The reply ends when the client has seen it, perhaps before the driver's slice."""
    stages = {"decode": decode.duration_ns if decode else 0, "bind": bind.duration_ns if bind else 0}
    if engine is not None:
        ready_ns = max(one.end_ns if one else driver.begin_ns for one in (decode, bind))
        stages["queue for cores"] = max(0, engine.begin_ns - ready_ns)
        stages["engine"] = engine.duration_ns
        stages["reply"] = max(0, reply_end_ns - engine.end_ns)
    return stages


def explain(trace: Trace, count: int) -> list[Explanation]:
    """Return the slowest `count` requests, the slowest first, each with the usual times beside."""
    requests = requests_of(trace)
    medians = _medians(requests)
    operations = _Operations(trace.slices)
    slowest = sorted(requests, key=lambda request: -request.total_ns)[:count]
    return [_explanation(trace, request, medians, operations) for request in slowest]


def _medians(requests: Iterable[RequestStages]) -> dict[str, int]:
    times: dict[str, list[int]] = defaultdict(list)
    for request in requests:
        for name, duration_ns in request.stages.items():
            times[name].append(duration_ns)
    return {name: median_low(found) for name, found in times.items()}


def _explanation(trace: Trace, request: RequestStages, medians: dict[str, int], operations: _Operations) -> Explanation:
    total_ns = max(request.total_ns, 1)
    stages = [Stage(name, ns, ns / total_ns, medians[name]) for name, ns in request.stages.items()]
    waits = [
        wait
        for wait in trace.waits
        if (wait.pid, wait.thread) in request.threads
        and wait.begin_ns < request.begin_ns + request.total_ns
        and wait.end_ns > request.begin_ns
    ]
    return Explanation(request, stages, operations.slowest(request.engine, total_ns), waits)


class _Operations:
    """The operations of a trace by thread, and their medians."""

    def __init__(self, slices: Sequence[Slice]) -> None:
        self._threads: dict[tuple[int, int], list[Slice]] = defaultdict(list)
        times: dict[tuple[int, str], list[int]] = defaultdict(list)
        for one in slices:
            if one.name.startswith(_OPERATION):
                self._threads[one.pid, one.thread].append(one)
                times[one.pid, one.name].append(one.duration_ns)
        self._medians = {key: median_low(found) for key, found in times.items()}

    def slowest(self, engine: Slice | None, total_ns: int) -> list[Stage]:
        """Return the slowest operations within the engine's slice."""
        if engine is None:
            return []
        found = self._threads.get((engine.pid, engine.thread), [])
        first = bisect_left(found, engine.begin_ns, key=lambda one: one.begin_ns)
        last = bisect_right(found, engine.end_ns, key=lambda one: one.begin_ns)
        within = [one for one in found[first:last] if one.end_ns <= engine.end_ns]
        within.sort(key=lambda one: -one.duration_ns)
        return [
            Stage(
                one.name.removeprefix(_OPERATION),
                one.duration_ns,
                one.duration_ns / total_ns,
                self._medians[one.pid, one.name],
            )
            for one in within[:_SLOWEST_OPERATIONS]
        ]


# ----------------------------------------------------------------------------------------------------------------------
# AOSP's table of a trace: how long each layer was in each phase, overall and by itself.
#
# Slices nest on a thread; calls to lower layers are nested in calls of upper ones. Each moment of a thread counts for
# the innermost slice (`self`), and for each layer and phase of the slices around it (`overall`), with these exceptions:
#
# * A phase that is nested in another one does not count for that: initialization inside preparation. Parts of an
#   execution (PIO, PTR, PCO, PR) count for PE as well. PO, PWU and PBM count all that is nested in them.
# * LU (utility) and names without a tag count for the slice around them.
# * `[SW]` ends the slice around it: the scope goes on in another phase.
# * `[SUB]` does not count for the layer of the slice around it.
#
# `wait` of a client contains the driver's `request` in another process, which is therefore subtracted from LI's own
# time. (OBS-7, source of the rules: NNAPI's Tracing.h and the tests of its systrace parser)


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
