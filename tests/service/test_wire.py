"""Private copies of a client's memory, and what happens where there is no room for them."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from nnfmq.hal.errors import ResourceExhaustedTransient
from nnfmq.memory import Memory
from nnfmq.service.accounts import MemoryAccount
from nnfmq.service.wire import private_pools


class Huge(Memory):
    """Memory that does not fit into this machine a second time."""

    @property
    def view(self) -> memoryview:
        raise MemoryError


def test_memories_are_copied_and_closed(resources: ExitStack) -> None:
    memories = [resources.enter_context(Memory.create(size)) for size in (3, 5)]
    memories[1].view[:] = b"later"
    pools = private_pools(memories, MemoryAccount())
    assert [bytes(pool.view) for pool in pools] == [bytes(3), b"later"]
    assert [memory.closed for memory in memories] == [True, True]


def test_memory_that_cannot_be_copied_is_refused_and_all_are_closed(resources: ExitStack) -> None:
    memories = [resources.enter_context(kind.create(3)) for kind in (Memory, Huge, Memory)]
    with pytest.raises(ResourceExhaustedTransient, match="not enough memory"):
        private_pools(memories, MemoryAccount())
    assert [memory.closed for memory in memories] == [True, True, True]
