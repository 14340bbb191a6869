"""One queue, no waiting: what libfmq's own unit tests check, and the bytes in memory."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable
from typing import Any

import pytest
from support.code_steps import made_with_an_interrupt_at_every_line

from nnfmq.base.memory import Memory
from nnfmq.hal.errors import InvalidArgument, QueueCorrupted
from nnfmq.queue import Grantor, MessageQueue, MQDescriptor, message_queue
from nnfmq.queue import core as cores
from nnfmq.queue.core import Core

MakeQueue = Callable[..., MessageQueue]
Attach = Callable[..., MessageQueue]


def pattern(length: int) -> bytes:
    return bytes(i & 0xFF for i in range(length))


# ---- the bytes ----


def test_a_new_queue_is_zero_in_every_byte(make_queue: MakeQueue) -> None:
    view = make_queue(24, 1024).memory.view
    assert bytes(view) == bytes(len(view))


def test_records_and_counters_are_at_libfmq_s_offsets(make_queue: MakeQueue) -> None:
    queue = make_queue(8, 4)
    queue.write(b"ABCDEFGHabcdefgh")
    queue.read(1)
    assert bytes(queue.memory.view[:48]) == struct.pack("<QQ", 8, 16) + b"ABCDEFGHabcdefgh" + bytes(16)


def test_counters_only_grow_and_index_the_ring_modulo_its_size(make_queue: MakeQueue) -> None:
    queue = make_queue(8, 3)
    for record in (b"11111111", b"22222222", b"33333333", b"44444444"):
        queue.write(record)
        queue.read(1)
    assert bytes(queue.memory.view[:40]) == struct.pack("<QQ", 32, 32) + b"444444442222222233333333"


def test_send_sets_not_empty_and_receive_sets_not_full(make_queue: MakeQueue) -> None:
    queue = make_queue(24, 1024)
    queue.send(bytes(24))
    after_send = bytes(queue.memory.view[24592:24598])
    queue.receive(0, 0)
    assert (after_send, bytes(queue.memory.view[24592:24598])) == (b"\2\0\0\0\0\0", b"\3\0\0\0\0\0")


def test_send_stores_the_cpu_hint_of_the_writer(make_queue: MakeQueue) -> None:
    queue, allowed = make_queue(24, 1024), os.sched_getaffinity(0)
    cpu = max(allowed)
    os.sched_setaffinity(0, {cpu})
    try:
        queue.send(bytes(24))
    finally:
        os.sched_setaffinity(0, allowed)
    assert bytes(queue.memory.view[24596:24600]) == struct.pack("<HH", 0, cpu + 1)


def test_write_and_read_do_not_change_the_event_flag_word(make_queue: MakeQueue) -> None:
    queue = make_queue(24, 1024)
    queue.write(bytes(24))
    queue.read(1)
    assert bytes(queue.memory.view[24592:24596]) == bytes(4)


def test_stats_view_is_the_reserved_area_behind_the_event_flag_word(make_queue: MakeQueue) -> None:
    queue = make_queue(24, 1024)
    assert queue.stats_view is not None
    queue.stats_view[:] = b"s" * 256
    assert bytes(queue.memory.view).find(b"s" * 256) == 24640


# ---- making one ----


def test_an_interrupt_while_a_queue_is_made_leaves_nothing_open(core: Core) -> None:
    assert made_with_an_interrupt_at_every_line(lambda: MessageQueue.create(8, 4, core=core), message_queue) > 20


# ---- libfmq's SynchronizedReadWrites ----


def test_SmallInputTest1_records_are_read_as_written(make_queue: MakeQueue) -> None:
    queue = make_queue()
    assert queue.write(pattern(16)) is True
    assert queue.read(16) == pattern(16)


def test_ReadWhenEmpty1_reading_an_empty_queue_returns_none(make_queue: MakeQueue) -> None:
    queue = make_queue()
    assert queue.available_to_read() == 0
    assert queue.read(2) is None


def test_WriteWhenFull1_a_full_queue_rejects_and_keeps_its_content(make_queue: MakeQueue) -> None:
    queue = make_queue()
    assert queue.write(pattern(2048))
    assert queue.available_to_write() == 0
    assert queue.write(b"x") is False
    assert queue.read(2048) == pattern(2048)


def test_LargeInputTest1_the_whole_ring_is_usable(make_queue: MakeQueue) -> None:
    queue = make_queue()
    assert queue.write(pattern(2048)) and queue.available_to_read() == 2048
    assert queue.read(2048) == pattern(2048)


def test_LargeInputTest2_more_than_the_ring_is_rejected_and_nothing_is_written(make_queue: MakeQueue) -> None:
    queue = make_queue()
    assert queue.write(pattern(4096)) is False
    assert (queue.available_to_read(), queue.read(1)) == (0, None)


def test_LargeInputTest3_a_rejected_write_leaves_the_data_intact(make_queue: MakeQueue) -> None:
    queue = make_queue()
    queue.write(pattern(2000))
    assert queue.write(pattern(49)) is False
    assert queue.read(2000) == pattern(2000)


def test_MultipleRead_one_write_is_read_in_parts(make_queue: MakeQueue) -> None:
    queue = make_queue()
    queue.write(pattern(500))
    assert b"".join(queue.read(100) or b"" for _ in range(5)) == pattern(500)


def test_MultipleWrite_several_writes_are_read_in_one_call(make_queue: MakeQueue) -> None:
    queue = make_queue()
    for part in range(5):
        queue.write(pattern(500)[part * 100 : part * 100 + 100])
    assert queue.read(500) == pattern(500)


def test_ReadWriteWrapAround1_a_span_may_cross_the_end(make_queue: MakeQueue) -> None:
    queue = make_queue()
    queue.write(bytes(2047))
    queue.read(2047)
    assert queue.write(pattern(2048))
    assert queue.read(2048) == pattern(2048)


def test_ReadMoreThanAvailableToReadFails_and_consumes_nothing(make_queue: MakeQueue) -> None:
    queue = make_queue()
    queue.write(pattern(16))
    assert queue.read(17) is None
    assert queue.read(16) == pattern(16)


def test_ReadMoreThanNumMessagesMaxFails(make_queue: MakeQueue) -> None:
    queue = make_queue()
    queue.write(pattern(2048))
    assert queue.read(2049) is None
    assert queue.read(2**70) is None


@pytest.mark.parametrize("quantum", [1, 3, 24])
def test_BlockingReadWriteZeroMessages_moving_no_records_succeeds_in_any_state(
    make_queue: MakeQueue, quantum: int
) -> None:
    queue = make_queue(quantum, 2)
    queue.write(bytes(2 * quantum))
    assert queue.write(b"") is True
    assert queue.read(0) == b""


@pytest.mark.parametrize(("quantum", "count"), [(1, 1), (24, 1024), (5, 7), (24, 3)])
def test_a_queue_behaves_as_a_bounded_deque_of_records(make_queue: MakeQueue, quantum: int, count: int) -> None:
    queue, model, chance = make_queue(quantum, count), b"", random.Random(quantum * count)
    for _ in range(500):
        n = chance.randrange(count + 2)
        if chance.random() < 0.5:
            data, fits = chance.randbytes(n * quantum), len(model) + n * quantum <= count * quantum
            assert queue.write(data) is fits
            model += data if fits else b""
        else:
            expected = model[: n * quantum] if n * quantum <= len(model) else None
            assert queue.read(n) == expected
            model = model[len(expected or b"") :]
        assert queue.available_to_read() == len(model) // quantum
        assert queue.available_to_write() == count - len(model) // quantum


# ---- the burst's calls ----


def test_receive_takes_all_records_that_are_there(make_queue: MakeQueue) -> None:
    queue = make_queue(8, 16)
    queue.send(pattern(24))
    queue.send(pattern(16))
    assert queue.receive(None, 0) == pattern(24) + pattern(16)


def test_BUR_5_send_rejects_a_packet_that_does_not_fit_and_writes_nothing(make_queue: MakeQueue) -> None:
    queue = make_queue(8, 4)
    queue.send(pattern(24))
    assert queue.send(pattern(16)) is False
    assert queue.receive(None, 0) == pattern(24)


def test_receive_crosses_the_end(make_queue: MakeQueue) -> None:
    queue = make_queue(8, 4)
    queue.send(bytes(24))
    queue.receive(None, 0)
    queue.send(pattern(32))
    assert queue.receive(None, 0) == pattern(32)


def test_drain_drops_everything_and_counts_it(make_queue: MakeQueue) -> None:
    queue = make_queue(8, 4)
    queue.write(pattern(24))
    assert (queue.drain(), queue.drain(), queue.available_to_write()) == (3, 0, 4)


@pytest.mark.parametrize("data", [bytearray(b"12345678"), memoryview(b"12345678"), memoryview(b"12345678").cast("Q")])
def test_any_contiguous_buffer_can_be_written(make_queue: MakeQueue, data: bytes) -> None:
    queue = make_queue(8, 4)
    assert queue.send(data) and queue.write(data)
    assert queue.read(2) == b"1234567812345678"


# ---- misuse ----


@pytest.mark.parametrize("call", ["write", "send"])
def test_a_part_of_a_record_is_rejected(make_queue: MakeQueue, call: str) -> None:
    with pytest.raises(InvalidArgument, match="13 bytes are no whole number of records of 8 bytes"):
        getattr(make_queue(8, 4), call)(bytes(13))


def test_a_negative_count_is_rejected(make_queue: MakeQueue) -> None:
    with pytest.raises(InvalidArgument, match="-1 records"):
        make_queue().read(-1)


def test_an_object_that_is_not_a_buffer_is_a_type_error(make_queue: MakeQueue) -> None:
    with pytest.raises(TypeError):
        make_queue().send("text")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "call",
    [
        lambda queue: queue.write(b""), lambda queue: queue.read(0), lambda queue: queue.send(b""),
        lambda queue: queue.receive(0, 0), lambda queue: queue.drain(), lambda queue: queue.available_to_read(),
        lambda queue: queue.available_to_write(), lambda queue: queue.read_blocking(1, 0),
        lambda queue: queue.write_blocking(b"x", 0), lambda queue: queue.event_flag.wake(1),
        lambda queue: queue.event_flag.wait(1, 0),
    ],
)  # fmt: skip
def test_a_closed_queue_rejects_every_call(make_queue: MakeQueue, call: Callable[[MessageQueue], object]) -> None:
    queue = make_queue()
    queue.close()
    queue.close()
    with pytest.raises(InvalidArgument, match="closed"):
        call(queue)


def test_closing_releases_memory_and_stats_view(make_queue: MakeQueue) -> None:
    queue = make_queue(24, 1024)
    fd, stats = queue.memory.fileno(), queue.stats_view
    queue.close()
    with pytest.raises(OSError):
        os.fstat(fd)
    with pytest.raises(ValueError, match="released"):
        bytes(stats)  # type: ignore[arg-type]


def test_a_queue_that_is_collected_open_warns_and_is_unmapped(core: Core) -> None:
    queue = MessageQueue.create(24, 4, core=core)
    memory = queue.memory
    with pytest.warns(ResourceWarning, match="never closed"):
        del queue
    assert memory.closed


def test_a_queue_may_be_closed_while_another_thread_wakes_its_waiters(
    make_queue: MakeQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(8, 4)
    word = queue._lifetime

    class Closing:
        """The event flag's word, whose queue is closed at the end of the call."""

        def wake_all(self) -> int:
            slept = word.wake_all()
            queue.close()
            return slept

    monkeypatch.setattr(queue, "_lifetime", Closing())
    assert queue.wake_all() == 0


