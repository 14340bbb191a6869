"""InferenceApp: the Open Inference Protocol over HTTP, as an ASGI application for any server that runs one.

It needs no package beyond the base install; a server does: `python -m uvicorn module:app`, or Ray Serve's proxies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from typing import Any, TypeAlias

import msgspec

from nnfmq.hal.errors import DeviceUnavailable, InvalidArgument
from nnfmq.serving.inference_protocol.asgi_messages import (
    HttpReply,
    Receive,
    Scope,
    Send,
    error_reply,
    header,
    json_reply,
    read_body,
)
from nnfmq.serving.inference_protocol.datatypes import datatype_of
from nnfmq.serving.inference_protocol.model_listing import listed_models
from nnfmq.serving.inference_protocol.request_errors import (
    ClientLeft,
    CompressedBody,
    EndpointMissing,
    MethodNotAllowed,
    quoted,
)
from nnfmq.serving.inference_protocol.rest_codec import RestRequest, decode_infer_request, encode_infer_response
from nnfmq.serving.inference_protocol.rest_routes import RestEndpoint, Route, find_route
from nnfmq.serving.inference_protocol.wire_tensors import RequestLimits
from nnfmq.serving.inference_service import InferenceModelMetadata, InferenceService, InferenceTensorMetadata

__all__ = ["InferenceApp", "ServiceOpener"]

ServiceOpener: TypeAlias = Callable[[], AbstractAsyncContextManager[InferenceService]]

_HEADER_LENGTH = b"inference-header-content-length"
_EXTENSION = "binary_tensor_data"
_LARGE_JSON_BYTES = 1 << 18  # takes 0.7 to 2.6 ms, and a thread for it 0.2 ms


class _IndexRequest(msgspec.Struct):
    ready: bool = False


class InferenceApp:
    """An ASGI application over an InferenceService.

    Pass the service, or with `opened_by` a function that opens it: the server then opens it in each of its processes
    when it starts, on the event loop that serves requests, and closes it when it ends.
    """

    def __init__(self, service: InferenceService | None = None, *, limits: RequestLimits | None = None) -> None:
        self._service = service
        self._limits = limits or RequestLimits()
        self._open: ServiceOpener | None = None
        self._large_json = asyncio.Lock()  # one at a time: parsing takes up to thirty times as much memory as the text

    @classmethod
    def opened_by(cls, opener: ServiceOpener, *, limits: RequestLimits | None = None) -> InferenceApp:
        """Return an application whose service is opened at the start of the server."""
        app = cls(limits=limits)
        app._open = opener
        return app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or the lifetime of the server. Other protocols, such as WebSocket, are refused."""
        if scope["type"] == "http":
            await self._serve_request(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._serve_lifespan(receive, send)
        else:
            await send({"type": "websocket.close", "code": 1003})

    async def _serve_lifespan(self, receive: Receive, send: Send) -> None:
        async with AsyncExitStack() as opened:
            await receive()  # lifespan.startup
            if self._open is not None:
                try:
                    self._service = await opened.enter_async_context(self._open())
                except Exception as error:
                    await send({"type": "lifespan.startup.failed", "message": str(error)})
                    raise
            await send({"type": "lifespan.startup.complete"})
            await receive()  # lifespan.shutdown
        await send({"type": "lifespan.shutdown.complete"})

    async def _serve_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            reply = await self._reply(scope, receive)
        except ClientLeft:
            return
        except Exception as error:  # noqa: BLE001  (becomes the response; a defect is logged)
            reply = error_reply(error)
        await reply.send(send)

    async def _reply(self, scope: Scope, receive: Receive) -> HttpReply:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        route = find_route(path)
        if route is None:
            raise EndpointMissing(f"this server has no {quoted(path)}")
        allowed = route.endpoint.method
        if scope["method"] != allowed:
            raise MethodNotAllowed(f"{quoted(path)} takes {allowed} only", allowed)
        if self._service is None:
            raise DeviceUnavailable("the server is starting")
        if allowed == "GET":
            return await _get(self._service, route)
        encoding = header(scope, b"content-encoding") or "identity"
        if encoding != "identity":
            raise CompressedBody(f"the body's encoding is {quoted(encoding)}; only uncompressed bodies are read")
        body = await read_body(scope, receive, self._limits.max_body_bytes)
        if route.endpoint is RestEndpoint.REPOSITORY_INDEX:
            return await _index(self._service, body)
        return await self._infer(self._service, route, body, _header_length(scope))

    async def _infer(
        self, service: InferenceService, route: Route, body: bytes, header_length: int | None
    ) -> HttpReply:
        request, formats = await self._decoded(route, body, header_length)
        encoded = encode_infer_response(await service.infer(request), formats)
        if encoded.header_length is None:
            return HttpReply(200, encoded.body)
        length = str(encoded.header_length).encode()
        return HttpReply(200, encoded.body, ((b"content-type", b"application/octet-stream"), (_HEADER_LENGTH, length)))

    async def _decoded(self, route: Route, body: bytes, header_length: int | None) -> RestRequest:
        """Return the decoded body; other requests are served while a large one is decoded."""
        decode = partial(
            decode_infer_request, body, header_length, model=route.model, version=route.version, limits=self._limits
        )
        if (len(body) if header_length is None else header_length) < _LARGE_JSON_BYTES:
            return decode()
        async with self._large_json:
            return await asyncio.to_thread(decode)


def _header_length(scope: Scope) -> int | None:
    text = header(scope, _HEADER_LENGTH)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise InvalidArgument(f"Inference-Header-Content-Length is {quoted(text)}; a number of bytes is needed")
    return int(text)


async def _get(service: InferenceService, route: Route) -> HttpReply:
    """Return the reply to a request without a body."""
    if route.endpoint is RestEndpoint.SERVER_LIVE:
        live = await service.is_live()
        return json_reply({"live": live}, 200 if live else 503)
    if route.endpoint is RestEndpoint.SERVER_READY:
        ready = await service.is_ready()
        return json_reply({"ready": ready}, 200 if ready else 503)
    if route.endpoint is RestEndpoint.MODEL_READY:
        ready = await service.is_model_ready(route.model, route.version)
        return json_reply({"name": route.model, "ready": ready}, 200 if ready else 503)
    if route.endpoint is RestEndpoint.MODEL_METADATA:
        return json_reply(_model_json(await service.model_metadata(route.model, route.version)))
    server = await service.server_metadata()
    extensions = dict.fromkeys([*server.extensions, _EXTENSION])
    return json_reply({"name": server.name, "version": server.version, "extensions": list(extensions)})


def _model_json(model: InferenceModelMetadata) -> dict[str, Any]:
    return {
        "name": model.name,
        "versions": model.versions,
        "platform": model.platform,
        "inputs": [_tensor_json(tensor) for tensor in model.inputs],
        "outputs": [_tensor_json(tensor) for tensor in model.outputs],
    }


def _tensor_json(tensor: InferenceTensorMetadata) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": tensor.name, "datatype": datatype_of(tensor.dtype), "shape": tensor.shape}
    return {**entry, "parameters": tensor.parameters} if tensor.parameters else entry


async def _index(service: InferenceService, body: bytes) -> HttpReply:
    try:
        wanted = msgspec.json.decode(body, type=_IndexRequest) if body.strip() else _IndexRequest()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"the body is not a repository index request in JSON: {error}") from error
    return json_reply(await listed_models(service, ready=wanted.ready))
