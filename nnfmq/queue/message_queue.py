"""MessageQueue: a ring of equal records in shared memory, with one writer (libfmq MessageQueue).

* Synchronized: one reader. The writer waits for space, nothing is lost.
* Unsynchronized: any number of readers, each with its own position. The writer overwrites; a reader detects overflow.

Operations move whole records, all of them or none. A full or an empty ring is a result (False, None); exceptions mean
misuse, a dead peer or corrupted counters. As in libfmq, an object is used for writing or for reading by convention.
Records are bytes; this package has no record types. docs/reference/queue.md describes the memory layout.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING, Any, Self, TypedDict

from msgspec import Struct

from nnfmq.base.deadlines import deadline_after
from nnfmq.base.memory import Memory
from nnfmq.base.ownership import Closable
from nnfmq.hal.errors import BadState, InvalidArgument, QueueCorrupted
from nnfmq.queue import descriptor_formats, layout
from nnfmq.queue.core import ACTIVE_CORE, Core
from nnfmq.queue.event_flag import NOT_EMPTY, NOT_FULL, EventFlag, PeerDeathFlag, checked_mask
from nnfmq.queue.layout import SYNCHRONIZED, UNSYNCHRONIZED, MQDescriptor, QueueLayout

if TYPE_CHECKING:
    from typing_extensions import Buffer, Unpack

    from nnfmq.queue._pycore import Ring
    from nnfmq.queue.responder import Responder

__all__ = ["AttachOptions", "MessageQueue", "Overflow", "Transaction"]


# ----------------------------------------------------------------------------------------------------------------------
# Transaction: records that are written or read in the ring itself (libfmq MemTransaction).
#
# `MessageQueue.begin_write` and `begin_read` return transactions; `commit_write` publishes the records, `commit_read`
# consumes them. A transaction is two memoryviews and arithmetic. The core stores what was begun, and decides whether it
# may be committed. The views keep the memory mapped, also after the queue was closed.


class Transaction(Struct, frozen=True, eq=False):
    """Space for records, or records to read, in one region of the ring or, if they cross its end, in two.

    `first` and `second` are bytes of the ring, writable in a write transaction, read-only in a read transaction. What
    is read from an unsynchronized queue is valid only after `commit_read` has returned True.
    """

    first: memoryview
    second: memoryview
    quantum: int

    @classmethod
    def from_ring(cls, ring: memoryview, start: int, n: int, quantum: int) -> Self:
        """Return the `n` records that begin at byte `start` of the whole ring `ring`."""
        first = ring[start : start + n * quantum]
        return cls(first, ring[: n * quantum - len(first)], quantum)

    @property
    def count(self) -> int:
        """Number of records."""
        return (len(self.first) + len(self.second)) // self.quantum

    def get_slot(self, index: int) -> memoryview:
        """Return the bytes of one record in the ring.

        Raises:
            InvalidArgument: If there is no record `index`.
        """
        if not 0 <= index < self.count:
            raise InvalidArgument(f"record {index} of a transaction of {self.count}")
        start = index * self.quantum
        region, start = (self.first, start) if start < len(self.first) else (self.second, start - len(self.first))
        return region[start : start + self.quantum]

    def copy_to(self, data: Buffer, start: int = 0) -> None:
        """Copy the records of `data` into the ring, beginning at record `start` of the transaction.

        Raises:
            InvalidArgument: If they do not fit or are not whole records, or this is a read transaction.
        """
        source = memoryview(data).cast("B")
        if self.first.readonly:
            raise InvalidArgument("this transaction is for reading")
        first, second = self._regions(start, len(source))
        first[:] = source[: len(first)]
        second[:] = source[len(first) :]

    def copy_from(self, data: Buffer, start: int = 0) -> None:
        """Fill the writable buffer `data` with records, beginning at record `start` of the transaction.

        Raises:
            InvalidArgument: If there are fewer records, or the size of `data` is not a whole number of records.
        """
        target = memoryview(data).cast("B")
        first, second = self._regions(start, len(target))
        target[: len(first)] = first
        target[len(first) :] = second

    def tobytes(self) -> bytes:
        """Return a copy of all records."""
        return self.first.tobytes() + self.second.tobytes()

    def _regions(self, start: int, size: int) -> tuple[memoryview, memoryview]:
        begin, end = start * self.quantum, start * self.quantum + size
        if start < 0 or size % self.quantum or end > len(self.first) + len(self.second):
            raise InvalidArgument(
                f"{size} bytes from record {start} on; the transaction has {self.count} records of {self.quantum} bytes"
            )
        split = len(self.first)
        return self.first[begin:end], self.second[max(begin - split, 0) : max(end - split, 0)]


# ----------------------------------------------------------------------------------------------------------------------
# MessageQueue: a ring of equal records in shared memory, with one writer (libfmq MessageQueue).


class Overflow(Enum):
    """The records that an unsynchronized reader can still read after an overflow."""

    SKIP_ALL = "none: the next record to be written is the next to be read (Android 10 to 15)"
    KEEP_HALF = "the newest half of the ring (Android 15 QPR1 and later)"


class AttachOptions(TypedDict, total=False):
    """Keyword options shared by `MessageQueue.attach` and `MessageQueue.adopt`; documented in `attach`."""

    flavor: int
    reset_pointers: bool
    overflow: Overflow
    peer_death: PeerDeathFlag | None
    quantum: int | None
    core: Core


class MessageQueue(Closable):
    """One end of a queue. Owns its memory regions; close it, or use `with`.

    Three methods are the core's own, so that a call has no Python frame in between:

    * ``send(data) -> bool``: write all of `data` and wake the reader; False if it does not fit. Does not block.
    * ``receive(deadline_ns, window_ns) -> bytes | None``: block until there is a record, then read all there are and
      wake the writer; None at the deadline (CLOCK_MONOTONIC in ns; None = no limit). Polls for up to `window_ns` and
      sleeps otherwise, as `hybrid_polling` describes.
    * ``receive_into(out, deadline_ns, window_ns) -> int``: the same into a writable buffer, as many whole records as
      fit; returns how many, 0 at the deadline.

    They raise BadState if the queue is closed, InvalidArgument if it has no event flag or is unsynchronized, and
    QueueCorrupted if the counters are invalid. The blocking ones raise DeadObject if the peer has died, BadState if
    another thread closes the queue, and any error of a signal handler.

    Attributes:
        descriptor: What a peer needs to attach, besides the fds of `memories` (see `fds`).
        memories: The memory regions; `memory` is the first.
        quantum: Bytes of a record.
        count: Capacity in records.
        flavor: SYNCHRONIZED or UNSYNCHRONIZED.
        event_flag: The event flag; None if the queue has none, or it is mapped read-only.
        stats_view: 32 words of 64 bits, as bytes, for execution stats; None if the memory has no space for them. Views
            that are made from it must be released before `close`.
        ring_view: The ring's bytes, for transactions.
        on_corruption: If set, `write`, `read`, `read_into` and the begin methods call it with a sentence when they find
            invalid counters, which they otherwise report only by False or None (libfmq's setErrorHandler).
    """

    __slots__ = (
        "__weakref__", "_core", "_lifetime", "_peer_death", "_ring", "count", "count_waits", "descriptor", "event_flag",
        "flavor", "memories", "memory", "on_corruption", "quantum", "receive", "receive_into", "ring_view", "send",
        "stats_view",
    )  # fmt: skip

    send: Callable[[Buffer], bool]
    receive: Callable[[int | None, int], bytes | None]
    receive_into: Callable[[Buffer, int | None, int], int]

    def __init__(
        self, descriptor: MQDescriptor, memories: tuple[Memory, ...], queue_layout: QueueLayout,
        peer_death: PeerDeathFlag, core: Core, shared: bool, overflow: Overflow = Overflow.SKIP_ALL,
    ) -> None:  # fmt: skip
        views = tuple(memory.view for memory in memories)
        flag_view = views[queue_layout.fds[layout.EVENT_FLAG]]
        word = None
        if queue_layout.event_flag is not None and not flag_view.readonly:
            word = core.EventFlagWord(flag_view, queue_layout.event_flag, peer_death.buffer)
        self._lifetime = word or core.EventFlagWord(memoryview(bytearray(4)), 0, peer_death.buffer)
        self.flavor, is_unsynchronized = descriptor.flags, descriptor.flags == UNSYNCHRONIZED
        keeps_half = is_unsynchronized and overflow is Overflow.KEEP_HALF
        ring = core.Ring(
            views[0], queue_layout, None if is_unsynchronized else word, shared,
            others=views[1:], lifetime=self._lifetime, unsynchronized=is_unsynchronized,
            history_bytes=queue_layout.count // 2 * queue_layout.quantum if keeps_half else 0,
        )  # fmt: skip
        self._peer_death, self._core = peer_death, core
        self.descriptor, self.memories, self.memory = descriptor, memories, memories[0]
        self.quantum, self.count = queue_layout.quantum, queue_layout.count
        self.event_flag = None if word is None else EventFlag(word)
        start, stats = queue_layout.ring, queue_layout.stats
        self.ring_view = views[queue_layout.fds[layout.RING]][start : start + queue_layout.ring_bytes]
        self.stats_view = None if stats is None else views[0][stats : stats + layout.STATS_BYTES]
        self.on_corruption: Callable[[str], object] | None = None
        self.send, self.receive, self.receive_into = ring.send, ring.receive, ring.receive_into
        self.count_waits = ring.count_waits
        self._ring: Ring | None = ring  # last: `close`, which needs all of the above, does nothing without it

    @classmethod
    def create(
        cls, quantum: int, count: int, *, label: str = "nnfmq-queue", peer_death: PeerDeathFlag | None = None,
        event_flag: bool = True, shared: bool = True, core: Core = ACTIVE_CORE, flavor: int = SYNCHRONIZED,
        overflow: Overflow = Overflow.SKIP_ALL, one_writer: bool = False, ring_memory: Memory | None = None,
    ) -> Self:  # fmt: skip
        """Create an empty queue of `count` records of `quantum` bytes, in new memory.

        Args:
            quantum: Bytes of a record.
            count: Capacity in records.
            label: Name of the memory in /proc/PID/maps.
            peer_death: The flag that cancels waits; queues to the same peer may share one.
            event_flag: Whether the queue has an event flag, without which no call can block or wake.
            shared: False promises that no other process attaches.
            core: The core that runs the queue.
            flavor: SYNCHRONIZED or UNSYNCHRONIZED.
            overflow: What this object's reads do after an overflow of an unsynchronized queue.
            one_writer: Let other processes map an unsynchronized queue read-only.
            ring_memory: Memory for the ring. The queue takes ownership, also if this raises.

        Raises:
            InvalidArgument: If a descriptor cannot express the sizes, `ring_memory` is too small, or the Python core
                cannot share memory on this machine.
            ResourceExhaustedTransient: If there is not enough memory.
        """
        memories = () if ring_memory is None else (ring_memory,)
        try:
            _check_flavor(flavor, one_writer)
            queue_layout = layout.compute_layout(quantum, count, event_flag, len(memories))
            if ring_memory is not None and ring_memory.size_bytes < queue_layout.ring_bytes:
                raise InvalidArgument(
                    f"a ring of {queue_layout.ring_bytes} bytes in memory of {ring_memory.size_bytes} bytes"
                )
            memories = (Memory.create(queue_layout.region_bytes, label, one_writer=one_writer), *memories)
            descriptor = layout.to_descriptor(queue_layout, flavor)
            return cls(descriptor, memories, queue_layout, peer_death or PeerDeathFlag(), core, shared, overflow)
        except BaseException:
            _close_all(memories)
            raise

    @classmethod
    def attach(
        cls, descriptor: MQDescriptor, *memories: Memory, flavor: int = SYNCHRONIZED, reset_pointers: bool = True,
        overflow: Overflow = Overflow.SKIP_ALL, peer_death: PeerDeathFlag | None = None, quantum: int | None = None,
        core: Core = ACTIVE_CORE,
    ) -> Self:  # fmt: skip
        """Attach to a queue that another object has created. Takes ownership of `memories`, also if it raises.

        As in libfmq, both counters are set to 0 unless `reset_pointers` is False. That is needed to join a queue in
        use, and for memory that is mapped read-only, which an unsynchronized queue may be. The other options are those
        of `create`.

        Raises:
            QueueCorrupted: If the descriptor is invalid or has another flavor, or its records are not of `quantum`
                bytes.
        """
        try:
            queue_layout = _validated(descriptor, memories, quantum, flavor)
            queue = cls(descriptor, memories, queue_layout, peer_death or PeerDeathFlag(), core, True, overflow)
        except BaseException:
            _close_all(memories)
            raise
        if reset_pointers:
            try:
                queue._open_ring().reset()
            except BaseException:
                queue.close()
                raise
        return queue

    @classmethod
    def adopt(cls, fds: Sequence[int], text: str | bytes, **options: Unpack[AttachOptions]) -> Self:
        """Attach to a queue by its JSON descriptor (see `to_json`) and received `fds`. Takes ownership of `fds`.

        Options and errors are those of `attach`; the fds are closed if it raises.

        Raises:
            InvalidArgument: If an fd must not be mapped.
            QueueCorrupted: If the descriptor is invalid.
        """
        memories: list[Memory] = []
        remaining = list(fds)
        try:
            descriptor = descriptor_formats.from_json(text)
            while remaining:
                memories.append(Memory.adopt(remaining.pop(0)))
        except BaseException:
            _close_all(memories)
            for fd in remaining:
                with suppress(OSError):  # the integer may not be an open fd at all
                    os.close(fd)
            raise
        return cls.attach(descriptor, *memories, **options)

    def to_json(self) -> str:
        """Return the descriptor as JSON, which a peer passes to `adopt` together with `fds`."""
        return descriptor_formats.to_json(self.descriptor)

    def fds(self) -> tuple[int, ...]:
        """Return the fds of the memory regions, which stay owned by the queue."""
        return tuple(memory.fileno() for memory in self.memories)

    # ---- non-blocking calls, which wake nobody ----

    def available_to_read(self) -> int:
        """Return how many records can be read. More than `count` means overflow or a corrupted counter."""
        return self._open_ring().available_to_read()

    def available_to_write(self) -> int:
        """Return how many records fit now."""
        return self._open_ring().available_to_write()

    def counters(self) -> tuple[int, int]:
        """Return the write and the read counter: bytes since the queue was created; they only increase."""
        return self._open_ring().counters()

    def write(self, data: Buffer) -> bool:
        """Write all records of `data`, or none: return whether they fit. Does not block; does not wake the reader.

        Raises:
            InvalidArgument: If `data` is not a whole number of records.
        """
        if self.on_corruption is not None:
            self._report_corruption()
        return self._open_ring().write(data)

    def read(self, n: int) -> bytes | None:
        """Read `n` records, or none: return None if there are fewer. Does not block; does not wake the writer.

        Also returns None after an overflow of an unsynchronized queue; the next read continues as `overflow` specifies.
        """
        if self.on_corruption is not None:
            self._report_corruption()
        return self._open_ring().read(n)

    def read_into(self, out: Buffer) -> bool:
        """Fill the writable buffer `out` with records, or read none. Does not block; does not wake the writer.

        Returns:
            Whether there were enough records. If not, `out` may contain bytes of records that were overwritten
            meanwhile.

        Raises:
            InvalidArgument: If the size of `out` is not a whole number of records.
        """
        if self.on_corruption is not None:
            self._report_corruption()
        return self._open_ring().read_into(out)

    def drain(self) -> int:
        """Discard all readable records and wake the writer; return how many. Does not block.

        Raises:
            QueueCorrupted: If the counters are invalid.
        """
        return self._open_ring().drain()

    # ---- transactions: the same without copies ----

    def begin_write(self, n: int) -> Transaction | None:
        """Return space for `n` records in the ring, or None if they do not fit. Does not block.

        `commit_write` publishes them. Until then nothing has changed, and the transaction may be abandoned. In an
        unsynchronized queue it overwrites records that readers may not have read.
        """
        if self.on_corruption is not None:
            self._report_corruption()
        start = self._open_ring().begin_write(n)
        return None if start is None else Transaction.from_ring(self.ring_view, start, n, self.quantum)

    def commit_write(self, n: int) -> None:
        """Publish the first `n` records of the transaction. Does not wake the reader.

        Raises:
            InvalidArgument: If there is no transaction, or it has fewer records.
            QueueCorrupted: If the write counter has changed since `begin_write`: there is another writer.
        """
        self._open_ring().commit_write(n)

    def begin_read(self, n: int) -> Transaction | None:
        """Return the next `n` records in the ring, read-only, or None if there are fewer. Does not block.

        `commit_read` consumes them. Until then nothing has changed, and the transaction may be abandoned.
        """
        if self.on_corruption is not None:
            self._report_corruption()
        start = self._open_ring().begin_read(n)
        return None if start is None else Transaction.from_ring(self.ring_view.toreadonly(), start, n, self.quantum)

    def commit_read(self, n: int) -> bool:
        """Consume the first `n` records of the transaction. Does not wake the writer.

        Returns:
            False if an unsynchronized writer may have overwritten the records; what was read must be discarded.

        Raises:
            InvalidArgument: If there is no transaction, or it has fewer records.
            QueueCorrupted: If the read counter has changed since `begin_read`.
        """
        return self._open_ring().commit_read(n)

    # ---- blocking calls ----

    def write_blocking(
        self, data: Buffer, deadline_ns: int | None, read_notification: int = NOT_FULL,
        write_notification: int = NOT_EMPTY, event_flag: EventFlag | None = None,
    ) -> bool:  # fmt: skip
        """Block until all of `data` fits, write it and wake the reader; False at the deadline (None = no limit).

        Returns False immediately for more than `count` records. Waits for the bits `read_notification`, and sets
        `write_notification` (0 = none) afterwards, in `event_flag`, which may be another queue's; None = this queue's.

        Raises:
            DeadObject: If the peer has died.
            QueueCorrupted: If the counters are invalid.
            Exception: Any error that a signal handler raises.
        """
        if event_flag is None and read_notification == NOT_FULL and write_notification == NOT_EMPTY:
            return self._open_ring().write_blocking(data, deadline_ns)
        bits = checked_mask(read_notification), checked_mask(write_notification)
        return self._open_ring().write_blocking(
            data, deadline_ns, None if event_flag is None else event_flag._word, *bits
        )

    def read_blocking(
        self, n: int, deadline_ns: int | None, read_notification: int = NOT_FULL,
        write_notification: int = NOT_EMPTY, event_flag: EventFlag | None = None,
    ) -> bytes | None:  # fmt: skip
        """Block until there are `n` records, read them and wake the writer; None at the deadline (None = no limit).

        Returns None immediately for more than `count` records. Waits for the bits `write_notification`, and sets
        `read_notification` (0 = none) afterwards, in `event_flag`, which may be another queue's; None = this queue's.

        Raises:
            DeadObject: If the peer has died.
            QueueCorrupted: If the counters are invalid.
            Exception: Any error that a signal handler raises.
        """
        if event_flag is None and read_notification == NOT_FULL and write_notification == NOT_EMPTY:
            return self._open_ring().read_blocking(n, deadline_ns)
        bits = checked_mask(write_notification), checked_mask(read_notification)
        return self._open_ring().read_blocking(n, deadline_ns, None if event_flag is None else event_flag._word, *bits)

    def responder(
        self, results: MessageQueue, words: memoryview, bound_to: Any, server: Any, count: Callable[[int, int], object]
    ) -> Responder:
        """Return the Responder that answers the requests of this queue in `results`, a queue of the same core."""
        rings = self._open_ring(), results._open_ring()
        return self._core.Responder(*rings, words, bound_to, server, count, self.stats_view)

    # ---- coroutines, for tasks of asyncio: other tasks of the event loop run while one waits ----

    async def read_async(self, n: int = 1, *, timeout: float | None = None) -> bytes | None:
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

    async def receive_async(self, deadline_ns: int | None) -> bytes | None:
        """Wait for a record, then read all there are and wake the writer; None at the deadline (None = no limit).

        A task that is cancelled has read nothing. Raises as `read_async`.
        """
        from nnfmq.queue import aio

        return await aio.retry_until_done(
            lambda: self.receive(0, 0), self._open_ring(), self.event_flag, NOT_EMPTY, self.quantum, deadline_ns
        )

    async def write_async(self, data: Buffer, *, timeout: float | None = None) -> bool:
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

    # ---- peer death ----

    @property
    def peer_death(self) -> PeerDeathFlag:
        """The flag that cancels every wait of this object. Assign one to share it among the queues to a peer."""
        return self._peer_death

    @peer_death.setter
    def peer_death(self, flag: PeerDeathFlag) -> None:
        self._lifetime.set_peer_death(flag.buffer)
        self._peer_death = flag

    @property
    def waiters(self) -> int:
        """Number of threads of this process in a blocking call (with the Python core also in `send`)."""
        return self._lifetime.waiters

    def wake_all(self) -> int:
        """Set all bits of the event flag and wake all waiters; return how many slept. Does nothing if closed.

        The watcher calls it after it has set the peer death flag, every millisecond until `waiters` is 0.
        """
        ring = self._ring  # another thread may close the queue meanwhile
        return 0 if ring is None else self._lifetime.wake_all() + ring.wake_external_waits()

    # ---- lifetime ----

    def close(self) -> None:
        """Release the memory. Idempotent. Blocked threads raise BadState, and the last of them unmaps it."""
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.close(self._release_memory)

    def _release_memory(self) -> None:
        if self.stats_view is not None:
            self.stats_view.release()
        # Replaced, not released: a transaction may use the mapping, and another thread may be about to slice the view.
        self.ring_view = memoryview(b"")
        _close_all(self.memories)

    def _report_corruption(self) -> None:
        w, r = self._open_ring().counters()
        ring_bytes = self.count * self.quantum
        is_impossible = self.flavor == SYNCHRONIZED and not 0 <= w - r <= ring_bytes  # else it is an overflow
        if self.on_corruption is not None and (is_impossible or w % self.quantum or r % self.quantum):
            ring = f"a ring of {ring_bytes} bytes with records of {self.quantum} bytes"
            self.on_corruption(f"write counter {w}, read counter {r}: impossible in {ring}")

    def _open_ring(self) -> Ring:
        if (ring := self._ring) is None:
            raise BadState("the queue is closed")
        return ring

    def __del__(self) -> None:
        if getattr(self, "_ring", None) is not None:
            if not sys.is_finalizing():
                warnings.warn(f"queue of {self.count} records was never closed", ResourceWarning, stacklevel=2)
            self.close()


def _validated(descriptor: MQDescriptor, memories: Sequence[Memory], quantum: int | None, flavor: int) -> QueueLayout:
    if not memories:
        raise InvalidArgument("no memory to attach to")
    if quantum is not None and descriptor.quantum != quantum:
        raise QueueCorrupted(f"queue descriptor: quantum is {descriptor.quantum}, expected are {quantum} bytes")
    if flavor == SYNCHRONIZED and any(memory.view.readonly for memory in memories):
        raise QueueCorrupted("queue memory is mapped for reading only; both sides of a queue write counters")
    _check_flavor(flavor)
    # `layout.resolve` detects overlapping parts by fd index and offset. It cannot if two fds refer to one file.
    files = {(stat.st_dev, stat.st_ino) for stat in (os.fstat(memory.fileno()) for memory in memories)}
    if len(files) < len(memories):
        raise QueueCorrupted(f"queue descriptor: among its {len(memories)} memories is one twice")
    return layout.resolve(descriptor, *(memory.size_bytes for memory in memories), flavor=flavor)


def _check_flavor(flavor: int, one_writer: bool = False) -> None:
    if flavor not in (SYNCHRONIZED, UNSYNCHRONIZED):
        raise InvalidArgument(f"flavor is {flavor}; allowed are 1 (synchronized) and 2 (unsynchronized)")
    if one_writer and flavor == SYNCHRONIZED:
        raise InvalidArgument("both sides of a synchronized queue write counters: one_writer is for the other flavor")


def _close_all(memories: Sequence[Memory]) -> None:
    for memory in memories:
        memory.close()
