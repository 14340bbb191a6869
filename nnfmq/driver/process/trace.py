"""Traces of workers: where each records its slices, and the area of all.

A client that traces itself gives the worker a ring (`StartTrace`); the worker only writes there, and reads nothing
back. Otherwise the worker looks after each request whether a client traces the driver. One look at `switch` tells both,
and costs 10 to 20 ns after the reply was sent. (OBS-7)
"""

from __future__ import annotations

import os
import threading
from time import monotonic_ns
from typing import Final

from nnfmq.base.memory import Memory, allocate_pages
from nnfmq.base.ownership import Closable
from nnfmq.base.verbose_log import vlog, vlog_is_on
from nnfmq.hal.errors import GeneralFailure, InvalidArgument, NnfmqError
from nnfmq.observe.trace_layout import request_base, ring_bytes
from nnfmq.observe.trace_points import TRACING, TraceRecorder
from nnfmq.serialize.messages import Call

__all__ = [
    "ACTIVE",
    "AREA_RING_BYTES",
    "OWNER",
    "WORKER_TRACE",
    "TraceArea",
    "WorkerTrace",
    "recorded_call",
    "ring_offset",
    "slots_of",
]


# ----------------------------------------------------------------------------------------------------------------------
# The trace area of a driver: a ring for each worker, in which all record while a client traces the driver.
#
#     page 0     byte 0: the slot of the worker whose client traces the driver, 0 = nobody does; then a byte for each
#                slot from 1 on: 1 if the worker has begun to record
#     then       for each slot a trace ring of AREA_RING_BYTES (`observe.trace_layout`)
#
# The memory is sparse: a worker allocates the pages of its ring when it begins to record, so a driver that is not
# traced needs one page. The pages stay allocated for the next trace. A worker writes its own ring and byte, and byte 0
# if its client begins to trace. If it dies, the supervisor ends the trace. The area is trusted: only the supervisor and
# its workers can write to it, because it is sealed against new writable mappings as soon as the supervisor has mapped
# it (unless workers are programs of their own, which must map it); clients that administer the driver may read it (see
# docs/explanation/security-model.md).


OWNER: Final = 0
ACTIVE: Final = 0  # plus the slot
AREA_RING_BYTES: Final = ring_bytes(32768)
_PAGE = 4096


def ring_offset(slot: int) -> int:
    """Return the offset at which the ring of a slot, from 1 on, begins."""
    return _PAGE + (slot - 1) * AREA_RING_BYTES


