"""What the session makes of received values before it uses them: private copies, absolute deadlines, descriptors."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from nnfmq.file_memory import FileMemory
from nnfmq.hal.errors import InvalidArgument
from nnfmq.memory import identity_of
from nnfmq.queue import Grantor, MQDescriptor
from nnfmq.serialize.messages import MQDescriptorData
from nnfmq.service.accounts import MemoryAccount, Received
from nnfmq.service.faults import faults_as_errors

NO_DEADLINE = -1


@dataclass(frozen=True, slots=True)
class PrivatePool:
    """A pool's bytes where no peer can change them.

    They were copied from byte `offset` on of the file that has this identity, where it can be told from others.
    """

    data: bytes
    identity: tuple[int, int] | None = None
    offset: int = 0

    @property
    def size_bytes(self) -> int:
        """Size in bytes."""
        return len(self.data)

    @property
    def view(self) -> memoryview:
        """The bytes, read-only."""
        return memoryview(self.data)


def private_pools(memories: Sequence[Received], account: MemoryAccount) -> tuple[PrivatePool, ...]:
    """Copy the memories and close them: what decides addresses or control flow is never read twice from a peer.

    Raises InvalidArgument for what may not be read, ResourceExhaustedTransient where there is no room: a sparse file is
    larger than what it cost its sender.
    """
    pools = []
    with ExitStack() as stack, faults_as_errors("copying the model's memory"):
        for memory in memories:
            stack.callback(memory.close)
        # What is mapped is on the account as long as it is.
        files = sum(memory.size_bytes for memory in memories if isinstance(memory, FileMemory))
        stack.callback(account.charge(files).close)
        for memory in memories:
            if not memory.is_readable:
                raise InvalidArgument("MEM-4: a memory with constants may only be written")
            pools.append(PrivatePool(bytes(memory.view), identity_of(memory.fileno()), memory.offset))
            memory.close()  # at once: nothing is held twice for longer than needed
    return tuple(pools)


def deadline_of(deadline_ns: int) -> int | None:
    """Return the deadline of a message, None for -1. Raises InvalidArgument below that (N-VAL-23, N-RQX-14)."""
    if deadline_ns < NO_DEADLINE:
        raise InvalidArgument(f"a deadline is a time in ns, or -1 for none; got {deadline_ns}")
    return None if deadline_ns == NO_DEADLINE else deadline_ns


def descriptor_of(data: MQDescriptorData) -> MQDescriptor:
    """Return a received queue descriptor as `queue` takes it."""
    grantors = tuple(Grantor(g.fd_index, g.offset, g.extent) for g in data.grantors)
    return MQDescriptor(grantors, data.quantum, data.flags)
