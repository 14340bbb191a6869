/* A foreign program at a named queue of 8-byte records, for test_foreign_programs.py: it does what its stdin says.
 *
 * `r N` and `w VALUE...` try once, `R MS N` and `W MS VALUE...` wait; `T MS N` reads and `S MS N` writes the numbers 0 to
 * N-1, one at a time; `a` asks what can be read; `x MS BITS` waits for event bits, `k BITS` wakes. It answers each line
 * with one: what the call returned, then records, or how many were in order. */
#include "nnfmq_queue.h"

#include <stdio.h>
#include <stdlib.h>

enum { MOST = 256 };

static int64_t next_number(void) {
    const char *word = strtok(NULL, " \n");
    return word ? strtoll(word, NULL, 10) : 0;
}

static uint64_t rest_of_line(uint64_t *values) {
    uint64_t count = 0;
    for (const char *word; count < MOST && (word = strtok(NULL, " \n")) != NULL;)
        values[count++] = strtoull(word, NULL, 10);
    return count;
}

static void answer(int result, const uint64_t *values, uint64_t count) {
    printf("%d", result);
    for (uint64_t i = 0; result == 1 && i < count; i++)
        printf(" %llu", (unsigned long long)values[i]);
    printf("\n");
}

static uint64_t stream(nnfmq_queue *q, int is_reader, int64_t timeout_ns, uint64_t count) {
    for (uint64_t i = 0; i < count; i++) {
        uint64_t value = i;
        int done = is_reader ? nnfmq_read_blocking(q, &value, 1, timeout_ns)
                             : nnfmq_write_blocking(q, &value, 1, timeout_ns);
        if (done != 1 || value != i)
            return i;
    }
    return count;
}

static void obey(nnfmq_queue *q, char what) {
    uint64_t values[MOST] = {0};
    uint32_t bits = 0;
    int64_t timeout_ns = strchr("RWTSx", what) ? next_number() * 1000000 : 0;
    uint64_t count = strchr("Ww", what) ? rest_of_line(values) : (uint64_t)next_number();
    switch (what) {
    case 'r': answer(nnfmq_read(q, values, count), values, count); break;
    case 'w': answer(nnfmq_write(q, values, count), NULL, 0); break;
    case 'R': answer(nnfmq_read_blocking(q, values, count, timeout_ns), values, count); break;
    case 'W': answer(nnfmq_write_blocking(q, values, count, timeout_ns), NULL, 0); break;
    case 'T':
    case 'S': printf("%llu\n", (unsigned long long)stream(q, what == 'T', timeout_ns, count)); break;
    case 'a': printf("%llu\n", (unsigned long long)nnfmq_available_to_read(q)); break;
    case 'x':
        answer(nnfmq_wait(q, (uint32_t)count, &bits, timeout_ns), values, 0);
        printf("%u\n", bits);
        break;
    case 'k': nnfmq_wake(q, (uint32_t)count); printf("0\n"); break;
    default: printf("?\n");
    }
}

int main(int count, char **words) {
    nnfmq_queue q;
    char line[4096];
    int error = count == 2 ? nnfmq_open(&q, words[1]) : -EINVAL;
    alarm(60); /* longer than any test: what hangs ends */
    printf("%d\n", error);
    fflush(stdout);
    while (error == 0 && fgets(line, sizeof line, stdin) != NULL) {
        const char *what = strtok(line, " \n");
        obey(&q, what ? *what : '?');
        fflush(stdout);
    }
    if (error == 0)
        nnfmq_close(&q);
    return 0;
}
