"""FmqRequestDatum and FmqResultDatum: the variants of the 24-byte records of a burst, and the offsets of their fields.

Both are HIDL safe unions: the discriminator is a u8 at offset 0, the payload starts at the alignment of its widest
member, integers are little-endian, and all other bytes are padding, which is written as zero and ignored when read.

    byte   0              4                              8                                              24
    request| d | padding  | payload, 20 bytes                                                            |
    result | d | padding                                 | payload, 16 bytes                             |

The codecs encode and decode by these tables; docs/reference/protocol.md repeats them, which a test compares.

Source: HAL 1.2 types.hal, and the layout that hidl-gen gives to safe unions.
"""

from __future__ import annotations

import struct

from msgspec import Struct

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