def slots_of(size_bytes: int) -> int:
    """Return how many slots an area of `size_bytes` has."""
    return max(0, (size_bytes - _PAGE) // AREA_RING_BYTES)


class TraceArea(Closable):
    """The supervisor's side, for workers with the slots 1 to `slots`. Owns its memory; close it, or use `with`.

    Workers inherit the mapping (`Memory.inherited`), other children do not. Without `one_writer` workers map the memory
    themselves.
    """

    def __init__(self, slots: int, *, one_writer: bool = True) -> None:
        assert slots < _PAGE
        self.memory = Memory.create_sparse(ring_offset(slots + 1), "nnfmq-trace", one_writer=one_writer)
        self.memory.keep_from_children()

    def release(self, slot: int) -> None:
        """Forget a worker that has exited: the trace of its client ends, and its ring is free for another worker.

        What it has recorded stays readable until then.
        """
        view = self.memory.view
        if view[OWNER] == slot:
            view[OWNER] = 0

    def close(self) -> None:
        """Release the memory. Idempotent."""
        self.memory.close()


# ----------------------------------------------------------------------------------------------------------------------
# Where this worker records its slices: in its client's ring, in its ring of the driver's trace area, or nowhere.


_NOBODY = (0,)  # CPython reads tuples faster than bytes
_RECORDS = (1,)


class WorkerTrace:
    """Begins and ends the recording of this process. Thread-safe.

    Attributes:
        switch: Its first item is not 0 while this process records, or a client traces the driver.
        label: What the rings say about this process.
    """

    def __init__(self) -> None:
        self.switch: memoryview | tuple[int, ...] = _NOBODY
        # Its first item is not 0 while a client traces the driver.
        self._driver_switch: memoryview | tuple[int, ...] = _NOBODY
        self.label = "driver"
        self._area: Memory | None = None
        self._slot = 0
        self._client_ring: Memory | None = None
        self._area_recorder: TraceRecorder | None = None
        self._lock = threading.Lock()

    def use_area(self, area: Memory, slot: int) -> None:
        """Record in the ring of `slot` while a client traces the driver. Borrows `area` until `stop`."""
        self._area, self._slot = area, slot
        self.switch = self._driver_switch = area.view[OWNER : OWNER + 1]

    def record_to(self, memory: Memory) -> None:
        """Record in the client's ring from now on. Takes ownership of `memory`, also if it raises.

        Raises:
            InvalidArgument: If the memory is too small, or sealed against writing.
        """
        if not memory.is_writable or memory.size_bytes < ring_bytes(1):
            memory.close()
            raise InvalidArgument(f"a trace ring is writable and has at least {ring_bytes(1)} bytes")
        recorder = TraceRecorder(memory.view, self.label)
        with self._lock:
            previous, self._client_ring, self._area_recorder = self._client_ring, memory, None
            TRACING.start(recorder)
            self.switch = _RECORDS
        if previous is not None:
            previous.close()

    def open_area(self) -> int:
        """Begin to trace all workers, and return a read-only fd of the area, which the caller owns.

        Raises:
            GeneralFailure: If this driver has no area, or another client traces it.
        """
        area = self._area
        if area is None:
            raise GeneralFailure("an embedded driver has one client: trace that with `nnfmq trace -o FILE -- COMMAND`")
        if area.view[OWNER] not in (0, self._slot):
            raise GeneralFailure("another client traces this driver already; try again when it has ended")
        fd = os.open(f"/proc/self/fd/{area.fileno()}", os.O_RDONLY | os.O_CLOEXEC)
        area.view[OWNER] = self._slot
        return fd

    def note_request(self, base: int, words: memoryview, sent_ns: int) -> bool:
        """Record a burst's request, and begin or end to record in the area. Call it while `switch` says so.

        Returns whether it is of use to know when the client has sent the next one: it does not record that itself.
        `sent_ns` is what it says of this one, 0 if that is not known.
        """
        recorder = TRACING.recorder
        if recorder is None or (recorder is self._area_recorder and not self._driver_switch[0]):
            recorder = self.recorder()
        is_of_area = recorder is not None and recorder is self._area_recorder
        if recorder is not None and recorder.ring.burst_request(base, words, sent_ns if is_of_area else 0):
            recorder.sample_times()
        return is_of_area

    def recorder(self) -> TraceRecorder | None:
        """Return the recorder of now, after a look whether a client traces the driver; None if none does."""
        recorder = TRACING.recorder
        if recorder is None:
            return self._begin_in_area() if self._driver_switch[0] else None
        if recorder is self._area_recorder and not self._driver_switch[0]:
            self._end_in_area()
            return None
        return recorder

    def _begin_in_area(self) -> TraceRecorder | None:
        with self._lock:
            area, slot = self._area, self._slot
            if TRACING.recorder is not None or area is None:
                return TRACING.recorder
            offset = ring_offset(slot)
            try:
                allocate_pages(area.fileno(), AREA_RING_BYTES, offset)
            except NnfmqError:  # no memory is left: the request must not fail because of a trace
                return None
            recorder = self._area_recorder = TraceRecorder(area.view[offset : offset + AREA_RING_BYTES], self.label)
            TRACING.start(recorder)
            self.switch = _RECORDS
            area.view[ACTIVE + slot] = 1
            return recorder

    def _end_in_area(self) -> None:
        with self._lock:
            if TRACING.recorder is self._area_recorder:
                TRACING.stop()
                self.switch = self._driver_switch
            self._area_recorder = None

    def stop(self) -> None:
        """Record nothing any more, and release the client's ring. Idempotent. For tests: a worker exits without it."""
        with self._lock:
            self.switch = self._driver_switch = _NOBODY
            TRACING.stop()
            ring, self._client_ring, self._area, self._area_recorder = self._client_ring, None, None, None
        if ring is not None:
            ring.close()


WORKER_TRACE = WorkerTrace()
"""That of this process."""


class recorded_call:
    """`with recorded_call(message):` records and logs what handling a call of the control channel took."""

    __slots__ = ("_begin_ns", "_message")

    def __init__(self, message: Call) -> None:
        self._message = message

    def __enter__(self) -> None:
        WORKER_TRACE.recorder()  # begins to record, so that the engine's steps are recorded, too
        self._begin_ns = monotonic_ns()

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _traceback: object) -> None:
        recorder = TRACING.recorder
        if recorder is not None:
            request = request_base(os.getpid()) | self._message.call % (1 << 24)
            recorder.slice(self._message.trace_name("LD"), self._begin_ns, monotonic_ns(), request)
        if vlog_is_on("driver"):
            took_ms, failed = (monotonic_ns() - self._begin_ns) / 1e6, f", failed: {error}" if error else ""
            vlog("driver", "%s took %.3f ms%s", type(self._message).__name__, took_ms, failed)
