"""Malformed packets: each is rejected as a whole, and the error names the byte."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from nnfmq.hal.errors import ProtocolError

HUGE = 0xFFFFFFFF

# One bad record of each kind, as the HAL's own tests make them.
BAD_REQUEST_RECORDS = [
    struct.pack("<B3xIIII4x", 0, 10, 10, 10, 10),
    struct.pack("<B3xB3xIIII", 1, 0, 0, 0, 0, 10),
    struct.pack("<B3xI16x", 2, 0),
    struct.pack("<B3xB3xIIII", 3, 0, 0, 0, 0, 10),
    struct.pack("<B3xI16x", 4, 0),
    struct.pack("<B3xi16x", 5, 2**31 - 1),
    struct.pack("<B3xi16x", 6, 1),
]
BAD_RESULT_RECORDS = [
    struct.pack("<B7xIiI4x", 0, 10, 0, 10),
    struct.pack("<B7xB3xI8x", 1, 1, 10),
    struct.pack("<B7xI12x", 2, 0),
    struct.pack("<B7xQQ", 3, 0, 0),
]
KINDS_ALLOWED_TO_REPLACE_THEIR_OWN = {2, 4, 5}  # another dimension or slot is another packet, and not an malformed one


def resized(sample: Any, records: list[bytes]) -> bytes:
    """Return the records with a correct packetSize."""
    at = 4 if len(sample.records) == 11 else 8
    first = bytearray(records[0])
    struct.pack_into("<I", first, at, len(records))
    return bytes(first) + b"".join(records[1:])


def poked(data: bytes, offset: int, code: str, value: int) -> bytes:
    changed = bytearray(data)
    struct.pack_into(code, changed, offset, value)
    return bytes(changed)


# ------------------------------------------------------------------------------------------------ cut, and too long


def test_BUR_9_a_packet_truncated_at_any_byte_is_rejected(sample: Any) -> None:
    assert sample.accepted([sample.data[:end] for end in range(len(sample.data))]) == []


def test_BUR_9_a_golden_request_truncated_at_any_byte_is_rejected(golden_request: Any) -> None:
    assert golden_request.accepted([golden_request.data[:end] for end in range(len(golden_request.data))]) == []


def test_BUR_9_a_golden_result_truncated_at_any_byte_is_rejected(golden_result: Any) -> None:
    assert golden_result.accepted([golden_result.data[:end] for end in range(len(golden_result.data))]) == []


def test_BUR_9_a_packet_truncated_at_a_record_is_rejected_even_with_a_matching_packet_size(sample: Any) -> None:
    cuts = [resized(sample, list(sample.records[:count])) for count in range(1, len(sample.records))]
    assert sample.accepted(cuts) == []


@pytest.mark.parametrize("extra", [1, 12, 23])
def test_a_partial_record_is_rejected_at_its_offset(sample: Any, extra: int) -> None:
    assert sample.rejection_offset(sample.data + bytes(extra)) == len(sample.data)


def test_BUR_9_a_trailing_record_of_any_kind_is_rejected(sample: Any) -> None:
    longer = [sample.data + record for record in sample.records]
    assert sample.accepted(longer) == []


def test_BUR_9_a_trailing_record_is_rejected_at_its_offset_if_the_size_includes_it(sample: Any) -> None:
    longer = resized(sample, [*sample.records, sample.records[-1]])
    assert sample.rejection_offset(longer) == len(sample.data)


def test_an_empty_packet_is_rejected_at_byte_0(sample: Any) -> None:
    assert sample.rejection_offset(b"") == 0


def test_two_packets_in_the_ring_together_are_one_malformed_packet(sample: Any) -> None:
    assert sample.accepted([sample.data * 2]) == []


# ------------------------------------------------------------------------------------------------ dropped, inserted


@pytest.mark.parametrize("index", range(11))
def test_N_BUR_1_a_request_without_one_of_its_records_is_rejected(request_sample: Any, index: int) -> None:
    left = [*request_sample.records[:index], *request_sample.records[index + 1 :]]
    assert request_sample.accepted([b"".join(left), resized(request_sample, left)]) == []


@pytest.mark.parametrize("kind", range(7))
@pytest.mark.parametrize("index", range(12))
def test_N_BUR_2_a_request_with_one_more_record_is_rejected(request_sample: Any, index: int, kind: int) -> None:
    more = [*request_sample.records[:index], BAD_REQUEST_RECORDS[kind], *request_sample.records[index:]]
    assert request_sample.accepted([b"".join(more), resized(request_sample, more)]) == []


@pytest.mark.parametrize("kind", range(7))
@pytest.mark.parametrize("index", range(10))
def test_N_BUR_3_a_request_with_another_record_in_its_place_is_rejected(
    request_sample: Any, index: int, kind: int
) -> None:
    records = list(request_sample.records)
    same_kind = records[index][0] == kind and kind in KINDS_ALLOWED_TO_REPLACE_THEIR_OWN
    records[index] = BAD_REQUEST_RECORDS[kind]
    assert (request_sample.rejection_offset(b"".join(records)) is None) == same_kind


@pytest.mark.parametrize("kind", range(6))
def test_N_BUR_3_a_request_without_measure_timing_at_its_end_is_rejected(request_sample: Any, kind: int) -> None:
    replaced = b"".join(request_sample.records[:-1]) + BAD_REQUEST_RECORDS[kind]
    assert request_sample.rejection_offset(replaced) == 240


@pytest.mark.parametrize("index", range(6))
def test_a_result_without_one_of_its_records_is_rejected(result_sample: Any, index: int) -> None:
    left = [*result_sample.records[:index], *result_sample.records[index + 1 :]]
    assert result_sample.accepted([b"".join(left), resized(result_sample, left)]) == []


@pytest.mark.parametrize("kind", range(4))
@pytest.mark.parametrize("index", range(7))
def test_a_result_with_one_more_record_is_rejected(result_sample: Any, index: int, kind: int) -> None:
    more = [*result_sample.records[:index], BAD_RESULT_RECORDS[kind], *result_sample.records[index:]]
    assert result_sample.accepted([b"".join(more), resized(result_sample, more)]) == []


# ------------------------------------------------------------------------------------------------ fields


@pytest.mark.parametrize("size", [0, 1, 10, 12, 1025, HUGE])
def test_N_BUX_1_a_request_with_a_wrong_packet_size_is_rejected(request_sample: Any, size: int) -> None:
    assert request_sample.rejection_offset(poked(request_sample.data, 4, "<I", size)) == 4


@pytest.mark.parametrize("size", [0, 1, 5, 7, 1025, HUGE])
def test_N_BUX_1_a_result_with_a_wrong_packet_size_is_rejected(result_sample: Any, size: int) -> None:
    assert result_sample.rejection_offset(poked(result_sample.data, 8, "<I", size)) == 8


@pytest.mark.parametrize("offset", [8, 12, 16])
@pytest.mark.parametrize("count", [10, 2**31, HUGE])
def test_N_BUX_2_a_request_count_beyond_the_records_is_rejected(request_sample: Any, offset: int, count: int) -> None:
    rejected_at = request_sample.rejection_offset(poked(request_sample.data, offset, "<I", count))
    assert rejected_at in range(offset, 20, 4)


def test_N_BUX_2_counts_whose_32_bit_sum_would_fit_are_rejected(request_sample: Any) -> None:
    counts = struct.pack("<III", HUGE, 1, 5)
    assert request_sample.rejection_offset(request_sample.data[:8] + counts + request_sample.data[20:]) == 8


@pytest.mark.parametrize("count", [5, HUGE])
def test_N_BUX_2_a_result_count_beyond_the_records_is_rejected(result_sample: Any, count: int) -> None:
    assert result_sample.rejection_offset(poked(result_sample.data, 16, "<I", count)) == 16


@pytest.mark.parametrize("operand", [1, 4, 5])
@pytest.mark.parametrize("rank", [11, HUGE])
def test_N_BUX_2_more_dimensions_than_records_are_rejected_in_a_request(
    request_sample: Any, operand: int, rank: int
) -> None:
    field = 24 * operand + 20
    assert request_sample.rejection_offset(poked(request_sample.data, field, "<I", rank)) == field


@pytest.mark.parametrize("operand", [1, 4])
@pytest.mark.parametrize("rank", [6, HUGE])
def test_N_BUX_2_more_dimensions_than_records_are_rejected_in_a_result(
    result_sample: Any, operand: int, rank: int
) -> None:
    field = 24 * operand + 12
    assert result_sample.rejection_offset(poked(result_sample.data, field, "<I", rank)) == field


@pytest.mark.parametrize("index", range(11))
@pytest.mark.parametrize("kind", [7, 255])
def test_an_unknown_kind_of_request_record_is_rejected_at_its_offset(
    request_sample: Any, index: int, kind: int
) -> None:
    assert request_sample.rejection_offset(poked(request_sample.data, 24 * index, "B", kind)) == 24 * index


@pytest.mark.parametrize("index", range(6))
@pytest.mark.parametrize("kind", [4, 255])
def test_an_unknown_kind_of_result_record_is_rejected_at_its_offset(result_sample: Any, index: int, kind: int) -> None:
    assert result_sample.rejection_offset(poked(result_sample.data, 24 * index, "B", kind)) == 24 * index


@pytest.mark.parametrize("operand", [1, 4, 5])
@pytest.mark.parametrize("value", [2, 255])
def test_has_no_value_is_0_or_1(request_sample: Any, operand: int, value: int) -> None:
    field = 24 * operand + 4
    assert request_sample.rejection_offset(poked(request_sample.data, field, "B", value)) == field


@pytest.mark.parametrize("operand", [1, 4])
@pytest.mark.parametrize("value", [2, 255])
def test_is_sufficient_is_0_or_1(result_sample: Any, operand: int, value: int) -> None:
    field = 24 * operand + 8
    assert result_sample.rejection_offset(poked(result_sample.data, field, "B", value)) == field


@pytest.mark.parametrize("value", [-1, 2, 256, 2**31 - 1])
def test_measure_timing_is_0_or_1(request_sample: Any, value: int) -> None:
    assert request_sample.rejection_offset(poked(request_sample.data, 244, "<i", value)) == 244


@pytest.mark.parametrize("status", [-1, 5, 8, 10000])
def test_an_error_status_that_hal_1_0_does_not_have_is_rejected(result_sample: Any, status: int) -> None:
    assert result_sample.rejection_offset(poked(result_sample.data, 12, "<i", status)) == 12


def test_a_request_is_no_result_and_a_result_no_request(codec: Any, request_sample: Any, result_sample: Any) -> None:
    with pytest.raises(ProtocolError):
        codec.decode_result(request_sample.data)
    with pytest.raises(ProtocolError):
        codec.decode_request(result_sample.data)


def test_the_message_has_the_field_its_value_and_the_allowed_values(codec: Any, request_sample: Any) -> None:
    with pytest.raises(ProtocolError, match=r"packetInformation.packetSize is 3, allowed is the 11 records .*byte 4"):
        codec.decode_request(poked(request_sample.data, 4, "<I", 3))
