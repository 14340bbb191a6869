"""Bodies of HTTP: what is decoded, what is rejected and with which words, and what a response looks like."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from nnfmq.hal.errors import InvalidArgument
from nnfmq.serving.inference_protocol.errors import RequestTooLarge
from nnfmq.serving.inference_protocol.http import (
    OutputFormats,
    RestRequest,
    decode_infer_request,
    encode_infer_response,
)
from nnfmq.serving.inference_protocol.tensors import RequestLimits
from nnfmq.serving.inference_service import InferResponse


def decoded(header: object, binary: bytes = b"", **options: Any) -> RestRequest:
    text = json.dumps(header).encode()
    return decode_infer_request(text + binary, len(text) if binary else None, model="m", version="4", **options)


def tensor(datatype: str = "FP32", shape: Any = (2, 2), name: str = "x", **fields: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, **fields}


def binary_tensor(length: object, **fields: Any) -> dict[str, Any]:
    return tensor(**fields, parameters={"binary_data_size": length})


def one(*inputs: object, **fields: Any) -> dict[str, Any]:
    return {"inputs": inputs, **fields}


# ------------------------------------------------------------------------------------------------ requests


@pytest.mark.parametrize(
    ("datatype", "dtype", "data"),
    [
        ("BOOL", "bool", [True, False, False, True]),
        ("UINT8", "uint8", [0, 255, 1, 2]),
        ("UINT16", "uint16", [0, 65535, 1, 2]),
        ("UINT32", "uint32", [0, 2**32 - 1, 1, 2]),
        ("UINT64", "uint64", [0, 2**64 - 1, 1, 2]),
        ("INT8", "int8", [-128, 127, 1, 2]),
        ("INT16", "int16", [-(2**15), 2**15 - 1, 1, 2]),
        ("INT32", "int32", [-(2**31), 2**31 - 1, 1, 2]),
        ("INT64", "int64", [-(2**63), 2**63 - 1, 1, 2]),
        ("FP16", "float16", [0.5, -65504, 1, 2]),
        ("FP32", "float32", [0.1, -3.4e38, 1, 2]),
        ("FP64", "float64", [0.1, -1.7e308, 1, 2]),
    ],
)
def test_numbers_in_json_have_the_limits_of_their_datatype(datatype: str, dtype: str, data: list[Any]) -> None:
    expected = np.array(data, dtype).reshape(2, 2)
    for given in (data, [data[:2], data[2:]]):
        array = decoded(one(tensor(datatype, data=given))).request.inputs["x"]
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize(
    ("datatype", "value"),
    [
        ("BOOL", 1),
        ("UINT8", 256),
        ("UINT8", -1),
        ("UINT64", 2**64),
        ("UINT64", -1),
        ("INT8", 128),
        ("INT32", 2**31),
        ("INT64", 2**63),
        ("INT32", 1.0),
        ("INT32", True),
        ("FP16", 65520),
        ("FP32", 3.5e38),
        ("FP32", "1"),
        ("FP32", None),
        ("FP32", True),
        ("FP32", [1]),
    ],
)
def test_values_that_the_datatype_does_not_have_are_rejected(datatype: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match="input 'x' "):
        decoded(one(tensor(datatype, [1], data=[value])))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "-1e999", "01", "1.", "0x1"])
def test_numbers_that_json_does_not_have_are_rejected(number: str) -> None:
    body = f'{{"inputs": [{{"name": "x", "datatype": "FP64", "shape": [1], "data": [{number}]}}]}}'
    with pytest.raises(InvalidArgument):
        decode_infer_request(body.encode(), None, model="m")


@pytest.mark.parametrize("datatype", ["BYTES", "FP8", "fp32", ""])
def test_other_datatypes_are_rejected_with_advice(datatype: str) -> None:
    with pytest.raises(InvalidArgument, match=r"is not supported; (models have no|NumPy has no|allowed are BOOL, )"):
        decoded(one(tensor(datatype, data=[1])))


def test_binary_data_becomes_read_only_views_of_the_body() -> None:
    first, second = np.arange(4, dtype="<f4"), np.array([True, False])
    header = json.dumps(one(binary_tensor(16), binary_tensor(2, datatype="BOOL", shape=[2], name="z"))).encode()
    body = header + first.tobytes() + second.tobytes()
    inputs = decode_infer_request(body, len(header), model="m").request.inputs
    np.testing.assert_array_equal(inputs["x"], first.reshape(2, 2))
    np.testing.assert_array_equal(inputs["z"], second)
    for array in inputs.values():
        assert not array.flags.writeable
        assert np.shares_memory(array, np.frombuffer(body, np.uint8))


def test_json_and_binary_inputs_can_be_in_one_request() -> None:
    values = np.array([5, 6], "<i8")
    header = one(tensor("INT32", [2], data=[1, 2]), binary_tensor(16, datatype="INT64", shape=[2], name="z"))
    inputs = decoded(header, values.tobytes()).request.inputs
    assert {name: array.tolist() for name, array in inputs.items()} == {"x": [1, 2], "z": [5, 6]}


@pytest.mark.parametrize("shape", [[0], [0, 3], [2, 0]])
def test_empty_tensors_are_tensors(shape: list[int]) -> None:
    assert decoded(one(tensor(shape=shape, data=[]))).request.inputs["x"].shape == tuple(shape)
    header = json.dumps(one(binary_tensor(0, shape=shape))).encode()
    request = decode_infer_request(header, len(header), model="m").request
    assert request.inputs["x"].shape == tuple(shape)


def test_a_shape_of_no_dimensions_has_one_value() -> None:
    for data in (3, [3]):
        array = decoded(one(tensor(shape=[], data=data))).request.inputs["x"]
        assert (array.shape, array.item()) == ((), 3)


@pytest.mark.parametrize(
    ("shape", "data"),
    [
        ([2, 2], [1, 2, 3]),
        ([2, 2], [1, 2, 3, 4, 5]),
        ([2, 2], [[1, 2], [3]]),
        ([2, 2], [[1, 2, 3, 4]]),
        ([2, 2], [[[1, 2], [3, 4]]]),
        ([1, 2, 2], [[1, 2], [3, 4]]),
        ([4], 1),
        ([4], "1234"),
        ([4], {"0": 1}),
        ([4], None),
        ([], [[3]]),
        ([], "3"),
    ],
)
def test_data_of_another_shape_is_rejected(shape: list[int], data: object) -> None:
    with pytest.raises(InvalidArgument, match="input 'x' "):
        decoded(one(tensor(shape=shape, data=data)))


@pytest.mark.parametrize(
    "shape",
    [[-1], [2**31], [2**40, 2**40], [2**16, 2**16], [2**16, 2**16, 0], [1] * 33, "4", [1.5], [None], None, [[4]]],
)
def test_impossible_shapes_are_rejected(shape: object) -> None:
    with pytest.raises(InvalidArgument):
        decoded(one(tensor(shape=shape, data=[])))
    with pytest.raises(InvalidArgument):
        decoded(one(binary_tensor(16, shape=shape)), bytes(16))


@pytest.mark.parametrize("length", [15, 17, 0, -16, 2**70, 16.0, "16", True])
def test_a_binary_data_size_that_is_not_that_of_the_shape_is_rejected(length: object) -> None:
    with pytest.raises(InvalidArgument):
        decoded(one(binary_tensor(length)), bytes(16))


@pytest.mark.parametrize("binary", [bytes(15), bytes(17), bytes(32)])
def test_bytes_that_no_input_has_are_rejected(binary: bytes) -> None:
    with pytest.raises(InvalidArgument, match=r"after its JSON|are needed for shape"):
        decoded(one(binary_tensor(16)), binary)


def test_bytes_after_json_inputs_are_rejected() -> None:
    with pytest.raises(InvalidArgument, match="4 bytes after its JSON; the inputs have 0"):
        decoded(one(tensor(shape=[1], data=[1])), bytes(4))


def test_a_boolean_that_is_neither_0_nor_1_is_rejected() -> None:
    with pytest.raises(InvalidArgument, match="has the byte 2; allowed are 0 and 1"):
        decoded(one(binary_tensor(2, datatype="BOOL", shape=[2])), b"\1\2")


@pytest.mark.parametrize(
    "entry", [tensor(), {**binary_tensor(4, shape=[1]), "data": [1]}, {"name": "x"}, {"datatype": "FP32", "shape": []}]
)
def test_an_input_has_a_name_and_either_json_or_binary_data(entry: object) -> None:
    with pytest.raises(InvalidArgument):
        decoded(one(entry), bytes(4))


@pytest.mark.parametrize("length", [-1, 5, 10**12])
def test_a_header_length_outside_of_the_body_is_rejected(length: int) -> None:
    with pytest.raises(InvalidArgument, match="Inference-Header-Content-Length"):
        decode_infer_request(b"{}  ", length, model="m")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"{}",
        b'{"inputs": {}}',
        b'{"inputs": [1]}',
        b'{"inputs": []} {}',
        b'{"inputs": [], "id": 5}',
        b'{"inputs": [], "id": "\xff"}',
        b'{"inputs": [], "parameters": []}',
        b'{"inputs": [], "parameters": {"a": [1]}}',
        b'{"inputs": [], "outputs": ["y"]}',
        b'{"inputs": [], "x": ' + b"[" * 100_000,
        b'{"inputs": ' + b"[" * 100_000,
        b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": '
        + b"[" * 100_000
        + b"]" * 100_000
        + b"}]}",
    ],
)
def test_anything_else_than_a_request_is_rejected(body: bytes) -> None:
    with pytest.raises(InvalidArgument):
        decode_infer_request(body, None, model="m")


def test_a_name_may_be_given_once() -> None:
    with pytest.raises(InvalidArgument, match="input 'x' is given twice"):
        decoded(one(tensor(shape=[1], data=[1]), tensor(shape=[1], data=[1])))
    with pytest.raises(InvalidArgument, match="output 'y' is given twice"):
        decoded(one(outputs=[{"name": "y"}, {"name": "y"}]))


def test_the_number_of_inputs_and_outputs_is_limited() -> None:
    many = [{"name": str(number)} for number in range(1025)]
    with pytest.raises(InvalidArgument, match="outputs"):
        decoded(one(outputs=many))
    with pytest.raises(InvalidArgument, match="inputs"):
        decoded(one(*(tensor(shape=[0], name=entry["name"], data=[]) for entry in many)))


def test_unknown_fields_and_parameters_are_ignored() -> None:
    parameters = {"priority": 3, "custom": "text"}
    request, formats = decoded(one(model_name="other", extra=[{}], parameters=parameters))
    assert (request.model, request.version, request.inputs, formats.is_binary("y")) == ("m", "4", {}, False)


@pytest.mark.parametrize("name", ["sequence_id", "shared_memory_region", "classification"])
def test_extensions_that_would_change_the_result_are_rejected(name: str) -> None:
    parameters = {name: 1}
    for header in (
        one(parameters=parameters),
        one(tensor(shape=[0], data=[], parameters=parameters)),
        one(outputs=[{"name": "y", "parameters": parameters}]),
    ):
        with pytest.raises(InvalidArgument, match=f"parameter '{name}': this server has no "):
            decoded(header)


def test_the_timeout_is_in_microseconds() -> None:
    assert decoded(one(parameters={"timeout": 1500})).request.timeout_s == 0.0015
    assert decoded(one()).request.timeout_s is None
    assert decoded(one(parameters={"timeout": 0})).request.timeout_s is None
    assert decoded(one(parameters={"timeout": 10**30})).request.timeout_s == 10_000_000


@pytest.mark.parametrize("timeout", [-1, 1.5, True, "5"])
def test_other_timeouts_are_rejected(timeout: object) -> None:
    with pytest.raises(InvalidArgument, match="a number of microseconds is needed"):
        decoded(one(parameters={"timeout": timeout}))


def test_json_beyond_the_limit_is_rejected_but_not_binary_data() -> None:
    limits = RequestLimits(max_header_bytes=200)
    header = one(binary_tensor(4000, shape=[1000]))
    assert decoded(header, bytes(4000), limits=limits).request.inputs["x"].shape == (1000,)
    with pytest.raises(RequestTooLarge, match="at most 200 are allowed: send tensors as binary data"):
        decoded(one(tensor(shape=[1000], data=[0] * 1000)), limits=limits)


# ------------------------------------------------------------------------------------------------ responses


def test_wanted_outputs_and_their_formats_are_decoded() -> None:
    outputs = [{"name": "a"}, {"name": "b", "parameters": {"binary_data": False}}]
    request, formats = decoded(one(outputs=outputs, parameters={"binary_data_output": True}, id="7"))
    assert (request.outputs, request.id) == (("a", "b"), "7")
    assert (formats.is_binary("a"), formats.is_binary("b"), formats.is_binary("c")) == (True, False, True)


@pytest.mark.parametrize("value", [1, "true", 0.5])
def test_formats_are_true_or_false(value: object) -> None:
    with pytest.raises(InvalidArgument, match="true or false is needed"):
        decoded(one(parameters={"binary_data_output": value}))


def test_a_response_in_json_has_flat_data() -> None:
    outputs = {"y": np.array([[1, 2], [3, 4]], np.int8), "b": np.array([True])}
    body, length = encode_infer_response(InferResponse("m", "3", outputs, "7"), OutputFormats())
    assert length is None
    assert json.loads(body) == {
        "model_name": "m",
        "model_version": "3",
        "id": "7",
        "outputs": [
            {"name": "y", "datatype": "INT8", "shape": [2, 2], "data": [1, 2, 3, 4]},
            {"name": "b", "datatype": "BOOL", "shape": [1], "data": [True]},
        ],
    }


def test_a_response_has_the_bytes_of_binary_outputs_after_its_json() -> None:
    columns = np.arange(6, dtype=">f4").reshape(2, 3).T
    outputs = {"y": columns, "z": np.array([7], np.int16), "half": np.array([1.5], np.float16)}
    formats = OutputFormats(True, {"z": False})
    body, length = encode_infer_response(InferResponse("m", "3", outputs), formats)
    assert length is not None
    header = json.loads(body[:length])
    assert [entry.get("parameters") for entry in header["outputs"]] == [
        {"binary_data_size": 24},
        None,
        {"binary_data_size": 2},
    ]
    assert "id" not in header
    assert body[length:] == np.array([0, 3, 1, 4, 2, 5], "<f4").tobytes() + np.array([1.5], "<f2").tobytes()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_json_does_not_have_must_be_asked_for_as_binary_data(value: float) -> None:
    response = InferResponse("m", "3", {"y": np.array([value], np.float32)})
    with pytest.raises(InvalidArgument, match="ask for binary data"):
        encode_infer_response(response, OutputFormats())
    body, length = encode_infer_response(response, OutputFormats(True))
    np.testing.assert_array_equal(np.frombuffer(body[length:], "<f4"), [np.float32(value)])


def test_an_output_of_a_dtype_without_datatype_is_an_error() -> None:
    with pytest.raises(InvalidArgument, match="complex64 has no datatype"):
        encode_infer_response(InferResponse("m", "3", {"y": np.zeros(1, np.complex64)}), OutputFormats())
