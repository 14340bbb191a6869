/* A named queue of nnfmq from C11 or C++11: attach by name, write, read, wait, wake. One file, made to be copied.
 *
 * `nnfmq queue create NAME --record-bytes N --count N` creates the queue; the trailer of its memory has the layout.
 * Flavors, counters and event flag word are libfmq's. One thread of one process writes, and one reads; any number may
 * read from an unsynchronized queue. Operations move all of their records or none.
 *
 * Results: 1 = done; 0 = not enough space or records (non-blocking calls only); negative = an errno. Timeouts are in
 * nanoseconds; 0 means no limit, as in libfmq. Peer death is not detected: use timeouts.
 *
 * Only for programs that trust each other: a process that may open the memory can shrink it, and the next access of the
 * others is a SIGBUS. Needs Linux, a little-endian machine, and the __atomic builtins of GCC or Clang, which are C11's
 * memory model in C and in C++ (_Atomic is not C++). nnfmq/queue/_atomics.h explains the memory orders. Include this
 * file first, or compile with -D_GNU_SOURCE; before glibc 2.34 link with -lrt.
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

enum { NNFMQ_NOT_FULL = 1, NNFMQ_NOT_EMPTY = 2 };         /* bits of the event flag word */
enum { NNFMQ_SYNCHRONIZED = 1, NNFMQ_UNSYNCHRONIZED = 2 }; /* flavors */

#define NNFMQ_MAGIC 0x716d666eu /* "nfmq" */

typedef struct {
    uint64_t *read_counter, *write_counter;
    uint32_t *event; /* the event flag word; NULL: the queue has none */
    unsigned char *ring;
    uint64_t ring_bytes, quantum;
    uint64_t private_read_counter; /* of an unsynchronized reader */
    uint32_t flavor;
    int is_writable;
    void *memory;
    size_t memory_bytes;
} nnfmq_queue;

/* The last 128 bytes of the memory, as nnfmq/queue/descriptor_formats.py documents them. */
typedef struct {
    uint32_t magic, version, flavor, quantum;
    uint64_t count;
    struct {
        uint64_t offset, extent;
    } read_counter, write_counter, ring, event;
    uint64_t unused[5];
} nnfmq_trailer;

static_assert(sizeof(nnfmq_trailer) == 128, "the trailer has 128 bytes");

/* ---- attaching ---- */

static inline int nnfmq_is_inside(uint64_t offset, uint64_t extent, uint64_t min_extent, uint64_t end) {
    return offset % 8 == 0 && extent >= min_extent && offset <= end && extent <= end - offset;
}

/* Sets the addresses of the queue's parts from a copy of the trailer. -EAGAIN: the creator has not finished it. */
static inline int nnfmq_read_trailer(nnfmq_queue *q) {
    nnfmq_trailer trailer;
    uint64_t end = q->memory_bytes - sizeof trailer;
    unsigned char *base = (unsigned char *)q->memory;
    uint32_t magic = __atomic_load_n((uint32_t *)(void *)(base + end), __ATOMIC_ACQUIRE);
    if (magic != NNFMQ_MAGIC)
        return (magic & ~NNFMQ_MAGIC) == 0 ? -EAGAIN : -EPROTO; /* without libatomic, a creator sets its bits one by one */
    memcpy(&trailer, base + end, sizeof trailer);
    if (trailer.version != 1 || trailer.quantum == 0 || trailer.count == 0 ||
        trailer.count > INT_MAX / trailer.quantum || trailer.ring.extent != trailer.quantum * trailer.count ||
        !nnfmq_is_inside(trailer.read_counter.offset, trailer.read_counter.extent, 8, end) ||
        !nnfmq_is_inside(trailer.write_counter.offset, trailer.write_counter.extent, 8, end) ||
        !nnfmq_is_inside(trailer.ring.offset, trailer.ring.extent, 1, end) ||
        (trailer.event.extent && !nnfmq_is_inside(trailer.event.offset, trailer.event.extent, 4, end)) ||
        (trailer.flavor != NNFMQ_SYNCHRONIZED && trailer.flavor != NNFMQ_UNSYNCHRONIZED))
        return -EPROTO;
    if (trailer.flavor == NNFMQ_SYNCHRONIZED && !q->is_writable)
        return -EACCES; /* both sides store counters */
    q->read_counter = (uint64_t *)(void *)(base + trailer.read_counter.offset);
    q->write_counter = (uint64_t *)(void *)(base + trailer.write_counter.offset);
    q->event = trailer.event.extent ? (uint32_t *)(void *)(base + trailer.event.offset) : NULL;
    q->ring = base + trailer.ring.offset;
    q->ring_bytes = trailer.ring.extent;
    q->quantum = trailer.quantum;
    q->flavor = trailer.flavor;
    return 0;
}

