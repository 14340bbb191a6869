/* The thread pool's protocol: per-thread ranges of chunks with work stealing, as C11 inline functions.
 *
 * The calling thread runs launches one after the other. It cuts a parallel launch into chunks, writes the parallel
 * region (what to compute, and a contiguous range of chunks for each thread), and opens the region: it makes `epoch`
 * odd. A thread takes chunks from its own range, then from the others'. The caller takes part, so a sleeping or
 * preempted worker delays only the chunk that it holds. When no chunk is left, the caller closes the region (`epoch`
 * becomes even) and waits for the workers that are `busy`. Results do not depend on who computes which chunk.
 *
 * The memory is private to one process, and so are the futexes: all threads of the pool end together. A child process
 * that was forked has no workers, and begins with new memory. One caller at a time: the owner of the pool sees to that.
 *
 * Pools of several processes may divide the cores (`_core_division.h`): before each launch a pool looks how many threads it
 * may use, and if a client of a higher class needs all cores, it pauses. In a pool of the class batch a launch that is in
 * progress ends sooner, too: its workers take no more chunks, and the caller pauses between two of them.
 *
 * Kernels run in the floating-point mode of their threads, that of IEEE 754: subnormal numbers are operands and results.
 *
 * Each pair of accesses that synchronizes two threads has a label, which stands at both ends:
 *
 *   region   The caller writes the region, then changes `epoch`; a worker that finds `epoch` odd reads the region.
 *   busy     A worker stores `busy`, then loads `epoch` again; the caller changes `epoch`, then loads `busy`. All four
 *            are seq_cst, so at least one of them sees the other: the worker stays out, or the caller waits for it. So
 *            the caller never overwrites a region that a worker still reads.
 *   result   A worker computes, then clears `busy`; the caller loads `busy` before it uses the results.
 *   await    The caller changes `busy` from 1 to 2 before it sleeps on it; the worker that clears it finds the 2 and
 *            wakes. If the worker came first, the exchange fails.
 *   sleep    A worker loads `wake_seq`, counts itself in `sleepers`, then loads `epoch` again; the caller changes
 *            `epoch`, then loads `sleepers`. All but the first are seq_cst: the worker sees the new `epoch`, or the
 *            caller sees the sleeper, changes `wake_seq` and wakes. A worker that was about to sleep then finds
 *            `wake_seq` changed, in the futex. The load of `wake_seq` is acquire: a worker that loads the new value
 *            counts itself after the caller's reset of `sleepers`, not before.
 *
 * tests/queue_model_checking/test_pool_interleavings.py explores these functions, one ordered access at a time.
 */
#ifndef NNFMQ_THREAD_POOL_H
#define NNFMQ_THREAD_POOL_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <limits.h>
#include <sched.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "../../_pause.h"
#include "_core_division.h"

#define NNFMQ_POOL_MAX_WORKERS 15
#ifndef NNFMQ_POOL_IDLE_SPINS         /* the model checker has smaller numbers */
#define NNFMQ_POOL_IDLE_SPINS 4000    /* after a run: about 130 µs, longer than an application takes between two runs */
#define NNFMQ_POOL_BUSY_SPINS 200000  /* during a run */
#define NNFMQ_POOL_AWAIT_SPINS 2000   /* of the caller, for a worker that still computes a chunk */
#define NNFMQ_POOL_CHUNKS_PER_THREAD 4
#endif
#define NNFMQ_POOL_CHUNKS 8 /* of a launch that one thread computes, if it may pause in between */
#define NNFMQ_POOL_YIELD_SPINS 100 /* without yielding: about 3 µs */
#define NNFMQ_POOL_YIELD_PERIOD 8 /* spins between two yields */

#define NNFMQ_POOL_STOPPED (-1)
enum { NNFMQ_POOL_FREE = 0, NNFMQ_POOL_BUSY = 1, NNFMQ_POOL_AWAITED = 2 };

/* Which threads compute a launch: the calling thread, also the awake workers, or all after waking them. Runs in quick
 * succession wake workers for every parallel launch: they find little to do in this run, but are awake in the next. */
