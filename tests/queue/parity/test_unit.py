"""libfmq's fmq_unit_tests, test by test: 45 names, 135 instances, each on every core.

Where libfmq writes and reads through one object, here the reader is a second one, attached through the set-up's form of
the descriptor. Where nnfmq is stricter the row keeps its name and shows the rejection.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from time import monotonic_ns
from typing import Any

import pytest
from msgspec.structs import replace
from support.queues import COUNT, CUSTOM_NOT_EMPTY, CUSTOM_NOT_FULL, Setup, pattern

from nnfmq.base.memory import Memory
from nnfmq.hal.errors import InvalidArgument, QueueCorrupted
from nnfmq.queue import UNSYNCHRONIZED, EventFlag, Grantor, MessageQueue, MQDescriptor, descriptor_formats, layout

Start = Callable[..., "Future[Any]"]
Until = Callable[[Callable[[], object]], None]

SIZE_MAX, SSIZE_MAX = 2**64 - 1, 2**63 - 1
DATA_64 = pattern(64)


# ---- BadQueueConfig ----


def test_BadQueueConfig_QueueSizeTooLarge(setup: Setup) -> None:
    with pytest.raises(InvalidArgument, match="allowed are 1 to"):
        setup.create(2, SIZE_MAX // 2 + 1)


# ---- HidlOnlyBadQueueConfig: descriptors that only HIDL's unsigned fields can hold ----


def hidl_attach(descriptor: MQDescriptor, setup: Setup) -> str:
    """Return the error for 4096 bytes of memory with this descriptor, which was in HIDL's form."""
    with pytest.raises(QueueCorrupted) as caught:
        MessageQueue.attach(
            descriptor_formats.from_hidl(descriptor_formats.to_hidl(descriptor)), Memory.create(4096), core=setup.core
        )
    return str(caught.value)


def overlapping(**first: int) -> MQDescriptor:
    whole = Grantor(0, 0, 4096)
    return MQDescriptor((replace(whole, **first), whole, whole), 2)


def test_HidlOnlyBadQueueConfig_SanityCheck(plain: Setup) -> None:
    """Stricter: libfmq takes three grantors in one place."""
    assert "overlaps" in hidl_attach(overlapping(), plain)


def test_HidlOnlyBadQueueConfig_BadFdIndex(plain: Setup) -> None:
    assert "read counter is in descriptor 5" in hidl_attach(overlapping(fd_index=5), plain)


def test_HidlOnlyBadQueueConfig_ExtentTooLarge(plain: Setup) -> None:
    assert "read counter has extent 4294963265" in hidl_attach(overlapping(extent=0xFFFFF041), plain)


# ---- AidlOnlyBadQueueConfig ----


