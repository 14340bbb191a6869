"""Counters that a peer has corrupted: libfmq's results, and never a crash, a copy outside of the ring, or a hang."""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from nnfmq.hal.errors import InvalidArgument, QueueCorrupted
from nnfmq.queue import MessageQueue
from nnfmq.queue.core import Core

MakeQueue = Callable[..., MessageQueue]

# A ring of 4 records of 8 bytes: (read counter, write counter) → the results of libfmq's
# (available_to_read, available_to_write, write(1), read(1)) and the read counter after the read.
STATES = {
    "w below r": ((16, 8), (0, 4, True), (None, 8)),
    "w far ahead of r": ((0, 40), (5, 0, False), (None, 40)),
    "w almost 2^64": ((0, 2**64 - 8), (2**61 - 1, 0, False), (None, 2**64 - 8)),
    "w misaligned": ((8, 17), (1, 2, False), (None, 8)),
    "r misaligned": ((9, 24), (1, 2, True), (None, 9)),
}


def poke(queue: MessageQueue, r: int, w: int) -> None:
    queue.memory.view[:16] = struct.pack("<QQ", r, w)


def counters(queue: MessageQueue) -> tuple[int, int]:
    r, w = struct.unpack("<QQ", queue.memory.view[:16])
    return r, w


@pytest.mark.parametrize(("state", "expected"), [(row[0], row[1]) for row in STATES.values()], ids=STATES.keys())
def test_N_BUX_3_a_writer_s_calls_return_what_libfmq_s_do(
    make_queue: MakeQueue, state: tuple[int, int], expected: tuple[int, int, bool]
) -> None:
    queue = make_queue(8, 4)
    poke(queue, *state)
    assert (queue.available_to_read(), queue.available_to_write(), queue.write(bytes(8))) == expected


@pytest.mark.parametrize(("state", "expected"), [(row[0], row[2]) for row in STATES.values()], ids=STATES.keys())
def test_N_BUX_3_a_reader_s_calls_return_what_libfmq_s_do(
    make_queue: MakeQueue, state: tuple[int, int], expected: tuple[None, int]
) -> None:
    queue = make_queue(8, 4)
    poke(queue, *state)
    assert (queue.read(1), counters(queue)[0]) == expected


READERS: list[Callable[[MessageQueue], object]] = [
    lambda queue: queue.receive(None, 50_000),
    lambda queue: queue.read_blocking(1, None),
    lambda queue: queue.drain(),
]


@pytest.mark.parametrize("state", [row[0] for row in STATES.values()], ids=STATES.keys())
@pytest.mark.parametrize("call", READERS, ids=["receive", "read_blocking", "drain"])
def test_N_BUX_3_a_blocking_read_raises_instead_of_waiting_indefinitely(
    make_queue: MakeQueue, call: Callable[[MessageQueue], object], state: tuple[int, int]
) -> None:
    queue = make_queue(8, 4)
    poke(queue, *state)
    with pytest.raises(QueueCorrupted, match=f"write counter {state[1]}"):
        call(queue)


@pytest.mark.parametrize("state", [(16, 8), (0, 40), (0, 2**64 - 8), (8, 17)])
@pytest.mark.parametrize("call", ["send", "write_blocking"])
def test_N_BUX_3_send_raises_and_writes_nothing(make_queue: MakeQueue, call: str, state: tuple[int, int]) -> None:
    queue = make_queue(8, 4)
    poke(queue, *state)
    options = (None,) if call == "write_blocking" else ()
    with pytest.raises(QueueCorrupted, match=f"read counter {state[0]}"):
        getattr(queue, call)(bytes(8), *options)
    assert counters(queue) == state


def test_MisalignedWriteCounter_the_next_write_fails(make_queue: MakeQueue) -> None:
    queue = make_queue(4, 1020)
    poke(queue, 0, 4 * 1020 - 1)
    assert queue.write(bytes(4)) is False


def test_an_overflowed_queue_works_again_after_the_read_that_found_it(make_queue: MakeQueue) -> None:
    queue = make_queue(8, 4)
    poke(queue, 0, 800)
    assert queue.read(1) is None
    assert queue.send(b"A" * 16)
    assert queue.receive(None, 0) == b"A" * 16


def test_counters_corrupted_during_a_wait_end_it(
    make_queue: MakeQueue, start: Callable[..., object], until: Callable[..., None], limit_ns: int
) -> None:
    queue = make_queue(8, 4)
    future = start(queue.receive, limit_ns, 0)
    until(lambda: queue.waiters)
    poke(queue, 0, 3)
    assert queue.event_flag is not None
    until(lambda: queue.event_flag.wake(2) or future.done())
    with pytest.raises(QueueCorrupted):
        future.result()


def test_an_overwritten_event_flag_word_delays_a_call_at_most_to_its_deadline(
    make_queue: MakeQueue, start: Callable[..., Any], until: Callable[..., None]
) -> None:
    queue, chance, deadline = make_queue(8, 4), random.Random(5), time.monotonic_ns() + 50 * 10**6
    grantor = queue.descriptor.grantors[3]
    word = queue.memory.view[grantor.offset : grantor.offset + 4]
    future = start(queue.receive, deadline, 0)
    until(lambda: queue.waiters)
    until(lambda: word.__setitem__(slice(0, 4), chance.randbytes(4)) or future.done())
    assert future.result() is None and time.monotonic_ns() >= deadline
    word.release()
    assert queue.send(b"12345678") and queue.receive(0, 0) == b"12345678"


def test_fmq_fuzzer_random_counters_never_crash_nor_leave_the_ring(make_queue: MakeQueue) -> None:
    queue, chance = make_queue(8, 4), random.Random(4)
    place = memoryview(queue.memory.view)
    interesting = [0, 1, 7, 8, 24, 32, 40, 2**31, 2**32 - 8, 2**63, 2**64 - 32, 2**64 - 8, 2**64 - 1]
    actions: list[Callable[[], object]] = [
        lambda: queue.write(b"W" * 8 * chance.randrange(6)),
        lambda: queue.read(chance.randrange(6)),
        lambda: queue.send(b"S" * 8 * chance.randrange(6)),
        lambda: queue.receive(time.monotonic_ns() + 1000, 500),
        lambda: queue.read_blocking(chance.randrange(6), time.monotonic_ns() + 1000),
        lambda: queue.write_blocking(b"B" * 8 * chance.randrange(6), time.monotonic_ns() + 1000),
        queue.drain,
    ]
    for _ in range(2000):
        poke(queue, chance.choice(interesting), chance.choice(interesting))
        with suppress(QueueCorrupted):
            chance.choice(actions)()
        behind = bytes(place[52:54]) + bytes(place[56:])  # but for the CPU hint
        assert behind == bytes(len(place) - 54), "a byte behind the event flag word was written"
    place.release()


@pytest.mark.parametrize("offset", [-4, 2, 61, 64, 2**40])
def test_a_core_rejects_an_event_flag_word_outside_its_memory(core: Core, offset: int) -> None:
    with pytest.raises(InvalidArgument, match="outside or misaligned"):
        core.EventFlagWord(memoryview(bytearray(64)), offset, bytearray(4))
