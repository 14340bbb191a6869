"""AwaitableQueue: the coroutines of a message queue, for tasks of asyncio."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from nnfmq.base.deadlines import deadline_after
from nnfmq.queue.event_flag import NOT_EMPTY, NOT_FULL, EventFlag

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from nnfmq.queue._pycore import Ring

__all__ = ["AwaitableQueue"]


class _Queue(Protocol):
    """A message queue, as the coroutines use it."""

    quantum: int
    count: int
    event_flag: EventFlag | None

    def receive(self, deadline_ns: int | None, window_ns: int, /) -> bytes | None: ...

    def read_blocking(self, n: int, deadline_ns: int | None) -> bytes | None: ...

    def write_blocking(self, data: Buffer, deadline_ns: int | None) -> bool: ...

    def _open_ring(self) -> Ring: ...


class AwaitableQueue:
    """The base of `MessageQueue` with its coroutines. Other tasks of the event loop run while one waits."""

    __slots__ = ()

    async def read_async(self: _Queue, n: int = 1, *, timeout: float | None = None) -> bytes | None:
        """Wait for `n` records, read them and wake the writer; None after `timeout` seconds (0 = do not wait).

        A task that is cancelled has read nothing. Returns None immediately for more than `count` records.

        Raises:
            DeadObject: If the peer has died.
            QueueCorrupted: If the counters are invalid.
            BadState: If the queue is closed.
            InvalidArgument: If another task waits to read from it.
        """
        from nnfmq.queue import aio  # late, because asyncio costs more to import than this package

        deadline_ns = deadline_after(timeout) if n <= self.count else 0
        return await aio.retry_until_done(
            lambda: self.read_blocking(n, 0), self._open_ring(), self.event_flag, NOT_EMPTY,
            n * self.quantum, deadline_ns,
        )  # fmt: skip

    async def receive_async(self: _Queue, deadline_ns: int | None) -> bytes | None:
        """Wait for a record, then read all there are and wake the writer; None at the deadline (None = no limit).

        A task that is cancelled has read nothing. Raises as `read_async`.
        """
        from nnfmq.queue import aio

        return await aio.retry_until_done(
            lambda: self.receive(0, 0), self._open_ring(), self.event_flag, NOT_EMPTY, self.quantum, deadline_ns
        )

    async def write_async(self: _Queue, data: Buffer, *, timeout: float | None = None) -> bool:
        """Wait until `data` fits, write it and wake the reader; False after `timeout` seconds (0 = do not wait).

        `data` must not change meanwhile. A task that is cancelled has written nothing. Returns False immediately for
        more than `count` records.

        Raises:
            DeadObject: If the peer has died.
            QueueCorrupted: If the counters are invalid.
            BadState: If the queue is closed.
            InvalidArgument: If another task waits to write to it.
        """
        from nnfmq.queue import aio

        size = memoryview(data).nbytes
        deadline_ns = deadline_after(timeout) if size <= self.count * self.quantum else 0
        done = await aio.retry_until_done(
            lambda: self.write_blocking(data, 0) or None, self._open_ring(), self.event_flag, NOT_FULL,
            size, deadline_ns,
        )  # fmt: skip
        return done is not None
