/* A writer and a reader thread over _atomics.h, for ThreadSanitizer and for other CPUs. By hand:
 *
 *     cc -std=c11 -O1 -g -fno-builtin -fsanitize=thread -pthread tools/tsan/harness.c -o harness
 *     TSAN_OPTIONS=halt_on_error=1 ./harness 100000
 *
 * (-fno-builtin: gcc would put its own copy loop in memcpy's place, which ThreadSanitizer does not see.)
 *
 * The writer sends numbered records in batches of 1 to 4 through a ring of 7, and waits for space; the reader checks
 * every number, in reads of 1 to 3. Then the reader waits for a record that is never sent, until a third thread sets the
 * peer death flag. Exit status 0: success; 1: a wrong record, or a wait that does not end; 66 (ThreadSanitizer's): a
 * data race.
 *
 * -DSEED_RELAXED_RELEASE, -DSEED_RELAXED_ACQUIRE, -DSEED_EARLY_PUBLISH and -DSEED_PLAIN_EVENT seed bugs, which
 * must be found. Not covered: the unsynchronized flavor, whose readers race with the writer by design.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#if defined SEED_RELAXED_RELEASE || defined SEED_RELAXED_ACQUIRE || defined SEED_EARLY_PUBLISH \
    || defined SEED_PLAIN_EVENT
#define SEEDED
#endif
#ifdef SEED_RELAXED_RELEASE
#define memory_order_release memory_order_relaxed
#endif
#ifdef SEED_RELAXED_ACQUIRE
#define memory_order_acquire memory_order_relaxed
#endif
#ifdef SEED_PLAIN_EVENT
static inline uint32_t plain_or(volatile uint32_t *word, uint32_t mask) {
    uint32_t old = *word;
    *word = old | mask;
    return old;
}
#undef atomic_fetch_or_explicit
#define atomic_fetch_or_explicit(word, mask, order) plain_or((volatile uint32_t *)(word), mask)
#endif

#include "../../nnfmq/queue/_atomics.h"

enum { COUNT = 7, QUANTUM = 24, RING_BYTES = COUNT * QUANTUM };

static _Atomic uint64_t read_counter, write_counter;
static _Atomic uint32_t event_flag_word, peer_death;
static unsigned char ring_bytes[RING_BYTES] __attribute__((aligned(8)));
static _Atomic int is_done;

/* Each thread has its own objects over the shared words, as two processes have. */
static nnfmq_ring new_ring(void) {
    nnfmq_ring ring = {0};
    ring.read_counter = &read_counter;
    ring.write_counter = &write_counter;
    ring.ring = ring_bytes;
    ring.ring_bytes = RING_BYTES;
    ring.quantum = QUANTUM;
    return ring;
}

static nnfmq_event new_event(void) {
    nnfmq_event event = {0};
    event.word = &event_flag_word;
    event.peer_death = &peer_death;
    return event;
}

static void fail(const char *what, uint64_t at) {
    fprintf(stderr, "harness: %s at record %llu\n", what, (unsigned long long)at);
    _Exit(1);
}

static void *fill(uint64_t *batch, uint64_t first, uint64_t n) {
    for (uint64_t i = 0; i < n; i++) {
        batch[3 * i] = first + i;
        batch[3 * i + 1] = ~(first + i);
        batch[3 * i + 2] = (first + i) * 0x9E3779B97F4A7C15u;
    }
    return batch;
}

static void check(const uint64_t *batch, uint64_t first, uint64_t n) {
    uint64_t expected[3 * COUNT];
    if (memcmp(batch, fill(expected, first, n), n * QUANTUM))
        fail("wrong record", first);
}

static void publish(const nnfmq_ring *q, const nnfmq_counters *counters, const void *data, uint64_t bytes) {
#ifdef SEED_EARLY_PUBLISH
    atomic_store_explicit(q->write_counter, counters->w + bytes, memory_order_release);
    sched_yield();
#endif
    nnfmq_commit_write(q, counters->w, data, bytes);
#ifdef SEEDED
    sched_yield(); /* with one CPU, a switch between counter and event flag word is rare otherwise */
#endif
}

static void *writer(void *argument) {
    const uint64_t total = *(const uint64_t *)argument;
    nnfmq_ring q = new_ring();
    nnfmq_event event = new_event();
    nnfmq_counters counters;
    uint64_t batch[3 * COUNT];
    for (uint64_t sent = 0, n; sent < total; sent += n) {
        n = 1 + sent % 4;
        n = n < total - sent ? n : total - sent;
        fill(batch, sent, n);
        for (;;) {
            if (nnfmq_begin_write(&q, &counters) != NNFMQ_OK)
                fail("invalid counters seen by the writer", sent);
            if (counters.bytes >= n * QUANTUM)
                break;
            nnfmq_sleep(&q, &event, NNFMQ_WRITER, n * QUANTUM, NNFMQ_NO_DEADLINE);
        }
        publish(&q, &counters, batch, n * QUANTUM);
        nnfmq_wake(event.word, NNFMQ_NOT_EMPTY);
    }
    return NULL;
}

static void *reader(void *argument) {
    const uint64_t total = *(const uint64_t *)argument;
    nnfmq_ring q = new_ring();
    nnfmq_event event = new_event();
    nnfmq_counters counters;
    uint64_t batch[3 * COUNT];
    for (uint64_t got = 0, n; got < total; got += n) {
        n = 1 + got % 3;
        n = n < total - got ? n : total - got;
        for (;;) {
            if (nnfmq_begin_read(&q, &counters) != NNFMQ_OK)
                fail("invalid counters seen by the reader", got);
            if (counters.bytes >= n * QUANTUM)
                break;
            if (got % 2)
                nnfmq_poll(&q, &event, NNFMQ_READER, n * QUANTUM, nnfmq_now() + 20000);
            else
                nnfmq_sleep(&q, &event, NNFMQ_READER, n * QUANTUM, NNFMQ_NO_DEADLINE);
        }
        nnfmq_copy_out(&q, counters.r, batch, n * QUANTUM);
        nnfmq_commit_read(&q, counters.r, n * QUANTUM);
        nnfmq_wake(event.word, NNFMQ_NOT_FULL);
        check(batch, got, n);
    }
    while (!nnfmq_is_cancelled(&event))
        nnfmq_sleep(&q, &event, NNFMQ_READER, QUANTUM, NNFMQ_NO_DEADLINE);
    atomic_store(&is_done, 1);
    return NULL;
}

/* Sets the flag, then all bits, and wakes, every millisecond until the waiter has ended: as the watcher does. */
static void notify_peer_death(void) {
    atomic_store_explicit(&peer_death, 1, memory_order_release); /* SYNC dead */
    for (int i = 0; i < 10000 && !atomic_load(&is_done); i++) {
        nnfmq_wake_all(&event_flag_word);
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    }
    if (!atomic_load(&is_done))
        fail("a wait outlived its peer", 0);
}

int main(int argc, char **argv) {
    uint64_t total = argc > 1 ? strtoull(argv[1], NULL, 10) : 100000;
    pthread_t writing, reading;
    if (pthread_create(&writing, NULL, writer, &total) || pthread_create(&reading, NULL, reader, &total))
        fail("no thread", 0);
    pthread_join(writing, NULL);
    notify_peer_death();
    pthread_join(reading, NULL);
    printf("%llu records\n", (unsigned long long)total);
    return 0;
}
