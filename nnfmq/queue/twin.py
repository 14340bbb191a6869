"""The queue's algorithm in plain Python, one shared-memory step at a time: specification, and fallback for `_core`.

Rules: shared words are read and written only as aligned items of a `memoryview.cast` (one load or store each; struct
would write byte by byte), and the event word is changed only by libatomic or, where that is missing, by the kernel
(FUTEX_WAKE_OP). Python has no acquire and release, so off x86-64, whose ordinary loads and stores have both, a queue
that two processes share is refused. The SYNC labels are those of `_atomics.h`. FMQ_FACTS 1.3, 1.4, 1.7, 1.9, 1.11.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable
from errno import EAGAIN, EINTR, ETIMEDOUT
from time import monotonic_ns
from typing import TYPE_CHECKING, NoReturn

from nnfmq.hal.errors import DeadObject, InvalidArgument, QueueCorrupted
from nnfmq.queue.futex import ALL_BITS, Atomics, find_atomics, futex_wait, futex_wake
from nnfmq.queue.layout import Geometry

if TYPE_CHECKING:
    from typing_extensions import Buffer

NOT_FULL = 0x1
NOT_EMPTY = 0x2
READER, WRITER = 0, 1

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


class EventWord:
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
        """Test the word `dead` (a DeadFlag's buffer) in every wait from now on."""
        if self.waiters:
            raise InvalidArgument("the dead flag cannot be changed while a thread waits")
        self._dead = memoryview(dead).cast("B").cast("I")

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
        return self._dead[0] != 0 or self.is_closing  # SYNC dead

    def check_stop(self) -> None:
        """Raise what ends a wait, if something does."""
        if self.is_closing:
            raise InvalidArgument("the queue was closed during the wait")
        if self._dead[0]:  # SYNC dead
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
        self._dead.release()
        if self._on_released is not None:
            self._on_released()
        self._on_released = None


def _has_passed(deadline_ns: int | None) -> bool:
    return deadline_ns is not None and monotonic_ns() >= deadline_ns


# ---- the ring ----


class Ring:
    """Counters and records of one queue; `event` is where its two sides wait, or None."""

    def __init__(self, region: memoryview, layout: Geometry, event: EventWord | None, shared: bool = True) -> None:
        if shared:
            refuse_if_unordered()
        self._read = region[layout.read_counter : layout.read_counter + 8].cast("Q")
        self._write = region[layout.write_counter : layout.write_counter + 8].cast("Q")
        self._ring = region[layout.ring : layout.ring + layout.ring_bytes]
        self._ring_bytes = layout.ring_bytes
        self._quantum = layout.quantum
        self._event = event
        self._is_open = True
        self._on_released: Callable[[], object] | None = None

    def _check_open(self) -> None:
        if not self._is_open or (self._event is not None and self._event.is_closing):
            raise InvalidArgument("the queue is closed")

    def _enter(self) -> EventWord:
        event = self._event
        if event is None:
            self._check_open()
            raise InvalidArgument("this queue has no event word: only write and read without waiting are possible")
        event.enter()
        return event

    def reset(self) -> None:
        """Zero both counters."""
        self._check_open()
        self._read[0] = 0  # SYNC space
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
            self._read[0] = w  # SYNC space
        if strict:
            self._corrupted(w, r)
        return 0, -1

    def _take(self, r: int, size: int) -> bytes:
        at = r % self._ring_bytes
        data = bytes(self._ring[at : at + size])  # as far as the end
        if len(data) < size:
            data += self._ring[: size - len(data)]
        self._read[0] = (r + size) % 2**64  # SYNC space
        return data

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
        return self._try_write(data, False)

    def read(self, n: int) -> bytes | None:
        """Take `n` records, or none: None where there are fewer."""
        return self._try_read(self._record_bytes(n), False)

    def send(self, data: Buffer) -> bool:
        """Write all and wake the reader, or return False where there is no room."""
        event = self._enter()
        try:
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
        self._check_open()
        r, used = self._begin_read(strict=True)
        self._read[0] = r + used  # SYNC space
        if self._event is not None:
            self._event.wake(NOT_FULL)
        return used // self._quantum

    # Waiting.

    def receive(self, deadline_ns: int | None, window_ns: int) -> bytes | None:
        """Wait for a record, polling for `window_ns` before sleeping; then take all there are."""
        event = self._enter()
        try:
            return self._receive(event, deadline_ns, window_ns)
        finally:
            event.waiters -= 1
            if event.is_closing:
                event.settle()

    def _receive(self, event: EventWord, deadline_ns: int | None, window_ns: int) -> bytes | None:
        while True:
            event.check_stop()
            r, used = self._begin_read(strict=True)
            if used:
                data = self._take(r, used)
                event.notify(NOT_FULL)
                return data
            if not self._wait_ready(event, READER, self._quantum, deadline_ns, window_ns):
                return None

    def read_blocking(self, n: int, deadline_ns: int | None) -> bytes | None:
        """Wait for `n` records and take them; None at the deadline, or at once where they can never be."""
        size, event = self._record_bytes(n), self._enter()
        try:
            return self._read_waiting(event, size, deadline_ns) if size <= self._ring_bytes else None
        finally:
            event.waiters -= 1
            if event.is_closing:
                event.settle()

    def _read_waiting(self, event: EventWord, size: int, deadline_ns: int | None) -> bytes | None:
        while True:
            event.check_stop()
            data = self._try_read(size, True)
            if data is not None:
                event.notify(NOT_FULL)
                return data
            if not self._wait_ready(event, READER, size, deadline_ns, 0):
                return None

    def write_blocking(self, data: Buffer, deadline_ns: int | None) -> bool:
        """Wait for room and write all; False at the deadline, or at once where they can never fit."""
        event = self._enter()
        try:
            return self._write_waiting(event, data if type(data) is bytes else bytes(data), deadline_ns)
        finally:
            event.waiters -= 1
            if event.is_closing:
                event.settle()

    def _write_waiting(self, event: EventWord, source: bytes, deadline_ns: int | None) -> bool:
        while True:
            event.check_stop()
            if self._try_write(source, True):
                event.notify(NOT_EMPTY)
                return True
            if len(source) > self._ring_bytes:
                return False
            if not self._wait_ready(event, WRITER, len(source), deadline_ns, 0):
                return False

    def _is_ready(self, side: int, size: int) -> bool:
        """Return True if a try is worth while. Impossible counters count as ready: the try then says so."""
        w = self._write[0]  # SYNC records
        used = w - self._read[0]  # SYNC space
        if not 0 <= used <= self._ring_bytes:
            return True
        if side == READER:
            return used > 0 and (used >= size or used % self._quantum != 0)
        return self._ring_bytes - used >= size or w % self._quantum != 0

    def _wait_ready(self, event: EventWord, side: int, size: int, deadline_ns: int | None, window_ns: int) -> bool:
        """Return True when a try is worth while (or the wait must stop), False when the deadline passed."""
        now = monotonic_ns()
        spin_end = now + window_ns if deadline_ns is None else min(now + window_ns, deadline_ns)
        while now < spin_end:
            if self._is_ready(side, size) or event.is_stopped:
                return True
            now = monotonic_ns()
        return self._sleep(event, side, size, deadline_ns)

    def _sleep(self, event: EventWord, side: int, size: int, deadline_ns: int | None) -> bool:
        # The order that loses no wake-up: consume the bit, look again, sleep only if the word stood still.
        mask = NOT_EMPTY if side == READER else NOT_FULL
        while not _has_passed(deadline_ns):
            old = event.take_bits(mask)
            if self._is_ready(side, size) or event.is_stopped:
                return True
            if not old & mask:
                event.sleep(old & ~mask, deadline_ns, mask)
        return self._is_ready(side, size) or event.is_stopped

    # Lifetime.

    def close(self, on_released: Callable[[], object] | None = None) -> None:
        """Let go of the memory, now or when the last waiter has left; then call `on_released`."""
        if not self._is_open:
            return
        self._on_released = on_released
        if self._event is None:
            self._finish()
        else:
            self._event.close(self._finish)

    def _finish(self) -> None:
        self._is_open = False
        for view in (self._read, self._write, self._ring):
            view.release()
        if self._on_released is not None:
            self._on_released()
        self._on_released = None
