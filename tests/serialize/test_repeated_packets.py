"""Decoders that return the same object for equal bytes."""

from __future__ import annotations

from typing import Any

import pytest
from support.packets import outcome

from nnfmq.hal.errors import ErrorStatus, ProtocolError
from nnfmq.hal.timing import Timing
from nnfmq.hal.types import OutputShape
from nnfmq.serialize.codec import Decoder


@pytest.mark.parametrize("given", [bytes, bytearray, memoryview], ids=lambda kind: kind.__name__)
def test_the_same_bytes_give_the_same_object(codec: Any, sample: Any, given: Any) -> None:
    decoder = Decoder(sample.decode)
    first = decoder.decode(given(sample.data))
    assert first == sample.value
    assert decoder.decode(given(bytearray(sample.data))) is first


def test_a_packet_that_differs_in_any_byte_is_decoded_again(codec: Any, sample: Any) -> None:
    decoder = Decoder(sample.decode)
    assert [at for at in range(len(sample.data)) if not is_distinguished(decoder, sample, at)] == []


def is_distinguished(decoder: Any, sample: Any, at: int) -> bool:
    """Return whether a packet of equal length that differs at one byte is decoded as by a new decoder."""
    decoder.decode(sample.data)
    other = bytearray(sample.data)
    other[at] ^= 2
    return outcome(decoder.decode, bytes(other)) == outcome(sample.decode, bytes(other))


def test_a_malformed_packet_is_rejected_each_time_and_not_remembered(codec: Any, sample: Any) -> None:
    decoder = Decoder(sample.decode)
    first = decoder.decode(sample.data)
    for _ in range(2):
        with pytest.raises(ProtocolError):
            decoder.decode(sample.data[:-24])
    assert decoder.decode(sample.data) == first


def test_a_decoder_keeps_one_packet_and_no_more(codec: Any) -> None:
    decoder = Decoder(codec.decode_result)
    one, other = (codec.encode_result(ErrorStatus.NONE, (), Timing(time, 0)) for time in (1000, 2000))
    first = decoder.decode(one)
    assert decoder.decode(other).timing == Timing(2000, 0)
    assert decoder.decode(one) is not first and decoder.decode(one) == first


def test_what_was_remembered_does_not_change_with_the_memory_it_came_from(codec: Any, sample: Any) -> None:
    decoder = Decoder(sample.decode)
    shared = bytearray(sample.data)
    first = decoder.decode(shared)
    shared[:] = bytes(len(shared))
    assert outcome(decoder.decode, shared)[0] is ProtocolError
    assert decoder.decode(sample.data) is first


@pytest.mark.parametrize(("dimensions", "is_remembered"), [(167, True), (168, False)], ids=["4 KiB", "more"])
def test_only_small_packets_are_remembered(codec: Any, dimensions: int, is_remembered: bool) -> None:
    """The sender chooses the size; the sender must not be able to fill the driver's memory."""
    result = codec.encode_result(ErrorStatus.NONE, [OutputShape((1,) * dimensions, True)])
    decoder = Decoder(codec.decode_result)
    assert (len(result) <= 4096) == is_remembered
    assert (decoder.decode(result) is decoder.decode(result)) == is_remembered
    assert decoder.decode(result) == codec.decode_result(result)
