"""Bugs that the model checker must find. Each is one change to the text of `_thread_pool.h`.

If the text to be replaced is not found exactly once, the test fails with a message: the bug has to follow the source.
"""

from __future__ import annotations

from support.pool_explorer.replay import SeededBug

_OPEN = "    atomic_fetch_add_explicit(&pool->epoch, 1, memory_order_seq_cst); /* SYNC region, busy, sleep */\n"
_DIVIDE = "    nnfmq_pool_divide(pool, launch, threads);\n"
_JOIN = "    atomic_exchange_explicit(busy, NNFMQ_POOL_BUSY, memory_order_seq_cst); /* SYNC busy */\n"
_AGAIN = (
    "    int is_open = atomic_load_explicit(&pool->epoch, memory_order_seq_cst) == epoch; /* SYNC busy, region */\n"
)
_LEAVE = "atomic_exchange_explicit(busy, NNFMQ_POOL_FREE, memory_order_seq_cst); /* SYNC result, await */\n"
_COUNTED = (
    "    if (atomic_load_explicit(&pool->epoch, memory_order_seq_cst) != epoch) /* SYNC sleep */\n        return;\n"
)

# These are found with loads that read what is newest.

OPENED_BEFORE_IT_IS_WRITTEN = SeededBug(_DIVIDE + _OPEN, _OPEN + _DIVIDE)
OPENED_WITHOUT_RELEASE = SeededBug(_OPEN, _OPEN.replace("seq_cst", "relaxed"))
JOINED_WITHOUT_A_SECOND_LOOK = SeededBug(_AGAIN, "    int is_open = 1 || epoch;\n")
NOT_AWAITED = SeededBug(
    "    for (int64_t t = 1; t <= pool->workers; t++)\n        nnfmq_pool_await(&pool->ranges[t].busy);\n", ""
)
LEFT_WITHOUT_RELEASE = SeededBug(_LEAVE, _LEAVE.replace("seq_cst", "relaxed"))
LEFT_WITHOUT_WAKING = SeededBug(
    "    if (before == NNFMQ_POOL_AWAITED)\n", "    if (before == NNFMQ_POOL_AWAITED && 0)\n"
)
CHUNKS_TAKEN_TWICE = SeededBug(
    "(number = atomic_fetch_add_explicit(&range->next, 1, memory_order_relaxed)) < end",
    "(number = atomic_load_explicit(&range->next, memory_order_relaxed)) < end"
    " && (atomic_store_explicit(&range->next, number + 1, memory_order_relaxed), 1)",
)
SLEPT_WITHOUT_A_SECOND_LOOK = SeededBug(_COUNTED, "    (void)epoch;\n")
SLEPT_ON_ANY_VALUE = SeededBug(
    "        nnfmq_pool_futex_wait(&pool->wake_seq, seq);\n",
    "        nnfmq_pool_futex_wait(&pool->wake_seq, seq = atomic_load(&pool->wake_seq));\n",
)
STOPPED_WITHOUT_WAKING = SeededBug(
    "memory_order_seq_cst); /* SYNC sleep */\n    nnfmq_pool_wake(pool);\n", "memory_order_seq_cst);\n"
)

# These are visible only if a load may read what is older.

JOINED_WITHOUT_TOTAL_ORDER = SeededBug(_JOIN, _JOIN.replace("seq_cst", "acq_rel"))
SECOND_LOOK_WITHOUT_TOTAL_ORDER = SeededBug(_AGAIN, _AGAIN.replace("seq_cst", "acquire"))
COUNTED_WITHOUT_TOTAL_ORDER = SeededBug(_COUNTED, _COUNTED.replace("seq_cst", "relaxed"))