enum { NNFMQ_SERIAL = 0, NNFMQ_PARALLEL = 1, NNFMQ_PARALLEL_WAKE = 2 };

/* Computes the work items from `first` to before `last`. */
typedef void (*nnfmq_kernel)(void *args, int64_t first, int64_t last, void *scratch);

/* A launch record, as the executor writes it. */
typedef struct {
    nnfmq_kernel kernel;
    void *args;
    int64_t items;
    int64_t parallelism;
} nnfmq_launch;

_Static_assert(sizeof(nnfmq_launch) == 32, "RECORD_WORDS");

/* A thread's range of chunks. `busy` is a worker's state, and the futex word of a caller that waits for it. */
typedef struct {
    _Alignas(128) _Atomic int64_t next; /* 128: some CPUs prefetch two cache lines together */
    int64_t end;
    _Atomic uint32_t busy;
} nnfmq_pool_range;

typedef struct {
    /* The parallel region, and what changes for each run only. */
    _Alignas(128) int64_t workers;
    int64_t threads; /* that take part in the region: the caller and the first workers */
    nnfmq_kernel kernel;
    void *args;
    char *scratch;
    int64_t stride; /* of the threads' scratch buffers */
    int64_t chunk;  /* work items */
    int64_t items;
    const nnfmq_core_division *yields; /* NULL: a launch that has begun goes on */
    nnfmq_pauses *pauses;
    int64_t is_repeated;    /* the caller's: the last run ended a short time ago, so workers that wake now stay awake */
    _Atomic int64_t active; /* threads that the run in progress uses: its workers spin longer */

    _Alignas(128) _Atomic int64_t epoch; /* odd: region open, even: closed, or NNFMQ_POOL_STOPPED */

    _Alignas(128) _Atomic uint32_t sleepers; /* since the last wake-up; some may not have slept after all */
    _Atomic uint32_t wake_seq;               /* the futex word of sleeping workers */

    nnfmq_pool_range ranges[1 + NNFMQ_POOL_MAX_WORKERS]; /* the caller's first */
} nnfmq_pool;

/* What a worker remembers between two steps. */
typedef struct {
    int64_t seen; /* the last region that it took part in */
    int64_t spins;
} nnfmq_worker;

static inline void nnfmq_pool_futex_wait(_Atomic uint32_t *word, uint32_t expected) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, expected, NULL, NULL, 0); /* its callers look at the word again */
}

static inline void nnfmq_pool_futex_wake(_Atomic uint32_t *word, int count) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
}

/* Returns an idle pool, or NULL: no memory. */
static inline nnfmq_pool *nnfmq_pool_new(void) {
    nnfmq_pool *pool = aligned_alloc(_Alignof(nnfmq_pool), sizeof *pool);
    if (pool)
        memset(pool, 0, sizeof *pool);
    return pool;
}

/* ---- all threads ---- */

/* Returns how many threads the next launch, or the next chunk of one, may use; pauses before if none is left. Meanwhile the
 * workers do not wait for launches awake. `pool` may be NULL; `pauses` as well: the process never pauses. */
static inline int64_t nnfmq_pool_admit(nnfmq_pool *pool, const nnfmq_core_division *division, nnfmq_pauses *pauses,
                                       int64_t most) {
    if (!division)
        return most;
    if (pauses)
        nnfmq_yield(division);
    const int64_t share = nnfmq_share(division, most);
    if (pauses && share)
        pauses->stuck_ns = 0;
    if (!pauses || share)
        return share ? share : 1;
    const int64_t active = pool ? atomic_load_explicit(&pool->active, memory_order_relaxed) : 0;
    if (pool)
        atomic_store_explicit(&pool->active, 0, memory_order_relaxed);
    const int64_t threads = nnfmq_wait_for_core(division, pauses, most, INT64_MAX);
    if (pool)
        atomic_store_explicit(&pool->active, active, memory_order_relaxed);
    return threads;
}