def test_a_word_may_be_closed_while_another_thread_wakes_its_waiters(
    make_queue: MakeQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(8, 4, core=cores.CORES.load("python"))
    word: Any = queue._lifetime
    acquire = word.acquire

    def close_and_acquire() -> None:
        queue.close()
        acquire()

    monkeypatch.setattr(word, "acquire", close_and_acquire)
    assert word.wake_all() == 0


def test_BUR_6_a_queue_without_event_flag_word_only_reads_and_writes(make_queue: MakeQueue) -> None:
    queue = make_queue(8, 4, event_flag=False)
    assert queue.event_flag is None
    assert queue.write(pattern(8)) and queue.read(1) == pattern(8)
    assert (queue.waiters, queue.wake_all()) == (0, 0)
    with pytest.raises(InvalidArgument, match="no event flag word"):
        queue.receive(None, 0)


# ---- attaching ----


def test_attaching_zeroes_the_counters_by_default(make_queue: MakeQueue, attach: Attach, core: Core) -> None:
    queue = make_queue(8, 4)
    queue.write(pattern(24))
    assert attach(queue, core).available_to_read() == 0
    assert queue.available_to_write() == 4


def test_attaching_without_reset_joins_a_live_queue(make_queue: MakeQueue, attach: Attach, core: Core) -> None:
    queue = make_queue(8, 4)
    queue.write(pattern(24))
    assert attach(queue, core, reset_pointers=False).read(3) == pattern(24)


def test_both_ends_see_one_stage_area(make_queue: MakeQueue, attach: Attach, core: Core) -> None:
    queue = make_queue(24, 1024)
    other = attach(queue, core)
    assert queue.stats_view is not None and other.stats_view is not None
    queue.stats_view[5] = 77
    assert other.stats_view[5] == 77


def rejected(descriptor: MQDescriptor, memory: Memory, core: Core, **options: int) -> str:
    """Return the error of attaching; the memory must be closed then."""
    with pytest.raises(QueueCorrupted) as caught:
        MessageQueue.attach(descriptor, memory, core=core, **options)  # type: ignore[arg-type]
    assert memory.closed
    return str(caught.value)


def test_MismatchedPayloadSize_other_records_than_expected_are_rejected(make_queue: MakeQueue, core: Core) -> None:
    queue = make_queue(8, 4)
    memory = Memory.adopt(os.dup(queue.memory.fileno()))
    assert "quantum is 8, expected are 24" in rejected(queue.descriptor, memory, core, quantum=24)


def test_N_BUX_3_memory_shorter_than_the_descriptor_is_rejected(make_queue: MakeQueue, core: Core) -> None:
    assert "of memory of 4096 bytes" in rejected(make_queue(24, 1024).descriptor, Memory.create(4096), core)


def test_LookForLeakedFds_rejected_attachments_leave_no_descriptor(core: Core) -> None:
    bad = MQDescriptor((Grantor(5, 0, 8),) * 3, 8)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        rejected(bad, Memory.create(64), core)
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_mapped_for_reading_only_is_rejected(core: Core) -> None:
    with Memory.create(4096, one_writer=True) as writable:
        memory = Memory.adopt(os.dup(writable.fileno()))
        descriptor = MQDescriptor((Grantor(0, 0, 8), Grantor(0, 8, 8), Grantor(0, 16, 64)), 8)
        assert "reading only" in rejected(descriptor, memory, core)


def test_a_ring_in_the_middle_of_the_memory_works(core: Core) -> None:
    grantors = (Grantor(0, 512, 8), Grantor(0, 128, 8), Grantor(0, 256, 72), Grantor(0, 64, 4))
    with MessageQueue.attach(MQDescriptor(grantors, 24), Memory.create(1024), core=core) as queue:
        assert queue.send(pattern(72)) and queue.stats_view is None
        assert bytes(queue.memory.view[256:328]) == pattern(72)
        assert bytes(queue.memory.view[128:136]) == struct.pack("<Q", 72)
        assert queue.receive(None, 0) == pattern(72)
