# cython: language_level=3, embedsignature=True, binding=False
"""The compiled core: EventFlagWord and Ring over `_atomics.h`. `_pycore.py` is the same in plain Python, and its specification.

The GIL is held through every call that does not wait and for the first 2 µs of a wait (taking it back can cost 5 ms
beside a thread that computes), then released. While it is released only plain C runs, on memory that cannot go away:
closing is left to the last waiter. Signals are served after each slice of a spin and each return of the futex.
"""

cimport cython
from cpython.bytes cimport (
    PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
)
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.exc cimport PyErr_CheckSignals
from libc.errno cimport EAGAIN, EINTR, ETIMEDOUT
from libc.stdint cimport INT64_MAX, int64_t, uint16_t, uint32_t, uint64_t, uintptr_t

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
    ctypedef struct nnfmq_wait_estimator:
        int64_t mean, deviation, wakeup_delay, samples, early_arrivals
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
    int nnfmq_commit_unless_lapped(const nnfmq_ring *q, uint64_t r, uint64_t size)
    int nnfmq_begin_write(const nnfmq_ring *q, nnfmq_look *look)
    int nnfmq_begin_overwrite(const nnfmq_ring *q, nnfmq_look *look)
    void nnfmq_commit_write(const nnfmq_ring *q, uint64_t w, const void *source, uint64_t size)
    void nnfmq_publish(const nnfmq_ring *q, uint64_t w, uint64_t size)
    int nnfmq_is_ready(const nnfmq_ring *q, int side, uint64_t size)
    void nnfmq_announce(const nnfmq_ring *q, uint64_t w, uint64_t size)
    int nnfmq_poll(const nnfmq_ring *q, const nnfmq_event *event, int side, uint64_t size, int64_t until_ns)
    void nnfmq_publish_cpu(const nnfmq_ring *q, uint16_t *published)
    int nnfmq_writer_is_here(const nnfmq_ring *q)
    int nnfmq_nap(const nnfmq_ring *q, const nnfmq_event *event, int side, uint64_t size, int64_t deadline_ns)
    const int NNFMQ_POLL, NNFMQ_SLEEP
    int64_t nnfmq_next_action(const nnfmq_wait_estimator *f, int64_t now, int64_t window_ns)
    void nnfmq_add_wait(nnfmq_wait_estimator *f, int64_t waited)
    void nnfmq_add_wakeup(nnfmq_wait_estimator *f, int64_t planned, int64_t now, int found)
    int nnfmq_sleep(const nnfmq_ring *q, const nnfmq_event *event, int side, uint64_t size, int64_t deadline_ns)
    int nnfmq_arm(const nnfmq_ring *q, const nnfmq_event *event, int side, uint64_t size, uint32_t *expected)
    int nnfmq_sleep_on(const nnfmq_ring *q, const nnfmq_event *event, const nnfmq_event *guard, int side, uint64_t size,
                       int64_t deadline_ns, uint32_t mask)

cdef extern from "sched.h" nogil:
    int sched_yield()

