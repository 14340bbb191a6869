"""MessageQueue: a ring of equal records in sealed memfds, in two processes as a rule. One writer.

Synchronized: one reader, nothing is lost. Unsynchronized: any number of readers with positions of their own; the writer
never waits for them and overwrites. The layout is libfmq's (`layout.py`); the work is done by a core (`core.py`), on
memory that the queue owns. Operations move whole records, all or nothing; full and empty are answers (False, None),
exceptions mean misuse, a dead peer or impossible counters. Whether an object writes or reads is convention, as in
libfmq. Left out: record types (records are bytes). FMQ_FACTS 1.2 to 1.8.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypedDict

from nnfmq.deadlines import deadline_after
from nnfmq.hal.errors import InvalidArgument, QueueCorrupted
from nnfmq.memory import Memory
from nnfmq.queue import core, descriptor_formats, layout
from nnfmq.queue.event_flag import NOT_EMPTY, NOT_FULL, EventFlag
from nnfmq.queue.layout import SYNCHRONIZED, UNSYNCHRONIZED, MQDescriptor, QueueLayout
from nnfmq.queue.peer_death import PeerDeathFlag
from nnfmq.queue.transaction import Transaction

if TYPE_CHECKING:
    from typing_extensions import Buffer, Unpack

    from nnfmq.queue._pycore import EventFlagWord, Ring


class Overflow(Enum):
    """Where an unsynchronized reader goes on that the writer has overtaken."""

    SKIP_ALL = "all is lost: the next record to be written is the next to be read (Android 10 to 14)"
    KEEP_HALF = "the newest half of the ring can still be read (Android 15 and later)"


class AttachOptions(TypedDict, total=False):
    """What `attach` and `adopt` may be told; see there."""

    flavor: int
    reset_pointers: bool
    overflow: Overflow
    peer_death: PeerDeathFlag | None
    quantum: int | None
    using: core.Core


class MessageQueue:
    """One end of a queue. Owns its memories; close it, or use `with`.

    The calls of the hot path are the core's own, without a Python frame between:

    * ``send(data) -> bool``: write all of `data` and wake the reader; False where there is no room. Never waits.
    * ``receive(deadline_ns, window_ns) -> bytes | None``: wait for a record, polling for `window_ns` before sleeping,
      then take all there are and wake the writer; None once `deadline_ns` (absolute, CLOCK_MONOTONIC; None = no limit)
      has passed.
    * ``receive_into(out, deadline_ns, window_ns) -> int``: the same into a writable buffer of the caller's, as many
      whole records as fit; returns how many, 0 once the deadline has passed.

    When a receiver polls and when it sleeps is told in `waiting`. All raise QueueCorrupted where the counters are
    impossible; the latter two raise DeadObject once the dead flag is up, InvalidArgument when another thread closes the
    queue, and what signal handlers raise. Calls that wait or wake need
    an event word, and a synchronized queue. Attributes: `descriptor` and `memories` (or `fds()`) for handing over,
    `memory` (the first of them), `quantum` (bytes of a record), `count` (capacity in records), `flavor`, `event_flag`
    (None without event word or where it is mapped for reading only), `stats_view` (32 u64 slots as bytes, None where
    the memory has none). Views made from `stats_view` must be released before `close`.

    `on_corruption` (None at first) is called with a sentence by `write`, `read` and the begin calls, which only answer
    False or None, where they meet impossible counters. `ring_view` is the ring's bytes, for transactions.
    """

    __slots__ = (
        "__weakref__",
        "_guard",
        "_peer_death",
        "_ring",
        "count",
        "descriptor",
        "event_flag",
        "flavor",
        "memories",
        "memory",
        "on_corruption",
        "quantum",
        "receive",
        "receive_into",
        "ring_view",
        "send",
        "stats_view",
    )  # fmt: skip

    send: Callable[[Buffer], bool]
    receive: Callable[[int | None, int], bytes | None]
    receive_into: Callable[[Buffer, int | None, int], int]

    def __init__(
        self, descriptor: MQDescriptor, memories: tuple[Memory, ...], place: QueueLayout, peer_death: PeerDeathFlag,
        using: core.Core, shared: bool, overflow: Overflow = Overflow.SKIP_ALL,
    ) -> None:  # fmt: skip
        views = tuple(memory.view for memory in memories)
        word = _event_word(place, views, peer_death, using)
        self._guard = word or using.EventFlagWord(memoryview(bytearray(4)), 0, peer_death.buffer)
        self.flavor, is_lossy = descriptor.flags, descriptor.flags == UNSYNCHRONIZED
        kept = place.count // 2 * place.quantum if is_lossy and overflow is Overflow.KEEP_HALF else 0
        self._ring: Ring | None = using.Ring(
            views[0], place, None if is_lossy else word, shared,
            others=views[1:], guard=self._guard, lossy=is_lossy, history_bytes=kept,
        )  # fmt: skip
        self._peer_death = peer_death
        self.descriptor, self.memories, self.memory = descriptor, memories, memories[0]
        self.quantum, self.count = place.quantum, place.count
        self.event_flag = None if word is None else EventFlag(word)
        self.ring_view = views[place.fds[layout.RING]][place.ring : place.ring + place.ring_bytes]
        self.stats_view = None if place.stats is None else views[0][place.stats : place.stats + layout.STATS_BYTES]
        self.on_corruption: Callable[[str], object] | None = None
        self.send, self.receive, self.receive_into = self._ring.send, self._ring.receive, self._ring.receive_into

    @classmethod
    def create(
        cls, quantum: int, count: int, *, label: str = "nnfmq-queue", peer_death: PeerDeathFlag | None = None,
        event_flag: bool = True, shared: bool = True, using: core.Core = core.active, flavor: int = SYNCHRONIZED,
        overflow: Overflow = Overflow.SKIP_ALL, one_writer: bool = False, ring_memory: Memory | None = None,
    ) -> Self:  # fmt: skip
        """Create an empty queue of `count` records of `quantum` bytes in memory of its own.

        `shared=False` promises that no other process attaches. `ring_memory`, which the queue takes over and closes
        also where it refuses, holds the ring instead. With `one_writer` others can map an unsynchronized queue for
        reading only. `overflow` is for reading from an unsynchronized queue. Raises InvalidArgument for sizes that no
        descriptor can express or `ring_memory` does not hold, and where the Python core cannot share
        memory on this machine, ResourceExhaustedTransient without memory.
        """
        memories = () if ring_memory is None else (ring_memory,)
        try:
            _check_choice(flavor, one_writer)
            place = layout.compute_layout(quantum, count, event_flag, len(memories))
            _check_room(place, ring_memory)
            memories = (Memory.create(place.region_bytes, label, one_writer=one_writer), *memories)
            descriptor = layout.to_descriptor(place, flavor)
            return cls(descriptor, memories, place, peer_death or PeerDeathFlag(), using, shared, overflow)
        except BaseException:
            _close_all(memories)
            raise

    @classmethod
    def attach(
        cls, descriptor: MQDescriptor, *memories: Memory, flavor: int = SYNCHRONIZED, reset_pointers: bool = True,
        overflow: Overflow = Overflow.SKIP_ALL, peer_death: PeerDeathFlag | None = None, quantum: int | None = None,
        using: core.Core = core.active,
    ) -> Self:  # fmt: skip
        """Attach to a queue that somebody else created; takes over the memories and closes them also where it refuses.

        As in libfmq both counters are zeroed unless `reset_pointers` is False (to join a queue in use, and to read from
        memory that is mapped for reading only, which an unsynchronized queue may be). Raises QueueCorrupted where the
        descriptor is impossible, is of another flavour, or its records are not of `quantum` bytes.
        """
        try:
            place = _checked(descriptor, memories, quantum, flavor)
            queue = cls(descriptor, memories, place, peer_death or PeerDeathFlag(), using, True, overflow)
        except BaseException:
            _close_all(memories)
            raise
        if reset_pointers:
            queue._reset_or_close()
        return queue

    @classmethod
    def adopt(cls, fds: Sequence[int], text: str | bytes, **options: Unpack[AttachOptions]) -> Self:
        """Attach to the queue that `text` (see `to_json`) describes and whose `fds` were received.

        The fds are taken over, and closed whatever happens. Options and errors are those of `attach`; InvalidArgument
        where an fd is nothing that may be mapped.
        """
        memories: list[Memory] = []
        rest = list(fds)
        try:
            descriptor = descriptor_formats.from_json(text)
            while rest:
                memories.append(Memory.adopt(rest.pop(0)))
        except BaseException:
            _close_all(memories)
            for fd in rest:
                with suppress(OSError):  # no open descriptor: nothing to close
                    os.close(fd)
            raise
        return cls.attach(descriptor, *memories, **options)

    def to_json(self) -> str:
        """Return the descriptor as JSON, for `adopt` in another process, together with `fds`."""
        return descriptor_formats.to_json(self.descriptor)

    def fds(self) -> tuple[int, ...]:
        """Lend the descriptors of the queue's memories, for passing them to a peer; they stay the queue's."""
        return tuple(memory.fileno() for memory in self.memories)

    # ---- one try, never waits, wakes nobody ----

    def available_to_read(self) -> int:
        """Return the number of readable records; more than `count` tells that a counter is corrupted."""
        return self._open_ring().available_to_read()

    def available_to_write(self) -> int:
        """Return how many records fit now."""
        return self._open_ring().available_to_write()

    def counters(self) -> tuple[int, int]:
        """Return the write and the read counter: bytes since the queue was made, which only grow."""
        return self._open_ring().counters()

    def write(self, data: Buffer) -> bool:
        """Write all records of `data`, or none: False where they do not fit. Wakes nobody.

        Raises InvalidArgument where `data` is no whole number of records.
        """
        if self.on_corruption is not None:
            self._report_corruption()
        return self._open_ring().write(data)

    def read(self, n: int) -> bytes | None:
        """Take `n` records, or none: None where there are fewer. Wakes nobody.

        None also where an unsynchronized writer has overtaken this reader, which then goes on as `overflow` says.
        """
        if self.on_corruption is not None:
            self._report_corruption()
        return self._open_ring().read(n)

    def read_into(self, out: Buffer) -> bool:
        """Take as many records as fill the writable buffer `out`, or none: False where there are fewer. Wakes nobody.

        After False `out` may hold bytes of records that an unsynchronized writer has overtaken. Raises InvalidArgument
        where its size is no whole number of records.
        """
        if self.on_corruption is not None:
            self._report_corruption()
        return self._open_ring().read_into(out)

    def drain(self) -> int:
        """Drop all readable records and wake the writer; return how many. Raises QueueCorrupted."""
        return self._open_ring().drain()

    # ---- transactions: the same without copies ----

    def begin_write(self, n: int) -> Transaction | None:
        """Return room for `n` records, to be filled and then published by `commit_write`; None where they do not fit.

        Nothing has changed until then: a transaction may be abandoned. An unsynchronized writer overwrites from here on
        what its readers have not read.
        """
        if self.on_corruption is not None:
            self._report_corruption()
        at = self._open_ring().begin_write(n)
        return None if at is None else Transaction.of(self.ring_view, at, n, self.quantum)

    def commit_write(self, n: int) -> None:
        """Publish the first `n` records of the open transaction. Wakes nobody.

        Raises InvalidArgument where there is none or it is smaller, QueueCorrupted where the write counter has moved
        since: another writer, or a write of this one in between.
        """
        self._open_ring().commit_write(n)

    def begin_read(self, n: int) -> Transaction | None:
        """Return the next `n` records in place, for reading only; None where there are fewer.

        Nothing is consumed until `commit_read`: a transaction may be abandoned.
        """
        if self.on_corruption is not None:
            self._report_corruption()
        at = self._open_ring().begin_read(n)
        return None if at is None else Transaction.of(self.ring_view.toreadonly(), at, n, self.quantum)

    def commit_read(self, n: int) -> bool:
        """Consume the first `n` records of the open transaction. Wakes nobody.

        False where the writer came round meanwhile: the bytes seen are not to be believed. Raises InvalidArgument where
        there is no transaction or it is smaller, QueueCorrupted where the read counter has moved since.
        """
        return self._open_ring().commit_read(n)

    # ---- waiting ----

    def write_blocking(
        self, data: Buffer, deadline_ns: int | None, read_notification: int = NOT_FULL,
        write_notification: int = NOT_EMPTY, event_flag: EventFlag | None = None,
    ) -> bool:  # fmt: skip
        """Wait for room, write all records of `data`, wake the reader; False once `deadline_ns` has passed.

        More than `count` records are refused at once. Blocks without limit where `deadline_ns` is None. It waits for
        the bits `read_notification` and wakes `write_notification` (0 = nobody) in the word of `event_flag`, which may
        be another queue's; by default in its own. Raises DeadObject, QueueCorrupted, and what signal handlers raise.
        """
        if event_flag is None and read_notification == NOT_FULL and write_notification == NOT_EMPTY:
            return self._open_ring().write_blocking(data, deadline_ns)
        bits = _checked_mask(read_notification), _checked_mask(write_notification)
        return self._open_ring().write_blocking(
            data, deadline_ns, None if event_flag is None else event_flag._word, *bits
        )

    def read_blocking(
        self, n: int, deadline_ns: int | None, read_notification: int = NOT_FULL,
        write_notification: int = NOT_EMPTY, event_flag: EventFlag | None = None,
    ) -> bytes | None:  # fmt: skip
        """Wait for `n` records, take them, wake the writer; None once `deadline_ns` has passed.

        More than `count` records are refused at once. Blocks without limit where `deadline_ns` is None. It waits for
        the bits `write_notification` and wakes `read_notification` (0 = nobody) in the word of `event_flag`, which may
        be another queue's; by default in its own. Raises DeadObject, QueueCorrupted, and what signal handlers raise.
        """
        if event_flag is None and read_notification == NOT_FULL and write_notification == NOT_EMPTY:
            return self._open_ring().read_blocking(n, deadline_ns)
        bits = _checked_mask(write_notification), _checked_mask(read_notification)
        return self._open_ring().read_blocking(n, deadline_ns, None if event_flag is None else event_flag._word, *bits)

    # ---- waiting without blocking an event loop ----

    async def read_async(self, n: int = 1, *, timeout: float | None = None) -> bytes | None:
        """Wait for `n` records, take them, wake the writer; None once `timeout` seconds have passed (0 = do not wait).

        Other tasks of the loop run meanwhile. A cancelled read has taken nothing. More than `count` records are refused
        at once. Raises DeadObject, QueueCorrupted, and InvalidArgument where the queue is closed or another task reads
        here already.
        """
        from nnfmq.queue import aio  # late: asyncio costs more to import than all of this

        deadline_ns = deadline_after(timeout) if n <= self.count else 0
        return await aio.until_done(
            lambda: self.read_blocking(n, 0), self._open_ring(), self.event_flag, NOT_EMPTY,
            n * self.quantum, deadline_ns,
        )  # fmt: skip

    async def write_async(self, data: Buffer, *, timeout: float | None = None) -> bool:
        """Wait for room, write all records of `data`, wake the reader; False once `timeout` seconds have passed.

        Other tasks of the loop run meanwhile; `data` must not change. A cancelled write has written nothing. More than
        `count` records are refused at once. Raises DeadObject, QueueCorrupted, and InvalidArgument where the queue is
        closed or another task writes here already.
        """
        from nnfmq.queue import aio  # late: see above

        size = memoryview(data).nbytes
        deadline_ns = deadline_after(timeout) if size <= self.count * self.quantum else 0
        done = await aio.until_done(
            lambda: self.write_blocking(data, 0) or None, self._open_ring(), self.event_flag, NOT_FULL,
            size, deadline_ns,
        )  # fmt: skip
        return done is not None

    # ---- death ----

    @property
    def peer_death(self) -> PeerDeathFlag:
        """The flag that ends every wait of this object; set it to share one flag among the queues of a peer."""
        return self._peer_death

    @peer_death.setter
    def peer_death(self, flag: PeerDeathFlag) -> None:
        self._guard.watch(flag.buffer)
        self._peer_death = flag

    @property
    def waiters(self) -> int:
        """Return how many threads of this process are in a blocking call now (on the Python core also in `send`)."""
        return self._guard.waiters

    def wake_all(self) -> int:
        """Set all event bits and wake everybody, after the dead flag was raised; return how many slept.

        The watcher repeats it each millisecond until `waiters` is 0. Does nothing once closed.
        """
        if self._ring is None:
            return 0
        return self._guard.wake_all() + self._ring.wake_visitors()

    # ---- lifetime ----

    def close(self) -> None:
        """Let go of the memory. Waiting threads leave with InvalidArgument, and the last one unmaps it. Idempotent."""
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.close(self._release_memory)

    def _release_memory(self) -> None:
        if self.stats_view is not None:
            self.stats_view.release()
        # Dropped, not released: a transaction keeps the mapping, and another thread may be about to look.
        self.ring_view = memoryview(b"")
        _close_all(self.memories)

    def _reset_or_close(self) -> None:
        try:
            self._open_ring().reset()
        except BaseException:
            self.close()
            raise

    def _report_corruption(self) -> None:
        w, r = self._open_ring().counters()
        ring_bytes = self.count * self.quantum
        is_lapped = self.flavor == SYNCHRONIZED and not 0 <= w - r <= ring_bytes
        if self.on_corruption is not None and (is_lapped or w % self.quantum or r % self.quantum):
            self.on_corruption(
                f"write counter {w}, read counter {r}: impossible in a ring of {ring_bytes} bytes with records of "
                f"{self.quantum} bytes"
            )

    def _open_ring(self) -> Ring:
        if self._ring is None:
            raise InvalidArgument("the queue is closed")
        return self._ring

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_ring", None) is not None:
            warnings.warn(f"queue of {self.count} records was never closed", ResourceWarning, stacklevel=2)
            self.close()


def _checked(descriptor: MQDescriptor, memories: Sequence[Memory], quantum: int | None, flavor: int) -> QueueLayout:
    if not memories:
        raise InvalidArgument("no memory to attach to")
    if quantum is not None and descriptor.quantum != quantum:
        raise QueueCorrupted(f"queue descriptor: quantum is {descriptor.quantum}, expected are {quantum} bytes")
    if flavor == SYNCHRONIZED and any(memory.view.readonly for memory in memories):
        raise QueueCorrupted("queue memory is mapped for reading only; both sides of a queue write counters")
    _check_choice(flavor)
    _check_different(memories)
    return layout.resolve(descriptor, *(memory.size_bytes for memory in memories), flavor=flavor)


def _check_choice(flavor: int, one_writer: bool = False) -> None:
    if flavor not in (SYNCHRONIZED, UNSYNCHRONIZED):
        raise InvalidArgument(f"flavor is {flavor}; allowed are 1 (synchronized) and 2 (unsynchronized)")
    if one_writer and flavor == SYNCHRONIZED:
        raise InvalidArgument("both sides of a synchronized queue write counters: one_writer is for the other flavour")


def _check_room(place: QueueLayout, ring_memory: Memory | None) -> None:
    if ring_memory is not None and ring_memory.size_bytes < place.ring_bytes:
        raise InvalidArgument(f"a ring of {place.ring_bytes} bytes in memory of {ring_memory.size_bytes} bytes")


def _check_different(memories: Sequence[Memory]) -> None:
    # The same memory twice would be overlap that the offsets do not show.
    identities = {(stat.st_dev, stat.st_ino) for stat in (os.fstat(memory.fileno()) for memory in memories)}
    if len(identities) < len(memories):
        raise QueueCorrupted(f"queue descriptor: among its {len(memories)} memories is one twice")


def _event_word(
    place: QueueLayout, views: tuple[memoryview, ...], peer_death: PeerDeathFlag, using: core.Core
) -> EventFlagWord | None:
    view = views[place.fds[layout.EVENT_WORD]]
    if place.event_word is None or view.readonly:
        return None
    return using.EventFlagWord(view, place.event_word, peer_death.buffer)


def _checked_mask(mask: int) -> int:
    if not 0 <= mask <= 0xFFFFFFFF:
        raise InvalidArgument(f"notification bits are {mask:#x}; allowed are 32 bits")
    return mask


def _close_all(memories: Sequence[Memory]) -> None:
    for memory in memories:
        memory.close()
