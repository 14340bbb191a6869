"""What a burst's slots stand for in the driver, and what a client's memory costs it."""

from __future__ import annotations

import fcntl
import os
from contextlib import ExitStack

import pytest

from nnfmq.hal.errors import InvalidArgument, ResourceExhaustedTransient
from nnfmq.memory import Memory
from nnfmq.serialize.messages import MemoryData
from nnfmq.service import memory_quota
from nnfmq.service.memory_cache import MemoryCache
from nnfmq.service.memory_quota import MemoryQuota


@pytest.fixture
def memories(resources: ExitStack) -> list[Memory]:
    return [resources.enter_context(Memory.create(8)) for _ in range(3)]


@pytest.fixture
def cache(resources: ExitStack) -> MemoryCache:
    cache = MemoryCache()
    resources.callback(cache.close)
    return cache


def test_unknown_slots_are_named_once_each_in_ascending_order(cache: MemoryCache, memories: list[Memory]) -> None:
    cache.add(5, memories[0])
    assert cache.unknown([9, 5, -1, 9, 2]) == [-1, 2, 9]
    assert cache.unknown([5, 5]) == []


def test_memories_come_in_the_order_of_the_slots(cache: MemoryCache, memories: list[Memory]) -> None:
    cache.add(1, memories[0])
    cache.add(0, memories[1])
    assert cache.memories([0, 1, 0])[1] == (memories[1], memories[0], memories[1])


def test_a_slot_that_is_unknown_has_no_memory(cache: MemoryCache, memories: list[Memory]) -> None:
    cache.add(1, memories[0])
    with pytest.raises(InvalidArgument, match="slot 2 is unknown"):
        cache.memories([1, 2])


def test_every_change_makes_what_was_derived_before_worthless(cache: MemoryCache, memories: list[Memory]) -> None:
    generations = [cache.generation]
    for change in (lambda: cache.add(0, memories[0]), lambda: cache.remove(0), lambda: cache.remove(0), cache.close):
        change()
        generations.append(cache.generation)
    assert generations == sorted(set(generations))


def test_a_removed_memory_is_closed_and_its_slot_unknown(cache: MemoryCache, memories: list[Memory]) -> None:
    cache.add(0, memories[0])
    cache.remove(0)
    assert memories[0].closed
    assert cache.unknown([0]) == [0]


def test_a_memory_in_the_place_of_another_closes_that(cache: MemoryCache, memories: list[Memory]) -> None:
    cache.add(0, memories[0])
    cache.add(0, memories[1])
    assert (memories[0].closed, memories[1].closed) == (True, False)


def test_closing_closes_everything(cache: MemoryCache, memories: list[Memory]) -> None:
    for slot, memory in enumerate(memories):
        cache.add(slot, memory)
    cache.close()
    cache.close()
    assert all(memory.closed for memory in memories)


# ------------------------------------------------------------------------------------------------ accounts


def sealed(size_bytes: int) -> int:
    fd = os.memfd_create("received", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def test_received_memory_is_charged_by_the_size_of_its_file_until_it_is_closed() -> None:
    quota = MemoryQuota(10_000)
    with quota.adopt_all([sealed(6000)], [MemoryData(100)])[0] as memory:
        assert memory.size_bytes == 100
        assert quota.charged_bytes == 6000
    assert quota.charged_bytes == 0


def test_memory_beyond_the_limit_is_refused_and_costs_nothing() -> None:
    quota = MemoryQuota(10_000)
    with quota.adopt_mapped([sealed(6000)])[0]:
        with pytest.raises(ResourceExhaustedTransient, match=r"would make 10001 .* the limit is 10000"):
            quota.adopt_mapped([sealed(4001)])
        with quota.adopt_mapped([sealed(4000)])[0]:
            assert quota.charged_bytes == 10_000
    assert quota.charged_bytes == 0


def test_of_several_memories_all_are_taken_or_none() -> None:
    quota = MemoryQuota(10_000)
    fds = [sealed(size) for size in (1000, 2000, 9000, 10)]
    with pytest.raises(ResourceExhaustedTransient):
        quota.adopt_mapped(fds)
    assert quota.charged_bytes == 0
    assert [os.path.lexists(f"/proc/self/fd/{fd}") for fd in fds] == [False] * 4


@pytest.mark.parametrize(("given", "limit"), [("3", 3 << 20), ("0", 0)])
def test_the_limit_can_be_set(given: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(memory_quota.LIMIT_VARIABLE, given)
    assert memory_quota.quota_limit_bytes() == limit


@pytest.mark.parametrize("given", ["", "-1", "lots"])
def test_a_limit_that_is_no_number_is_half_of_the_machine(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(memory_quota.LIMIT_VARIABLE, given)
    assert memory_quota.quota_limit_bytes() == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
