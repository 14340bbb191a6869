"""tritonclient, unchanged, against real servers: uvicorn and grpc.aio on loopback."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("grpc", reason="grpcio is not installed")
pytest.importorskip("google.protobuf", reason="protobuf is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")
pytest.importorskip("gevent", reason="tritonclient[http] is not installed")
pytest.importorskip("tritonclient.grpc.aio", reason="tritonclient[grpc] is not installed")

import gevent
import tritonclient.grpc as rpc
import tritonclient.grpc.aio as aio_rpc
import tritonclient.http as http
import tritonclient.http.aio as aio_http
from google.protobuf import json_format
from support.inference_services import TIMES, Addresses, ComputingService, ListingService, served
from tritonclient.grpc.model_config_pb2 import ModelConfig
from tritonclient.utils import InferenceServerException

from nnfmq.hal.errors import MissedDeadlinePersistent, ResourceExhaustedTransient
from nnfmq.serving.inference_protocol.http import InferenceApp
from nnfmq.serving.inference_protocol.tensors import RequestLimits

DTYPES = (
    "bool",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
)
NAMES = ("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64")
VALUES = np.array([[1, 2.5], [0, 100]], "float32")


@pytest.fixture
def service() -> ListingService:
    return ListingService()


@pytest.fixture
def addresses(service: ListingService) -> Iterator[Addresses]:
    with served(InferenceApp(service), service) as found:
        yield found


@pytest.fixture(autouse=True)
def _no_event_loop_of_gevent_is_left() -> Iterator[None]:
    yield
    gevent.get_hub().destroy(destroy_loop=True)


def http_input(array: Any, datatype: str, *, binary: bool, name: str = "x") -> Any:
    tensor = http.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array, binary_data=binary)
    return tensor


def rpc_input(array: Any, datatype: str, name: str = "x") -> Any:
    tensor = rpc.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return tensor


# ------------------------------------------------------------------------------------------------ HTTP


def test_http_health_metadata_and_list_of_models(addresses: Addresses, service: ListingService) -> None:
    with http.InferenceServerClient(addresses.http) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("add")
        assert client.is_model_ready("add", "3")
        assert not client.is_model_ready("add", "4")
        assert client.get_server_metadata()["name"] == "nnfmq"
        assert client.get_model_metadata("add")["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}]
        assert [entry["name"] for entry in client.get_model_repository_index()] == ["add", "new", "broken"]
        service.ready = False
        assert not client.is_server_live()
        assert not client.is_server_ready()


def test_the_configuration_of_a_model_is_the_same_over_both_protocols(addresses: Addresses) -> None:
    """The shapes are without the rows, of which a request may have up to `max_batch_size`."""
    expected = {
        "name": "add",
        "platform": "nnfmq",
        "backend": "nnfmq",
        "max_batch_size": 8,
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": ["3"]}],
        "output": [{"name": "y", "data_type": "TYPE_UINT8", "dims": ["3"]}],
        "dynamic_batching": {"max_queue_delay_microseconds": "2000"},
    }
    with http.InferenceServerClient(addresses.http) as client:
        over_http = client.get_model_config("add")
        without_batches = client.get_model_config("echo", "3")
        with pytest.raises(InferenceServerException, match="no model 'other'"):
            client.get_model_config("other")
    with rpc.InferenceServerClient(addresses.grpc) as client:
        assert client.get_model_config("add", as_json=True) == {"config": expected}
        with pytest.raises(InferenceServerException, match="no model 'other'"):
            client.get_model_config("other")
    message = json_format.ParseDict(over_http, ModelConfig())  # as Triton has it
    assert json_format.MessageToDict(message, preserving_proto_field_name=True) == expected
    assert (without_batches["max_batch_size"], "dynamic_batching" in without_batches) == (0, False)
    assert without_batches["input"][0]["dims"] == [-1, 3]


def test_the_statistics_of_a_model_are_the_same_over_both_protocols(addresses: Addresses) -> None:
    with http.InferenceServerClient(addresses.http) as client:
        found = client.get_inference_statistics("add", "3")
        assert client.get_inference_statistics() == found
        with pytest.raises(InferenceServerException, match="no model 'other'"):
            client.get_inference_statistics("other")
    with rpc.InferenceServerClient(addresses.grpc) as client:
        message = client.get_inference_statistics("add", "3")
        with pytest.raises(InferenceServerException, match="no model 'other'"):
            client.get_inference_statistics("other")
    assert json_format.ParseDict(found, type(message)()) == message
    (row,) = found["model_stats"]
    assert (row["name"], row["version"], row["inference_count"], row["execution_count"]) == ("add", "3", 2**40, 5)
    times = {name: {"count": 10 * place, "ns": 10 * place + 1} for place, name in enumerate(TIMES, start=1)}
    none = {"count": 0, "ns": 0}
    assert row["inference_stats"] == {**times, "cache_hit": none, "cache_miss": none}


def test_a_server_without_statistics_has_no_such_endpoint() -> None:
    service = ComputingService()
    with served(InferenceApp(service), service) as addresses:
        with http.InferenceServerClient(addresses.http) as client:
            with pytest.raises(InferenceServerException, match="no statistics of its models") as raised:
                client.get_inference_statistics("add")
            assert raised.value.status() == "404"
        with rpc.InferenceServerClient(addresses.grpc) as client:
            with pytest.raises(InferenceServerException, match="no statistics of its models") as raised:
                client.get_inference_statistics("add")
            assert raised.value.status() == "StatusCode.UNIMPLEMENTED"


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize(("dtype", "datatype"), list(zip(DTYPES, NAMES, strict=True)))
def test_http_arrays_come_back_as_they_were(addresses: Addresses, dtype: str, datatype: str, binary: bool) -> None:
    array = VALUES.astype(dtype)
    with http.InferenceServerClient(addresses.http) as client:
        tensors = [http_input(array, datatype, binary=binary), http_input(array.T, datatype, binary=True, name="z")]
        outputs = [http.InferRequestedOutput(name, binary_data=binary == (name == "x")) for name in ("z", "x")]
        result = client.infer("echo", tensors, outputs=outputs, request_id="17")
    assert result.get_response()["id"] == "17"
    for name, expected in (("x", array), ("z", array.T)):
        found = result.as_numpy(name)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


def test_http_the_client_s_timeout_reaches_the_service(addresses: Addresses, service: ListingService) -> None:
    with http.InferenceServerClient(addresses.http) as client:
        client.infer("add", [http_input(VALUES, "FP32", binary=True)], timeout=2_000_000)
    assert service.requests[0].timeout_s == 2.0


def test_http_errors_have_their_status_and_text(addresses: Addresses, service: ListingService) -> None:
    service.failure = ResourceExhaustedTransient("64 requests wait already")
    with http.InferenceServerClient(addresses.http) as client:
        for model, status, words in (("fail", "429", "64 requests wait already"), ("other", "404", "no model 'other'")):
            with pytest.raises(InferenceServerException, match=words) as raised:
                client.infer(model, [http_input(VALUES, "FP32", binary=True)])
            assert raised.value.status() == status
        with pytest.raises(InferenceServerException, match="only uncompressed bodies are read"):
            client.infer("add", [http_input(VALUES, "FP32", binary=True)], request_compression_algorithm="gzip")
        strings = np.array([b"text"], np.object_)
        with pytest.raises(InferenceServerException, match="models have no strings"):
            client.infer("add", [http_input(strings, "BYTES", binary=True)])
        with pytest.raises(InferenceServerException, match="this server has no '/v2/logging'"):
            client.get_log_settings()


def test_http_with_asyncio(addresses: Addresses) -> None:
    async def run() -> Any:
        async with aio_http.InferenceServerClient(addresses.http) as client:
            assert await client.is_server_ready()
            tensors = [http_input(VALUES, "FP32", binary=True)]
            return await asyncio.gather(*(client.infer("add", tensors, request_id=str(n)) for n in range(8)))

    for number, result in enumerate(asyncio.run(run())):
        assert result.get_response()["id"] == str(number)
        np.testing.assert_array_equal(result.as_numpy("y"), VALUES + 1)


# ------------------------------------------------------------------------------------------------ gRPC


def test_grpc_health_metadata_and_list_of_models(addresses: Addresses, service: ListingService) -> None:
    with rpc.InferenceServerClient(addresses.grpc) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("add", "3")
        assert not client.is_model_ready("add", "4")
        assert client.get_server_metadata().version == "1.2.3"
        assert list(client.get_model_metadata("add").inputs[0].shape) == [-1, 3]
        assert [entry.name for entry in client.get_model_repository_index().models] == ["add", "new", "broken"]
        service.ready = False
        assert not client.is_server_ready()


@pytest.mark.parametrize(("dtype", "datatype"), list(zip(DTYPES, NAMES, strict=True)))
def test_grpc_arrays_come_back_as_they_were(addresses: Addresses, dtype: str, datatype: str) -> None:
    array = VALUES.astype(dtype)
    with rpc.InferenceServerClient(addresses.grpc) as client:
        tensors = [rpc_input(array, datatype), rpc_input(array.T, datatype, "z")]
        outputs = [rpc.InferRequestedOutput("z"), rpc.InferRequestedOutput("x")]
        result = client.infer("echo", tensors, outputs=outputs, request_id="17")
    assert result.get_response().id == "17"
    for name, expected in (("x", array), ("z", array.T)):
        found = result.as_numpy(name)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


def test_grpc_the_sooner_of_deadline_and_timeout_reaches_the_service(
    addresses: Addresses, service: ListingService
) -> None:
    with rpc.InferenceServerClient(addresses.grpc) as client:
        tensors = [rpc_input(VALUES, "FP32")]
        client.infer("add", tensors)
        client.infer("add", tensors, timeout=2_000_000, client_timeout=200)
        client.infer("add", tensors, client_timeout=200)
    none, timeout, deadline = (request.timeout_s for request in service.requests)
    assert (none, timeout) == (None, 2.0)
    assert deadline is not None
    assert 100 < deadline < 202  # gRPC rounds what it sends up


def test_grpc_errors_have_their_code_and_text(addresses: Addresses, service: ListingService) -> None:
    service.failure = MissedDeadlinePersistent("1 ms is too little")
    with rpc.InferenceServerClient(addresses.grpc) as client:
        for model, code, words in (
            ("fail", "StatusCode.DEADLINE_EXCEEDED", "1 ms is too little"),
            ("other", "StatusCode.NOT_FOUND", "no model 'other'"),
        ):
            with pytest.raises(InferenceServerException, match=words) as raised:
                client.infer(model, [rpc_input(VALUES, "FP32")])
            assert raised.value.status() == code
        with pytest.raises(InferenceServerException, match="models have no strings"):
            client.infer("add", [rpc_input(np.array([b"text"], np.object_), "BYTES")])
        with pytest.raises(InferenceServerException) as raised:
            client.get_log_settings()
        assert raised.value.status() == "StatusCode.UNIMPLEMENTED"


def test_grpc_stream(addresses: Addresses) -> None:
    results = queue.SimpleQueue[tuple[Any, Any]]()
    with rpc.InferenceServerClient(addresses.grpc) as client:
        client.start_stream(lambda result, error: results.put((result, error)))
        for model in ("add", "other", "add"):
            client.async_stream_infer(model, [rpc_input(VALUES, "FP32")])
        found = [results.get(timeout=30) for _ in range(3)]
        client.stop_stream()
    assert [None if error is None else error.message() for _, error in found] == [
        None,
        "there is no model 'other'",
        None,
    ]
    np.testing.assert_array_equal(found[2][0].as_numpy("y"), VALUES + 1)


def test_grpc_with_asyncio(addresses: Addresses) -> None:
    async def run() -> Any:
        async with aio_rpc.InferenceServerClient(addresses.grpc) as client:
            assert await client.is_server_ready()
            tensors = [rpc_input(VALUES, "FP32")]
            return await asyncio.gather(*(client.infer("add", tensors, request_id=str(n)) for n in range(8)))

    for number, result in enumerate(asyncio.run(run())):
        assert result.get_response().id == str(number)
        np.testing.assert_array_equal(result.as_numpy("y"), VALUES + 1)


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_grpc_messages_beyond_the_limit_are_rejected(service: ListingService, compression: str | None) -> None:
    """A message counts as long as it is without compression."""
    limits = RequestLimits(max_body_bytes=100_000)
    with (
        served(InferenceApp(service), service, limits) as addresses,
        rpc.InferenceServerClient(addresses.grpc) as client,
    ):
        with pytest.raises(InferenceServerException) as raised:
            client.infer("add", [rpc_input(np.zeros(50_000, "f4"), "FP32")], compression_algorithm=compression)
        assert raised.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
        client.infer("add", [rpc_input(np.zeros(20_000, "f4"), "FP32")], compression_algorithm=compression)
    assert [request.inputs["x"].size for request in service.requests] == [20_000]
