# cython: language_level=3, embedsignature=True, binding=False
"""The compiled core of trace rings over `_trace_ring.h`. `_pytrace_core.py` is its specification and has the docstrings.

Everything runs with the GIL held, which makes each process the only writer of its ring, one call at a time.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memset

from nnfmq.observe import trace_layout

cdef extern from "_trace_ring.h" nogil:
    ctypedef struct nnfmq_trace_ring:
        unsigned char *memory
        uint64_t capacity, written, names_size
    const uint64_t NNFMQ_TRACE_CURSOR, NNFMQ_TRACE_NAMES_SIZE, NNFMQ_TRACE_NAMES, NNFMQ_TRACE_RECORDS
    int64_t nnfmq_trace_now()
    void nnfmq_trace_write(nnfmq_trace_ring *ring, uint32_t name, uint64_t request, int64_t begin_ns, int64_t end_ns)
    uint64_t nnfmq_trace_load(const unsigned char *memory, uint64_t offset)
    uint64_t nnfmq_trace_reload(const unsigned char *memory)
    void nnfmq_trace_add_name(nnfmq_trace_ring *ring, const char *name, uint16_t size)
    void nnfmq_trace_forget_thread()

cdef extern from "pthread.h" nogil:
    int pthread_atfork(void (*prepare)(), void (*parent)(), void (*child)())

pthread_atfork(NULL, NULL, nnfmq_trace_forget_thread)

cdef enum:
    REQUEST = 1
    DECODE = 2
    ENGINE = 3
    EXECUTE = 4
    WRITE = 5
    WAIT = 6
    READ = 7
    WAKE_UP = 11
    RECORD_BYTES = 32

cdef uint64_t NUMBER = 0xFFFFFF
cdef uint64_t WAKE_UP_MAX_NS = <uint64_t>1 << 36
cdef int64_t SLOW_NS = trace_layout.SLOW_NS
cdef int64_t SAMPLE_PERIOD_NS = trace_layout.SAMPLE_PERIOD_NS


@cython.final
cdef class TraceRing:
    cdef nnfmq_trace_ring ring
    cdef Py_buffer region
    cdef bint is_open
    cdef uint32_t count
    cdef int64_t sampled_ns

    def __cinit__(self, region, uint64_t pid, bytes label):
        cdef Py_ssize_t size = min(PyBytes_GET_SIZE(label), trace_layout.LABEL_BYTES)
        PyObject_GetBuffer(region, &self.region, PyBUF_SIMPLE | PyBUF_WRITABLE)
        self.is_open = True
        self.ring.capacity = trace_layout.capacity_of(self.region.len)
        if <uintptr_t>self.region.buf % 8:
            raise ValueError("a trace ring begins at a multiple of 8")
        self.ring.memory = <unsigned char *>self.region.buf
        memset(self.ring.memory + NNFMQ_TRACE_CURSOR, 0, NNFMQ_TRACE_NAMES - NNFMQ_TRACE_CURSOR)
        memcpy(self.ring.memory + <uint64_t>trace_layout.PID, &pid, 8)
        memcpy(self.ring.memory + <uint64_t>trace_layout.LABEL, PyBytes_AS_STRING(label), size)
        for name in trace_layout.STANDARD_NAMES:
            self.add_name(name.encode())
        memcpy(self.ring.memory, PyBytes_AS_STRING(trace_layout.MAGIC), 8)

    @property
    def written(self):
        return self.ring.written

    def add_name(self, bytes name):
        cdef uint64_t size = PyBytes_GET_SIZE(name)
        if not self.is_open or NNFMQ_TRACE_NAMES + self.ring.names_size + 2 + size > NNFMQ_TRACE_RECORDS:
            return 0
        nnfmq_trace_add_name(&self.ring, PyBytes_AS_STRING(name), <uint16_t>size)
        self.count += 1
        return self.count

    cdef void write(self, uint32_t name, uint64_t request, int64_t begin_ns, int64_t end_ns) noexcept:
        if name and self.is_open:
            nnfmq_trace_write(&self.ring, name, request, begin_ns, end_ns)

    def slice(self, uint32_t name, uint64_t request, int64_t begin_ns, int64_t end_ns):
        self.write(name, request, begin_ns, end_ns)

    def launches(self, bytes names, times):
        cdef Py_buffer stamps
        cdef const uint32_t *ids = <const uint32_t *>PyBytes_AS_STRING(names)
        cdef const int64_t *at
        cdef Py_ssize_t number, count
        PyObject_GetBuffer(times, &stamps, PyBUF_SIMPLE)
        at = <const int64_t *>stamps.buf
        count = min(PyBytes_GET_SIZE(names) // 4, stamps.len // 8 - 1)
        for number in range(count):
            self.write(ids[number], 0, at[number], at[number + 1])
        PyBuffer_Release(&stamps)

    def burst_request(self, uint64_t base, words, uint64_t sent_ns=0):
        cdef uint64_t begun
        cdef Py_buffer stats
        cdef uint64_t copied[6]  # sequence, received, ready, begin, end, sent
        PyObject_GetBuffer(words, &stats, PyBUF_SIMPLE)
        if stats.len < 48:
            size = stats.len
            PyBuffer_Release(&stats)
            raise ValueError(f"{size} bytes of statistics; 48 are needed")
        memcpy(copied, stats.buf, 48)
        PyBuffer_Release(&stats)
        base |= copied[0] & NUMBER
        begun = copied[1]
        if 0 < sent_ns < copied[1] and copied[1] - sent_ns < WAKE_UP_MAX_NS:
            self.write(WAKE_UP, base, sent_ns, copied[1])
            begun = sent_ns
        if copied[2] > copied[1]:
            self.write(DECODE, base, copied[1], copied[2])
        if copied[3]:
            self.write(ENGINE, base, copied[3], copied[4])
        self.write(REQUEST, base, copied[1], copied[5])
        return self.is_sample_due(begun, copied[5])

    cdef bint is_sample_due(self, int64_t begin_ns, int64_t end_ns) noexcept:
        if end_ns - begin_ns < SLOW_NS and end_ns - self.sampled_ns < SAMPLE_PERIOD_NS:
            return False
        self.sampled_ns = end_ns
        return True

    def close(self):
        if self.is_open:
            self.is_open = False
            PyBuffer_Release(&self.region)

    def __dealloc__(self):
        if self.is_open:
            PyBuffer_Release(&self.region)


@cython.final
cdef class ExchangeTrace:
    cdef TraceRing ring
    cdef uint64_t base
    cdef int64_t begin_ns
    cdef object words, sample

    def __cinit__(self, TraceRing ring not None, uint64_t base, words, sample):
        self.ring, self.base, self.words, self.sample = ring, base, words, sample

    def begin(self):
        self.begin_ns = nnfmq_trace_now()

    def end(self, int64_t sent_ns, int64_t waited_ns):
        cdef Py_buffer stats
        cdef uint64_t request
        cdef int64_t begin_ns, end_ns
        if not self.begin_ns:
            return
        end_ns = nnfmq_trace_now()
        try:
            PyObject_GetBuffer(self.words, &stats, PyBUF_SIMPLE)
        except ValueError:  # another thread has closed the burst
            return
        request = self.base | (<const uint64_t *>stats.buf)[0] & NUMBER
        PyBuffer_Release(&stats)
        self.ring.write(WRITE, request, self.begin_ns, sent_ns)
        self.ring.write(WAIT, request, sent_ns, sent_ns + waited_ns)
        self.ring.write(READ, request, sent_ns + waited_ns, end_ns)
        self.ring.write(EXECUTE, request, self.begin_ns, end_ns)
        begin_ns, self.begin_ns = self.begin_ns, 0
        if self.ring.is_sample_due(begin_ns, end_ns):
            self.sample()


@cython.final
cdef class StepTrace:
    cdef TraceRing ring
    cdef bytes names
    cdef const uint32_t *ids
    cdef Py_ssize_t count, next
    cdef int64_t begin_ns

    def __cinit__(self, TraceRing ring not None, bytes names not None):
        self.ring, self.names = ring, names
        self.ids, self.count = <const uint32_t *>PyBytes_AS_STRING(names), PyBytes_GET_SIZE(names) // 4
        self.next = self.count

    def run(self, steps, frame):
        self.begin()
        for step in steps:
            step(frame)
            self.end_step()

    cpdef begin(self):
        self.next = 0
        self.begin_ns = nnfmq_trace_now()

    cpdef end_step(self):
        cdef int64_t now_ns
        if self.next < self.count:
            now_ns = nnfmq_trace_now()
            self.ring.write(self.ids[self.next], 0, self.begin_ns, now_ns)
            self.next += 1
            self.begin_ns = now_ns


def copy_records(region, uint64_t since):
    cdef Py_buffer buffer
    cdef uint64_t capacity, cursor, first, intact
    cdef bytes data
    PyObject_GetBuffer(region, &buffer, PyBUF_SIMPLE)
    try:
        capacity = trace_layout.capacity_of(buffer.len)
        cursor = nnfmq_trace_load(<unsigned char *>buffer.buf, NNFMQ_TRACE_CURSOR)
        first = max(since, cursor - capacity if cursor > capacity else 0)
        if first >= cursor:
            return cursor, b""
        data = copied(<const char *>buffer.buf + NNFMQ_TRACE_RECORDS, first % capacity, cursor - first, capacity)
        intact = nnfmq_trace_reload(<unsigned char *>buffer.buf) + 1
        intact = max(first, intact - capacity if intact > capacity else 0)
        return (intact, data[RECORD_BYTES * (intact - first):]) if intact < cursor else (cursor, b"")
    finally:
        PyBuffer_Release(&buffer)


cdef bytes copied(const char *records, uint64_t place, uint64_t count, uint64_t capacity):
    cdef uint64_t until_end = min(count, capacity - place)
    cdef bytes data = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>(RECORD_BYTES * count))
    cdef char *target = PyBytes_AS_STRING(data)
    memcpy(target, records + RECORD_BYTES * place, RECORD_BYTES * until_end)
    memcpy(target + RECORD_BYTES * until_end, records, RECORD_BYTES * (count - until_end))
    return data


def copy_names(region):
    cdef Py_buffer buffer
    cdef uint64_t size
    PyObject_GetBuffer(region, &buffer, PyBUF_SIMPLE)
    try:
        trace_layout.capacity_of(buffer.len)
        size = min(nnfmq_trace_load(<unsigned char *>buffer.buf, NNFMQ_TRACE_NAMES_SIZE),
                   NNFMQ_TRACE_RECORDS - NNFMQ_TRACE_NAMES)
        return PyBytes_FromStringAndSize(<const char *>buffer.buf + NNFMQ_TRACE_NAMES, <Py_ssize_t>size)
    finally:
        PyBuffer_Release(&buffer)
