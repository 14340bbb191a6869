"""Where a worker records: its client's ring, its ring of the driver's area, or nowhere. (OBS-7)"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator

import pytest

from nnfmq.base.memory import Memory
from nnfmq.driver.process.trace import (
    ACTIVE,
    AREA_RING_BYTES,
    OWNER,
    TraceArea,
    WorkerTrace,
    recorded_call,
    ring_offset,
    slots_of,
)
from nnfmq.hal.errors import GeneralFailure, InvalidArgument, ResourceExhaustedTransient
from nnfmq.observe.trace_files import RingReader, Slice
from nnfmq.observe.trace_layout import ring_bytes
from nnfmq.observe.trace_points import TRACING
from nnfmq.serialize import messages

WORDS = memoryview(bytearray(struct.pack("<6Q", 3, 100, 100, 110, 150, 160).ljust(256, b"\0"))).cast("Q")
SLOTS = 3


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerTrace]:
    made = WorkerTrace()
    monkeypatch.setattr("nnfmq.driver.process.trace.WORKER_TRACE", made)
    yield made
    made.stop()


@pytest.fixture
def area() -> Iterator[TraceArea]:
    with TraceArea(SLOTS) as made:
        yield made


def slices_in(view: memoryview) -> list[Slice]:
    reader = RingReader(view)
    reader.poll()
    found = reader.trace().slices
    del reader
    return found


def slices_of(area: TraceArea, slot: int) -> list[Slice]:
    offset = ring_offset(slot)
    return slices_in(area.memory.view[offset : offset + AREA_RING_BYTES])


def allocated_bytes(memory: Memory) -> int:
    return os.fstat(memory.fileno()).st_blocks * 512


def worker_in(area: TraceArea, trace: WorkerTrace, slot: int) -> WorkerTrace:
    trace.use_area(area.memory, slot)
    return trace


def test_the_area_has_a_ring_for_each_slot_and_takes_no_memory_until_it_is_used(area: TraceArea) -> None:
    assert slots_of(area.memory.size_bytes) == SLOTS
    assert [ring_offset(slot) for slot in (1, 2, 3)] == [4096, 4096 + AREA_RING_BYTES, 4096 + 2 * AREA_RING_BYTES]
    assert AREA_RING_BYTES % 4096 == 0
    assert allocated_bytes(area.memory) == 0


def test_a_worker_that_nobody_traces_records_nothing(area: TraceArea, trace: WorkerTrace) -> None:
    worker_in(area, trace, 2)
    assert trace.switch[0] == 0
    trace.note_request(0, WORDS, 0)
    assert trace.recorder() is None
    assert TRACING.recorder is None
    assert bytes(area.memory.view[:8]) == bytes(8)


def test_a_worker_records_in_its_ring_while_a_client_traces_the_driver(area: TraceArea, trace: WorkerTrace) -> None:
    worker_in(area, trace, 2).label = "driver of x"
    area.memory.view[OWNER] = 3  # the client of another worker
    assert trace.switch[0]
    trace.note_request(7 << 42, WORDS, 0)
    assert bytes(area.memory.view[ACTIVE + 1 : ACTIVE + 4]) == b"\0\1\0"
    assert [one.name for one in slices_of(area, 2)] == ["[NN_LD_PE]request", "[NN_LC_PE]engine"]
    assert AREA_RING_BYTES <= allocated_bytes(area.memory) < 2 * AREA_RING_BYTES
    area.memory.view[OWNER] = 0
    trace.note_request(7 << 42, WORDS, 0)
    assert TRACING.recorder is None
    assert len(slices_of(area, 2)) == 2


def test_the_clients_time_is_of_use_while_only_the_driver_is_traced(area: TraceArea, trace: WorkerTrace) -> None:
    worker_in(area, trace, 2)
    area.memory.view[OWNER] = 3
    assert trace.note_request(0, WORDS, 0) is True
    received_ns = WORDS[1]
    assert trace.note_request(0, WORDS, received_ns - 1 if received_ns else 0) is True
    area.memory.view[OWNER] = 0
    assert trace.note_request(0, WORDS, 0) is False
    trace.record_to(Memory.create(ring_bytes(8)))
    assert trace.note_request(0, WORDS, 0) is False  # the client records it itself


def test_the_switch_is_on_until_the_request_that_ends_the_recording(area: TraceArea, trace: WorkerTrace) -> None:
    worker_in(area, trace, 2)
    area.memory.view[OWNER] = 3
    trace.note_request(0, WORDS, 0)
    area.memory.view[OWNER] = 0
    assert trace.switch[0]  # the next request ends the recording
    trace.note_request(0, WORDS, 0)
    assert not trace.switch[0]
    area.memory.view[OWNER] = 3
    assert trace.switch[0]


def test_the_switch_stays_on_in_a_worker_with_its_client_s_ring(trace: WorkerTrace) -> None:
    assert not trace.switch[0]
    trace.record_to(Memory.create(ring_bytes(8)))
    assert trace.switch[0]
    trace.note_request(0, WORDS, 0)
    assert trace.switch[0]
    trace.stop()
    assert not trace.switch[0]


def test_a_worker_records_again_in_a_second_trace(area: TraceArea, trace: WorkerTrace) -> None:
    worker_in(area, trace, 1)
    for _ in range(2):
        area.memory.view[OWNER] = 2
        trace.note_request(0, WORDS, 0)
        assert len(slices_of(area, 1)) == 2
        area.memory.view[OWNER] = 0
        assert trace.recorder() is None


def test_without_memory_for_a_ring_requests_go_on(
    area: TraceArea, trace: WorkerTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ResourceExhaustedTransient("no memory")

    monkeypatch.setattr("nnfmq.driver.process.trace.allocate_pages", refuse)
    worker_in(area, trace, 1)
    area.memory.view[OWNER] = 2
    trace.note_request(0, WORDS, 0)
    assert TRACING.recorder is None
    assert area.memory.view[ACTIVE + 1] == 0


def test_the_client_of_one_worker_traces_the_driver_until_the_worker_exits(area: TraceArea, trace: WorkerTrace) -> None:
    fd = worker_in(area, trace, 2).open_area()
    try:
        assert area.memory.view[OWNER] == 2
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(fd, b"x")
        os.close(trace.open_area())  # again
        area.release(1)
        assert area.memory.view[OWNER] == 2
        area.release(2)
        assert area.memory.view[OWNER] == 0
    finally:
        os.close(fd)


def test_who_reads_the_area_cannot_open_it_for_writing_either(area: TraceArea, trace: WorkerTrace) -> None:
    fd = worker_in(area, trace, 2).open_area()
    try:
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    finally:
        os.close(fd)
    try:
        with pytest.raises(PermissionError):
            os.pwrite(again, b"x", ring_offset(1))
        with pytest.raises(PermissionError):
            mmap.mmap(again, 0)
    finally:
        os.close(again)


def test_a_second_client_cannot_trace_the_driver(area: TraceArea, trace: WorkerTrace) -> None:
    worker_in(area, trace, 2)
    area.memory.view[OWNER] = 1
    with pytest.raises(GeneralFailure, match="another client traces this driver already"):
        trace.open_area()
    assert area.memory.view[OWNER] == 1


def test_an_embedded_driver_has_no_area(trace: WorkerTrace) -> None:
    with pytest.raises(GeneralFailure, match="an embedded driver has one client"):
        trace.open_area()


def test_a_client_gives_its_worker_a_ring(area: TraceArea, trace: WorkerTrace) -> None:
    worker_in(area, trace, 1)
    with Memory.create(ring_bytes(8)) as ring:
        trace.record_to(Memory.adopt(os.dup(ring.fileno())))
        area.memory.view[OWNER] = 2  # the client's ring comes first
        trace.note_request(0, WORDS, 0)
        assert len(slices_in(ring.view)) == 2
        assert area.memory.view[ACTIVE + 1] == 0
        with Memory.create(ring_bytes(8)) as second:
            trace.record_to(Memory.adopt(os.dup(second.fileno())))
            trace.note_request(0, WORDS, 0)
            assert (len(slices_in(ring.view)), len(slices_in(second.view))) == (2, 2)
        trace.stop()


@pytest.mark.parametrize(("size", "one_writer"), [(ring_bytes(1) - 1, False), (ring_bytes(4), True)])
def test_memory_that_cannot_be_a_ring_is_rejected_and_closed(trace: WorkerTrace, size: int, one_writer: bool) -> None:
    with Memory.create(size, one_writer=one_writer) as ring:
        received = Memory.adopt(os.dup(ring.fileno()))
        with pytest.raises(InvalidArgument, match="a trace ring is writable and has at least 32800 bytes"):
            trace.record_to(received)
        assert received.closed
    assert TRACING.recorder is None


def test_a_call_is_recorded_with_its_id(trace: WorkerTrace) -> None:
    with Memory.create(ring_bytes(8)) as ring:
        trace.record_to(Memory.adopt(os.dup(ring.fileno())))
        with recorded_call(messages.ListDevices(77)):
            pass
        (one,) = slices_in(ring.view)
        assert one.name == "[NN_LD_PI]ListDevices"
        assert one.request % (1 << 24) == 77
        assert one.request >> 42 == os.getpid() % (1 << 22)
        trace.stop()


def test_a_call_begins_to_record_in_the_area(area: TraceArea, trace: WorkerTrace) -> None:
    worker_in(area, trace, 1)
    area.memory.view[OWNER] = 2
    with recorded_call(messages.ListDevices(1)):
        assert TRACING.recorder is not None
    assert [one.name for one in slices_of(area, 1)] == ["[NN_LD_PI]ListDevices"]


def test_a_call_is_not_recorded_while_nobody_traces(trace: WorkerTrace) -> None:
    with recorded_call(messages.ListDevices(1)):
        assert TRACING.recorder is None
