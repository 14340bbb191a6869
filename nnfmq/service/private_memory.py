"""What the session makes of received values before it uses them: private copies, absolute deadlines, descriptors."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from nnfmq.file_memory import FileMemory
from nnfmq.hal.errors import InvalidArgument
from nnfmq.memory import file_identity
from nnfmq.service.error_translation import errors_to_status
from nnfmq.service.memory_quota import MemoryQuota, Received


@dataclass(frozen=True, slots=True)
class ConstantPool:
    """A pool's bytes where no peer can change them.

    They were copied from byte `offset` on of the file that has this identity, where it can be told from others.
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


def copy_to_private_pools(memories: Sequence[Received], quota: MemoryQuota) -> tuple[ConstantPool, ...]:
    """Copy the memories and close them: what decides addresses or control flow is never read twice from a peer.

    Raises InvalidArgument for what may not be read, ResourceExhaustedTransient where there is no room: a sparse file is
    larger than what it cost its sender.
    """
    pools = []
    with ExitStack() as stack, errors_to_status("copying the model's memory"):
        for memory in memories:
            stack.callback(memory.close)
        # What is mapped is on the quota as long as it is.
        files = sum(memory.size_bytes for memory in memories if isinstance(memory, FileMemory))
        stack.callback(quota.charge(files).close)
        for memory in memories:
            if not memory.is_readable:
                raise InvalidArgument("MEM-4: a memory with constants may only be written")
            pools.append(ConstantPool(bytes(memory.view), file_identity(memory.fileno()), memory.offset))
            memory.close()  # at once: nothing is held twice for longer than needed
    return tuple(pools)
