# cython: language_level=3, embedsignature=True, binding=False
"""The compiled core: EventFlagWord, Ring and Responder over `_atomics.h`. `_pycore.py` is its specification.

Docstrings are there; comments here explain what only this core does.

Non-blocking calls keep the GIL, and so does the first 2 µs of a wait: to acquire it again can take 5 ms while another
thread computes (sys.getswitchinterval). Then it is released. Without the GIL only C code runs, on memory that stays
mapped: `waiters`, the in-use count, is incremented before, and `close` leaves the release to the last waiter.

Python's signal handlers run after each slice of a poll and after each return of the futex. They may raise; every path
out of a wait therefore goes through `finally`.
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

from nnfmq.hal.errors import BadState, DeadObject, InvalidArgument, QueueCorrupted

cdef extern from "_atomics.h" nogil:
    ctypedef struct nnfmq_event:
        pass
    ctypedef struct nnfmq_ring:
        uint64_t ring_bytes
        uint64_t quantum
    ctypedef struct nnfmq_counters:
        uint64_t w, r, bytes
    ctypedef struct nnfmq_wait_estimator:
        int64_t mean, deviation, wakeup_delay, samples, early_arrivals, stopped_polls
    const int64_t NNFMQ_NO_DEADLINE
    const uint32_t NNFMQ_NOT_FULL, NNFMQ_NOT_EMPTY
    const int NNFMQ_OK, NNFMQ_CORRUPTED, NNFMQ_READER, NNFMQ_WRITER
    int64_t nnfmq_now()
    int nnfmq_is_cancelled(const nnfmq_event *event)
    int nnfmq_wait_bits(const nnfmq_event *event, uint32_t mask, int64_t deadline_ns, uint32_t *bits)
    void nnfmq_reset(const nnfmq_ring *q)
    uint64_t nnfmq_readable_bytes(const nnfmq_ring *q)
    int nnfmq_begin_read(const nnfmq_ring *q, nnfmq_counters *counters)
    void nnfmq_copy_out(const nnfmq_ring *q, uint64_t r, void *target, uint64_t size)
    void nnfmq_commit_read(const nnfmq_ring *q, uint64_t r, uint64_t size)
    int nnfmq_commit_if_intact(const nnfmq_ring *q, uint64_t r, uint64_t size)
    int nnfmq_begin_write(const nnfmq_ring *q, nnfmq_counters *counters)
    int nnfmq_begin_unsynchronized_write(const nnfmq_ring *q, nnfmq_counters *counters)
    void nnfmq_commit_write(const nnfmq_ring *q, uint64_t w, const void *source, uint64_t size)
    void nnfmq_publish(const nnfmq_ring *q, uint64_t w, uint64_t size)
    int nnfmq_is_ready(const nnfmq_ring *q, int side, uint64_t size)
    void nnfmq_reserve(const nnfmq_ring *q, uint64_t w, uint64_t size)
    int nnfmq_poll(const nnfmq_ring *q, const nnfmq_event *event, int side, uint64_t size, int64_t until_ns)
    void nnfmq_publish_cpu(const nnfmq_ring *q, uint16_t *published)
    int nnfmq_is_writer_on_this_cpu(const nnfmq_ring *q)
    int nnfmq_timed_sleep(const nnfmq_ring *q, const nnfmq_event *event, int side, uint64_t size, int64_t deadline_ns)
    const int NNFMQ_POLL, NNFMQ_SLEEP
    int64_t nnfmq_next_action(const nnfmq_wait_estimator *f, int64_t now, int64_t window_ns)
    int64_t nnfmq_poll_end(const nnfmq_wait_estimator *f, int64_t began, int64_t now, int64_t window_ns)
    int nnfmq_must_stop_polling(const nnfmq_wait_estimator *f, int64_t yield_ns, int64_t window_ns)
    void nnfmq_add_poll(nnfmq_wait_estimator *f, int is_stopped)
    void nnfmq_add_wait(nnfmq_wait_estimator *f, int64_t waited)
    void nnfmq_add_wakeup(nnfmq_wait_estimator *f, int64_t planned, int64_t now, int found)
    int nnfmq_sleep(const nnfmq_ring *q, const nnfmq_event *event, int side, uint64_t size, int64_t deadline_ns)
    int nnfmq_prepare_to_wait(const nnfmq_ring *q, const nnfmq_event *event, int side, uint64_t size,
                              uint32_t *expected)
    int nnfmq_sleep_on(const nnfmq_ring *q, const nnfmq_event *event, const nnfmq_event *lifetime, int side,
                       uint64_t size, int64_t deadline_ns, uint32_t mask)

cdef extern from "sched.h" nogil:
    int sched_yield()

cdef extern from *:
    """
    /* Cython has no atomic types; these macros convert addresses and access flags without casts that drop _Atomic. */
    #define nnfmq_set_word(e, address) ((e)->word = (_Atomic uint32_t *)(address))
    #define nnfmq_set_peer_death(e, address) ((e)->peer_death = (const _Atomic uint32_t *)(address))
    #define nnfmq_set_closing(e) atomic_store_explicit(&(e)->closing, 1, memory_order_release)
    #define nnfmq_is_closing(e) (atomic_load_explicit(&(e)->closing, memory_order_relaxed) != 0)
    #define nnfmq_set_ring(q, r, w, data, size, record, kept) \\
        ((q)->read_counter = (_Atomic uint64_t *)(r), (q)->write_counter = (_Atomic uint64_t *)(w), \\
         (q)->ring = (data), (q)->ring_bytes = (size), (q)->quantum = (record), (q)->history_bytes = (kept))
    #define nnfmq_set_reserved_counter(q, address) ((q)->reserved_counter = (_Atomic uint64_t *)(address))
    #define nnfmq_set_writer_cpu(q, address) ((q)->writer_cpu = (_Atomic uint16_t *)(address))
    #define nnfmq_count_one(word) \\
        atomic_store_explicit((_Atomic uint64_t *)(word), \\
                              atomic_load_explicit((_Atomic uint64_t *)(word), memory_order_relaxed) + 1, \\
                              memory_order_relaxed)
    #define nnfmq_address_of(e) ((uintptr_t)(e)->word)
    #define nnfmq_event_wake(e, mask) nnfmq_wake((e)->word, mask)
    #define nnfmq_event_wake_all(e) nnfmq_wake_all((e)->word)
    """
    void nnfmq_set_word(nnfmq_event *event, void *address) nogil
    void nnfmq_set_peer_death(nnfmq_event *event, void *address) nogil
    void nnfmq_set_closing(nnfmq_event *event) nogil
    bint nnfmq_is_closing(nnfmq_event *event) nogil
    void nnfmq_set_ring(nnfmq_ring *q, void *r, void *w, unsigned char *data, uint64_t size, uint64_t record,
                        uint64_t kept) nogil
    void nnfmq_set_reserved_counter(nnfmq_ring *q, void *address) nogil
    void nnfmq_set_writer_cpu(nnfmq_ring *q, void *address) nogil
    void nnfmq_count_one(uint64_t *word) nogil
    uintptr_t nnfmq_address_of(const nnfmq_event *event) nogil
    long nnfmq_event_wake(const nnfmq_event *event, uint32_t mask) nogil
    long nnfmq_event_wake_all(const nnfmq_event *event) nogil

cdef int64_t FIRST_POLL_NS = 2_000  # polling before the estimator is consulted, with the GIL
cdef int64_t SPIN_SLICE_NS = 10_000_000  # of polling without the GIL, after which signal handlers run
cdef int64_t YIELD_PERIOD_NS = 5_000  # of polling without the GIL, after which another thread may have the CPU
cdef enum:  # words of `count_waits`
    RECEIVED, POLLED, SLEPT, WAIT_WORDS


cdef int64_t as_deadline(object deadline_ns) except? -2:
    return NNFMQ_NO_DEADLINE if deadline_ns is None else max(0, min(deadline_ns, NNFMQ_NO_DEADLINE - 1))


cdef inline int64_t later(int64_t start, int64_t duration) noexcept:
    return start + duration if duration < INT64_MAX - start else INT64_MAX


@cython.final
cdef class EventFlagWord:
    """An event flag: one futex word in shared memory, and the private flags that cancel waits on it."""

    cdef nnfmq_event event
    cdef Py_buffer region
    cdef Py_buffer flag
    cdef bint has_region, has_flag
    cdef object on_released
    cdef readonly Py_ssize_t waiters

    def __cinit__(self, region, Py_ssize_t offset, peer_death):
        PyObject_GetBuffer(region, &self.region, PyBUF_SIMPLE | PyBUF_WRITABLE)
        self.has_region = True
        if offset < 0 or offset > self.region.len - 4 or (<uintptr_t>self.region.buf + <size_t>offset) % 4:
            raise InvalidArgument(
                f"event flag word at offset {offset} of {self.region.len} bytes: outside or misaligned"
            )
        nnfmq_set_word(&self.event, <unsigned char *>self.region.buf + offset)
        self.set_peer_death(peer_death)

    def set_peer_death(self, flag):
        """Use another peer death flag (the buffer of a `PeerDeathFlag`)."""
        if self.waiters:
            raise InvalidArgument("the peer death flag cannot be changed while a thread waits")
        cdef Py_buffer buffer
        PyObject_GetBuffer(flag, &buffer, PyBUF_SIMPLE)
        if buffer.len < 4 or <uintptr_t>buffer.buf % 4:
            PyBuffer_Release(&buffer)
            raise InvalidArgument("a peer death flag is an aligned word of 4 bytes")
        if self.has_flag:
            PyBuffer_Release(&self.flag)
        self.flag = buffer
        self.has_flag = True
        nnfmq_set_peer_death(&self.event, self.flag.buf)

    cdef int acquire(self) except -1:
        if nnfmq_is_closing(&self.event):
            raise BadState("the queue is closed")
        self.waiters += 1
        return 0

    cdef int release_use(self) except -1:
        self.waiters -= 1
        if not self.waiters and nnfmq_is_closing(&self.event):
            self.finish_close()
        return 0

    cdef int raise_if_cancelled(self) except -1:
        if nnfmq_is_cancelled(&self.event):
            if nnfmq_is_closing(&self.event):
                raise BadState("the queue was closed during the wait")
            raise DeadObject("the process at the other end of the queue is gone")
        return 0

    cdef int check_open(self) except -1:
        if nnfmq_is_closing(&self.event):
            raise BadState("the queue is closed")
        return 0

    def wake(self, uint32_t mask):
        """OR `mask` into the word and wake the threads that wait for one of its bits; return how many slept."""
        self.check_open()
        return nnfmq_event_wake(&self.event, mask) if mask else 0

    def wake_all(self):
        """OR all bits into the word and wake all waiters; return how many slept. Does nothing if the word is closed."""
        return 0 if nnfmq_is_closing(&self.event) else nnfmq_event_wake_all(&self.event)

    def wait(self, uint32_t mask, deadline_ns=None):
        """Block until a bit of `mask` is set; clear and return those that are set, or 0 at the deadline."""
        cdef int64_t deadline = as_deadline(deadline_ns)
        if not mask:
            raise InvalidArgument("an event flag cannot wait for no bit at all")
        self.acquire()
        try:
            return self.wait_bits(mask, deadline)
        finally:
            self.release_use()

    cdef object wait_bits(self, uint32_t mask, int64_t deadline):
        cdef uint32_t bits = 0
        cdef int error
        cdef bint has_passed
        self.raise_if_cancelled()
        while True:
            has_passed = nnfmq_now() >= deadline
            with nogil:
                error = nnfmq_wait_bits(&self.event, mask, deadline, &bits)
            self.raise_if_cancelled()  # before the bits are used: `wake_all` sets all of them when the peer has died
            if bits or has_passed:
                return bits
            self.after_futex(error)

    cdef int after_futex(self, int error) except -1:
        PyErr_CheckSignals()
        if error != 0 and error != EAGAIN and error != EINTR and error != ETIMEDOUT:
            raise OSError(error, f"futex: {os.strerror(error)}")
        return 0

    def close(self, on_released=None):
        """Cancel all waits. Release the memory and call `on_released` once no call uses it any more. Idempotent."""
        if nnfmq_is_closing(&self.event):
            return
        self.on_released = on_released
        nnfmq_set_closing(&self.event)
        if self.waiters:
            nnfmq_event_wake_all(&self.event)
        else:
            self.finish_close()

    cdef int finish_close(self) except -1:
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
    """Counters and records of one queue. Each operation loads each counter once and computes on the copies."""

    cdef nnfmq_ring ring
    cdef EventFlagWord event
    cdef EventFlagWord lifetime  # its in-use count and flags protect the memory: `event`, or a private word
    cdef bint is_open, is_unsynchronized, is_read_only
    cdef list external_waits  # words of other queues on which a thread waits for this one
    cdef object on_released
    cdef Py_buffer parts[3]  # the memory of the read counter, the write counter and the ring
    cdef uint64_t private_read_counter  # an unsynchronized reader's
    cdef nnfmq_wait_estimator estimator
    cdef Py_buffer hint_memory
    cdef uint16_t private_cpu_hint  # if the memory has none
    cdef uint16_t published_cpu
    cdef Py_buffer wait_memory
    cdef uint64_t private_waits[WAIT_WORDS]  # unless `count_waits` gave others
    cdef uint64_t *waits
    cdef int64_t write_at, write_size, read_at, read_size  # of the transactions that were begun; size -1 = none

    def __cinit__(self, region, layout, EventFlagWord event, bint shared=True, *, tuple others=(),
                  EventFlagWord lifetime=None, bint unsynchronized=False, uint64_t history_bytes=0):
        # `shared` is for the Python core; these accesses are ordered between processes on every machine.
        self.is_open, self.is_unsynchronized = True, unsynchronized
        self.event = event
        self.lifetime = event if event is not None else lifetime
        self.external_waits = []
        self.write_size = self.read_size = -1
        self.waits = self.private_waits
        regions = (region, *others)
        if layout.quantum <= 0 or layout.ring_bytes % layout.quantum:
            raise InvalidArgument(f"ring of {layout.ring_bytes} bytes is no multiple of quantum {layout.quantum}")
        r = self.map_part(0, regions[layout.fds[0]], "read counter", layout.read_counter, 8)
        w = self.map_part(1, regions[layout.fds[1]], "write counter", layout.write_counter, 8)
        data = self.map_part(2, regions[layout.fds[2]], "ring", layout.ring, layout.ring_bytes)
        nnfmq_set_reserved_counter(&self.ring, <void *><uintptr_t>r if unsynchronized else NULL)
        self.map_cpu_hint(regions[layout.fds[3]], None if event is None else layout.writer_cpu)
        nnfmq_set_ring(&self.ring, &self.private_read_counter if unsynchronized else <void *><uintptr_t>r,
                       <void *><uintptr_t>w,
                       <unsigned char *><uintptr_t>data, layout.ring_bytes, layout.quantum, history_bytes)

    cdef object map_part(self, int part, region, name, offset, size):
        """Keep the memory of one part mapped; return the part's address."""
        cdef Py_buffer *buffer = &self.parts[part]
        PyObject_GetBuffer(region, buffer, PyBUF_SIMPLE if self.is_unsynchronized else PyBUF_SIMPLE | PyBUF_WRITABLE)
        self.is_read_only = self.is_read_only or buffer.readonly
        if offset < 0 or size <= 0 or offset + size > buffer.len or (<uintptr_t>buffer.buf + offset) % 8:
            raise InvalidArgument(f"{name} at offset {offset} of {buffer.len} bytes: outside or misaligned")
        return <uintptr_t>buffer.buf + offset

    cdef int map_cpu_hint(self, region, offset) except -1:
        nnfmq_set_writer_cpu(&self.ring, &self.private_cpu_hint)
        if offset is None:
            return 0
        PyObject_GetBuffer(region, &self.hint_memory, PyBUF_SIMPLE | PyBUF_WRITABLE)
        if offset < 0 or offset + 2 > self.hint_memory.len or offset % 2:
            raise InvalidArgument(f"CPU hint at offset {offset} of {self.hint_memory.len} bytes: outside or misaligned")
        nnfmq_set_writer_cpu(&self.ring, <unsigned char *>self.hint_memory.buf + <Py_ssize_t>offset)
        return 0

    def count_waits(self, words):
        """Count in `words` from now on; the memory stays mapped until the ring is closed."""
        cdef Py_buffer buffer
        self.check_open()
        PyObject_GetBuffer(words, &buffer, PyBUF_SIMPLE | PyBUF_WRITABLE)
        if buffer.len < WAIT_WORDS * 8 or <uintptr_t>buffer.buf % 8:
            PyBuffer_Release(&buffer)
            raise InvalidArgument("waits are counted in three aligned words of 8 bytes")
        PyBuffer_Release(&self.wait_memory)
        self.wait_memory = buffer
        self.waits = <uint64_t *>buffer.buf

    cdef void release(self) noexcept:
        cdef int part
        self.waits = self.private_waits
        PyBuffer_Release(&self.wait_memory)
        PyBuffer_Release(&self.hint_memory)
        for part in range(3):
            PyBuffer_Release(&self.parts[part])  # does nothing for a buffer that was not acquired

    cdef int check_open(self) except -1:
        if not self.is_open or (self.lifetime is not None and nnfmq_is_closing(&self.lifetime.event)):
            raise BadState("the queue is closed")
        return 0

    cdef int check_synchronized(self) except -1:
        self.check_open()
        if self.is_unsynchronized:
            raise InvalidArgument("an unsynchronized queue has no calls that wait or wake")
        return 0

    cdef EventFlagWord own_event(self):
        self.check_open()
        if self.event is None:
            self.check_synchronized()
            raise InvalidArgument("this queue has no event flag word: only non-blocking write and read are possible")
        return self.event

    cdef int check_writable(self) except -1:
        self.check_open()
        if self.is_read_only:
            raise InvalidArgument("this queue is mapped for reading only")
        return 0

    def reset(self):
        """Set both counters to 0."""
        self.check_writable()
        nnfmq_reset(&self.ring)

    def counters(self):
        """Return (write counter, read counter) in bytes, for display."""
        cdef nnfmq_counters counters
        self.check_open()
        nnfmq_begin_write(&self.ring, &counters)
        return counters.w, counters.r

    def available_to_read(self):
        self.check_open()
        return nnfmq_readable_bytes(&self.ring) // self.ring.quantum

    def available_to_write(self):
        cdef uint64_t used
        self.check_open()
        used = nnfmq_readable_bytes(&self.ring)
        return 0 if used > self.ring.ring_bytes else (self.ring.ring_bytes - used) // self.ring.quantum

    # ---- non-blocking attempts ----

    cdef int try_write(self, const void *data, uint64_t size, bint strict) except -1:
        cdef nnfmq_counters counters
        cdef int answer
        self.check_open()
        if size % self.ring.quantum:
            raise InvalidArgument(f"{size} bytes are no whole number of records of {self.ring.quantum} bytes")
        answer = nnfmq_begin_write(&self.ring, &counters)
        if strict and answer == NNFMQ_CORRUPTED:
            self.raise_corrupted(&counters)
        if size > counters.bytes or counters.w % self.ring.quantum:
            return 0
        nnfmq_commit_write(&self.ring, counters.w, data, size)
        return 1

    cdef object try_read(self, uint64_t size, bint strict):
        cdef nnfmq_counters counters
        if nnfmq_begin_read(&self.ring, &counters) == NNFMQ_CORRUPTED:
            return self.raise_corrupted(&counters) if strict else None
        return self.read_and_commit(counters.r, size) if counters.bytes >= size else None

    cdef bytes read_and_commit(self, uint64_t r, uint64_t size):
        cdef bytes data = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>size)
        nnfmq_copy_out(&self.ring, r, PyBytes_AS_STRING(data), size)
        nnfmq_commit_read(&self.ring, r, size)
        return data

    cdef object raise_corrupted(self, const nnfmq_counters *counters):
        raise QueueCorrupted(f"write counter {counters.w}, read counter {counters.r}: impossible in a ring of "
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
            if self.is_unsynchronized:
                return self.write_unsynchronized(&source) != 0
            return self.try_write(source.buf, source.len, False) != 0
        finally:
            PyBuffer_Release(&source)

    cdef int write_unsynchronized(self, const Py_buffer *data) except -1:
        cdef nnfmq_counters counters
        self.check_writable()
        if data.len % self.ring.quantum:
            raise InvalidArgument(f"{data.len} bytes are no whole number of records of {self.ring.quantum} bytes")
        if nnfmq_begin_unsynchronized_write(&self.ring, &counters) != NNFMQ_OK or <uint64_t>data.len > counters.bytes:
            return 0
        nnfmq_reserve(&self.ring, counters.w, data.len)
        nnfmq_commit_write(&self.ring, counters.w, data.buf, data.len)
        return 1

    def read(self, n):
        cdef uint64_t size = self.record_bytes(n)
        return self.read_unsynchronized(size) if self.is_unsynchronized else self.try_read(size, False)

    def read_into(self, out):
        """Fill `out` with records, or read none; return whether there were enough. Does not block."""
        cdef Py_buffer target
        PyObject_GetBuffer(out, &target, PyBUF_SIMPLE | PyBUF_WRITABLE)
        try:
            self.check_open()
            if target.len % self.ring.quantum:
                raise InvalidArgument(
                    f"{target.len} bytes are no whole number of records of {self.ring.quantum} bytes"
                )
            return self.read_into_buffer(&target)
        finally:
            PyBuffer_Release(&target)

    cdef bint read_into_buffer(self, const Py_buffer *target):
        cdef nnfmq_counters counters
        if nnfmq_begin_read(&self.ring, &counters) != NNFMQ_OK or counters.bytes < <uint64_t>target.len:
            return False
        nnfmq_copy_out(&self.ring, counters.r, target.buf, target.len)
        if self.is_unsynchronized:
            return nnfmq_commit_if_intact(&self.ring, counters.r, target.len)
        nnfmq_commit_read(&self.ring, counters.r, target.len)
        return True

    cdef object read_unsynchronized(self, uint64_t size):
        cdef nnfmq_counters counters
        cdef bytes data
        if nnfmq_begin_read(&self.ring, &counters) != NNFMQ_OK or counters.bytes < size:
            return None
        data = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>size)
        nnfmq_copy_out(&self.ring, counters.r, PyBytes_AS_STRING(data), size)
        return data if nnfmq_commit_if_intact(&self.ring, counters.r, size) else None

    def send(self, data, /):
        cdef Py_buffer source
        if PyBytes_CheckExact(data):
            return self.send_bytes(PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))
        PyObject_GetBuffer(data, &source, PyBUF_SIMPLE)
        try:
            return self.send_bytes(source.buf, source.len)
        finally:
            PyBuffer_Release(&source)

    cdef bint send_bytes(self, const void *data, uint64_t size) except -1:
        cdef EventFlagWord event = self.own_event()
        if not self.try_write(data, size, True):
            return False
        nnfmq_publish_cpu(&self.ring, &self.published_cpu)
        nnfmq_event_wake(&event.event, NNFMQ_NOT_EMPTY)
        return True

    def drain(self):
        cdef nnfmq_counters counters
        self.check_synchronized()
        if nnfmq_begin_read(&self.ring, &counters) == NNFMQ_CORRUPTED:
            self.raise_corrupted(&counters)
        nnfmq_commit_read(&self.ring, counters.r, counters.bytes)
        if self.event is not None:
            nnfmq_event_wake(&self.event.event, NNFMQ_NOT_FULL)
        return counters.bytes // self.ring.quantum

    # ---- transactions: the caller writes or reads records in the ring itself ----

    def begin_write(self, n):
        """Return the ring offset (in bytes) at which `n` records may be written, or None if they do not fit."""
        cdef nnfmq_counters counters
        cdef uint64_t size = self.record_bytes(n)
        self.check_writable()
        self.write_size = -1
        if self.is_unsynchronized:
            nnfmq_begin_unsynchronized_write(&self.ring, &counters)
        else:
            nnfmq_begin_write(&self.ring, &counters)
        if size > counters.bytes or counters.w % self.ring.quantum:
            return None
        if self.is_unsynchronized:
            nnfmq_reserve(&self.ring, counters.w, size)
        self.write_at, self.write_size = counters.w, size
        return counters.w % self.ring.ring_bytes

    def commit_write(self, n):
        """Publish the first `n` of the records that `begin_write` reserved."""
        cdef nnfmq_counters counters
        cdef uint64_t size = self.record_bytes(n)
        self.check_transaction(n, size, self.write_size, "write")
        self.write_size = -1
        nnfmq_begin_write(&self.ring, &counters)
        if counters.w != <uint64_t>self.write_at:
            raise QueueCorrupted(f"write counter {counters.w}: it was {<uint64_t>self.write_at} when the write began")
        nnfmq_publish(&self.ring, counters.w, size)

    cdef int check_transaction(self, n, uint64_t size, int64_t begun, str what) except -1:
        if begun < 0:
            raise InvalidArgument(f"commit_{what} without a begin_{what} that succeeded")
        if size > <uint64_t>begun:
            raise InvalidArgument(f"{n} records to commit; begin_{what} gave {begun // self.ring.quantum}")
        return 0

    def begin_read(self, n):
        """Return the ring offset (in bytes) of the next `n` records, or None if there are fewer."""
        cdef nnfmq_counters counters
        cdef uint64_t size = self.record_bytes(n)
        self.read_size = -1
        if nnfmq_begin_read(&self.ring, &counters) != NNFMQ_OK or counters.bytes < size:
            return None
        self.read_at, self.read_size = counters.r, size
        return counters.r % self.ring.ring_bytes

    def commit_read(self, n):
        """Consume the first `n` of the records of `begin_read`; return False if they may have been overwritten."""
        cdef nnfmq_counters counters
        cdef uint64_t size = self.record_bytes(n)
        self.check_transaction(n, size, self.read_size, "read")
        self.read_size = -1
        nnfmq_begin_write(&self.ring, &counters)
        if counters.r != <uint64_t>self.read_at:
            raise QueueCorrupted(f"read counter {counters.r}: it was {<uint64_t>self.read_at} when the read began")
        return nnfmq_commit_if_intact(&self.ring, counters.r, size) != 0

    # ---- blocking calls ----

    def receive(self, deadline_ns, int64_t window_ns, /):
        return self.receive_all(deadline_ns, window_ns)

    cdef bytes receive_all(self, object deadline_ns, int64_t window_ns):
        cdef EventFlagWord event = self.own_event()
        cdef nnfmq_counters counters
        cdef bytes data
        if not self.wait_for_records(event, deadline_ns, window_ns, &counters):
            return None
        data = self.read_and_commit(counters.r, counters.bytes)
        nnfmq_count_one(&self.waits[RECEIVED])
        nnfmq_event_wake(&event.event, NNFMQ_NOT_FULL)
        return data

    def receive_into(self, out, deadline_ns, int64_t window_ns, /):
        """Block as `receive` does; then read as many records as fit into `out`; return how many, 0 at the deadline."""
        cdef EventFlagWord event = self.own_event()
        cdef Py_buffer target
        PyObject_GetBuffer(out, &target, PyBUF_SIMPLE | PyBUF_WRITABLE)
        try:
            return self.receive_into_buffer(event, deadline_ns, window_ns, &target)
        finally:
            PyBuffer_Release(&target)

    cdef object receive_into_buffer(self, EventFlagWord event, object deadline, int64_t window,
                                    const Py_buffer *target):
        cdef nnfmq_counters counters
        cdef uint64_t size = target.len - target.len % self.ring.quantum
        if not size:
            raise InvalidArgument(f"{target.len} bytes do not hold a record of {self.ring.quantum} bytes")
        if not self.wait_for_records(event, deadline, window, &counters):
            return 0
        size = min(size, counters.bytes)
        nnfmq_copy_out(&self.ring, counters.r, target.buf, size)
        nnfmq_commit_read(&self.ring, counters.r, size)
        nnfmq_count_one(&self.waits[RECEIVED])
        nnfmq_event_wake(&event.event, NNFMQ_NOT_FULL)
        return size // self.ring.quantum

    cdef bint wait_for_records(self, EventFlagWord event, object deadline_ns, int64_t window,
                               nnfmq_counters *counters) except -1:
        """Fill in `counters` when there is something to read; return False at the deadline."""
        if self.check_for_records(event, counters):
            return True
        return self.wait_until_records(event, as_deadline(deadline_ns), window, counters)

    cdef bint check_for_records(self, EventFlagWord event, nnfmq_counters *counters) except -1:
        event.raise_if_cancelled()
        if nnfmq_begin_read(&self.ring, counters) == NNFMQ_CORRUPTED:
            self.raise_corrupted(counters)
        return counters.bytes != 0

    cdef bint wait_until_records(self, EventFlagWord event, int64_t deadline, int64_t window,
                                 nnfmq_counters *counters) except -1:
        event.acquire()
        try:
            while self.wait(event, deadline, window):
                if self.check_for_records(event, counters):
                    return True
            return False
        finally:
            event.release_use()

    def read_blocking(self, n, deadline_ns, EventFlagWord word=None, uint32_t awaited=NNFMQ_NOT_EMPTY,
                      uint32_t woken=NNFMQ_NOT_FULL):
        cdef int64_t deadline = as_deadline(deadline_ns)
        cdef uint64_t size = self.record_bytes(n)
        cdef EventFlagWord event = self.event_to_wait_on(word)
        self.acquire_both(event, awaited)
        try:
            return self.read_waiting(event, size, deadline, awaited, woken) if size <= self.ring.ring_bytes else None
        finally:
            self.release_both(event)

    cdef object read_waiting(self, EventFlagWord event, uint64_t size, int64_t deadline, uint32_t awaited,
                             uint32_t woken):
        while True:
            self.raise_if_cancelled(event)
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
        cdef EventFlagWord event = self.event_to_wait_on(word)
        cdef Py_buffer source
        PyObject_GetBuffer(data, &source, PyBUF_SIMPLE)
        try:
            self.acquire_both(event, awaited)
            try:
                return self.write_waiting(event, &source, deadline, awaited, woken)
            finally:
                self.release_both(event)
        finally:
            PyBuffer_Release(&source)

    cdef bint write_waiting(self, EventFlagWord event, const Py_buffer *source, int64_t deadline, uint32_t awaited,
                            uint32_t woken) except -1:
        while True:
            self.raise_if_cancelled(event)
            if self.try_write(source.buf, source.len, True):
                if woken:
                    nnfmq_event_wake(&event.event, woken)
                return True
            if <uint64_t>source.len > self.ring.ring_bytes:
                return False
            if not self.sleep_on(event, NNFMQ_WRITER, <uint64_t>source.len, deadline, awaited):
                return False

    cdef EventFlagWord event_to_wait_on(self, EventFlagWord word):
        """Return the word on which to wait: `word`, or the queue's own if that is None."""
        if word is None:
            return self.own_event()
        self.check_synchronized()
        if self.lifetime is None:
            raise InvalidArgument("this queue was made without what a wait on another word needs")
        return word

    cdef int acquire_both(self, EventFlagWord event, uint32_t awaited) except -1:
        if not awaited:
            raise InvalidArgument("a blocking call cannot wait for no bit at all")
        self.lifetime.acquire()
        return 0 if event is self.lifetime else self.acquire_external(event)

    cdef int acquire_external(self, EventFlagWord event) except -1:
        try:
            event.acquire()
        except InvalidArgument:
            self.lifetime.release_use()
            raise
        self.external_waits.append(event)
        return 0

    cdef int release_both(self, EventFlagWord event) except -1:
        return self.lifetime.release_use() if event is self.lifetime else self.release_external(event)

    cdef int release_external(self, EventFlagWord event) except -1:
        try:
            self.external_waits.remove(event)
            event.release_use()
        finally:
            self.lifetime.release_use()
        return 0

    cdef int raise_if_cancelled(self, EventFlagWord event) except -1:
        self.lifetime.raise_if_cancelled()
        if event is not self.lifetime:
            event.raise_if_cancelled()
        return 0

    def wake_external_waits(self):
        """Wake threads that wait for this queue on other queues' words, so that they check its flags."""
        return sum([(<EventFlagWord>event).wake_all() for event in self.external_waits])

    cdef bint wait(self, EventFlagWord event, int64_t deadline, int64_t window) except -1:
        """Block until a record may be there, or the wait is cancelled; return False at the deadline."""
        cdef int64_t began = nnfmq_now()
        if began >= deadline:
            return self.has_record(event)
        if window > 0 and nnfmq_is_writer_on_this_cpu(&self.ring):
            with nogil:
                sched_yield()  # the writer cannot run while this thread occupies its CPU
            return self.has_record(event) or self.sleep(event, deadline)
        if window > 0 and self.poll(event, min(later(began, min(window, FIRST_POLL_NS)), deadline)):
            nnfmq_count_one(&self.waits[POLLED])
            return True  # not a sample: the estimator learns when not to poll
        return self.hybrid_wait(event, deadline, window, began)

    cdef bint hybrid_wait(self, EventFlagWord event, int64_t deadline, int64_t window, int64_t began) except -1:
        cdef int64_t action = nnfmq_next_action(&self.estimator, began, window)
        cdef int64_t now = began
        cdef int64_t poll_end
        cdef bint found
        if action > NNFMQ_POLL and self.sleep_before_poll(event, deadline, action, &now):
            return True
        poll_end = min(nnfmq_poll_end(&self.estimator, began, now, window), deadline)
        found = action != NNFMQ_SLEEP and self.poll_without_gil(event, now, poll_end, window)
        if found:
            nnfmq_count_one(&self.waits[POLLED])
        elif not self.sleep(event, deadline):
            return False
        nnfmq_add_wait(&self.estimator, nnfmq_now() - began)
        return True

    cdef bint sleep_before_poll(self, EventFlagWord event, int64_t deadline, int64_t until, int64_t *now) except -1:
        """Sleep until `until` with exact timers; return whether a record is there already. *now is when it ended."""
        cdef int64_t end = min(until, deadline)
        cdef int error
        cdef bint found = False
        nnfmq_count_one(&self.waits[SLEPT])
        now[0] = nnfmq_now()
        while now[0] < end and not found:
            with nogil:
                error = nnfmq_timed_sleep(&self.ring, &event.event, NNFMQ_READER, self.ring.quantum, end)
            event.after_futex(error)
            found = self.has_record(event)
            now[0] = nnfmq_now()
        nnfmq_add_wakeup(&self.estimator, until, now[0], found)
        return found

    cdef bint poll_without_gil(self, EventFlagWord event, int64_t now, int64_t until, int64_t window) except -1:
        """Poll without the GIL, in slices between which signal handlers run.

        Yields the CPU repeatedly: the thread that computes what this one waits for may have been placed on it. Then
        the estimator may end the poll.
        """
        cdef bint found = False
        cdef bint must_stop = False
        cdef int64_t slice_end, yielded
        while not found and not must_stop and now < until:
            slice_end = min(now + SPIN_SLICE_NS, until)
            with nogil:
                while not found and not must_stop and now < slice_end:
                    found = nnfmq_poll(&self.ring, &event.event, NNFMQ_READER, self.ring.quantum,
                                       min(now + YIELD_PERIOD_NS, slice_end))
                    if not found:
                        yielded = nnfmq_now()
                        sched_yield()
                        now = nnfmq_now()
                        must_stop = nnfmq_must_stop_polling(&self.estimator, now - yielded, window)
            PyErr_CheckSignals()
        nnfmq_add_poll(&self.estimator, must_stop)
        return found

    cdef bint poll(self, EventFlagWord event, int64_t until):
        """Poll with the GIL, for some microseconds only."""
        return nnfmq_poll(&self.ring, &event.event, NNFMQ_READER, self.ring.quantum, until)

    cdef bint has_record(self, EventFlagWord event):
        return nnfmq_is_ready(&self.ring, NNFMQ_READER, self.ring.quantum) or nnfmq_is_cancelled(&event.event)

    cdef bint sleep(self, EventFlagWord event, int64_t deadline) except -1:
        cdef int error
        PyErr_CheckSignals()  # of signals that came while this thread yielded its CPU, which may have taken long
        nnfmq_count_one(&self.waits[SLEPT])
        while nnfmq_now() < deadline:
            with nogil:
                error = nnfmq_sleep(&self.ring, &event.event, NNFMQ_READER, self.ring.quantum, deadline)
            event.after_futex(error)
            if self.has_record(event):
                return True
        return self.has_record(event)

    cdef bint sleep_on(self, EventFlagWord event, int side, uint64_t size, int64_t deadline, uint32_t mask) except -1:
        """Sleep until an attempt may succeed, or the wait is cancelled; return False at the deadline."""
        cdef int error
        while nnfmq_now() < deadline:
            with nogil:
                error = nnfmq_sleep_on(&self.ring, &event.event, &self.lifetime.event, side, size, deadline, mask)
            event.after_futex(error)
            if self.is_ready_or_cancelled(event, side, size):
                return True
        return self.is_ready_or_cancelled(event, side, size)

    cdef bint is_ready_or_cancelled(self, EventFlagWord event, int side, uint64_t size):
        return (nnfmq_is_ready(&self.ring, side, size) or nnfmq_is_cancelled(&event.event)
                or nnfmq_is_cancelled(&self.lifetime.event))

    # ---- waits by other means: `aio` sleeps in futex_waitv on many words ----

    def begin_wait(self):
        """Acquire the event flag word until `finish_wait`; return the address of the futex."""
        cdef EventFlagWord event = self.own_event()
        event.acquire()
        return nnfmq_address_of(&event.event)

    def prepare_to_wait(self, int side, uint64_t size):
        """Clear the bit of `side` and check the condition; return the futex value to sleep on, None if it may hold."""
        cdef uint32_t expected
        return expected if nnfmq_prepare_to_wait(&self.ring, &self.event.event, side, size, &expected) else None

    def finish_wait(self):
        """End what `begin_wait` began. Releases the memory if the queue was closed and this was the last call."""
        self.event.release_use()

    # ---- lifetime ----

    def close(self, on_released=None):
        """Cancel all waits. Release the memory and call `on_released` once no call uses it any more. Idempotent."""
        if not self.is_open:
            return
        self.on_released = on_released
        external_waits = list(self.external_waits)
        if self.lifetime is None:
            self.finish_close()
        else:
            self.lifetime.close(self.finish_close)
        for event in external_waits:
            (<EventFlagWord>event).wake_all()

    def finish_close(self):
        on_released, self.on_released = self.on_released, None
        if self.is_open:
            self.is_open = False
            self.release()
        if on_released is not None:
            on_released()

    def __dealloc__(self):
        self.release()


