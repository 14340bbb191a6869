"""The compiled codec against its specification, the pycodec: the same values, bytes and errors, offsets included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from enum import IntEnum
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.packets import arguments, outcome, parts, requests, results, shapes

from nnfmq.hal.errors import ErrorStatus, GeneralFailure, InvalidArgument, ProtocolError
from nnfmq.hal.timing import Timing
from nnfmq.hal.types import DataLocation, MeasureTiming, OutputShape, RequestArgument
from nnfmq.serialize import _pycodec as pycodec
from nnfmq.serialize.packets import RequestPacket, ResultPacket

DECODERS = ["decode_request", "decode_result"]


class Rank(IntEnum):
    """A subclass of int."""

    TWO = 2


class Mutable:
    """Not a RequestArgument, but with its attributes."""

    has_no_value = True
    location = DataLocation(1, 2, 3)
    dimensions = (4, 5)


numbers = st.one_of(
    st.integers(0, 300),
    st.sampled_from([-1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64, 10**30, -(2**31), -(2**31) - 1, -(2**70)]),
    st.sampled_from([True, Rank.TWO, np.int64(7), np.uint32(2**32 - 1), 1.0, "1", None]),
)
flags: st.SearchStrategy[Any] = st.sampled_from([False, True, 0, 1, 2, 256, None, np.True_])
some_dimensions: st.SearchStrategy[Any] = st.lists(numbers, max_size=3).flatmap(
    lambda found: st.sampled_from([tuple(found), found])
)
some_arguments: st.SearchStrategy[Any] = st.one_of(
    arguments,
    st.builds(RequestArgument, flags, st.builds(DataLocation, numbers, numbers, numbers, numbers), some_dimensions),
    st.builds(RequestArgument, st.just(False), st.none()),
    st.just(Mutable()),
    st.none(),
)


def rows(items: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return tuples and lists of a few items, and other objects."""
    few = st.lists(items, max_size=3)
    return few.map(tuple) | few | few.map(lambda found: dict(enumerate(found)).values()) | st.none()


def both(compiled: ModuleType, name: str, *given: Any) -> tuple[Any, Any]:
    return outcome(getattr(compiled, name), *given), outcome(getattr(pycodec, name), *given)


def agree(compiled: ModuleType, name: str, *given: Any) -> bool:
    expected, found = both(compiled, name, *given)
    return bool(expected == found)


# ------------------------------------------------------------------------------------------------ encode


@given(requests)
def test_a_request_has_the_same_bytes(compiled: ModuleType, packet: RequestPacket) -> None:
    expected, found = both(compiled, "encode_request", *parts(packet))
    assert expected == found and expected[0] is bytes


@given(results)
def test_a_result_has_the_same_bytes(compiled: ModuleType, packet: ResultPacket) -> None:
    expected, found = both(compiled, "encode_result", packet.status, packet.output_shapes, packet.timing)
    assert expected == found and expected[0] is bytes


@given(
    rows(some_arguments), rows(some_arguments), rows(numbers), st.sampled_from([*MeasureTiming, 0, 1, 7, 2**40, None])
)
def test_a_request_of_any_kind_of_numbers_has_the_same_bytes_or_error(
    compiled: ModuleType, inputs: Any, outputs: Any, slots: Any, measure: Any
) -> None:
    assert agree(compiled, "encode_request", inputs, outputs, slots, measure)


some_shapes: st.SearchStrategy[Any] = st.builds(OutputShape, some_dimensions, flags) | st.just(Mutable())
times = st.one_of(numbers, st.sampled_from([999, 1000, 2**63 - 1, 2**64 * 1000 - 1, 2**64 * 1000, -2]))
timings: st.SearchStrategy[Any] = st.builds(Timing, times, times) | st.none()
statuses: st.SearchStrategy[Any] = st.sampled_from([*ErrorStatus, 0, 3, 9, -1, None])


@given(statuses, rows(some_shapes), timings)
def test_a_result_of_any_kind_of_numbers_has_the_same_bytes_or_error(
    compiled: ModuleType, status: Any, found: Any, timing: Any
) -> None:
    assert agree(compiled, "encode_result", status, found, timing)


@pytest.mark.parametrize("number", [-1, 0, 2**32 - 1, 2**32, 2**63, -(2**63)])
@pytest.mark.parametrize("field", ["pool_index", "offset", "length"])
def test_each_number_of_a_location_is_encoded_or_rejected_alike(compiled: ModuleType, field: str, number: int) -> None:
    argument = RequestArgument(location=DataLocation(**{field: number}))
    assert agree(compiled, "encode_request", (argument,), (), ())
    assert agree(compiled, "encode_request", (), [argument], ())


def test_the_defaults_are_the_same(compiled: ModuleType) -> None:
    assert compiled.encode_request([], [], []) == pycodec.encode_request([], [], [])
    assert compiled.encode_result(ErrorStatus.NONE, []) == pycodec.encode_result(ErrorStatus.NONE, [])
    assert compiled.encode_request(inputs=(), outputs=(), slots=(), measure=MeasureTiming.YES)[-20] == 1
    assert compiled.encode_result(status=ErrorStatus.NONE, shapes=(), timing=Timing(1000, 2000))[-8] == 2


