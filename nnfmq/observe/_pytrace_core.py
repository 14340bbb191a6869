"""The Python core of trace rings: the specification of `_trace_core`, and its fallback.

A record is written by ordinary stores, as `_trace_ring.h` describes. Python has no ordered accesses to memory: on
machines other than x86-64 a reader in another process may see a cursor before the records. Such records show wrong
times in a trace, nothing else.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from nnfmq.observe.trace_layout import (
    CURSOR,
    HEADER_BYTES,
    LABEL,
    LABEL_BYTES,
    MAGIC,
    NAMES,
    NAMES_SIZE,
    PID,
    RECORD,
    RECORD_BYTES,
    RECORDS,
    SAMPLE_PERIOD_NS,
    SLOW_NS,
    STANDARD_NAMES,
    capacity_of,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["ExchangeTrace", "StepTrace", "TraceRing", "copy_names", "copy_records"]

_REQUEST, _DECODE, _ENGINE, _EXECUTE, _WRITE, _WAIT, _READ = range(1, 8)
_WAKE_UP = 11
_WAKE_UP_MAX_NS = 1 << 36
_NUMBER = (1 << 24) - 1
_MASK = (1 << 64) - 1
_RECORD = struct.Struct(RECORD)


class TraceRing:
    """The writer's end of a ring. Borrows `region`, writable memory of a ring's size, until `close`.

    All methods may be called by any thread; under the GIL each call is one step.
    """

    def __init__(self, region: Buffer, pid: int, label: bytes) -> None:
        """Begin a ring: whatever the memory has is lost.

        Raises:
            ValueError: If the region is too small for a record.
        """
        memory = memoryview(region).cast("B")
        self._capacity = capacity_of(len(memory))
        self._memory = memory
        self._words = memory[: len(memory) - len(memory) % 8].cast("Q")
        self._written = self._names_size = self._sampled_ns = 0
        self._is_open = True
        self._words[CURSOR // 8] = self._words[NAMES_SIZE // 8] = 0
        self._words[PID // 8] = pid
        memory[LABEL : LABEL + LABEL_BYTES] = label[:LABEL_BYTES].ljust(LABEL_BYTES, b"\0")
        self._count = 0
        for name in STANDARD_NAMES:
            self.add_name(name.encode())
        memory[: len(MAGIC)] = MAGIC

    @property
    def written(self) -> int:
        """The number of records that were written."""
        return self._written

    def add_name(self, name: bytes) -> int:
        """Append a name and return its id; 0, which records nothing, if there is no space for it."""
        end = NAMES + self._names_size
        if not self._is_open or end + 2 + len(name) > HEADER_BYTES:
            return 0
        self._memory[end : end + 2] = len(name).to_bytes(2, "little")
        self._memory[end + 2 : end + 2 + len(name)] = name
        self._names_size += 2 + len(name)
        self._words[NAMES_SIZE // 8] = self._names_size  # SYNC names
        self._count += 1
        return self._count

    def slice(self, name: int, request: int, begin_ns: int, end_ns: int) -> None:
        """Record a slice. Does nothing if `name` is 0."""
        if name:
            self._write(name, request, begin_ns, end_ns)

    def launches(self, names: bytes, times: Buffer) -> None:
        """Record a slice for each pair of successive `times` (i64), with the names in `names` (u32)."""
        ids, stamps = memoryview(names).cast("I"), memoryview(times).cast("B").cast("q")
        for number in range(min(len(ids), len(stamps) - 1)):
            self.slice(ids[number], 0, stamps[number], stamps[number + 1])

    def burst_request(self, base: int, words: Buffer, sent_ns: int = 0) -> bool:
        """Record a burst's request as its execution statistics describe it: `serialize.execution_stats`.

        `sent_ns` is when its client says that it has sent it, 0 if that is not known. What cannot be is left out.
        Returns whether it is time for a sample of how long the thread has waited for a CPU.

        Raises:
            ValueError: If there are fewer than 6 words.
        """
        stats = memoryview(words).cast("B")
        if len(stats) < 48:
            raise ValueError(f"{len(stats)} bytes of statistics; 48 are needed")
        sequence, received, ready, begin, end, sent = stats[:48].cast("Q")
        request = base | sequence & _NUMBER
        begun = received
        if 0 < sent_ns < received and received - sent_ns < _WAKE_UP_MAX_NS:
            self._write(_WAKE_UP, request, sent_ns, received)
            begun = sent_ns
        if ready > received:
            self._write(_DECODE, request, received, ready)
        if begin:
            self._write(_ENGINE, request, begin, end)
        self._write(_REQUEST, request, received, sent)
        return self._is_sample_due(begun, sent)

    def _is_sample_due(self, begin_ns: int, end_ns: int) -> bool:
        if end_ns - begin_ns < SLOW_NS and end_ns - self._sampled_ns < SAMPLE_PERIOD_NS:
            return False
        self._sampled_ns = end_ns
        return True

    def _write(self, name: int, request: int, begin_ns: int, end_ns: int) -> None:
        if not self._is_open:
            return
        offset = RECORDS + RECORD_BYTES * (self._written % self._capacity)
        thread = threading.get_native_id()
        _RECORD.pack_into(
            self._memory, offset, begin_ns & _MASK, end_ns & _MASK, request & _MASK, name & 0xFFFFFFFF, thread
        )
        self._written += 1
        self._words[CURSOR // 8] = self._written  # SYNC slices, overwrite

    def close(self) -> None:
        """Release the memory; later calls record nothing. Idempotent."""
        self._is_open = False
        self._words.release()
        self._memory.release()


class ExchangeTrace:
    """Records the requests of one burst of a client.

    `words` are the burst's execution statistics, whose first word is the number of the packet; borrowed. `sample` is
    called when it is time for a sample of how long the thread has waited for a CPU.
    """

    def __init__(self, ring: TraceRing, base: int, words: memoryview, sample: Callable[[], object]) -> None:
        self._ring = ring
        self._base = base
        self._words = words
        self._sample = sample
        self._begin_ns = 0

    def begin(self) -> None:
        """An execution begins."""
        self._begin_ns = monotonic_ns()

    def end(self, sent_ns: int, waited_ns: int) -> None:
        """An execution ends, whose packet was sent at `sent_ns` and whose result was read `waited_ns` later: record it.

        Does nothing unless one has begun.
        """
        if not self._begin_ns:
            return
        ring, received_ns, end_ns = self._ring, sent_ns + waited_ns, monotonic_ns()
        try:
            request = self._base | self._words[0] & _NUMBER
        except ValueError:  # another thread has closed the burst
            return
        ring.slice(_WRITE, request, self._begin_ns, sent_ns)
        ring.slice(_WAIT, request, sent_ns, received_ns)
        ring.slice(_READ, request, received_ns, end_ns)
        ring.slice(_EXECUTE, request, self._begin_ns, end_ns)
        begin_ns, self._begin_ns = self._begin_ns, 0
        if ring._is_sample_due(begin_ns, end_ns):
            self._sample()


class StepTrace:
    """Records the steps of one execution, which run one after the other; `names` has the id of each name (u32)."""

    def __init__(self, ring: TraceRing, names: bytes) -> None:
        self._ring = ring
        self._ids = memoryview(names).cast("I")
        self._next = len(self._ids)
        self._begin_ns = 0

    def run(self, steps: Sequence[Callable[[list[Any]], object]], frame: list[Any]) -> None:
        """Call each step with `frame`, and record it."""
        self.begin()
        for step in steps:
            step(frame)
            self.end_step()

    def begin(self) -> None:
        """The first step begins."""
        self._next = 0
        self._begin_ns = monotonic_ns()

    def end_step(self) -> None:
        """A step ends, and the next one begins. Does nothing after the last one."""
        if self._next < len(self._ids):
            now_ns = monotonic_ns()
            self._ring.slice(self._ids[self._next], 0, self._begin_ns, now_ns)
            self._next += 1
            self._begin_ns = now_ns


def copy_records(region: Buffer, since: int) -> tuple[int, bytes]:
    """Return the records from number `since` on that are still there: the number of the first, and their bytes.

    Raises:
        ValueError: If the region is too small for a ring.
    """
    memory = memoryview(region).cast("B")
    capacity = capacity_of(len(memory))
    cursor = _word(memory, CURSOR)  # SYNC slices
    first = max(since, cursor - capacity, 0)
    if first >= cursor:
        return cursor, b""
    data = _copied(memory, first % capacity, cursor - first, capacity)
    intact = max(first, _word(memory, CURSOR) + 1 - capacity)  # SYNC overwrite
    return (intact, data[RECORD_BYTES * (intact - first) :]) if intact < cursor else (cursor, b"")


def copy_names(region: Buffer) -> bytes:
    """Return the bytes of all names.

    Raises:
        ValueError: If the region is too small for a ring.
    """
    memory = memoryview(region).cast("B")
    capacity_of(len(memory))
    size = min(_word(memory, NAMES_SIZE), HEADER_BYTES - NAMES)  # SYNC names
    return bytes(memory[NAMES : NAMES + size])


def _word(memory: memoryview, offset: int) -> int:
    return memory[offset : offset + 8].cast("Q")[0]


def _copied(memory: memoryview, place: int, count: int, capacity: int) -> bytes:
    """Copy `count` records from `place` on; the ring continues at its beginning."""
    until_end = min(count, capacity - place)
    begin = RECORDS + RECORD_BYTES * place
    rest = RECORDS + RECORD_BYTES * (count - until_end)
    return bytes(memory[begin : begin + RECORD_BYTES * until_end]) + bytes(memory[RECORDS:rest])