static inline void nnfmq_close(nnfmq_queue *q) {
    if (q->memory != NULL)
        munmap(q->memory, q->memory_bytes);
    memset(q, 0, sizeof *q);
}

/* Attaches to the queue of this name; its counters stay as they are. Returns 0, or a negative errno. If it fails, there
 * is nothing to close. */
static inline int nnfmq_open(nnfmq_queue *q, const char *name) {
    struct stat found;
    int error, fd = shm_open(name, O_RDWR, 0);
    memset(q, 0, sizeof *q);
    q->is_writable = fd >= 0;
    if (fd < 0 && errno == EACCES) /* sufficient to read from an unsynchronized queue */
        fd = shm_open(name, O_RDONLY, 0);
    if (fd < 0 || fstat(fd, &found) != 0) {
        error = -errno;
    } else if (found.st_size % 8 != 0 || found.st_size < (off_t)sizeof(nnfmq_trailer)) {
        error = found.st_size == 0 ? -EAGAIN : -EPROTO;
    } else {
        void *at = mmap(NULL, (size_t)found.st_size, PROT_READ | (q->is_writable ? PROT_WRITE : 0), MAP_SHARED, fd, 0);
        q->memory = at == MAP_FAILED ? NULL : at;
        q->memory_bytes = (size_t)found.st_size;
        error = at == MAP_FAILED ? -errno : nnfmq_read_trailer(q);
    }
    if (fd >= 0)
        close(fd);
    if (error)
        nnfmq_close(q);
    return error;
}

/* ---- non-blocking calls, which wake nobody ---- */

static inline uint64_t *nnfmq_read_counter(nnfmq_queue *q) {
    return q->flavor == NNFMQ_SYNCHRONIZED ? q->read_counter : &q->private_read_counter;
}

/* How many records can be read. More than the capacity: overflow of an unsynchronized queue. */
static inline uint64_t nnfmq_available_to_read(nnfmq_queue *q) {
    uint64_t w = __atomic_load_n(q->write_counter, __ATOMIC_ACQUIRE);
    uint64_t r = __atomic_load_n(nnfmq_read_counter(q), __ATOMIC_ACQUIRE);
    return w < r ? 0 : (w - r) / q->quantum;
}

/* Also -EMSGSIZE: more than the capacity; -EACCES: mapped read-only; -EBADMSG: a counter that no correct peer stores. As
 * in libfmq, a read counter ahead of the write counter counts as an empty ring, and the next read discards what is in
 * it; with one more than a ring behind, a write fails until the next read. */
static inline int nnfmq_write(nnfmq_queue *q, const void *data, uint64_t records) {
    if (records > q->ring_bytes / q->quantum)
        return -EMSGSIZE;
    if (!q->is_writable)
        return -EACCES;
    uint64_t bytes = records * q->quantum;
    uint64_t w = __atomic_load_n(q->write_counter, __ATOMIC_RELAXED);
    uint64_t used = 0;
    if (q->flavor == NNFMQ_SYNCHRONIZED) {
        uint64_t r = __atomic_load_n(q->read_counter, __ATOMIC_ACQUIRE);
        used = w < r ? 0 : w - r;
    }
    if (w % q->quantum != 0 || used > q->ring_bytes)
        return -EBADMSG;
    if (bytes > q->ring_bytes - used)
        return 0;
    if (q->flavor == NNFMQ_UNSYNCHRONIZED) { /* reserve: libfmq does not use this word */
        __atomic_store_n(q->read_counter, w + bytes, __ATOMIC_RELAXED);
        __atomic_thread_fence(__ATOMIC_RELEASE); /* a reader that sees the new bytes sees this too */
    }
    uint64_t at = w % q->ring_bytes;
    uint64_t first = bytes < q->ring_bytes - at ? bytes : q->ring_bytes - at;
    memcpy(q->ring + at, data, first);
    memcpy(q->ring, (const unsigned char *)data + first, bytes - first);
    __atomic_store_n(q->write_counter, w + bytes, __ATOMIC_RELEASE);
    return 1;
}

/* Also -EMSGSIZE; -EBADMSG, after which, as in libfmq, the next call reads what is written next, unless a counter is no
 * multiple of the quantum; -EOVERFLOW: an unsynchronized writer has overwritten unread records. The next call reads what
 * is written next, and `data` may contain bytes of other records. */
