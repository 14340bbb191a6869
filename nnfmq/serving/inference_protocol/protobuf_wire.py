"""The outermost fields of a protobuf message, without copying large ones.

A message with tensors is nearly all raw bytes. Taken out first, they stay views of the request, and what protobuf
parses is small: parsing may take a hundred times as much memory as the bytes parsed.

Source: the encoding is that of https://protobuf.dev/programming-guides/encoding/.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from nnfmq.hal.errors import InvalidArgument

__all__ = ["Separated", "SerializedMessage", "bytes_field", "separate_bytes_field"]

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10


class Separated(NamedTuple):
    """The occurrences of one field as views, and the rest of the message."""

    values: list[memoryview]
    other_fields: bytes


class _Field(NamedTuple):
    tag: int
    start: int
    value_start: int
    end: int


class SerializedMessage(NamedTuple):
    """A message whose bytes are known already; with the method by which gRPC and Ray serialize messages."""

    data: bytes

    def SerializeToString(self) -> bytes:
        """Return the message's bytes."""
        return self.data


def separate_bytes_field(data: bytes, number: int, max_fields: int) -> Separated:
    """Return the values of a repeated field of bytes, and the message without it.

    Raises:
        InvalidArgument: If `data` is no message, or has more than `max_fields` outermost fields.
    """
    view, wanted = memoryview(data), number << 3 | _LENGTH
    values, others = list[memoryview](), list[memoryview]()
    for count, field in enumerate(_fields(view)):
        if count == max_fields:
            raise InvalidArgument(f"the message has more than {max_fields} fields")
        if field.tag == wanted:
            values.append(view[field.value_start : field.end])
        else:
            others.append(view[field.start : field.end])
    return Separated(values, b"".join(others))


def _fields(data: memoryview) -> Iterator[_Field]:
    start = 0
    while start < len(data):
        tag, value_start = _varint(data, start)
        kind = tag & 7
        if kind == _VARINT:
            _, end = _varint(data, value_start)
        elif kind == _LENGTH:
            length, value_start = _varint(data, value_start)
            end = value_start + length
        elif kind in (_FIXED64, _FIXED32):
            end = value_start + (8 if kind == _FIXED64 else 4)
        else:
            raise InvalidArgument(f"the message has a field of wire type {kind} at byte {start}")
        if end > len(data):
            raise InvalidArgument(f"the message ends within the field at byte {start}")
        yield _Field(tag, start, value_start, end)
        start = end


def _varint(data: memoryview, start: int) -> tuple[int, int]:
    """Return a number, and the offset behind it."""
    value = 0
    for index, byte in enumerate(data[start : start + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, start + index + 1
    raise InvalidArgument(f"the message has no complete number at byte {start}")


def bytes_field(number: int, value: memoryview) -> Sequence[bytes | memoryview]:
    """Return the pieces of a field of bytes, to be joined."""
    length, prefix = len(value), bytearray([number << 3 | _LENGTH])
    while length >= 0x80:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    prefix.append(length)
    return bytes(prefix), value
