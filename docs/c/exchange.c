/* Reads records from one named queue, reverses the bytes of each, and writes them to another.
 *
 *     cc -std=c11 -O2 exchange.c -o exchange          (or: c++ -x c++ -std=c++17 ...)
 *     nnfmq queue create /requests --record-bytes 8 --count 64
 *     nnfmq queue create /results --record-bytes 8 --count 64
 *     ./exchange /requests /results 10 &
 *     nnfmq queue write /requests abcdefgh && nnfmq queue read /results      # hgfedcba
 *
 * It ends after a record of zeros, or after so many seconds (default 5) without a record. */
#include "nnfmq_queue.h"

#include <stdio.h>
#include <stdlib.h>

static int fail(const char *what, int error) {
    fprintf(stderr, "exchange: %s: %s\n", what, strerror(-error));
    return 1;
}

static int is_zero(const unsigned char *record, size_t bytes) {
    while (bytes > 0 && record[bytes - 1] == 0)
        bytes--;
    return bytes == 0;
}

static void reverse(unsigned char *record, size_t bytes) {
    for (size_t i = 0; i < bytes / 2; i++) {
        unsigned char swapped = record[bytes - 1 - i];
        record[bytes - 1 - i] = record[i];
        record[i] = swapped;
    }
}

static int exchange(nnfmq_queue *requests, nnfmq_queue *results, unsigned char *record, int64_t timeout_ns) {
    for (;;) {
        int done = nnfmq_read_blocking(requests, record, 1, timeout_ns);
        if (done < 0)
            return fail("no record", done);
        if (is_zero(record, requests->quantum))
            return 0;
        reverse(record, requests->quantum);
        done = nnfmq_write_blocking(results, record, 1, timeout_ns);
        if (done < 0)
            return fail("no space", done);
    }
}

int main(int count, char **words) {
    nnfmq_queue requests, results;
    int error;
    if (count < 3)
        return fprintf(stderr, "usage: exchange REQUESTS RESULTS [SECONDS]\n"), 2;
    if ((error = nnfmq_open(&requests, words[1])) != 0)
        return fail(words[1], error);
    if ((error = nnfmq_open(&results, words[2])) != 0 || requests.quantum != results.quantum)
        return fail(words[2], error ? error : -EPROTO);
    unsigned char *record = (unsigned char *)malloc(requests.quantum);
    int status = record ? exchange(&requests, &results, record, (int64_t)(1e9 * (count > 3 ? atof(words[3]) : 5))) : 1;
    free(record);
    nnfmq_close(&requests);
    nnfmq_close(&results);
    return status;
}
