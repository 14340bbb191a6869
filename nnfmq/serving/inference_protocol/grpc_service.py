"""The protocol's gRPC service, for a server of grpc.aio and for Ray Serve's gRPC proxies.

Requests arrive as bytes: a proxy of Ray then passes them on unparsed, and tensors are not copied out of messages.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from typing import Any

import grpc

from nnfmq.serving.inference_protocol.grpc_codec import (
    decode_infer_message,
    encode_infer_message,
    encode_model_index,
    encode_model_metadata,
    encode_server_metadata,
    parsed_message,
)
from nnfmq.serving.inference_protocol.grpc_messages import PACKAGE, message_classes
from nnfmq.serving.inference_protocol.model_listing import listed_models
from nnfmq.serving.inference_protocol.status_mapping import error_text, protocol_status
from nnfmq.serving.inference_protocol.wire_tensors import RequestLimits
from nnfmq.serving.inference_service import InferenceService

__all__ = ["SERVICE", "GrpcInferenceService", "add_to_server", "server_options"]

SERVICE = f"{PACKAGE}.GRPCInferenceService"
_LONGEST_S = 10_000_000
"""gRPC gives a call without a deadline one that is centuries away."""
_UNARY = (
    "ServerLive",
    "ServerReady",
    "ModelReady",
    "ServerMetadata",
    "ModelMetadata",
    "ModelInfer",
    "RepositoryIndex",
)


class GrpcInferenceService:
    """The methods of the gRPC service over an InferenceService.

    Each takes the bytes of a request, and returns a message with `SerializeToString`. If a request fails, the context
    gets the code and the text, and the message is empty. The parameter of the context has the name that Ray Serve
    looks for, so that a deployment can inherit the methods or call them.
    """

    def __init__(self, service: InferenceService, *, limits: RequestLimits | None = None) -> None:
        self._service = service
        self._limits = limits or RequestLimits()

    async def ServerLive(self, request: bytes, grpc_context: Any) -> Any:
        """Return whether the server runs."""
        return await _response_or_code(grpc_context, "ServerLiveResponse", self._server_live())

    async def ServerReady(self, request: bytes, grpc_context: Any) -> Any:
        """Return whether the server can serve requests."""
        return await _response_or_code(grpc_context, "ServerReadyResponse", self._server_ready())

    async def ModelReady(self, request: bytes, grpc_context: Any) -> Any:
        """Return whether a model is served."""
        return await _response_or_code(grpc_context, "ModelReadyResponse", self._model_ready(request))

    async def ServerMetadata(self, request: bytes, grpc_context: Any) -> Any:
        """Return the server's name, release and extensions."""
        return await _response_or_code(grpc_context, "ServerMetadataResponse", self._server_metadata())

    async def ModelMetadata(self, request: bytes, grpc_context: Any) -> Any:
        """Return a model's versions, inputs and outputs."""
        return await _response_or_code(grpc_context, "ModelMetadataResponse", self._model_metadata(request))

    async def ModelInfer(self, request: bytes, grpc_context: Any) -> Any:
        """Execute a request, once."""
        return await _response_or_code(
            grpc_context, "ModelInferResponse", self._infer(request, _time_left_s(grpc_context))
        )

    async def RepositoryIndex(self, request: bytes, grpc_context: Any) -> Any:
        """Return the models of the repository."""
        return await _response_or_code(grpc_context, "RepositoryIndexResponse", self._repository_index(request))

    async def ModelStreamInfer(self, request: AsyncIterator[bytes], grpc_context: Any) -> AsyncIterator[Any]:
        """Execute the requests of a stream one after the other; a failed one has its text in its response."""
        kind = message_classes()["ModelStreamInferResponse"]
        async for data in request:
            try:
                encoded = await self._infer(data, _time_left_s(grpc_context))
            except Exception as error:  # noqa: BLE001  (becomes the response; a defect is logged)
                yield kind(error_message=error_text(error))
            else:
                yield kind(infer_response=message_classes()["ModelInferResponse"].FromString(encoded.data))

    async def _server_live(self) -> Any:
        return message_classes()["ServerLiveResponse"](live=await self._service.is_live())

    async def _server_ready(self) -> Any:
        return message_classes()["ServerReadyResponse"](ready=await self._service.is_ready())

    async def _model_ready(self, data: bytes) -> Any:
        wanted = self._parsed("ModelReadyRequest", data)
        ready = await self._service.is_model_ready(wanted.name, wanted.version)
        return message_classes()["ModelReadyResponse"](ready=ready)

    async def _server_metadata(self) -> Any:
        return encode_server_metadata(await self._service.server_metadata())

    async def _model_metadata(self, data: bytes) -> Any:
        wanted = self._parsed("ModelMetadataRequest", data)
        return encode_model_metadata(await self._service.model_metadata(wanted.name, wanted.version))

    async def _infer(self, data: bytes, time_left_s: float | None) -> Any:
        request = decode_infer_message(data, self._limits, time_left_s)
        return encode_infer_message(await self._service.infer(request))

    async def _repository_index(self, data: bytes) -> Any:
        wanted = self._parsed("RepositoryIndexRequest", data)
        return encode_model_index(await listed_models(self._service, ready=wanted.ready))

    def _parsed(self, name: str, data: bytes) -> Any:
        return parsed_message(name, data, self._limits.max_header_bytes)


def _time_left_s(context: Any) -> float | None:
    """Return the time that the client still waits; None if it set no deadline. Ray's contexts do not know it."""
    time_remaining = getattr(context, "time_remaining", None)
    left: float | None = None if time_remaining is None else time_remaining()
    return left if left is not None and left < _LONGEST_S else None


async def _response_or_code(context: Any, name: str, response: Awaitable[Any]) -> Any:
    """Return `response`; if it fails, an empty message of class `name` after the context has got the error's code."""
    try:
        return await response
    except Exception as error:  # noqa: BLE001  (becomes the status; a defect is logged)
        # A raised error would be logged by gRPC, and by Ray, with its traceback for each invalid request.
        context.set_code(grpc.StatusCode[protocol_status(error).grpc])
        context.set_details(error_text(error))
        return message_classes()[name]()


def add_to_server(servicer: Any, server: Any) -> None:
    """Register the service at a server of grpc.aio.

    Ray Serve imports this function by its dotted name, from `gRPCOptions.grpc_servicer_functions`, and replaces the
    servicer's methods by its own, which call those of the same names of the deployment.
    """
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(getattr(servicer, name), response_serializer=_serialized)
        for name in _UNARY
    }
    handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
        servicer.ModelStreamInfer, response_serializer=_serialized
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


def _serialized(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def server_options(limits: RequestLimits | None = None) -> list[tuple[str, int]]:
    """Return the options of a server of grpc.aio for these limits: gRPC's own limit of a message is 4 MiB."""
    return [
        ("grpc.max_receive_message_length", (limits or RequestLimits()).max_body_bytes),
        ("grpc.max_send_message_length", -1),
    ]