# ---- answers to equal requests ----

@cython.final
cdef class RepeatedRequest:
    """A request that was bound, and the reply of its last run. `responder.py` is the specification."""

    cdef readonly bytes packet
    cdef readonly object version, execution
    cdef readonly bint is_measured
    cdef object run_execution, result
    cdef bytes reply

    def __init__(self, bytes packet not None, version, execution, bint is_measured=False, /):
        self.packet, self.version, self.execution, self.is_measured = packet, version, execution, is_measured
        self.run_execution, self.result, self.reply = execution.run, None, b""

    cdef bytes run(self, object server):
        result = self.run_execution()
        if self.is_measured:
            return server.encode(self, result)
        if result is not self.result:
            if not self.reply or result != self.result:
                self.reply = server.encode(self, result)
            self.result = result
        return self.reply


@cython.final
cdef class Responder:
    """Receives the requests of one ring, and sends replies to another. `responder.py` is the specification."""

    cdef public RepeatedRequest last
    cdef readonly dict kept
    cdef public int64_t received
    cdef public bint notes_sent
    cdef readonly int64_t received_ns
    cdef readonly uint64_t sent_ns
    cdef Ring requests, results
    cdef Py_buffer memory, sent_memory
    cdef int64_t *words
    cdef uint64_t *sent
    cdef object bound_to, server, count

    def __cinit__(self, Ring requests not None, Ring results not None, words, bound_to, server, count, sent=None, /):
        PyObject_GetBuffer(words, &self.memory, PyBUF_SIMPLE | PyBUF_WRITABLE)
        if self.memory.len < 48 or <uintptr_t>self.memory.buf % 8:
            raise InvalidArgument("a responder describes executions in six aligned words of 8 bytes")
        self.words = <int64_t *>self.memory.buf
        if sent is not None:
            PyObject_GetBuffer(sent, &self.sent_memory, PyBUF_SIMPLE)
            if self.sent_memory.len < 16 or <uintptr_t>self.sent_memory.buf % 8:
                raise InvalidArgument("a client says when it sent a request in the second of two aligned words")
            self.sent = <uint64_t *>self.sent_memory.buf
        self.requests, self.results = requests, results
        self.bound_to, self.server, self.count = bound_to, server, count
        self.kept = {}

    def bind(self, packet, version, execution, is_measured=False, /):
        return RepeatedRequest(packet, version, execution, is_measured)

    def serve(self, int64_t window_ns, /):
        cdef bytes packet = self.requests.receive_all(None, window_ns)
        cdef RepeatedRequest equal = self.last
        self.received_ns = nnfmq_now()
        self.sent_ns = self.sent[1] if self.notes_sent and self.sent is not NULL else 0
        self.received += 1
        if equal is None or packet != equal.packet:
            equal = self.kept.get(packet)
        if equal is None or equal.version != self.bound_to.version:
            return packet
        self.respond(equal, self.received_ns)
        return None

    def answer(self, RepeatedRequest request not None, int64_t ready_ns, /):
        self.respond(request, ready_ns)

    cdef int respond(self, RepeatedRequest request, int64_t ready_ns) except -1:
        cdef bytes reply
        cdef int64_t begin_ns, end_ns, sent_ns
        cdef bint is_sent
        try:
            reply = request.run(self.server)
        except Exception as error:
            self.server.fail(error, ready_ns)
            return 0
        begin_ns, end_ns = request.execution.engine_begin_ns, request.execution.engine_end_ns
        if self.words is NULL:
            raise BadState("the responder is closed")
        self.words[0], self.words[1], self.words[2] = self.received, self.received_ns, ready_ns
        self.words[3], self.words[4] = begin_ns, end_ns
        self.words[5] = sent_ns = nnfmq_now()
        try:
            is_sent = self.results.send_bytes(PyBytes_AS_STRING(reply), PyBytes_GET_SIZE(reply))
        except QueueCorrupted:
            is_sent = False
        if is_sent or self.server.send_again(reply, ready_ns):
            self.count(sent_ns - self.received_ns, end_ns - begin_ns)
        return 0

    def close(self):
        """Release the words and the server. Idempotent."""
        self.last = self.server = self.bound_to = self.count = None
        self.kept.clear()
        self.words = NULL
        self.sent = NULL
        PyBuffer_Release(&self.memory)
        PyBuffer_Release(&self.sent_memory)

    def __dealloc__(self):
        PyBuffer_Release(&self.memory)
        PyBuffer_Release(&self.sent_memory)
