"""Trace rings of both cores: what they write is what the layout says, and a reader gets only intact records."""

from __future__ import annotations

import mmap
import os
import signal
import struct
import threading
from types import ModuleType

import pytest

from nnfmq.observe import trace_core, trace_layout

HEADER = 32768
PID, LABEL = 4711, b"application app.py"
CORES = trace_core.CORES.available()
pytestmark = pytest.mark.parametrize("core", CORES, indirect=True)


@pytest.fixture
def core(request: pytest.FixtureRequest) -> ModuleType:
    return trace_core.CORES.load(request.param)


@pytest.fixture
def memory() -> bytearray:
    return bytearray(HEADER + 4 * 32)


def records(memory: bytearray) -> list[tuple[int, ...]]:
    return list(struct.iter_unpack("<QQQII", memory[HEADER:]))


def names(memory: bytearray) -> list[str]:
    (size,) = struct.unpack_from("<Q", memory, 16)
    data, found = bytes(memory[128 : 128 + size]), []
    while data:
        length = int.from_bytes(data[:2], "little")
        found.append(data[2 : 2 + length].decode())
        data = data[2 + length :]
    return found


def test_a_new_ring_has_the_documented_header(core: ModuleType, memory: bytearray) -> None:
    memory[8:128] = b"\xff" * 120
    core.TraceRing(memory, PID, LABEL).close()
    assert memory[:8] == b"nnfmqtr1"
    assert struct.unpack_from("<Q", memory, 8) == (0,)
    assert struct.unpack_from("<Q", memory, 24) == (PID,)
    assert bytes(memory[32:128]) == LABEL.ljust(96, b"\0")
    assert names(memory) == list(trace_layout.STANDARD_NAMES)


def test_a_slice_is_a_record_of_32_bytes(core: ModuleType, memory: bytearray) -> None:
    ring = core.TraceRing(memory, PID, LABEL)
    ring.slice(3, 2**63 + 5, 1000, 2500)
    assert records(memory)[0] == (1000, 2500, 2**63 + 5, 3, threading.get_native_id())
    assert struct.unpack_from("<Q", memory, 8) == (1,)
    assert ring.written == 1


def test_each_thread_writes_its_own_id(core: ModuleType, memory: bytearray) -> None:
    ring, ids = core.TraceRing(memory, PID, LABEL), []

    def write() -> None:
        ids.append(threading.get_native_id())
        ring.slice(1, 0, 0, 1)

    write()
    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert [record[4] for record in records(memory)[:2]] == ids
    assert ids[0] != ids[1]


def test_a_forked_child_writes_its_own_thread_id(core: ModuleType, memory: bytearray) -> None:
    ring = core.TraceRing(memory, PID, LABEL)
    ring.slice(1, 0, 0, 1)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        ring.slice(1, 0, 2, 3)
        os.write(writing, records(memory)[1][4].to_bytes(4, "little"))
        os._exit(0)
    os.close(writing)
    written = int.from_bytes(os.read(reading, 4), "little")
    os.close(reading)
    os.waitpid(child, 0)
    assert written == child


def test_a_full_ring_keeps_the_last_records_and_the_reader_says_from_which_on(
    core: ModuleType, memory: bytearray
) -> None:
    ring = core.TraceRing(memory, PID, LABEL)
    for number in range(6):
        ring.slice(1, number, number, number + 1)
    first, data = core.copy_records(memory, 0)
    # 4 places; the record that may be overwritten at this moment is left out.
    assert first == 3
    assert [record[2] for record in struct.iter_unpack("<QQQII", data)] == [3, 4, 5]


def test_a_reader_goes_on_where_it_was(core: ModuleType, memory: bytearray) -> None:
    ring = core.TraceRing(memory, PID, LABEL)
    ring.slice(1, 10, 0, 1)
    assert core.copy_records(memory, 0)[0] == 0
    assert core.copy_records(memory, 1) == (1, b"")
    ring.slice(1, 11, 0, 1)
    first, data = core.copy_records(memory, 1)
    assert (first, [record[2] for record in struct.iter_unpack("<QQQII", data)]) == (1, [11])


