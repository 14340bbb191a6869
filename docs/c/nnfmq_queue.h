/* A named queue of nnfmq from C11 or C++11: attach by name, write, read, wait, wake. One file, made to be copied.
 *
 * `nnfmq queue create NAME --record-bytes N --count N` makes the queue; its memory says where everything lies. The two
 * flavours, the counters and the event word are libfmq's. One thread of one process writes, one reads (unsynchronized:
 * any number read). Whole records, all or nothing. Payload first, then one release store of the counter.
 *
 * Answers: 1 = done, 0 = no room or not enough records (blocking calls: never 0), negative = an errno. Time-outs are
 * nanoseconds, and 0 waits for ever, as in libfmq. Nothing says whether the other side lives: give a time-out.
 *
 * For programs that trust each other: whoever may open the memory can shrink it, and an access is then a SIGBUS.
 * Needs Linux, a little-endian machine, and the __atomic builtins of GCC or Clang, which are C11's memory model in C
 * and in C++ alike (_Atomic is not C++). Include it first, or compile with -D_GNU_SOURCE; glibc before 2.34: -lrt.
 */
#ifndef NNFMQ_QUEUE_H
#define NNFMQ_QUEUE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* for syscall(2) */
#endif

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the queues are little-endian"
#endif

enum { NNFMQ_NOT_FULL = 1, NNFMQ_NOT_EMPTY = 2 };         /* bits of the event word */
enum { NNFMQ_SYNCHRONIZED = 1, NNFMQ_UNSYNCHRONIZED = 2 }; /* flavours */

#define NNFMQ_MAGIC 0x716d666eu /* "nfmq" */

typedef struct {
    uint64_t *read_counter, *write_counter;
    uint32_t *event; /* NULL: it has none */
    unsigned char *ring;
    uint64_t ring_bytes, quantum;
    uint64_t position; /* an unsynchronized reader's own */
    uint32_t flavor;
    int is_writable;
    void *memory;
    size_t memory_bytes;
} nnfmq_queue;

/* The last 128 bytes of the memory; drawn in nnfmq/queue/descriptor_formats.py. */
typedef struct {
    uint32_t magic, version, flavor, quantum;
    uint64_t count;
    struct {
        uint64_t offset, extent;
    } read_counter, write_counter, ring, event;
    uint64_t unused[5];
} nnfmq_record;

static_assert(sizeof(nnfmq_record) == 128, "the record has 128 bytes");

/* ---- attaching ---- */

static inline int nnfmq_is_inside(uint64_t offset, uint64_t extent, uint64_t least, uint64_t end) {
    return offset % 8 == 0 && extent >= least && offset <= end && extent <= end - offset;
}

/* Where the parts lie, by a copy of the record. -EAGAIN: its creator has not finished it. */
static inline int nnfmq_place(nnfmq_queue *q) {
    nnfmq_record record;
    uint64_t end = q->memory_bytes - sizeof record;
    unsigned char *base = (unsigned char *)q->memory;
    uint32_t magic = __atomic_load_n((uint32_t *)(void *)(base + end), __ATOMIC_ACQUIRE);
    if (magic != NNFMQ_MAGIC)
        return (magic & ~NNFMQ_MAGIC) == 0 ? -EAGAIN : -EPROTO; /* some creators can set its bits only one by one */
    memcpy(&record, base + end, sizeof record);
    if (record.version != 1 || record.quantum == 0 || record.count == 0 ||
        record.count > INT_MAX / record.quantum || record.ring.extent != record.quantum * record.count ||
        !nnfmq_is_inside(record.read_counter.offset, record.read_counter.extent, 8, end) ||
        !nnfmq_is_inside(record.write_counter.offset, record.write_counter.extent, 8, end) ||
        !nnfmq_is_inside(record.ring.offset, record.ring.extent, 1, end) ||
        (record.event.extent && !nnfmq_is_inside(record.event.offset, record.event.extent, 4, end)) ||
        (record.flavor != NNFMQ_SYNCHRONIZED && record.flavor != NNFMQ_UNSYNCHRONIZED))
        return -EPROTO;
    if (record.flavor == NNFMQ_SYNCHRONIZED && !q->is_writable)
        return -EACCES; /* both sides write counters */
    q->read_counter = (uint64_t *)(void *)(base + record.read_counter.offset);
    q->write_counter = (uint64_t *)(void *)(base + record.write_counter.offset);
    q->event = record.event.extent ? (uint32_t *)(void *)(base + record.event.offset) : NULL;
    q->ring = base + record.ring.offset;
    q->ring_bytes = record.ring.extent;
    q->quantum = record.quantum;
    q->flavor = record.flavor;
    return 0;
}

