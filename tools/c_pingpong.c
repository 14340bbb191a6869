/* Two pinned processes exchange a 512-byte request and a 64-byte reply over two rings of _atomics.h: the floor.
 *
 *     c_pingpong spin|futex COUNT WARM_UP CPU_A CPU_B SECONDS
 *
 * prints COUNT round trips in nanoseconds, one a line. `spin` polls and wakes nobody; `futex` sleeps and wakes for every
 * message, as libfmq's blocking calls do. Ends with SIGALRM after SECONDS, whatever happens; the death signal kills the
 * other process. Compile with -I nnfmq/queue.
 */
#include "_atomics.h"

#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

enum { REQUEST_BYTES = 512, REPLY_BYTES = 64, RECORDS = 8, LINE_BYTES = 128 };

struct shared {
    _Alignas(LINE_BYTES) _Atomic uint64_t read_counter;
    _Alignas(LINE_BYTES) _Atomic uint64_t write_counter;
    _Alignas(LINE_BYTES) _Atomic uint32_t word;
    _Alignas(LINE_BYTES) unsigned char ring[RECORDS * REQUEST_BYTES];
};

struct end {
    nnfmq_ring ring;
    nnfmq_event event;
};

static const _Atomic uint32_t never_dead;
static int is_spinning;

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

static struct end end_of(struct shared *at, uint64_t quantum) {
    struct end end = {
        .ring = {.read_counter = &at->read_counter, .write_counter = &at->write_counter, .ring = at->ring,
                 .ring_bytes = RECORDS * quantum, .quantum = quantum},
        .event = {.word = &at->word, .dead = &never_dead},
    };
    return end;
}

static void put(const struct end *to, const void *from, uint64_t bytes) {
    nnfmq_counters counters;
    if (nnfmq_begin_write(&to->ring, &counters) != NNFMQ_OK || counters.bytes < bytes) fail("no room");
    nnfmq_commit_write(&to->ring, counters.w, from, bytes);
    if (!is_spinning) nnfmq_wake(to->event.word, NNFMQ_NOT_EMPTY);
}

static void take(const struct end *from, void *to, uint64_t bytes) {
    nnfmq_counters counters;
    while (nnfmq_begin_read(&from->ring, &counters) == NNFMQ_OK && counters.bytes < bytes) {
        if (is_spinning)
            nnfmq_pause();
        else
            nnfmq_sleep(&from->ring, &from->event, NNFMQ_READER, bytes, NNFMQ_NO_DEADLINE);
    }
    nnfmq_copy_out(&from->ring, counters.r, to, bytes);
    nnfmq_commit_read(&from->ring, counters.r, bytes);
}

static void answer(const struct end *requests, const struct end *replies, uint64_t count, pid_t parent) {
    char request[REQUEST_BYTES];
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) exit(1); /* it died before we asked to be told */
    for (uint64_t i = 0; i < count; i++) {
        take(requests, request, REQUEST_BYTES);
        put(replies, request, REPLY_BYTES);
    }
    exit(0);
}

int main(int argc, char **argv) {
    if (argc != 7 || (strcmp(argv[1], "spin") && strcmp(argv[1], "futex")) || !atoi(argv[2])) {
        fprintf(stderr, "usage: c_pingpong spin|futex COUNT WARM_UP CPU_A CPU_B SECONDS\n");
        return 2;
    }
    uint64_t count = strtoull(argv[2], NULL, 10), warm_up = strtoull(argv[3], NULL, 10);
    is_spinning = strcmp(argv[1], "spin") == 0;
    alarm((unsigned)atoi(argv[6]));
    struct shared *shared =
        mmap(NULL, 2 * sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) fail("mmap");
    struct end requests = end_of(&shared[0], REQUEST_BYTES), replies = end_of(&shared[1], REPLY_BYTES);
    int64_t *times = calloc(count, sizeof *times);
    if (times == NULL) fail("calloc");
    char request[REQUEST_BYTES], reply[REPLY_BYTES];
    memset(request, 7, sizeof request);

    pid_t parent = getpid(), child = fork();
    if (child < 0) fail("fork");
    pin(atoi(argv[child == 0 ? 5 : 4]));
    if (child == 0) answer(&requests, &replies, warm_up + count, parent);
    for (uint64_t i = 0; i < warm_up + count; i++) {
        int64_t begin = nnfmq_now();
        put(&requests, request, REQUEST_BYTES);
        take(&replies, reply, REPLY_BYTES);
        if (i >= warm_up) times[i - warm_up] = nnfmq_now() - begin;
    }
    waitpid(child, NULL, 0);
    for (uint64_t i = 0; i < count; i++) printf("%lld\n", (long long)times[i]);
    return 0;
}
