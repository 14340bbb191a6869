"""A recorded trace: its slices in memory, read from rings, and as files for ui.perfetto.dev and ftrace."""

from __future__ import annotations

import json
import re
import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from nnfmq.hal.summaries import printable
from nnfmq.observe.machine_record import CpuUse, MachineRecord, Stop
from nnfmq.observe.trace_core import copy_names, copy_records
from nnfmq.observe.trace_layout import (
    LABEL,
    LABEL_BYTES,
    MAGIC,
    PID,
    RAN,
    RECORD,
    RECORD_BYTES,
    STANDARD_NAMES,
    WAITED,
    burst_of,
    packet_of,
    request_base,
    worker_of,
)

__all__ = [
    "RingReader",
    "Slice",
    "ThreadTimes",
    "Trace",
    "current_epoch_ns",
    "events",
    "merged",
    "read_trace",
    "write_trace",
]

_LAST_RECORDS = 1 << 18  # of each ring, in the memory of the reader


class Slice(NamedTuple):
    """The work of a thread from `begin_ns` to `end_ns`; `request` joins the slices of one request, 0 = none."""

    pid: int
    thread: int
    begin_ns: int
    end_ns: int
    name: str
    request: int = 0

    @property
    def duration_ns(self) -> int:
        """From the begin to the end."""
        return self.end_ns - self.begin_ns


class ThreadTimes(NamedTuple):
    """From `begin_ns` to `end_ns` a thread ran for `ran_ns`, and was runnable without a CPU for `waited_ns`."""

    pid: int
    thread: int
    begin_ns: int
    end_ns: int
    waited_ns: int
    ran_ns: int


@dataclass(slots=True)
class Trace:
    """A recording: slices, times of executions, and their processes.

    Attributes:
        slices: In the order of their begin, an enclosing one first.
        processes: Labels of the processes that recorded.
        times: What threads did between two samples.
        lost: How many slices were lost.
        machine: What the machine did beside them.
        epoch_ns: When the clock of all times was 0, on that of time.time_ns; 0 if it is not known.
        conditions: By which build, on which machine and when it was recorded (`base.conditions`); None if that is not
            known.
    """

    slices: list[Slice] = field(default_factory=list)
    processes: dict[int, str] = field(default_factory=dict)
    times: list[ThreadTimes] = field(default_factory=list)
    lost: int = 0
    machine: MachineRecord = field(default_factory=MachineRecord)
    epoch_ns: int = 0
    conditions: dict[str, Any] | None = None

    def sort(self) -> None:
        """Restore the order."""
        self.slices.sort(key=lambda one: (one.begin_ns, -one.end_ns))


class RingReader:
    """Reads the ring in `region`, which it borrows. The writer may be another process, and may have died.

    Between calls of `poll` the writer may write as many slices as the ring has; what it overwrites is counted as lost.
    Of all that was copied, the last slices are kept.
    """

    def __init__(self, region: memoryview, last: int = _LAST_RECORDS) -> None:
        self._region = region
        self._last = last
        self._next = 0
        self._records: list[bytes] = []
        self._count = 0
        self._names = b""
        self._label = ""
        self.pid = 0
        self.lost = 0

    def poll(self) -> int:
        """Copy the slices that were written since the last call; return how many."""
        first, data = copy_records(self._region, self._next)
        count = len(data) // RECORD_BYTES
        self.lost += max(first - self._next, 0) if count else 0
        self._next = first + count
        if count:
            self._records.append(data)
            self._count += count
            self._names = copy_names(self._region)  # a name is there before the first record with it
            self.pid = self.writer_pid()
            self._label = _text(bytes(self._region[LABEL : LABEL + LABEL_BYTES]).rstrip(b"\0"))
        while len(self._records) > 1 and self._count - len(self._records[0]) // RECORD_BYTES >= self._last:
            dropped = len(self._records.pop(0)) // RECORD_BYTES
            self._count -= dropped
            self.lost += dropped
        return count

    def release(self) -> None:
        """Release the region; `trace` still returns what was copied."""
        self._region = memoryview(b"")

    def writer_pid(self) -> int:
        """Return the pid of the process that writes the ring now; 0 if the memory is not a ring."""
        if bytes(self._region[: len(MAGIC)]) != MAGIC:
            return 0
        return int.from_bytes(self._region[PID : PID + 8], "little")

    def trace(self) -> Trace:
        """Return the trace of what `poll` has copied."""
        names, pid = list(_names(self._names)), self.pid
        trace = Trace(processes={pid: self._label} if pid else {}, lost=self.lost)
        waited: dict[int, tuple[int, int]] = {}  # by thread: the end of the times, and for how long it waited
        for begin_ns, end_ns, request, name, thread in self._slices():
            text = names[name - 1] if 0 < name <= len(names) else "?"
            if text == WAITED:
                waited[thread] = end_ns, request
            elif text == RAN:
                until_ns, waited_ns = waited.pop(thread, (0, 0))
                if until_ns == end_ns:  # otherwise that record was lost
                    trace.times.append(ThreadTimes(pid, thread, begin_ns, end_ns, waited_ns, request))
            elif begin_ns <= end_ns < 1 << 63:
                trace.slices.append(Slice(pid, thread, begin_ns, end_ns, text, request))
        trace.sort()
        return trace

    def _slices(self) -> Iterator[tuple[int, int, int, int, int]]:
        for data in self._records:
            yield from struct.iter_unpack(RECORD, data)


