/* What the threads of a scenario do, one call each, over the header that is explored. Compiled with -fsanitize=thread, so
 * that the compiler calls hooks.c at every access to memory. */
#define _GNU_SOURCE
#include <stdint.h>
#include <unistd.h>

long explored_syscall(long number, void *word, int operation, uint32_t value, ...);
#define syscall(...) explored_syscall(__VA_ARGS__)

#define NNFMQ_POOL_CHUNKS_PER_THREAD 1 /* the numbers of spins are compiler options */

#include "_thread_pool.h"

enum { ITEMS = 4 };

/* What the caller gives to a launch, and what the kernel computes. */
typedef struct {
    int64_t amount;
    int64_t sums[ITEMS];
} explored_work;

nnfmq_pool explored_pool;
explored_work explored_data;
const uint64_t explored_sizes[2] = {sizeof explored_pool, sizeof explored_data};

static void add(void *args, int64_t first, int64_t last, void *scratch) {
    (void)scratch;
    explored_work *work = args;
    for (int64_t i = first; i < last; i++) {
        int64_t before = work->sums[i];
        work->sums[i] = before + work->amount;
    }
}

/* One step of worker `me`, which remembers state[0] and state[1]. Returns 0 once the pool is stopped. */
int64_t explored_step(int64_t me, int64_t *state) {
    nnfmq_worker worker = {state[0], state[1]};
    int goes_on = nnfmq_pool_step(&explored_pool, me, &worker);
    state[0] = worker.seen;
    state[1] = worker.spins;
    return goes_on;
}

/* A run of `state[1]` launches of `state[0]` items that add `amount`. */
int64_t explored_run(int64_t amount, int64_t *state) {
    nnfmq_launch launches[2] = {{add, &explored_data, state[0], state[2]}, {add, &explored_data, state[0], state[2]}};
    explored_data.amount = amount;
    nnfmq_pool_run(&explored_pool, NULL, NULL, launches, 0, state[1], 0, 0, NULL);
    return 0;
}

/* The parts of a launch, after each of which the search forgets what the caller has loaded. */
int64_t explored_open(int64_t amount, int64_t *state) {
    nnfmq_launch launch = {add, &explored_data, state[0], state[2]};
    explored_data.amount = amount;
    nnfmq_pool_open(&explored_pool, &launch, explored_pool.workers + 1);
    return 0;
}

int64_t explored_compute(int64_t unused, int64_t *state) {
    (void)unused, (void)state;
    nnfmq_pool_compute(&explored_pool, 0);
    return 0;
}

int64_t explored_close(int64_t unused, int64_t *state) {
    (void)unused, (void)state;
    nnfmq_pool_close(&explored_pool);
    return 0;
}

/* The items that do not have the sum `expected`. */
int64_t explored_check(int64_t expected, int64_t *state) {
    int64_t wrong = 0;
    for (int64_t i = 0; i < state[0]; i++)
        wrong += explored_data.sums[i] != expected;
    return wrong;
}

int64_t explored_stop(int64_t unused, int64_t *state) {
    (void)unused, (void)state;
    nnfmq_pool_stop(&explored_pool);
    return 0;
}
