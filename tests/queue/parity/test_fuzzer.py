"""fmq_fuzzer in small: random peers. No crash, no hang, no byte outside the ring; only typed errors."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack, suppress
from time import monotonic_ns
from typing import Any

import pytest
from support.queues import Setup

from nnfmq.base.memory import Memory
from nnfmq.hal.errors import InvalidArgument, QueueCorrupted
from nnfmq.queue import UNSYNCHRONIZED, Grantor, MessageQueue, MQDescriptor, Overflow

COUNTERS = [0, 1, 7, 8, 24, 32, 40, 72, 2**31, 2**32 - 8, 2**63, 2**64 - 32, 2**64 - 8, 2**64 - 1]
RING = slice(64, 96)
DESCRIPTOR = (Grantor(0, 0, 8), Grantor(0, 8, 8), Grantor(0, 64, 32), Grantor(0, 24, 4))
LIMIT_NS = 100_000  # as the fuzzer's blocking calls
ROUNDS = 1500


def poke(memory: Memory, chance: random.Random) -> None:
    """Change one counter, as a hostile peer would at any time."""
    at = chance.choice([0, 8])
    memory.view[at : at + 8] = chance.choice(COUNTERS).to_bytes(8, "little")


def outside(memory: Memory) -> bytes:
    """Return what no call may change: all but counters, event flag word and ring."""
    view = memory.view
    return bytes(view[16:24]) + bytes(view[28 : RING.start]) + bytes(view[RING.stop :])


def attached(plain: Setup, memory: Memory, flavor: int, **options: Any) -> MessageQueue:
    queue = MessageQueue.attach(MQDescriptor(DESCRIPTOR, 8, flavor), memory, flavor=flavor, core=plain.core, **options)
    return plain.stack.enter_context(queue)


def transact(begin: Callable[[int], Any], commit: Callable[[int], Any], n: int, corrupt: Callable[[], None]) -> None:
    """Make a transaction, with the peer at work in the middle."""
    if begin(n) is not None:
        corrupt()
        commit(n)


def test_fmq_fuzzer_synchronized(plain: Setup) -> None:
    memory, chance = Memory.create(4096), random.Random(1)
    queue = attached(plain, memory, 1)
    before = outside(memory)

    def corrupt() -> None:
        poke(memory, chance)

    def some() -> int:
        return chance.randrange(7)

    calls: list[Callable[[], object]] = [
        lambda: queue.write(b"W" * 8 * some()),
        lambda: queue.read(some()),
        lambda: queue.send(b"S" * 8 * some()),
        lambda: queue.receive(monotonic_ns() + LIMIT_NS, 500),
        lambda: queue.write_blocking(b"B" * 8 * some(), monotonic_ns() + LIMIT_NS),
        lambda: queue.read_blocking(some(), monotonic_ns() + LIMIT_NS),
        lambda: queue.read_blocking(some(), monotonic_ns() + LIMIT_NS, write_notification=16),
        lambda: transact(queue.begin_write, queue.commit_write, some(), corrupt),
        lambda: transact(queue.begin_read, queue.commit_read, some(), corrupt),
    ]
    for _ in range(ROUNDS):
        corrupt()
        with suppress(QueueCorrupted):
            chance.choice(calls)()
        assert outside(memory) == before


@pytest.mark.parametrize("overflow", list(Overflow))
def test_fmq_fuzzer_unsynchronized(plain: Setup, overflow: Overflow) -> None:
    writer, chance = plain.create(8, 4, flavor=UNSYNCHRONIZED), random.Random(2)
    readers = [plain.attach(writer, reset_pointers=False, overflow=overflow) for _ in range(5)]
    view = writer.memory.view
    before = bytes(view[48:])

    def corrupt() -> None:
        poke(writer.memory, chance)

    def act(queue: MessageQueue) -> None:
        n = chance.randrange(7)
        queue.read(n)
        transact(queue.begin_read, queue.commit_read, n, corrupt)

    for _ in range(ROUNDS):
        corrupt()
        with suppress(QueueCorrupted):
            writer.write(b"W" * 8 * chance.randrange(7))
            transact(writer.begin_write, writer.commit_write, chance.randrange(7), corrupt)
        act(chance.choice(readers))
        assert bytes(view[48:]) == before


def test_fmq_fuzzer_descriptors(plain: Setup) -> None:
    chance = random.Random(3)
    numbers = [-(2**63), -10, -8, -1, 0, 1, 4, 7, 8, 16, 24, 32, 4088, 4096, 2**31 - 1, 2**31, 2**32 - 8, 2**63, 2**64]

    def any_grantor() -> Grantor:
        return Grantor(chance.randint(-2, 2), chance.choice(numbers), chance.choice(numbers))

    for _ in range(ROUNDS):
        grantors = tuple(chance.choice([any_grantor(), *DESCRIPTOR]) for _ in range(chance.randrange(6)))
        descriptor = MQDescriptor(grantors, chance.choice([-1, 0, 1, 8, 2**31]), chance.choice([0, 1, 2]))
        memories = [Memory.create(4096) for _ in range(chance.randrange(3))]
        with suppress(QueueCorrupted, InvalidArgument), ExitStack() as stack:
            queue = stack.enter_context(MessageQueue.attach(descriptor, *memories, core=plain.core))
            queue.write(bytes(queue.quantum))
        assert all(memory.closed for memory in memories)
