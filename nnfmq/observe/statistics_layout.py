"""The layout of the statistics area: a header of the driver, one slot for each worker, then the counts of past clients.

All fields are words: u64, little-endian, aligned. Text is UTF-8, cut to its field and filled with zeros. A counter has
one writer, which adds to it without a lock; its words are read one by one, so the counters of a row may be of slightly
different times. What tells who has a slot and which rows it has changes together: its writer makes `CHANGE` odd before,
and even afterwards, and a reader that saw it change reads again (SYNC rows in `_recorder.pyx`).

What a client measures itself it writes to a page of its own, a memory with a row of calls for each row of its models.
The supervisor copies the rows into the client's slot before somebody reads. Nobody but the client answers for them. In
the same page the supervisor tells the client which class it was given, so that it asks the next driver for that.

A histogram counts durations. Below 1 µs its buckets are 125 ns wide; above, each octave from 2^k to 2^(k+1) µs has 8
buckets of equal width. So a bucket's middle is at most 1/16 (6.25 %) away from any duration in it. The last bucket,
which begins at 2^27 µs - 2^23 µs, also counts everything longer (125.8 s).
"""

from __future__ import annotations

import math
from typing import Final

from msgspec import Struct

__all__ = [
    "LatencyHistogram",
    "area_bytes",
    "bucket_of",
    "bucket_start_ns",
    "slot_at",
    "supports",
    "text_from_words",
    "text_to_words",
]

WORD_BYTES: Final = 8
MAGIC: Final = int.from_bytes(b"NNFMQST2", "little")  # the digit is the version of the layout
DRIVER_PAGE: Final = "nnfmq-statistics"

# Words of the header. The supervisor, or the embedded driver, writes them.
HEADER_MAGIC: Final = 0
HEADER_SLOTS: Final = 1
DRIVER_PID: Final = 2
DRIVER_START: Final = 3  # CLOCK_MONOTONIC, ns
MEMORY_LIMIT: Final = 4  # bytes that all clients may have together
CACHE_LIMIT: Final = 5  # bytes of shared programs
CACHE_PROGRAMS: Final = 6
CACHE_BYTES: Final = 7
CACHE_LOOKUPS: Final = 8
CACHE_HITS: Final = 9
COMPILE_SERVER_PID: Final = 10  # 0: none runs
COMPILE_REQUESTS: Final = 11
REJECTED_CLIENTS: Final = 12
DEAD_WORKERS: Final = 13
HEADER_PAST: Final = 14  # rows of past clients, after the slots
CLIENTS_LIMIT: Final = 15  # how many clients the driver serves at most, those that only read its statistics aside
DRIVER_VERSION: Final = 16  # text
DRIVER_VERSION_WORDS: Final = 8
DEATHS: Final = 24  # how many workers have died of each of DEATH_CAUSES
DEATH_CAUSES: Final = ("killed", "crashed", "sandbox", "ended")
SERVED_USERS: Final = 28  # one of ONE_USER and those below
ONE_USER, SEVERAL_USERS, LACKS_CAPABILITIES = 0, 1, 2  # the last: one, although it was to serve several
PID_NAMESPACE: Final = 29  # its inode: the pids of a driver mean something to processes of this one only
UPGRADED: Final = 30  # 1: nnfmq was upgraded under the driver
DRIVER_BUILD: Final = 32  # text: queue core, Python, machine
DRIVER_BUILD_WORDS: Final = 8
LIMITS: Final = 40  # the driver's limits, in the order of `limits.LIMITS`, up to the end of the header
HEADER_WORDS: Final = 64

# Words of a slot, from its beginning. The supervisor frees it and writes CLIENT_CLASS, the worker everything else.
CHANGE: Final = 0
STATE: Final = 1
FREE, USED = 0, 1
WORKER_PID: Final = 2
CLIENT_PID: Final = 3
CLIENT_UID: Final = 4
CLIENT_START: Final = 5  # CLOCK_MONOTONIC, ns
CLIENT_EXECUTIONS: Final = 6  # of all its models, released ones included
CLIENT_FAILURES: Final = 7
OPEN_CALLS: Final = 8  # calls that are queued or running
CHARGED_BYTES: Final = 9  # of the client's memory quota
QUOTA_BYTES: Final = 10  # the quota
RUNNING_CALLS: Final = 11  # those of the open calls that a thread handles
MODEL_COUNT: Final = 12  # prepared models
BURST_COUNT: Final = 13  # bursts over queues
THREAD_COUNT: Final = 14  # threads of bursts, and those that hosted runtimes started for open files
CLIENT_PROGRAM: Final = 16  # text
CLIENT_PROGRAM_WORDS: Final = 5
CLIENT_CLASS: Final = 31  # a `ClientClass`; written before the worker has the slot
SLOT_HEADER_WORDS: Final = 32