def _names(data: bytes) -> Iterator[str]:
    at = 0
    while at + 2 <= len(data):
        size = int.from_bytes(data[at : at + 2], "little")
        yield _text(data[at + 2 : at + 2 + size])
        at += 2 + size


def _text(data: bytes) -> str:
    """Return a name: the process that writes it, and the client that names a model, may be hostile."""
    return printable(data.decode("utf-8", "replace"))


def current_epoch_ns() -> int:
    """Return when the clock of slices was 0, on that of time.time_ns."""
    return time.time_ns() - time.monotonic_ns()


def merged(traces: Iterable[Trace]) -> Trace:
    """Return one trace with everything that all of them have from rings."""
    result = Trace()
    for trace in traces:
        result.slices += trace.slices
        result.times += trace.times
        result.processes |= trace.processes
        result.lost += trace.lost
    result.sort()
    return result


# ----------------------------------------------------------------------------------------------------------------------
# Traces as files: Chrome's JSON, which ui.perfetto.dev and chrome://tracing open, and ftrace's text for reading.
#
# A slice becomes a complete event (`X`), a request's way from the client's slice `write` into the driver's slice
# `request`, and back into `wait`, two flow arrows (`s`, `f`). Times are CLOCK_MONOTONIC in µs with three decimals.
# What a thread did between two samples, and what a sampler saw of other processes, are instant events at the end of
# their interval, whose begin is in their arguments: they would not nest with slices.


_REQUEST, _WRITE, _WAIT = STANDARD_NAMES[0], STANDARD_NAMES[4], STANDARD_NAMES[5]
_TAG = re.compile(r"\[NN_(L\w)_(P\w+)\]")
_MARK = re.compile(r"-(\d+)\s.*?\s(\d+)\.(\d+): tracing_mark_write: ([BE])(?:\|(\d+))?(?:\|(.*))?$")
_USED, _STOPPED = "used a CPU", "stopped"
_NOT_A_TRACE = "is neither a Chrome JSON trace nor ftrace text with tracing_mark_write lines"


# -- writing ----------------------------------------------------------------------------------------------------------