cdef extern from *:
    """
    /* Cython knows no atomic types; these lend it addresses and flags without casting the qualifiers away there. */
    #define nnfmq_set_word(e, address) ((e)->word = (_Atomic uint32_t *)(address))
    #define nnfmq_set_dead(e, address) ((e)->dead = (const _Atomic uint32_t *)(address))
    #define nnfmq_set_closing(e) atomic_store_explicit(&(e)->closing, 1, memory_order_release)
    #define nnfmq_is_closing(e) (atomic_load_explicit(&(e)->closing, memory_order_relaxed) != 0)
    #define nnfmq_set_ring(q, r, w, data, size, record, kept) \\
        ((q)->read_counter = (_Atomic uint64_t *)(r), (q)->write_counter = (_Atomic uint64_t *)(w), \\
         (q)->ring = (data), (q)->ring_bytes = (size), (q)->quantum = (record), (q)->history_bytes = (kept))
    #define nnfmq_set_intent(q, address) ((q)->intent = (_Atomic uint64_t *)(address))
    #define nnfmq_set_writer_cpu(q, address) ((q)->writer_cpu = (_Atomic uint16_t *)(address))
    #define nnfmq_address_of(e) ((uintptr_t)(e)->word)
    #define nnfmq_event_wake(e, mask) nnfmq_wake((e)->word, mask)
    #define nnfmq_event_wake_all(e) nnfmq_wake_all((e)->word)
    """
    void nnfmq_set_word(nnfmq_event *event, void *address) nogil
    void nnfmq_set_dead(nnfmq_event *event, void *address) nogil
    void nnfmq_set_closing(nnfmq_event *event) nogil
    bint nnfmq_is_closing(nnfmq_event *event) nogil
    void nnfmq_set_ring(nnfmq_ring *q, void *r, void *w, unsigned char *data, uint64_t size, uint64_t record,
                        uint64_t kept) nogil
    void nnfmq_set_intent(nnfmq_ring *q, void *address) nogil
    void nnfmq_set_writer_cpu(nnfmq_ring *q, void *address) nogil
    uintptr_t nnfmq_address_of(const nnfmq_event *event) nogil
    long nnfmq_event_wake(const nnfmq_event *event, uint32_t mask) nogil
    long nnfmq_event_wake_all(const nnfmq_event *event) nogil

cdef int64_t FIRST_LOOK_NS = 2_000  # before a wait is planned, and with the GIL held
cdef int64_t SPIN_SLICE_NS = 10_000_000  # signals are served this often in a long spin


cdef int64_t as_deadline(object deadline_ns) except? -2:
    return NNFMQ_NO_DEADLINE if deadline_ns is None else max(0, min(deadline_ns, NNFMQ_NO_DEADLINE - 1))


cdef inline int64_t later(int64_t start, int64_t duration) noexcept:
    return start + duration if duration < INT64_MAX - start else INT64_MAX


@cython.final
cdef class EventFlagWord:
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
        """Test the word `dead` (a PeerDeathFlag's buffer) in every wait from now on."""
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


