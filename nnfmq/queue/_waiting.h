/* When a receiver polls and when it sleeps: the arithmetic of `Forecast` in waiting.py, which is its specification.
 *
 * Plain integers of one process, in nanoseconds; nothing here reads shared memory, waits or decides an address. All
 * divisions are of numbers that are not negative, so C and Python round alike.
 */
#ifndef NNFMQ_WAITING_H
#define NNFMQ_WAITING_H

#include <stdint.h>

#define NNFMQ_POLL 0
#define NNFMQ_SLEEP (-1)

typedef struct {
    int64_t expected, spread;
    int64_t lateness;
    int64_t samples;
    int64_t finds;
} nnfmq_forecast;

static inline int64_t nnfmq_least(int64_t a, int64_t b) { return a < b ? a : b; }

/* POLL, SLEEP, or when the nap ends after which to poll. */
static inline int64_t nnfmq_plan(const nnfmq_forecast *f, int64_t now, int64_t window_ns) {
    if (window_ns == 0)
        return NNFMQ_SLEEP;
    if (f->samples < 4 || f->expected > 100000000 || f->expected + 2 * f->spread <= window_ns)
        return NNFMQ_POLL;
    if (f->spread > window_ns / 2)
        return f->expected - f->spread > window_ns ? NNFMQ_SLEEP : NNFMQ_POLL;
    int64_t nap = f->expected - nnfmq_least(f->lateness + 2 * f->spread + 5000, window_ns);
    return nap < 10000 ? NNFMQ_POLL : now + nap;
}

static inline void nnfmq_learn(nnfmq_forecast *f, int64_t waited) {
    if (!f->samples) {
        f->expected = waited;
        f->spread = waited / 2;
    }
    int is_longer = waited > f->expected;
    int64_t error = nnfmq_least(is_longer ? waited - f->expected : f->expected - waited, 4 * f->spread + 20000);
    f->expected += is_longer ? error / 4 : -(error / 4);
    f->spread += error > f->spread ? (error - f->spread) / 4 : -((f->spread - error) / 4);
    f->samples++;
}

static inline void nnfmq_woke(nnfmq_forecast *f, int64_t planned, int64_t now, int found) {
    if (now >= planned) {
        int64_t late = nnfmq_least(now - planned, 100000);
        f->lateness += late > f->lateness ? (late - f->lateness) / 2 : -((f->lateness - late) / 16);
    }
    if (found)
        f->expected -= f->expected / (f->finds >= 2 ? 2 : 8);
    f->finds = found ? f->finds + 1 : 0;
}

#endif
