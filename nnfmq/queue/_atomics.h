/* The compiled core's ordered accesses to shared memory: ring and event flag word, as C11 inline functions.
 *
 * The peer may write any value into the counters at any time. Three rules keep that harmless:
 *   1. A call loads each counter once, and computes on the copies (struct nnfmq_counters).
 *   2. Every offset is taken modulo the ring's size, and every length is checked against it before bytes are copied.
 *   3. Records are copied first; then one release store of a counter publishes all of them.
 * No function allocates, logs or uses Python. docs/reference/queue.md describes the memory and the protocol.
 *
 * Each pair of accesses that synchronizes two threads has a label, which stands at both ends here and in _pycore.py:
 *
 *   records  The writer stores the write counter with release after it copied the records; the reader loads it with
 *            acquire before it copies them. So a reader that sees the counter sees the records.
 *   space    The reader stores the read counter with release after it copied the records; the writer loads it with
 *            acquire before it overwrites them. So the writer never overwrites what is still being copied.
 *   event    A thread that changed the ring ORs bits into the event flag word; a thread that wants to sleep clears
 *            them and checks the ring again. Both are read-modify-writes in one total order (seq_cst). If the OR comes
 *            first, the AND reads its value (synchronizes with it), and the check sees the change of the ring. If the
 *            AND comes first, the OR finds the bit cleared and wakes, and the futex compares the word before it sleeps.
 *   reserve  An unsynchronized writer stores the reserved counter, then a release fence, then the records. A reader
 *            copies records, then an acquire fence, then loads the reserved counter. If it copied even one byte of the
 *            new records, the fences synchronize (C11 7.17.4): it sees the reserved counter too, and rejects the copy.
 *   dead     The watcher sets the peer death flag, then ORs all bits; a waiter clears its bits, then loads the flag. As
 *            with `event`, the waiter sees the flag, or it is woken.
 *
 * Copies of records are ordinary memcpy calls. For `reserve` they race by design: C11 calls that undefined, but the
 * functions are compiled into code that calls memcpy or its inline form, and the result is discarded after a race.
 * The Linux seqlock relies on the same.
 */
#ifndef NNFMQ_ATOMICS_H
#define NNFMQ_ATOMICS_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "../_pause.h"
#include "_hybrid_polling.h"

#define NNFMQ_NOT_FULL 0x1u
#define NNFMQ_NOT_EMPTY 0x2u
#define NNFMQ_NO_DEADLINE INT64_MAX

_Static_assert(sizeof(_Atomic uint64_t) == 8 && sizeof(_Atomic uint32_t) == 4, "atomics must have no hidden lock");

/* Results of the functions that load the counters. */
enum { NNFMQ_OK = 1, NNFMQ_CORRUPTED = 2 };

/* The side that waits. */
enum { NNFMQ_READER = 0, NNFMQ_WRITER = 1 };

typedef struct {
    _Atomic uint32_t *word;             /* shared */
    const _Atomic uint32_t *peer_death; /* private to this process */
    _Atomic uint32_t closing;           /* private to this process: another thread closes the object */
} nnfmq_event;

typedef struct {
    _Atomic uint64_t *read_counter;
    _Atomic uint64_t *write_counter;
    _Atomic uint64_t *reserved_counter; /* unsynchronized queues only, else NULL: the write counter after this write */
    _Atomic uint16_t *writer_cpu;       /* a hint: CPU number + 1 of the thread that sent last, 0 = unknown */
    unsigned char *ring;
    uint64_t ring_bytes;
    uint64_t quantum;
    uint64_t history_bytes; /* what an unsynchronized reader keeps after an overflow: 0, or half of the ring */
} nnfmq_ring;

/* Copies of the counters, and how many bytes may be read or written. */
typedef struct {
    uint64_t w, r;
    uint64_t bytes;
} nnfmq_counters;

static inline int64_t nnfmq_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* ---- event flag word ---- */

/* Whether all waits must end. Acquire: what the watcher stored before the flag is visible. */
static inline int nnfmq_is_cancelled(const nnfmq_event *event) {
    return atomic_load_explicit(event->peer_death, memory_order_acquire) != 0 /* SYNC dead */
           || atomic_load_explicit(&event->closing, memory_order_acquire) != 0;
}

static inline long nnfmq_futex_wake(_Atomic uint32_t *word, uint32_t mask) {
    return syscall(SYS_futex, word, FUTEX_WAKE_BITSET, INT_MAX, NULL, NULL, mask);
}