static inline int nnfmq_read(nnfmq_queue *q, void *data, uint64_t records) {
    if (records > q->ring_bytes / q->quantum)
        return -EMSGSIZE;
    uint64_t bytes = records * q->quantum;
    uint64_t w = __atomic_load_n(q->write_counter, __ATOMIC_ACQUIRE);
    uint64_t r = __atomic_load_n(nnfmq_read_counter(q), __ATOMIC_RELAXED);
    if (w % q->quantum != 0 || r % q->quantum != 0)
        return -EBADMSG;
    if (q->flavor == NNFMQ_SYNCHRONIZED && w - r > q->ring_bytes) { /* also if w < r: the difference wraps around */
        __atomic_store_n(q->read_counter, w, __ATOMIC_RELEASE);
        return -EBADMSG;
    }
    uint64_t end = w; /* the writer may have overwritten records before this counter */
    if (w - r <= q->ring_bytes) {
        if (w - r < bytes)
            return 0;
        uint64_t at = r % q->ring_bytes;
        uint64_t first = bytes < q->ring_bytes - at ? bytes : q->ring_bytes - at;
        memcpy(data, q->ring + at, first);
        memcpy((unsigned char *)data + first, q->ring, bytes - first);
        __atomic_thread_fence(__ATOMIC_ACQUIRE); /* the loads of the copy come before those of the counters */
        if (q->flavor == NNFMQ_UNSYNCHRONIZED) {
            w = __atomic_load_n(q->write_counter, __ATOMIC_ACQUIRE);
            end = __atomic_load_n(q->read_counter, __ATOMIC_RELAXED);
        }
    }
    int is_overflow = w - r > q->ring_bytes || (end > r && end - r > q->ring_bytes);
    __atomic_store_n(nnfmq_read_counter(q), is_overflow ? w : r + bytes, __ATOMIC_RELEASE);
    return is_overflow ? -EOVERFLOW : 1;
}

/* ---- the event flag word ---- */

static inline int64_t nnfmq_deadline(int64_t timeout_ns) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    int64_t now_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    return timeout_ns > 0 && timeout_ns < INT64_MAX - now_ns ? now_ns + timeout_ns : INT64_MAX;
}

/* Sets bits and wakes the threads that wait for one of them. If all were set, nobody sleeps on them, and there is no
 * system call. Does nothing if the queue has no event flag or is mapped read-only. */
static inline void nnfmq_wake(nnfmq_queue *q, uint32_t bits) {
    if (q->event == NULL || !q->is_writable)
        return;
    uint32_t old = __atomic_fetch_or(q->event, bits, __ATOMIC_SEQ_CST);
    if ((old & bits) != bits)
        syscall(SYS_futex, q->event, FUTEX_WAKE_BITSET, INT_MAX, NULL, NULL, bits);
}

/* Clears those of `bits` that are set, else sleeps once. Returns 0 (check again), -ETIMEDOUT, or another negative errno. */
static inline int nnfmq_sleep(nnfmq_queue *q, uint32_t bits, int64_t deadline_ns, uint32_t *cleared) {
    struct timespec at = {(time_t)(deadline_ns / 1000000000), (long)(deadline_ns % 1000000000)};
    struct timespec *limit = deadline_ns == INT64_MAX ? NULL : &at;
    uint32_t old = __atomic_fetch_and(q->event, ~bits, __ATOMIC_SEQ_CST);
    *cleared = old & bits;
    if (*cleared || syscall(SYS_futex, q->event, FUTEX_WAIT_BITSET, old & ~bits, limit, NULL, bits) == 0)
        return 0;
    return errno == EAGAIN || errno == EINTR ? 0 : -errno;
}

/* Blocks until one of `bits` is set. Returns 1 and clears those in *state, or a negative errno. One waiter per bit. */
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
    uint32_t cleared;
    int done, error = 0;
    if (q->flavor != NNFMQ_SYNCHRONIZED || q->event == NULL)
        return -EINVAL;
    while ((done = nnfmq_write(q, data, records)) == 0 && error == 0)
        error = nnfmq_sleep(q, NNFMQ_NOT_FULL, deadline_ns, &cleared);
    if (done == 1)
        nnfmq_wake(q, NNFMQ_NOT_EMPTY);
    return done ? done : error;
}

static inline int nnfmq_read_blocking(nnfmq_queue *q, void *data, uint64_t records, int64_t timeout_ns) {
    int64_t deadline_ns = nnfmq_deadline(timeout_ns);
    uint32_t cleared;
    int done, error = 0;
    if (q->flavor != NNFMQ_SYNCHRONIZED || q->event == NULL)
        return -EINVAL;
    while ((done = nnfmq_read(q, data, records)) == 0 && error == 0)
        error = nnfmq_sleep(q, NNFMQ_NOT_EMPTY, deadline_ns, &cleared);
    if (done == 1)
        nnfmq_wake(q, NNFMQ_NOT_FULL);
    return done ? done : error;
}

#endif
