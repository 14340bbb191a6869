"""Packets of a burst: values in, exactly Android's bytes out, and back."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.packets import requests, results

from nnfmq.hal.errors import ErrorStatus, InvalidArgument, ProtocolError
from nnfmq.hal.timing import Timing
from nnfmq.hal.types import DataLocation, OutputShape, RequestArgument
from nnfmq.serialize.codec import encode_result
from nnfmq.serialize.packets import RequestPacket, ResultPacket


def encoded_request(codec: Any, packet: RequestPacket) -> bytes:
    return codec.encode_request(packet.inputs, packet.outputs, packet.slots, packet.measure)


def encoded_result(codec: Any, packet: ResultPacket) -> bytes:
    return codec.encode_result(packet.status, packet.output_shapes, packet.timing)


def test_BUR_7_a_golden_request_encodes_to_exactly_those_bytes(codec: Any, golden_request: Any) -> None:
    assert encoded_request(codec, golden_request.value) == golden_request.data


def test_BUR_7_a_golden_request_decodes_to_its_values(codec: Any, golden_request: Any) -> None:
    assert codec.decode_request(golden_request.data) == golden_request.value


def test_BUR_8_a_golden_result_encodes_to_exactly_those_bytes(codec: Any, golden_result: Any) -> None:
    assert encoded_result(codec, golden_result.value) == golden_result.data


def test_BUR_8_a_golden_result_decodes_to_its_values(codec: Any, golden_result: Any) -> None:
    assert codec.decode_result(golden_result.data) == golden_result.value


def test_these_tests_use_every_packet_of_the_golden_file(golden: dict[str, list[Any]]) -> None:
    assert (len(golden["requests"]), len(golden["results"])) == (17, 15)


def test_BUR_7_a_request_written_by_hand_is_what_the_encoder_writes(codec: Any, request_sample: Any) -> None:
    assert encoded_request(codec, request_sample.value) == request_sample.data


def test_BUR_8_a_result_written_by_hand_is_what_the_encoder_writes(codec: Any, result_sample: Any) -> None:
    assert encoded_result(codec, result_sample.value) == result_sample.data


def test_a_packet_written_by_hand_is_decoded(sample: Any) -> None:
    assert sample.decode(sample.data) == sample.value


@given(requests)
def test_any_request_decodes_to_what_was_encoded(codec: Any, packet: RequestPacket) -> None:
    assert codec.decode_request(encoded_request(codec, packet)) == packet


@given(results)
def test_any_result_decodes_to_what_was_encoded(codec: Any, packet: ResultPacket) -> None:
    assert codec.decode_result(encoded_result(codec, packet)) == packet


@given(st.builds(bytes, st.lists(st.integers(0, 7), max_size=12).map(lambda kinds: b"".join(map(_record, kinds)))))
def test_records_of_any_kinds_never_raise_anything_but_protocol_error(codec: Any, data: bytes) -> None:
    assert outcome(codec.decode_request, data) in (RequestPacket, ProtocolError)
    assert outcome(codec.decode_result, data) in (ResultPacket, ProtocolError)


@given(st.binary(max_size=300))
def test_random_bytes_never_raise_anything_but_protocol_error(codec: Any, data: bytes) -> None:
    assert outcome(codec.decode_request, data) in (RequestPacket, ProtocolError)
    assert outcome(codec.decode_result, data) in (ResultPacket, ProtocolError)


def _record(kind: int) -> bytes:
    return bytes([kind, 0, 0, 0, kind % 3, 0, 0, 0, kind % 4, 0, 0, 0]) + bytes(12)


def outcome(decode: Any, data: bytes) -> type:
    """Return the type of the decoded value, or of the error that `decode` may raise."""
    try:
        return type(decode(data))
    except ProtocolError:
        return ProtocolError


@given(results)
def test_BUR_11_N_BUR_5_padding_of_a_results_records_is_zero(codec: Any, packet: ResultPacket) -> None:
    data = encoded_result(codec, packet)
    assert [at for at in range(len(data)) if at % 24 in range(1, 8) and data[at]] == []
    operands = [data[at : at + 24] for at in range(0, len(data), 24) if data[at] == 1]
    assert [record for record in operands if any(record[9:12]) or any(record[16:])] == []


def test_padding_of_a_request_is_ignored(codec: Any, request_sample: Any) -> None:
    dirty = [_with_ones(record, _REQUEST_PADDING[record[0]]) for record in request_sample.records]
    assert codec.decode_request(b"".join(dirty)) == request_sample.value


def test_padding_of_a_result_is_ignored(codec: Any, result_sample: Any) -> None:
    dirty = [_with_ones(record, _RESULT_PADDING[record[0]]) for record in result_sample.records]
    assert codec.decode_result(b"".join(dirty)) == result_sample.value


_ONE_WORD = (*range(1, 4), *range(8, 24))
_REQUEST_OPERAND = (*range(1, 4), *range(5, 8))
_REQUEST_PADDING = (
    (*range(1, 4), *range(20, 24)), _REQUEST_OPERAND, _ONE_WORD, _REQUEST_OPERAND, _ONE_WORD, _ONE_WORD, _ONE_WORD,
)  # fmt: skip
_RESULT_PADDING = (
    (*range(1, 8), *range(20, 24)),
    (*range(1, 8), *range(9, 12), *range(16, 24)),
    (*range(1, 8), *range(12, 24)),
    tuple(range(1, 8)),
)


def _with_ones(record: bytes, where: tuple[int, ...]) -> bytes:
    return bytes(0xFF if at in where else byte for at, byte in enumerate(record))


@pytest.mark.parametrize("status", list(ErrorStatus))
def test_an_error_packet_is_two_records_and_late_statuses_become_general_failure(status: ErrorStatus) -> None:
    on_the_wire = int(status) if status <= 4 else 2
    expected = struct.pack("<B7xIiI4xB7xQQ", 0, 2, on_the_wire, 0, 3, 2**64 - 1, 2**64 - 1)
    assert encode_result(status, ()) == expected


def test_nanoseconds_are_rounded_down_to_microseconds(codec: Any) -> None:
    data = codec.encode_result(ErrorStatus.NONE, (), Timing(1999, 999))
    assert struct.unpack_from("<QQ", data, 32) == (1, 0)


def test_a_time_that_is_not_available_is_all_ones_on_the_wire(codec: Any) -> None:
    data = codec.encode_result(ErrorStatus.NONE, (), Timing(-1, 5000))
    assert struct.unpack_from("<QQ", data, 32) == (2**64 - 1, 5)


def test_the_padding_of_a_location_is_not_sent(codec: Any) -> None:
    data = codec.encode_request((RequestArgument(location=DataLocation(0, 0, 4, padding=4)),), (), (0,))
    assert codec.decode_request(data).inputs[0].location == DataLocation(0, 0, 4)


@pytest.mark.parametrize(
    ("argument", "slots"),
    [
        (RequestArgument(location=DataLocation(offset=-1)), ()),
        (RequestArgument(location=DataLocation(length=2**32)), ()),
        (RequestArgument(dimensions=(-1,)), ()),
        (RequestArgument(), (2**31,)),
    ],
)
def test_numbers_that_do_not_fit_their_field_are_invalid_arguments(
    codec: Any, argument: RequestArgument, slots: tuple[int, ...]
) -> None:
    with pytest.raises(InvalidArgument, match="does not fit"):
        codec.encode_request((argument,), (), slots)


@pytest.mark.parametrize(("shape", "timing"), [(OutputShape((2**32,)), Timing()), (OutputShape(()), Timing(-2, 0))])
def test_results_that_do_not_fit_their_field_are_invalid_arguments(
    codec: Any, shape: OutputShape, timing: Timing
) -> None:
    with pytest.raises(InvalidArgument, match="does not fit"):
        codec.encode_result(ErrorStatus.NONE, (shape,), timing)


def test_a_decoded_packet_does_not_change_with_its_source_memory(sample: Any) -> None:
    shared = bytearray(sample.data)
    packet = sample.decode(memoryview(shared))
    shared[:] = bytes(len(shared))
    assert packet == sample.value
