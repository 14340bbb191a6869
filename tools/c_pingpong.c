/* Round trips of a 512-byte request and a 64-byte reply between two pinned processes, over two rings of _atomics.h.
 *
 *     c_pingpong spin|futex COUNT WARM_UP CLIENT_CPU SERVER_CPU SECONDS
 *
 * Measures the least time that this queue protocol takes without Python. Prints COUNT round trips in nanoseconds, one per
 * line; WARM_UP more come first and are not printed. With `spin` both processes poll and wake nobody; with `futex` they
 * sleep and wake for every message, as libfmq's blocking calls do. SIGALRM ends the program after SECONDS; the server
 * process is killed when its parent exits (PR_SET_PDEATHSIG). Compile with -I nnfmq/queue.
 */
#include "_atomics.h"

#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/time.h>
#include <sys/wait.h>

/* Each counter has two cache lines of its own, because x86-64 prefetches lines in pairs. */
enum { REQUEST_BYTES = 512, REPLY_BYTES = 64, RECORDS = 8, LINE_BYTES = 128 };

struct shared {
    _Alignas(LINE_BYTES) _Atomic uint64_t read_counter;
    _Alignas(LINE_BYTES) _Atomic uint64_t write_counter;
    _Alignas(LINE_BYTES) _Atomic uint32_t word;
    _Alignas(LINE_BYTES) unsigned char ring[RECORDS * REQUEST_BYTES];
};

/* One ring with its event flag word, as a process accesses it. */
struct queue {
    nnfmq_ring ring;
    nnfmq_event event;
};

static const _Atomic uint32_t no_peer_death;
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

static struct queue queue_at(struct shared *at, uint64_t quantum) {
    struct queue queue = {
        .ring = {.read_counter = &at->read_counter, .write_counter = &at->write_counter, .ring = at->ring,
                 .ring_bytes = RECORDS * quantum, .quantum = quantum},
        .event = {.word = &at->word, .peer_death = &no_peer_death},
    };
    return queue;
}

static void send_message(const struct queue *queue, const void *message, uint64_t bytes) {
    nnfmq_counters counters;
    if (nnfmq_begin_write(&queue->ring, &counters) != NNFMQ_OK || counters.bytes < bytes) fail("the ring is full");
    nnfmq_commit_write(&queue->ring, counters.w, message, bytes);
    if (!is_spinning) nnfmq_wake(queue->event.word, NNFMQ_NOT_EMPTY);
}

static void receive_message(const struct queue *queue, void *message, uint64_t bytes) {
    nnfmq_counters counters;
    while (nnfmq_begin_read(&queue->ring, &counters) == NNFMQ_OK && counters.bytes < bytes) {
        if (is_spinning)
            nnfmq_pause();
        else
            nnfmq_sleep(&queue->ring, &queue->event, NNFMQ_READER, bytes, NNFMQ_NO_DEADLINE);
    }
    nnfmq_copy_out(&queue->ring, counters.r, message, bytes);
    nnfmq_commit_read(&queue->ring, counters.r, bytes);
}

static void serve(const struct queue *requests, const struct queue *replies, uint64_t count, pid_t parent) {
    char request[REQUEST_BYTES];
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) exit(1); /* the parent exited before prctl took effect */
    for (uint64_t i = 0; i < count; i++) {
        receive_message(requests, request, REQUEST_BYTES);
        send_message(replies, request, REPLY_BYTES);
    }
    exit(0);
}

int main(int argc, char **argv) {
    if (argc != 7 || (strcmp(argv[1], "spin") && strcmp(argv[1], "futex")) || !atoi(argv[2])) {
        fprintf(stderr, "usage: c_pingpong spin|futex COUNT WARM_UP CLIENT_CPU SERVER_CPU SECONDS\n");
        return 2;
    }
    uint64_t count = strtoull(argv[2], NULL, 10), warm_up = strtoull(argv[3], NULL, 10);
    is_spinning = strcmp(argv[1], "spin") == 0;
    struct itimerval limit = {.it_value = {.tv_sec = atoi(argv[6])}};
    if (setitimer(ITIMER_REAL, &limit, NULL) != 0) fail("setitimer");
    struct shared *shared =
        mmap(NULL, 2 * sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) fail("mmap");
    struct queue requests = queue_at(&shared[0], REQUEST_BYTES), replies = queue_at(&shared[1], REPLY_BYTES);
    int64_t *times = calloc(count, sizeof *times);
    if (times == NULL) fail("calloc");
    char request[REQUEST_BYTES], reply[REPLY_BYTES];
    memset(request, 7, sizeof request);

    pid_t parent = getpid(), child = fork();
    if (child < 0) fail("fork");
    pin(atoi(argv[child == 0 ? 5 : 4]));
    if (child == 0) serve(&requests, &replies, warm_up + count, parent);
    for (uint64_t i = 0; i < warm_up + count; i++) {
        int64_t begin = nnfmq_now();
        send_message(&requests, request, REQUEST_BYTES);
        receive_message(&replies, reply, REPLY_BYTES);
        if (i >= warm_up) times[i - warm_up] = nnfmq_now() - begin;
    }
    waitpid(child, NULL, 0);
    for (uint64_t i = 0; i < count; i++) printf("%lld\n", (long long)times[i]);
    return 0;
}