# Words of a model's row, from its beginning. What identifies the model in totals is from MODEL_VERSION to PROGRAM.
MODEL_ID: Final = 0  # 0: the row is free; it keeps the counts of its last model until another one gets it
EXECUTIONS: Final = 1  # that succeeded
FAILURES: Final = 2
DRIVER_NS: Final = 3  # sum of the times from receiving the request to the result
ENGINE_NS: Final = 4  # sum of the times in the engine
MODEL_VERSION: Final = 5  # of a model of the model repository; 0 for others
MODEL_NAME: Final = 8  # text
MODEL_NAME_WORDS: Final = 8
DEVICE_NAME: Final = 16  # text
DEVICE_NAME_WORDS: Final = 4
PROGRAM: Final = 20  # text: that of the client
PROGRAM_WORDS: Final = CLIENT_PROGRAM_WORDS
IDENTITY_END: Final = PROGRAM + PROGRAM_WORDS
BUCKETS: Final = 224
DRIVER_HISTOGRAM: Final = 32
ENGINE_HISTOGRAM: Final = DRIVER_HISTOGRAM + BUCKETS
MODEL_WORDS: Final = ENGINE_HISTOGRAM + BUCKETS
MODELS_MAX: Final = 16  # rows of a slot; the last one counts all models that have no row of their own
OTHER_MODELS_ID: Final = 2**64 - 1
OTHER_MODELS: Final = "(other models)"

# Words of a row of calls, from its beginning: what the client measured of the executions of the model with this row.
CLIENT_NS: Final = 0  # sum of the times from call to return
QUEUE_NS: Final = 1  # sum of the times between client and driver, both ways
CLIENT_HISTOGRAM: Final = 8
QUEUE_HISTOGRAM: Final = CLIENT_HISTOGRAM + BUCKETS
CALLS_WORDS: Final = QUEUE_HISTOGRAM + BUCKETS
CALLS_BYTES: Final = MODELS_MAX * CALLS_WORDS * WORD_BYTES
PAGE_BYTES: Final = CALLS_BYTES + WORD_BYTES  # after the rows: the `ClientClass` set while it runs, by the supervisor
PAGE: Final = "nnfmq-calls"
CALLS_AHEAD_MAX: Final = 64  # of the driver's counts: executions that it has not counted yet

# A row of the past has the words of a model's row, then those of a row of calls. The last row of a table of them counts
# what found no other.
PAST_CALLS: Final = MODEL_WORDS
PAST_WORDS: Final = MODEL_WORDS + CALLS_WORDS
PAST_MODELS_MAX: Final = 4  # of a slot: released models whose row another model has got
PAST_CLIENTS_MAX: Final = 64  # of a supervisor: models of clients that have left

# Words of the row of a burst over queues, from its beginning: one cache line.
BURST_ID: Final = 0  # 0: the row is free
BURST_MODEL_ID: Final = 1
BURST_EXECUTIONS: Final = 2
BURST_FAILURES: Final = 3
RECEIVED: Final = 4  # request packets; if more than executions and failures, one is executing
POLLED: Final = 5  # waits for a request that ended while the listener polled
SLEPT: Final = 6  # waits for which the listener slept
BURST_WORDS: Final = 8
BURSTS_MAX: Final = 32  # rows of a slot; further bursts are counted in their models only

MODELS_AT: Final = SLOT_HEADER_WORDS
BURSTS_AT: Final = MODELS_AT + MODELS_MAX * MODEL_WORDS
CALLS_AT: Final = BURSTS_AT + BURSTS_MAX * BURST_WORDS  # the copy of the client's page
PAST_AT: Final = CALLS_AT + MODELS_MAX * CALLS_WORDS
SLOT_WORDS: Final = PAST_AT + PAST_MODELS_MAX * PAST_WORDS
SLOT_BYTES: Final = SLOT_WORDS * WORD_BYTES

