"""Tests of libfmq's later versions: after an overflow half of the ring is readable; short waits; the error handler.

They also use AIDL's C++ backend, whose descriptors are those of the NDK backend. Their UnsynchronizedReadWriteTest is
UnsynchronizedWriteTest with another name and two more tests; here its readers have the later rule. Two tests have no
counterpart: MessageQueueErasedTest is about C++ templates, RustInteropTest about a Rust library.
"""

from __future__ import annotations

import struct
from time import monotonic_ns

import pytest
from support.queues import COUNT, CUSTOM_NOT_EMPTY, CUSTOM_NOT_FULL, Setup, pattern

from nnfmq.queue import EventFlag, MessageQueue, Overflow

WORDS = pattern(COUNT, 2)


def later(setup: Setup, count: int = COUNT) -> tuple[MessageQueue, MessageQueue]:
    """Return writer and reader of 2-byte records under the later rule."""
    return setup.unsync(2, count, overflow=Overflow.KEEP_HALF)


def newest_half(reader: MessageQueue) -> bytes | None:
    """Read what is left, which must be half of the ring."""
    assert reader.available_to_read() == COUNT // 2
    return reader.read(COUNT // 2)


# ---- BlockingReadWrites ----


def test_BlockingReadWrites_ShortEventFlagWaitWithWakeTest(word: EventFlag) -> None:
    word.wake(CUSTOM_NOT_EMPTY)
    assert word.wait(CUSTOM_NOT_EMPTY, monotonic_ns() + 1) == CUSTOM_NOT_EMPTY


def test_BlockingReadWrites_ShortEventFlagWaitWithoutWakeTest(word: EventFlag) -> None:
    assert word.wait(CUSTOM_NOT_EMPTY, monotonic_ns() + 1) == 0


def test_BlockingReadWrites_FmqWriteAndReadWithShortEventFlagWaitTest(setup: Setup, word: EventFlag) -> None:
    """The read finds its records at the first attempt, so the bits, which libfmq's test exchanges, play no part."""
    writer, reader = setup.sync(event_flag=False)
    assert writer.write(bytes(16))
    word.wake(CUSTOM_NOT_EMPTY)
    bits = {"read_notification": CUSTOM_NOT_EMPTY, "write_notification": CUSTOM_NOT_FULL}
    assert reader.read_blocking(16, monotonic_ns() + 1, **bits, event_flag=word) == bytes(16)


# ---- UnsynchronizedReadWriteTest ----


@pytest.fixture
def ends(setup: Setup) -> tuple[MessageQueue, MessageQueue]:
    """Writer and reader of 2048 bytes under the later rule."""
    return setup.unsync(overflow=Overflow.KEEP_HALF)


Ends = tuple[MessageQueue, MessageQueue]


def test_UnsynchronizedReadWriteTest_SmallInputTest1(ends: Ends) -> None:
    writer, reader = ends
    assert writer.write(pattern(16))
    assert reader.read(16) == pattern(16)


def test_UnsynchronizedReadWriteTest_ReadWhenEmpty(ends: Ends) -> None:
    _, reader = ends
    assert (reader.available_to_read(), reader.read(2)) == (0, None)


def test_UnsynchronizedReadWriteTest_WriteWhenFull1(ends: Ends) -> None:
    writer, reader = ends
    assert writer.write(pattern(COUNT))
    assert (writer.available_to_write(), writer.write(b"x")) == (0, True)
    assert reader.read(COUNT) is None


def test_UnsynchronizedReadWriteTest_WriteWhenFull2(ends: Ends) -> None:
    writer, reader = ends
    assert writer.write(pattern(COUNT))
    write = writer.begin_write(1)
    assert write is not None and len(write.first) == 1
    write.copy_to(b"x")
    writer.commit_write(1)
    assert reader.read(COUNT) is None


def test_UnsynchronizedReadWriteTest_LargeInputTest1(ends: Ends) -> None:
    writer, reader = ends
    assert writer.write(pattern(COUNT))
    assert reader.read(COUNT) == pattern(COUNT)


def test_UnsynchronizedReadWriteTest_LargeInputTest2(ends: Ends) -> None:
    writer, reader = ends
    assert writer.write(pattern(4096)) is False
    assert (reader.read(COUNT), reader.available_to_read()) == (None, 0)


def test_UnsynchronizedReadWriteTest_LargeInputTest3(ends: Ends) -> None:
    writer, reader = ends
    assert writer.write(pattern(COUNT)) and writer.write(b"x")
    assert reader.read(COUNT) is None
    assert newest_half(reader) == (pattern(COUNT) + b"x")[-COUNT // 2 :]


def test_UnsynchronizedReadWriteTest_MultipleRead(ends: Ends) -> None:
    writer, reader = ends
    assert writer.write(pattern(500))
    assert b"".join(reader.read(100) or b"" for _ in range(5)) == pattern(500)


def test_UnsynchronizedReadWriteTest_MultipleWrite(ends: Ends) -> None:
    writer, reader = ends
    assert all(writer.write(pattern(500)[at : at + 100]) for at in range(0, 500, 100))
    assert reader.read(500) == pattern(500)


def test_UnsynchronizedReadWriteTest_ReadWriteWrapAround(ends: Ends) -> None:
    writer, reader = ends
    assert writer.write(pattern(COUNT - 1)) and reader.read(COUNT - 1) == pattern(COUNT - 1)
    assert writer.write(pattern(COUNT))
    assert reader.read(COUNT) == pattern(COUNT)


def test_UnsynchronizedReadWriteTest_ReadMoreThanNumMessagesMaxFails(ends: Ends) -> None:
    writer, reader = ends
    assert writer.write(pattern(COUNT))
    assert reader.read(COUNT + 1) is None


def test_UnsynchronizedReadWriteTest_ReadMoreThanAvailableToReadFails(ends: Ends) -> None:
    writer, reader = ends
    assert writer.write(pattern(COUNT // 2))
    assert reader.read(COUNT // 2 + 1) is None


# ---- UnsynchronizedOverflowHistoryTest, and the error handler ----


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