/* Computes chunks as thread `me` until none is left. The fields of the region are plain: a worker gets here only
 * between busy = 1 and busy = 0, and the caller writes them when all workers are free. The fetch-add hands out each
 * chunk once, and orders nothing. A counter passes the end of its range by at most one for each call. */
static inline void nnfmq_pool_compute(nnfmq_pool *pool, int64_t me) {
    const int64_t threads = pool->threads, chunk = pool->chunk, items = pool->items;
    const nnfmq_kernel kernel = pool->kernel;
    void *const args = pool->args;
    char *const scratch = pool->scratch + me * pool->stride;
    const nnfmq_core_division *const yields = pool->yields;
    if (me >= threads)
        return;
    for (int64_t visited = 0, owner = me; visited < threads; visited++) {
        nnfmq_pool_range *range = &pool->ranges[owner];
        const int64_t end = range->end;
        int64_t number;
        while ((number = atomic_fetch_add_explicit(&range->next, 1, memory_order_relaxed)) < end) {
            const int64_t first = number * chunk, last = first + chunk;
            kernel(args, first, last < items ? last : items, scratch);
            if (!yields)
                continue;
            if (!me) {
                nnfmq_pool_admit(pool, yields, pool->pauses, 1);
                continue;
            }
            nnfmq_yield(yields);
            if (!nnfmq_share(yields, 1))
                return; /* the caller computes what is left */
        }
        owner = owner + 1 == threads ? 0 : owner + 1;
    }
}

/* What a thread does between two looks, after `spins` of them. The scheduler may have put the caller, a worker and the
 * thread that waits for the result on one CPU; whoever spins there without yielding keeps the others from running for a
 * slice of the scheduler, which takes milliseconds. */
static inline void nnfmq_pool_relax(int64_t spins) {
    if (spins > NNFMQ_POOL_YIELD_SPINS && spins % NNFMQ_POOL_YIELD_PERIOD == 0)
        sched_yield();
    else
        nnfmq_pause();
}

/* ---- workers ---- */

static inline void nnfmq_pool_leave(_Atomic uint32_t *busy) {
    uint32_t before = atomic_exchange_explicit(busy, NNFMQ_POOL_FREE, memory_order_seq_cst); /* SYNC result, await */
    if (before == NNFMQ_POOL_AWAITED)
        nnfmq_pool_futex_wake(busy, 1);
}

/* Takes part in the region `epoch`; returns 0 if that is closed already. */
static inline int nnfmq_pool_join(nnfmq_pool *pool, int64_t me, int64_t epoch) {
    _Atomic uint32_t *busy = &pool->ranges[me].busy;
    atomic_exchange_explicit(busy, NNFMQ_POOL_BUSY, memory_order_seq_cst); /* SYNC busy */
    int is_open = atomic_load_explicit(&pool->epoch, memory_order_seq_cst) == epoch; /* SYNC busy, region */
    if (is_open)
        nnfmq_pool_compute(pool, me);
    nnfmq_pool_leave(busy);
    return is_open;
}

/* Sleeps until the next wake-up, unless `epoch` has changed. A worker that does not sleep stays counted: the next
 * wake-up resets the count, at the price of a needless system call. */
static inline void nnfmq_pool_sleep(nnfmq_pool *pool, int64_t epoch) {
    uint32_t seq = atomic_load_explicit(&pool->wake_seq, memory_order_acquire);    /* SYNC sleep */
    atomic_fetch_add_explicit(&pool->sleepers, 1, memory_order_seq_cst);           /* SYNC sleep */
    if (atomic_load_explicit(&pool->epoch, memory_order_seq_cst) != epoch) /* SYNC sleep */
        return;
    do /* a futex may return without a wake-up */
        nnfmq_pool_futex_wait(&pool->wake_seq, seq);
    while (atomic_load_explicit(&pool->wake_seq, memory_order_relaxed) == seq);
}

/* One step of worker `me`: looks at `epoch`, then computes, spins or sleeps. Returns 0 once the pool is stopped. The
 * load orders nothing: whoever acts on it loads `epoch` again. */