static inline void nnfmq_close(nnfmq_queue *q) {
    if (q->memory != NULL)
        munmap(q->memory, q->memory_bytes);
    memset(q, 0, sizeof *q);
}

/* Attaches to the queue of this name, counters as they are. 0 or a negative errno; then there is nothing to close. */
static inline int nnfmq_open(nnfmq_queue *q, const char *name) {
    struct stat found;
    int error, fd = shm_open(name, O_RDWR, 0);
    memset(q, 0, sizeof *q);
    q->is_writable = fd >= 0;
    if (fd < 0 && errno == EACCES) /* enough for reading from an unsynchronized queue */
        fd = shm_open(name, O_RDONLY, 0);
    if (fd < 0 || fstat(fd, &found) != 0) {
        error = -errno;
    } else if (found.st_size % 8 != 0 || found.st_size < (off_t)sizeof(nnfmq_record)) {
        error = found.st_size == 0 ? -EAGAIN : -EPROTO;
    } else {
        void *at = mmap(NULL, (size_t)found.st_size, PROT_READ | (q->is_writable ? PROT_WRITE : 0), MAP_SHARED, fd, 0);
        q->memory = at == MAP_FAILED ? NULL : at;
        q->memory_bytes = (size_t)found.st_size;
        error = at == MAP_FAILED ? -errno : nnfmq_place(q);
    }
    if (fd >= 0)
        close(fd);
    if (error)
        nnfmq_close(q);
    return error;
}

/* ---- one try; never waits, wakes nobody ---- */

static inline uint64_t *nnfmq_reader(nnfmq_queue *q) {
    return q->flavor == NNFMQ_SYNCHRONIZED ? q->read_counter : &q->position;
}

/* Records that can be read; of an unsynchronized queue, more than it holds where the writer has overtaken us. */
static inline uint64_t nnfmq_available_to_read(nnfmq_queue *q) {
    uint64_t w = __atomic_load_n(q->write_counter, __ATOMIC_ACQUIRE);
    uint64_t r = __atomic_load_n(nnfmq_reader(q), __ATOMIC_ACQUIRE);
    return w < r ? 0 : (w - r) / q->quantum;
}

/* Also -EMSGSIZE: more than the ring holds; -EBADMSG: impossible counters; -EACCES: mapped for reading only. */
static inline int nnfmq_write(nnfmq_queue *q, const void *data, uint64_t records) {
    if (records > q->ring_bytes / q->quantum)
        return -EMSGSIZE;
    if (!q->is_writable)
        return -EACCES;
    uint64_t bytes = records * q->quantum;
    uint64_t w = __atomic_load_n(q->write_counter, __ATOMIC_RELAXED);
    uint64_t used = 0;
    if (q->flavor == NNFMQ_SYNCHRONIZED)
        used = w - __atomic_load_n(q->read_counter, __ATOMIC_ACQUIRE);
    if (w % q->quantum != 0 || used > q->ring_bytes)
        return -EBADMSG;
    if (bytes > q->ring_bytes - used)
        return 0;
    if (q->flavor == NNFMQ_UNSYNCHRONIZED) { /* say how far we are about to write: libfmq does not use this word */
        __atomic_store_n(q->read_counter, w + bytes, __ATOMIC_RELAXED);
        __atomic_thread_fence(__ATOMIC_RELEASE); /* whoever sees the new bytes sees this, too */
    }
    uint64_t at = w % q->ring_bytes;
    uint64_t first = bytes < q->ring_bytes - at ? bytes : q->ring_bytes - at;
    memcpy(q->ring + at, data, first);
    memcpy(q->ring, (const unsigned char *)data + first, bytes - first);
    __atomic_store_n(q->write_counter, w + bytes, __ATOMIC_RELEASE);
    return 1;
}

/* Also -EMSGSIZE and -EBADMSG; -EOVERFLOW: the writer has overtaken this unsynchronized reader, which goes on with what
 * is written next; then `data` may hold other records. */
