"""Stage slots: what the driver tells about its last execution beside the rings, in 32 u64 words per queue.

The words lie in the result queue's memory, behind what libfmq knows of (their place: `queue.layout`). The driver is
their only writer. It fills them before it sends the result, so the release store that publishes the packet publishes
them too, and the client may read them from then until it sends its next request. SEQUENCE counts the packets that the
driver has taken on this burst; a reader that finds another number than it expects has another execution's times.
Times are CLOCK_MONOTONIC nanoseconds unless the name says otherwise. The words come from the peer: they are to be
shown and summed, never to be believed. Left out: aggregation, names of metrics (`observe`).
"""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic_ns
from typing import Final

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.timing import NO_TIMING, Timing, from_unsigned, to_unsigned

STATS_WORDS: Final = 32
STATS_BYTES: Final = 8 * STATS_WORDS

SEQUENCE: Final = 0  # packets taken on this burst, this one included
REQUEST_RECEIVED: Final = 1  # the request had been read from the ring
MEMORY_READY: Final = 2  # every slot mapped; REQUEST_RECEIVED again where the request was the one before
ENGINE_BEGIN: Final = 3
ENGINE_END: Final = 4
RESULT_SENT: Final = 5  # just before the packet is published: nothing can be stamped after
TIME_ON_DEVICE_NS: Final = 6  # durations, to the nanosecond; the packet has microseconds
TIME_IN_DRIVER_NS: Final = 7
FAILURES: Final = 8  # how many of the results sent on this burst had another status than NONE
RESERVED: Final = 9  # this and all later slots: zero


@dataclass(frozen=True, slots=True)
class ExecutionStats:
    """One reading of the slots; fields as the constants, timing in nanoseconds."""

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
        """Nanoseconds from taking the request to sending the result."""
        return self.result_sent_ns - self.request_received_ns

    @property
    def engine_ns(self) -> int:
        """Nanoseconds in the engine."""
        return self.engine_end_ns - self.engine_begin_ns


class StatsArea:
    """Writer and reader over the stage area of a queue. `words` is its memoryview of 32 u64, for other stamps.

    The queue stays the owner of the memory and must outlive this.
    """

    __slots__ = ("_failures", "_timing", "words")

    def __init__(self, words: memoryview) -> None:
        self.words = words
        self._failures = 0
        self._timing: Timing | None = None  # what the words say now

    @classmethod
    def over(cls, area: memoryview | None) -> StatsArea:
        """Return the slots in `area`: 256 bytes, aligned to 8, writable for `record`.

        None stands for a queue without such an area: then the slots are private and only this object sees them.
        Raises InvalidArgument for an area that is too short.
        """
        if area is None:
            area = memoryview(bytearray(STATS_BYTES))
        if area.nbytes < STATS_BYTES:
            raise InvalidArgument(f"a stage area has {STATS_BYTES} bytes, this one {area.nbytes}")
        return cls(area.cast("B").cast("Q"))

    def record(
        self, sequence: int, request_received_ns: int, memory_ready_ns: int, engine_begin_ns: int, engine_end_ns: int,
        timing: Timing = NO_TIMING,
    ) -> None:  # fmt: skip
        """Write what happened to packet `sequence`, and the present as RESULT_SENT: the last thing before the send.

        A stage that was not reached is 0.
        """
        words = self.words
        words[0] = sequence  # the numbers of the slots, spelt out: this is done for every execution
        words[1] = request_received_ns
        words[2] = memory_ready_ns
        words[3] = engine_begin_ns
        words[4] = engine_end_ns
        if timing is not self._timing:
            self._record_timing(timing)
        words[5] = monotonic_ns()

    def _record_timing(self, timing: Timing) -> None:
        self.words[TIME_ON_DEVICE_NS] = to_unsigned(timing.time_on_device_ns)
        self.words[TIME_IN_DRIVER_NS] = to_unsigned(timing.time_in_driver_ns)
        self._timing = timing

    def count_failure(self) -> None:
        """Count one more result with another status than NONE."""
        self._failures += 1
        self.words[FAILURES] = self._failures

    def read(self) -> ExecutionStats:
        """Return what the slots hold; call it after the result was received and before the next request."""
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
        """Give the view back; the slots must not be used again. Closing twice does no harm."""
        self.words.release()
