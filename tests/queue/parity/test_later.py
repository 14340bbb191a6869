"""Tests of libfmq's later versions: after an overflow half of the ring is readable; the error handler."""

from __future__ import annotations

import struct

import pytest
from support.queues import COUNT, Setup, pattern

from nnfmq.queue import MessageQueue, Overflow

WORDS = pattern(COUNT, 2)


def later(setup: Setup, count: int = COUNT) -> tuple[MessageQueue, MessageQueue]:
    """Return writer and reader of 2-byte records under the later rule."""
    return setup.unsync(2, count, overflow=Overflow.KEEP_HALF)


def newest_half(reader: MessageQueue) -> bytes | None:
    """Read what is left, which must be half of the ring."""
    assert reader.available_to_read() == COUNT // 2
    return reader.read(COUNT // 2)


def test_UnsynchronizedWriteTest_ReadMoreThanNumMessagesMaxFails(setup: Setup) -> None:
    writer, reader = setup.unsync()
    assert writer.write(pattern(COUNT))
    assert reader.read(COUNT + 1) is None


def test_UnsynchronizedWriteTest_ReadMoreThanAvailableToReadFails(setup: Setup) -> None:
    writer, reader = setup.unsync()
    assert writer.write(pattern(COUNT // 2))
    assert reader.read(COUNT // 2 + 1) is None


def test_UnsynchronizedOverflowHistoryTest_ReadAfterOverflow(setup: Setup) -> None:
    writer, reader = later(setup)
    assert writer.write(WORDS) and writer.write(WORDS[:2])
    assert reader.read(1) is None
    assert newest_half(reader) == (WORDS + WORDS[:2])[-COUNT:]


def test_UnsynchronizedOverflowHistoryTest_CommitReadAfterOverflow(setup: Setup) -> None:
    writer, reader = later(setup)
    assert writer.write(WORDS) and reader.begin_read(COUNT) is not None
    assert writer.write(WORDS[:2])
    assert reader.commit_read(COUNT) is False
    assert newest_half(reader) == (WORDS + WORDS[:2])[-COUNT:]


def test_UnsynchronizedOverflowHistoryTestSingleElement_ReadAfterOverflow(setup: Setup) -> None:
    writer, reader = later(setup, 1)
    assert writer.write(b"ab") and reader.read(1) == b"ab"
    assert writer.write(b"cd") and writer.write(b"ef")
    assert reader.read(1) is None
    assert writer.write(b"gh") and reader.read(1) == b"gh"


def test_SynchronizedReadWriteClient_MisalignedWriteCounterClientSide(setup: Setup) -> None:
    queue, told = setup.create(4, 1020), []
    queue.on_corruption = told.append
    assert queue.begin_write(1) is not None and told == []
    queue.memory.view[8:16] = struct.pack("<Q", 4 * 1020 - 1)
    assert queue.write(bytes(4)) is False
    assert len(told) == 1 and "write counter 4079" in told[0]
    queue.on_corruption = None
    assert queue.write(bytes(4)) is False
    assert len(told) == 1


@pytest.mark.parametrize("writes", [1, COUNT - 1, COUNT, 3 * COUNT + 5])
def test_with_the_earlier_rule_nothing_is_readable_after_an_overflow(plain: Setup, writes: int) -> None:
    writer, reader = plain.unsync(2)
    assert writer.write(WORDS)
    for _ in range(writes):
        writer.write(b"zz")
    assert reader.read(1) is None and reader.available_to_read() == 0
    assert writer.write(b"ab") and reader.read(1) == b"ab"