static inline int nnfmq_read(nnfmq_queue *q, void *data, uint64_t records) {
    if (records > q->ring_bytes / q->quantum)
        return -EMSGSIZE;
    uint64_t bytes = records * q->quantum;
    uint64_t w = __atomic_load_n(q->write_counter, __ATOMIC_ACQUIRE);
    uint64_t r = __atomic_load_n(nnfmq_reader(q), __ATOMIC_RELAXED);
    if (w % q->quantum != 0 || r % q->quantum != 0 || (q->flavor == NNFMQ_SYNCHRONIZED && w - r > q->ring_bytes))
        return -EBADMSG;
    uint64_t end = w; /* of what is, or is about to be, overwritten */
    if (w - r <= q->ring_bytes) {
        if (w - r < bytes)
            return 0;
        uint64_t at = r % q->ring_bytes;
        uint64_t first = bytes < q->ring_bytes - at ? bytes : q->ring_bytes - at;
        memcpy(data, q->ring + at, first);
        memcpy((unsigned char *)data + first, q->ring, bytes - first);
        __atomic_thread_fence(__ATOMIC_ACQUIRE); /* the copy is over before the counter is looked at again */
        if (q->flavor == NNFMQ_UNSYNCHRONIZED) {
            w = __atomic_load_n(q->write_counter, __ATOMIC_ACQUIRE);
            end = __atomic_load_n(q->read_counter, __ATOMIC_RELAXED);
        }
    }
    int is_overtaken = w - r > q->ring_bytes || (end > r && end - r > q->ring_bytes);
    __atomic_store_n(nnfmq_reader(q), is_overtaken ? w : r + bytes, __ATOMIC_RELEASE);
    return is_overtaken ? -EOVERFLOW : 1;
}

/* ---- the event word ---- */

static inline int64_t nnfmq_deadline(int64_t timeout_ns) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    int64_t now_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    return timeout_ns > 0 && timeout_ns < INT64_MAX - now_ns ? now_ns + timeout_ns : INT64_MAX;
}

/* Sets bits and wakes who waits for one of them; no system call where they were set, for then nobody sleeps. Does
 * nothing where the queue has no event word or is mapped for reading only. */
static inline void nnfmq_wake(nnfmq_queue *q, uint32_t bits) {
    if (q->event == NULL || !q->is_writable)
        return;
    uint32_t old = __atomic_fetch_or(q->event, bits, __ATOMIC_SEQ_CST);
    if ((old & bits) != bits)
        syscall(SYS_futex, q->event, FUTEX_WAKE_BITSET, INT_MAX, NULL, NULL, bits);
}

/* Takes those of `bits` that are set, else sleeps once: 0 (look again), -ETIMEDOUT, or another negative errno. */
static inline int nnfmq_sleep(nnfmq_queue *q, uint32_t bits, int64_t deadline_ns, uint32_t *taken) {
    struct timespec at = {(time_t)(deadline_ns / 1000000000), (long)(deadline_ns % 1000000000)};
    struct timespec *limit = deadline_ns == INT64_MAX ? NULL : &at;
    uint32_t old = __atomic_fetch_and(q->event, ~bits, __ATOMIC_SEQ_CST);
    *taken = old & bits;
    if (*taken || syscall(SYS_futex, q->event, FUTEX_WAIT_BITSET, old & ~bits, limit, NULL, bits) == 0)
        return 0;
    return errno == EAGAIN || errno == EINTR ? 0 : -errno;
}

/* Waits for any of `bits`; 1, with those that came, or a negative errno. One waiter for each bit. */
static inline int nnfmq_wait(nnfmq_queue *q, uint32_t bits, uint32_t *state, int64_t timeout_ns) {
    int64_t deadline_ns = nnfmq_deadline(timeout_ns);
    int error = 0;
    *state = 0;
    if (q->event == NULL || !q->is_writable || bits == 0)
        return -EINVAL;
    while (error == 0 && *state == 0)
        error = nnfmq_sleep(q, bits, deadline_ns, state);
    return *state ? 1 : error;
}

/* ---- blocking: synchronized queues only (-EINVAL) ---- */

static inline int nnfmq_write_blocking(nnfmq_queue *q, const void *data, uint64_t records, int64_t timeout_ns) {
    int64_t deadline_ns = nnfmq_deadline(timeout_ns);
    uint32_t taken;
    int done, error = 0;
    if (q->flavor != NNFMQ_SYNCHRONIZED || q->event == NULL)
        return -EINVAL;
    while ((done = nnfmq_write(q, data, records)) == 0 && error == 0)
        error = nnfmq_sleep(q, NNFMQ_NOT_FULL, deadline_ns, &taken);
    if (done == 1)
        nnfmq_wake(q, NNFMQ_NOT_EMPTY);
    return done ? done : error;
}

static inline int nnfmq_read_blocking(nnfmq_queue *q, void *data, uint64_t records, int64_t timeout_ns) {
    int64_t deadline_ns = nnfmq_deadline(timeout_ns);
    uint32_t taken;
    int done, error = 0;
    if (q->flavor != NNFMQ_SYNCHRONIZED || q->event == NULL)
        return -EINVAL;
    while ((done = nnfmq_read(q, data, records)) == 0 && error == 0)
        error = nnfmq_sleep(q, NNFMQ_NOT_EMPTY, deadline_ns, &taken);
    if (done == 1)
        nnfmq_wake(q, NNFMQ_NOT_FULL);
    return done ? done : error;
}

#endif
