"""The queue's algorithm in plain Python, one shared-memory step at a time: specification, and fallback for `_core`.

Rules: shared words are read and written only as aligned items of a `memoryview.cast` (one load or store each; struct
would write byte by byte), and the event word is changed only by libatomic or, where that is missing, by the kernel
(FUTEX_WAKE_OP). Python has no acquire and release, so off x86-64, whose ordinary loads and stores have both, a queue
that two processes share is refused. The SYNC labels are those of `_atomics.h`. FMQ_FACTS 1.3 to 1.11. The file is
long because a specification is read, and its steps explored, in one piece.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable
from errno import EAGAIN, EINTR, ETIMEDOUT
from time import monotonic_ns
from typing import TYPE_CHECKING, NoReturn, TypeVar

from nnfmq.hal.errors import DeadObject, InvalidArgument, QueueCorrupted
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

if TYPE_CHECKING:
    from typing_extensions import Buffer

NOT_FULL = 0x1
NOT_EMPTY = 0x2
READER, WRITER = 0, 1
_FIRST_LOOK_NS = 5_000  # before a wait is planned
_SENDS_PER_HINT = 64  # asking for the CPU costs a third of a send

Answer = TypeVar("Answer")

_atomics = find_atomics()


def refuse_if_unordered() -> None:
    """Raise InvalidArgument on a machine where plain Python cannot order its memory accesses."""
    machine = platform.machine()
    if machine != "x86_64":
        raise InvalidArgument(
            f"the plain-Python core cannot share a queue between processes on {machine}, where loads and stores "
            "are reordered: install a C compiler and Cython, and reinstall nnfmq to get the compiled core"
        )


# ---- the event word ----


class EventFlagWord:
    """One futex word in shared memory, and the private flags that end a wait on it."""

    def __init__(self, region: memoryview, offset: int, dead: Buffer, atomics: Atomics | None = None) -> None:
        if offset < 0 or offset % 4 or offset + 4 > len(region):
            raise InvalidArgument(f"event word at offset {offset} of {len(region)} bytes: outside or misaligned")
        self._word = region[offset : offset + 4].cast("I")
        self._anchor: ctypes.c_uint32 | None = ctypes.c_uint32.from_buffer(region, offset)
        self._address = ctypes.addressof(self._anchor)
        self._atomics = atomics or _atomics
        self._set_bits = self._atomics.set_bits
        self._on_released: Callable[[], object] | None = None
        self.is_closing = False
        self.waiters = 0
        self.watch(dead)

    def watch(self, dead: Buffer) -> None:
        """Test the word `dead` (a PeerDeathFlag's buffer) in every wait from now on."""
        if self.waiters:
            raise InvalidArgument("the dead flag cannot be changed while a thread waits")
        self._peer_death = memoryview(dead).cast("B").cast("I")

    def enter(self) -> None:
        """Count a user in, so that the memory stays until it has left.

        It leaves with `waiters -= 1` and, if closing, `settle()`, spelt out: were that one call, a signal's exception
        could be raised at its beginning and the count be wrong for ever.
        """
        if self.is_closing:
            raise InvalidArgument("the queue is closed")
        self.waiters += 1

    def settle(self) -> None:
        """Finish a close that came while somebody was in here, once the last one has left."""
        if not self.waiters:
            self._finish()

    @property
    def is_stopped(self) -> bool:
        """True when no wait may go on."""
        return self._peer_death[0] != 0 or self.is_closing  # SYNC dead

    def check_stop(self) -> None:
        """Raise what ends a wait, if something does."""
        if self.is_closing:
            raise InvalidArgument("the queue was closed during the wait")
        if self._peer_death[0]:  # SYNC dead
            raise DeadObject("the process at the other end of the queue is gone")

    def wake(self, mask: int) -> int:
        """OR `mask` into the word and wake who waits for a bit of it; returns how many slept."""
        self.enter()
        try:
            return self.notify(mask) if mask else 0
        finally:
            self.waiters -= 1
            if self.is_closing:
                self.settle()

    def wake_all(self) -> int:
        """OR every bit and wake everybody; returns how many slept. After `close`, which did so itself, none."""
        if self.is_closing:
            return 0
        self.enter()
        try:
            return self._notify_all()
        finally:
            self.waiters -= 1
            if self.is_closing:
                self.settle()

    def notify(self, mask: int) -> int:
        """Do what `wake` does, for who has entered."""
        # A sleeper has cleared its own bits: where all were set there is nobody to wake.
        if self._set_bits(self._word, self._address, mask):  # SYNC event, SYNC dead
            return futex_wake(self._address, mask)
        return 0

    def _notify_all(self) -> int:
        self._set_bits(self._word, self._address, ALL_BITS)  # SYNC event, SYNC dead
        return futex_wake(self._address, ALL_BITS)

    def take_bits(self, mask: int) -> int:
        """Clear the bits of `mask`; return the word as it was."""
        return self._atomics.take_bits(self._word, self._address, mask)  # SYNC event, SYNC dead

    def sleep(self, expected: int, deadline_ns: int | None, mask: int) -> None:
        """Sleep until woken, the deadline, a signal, or at once where the word is not `expected`."""
        error = futex_wait(self._address, expected, deadline_ns, mask)
        if error not in (0, EAGAIN, EINTR, ETIMEDOUT):
            raise OSError(error, f"futex: {os.strerror(error)}")

    def wait(self, mask: int, deadline_ns: int | None = None) -> int:
        """Wait for any bit of `mask`, consume and return what came; 0 when the deadline passed."""
        if not mask:
            raise InvalidArgument("an event flag cannot wait for no bit at all")
        self.enter()
        try:
            return self._wait(mask, deadline_ns)
        finally:
            self.waiters -= 1
            if self.is_closing:
                self.settle()

    def _wait(self, mask: int, deadline_ns: int | None) -> int:
        self.check_stop()
        while True:
            old = self.take_bits(mask)
            self.check_stop()  # before the bits are believed: they may be those of wake_all
            if old & mask or _has_passed(deadline_ns):
                return old & mask
            self.sleep(old & ~mask, deadline_ns, mask)

    def close(self, on_released: Callable[[], object] | None = None) -> None:
        """End all waits and let go of the memory, now or when the last waiter has left; then call `on_released`."""
        if self.is_closing:
            return
        self._on_released = on_released
        self.is_closing = True
        if self.waiters:
            self._notify_all()
        else:
            self._finish()

    def _finish(self) -> None:
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


class Ring:
    """Counters and records of one queue; `event` is where its two sides wait, or None.

    `others` are the queue's further memories, `guard` counts who is inside where there is no event word. A `lossy` ring
    is unsynchronized: its writer overwrites, its readers have positions of their own, and one that was overtaken keeps
    the newest `history_bytes`.
    """

    def __init__(
        self, region: memoryview, layout: QueueLayout, event: EventFlagWord | None, shared: bool = True, *,
        others: tuple[memoryview, ...] = (), guard: EventFlagWord | None = None, lossy: bool = False,
        history_bytes: int = 0,
    ) -> None:  # fmt: skip
        if shared:
            refuse_if_unordered()
        regions = (region, *others)
        at_read, at_write, at_ring = (regions[index] for index in layout.fds[:3])
        self._read = memoryview(bytearray(8)) if lossy else at_read[layout.read_counter : layout.read_counter + 8]
        self._read = self._read.cast("Q")
        self._write = at_write[layout.write_counter : layout.write_counter + 8].cast("Q")
        # What an unsynchronized writer is about to have written; libfmq has the word and does not use it.
        self._intent = at_read[layout.read_counter : layout.read_counter + 8].cast("Q") if lossy else self._read
        self._ring = at_ring[layout.ring : layout.ring + layout.ring_bytes]
        self._ring_bytes = layout.ring_bytes
        self._quantum = layout.quantum
        self._is_lossy, self._history_bytes = lossy, history_bytes
        self._event = event
        self._guard = guard if event is None else event
        self._visited: list[EventFlagWord] = []
        self._granted_write: tuple[int, int] | None = None  # counter and size of the open transactions
        self._granted_read: tuple[int, int] | None = None
        self._is_open = True
        self._on_released: Callable[[], object] | None = None
        at_event, hint = regions[layout.fds[3]], None if event is None else layout.writer_cpu
        self._writer_cpu = memoryview(bytearray(2)) if hint is None else at_event[hint : hint + 2]
        self._writer_cpu = self._writer_cpu.cast("H")
        self._sends = 0
        self._estimator = WaitEstimator()

    def _check_open(self) -> None:
        if not self._is_open or (self._guard is not None and self._guard.is_closing):
            raise InvalidArgument("the queue is closed")

    def _check_writable(self) -> None:
        self._check_open()
        if self._write.readonly or self._ring.readonly:
            raise InvalidArgument("this queue is mapped for reading only")

    def _check_can_wait(self) -> None:
        self._check_open()
        if self._is_lossy:
            raise InvalidArgument("an unsynchronized queue has no calls that wait or wake")

    def _enter(self) -> EventFlagWord:
        event = self._event
        if event is None:
            self._check_can_wait()
            raise InvalidArgument("this queue has no event word: only write and read without waiting are possible")
        event.enter()
        return event

    def reset(self) -> None:
        """Zero both counters."""
        self._check_writable()
        self._read[0] = 0  # SYNC space
        if self._is_lossy:
            self._intent[0] = 0
        self._write[0] = 0  # SYNC records

    def counters(self) -> tuple[int, int]:
        """Return (write counter, read counter) in bytes, for messages and tools."""
        self._check_open()
        return self._write[0], self._read[0]

    def _readable_bytes(self) -> int:
        w = self._write[0]  # SYNC records
        r = self._read[0]  # SYNC space
        return max(w - r, 0)

    def available_to_read(self) -> int:
        """Return the readable records; more than the capacity tells that a counter is corrupted."""
        self._check_open()
        return self._readable_bytes() // self._quantum

    def available_to_write(self) -> int:
        """Return how many records fit now."""
        self._check_open()
        return max(self._ring_bytes - self._readable_bytes(), 0) // self._quantum

    # One try, never waits.

    def _try_write(self, data: Buffer, strict: bool) -> bool:
        source = data if type(data) is bytes else memoryview(data).cast("B")
        size = len(source)
        if size % self._quantum:
            raise InvalidArgument(f"{size} bytes are no whole number of records of {self._quantum} bytes")
        w = self._write[0]
        r = self._read[0]  # SYNC space
        used = w - r
        if strict and (not 0 <= used <= self._ring_bytes or w % self._quantum):
            self._corrupted(w, r)
        free = 0 if used > self._ring_bytes else self._ring_bytes - max(used, 0)
        if size > free or w % self._quantum:
            return False
        self._put(w, source, size)
        return True

    def _put(self, w: int, source: bytes | memoryview, size: int) -> None:
        at = w % self._ring_bytes
        first = self._ring_bytes - at
        if size <= first:
            self._ring[at : at + size] = source
        else:
            self._ring[at:] = source[:first]
            self._ring[: size - first] = source[first:]
        self._write[0] = (w + size) % 2**64  # SYNC records

    def _begin_read(self, strict: bool) -> tuple[int, int]:
        """Return (read counter, readable bytes), or (0, -1) where the counters are impossible; overflow is healed."""
        w = self._write[0]  # SYNC records
        r = self._read[0]
        is_aligned = w % self._quantum == r % self._quantum == 0
        if is_aligned and 0 <= w - r <= self._ring_bytes:
            return r, w - r
        if is_aligned:
            self._skip_lost(w)
        if strict:
            self._corrupted(w, r)
        return 0, -1

    def _skip_lost(self, w: int) -> None:
        # As libfmq heals overflow: nothing is left to read, or the newest half of the ring.
        self._read[0] = w - min(self._history_bytes, w)  # SYNC space

    def _take(self, r: int, size: int) -> bytes:
        data = self._copy_out(r, size)
        self._read[0] = (r + size) % 2**64  # SYNC space
        return data

    def _copy_out(self, r: int, size: int) -> bytes:
        at = r % self._ring_bytes
        data = bytes(self._ring[at : at + size])  # as far as the end
        if len(data) < size:
            data += self._ring[: size - len(data)]
        return data

    def _copy_into(self, target: memoryview, r: int, size: int) -> None:
        at = r % self._ring_bytes
        first = min(size, self._ring_bytes - at)
        target[:first] = self._ring[at : at + first]
        target[first:size] = self._ring[: size - first]

    def _commit_unless_lapped(self, r: int, size: int) -> bool:
        """Consume, or return False where the writer came round meanwhile: then no byte is to be believed."""
        w = self._write[0]  # SYNC records, SYNC lap: after the copy
        if not 0 <= w - r <= self._ring_bytes:
            self._skip_lost(w)
            return False
        if self._is_lossy and self._intent[0] - r > self._ring_bytes:  # SYNC lap: it is being overwritten
            self._skip_lost(w)
            return False
        self._read[0] = (r + size) % 2**64  # SYNC space
        return True

    def _try_read(self, size: int, strict: bool) -> bytes | None:
        r, used = self._begin_read(strict)
        return self._take(r, size) if used >= size else None

    def _corrupted(self, w: int, r: int) -> NoReturn:
        raise QueueCorrupted(
            f"write counter {w}, read counter {r}: impossible in a ring of {self._ring_bytes} bytes "
            f"with records of {self._quantum} bytes"
        )

    def _record_bytes(self, n: int) -> int:
        if n < 0:
            raise InvalidArgument(f"{n} records; a read takes 0 or more")
        self._check_open()
        return n * self._quantum

    def write(self, data: Buffer) -> bool:
        """Write all records of `data`, or none: False where they do not fit."""
        self._check_open()
        return self._overwrite(data) if self._is_lossy else self._try_write(data, False)

    def _overwrite(self, data: Buffer) -> bool:
        self._check_writable()
        source = data if type(data) is bytes else memoryview(data).cast("B")
        size = len(source)
        if size % self._quantum:
            raise InvalidArgument(f"{size} bytes are no whole number of records of {self._quantum} bytes")
        w = self._write[0]
        if size > self._ring_bytes or w % self._quantum:
            return False
        self._intent[0] = (w + size) % 2**64  # SYNC lap: before the bytes; x86-64 keeps that order by itself
        self._put(w, source, size)
        return True

    def read(self, n: int) -> bytes | None:
        """Take `n` records, or none: None where there are fewer."""
        size = self._record_bytes(n)
        return self._read_lossy(size) if self._is_lossy else self._try_read(size, False)

    def read_into(self, out: Buffer) -> bool:
        """Take as many records as fill `out`, or none: False where there are fewer."""
        target = memoryview(out).cast("B")
        size = len(target)
        self._check_open()
        if size % self._quantum:
            raise InvalidArgument(f"{size} bytes are no whole number of records of {self._quantum} bytes")
        r, used = self._begin_read(strict=False)
        if used < size:
            return False
        if self._is_lossy:
            self._copy_into(target, r, size)
            return self._commit_unless_lapped(r, size)
        self._take_into(target, r, size)
        return True

    def _read_lossy(self, size: int) -> bytes | None:
        r, used = self._begin_read(strict=False)
        if used < size:
            return None
        data = self._copy_out(r, size)
        return data if self._commit_unless_lapped(r, size) else None

    def send(self, data: Buffer, /) -> bool:
        """Write all and wake the reader, or return False where there is no room."""
        event = self._enter()
        try:
            if not self._sends % _SENDS_PER_HINT:
                self._writer_cpu[0] = (current_cpu() + 1) % 2**16
            self._sends += 1
            if not self._try_write(data, True):
                return False
            event.notify(NOT_EMPTY)
            return True
        finally:
            event.waiters -= 1
            if event.is_closing:
                event.settle()

    def drain(self) -> int:
        """Drop all readable records; return how many."""
        self._check_can_wait()
        r, used = self._begin_read(strict=True)
        self._read[0] = r + used  # SYNC space
        if self._event is not None:
            self._event.wake(NOT_FULL)
        return used // self._quantum

    # Transactions: the ring's bytes are worked on in place, by who asked where.

    def begin_write(self, n: int) -> int | None:
        """Return where in the ring `n` records may be written (in bytes), or None where they do not fit."""
        size = self._record_bytes(n)
        self._check_writable()
        self._granted_write = None
        w = self._write[0]
        used = 0 if self._is_lossy else w - self._read[0]  # SYNC space
        free = 0 if used > self._ring_bytes else self._ring_bytes - max(used, 0)
        if size > free or w % self._quantum:
            return None
        if self._is_lossy:
            self._intent[0] = (w + size) % 2**64  # SYNC lap
        self._granted_write = w, size
        return w % self._ring_bytes

    def commit_write(self, n: int) -> None:
        """Publish the first `n` of the records that `begin_write` gave room for."""
        size = self._record_bytes(n)
        began = self._check_granted(n, size, self._granted_write, "write")
        self._granted_write = None
        w = self._write[0]
        if w != began:
            raise QueueCorrupted(f"write counter {w}: it was {began} when the write began")
        self._write[0] = (w + size) % 2**64  # SYNC records

    def begin_read(self, n: int) -> int | None:
        """Return where in the ring the next `n` records are (in bytes), or None where there are fewer."""
        size = self._record_bytes(n)
        self._granted_read = None
        r, used = self._begin_read(strict=False)
        if used < size:
            return None
        self._granted_read = r, size
        return r % self._ring_bytes

    def commit_read(self, n: int) -> bool:
        """Consume the first `n` of the records that `begin_read` gave; False where they were overwritten meanwhile."""
        size = self._record_bytes(n)
        began = self._check_granted(n, size, self._granted_read, "read")
        self._granted_read = None
        r = self._read[0]
        if r != began:
            raise QueueCorrupted(f"read counter {r}: it was {began} when the read began")
        return self._commit_unless_lapped(r, size)

    def _check_granted(self, n: int, size: int, granted: tuple[int, int] | None, what: str) -> int:
        if granted is None:
            raise InvalidArgument(f"commit_{what} without a begin_{what} that succeeded")
        if size > granted[1]:
            raise InvalidArgument(f"{n} records to commit; begin_{what} gave {granted[1] // self._quantum}")
        return granted[0]

    # Waiting.

    def receive(self, deadline_ns: int | None, window_ns: int, /) -> bytes | None:
        """Wait for a record, polling for `window_ns` before sleeping; then take all there are."""
        event = self._enter()
        try:
            return self._receive(event, deadline_ns, window_ns)
        finally:
            event.waiters -= 1
            if event.is_closing:
                event.settle()

    def _receive(self, event: EventFlagWord, deadline_ns: int | None, window_ns: int) -> bytes | None:
        r, used = self._await_records(event, deadline_ns, window_ns)
        if not used:
            return None
        data = self._take(r, used)
        event.notify(NOT_FULL)
        return data

    def _await_records(self, event: EventFlagWord, deadline_ns: int | None, window_ns: int) -> tuple[int, int]:
        """Return the read counter and how many bytes can be read: 0 once the deadline has passed."""
        while True:
            event.check_stop()
            r, used = self._begin_read(strict=True)
            if used or not self._wait(event, deadline_ns, window_ns):
                return r, used

    def receive_into(self, out: Buffer, deadline_ns: int | None, window_ns: int, /) -> int:
        """Wait as `receive` does; then take as many records as there are and `out` has room for; return how many."""
        target = memoryview(out).cast("B")
        room = len(target) - len(target) % self._quantum
        if not room:
            raise InvalidArgument(f"{len(target)} bytes have no room for a record of {self._quantum} bytes")
        event = self._enter()
        try:
            r, used = self._await_records(event, deadline_ns, window_ns)
            if not used:
                return 0
            self._take_into(target, r, min(used, room))
            event.notify(NOT_FULL)
            return min(used, room) // self._quantum
        finally:
            event.waiters -= 1
            if event.is_closing:
                event.settle()

    def _take_into(self, target: memoryview, r: int, size: int) -> None:
        self._copy_into(target, r, size)
        self._read[0] = (r + size) % 2**64  # SYNC space

    def read_blocking(
        self, n: int, deadline_ns: int | None, word: EventFlagWord | None = None, awaited: int = NOT_EMPTY,
        woken: int = NOT_FULL,
    ) -> bytes | None:  # fmt: skip
        """Wait for `n` records and take them; None at the deadline, or at once where they can never be.

        It waits for a bit of `awaited` in `word` (None = the queue's own), and wakes `woken` there.
        """
        size = self._record_bytes(n)
        if word is not None and word is not self._event:
            return self._visit(word, lambda: self._read_waiting(word, size, deadline_ns, awaited, woken))
        event = self._enter()
        try:
            return self._read_waiting(event, size, deadline_ns, awaited, woken)
        finally:
            event.waiters -= 1
            if event.is_closing:
                event.settle()

    def _read_waiting(
        self, event: EventFlagWord, size: int, deadline_ns: int | None, awaited: int, woken: int
    ) -> bytes | None:
        _check_awaited(awaited)
        while size <= self._ring_bytes:
            self._check_stop(event)
            data = self._try_read(size, True)
            if data is not None:
                if woken:
                    event.notify(woken)
                return data
            if not self._sleep(event, READER, size, deadline_ns, awaited):
                break
        return None

    def write_blocking(
        self, data: Buffer, deadline_ns: int | None, word: EventFlagWord | None = None, awaited: int = NOT_FULL,
        woken: int = NOT_EMPTY,
    ) -> bool:  # fmt: skip
        """Wait for room and write all; False at the deadline, or at once where they can never fit.

        It waits for a bit of `awaited` in `word` (None = the queue's own), and wakes `woken` there.
        """
        source = data if type(data) is bytes else bytes(data)
        if word is not None and word is not self._event:
            return self._visit(word, lambda: self._write_waiting(word, source, deadline_ns, awaited, woken))
        event = self._enter()
        try:
            return self._write_waiting(event, source, deadline_ns, awaited, woken)
        finally:
            event.waiters -= 1
            if event.is_closing:
                event.settle()

    def _write_waiting(
        self, event: EventFlagWord, source: bytes, deadline_ns: int | None, awaited: int, woken: int
    ) -> bool:
        _check_awaited(awaited)
        while True:
            self._check_stop(event)
            if self._try_write(source, True):
                if woken:
                    event.notify(woken)
                return True
            if len(source) > self._ring_bytes:
                return False
            if not self._sleep(event, WRITER, len(source), deadline_ns, awaited):
                return False

    def _visit(self, word: EventFlagWord, call: Callable[[], Answer]) -> Answer:
        """Make `call`, which waits at `word`, a queue's that is not this one: both must stay meanwhile."""
        self._check_can_wait()
        guard = self._guard
        if guard is None:
            raise InvalidArgument("this queue was made without what a wait on another word needs")
        guard.enter()
        try:
            return self._enter_and_call(word, call)
        finally:
            guard.waiters -= 1
            if guard.is_closing:
                guard.settle()

    def _enter_and_call(self, word: EventFlagWord, call: Callable[[], Answer]) -> Answer:
        self._visited.append(word)  # left over where a signal comes now: then it is woken for nothing
        word.enter()
        try:
            return call()
        finally:
            word.waiters -= 1
            if word.is_closing:
                word.settle()
            self._visited.remove(word)

    def wake_visitors(self) -> int:
        """Wake who waits here on a word of others, so that it looks at this queue's flags; returns how many slept."""
        return sum([word.wake_all() for word in tuple(self._visited)])

    def _check_stop(self, event: EventFlagWord) -> None:
        if event is not self._guard and self._guard is not None:
            self._guard.check_stop()
        event.check_stop()

    def _is_stopped(self, event: EventFlagWord) -> bool:
        guard = self._guard
        return event.is_stopped or (guard is not None and guard is not event and guard.is_stopped)

    def _is_ready(self, side: int, size: int) -> bool:
        """Return True if a try is worth while. Impossible counters count as ready: the try then says so."""
        w = self._write[0]  # SYNC records
        used = w - self._read[0]  # SYNC space
        if not 0 <= used <= self._ring_bytes:
            return True
        if side == READER:
            return used > 0 and (used >= size or used % self._quantum != 0)
        return self._ring_bytes - used >= size or w % self._quantum != 0

    def _wait(self, event: EventFlagWord, deadline_ns: int | None, window_ns: int) -> bool:
        """Return True when a look is worth while (or the wait must stop), False when the deadline passed."""
        began = monotonic_ns()
        if deadline_ns is not None and began >= deadline_ns:
            return self._is_ready(READER, self._quantum) or event.is_stopped
        if self._poll(event, began, _earlier(deadline_ns, began + min(window_ns, _FIRST_LOOK_NS))):
            return True  # too short to learn from: what is learnt is when not to poll
        if window_ns and self._writer_cpu[0] == current_cpu() + 1:
            os.sched_yield()  # it cannot answer while we run here
            return self._sleep(event, READER, self._quantum, deadline_ns, NOT_EMPTY)
        return self._wait_as_planned(event, deadline_ns, window_ns, began)

    def _wait_as_planned(self, event: EventFlagWord, deadline_ns: int | None, window_ns: int, began: int) -> bool:
        plan = self._estimator.next_action(began, window_ns)
        if plan > POLL and self._nap(event, deadline_ns, plan):
            return True
        start = began if plan == POLL else monotonic_ns()
        found = plan != SLEEP and self._poll(event, monotonic_ns(), _earlier(deadline_ns, start + window_ns))
        found = found or self._sleep(event, READER, self._quantum, deadline_ns, NOT_EMPTY)
        if found:
            self._estimator.add_wait(monotonic_ns() - began)
        return found

    def _nap(self, event: EventFlagWord, deadline_ns: int | None, until: int) -> bool:
        slack = timer_slack()
        try:
            set_timer_slack(1)  # the thread is the application's: inside the try, for a handler may raise right after
            found = self._sleep(event, READER, self._quantum, _earlier(deadline_ns, until), NOT_EMPTY)
        finally:
            set_timer_slack(slack)
        self._estimator.add_wakeup(until, monotonic_ns(), found)
        return found

    def _poll(self, event: EventFlagWord, now: int, until: int) -> bool:
        while now < until:
            if self._is_ready(READER, self._quantum) or event.is_stopped:
                return True
            now = monotonic_ns()
        return False

    def _sleep(self, event: EventFlagWord, side: int, size: int, deadline_ns: int | None, mask: int) -> bool:
        # The order that loses no wake-up: consume the bit, look again, sleep only if the word stood still.
        while not _has_passed(deadline_ns):
            old = event.take_bits(mask)
            if self._is_ready(side, size) or self._is_stopped(event):
                return True
            if not old & mask:
                event.sleep(old & ~mask, deadline_ns, mask)
        return self._is_ready(side, size) or self._is_stopped(event)

    # Waiting elsewhere: who sleeps on the word by other means does what `_sleep` does, in these steps.

    def admit(self) -> int:
        """Count a waiter in until `dismiss`; return the address of the word on which it may sleep."""
        return self._enter()._address

    def arm(self, side: int, size: int) -> int | None:
        """Consume the bit of `side`, look again; return the word to sleep on, or None where a try is worth while."""
        event = self._event
        assert event is not None, "arm is for who was admitted"
        mask = NOT_EMPTY if side == READER else NOT_FULL
        old = event.take_bits(mask)
        if self._is_ready(side, size) or event.is_stopped:
            return None
        return old & ~mask

    def dismiss(self) -> None:
        """Count a waiter out that was admitted; the last one of a queue that was closed lets go of the memory."""
        event = self._event
        assert event is not None, "dismiss is for who was admitted"
        event.waiters -= 1
        if event.is_closing:
            event.settle()

    # Lifetime.

    def close(self, on_released: Callable[[], object] | None = None) -> None:
        """Let go of the memory, now or when the last waiter has left; then call `on_released`."""
        if not self._is_open:
            return
        self._on_released = on_released
        visited = tuple(self._visited)
        if self._guard is None:
            self._finish()
        else:
            self._guard.close(self._finish)
        for word in visited:
            word.wake_all()

    def _finish(self) -> None:
        self._is_open = False
        for view in (self._read, self._write, self._ring, self._intent, self._writer_cpu):
            view.release()
        if self._on_released is not None:
            self._on_released()
        self._on_released = None
