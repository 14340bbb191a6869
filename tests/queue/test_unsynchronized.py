"""The unsynchronized flavor: many readers, private positions, overwriting, reading from memory that is read-only."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from support.queues import CORES, Setup

from nnfmq.base.memory import Memory
from nnfmq.hal.errors import InvalidArgument, QueueCorrupted
from nnfmq.queue import SYNCHRONIZED, UNSYNCHRONIZED, MessageQueue, Overflow
from nnfmq.queue.core import Core

Start = Callable[..., "Future[Any]"]
Until = Callable[[Callable[[], object]], None]
RECORDS = [b"record %1d" % i for i in range(10)]


@pytest.fixture(params=CORES)
def setup(request: pytest.FixtureRequest) -> Iterator[Setup]:
    made = Setup(request.param)
    with made.stack:
        yield made


def write(writer: MessageQueue, *numbers: int) -> None:
    for i in numbers:
        assert writer.write(RECORDS[i])


# ---- readers ----


def test_each_reader_has_its_own_position(setup: Setup) -> None:
    writer, first = setup.unsync(8, 4)
    second = setup.attach(writer, reset_pointers=False)
    write(writer, 0, 1)
    assert first.read(2) == RECORDS[0] + RECORDS[1]
    assert (first.available_to_read(), second.available_to_read()) == (0, 2)
    assert second.read(1) == RECORDS[0]


def test_reading_does_not_change_the_memory(setup: Setup) -> None:
    writer, reader = setup.unsync(8, 4)
    write(writer, 0, 1, 2, 3, 4)
    before = bytes(writer.memory.view)
    assert (reader.read(1), reader.read(0)) == (None, b"")
    assert bytes(writer.memory.view) == before


def test_a_late_reader_begins_at_the_oldest_remaining_record(setup: Setup) -> None:
    writer = setup.create(8, 4, flavor=UNSYNCHRONIZED)
    write(writer, 0, 1, 2, 3)
    assert setup.attach(writer, reset_pointers=False).read(4) == b"".join(RECORDS[:4])


def test_a_late_reader_of_a_ring_that_wrapped_around_fails_once(setup: Setup) -> None:
    writer = setup.create(8, 4, flavor=UNSYNCHRONIZED)
    write(writer, 0, 1, 2, 3, 4)
    reader = setup.attach(writer, reset_pointers=False)
    assert reader.available_to_read() == 5  # more than the ring holds: an overflow
    assert reader.read(1) is None
    write(writer, 5)
    assert reader.read(1) == RECORDS[5]


@pytest.mark.parametrize(
    ("overflow", "left"), [(Overflow.SKIP_ALL, b""), (Overflow.KEEP_HALF, RECORDS[5] + RECORDS[6])]
)
def test_after_overflow_a_reader_continues_as_its_option_specifies(
    setup: Setup, overflow: Overflow, left: bytes
) -> None:
    writer, reader = setup.unsync(8, 5, overflow=overflow)
    write(writer, *range(7))
    assert reader.read(1) is None
    assert reader.read(reader.available_to_read()) == left


def test_a_reader_exactly_one_ring_behind_can_still_read(setup: Setup) -> None:
    writer, reader = setup.unsync(8, 4)
    write(writer, 0)
    assert reader.read(1) == RECORDS[0]
    write(writer, 1, 2, 3, 4)
    assert reader.read(4) == b"".join(RECORDS[1:5])


def test_a_writer_that_resets_its_counter_is_detected_and_followed(setup: Setup) -> None:
    writer = setup.create(8, 4, flavor=UNSYNCHRONIZED)
    reader = setup.attach(writer, reset_pointers=False)
    write(writer, 0, 1)
    assert reader.read(2)
    setup.attach(writer, reset_pointers=True).write(RECORDS[7])
    assert reader.read(1) is None
    write(writer, 8)
    assert reader.read(1) == RECORDS[8]


@pytest.mark.parametrize("overflow", list(Overflow))
@pytest.mark.parametrize("counter", [1, 33, 2**63 - 1, 2**64 - 1])
def test_N_BUX_3_a_misaligned_counter_stops_reader_and_writer(setup: Setup, counter: int, overflow: Overflow) -> None:
    writer, reader = setup.unsync(8, 4, overflow=overflow)
    writer.memory.view[8:16] = struct.pack("<Q", counter)
    assert (reader.read(1), reader.begin_read(1)) == (None, None)
    assert (writer.write(RECORDS[0]), writer.write(b""), writer.begin_write(1)) == (False, False, None)


@pytest.mark.parametrize("counter", [2**32, 2**63, 2**64 - 8])
def test_N_BUX_3_a_counter_that_jumps_is_an_overflow(setup: Setup, counter: int) -> None:
    writer, reader = setup.unsync(8, 4, overflow=Overflow.KEEP_HALF)
    writer.memory.view[8:16] = struct.pack("<Q", counter)
    assert (reader.read(1), reader.available_to_read()) == (None, 2)


def test_the_writer_reserves_before_it_overwrites_the_oldest_records(setup: Setup) -> None:
    writer = setup.create(8, 3, flavor=UNSYNCHRONIZED)
    write(writer, 0, 1, 2, 3)
    assert bytes(writer.memory.view[:40]) == struct.pack("<QQ", 32, 32) + RECORDS[3] + RECORDS[1] + RECORDS[2]


def test_a_record_that_is_being_overwritten_is_not_returned(setup: Setup) -> None:
    writer, reader = setup.unsync(8, 2)
    write(writer, 0, 1)
    writer.begin_write(1)
    assert reader.read(1) is None


def test_a_libfmq_writer_is_checked_by_its_counter_only(setup: Setup) -> None:
    writer, reader = setup.unsync(8, 2)
    write(writer, 0, 1)
    writer.memory.view[0:8] = bytes(8)  # libfmq leaves this word alone
    assert reader.read(1) == RECORDS[0]


def test_a_reset_clears_the_writer_s_reservation(setup: Setup) -> None:
    writer = setup.create(8, 2, flavor=UNSYNCHRONIZED)
    write(writer, 0, 1)
    setup.attach(writer, reset_pointers=True).write(RECORDS[7])
    assert bytes(writer.memory.view[:16]) == struct.pack("<QQ", 8, 8)


def test_a_transaction_that_was_overwritten_is_not_committed(setup: Setup) -> None:
    writer, reader = setup.unsync(8, 2)
    write(writer, 0, 1)
    read = reader.begin_read(2)
    write(writer, 2)
    assert read is not None and bytes(read.first[:8]) == RECORDS[2]
    assert reader.commit_read(2) is False


def test_one_core_reads_what_the_other_wrote(core_pair: tuple[Core, Core]) -> None:
    setup = Setup("python")
    with setup.stack:
        writer = setup.create(8, 3, flavor=UNSYNCHRONIZED, core=core_pair[0])
        reader = setup.attach(writer, reset_pointers=False, core=core_pair[1])
        for i in range(10):
            write(writer, i)
            assert reader.read(1) == RECORDS[i]


# ---- what may be mapped, and how ----


def test_readers_can_be_given_read_only_memory(setup: Setup) -> None:
    writer, reader = setup.unsync(8, 4)
    assert reader.memory.view.readonly and not writer.memory.view.readonly
    for call in (lambda: reader.write(RECORDS[0]), lambda: reader.begin_write(1)):
        with pytest.raises(InvalidArgument, match="mapped for reading only"):
            call()


def test_a_reset_of_memory_that_is_mapped_for_reading_is_rejected(setup: Setup) -> None:
    writer = setup.create(8, 4, flavor=UNSYNCHRONIZED, one_writer=True)
    with pytest.raises(InvalidArgument, match="mapped for reading only"):
        setup.attach(writer, reset_pointers=True)


def test_a_synchronized_queue_cannot_have_one_writer(setup: Setup) -> None:
    with pytest.raises(InvalidArgument, match="one_writer is for the other flavor"):
        setup.create(8, 4, one_writer=True)


@pytest.mark.parametrize(("made", "expected"), [(SYNCHRONIZED, UNSYNCHRONIZED), (UNSYNCHRONIZED, SYNCHRONIZED)])
def test_N_BUX_3_a_queue_of_the_other_flavor_is_rejected(setup: Setup, made: int, expected: int) -> None:
    queue = setup.create(8, 4, flavor=made)
    with pytest.raises(QueueCorrupted, match=f"flavor is {made}; expected is {expected}"):
        setup.attach(queue, flavor=expected)


@pytest.mark.parametrize("flavor", [0, 3, -1])
def test_there_are_two_flavors(setup: Setup, flavor: int) -> None:
    with pytest.raises(InvalidArgument, match="allowed are 1"):
        setup.create(8, 4, flavor=flavor)


# ---- waiting ----


@pytest.mark.parametrize(
    "call",
    [
        lambda queue: queue.drain(),
        lambda queue: queue.send(bytes(8)), lambda queue: queue.receive(0, 0), lambda queue: queue.read_blocking(1, 0),
        lambda queue: queue.write_blocking(bytes(8), 0),
        lambda queue: queue.read_blocking(1, 0, event_flag=queue.event_flag),
        lambda queue: queue.write_blocking(bytes(8), 0, event_flag=queue.event_flag),
    ],
)  # fmt: skip
def test_an_unsynchronized_queue_rejects_blocking_calls(setup: Setup, call: Callable[[MessageQueue], object]) -> None:
    with pytest.raises(InvalidArgument, match="no calls that wait or wake"):
        call(setup.create(8, 4, flavor=UNSYNCHRONIZED))


def test_an_unsynchronized_queue_s_event_flag_word_can_be_used_explicitly(
    setup: Setup, start: Start, until: Until, limit_ns: int
) -> None:
    writer = setup.create(8, 4, flavor=UNSYNCHRONIZED)
    reader = setup.attach(writer, reset_pointers=False)
    assert writer.event_flag is not None and reader.event_flag is not None
    future = start(reader.event_flag.wait, 4, limit_ns)
    until(lambda: reader.waiters)
    writer.event_flag.wake(4)
    assert future.result() == 4


def test_a_wait_on_an_unsynchronized_queue_s_event_flag_word_ends_when_it_is_closed(
    setup: Setup, start: Start, until: Until
) -> None:
    queue = setup.create(8, 4, flavor=UNSYNCHRONIZED)
    assert queue.event_flag is not None
    future = start(queue.event_flag.wait, 4, None)
    until(lambda: queue.waiters)
    queue.close()
    with pytest.raises(InvalidArgument, match="closed during the wait"):
        future.result()
    until(lambda: queue.memory.closed)


def test_memory_that_is_mapped_for_reading_has_no_event_flag(setup: Setup) -> None:
    assert setup.unsync(8, 4)[1].event_flag is None


def test_a_queue_on_the_same_memory_twice_is_rejected(setup: Setup) -> None:
    queue = setup.create(8, 4)
    memories = [Memory.adopt(os.dup(queue.memory.fileno())) for _ in range(2)]
    with pytest.raises(QueueCorrupted, match="one twice"):
        MessageQueue.attach(queue.descriptor, *memories, core=setup.core)
    assert all(memory.closed for memory in memories)
