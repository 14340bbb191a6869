/* When a receiver polls and when it sleeps: `WaitEstimator` of hybrid_polling.py in C. The Python class is the
 * specification, and explains the arithmetic; a test feeds both with the same waits and compares every field.
 *
 * Integers of one process, in nanoseconds. Nothing here reads shared memory or waits. All divisions are of non-negative
 * numbers, for which C (rounds towards 0) and Python (rounds down) agree.
 */
#ifndef NNFMQ_HYBRID_POLLING_H
#define NNFMQ_HYBRID_POLLING_H

#include <stdint.h>

#define NNFMQ_POLL 0
#define NNFMQ_SLEEP (-1)

typedef struct {
    int64_t mean, deviation;
    int64_t wakeup_delay;
    int64_t samples;
    int64_t early_arrivals;
    int64_t stopped_polls;
} nnfmq_wait_estimator;

static inline int64_t nnfmq_min(int64_t a, int64_t b) { return a < b ? a : b; }

/* The change of a moving average that follows `sample` with weight 1/up or 1/down. */
static inline int64_t nnfmq_step(int64_t estimate, int64_t sample, int64_t up, int64_t down) {
    return sample > estimate ? (sample - estimate) / up : -((estimate - sample) / down);
}

static inline int nnfmq_is_regular(const nnfmq_wait_estimator *e, int64_t window_ns) {
    int is_as_late = e->deviation <= e->wakeup_delay && (e->deviation + 1) / 2 <= window_ns; /* 2 * window_ns may overflow */
    return e->deviation <= window_ns / 2 || is_as_late;
}

/* The time at which to stop polling, which begins at `now`, and sleep. */
static inline int64_t nnfmq_poll_end(const nnfmq_wait_estimator *e, int64_t began, int64_t now, int64_t window_ns) {
    int is_expected = e->samples >= 4 && e->mean <= 100000000 && nnfmq_is_regular(e, window_ns);
    int64_t from = is_expected && began + e->mean > now ? began + e->mean : now;
    return from > INT64_MAX - window_ns ? INT64_MAX : from + window_ns;
}

static inline int nnfmq_is_short(const nnfmq_wait_estimator *e, int64_t window_ns) {
    return e->mean + 2 * e->deviation <= window_ns;
}

/* Whether to stop polling and sleep, after a yield of the CPU that took `yield_ns`. */
static inline int nnfmq_must_stop_polling(const nnfmq_wait_estimator *e, int64_t yield_ns, int64_t window_ns) {
    return yield_ns > 2000 && e->samples >= 4 && !nnfmq_is_short(e, window_ns);
}

/* NNFMQ_POLL, NNFMQ_SLEEP, or the time at which to end a sleep before polling. */
static inline int64_t nnfmq_next_action(const nnfmq_wait_estimator *e, int64_t now, int64_t window_ns) {
    if (window_ns == 0)
        return NNFMQ_SLEEP;
    if (e->samples < 4 || e->mean > 100000000 || nnfmq_is_short(e, window_ns))
        return NNFMQ_POLL;
    if ((e->stopped_polls >= 2 || !nnfmq_is_regular(e, window_ns)) && e->samples % 16)
        return e->mean - e->deviation > window_ns ? NNFMQ_SLEEP : NNFMQ_POLL;
    int64_t sleep_ns = e->mean - (e->wakeup_delay + 2 * e->deviation + 5000);
    return sleep_ns < 10000 ? NNFMQ_POLL : now + sleep_ns;
}

static inline void nnfmq_add_poll(nnfmq_wait_estimator *e, int is_stopped) {
    e->stopped_polls = is_stopped ? e->stopped_polls + 1 : 0;
}

static inline void nnfmq_add_wait(nnfmq_wait_estimator *e, int64_t waited) {
    if (!e->samples) {
        e->mean = waited;
        e->deviation = waited / 2;
    }
    int is_longer = waited > e->mean;
    int64_t error = nnfmq_min(is_longer ? waited - e->mean : e->mean - waited, 4 * e->deviation + 20000);
    e->mean += is_longer ? error / 4 : -(error / 4);
    e->deviation += nnfmq_step(e->deviation, error, 4, 4);
    e->samples++;
}

static inline void nnfmq_add_wakeup(nnfmq_wait_estimator *e, int64_t planned, int64_t now, int is_ready) {
    if (now >= planned)
        e->wakeup_delay += nnfmq_step(e->wakeup_delay, nnfmq_min(now - planned, 100000), 2, 16);
    if (is_ready)
        e->mean -= e->mean / (e->early_arrivals >= 2 ? 2 : 8);
    e->early_arrivals = is_ready ? e->early_arrivals + 1 : 0;
}

#endif
