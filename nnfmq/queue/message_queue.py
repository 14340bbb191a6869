"""MessageQueue: a ring of equal records in a sealed memfd, one writer and one reader, in two processes as a rule.

The layout is libfmq's (`layout.py`); the work is done by a core (`core.py`), on memory that the queue owns. Operations
move whole records, all or nothing; full and empty are answers (False, None), exceptions mean misuse, a dead peer or
impossible counters. Whether an object writes or reads is convention, as in libfmq. Left out: the unsynchronized
flavour, zero-copy transactions, custom event bits, a ring in a second descriptor. FMQ_FACTS 1.2 to 1.8.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from nnfmq.hal.errors import InvalidArgument, QueueCorrupted
from nnfmq.memory import Memory
from nnfmq.queue import core, layout
from nnfmq.queue.event_flag import EventFlag
from nnfmq.queue.layout import Geometry, MQDescriptor
from nnfmq.queue.waiting import DeadFlag

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from nnfmq.queue.twin import Ring


class MessageQueue:
    """One end of a synchronized queue. Owns its memory; close it, or use `with`.

    The two calls of the burst's hot path are the core's own, without a Python frame between:

    * ``send(data) -> bool``: write all of `data` and wake the reader; False where there is no room. Never waits.
    * ``receive(deadline_ns, window_ns) -> bytes | None``: wait for a record, polling for `window_ns` before sleeping,
      then take all there are and wake the writer; None once `deadline_ns` (absolute, CLOCK_MONOTONIC; None = no limit)
      has passed.

    Both raise QueueCorrupted where the counters are impossible; `receive` raises DeadObject once the dead flag is up,
    InvalidArgument when another thread closes the queue, and what signal handlers raise. Blocking calls need the event
    word. Attributes: `descriptor` and `memory` for handing over, `quantum` (bytes of a record), `count` (capacity in
    records), `event_flag` (None without event word), `stage_view` (32 u64 slots as bytes, None where the memory has
    none). Views made from `stage_view` must be released before `close`.
    """

    __slots__ = (
        "__weakref__", "_dead", "_ring", "count", "descriptor", "event_flag", "memory", "quantum", "receive", "send",
        "stage_view",
    )  # fmt: skip

    send: Callable[[Buffer], bool]
    receive: Callable[[int | None, int], bytes | None]

    def __init__(
        self, descriptor: MQDescriptor, memory: Memory, place: Geometry, dead: DeadFlag, using: core.Core, shared: bool
    ) -> None:
        view = memory.view
        word = None if place.event_word is None else using.EventWord(view, place.event_word, dead.buffer)
        self._ring: Ring | None = using.Ring(view, place, word, shared)
        self._dead = dead
        self.descriptor, self.memory = descriptor, memory
        self.quantum, self.count = place.quantum, place.count
        self.event_flag = None if word is None else EventFlag(word)
        self.stage_view = None if place.stage is None else view[place.stage : place.stage + layout.STAGE_BYTES]
        self.send, self.receive = self._ring.send, self._ring.receive

    @classmethod
    def create(
        cls, quantum: int, count: int, *, label: str = "nnfmq-queue", dead: DeadFlag | None = None,
        event_flag: bool = True, shared: bool = True, using: core.Core = core.active,
    ) -> Self:  # fmt: skip
        """Create an empty queue of `count` records of `quantum` bytes in memory of its own.

        `shared=False` promises that no other process attaches. Raises InvalidArgument for sizes that no descriptor can
        express and where the twin cannot share memory on this machine, ResourceExhaustedTransient without memory.
        """
        place = layout.geometry(quantum, count, event_flag)
        memory = Memory.create(place.region_bytes, label)
        try:
            return cls(layout.describe(place), memory, place, dead or DeadFlag(), using, shared)
        except BaseException:
            memory.close()
            raise

    @classmethod
    def attach(
        cls, descriptor: MQDescriptor, memory: Memory, *, reset_pointers: bool = True, dead: DeadFlag | None = None,
        quantum: int | None = None, using: core.Core = core.active,
    ) -> Self:  # fmt: skip
        """Attach to a queue that somebody else created; takes over `memory` and closes it also where it refuses.

        As in libfmq both counters are zeroed unless `reset_pointers` is False (to join a queue in use). Raises
        QueueCorrupted where the descriptor is impossible, or its records are not of `quantum` bytes.
        """
        try:
            place = _checked(descriptor, memory, quantum)
            queue = cls(descriptor, memory, place, dead or DeadFlag(), using, True)
        except BaseException:
            memory.close()
            raise
        if reset_pointers:
            queue._open_ring().reset()
        return queue

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
        return self._open_ring().write(data)

    def read(self, n: int) -> bytes | None:
        """Take `n` records, or none: None where there are fewer. Wakes nobody."""
        return self._open_ring().read(n)

    def drain(self) -> int:
        """Drop all readable records and wake the writer; return how many. Raises QueueCorrupted."""
        return self._open_ring().drain()

    # ---- waiting ----

    def write_blocking(self, data: Buffer, deadline_ns: int | None) -> bool:
        """Wait for room, write all records of `data`, wake the reader; False once `deadline_ns` has passed.

        More than `count` records are refused at once. Blocks without limit where `deadline_ns` is None. Raises
        DeadObject, QueueCorrupted, and what signal handlers raise.
        """
        return self._open_ring().write_blocking(data, deadline_ns)

    def read_blocking(self, n: int, deadline_ns: int | None) -> bytes | None:
        """Wait for `n` records, take them, wake the writer; None once `deadline_ns` has passed.

        More than `count` records are refused at once. Blocks without limit where `deadline_ns` is None. Raises
        DeadObject, QueueCorrupted, and what signal handlers raise.
        """
        return self._open_ring().read_blocking(n, deadline_ns)

    # ---- death ----

    @property
    def dead(self) -> DeadFlag:
        """The flag that ends every wait of this object; set it to share one flag among the queues of a peer."""
        return self._dead

    @dead.setter
    def dead(self, flag: DeadFlag) -> None:
        if self.event_flag is not None:
            self.event_flag._word.watch(flag.buffer)
        self._dead = flag

    @property
    def waiters(self) -> int:
        """Return how many threads of this process are in a blocking call now (on the twin also in `send`)."""
        return 0 if self.event_flag is None else self.event_flag.waiters

    def wake_all(self) -> int:
        """Set all event bits and wake everybody, after the dead flag was raised; return how many slept.

        The watcher repeats it each millisecond until `waiters` is 0. Does nothing without event word or once closed.
        """
        if self.event_flag is None or self._ring is None:
            return 0
        return self.event_flag.wake_all()

    # ---- lifetime ----

    def close(self) -> None:
        """Let go of the memory. Waiting threads leave with InvalidArgument, and the last one unmaps it. Idempotent."""
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.close(self._release_memory)

    def _release_memory(self) -> None:
        if self.stage_view is not None:
            self.stage_view.release()
        self.memory.close()

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


def _checked(descriptor: MQDescriptor, memory: Memory, quantum: int | None) -> Geometry:
    if quantum is not None and descriptor.quantum != quantum:
        raise QueueCorrupted(f"queue descriptor: quantum is {descriptor.quantum}, expected are {quantum} bytes")
    if memory.view.readonly:
        raise QueueCorrupted("queue memory is mapped for reading only; both sides of a queue write counters")
    return layout.resolve(descriptor, memory.size_bytes)
