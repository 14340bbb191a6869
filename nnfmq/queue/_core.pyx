# cython: language_level=3, embedsignature=True, binding=False
"""The compiled core: EventWord and Ring over `_atomics.h`. `twin.py` is the same in plain Python, and its specification.

The GIL is held through every call that does not wait and for the first 2 µs of a spin (taking it back can cost 5 ms
beside a thread that computes), then released. While it is released only plain C runs, on memory that cannot go away:
closing is left to the last waiter. Signals are served after each slice of a spin and each return of the futex.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.exc cimport PyErr_CheckSignals
from libc.errno cimport EAGAIN, EINTR, ETIMEDOUT
from libc.stdint cimport INT64_MAX, int64_t, uint32_t, uint64_t, uintptr_t

import os

from nnfmq.hal.errors import DeadObject, InvalidArgument, QueueCorrupted

cdef extern from "_atomics.h" nogil:
    ctypedef struct nnfmq_event:
        pass
    ctypedef struct nnfmq_ring:
        uint64_t ring_bytes
        uint64_t quantum
    ctypedef struct nnfmq_look:
        uint64_t w, r, bytes
    const int64_t NNFMQ_NO_DEADLINE
    const uint32_t NNFMQ_NOT_FULL, NNFMQ_NOT_EMPTY
    const int NNFMQ_DONE, NNFMQ_CORRUPTED, NNFMQ_READER, NNFMQ_WRITER
    int64_t nnfmq_now()
    int nnfmq_is_stopped(const nnfmq_event *event)
    int nnfmq_wait_bits(const nnfmq_event *event, uint32_t mask, int64_t deadline_ns, uint32_t *bits)
    void nnfmq_reset(const nnfmq_ring *q)
    uint64_t nnfmq_readable_bytes(const nnfmq_ring *q)
    int nnfmq_begin_read(const nnfmq_ring *q, nnfmq_look *look)
    void nnfmq_copy_out(const nnfmq_ring *q, uint64_t r, void *target, uint64_t size)
    void nnfmq_commit_read(const nnfmq_ring *q, uint64_t r, uint64_t size)
    int nnfmq_begin_write(const nnfmq_ring *q, nnfmq_look *look)
    void nnfmq_commit_write(const nnfmq_ring *q, uint64_t w, const void *source, uint64_t size)
    int nnfmq_is_ready(const nnfmq_ring *q, int side, uint64_t size)
    int nnfmq_spin(const nnfmq_ring *q, const nnfmq_event *event, int side, uint64_t size, int64_t until_ns)
    int nnfmq_sleep(const nnfmq_ring *q, const nnfmq_event *event, int side, uint64_t size, int64_t deadline_ns)

cdef extern from *:
    """
    /* Cython knows no atomic types; these lend it addresses and flags without casting the qualifiers away there. */
    #define nnfmq_set_word(e, address) ((e)->word = (_Atomic uint32_t *)(address))
    #define nnfmq_set_dead(e, address) ((e)->dead = (const _Atomic uint32_t *)(address))
    #define nnfmq_set_closing(e) atomic_store_explicit(&(e)->closing, 1, memory_order_release)
    #define nnfmq_is_closing(e) (atomic_load_explicit(&(e)->closing, memory_order_relaxed) != 0)
    #define nnfmq_set_ring(q, base, r, w, data, size, record) \\
        ((q)->read_counter = (_Atomic uint64_t *)((base) + (r)), \\
         (q)->write_counter = (_Atomic uint64_t *)((base) + (w)), \\
         (q)->ring = (base) + (data), (q)->ring_bytes = (size), (q)->quantum = (record))
    #define nnfmq_event_wake(e, mask) nnfmq_wake((e)->word, mask)
    #define nnfmq_event_wake_all(e) nnfmq_wake_all((e)->word)
    """
    void nnfmq_set_word(nnfmq_event *event, void *address) nogil
    void nnfmq_set_dead(nnfmq_event *event, void *address) nogil
    void nnfmq_set_closing(nnfmq_event *event) nogil
    bint nnfmq_is_closing(nnfmq_event *event) nogil
    void nnfmq_set_ring(nnfmq_ring *q, unsigned char *base, uint64_t r, uint64_t w, uint64_t data, uint64_t size,
                        uint64_t record) nogil
    long nnfmq_event_wake(const nnfmq_event *event, uint32_t mask) nogil
    long nnfmq_event_wake_all(const nnfmq_event *event) nogil

cdef int64_t GIL_HELD_NS = 2_000
cdef int64_t SPIN_SLICE_NS = 10_000_000  # signals are served this often in a long spin


cdef int64_t as_deadline(object deadline_ns) except? -2:
    return NNFMQ_NO_DEADLINE if deadline_ns is None else max(0, min(deadline_ns, NNFMQ_NO_DEADLINE - 1))


cdef inline int64_t later(int64_t start, int64_t duration) noexcept:
    return start + duration if duration < INT64_MAX - start else INT64_MAX


cdef class EventWord:
    """One futex word in shared memory, and the private flags that end a wait on it."""

    cdef nnfmq_event event
    cdef Py_buffer region
    cdef Py_buffer flag
    cdef bint has_region, has_flag
    cdef object on_released
    cdef readonly Py_ssize_t waiters

    def __cinit__(self, region, Py_ssize_t offset, dead):
        PyObject_GetBuffer(region, &self.region, PyBUF_SIMPLE | PyBUF_WRITABLE)
        self.has_region = True
        if offset < 0 or offset > self.region.len - 4 or (<uintptr_t>self.region.buf + <size_t>offset) % 4:
            raise InvalidArgument(f"event word at offset {offset} of {self.region.len} bytes: outside or misaligned")
        nnfmq_set_word(&self.event, <unsigned char *>self.region.buf + offset)
        self.watch(dead)

    def watch(self, dead):
        """Test the word `dead` (a DeadFlag's buffer) in every wait from now on."""
        if self.waiters:
            raise InvalidArgument("the dead flag cannot be changed while a thread waits")
        cdef Py_buffer flag
        PyObject_GetBuffer(dead, &flag, PyBUF_SIMPLE)
        if flag.len < 4 or <uintptr_t>flag.buf % 4:
            PyBuffer_Release(&flag)
            raise InvalidArgument("a dead flag is an aligned word of 4 bytes")
        if self.has_flag:
            PyBuffer_Release(&self.flag)
        self.flag = flag
        self.has_flag = True
        nnfmq_set_dead(&self.event, self.flag.buf)

    cdef int enter(self) except -1:
        if nnfmq_is_closing(&self.event):
            raise InvalidArgument("the queue is closed")
        self.waiters += 1
        return 0

    cdef int leave(self) except -1:
        self.waiters -= 1
        if not self.waiters and nnfmq_is_closing(&self.event):
            self.finish()
        return 0

    cdef int check_stop(self) except -1:
        if nnfmq_is_stopped(&self.event):
            if nnfmq_is_closing(&self.event):
                raise InvalidArgument("the queue was closed during the wait")
            raise DeadObject("the process at the other end of the queue is gone")
        return 0

    cdef int check_open(self) except -1:
        if nnfmq_is_closing(&self.event):
            raise InvalidArgument("the queue is closed")
        return 0

    def wake(self, uint32_t mask):
        """OR `mask` into the word and wake who waits for a bit of it; returns how many slept."""
        self.check_open()
        return nnfmq_event_wake(&self.event, mask) if mask else 0

    def wake_all(self):
        """OR every bit and wake everybody; returns how many slept. After `close`, which did so itself, none."""
        return 0 if nnfmq_is_closing(&self.event) else nnfmq_event_wake_all(&self.event)

    def wait(self, uint32_t mask, deadline_ns=None):
        """Wait for any bit of `mask`, consume and return what came; 0 when the deadline passed."""
        cdef int64_t deadline = as_deadline(deadline_ns)
        if not mask:
            raise InvalidArgument("an event flag cannot wait for no bit at all")
        self.enter()
        try:
            return self.wait_bits(mask, deadline)
        finally:
            self.leave()

    cdef object wait_bits(self, uint32_t mask, int64_t deadline):
        cdef uint32_t bits = 0
        cdef int error
        cdef bint has_passed
        self.check_stop()
        while True:
            has_passed = nnfmq_now() >= deadline
            with nogil:
                error = nnfmq_wait_bits(&self.event, mask, deadline, &bits)
            self.check_stop()  # first: the bits may be those of wake_all
            if bits or has_passed:
                return bits
            self.after_futex(error)

    cdef int after_futex(self, int error) except -1:
        PyErr_CheckSignals()
        if error != 0 and error != EAGAIN and error != EINTR and error != ETIMEDOUT:
            raise OSError(error, f"futex: {os.strerror(error)}")
        return 0

    def close(self, on_released=None):
        """End all waits and let go of the memory, now or when the last waiter has left; then call `on_released`."""
        if nnfmq_is_closing(&self.event):
            return
        self.on_released = on_released
        nnfmq_set_closing(&self.event)
        if self.waiters:
            nnfmq_event_wake_all(&self.event)
        else:
            self.finish()

    cdef int finish(self) except -1:
        on_released, self.on_released = self.on_released, None
        self.release()
        if on_released is not None:
            on_released()
        return 0

    cdef void release(self) noexcept:
        if self.has_region:
            PyBuffer_Release(&self.region)
        if self.has_flag:
            PyBuffer_Release(&self.flag)
        self.has_region = self.has_flag = False

    def __dealloc__(self):
        self.release()


cdef class Ring:
    """Counters and records of one queue; `event` is where its two sides wait, or None."""

    cdef nnfmq_ring ring
    cdef Py_buffer region
    cdef bint is_open
    cdef EventWord event
    cdef object on_released

    def __cinit__(self, region, layout, EventWord event, bint shared=True):
        # `shared` is for the twin: these accesses are ordered between processes on every machine.
        PyObject_GetBuffer(region, &self.region, PyBUF_SIMPLE | PyBUF_WRITABLE)
        self.is_open = True
        self.event = event
        for name, offset, size in (("read counter", layout.read_counter, 8), ("write counter", layout.write_counter, 8),
                                   ("ring", layout.ring, layout.ring_bytes)):
            if offset < 0 or size <= 0 or offset + size > self.region.len or (<uintptr_t>self.region.buf + offset) % 8:
                raise InvalidArgument(f"{name} at offset {offset} of {self.region.len} bytes: outside or misaligned")
        if layout.quantum <= 0 or layout.ring_bytes % layout.quantum:
            raise InvalidArgument(f"ring of {layout.ring_bytes} bytes is no multiple of quantum {layout.quantum}")
        nnfmq_set_ring(&self.ring, <unsigned char *>self.region.buf, layout.read_counter, layout.write_counter,
                       layout.ring, layout.ring_bytes, layout.quantum)

    cdef int check_open(self) except -1:
        if not self.is_open or (self.event is not None and nnfmq_is_closing(&self.event.event)):
            raise InvalidArgument("the queue is closed")
        return 0

    cdef EventWord waiting_place(self):
        self.check_open()
        if self.event is None:
            raise InvalidArgument("this queue has no event word: only write and read without waiting are possible")
        return self.event

    def reset(self):
        """Zero both counters."""
        self.check_open()
        nnfmq_reset(&self.ring)

    def counters(self):
        """Return (write counter, read counter) in bytes, for messages and tools."""
        cdef nnfmq_look look
        self.check_open()
        nnfmq_begin_write(&self.ring, &look)
        return look.w, look.r

    def available_to_read(self):
        self.check_open()
        return nnfmq_readable_bytes(&self.ring) // self.ring.quantum

    def available_to_write(self):
        cdef uint64_t used
        self.check_open()
        used = nnfmq_readable_bytes(&self.ring)
        return 0 if used > self.ring.ring_bytes else (self.ring.ring_bytes - used) // self.ring.quantum

    # ---- one try, never waits ----

    cdef int try_write(self, const Py_buffer *data, bint strict) except -1:
        cdef nnfmq_look look
        cdef uint64_t size = <uint64_t>data.len
        cdef int answer
        self.check_open()
        if size % self.ring.quantum:
            raise InvalidArgument(f"{size} bytes are no whole number of records of {self.ring.quantum} bytes")
        answer = nnfmq_begin_write(&self.ring, &look)
        if strict and answer == NNFMQ_CORRUPTED:
            self.corrupted(&look)
        if size > look.bytes or look.w % self.ring.quantum:
            return 0
        nnfmq_commit_write(&self.ring, look.w, data.buf, size)
        return 1

    cdef object try_read(self, uint64_t size, bint strict):
        cdef nnfmq_look look
        if nnfmq_begin_read(&self.ring, &look) == NNFMQ_CORRUPTED:
            return self.corrupted(&look) if strict else None
        return self.take(look.r, size) if look.bytes >= size else None

    cdef bytes take(self, uint64_t r, uint64_t size):
        cdef bytes data = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>size)
        nnfmq_copy_out(&self.ring, r, PyBytes_AS_STRING(data), size)
        nnfmq_commit_read(&self.ring, r, size)
        return data

    cdef object corrupted(self, const nnfmq_look *look):
        raise QueueCorrupted(f"write counter {look.w}, read counter {look.r}: impossible in a ring of "
                             f"{self.ring.ring_bytes} bytes with records of {self.ring.quantum} bytes")

    cdef uint64_t record_bytes(self, n) except? 0:
        if n < 0:
            raise InvalidArgument(f"{n} records; a read takes 0 or more")
        self.check_open()
        return min(n, self.ring.ring_bytes // self.ring.quantum + 1) * self.ring.quantum

    def write(self, data):
        cdef Py_buffer source
        PyObject_GetBuffer(data, &source, PyBUF_SIMPLE)
        try:
            return self.try_write(&source, False) != 0
        finally:
            PyBuffer_Release(&source)

    def read(self, n):
        return self.try_read(self.record_bytes(n), False)

    def send(self, data):
        cdef EventWord event = self.waiting_place()
        cdef Py_buffer source
        PyObject_GetBuffer(data, &source, PyBUF_SIMPLE)
        try:
            if not self.try_write(&source, True):
                return False
        finally:
            PyBuffer_Release(&source)
        nnfmq_event_wake(&event.event, NNFMQ_NOT_EMPTY)
        return True

    def drain(self):
        cdef nnfmq_look look
        self.check_open()
        if nnfmq_begin_read(&self.ring, &look) == NNFMQ_CORRUPTED:
            self.corrupted(&look)
        nnfmq_commit_read(&self.ring, look.r, look.bytes)
        if self.event is not None:
            nnfmq_event_wake(&self.event.event, NNFMQ_NOT_FULL)
        return look.bytes // self.ring.quantum

    # ---- waiting ----

    def receive(self, deadline_ns, int64_t window_ns):
        cdef EventWord event = self.waiting_place()
        cdef int64_t deadline = as_deadline(deadline_ns)
        event.enter()
        try:
            return self.receive_all(event, deadline, window_ns)
        finally:
            event.leave()

    cdef object receive_all(self, EventWord event, int64_t deadline, int64_t window):
        cdef nnfmq_look look
        cdef bytes data
        while True:
            event.check_stop()
            if nnfmq_begin_read(&self.ring, &look) == NNFMQ_CORRUPTED:
                self.corrupted(&look)
            if look.bytes:
                data = self.take(look.r, look.bytes)
                nnfmq_event_wake(&event.event, NNFMQ_NOT_FULL)
                return data
            if not self.wait_ready(event, NNFMQ_READER, self.ring.quantum, deadline, window):
                return None

    def read_blocking(self, n, deadline_ns):
        cdef EventWord event = self.waiting_place()
        cdef int64_t deadline = as_deadline(deadline_ns)
        cdef uint64_t size = self.record_bytes(n)
        event.enter()
        try:
            return self.read_waiting(event, size, deadline) if size <= self.ring.ring_bytes else None
        finally:
            event.leave()

    cdef object read_waiting(self, EventWord event, uint64_t size, int64_t deadline):
        while True:
            event.check_stop()
            data = self.try_read(size, True)
            if data is not None:
                nnfmq_event_wake(&event.event, NNFMQ_NOT_FULL)
                return data
            if not self.wait_ready(event, NNFMQ_READER, size, deadline, 0):
                return None

    def write_blocking(self, data, deadline_ns):
        cdef EventWord event = self.waiting_place()
        cdef int64_t deadline = as_deadline(deadline_ns)
        cdef Py_buffer source
        PyObject_GetBuffer(data, &source, PyBUF_SIMPLE)
        try:
            event.enter()
            try:
                return self.write_waiting(event, &source, deadline)
            finally:
                event.leave()
        finally:
            PyBuffer_Release(&source)

    cdef bint write_waiting(self, EventWord event, const Py_buffer *source, int64_t deadline) except -1:
        while True:
            event.check_stop()
            if self.try_write(source, True):
                nnfmq_event_wake(&event.event, NNFMQ_NOT_EMPTY)
                return True
            if <uint64_t>source.len > self.ring.ring_bytes:
                return False
            if not self.wait_ready(event, NNFMQ_WRITER, <uint64_t>source.len, deadline, 0):
                return False

    cdef bint wait_ready(self, EventWord event, int side, uint64_t size, int64_t deadline, int64_t window) except -1:
        """Return True when a try is worth while (or a wait must stop), False when the deadline passed."""
        cdef int64_t now = nnfmq_now()
        cdef int64_t spin_end = min(later(now, window), deadline)
        if now >= deadline:
            return nnfmq_is_ready(&self.ring, side, size)
        if now < spin_end and self.spin(event, side, size, now, spin_end):
            return True
        return self.sleep(event, side, size, deadline)

    cdef bint spin(self, EventWord event, int side, uint64_t size, int64_t now, int64_t spin_end) except -1:
        cdef int found = nnfmq_spin(&self.ring, &event.event, side, size, min(now + GIL_HELD_NS, spin_end))
        cdef int64_t slice_end
        while not found:
            now = nnfmq_now()
            if now >= spin_end:
                break
            slice_end = min(now + SPIN_SLICE_NS, spin_end)
            with nogil:
                found = nnfmq_spin(&self.ring, &event.event, side, size, slice_end)
            PyErr_CheckSignals()
        return found

    cdef bint sleep(self, EventWord event, int side, uint64_t size, int64_t deadline) except -1:
        cdef int error
        while nnfmq_now() < deadline:
            with nogil:
                error = nnfmq_sleep(&self.ring, &event.event, side, size, deadline)
            event.after_futex(error)
            if nnfmq_is_ready(&self.ring, side, size) or nnfmq_is_stopped(&event.event):
                return True
        return nnfmq_is_ready(&self.ring, side, size) or nnfmq_is_stopped(&event.event)

    # ---- lifetime ----

    def close(self, on_released=None):
        """Let go of the memory, now or when the last waiter has left; then call `on_released`."""
        if not self.is_open:
            return
        self.on_released = on_released
        if self.event is None:
            self.finish()
        else:
            self.event.close(self.finish)

    def finish(self):
        on_released, self.on_released = self.on_released, None
        if self.is_open:
            self.is_open = False
            PyBuffer_Release(&self.region)
        if on_released is not None:
            on_released()

    def __dealloc__(self):
        if self.is_open:
            PyBuffer_Release(&self.region)
