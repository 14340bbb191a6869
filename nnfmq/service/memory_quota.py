"""Per-client quota of memory that the driver holds.

Without a limit, a client could make the driver map, and so keep alive, as much memory as the machine has. The quota is
charged with

* received memory, by the size of its file, until it is closed;
* the private copies of a model's constants, until the last user of the model (a burst, an execution) has dropped it;
* copies of data in files, and managed buffers;
* large messages while they wait to be handled.

It is not charged with what a device compiles, whether that is private to this worker or shared: the size of a compiled
program grows with its model, which is charged to each client that has it.

The limit is $NNFMQ_CLIENT_MEMORY_MIB, by default half of the machine's memory. Each session has one quota.
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

ReceivedMemory: TypeAlias = Memory | FileMemory
MemoryT = TypeVar("MemoryT", Memory, FileMemory, ReceivedMemory)


def quota_limit_bytes() -> int:
    """Return the limit for one client, in bytes."""
    value = os.environ.get(LIMIT_VARIABLE, "")
    if value.isdecimal():
        return int(value) * _MIB
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


class QuotaCharge:
    """Bytes charged against a quota until `close`, or until this object is garbage-collected."""

    __slots__ = ("_quota", "_size")

    def __init__(self, quota: MemoryQuota, size: int) -> None:
        self._quota = quota
        self._size = size

    def close(self) -> None:
        """Return the bytes to the quota. Idempotent."""
        size, self._size = self._size, 0
        self._quota._uncharge(size)

    def __del__(self) -> None:
        self.close()


class MemoryQuota:
    """The quota of one client. Thread-safe. `charged_bytes` is the sum of all charges."""

    def __init__(self, limit: int | None = None) -> None:
        self._limit = quota_limit_bytes() if limit is None else limit
        # Reentrant: the garbage collector may close a charge in a thread that holds the lock.
        self._lock = threading.RLock()
        self.charged_bytes = 0

    @property
    def free_bytes(self) -> int:
        """How many bytes can be charged now."""
        return max(self._limit - self.charged_bytes, 0)

    def adopt_mapped(self, fds: Sequence[int]) -> list[Memory]:
        """Map received memory that must be mapped, such as a queue's; it is charged until it is closed.

        Takes ownership of `fds`: all of them are closed if one cannot be mapped.

        Raises:
            InvalidArgument: If a file must not be mapped (see `Memory.adopt`).
            ResourceExhaustedTransient: If the quota is exhausted.
        """
        return _adopt_each(fds, [self._adopt_mapped for _ in fds])

    def adopt_all(self, fds: Sequence[int], memories: Iterable[MemoryData]) -> list[ReceivedMemory]:
        """Take ownership of one fd for each of `memories`: sealed memory is mapped, other files are not.

        Mapped memory is charged until it is closed; of a file, only later copies are charged.

        Raises:
            InvalidArgument: If a memory's description is invalid.
            ResourceExhaustedTransient: If the quota is exhausted.
        """
        return _adopt_each(fds, [partial(self._adopt, data=data) for data in memories])

    def _adopt(self, fd: int, data: MemoryData) -> ReceivedMemory:
        try:
            if data.protection & ~Protection.READ_WRITE.value:
                raise InvalidArgument(
                    f"protection {data.protection:#x} of a memory; 1 (read) and 2 (write) are known (N-VAL-13)"
                )
            protection = Protection(data.protection)
            is_mapped = is_mappable(fd)
        except BaseException:
            close_all([fd])
            raise
        if is_mapped:
            return self._adopt_mapped(fd, data.size_bytes, data.offset, protection)
        return FileMemory.adopt(fd, data.size_bytes, data.offset, protection)

    def _adopt_mapped(
        self, fd: int, size_bytes: int | None = None, offset: int = 0, protection: Protection = Protection.READ_WRITE
    ) -> Memory:
        memory = Memory.adopt(fd, size_bytes, offset, protection)
        # The whole file is charged: the peer can allocate all of its pages, however little of it is mapped here.
        size = os.fstat(memory.fileno()).st_size
        try:
            memory.on_close = self.charge(size).close
        except BaseException:
            memory.close()
            raise
        return memory

    def charge(self, size: int) -> QuotaCharge:
        """Charge `size` bytes.

        Raises:
            ResourceExhaustedTransient: If that would exceed the limit.
        """
        with self._lock:
            self.charged_bytes += size
            charged = self.charged_bytes
            if charged <= self._limit:
                return QuotaCharge(self, size)
            self.charged_bytes -= size
        raise ResourceExhaustedTransient(
            f"{size} bytes more would make {charged} of this client's in the driver; the limit is {self._limit} "
            f"(${LIMIT_VARIABLE})"
        )

    def _uncharge(self, size: int) -> None:
        with self._lock:
            self.charged_bytes -= size


def _adopt_each(fds: Sequence[int], adopt: Sequence[Callable[[int], MemoryT]]) -> list[MemoryT]:
    """Call each function with its fd, of which it takes ownership. If one raises, close everything and re-raise."""
    with ExitStack() as undo:
        remaining = list(fds)
        undo.callback(lambda: close_all(remaining))
        memories = []
        for function in adopt:
            memories.append(function(remaining.pop(0)))
            undo.callback(memories[-1].close)
        undo.pop_all()
        return memories
