"""What a client's memory costs: what the driver holds for a client is charged to it by size, as long as it is held.

Received regions are, the private copies that a model is made of, until the model is dropped (not only released, but
used by no burst any more), the copies of what lies in files, the buffers that it had allocated, and large messages
while they wait for their turn. What a device makes of a model is not, whether it is this worker's own or shared with
others (`service.caching`): the model, which it grows with, is charged to each client that has it.

A client could otherwise make the driver map, and so keep alive, as much memory as the machine has. The limit is
$NNFMQ_CLIENT_MEMORY_MIB, by default half of the machine's memory. One quota per session. (ARCHITECTURE: Shared
memory from a peer)
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TypeAlias, TypeVar

from nnfmq.channel import close_all
from nnfmq.file_memory import FileMemory
from nnfmq.hal.errors import InvalidArgument, ResourceExhaustedTransient
from nnfmq.hal.types import Protection
from nnfmq.memory import Memory, is_mappable
from nnfmq.serialize.messages import MemoryData

LIMIT_VARIABLE = "NNFMQ_CLIENT_MEMORY_MIB"
_MIB = 1 << 20

Received: TypeAlias = Memory | FileMemory
ReceivedT = TypeVar("ReceivedT", Memory, FileMemory, Received)


def quota_limit_bytes() -> int:
    """Return how much memory of one client this driver holds at most."""
    given = os.environ.get(LIMIT_VARIABLE, "")
    if given.isdecimal():
        return int(given) * _MIB
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


class QuotaCharge:
    """Some bytes on an quota, until `close`, or until nobody refers to this any more."""

    __slots__ = ("_quota", "_size")

    def __init__(self, quota: MemoryQuota, size: int) -> None:
        self._quota = quota
        self._size = size

    def close(self) -> None:
        """Take them off the quota. Harmless when repeated."""
        size, self._size = self._size, 0
        self._quota._release(size)

    def __del__(self) -> None:
        self.close()


class MemoryQuota:
    """The memory that is held for one client. Thread-safe."""

    def __init__(self, limit: int | None = None) -> None:
        self._limit = quota_limit_bytes() if limit is None else limit
        self._lock = threading.RLock()  # the collector may drop a memory in the thread that holds it
        self.charged_bytes = 0

    @property
    def free_bytes(self) -> int:
        """How much more may be charged, at this moment."""
        return max(self._limit - self.charged_bytes, 0)

    def adopt_mapped(self, fds: Sequence[int]) -> list[Memory]:
        """Take over what must be mapped, a queue's memory, as `Memory.adopt` does; charge it until it is closed.

        Where one is refused all are closed. Raises InvalidArgument for memory that must not be mapped,
        ResourceExhaustedTransient beyond the limit.
        """
        return _adopt_each(fds, [self._adopt_mapped for _ in fds])

    def adopt_all(self, fds: Sequence[int], lent: Iterable[MemoryData]) -> list[Received]:
        """Take over one fd for each of `lent`, as it says: mapped where it is sealed, otherwise as a file.

        What is mapped is charged until it is closed; of a file, what is copied will be. Raises as `adopt_mapped`.
        """
        return _adopt_each(fds, [partial(self._adopt, lent=each) for each in lent])

    def _adopt(self, fd: int, lent: MemoryData) -> Received:
        try:
            protection = _protection(lent.protection)
            is_mapped = is_mappable(fd)
        except BaseException:
            close_all([fd])
            raise
        if is_mapped:
            return self._adopt_mapped(fd, lent.size_bytes, lent.offset, protection)
        return FileMemory.adopt(fd, lent.size_bytes, lent.offset, protection)

    def _adopt_mapped(
        self, fd: int, size_bytes: int | None = None, offset: int = 0, protection: Protection = Protection.READ_WRITE
    ) -> Memory:
        memory = Memory.adopt(fd, size_bytes, offset, protection)
        size = os.fstat(memory.fileno()).st_size  # what the peer can make it hold, however little of it is mapped
        try:
            memory.on_close = self.charge(size).close
        except BaseException:
            memory.close()
            raise
        return memory

    def charge(self, size: int) -> QuotaCharge:
        """QuotaCharge what is no received memory. Raises ResourceExhaustedTransient beyond the limit."""
        with self._lock:
            self.charged_bytes += size
            held = self.charged_bytes
            if held <= self._limit:
                return QuotaCharge(self, size)
            self.charged_bytes -= size
        raise ResourceExhaustedTransient(
            f"{size} bytes more would make {held} of this client's in the driver; the limit is {self._limit} "
            f"(${LIMIT_VARIABLE})"
        )

    def _release(self, size: int) -> None:
        with self._lock:
            self.charged_bytes -= size


def _protection(bits: int) -> Protection:
    if bits & ~Protection.READ_WRITE.value:
        raise InvalidArgument(f"N-VAL-13: protection {bits:#x} of a memory; 1 (read) and 2 (write) are known")
    return Protection(bits)


def _adopt_each(fds: Sequence[int], adopt: Sequence[Callable[[int], ReceivedT]]) -> list[ReceivedT]:
    """Take over each fd by its function; where one is refused all are closed, and its error is raised."""
    with ExitStack() as undo:
        rest = list(fds)
        undo.callback(lambda: close_all(rest))
        memories = []
        for function in adopt:
            memories.append(function(rest.pop(0)))
            undo.callback(memories[-1].close)
        undo.pop_all()
        return memories
