"""The outermost fields of protobuf messages. Expected bytes are from the encoding's description."""

from __future__ import annotations

import pytest

from nnfmq.hal.errors import InvalidArgument
from nnfmq.serving.inference_protocol.grpc import bytes_field, separate_bytes_field

NUMBER = b"\x08\x96\x01"  # field 1 = 150
TEXT = b"\x12\x07testing"  # field 2
FIXED64, FIXED32 = b"\x19" + bytes(8), b"\x25" + bytes(4)  # fields 3 and 4
FIRST, SECOND = b"\x3a\x03abc", b"\x3a\x00"  # field 7, twice


def test_a_field_is_separated_wherever_it_is() -> None:
    values, others = separate_bytes_field(FIRST + NUMBER + TEXT + SECOND + FIXED64 + FIXED32, 7, 10)
    assert [bytes(value) for value in values] == [b"abc", b""]
    assert others == NUMBER + TEXT + FIXED64 + FIXED32


def test_a_field_of_that_number_and_another_type_is_left_to_protobuf() -> None:
    assert separate_bytes_field(b"\x38\x05", 7, 10) == ([], b"\x38\x05")


def test_an_empty_message_has_no_fields() -> None:
    assert separate_bytes_field(b"", 7, 0) == ([], b"")


@pytest.mark.parametrize("whole", [NUMBER, TEXT, FIXED64, FIXED32, FIRST])
def test_a_message_that_ends_within_a_field_is_rejected(whole: bytes) -> None:
    for end in range(1, len(whole)):
        with pytest.raises(InvalidArgument, match=r"ends within the field at byte 0|no complete number at byte"):
            separate_bytes_field(whole[:end], 7, 10)


@pytest.mark.parametrize("kind", [3, 4, 6, 7])
def test_other_wire_types_are_rejected(kind: int) -> None:
    with pytest.raises(InvalidArgument, match=f"wire type {kind} at byte 3"):
        separate_bytes_field(NUMBER + bytes([1 << 3 | kind]) + bytes(20), 7, 10)


def test_a_number_of_more_than_ten_bytes_is_rejected() -> None:
    assert separate_bytes_field(b"\x08" + b"\x80" * 9 + b"\x01", 7, 10).other_fields
    with pytest.raises(InvalidArgument, match="no complete number at byte 1"):
        separate_bytes_field(b"\x08" + b"\x80" * 10 + b"\x01", 7, 10)


def test_a_length_beyond_the_message_is_rejected() -> None:
    with pytest.raises(InvalidArgument, match="ends within the field at byte 0"):
        separate_bytes_field(b"\x3a" + b"\xff" * 9 + b"\x01" + bytes(100), 7, 10)


def test_the_number_of_fields_is_limited() -> None:
    assert separate_bytes_field(NUMBER * 10, 7, 10).other_fields == NUMBER * 10
    with pytest.raises(InvalidArgument, match="more than 9 fields"):
        separate_bytes_field(NUMBER * 10, 7, 9)


@pytest.mark.parametrize(
    ("length", "prefix"),
    [
        (0, b"\x32\x00"),
        (127, b"\x32\x7f"),
        (128, b"\x32\x80\x01"),
        (300, b"\x32\xac\x02"),
        (16384, b"\x32\x80\x80\x01"),
    ],
)
def test_a_field_of_bytes_has_its_length_before_it(length: int, prefix: bytes) -> None:
    assert b"".join(bytes_field(6, memoryview(bytes(length)))) == prefix + bytes(length)
