"""Reading into the caller's own buffer: whole records, nothing lost, nothing beyond."""

from __future__ import annotations

import array
import time
from collections.abc import Callable

import pytest

from nnfmq.hal.errors import DeadObject, InvalidArgument, QueueCorrupted
from nnfmq.queue import UNSYNCHRONIZED, MessageQueue

MakeQueue = Callable[..., MessageQueue]
RECORDS = b"".join(bytes([i]) * 8 for i in range(1, 8))


def soon() -> int:
    return time.monotonic_ns() + 20 * 10**9


def test_read_into_reads_as_many_records_as_fill_the_buffer(make_queue: MakeQueue) -> None:
    queue, out = make_queue(8, 4), bytearray(16)
    queue.write(RECORDS[:24])
    assert queue.read_into(out)
    assert (bytes(out), queue.available_to_read()) == (RECORDS[:16], 1)


def test_read_into_reads_nothing_if_there_are_fewer_records(make_queue: MakeQueue) -> None:
    queue, out = make_queue(8, 4), bytearray(16)
    queue.write(RECORDS[:8])
    assert not queue.read_into(out)
    assert (bytes(out), queue.available_to_read()) == (bytes(16), 1)


def test_read_into_wraps_around_the_end_of_the_ring(make_queue: MakeQueue) -> None:
    queue, out = make_queue(8, 3), bytearray(24)
    queue.write(RECORDS[:16])
    queue.read(2)
    queue.write(RECORDS[16:40])
    assert queue.read_into(out)
    assert bytes(out) == RECORDS[16:40]


def test_read_into_fills_any_writable_buffer(make_queue: MakeQueue) -> None:
    queue, out = make_queue(8, 4), array.array("Q", [0, 0, 0])
    queue.write(RECORDS[:8])
    assert queue.read_into(memoryview(out)[1:2])
    assert out.tobytes() == bytes(8) + RECORDS[:8] + bytes(8)


@pytest.mark.parametrize("size", [1, 7, 9])
def test_read_into_rejects_a_buffer_of_no_whole_number_of_records(make_queue: MakeQueue, size: int) -> None:
    with pytest.raises(InvalidArgument, match=f"{size} bytes are no whole number of records of 8 bytes"):
        make_queue(8, 4).read_into(bytearray(size))


def test_read_into_rejects_a_buffer_that_cannot_be_written(make_queue: MakeQueue) -> None:
    queue = make_queue(8, 4)
    queue.write(RECORDS[:8])
    with pytest.raises((BufferError, TypeError, InvalidArgument)):
        queue.read_into(bytes(8))
    assert queue.available_to_read() == 1


def test_read_into_reports_an_overflow(make_queue: MakeQueue) -> None:
    queue = make_queue(8, 2, flavor=UNSYNCHRONIZED)
    queue.write(RECORDS[:16])
    queue.write(RECORDS[16:24])
    assert not queue.read_into(bytearray(8))
    queue.write(RECORDS[24:32])
    out = bytearray(8)
    assert queue.read_into(out)
    assert bytes(out) == RECORDS[24:32]


def test_receive_into_reads_all_records_and_wakes_the_writer(make_queue: MakeQueue) -> None:
    queue, out = make_queue(8, 4), bytearray(32)
    queue.send(RECORDS[:16])
    assert queue.receive_into(out, soon(), 0) == 2
    assert bytes(out) == RECORDS[:16] + bytes(16)
    assert queue.event_flag is not None
    assert queue.event_flag.wait(1, soon()) == 1


def test_receive_into_reads_no_more_than_fits(make_queue: MakeQueue) -> None:
    queue, out = make_queue(8, 4), bytearray(19)
    queue.send(RECORDS[:24])
    assert queue.receive_into(out, soon(), 0) == 2
    assert (bytes(out), queue.available_to_read()) == (RECORDS[:16] + bytes(3), 1)


def test_receive_into_returns_0_at_the_deadline(make_queue: MakeQueue) -> None:
    assert make_queue(8, 4).receive_into(bytearray(8), 0, 50_000) == 0


def test_receive_into_rejects_a_buffer_smaller_than_a_record(make_queue: MakeQueue) -> None:
    with pytest.raises(InvalidArgument, match="7 bytes do not hold a record of 8 bytes"):
        make_queue(8, 4).receive_into(bytearray(7), 0, 0)


def test_receive_into_rejects_a_read_only_buffer_before_it_reads(make_queue: MakeQueue) -> None:
    queue = make_queue(8, 4)
    queue.send(RECORDS[:8])
    with pytest.raises((BufferError, TypeError, InvalidArgument)):
        queue.receive_into(bytes(8), soon(), 0)
    assert queue.available_to_read() == 1


def test_receive_into_ends_when_the_peer_dies(make_queue: MakeQueue) -> None:
    queue = make_queue(8, 4)
    queue.peer_death.set()
    with pytest.raises(DeadObject):
        queue.receive_into(bytearray(8), soon(), 0)


def test_receive_into_raises_for_impossible_counters(make_queue: MakeQueue) -> None:
    queue = make_queue(8, 4)
    queue.memory.view[8:16] = (2**40).to_bytes(8, "little")
    with pytest.raises(QueueCorrupted):
        queue.receive_into(bytearray(8), soon(), 0)