_UNIT_NS: Final = 125
_SUB_BITS: Final = 3


def area_bytes(slots: int, past: int = 0) -> int:
    """Return the size of an area with so many slots and rows of past clients."""
    return (slot_at(slots) + past * PAST_WORDS) * WORD_BYTES


def slot_at(slot: int) -> int:
    """Return the first word of a slot; slots count from 0."""
    return HEADER_WORDS + slot * SLOT_WORDS


def bucket_of(duration_ns: int) -> int:
    """Return the bucket that counts a duration; a negative one counts as 0."""
    units = max(duration_ns, 0) // _UNIT_NS
    if units < 1 << _SUB_BITS:
        return units
    shift = units.bit_length() - 1 - _SUB_BITS
    return min((shift << _SUB_BITS) + (units >> shift), BUCKETS - 1)


def bucket_start_ns(bucket: int) -> int:
    """Return the shortest duration that a bucket counts; for BUCKETS, the end of the last bucket."""
    octave, part = divmod(bucket, 1 << _SUB_BITS)
    if octave == 0:
        return part * _UNIT_NS
    return (((1 << _SUB_BITS) + part) << (octave - 1)) * _UNIT_NS


def text_to_words(text: str, words: int) -> bytes:
    """Return text as the bytes of a field of so many words, cut at a character."""
    size = words * WORD_BYTES
    data = text.encode("utf-8", "replace")[:size].decode("utf-8", "ignore").encode()
    return data.ljust(size, b"\0")


def text_from_words(data: bytes) -> str:
    """Return the text of a field; what is no UTF-8 is replaced."""
    return data.partition(b"\0")[0].decode("utf-8", "replace")


# ----------------------------------------------------------------------------------------------------------------------
# LatencyHistogram: how long executions took, as counts in the buckets of `statistics_layout`.


_PER_OCTAVE = 8


def supports(count: int, fraction: float) -> bool:
    """Return whether so many values support a quantile: one of them may be above it, or it is the maximum (1.0).

    The 99.9th percentile needs 1,000 of them; the maximum one.
    """
    return fraction == 1 or count * (1 - fraction) >= 1 - 1e-9


class LatencyHistogram(Struct, frozen=True):
    """Counts of durations; `counts` has one for each bucket."""

    counts: tuple[int, ...] = (0,) * BUCKETS

    @property
    def total(self) -> int:
        """The number of durations that were counted."""
        return sum(self.counts)

    def supported_ns(self, fraction: float) -> int | None:
        """Return the quantile, or None if too few durations were counted for it."""
        return self.quantile_ns(fraction) if supports(self.total, fraction) else None

    def quantile_ns(self, fraction: float) -> int | None:
        """Return the nearest-rank quantile, to within 6.25 %; None if nothing was counted.

        That is the middle of the bucket of the duration: below 1 µs it is at most 63 ns away.
        """
        rank = max(1, math.ceil(self.total * fraction))
        seen = 0
        for bucket, count in enumerate(self.counts):
            seen += count
            if seen >= rank:
                return (bucket_start_ns(bucket) + bucket_start_ns(bucket + 1)) // 2
        return None

    def since(self, earlier: LatencyHistogram) -> LatencyHistogram:
        """Return the counts after `earlier`; a count that has gone back was read in another order, and is 0."""
        pairs = zip(self.counts, earlier.counts, strict=True)
        return LatencyHistogram(tuple(max(now - then, 0) for now, then in pairs))

    def __add__(self, other: LatencyHistogram) -> LatencyHistogram:
        pairs = zip(self.counts, other.counts, strict=True)
        return LatencyHistogram(tuple(one + two for one, two in pairs))

    def below_powers_of_two(self) -> list[tuple[float, int]]:
        """Return for 1, 2, 4, ... µs the bound in seconds, and how many durations are shorter than it."""
        bounds, below = [], 0
        for octave in range(BUCKETS // _PER_OCTAVE - 1):
            begin = octave * _PER_OCTAVE
            below += sum(self.counts[begin : begin + _PER_OCTAVE])
            bounds.append((bucket_start_ns(begin + _PER_OCTAVE) / 1e9, below))
        return bounds
