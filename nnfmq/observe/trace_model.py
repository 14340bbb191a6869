"""A recorded trace in memory: slices of threads, and reading them from rings, of this or of other processes."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from nnfmq.observe.trace_core import copy_names, copy_records
from nnfmq.observe.trace_layout import LABEL, LABEL_BYTES, MAGIC, PID, RECORD, RECORD_BYTES, WAITED

__all__ = ["CpuWait", "RingReader", "Slice", "Trace", "merged"]

_LAST_RECORDS = 1 << 18  # of each ring, in the memory of the reader


class Slice(NamedTuple):
    """What a thread did from `begin_ns` to `end_ns`; `request` joins the slices of one request, 0 = none."""

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


class CpuWait(NamedTuple):
    """From `begin_ns` to `end_ns` a thread was runnable but had no CPU for `waited_ns`, all in all."""

    pid: int
    thread: int
    begin_ns: int
    end_ns: int
    waited_ns: int


@dataclass(slots=True)
class Trace:
    """Slices in the order of their begin, an enclosing one first; labels of processes; how many slices were lost."""

    slices: list[Slice] = field(default_factory=list)
    processes: dict[int, str] = field(default_factory=dict)
    waits: list[CpuWait] = field(default_factory=list)
    lost: int = 0

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
            self._label = bytes(self._region[LABEL : LABEL + LABEL_BYTES]).rstrip(b"\0").decode("utf-8", "replace")
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
        """Return what `poll` has copied."""
        names, pid = list(_names(self._names)), self.pid
        trace = Trace(processes={pid: self._label} if pid else {}, lost=self.lost)
        for begin_ns, end_ns, request, name, thread in self._slices():
            text = names[name - 1] if 0 < name <= len(names) else "?"
            if text == WAITED:
                trace.waits.append(CpuWait(pid, thread, begin_ns, end_ns, request))
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
        yield data[at + 2 : at + 2 + size].decode("utf-8", "replace")
        at += 2 + size


def merged(traces: Iterable[Trace]) -> Trace:
    """Return one trace with everything of all."""
    result = Trace()
    for trace in traces:
        result.slices += trace.slices
        result.waits += trace.waits
        result.processes |= trace.processes
        result.lost += trace.lost
    result.sort()
    return result
