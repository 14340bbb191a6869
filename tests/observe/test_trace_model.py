"""Reading rings into a trace, also rings that a peer has filled with anything."""

from __future__ import annotations

import struct

from nnfmq.observe.trace_core import TraceRing
from nnfmq.observe.trace_files import RingReader, Slice, ThreadTimes, Trace, merged
from nnfmq.observe.trace_layout import RAN, STANDARD_NAMES, WAITED, ring_bytes

WAITED_ID, RAN_ID = STANDARD_NAMES.index(WAITED) + 1, STANDARD_NAMES.index(RAN) + 1


def ring_of(records: int) -> tuple[bytearray, TraceRing]:
    memory = bytearray(ring_bytes(records))
    return memory, TraceRing(memory, 12, "driver of é".encode())


def test_a_reader_returns_slices_in_order_with_their_names() -> None:
    memory, ring = ring_of(8)
    own = ring.add_name(b"[NN_LC_PCO]0 ADD")
    ring.slice(own, 0, 20, 30)
    ring.slice(1, 5, 10, 40)
    reader = RingReader(memoryview(memory))
    assert reader.poll() == 2
    trace = reader.trace()
    assert [(one.name, one.begin_ns, one.end_ns, one.request, one.pid) for one in trace.slices] == [
        ("[NN_LD_PE]request", 10, 40, 5, 12),
        ("[NN_LC_PCO]0 ADD", 20, 30, 0, 12),
    ]
    assert trace.slices[0].duration_ns == 30
    assert trace.processes == {12: "driver of é"}
    assert trace.lost == 0


def test_polling_often_keeps_more_than_the_ring_has() -> None:
    memory, ring = ring_of(4)
    reader = RingReader(memoryview(memory))
    for number in range(10):
        ring.slice(1, number, number, number + 1)
        assert reader.poll() == 1
    assert [one.request for one in reader.trace().slices] == list(range(10))
    assert reader.lost == 0


def test_what_was_overwritten_before_a_poll_counts_as_lost() -> None:
    memory, ring = ring_of(4)
    reader = RingReader(memoryview(memory))
    ring.slice(1, 0, 0, 1)
    reader.poll()
    for number in range(1, 10):
        ring.slice(1, number, number, number + 1)
    assert reader.poll() == 3
    assert reader.trace().lost == 6


def test_a_reader_keeps_the_last_slices_within_its_limit() -> None:
    memory, ring = ring_of(8)
    reader = RingReader(memoryview(memory), last=4)
    for number in range(12):
        ring.slice(1, number, number, number + 1)
        if number % 2:
            reader.poll()
    assert [one.request for one in reader.trace().slices] == [8, 9, 10, 11]
    assert reader.lost == 8


def test_the_times_of_threads_are_no_slices() -> None:
    memory, ring = ring_of(4)
    ring.slice(WAITED_ID, 250, 1000, 2000)
    ring.slice(RAN_ID, 600, 1000, 2000)
    reader = RingReader(memoryview(memory))
    reader.poll()
    trace = reader.trace()
    assert trace.slices == []
    assert [(one.begin_ns, one.end_ns, one.waited_ns, one.ran_ns) for one in trace.times] == [(1000, 2000, 250, 600)]


def test_times_of_which_one_half_was_overwritten_are_left_out() -> None:
    memory, ring = ring_of(4)
    ring.slice(RAN_ID, 600, 1000, 2000)
    ring.slice(WAITED_ID, 250, 2000, 3000)
    reader = RingReader(memoryview(memory))
    reader.poll()
    assert reader.trace().times == []


def test_invalid_records_and_names_are_harmless() -> None:
    memory, ring = ring_of(4)
    ring.slice(1000, 1, 5, 6)  # there is no such name
    ring.slice(1, 2, 9, 8)  # ends before it begins
    ring.slice(1, 3, 0, -1)
    struct.pack_into("<H", memory, 128, 0xFFFF)  # a name beyond all names
    memory[32:36] = b"\xff\xfe\xff\xfe"
    reader = RingReader(memoryview(memory))
    reader.poll()
    trace = reader.trace()
    assert [(one.name, one.request) for one in trace.slices] == [("?", 1)]
    assert "\ufffd" in trace.processes[12]


def test_no_name_has_what_a_terminal_obeys() -> None:
    memory = bytearray(ring_bytes(4))
    ring = TraceRing(memory, 12, b"driver\x1b[2J")
    ring.slice(ring.add_name("a model\x1b]0;title\x07\u202e".encode()), 1, 5, 6)
    reader = RingReader(memoryview(memory))
    reader.poll()
    trace = reader.trace()
    assert [one.name for one in trace.slices] == ["a model\ufffd]0;title\ufffd\ufffd"]
    assert trace.processes == {12: "driver\ufffd[2J"}


def test_memory_that_is_no_ring_has_no_writer() -> None:
    reader = RingReader(memoryview(bytearray(ring_bytes(1))))
    assert reader.poll() == 0
    assert reader.writer_pid() == 0
    assert reader.trace() == Trace()


def test_traces_are_merged_in_the_order_of_time() -> None:
    first = Trace([Slice(1, 1, 10, 50, "a"), Slice(1, 1, 20, 30, "b")], {1: "x"}, [ThreadTimes(1, 1, 0, 1, 1, 0)], 2)
    second = Trace([Slice(2, 2, 10, 60, "c"), Slice(2, 2, 15, 16, "d")], {2: "y"}, [], 3)
    trace = merged([first, second])
    assert [one.name for one in trace.slices] == ["c", "a", "d", "b"]
    assert (trace.processes, len(trace.times), trace.lost) == ({1: "x", 2: "y"}, 1, 5)
