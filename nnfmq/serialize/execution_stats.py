"""Execution statistics: 32 u64 words beside the rings of a burst, in which the driver describes its last execution.

The words are in the result queue's memory, after the parts that libfmq defines (`queue.layout` has their offset). Only
the driver writes them. It writes them before it sends the result: the release store that publishes the packet publishes
them too, so the client may read them from the time it receives the result until it sends its next request. SEQUENCE
counts the packets that the driver received on this burst; if it is not the number that the reader expects, the words
describe another execution. Times are CLOCK_MONOTONIC nanoseconds, except durations. The peer writes the words, so they
may be displayed and summed, but nothing may depend on them.
"""

from __future__ import annotations

from contextlib import suppress
from time import monotonic_ns
from typing import Final

from msgspec import Struct

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.timing import NO_TIMING, Timing, from_unsigned, to_unsigned

STATS_WORDS: Final = 32
STATS_BYTES: Final = 8 * STATS_WORDS

SEQUENCE: Final = 0  # packets received on this burst, this one included
REQUEST_RECEIVED: Final = 1  # the request was read from the ring
MEMORY_READY: Final = 2  # every slot is mapped; equals REQUEST_RECEIVED if the request was cached
ENGINE_BEGIN: Final = 3
ENGINE_END: Final = 4
RESULT_SENT: Final = 5  # just before the packet is published, since no word may change after that
TIME_ON_DEVICE_NS: Final = 6  # durations in ns (the packet has µs), 2^64-1 = not measured
TIME_IN_DRIVER_NS: Final = 7
FAILURES: Final = 8  # results sent on this burst whose status is not NONE
RESERVED: Final = 9  # this word and all later ones are zero


class ExecutionStats(Struct, frozen=True):
    """The statistics as read once; the fields are named after the words."""

    sequence: int
    request_received_ns: int
    memory_ready_ns: int
    engine_begin_ns: int
    engine_end_ns: int
    result_sent_ns: int
    timing: Timing
    failures: int

    @property
    def executions(self) -> int:
        """Results sent with status NONE on this burst."""
        return self.sequence - self.failures

    @property
    def driver_ns(self) -> int:
        """Nanoseconds from receiving the request to sending the result."""
        return self.result_sent_ns - self.request_received_ns

    @property
    def engine_ns(self) -> int:
        """Nanoseconds in the engine."""
        return self.engine_end_ns - self.engine_begin_ns


class StatsArea:
    """Writer and reader of the words of one burst. It borrows the queue's memory, which must outlive it.

    `words` is the area as a memoryview of u64, for writers that stamp single words.
    """

    __slots__ = ("_failures", "_timing", "words")

    def __init__(self, words: memoryview) -> None:
        self.words = words
        self._failures = 0
        self._timing: Timing | None = None  # the one that the words contain

    @classmethod
    def over(cls, area: memoryview | None) -> StatsArea:
        """Return a StatsArea over `area`: at least 256 bytes, aligned to 8, and writable if `record` is used.

        If `area` is None, because the queue has none, the words are private to this object.

        Raises:
            InvalidArgument: If the area is too short.
        """
        if area is None:
            area = memoryview(bytearray(STATS_BYTES))
        if area.nbytes < STATS_BYTES:
            raise InvalidArgument(f"execution statistics have {STATS_BYTES} bytes, this area {area.nbytes}")
        return cls(area.cast("B").cast("Q"))

    def record(
        self, sequence: int, request_received_ns: int, memory_ready_ns: int, engine_begin_ns: int, engine_end_ns: int,
        timing: Timing = NO_TIMING,
    ) -> int:  # fmt: skip
        """Write the statistics of packet `sequence`; call it just before sending. Return what it writes as RESULT_SENT.

        That is the current time. A stage that the execution did not reach is 0.
        """
        words = self.words
        words[SEQUENCE] = sequence
        words[REQUEST_RECEIVED] = request_received_ns
        words[MEMORY_READY] = memory_ready_ns
        words[ENGINE_BEGIN] = engine_begin_ns
        words[ENGINE_END] = engine_end_ns
        self.set_timing(timing)
        words[RESULT_SENT] = now = monotonic_ns()
        return now

    def set_timing(self, timing: Timing) -> None:
        """Write the durations of the next result; a `Responder` of the burst's queues writes the other words."""
        if timing is not self._timing:
            self.words[TIME_ON_DEVICE_NS] = to_unsigned(timing.time_on_device_ns)
            self.words[TIME_IN_DRIVER_NS] = to_unsigned(timing.time_in_driver_ns)
            self._timing = timing

    def count_failure(self) -> None:
        """Count one more result whose status is not NONE."""
        self._failures += 1
        self.words[FAILURES] = self._failures

    def read(self) -> ExecutionStats:
        """Return the current statistics; call it between receiving a result and sending the next request."""
        words = self.words.tolist()
        return ExecutionStats(
            sequence=words[SEQUENCE],
            request_received_ns=words[REQUEST_RECEIVED],
            memory_ready_ns=words[MEMORY_READY],
            engine_begin_ns=words[ENGINE_BEGIN],
            engine_end_ns=words[ENGINE_END],
            result_sent_ns=words[RESULT_SENT],
            timing=Timing(from_unsigned(words[TIME_ON_DEVICE_NS]), from_unsigned(words[TIME_IN_DRIVER_NS])),
            failures=words[FAILURES],
        )

    def close(self) -> None:
        """Release the memoryview; the object must not be used afterwards. Idempotent."""
        # An exception of a signal handler can hold what uses the words: then they are released with that.
        with suppress(BufferError):
            self.words.release()
