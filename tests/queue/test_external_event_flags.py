"""Long blocking calls: custom bits, and an event flag word that belongs to another queue or to none."""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from nnfmq.hal.errors import DeadObject, InvalidArgument
from nnfmq.queue import EventFlag, MessageQueue
from nnfmq.queue.core import Core

MakeQueue = Callable[..., MessageQueue]
Start = Callable[..., "Future[Any]"]
Until = Callable[[Callable[[], object]], None]

SPACE, DATA = 0x100, 0x200


@pytest.fixture
def queues(make_queue: MakeQueue) -> tuple[MessageQueue, MessageQueue]:
    """A queue of 4 records of 8 bytes without event flag word, and another one that has a word."""
    return make_queue(8, 4, event_flag=False), make_queue(8, 4)


@pytest.fixture
def bits(queues: tuple[MessageQueue, MessageQueue]) -> dict[str, Any]:
    """Wait with the word of the second queue."""
    return {"read_notification": SPACE, "write_notification": DATA, "event_flag": queues[1].event_flag}


def word_of(queue: MessageQueue) -> int:
    grantor = queue.descriptor.grantors[3]
    return int.from_bytes(queue.memory.view[grantor.offset : grantor.offset + 4], "little")


# ---- bits ----


def test_custom_bits_are_set_in_the_queue_s_own_word(make_queue: MakeQueue, limit_ns: int) -> None:
    queue = make_queue(8, 4)
    bits = {"read_notification": SPACE, "write_notification": DATA}
    assert queue.write_blocking(bytes(8), limit_ns, **bits)
    after_write = word_of(queue)
    assert queue.read_blocking(1, limit_ns, **bits) == bytes(8)
    assert (after_write, word_of(queue)) == (DATA, DATA | SPACE)


def test_a_call_may_wake_no_waiter(make_queue: MakeQueue, limit_ns: int) -> None:
    queue = make_queue(8, 4)
    assert queue.write_blocking(bytes(8), limit_ns, write_notification=0)
    assert queue.read_blocking(1, limit_ns, read_notification=0) == bytes(8)
    assert word_of(queue) == 0


def test_a_call_cannot_wait_for_no_bit(make_queue: MakeQueue) -> None:
    """libfmq returns false."""
    queue = make_queue(8, 4)
    with pytest.raises(InvalidArgument, match="no bit at all"):
        queue.write_blocking(bytes(8), 0, read_notification=0)
    with pytest.raises(InvalidArgument, match="no bit at all"):
        queue.read_blocking(0, 0, write_notification=0)


@pytest.mark.parametrize("mask", [-1, 2**32])
def test_notifications_have_32_bits(make_queue: MakeQueue, mask: int) -> None:
    with pytest.raises(InvalidArgument, match="32 bits"):
        make_queue(8, 4).read_blocking(1, 0, read_notification=mask)


def test_a_queue_without_any_word_cannot_wait(queues: tuple[MessageQueue, MessageQueue]) -> None:
    with pytest.raises(InvalidArgument, match="no event flag word"):
        queues[0].read_blocking(1, 0, read_notification=SPACE, write_notification=DATA)


def test_more_records_than_fit_are_rejected_immediately(
    queues: tuple[MessageQueue, MessageQueue], bits: dict[str, Any]
) -> None:
    assert queues[0].read_blocking(5, None, **bits) is None
    assert queues[0].write_blocking(bytes(40), None, **bits) is False


# ---- several queues, one word ----


def test_one_thread_waits_for_several_queues_on_one_word(make_queue: MakeQueue, start: Start, limit_ns: int) -> None:
    queues = [make_queue(8, 4, event_flag=i == 0) for i in range(3)]
    flag = queues[0].event_flag
    assert flag is not None

    def write_each() -> bool:
        return all(
            queue.write_blocking(bytes([i]) * 8, limit_ns, write_notification=1 << 2 * i + 1, event_flag=flag)
            for i, queue in enumerate(queues)
        )

    future, came = start(write_each), dict[int, bytes | None]()
    while len(came) < 3:
        state = flag.wait(0b101010, limit_ns)
        assert state
        came |= {i: queue.read(1) for i, queue in enumerate(queues) if state & 1 << 2 * i + 1}
    assert future.result() is True
    assert came == {i: bytes([i]) * 8 for i in range(3)}


def test_a_reader_on_another_queue_s_word_is_woken_there(
    queues: tuple[MessageQueue, MessageQueue], bits: dict[str, Any], start: Start, until: Until, limit_ns: int
) -> None:
    queue, other = queues
    future = start(lambda: queue.read_blocking(2, limit_ns, **bits))
    until(lambda: queue.waiters)
    assert other.waiters == 1
    assert queue.write_blocking(b"ABCDEFGH", limit_ns, **bits)
    assert not future.done()
    assert queue.write_blocking(b"abcdefgh", limit_ns, **bits)
    assert future.result() == b"ABCDEFGHabcdefgh"
    assert (queue.waiters, other.waiters) == (0, 0)


def test_a_writer_on_another_queue_s_word_is_woken_there(
    queues: tuple[MessageQueue, MessageQueue], bits: dict[str, Any], start: Start, until: Until, limit_ns: int
) -> None:
    queue, _ = queues
    queue.write(b"1" * 32)
    future = start(lambda: queue.write_blocking(b"2" * 8, limit_ns, **bits))
    until(lambda: queue.waiters)
    assert queue.read_blocking(1, limit_ns, **bits) == b"1" * 8
    assert future.result() is True