static inline int nnfmq_pool_step(nnfmq_pool *pool, int64_t me, nnfmq_worker *worker) {
    int64_t epoch = atomic_load_explicit(&pool->epoch, memory_order_relaxed);
    if (epoch == NNFMQ_POOL_STOPPED)
        return 0;
    if (epoch % 2 && epoch != worker->seen) {
        if (nnfmq_pool_join(pool, me, epoch)) {
            worker->seen = epoch;
            worker->spins = 0;
        }
        return 1;
    }
    nnfmq_pool_relax(worker->spins);
    if (++worker->spins < NNFMQ_POOL_IDLE_SPINS)
        return 1;
    if (worker->spins < NNFMQ_POOL_BUSY_SPINS && me < atomic_load_explicit(&pool->active, memory_order_relaxed))
        return 1;
    nnfmq_pool_sleep(pool, epoch);
    worker->spins = 0;
    return 1;
}

static inline void nnfmq_pool_work(nnfmq_pool *pool, int64_t me) {
    nnfmq_worker worker = {0, 0};
    while (nnfmq_pool_step(pool, me, &worker)) {
    }
}

/* ---- the caller ---- */

/* Wakes the sleeping workers. Called after a change of `epoch`. */
static inline void nnfmq_pool_wake(nnfmq_pool *pool) {
    if (!atomic_load_explicit(&pool->sleepers, memory_order_seq_cst)) /* SYNC sleep */
        return;
    atomic_store_explicit(&pool->sleepers, 0, memory_order_seq_cst);     /* SYNC sleep */
    atomic_fetch_add_explicit(&pool->wake_seq, 1, memory_order_seq_cst); /* SYNC sleep */
    nnfmq_pool_futex_wake(&pool->wake_seq, INT_MAX);
}

/* Lets all workers return. Nobody may run launches from then on. */
static inline void nnfmq_pool_stop(nnfmq_pool *pool) {
    atomic_store_explicit(&pool->epoch, NNFMQ_POOL_STOPPED, memory_order_seq_cst); /* SYNC sleep */
    nnfmq_pool_wake(pool);
}

/* Waits until a worker has left the region: spins first, then sleeps, so that a preempted worker can have this CPU. */
static inline void nnfmq_pool_await(_Atomic uint32_t *busy) {
    for (int spins = 0; spins < NNFMQ_POOL_AWAIT_SPINS; spins++) {
        if (atomic_load_explicit(busy, memory_order_seq_cst) == NNFMQ_POOL_FREE) /* SYNC busy, result */
            return;
        nnfmq_pool_relax(spins);
    }
    for (;;) {
        uint32_t found = NNFMQ_POOL_BUSY;
        atomic_compare_exchange_strong_explicit(busy, &found, NNFMQ_POOL_AWAITED, memory_order_seq_cst,
                                                memory_order_seq_cst); /* SYNC await, busy, result */
        if (found == NNFMQ_POOL_FREE)
            return;
        nnfmq_pool_futex_wait(busy, NNFMQ_POOL_AWAITED);
    }
}

/* Writes the region of a launch: chunks of equal size, as many for each thread. All workers are free. */
static inline void nnfmq_pool_divide(nnfmq_pool *pool, const nnfmq_launch *launch, int64_t threads) {
    const int64_t most = threads * NNFMQ_POOL_CHUNKS_PER_THREAD;
    const int64_t chunk = (launch->items + most - 1) / most, chunks = (launch->items + chunk - 1) / chunk;
    pool->threads = threads;
    pool->kernel = launch->kernel;
    pool->args = launch->args;
    pool->chunk = chunk;
    pool->items = launch->items;
    for (int64_t t = 0; t < threads; t++) {
        atomic_store_explicit(&pool->ranges[t].next, chunks * t / threads, memory_order_relaxed);
        pool->ranges[t].end = chunks * (t + 1) / threads;
    }
}

