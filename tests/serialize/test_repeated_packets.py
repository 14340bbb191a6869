"""What repeats itself: templates that are patched in place, and decoders that know the last packet again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.packets import arguments, i32, outcome, parts, requests, u32

from nnfmq.hal.errors import ErrorStatus, InvalidArgument, ProtocolError
from nnfmq.hal.types import DataLocation, MeasureTiming, OutputShape, RequestArgument, Timing
from nnfmq.queue import MessageQueue
from nnfmq.serialize.packet import RequestPacket

Change = Callable[[Any], None]


def encoded(codec: ModuleType, packet: RequestPacket) -> bytes:
    return bytes(codec.encode_request(*parts(packet)))


# ------------------------------------------------------------------------------------------------ templates


def test_a_template_begins_as_the_packet_itself(codec: Any, golden_request: Any) -> None:
    assert codec.RequestTemplate(*parts(golden_request.value)).packet == golden_request.data


@given(requests)
def test_any_request_can_be_a_template(codec: Any, packet: RequestPacket) -> None:
    assert codec.RequestTemplate(*parts(packet)).packet == encoded(codec, packet)


@given(requests, st.data())
def test_a_template_changed_in_every_place_is_the_packet_of_the_new_values(
    codec: Any, old: RequestPacket, data: st.DataObject
) -> None:
    new = data.draw(of_the_same_form(old))
    template = codec.RequestTemplate(*parts(old))
    for index, argument in enumerate(new.inputs):
        template.set_input(index, argument)
    for index, argument in enumerate(new.outputs):
        template.set_output(index, argument)
    for index, slot in enumerate(new.slots):
        template.set_slot(index, slot)
    template.set_measure(new.measure)
    assert template.packet == encoded(codec, new)


def of_the_same_form(packet: RequestPacket) -> st.SearchStrategy[RequestPacket]:
    """Return requests with as many arguments of the same ranks, and as many slots."""
    inputs, outputs = (st.tuples(*map(of_the_same_rank, side)) for side in (packet.inputs, packet.outputs))
    slots = st.tuples(*[i32] * len(packet.slots))
    return st.builds(RequestPacket, inputs, outputs, slots, st.sampled_from(MeasureTiming))


def of_the_same_rank(argument: RequestArgument) -> st.SearchStrategy[RequestArgument]:
    return st.builds(replace, arguments, dimensions=st.tuples(*[u32] * len(argument.dimensions)))


@pytest.mark.parametrize(
    ("change", "offset", "size"),
    [
        (lambda t: t.set_input(0, RequestArgument(True, DataLocation(1, 64, 24), (2, 3))), 28, 1),
        (lambda t: t.set_input(0, RequestArgument(False, DataLocation(9, 64, 24), (2, 3))), 32, 1),
        (lambda t: t.set_input(0, RequestArgument(False, DataLocation(1, 2**32 - 1, 24), (2, 3))), 36, 4),
        (lambda t: t.set_input(0, RequestArgument(False, DataLocation(1, 64, 25), (2, 3))), 40, 1),
        (lambda t: t.set_input(0, RequestArgument(False, DataLocation(1, 64, 24), (2, 4))), 76, 1),
        (lambda t: t.set_input(1, RequestArgument(False)), 100, 1),
        (lambda t: t.set_output(0, RequestArgument(False, DataLocation(0, 0, 4), (1, 4))), 132, 1),
        (lambda t: t.set_output(0, RequestArgument(False, DataLocation(0, 128, 4), (2, 4))), 148, 1),
        (lambda t: t.set_slot(0, -1), 196, 4),
        (lambda t: t.set_slot(1, 3), 220, 1),
        (lambda t: t.set_measure(MeasureTiming.NO), 244, 1),
    ],
)
def test_a_change_touches_its_own_field_alone(
    codec: Any, request_sample: Any, change: Change, offset: int, size: int
) -> None:
    template = codec.RequestTemplate(*parts(request_sample.value))
    change(template)
    different = [at for at in range(264) if template.packet[at] != request_sample.data[at]]
    assert different == list(range(offset, offset + size))


FITTING = RequestArgument(True, DataLocation(5, 6, 7), (8, 9))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t.set_input(0, replace(FITTING, dimensions=(8,))), "input 0 has rank 2 in this template, not 1"),
        (lambda t: t.set_input(1, FITTING), "input 1 has rank 0 in this template, not 2: make a new one"),
        (lambda t: t.set_output(0, replace(FITTING, dimensions=())), "output 0 has rank 2 in this template, not 0"),
        (lambda t: t.set_input(0, replace(FITTING, dimensions=(8, 2**32))), "does not fit"),
        (lambda t: t.set_input(0, replace(FITTING, dimensions=(8, "9"))), "does not fit"),
        (lambda t: t.set_input(0, replace(FITTING, has_no_value=256)), "does not fit"),
        (lambda t: t.set_input(0, replace(FITTING, location=DataLocation(5, 6, 2**32))), "does not fit"),
        (lambda t: t.set_output(0, replace(FITTING, location=DataLocation(5, -1, 7))), "does not fit"),
        (lambda t: t.set_output(0, replace(FITTING, dimensions=(-1, 9))), "does not fit"),
        (lambda t: t.set_slot(0, 2**31), "does not fit"),
        (lambda t: t.set_measure(2**31), "does not fit"),
        (lambda t: t.set_input(2, FITTING), "there is no input 2 in this template, which has 2"),
        (lambda t: t.set_input(-1, FITTING), "there is no input -1"),
        (lambda t: t.set_output(1, FITTING), "there is no output 1 in this template, which has 1"),
        (lambda t: t.set_output(2**70, FITTING), "there is no output"),
        (lambda t: t.set_slot(2, 0), "there is no slot 2 in this template, which has 2"),
    ],
)
def test_what_does_not_fit_into_a_template_is_refused_and_changes_nothing(
    codec: Any, request_sample: Any, change: Change, text: str
) -> None:
    template = codec.RequestTemplate(*parts(request_sample.value))
    with pytest.raises(InvalidArgument, match=text):
        change(template)
    assert template.packet == request_sample.data


@pytest.mark.parametrize("argument", [None, "x", RequestArgument(location=None), object.__new__(RequestArgument)])  # type: ignore[arg-type]
def test_what_is_no_argument_at_all_changes_nothing(codec: Any, request_sample: Any, argument: Any) -> None:
    template = codec.RequestTemplate(*parts(request_sample.value))
    assert outcome(template.set_input, 1, argument)[0] is AttributeError
    assert template.packet == request_sample.data


def test_a_template_of_what_does_not_fit_is_refused(codec: Any) -> None:
    with pytest.raises(InvalidArgument, match="does not fit"):
        codec.RequestTemplate((), (), [2**31])


def test_the_packet_of_a_template_cannot_be_written_and_stays_where_it_is(codec: Any, request_sample: Any) -> None:
    template = codec.RequestTemplate(*parts(request_sample.value))
    packet = template.packet
    template.set_slot(0, 3)
    assert packet.readonly and packet is template.packet and packet[196] == 3


def test_a_queue_takes_the_packet_as_it_is_at_that_moment(codec: Any, request_sample: Any) -> None:
    template = codec.RequestTemplate(*parts(request_sample.value))
    with MessageQueue.create(quantum=24, count=32) as queue:
        assert queue.send(template.packet)
        template.set_slot(0, 3)
        assert queue.send(template.packet)
        assert queue.receive(0, 0) == request_sample.data + bytes(template.packet)


def test_numbers_that_are_no_plain_int_are_written_as_the_encoder_does(codec: Any) -> None:
    template = codec.RequestTemplate((RequestArgument(),), (), (0,))
    location: Any = DataLocation(True, False, MeasureTiming.YES)
    template.set_input(False, RequestArgument(location=location))
    template.set_slot(0, True)
    assert template.packet == codec.encode_request((RequestArgument(location=DataLocation(1, 0, 1)),), (), (1,))


# ------------------------------------------------------------------------------------------------ decoders


@pytest.mark.parametrize("given", [bytes, bytearray, memoryview], ids=lambda kind: kind.__name__)
def test_the_same_bytes_give_the_same_object(codec: Any, sample: Any, given: Any) -> None:
    decoder = codec.Decoder(sample.decode)
    first = decoder.decode(given(sample.data))
    assert first == sample.value
    assert decoder.decode(given(bytearray(sample.data))) is first


def test_a_packet_that_differs_in_any_byte_is_decoded_afresh(codec: Any, sample: Any) -> None:
    decoder = codec.Decoder(sample.decode)
    assert [at for at in range(len(sample.data)) if not is_told_apart(decoder, sample, at)] == []


def is_told_apart(decoder: Any, sample: Any, at: int) -> bool:
    """Return whether a packet of equal length that differs at one byte is answered as if it came first."""
    decoder.decode(sample.data)
    other = bytearray(sample.data)
    other[at] ^= 2
    return outcome(decoder.decode, bytes(other)) == outcome(sample.decode, bytes(other))


def test_a_malformed_packet_is_refused_each_time_and_not_remembered(codec: Any, sample: Any) -> None:
    decoder = codec.Decoder(sample.decode)
    first = decoder.decode(sample.data)
    for _ in range(2):
        with pytest.raises(ProtocolError):
            decoder.decode(sample.data[:-24])
    assert decoder.decode(sample.data) == first


def test_a_decoder_keeps_one_packet_and_no_more(codec: Any) -> None:
    decoder = codec.Decoder(codec.decode_result)
    one, other = (codec.encode_result(ErrorStatus.NONE, (), Timing(time, 0)) for time in (1000, 2000))
    first = decoder.decode(one)
    assert decoder.decode(other).timing == Timing(2000, 0)
    assert decoder.decode(one) is not first and decoder.decode(one) == first


def test_what_was_remembered_does_not_change_with_the_memory_it_came_from(codec: Any, sample: Any) -> None:
    decoder = codec.Decoder(sample.decode)
    shared = bytearray(sample.data)
    first = decoder.decode(shared)
    shared[:] = bytes(len(shared))
    assert outcome(decoder.decode, shared)[0] is ProtocolError
    assert decoder.decode(sample.data) is first


@pytest.mark.parametrize(("dimensions", "is_remembered"), [(167, True), (168, False)], ids=["4 KiB", "more"])
def test_only_small_packets_are_remembered(codec: Any, dimensions: int, is_remembered: bool) -> None:
    """The sender chooses the size; the driver's memory is not his to fill."""
    result = codec.encode_result(ErrorStatus.NONE, [OutputShape((1,) * dimensions, True)])
    decoder = codec.Decoder(codec.decode_result)
    assert (len(result) <= 4096) == is_remembered
    assert (decoder.decode(result) is decoder.decode(result)) == is_remembered
    assert decoder.decode(result) == codec.decode_result(result)
