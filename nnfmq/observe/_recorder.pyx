# cython: language_level=3, embedsignature=True, binding=False
"""The compiled core of the statistics area. `_pyrecorder.py` is its specification and has the docstrings.

A counter has one writing process, whose threads hold the GIL here. So an addition is a relaxed load and a relaxed
store of one aligned word, without a lock or a fence; a reader sees each counter as it was at some moment.

  rows   Whoever changes the rows of a slot makes its change word odd, then a release fence, then stores the rows; then
         stores an even number with release. A reader loads the word with acquire, copies the slot, then an acquire
         fence, then loads the word again. If it copied anything of a change, the fences synchronize: the second load
         sees another number, or the first one saw an odd one, and the copy is rejected (a seqlock; C11 7.17.4).
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint64_t, uintptr_t

from nnfmq.observe import statistics_layout as layout

cdef extern from *:
    """
    #include <stdatomic.h>
    #include <stdint.h>
    #include <string.h>
    #include <time.h>

    static inline int64_t nnfmq_monotonic_ns(void) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    }

    static inline void nnfmq_count(uint64_t *word, uint64_t more) {
        _Atomic uint64_t *counter = (_Atomic uint64_t *)word;
        atomic_store_explicit(counter, atomic_load_explicit(counter, memory_order_relaxed) + more,
                              memory_order_relaxed);
    }

    static inline uint64_t nnfmq_bucket(uint64_t duration_ns, uint64_t last) {
        uint64_t units = duration_ns / 125;
        if (units < 8)
            return units;
        uint64_t shift = (uint64_t)(63 - __builtin_clzll(units)) - 3;
        uint64_t bucket = (shift << 3) + (units >> shift);
        return bucket < last ? bucket : last;
    }

    static inline void nnfmq_begin_change(uint64_t *word) {
        _Atomic uint64_t *change = (_Atomic uint64_t *)word;
        atomic_store_explicit(change, atomic_load_explicit(change, memory_order_relaxed) | 1,
                              memory_order_relaxed); /* SYNC rows */
        atomic_thread_fence(memory_order_release);   /* SYNC rows */
    }

    static inline void nnfmq_end_change(uint64_t *word) {
        _Atomic uint64_t *change = (_Atomic uint64_t *)word;
        atomic_store_explicit(change, (atomic_load_explicit(change, memory_order_relaxed) | 1) + 1,
                              memory_order_release); /* SYNC rows */
    }

    static inline int nnfmq_snapshot(void *target, const uint64_t *slot, size_t size, size_t change_word) {
        const _Atomic uint64_t *change = (const _Atomic uint64_t *)(slot + change_word);
        uint64_t before = atomic_load_explicit(change, memory_order_acquire); /* SYNC rows */
        memcpy(target, slot, size);
        atomic_thread_fence(memory_order_acquire); /* SYNC rows */
        return before % 2 == 0 && atomic_load_explicit(change, memory_order_relaxed) == before; /* SYNC rows */
    }
    """
    int64_t nnfmq_monotonic_ns() noexcept
    void nnfmq_count(uint64_t *word, uint64_t more) noexcept
    uint64_t nnfmq_bucket(uint64_t duration_ns, uint64_t last) noexcept
    void nnfmq_begin_change(uint64_t *word) noexcept
    void nnfmq_end_change(uint64_t *word) noexcept
    int nnfmq_snapshot(void *target, const uint64_t *slot, size_t size, size_t change_word) noexcept

cdef int CHANGE = layout.CHANGE
cdef int CLIENT_EXECUTIONS = layout.CLIENT_EXECUTIONS
cdef int CLIENT_FAILURES = layout.CLIENT_FAILURES
cdef int EXECUTIONS = layout.EXECUTIONS
cdef int FAILURES = layout.FAILURES
cdef int DRIVER_NS = layout.DRIVER_NS
cdef int ENGINE_NS = layout.ENGINE_NS
cdef int DRIVER_HISTOGRAM = layout.DRIVER_HISTOGRAM
cdef int ENGINE_HISTOGRAM = layout.ENGINE_HISTOGRAM
cdef int CLIENT_NS = layout.CLIENT_NS
cdef int QUEUE_NS = layout.QUEUE_NS
cdef int CLIENT_HISTOGRAM = layout.CLIENT_HISTOGRAM
cdef int QUEUE_HISTOGRAM = layout.QUEUE_HISTOGRAM
cdef int LAST_BUCKET = layout.BUCKETS - 1
cdef int BURST_EXECUTIONS = layout.BURST_EXECUTIONS
cdef int BURST_FAILURES = layout.BURST_FAILURES
cdef Py_ssize_t CLIENT_BYTES = layout.SLOT_HEADER_WORDS * 8
cdef Py_ssize_t MODEL_BYTES = layout.MODEL_WORDS * 8
cdef Py_ssize_t BURST_BYTES = layout.BURST_WORDS * 8
cdef Py_ssize_t CALLS_BYTES = layout.CALLS_WORDS * 8

cdef enum:  # words of `serialize.execution_stats`
    REQUEST_RECEIVED = 1
    RESULT_SENT = 5

cdef enum:  # of `serialize.packets`
    SENT_WORD = 1

cdef enum:
    SAMPLED_BELOW_NS = 16000
    SAMPLE = 8


cdef int map_words(Py_buffer *buffer, object region, Py_ssize_t needed, int flags) except -1:
    PyObject_GetBuffer(region, buffer, flags)
    if buffer.len < needed or <uintptr_t>buffer.buf % 8:
        length = buffer.len
        PyBuffer_Release(buffer)
        raise ValueError(f"{length // 8} words of statistics where {needed // 8} are needed, aligned")
    return 0


# The collector must not clear a buffer that is still exported. Neither class can be a part of a cycle, so it need not
# see them.
@cython.final
@cython.no_gc
cdef class ModelRecorder:
    """Counts the executions of one model, for the model and for the client."""

    cdef Py_buffer client, row
    cdef object __weakref__

    def __cinit__(self, client, row):
        map_words(&self.client, client, CLIENT_BYTES, PyBUF_SIMPLE | PyBUF_WRITABLE)
        map_words(&self.row, row, MODEL_BYTES, PyBUF_SIMPLE | PyBUF_WRITABLE)

    cdef void count(self, int64_t driver_ns, int64_t engine_ns) noexcept:
        cdef uint64_t *row = <uint64_t *>self.row.buf
        cdef uint64_t driver = <uint64_t>driver_ns if driver_ns > 0 else 0
        nnfmq_count(<uint64_t *>self.client.buf + CLIENT_EXECUTIONS, 1)
        nnfmq_count(row + EXECUTIONS, 1)
        nnfmq_count(row + DRIVER_NS, driver)
        cdef uint64_t engine = <uint64_t>engine_ns if engine_ns > 0 else 0
        nnfmq_count(row + ENGINE_NS, engine)
        nnfmq_count(row + DRIVER_HISTOGRAM + nnfmq_bucket(driver, LAST_BUCKET), 1)
        nnfmq_count(row + ENGINE_HISTOGRAM + nnfmq_bucket(engine, LAST_BUCKET), 1)

    cdef void count_failure(self) noexcept:
        nnfmq_count(<uint64_t *>self.client.buf + CLIENT_FAILURES, 1)
        nnfmq_count(<uint64_t *>self.row.buf + FAILURES, 1)

    def add(self, int64_t driver_ns, int64_t engine_ns, /):
        self.count(driver_ns, engine_ns)

    def add_failure(self):
        self.count_failure()

    def __dealloc__(self):
        PyBuffer_Release(&self.client)
        PyBuffer_Release(&self.row)


@cython.final
@cython.no_gc
cdef class BurstRecorder:
    """Counts the executions of one burst, for the burst, its model and the client."""

    cdef ModelRecorder model
    cdef Py_buffer row

    def __cinit__(self, ModelRecorder model not None, row):
        self.model = model
        map_words(&self.row, row, BURST_BYTES, PyBUF_SIMPLE | PyBUF_WRITABLE)

    def add(self, int64_t driver_ns, int64_t engine_ns, /):
        nnfmq_count(<uint64_t *>self.row.buf + BURST_EXECUTIONS, 1)
        self.model.count(driver_ns, engine_ns)

    def add_failure(self):
        nnfmq_count(<uint64_t *>self.row.buf + BURST_FAILURES, 1)
        self.model.count_failure()

    def __dealloc__(self):
        PyBuffer_Release(&self.row)


@cython.final
@cython.no_gc
cdef class Calls:
    """Counts the executions of one model as its client sees them."""

    cdef Py_buffer row

    def __cinit__(self, row):
        map_words(&self.row, row, CALLS_BYTES, PyBUF_SIMPLE | PyBUF_WRITABLE)

    cdef void count(self, int64_t client_ns) noexcept:
        cdef uint64_t *row = <uint64_t *>self.row.buf
        cdef uint64_t client = <uint64_t>client_ns if client_ns > 0 else 0
        nnfmq_count(row + CLIENT_NS, client)
        nnfmq_count(row + CLIENT_HISTOGRAM + nnfmq_bucket(client, LAST_BUCKET), 1)

    cdef void count_queue(self, uint64_t queue, uint64_t executions) noexcept:
        cdef uint64_t *row = <uint64_t *>self.row.buf
        nnfmq_count(row + QUEUE_NS, queue * executions)
        nnfmq_count(row + QUEUE_HISTOGRAM + nnfmq_bucket(queue, LAST_BUCKET), executions)

    def add(self, int64_t client_ns, int64_t queue_ns, /):
        self.count(client_ns)
        if queue_ns >= 0:
            self.count_queue(<uint64_t>queue_ns, 1)

    def __dealloc__(self):
        PyBuffer_Release(&self.row)


@cython.final
@cython.no_gc
cdef class BurstCalls:
    """Counts the executions of a burst as its client sees them."""

    cdef Calls calls
    cdef Py_buffer words
    cdef uint64_t unread

    def __cinit__(self, Calls calls not None, words):
        self.calls = calls
        map_words(&self.words, words, (RESULT_SENT + 1) * 8, PyBUF_SIMPLE)

    def add(self, int64_t client_ns, int64_t latency_ns, /):
        self.count(client_ns, latency_ns)

    def finish(self, int64_t begin_ns, bint is_counted, /):
        cdef int64_t latency_ns = nnfmq_monotonic_ns() - begin_ns
        if is_counted:
            self.count(latency_ns, latency_ns)
        return latency_ns

    cdef void count(self, int64_t client_ns, int64_t latency_ns) noexcept:
        cdef const uint64_t *words = <const uint64_t *>self.words.buf
        if words is NULL:
            return
        self.calls.count(client_ns)
        cdef uint64_t executions = 1
        if latency_ns < SAMPLED_BELOW_NS:
            self.unread += 1
            if self.unread < SAMPLE:
                return
            executions, self.unread = self.unread, 0
        cdef uint64_t driver = words[RESULT_SENT] - words[REQUEST_RECEIVED]
        cdef uint64_t latency = <uint64_t>latency_ns if latency_ns > 0 else 0
        self.calls.count_queue(latency - driver if driver < latency else 0, executions)

    def close(self):
        PyBuffer_Release(&self.words)  # sets `obj`, not `buf`, to NULL
        self.words.buf = NULL

    def __dealloc__(self):
        PyBuffer_Release(&self.words)


@cython.final
@cython.no_gc
cdef class SendClock:
    """Tells the driver of a burst when its client sends a request."""

    cdef Py_buffer words

    def __cinit__(self, words):
        map_words(&self.words, words, (SENT_WORD + 1) * 8, PyBUF_SIMPLE | PyBUF_WRITABLE)

    def now(self):
        cdef int64_t now_ns = nnfmq_monotonic_ns()
        if self.words.buf is not NULL:
            (<int64_t *>self.words.buf)[SENT_WORD] = now_ns
        return now_ns

    def close(self):
        PyBuffer_Release(&self.words)  # sets `obj`, not `buf`, to NULL
        self.words.buf = NULL

    def __dealloc__(self):
        PyBuffer_Release(&self.words)


def begin_change(slot, /):
    cdef Py_buffer buffer
    map_words(&buffer, slot, CLIENT_BYTES, PyBUF_SIMPLE | PyBUF_WRITABLE)
    nnfmq_begin_change(<uint64_t *>buffer.buf + CHANGE)
    PyBuffer_Release(&buffer)


def end_change(slot, /):
    cdef Py_buffer buffer
    map_words(&buffer, slot, CLIENT_BYTES, PyBUF_SIMPLE | PyBUF_WRITABLE)
    nnfmq_end_change(<uint64_t *>buffer.buf + CHANGE)
    PyBuffer_Release(&buffer)


def snapshot(slot, /):
    cdef Py_buffer buffer
    cdef bytes copy
    map_words(&buffer, slot, CLIENT_BYTES, PyBUF_SIMPLE)
    try:
        copy = PyBytes_FromStringAndSize(NULL, buffer.len)
        found = nnfmq_snapshot(PyBytes_AS_STRING(copy), <const uint64_t *>buffer.buf, buffer.len, CHANGE)
        return copy if found else None
    finally:
        PyBuffer_Release(&buffer)