def test_a_reader_survives_any_cursor(core: ModuleType, memory: bytearray) -> None:
    core.TraceRing(memory, PID, LABEL).close()
    for cursor in (2**64 - 1, 2**63, 5, 4):
        struct.pack_into("<Q", memory, 8, cursor)
        first, data = core.copy_records(memory, 0)
        assert len(data) == 32 * (cursor - first)
        assert len(data) <= 4 * 32
        assert core.copy_records(memory, 2**64 - 1) == (cursor, b"")


def test_a_reader_copies_no_names_from_beyond_their_place(core: ModuleType, memory: bytearray) -> None:
    core.TraceRing(memory, PID, LABEL).close()
    struct.pack_into("<Q", memory, 16, 2**64 - 1)
    assert len(core.copy_names(memory)) == HEADER - 128


def test_a_writer_ignores_what_a_peer_stores_in_the_ring(core: ModuleType, memory: bytearray) -> None:
    ring = core.TraceRing(memory, PID, LABEL)
    ring.slice(1, 0, 0, 1)
    struct.pack_into("<QQ", memory, 8, 2**64 - 1, 2**64 - 1)
    ring.slice(1, 7, 2, 3)
    assert records(memory)[1][:3] == (2, 3, 7)
    assert struct.unpack_from("<Q", memory, 8) == (2,)
    assert ring.add_name(b"new") == len(trace_layout.STANDARD_NAMES) + 1


def test_names_get_numbers_until_their_place_is_full(core: ModuleType, memory: bytearray) -> None:
    ring, count = core.TraceRing(memory, PID, LABEL), len(trace_layout.STANDARD_NAMES)
    long = b"x" * 3000
    added = [ring.add_name(long) for _ in range(20)]
    space = HEADER - 128 - sum(2 + len(name) for name in trace_layout.STANDARD_NAMES)
    fitting = space // 3002
    assert added == [*range(count + 1, count + 1 + fitting), *[0] * (20 - fitting)]
    ring.slice(0, 0, 0, 1)  # id 0 records nothing
    assert ring.written == 0
    assert core.copy_names(memory).count(long) == fitting


def test_steps_are_recorded_one_after_the_other(core: ModuleType, memory: bytearray) -> None:
    ring = core.TraceRing(memory, PID, LABEL)
    steps = core.StepTrace(ring, struct.pack("<3I", 7, 0, 8))
    steps.end_step()  # nothing has begun
    assert ring.written == 0
    begin_ns = trace_now()
    steps.begin()
    for _ in range(4):  # one more than there are
        steps.end_step()
    first, last = records(memory)[:2]
    assert begin_ns <= first[0] <= first[1] <= last[0] <= last[1] <= trace_now()
    assert (first[2:4], last[2:4], ring.written) == ((0, 7), (0, 8), 2)
    steps.begin()
    steps.end_step()
    assert records(memory)[2][3] == 7
    assert records(memory)[2][0] >= last[1]


