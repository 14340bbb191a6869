"""Properties of the codecs: what was encoded is decoded, and any bytes are a request or InvalidArgument."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from nnfmq.hal.errors import InvalidArgument
from nnfmq.serving.inference_protocol import http
from nnfmq.serving.inference_protocol.http import OutputFormats, decode_infer_request, encode_infer_response
from nnfmq.serving.inference_protocol.tensors import BFLOAT16, DATATYPES, RequestLimits, datatype_of, dtype_of
from nnfmq.serving.inference_service import InferRequest, InferResponse

SMALL = RequestLimits(max_body_bytes=1 << 16, max_header_bytes=1 << 12)
NAMES = st.text(max_size=8)
PARAMETERS = st.dictionaries(
    st.sampled_from(["binary_data_size", "binary_data", "binary_data_output", "timeout", "sequence_id", "a"]),
    st.one_of(st.booleans(), st.integers(-5, 40), st.floats(allow_nan=False), st.text(max_size=3), st.none()),
    max_size=3,
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**65), 2**65), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=12,
)
TENSORS = st.fixed_dictionaries(
    {
        "name": st.one_of(NAMES, JSON),
        "datatype": st.one_of(st.sampled_from([*DATATYPES, "BYTES"]), JSON),
        "shape": st.one_of(st.lists(st.integers(-1, 4), max_size=4), JSON),
    },
    optional={"data": st.one_of(st.lists(st.integers(-2, 300), max_size=9), JSON), "parameters": PARAMETERS},
)
REQUESTS = st.fixed_dictionaries(
    {"inputs": st.lists(TENSORS, max_size=3)},
    optional={
        "id": st.one_of(NAMES, JSON),
        "outputs": st.one_of(st.lists(st.fixed_dictionaries({"name": NAMES})), JSON),
    },
)


@st.composite
def tensors(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """Return an array of any dtype of the protocol, with any values, and in any order in memory."""
    dtype = draw(st.sampled_from([row.dtype for row in DATATYPES.values()]))
    shape = draw(arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    array: np.ndarray[Any, Any] = draw(arrays.arrays(dtype, shape))
    return array.T if draw(st.booleans()) else array


def same(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> bool:
    return first.shape == second.shape and first.tobytes() == second.tobytes() and first.dtype == second.dtype


def as_request(body: bytes, header_length: int | None) -> bytes:
    """Turn a response into a request: outputs become inputs, which have the same form."""
    end = len(body) if header_length is None else header_length
    fields = json.loads(body[:end])
    return json.dumps({"inputs": fields["outputs"]}).encode()


@given(st.lists(tensors(), max_size=3))
def test_binary_tensors_come_back_bit_for_bit(given_arrays: list[np.ndarray[Any, Any]]) -> None:
    outputs = {str(index): array for index, array in enumerate(given_arrays)}
    body, length = encode_infer_response(InferResponse("m", "1", outputs), OutputFormats(True))
    header = as_request(body, length)
    binary = b"" if length is None else body[length:]
    found = decode_infer_request(header + binary, len(header), model="m").request.inputs
    assert list(found) == list(outputs)
    assert all(same(found[name], outputs[name]) for name in outputs)


@given(tensors())
def test_tensors_in_json_come_back_bit_for_bit(array: np.ndarray[Any, Any]) -> None:
    response = InferResponse("m", "1", {"x": array})
    if array.dtype.kind == "f" and not all(map(math.isfinite, array.ravel().tolist())):
        with pytest.raises(InvalidArgument):
            encode_infer_response(response, OutputFormats())
        return
    found = decode_infer_request(as_request(*encode_infer_response(response, OutputFormats())), None, model="m")
    assert same(found.request.inputs["x"], array)


@pytest.mark.parametrize("datatype", sorted(DATATYPES.keys() - {BFLOAT16}))
def test_datatypes_and_dtypes_belong_to_each_other(datatype: str) -> None:
    assert datatype_of(dtype_of(datatype)) == datatype
    assert datatype_of(dtype_of(datatype).newbyteorder(">")) == datatype


def accepted(body: bytes, header_length: int | None) -> InferRequest | None:
    """Return the request, None if the body was rejected; another error than InvalidArgument fails the test."""
    try:
        return decode_infer_request(body, header_length, model="m", limits=SMALL).request
    except InvalidArgument:
        return None


@settings(max_examples=200)
@given(st.binary(max_size=200), st.one_of(st.none(), st.integers(-2, 210)))
def test_any_bytes_are_a_request_or_an_invalid_argument(body: bytes, header_length: int | None) -> None:
    accepted(body, header_length)


@settings(max_examples=200)
@given(REQUESTS, st.binary(max_size=40), st.integers(-3, 3))
def test_any_json_is_a_request_or_an_invalid_argument(fields: dict[str, Any], binary: bytes, error: int) -> None:
    text = json.dumps(fields).encode()
    request = accepted(text + binary, max(0, len(text) + error) if binary else None)
    if request is not None:
        stated = {entry["name"]: entry["shape"] for entry in fields["inputs"]}
        assert {name: list(array.shape) for name, array in request.inputs.items()} == stated


# ------------------------------------------------------------------------------------------------ gRPC


def decode_message(data: bytes) -> InferRequest | None:
    pytest.importorskip("google.protobuf", reason="protobuf is not installed")
    from nnfmq.serving.inference_protocol.grpc import decode_infer_message

    try:
        return decode_infer_message(data, SMALL)
    except InvalidArgument:
        return None


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_an_invalid_argument(data: bytes) -> None:
    decode_message(data)


FIELDS = st.recursive(
    st.binary(max_size=12),
    lambda inner: st.lists(st.tuples(st.integers(1, 8), inner), max_size=5).map(
        lambda fields: b"".join(
            struct.pack("BB", number << 3 | 2, min(len(value), 127)) + value[:127] for number, value in fields
        )
    ),
    max_leaves=12,
)


@settings(max_examples=200)
@given(FIELDS)
def test_any_nested_fields_are_a_message_or_an_invalid_argument(data: bytes) -> None:
    decode_message(data)


@given(st.lists(tensors(), max_size=3))
def test_raw_contents_come_back_bit_for_bit(given_arrays: list[np.ndarray[Any, Any]]) -> None:
    pytest.importorskip("google.protobuf", reason="protobuf is not installed")
    from nnfmq.serving.inference_protocol.grpc import encode_infer_message, message_classes

    outputs = {str(index): array for index, array in enumerate(given_arrays)}
    encoded = encode_infer_message(InferResponse("m", "1", outputs)).SerializeToString()
    response = message_classes()["ModelInferResponse"].FromString(encoded)
    inputs = [{"name": o.name, "datatype": o.datatype, "shape": o.shape} for o in response.outputs]
    request = message_classes()["ModelInferRequest"](inputs=inputs, raw_input_contents=response.raw_output_contents)
    found = decode_message(request.SerializeToString())
    assert found is not None
    assert all(same(found.inputs[name], outputs[name]) for name in outputs)


FLAT = st.lists(st.one_of(st.integers(-2, 300), st.integers(-(2**65), 2**65), st.floats(), JSON), max_size=12)
DAMAGE = st.sampled_from(["", "", ",", " ", "[", "]", '"', "1", "{"])


@given(FLAT, st.sampled_from(list(DATATYPES)), st.integers(1, 9), DAMAGE, st.integers(0, 60))
def test_flat_data_decoded_in_pieces_is_what_it_is_as_a_whole(
    values: list[Any], datatype: str, piece: int, damage: str, place: int
) -> None:
    data = json.dumps(values)
    place = min(place, len(data))
    data = data[:place] + damage + data[place:]
    text = f'{{"inputs": [{{"name": "x", "datatype": "{datatype}", "shape": [{len(values)}], "data": {data}}}]}}'
    results = []
    for piece_bytes in (piece, len(text)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(http, "PIECE_BYTES", piece_bytes)
            try:
                results.append(decode_infer_request(text.encode(), None, model="m").request.inputs["x"].tobytes())
            except InvalidArgument:
                results.append(b"invalid")
    assert results[0] == results[1]
