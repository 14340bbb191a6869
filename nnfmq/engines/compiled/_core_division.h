/* How pools of several processes divide the cores, as C11 inline functions.
 *
 * Each process has bytes in memory that all of them map. The busy byte is 1 during a run; the claim byte while the
 * process executes a model or waits for a core. A launch uses as many threads as the cores, divided by the number of
 * processes with either. The bytes are hints: they order nothing, and a wrong one costs time, never a result. Each
 * process writes its own bytes only, and the pool all but the claim byte and the class.
 *
 * If there are classes, cores that processes of a higher class use are not divided among those of a lower one, and a
 * process for which no core is left pauses before its next launch:
 *
 * * It sleeps until somebody ends a run, or an execution (`resumed`), and then looks again.
 * * It pauses no more than a part of its time, which its class says (`nnfmq_pause_ratio`). So it is not starved.
 * * If nobody has ended anything for NNFMQ_PAUSE_STUCK_NS, whoever is busy computes for long, was stopped, or has
 *   died with its supervisor: then the kernel's scheduler shares the cores.
 *
 *   resume   A process that pauses sets its `paused` byte, then looks at the busy and claim bytes again; one that ends a
 *            run clears its busy byte, then looks at the `paused` bytes. So at least one usually sees the other; the loads of
 *            busy bytes order nothing, and a wake-up that is lost on some CPU costs NNFMQ_PAUSE_LOOK_NS.
 */
#ifndef NNFMQ_CORE_DIVISION_H
#define NNFMQ_CORE_DIVISION_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define NNFMQ_PAUSE_CREDIT_NS 1000000000 /* what a process can save up for pauses */
#define NNFMQ_PAUSE_STUCK_NS 1000000000
#define NNFMQ_PAUSE_LOOK_NS 5000000
#define NNFMQ_PAUSES_KEPT 64
#define NNFMQ_YIELD_NS 100000

enum { NNFMQ_CLASS_BATCH = 1, NNFMQ_CLASS_NORMAL = 2, NNFMQ_CLASS_INTERACTIVE = 3 }; /* hal.client_class */

/* Where the bytes of all processes are, as 64-bit words; `own` is this process's busy byte. `classes` may be NULL: all
 * are equal. */
typedef struct {
    const _Atomic uint64_t *busy;
    const _Atomic uint64_t *claims;
    int64_t words;
    _Atomic uint8_t *own;
    int64_t cores;
    int64_t number;                  /* of this process */
    const _Atomic uint64_t *classes; /* a byte each */
    _Atomic uint8_t *uses;           /* how many threads the last run of each process used */
    _Atomic uint8_t *paused;         /* whether a process pauses */
    _Atomic uint32_t *resumed;       /* a futex word, which changes with each wake-up */
} nnfmq_core_division;

/* A pause, and the highest class for which the process paused. */
typedef struct {
    int64_t begin_ns, end_ns, for_class;
} nnfmq_pause_times;

/* What a process remembers of its pauses. Begins with zeros. */
typedef struct {
    int64_t credit_ns; /* how long it may pause */
    int64_t counted_ns; /* until when its time is in the credit */
    int64_t stuck_ns;   /* since when it has found no core; 0: it has found one */
    uint32_t seen;      /* `resumed` then */
    int64_t count;      /* of the last pauses, which whoever runs launches takes, for traces */
    nnfmq_pause_times last[NNFMQ_PAUSES_KEPT];
} nnfmq_pauses;

