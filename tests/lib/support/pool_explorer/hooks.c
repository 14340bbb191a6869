/* The functions that code compiled with -fsanitize=thread calls at its accesses: a replay instead of a race detector.
 *
 * `explored_replay` makes a call. Each access to the explored memory returns the next result of `history`; the first one
 * beyond it ends the call, and is reported. A plain access happens after its hook, so a load finds the result put into
 * memory, and a store is reported at the next hook, when its value is there. Memory has no other meaning here: what it
 * contains in a state is in the state.
 */
#include <setjmp.h>
#include <stdint.h>
#include <string.h>

enum { DONE, READ, WRITE, LOAD, STORE, ADD, EXCHANGE, COMPARE, WAIT, WAKE };

typedef struct {
    int64_t kind, place, size, operand, expected, order;
} operation;

extern char explored_pool[], explored_data[];
extern const uint64_t explored_sizes[2];

static const int64_t *results;
static int64_t result_count, position;
static operation *reported;
static jmp_buf ending;
static char *stored;
static int64_t stored_size;

/* The place of an address in the explored memory, or -1: the thread's own memory. The data come after the pool. */
static int64_t place_of(const void *address) {
    const char *at = address;
    if (at >= explored_pool && at < explored_pool + explored_sizes[0])
        return at - explored_pool;
    if (at >= explored_data && at < explored_data + explored_sizes[1])
        return (int64_t)explored_sizes[0] + (at - explored_data);
    return -1;
}

static int64_t perform(operation op) {
    if (position < result_count)
        return results[position++];
    *reported = op;
    longjmp(ending, 1);
}

static void flush(void) {
    if (!stored)
        return;
    int64_t value = 0;
    memcpy(&value, stored, (size_t)stored_size);
    const char *at = stored;
    stored = 0;
    perform((operation){WRITE, place_of(at), stored_size, value, 0, 0});
}

static void plain_read(void *address, int64_t size) {
    flush();
    if (place_of(address) < 0)
        return;
    int64_t value = perform((operation){READ, place_of(address), size, 0, 0, 0});
    memcpy(address, &value, (size_t)size);
}

static void plain_write(void *address, int64_t size) {
    flush();
    if (place_of(address) >= 0) {
        stored = address;
        stored_size = size;
    }
}

static int64_t atomic(int64_t kind, const volatile void *address, int64_t size, int64_t operand, int64_t expected,
                      int order) {
    flush();
    return perform((operation){kind, place_of((const void *)address), size, operand, expected, order});
}

#define PLAIN(size) \
    void __tsan_read##size(void *address) { plain_read(address, size); } \
    void __tsan_write##size(void *address) { plain_write(address, size); }
PLAIN(1)
PLAIN(2)
PLAIN(4)
PLAIN(8)

#define ATOMIC(bits, type) \
    type __tsan_atomic##bits##_load(const volatile type *at, int order) { \
        return (type)atomic(LOAD, at, sizeof(type), 0, 0, order); \
    } \
    void __tsan_atomic##bits##_store(volatile type *at, type value, int order) { \
        atomic(STORE, at, sizeof(type), value, 0, order); \
    } \
    type __tsan_atomic##bits##_fetch_add(volatile type *at, type value, int order) { \
        return (type)atomic(ADD, at, sizeof(type), value, 0, order); \
    } \
    type __tsan_atomic##bits##_exchange(volatile type *at, type value, int order) { \
        return (type)atomic(EXCHANGE, at, sizeof(type), value, 0, order); \
    } \
    int __tsan_atomic##bits##_compare_exchange_strong(volatile type *at, type *expected, type value, int order, \
                                                      int failure) { \
        (void)failure; \
        type before = *expected; \
        *expected = (type)atomic(COMPARE, at, sizeof(type), value, before, order); \
        return *expected == before; \
    }
ATOMIC(8, int8_t)
ATOMIC(32, int32_t)
ATOMIC(64, int64_t)

long explored_syscall(long number, void *word, int operation, uint32_t value, ...) {
    (void)number;
    enum { FUTEX_WAIT_PRIVATE = 128, FUTEX_WAKE_PRIVATE = 129 };
    if (operation == FUTEX_WAIT_PRIVATE)
        return atomic(WAIT, word, 4, 0, (int32_t)value, 5);
    return operation == FUTEX_WAKE_PRIVATE ? atomic(WAKE, word, 4, (int32_t)value, 0, 5) : -1;
}

void __tsan_func_entry(void *address) { (void)address; }
void __tsan_func_exit(void) {}
void __tsan_init(void) {}

/* Makes the call `function(argument, state)` with `count` results, and reports the operation that it stops at: DONE, with
 * the returned value as operand, if it ends. */
void explored_replay(int64_t (*function)(int64_t, int64_t *), int64_t argument, int64_t *state, const int64_t *history,
                     int64_t count, int64_t workers, operation *op) {
    results = history;
    result_count = count;
    position = 0;
    reported = op;
    stored = 0;
    memset(explored_data, 0, explored_sizes[1]);
    memset(explored_pool, 0, explored_sizes[0]);
    memcpy(explored_pool, &workers, sizeof workers); /* nobody writes it while threads run */
    if (setjmp(ending))
        return;
    int64_t value = function(argument, state);
    flush();
    *op = (operation){DONE, -1, 0, value, 0, 0};
}
