/* A caller and three workers over _thread_pool.h, for ThreadSanitizer and for other CPUs. By hand:
 *
 *     cc -std=c11 -O1 -g -fno-builtin -fsanitize=thread -pthread tools/tsan/pool_harness.c -o pool_harness
 *     TSAN_OPTIONS=halt_on_error=1 ./pool_harness 100000
 *
 * Each run has a few launches of 1 to 40 work items. A kernel adds what the caller wrote for the launch to each of its
 * items; all are plain variables. The caller checks every item after every run, and sleeps between some of them, so that
 * workers sleep too. The pool is stopped and begun again every thousand runs. Exit status 0: success; 1: a wrong item;
 * 66 (ThreadSanitizer's): a data race.
 *
 * -DSEED_RELAXED and -DSEED_PLAIN_BUSY seed bugs, which must be found.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define NNFMQ_POOL_IDLE_SPINS 20
#define NNFMQ_POOL_BUSY_SPINS 200
#define NNFMQ_POOL_AWAIT_SPINS 20
#define NNFMQ_POOL_CHUNKS_PER_THREAD 4

#ifdef SEED_RELAXED
#define memory_order_seq_cst memory_order_relaxed
#endif
#ifdef SEED_PLAIN_BUSY
static inline uint32_t plain_exchange(volatile uint32_t *word, uint32_t value) {
    uint32_t old = *word;
    *word = value;
    return old;
}
#undef atomic_exchange_explicit
#define atomic_exchange_explicit(word, value, order) plain_exchange((volatile uint32_t *)(word), value)
#endif

#include "../../nnfmq/engines/compiled/_thread_pool.h"

enum { WORKERS = 3, LAUNCHES = 4, ITEMS = 40, RUNS_OF_A_POOL = 1000 };

typedef struct {
    int64_t amount;
    int64_t sums[ITEMS];
} work;

static work works[LAUNCHES];
static char scratch[(1 + WORKERS) * 64];

static void add(void *args, int64_t first, int64_t last, void *own) {
    work *it = args;
    for (int64_t i = first; i < last; i++) {
        *(int64_t *)own = it->amount; /* each thread's own: a data race if two share it */
        it->sums[i] += *(int64_t *)own;
    }
}

static void check(int64_t run, int64_t launch, int64_t items, const work *expected) {
    for (int64_t i = 0; i < ITEMS; i++)
        if (works[launch].sums[i] != expected->sums[i] + (i < items ? works[launch].amount : 0)) {
            fprintf(stderr, "pool_harness: run %lld, launch %lld: wrong item %lld\n", (long long)run,
                    (long long)launch, (long long)i);
            _Exit(1);
        }
}

/* As many processes are busy as the number of the run says: launches use 4, 2 and 1 threads, and 4 again. All are of the
 * class batch, so the threads of a launch look at each other process after every chunk, and none pauses. */
static const nnfmq_core_division *divided(int64_t run) {
    static _Atomic uint64_t busy, claims;
    static _Atomic uint64_t classes = 0x0101010101010101, uses, paused;
    static _Atomic uint32_t resumed;
    static nnfmq_core_division division = {
        &busy, &claims, 1, (_Atomic uint8_t *)&busy, 1 + WORKERS, 0,
        &classes, (_Atomic uint8_t *)&uses, (_Atomic uint8_t *)&paused, &resumed,
    };
    static const uint64_t others[] = {0, 0x100, 0x1010100, 0x100000000};
    atomic_store_explicit(run % 2 ? &busy : &claims, others[run / 7 % 4], memory_order_relaxed);
    atomic_store_explicit(run % 2 ? &claims : &busy, others[run / 11 % 2], memory_order_relaxed);
    return run / 28 % 2 ? NULL : &division;
}

static void run_once(nnfmq_pool *pool, int64_t run) {
    nnfmq_launch launches[LAUNCHES];
    work before[LAUNCHES];
    for (int64_t n = 0; n < LAUNCHES; n++) {
        works[n].amount = run + n;
        before[n] = works[n];
        launches[n] = (nnfmq_launch){add, &works[n], 1 + (run * LAUNCHES + n) % ITEMS, (run + n) % 3};
    }
    static nnfmq_pauses pauses;
    nnfmq_pool_run(pool, divided(run), &pauses, launches, 0, LAUNCHES, scratch, 64, NULL);
    for (int64_t n = 0; n < LAUNCHES; n++)
        check(run, n, launches[n].items, &before[n]);
}

typedef struct {
    nnfmq_pool *pool;
    int64_t number;
} worker;

static void *be_worker(void *argument) {
    const worker *me = argument;
    nnfmq_pool_work(me->pool, me->number);
    return NULL;
}

static void run_pool(int64_t first, int64_t last) {
    nnfmq_pool *pool = nnfmq_pool_new();
    worker workers[WORKERS];
    pthread_t threads[WORKERS];
    for (int64_t n = 0; n < WORKERS; n++) {
        workers[n] = (worker){pool, n + 1};
        if (!pool || pthread_create(&threads[n], NULL, be_worker, &workers[n]))
            abort();
    }
    pool->workers = WORKERS;
    for (int64_t run = first; run < last; run++) {
        run_once(pool, run);
        if (run % 50 == 0)
            nanosleep(&(struct timespec){0, 200000}, NULL);
        else if (run % 3 == 0)
            sched_yield();
    }
    nnfmq_pool_stop(pool);
    for (int64_t n = 0; n < WORKERS; n++)
        pthread_join(threads[n], NULL);
    free(pool);
}

int main(int argc, char **argv) {
    int64_t total = argc > 1 ? strtoll(argv[1], NULL, 10) : 10000;
    for (int64_t first = 0; first < total; first += RUNS_OF_A_POOL)
        run_pool(first, first + RUNS_OF_A_POOL < total ? first + RUNS_OF_A_POOL : total);
    printf("%lld runs\n", (long long)total);
    return 0;
}
