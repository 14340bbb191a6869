/* The compiled core's ordered accesses to a trace ring, as C11 inline functions.
 *
 * One process writes (with the GIL held), any process reads at any time and never blocks the writer. The writer keeps
 * its cursor in private memory: whatever a peer stores in a ring that it has mapped too, it reads only what it wrote.
 * `trace_layout.py` describes the memory; `_pytrace_core.py` is the specification.
 *
 * Each pair of accesses that synchronizes two processes has a label, which stands at both ends here and there:
 *
 *   slices   The writer stores a record, then the cursor with release; the reader loads the cursor with acquire, then
 *            copies records. So it sees every record below the cursor.
 *   overwrite  The writer stores the cursor, then a release fence, then the next record; the reader copies records,
 *            then an acquire fence, then loads the cursor again. If it copied even one byte of the new record, it sees
 *            the cursor that precedes it, and drops what that record overwrites.
 *   names    The writer copies a name, then stores the size of all names with release; the reader loads the size with
 *            acquire, then copies the names.
 */
#ifndef NNFMQ_TRACE_RING_H
#define NNFMQ_TRACE_RING_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define NNFMQ_TRACE_CURSOR 8     /* offsets in a ring's memory, as in trace_layout.py */
#define NNFMQ_TRACE_NAMES_SIZE 16
#define NNFMQ_TRACE_NAMES 128
#define NNFMQ_TRACE_RECORDS 32768

typedef struct {
    uint64_t begin_ns, end_ns, request;
    uint32_t name, thread;
} nnfmq_slice;

_Static_assert(sizeof(nnfmq_slice) == 32 && sizeof(_Atomic uint64_t) == 8, "the layout of a record");

typedef struct {
    unsigned char *memory;
    uint64_t capacity, written, names_size;
} nnfmq_trace_ring;

static inline int64_t nnfmq_trace_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static _Thread_local uint32_t nnfmq_trace_tid; /* 0: not asked for yet */

static void nnfmq_trace_forget_thread(void) {
    nnfmq_trace_tid = 0; /* in a forked child: the only thread has another id there */
}

static inline uint32_t nnfmq_trace_thread(void) {
    if (!nnfmq_trace_tid)
        nnfmq_trace_tid = (uint32_t)syscall(SYS_gettid);
    return nnfmq_trace_tid;
}

static inline _Atomic uint64_t *nnfmq_trace_word(const unsigned char *memory, uint64_t offset) {
    return (_Atomic uint64_t *)(uintptr_t)(memory + offset);
}

static inline void nnfmq_trace_write(nnfmq_trace_ring *ring, uint32_t name, uint64_t request, int64_t begin_ns,
                                     int64_t end_ns) {
    const nnfmq_slice slice = {(uint64_t)begin_ns, (uint64_t)end_ns, request, name, nnfmq_trace_thread()};
    atomic_thread_fence(memory_order_release); /* SYNC overwrite */
    memcpy(ring->memory + NNFMQ_TRACE_RECORDS + sizeof slice * (ring->written % ring->capacity), &slice, sizeof slice);
    ring->written++;
    atomic_store_explicit(nnfmq_trace_word(ring->memory, NNFMQ_TRACE_CURSOR), ring->written,
                          memory_order_release); /* SYNC slices, overwrite */
}

static inline uint64_t nnfmq_trace_load(const unsigned char *memory, uint64_t offset) {
    return atomic_load_explicit(nnfmq_trace_word(memory, offset), memory_order_acquire); /* SYNC slices, names */
}

/* Loads the cursor after records were copied. */
static inline uint64_t nnfmq_trace_reload(const unsigned char *memory) {
    atomic_thread_fence(memory_order_acquire); /* SYNC overwrite */
    return atomic_load_explicit(nnfmq_trace_word(memory, NNFMQ_TRACE_CURSOR), memory_order_relaxed);
}

/* Appends a name of `size` bytes, which fits. */
static inline void nnfmq_trace_add_name(nnfmq_trace_ring *ring, const char *name, uint16_t size) {
    unsigned char *end = ring->memory + NNFMQ_TRACE_NAMES + ring->names_size;
    memcpy(end, &size, sizeof size);
    memcpy(end + sizeof size, name, size);
    ring->names_size += sizeof size + size;
    atomic_store_explicit(nnfmq_trace_word(ring->memory, NNFMQ_TRACE_NAMES_SIZE), ring->names_size,
                          memory_order_release); /* SYNC names */
}

#endif
