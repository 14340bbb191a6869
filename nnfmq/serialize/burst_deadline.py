"""The deadline of a burst's execution, which a request packet has no field for (BUR-18).

The client stores it in a word beside the ring of the request queue, in the area that the result queue uses for the
execution statistics, and marks the packet: a byte of padding of the first record, which readers of HIDL 1.2 ignore,
is 1. It stores the word before it sends the packet, whose release store publishes both; the driver reads the word once,
after it has received the packet. So a packet without the mark costs neither side anything.
"""

from __future__ import annotations

from typing import Final

from nnfmq.serialize.execution_stats import STATS_BYTES

MARK_OFFSET: Final = 20  # of the packet: the first byte of padding after packetInformation's four fields
MARK: Final = 1
_CLOCK_MAX_NS: Final = 2**63 - 1  # the last point of CLOCK_MONOTONIC


def marked(packet: bytes) -> bytes:
    """Return a request packet that says that its execution has a deadline."""
    return packet[:MARK_OFFSET] + bytes([MARK]) + packet[MARK_OFFSET + 1 :]


def is_marked(packet: bytes) -> bool:
    """Return whether the execution of a valid request packet has a deadline."""
    return packet[MARK_OFFSET] == MARK


class DeadlineWord:
    """The word: a u64 of CLOCK_MONOTONIC nanoseconds, 0 = none. Borrows the queue's memory, which must outlive it."""

    __slots__ = ("_words",)

    def __init__(self, area: memoryview | None) -> None:
        """Use the area beside the ring of a request queue; a private word if None, because the memory has no area."""
        area = memoryview(bytearray(STATS_BYTES)) if area is None else area
        self._words = area.cast("B").cast("Q")

    def store(self, deadline_ns: int) -> None:
        """Store the deadline of the next marked packet; call it before sending that."""
        self._words[0] = deadline_ns

    def load(self) -> int | None:
        """Return the deadline of the marked packet that was received; None if it has none, or one beyond the clock."""
        deadline_ns = self._words[0]
        return deadline_ns if 0 < deadline_ns <= _CLOCK_MAX_NS else None

    def close(self) -> None:
        """Release the memoryview; the object must not be used afterwards. Idempotent."""
        self._words.release()