# ------------------------------------------------------------------------------------------------ decode


@given(requests)
def test_a_decoded_request_is_the_same_in_every_field(compiled: ModuleType, packet: RequestPacket) -> None:
    data = pycodec.encode_request(*parts(packet))
    assert typed(compiled.decode_request(data)) == typed(pycodec.decode_request(data))


@given(results)
def test_a_decoded_result_is_the_same_in_every_field(compiled: ModuleType, packet: ResultPacket) -> None:
    data = pycodec.encode_result(packet.status, packet.output_shapes, packet.timing)
    assert typed(compiled.decode_result(data)) == typed(pycodec.decode_result(data))


def typed(value: Any) -> Any:
    """Return a value with the type of each part: 1 == True == MeasureTiming.YES."""
    if isinstance(value, tuple):
        return [typed(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return type(value), [typed(getattr(value, field.name)) for field in fields(value)]
    return type(value), value


@pytest.mark.parametrize("name", DECODERS)
@given(st.binary(max_size=300) | st.lists(st.binary(min_size=24, max_size=24), max_size=6).map(b"".join))
@example(bytes(24))
@example(b"")
def test_random_bytes_are_treated_alike(compiled: ModuleType, name: str, data: bytes) -> None:
    assert agree(compiled, name, data)


INTERESTING = [0, 1, 2, 3, 4, 5, 6, 7, 255, 256, 2**31 - 1, 2**31, 2**32 - 1]
changes = st.lists(
    st.tuples(
        st.sampled_from(["byte", "word", "cut", "add", "drop", "twice"]), st.integers(0, 600), st.integers(0, 255)
    ),
    min_size=1,
    max_size=4,
)


def changed(data: bytes, steps: Sequence[tuple[str, int, int]]) -> bytes:
    """Return a packet with random corruptions."""
    for step, where, value in steps:
        at = where % (len(data) + 1)
        record, word = at - at % 24, at - at % 4
        match step:
            case "byte":
                data = data[:at] + bytes([value]) + data[at + 1 :]
            case "word":
                number = INTERESTING[value % len(INTERESTING)]
                data = data[:word] + number.to_bytes(4, "little") + data[word + 4 :]
            case "cut":
                data = data[:at]
            case "add":
                data += bytes([value]) + bytes(23)
            case "drop":
                data = data[:record] + data[record + 24 :]
            case "twice":
                data = data[: record + 24] + data[record:]
    return data


def resized(data: bytes, at: int) -> bytes:
    """Return the packet with a correct packetSize, so that the decoder reaches the corruption after it."""
    return data[:at] + (len(data) // 24).to_bytes(4, "little") + data[at + 4 :] if len(data) >= 24 else data


@pytest.mark.parametrize(("name", "kind", "at"), [("decode_request", "requests", 4), ("decode_result", "results", 8)])
@given(index=st.integers(0, 14), steps=changes)
def test_damaged_golden_packets_are_treated_alike(
    compiled: ModuleType, golden: dict[str, list[Any]], name: str, kind: str, at: int, index: int, steps: Any
) -> None:
    data = changed(bytes.fromhex(golden[kind][index]["hex"]), steps)
    assert agree(compiled, name, data)
    assert agree(compiled, name, resized(data, at))


@pytest.mark.parametrize("value", [0, 1, 2, 5, 255])
def test_every_byte_of_a_packet_changed_alone_is_treated_alike(compiled: ModuleType, sample: Any, value: int) -> None:
    name = sample.decode.__name__
    damaged = [sample.data[:at] + bytes([value]) + sample.data[at + 1 :] for at in range(len(sample.data))]
    assert [data for data in damaged if not agree(compiled, name, data)] == []


def test_a_truncated_or_extended_packet_is_treated_alike(compiled: ModuleType, sample: Any) -> None:
    name = sample.decode.__name__
    cut = [sample.data[:end] for end in range(len(sample.data) + 1)]
    longer = [sample.data + bytes(more) for more in range(1, 49)]
    assert [data for data in cut + longer if not agree(compiled, name, data)] == []


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize(
    "given", [bytearray(30), memoryview(bytes(48)), 48, "text", None, [1, 2]], ids=lambda given: type(given).__name__
)
def test_arguments_that_are_not_packets_are_treated_alike(compiled: ModuleType, name: str, given: Any) -> None:
    assert agree(compiled, name, given)


def test_a_packet_that_only_the_compiled_codec_rejects_is_an_internal_error(
    compiled: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pycodec, "decode_request", lambda data: None)
    with pytest.raises(GeneralFailure, match="the two codecs disagree: only the compiled one rejects 0102"):
        compiled.decode_request(b"\1\2")


def test_the_python_codec_raises_the_error(compiled: ModuleType) -> None:
    assert outcome(compiled.decode_request, bytes(24))[0] is ProtocolError
    assert outcome(compiled.encode_request, (), (), [2**31])[0] is InvalidArgument


@given(shapes)
def test_shapes_may_be_a_list_or_a_tuple(compiled: ModuleType, found: tuple[OutputShape, ...]) -> None:
    assert compiled.encode_result(ErrorStatus.NONE, list(found)) == compiled.encode_result(ErrorStatus.NONE, found)
