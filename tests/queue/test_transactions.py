"""Zero-copy transactions: records in place, published or consumed atomically, without effect if dropped."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

from nnfmq.hal.errors import InvalidArgument, QueueCorrupted
from nnfmq.queue import MessageQueue, Transaction

MakeQueue = Callable[..., MessageQueue]


def begun_write(queue: MessageQueue, n: int) -> Transaction:
    transaction = queue.begin_write(n)
    assert transaction is not None
    return transaction


def begun_read(queue: MessageQueue, n: int) -> Transaction:
    transaction = queue.begin_read(n)
    assert transaction is not None
    return transaction


@pytest.fixture
def queue(make_queue: MakeQueue) -> MessageQueue:
    """A ring of 4 records of 8 bytes; the next record to be written, and to be read, is number 3 of the ring."""
    made = make_queue(8, 4)
    assert made.write(bytes(24)) and made.read(3)
    return made


# ---- the buffers ----


def test_a_write_s_buffers_are_the_ring_itself(queue: MessageQueue) -> None:
    write = begun_write(queue, 2)
    write.first[:], write.second[:] = b"11111111", b"22222222"
    assert bytes(queue.memory.view[16:48]) == b"22222222" + bytes(16) + b"11111111"


def test_records_that_do_not_cross_the_end_are_in_one_region(make_queue: MakeQueue) -> None:
    write = begun_write(make_queue(8, 4), 4)
    assert (len(write.first), len(write.second), write.count) == (32, 0, 4)


def test_a_read_s_buffers_cannot_be_written(queue: MessageQueue) -> None:
    queue.write(bytes(16))
    read = begun_read(queue, 2)
    assert read.first.readonly and read.second.readonly
    with pytest.raises(InvalidArgument, match="for reading"):
        read.copy_to(bytes(8))


def test_slot_indexes_continue_across_both_regions(queue: MessageQueue) -> None:
    queue.write(b"AAAAAAAABBBBBBBBCCCCCCCC")
    read = begun_read(queue, 3)
    assert [bytes(read.get_slot(i)) for i in range(3)] == [b"AAAAAAAA", b"BBBBBBBB", b"CCCCCCCC"]


@pytest.mark.parametrize("index", [-1, 3, 4, 2**70])
def test_a_slot_index_out_of_range_is_rejected(queue: MessageQueue, index: int) -> None:
    """libfmq lets index 3 of 3 pass."""
    with pytest.raises(InvalidArgument, match="of a transaction of 3"):
        begun_write(queue, 3).get_slot(index)


@pytest.mark.parametrize("start", [0, 1, 2])
def test_copies_may_start_at_any_record(queue: MessageQueue, start: int) -> None:
    write = begun_write(queue, 3)
    write.copy_to(b"-" * 24)
    write.copy_to(b"N" * 8, start)
    target = bytearray(8)
    write.copy_from(target, start)
    assert target == b"N" * 8 and write.tobytes().count(b"N") == 8


@pytest.mark.parametrize(("size", "start"), [(32, 0), (8, 3), (16, 2), (8, -1), (7, 0)])
def test_copies_beyond_the_transaction_are_rejected(queue: MessageQueue, size: int, start: int) -> None:
    write = begun_write(queue, 3)
    with pytest.raises(InvalidArgument, match="the transaction has 3 records of 8 bytes"):
        write.copy_to(bytes(size), start)
    with pytest.raises(InvalidArgument, match="the transaction has 3 records of 8 bytes"):
        write.copy_from(bytearray(size), start)


def test_a_transaction_of_no_records_succeeds_in_any_state(queue: MessageQueue) -> None:
    queue.write(bytes(32))
    assert (begun_write(queue, 0).count, begun_read(queue, 0).tobytes()) == (0, b"")
    queue.commit_write(0)
    assert queue.commit_read(0) is True
    assert queue.available_to_read() == 4


# ---- publishing and consuming ----


def test_nothing_is_visible_before_the_commit(queue: MessageQueue) -> None:
    begun_write(queue, 2).copy_to(b"1" * 16)
    before = queue.available_to_read()
    queue.commit_write(2)
    assert (before, queue.read(2)) == (0, b"1" * 16)


def test_nothing_is_consumed_before_the_commit(queue: MessageQueue) -> None:
    queue.write(b"1" * 16)
    begun_read(queue, 2)
    before = queue.available_to_read()
    assert queue.commit_read(2) is True
    assert (before, queue.available_to_read()) == (2, 0)


def test_fewer_records_may_be_committed_than_were_begun(queue: MessageQueue) -> None:
    begun_write(queue, 3).copy_to(b"AAAAAAAABBBBBBBBCCCCCCCC")
    queue.commit_write(2)
    begun_read(queue, 2)
    assert queue.commit_read(1) is True
    assert (queue.read(2), queue.read(1)) == (None, b"BBBBBBBB")


def test_an_abandoned_transaction_changes_nothing(queue: MessageQueue) -> None:
    queue.write(b"old data")
    begun_write(queue, 3).copy_to(b"x" * 24)
    begun_read(queue, 1)
    assert queue.counters() == (32, 24)
    assert queue.send(b"new data") and queue.receive(0, 0) == b"old datanew data"


@pytest.mark.parametrize("n", [5, 2**62, 2**70])
def test_beginning_more_records_than_there_are_or_fit_returns_none(queue: MessageQueue, n: int) -> None:
    assert (queue.begin_write(n), queue.begin_read(n)) == (None, None)


# ---- misuse and hostile peers ----


def test_a_commit_without_a_begin_is_rejected(queue: MessageQueue) -> None:
    queue.write(bytes(8))
    with pytest.raises(InvalidArgument, match="without a begin_write"):
        queue.commit_write(1)
    with pytest.raises(InvalidArgument, match="without a begin_read"):
        queue.commit_read(1)


def test_a_rejected_begin_cancels_the_previous_one(queue: MessageQueue) -> None:
    begun_write(queue, 1)
    queue.begin_write(5)
    with pytest.raises(InvalidArgument, match="without a begin_write"):
        queue.commit_write(1)


def test_a_transaction_is_committed_once(queue: MessageQueue) -> None:
    begun_write(queue, 2)
    queue.commit_write(1)
    with pytest.raises(InvalidArgument, match="without a begin_write"):
        queue.commit_write(1)


def test_more_than_was_begun_cannot_be_committed(queue: MessageQueue) -> None:
    """libfmq trusts the number."""
    begun_write(queue, 2)
    with pytest.raises(InvalidArgument, match="3 records to commit; begin_write gave 2"):
        queue.commit_write(3)
    queue.commit_write(2)
    begun_read(queue, 1)
    with pytest.raises(InvalidArgument, match="2 records to commit; begin_read gave 1"):
        queue.commit_read(2)


@pytest.mark.parametrize("counter", [0, 32, 2**63, 2**64 - 8])
def test_N_BUX_3_a_commit_fails_if_the_write_counter_changed_since_the_begin(queue: MessageQueue, counter: int) -> None:
    begun_write(queue, 1)
    queue.memory.view[8:16] = struct.pack("<Q", counter)
    with pytest.raises(QueueCorrupted, match="it was 24 when the write began"):
        queue.commit_write(1)
    assert queue.counters()[0] == counter


def test_N_BUX_3_a_commit_fails_if_the_read_counter_changed_since_the_begin(queue: MessageQueue) -> None:
    queue.write(bytes(8))
    begun_read(queue, 1)
    queue.memory.view[0:8] = bytes(8)
    with pytest.raises(QueueCorrupted, match="it was 24 when the read began"):
        queue.commit_read(1)


@pytest.mark.parametrize("counter", [0, 24 + 40, 2**64 - 8])
def test_an_overflow_makes_the_commit_of_a_read_fail(queue: MessageQueue, counter: int) -> None:
    queue.write(bytes(8))
    begun_read(queue, 1)
    queue.memory.view[8:16] = struct.pack("<Q", counter)
    assert queue.commit_read(1) is False
    assert queue.counters() == (counter, counter)


@pytest.mark.parametrize(
    "call",
    [
        lambda queue: queue.begin_write(1), lambda queue: queue.begin_read(0), lambda queue: queue.commit_write(0),
        lambda queue: queue.commit_read(0),
    ],
)  # fmt: skip
def test_a_closed_queue_begins_and_commits_nothing(queue: MessageQueue, call: Callable[[MessageQueue], object]) -> None:
    begun_write(queue, 1)
    queue.close()
    with pytest.raises(InvalidArgument, match="closed"):
        call(queue)


def test_buffers_keep_their_memory_when_the_queue_is_closed(queue: MessageQueue) -> None:
    queue.write(b"still here?     ")
    read, slot = begun_read(queue, 2), begun_write(queue, 1).get_slot(0)
    queue.close()
    assert queue.memory.closed
    assert read.tobytes() == b"still here?     "
    slot[:] = b"writable"
    assert bytes(slot) == b"writable"