def test_the_steps_that_are_run_are_recorded_until_one_fails(core: ModuleType, memory: bytearray) -> None:
    ring, frame = core.TraceRing(memory, PID, LABEL), [0]
    steps = core.StepTrace(ring, struct.pack("<2I", 7, 8))
    steps.run([lambda frame: frame.append(1), lambda frame: frame.append(2)], frame)
    first, second = records(memory)[:2]
    assert (frame, first[3], second[3], ring.written) == ([0, 1, 2], 7, 8, 2)
    assert first[0] <= first[1] <= second[0] <= second[1]
    with pytest.raises(ZeroDivisionError):
        steps.run((lambda frame: frame.append(3), lambda _frame: 1 // 0), frame)
    assert (frame, ring.written) == ([0, 1, 2, 3], 3)


def trace_now() -> int:
    import time

    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


def test_launches_are_recorded_between_successive_times(core: ModuleType, memory: bytearray) -> None:
    ring = core.TraceRing(memory, PID, LABEL)
    ring.launches(struct.pack("<3I", 7, 0, 8), memoryview(struct.pack("<4q", 10, 20, 35, 50)))
    assert [record[:4] for record in records(memory)[:2]] == [(10, 20, 0, 7), (35, 50, 0, 8)]
    ring.launches(struct.pack("<3I", 7, 7, 7), memoryview(b""))
    assert ring.written == 2


def statistics(*words: int) -> memoryview:
    return memoryview(bytearray(struct.pack("<6Q", *words).ljust(256, b"\0"))).cast("Q")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        pytest.param((5, 100, 100, 110, 190, 200), [(110, 190, 3), (100, 200, 1)], id="cached"),
        pytest.param((5, 100, 107, 110, 190, 200), [(100, 107, 2), (110, 190, 3), (100, 200, 1)], id="decoded"),
        pytest.param((5, 100, 0, 0, 0, 200), [(100, 200, 1)], id="failed"),
    ],
)
def test_a_request_is_recorded_as_its_statistics_say(
    core: ModuleType, memory: bytearray, words: tuple[int, ...], expected: list[tuple[int, int, int]]
) -> None:
    ring, base = core.TraceRing(memory, PID, LABEL), trace_layout.request_base(4711, 9)
    ring.burst_request(base, statistics(*words))
    written = records(memory)[: ring.written]
    assert [(begin, end, name) for begin, end, _, name, _ in written] == expected
    assert {request for _, _, request, _, _ in written} == {(4711 << 42) | (9 << 24) | 5}


@pytest.mark.parametrize(
    ("sent", "expected"),
    [(40, [(40, 100, 11)]), (100, []), (101, []), (0, []), (2**64 - 1, [])],
    ids=["before", "at once", "afterwards", "not known", "impossible"],
)
def test_the_wake_up_for_a_request_begins_when_its_client_says_that_it_sent_it(
    core: ModuleType, memory: bytearray, sent: int, expected: list[tuple[int, int, int]]
) -> None:
    ring = core.TraceRing(memory, PID, LABEL)
    ring.burst_request(0, statistics(5, 100, 100, 110, 190, 200), sent)
    written = records(memory)[: ring.written]
    assert [(begin, end, name) for begin, end, _, name, _ in written] == [*expected, (110, 190, 3), (100, 200, 1)]
    assert trace_layout.STANDARD_NAMES[11 - 1] == trace_layout.WAKE_UP


def test_a_request_that_waited_for_long_is_slow(core: ModuleType, memory: bytearray) -> None:
    ring, ms = core.TraceRing(memory, PID, LABEL), 1_000_000
    assert ring.burst_request(0, statistics(1, 100 * ms, 0, 1, 1, 100 * ms + 10), 0) is True  # the first one
    assert ring.burst_request(0, statistics(1, 102 * ms, 0, 1, 1, 102 * ms + 10), 102 * ms - 5) is False
    assert ring.burst_request(0, statistics(1, 103 * ms, 0, 1, 1, 103 * ms + 10), 102 * ms) is True


def test_statistics_that_are_too_short_are_rejected(core: ModuleType, memory: bytearray) -> None:
    ring = core.TraceRing(memory, PID, LABEL)
    with pytest.raises(ValueError, match="40 bytes of statistics; 48 are needed"):
        ring.burst_request(0, memoryview(bytes(40)))


def test_a_sample_is_due_after_a_slow_request_and_every_10_ms(core: ModuleType, memory: bytearray) -> None:
    ring, ms = core.TraceRing(memory, PID, LABEL), 1_000_000
    at = [100 * ms, 101 * ms, 105 * ms, 109 * ms, 110 * ms + 1]
    due = [ring.burst_request(0, statistics(1, begin, begin, 1, 1, begin + 10)) for begin in at]
    assert due == [True, False, False, False, True]
    assert ring.burst_request(0, statistics(1, 111 * ms, 0, 1, 1, 112 * ms)) is True
    assert ring.burst_request(0, statistics(1, 111 * ms, 0, 1, 1, 112 * ms - 1)) is False