@cython.final
cdef class Ring:
    """Counters and records of one queue; `event` is where its two sides wait, or None."""

    cdef nnfmq_ring ring
    cdef EventFlagWord event
    cdef EventFlagWord guard  # counts who is inside, so that the memory stays; the event word where there is one
    cdef bint is_open, is_lossy, is_read_only
    cdef list visited  # words of others on which somebody waits here
    cdef object on_released
    cdef Py_buffer parts[3]  # the memory of the read counter, the write counter and the ring
    cdef uint64_t own_position  # of an unsynchronized reader
    cdef nnfmq_wait_estimator estimator
    cdef Py_buffer event_memory
    cdef uint16_t own_cpu_hint  # where the memory has no place for one
    cdef uint16_t published_cpu
    cdef int64_t write_at, write_size, read_at, read_size  # of the open transactions; size -1 = none

    def __cinit__(self, region, layout, EventFlagWord event, bint shared=True, *, tuple others=(), EventFlagWord guard=None,
                  bint lossy=False, uint64_t history_bytes=0):
        # `shared` is for the Python core: these accesses are ordered between processes on every machine.
        self.is_open, self.is_lossy = True, lossy
        self.event = event
        self.guard = event if event is not None else guard
        self.visited = []
        self.write_size = self.read_size = -1
        regions = (region, *others)
        if layout.quantum <= 0 or layout.ring_bytes % layout.quantum:
            raise InvalidArgument(f"ring of {layout.ring_bytes} bytes is no multiple of quantum {layout.quantum}")
        r = self.place(0, regions[layout.fds[0]], "read counter", layout.read_counter, 8)
        w = self.place(1, regions[layout.fds[1]], "write counter", layout.write_counter, 8)
        data = self.place(2, regions[layout.fds[2]], "ring", layout.ring, layout.ring_bytes)
        nnfmq_set_intent(&self.ring, <void *><uintptr_t>r if lossy else NULL)
        self.place_hint(regions[layout.fds[3]], None if event is None else layout.writer_cpu)
        nnfmq_set_ring(&self.ring, &self.own_position if lossy else <void *><uintptr_t>r, <void *><uintptr_t>w,
                       <unsigned char *><uintptr_t>data, layout.ring_bytes, layout.quantum, history_bytes)

    cdef object place(self, int part, region, name, offset, size):
        """Hold the memory of one part; return the part's address."""
        cdef Py_buffer *held = &self.parts[part]
        PyObject_GetBuffer(region, held, PyBUF_SIMPLE if self.is_lossy else PyBUF_SIMPLE | PyBUF_WRITABLE)
        self.is_read_only = self.is_read_only or held.readonly
        if offset < 0 or size <= 0 or offset + size > held.len or (<uintptr_t>held.buf + offset) % 8:
            raise InvalidArgument(f"{name} at offset {offset} of {held.len} bytes: outside or misaligned")
        return <uintptr_t>held.buf + offset

    cdef int place_hint(self, region, offset) except -1:
        nnfmq_set_writer_cpu(&self.ring, &self.own_cpu_hint)
        if offset is None:
            return 0
        PyObject_GetBuffer(region, &self.event_memory, PyBUF_SIMPLE | PyBUF_WRITABLE)
        if offset < 0 or offset + 2 > self.event_memory.len or offset % 2:
            raise InvalidArgument(f"CPU hint at offset {offset} of {self.event_memory.len} bytes: outside or misaligned")
        nnfmq_set_writer_cpu(&self.ring, <unsigned char *>self.event_memory.buf + <Py_ssize_t>offset)
        return 0

    cdef void release(self) noexcept:
        cdef int part
        PyBuffer_Release(&self.event_memory)
        for part in range(3):
            PyBuffer_Release(&self.parts[part])  # does nothing where it was never had

    cdef int check_open(self) except -1:
        if not self.is_open or (self.guard is not None and nnfmq_is_closing(&self.guard.event)):
            raise InvalidArgument("the queue is closed")
        return 0

    cdef int check_can_wait(self) except -1:
        self.check_open()
        if self.is_lossy:
            raise InvalidArgument("an unsynchronized queue has no calls that wait or wake")
        return 0

    cdef EventFlagWord waiting_place(self):
        self.check_open()
        if self.event is None:
            self.check_can_wait()
            raise InvalidArgument("this queue has no event word: only write and read without waiting are possible")
        return self.event

    cdef int check_writable(self) except -1:
        self.check_open()
        if self.is_read_only:
            raise InvalidArgument("this queue is mapped for reading only")
        return 0

    def reset(self):
        """Zero both counters."""
        self.check_writable()
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

    cdef int try_write(self, const void *data, uint64_t size, bint strict) except -1:
        cdef nnfmq_look look
        cdef int answer
        self.check_open()
        if size % self.ring.quantum:
            raise InvalidArgument(f"{size} bytes are no whole number of records of {self.ring.quantum} bytes")
        answer = nnfmq_begin_write(&self.ring, &look)
        if strict and answer == NNFMQ_CORRUPTED:
            self.corrupted(&look)
        if size > look.bytes or look.w % self.ring.quantum:
            return 0
        nnfmq_commit_write(&self.ring, look.w, data, size)
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
            return (self.overwrite(&source) if self.is_lossy else self.try_write(source.buf, source.len, False)) != 0
        finally:
            PyBuffer_Release(&source)

    cdef int overwrite(self, const Py_buffer *data) except -1:
        cdef nnfmq_look look
        self.check_writable()
        if data.len % self.ring.quantum:
            raise InvalidArgument(f"{data.len} bytes are no whole number of records of {self.ring.quantum} bytes")
        if nnfmq_begin_overwrite(&self.ring, &look) != NNFMQ_DONE or <uint64_t>data.len > look.bytes:
            return 0
        nnfmq_announce(&self.ring, look.w, data.len)
        nnfmq_commit_write(&self.ring, look.w, data.buf, data.len)
        return 1

    def read(self, n):
        cdef uint64_t size = self.record_bytes(n)
        return self.read_lossy(size) if self.is_lossy else self.try_read(size, False)

    def read_into(self, out):
        """Take as many records as fill `out`, or none: False where there are fewer."""
        cdef Py_buffer target
        PyObject_GetBuffer(out, &target, PyBUF_SIMPLE | PyBUF_WRITABLE)
        try:
            self.check_open()
            if target.len % self.ring.quantum:
                raise InvalidArgument(
                    f"{target.len} bytes are no whole number of records of {self.ring.quantum} bytes"
                )
            return self.take_into(&target)
        finally:
            PyBuffer_Release(&target)

    cdef bint take_into(self, const Py_buffer *target):
        cdef nnfmq_look look
        if nnfmq_begin_read(&self.ring, &look) != NNFMQ_DONE or look.bytes < <uint64_t>target.len:
            return False
        nnfmq_copy_out(&self.ring, look.r, target.buf, target.len)
        if self.is_lossy:
            return nnfmq_commit_unless_lapped(&self.ring, look.r, target.len)
        nnfmq_commit_read(&self.ring, look.r, target.len)
        return True

    cdef object read_lossy(self, uint64_t size):
        cdef nnfmq_look look
        cdef bytes data
        if nnfmq_begin_read(&self.ring, &look) != NNFMQ_DONE or look.bytes < size:
            return None
        data = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>size)
        nnfmq_copy_out(&self.ring, look.r, PyBytes_AS_STRING(data), size)
        return data if nnfmq_commit_unless_lapped(&self.ring, look.r, size) else None

    def send(self, data, /):
        cdef EventFlagWord event = self.waiting_place()
        cdef Py_buffer source
        if PyBytes_CheckExact(data):
            if not self.try_write(PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data), True):
                return False
        else:
            PyObject_GetBuffer(data, &source, PyBUF_SIMPLE)
            try:
                if not self.try_write(source.buf, source.len, True):
                    return False
            finally:
                PyBuffer_Release(&source)
        nnfmq_publish_cpu(&self.ring, &self.published_cpu)
        nnfmq_event_wake(&event.event, NNFMQ_NOT_EMPTY)
        return True

    def drain(self):
        cdef nnfmq_look look
        self.check_can_wait()
        if nnfmq_begin_read(&self.ring, &look) == NNFMQ_CORRUPTED:
            self.corrupted(&look)
        nnfmq_commit_read(&self.ring, look.r, look.bytes)
        if self.event is not None:
            nnfmq_event_wake(&self.event.event, NNFMQ_NOT_FULL)
        return look.bytes // self.ring.quantum

    # ---- transactions: the ring's bytes are worked on in place, by who asked where ----

    def begin_write(self, n):
        """Return where in the ring `n` records may be written (in bytes), or None where they do not fit."""
        cdef nnfmq_look look
        cdef uint64_t size = self.record_bytes(n)
        self.check_writable()
        self.write_size = -1
        if self.is_lossy:
            nnfmq_begin_overwrite(&self.ring, &look)
        else:
            nnfmq_begin_write(&self.ring, &look)
        if size > look.bytes or look.w % self.ring.quantum:
            return None
        if self.is_lossy:
            nnfmq_announce(&self.ring, look.w, size)
        self.write_at, self.write_size = look.w, size
        return look.w % self.ring.ring_bytes

    def commit_write(self, n):
        """Publish the first `n` of the records that `begin_write` gave room for."""
        cdef nnfmq_look look
        cdef uint64_t size = self.record_bytes(n)
        self.check_granted(n, size, self.write_size, "write")
        self.write_size = -1
        nnfmq_begin_write(&self.ring, &look)
        if look.w != <uint64_t>self.write_at:
            raise QueueCorrupted(f"write counter {look.w}: it was {<uint64_t>self.write_at} when the write began")
        nnfmq_publish(&self.ring, look.w, size)

    cdef int check_granted(self, n, uint64_t size, int64_t granted, str what) except -1:
        if granted < 0:
            raise InvalidArgument(f"commit_{what} without a begin_{what} that succeeded")
        if size > <uint64_t>granted:
            raise InvalidArgument(f"{n} records to commit; begin_{what} gave {granted // self.ring.quantum}")
        return 0

    def begin_read(self, n):
        """Return where in the ring the next `n` records are (in bytes), or None where there are fewer."""
        cdef nnfmq_look look
        cdef uint64_t size = self.record_bytes(n)
        self.read_size = -1
        if nnfmq_begin_read(&self.ring, &look) != NNFMQ_DONE or look.bytes < size:
            return None
        self.read_at, self.read_size = look.r, size
        return look.r % self.ring.ring_bytes

    def commit_read(self, n):
        """Consume the first `n` of the records that `begin_read` gave; False where they were overwritten meanwhile."""
        cdef nnfmq_look look
        cdef uint64_t size = self.record_bytes(n)
        self.check_granted(n, size, self.read_size, "read")
        self.read_size = -1
        nnfmq_begin_write(&self.ring, &look)
        if look.r != <uint64_t>self.read_at:
            raise QueueCorrupted(f"read counter {look.r}: it was {<uint64_t>self.read_at} when the read began")
        return nnfmq_commit_unless_lapped(&self.ring, look.r, size) != 0

    # ---- waiting ----

    def receive(self, deadline_ns, int64_t window_ns, /):
        cdef EventFlagWord event = self.waiting_place()
        cdef nnfmq_look look
        cdef bytes data
        if not self.await_records(event, deadline_ns, window_ns, &look):
            return None
        data = self.take(look.r, look.bytes)
        nnfmq_event_wake(&event.event, NNFMQ_NOT_FULL)
        return data

    def receive_into(self, out, deadline_ns, int64_t window_ns, /):
        """Wait as `receive` does; then take as many records as there are and `out` has room for; return how many."""
        cdef EventFlagWord event = self.waiting_place()
        cdef Py_buffer target
        PyObject_GetBuffer(out, &target, PyBUF_SIMPLE | PyBUF_WRITABLE)
        try:
            return self.receive_what_fits(event, deadline_ns, window_ns, &target)
        finally:
            PyBuffer_Release(&target)

    cdef object receive_what_fits(self, EventFlagWord event, object deadline, int64_t window, const Py_buffer *target):
        cdef nnfmq_look look
        cdef uint64_t size = target.len - target.len % self.ring.quantum
        if not size:
            raise InvalidArgument(f"{target.len} bytes have no room for a record of {self.ring.quantum} bytes")
        if not self.await_records(event, deadline, window, &look):
            return 0
        size = min(size, look.bytes)
        nnfmq_copy_out(&self.ring, look.r, target.buf, size)
        nnfmq_commit_read(&self.ring, look.r, size)
        nnfmq_event_wake(&event.event, NNFMQ_NOT_FULL)
        return size // self.ring.quantum

    cdef bint await_records(self, EventFlagWord event, object deadline_ns, int64_t window, nnfmq_look *look) except -1:
        """Fill in `look` once there is something to read; False once the deadline has passed."""
        return self.look_for_records(event, look) or self.wait_for_records(event, as_deadline(deadline_ns), window, look)

    cdef bint look_for_records(self, EventFlagWord event, nnfmq_look *look) except -1:
        event.check_stop()
        if nnfmq_begin_read(&self.ring, look) == NNFMQ_CORRUPTED:
            self.corrupted(look)
        return look.bytes != 0

    cdef bint wait_for_records(self, EventFlagWord event, int64_t deadline, int64_t window, nnfmq_look *look) except -1:
        event.enter()
        try:
            while self.wait(event, deadline, window):
                if self.look_for_records(event, look):
                    return True
            return False
        finally:
            event.leave()

    def read_blocking(self, n, deadline_ns, EventFlagWord word=None, uint32_t awaited=NNFMQ_NOT_EMPTY,
                      uint32_t woken=NNFMQ_NOT_FULL):
        cdef int64_t deadline = as_deadline(deadline_ns)
        cdef uint64_t size = self.record_bytes(n)
        cdef EventFlagWord event = self.meeting_place(word)
        self.visit(event, awaited)
        try:
            return self.read_waiting(event, size, deadline, awaited, woken) if size <= self.ring.ring_bytes else None
        finally:
            self.depart(event)

    cdef object read_waiting(self, EventFlagWord event, uint64_t size, int64_t deadline, uint32_t awaited, uint32_t woken):
        while True:
            self.check_stop(event)
            data = self.try_read(size, True)
            if data is not None:
                if woken:
                    nnfmq_event_wake(&event.event, woken)
                return data
            if not self.sleep_on(event, NNFMQ_READER, size, deadline, awaited):
                return None

    def write_blocking(self, data, deadline_ns, EventFlagWord word=None, uint32_t awaited=NNFMQ_NOT_FULL,
                       uint32_t woken=NNFMQ_NOT_EMPTY):
        cdef int64_t deadline = as_deadline(deadline_ns)
        cdef EventFlagWord event = self.meeting_place(word)
        cdef Py_buffer source
        PyObject_GetBuffer(data, &source, PyBUF_SIMPLE)
        try:
            self.visit(event, awaited)
            try:
                return self.write_waiting(event, &source, deadline, awaited, woken)
            finally:
                self.depart(event)
        finally:
            PyBuffer_Release(&source)

    cdef bint write_waiting(self, EventFlagWord event, const Py_buffer *source, int64_t deadline, uint32_t awaited,
                            uint32_t woken) except -1:
        while True:
            self.check_stop(event)
            if self.try_write(source.buf, source.len, True):
                if woken:
                    nnfmq_event_wake(&event.event, woken)
                return True
            if <uint64_t>source.len > self.ring.ring_bytes:
                return False
            if not self.sleep_on(event, NNFMQ_WRITER, <uint64_t>source.len, deadline, awaited):
                return False

    cdef EventFlagWord meeting_place(self, EventFlagWord word):
        """Return the word on which this queue's sides wait: `word`, or its own where that is None."""
        if word is None:
            return self.waiting_place()
        self.check_can_wait()
        if self.guard is None:
            raise InvalidArgument("this queue was made without what a wait on another word needs")
        return word

    cdef int visit(self, EventFlagWord event, uint32_t awaited) except -1:
        if not awaited:
            raise InvalidArgument("a blocking call cannot wait for no bit at all")
        self.guard.enter()
        return 0 if event is self.guard else self.visit_other(event)

    cdef int visit_other(self, EventFlagWord event) except -1:
        try:
            event.enter()
        except InvalidArgument:
            self.guard.leave()
            raise
        self.visited.append(event)
        return 0

    cdef int depart(self, EventFlagWord event) except -1:
        return self.guard.leave() if event is self.guard else self.depart_other(event)

    cdef int depart_other(self, EventFlagWord event) except -1:
        try:
            self.visited.remove(event)
            event.leave()
        finally:
            self.guard.leave()
        return 0

    cdef int check_stop(self, EventFlagWord event) except -1:
        self.guard.check_stop()
        if event is not self.guard:
            event.check_stop()
        return 0

    def wake_visitors(self):
        """Wake who waits here on another queue's word, so that it looks at this queue's flags; returns how many slept."""
        return sum([(<EventFlagWord>event).wake_all() for event in self.visited])

    cdef bint wait(self, EventFlagWord event, int64_t deadline, int64_t window) except -1:
        """Return True when a look is worth while (or the wait must stop), False when the deadline passed."""
        cdef int64_t began = nnfmq_now()
        if began >= deadline:
            return self.is_worth_a_look(event)
        if window > 0 and nnfmq_writer_is_here(&self.ring):
            with nogil:
                sched_yield()  # it cannot answer while we run here
            return self.is_worth_a_look(event) or self.sleep(event, deadline)
        if window > 0 and self.poll(event, min(later(began, min(window, FIRST_LOOK_NS)), deadline)):
            return True  # too short to learn from: what is learnt is when not to poll
        return self.wait_as_planned(event, deadline, window, began)

    cdef bint wait_as_planned(self, EventFlagWord event, int64_t deadline, int64_t window, int64_t began) except -1:
        cdef int64_t plan = nnfmq_next_action(&self.estimator, began, window)
        cdef int64_t now = began
        cdef bint found
        if plan > NNFMQ_POLL and self.nap(event, deadline, plan, &now):
            return True
        found = plan != NNFMQ_SLEEP and self.poll_freely(event, now, min(later(now, window), deadline))
        if not found and not self.sleep(event, deadline):
            return False
        nnfmq_add_wait(&self.estimator, nnfmq_now() - began)
        return True

    cdef bint nap(self, EventFlagWord event, int64_t deadline, int64_t until, int64_t *now) except -1:
        """Sleep until a record is due; True if there is one already. *now is when it ended."""
        cdef int64_t end = min(until, deadline)
        cdef int error
        cdef bint found = False
        now[0] = nnfmq_now()
        while now[0] < end and not found:
            with nogil:
                error = nnfmq_nap(&self.ring, &event.event, NNFMQ_READER, self.ring.quantum, end)
            event.after_futex(error)
            found = self.is_worth_a_look(event)
            now[0] = nnfmq_now()
        nnfmq_add_wakeup(&self.estimator, until, now[0], found)
        return found

    cdef bint poll_freely(self, EventFlagWord event, int64_t now, int64_t until) except -1:
        """Poll without the GIL; signals are served between."""
        cdef bint found = False
        cdef int64_t slice_end
        while not found and now < until:
            slice_end = min(now + SPIN_SLICE_NS, until)
            with nogil:
                found = nnfmq_poll(&self.ring, &event.event, NNFMQ_READER, self.ring.quantum, slice_end)
            PyErr_CheckSignals()
            now = nnfmq_now()
        return found

    cdef bint poll(self, EventFlagWord event, int64_t until):
        """Poll with the GIL held: for a moment only."""
        return nnfmq_poll(&self.ring, &event.event, NNFMQ_READER, self.ring.quantum, until)

    cdef bint is_worth_a_look(self, EventFlagWord event):
        return nnfmq_is_ready(&self.ring, NNFMQ_READER, self.ring.quantum) or nnfmq_is_stopped(&event.event)

    cdef bint sleep(self, EventFlagWord event, int64_t deadline) except -1:
        cdef int error
        while nnfmq_now() < deadline:
            with nogil:
                error = nnfmq_sleep(&self.ring, &event.event, NNFMQ_READER, self.ring.quantum, deadline)
            event.after_futex(error)
            if self.is_worth_a_look(event):
                return True
        return self.is_worth_a_look(event)

    cdef bint sleep_on(self, EventFlagWord event, int side, uint64_t size, int64_t deadline, uint32_t mask) except -1:
        """Return True when a try is worth while (or a wait must stop), False when the deadline passed."""
        cdef int error
        while nnfmq_now() < deadline:
            with nogil:
                error = nnfmq_sleep_on(&self.ring, &event.event, &self.guard.event, side, size, deadline, mask)
            event.after_futex(error)
            if self.is_worth_a_try(event, side, size):
                return True
        return self.is_worth_a_try(event, side, size)

    cdef bint is_worth_a_try(self, EventFlagWord event, int side, uint64_t size):
        return (nnfmq_is_ready(&self.ring, side, size) or nnfmq_is_stopped(&event.event)
                or nnfmq_is_stopped(&self.guard.event))

    # ---- waiting elsewhere: who sleeps on the word by other means does what `sleep` does, in these steps ----

    def admit(self):
        """Count a waiter in until `dismiss`; return the address of the word on which it may sleep."""
        cdef EventFlagWord event = self.waiting_place()
        event.enter()
        return nnfmq_address_of(&event.event)

    def arm(self, int side, uint64_t size):
        """Consume the bit of `side`, look again; return the word to sleep on, or None where a try is worth while."""
        cdef uint32_t expected
        return expected if nnfmq_arm(&self.ring, &self.event.event, side, size, &expected) else None

    def dismiss(self):
        """Count a waiter out that was admitted; the last one of a queue that was closed lets go of the memory."""
        self.event.leave()

    # ---- lifetime ----

    def close(self, on_released=None):
        """Let go of the memory, now or when the last waiter has left; then call `on_released`."""
        if not self.is_open:
            return
        self.on_released = on_released
        visited = list(self.visited)
        if self.guard is None:
            self.finish()
        else:
            self.guard.close(self.finish)
        for event in visited:
            (<EventFlagWord>event).wake_all()

    def finish(self):
        on_released, self.on_released = self.on_released, None
        if self.is_open:
            self.is_open = False
            self.release()
        if on_released is not None:
            on_released()

    def __dealloc__(self):
        self.release()