/* Returns how many threads were woken. A sleeper cleared its bits before it went to sleep, so if all bits of the mask
 * were set, nobody sleeps on them, and the system call is not needed. */
static inline long nnfmq_wake(_Atomic uint32_t *word, uint32_t mask) {
    uint32_t old = atomic_fetch_or_explicit(word, mask, memory_order_seq_cst); /* SYNC event, SYNC dead */
    return (old & mask) == mask ? 0 : nnfmq_futex_wake(word, mask);
}

/* For peer death and close: all bits, and always the system call, because waiters of any bit must wake. */
static inline long nnfmq_wake_all(_Atomic uint32_t *word) {
    atomic_fetch_or_explicit(word, UINT32_MAX, memory_order_seq_cst); /* SYNC event, SYNC dead */
    return nnfmq_futex_wake(word, UINT32_MAX);
}

/* Clears the bits of `mask`; returns the word as it was before. */
static inline uint32_t nnfmq_fetch_clear(_Atomic uint32_t *word, uint32_t mask) {
    return atomic_fetch_and_explicit(word, ~mask, memory_order_seq_cst); /* SYNC event, SYNC dead */
}

/* Returns 0 when woken, else an errno: EAGAIN (the word is not `expected`), EINTR, ETIMEDOUT. */
static inline int nnfmq_futex_wait(_Atomic uint32_t *word, uint32_t expected, int64_t deadline_ns, uint32_t mask) {
    struct timespec at = {deadline_ns / 1000000000, deadline_ns % 1000000000};
    struct timespec *limit = deadline_ns == NNFMQ_NO_DEADLINE ? NULL : &at;
    return syscall(SYS_futex, word, FUTEX_WAIT_BITSET, expected, limit, NULL, mask) == 0 ? 0 : errno;
}

/* One round of an event flag's wait: sets *bits and returns 0, or sleeps and returns the futex's result. */
static inline int nnfmq_wait_bits(const nnfmq_event *event, uint32_t mask, int64_t deadline_ns, uint32_t *bits) {
    uint32_t old = nnfmq_fetch_clear(event->word, mask);
    *bits = old & mask;
    if (*bits || nnfmq_is_cancelled(event))
        return 0;
    return nnfmq_futex_wait(event->word, old & ~mask, deadline_ns, mask);
}

/* ---- ring ---- */

static inline void nnfmq_reset(const nnfmq_ring *q) {
    atomic_store_explicit(q->read_counter, 0, memory_order_release); /* SYNC space */
    if (q->reserved_counter)
        atomic_store_explicit(q->reserved_counter, 0, memory_order_relaxed);
    atomic_store_explicit(q->write_counter, 0, memory_order_release); /* SYNC records */
}

/* How many bytes can be read, as either side sees it. More than the ring's size means overflow or a corrupted counter.
 * The write counter is loaded first, as libfmq does: the read counter can only be newer then, so the result is not
 * larger than what was there, unless a counter is corrupted. */
static inline uint64_t nnfmq_readable_bytes(const nnfmq_ring *q) {
    uint64_t w = atomic_load_explicit(q->write_counter, memory_order_acquire); /* SYNC records */
    uint64_t r = atomic_load_explicit(q->read_counter, memory_order_acquire);  /* SYNC space */
    return w < r ? 0 : w - r;
}

/* Moves the read counter after an overflow, as libfmq's beginRead: nothing is left, or the newest half of the ring. */
static inline void nnfmq_recover_from_overflow(const nnfmq_ring *q, uint64_t w) {
    uint64_t kept = q->history_bytes < w ? q->history_bytes : w;
    atomic_store_explicit(q->read_counter, w - kept, memory_order_release); /* SYNC space */
}

/* Loads the counters for the reader; 0 bytes unless NNFMQ_OK. The read counter is relaxed: only this side stores it. */
static inline int nnfmq_begin_read(const nnfmq_ring *q, nnfmq_counters *c) {
    c->w = atomic_load_explicit(q->write_counter, memory_order_acquire); /* SYNC records */
    c->r = atomic_load_explicit(q->read_counter, memory_order_relaxed);
    c->bytes = 0;
    if (c->w % q->quantum || c->r % q->quantum)
        return NNFMQ_CORRUPTED;
    if (c->w - c->r > q->ring_bytes) { /* unsigned: also if w < r */
        nnfmq_recover_from_overflow(q, c->w);
        return NNFMQ_CORRUPTED;
    }
    c->bytes = c->w - c->r;
    return NNFMQ_OK;
}

