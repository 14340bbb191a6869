# cython: language_level=3, embedsignature=True, binding=False
"""The compiled core of the thread pool: `LaunchCore` over `_thread_pool.h`. `_pypool.py` has the docstrings.

The GIL is released while launches run and while a worker works: only C code runs there, and the kernels. Whoever calls
keeps this object, the launch records, the scratch memory and the kernels' code alive.
"""

cimport cython
from libc.stdint cimport int64_t, uintptr_t
from libc.stdlib cimport free
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

cdef extern from "_thread_pool.h" nogil:
    ctypedef struct nnfmq_launch:
        pass
    ctypedef struct nnfmq_pool:
        int64_t workers
        int64_t is_repeated
    ctypedef struct nnfmq_core_division:
        # Pointers to atomic types, which Cython does not know: C converts a pointer to void, and no other one.
        const void *busy
        const void *claims
        int64_t words
        void *own
        int64_t cores
        int64_t number
        const void *classes
        void *uses
        void *paused
        void *resumed
    ctypedef struct nnfmq_pause_times:
        int64_t begin_ns, end_ns, for_class
    ctypedef struct nnfmq_pauses:
        int64_t count
        nnfmq_pause_times *last
    void nnfmq_begin_work(const nnfmq_core_division *division, nnfmq_pauses *pauses, int64_t until_ns)
    void nnfmq_end_run(const nnfmq_core_division *division, int64_t threads)
    const int NNFMQ_POOL_MAX_WORKERS
    nnfmq_pool *nnfmq_pool_new()
    void nnfmq_pool_run(nnfmq_pool *pool, const nnfmq_core_division *division, nnfmq_pauses *pauses,
                        const nnfmq_launch *launches, int64_t first, int64_t last, char *scratch, int64_t stride,
                        int64_t *times)
    void nnfmq_pool_work(nnfmq_pool *pool, int64_t me)
    void nnfmq_pool_stop(nnfmq_pool *pool)

cdef extern from *:
    """
    #define nnfmq_pool_sleepers(pool) ((int64_t)atomic_load_explicit(&(pool)->sleepers, memory_order_relaxed))
    """
    int64_t nnfmq_pool_sleepers(nnfmq_pool *pool) nogil

MAX_WORKERS = NNFMQ_POOL_MAX_WORKERS

cdef enum:
    REPEATED_NS = 100000  # between two runs: less than a worker spins


cdef inline int64_t monotonic_ns() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return now.tv_sec * 1000000000 + now.tv_nsec


cdef list take(nnfmq_pauses *pauses):
    """Return the pauses that were kept, and forget them."""
    cdef nnfmq_pause_times each
    cdef int64_t number
    found = []
    for number in range(pauses.count):
        each = pauses.last[number]
        found.append((each.begin_ns, each.end_ns, each.for_class))
    pauses.count = 0
    return found


@cython.final
cdef class LaunchCore:
    """Memory of a pool, and the loops of its threads."""

    cdef nnfmq_pool *pool
    cdef nnfmq_core_division division
    cdef nnfmq_pauses pauses
    cdef nnfmq_pauses work_pauses
    cdef int64_t ended_ns  # the last run

    def __cinit__(self):
        self.pool = nnfmq_pool_new()
        if self.pool is NULL:
            raise MemoryError("a thread pool")

    def __dealloc__(self):
        free(self.pool)

    def set_workers(self, int64_t count):
        """Let `run` share its launches with workers 1 to `count`. No run may be in progress."""
        if not 0 <= count <= NNFMQ_POOL_MAX_WORKERS:
            raise ValueError(f"{count} workers; at most {NNFMQ_POOL_MAX_WORKERS} are possible")
        self.pool.workers = count

    def divide(self, uintptr_t busy, uintptr_t claims, int64_t count, int64_t own, int64_t cores):
        """Use this process's share of `cores` from the next run on."""
        if count % 8 or not 0 <= own < count:
            raise ValueError(f"busy byte {own} of {count}: their number is a multiple of 8")
        self.division = nnfmq_core_division(
            <const void *>busy, <const void *>claims, count // 8, <void *>(busy + own), cores, own, NULL, NULL, NULL, NULL
        )

    def pause(self, uintptr_t classes, uintptr_t uses, uintptr_t paused, uintptr_t resumed):
        """Pause for processes of higher classes from the next run on. Call `divide` before."""
        self.division.classes = <const void *>classes
        self.division.uses = <void *>uses
        self.division.paused = <void *>paused
        self.division.resumed = <void *>resumed

    def take_pauses(self):
        """Return the pauses since the last call: begin, end, and the class for which the process paused."""
        return take(&self.pauses)

    def begin_work(self, int64_t until_ns):
        """Begin work of other code than launches; pause before it, and return the pause. Blocks, without the GIL."""
        if not self.division.words:
            return []
        with nogil:
            nnfmq_begin_work(&self.division, &self.work_pauses, until_ns)
        return take(&self.work_pauses)

    def end_work(self, int64_t threads):
        """End the work, which used so many threads."""
        if self.division.words:
            nnfmq_end_run(&self.division, threads)

    def run(self, uintptr_t launches, int64_t first, int64_t last, uintptr_t scratch, int64_t stride,
            uintptr_t times=0):
        """Run launch records together with the workers. Blocks, without the GIL. One caller at a time."""
        cdef const nnfmq_core_division *division = &self.division if self.division.words else NULL
        with nogil:
            self.pool.is_repeated = monotonic_ns() - self.ended_ns < REPEATED_NS
            nnfmq_pool_run(self.pool, division, &self.pauses, <const nnfmq_launch *>launches, first, last,
                           <char *>scratch, stride, <int64_t *>times)
            self.ended_ns = monotonic_ns()

    def run_serially(self, uintptr_t launches, int64_t first, int64_t last, uintptr_t scratch, uintptr_t times=0):
        """Run launch records on the calling thread. Blocks, without the GIL. Any number of callers."""
        cdef nnfmq_pauses pauses = self.pauses  # a copy: the other caller has this one
        cdef const nnfmq_core_division *division = &self.division if self.division.words else NULL
        with nogil:
            nnfmq_pool_run(NULL, division, &pauses, <const nnfmq_launch *>launches, first, last, <char *>scratch, 0,
                           <int64_t *>times)

    def work(self, int64_t number):
        """Be worker `number` until `stop` is called. Blocks, without the GIL."""
        if not 1 <= number <= NNFMQ_POOL_MAX_WORKERS:
            raise ValueError(f"worker {number}; the numbers are 1 to {NNFMQ_POOL_MAX_WORKERS}")
        with nogil:
            nnfmq_pool_work(self.pool, number)

    def stop(self):
        """Let all workers return from `work`, for good: the core cannot be used again. No run may be in progress."""
        nnfmq_pool_stop(self.pool)

    @property
    def sleepers(self):
        """The workers counted as sleepers since the last wake-up; some may not have slept after all."""
        return nnfmq_pool_sleepers(self.pool)
