"""Burst packets: a decoded request and a decoded result, the records that carry them, and their deadline.

    request: packetInformation, (input, its dimensions)*, (output, its dimensions)*, poolIdentifier*, measureTiming
    result:  packetInformation, (operand, its dimensions)*, executionTiming

Source: HAL 1.2 types.hal (`FmqRequestDatum`, `FmqResultDatum`) and NNAPI's burst utilities.
"""

from __future__ import annotations

import struct
from typing import Final, TypeAlias

from msgspec import Struct

from nnfmq.hal.errors import ErrorStatus
from nnfmq.hal.timing import Timing
from nnfmq.hal.types import MeasureTiming, OutputShape, RequestArgument
from nnfmq.serialize.execution_stats import STATS_BYTES

__all__ = [
    "BytesLike",
    "DatumField",
    "DatumVariant",
    "DeadlineWord",
    "RequestPacket",
    "ResultPacket",
    "is_marked",
    "marked",
]

BytesLike: TypeAlias = bytes | bytearray | memoryview


class RequestPacket(Struct, frozen=True):
    """A decoded request; `slots[i]` names the memory of pool i, and `location.pool_index` is an index of `slots`."""

    inputs: tuple[RequestArgument, ...]
    outputs: tuple[RequestArgument, ...]
    slots: tuple[int, ...]
    measure: MeasureTiming


class ResultPacket(Struct, frozen=True):
    """A decoded result, exactly as sent: an error status may come with shapes or timing, which the reader ignores."""

    status: ErrorStatus
    output_shapes: tuple[OutputShape, ...]
    timing: Timing


# ----------------------------------------------------------------------------------------------------------------------
# FmqRequestDatum and FmqResultDatum: the variants of the 24-byte records of a burst, and the offsets of their fields.
#
# Both are HIDL safe unions: the discriminator is a u8 at offset 0, the payload starts at the alignment of its widest
# member, integers are little-endian, and all other bytes are padding, which is written as zero and ignored when read.
#
#     byte   0              4                              8                                              24
#     request| d | padding  | payload, 20 bytes                                                            |
#     result | d | padding                                 | payload, 16 bytes                             |
#
# The codecs encode and decode by these tables; docs/reference/protocol.md repeats them, which a test compares.
#
# Source: HAL 1.2 types.hal, and the layout that hidl-gen gives to safe unions.


DATUM_BYTES = 24  # of a request and of a result record


class DatumField(Struct, frozen=True):
    """A field of a record: its byte offset, and its format character of `struct` (B u8, I u32, i i32, Q u64)."""

    name: str
    offset: int
    code: str


class DatumVariant(Struct, frozen=True):
    """A variant of the union. `codes` is its `struct` format, discriminator first, without a byte order."""

    name: str
    discriminator: int
    fields: tuple[DatumField, ...]
    codes: str
    layout: struct.Struct

    def offset_of(self, field: str) -> int:
        """Return the byte offset of `field` in the record.

        Raises:
            KeyError: If the variant has no such field.
        """
        return {f.name: f.offset for f in self.fields}[field]


def _variant(discriminator: int, name: str, *fields: tuple[str, int, str]) -> DatumVariant:
    """Return a variant whose format covers the whole record, with pad bytes between the fields."""
    table = tuple(DatumField(*field) for field in fields)
    codes, end = "B", 1
    for field in table:
        codes += f"{field.offset - end}x{field.code}"
        end = field.offset + struct.calcsize(f"<{field.code}")
    codes += f"{DATUM_BYTES - end}x"
    layout = struct.Struct(f"<{codes}")
    assert layout.size == DATUM_BYTES, name
    return DatumVariant(name, discriminator, table, codes, layout)


_REQUEST_OPERAND = (
    ("hasNoValue", 4, "B"), ("poolIndex", 8, "I"), ("offset", 12, "I"), ("length", 16, "I"),
    ("numberOfDimensions", 20, "I"),
)  # fmt: skip

REQUEST_PACKET = _variant(
    0, "packetInformation",
    ("packetSize", 4, "I"), ("numberOfInputOperands", 8, "I"), ("numberOfOutputOperands", 12, "I"),
    ("numberOfPools", 16, "I"),
)  # fmt: skip
INPUT_OPERAND = _variant(1, "inputOperandInformation", *_REQUEST_OPERAND)
INPUT_DIMENSION = _variant(2, "inputOperandDimensionValue", ("value", 4, "I"))
OUTPUT_OPERAND = _variant(3, "outputOperandInformation", *_REQUEST_OPERAND)
OUTPUT_DIMENSION = _variant(4, "outputOperandDimensionValue", ("value", 4, "I"))
POOL_IDENTIFIER = _variant(5, "poolIdentifier", ("slot", 4, "i"))
MEASURE_TIMING = _variant(6, "measureTiming", ("measure", 4, "i"))

RESULT_PACKET = _variant(
    0, "packetInformation", ("packetSize", 8, "I"), ("errorStatus", 12, "i"), ("numberOfOperands", 16, "I")
)
RESULT_OPERAND = _variant(1, "operandInformation", ("isSufficient", 8, "B"), ("numberOfDimensions", 12, "I"))
RESULT_DIMENSION = _variant(2, "operandDimensionValue", ("value", 8, "I"))
EXECUTION_TIMING = _variant(3, "executionTiming", ("timeOnDevice", 8, "Q"), ("timeInDriver", 16, "Q"))

REQUEST_VARIANTS = (
    REQUEST_PACKET, INPUT_OPERAND, INPUT_DIMENSION, OUTPUT_OPERAND, OUTPUT_DIMENSION, POOL_IDENTIFIER, MEASURE_TIMING,
)  # fmt: skip
RESULT_VARIANTS = (RESULT_PACKET, RESULT_OPERAND, RESULT_DIMENSION, EXECUTION_TIMING)


# ----------------------------------------------------------------------------------------------------------------------
# The deadline of a burst's execution, which a request packet has no field for (BUR-18).
#
# The client stores it in a word beside the ring of the request queue, in the area that the result queue uses for the
# execution statistics, and marks the packet: a byte of padding of the first record, which readers of HIDL 1.2 ignore,
# is 1. It stores the word before it sends the packet, whose release store publishes both; the driver reads the word
# once, after it has received the packet. So a packet without the mark costs neither side anything.


MARK_OFFSET: Final = 20  # of the packet: the first byte of padding after packetInformation's four fields
MARK: Final = 1
_CLOCK_MAX_NS: Final = 2**63 - 1  # the last point of CLOCK_MONOTONIC


def marked(packet: bytes) -> bytes:
    """Return a request packet that says that its execution has a deadline."""
    return packet[:MARK_OFFSET] + bytes([MARK]) + packet[MARK_OFFSET + 1 :]


def is_marked(packet: bytes) -> bool:
    """Return whether the execution of a valid request packet has a deadline."""
    return packet[MARK_OFFSET] == MARK


SENT_WORD: Final = 1
"""The word beside the ring of a request queue in which the client says when it sent the last packet, for traces."""


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