/* Copies `bytes` <= ring_bytes that start at counter `r`; the range may cross the ring's end once. */
static inline void nnfmq_copy_out(const nnfmq_ring *q, uint64_t r, void *target, uint64_t bytes) {
    uint64_t start = r % q->ring_bytes;
    uint64_t first = q->ring_bytes - start < bytes ? q->ring_bytes - start : bytes;
    memcpy(target, q->ring + start, first);
    memcpy((unsigned char *)target + first, q->ring, bytes - first);
}

static inline void nnfmq_commit_read(const nnfmq_ring *q, uint64_t r, uint64_t bytes) {
    atomic_store_explicit(q->read_counter, r + bytes, memory_order_release); /* SYNC space */
}

/* For a reader that copied records while the writer may have overwritten them: returns 0 if it may have, and the copy
 * must be discarded. The fence keeps the loads of the copy before the loads of the counters. libfmq checks only the
 * write counter, which its writer stores after the bytes, so its readers can return a torn record. */
static inline int nnfmq_commit_if_intact(const nnfmq_ring *q, uint64_t r, uint64_t bytes) {
    atomic_thread_fence(memory_order_acquire); /* SYNC reserve */
    uint64_t w = atomic_load_explicit(q->write_counter, memory_order_acquire); /* SYNC records */
    uint64_t end = w;
    if (q->reserved_counter)
        end = atomic_load_explicit(q->reserved_counter, memory_order_relaxed); /* SYNC reserve */
    if (w - r > q->ring_bytes || (end > r && end - r > q->ring_bytes)) {
        nnfmq_recover_from_overflow(q, w);
        return 0;
    }
    nnfmq_commit_read(q, r, bytes);
    return 1;
}

/* Loads the counters for the writer. `bytes` is what libfmq would accept, also if the result is NNFMQ_CORRUPTED (w < r
 * counts as empty). The write counter is relaxed: only this side stores it. */
static inline int nnfmq_begin_write(const nnfmq_ring *q, nnfmq_counters *c) {
    c->w = atomic_load_explicit(q->write_counter, memory_order_relaxed);
    c->r = atomic_load_explicit(q->read_counter, memory_order_acquire); /* SYNC space */
    uint64_t used = c->w < c->r ? 0 : c->w - c->r;
    c->bytes = used > q->ring_bytes ? 0 : q->ring_bytes - used;
    return c->w < c->r || used > q->ring_bytes || c->w % q->quantum ? NNFMQ_CORRUPTED : NNFMQ_OK;
}

/* The same for an unsynchronized writer: the whole ring is free, whatever the readers do. */
static inline int nnfmq_begin_unsynchronized_write(const nnfmq_ring *q, nnfmq_counters *c) {
    c->w = atomic_load_explicit(q->write_counter, memory_order_relaxed);
    c->r = atomic_load_explicit(q->read_counter, memory_order_relaxed);
    c->bytes = c->w % q->quantum ? 0 : q->ring_bytes;
    return c->bytes ? NNFMQ_OK : NNFMQ_CORRUPTED;
}

/* Announces that the `bytes` after counter `w` will be overwritten. The fence orders the announcement before them. */
static inline void nnfmq_reserve(const nnfmq_ring *q, uint64_t w, uint64_t bytes) {
    atomic_store_explicit(q->reserved_counter, w + bytes, memory_order_relaxed);
    atomic_thread_fence(memory_order_release); /* SYNC reserve */
}

/* Publishes records that the caller wrote into the ring. */
static inline void nnfmq_publish(const nnfmq_ring *q, uint64_t w, uint64_t bytes) {
    atomic_store_explicit(q->write_counter, w + bytes, memory_order_release); /* SYNC records */
}

/* Copies `bytes` <= ring_bytes to counter `w`, and publishes all of them with one store. */
static inline void nnfmq_commit_write(const nnfmq_ring *q, uint64_t w, const void *source, uint64_t bytes) {
    uint64_t start = w % q->ring_bytes;
    uint64_t first = q->ring_bytes - start < bytes ? q->ring_bytes - start : bytes;
    memcpy(q->ring + start, source, first);
    memcpy(q->ring, (const unsigned char *)source + first, bytes - first);
    atomic_store_explicit(q->write_counter, w + bytes, memory_order_release); /* SYNC records */
}

/* ---- waiting ---- */