static inline int64_t nnfmq_clock(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static inline int64_t nnfmq_class(const nnfmq_core_division *division) {
    if (!division->classes)
        return NNFMQ_CLASS_NORMAL;
    const uint8_t found = atomic_load_explicit((const _Atomic uint8_t *)division->classes + division->number,
                                               memory_order_relaxed);
    return found ? found : NNFMQ_CLASS_NORMAL;
}

/* The lowest bit of each byte that is a class: those of 0 are normal. */
static inline uint64_t nnfmq_of_class(uint64_t classes, int64_t wanted) {
    const uint64_t ones = 0x0101010101010101u, low = classes & ones, high = classes >> 1 & ones;
    if (wanted == NNFMQ_CLASS_BATCH)
        return low & ~high;
    return wanted == NNFMQ_CLASS_INTERACTIVE ? low & high : ones & ~low;
}

/* The busy processes in 8 bytes, a bit each. This one is busy, because it asks. */
static inline uint64_t nnfmq_busy(const nnfmq_core_division *division, int64_t word) {
    return atomic_load_explicit(&division->busy[word], memory_order_relaxed)
           | atomic_load_explicit(&division->claims[word], memory_order_relaxed)
           | (word == division->number / 8 ? (uint64_t)1 << 8 * (division->number % 8) : 0);
}

/* How many threads the busy processes of higher classes use. */
static inline int64_t nnfmq_used_above(const nnfmq_core_division *division, int64_t own_class) {
    int64_t used = 0;
    for (int64_t word = 0; word < division->words; word++) {
        uint64_t found = nnfmq_busy(division, word);
        if (!found)
            continue;
        const uint64_t classes = atomic_load_explicit(&division->classes[word], memory_order_relaxed);
        uint64_t higher = nnfmq_of_class(classes, NNFMQ_CLASS_INTERACTIVE);
        if (own_class == NNFMQ_CLASS_BATCH)
            higher |= nnfmq_of_class(classes, NNFMQ_CLASS_NORMAL);
        for (found &= higher; found; found &= found - 1) {
            const int64_t number = 8 * word + __builtin_ctzll(found) / 8;
            const uint8_t uses = atomic_load_explicit(&division->uses[number], memory_order_relaxed);
            used += uses > 1 ? uses : 1;
        }
    }
    return used;
}

/* How many busy processes are of a class, and how many of these are before this one in an order that begins with
 * `first`: if there are fewer cores than processes, the order says whose they are, and changes. */
static inline int64_t nnfmq_equals(const nnfmq_core_division *division, int64_t own_class, uint32_t first,
                                   int64_t *before) {
    const int64_t all = 8 * division->words, own = (division->number - (int64_t)first % all + all) % all;
    int64_t equals = 0;
    *before = 0;
    for (int64_t word = 0; word < division->words; word++) {
        uint64_t found = nnfmq_busy(division, word);
        if (!found)
            continue;
        found &= nnfmq_of_class(atomic_load_explicit(&division->classes[word], memory_order_relaxed), own_class);
        equals += __builtin_popcountll(found);
        for (; found; found &= found - 1) {
            const int64_t number = 8 * word + __builtin_ctzll(found) / 8;
            *before += (number - (int64_t)first % all + all) % all < own;
        }
    }
    return equals;
}

/* How many threads the next launch may use, from 1 to `most`; 0: none is left by processes of higher classes. */
static inline int64_t nnfmq_share(const nnfmq_core_division *division, int64_t most) {
    int64_t busy = 0, share = most;
    for (int64_t word = 0; word < division->words; word++)
        busy += __builtin_popcountll(nnfmq_busy(division, word));
    if (busy <= 1)
        return most;
    if (!division->classes) {
        share = division->cores / busy;
    } else {
        const int64_t own_class = nnfmq_class(division);
        const int64_t left =
            division->cores - (own_class == NNFMQ_CLASS_INTERACTIVE ? 0 : nnfmq_used_above(division, own_class));
        int64_t before;
        const int64_t equals = nnfmq_equals(
            division, own_class, atomic_load_explicit(division->resumed, memory_order_relaxed), &before);
        if (left < division->cores && before >= left)
            return 0;
        share = equals > 1 ? left / equals : left;
    }
    return share < 1 ? 1 : share < most ? share : most;
}

/* The part of its time for which a process may pause, as the ratio to the rest of its time. */
static inline int64_t nnfmq_pause_ratio(int64_t own_class) {
    return own_class == NNFMQ_CLASS_BATCH ? 9 : own_class == NNFMQ_CLASS_NORMAL ? 1 : 0;
}

/* The highest class of the busy processes. */
static inline int64_t nnfmq_highest_busy(const nnfmq_core_division *division) {
    int64_t highest = NNFMQ_CLASS_BATCH;
    for (int64_t word = 0; word < division->words; word++) {
        const uint64_t found = nnfmq_busy(division, word);
        const uint64_t classes = atomic_load_explicit(&division->classes[word], memory_order_relaxed);
        if (found & nnfmq_of_class(classes, NNFMQ_CLASS_INTERACTIVE))
            return NNFMQ_CLASS_INTERACTIVE;
        if (found & nnfmq_of_class(classes, NNFMQ_CLASS_NORMAL))
            highest = NNFMQ_CLASS_NORMAL;
    }
    return highest;
}

/* Whether a process of the class interactive is there, and this one is of another. */
static inline int nnfmq_is_below_interactive(const nnfmq_core_division *division) {
    uint64_t found = 0;
    if (!division->classes || nnfmq_class(division) == NNFMQ_CLASS_INTERACTIVE)
        return 0;
    for (int64_t word = 0; word < division->words; word++)
        found |= nnfmq_of_class(atomic_load_explicit(&division->classes[word], memory_order_relaxed),
                                NNFMQ_CLASS_INTERACTIVE);
    return found != 0;
}

/* Lets threads that wait for this CPU go first, every NNFMQ_YIELD_NS, if a process of the class interactive is there. Its
 * worker is busy only when it has a CPU, and the threads of its client never are; a thread that has woken waits until the
 * one that computes has used up its slice, or the timer of the kernel ticks. */
static inline void nnfmq_yield(const nnfmq_core_division *division) {
    static _Thread_local int64_t last_ns;
    if (!nnfmq_is_below_interactive(division))
        return;
    const int64_t now = nnfmq_clock();
    if (now - last_ns < NNFMQ_YIELD_NS)
        return;
    last_ns = now;
    sched_yield();
}

/* Keeps a pause, unless there are many already. */
static inline void nnfmq_keep_pause(nnfmq_pauses *pauses, int64_t begin_ns, int64_t end_ns, int64_t for_class) {
    if (pauses->count < NNFMQ_PAUSES_KEPT && end_ns > begin_ns)
        pauses->last[pauses->count++] = (nnfmq_pause_times){begin_ns, end_ns, for_class};
}

static inline void nnfmq_sleep_paused(const nnfmq_core_division *division, uint32_t seen, int64_t at_most_ns) {
    const struct timespec timeout = {0, at_most_ns < NNFMQ_PAUSE_LOOK_NS ? at_most_ns : NNFMQ_PAUSE_LOOK_NS};
    syscall(SYS_futex, division->resumed, FUTEX_WAIT, seen, &timeout, NULL, 0); /* the caller looks again */
}

/* Pauses until a core is left, or the process has paused for long enough, or `until_ns`; returns how many threads it may
 * use. Call it if `nnfmq_share` is 0. */
static inline int64_t nnfmq_wait_for_core(const nnfmq_core_division *division, nnfmq_pauses *pauses, int64_t most,
                                          int64_t until_ns) {
    _Atomic uint8_t *const paused = division->paused + division->number;
    const int64_t begin = nnfmq_clock(), for_class = nnfmq_highest_busy(division);
    int64_t now = begin, share = 0;
    const int64_t earned = (now - pauses->counted_ns) * nnfmq_pause_ratio(nnfmq_class(division));
    pauses->credit_ns += earned < NNFMQ_PAUSE_CREDIT_NS ? earned : NNFMQ_PAUSE_CREDIT_NS;
    if (pauses->credit_ns > NNFMQ_PAUSE_CREDIT_NS)
        pauses->credit_ns = NNFMQ_PAUSE_CREDIT_NS;
    while (!share && pauses->credit_ns > 0 && now < until_ns) {
        const uint32_t seen = atomic_load_explicit(division->resumed, memory_order_acquire);
        if (!pauses->stuck_ns || seen != pauses->seen) {
            pauses->stuck_ns = now;
            pauses->seen = seen;
        }
        if (now - pauses->stuck_ns > NNFMQ_PAUSE_STUCK_NS)
            break;
        atomic_store_explicit(paused, 1, memory_order_seq_cst); /* SYNC resume */
        share = nnfmq_share(division, most);
        if (!share)
            nnfmq_sleep_paused(division, seen, pauses->credit_ns);
        const int64_t later = nnfmq_clock();
        pauses->credit_ns -= later - now;
        now = later;
    }
    atomic_store_explicit(paused, 0, memory_order_relaxed);
    pauses->counted_ns = now;
    nnfmq_keep_pause(pauses, begin, now, for_class);
    return share ? share : 1;
}

/* Wakes the processes that pause, after a run or an execution has ended. */
static inline void nnfmq_resume(const nnfmq_core_division *division) {
    uint64_t found = 0;
    for (int64_t word = 0; word < division->words; word++)
        found |= atomic_load_explicit((const _Atomic uint64_t *)division->paused + word, memory_order_seq_cst);
    if (!found)
        return;
    atomic_fetch_add_explicit(division->resumed, 1, memory_order_release);
    syscall(SYS_futex, division->resumed, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Begins a run. */
static inline void nnfmq_begin_run(const nnfmq_core_division *division) {
    atomic_store_explicit(division->own, 1, memory_order_relaxed);
}

/* Ends a run that used up to `threads`; wakes those that pause, unless the execution goes on. */
static inline void nnfmq_end_run(const nnfmq_core_division *division, int64_t threads) {
    if (!division->classes) {
        atomic_store_explicit(division->own, 0, memory_order_relaxed);
        return;
    }
    _Atomic uint8_t *const uses = division->uses + division->number;
    if (atomic_load_explicit(uses, memory_order_relaxed) != threads)
        atomic_store_explicit(uses, (uint8_t)threads, memory_order_relaxed);
    atomic_store_explicit(division->own, 0, memory_order_seq_cst); /* SYNC resume */
    if (!atomic_load_explicit((const _Atomic uint8_t *)division->claims + division->number, memory_order_relaxed))
        nnfmq_resume(division);
}

/* Begins work of other code than launches; pauses before, no longer than until `until_ns`. Ends with `nnfmq_end_run`. */
static inline void nnfmq_begin_work(const nnfmq_core_division *division, nnfmq_pauses *pauses, int64_t until_ns) {
    nnfmq_begin_run(division);
    if (!division->classes)
        return;
    if (nnfmq_share(division, 1))
        pauses->stuck_ns = 0;
    else
        nnfmq_wait_for_core(division, pauses, 1, until_ns);
}

#endif
