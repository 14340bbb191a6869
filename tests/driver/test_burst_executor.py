"""The memory of a burst's slots in the driver."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from support import models
from support.executors import prepared

from nnfmq.base.memory import Memory
from nnfmq.driver.execution.burst import CachingBurstExecutor
from nnfmq.hal.errors import InvalidArgument


@pytest.fixture
def memories(resources: ExitStack) -> list[Memory]:
    return [resources.enter_context(Memory.create(8)) for _ in range(3)]


@pytest.fixture
def executor(resources: ExitStack) -> CachingBurstExecutor:
    executor = CachingBurstExecutor(prepared(models.add_model()))
    resources.callback(executor.close)
    return executor


def test_unknown_slots_are_named_once_each_in_ascending_order(
    executor: CachingBurstExecutor, memories: list[Memory]
) -> None:
    executor.add_cache_entry(memories[0], 5)
    assert executor.unknown_slots([9, 5, -1, 9, 2]) == [-1, 2, 9]
    assert executor.unknown_slots([5, 5]) == []


def test_memories_are_returned_in_the_order_of_the_slots(
    executor: CachingBurstExecutor, memories: list[Memory]
) -> None:
    executor.add_cache_entry(memories[0], 1)
    executor.add_cache_entry(memories[1], 0)
    assert executor.memories([0, 1, 0])[1] == (memories[1], memories[0], memories[1])


def test_an_unknown_slot_is_an_error(executor: CachingBurstExecutor, memories: list[Memory]) -> None:
    executor.add_cache_entry(memories[0], 1)
    with pytest.raises(InvalidArgument, match="slot 2 is unknown"):
        executor.memories([1, 2])


def test_every_change_increments_the_version(executor: CachingBurstExecutor, memories: list[Memory]) -> None:
    versions = [executor.version]
    for change in (
        lambda: executor.add_cache_entry(memories[0], 0),
        lambda: executor.remove_cache_entry(0),
        lambda: executor.remove_cache_entry(0),
        executor.close,
    ):
        change()
        versions.append(executor.version)
    assert versions == sorted(set(versions))


def test_a_removed_memory_is_closed_and_its_slot_unknown(
    executor: CachingBurstExecutor, memories: list[Memory]
) -> None:
    executor.add_cache_entry(memories[0], 0)
    executor.remove_cache_entry(0)
    assert memories[0].closed
    assert executor.unknown_slots([0]) == [0]


def test_adding_a_memory_to_a_used_slot_closes_the_previous_one(
    executor: CachingBurstExecutor, memories: list[Memory]
) -> None:
    executor.add_cache_entry(memories[0], 0)
    executor.add_cache_entry(memories[1], 0)
    assert (memories[0].closed, memories[1].closed) == (True, False)


def test_closing_closes_all_memories(executor: CachingBurstExecutor, memories: list[Memory]) -> None:
    for slot, memory in enumerate(memories):
        executor.add_cache_entry(memory, slot)
    executor.close()
    executor.close()
    assert all(memory.closed for memory in memories)