/* Whether an attempt of `bytes` may succeed. True for invalid counters as well: the attempt then reports them. */
static inline int nnfmq_is_ready(const nnfmq_ring *q, int side, uint64_t bytes) {
    uint64_t w = atomic_load_explicit(q->write_counter, memory_order_acquire); /* SYNC records */
    uint64_t r = atomic_load_explicit(q->read_counter, memory_order_acquire);  /* SYNC space */
    uint64_t used = w - r;
    if (side == NNFMQ_READER)
        return used != 0 && (used >= bytes || used % q->quantum != 0);
    return used > q->ring_bytes || q->ring_bytes - used >= bytes || w % q->quantum != 0;
}

/* Polls until ready, cancelled, or `until_ns`; returns 0 in the last case. */
static inline int nnfmq_poll(const nnfmq_ring *q, const nnfmq_event *event, int side, uint64_t bytes,
                             int64_t until_ns) {
    do {
        for (int i = 0; i < 8; i++) { /* reading the clock costs as much as several checks */
            if (nnfmq_is_ready(q, side, bytes) || nnfmq_is_cancelled(event))
                return 1;
            nnfmq_pause();
        }
    } while (nnfmq_now() < until_ns);
    return 0;
}

static inline void nnfmq_publish_cpu(const nnfmq_ring *q, uint16_t *published) {
    uint16_t cpu = (uint16_t)(sched_getcpu() + 1);
    if (cpu != *published) /* a store would take the cache line away from a reader that polls */
        atomic_store_explicit(q->writer_cpu, cpu, memory_order_relaxed);
    *published = cpu;
}

static inline int nnfmq_is_writer_on_this_cpu(const nnfmq_ring *q) {
    return atomic_load_explicit(q->writer_cpu, memory_order_relaxed) == (uint16_t)(sched_getcpu() + 1);
}

/* Sleeps once. The order loses no wake-up: clear the bit, check the condition, sleep only if the word is unchanged (see
 * `event` above). Returns 0 if an attempt may succeed, else the futex's result. */
static inline int nnfmq_sleep(const nnfmq_ring *q, const nnfmq_event *event, int side, uint64_t bytes,
                              int64_t deadline_ns) {
    uint32_t mask = side == NNFMQ_READER ? NNFMQ_NOT_EMPTY : NNFMQ_NOT_FULL;
    uint32_t old = nnfmq_fetch_clear(event->word, mask);
    if (old & mask || nnfmq_is_ready(q, side, bytes) || nnfmq_is_cancelled(event))
        return 0;
    return nnfmq_futex_wait(event->word, old & ~mask, deadline_ns, mask);
}

/* The same with exact timers. The timer slack belongs to the application's thread, so it is restored. */
static inline int nnfmq_timed_sleep(const nnfmq_ring *q, const nnfmq_event *event, int side, uint64_t bytes,
                                    int64_t deadline_ns) {
    int slack = prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0);
    prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
    int error = nnfmq_sleep(q, event, side, bytes, deadline_ns);
    prctl(PR_SET_TIMERSLACK, (unsigned long)slack, 0, 0, 0);
    return error;
}

/* The steps of nnfmq_sleep before the sleep, for threads that sleep in futex_waitv: returns 0 if an attempt may
 * succeed, else 1 and the value to sleep on. */
static inline int nnfmq_prepare_to_wait(const nnfmq_ring *q, const nnfmq_event *event, int side, uint64_t bytes,
                                        uint32_t *expected) {
    uint32_t mask = side == NNFMQ_READER ? NNFMQ_NOT_EMPTY : NNFMQ_NOT_FULL;
    *expected = nnfmq_fetch_clear(event->word, mask) & ~mask;
    return !nnfmq_is_ready(q, side, bytes) && !nnfmq_is_cancelled(event);
}

/* As nnfmq_sleep, on any bits of any word. `lifetime` is the queue's own word, whose flags also end the wait. */
static inline int nnfmq_sleep_on(const nnfmq_ring *q, const nnfmq_event *event, const nnfmq_event *lifetime, int side,
                                 uint64_t bytes, int64_t deadline_ns, uint32_t mask) {
    uint32_t old = nnfmq_fetch_clear(event->word, mask);
    if (old & mask || nnfmq_is_ready(q, side, bytes) || nnfmq_is_cancelled(event) || nnfmq_is_cancelled(lifetime))
        return 0;
    return nnfmq_futex_wait(event->word, old & ~mask, deadline_ns, mask);
}

#endif