def write_trace(trace: Trace, path: Path) -> None:
    """Write `trace` to a file, which is replaced as a whole.

    Raises:
        OSError: If it cannot be written.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    with open(unfinished, "w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ns","otherData":')
        file.write(
            json.dumps(
                {
                    "clock": "CLOCK_MONOTONIC",
                    "lost_slices": trace.lost,
                    "epoch_ns": trace.epoch_ns,
                    "is_sampled": trace.machine.is_sampled,
                    "conditions": trace.conditions,
                }
            )
        )
        file.write(',"traceEvents":[\n')
        separator = ""
        for event in events(trace):
            file.write(separator)
            file.write(event)
            separator = ",\n"
        file.write("\n]}\n")
    unfinished.replace(path)


def events(trace: Trace) -> Iterator[str]:
    """Yield each event as JSON: names, slices in order, flows, times of threads, and what the machine did."""
    for pid, label in sorted(trace.processes.items()):
        yield _metadata("process_name", pid, 0, label)
    quoted: dict[str, str] = {}
    for one in trace.slices:
        head = quoted.get(one.name) or quoted.setdefault(one.name, _head(one.name))
        arguments = f',"args":{{"request":"{_request_text(one.request)}"}}' if one.request else ""
        yield (
            f'{{"ph":"X",{head},"pid":{one.pid},"tid":{one.thread},"ts":{_us(one.begin_ns)},'
            f'"dur":{_us(one.duration_ns)}{arguments}}}'
        )
    yield from _flows(trace)
    for times in trace.times:
        both = {"waited_ns": times.waited_ns, "ran_ns": times.ran_ns}
        yield _instant(WAITED, times.pid, times.thread, times.begin_ns, times.end_ns, both)
    yield from _machine_events(trace)


def _machine_events(trace: Trace) -> Iterator[str]:
    machine = trace.machine
    for pid, name in sorted(machine.processes.items()):
        if pid in trace.processes:
            yield _metadata("process_labels", pid, 0, name)
        else:
            yield _metadata("process_name", pid, 0, name, is_other=True)
    for (pid, thread), name in sorted(machine.threads.items()):
        yield _metadata("thread_name", pid, thread, name)
    for use in machine.uses:
        arguments = {"used_ns": use.used_ns, "cpus": list(use.cpus)}
        yield _instant(_USED, use.pid, use.thread, use.begin_ns, use.end_ns, arguments)
    for stop in machine.stops:
        yield _instant(_STOPPED, stop.pid, stop.pid, stop.begin_ns, stop.end_ns, {"how": stop.how})


def _metadata(kind: str, pid: int, thread: int, name: str, *, is_other: bool = False) -> str:
    """Return the name of a process that records, `is_other` of another one, a thread, or another name of a process."""
    key = "labels" if kind == "process_labels" else "name"
    arguments = json.dumps({key: name} | ({"is_other": True} if is_other else {}), ensure_ascii=False)
    return f'{{"ph":"M","name":"{kind}","pid":{pid},"tid":{thread},"args":{arguments}}}'


def _instant(name: str, pid: int, thread: int, begin_ns: int, end_ns: int, arguments: dict[str, Any]) -> str:
    text = json.dumps(arguments | {"since": begin_ns / 1000})
    return f'{{"ph":"i","s":"t","name":"{name}","pid":{pid},"tid":{thread},"ts":{_us(end_ns)},"args":{text}}}'


def _head(name: str) -> str:
    tag = _TAG.search(name)
    category = f"{tag[1]},{tag[2]}" if tag else "other"
    return f'"name":{json.dumps(name, ensure_ascii=False)},"cat":"{category}"'


def _request_text(request: int) -> str:
    return f"{worker_of(request)}.{burst_of(request)}.{packet_of(request)}"


def _us(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}"


def _flows(trace: Trace) -> Iterator[str]:
    """Yield the arrows of each request whose slices are all there, each once."""
    sides: dict[str, dict[int, Slice]] = {name: {} for name in (_REQUEST, _WRITE, _WAIT)}
    for one in trace.slices:
        if one.name in sides and one.request and one.duration_ns > 0:
            sides[one.name][one.request] = one
    for request, driver in sides[_REQUEST].items():
        write, wait = sides[_WRITE].get(request), sides[_WAIT].get(request)
        if write is not None and wait is not None:
            flow = _request_text(request)
            yield _flow("s", f"{flow}>", "request", write, write.end_ns - 1)
            yield _flow("f", f"{flow}>", "request", driver, driver.begin_ns)
            yield _flow("s", f"{flow}<", "result", driver, driver.end_ns - 1)
            yield _flow("f", f"{flow}<", "result", wait, wait.end_ns - 1)


def _flow(phase: str, flow: str, name: str, place: Slice, at_ns: int) -> str:
    binding = ',"bp":"e"' if phase == "f" else ""
    return (
        f'{{"ph":"{phase}","cat":"flow","name":"{name}","id":"{flow}","pid":{place.pid},"tid":{place.thread},'
        f'"ts":{_us(at_ns)}{binding}}}'
    )


# -- reading ----------------------------------------------------------------------------------------------------------


def read_trace(path: Path) -> Trace:
    """Return the slices of a file: JSON as `write_trace` and others write it, or ftrace's text.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is no trace.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    trace = _from_json(path, text) if text.lstrip()[:1] in ("{", "[") else _from_ftrace(path, text.splitlines())
    trace.sort()
    return trace


