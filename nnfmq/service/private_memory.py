"""Private copies of client memory.

The client can write to its memory at any time. What decides addresses or control flow in the driver, such as a model's
constants, must therefore not be read from it twice (TOCTOU): it is copied once, then validated and used from the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from nnfmq.file_memory import FileMemory
from nnfmq.hal.errors import InvalidArgument
from nnfmq.memory import file_identity
from nnfmq.service.error_translation import errors_to_status
from nnfmq.service.memory_quota import MemoryQuota, ReceivedMemory


@dataclass(frozen=True, slots=True)
class ConstantPool:
    """A private copy of a memory pool with a model's constants.

    Attributes:
        data: The copy.
        identity: The file from which it was copied (see `memory.file_identity`), None if that cannot be identified.
        offset: Where in the file the copied bytes begin.
    """

    data: bytes | memoryview
    identity: tuple[int, int] | None = None
    offset: int = 0

    @property
    def size_bytes(self) -> int:
        """Size in bytes."""
        return len(self.data)

    @property
    def view(self) -> memoryview:
        """The bytes, read-only."""
        return memoryview(self.data).toreadonly()


def copy_constant_pools(memories: Sequence[ReceivedMemory], quota: MemoryQuota) -> tuple[ConstantPool, ...]:
    """Copy the memories and close them.

    Raises:
        InvalidArgument: If a memory is write-only.
        ResourceExhausted: If the quota or the memory is exhausted: a sparse file can be larger than what it
            cost the client.
    """
    pools = []
    with ExitStack() as stack, errors_to_status("copying the model's memory"):
        for memory in memories:
            stack.callback(memory.close)
        # Mapped memory is charged already, as long as it is open. The caller charges the copies.
        file_bytes = sum(memory.size_bytes for memory in memories if isinstance(memory, FileMemory))
        stack.callback(quota.charge(file_bytes).close)
        for memory in memories:
            if not memory.is_readable:
                raise InvalidArgument("a memory with constants is write-only (MEM-4)")
            pools.append(ConstantPool(bytes(memory.view), file_identity(memory.fileno()), memory.offset))
            memory.close()  # before the next copy, so that at most one memory is held twice
    return tuple(pools)
