/* Ring and event word as C11 inline functions: the only ordered access to shared memory of the compiled core.
 *
 * Rules that keep it small: each call takes each counter once and computes on the copy; every index is taken modulo
 * the ring, every length is checked against it before a byte is copied, so no value that a peer writes into the
 * counters leads outside. Payload first, then one release store. No call here allocates, logs or knows Python.
 * Counters: FMQ_FACTS 1.3, 1.4, 1.11; event word: 1.7; orders: 1.9.
 *
 * SYNC labels, each at both of its ends (the Python core has the same):
 *   records  the writer's release store of the write counter - the reader's acquire load
 *   space    the reader's release store of the read counter  - the writer's acquire load
 *   event    fetch_or by who changed the ring                - fetch_and by who waits
 *   lap      the overwriting writer says how far it will write, then fence and copy - the reader's fence after its
 *            own copy, then its look at that
 *   dead     the watcher raises the flag, then fetch_or      - the waiter's fetch_and, then its load of the flag
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

#include "_hybrid_polling.h"

#define NNFMQ_NOT_FULL 0x1u
#define NNFMQ_NOT_EMPTY 0x2u
#define NNFMQ_NO_DEADLINE INT64_MAX

_Static_assert(sizeof(_Atomic uint64_t) == 8 && sizeof(_Atomic uint32_t) == 4, "atomics must have no hidden lock");

/* Answers of one try. */
enum { NNFMQ_REFUSED = 0, NNFMQ_DONE = 1, NNFMQ_CORRUPTED = 2 };

/* Which side waits. */
enum { NNFMQ_READER = 0, NNFMQ_WRITER = 1 };

typedef struct {
    _Atomic uint32_t *word;
    const _Atomic uint32_t *dead; /* private to this process */
    _Atomic uint32_t closing;     /* private to this process: the object is being closed by another thread */
} nnfmq_event;

typedef struct {
    _Atomic uint64_t *read_counter;
    _Atomic uint64_t *write_counter;
    _Atomic uint64_t *intent; /* unsynchronized only, else NULL: where the write counter will be after this write */
    _Atomic uint16_t *writer_cpu; /* the CPU from which was sent last, + 1; a guess, 0 = unknown */
    unsigned char *ring;
    uint64_t ring_bytes;
    uint64_t quantum;
    uint64_t history_bytes; /* how much an overflowed reader keeps: 0, or half of the ring (unsynchronized only) */
} nnfmq_ring;

/* One look at the counters, each taken once: everything after computes on these copies. */
typedef struct {
    uint64_t w, r;
    uint64_t bytes; /* what may be read, or written */
} nnfmq_look;

static inline int64_t nnfmq_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static inline void nnfmq_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb" ::: "memory"); /* a real delay; `yield` is a no-op on most cores */
#endif
}

/* ---- event word ---- */

static inline int nnfmq_is_stopped(const nnfmq_event *event) {
    return atomic_load_explicit(event->dead, memory_order_acquire) != 0 /* SYNC dead */
           || atomic_load_explicit(&event->closing, memory_order_acquire) != 0;
}

static inline long nnfmq_futex_wake(_Atomic uint32_t *word, uint32_t mask) {
    return syscall(SYS_futex, word, FUTEX_WAKE_BITSET, INT_MAX, NULL, NULL, mask);
}

/* Returns the number of sleepers woken. If every bit was set already nobody sleeps: a sleeper has cleared its own. */
static inline long nnfmq_wake(_Atomic uint32_t *word, uint32_t mask) {
    uint32_t old = atomic_fetch_or_explicit(word, mask, memory_order_seq_cst); /* SYNC event, SYNC dead */
    return (old & mask) == mask ? 0 : nnfmq_futex_wake(word, mask);
}

/* For death and closing: every bit, and the system call in any case. */
static inline long nnfmq_wake_all(_Atomic uint32_t *word) {
    atomic_fetch_or_explicit(word, UINT32_MAX, memory_order_seq_cst); /* SYNC event, SYNC dead */
    return nnfmq_futex_wake(word, UINT32_MAX);
}

