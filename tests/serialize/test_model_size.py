"""The size of a decoded model is known before it is decoded, whatever records it consists of."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import pytest

from nnfmq.hal.errors import ProtocolError
from nnfmq.serialize.models import decode_model, decoded_model_bytes

COUNT = 20_000
LOCATION = [0, 0, 0, 0]
OPERAND: list[Any] = [0, [], 0, 0, 0, LOCATION, None, b""]
NOTHING: list[Any] = [[], [], [], []]


def operand(**changes: Any) -> list[Any]:
    names = ("type", "dimensions", "scale", "zero_point", "lifetime", "location", "channel_quant", "extension_data")
    return [changes.get(name, value) for name, value in zip(names, OPERAND, strict=True)]


def model(main: list[Any], referenced: list[Any] | None = None, values: bytes = b"") -> bytes:
    return msgspec.msgpack.encode([main, referenced or [], values, [], False, []])


RECORDS = {
    "operands": model([[OPERAND] * COUNT, [], [], []]),
    "full operands": model([[operand(dimensions=[300], scale=0.5, channel_quant=[[1], 0])] * COUNT, [], [], []]),
    "dimensions": model([[operand(dimensions=[70_000] * COUNT)], [], [], []]),
    "scales": model([[operand(channel_quant=[[1] * COUNT, 0])], [], [], []]),
    "operations": model([[], [[0, [], []]] * COUNT, [], []]),
    "inputs": model([[], [], [300] * COUNT, []]),
    "subgraphs": model(NOTHING, [NOTHING] * COUNT),
}


@pytest.mark.parametrize("records", RECORDS)
def test_decoding_a_model_takes_at_most_the_size_that_was_computed_before(records: str) -> None:
    data = RECORDS[records]
    tracemalloc.start()
    try:
        decode_model(data, ())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0 < peak <= decoded_model_bytes(data)


def test_constants_count_once() -> None:
    small, large = model(NOTHING), model(NOTHING, values=bytes(1 << 20))
    assert decoded_model_bytes(large) - decoded_model_bytes(small) == pytest.approx(1 << 20, abs=1024)


@pytest.mark.parametrize("data", [b"", b"\x93", b"\x01", b"\x92\x90\x90"])
def test_bytes_that_are_no_model_are_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="are not a model"):
        decoded_model_bytes(data)