def _from_json(path: Path, text: str) -> Trace:
    try:
        root = json.loads(text)
        found = root["traceEvents"] if isinstance(root, dict) else root
        other = root.get("otherData", {}) if isinstance(root, dict) else {}
        trace = Trace(lost=int(other.get("lost_slices", 0)), epoch_ns=int(other.get("epoch_ns", 0)))
        trace.machine.is_sampled = bool(other.get("is_sampled", False))
        trace.conditions = _conditions(other)
        open_slices: dict[tuple[int, int], list[tuple[str, int]]] = {}
        for event in found:
            _add_event(trace, event, open_slices)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path} {_NOT_A_TRACE}: {what}") from error
    return trace


def _conditions(other: dict[str, Any]) -> dict[str, Any] | None:
    """Return the conditions that `write_trace` wrote; other programs write none, or something else."""
    found = other.get("conditions")
    return found if isinstance(found, dict) else None


def _add_event(trace: Trace, event: dict[str, Any], open_slices: dict[tuple[int, int], list[tuple[str, int]]]) -> None:
    phase, arguments = event["ph"], event.get("args") or {}
    if phase == "M":
        _add_name(trace, event, arguments)
        return
    if phase not in "XBEi":
        return
    pid, thread, at_ns = int(event["pid"]), int(event["tid"]), round(event["ts"] * 1000)
    if phase == "X":
        end_ns = at_ns + round(event["dur"] * 1000)
        trace.slices.append(Slice(pid, thread, at_ns, end_ns, str(event["name"]), _request_of(arguments)))
    elif phase == "i" and "since" in arguments:
        _add_interval(trace, event["name"], (pid, thread, round(arguments["since"] * 1000), at_ns), arguments)
    elif phase == "B":
        open_slices.setdefault((pid, thread), []).append((str(event["name"]), at_ns))
    elif phase == "E" and open_slices.get((pid, thread)):
        name, begin_ns = open_slices[pid, thread].pop()
        trace.slices.append(Slice(pid, thread, begin_ns, at_ns, name))


def _add_name(trace: Trace, event: dict[str, Any], arguments: dict[str, Any]) -> None:
    kind, pid = event["name"], int(event["pid"])
    if kind == "process_name":
        names = trace.machine.processes if arguments.get("is_other") else trace.processes
        names[pid] = str(arguments["name"])
    elif kind == "process_labels":
        trace.machine.processes[pid] = str(arguments["labels"])
    elif kind == "thread_name":
        trace.machine.threads[pid, int(event.get("tid", 0))] = str(arguments["name"])


def _add_interval(trace: Trace, name: str, place: tuple[int, int, int, int], arguments: dict[str, Any]) -> None:
    """Add what `_instant` has written: pid, thread, begin and end are `place`."""
    pid, _, begin_ns, end_ns = place
    if name == WAITED:
        trace.times.append(ThreadTimes(*place, int(arguments["waited_ns"]), int(arguments["ran_ns"])))
    elif name == _USED:
        cpus = tuple(map(int, arguments["cpus"]))
        trace.machine.uses.append(CpuUse(*place, int(arguments["used_ns"]), cpus))
    elif name == _STOPPED:
        trace.machine.stops.append(Stop(pid, begin_ns, end_ns, str(arguments["how"])))


def _request_of(arguments: dict[str, Any]) -> int:
    """Return the id that `_request_text` wrote, 0 if there is none."""
    text = arguments.get("request")
    if not isinstance(text, str) or text.count(".") != 2:
        return 0
    worker, burst, packet = map(int, text.split("."))
    return request_base(worker, burst) | packet % (1 << 24)


def _from_ftrace(path: Path, lines: list[str]) -> Trace:
    """Return the slices of `tracing_mark_write` lines: B|pid|name and E."""
    trace = Trace()
    open_slices: dict[int, list[tuple[int, str, int]]] = {}
    count = 0
    for line in lines:
        mark = _MARK.search(line)
        if mark is None:
            continue
        count += 1
        thread, at_ns = int(mark[1]), int(mark[2]) * 10**9 + int(mark[3].ljust(9, "0")[:9])
        stack = open_slices.setdefault(thread, [])
        if mark[4] == "B":
            stack.append((int(mark[5] or thread), mark[6] or "", at_ns))
        elif stack:
            pid, name, begin_ns = stack.pop()
            trace.slices.append(Slice(pid, thread, begin_ns, at_ns, name))
    if not count:
        raise ValueError(f"{path} {_NOT_A_TRACE}")
    return trace
