"""Waiting: deadlines, wake-ups, death, closing, signals. Each on every core; threads stand for processes here."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from support.drivers import at_least_once

from nnfmq.hal.errors import DeadObject, InvalidArgument
from nnfmq.queue import NOT_EMPTY, NOT_FULL, EventFlag, MessageQueue, PeerDeathFlag
from nnfmq.queue.core import Core

MakeQueue = Callable[..., MessageQueue]
Start = Callable[..., "Future[Any]"]
Until = Callable[[Callable[[], object]], None]
Wait = Callable[[MessageQueue, int | None], object]

MS = 10**6
LONG_WINDOW_NS = 30 * 10**9


def full(queue: MessageQueue) -> MessageQueue:
    """Return the queue, filled."""
    assert queue.write(bytes(queue.quantum * queue.count))
    return queue


# Every way to wait on a queue of 4 records of 8 bytes that is as empty (or as full) as the wait needs it.
WAITS: dict[str, tuple[Callable[[MessageQueue], object], Wait]] = {
    "receive asleep": (lambda queue: None, lambda queue, limit: queue.receive(limit, 0)),
    "receive polling": (lambda queue: None, lambda queue, limit: queue.receive(limit, LONG_WINDOW_NS)),
    "read_blocking": (lambda queue: None, lambda queue, limit: queue.read_blocking(2, limit)),
    "write_blocking": (full, lambda queue, limit: queue.write_blocking(bytes(16), limit)),
    "event flag": (lambda queue: None, lambda queue, limit: queue.event_flag and queue.event_flag.wait(4, limit)),
}


@pytest.fixture(params=WAITS.values(), ids=WAITS.keys())
def waiting(request: pytest.FixtureRequest, make_queue: MakeQueue) -> tuple[MessageQueue, Wait]:
    """A queue on which the wait has to wait, and the wait."""
    prepare, wait = request.param
    queue = make_queue(8, 4)
    prepare(queue)
    return queue, wait


# ---- deadlines ----


def test_a_wait_ends_at_its_deadline_and_not_before(waiting: tuple[MessageQueue, Wait]) -> None:
    queue, wait = waiting
    deadline = time.monotonic_ns() + 20 * MS
    assert not wait(queue, deadline)
    assert deadline <= time.monotonic_ns() < deadline + 10_000 * MS


@pytest.mark.parametrize("deadline", [0, 1, -1, -(2**62)])
def test_a_deadline_that_has_passed_means_one_try(waiting: tuple[MessageQueue, Wait], deadline: int) -> None:
    queue, wait = waiting
    start = time.monotonic_ns()
    assert not wait(queue, deadline)
    assert time.monotonic_ns() - start < 10_000 * MS


def test_one_try_succeeds_if_records_are_there(make_queue: MakeQueue) -> None:
    queue = make_queue(8, 4)
    assert queue.write_blocking(bytes(16), 0) is True
    assert queue.read_blocking(1, 0) == bytes(8)
    assert queue.receive(0, 0) == bytes(8)


def test_a_deadline_beyond_the_clock_s_range_is_no_limit(make_queue: MakeQueue, start: Start, until: Until) -> None:
    queue = make_queue(8, 4)
    future = start(queue.receive, 2**70, 0)
    until(lambda: queue.waiters)
    queue.send(bytes(8))
    assert future.result() == bytes(8)


def test_more_records_than_fit_are_rejected_immediately(make_queue: MakeQueue) -> None:
    queue = make_queue(8, 4)
    assert queue.read_blocking(5, None) is None
    assert queue.write_blocking(bytes(40), None) is False


def test_BlockingReadWriteZeroMessages_moving_no_records_never_waits(make_queue: MakeQueue) -> None:
    queue = full(make_queue(8, 4))
    assert queue.write_blocking(b"", None) is True
    queue.drain()
    assert queue.read_blocking(0, None) == b""


# ---- wake-ups ----


@pytest.mark.parametrize("window_ns", [0, LONG_WINDOW_NS])
def test_a_send_ends_a_receive(
    make_queue: MakeQueue, start: Start, until: Until, limit_ns: int, window_ns: int
) -> None:
    queue = make_queue(8, 4)
    future = start(queue.receive, limit_ns, window_ns)
    until(lambda: queue.waiters)
    assert queue.send(b"12345678")
    assert future.result() == b"12345678"
    assert queue.waiters == 0


def test_a_blocking_read_waits_for_all_its_records(
    make_queue: MakeQueue, start: Start, until: Until, limit_ns: int
) -> None:
    queue = make_queue(8, 4)
    future = start(queue.read_blocking, 3, limit_ns)
    until(lambda: queue.waiters)
    queue.send(bytes(16))
    assert not future.done()
    queue.send(bytes(8))
    assert future.result() == bytes(24)


def test_a_receive_frees_space_for_a_blocking_write(
    make_queue: MakeQueue, start: Start, until: Until, limit_ns: int
) -> None:
    queue = full(make_queue(8, 4))
    future = start(queue.write_blocking, b"A" * 32, limit_ns)
    until(lambda: queue.waiters)
    queue.receive(limit_ns, 0)
    assert future.result() is True
    assert queue.read(4) == b"A" * 32


def test_a_drain_frees_space_for_a_blocking_write(
    make_queue: MakeQueue, start: Start, until: Until, limit_ns: int
) -> None:
    queue = full(make_queue(8, 4))
    future = start(queue.write_blocking, b"A" * 32, limit_ns)
    until(lambda: queue.waiters)
    queue.drain()
    assert future.result() is True


def test_a_plain_write_with_a_wake_by_hand_ends_a_receive(
    make_queue: MakeQueue, start: Start, until: Until, limit_ns: int
) -> None:
    queue = make_queue(8, 4)
    future = start(queue.receive, limit_ns, 0)
    until(lambda: queue.waiters)
    queue.write(bytes(8))
    assert queue.event_flag is not None
    queue.event_flag.wake(NOT_EMPTY)
    assert future.result() == bytes(8)


def test_a_stale_bit_does_not_end_a_wait_without_records(make_queue: MakeQueue) -> None:
    queue = make_queue(8, 4)
    queue.send(bytes(8))
    queue.read(1)
    deadline = time.monotonic_ns() + 20 * MS
    assert queue.receive(deadline, 0) is None
    assert time.monotonic_ns() >= deadline


def test_no_wake_up_is_lost_between_cores(
    core_pair: tuple[Core, Core], attach: Callable[..., MessageQueue], start: Start, limit_ns: int
) -> None:
    writer_core, reader_core = core_pair
    with MessageQueue.create(8, 3, core=writer_core) as writer:
        reader = attach(writer, reader_core)
        future = start(lambda: [reader.read_blocking(1, limit_ns) for _ in range(3000)])
        for i in range(3000):
            assert writer.write_blocking(i.to_bytes(8, "little"), limit_ns)
        assert future.result() == [i.to_bytes(8, "little") for i in range(3000)]


def test_one_core_reads_what_the_other_sent(core_pair: tuple[Core, Core], attach: Callable[..., MessageQueue]) -> None:
    writer_core, reader_core = core_pair
    with MessageQueue.create(24, 5, core=writer_core) as writer:
        reader = attach(writer, reader_core)
        for n in [1, 2, 3, 4, 5] * 4:
            packet = os.urandom(24 * n)
            assert writer.send(packet)
            assert writer.send(bytes(24 * 6)) is False
            assert reader.receive(0, 0) == packet
            assert bytes(writer.memory.view[:16]) == bytes(reader.memory.view[:16])


# ---- death and closing ----


def test_the_peer_death_flag_ends_every_wait(waiting: tuple[MessageQueue, Wait], start: Start, until: Until) -> None:
    queue, wait = waiting
    future = start(wait, queue, None)
    until(lambda: queue.waiters)
    queue.peer_death.set()
    until(lambda: queue.wake_all() >= 0 and queue.waiters == 0)
    with pytest.raises(DeadObject, match="gone"):
        future.result()


def test_after_peer_death_no_wait_reads_the_ring(make_queue: MakeQueue) -> None:
    queue = make_queue(8, 4)
    queue.send(bytes(16))
    queue.peer_death.set()
    for call in (lambda: queue.receive(0, 0), lambda: queue.read_blocking(1, 0), lambda: queue.write_blocking(b"", 0)):
        with pytest.raises(DeadObject):
            call()


def test_one_flag_serves_all_queues_of_a_peer(make_queue: MakeQueue) -> None:
    flag = PeerDeathFlag()
    first, second = make_queue(8, 4, peer_death=flag), make_queue(8, 4)
    second.peer_death = flag
    flag.set()
    assert first.peer_death.is_set() and second.peer_death is flag
    with pytest.raises(DeadObject):
        second.receive(0, 0)


def test_the_flag_cannot_be_changed_under_a_waiter(
    make_queue: MakeQueue, start: Start, until: Until, limit_ns: int
) -> None:
    queue = make_queue(8, 4)
    future = start(queue.receive, limit_ns, 0)
    until(lambda: queue.waiters)
    with pytest.raises(InvalidArgument, match="while a thread waits"):
        queue.peer_death = PeerDeathFlag()
    queue.send(bytes(8))
    future.result()


def test_closing_ends_every_wait_and_the_last_waiter_unmaps(
    waiting: tuple[MessageQueue, Wait], start: Start, until: Until
) -> None:
    queue, wait = waiting
    future = start(wait, queue, None)
    until(lambda: queue.waiters)
    queue.close()
    with pytest.raises(InvalidArgument, match="closed during the wait"):
        future.result()
    until(lambda: queue.memory.closed)


# ---- signals ----


class Ping(Exception):
    """Raised by the signal handler of the tests."""


@pytest.fixture
def signal_timer() -> Iterator[Callable[[], int]]:
    """Have a signal come in 30 ms; returns when that will be."""

    def raise_ping(*_: object) -> None:
        raise Ping

    def start_timer() -> int:
        signal.setitimer(signal.ITIMER_REAL, 0.03)
        return time.monotonic_ns() + 30 * MS

    before = signal.signal(signal.SIGALRM, raise_ping)
    yield start_timer
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_a_signal_ends_every_wait_within_50_ms(
    waiting: tuple[MessageQueue, Wait], signal_timer: Callable[[], int], limit_ns: int
) -> None:
    queue, wait = waiting

    def ends_soon() -> bool:
        expected = signal_timer()
        with pytest.raises(Ping):
            wait(queue, limit_ns)
        late = time.monotonic_ns() - expected
        assert queue.waiters == 0
        return late < 50 * MS

    at_least_once(ends_soon, "the signal ends the wait within 50 ms")


def test_a_signal_whose_handler_returns_does_not_end_a_wait(make_queue: MakeQueue, limit_ns: int) -> None:
    queue, came = make_queue(8, 4), threading.Event()
    before = signal.signal(signal.SIGALRM, lambda *_: (came.set(), queue.send(bytes(8))))
    signal.setitimer(signal.ITIMER_REAL, 0.03)
    assert queue.receive(limit_ns, 0) == bytes(8)
    signal.signal(signal.SIGALRM, before)
    assert came.is_set()


def test_a_handler_may_close_the_queue_it_interrupts(make_queue: MakeQueue, limit_ns: int) -> None:
    queue = make_queue(8, 4)
    before = signal.signal(signal.SIGALRM, lambda *_: queue.close())
    signal.setitimer(signal.ITIMER_REAL, 0.03)
    with pytest.raises(InvalidArgument, match="closed during the wait"):
        queue.receive(limit_ns, 0)
    signal.signal(signal.SIGALRM, before)
    assert queue.memory.closed


def test_other_threads_run_while_one_waits(waiting: tuple[MessageQueue, Wait], start: Start, until: Until) -> None:
    queue, wait = waiting
    future = start(wait, queue, time.monotonic_ns() + 200 * MS)
    until(lambda: queue.waiters)
    turns = 0
    while not future.done():
        turns += 1
        os.sched_yield()
    assert turns > 10


# ---- the event flag by itself ----


@pytest.fixture
def flag(core: Core) -> Iterator[tuple[EventFlag, memoryview]]:
    """An event flag over a private word, and the word."""
    memory = memoryview(bytearray(64))
    with EventFlag.from_buffer(memory, 8, core=core) as event_flag:
        yield event_flag, memory[8:12].cast("I")


def test_bits_are_set_by_wake_and_consumed_by_wait(flag: tuple[EventFlag, memoryview]) -> None:
    event_flag, word = flag
    event_flag.wake(0x80000005)
    assert event_flag.wait(0x80000001, 0) == 0x80000001
    assert word[0] == 4


def test_an_empty_mask_wakes_no_thread(flag: tuple[EventFlag, memoryview]) -> None:
    event_flag, word = flag
    assert (event_flag.wake(0), word[0]) == (0, 0)
    assert (event_flag.wake(6), word[0]) == (0, 6)


def test_a_wait_gets_the_bits_it_waits_for_and_no_others(
    flag: tuple[EventFlag, memoryview], start: Start, until: Until, limit_ns: int
) -> None:
    event_flag, word = flag
    future = start(event_flag.wait, NOT_FULL | 8, limit_ns)
    until(lambda: event_flag.waiters)
    event_flag.wake(NOT_EMPTY)
    assert not future.done()
    event_flag.wake(8 | 16)
    assert future.result() == 8
    assert word[0] == NOT_EMPTY | 16


def test_BlockingTimeOutTest_a_wait_for_a_bit_that_is_never_set_returns_none(
    flag: tuple[EventFlag, memoryview],
) -> None:
    deadline = time.monotonic_ns() + 20 * MS
    assert flag[0].wait(1, deadline) == 0
    assert time.monotonic_ns() >= deadline


@pytest.mark.parametrize("mask", [-1, 2**32])
def test_a_mask_has_32_bits(flag: tuple[EventFlag, memoryview], mask: int) -> None:
    with pytest.raises(InvalidArgument, match="32 bits"):
        flag[0].wake(mask)


def test_a_wait_for_no_bit_is_rejected(flag: tuple[EventFlag, memoryview]) -> None:
    with pytest.raises(InvalidArgument, match="no bit"):
        flag[0].wait(0, 0)


def test_wake_all_sets_every_bit(flag: tuple[EventFlag, memoryview]) -> None:
    flag[0].wake_all()
    assert flag[1][0] == 0xFFFFFFFF


@pytest.mark.parametrize("deadline_ns", [2**63 - 1, 2**63, 2**100])
def test_a_deadline_beyond_the_end_of_the_clock_is_no_error(make_queue: MakeQueue, deadline_ns: int) -> None:
    queue = make_queue(8, 4)
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(queue.receive, deadline_ns, 0)
        while not queue.waiters:
            assert not received.done(), received.exception()
        queue.send(b"12345678")
        assert received.result(20) == b"12345678"