/* Clears the bits of `mask` and returns the word as it was. */
static inline uint32_t nnfmq_take_bits(_Atomic uint32_t *word, uint32_t mask) {
    return atomic_fetch_and_explicit(word, ~mask, memory_order_seq_cst); /* SYNC event, SYNC dead */
}

/* Returns 0 when woken, else an errno: EAGAIN (the word is not `expected`), EINTR, ETIMEDOUT. */
static inline int nnfmq_futex_wait(_Atomic uint32_t *word, uint32_t expected, int64_t deadline_ns, uint32_t mask) {
    struct timespec at = {deadline_ns / 1000000000, deadline_ns % 1000000000};
    struct timespec *limit = deadline_ns == NNFMQ_NO_DEADLINE ? NULL : &at;
    return syscall(SYS_futex, word, FUTEX_WAIT_BITSET, expected, limit, NULL, mask) == 0 ? 0 : errno;
}

/* One round of an event flag's wait: sets *bits and returns 0, or returns the futex's errno. */
static inline int nnfmq_wait_bits(const nnfmq_event *event, uint32_t mask, int64_t deadline_ns, uint32_t *bits) {
    uint32_t old = nnfmq_take_bits(event->word, mask);
    *bits = old & mask;
    if (*bits || nnfmq_is_stopped(event))
        return 0;
    return nnfmq_futex_wait(event->word, old & ~mask, deadline_ns, mask);
}

/* ---- ring ---- */

static inline void nnfmq_reset(const nnfmq_ring *q) {
    atomic_store_explicit(q->read_counter, 0, memory_order_release);  /* SYNC space */
    if (q->intent)
        atomic_store_explicit(q->intent, 0, memory_order_relaxed);
    atomic_store_explicit(q->write_counter, 0, memory_order_release); /* SYNC records */
}

/* Bytes that can be read as either side sees them; may exceed the ring if a peer corrupted a counter. */
static inline uint64_t nnfmq_readable_bytes(const nnfmq_ring *q) {
    uint64_t w = atomic_load_explicit(q->write_counter, memory_order_acquire); /* SYNC records */
    uint64_t r = atomic_load_explicit(q->read_counter, memory_order_acquire);  /* SYNC space */
    return w < r ? 0 : w - r;
}

/* Heals overflow as libfmq does: nothing is left to read, or the newest half of the ring. */
static inline void nnfmq_skip_lost(const nnfmq_ring *q, uint64_t w) {
    uint64_t kept = q->history_bytes < w ? q->history_bytes : w;
    atomic_store_explicit(q->read_counter, w - kept, memory_order_release); /* SYNC space */
}

/* The reader's look; 0 bytes unless DONE. */
static inline int nnfmq_begin_read(const nnfmq_ring *q, nnfmq_look *look) {
    look->w = atomic_load_explicit(q->write_counter, memory_order_acquire); /* SYNC records */
    look->r = atomic_load_explicit(q->read_counter, memory_order_relaxed);
    look->bytes = 0;
    if (look->w % q->quantum || look->r % q->quantum)
        return NNFMQ_CORRUPTED;
    if (look->w - look->r > q->ring_bytes) {
        nnfmq_skip_lost(q, look->w);
        return NNFMQ_CORRUPTED;
    }
    look->bytes = look->w - look->r;
    return NNFMQ_DONE;
}

/* Copies `bytes` <= ring_bytes that start at counter `r`; may cross the ring's end once. */
static inline void nnfmq_copy_out(const nnfmq_ring *q, uint64_t r, void *target, uint64_t bytes) {
    uint64_t at = r % q->ring_bytes;
    uint64_t first = q->ring_bytes - at < bytes ? q->ring_bytes - at : bytes;
    memcpy(target, q->ring + at, first);
    memcpy((unsigned char *)target + first, q->ring, bytes - first);
}

