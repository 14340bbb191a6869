/* Two pinned processes exchange a 512-byte request and a 64-byte reply over shared memory, both spinning: the floor.
 *
 *     c_pingpong COUNT WARM_UP CPU_A CPU_B SECONDS
 *
 * prints "p50 p90 p99 p99.9 max" of COUNT round trips in nanoseconds. A mailbox each way: fill, then publish its sequence
 * number with a release store; the other side spins on an acquire load and copies the bytes out. Ends with status 1 after
 * SECONDS, whatever happens: the alarm kills this process, and the death signal kills the other one.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { REQUEST_BYTES = 512, REPLY_BYTES = 64, LINE_BYTES = 128 };

struct mailbox {
    _Alignas(LINE_BYTES) _Atomic uint64_t sequence;
    _Alignas(LINE_BYTES) char bytes[REQUEST_BYTES];
};

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static void pin(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    if (sched_setaffinity(0, sizeof set, &set) != 0) fail("sched_setaffinity");
}

static void put(struct mailbox *box, uint64_t sequence, const char *from, size_t count) {
    memcpy(box->bytes, from, count);
    atomic_store_explicit(&box->sequence, sequence, memory_order_release);
}

static void take(struct mailbox *box, uint64_t sequence, char *to, size_t count) {
    while (atomic_load_explicit(&box->sequence, memory_order_acquire) != sequence) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
    memcpy(to, box->bytes, count);
}

static int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static void answer(struct mailbox *boxes, uint64_t count, int cpu, pid_t parent) {
    char request[REQUEST_BYTES];
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) exit(1); /* it died before we asked to be told */
    pin(cpu);
    for (uint64_t i = 1; i <= count; i++) {
        take(&boxes[0], i, request, REQUEST_BYTES);
        put(&boxes[1], i, request, REPLY_BYTES);
    }
    exit(0);
}

static int ascending(const void *left, const void *right) {
    int64_t a = *(const int64_t *)left, b = *(const int64_t *)right;
    return (a > b) - (a < b);
}

static int64_t percentile(const int64_t *sorted, uint64_t count, uint64_t per_mille) {
    uint64_t rank = (count * per_mille + 999) / 1000;
    return sorted[rank ? rank - 1 : 0];
}

int main(int argc, char **argv) {
    if (argc != 6) {
        fprintf(stderr, "usage: c_pingpong COUNT WARM_UP CPU_A CPU_B SECONDS\n");
        return 2;
    }
    uint64_t count = strtoull(argv[1], NULL, 10), warm_up = strtoull(argv[2], NULL, 10);
    if (count == 0) return 2;
    alarm((unsigned)atoi(argv[5]));
    struct mailbox *boxes =
        mmap(NULL, 2 * sizeof *boxes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (boxes == MAP_FAILED) fail("mmap");
    int64_t *times = calloc(count, sizeof *times);
    if (times == NULL) fail("calloc");
    char request[REQUEST_BYTES], reply[REPLY_BYTES];
    memset(request, 7, sizeof request);

    pid_t parent = getpid(), child = fork();
    if (child < 0) fail("fork");
    if (child == 0) answer(boxes, warm_up + count, atoi(argv[4]), parent);
    pin(atoi(argv[3]));
    for (uint64_t i = 1; i <= warm_up + count; i++) {
        int64_t begin = now_ns();
        put(&boxes[0], i, request, REQUEST_BYTES);
        take(&boxes[1], i, reply, REPLY_BYTES);
        if (i > warm_up) times[i - warm_up - 1] = now_ns() - begin;
    }
    waitpid(child, NULL, 0);
    qsort(times, count, sizeof *times, ascending);
    printf("%lld %lld %lld %lld %lld\n", (long long)percentile(times, count, 500), (long long)percentile(times, count, 900),
           (long long)percentile(times, count, 990), (long long)percentile(times, count, 999), (long long)times[count - 1]);
    return 0;
}
