"""Messages of gRPC: the bytes are written here by hand or by tritonclient's generated classes, never by the codec."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("google.protobuf", reason="protobuf is not installed")

from nnfmq.hal.errors import InvalidArgument
from nnfmq.serving.inference_protocol.errors import RequestTooLarge
from nnfmq.serving.inference_protocol.grpc import (
    decode_infer_message,
    encode_infer_message,
    message_classes,
    parsed_message,
)
from nnfmq.serving.inference_protocol.tensors import RequestLimits
from nnfmq.serving.inference_service import InferResponse


def message(*inputs: Any, raw: tuple[bytes, ...] = (), **fields: Any) -> bytes:
    data: bytes = message_classes()["ModelInferRequest"](
        inputs=inputs, raw_input_contents=raw, **fields
    ).SerializeToString()
    return data


def tensor(datatype: str, shape: list[int], name: str = "x", **fields: Any) -> Any:
    return message_classes()["InferInputTensor"](name=name, datatype=datatype, shape=shape, **fields)


def test_the_messages_are_those_of_tritons_client() -> None:
    triton = pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed").service_pb2
    flattened = {
        "InferInputTensor": triton.ModelInferRequest.InferInputTensor,
        "InferRequestedOutputTensor": triton.ModelInferRequest.InferRequestedOutputTensor,
        "InferOutputTensor": triton.ModelInferResponse.InferOutputTensor,
        "TensorMetadata": triton.ModelMetadataResponse.TensorMetadata,
        "ModelIndex": triton.RepositoryIndexResponse.ModelIndex,
    }
    for name, kind in message_classes().items():
        of_triton = flattened.get(name) or getattr(triton, name, None) or getattr(triton.model__config__pb2, name)
        ours, theirs = described(kind.DESCRIPTOR), described(of_triton.DESCRIPTOR)
        outside_of_oneof = [(*row[:4], None, *row[5:]) for row in theirs]
        assert ours == theirs or (name in PARTIAL and all(row in outside_of_oneof for row in ours)), name
    kinds = message_classes()["ModelInput"].DESCRIPTOR.fields_by_name["data_type"].enum_type
    assert [(each.name, each.number) for each in kinds.values] == list(triton.model__config__pb2.DataType.items())


PARTIAL = ("ModelConfig", "ModelInput", "ModelOutput", "ModelDynamicBatching", "ModelStatistics")
"""The messages of which this server has some fields only, none of them in a oneof."""


def described(descriptor: Any) -> list[tuple[Any, ...]]:
    """Return what decides the bytes of a message."""
    return [
        (
            field.number,
            field.name,
            field.type,
            field.is_repeated,
            field.containing_oneof.name if field.containing_oneof else None,
            field.message_type.name if field.message_type else None,
            described(field.message_type) if field.message_type and field.message_type.GetOptions().map_entry else None,
        )
        for field in descriptor.fields
    ]


def test_raw_contents_become_read_only_views_of_the_message() -> None:
    values = np.arange(3, dtype="<f4")
    data = message(tensor("FP32", [3]), tensor("BOOL", [1], "z"), raw=(values.tobytes(), b"\1"), model_name="m", id="7")
    request = decode_infer_message(data)
    assert (request.model, request.version, request.id, request.outputs) == ("m", "", "7", ())
    np.testing.assert_array_equal(request.inputs["x"], values)
    assert request.inputs["z"].tolist() == [True]
    for array in request.inputs.values():
        assert not array.flags.writeable
        assert np.shares_memory(array, np.frombuffer(data, np.uint8))


@pytest.mark.parametrize(
    ("datatype", "dtype", "field", "values"),
    [
        ("BOOL", "bool", "bool_contents", [True, False]),
        ("UINT8", "uint8", "uint_contents", [0, 255]),
        ("UINT16", "uint16", "uint_contents", [0, 65535]),
        ("UINT32", "uint32", "uint_contents", [0, 2**32 - 1]),
        ("UINT64", "uint64", "uint64_contents", [0, 2**64 - 1]),
        ("INT8", "int8", "int_contents", [-128, 127]),
        ("INT16", "int16", "int_contents", [-(2**15), 2**15 - 1]),
        ("INT32", "int32", "int_contents", [-(2**31), 2**31 - 1]),
        ("INT64", "int64", "int64_contents", [-(2**63), 2**63 - 1]),
        ("FP32", "float32", "fp32_contents", [0.5, float("inf")]),
        ("FP64", "float64", "fp64_contents", [0.1, -1e300]),
    ],
)
def test_typed_contents_have_the_field_of_their_datatype(
    datatype: str, dtype: str, field: str, values: list[Any]
) -> None:
    array = decode_infer_message(message(tensor(datatype, [1, 2], contents={field: values}))).inputs["x"]
    assert (array.dtype, array.shape) == (np.dtype(dtype), (1, 2))
    assert array.tolist() == [values]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (tensor("UINT8", [1], contents={"uint_contents": [256]}), "a value outside of 0 to 255"),
        (tensor("INT16", [1], contents={"int_contents": [-32769]}), "a value outside of -32768 to 32767"),
        (tensor("INT32", [2], contents={"int_contents": [1]}), "2 values in int_contents are needed"),
        (tensor("INT32", [1], contents={"int64_contents": [1]}), "1 values in int_contents are needed"),
        (tensor("INT32", [1], contents={"int_contents": [1], "fp32_contents": [1]}), "1 values in int_contents"),
        (tensor("INT32", [0], contents={"int_contents": [1]}), "0 values in int_contents are needed"),
        (tensor("INT32", [1]), "1 values in int_contents are needed"),
        (tensor("FP16", [1], contents={"fp32_contents": [1]}), "FP16, which only raw_input_contents can have"),
        (tensor("BYTES", [1], contents={"bytes_contents": [b"a"]}), "datatype 'BYTES' is not supported"),
        (tensor("FP32", [-1]), "a dimension of -1"),
        (tensor("FP32", [2**31]), "a dimension of 2147483648"),
        (tensor("FP32", [2**30, 2**30]), "more than 2147483647 elements"),
        (tensor("FP32", [2**30, 2**30, 0]), "more than 2147483647 elements"),
        (tensor("FP32", [1] * 33), "33 dimensions; at most 32"),
    ],
)
def test_typed_contents_that_do_not_fit_are_rejected(given: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        decode_infer_message(message(given))


def test_an_empty_tensor_needs_no_contents() -> None:
    assert decode_infer_message(message(tensor("INT8", [0, 4]))).inputs["x"].shape == (0, 4)
    assert decode_infer_message(message(tensor("INT8", [0, 4]), raw=(b"",))).inputs["x"].shape == (0, 4)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (message(tensor("FP32", [1]), raw=(bytes(4), bytes(4))), "1 inputs and 2 raw_input_contents"),
        (message(raw=(b"",)), "0 inputs and 1 raw_input_contents"),
        (message(tensor("FP32", [1]), raw=(bytes(3),)), "has 3 bytes; 4 are needed"),
        (message(tensor("FP32", [1], contents={"fp32_contents": [1]}), raw=(bytes(4),)), "`contents` beside"),
        (message(tensor("FP32", [1], contents={}), raw=(bytes(4),)), "`contents` beside"),
        (message(tensor("FP32", [0]), tensor("FP32", [0])), "input 'x' is given twice"),
        (message(outputs=[{"name": "y"}, {"name": "y"}]), "output 'y' is given twice"),
        (message(*[tensor("FP32", [0], str(n)) for n in range(1025)]), "1025 inputs; at most 1024"),
        (message(outputs=[{"name": str(n)} for n in range(1025)]), "1025 outputs; at most 1024"),
        (message(raw=(b"",) * 5000), "more than 4096 fields"),
        (message(model_name="m")[:-1], "ends within the field"),
        (b"\x0a\x01\xff", "not a message ModelInferRequest"),  # a name that is not UTF-8
    ],
)
def test_messages_that_contradict_themselves_are_rejected(data: bytes, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        decode_infer_message(data)


def test_parameters_of_other_extensions_are_rejected_wherever_they_are() -> None:
    sequence = {"sequence_id": message_classes()["InferParameter"](int64_param=5)}
    for data in (
        message(parameters=sequence),
        message(tensor("FP32", [0], parameters=sequence)),
        message(outputs=[message_classes()["InferRequestedOutputTensor"](name="y", parameters=sequence)]),
    ):
        with pytest.raises(InvalidArgument, match="parameter 'sequence_id': this server has no sequences"):
            decode_infer_message(data)


@pytest.mark.parametrize(
    ("timeout_us", "left_s", "expected"),
    [
        (None, None, None),
        (1500, None, 0.0015),
        (None, 2.0, 2.0),
        (1500, 2.0, 0.0015),
        (3_000_000, 2.0, 2.0),
        (0, 2.0, 2.0),
    ],
)
def test_the_sooner_of_timeout_and_deadline_counts(
    timeout_us: int | None, left_s: float | None, expected: float | None
) -> None:
    kind = message_classes()["InferParameter"]
    parameters = {} if timeout_us is None else {"timeout": kind(int64_param=timeout_us), "empty": kind()}
    assert decode_infer_message(message(parameters=parameters), time_left_s=left_s).timeout_s == expected


def test_messages_beyond_the_limit_are_rejected_but_not_raw_contents() -> None:
    limits = RequestLimits(max_header_bytes=100)
    assert decode_infer_message(message(tensor("FP32", [1000]), raw=(bytes(4000),)), limits).inputs["x"].size == 1000
    with pytest.raises(RequestTooLarge, match="at most 100 are allowed: send tensors as raw contents"):
        decode_infer_message(message(tensor("FP32", [1000], contents={"fp32_contents": [0] * 1000})), limits)
    with pytest.raises(RequestTooLarge):
        parsed_message("ModelReadyRequest", bytes(101), 100)


def test_a_response_has_raw_contents() -> None:
    outputs = {"y": np.arange(200, dtype=">i4").reshape(2, 100).T, "z": np.array([True]), "e": np.zeros((0, 2), "f4")}
    data = encode_infer_message(InferResponse("m", "3", outputs, "7")).SerializeToString()
    response = message_classes()["ModelInferResponse"].FromString(data)
    assert (response.model_name, response.model_version, response.id) == ("m", "3", "7")
    shapes = [(entry.name, entry.datatype, list(entry.shape)) for entry in response.outputs]
    assert shapes == [("y", "INT32", [100, 2]), ("z", "BOOL", [1]), ("e", "FP32", [0, 2])]
    first, second, third = response.raw_output_contents
    np.testing.assert_array_equal(np.frombuffer(first, "<i4"), outputs["y"].ravel())
    assert (second, third) == (b"\1", b"")


def test_an_output_of_a_dtype_without_datatype_is_an_error() -> None:
    with pytest.raises(InvalidArgument, match="complex64 has no datatype"):
        encode_infer_message(InferResponse("m", "3", {"y": np.zeros(1, np.complex64)}))