def test_no_wake_up_is_lost_on_a_shared_word(
    core_pair: tuple[Core, Core], attach: Callable[..., MessageQueue], start: Start, limit_ns: int
) -> None:
    with MessageQueue.create(8, 3, core=core_pair[0]) as writer, MessageQueue.create(8, 1, core=core_pair[0]) as word:
        reader, reader_word = attach(writer, core_pair[1]), attach(word, core_pair[1])
        bits = {"read_notification": SPACE, "write_notification": DATA}
        future = start(
            lambda: [
                reader.read_blocking(1, limit_ns, event_flag=reader_word.event_flag, **bits)  # type: ignore[arg-type]
                for _ in range(2000)
            ]
        )
        for i in range(2000):
            assert writer.write_blocking(i.to_bytes(8, "little"), limit_ns, event_flag=word.event_flag, **bits)  # type: ignore[arg-type]
        assert future.result() == [i.to_bytes(8, "little") for i in range(2000)]


# ---- the end of a wait on another word ----

Wait = Callable[[MessageQueue, int | None, dict[str, Any]], object]


def full(queue: MessageQueue) -> None:
    assert queue.write(bytes(32))


WAITS: dict[str, tuple[Callable[[MessageQueue], object], Wait]] = {
    "read": (lambda queue: None, lambda queue, limit, bits: queue.read_blocking(2, limit, **bits)),
    "write": (full, lambda queue, limit, bits: queue.write_blocking(bytes(16), limit, **bits)),
}


@pytest.fixture(params=["no word", "word"])
def queue(request: pytest.FixtureRequest, make_queue: MakeQueue) -> MessageQueue:
    """The queue that waits on another word; it may have its own word as well."""
    return make_queue(8, 4, event_flag=request.param == "word")


@pytest.fixture(params=WAITS.values(), ids=WAITS.keys())
def wait(request: pytest.FixtureRequest, queue: MessageQueue) -> Wait:
    prepare, made = request.param
    prepare(queue)
    return made


@pytest.fixture
def host(make_queue: MakeQueue) -> MessageQueue:
    """The queue whose word is waited on."""
    return make_queue(8, 4)


def at(host: MessageQueue) -> dict[str, Any]:
    return {"read_notification": SPACE, "write_notification": DATA, "event_flag": host.event_flag}


def test_a_wait_on_another_word_ends_at_its_deadline(queue: MessageQueue, host: MessageQueue, wait: Wait) -> None:
    deadline = time.monotonic_ns() + 20 * 10**6
    assert not wait(queue, deadline, at(host))
    assert deadline <= time.monotonic_ns() < deadline + 2 * 10**9
    assert (queue.waiters, host.waiters) == (0, 0)


def test_a_wait_on_another_word_ends_when_its_queue_is_closed(
    queue: MessageQueue, host: MessageQueue, wait: Wait, start: Start, until: Until
) -> None:
    future = start(wait, queue, None, at(host))
    until(lambda: host.waiters)
    queue.close()
    with pytest.raises(InvalidArgument, match="closed during the wait"):
        future.result()
    until(lambda: queue.memory.closed)
    assert not host.memory.closed and host.waiters == 0


def test_a_wait_on_another_word_ends_when_the_other_queue_is_closed(
    queue: MessageQueue, host: MessageQueue, wait: Wait, start: Start, until: Until
) -> None:
    future = start(wait, queue, None, at(host))
    until(lambda: host.waiters)
    host.close()
    with pytest.raises(InvalidArgument, match="closed during the wait"):
        future.result()
    until(lambda: host.memory.closed)
    assert queue.waiters == 0 and queue.available_to_read() >= 0


@pytest.mark.parametrize("whose", ["its queue", "the other queue"])
def test_a_wait_on_another_word_ends_when_the_peer_dies_of(
    whose: str, queue: MessageQueue, host: MessageQueue, wait: Wait, start: Start, until: Until
) -> None:
    future = start(wait, queue, None, at(host))
    until(lambda: host.waiters)
    orphan = queue if whose == "its queue" else host
    orphan.peer_death.set()
    until(lambda: orphan.wake_all() >= 0 and orphan.waiters == 0)
    with pytest.raises(DeadObject):
        future.result()


class Ping(Exception):
    """Raised by the signal handler."""


@pytest.fixture
def signal_timer() -> Iterator[None]:
    def raise_ping(*_: object) -> None:
        raise Ping

    gc.collect()
    gc.disable()  # an exception in a callback of the collector would be lost
    before = signal.signal(signal.SIGALRM, raise_ping)
    signal.setitimer(signal.ITIMER_REAL, 0.03)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    gc.enable()


def test_a_signal_ends_a_wait_on_another_word(
    queue: MessageQueue, host: MessageQueue, wait: Wait, signal_timer: None, limit_ns: int
) -> None:
    with pytest.raises(Ping):
        wait(queue, limit_ns, at(host))
    assert (queue.waiters, host.waiters) == (0, 0)


def test_a_closed_word_cannot_be_waited_on(queue: MessageQueue, host: MessageQueue, wait: Wait) -> None:
    bits = at(host)
    host.close()
    with pytest.raises(InvalidArgument, match="closed"):
        wait(queue, 0, bits)
    assert queue.waiters == 0


def test_the_word_may_be_private_memory(queue: MessageQueue, core: Core, limit_ns: int) -> None:
    with EventFlag.from_buffer(memoryview(bytearray(4)), core=core) as flag:
        assert queue.write_blocking(b"12345678", limit_ns, event_flag=flag)
        assert queue.read_blocking(1, limit_ns, event_flag=flag) == b"12345678"
        assert flag.wait(3, limit_ns) == 3