static inline void nnfmq_commit_read(const nnfmq_ring *q, uint64_t r, uint64_t bytes) {
    atomic_store_explicit(q->read_counter, r + bytes, memory_order_release); /* SYNC space */
}

/* For a reader that the writer may lap while it copies: 0 where it did, and the bytes copied are not to be believed. */
static inline int nnfmq_commit_unless_lapped(const nnfmq_ring *q, uint64_t r, uint64_t bytes) {
    atomic_thread_fence(memory_order_acquire); /* SYNC lap: the copy is over before the counter is looked at again */
    uint64_t w = atomic_load_explicit(q->write_counter, memory_order_acquire); /* SYNC records */
    uint64_t end = q->intent ? atomic_load_explicit(q->intent, memory_order_relaxed) : w; /* SYNC lap */
    if (w - r > q->ring_bytes || (end > r && end - r > q->ring_bytes)) {
        nnfmq_skip_lost(q, w);
        return 0;
    }
    nnfmq_commit_read(q, r, bytes);
    return 1;
}

/* The writer's look; bytes as libfmq computes them, also where the answer is CORRUPTED (w < r counts as empty). */
static inline int nnfmq_begin_write(const nnfmq_ring *q, nnfmq_look *look) {
    look->w = atomic_load_explicit(q->write_counter, memory_order_relaxed);
    look->r = atomic_load_explicit(q->read_counter, memory_order_acquire); /* SYNC space */
    uint64_t used = look->w < look->r ? 0 : look->w - look->r;
    look->bytes = used > q->ring_bytes ? 0 : q->ring_bytes - used;
    return look->w < look->r || used > q->ring_bytes || look->w % q->quantum ? NNFMQ_CORRUPTED : NNFMQ_DONE;
}

/* The look of a writer that overwrites: the whole ring is room, and no reader is asked. */
static inline int nnfmq_begin_overwrite(const nnfmq_ring *q, nnfmq_look *look) {
    look->w = atomic_load_explicit(q->write_counter, memory_order_relaxed);
    look->r = atomic_load_explicit(q->read_counter, memory_order_relaxed);
    look->bytes = look->w % q->quantum ? 0 : q->ring_bytes;
    return look->bytes ? NNFMQ_DONE : NNFMQ_CORRUPTED;
}

/* Says that `bytes` after counter `w` are about to be overwritten: libfmq leaves its readers to find out too late. */
static inline void nnfmq_announce(const nnfmq_ring *q, uint64_t w, uint64_t bytes) {
    atomic_store_explicit(q->intent, w + bytes, memory_order_relaxed);
    atomic_thread_fence(memory_order_release); /* SYNC lap: whoever sees the new bytes sees this, too */
}

/* Publishes what was written into the ring by other means. */
static inline void nnfmq_publish(const nnfmq_ring *q, uint64_t w, uint64_t bytes) {
    atomic_store_explicit(q->write_counter, w + bytes, memory_order_release); /* SYNC records */
}

/* Copies `bytes` <= ring_bytes to counter `w` and publishes them all at once. */
static inline void nnfmq_commit_write(const nnfmq_ring *q, uint64_t w, const void *source, uint64_t bytes) {
    uint64_t at = w % q->ring_bytes;
    uint64_t first = q->ring_bytes - at < bytes ? q->ring_bytes - at : bytes;
    memcpy(q->ring + at, source, first);
    memcpy(q->ring, (const unsigned char *)source + first, bytes - first);
    atomic_store_explicit(q->write_counter, w + bytes, memory_order_release); /* SYNC records */
}

/* ---- waiting ---- */

