"""Private copies of client memory, also when the quota or the memory is exhausted."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from nnfmq.hal.errors import ResourceExhaustedTransient
from nnfmq.memory import Memory
from nnfmq.service.memory_quota import MemoryQuota
from nnfmq.service.private_memory import copy_constant_pools


class Huge(Memory):
    """Memory that cannot be copied because the machine has too little."""

    @property
    def view(self) -> memoryview:
        raise MemoryError


def test_memories_are_copied_and_closed(resources: ExitStack) -> None:
    memories = [resources.enter_context(Memory.create(size)) for size in (3, 5)]
    memories[1].view[:] = b"later"
    pools = copy_constant_pools(memories, MemoryQuota())
    assert [bytes(pool.view) for pool in pools] == [bytes(3), b"later"]
    assert [memory.closed for memory in memories] == [True, True]


def test_memory_that_cannot_be_copied_is_rejected_and_all_are_closed(resources: ExitStack) -> None:
    memories = [resources.enter_context(kind.create(3)) for kind in (Memory, Huge, Memory)]
    with pytest.raises(ResourceExhaustedTransient, match="not enough memory"):
        copy_constant_pools(memories, MemoryQuota())
    assert [memory.closed for memory in memories] == [True, True, True]
