"""GrpcInferenceService with a context as Ray Serve passes it, and its registration as Ray does it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

pytest.importorskip("grpc", reason="grpcio is not installed")
pytest.importorskip("google.protobuf", reason="protobuf is not installed")

import grpc
from support.inference_services import ComputingService, ListingService

from nnfmq.hal.errors import MissedDeadlineTransient
from nnfmq.serving.inference_protocol.grpc import (
    GrpcInferenceService,
    add_to_server,
    message_classes,
    server_options,
)
from nnfmq.serving.inference_protocol.tensors import RequestLimits

INPUT = {"name": "x", "datatype": "INT32", "shape": [2]}
RAW = [np.array([1, 2], "<i4").tobytes()]


class Context:
    """A context without the time that remains, as Ray's are."""

    code: Any = None
    details = ""

    def set_code(self, code: Any) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details


class ContextWithDeadline(Context):
    def __init__(self, left_s: float) -> None:
        self.left_s = left_s

    def time_remaining(self) -> float:
        return self.left_s


@pytest.fixture
def service() -> ListingService:
    return ListingService()


@pytest.fixture
def context() -> Context:
    return Context()


def infer_request(**fields: Any) -> bytes:
    data: bytes = message_classes()["ModelInferRequest"](
        **{"model_name": "add", "inputs": [INPUT], "raw_input_contents": RAW, **fields}
    ).SerializeToString()
    return data


def call(service: Any, name: str, context: Any, data: bytes = b"", limits: RequestLimits | None = None) -> Any:
    """Return the response that a client would parse."""
    method = getattr(GrpcInferenceService(service, limits=limits), name)
    serialized = asyncio.run(method(data, grpc_context=context)).SerializeToString()
    return message_classes()[f"{name}Response"].FromString(serialized)


def request(name: str, /, **fields: Any) -> bytes:
    data: bytes = message_classes()[f"{name}Request"](**fields).SerializeToString()
    return data


def test_health(service: ListingService, context: Context) -> None:
    for ready in (True, False):
        service.ready = ready
        assert call(service, "ServerLive", context).live is ready
        assert call(service, "ServerReady", context).ready is ready
        assert call(service, "ModelReady", context, request("ModelReady", name="add", version="3")).ready is ready
        assert not call(service, "ModelReady", context, request("ModelReady", name="add", version="4")).ready
    assert context.code is None


def test_metadata(service: ListingService, context: Context) -> None:
    server = call(service, "ServerMetadata", context)
    assert (server.name, server.version, list(server.extensions)) == ("nnfmq", "1.2.3", ["statistics"])
    model = call(service, "ModelMetadata", context, request("ModelMetadata", name="add"))
    assert (model.name, list(model.versions), model.platform) == ("add", ["3"], "nnfmq")
    tensors = [(tensor.name, tensor.datatype, list(tensor.shape)) for tensor in (*model.inputs, *model.outputs)]
    assert tensors == [("x", "FP32", [-1, 3]), ("y", "UINT8", [-1, 3])]


def test_an_inference(service: ListingService, context: Context) -> None:
    response = call(service, "ModelInfer", context, infer_request(id="9"))
    assert (response.id, response.model_version, context.code) == ("9", "3", None)
    assert response.raw_output_contents == [np.array([2, 3], "<i4").tobytes()]
    assert service.requests[0].timeout_s is None


@pytest.mark.parametrize(("left_s", "expected"), [(1.5, 1.5), (9.2e9, None)])
def test_the_deadline_of_a_call_is_the_request_s(
    service: ListingService, left_s: float, expected: float | None
) -> None:
    call(service, "ModelInfer", ContextWithDeadline(left_s), infer_request())
    assert service.requests[0].timeout_s == expected


def test_the_list_of_models(service: ListingService, context: Context) -> None:
    models = call(service, "RepositoryIndex", context).models
    assert [(model.name, model.state, model.reason) for model in models] == [
        ("add", "READY", ""),
        ("new", "LOADING", ""),
        ("broken", "UNAVAILABLE", "no operator 12"),
    ]
    ready = call(service, "RepositoryIndex", context, request("RepositoryIndex", ready=True)).models
    assert [model.name for model in ready] == ["add"]
    assert not call(ComputingService(), "RepositoryIndex", context).models
    assert (context.code, context.details) == (grpc.StatusCode.UNIMPLEMENTED, "this server cannot list its models")


@pytest.mark.parametrize("name", ["ModelReady", "ModelMetadata", "ModelInfer", "RepositoryIndex"])
def test_other_bytes_are_an_invalid_argument(service: ListingService, context: Context, name: str) -> None:
    call(service, name, context, b"\x0a\xff")
    assert context.code == grpc.StatusCode.INVALID_ARGUMENT


def test_large_messages_are_rejected(service: ListingService, context: Context) -> None:
    call(service, "ModelReady", context, bytes(11), RequestLimits(max_header_bytes=10))
    assert context.code == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_an_error_becomes_a_code(service: ListingService, context: Context) -> None:
    service.failure = MissedDeadlineTransient("the request waited too long")
    response = call(service, "ModelInfer", context, infer_request(model_name="fail"))
    assert response == message_classes()["ModelInferResponse"]()
    assert (context.code, context.details) == (grpc.StatusCode.DEADLINE_EXCEEDED, "the request waited too long")


def test_a_cancelled_call_is_cancelled_in_the_service(service: ListingService, context: Context) -> None:
    service.failure = asyncio.CancelledError()
    with pytest.raises(asyncio.CancelledError):
        call(service, "ModelInfer", context, infer_request(model_name="fail"))


def test_a_stream_goes_on_after_an_error(service: ListingService, context: Context) -> None:
    async def requests() -> AsyncIterator[bytes]:
        for name in ("add", "other", "add"):
            yield infer_request(model_name=name, id=name)

    async def responses() -> list[Any]:
        return [r async for r in GrpcInferenceService(service).ModelStreamInfer(requests(), grpc_context=context)]

    found = [(response.error_message, response.infer_response.id) for response in asyncio.run(responses())]
    assert found == [("", "add"), ("there is no model 'other'", ""), ("", "add")]


def test_registration_needs_no_method_of_the_servicer() -> None:
    """Ray passes a Mock, and replaces the methods of the handler that it gets."""
    server = Mock()
    add_to_server(Mock(), server)
    (handlers,) = server.add_generic_rpc_handlers.call_args.args
    names = {f"/inference.GRPCInferenceService/{name}" for name in vars(GrpcInferenceService) if name[0].isupper()}
    assert set(handlers[0]._method_handlers) == names
    assert all(handler.request_deserializer is None for handler in handlers[0]._method_handlers.values())


def test_the_options_of_a_server_are_those_of_the_limits() -> None:
    assert dict(server_options(RequestLimits(max_body_bytes=77, max_calls=5))) == {
        "grpc.max_concurrent_streams": 5,
        "grpc.max_connection_idle_ms": 300_000,
        "grpc.server_handshake_timeout_ms": 10_000,
        "grpc.max_receive_message_length": 77,
        "grpc.max_send_message_length": -1,
        "grpc.so_reuseport": 0,
    }


@pytest.mark.parametrize(("calls", "total", "message"), [(64, 1 << 30, 16 << 20), (4, 1 << 30, 256 << 20)])
def test_the_largest_messages_of_all_calls_fit_into_the_memory_of_all_requests(
    calls: int, total: int, message: int
) -> None:
    limits = RequestLimits(max_total_bytes=total, max_calls=calls)
    assert dict(server_options(limits))["grpc.max_receive_message_length"] == message
    assert message * calls <= total