/* True if a try of `bytes` is worth while. Impossible counters count as ready: the try then says so. */
static inline int nnfmq_is_ready(const nnfmq_ring *q, int side, uint64_t bytes) {
    uint64_t w = atomic_load_explicit(q->write_counter, memory_order_acquire); /* SYNC records */
    uint64_t r = atomic_load_explicit(q->read_counter, memory_order_acquire);  /* SYNC space */
    uint64_t used = w - r;
    if (side == NNFMQ_READER)
        return used != 0 && (used >= bytes || used % q->quantum != 0);
    return used > q->ring_bytes || q->ring_bytes - used >= bytes || w % q->quantum != 0;
}

/* Polls until ready, stopped or `until_ns`; returns 0 in the last case. */
static inline int nnfmq_poll(const nnfmq_ring *q, const nnfmq_event *event, int side, uint64_t bytes,
                             int64_t until_ns) {
    do {
        for (int i = 0; i < 8; i++) { /* a clock reading costs as much as a few looks */
            if (nnfmq_is_ready(q, side, bytes) || nnfmq_is_stopped(event))
                return 1;
            nnfmq_pause();
        }
    } while (nnfmq_now() < until_ns);
    return 0;
}

static inline void nnfmq_publish_cpu(const nnfmq_ring *q, uint16_t *published) {
    uint16_t cpu = (uint16_t)(sched_getcpu() + 1);
    if (cpu != *published)
        atomic_store_explicit(q->writer_cpu, cpu, memory_order_relaxed);
    *published = cpu;
}

static inline int nnfmq_writer_is_here(const nnfmq_ring *q) {
    return atomic_load_explicit(q->writer_cpu, memory_order_relaxed) == (uint16_t)(sched_getcpu() + 1);
}

/* Sleeps once, in the order that loses no wake-up: consume the bit, look again, sleep only if the word stood still. */
static inline int nnfmq_sleep(const nnfmq_ring *q, const nnfmq_event *event, int side, uint64_t bytes,
                              int64_t deadline_ns) {
    uint32_t mask = side == NNFMQ_READER ? NNFMQ_NOT_EMPTY : NNFMQ_NOT_FULL;
    uint32_t old = nnfmq_take_bits(event->word, mask);
    if (old & mask || nnfmq_is_ready(q, side, bytes) || nnfmq_is_stopped(event))
        return 0;
    return nnfmq_futex_wait(event->word, old & ~mask, deadline_ns, mask);
}

/* The same, to end at the very deadline: timers of this thread, which is the application's, are exact meanwhile. */
static inline int nnfmq_nap(const nnfmq_ring *q, const nnfmq_event *event, int side, uint64_t bytes,
                            int64_t deadline_ns) {
    int slack = prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0);
    prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
    int error = nnfmq_sleep(q, event, side, bytes, deadline_ns);
    prctl(PR_SET_TIMERSLACK, (unsigned long)slack, 0, 0, 0);
    return error;
}

/* The same up to the sleep, for who sleeps by other means: returns 0 where a try is worth while, else sets *expected. */
static inline int nnfmq_arm(const nnfmq_ring *q, const nnfmq_event *event, int side, uint64_t bytes,
                            uint32_t *expected) {
    uint32_t mask = side == NNFMQ_READER ? NNFMQ_NOT_EMPTY : NNFMQ_NOT_FULL;
    *expected = nnfmq_take_bits(event->word, mask) & ~mask;
    return !nnfmq_is_ready(q, side, bytes) && !nnfmq_is_stopped(event);
}

/* As nnfmq_sleep, for a bit of any word; `guard` is what else may end the wait: the queue's own flags. */
static inline int nnfmq_sleep_on(const nnfmq_ring *q, const nnfmq_event *event, const nnfmq_event *guard, int side,
                                 uint64_t bytes, int64_t deadline_ns, uint32_t mask) {
    uint32_t old = nnfmq_take_bits(event->word, mask);
    if (old & mask || nnfmq_is_ready(q, side, bytes) || nnfmq_is_stopped(event) || nnfmq_is_stopped(guard))
        return 0;
    return nnfmq_futex_wait(event->word, old & ~mask, deadline_ns, mask);
}

#endif
