"""The queue's algorithm in Python, one shared-memory access at a time: the specification of `_core`, and its fallback.

How the accesses are ordered:

* A shared word is read or written only as an aligned item of a `memoryview.cast`, which CPython does by one load or one
  store of that size. (`struct.pack_into` may write byte by byte.)
* The event flag word is changed only by an atomic read-modify-write: libatomic's or, if that is not installed, the
  kernel's (FUTEX_WAKE_OP).
* Python has no acquire loads and release stores. x86-64 gives every ordinary load and store that meaning (TSO); other
  machines do not, so there this core rejects queues that are shared between processes.

A `# SYNC label` comment marks an access that another thread's access relies on. `_atomics.h` lists the labels and what
each pair guarantees; docs/reference/queue.md describes the queue. The model checker in tests/lib/support/explorer
compiles this file, stops it at each access, and reads the labels.

Long because it is a specification: it is read, and its interleavings are explored, in one piece.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable
from errno import EAGAIN, EINTR, ETIMEDOUT
from time import monotonic_ns
from typing import TYPE_CHECKING, NoReturn, TypeVar

from nnfmq.base.ownership import Uncopyable
from nnfmq.hal.errors import BadState, DeadObject, InvalidArgument, QueueCorrupted
from nnfmq.queue.futex import (
    ALL_BITS,
    Atomics,
    current_cpu,
    find_atomics,
    futex_wait,
    futex_wake,
    set_timer_slack,
    timer_slack,
)
from nnfmq.queue.hybrid_polling import POLL, SLEEP, WaitEstimator
from nnfmq.queue.layout import QueueLayout
from nnfmq.queue.responder import Responder as Responder

if TYPE_CHECKING:
    from typing_extensions import Buffer

NOT_FULL = 0x1
NOT_EMPTY = 0x2
READER, WRITER = 0, 1
_FIRST_POLL_NS = 5_000  # polling before the estimator is consulted
_SENDS_PER_CPU_HINT = 64  # sched_getcpu costs a third of a send
_RECEIVED, _POLLED, _SLEPT, _WAIT_WORDS = range(4)  # of `Ring.count_waits`

T = TypeVar("T")

_atomics = find_atomics()


def require_ordered_memory() -> None:
    """Raise InvalidArgument on a machine whose ordinary loads and stores other processes may see in another order."""
    machine = platform.machine()
    if machine != "x86_64":
        raise InvalidArgument(
            f"the Python core cannot share a queue between processes on {machine}, where loads and stores "
            "are reordered: install a C compiler and Cython, and reinstall nnfmq to get the compiled core"
        )


# ---- the event flag word ----


class EventFlagWord(Uncopyable):
    """An event flag: one futex word in shared memory, and the private flags that cancel waits on it.

    `waiters` is the in-use count: calls of this process that use the word now. The memory is unmapped after the last.
    """

    def __init__(self, region: memoryview, offset: int, peer_death: Buffer, atomics: Atomics | None = None) -> None:
        if offset < 0 or offset % 4 or offset + 4 > len(region):
            raise InvalidArgument(f"event flag word at offset {offset} of {len(region)} bytes: outside or misaligned")
        self._word = region[offset : offset + 4].cast("I")
        self._anchor: ctypes.c_uint32 | None = ctypes.c_uint32.from_buffer(region, offset)
        self._address = ctypes.addressof(self._anchor)
        self._atomics = atomics or _atomics
        self._on_released: Callable[[], object] | None = None
        self.is_closing = False
        self.waiters = 0
        self.set_peer_death(peer_death)

    def set_peer_death(self, flag: Buffer) -> None:
        """Use another peer death flag (the buffer of a `PeerDeathFlag`).

        Raises:
            InvalidArgument: If a thread is waiting.
        """
        if self.waiters:
            raise InvalidArgument("the peer death flag cannot be changed while a thread waits")
        self._peer_death = memoryview(flag).cast("B").cast("I")

    def acquire(self) -> None:
        """Increment the in-use count.

        Callers decrement it inline (`waiters -= 1`, then `finish_close()` if `is_closing`). A method could not do it
        reliably: a signal handler may raise at the entry to a Python function, and the count would stay too high.

        Raises:
            BadState: If the word is closed.
        """
        if self.is_closing:
            raise BadState("the queue is closed")
        self.waiters += 1

    def finish_close(self) -> None:
        """Release the memory if `close` was called and no call uses it any more."""
        if not self.waiters:
            self._release()

    @property
    def is_cancelled(self) -> bool:
        """Whether all waits must end: the peer has died, or the word is being closed."""
        return self._peer_death[0] != 0 or self.is_closing  # SYNC dead

    def raise_if_cancelled(self) -> None:
        """Raise BadState if the word is being closed, DeadObject if the peer has died."""
        if self.is_closing:
            raise BadState("the queue was closed during the wait")
        if self._peer_death[0]:  # SYNC dead
            raise DeadObject("the process at the other end of the queue is gone")

    def wake(self, mask: int) -> int:
        """OR `mask` into the word and wake the threads that wait for one of its bits; return how many slept."""
        self.acquire()
        try:
            return self.wake_acquired(mask) if mask else 0
        finally:
            self.waiters -= 1
            if self.is_closing:
                self.finish_close()

    def wake_all(self) -> int:
        """OR all bits into the word and wake all waiters; return how many slept. Does nothing if the word is closed."""
        try:
            self.acquire()
        except BadState:
            return 0
        try:
            return self._wake_everyone()
        finally:
            self.waiters -= 1
            if self.is_closing:
                self.finish_close()

    def wake_acquired(self, mask: int) -> int:
        """Do what `wake` does, for a caller that has acquired the word."""
        # A sleeper cleared its bits before it went to sleep. If all bits of the mask were set, nobody sleeps on them.
        old = self._atomics.fetch_or(self._word, self._address, mask)  # SYNC event, SYNC dead
        return futex_wake(self._address, mask) if old & mask != mask else 0

    def _wake_everyone(self) -> int:
        self._atomics.fetch_or(self._word, self._address, ALL_BITS)  # SYNC event, SYNC dead
        return futex_wake(self._address, ALL_BITS)

    def fetch_clear(self, mask: int) -> int:
        """Clear the bits of `mask`; return the word as it was before."""
        return self._atomics.fetch_clear(self._word, self._address, mask)  # SYNC event, SYNC dead

    def sleep(self, expected: int, deadline_ns: int | None, mask: int) -> None:
        """Sleep until woken, the deadline, or a signal. Return immediately if the word is not `expected`."""
        error = futex_wait(self._address, expected, deadline_ns, mask)
        if error not in (0, EAGAIN, EINTR, ETIMEDOUT):
            raise OSError(error, f"futex: {os.strerror(error)}")

    def wait(self, mask: int, deadline_ns: int | None = None) -> int:
        """Block until a bit of `mask` is set; clear and return those that are set, or 0 at the deadline."""
        if not mask:
            raise InvalidArgument("an event flag cannot wait for no bit at all")
        self.acquire()
        try:
            return self._wait(mask, deadline_ns)
        finally:
            self.waiters -= 1
            if self.is_closing:
                self.finish_close()

    def _wait(self, mask: int, deadline_ns: int | None) -> int:
        self.raise_if_cancelled()
        while True:
            old = self.fetch_clear(mask)
            self.raise_if_cancelled()  # before the bits are used: wake_all sets all when the peer died
            if old & mask or _has_passed(deadline_ns):
                return old & mask
            # The kernel compares the word with this value and goes to sleep atomically. A bit that is set after
            # fetch_clear, also one of another waiter, changes the word, so the call returns EAGAIN and no wake is lost.
            self.sleep(old & ~mask, deadline_ns, mask)

    def close(self, on_released: Callable[[], object] | None = None) -> None:
        """Cancel all waits. Release the memory and call `on_released` once no call uses it any more. Idempotent."""
        if self.is_closing:
            return
        self._on_released = on_released
        self.is_closing = True
        if self.waiters:
            self._wake_everyone()
        else:
            self._release()

    def _release(self) -> None:
        self._word.release()
        self._anchor = None
        self._peer_death.release()
        if self._on_released is not None:
            self._on_released()
        self._on_released = None


def _check_awaited(mask: int) -> None:
    if not mask:
        raise InvalidArgument("a blocking call cannot wait for no bit at all")


def _earlier(deadline_ns: int | None, other_ns: int) -> int:
    return other_ns if deadline_ns is None else min(deadline_ns, other_ns)


def _has_passed(deadline_ns: int | None) -> bool:
    return deadline_ns is not None and monotonic_ns() >= deadline_ns


# ---- the ring ----


class Ring(Uncopyable):
    """Counters and records of one queue. Each operation loads each counter once and computes on the copies.

    Args:
        region: The queue's first memory region; `others` are the further ones.
        layout: The offsets of the queue's parts.
        event: The queue's event flag word, or None if it has none that can be used.
        shared: Whether another process uses the queue.
        lifetime: The word whose in-use count and flags protect the memory: `event`, or a private one if that is None.
        unsynchronized: The writer overwrites; each reader has a private read counter.
        history_bytes: How much of the ring an unsynchronized reader keeps after an overflow.
    """

    def __init__(
        self, region: memoryview, layout: QueueLayout, event: EventFlagWord | None, shared: bool = True, *,
        others: tuple[memoryview, ...] = (), lifetime: EventFlagWord | None = None, unsynchronized: bool = False,
        history_bytes: int = 0,
    ) -> None:  # fmt: skip
        if shared:
            require_ordered_memory()
        regions = (region, *others)
        reads, writes, records = (regions[index] for index in layout.fds[:3])
        shared_counter = reads[layout.read_counter : layout.read_counter + 8]
        self._read_counter = (memoryview(bytearray(8)) if unsynchronized else shared_counter).cast("Q")
        self._write_counter = writes[layout.write_counter : layout.write_counter + 8].cast("Q")
        # The write counter that an unsynchronized writer will have after the write in progress. It is stored in the
        # place of the shared read counter, which libfmq's unsynchronized queues have and do not use.
        self._reserved_counter = shared_counter.cast("Q") if unsynchronized else self._read_counter
        self._ring = records[layout.ring : layout.ring + layout.ring_bytes]
        self._ring_bytes = layout.ring_bytes
        self._quantum = layout.quantum
        self._is_unsynchronized, self._history_bytes = unsynchronized, history_bytes
        self._event = event
        self._lifetime = lifetime if event is None else event
        self._external_waits: list[EventFlagWord] = []  # words of other queues on which a thread waits for this one
        self._open_write: tuple[int, int] | None = None  # counter and size of the transaction that was begun
        self._open_read: tuple[int, int] | None = None
        self._is_open = True
        self._on_released: Callable[[], object] | None = None
        hint = None if event is None else layout.writer_cpu
        region_of_hint = memoryview(bytearray(2)) if hint is None else regions[layout.fds[3]][hint : hint + 2]
        self._writer_cpu = region_of_hint.cast("H")
        self._sends = 0
        self._estimator = WaitEstimator()
        self._waits = memoryview(bytearray(_WAIT_WORDS * 8)).cast("Q")  # unless `count_waits` gave others

    def count_waits(self, words: memoryview) -> None:
        """Count in `words` from now on: calls that received, waits that ended by polling, and sleeps of `receive`.

        Three aligned words of 8 bytes, whose only writer is this process. They stay mapped until the ring is closed.
        """
        self._check_open()
        if words.nbytes < _WAIT_WORDS * 8:
            raise InvalidArgument("waits are counted in three aligned words of 8 bytes")
        self._waits.release()
        self._waits = words.cast("B").cast("Q")

    def _check_open(self) -> None:
        if not self._is_open or (self._lifetime is not None and self._lifetime.is_closing):
            raise BadState("the queue is closed")

    def _check_writable(self) -> None:
        self._check_open()
        if self._write_counter.readonly or self._ring.readonly:
            raise InvalidArgument("this queue is mapped for reading only")

    def _check_synchronized(self) -> None:
        self._check_open()
        if self._is_unsynchronized:
            raise InvalidArgument("an unsynchronized queue has no calls that wait or wake")

    def _check_whole_records(self, size: int) -> None:
        if size % self._quantum:
            raise InvalidArgument(f"{size} bytes are no whole number of records of {self._quantum} bytes")

    def _acquire_event(self) -> EventFlagWord:
        event = self._event
        if event is None:
            self._check_synchronized()
            raise InvalidArgument("this queue has no event flag word: only non-blocking write and read are possible")
        event.acquire()
        return event

    def reset(self) -> None:
        """Set both counters to 0."""
        self._check_writable()
        self._read_counter[0] = 0  # SYNC space
        if self._is_unsynchronized:
            self._reserved_counter[0] = 0
        self._write_counter[0] = 0  # SYNC records

    def counters(self) -> tuple[int, int]:
        """Return (write counter, read counter) in bytes, for display."""
        self._check_open()
        return self._write_counter[0], self._read_counter[0]

    def _readable_bytes(self) -> int:
        w = self._write_counter[0]  # SYNC records
        r = self._read_counter[0]  # SYNC space
        return max(w - r, 0)

    def available_to_read(self) -> int:
        """Return how many records can be read. More than the capacity means overflow or a corrupted counter."""
        self._check_open()
        return self._readable_bytes() // self._quantum

    def available_to_write(self) -> int:
        """Return how many records can be written without waiting."""
        self._check_open()
        return max(self._ring_bytes - self._readable_bytes(), 0) // self._quantum

    def _record_bytes(self, n: int) -> int:
        if n < 0:
            raise InvalidArgument(f"{n} records; a read takes 0 or more")
        self._check_open()
        return n * self._quantum

    # ---- non-blocking attempts ----

    def _try_write(self, data: Buffer, strict: bool) -> bool:
        """Write all of `data` if it fits. If `strict`, raise QueueCorrupted for invalid counters; else as libfmq."""
        source = data if type(data) is bytes else memoryview(data).cast("B")
        size = len(source)
        self._check_whole_records(size)
        w = self._write_counter[0]
        r = self._read_counter[0]  # SYNC space
        used = w - r
        if strict and (not 0 <= used <= self._ring_bytes or w % self._quantum):
            self._raise_corrupted(w, r)
        free = 0 if used > self._ring_bytes else self._ring_bytes - max(used, 0)
        if size > free or w % self._quantum:
            return False
        self._copy_in(w, source, size)
        return True

    def _copy_in(self, w: int, source: bytes | memoryview, size: int) -> None:
        """Copy the records into the ring, then publish all of them by one store of the write counter."""
        start = w % self._ring_bytes
        first = self._ring_bytes - start
        if size <= first:
            self._ring[start : start + size] = source
        else:
            self._ring[start:] = source[:first]
            self._ring[: size - first] = source[first:]
        self._write_counter[0] = (w + size) % 2**64  # SYNC records

    def _begin_read(self, strict: bool) -> tuple[int, int]:
        """Return the read counter and how many bytes can be read; (0, -1) if the counters are invalid.

        If the reader was overflowed, its counter is moved, so that the next attempt succeeds.
        """
        w = self._write_counter[0]  # SYNC records
        r = self._read_counter[0]
        is_aligned = w % self._quantum == r % self._quantum == 0
        if is_aligned and 0 <= w - r <= self._ring_bytes:
            return r, w - r
        if is_aligned:
            self._recover_from_overflow(w)
        if strict:
            self._raise_corrupted(w, r)
        return 0, -1

    def _recover_from_overflow(self, w: int) -> None:
        # As libfmq's beginRead: nothing is left to read or, from Android 15 QPR1 on, the newest half of the ring.
        self._read_counter[0] = w - min(self._history_bytes, w)  # SYNC space

    def _copy_out(self, r: int, size: int) -> bytes:
        start = r % self._ring_bytes
        data = bytes(self._ring[start : start + size])  # up to the ring's end
        if len(data) < size:
            data += self._ring[: size - len(data)]
        return data

    def _copy_into(self, target: memoryview, r: int, size: int) -> None:
        start = r % self._ring_bytes
        first = min(size, self._ring_bytes - start)
        target[:first] = self._ring[start : start + first]
        target[first:size] = self._ring[: size - first]

    def _read_and_commit(self, r: int, size: int) -> bytes:
        data = self._copy_out(r, size)
        self._read_counter[0] = (r + size) % 2**64  # SYNC space
        return data

    def _read_into_and_commit(self, target: memoryview, r: int, size: int) -> None:
        self._copy_into(target, r, size)
        self._read_counter[0] = (r + size) % 2**64  # SYNC space

    def _commit_if_intact(self, r: int, size: int) -> bool:
        """Consume `size` bytes from `r` on; return False if the writer may have overwritten them meanwhile.

        The caller has copied them already. The writer stores its reserved counter before it overwrites any byte, so a
        reader that copied a new byte loads the new reserved counter here, and rejects the copy.
        """
        w = self._write_counter[0]  # SYNC records, SYNC reserve: after the copy
        if not 0 <= w - r <= self._ring_bytes:
            self._recover_from_overflow(w)
            return False
        if self._is_unsynchronized and self._reserved_counter[0] - r > self._ring_bytes:  # SYNC reserve
            self._recover_from_overflow(w)
            return False
        self._read_counter[0] = (r + size) % 2**64  # SYNC space
        return True

    def _try_read(self, size: int, strict: bool) -> bytes | None:
        r, used = self._begin_read(strict)
        return self._read_and_commit(r, size) if used >= size else None

    def _raise_corrupted(self, w: int, r: int) -> NoReturn:
        raise QueueCorrupted(
            f"write counter {w}, read counter {r}: impossible in a ring of {self._ring_bytes} bytes "
            f"with records of {self._quantum} bytes"
        )

    def write(self, data: Buffer) -> bool:
        """Write all records of `data`, or none; return whether they were written. Does not block."""
        self._check_open()
        return self._write_unsynchronized(data) if self._is_unsynchronized else self._try_write(data, False)

    def _write_unsynchronized(self, data: Buffer) -> bool:
        self._check_writable()
        source = data if type(data) is bytes else memoryview(data).cast("B")
        size = len(source)
        self._check_whole_records(size)
        w = self._write_counter[0]
        if size > self._ring_bytes or w % self._quantum:
            return False
        # TSO keeps the order of stores, so nothing else is needed to make this one visible before the records.
        self._reserved_counter[0] = (w + size) % 2**64  # SYNC reserve: before the bytes
        self._copy_in(w, source, size)
        return True

    def read(self, n: int) -> bytes | None:
        """Read `n` records, or none: return None if there are fewer. Does not block."""
        size = self._record_bytes(n)
        if not self._is_unsynchronized:
            return self._try_read(size, False)
        r, used = self._begin_read(strict=False)
        if used < size:
            return None
        data = self._copy_out(r, size)
        return data if self._commit_if_intact(r, size) else None

    def read_into(self, out: Buffer) -> bool:
        """Fill `out` with records, or read none; return whether there were enough. Does not block."""
        target = memoryview(out).cast("B")
        size = len(target)
        self._check_open()
        self._check_whole_records(size)
        r, used = self._begin_read(strict=False)
        if used < size:
            return False
        if self._is_unsynchronized:
            self._copy_into(target, r, size)
            return self._commit_if_intact(r, size)
        self._read_into_and_commit(target, r, size)
        return True

    def send(self, data: Buffer, /) -> bool:
        """Write all records and wake the reader; return False if there is not enough space. Does not block."""
        event = self._acquire_event()
        try:
            if not self._sends % _SENDS_PER_CPU_HINT:
                self._writer_cpu[0] = (current_cpu() + 1) % 2**16
            self._sends += 1
            if not self._try_write(data, True):
                return False
            event.wake_acquired(NOT_EMPTY)
            return True
        finally:
            event.waiters -= 1
            if event.is_closing:
                event.finish_close()

    def drain(self) -> int:
        """Discard all readable records; return how many."""
        self._check_synchronized()
        r, used = self._begin_read(strict=True)
        self._read_counter[0] = r + used  # SYNC space
        if self._event is not None:
            self._event.wake(NOT_FULL)
        return used // self._quantum

    # ---- transactions: the caller writes or reads records in the ring itself ----

    def begin_write(self, n: int) -> int | None:
        """Return the ring offset (in bytes) at which `n` records may be written, or None if they do not fit."""
        size = self._record_bytes(n)
        self._check_writable()
        self._open_write = None
        w = self._write_counter[0]
        used = 0 if self._is_unsynchronized else w - self._read_counter[0]  # SYNC space
        free = 0 if used > self._ring_bytes else self._ring_bytes - max(used, 0)
        if size > free or w % self._quantum:
            return None
        if self._is_unsynchronized:
            self._reserved_counter[0] = (w + size) % 2**64  # SYNC reserve
        self._open_write = w, size
        return w % self._ring_bytes

    def commit_write(self, n: int) -> None:
        """Publish the first `n` of the records that `begin_write` reserved."""
        size = self._record_bytes(n)
        began = self._check_transaction(n, size, self._open_write, "write")
        self._open_write = None
        w = self._write_counter[0]
        if w != began:
            raise QueueCorrupted(f"write counter {w}: it was {began} when the write began")
        self._write_counter[0] = (w + size) % 2**64  # SYNC records

    def begin_read(self, n: int) -> int | None:
        """Return the ring offset (in bytes) of the next `n` records, or None if there are fewer."""
        size = self._record_bytes(n)
        self._open_read = None
        r, used = self._begin_read(strict=False)
        if used < size:
            return None
        self._open_read = r, size
        return r % self._ring_bytes

    def commit_read(self, n: int) -> bool:
        """Consume the first `n` of the records of `begin_read`; return False if they may have been overwritten."""
        size = self._record_bytes(n)
        began = self._check_transaction(n, size, self._open_read, "read")
        self._open_read = None
        r = self._read_counter[0]
        if r != began:
            raise QueueCorrupted(f"read counter {r}: it was {began} when the read began")
        return self._commit_if_intact(r, size)

    def _check_transaction(self, n: int, size: int, begun: tuple[int, int] | None, kind: str) -> int:
        if begun is None:
            raise InvalidArgument(f"commit_{kind} without a begin_{kind} that succeeded")
        if size > begun[1]:
            raise InvalidArgument(f"{n} records to commit; begin_{kind} gave {begun[1] // self._quantum}")
        return begun[0]

    # ---- blocking calls ----

    def receive(self, deadline_ns: int | None, window_ns: int, /) -> bytes | None:
        """Block until there is a record, then read all there are; None at the deadline. Hybrid polling."""
        event = self._acquire_event()
        try:
            r, used = self._wait_for_records(event, deadline_ns, window_ns)
            if not used:
                return None
            data = self._read_and_commit(r, used)
            self._waits[_RECEIVED] += 1
            event.wake_acquired(NOT_FULL)
            return data
        finally:
            event.waiters -= 1
            if event.is_closing:
                event.finish_close()

    def receive_into(self, out: Buffer, deadline_ns: int | None, window_ns: int, /) -> int:
        """Block as `receive` does; then read as many records as fit into `out`; return how many, 0 at the deadline."""
        target = memoryview(out).cast("B")
        capacity = len(target) - len(target) % self._quantum
        if not capacity:
            raise InvalidArgument(f"{len(target)} bytes do not hold a record of {self._quantum} bytes")
        event = self._acquire_event()
        try:
            r, used = self._wait_for_records(event, deadline_ns, window_ns)
            if not used:
                return 0
            self._read_into_and_commit(target, r, min(used, capacity))
            self._waits[_RECEIVED] += 1
            event.wake_acquired(NOT_FULL)
            return min(used, capacity) // self._quantum
        finally:
            event.waiters -= 1
            if event.is_closing:
                event.finish_close()

    def _wait_for_records(self, event: EventFlagWord, deadline_ns: int | None, window_ns: int) -> tuple[int, int]:
        """Return the read counter and how many bytes can be read: 0 at the deadline."""
        while True:
            event.raise_if_cancelled()
            r, used = self._begin_read(strict=True)
            if used or not self._wait(event, deadline_ns, window_ns):
                return r, used

    def read_blocking(
        self, n: int, deadline_ns: int | None, word: EventFlagWord | None = None, awaited: int = NOT_EMPTY,
        woken: int = NOT_FULL,
    ) -> bytes | None:  # fmt: skip
        """Block until `n` records can be read, and read them; None at the deadline, or if they can never be there.

        Waits for a bit of `awaited` in `word` (None = the queue's own), and sets `woken` there afterwards.
        """
        size = self._record_bytes(n)
        if word is not None and word is not self._event:
            return self._on_external_word(word, lambda: self._read_waiting(word, size, deadline_ns, awaited, woken))
        event = self._acquire_event()
        try:
            return self._read_waiting(event, size, deadline_ns, awaited, woken)
        finally:
            event.waiters -= 1
            if event.is_closing:
                event.finish_close()

    def _read_waiting(
        self, event: EventFlagWord, size: int, deadline_ns: int | None, awaited: int, woken: int
    ) -> bytes | None:
        _check_awaited(awaited)
        while size <= self._ring_bytes:
            self._raise_if_cancelled(event)
            data = self._try_read(size, True)
            if data is not None:
                if woken:
                    event.wake_acquired(woken)
                return data
            if not self._sleep(event, READER, size, deadline_ns, awaited):
                break
        return None

    def write_blocking(
        self, data: Buffer, deadline_ns: int | None, word: EventFlagWord | None = None, awaited: int = NOT_FULL,
        woken: int = NOT_EMPTY,
    ) -> bool:  # fmt: skip
        """Block until all of `data` fits, and write it; False at the deadline, or if it can never fit.

        Waits for a bit of `awaited` in `word` (None = the queue's own), and sets `woken` there afterwards.
        """
        source = data if type(data) is bytes else bytes(data)
        if word is not None and word is not self._event:
            return self._on_external_word(word, lambda: self._write_waiting(word, source, deadline_ns, awaited, woken))
        event = self._acquire_event()
        try:
            return self._write_waiting(event, source, deadline_ns, awaited, woken)
        finally:
            event.waiters -= 1
            if event.is_closing:
                event.finish_close()

    def _write_waiting(
        self, event: EventFlagWord, source: bytes, deadline_ns: int | None, awaited: int, woken: int
    ) -> bool:
        _check_awaited(awaited)
        while True:
            self._raise_if_cancelled(event)
            if self._try_write(source, True):
                if woken:
                    event.wake_acquired(woken)
                return True
            if len(source) > self._ring_bytes:
                return False
            if not self._sleep(event, WRITER, len(source), deadline_ns, awaited):
                return False

    def _on_external_word(self, word: EventFlagWord, call: Callable[[], T]) -> T:
        """Make `call`, which waits on another queue's word; keep the memory of both queues mapped meanwhile."""
        self._check_synchronized()
        lifetime = self._lifetime
        if lifetime is None:
            raise InvalidArgument("this queue was made without what a wait on another word needs")
        lifetime.acquire()
        try:
            return self._acquire_and_call(word, call)
        finally:
            lifetime.waiters -= 1
            if lifetime.is_closing:
                lifetime.finish_close()

    def _acquire_and_call(self, word: EventFlagWord, call: Callable[[], T]) -> T:
        # If a signal handler raises right after this, the word stays in the list and is woken once without need.
        self._external_waits.append(word)
        word.acquire()
        try:
            return call()
        finally:
            word.waiters -= 1
            if word.is_closing:
                word.finish_close()
            self._external_waits.remove(word)

    def wake_external_waits(self) -> int:
        """Wake threads that wait for this queue on other queues' words, so that they check its flags.

        Returns how many slept.
        """
        return sum([word.wake_all() for word in tuple(self._external_waits)])

    # A wait on an external word ends if either queue is cancelled, so both are checked.

    def _raise_if_cancelled(self, event: EventFlagWord) -> None:
        if event is not self._lifetime and self._lifetime is not None:
            self._lifetime.raise_if_cancelled()
        event.raise_if_cancelled()

    def _is_cancelled(self, event: EventFlagWord) -> bool:
        lifetime = self._lifetime
        return event.is_cancelled or (lifetime is not None and lifetime is not event and lifetime.is_cancelled)

    def _is_ready(self, side: int, size: int) -> bool:
        """Return whether an attempt may succeed. True for invalid counters as well: the attempt then raises."""
        w = self._write_counter[0]  # SYNC records
        used = w - self._read_counter[0]  # SYNC space
        if not 0 <= used <= self._ring_bytes:
            return True
        if side == READER:
            return used > 0 and (used >= size or used % self._quantum != 0)
        return self._ring_bytes - used >= size or w % self._quantum != 0

    def _wait(self, event: EventFlagWord, deadline_ns: int | None, window_ns: int) -> bool:
        """Block until a record may be there, or the wait is cancelled; return False at the deadline."""
        began = monotonic_ns()
        if deadline_ns is not None and began >= deadline_ns:
            return self._is_ready(READER, self._quantum) or event.is_cancelled
        if self._poll(event, began, _earlier(deadline_ns, began + min(window_ns, _FIRST_POLL_NS))):
            self._waits[_POLLED] += 1
            return True  # not a sample: the estimator learns when not to poll
        if window_ns and self._writer_cpu[0] == current_cpu() + 1:
            os.sched_yield()  # the writer cannot run while this thread occupies its CPU
            return self._sleep_for_record(event, deadline_ns)
        return self._hybrid_wait(event, deadline_ns, window_ns, began)

    def _hybrid_wait(self, event: EventFlagWord, deadline_ns: int | None, window_ns: int, began: int) -> bool:
        action = self._estimator.next_action(began, window_ns)
        if action > POLL and self._sleep_before_poll(event, deadline_ns, action):
            return True
        now = began if action == POLL else monotonic_ns()
        poll_end = self._estimator.poll_end(began, now, window_ns)
        found = action != SLEEP and self._poll_and_yield(event, now, _earlier(deadline_ns, poll_end), window_ns)
        self._waits[_POLLED] += found
        found = found or self._sleep_for_record(event, deadline_ns)
        if found:
            self._estimator.add_wait(monotonic_ns() - began)
        return found

    def _sleep_before_poll(self, event: EventFlagWord, deadline_ns: int | None, until: int) -> bool:
        """Sleep until `until` with exact timers; return whether a record is there already, or the wait is cancelled."""
        slack = timer_slack()
        try:
            # The slack belongs to the application's thread, so it is restored. Set inside the try block, because a
            # signal handler may raise right after it.
            set_timer_slack(1)
            found = self._sleep_for_record(event, _earlier(deadline_ns, until))
        finally:
            set_timer_slack(slack)
        self._estimator.add_wakeup(until, monotonic_ns(), found)
        return found

    def _sleep_for_record(self, event: EventFlagWord, deadline_ns: int | None) -> bool:
        self._waits[_SLEPT] += 1
        return self._sleep(event, READER, self._quantum, deadline_ns, NOT_EMPTY)

    def _poll(self, event: EventFlagWord, now: int, until: int) -> bool:
        while now < until:
            if self._is_ready(READER, self._quantum) or event.is_cancelled:
                return True
            now = monotonic_ns()
        return False

    def _poll_and_yield(self, event: EventFlagWord, now: int, until: int, window_ns: int) -> bool:
        """Poll, and yield the CPU repeatedly: the thread that computes the record may have been placed on it.

        Then the estimator may end the poll.
        """
        must_stop = False
        while now < until and not must_stop:
            if self._is_ready(READER, self._quantum) or event.is_cancelled:
                self._estimator.add_poll(False)
                return True
            yielded = monotonic_ns()
            os.sched_yield()
            now = monotonic_ns()
            must_stop = self._estimator.must_stop_polling(now - yielded, window_ns)
        self._estimator.add_poll(must_stop)
        return False

    def _sleep(self, event: EventFlagWord, side: int, size: int, deadline_ns: int | None, mask: int) -> bool:
        """Sleep until an attempt may succeed, or the wait is cancelled; return False at the deadline.

        The order is what loses no wake-up: clear the bits, check the condition, sleep only if the word is unchanged.
        The other side changes the ring first and sets the bit second. If it set the bit before it was cleared here, the
        check finds the change. If it set it later, the word differs from the expected value and the futex returns.
        The same holds for the death flag, which the watcher sets before it sets the bits.
        """
        while not _has_passed(deadline_ns):
            old = event.fetch_clear(mask)
            if self._is_ready(side, size) or self._is_cancelled(event):
                return True
            if not old & mask:
                event.sleep(old & ~mask, deadline_ns, mask)
        return self._is_ready(side, size) or self._is_cancelled(event)

    # ---- waits by other means: `aio` sleeps in futex_waitv on many words. The steps are named as in Linux wait queues.

    def begin_wait(self) -> int:
        """Acquire the event flag word until `finish_wait`; return the address of the futex."""
        return self._acquire_event()._address

    def prepare_to_wait(self, side: int, size: int) -> int | None:
        """Clear the bit of `side` and check the condition; return the futex value to sleep on, None if it may hold."""
        event = self._event
        assert event is not None, "begin_wait comes first"
        mask = NOT_EMPTY if side == READER else NOT_FULL
        old = event.fetch_clear(mask)
        if self._is_ready(side, size) or event.is_cancelled:
            return None
        return old & ~mask

    def finish_wait(self) -> None:
        """End what `begin_wait` began. Releases the memory if the queue was closed and this was the last call."""
        event = self._event
        assert event is not None, "begin_wait comes first"
        event.waiters -= 1
        if event.is_closing:
            event.finish_close()

    # ---- lifetime ----

    def close(self, on_released: Callable[[], object] | None = None) -> None:
        """Cancel all waits. Release the memory and call `on_released` once no call uses it any more. Idempotent."""
        if not self._is_open:
            return
        self._on_released = on_released
        external = tuple(self._external_waits)
        if self._lifetime is None:
            self._release()
        else:
            self._lifetime.close(self._release)
        for word in external:
            word.wake_all()

    def _release(self) -> None:
        self._is_open = False
        for view in (
            self._read_counter, self._write_counter, self._ring, self._reserved_counter, self._writer_cpu, self._waits,
        ):  # fmt: skip
            view.release()
        if self._on_released is not None:
            self._on_released()
        self._on_released = None