def test_AidlOnlyBadQueueConfig_LookForLeakedFds(plain: Setup) -> None:
    """libfmq makes 100 queues that it cannot map. Such sizes open nothing here, so others fail after opening."""
    donor = plain.create(4, 64)
    outside = donor.to_json().replace('"extent":256', '"extent":25600000')
    before = os.listdir("/proc/self/fd")
    for _ in range(100):
        with pytest.raises(InvalidArgument):
            plain.create(4, SIZE_MAX // 4 - layout.PAGE_BYTES - 1)
        with pytest.raises(InvalidArgument, match="ring of 256 bytes in memory of 128"):
            plain.create(4, 64, ring_memory=Memory.create(128))
        with pytest.raises(QueueCorrupted, match="ring"):
            MessageQueue.adopt([os.dup(fd) for fd in donor.fds()], outside, core=plain.core)
    assert os.listdir("/proc/self/fd") == before


def test_AidlOnlyBadQueueConfig_QueueSizeTooLargeForAidl(plain: Setup) -> None:
    with pytest.raises(InvalidArgument, match="allowed are 1 to"):
        plain.create(2, SSIZE_MAX // 2 + 1)


def test_AidlOnlyBadQueueConfig_NegativeAidlDescriptor(plain: Setup) -> None:
    with pytest.raises(QueueCorrupted, match="quantum is -10"):
        descriptor_formats.from_aidl({"grantors": [], "quantum": -10, "flags": 0})


def test_AidlOnlyBadQueueConfig_NegativeAidlDescriptorGrantor(plain: Setup) -> None:
    with pytest.raises(QueueCorrupted, match="extent of grantor 0 is -10"):
        descriptor_formats.from_aidl(
            {"grantors": [{"fdIndex": 0, "offset": 12, "extent": -10}], "quantum": 2, "flags": 0}
        )


def test_AidlOnlyBadQueueConfig_MismatchedPayloadSize(plain: Setup) -> None:
    queue = plain.create(2, 64)
    plain.attach(queue, quantum=2)
    queue.descriptor = replace(queue.descriptor, quantum=8)
    with pytest.raises(QueueCorrupted, match="quantum is 8, expected are 2"):
        plain.attach(queue, quantum=2)


# ---- Hidl2AidlOperation ----


def converted(queue: MessageQueue) -> MQDescriptor:
    return descriptor_formats.from_aidl(
        descriptor_formats.hidl_to_aidl(descriptor_formats.to_hidl(queue.descriptor), queue.flavor)
    )


def attach_converted(plain: Setup, queue: MessageQueue, **options: Any) -> MessageQueue:
    memory = Memory.adopt(os.dup(queue.memory.fileno()))
    attached = MessageQueue.attach(converted(queue), memory, flavor=queue.flavor, core=plain.core, **options)
    return plain.stack.enter_context(attached)


def test_Hidl2AidlOperation_ConvertDescriptorsSync(plain: Setup) -> None:
    hidl = plain.create(1, 64)
    aidl = attach_converted(plain, hidl)
    assert hidl.write(bytes([12, 11, 10, 9]))
    assert aidl.read(4) == bytes([12, 11, 10, 9])


def test_Hidl2AidlOperation_ConvertDescriptorsUnsync(plain: Setup) -> None:
    hidl = plain.create(1, 64, flavor=UNSYNCHRONIZED)
    readers = [attach_converted(plain, hidl, reset_pointers=False) for _ in range(2)]
    assert hidl.write(bytes([12, 11, 10, 9]))
    assert [reader.read(4) for reader in readers] == [bytes([12, 11, 10, 9])] * 2


def spread_over(*fd_indices: int) -> bytes:
    """Return the HIDL form of a descriptor with a grantor in each of these fds."""
    return descriptor_formats.to_hidl(
        MQDescriptor(tuple(Grantor(index, 16, 16) for index in fd_indices), 10, UNSYNCHRONIZED)
    )


def test_Hidl2AidlOperation_ConvertFdIndex1(plain: Setup) -> None:
    aidl = descriptor_formats.hidl_to_aidl(spread_over(1, 1, 1), UNSYNCHRONIZED)
    assert aidl["grantors"] == [{"fdIndex": 1, "offset": 16, "extent": 16}] * 3


def test_Hidl2AidlOperation_ConvertMultipleFds(plain: Setup) -> None:
    """The fds travel beside the descriptor here, so that both arrive is shown by parts of a queue in each of two."""
    aidl = descriptor_formats.hidl_to_aidl(spread_over(1, 1, 0), UNSYNCHRONIZED)
    assert [grantor["fdIndex"] for grantor in aidl["grantors"]] == [1, 1, 0]
    mixed = MQDescriptor((Grantor(1, 16, 8), Grantor(0, 24, 8), Grantor(1, 32, 80)), 10)
    memories = Memory.create(64), Memory.create(128)
    queue = plain.stack.enter_context(MessageQueue.attach(mixed, *memories, core=plain.core))
    assert queue.write(pattern(20)) and queue.read(1) == pattern(10)
    assert bytes(memories[1].view[32:52]) == pattern(20)
    assert (memories[0].view[24], memories[1].view[16]) == (20, 10)


# ---- DoubleFdFailures ----


def test_DoubleFdFailures_InvalidFd(plain: Setup) -> None:
    queue = plain.create(1, 64, ring_memory=Memory.create(64))
    with pytest.raises(InvalidArgument, match="cannot be sealed"):
        MessageQueue.adopt([os.dup(queue.memory.fileno()), 3000], queue.to_json(), core=plain.core)


def test_DoubleFdFailures_InvalidFdSize(plain: Setup) -> None:
    short = Memory.create(2048 - 8)
    with pytest.raises(InvalidArgument, match="ring of 2048 bytes in memory of 2040"):
        plain.create(2, 1024, ring_memory=short)
    assert short.closed


def test_DoubleFdFailures_LargerFdSize(plain: Setup) -> None:
    queue = plain.create(2, 1024, ring_memory=Memory.create(2048 + 8))
    assert (queue.count, queue.write(pattern(2048)), queue.write(pattern(2))) == (1024, True, False)


# ---- BlockingReadWrites: an event flag word that is not the queue's ----


def test_BlockingReadWrites_SmallInputTest1(
    setup: Setup, word: EventFlag, start: Start, until: Until, limit_ns: int
) -> None:
    writer, reader = setup.sync(event_flag=False)

    def read() -> bytes | None:
        while word.wait(CUSTOM_NOT_EMPTY, limit_ns):
            data = reader.read(64)
            if data is not None:
                word.wake(CUSTOM_NOT_FULL)
                return data
        return None

    future = start(read)
    until(lambda: word.waiters)
    assert writer.write(DATA_64)
    word.wake(CUSTOM_NOT_EMPTY)
    assert future.result() == DATA_64
    assert word.wait(CUSTOM_NOT_FULL, limit_ns) == CUSTOM_NOT_FULL


def test_BlockingReadWrites_SmallInputTest2(
    setup: Setup, word: EventFlag, start: Start, until: Until, limit_ns: int
) -> None:
    writer, reader = setup.sync(event_flag=False)
    bits: dict[str, Any] = {
        "read_notification": CUSTOM_NOT_FULL, "write_notification": CUSTOM_NOT_EMPTY, "event_flag": word,
    }  # fmt: skip
    future = start(lambda: reader.read_blocking(64, limit_ns, **bits))
    until(lambda: word.waiters)
    assert writer.write_blocking(DATA_64, limit_ns, **bits) is True
    assert future.result() == DATA_64


def test_BlockingReadWrites_BlockingTimeOutTest(setup: Setup, word: EventFlag) -> None:
    deadline = monotonic_ns() + 20 * 10**6  # libfmq waits for a second
    assert word.wait(CUSTOM_NOT_EMPTY, deadline) == 0
    assert monotonic_ns() >= deadline


# ---- QueueSizeOdd ----


def test_QueueSizeOdd_EventFlagTest(setup: Setup, limit_ns: int) -> None:
    writer, reader = (
        setup.sync(1, 2049, ring_memory=Memory.create(2049)) if setup.place == "two_fds" else setup.sync(1, 2049)
    )
    assert writer.descriptor.grantors[3].offset == (16 if setup.place == "two_fds" else 2072)
    bits = {"read_notification": CUSTOM_NOT_FULL, "write_notification": CUSTOM_NOT_EMPTY}
    assert writer.write_blocking(DATA_64, limit_ns, **bits) is True
    assert reader.read(64) == DATA_64


# ---- SynchronizedReadWrites ----


def filled(writer: MessageQueue) -> bytes:
    """Fill the queue; return what it is full of."""
    data = pattern(COUNT)
    assert writer.write(data)
    return data


def test_SynchronizedReadWrites_SmallInputTest1(setup: Setup) -> None:
    writer, reader = setup.sync()
    assert writer.write(pattern(16))
    assert reader.read(16) == pattern(16)


def test_SynchronizedReadWrites_SmallInputTest2(setup: Setup) -> None:
    writer, reader = setup.sync()
    write = writer.begin_write(16)
    assert write is not None
    write.copy_to(pattern(16))
    assert reader.available_to_read() == 0
    writer.commit_write(16)
    read, target = reader.begin_read(16), bytearray(16)
    assert read is not None
    read.copy_from(target)
    assert reader.commit_read(16) is True
    assert target == pattern(16) and reader.available_to_read() == 0


def test_SynchronizedReadWrites_SmallInputTest3(setup: Setup) -> None:
    writer, reader = setup.sync()
    write = writer.begin_write(16)
    assert write is not None and len(write.first) + len(write.second) == 16
    for i in range(16):
        write.get_slot(i)[:] = pattern(16)[i : i + 1]
    writer.commit_write(16)
    read = reader.begin_read(16)
    assert read is not None and len(read.first) + len(read.second) == 16
    assert b"".join(read.get_slot(i) for i in range(16)) == pattern(16)
    assert reader.commit_read(16) is True


def test_SynchronizedReadWrites_ReadWhenEmpty1(setup: Setup) -> None:
    _, reader = setup.sync()
    assert (reader.available_to_read(), reader.read(2)) == (0, None)


def test_SynchronizedReadWrites_ReadWhenEmpty2(setup: Setup) -> None:
    _, reader = setup.sync()
    assert (reader.available_to_read(), reader.begin_read(2)) == (0, None)


def test_SynchronizedReadWrites_WriteWhenFull1(setup: Setup) -> None:
    writer, reader = setup.sync()
    data = filled(writer)
    assert (writer.available_to_write(), writer.write(b"x")) == (0, False)
    assert reader.read(COUNT) == data


def test_SynchronizedReadWrites_WriteWhenFull2(setup: Setup) -> None:
    writer, reader = setup.sync()
    data = filled(writer)
    assert (writer.available_to_write(), writer.begin_write(1)) == (0, None)
    assert reader.read(COUNT) == data


def test_SynchronizedReadWrites_LargeInputTest1(setup: Setup) -> None:
    writer, reader = setup.sync()
    assert reader.read(COUNT) is None
    assert reader.read(0) == b""
    assert filled(writer) == reader.read(COUNT)


def test_SynchronizedReadWrites_LargeInputTest2(setup: Setup) -> None:
    writer, reader = setup.sync()
    assert writer.write(pattern(4096)) is False
    assert (reader.available_to_read(), reader.read(4096), reader.read(1)) == (0, None, None)


def test_SynchronizedReadWrites_LargeInputTest3(setup: Setup) -> None:
    writer, reader = setup.sync()
    data = filled(writer)
    assert writer.write(b"x") is False
    assert reader.read(COUNT) == data


def test_SynchronizedReadWrites_LargeInputTest4(setup: Setup) -> None:
    writer, reader = setup.sync()
    assert writer.begin_write(4096) is None
    assert reader.available_to_read() == 0


def read_in_parts(reader: MessageQueue) -> bytes:
    return b"".join(reader.read(100) or b"" for _ in range(5))


def write_in_parts(writer: MessageQueue, data: bytes) -> bool:
    return all(writer.write(data[at : at + 100]) for at in range(0, 500, 100))


def test_SynchronizedReadWrites_MultipleRead(setup: Setup) -> None:
    writer, reader = setup.sync()
    assert writer.write(pattern(500))
    assert read_in_parts(reader) == pattern(500)


def test_SynchronizedReadWrites_MultipleWrite(setup: Setup) -> None:
    writer, reader = setup.sync()
    assert write_in_parts(writer, pattern(500))
    assert reader.read(500) == pattern(500)


def advance(writer: MessageQueue, reader: MessageQueue) -> None:
    """Move both counters to one record before the ring's end."""
    assert writer.write(pattern(COUNT - 1)) and reader.read(COUNT - 1) == pattern(COUNT - 1)


def test_SynchronizedReadWrites_ReadWriteWrapAround1(setup: Setup) -> None:
    writer, reader = setup.sync()
    advance(writer, reader)
    assert filled(writer) == reader.read(COUNT)


def test_SynchronizedReadWrites_ReadWriteWrapAround2(setup: Setup) -> None:
    writer, reader = setup.sync()
    advance(writer, reader)
    write = writer.begin_write(COUNT)
    assert write is not None and (len(write.first), len(write.second)) == (1, COUNT - 1)
    write.copy_to(pattern(COUNT))
    writer.commit_write(COUNT)
    read = reader.begin_read(COUNT)
    assert read is not None and (len(read.first), len(read.second)) == (1, COUNT - 1)
    assert read.tobytes() == pattern(COUNT)
    assert reader.commit_read(COUNT) is True


# ---- UnsynchronizedWriteTest ----


def test_UnsynchronizedWriteTest_SmallInputTest1(setup: Setup) -> None:
    writer, reader = setup.unsync()
    assert writer.write(pattern(16))
    assert reader.read(16) == pattern(16)


def test_UnsynchronizedWriteTest_ReadWhenEmpty(setup: Setup) -> None:
    _, reader = setup.unsync()
    assert (reader.available_to_read(), reader.read(2)) == (0, None)


def test_UnsynchronizedWriteTest_WriteWhenFull1(setup: Setup) -> None:
    writer, reader = setup.unsync()
    filled(writer)
    assert (writer.available_to_write(), writer.write(b"x")) == (0, True)
    assert reader.read(COUNT) is None


def test_UnsynchronizedWriteTest_WriteWhenFull2(setup: Setup) -> None:
    writer, reader = setup.unsync()
    filled(writer)
    write = writer.begin_write(1)
    assert writer.available_to_write() == 0 and write is not None
    write.copy_to(b"x")
    writer.commit_write(1)
    assert reader.read(COUNT) is None


def test_UnsynchronizedWriteTest_LargeInputTest1(setup: Setup) -> None:
    writer, reader = setup.unsync()
    assert filled(writer) == reader.read(COUNT)


def test_UnsynchronizedWriteTest_LargeInputTest2(setup: Setup) -> None:
    writer, reader = setup.unsync()
    assert writer.write(pattern(4096)) is False
    assert (reader.available_to_read(), reader.read(1)) == (0, None)


def test_UnsynchronizedWriteTest_LargeInputTest3(setup: Setup) -> None:
    writer, reader = setup.unsync()
    filled(writer)
    assert writer.write(b"x") is True
    assert reader.read(COUNT) is None


def test_UnsynchronizedWriteTest_MultipleRead(setup: Setup) -> None:
    writer, reader = setup.unsync()
    assert writer.write(pattern(500))
    assert read_in_parts(reader) == pattern(500)


def test_UnsynchronizedWriteTest_MultipleWrite(setup: Setup) -> None:
    writer, reader = setup.unsync()
    assert write_in_parts(writer, pattern(500))
    assert reader.read(500) == pattern(500)


def test_UnsynchronizedWriteTest_ReadWriteWrapAround(setup: Setup) -> None:
    writer, reader = setup.unsync()
    advance(writer, reader)
    assert filled(writer) == reader.read(COUNT)
