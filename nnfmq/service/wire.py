"""What the session makes of received values before it uses them: private copies, absolute deadlines, descriptors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nnfmq.hal.errors import InvalidArgument
from nnfmq.memory import Memory
from nnfmq.queue import Grantor, MQDescriptor
from nnfmq.serialize.control import MQDescriptorData

NO_DEADLINE = -1


@dataclass(frozen=True, slots=True)
class PrivatePool:
    """A pool's bytes where no peer can change them."""

    data: bytes

    @property
    def size_bytes(self) -> int:
        """Size in bytes."""
        return len(self.data)

    @property
    def view(self) -> memoryview:
        """The bytes, read-only."""
        return memoryview(self.data)


def private_pools(memories: Sequence[Memory]) -> tuple[PrivatePool, ...]:
    """Copy the memories and close them: what decides addresses or control flow is never read twice from a peer."""
    pools = []
    for memory in memories:
        with memory:
            pools.append(PrivatePool(bytes(memory.view)))
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