def test_an_exchange_becomes_four_slices_of_one_request(core: ModuleType, memory: bytearray) -> None:
    ring, samples = core.TraceRing(memory, PID, LABEL), []
    exchange = core.ExchangeTrace(ring, 1 << 42, statistics(8, 0, 0, 0, 0, 0), lambda: samples.append(1))
    before = trace_now()
    exchange.begin()
    sent_ns = trace_now()
    exchange.end(sent_ns, 0)
    (write, wait, read, execute), after = records(memory)[:4], trace_now()
    assert [slice_[3] for slice_ in (write, wait, read, execute)] == [5, 6, 7, 4]
    assert before <= write[0] <= write[1] == wait[0] == sent_ns == wait[1] == read[0] <= read[1] <= after
    assert execute[:2] == (write[0], read[1])
    assert {slice_[2] for slice_ in (write, wait, read, execute)} == {(1 << 42) | 8}
    assert samples == [1]


def test_the_wait_of_an_exchange_begins_when_it_was_sent(core: ModuleType, memory: bytearray) -> None:
    ring = core.TraceRing(memory, PID, LABEL)
    exchange = core.ExchangeTrace(ring, 0, statistics(8, 0, 0, 0, 0, 0), lambda: None)
    exchange.begin()
    exchange.end(5_000, 700)
    assert records(memory)[1][:2] == (5_000, 5_700)


def test_an_exchange_that_has_not_begun_is_not_recorded(core: ModuleType, memory: bytearray) -> None:
    ring, words = core.TraceRing(memory, PID, LABEL), statistics(8, 0, 0, 0, 0, 0)
    exchange = core.ExchangeTrace(ring, 0, words, lambda: None)
    exchange.end(1, 1)
    assert ring.written == 0
    exchange.begin()
    exchange.end(1, 1)
    exchange.end(1, 1)
    assert ring.written == 4
    exchange.begin()
    words.release()  # the burst is closed by another thread
    exchange.end(1, 1)
    assert ring.written == 4


def test_a_closed_ring_records_nothing_and_releases_its_memory(core: ModuleType, memory: bytearray) -> None:
    ring = core.TraceRing(memory, PID, LABEL)
    ring.close()
    ring.close()
    memory.extend(b"")  # raises BufferError while the ring uses the memory
    before = bytes(memory)
    ring.slice(1, 0, 0, 1)
    ring.burst_request(0, statistics(1, 2, 2, 3, 4, 5))
    assert ring.add_name(b"late") == 0
    assert bytes(memory) == before


@pytest.mark.parametrize("size", [0, HEADER, HEADER + 31])
def test_memory_without_space_for_a_record_is_rejected(core: ModuleType, size: int) -> None:
    memory, message = bytearray(size), f"a trace ring of {size} bytes; it needs at least {HEADER + 32}"
    with pytest.raises(ValueError, match=message):
        core.TraceRing(memory, PID, LABEL)
    with pytest.raises(ValueError, match=message):
        core.copy_records(memory, 0)
    with pytest.raises(ValueError, match=message):
        core.copy_names(memory)


def test_a_long_label_is_cut(core: ModuleType, memory: bytearray) -> None:
    core.TraceRing(memory, PID, b"y" * 200).close()
    assert bytes(memory[32:128]) == b"y" * 96


def test_a_reader_of_another_process_copies_only_intact_records(core: ModuleType) -> None:
    """The writer, a child, overwrites the ring while it is read; each record has its number in three fields."""
    shared = mmap.mmap(-1, HEADER + 16 * 32)
    child = os.fork()
    if not child:
        ring = core.TraceRing(shared, PID, LABEL)
        for number in range(2_000_000):
            ring.slice(1, number, number, number + 1)
        os._exit(0)
    try:
        seen = gaps = 0
        while seen < 2000 or not gaps:
            first, data = core.copy_records(shared, seen)
            gaps += first > seen > 0
            for number, record in enumerate(struct.iter_unpack("<QQQII", data), first):
                assert record[:4] == (number, number + 1, number, 1)
            seen = max(seen, first + len(data) // 32)
            if os.waitpid(child, os.WNOHANG)[0]:
                child = 0
                break
        assert seen
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        shared.close()