static inline void nnfmq_pool_open(nnfmq_pool *pool, const nnfmq_launch *launch, int64_t threads) {
    nnfmq_pool_divide(pool, launch, threads);
    atomic_fetch_add_explicit(&pool->epoch, 1, memory_order_seq_cst); /* SYNC region, busy, sleep */
    if (launch->parallelism == NNFMQ_PARALLEL_WAKE || pool->is_repeated)
        nnfmq_pool_wake(pool);
}

static inline void nnfmq_pool_close(nnfmq_pool *pool) {
    atomic_fetch_add_explicit(&pool->epoch, 1, memory_order_seq_cst); /* SYNC busy */
    for (int64_t t = 1; t <= pool->workers; t++)
        nnfmq_pool_await(&pool->ranges[t].busy);
}

static inline void nnfmq_pool_launch(nnfmq_pool *pool, const nnfmq_launch *launch, int64_t threads) {
    nnfmq_pool_open(pool, launch, threads);
    nnfmq_pool_compute(pool, 0);
    nnfmq_pool_close(pool);
}

/* Sets how many threads the next launch uses; those beyond them go to sleep soon. */
static inline int64_t nnfmq_pool_use(nnfmq_pool *pool, int64_t threads, int64_t before) {
    if (threads != before)
        atomic_store_explicit(&pool->active, threads, memory_order_relaxed);
    return threads;
}

/* Computes a launch on this thread, in chunks if the process yields. */
static inline void nnfmq_pool_serial(nnfmq_pool *pool, const nnfmq_launch *launch, char *scratch,
                                     const nnfmq_core_division *yields, nnfmq_pauses *pauses) {
    const int64_t chunks = yields && launch->parallelism != NNFMQ_SERIAL ? NNFMQ_POOL_CHUNKS : 1;
    const int64_t chunk = (launch->items + chunks - 1) / chunks;
    for (int64_t first = 0; first < launch->items || !first; first += chunk) {
        const int64_t last = first + chunk;
        if (first)
            nnfmq_pool_admit(pool, yields, pauses, 1);
        launch->kernel(launch->args, first, last < launch->items ? last : launch->items, scratch);
        if (!chunk)
            return;
    }
}

/* Runs the launches from `first` to before `last`. `scratch` has a buffer of `stride` bytes for each thread. Without a
 * pool (NULL) or workers this thread computes everything. `division` may be NULL: no other process counts; `pauses` as
 * well: the process pauses for none. Unless `times` is NULL, times[0] becomes the time before launch 0, and times[n + 1]
 * that after launch n (CLOCK_MONOTONIC, ns). */
static inline void nnfmq_pool_run(nnfmq_pool *pool, const nnfmq_core_division *division, nnfmq_pauses *pauses,
                                  const nnfmq_launch *launches, int64_t first, int64_t last, char *scratch,
                                  int64_t stride, int64_t *times) {
    const int64_t most = pool ? pool->workers + 1 : 1;
    const nnfmq_core_division *const yields =
        division && pauses && nnfmq_class(division) == NNFMQ_CLASS_BATCH ? division : NULL;
    int64_t threads = 0, used = 1; /* of the last launch, and the most so far */
    if (division && pool)
        nnfmq_begin_run(division);
    if (most > 1) {
        pool->scratch = scratch;
        pool->stride = stride;
        pool->yields = yields;
        pool->pauses = pauses;
    }
    if (times && !first)
        times[0] = nnfmq_clock();
    for (const nnfmq_launch *launch = launches + first; launch < launches + last; launch++) {
        const int64_t admitted = nnfmq_pool_admit(pool, division, pauses, most);
        if (most > 1)
            threads = nnfmq_pool_use(pool, admitted, threads);
        if (threads > 1 && launch->parallelism != NNFMQ_SERIAL && launch->items > 0) {
            used = threads > used ? threads : used;
            nnfmq_pool_launch(pool, launch, threads);
        } else {
            nnfmq_pool_serial(pool, launch, scratch, yields, pauses);
        }
        if (times)
            times[launch - launches + 1] = nnfmq_clock();
    }
    if (most > 1)
        atomic_store_explicit(&pool->active, 0, memory_order_relaxed);
    if (division && pool)
        nnfmq_end_run(division, used);
}

#endif
