"""InferenceApp: the Open Inference Protocol over HTTP, as an ASGI application for any server that runs one.

It needs no package beyond the base install; a server does: `python -m uvicorn module:app`, or Ray Serve's proxies.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from enum import Enum
from functools import cache, partial
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta, Struct

from nnfmq.hal.errors import DeviceUnavailable, InvalidArgument
from nnfmq.serving.inference_protocol.access import BearerTokens
from nnfmq.serving.inference_protocol.errors import (
    ClientLeft,
    CompressedBody,
    EndpointMissing,
    MethodNotAllowed,
    RequestTooLarge,
    ServerOverloaded,
    Unauthenticated,
    UploadTooSlow,
    error_text,
    listed_models,
    protocol_status,
    quoted,
)
from nnfmq.serving.inference_protocol.model_details import listed_statistics, model_configuration
from nnfmq.serving.inference_protocol.tensors import (
    BFLOAT16,
    MAX_DIMENSION,
    MAX_TENSORS,
    DType,
    Parameters,
    RequestLimits,
    boolean,
    datatype_of,
    dtype_of,
    element_count,
    require_no_other_extension,
    require_unique,
    size,
    tensor_bytes,
    tensor_view,
    timeout_s,
)
from nnfmq.serving.inference_service import (
    Array,
    InferenceModelMetadata,
    InferenceService,
    InferenceTensorMetadata,
    InferRequest,
    InferResponse,
)

__all__ = [
    "BodyMemory",
    "HttpReply",
    "InferenceApp",
    "MetricsReader",
    "OutputFormats",
    "Receive",
    "RestEndpoint",
    "RestRequest",
    "RestResponse",
    "Route",
    "Scope",
    "Send",
    "ServiceOpener",
    "array_from_json",
    "decode_infer_request",
    "encode_infer_response",
    "error_reply",
    "find_route",
    "header",
    "json_reply",
    "json_values",
    "read_body",
]


# ----------------------------------------------------------------------------------------------------------------------
# Requests and responses of HTTP as the messages of ASGI: bodies within limits, headers, errors as JSON.


Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Body: TypeAlias = bytes | bytearray
Take: TypeAlias = Callable[[int], None]
"""Takes so many bytes of memory, or raises."""


class HttpReply(NamedTuple):
    """A response: its status, body and headers; Content-Length is added when it is sent."""

    status: int
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ((b"content-type", b"application/json"),)

    async def send(self, send: Send) -> None:
        """Send the response."""
        headers = [*self.headers, (b"content-length", str(len(self.body)).encode())]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


def json_reply(value: object, status: int = 200) -> HttpReply:
    """Return a reply of JSON."""
    return HttpReply(status, msgspec.json.encode(value))


def error_reply(error: BaseException) -> HttpReply:
    """Return the reply for an error: `{"error": text}`, and Retry-After if the same request may succeed later."""
    status = protocol_status(error)
    reply = json_reply({"error": error_text(error)}, status.http)
    if status.retry_after_s is not None:
        return reply._replace(headers=(*reply.headers, (b"retry-after", str(status.retry_after_s).encode())))
    if isinstance(error, MethodNotAllowed):
        return reply._replace(headers=(*reply.headers, (b"allow", error.allowed.encode())))
    if isinstance(error, Unauthenticated):
        return reply._replace(headers=(*reply.headers, (b"www-authenticate", b"Bearer")))
    return reply


def header(scope: Scope, name: bytes) -> str | None:
    """Return a header of the request; None without it. ASGI has names in lower case.

    Raises:
        InvalidArgument: If the request has it more than once.
    """
    found = [value for key, value in scope["headers"] if key == name]
    if len(found) > 1:
        raise InvalidArgument(f"header {name.decode()} is given {len(found)} times")
    return found[0].decode("latin-1").strip() if found else None


class BodyMemory:
    """The memory that the bodies of all requests of a server's process may take together."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._used_bytes = 0

    @contextmanager
    def of_request(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that takes memory for one request, for the time of the block; it raises ServerOverloaded."""
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            self.require(size)
            self._used_bytes += size
            taken += size

        try:
            yield take
        finally:
            self._used_bytes -= taken

    def require(self, size: int) -> None:
        """Raise ServerOverloaded if there is not so much left."""
        if self._used_bytes + size > self._limit_bytes:
            raise ServerOverloaded(
                f"the bodies of requests in progress have {self._used_bytes} bytes, and together they may have"
                f" {self._limit_bytes} (`RequestLimits.max_total_bytes` of the server); try again later"
            )


async def read_body(scope: Scope, receive: Receive, limits: RequestLimits, memory: BodyMemory, take: Take) -> Body:
    """Return the body of a request. `take` takes what has arrived from `memory`.

    Raises:
        RequestTooLarge: If it is larger than the limit; the rest is not read.
        ServerOverloaded: If other requests have the memory; the rest is not read.
        UploadTooSlow: If it does not arrive in time.
        ClientLeft: If the client closed the connection.
    """
    limit, announced = limits.max_body_bytes, header(scope, b"content-length") or "0"
    if announced.isdecimal():
        if len(announced) > 18 or int(announced) > limit:
            raise RequestTooLarge(f"the request's body has {announced[:20]} bytes; at most {limit} are allowed")
        memory.require(int(announced))
    try:
        async with asyncio.timeout(limits.max_upload_s) as timer:
            return await _received_body(receive, limit, take)
    except TimeoutError:
        if not timer.expired():
            raise
        raise UploadTooSlow(f"the request's body did not arrive within {limits.max_upload_s:g} s") from None


async def _received_body(receive: Receive, limit: int, take: Take) -> Body:
    body: Body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        part = message.get("body", b"")
        if len(body) + len(part) > limit:
            raise RequestTooLarge(f"the request's body has more than the {limit} bytes that are allowed")
        take(len(part))
        has_more = message.get("more_body", False)
        if not body and not has_more:
            return bytes(part)
        body = bytearray(body) if isinstance(body, bytes) else body  # grows in place, where joining parts takes twice
        body += part
        if not has_more:
            return body


# ----------------------------------------------------------------------------------------------------------------------
# The URLs of the protocol: which endpoint a path names, with the model and version in it.


class RestEndpoint(Enum):
    """An endpoint; the value is the method of HTTP that it takes."""

    SERVER_LIVE = ("live", "GET")
    SERVER_READY = ("ready", "GET")
    SERVER_METADATA = ("metadata", "GET")
    REPOSITORY_INDEX = ("index", "POST")
    METRICS = ("metrics", "GET")
    MODEL_READY = ("model ready", "GET")
    MODEL_METADATA = ("model metadata", "GET")
    MODEL_CONFIGURATION = ("model configuration", "GET")
    MODEL_STATISTICS = ("model statistics", "GET")
    MODEL_INFER = ("model infer", "POST")

    @property
    def method(self) -> str:
        """The method of HTTP that the endpoint takes."""
        return self.value[1]


class Route(NamedTuple):
    """An endpoint, and the model and version that the path names; empty if it names none."""

    endpoint: RestEndpoint
    model: str = ""
    version: str = ""


_SERVER: dict[tuple[str, ...], RestEndpoint] = {
    (): RestEndpoint.SERVER_METADATA,
    ("health", "live"): RestEndpoint.SERVER_LIVE,
    ("health", "ready"): RestEndpoint.SERVER_READY,
    ("repository", "index"): RestEndpoint.REPOSITORY_INDEX,
    ("models", "stats"): RestEndpoint.MODEL_STATISTICS,
}
_MODEL: dict[tuple[str, ...], RestEndpoint] = {
    (): RestEndpoint.MODEL_METADATA,
    ("ready",): RestEndpoint.MODEL_READY,
    ("infer",): RestEndpoint.MODEL_INFER,
    ("config",): RestEndpoint.MODEL_CONFIGURATION,
    ("stats",): RestEndpoint.MODEL_STATISTICS,
}


def find_route(path: str) -> Route | None:
    """Return the route of a path such as `/v2/models/NAME/infer`; None if there is no such endpoint."""
    match path.strip("/").split("/"):
        case ["v2", "models", "stats"]:  # Triton's path of all models; one of that name has a path with its version
            return _route(_SERVER, ["models", "stats"])
        case ["v2", "models", model, "versions", version, *rest] if model and version:
            return _route(_MODEL, rest, model, version)
        case ["v2", "models", model, *rest] if model:
            return _route(_MODEL, rest, model)
        case ["v2", *rest]:
            return _route(_SERVER, rest)
        case ["metrics"]:
            return Route(RestEndpoint.METRICS)
    return None


def _route(
    endpoints: dict[tuple[str, ...], RestEndpoint], rest: list[str], model: str = "", version: str = ""
) -> Route | None:
    endpoint = endpoints.get(tuple(rest))
    return None if endpoint is None else Route(endpoint, model, version)


# ----------------------------------------------------------------------------------------------------------------------
# Tensors in JSON: the `data` of an input or output, flat or nested, in row-major order.
#
# JSON has no infinity and no NaN, so a tensor that has one cannot be sent; neither can a number that is too large for
# the datatype.


PIECE_BYTES = 1 << 16  # takes some 0.2 to 1 ms

_OPENING = re.compile(rb"[\s\[]*")


def array_from_json(name: str, dtype: DType, shape: Sequence[int], data: msgspec.Raw) -> Array:
    """Return an input whose values are JSON: one flat array, or arrays in arrays as the shape says.

    Raises:
        InvalidArgument: If `data` is no such value, or does not have the shape.
    """
    count = element_count(name, shape)
    depth = _depth(data)
    if depth not in (1, len(shape)):
        raise InvalidArgument(f"input {quoted(name)} must have `data` that is flat, or nested {len(shape)} deep")
    try:
        with np.errstate(over="ignore"):
            array = (
                _flat_array(dtype, data) if depth == 1 else np.array(_tensor_decoder(dtype, depth).decode(data), dtype)
            )
    except (ValueError, OverflowError) as error:  # msgspec's errors are ValueErrors
        raise InvalidArgument(f"input {quoted(name)} has `data` that is not {dtype}: {error}") from error
    if array.shape != ((count,) if depth == 1 else tuple(shape)):
        raise InvalidArgument(f"input {quoted(name)} has `data` of shape {list(array.shape)}, not {list(shape)}")
    if dtype.kind == "f" and not np.isfinite(array).all():
        raise InvalidArgument(f"input {quoted(name)} has a number that is too large for {dtype}")
    return array.reshape(shape)


def _flat_array(dtype: DType, data: msgspec.Raw) -> Array:
    """Return the values of a flat array, decoded in pieces: msgspec has the GIL, which other threads get in between.

    A comma separates two values, or is inside one that is no number: then a piece is no JSON.
    """
    decoder, text, arrays, begin = _tensor_decoder(dtype, 1), bytes(data), list[Array](), 0
    while (end := text.find(b",", begin + PIECE_BYTES)) >= 0:
        arrays.append(np.array(decoder.decode((b"[" if begin else b"") + text[begin:end] + b"]"), dtype))
        begin = end + 1
    arrays.append(np.array(decoder.decode((b"[" if begin else b"") + text[begin:]), dtype))
    return np.concatenate(arrays)


def _depth(data: msgspec.Raw) -> int:
    """Return the number of brackets that a JSON value opens with."""
    opening = _OPENING.match(memoryview(data))
    return opening[0].count(b"[") if opening else 0


@cache
def _tensor_decoder(dtype: DType, depth: int) -> msgspec.json.Decoder[Any]:
    """Return a decoder of `depth` nested lists of numbers of a dtype. There are at most MAX_RANK for each dtype."""
    wanted: Any = _element_type(dtype)
    for _ in range(depth):
        wanted = list.__class_getitem__(wanted)
    return msgspec.json.Decoder(wanted)


def _element_type(dtype: DType) -> Any:
    """Return the type of one value. msgspec has no limits beyond 64 bits with sign; NumPy checks those of 64 bits."""
    if dtype.kind == "b":
        return bool
    if dtype.kind == "f":
        return float
    limits = np.iinfo(dtype)
    if dtype.itemsize < 8:
        return Annotated[int, Meta(ge=int(limits.min), le=int(limits.max))]
    return int if dtype.kind == "i" else Annotated[int, Meta(ge=0)]


def json_values(name: str, array: Array) -> list[bool | int | float]:
    """Return an output's values as a flat list.

    Raises:
        InvalidArgument: If one is infinite or not a number.
    """
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise InvalidArgument(
            f"output {quoted(name)} has a value that is infinite or NaN, which JSON does not have;"
            " ask for binary data (`binary_data`)"
        )
    values: list[bool | int | float] = array.ravel().tolist()
    return values


# ----------------------------------------------------------------------------------------------------------------------
# Bodies of HTTP: JSON, and after it the bytes of tensors as the binary tensor data extension has them.
#
# The arrays of a request are views of its body. A response is put together once.


_Name: TypeAlias = Annotated[str, Meta(max_length=1024)]
_Dimension: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_DIMENSION)]


class _InputJson(Struct):
    name: _Name
    shape: list[_Dimension]
    datatype: str
    parameters: Parameters = {}
    data: msgspec.Raw = msgspec.Raw()


class _OutputJson(Struct):
    name: _Name
    parameters: Parameters = {}


class _RequestJson(Struct):
    """A request. Unknown fields are ignored, as Triton does; KServe's client sends `model_name`."""

    inputs: Annotated[list[_InputJson], Meta(max_length=MAX_TENSORS)]
    id: Annotated[str, Meta(max_length=1024)] = ""
    parameters: Parameters = {}
    outputs: Annotated[list[_OutputJson], Meta(max_length=MAX_TENSORS)] = []


class OutputFormats(NamedTuple):
    """The formats that a client wants: True = binary data. `default` is that of outputs that are not in `by_name`."""

    default: bool = False
    by_name: Mapping[str, bool] = {}

    def is_binary(self, name: str) -> bool:
        """Return whether the client wants this output as binary data."""
        return self.by_name.get(name, self.default)


class RestRequest(NamedTuple):
    """A decoded request, and the formats in which the client wants the outputs."""

    request: InferRequest
    formats: OutputFormats


class RestResponse(NamedTuple):
    """A body, and the length of the JSON in it; None if it is nothing else."""

    body: bytes
    header_length: int | None


_decoder = msgspec.json.Decoder(_RequestJson)


# ------------------------------------------------------------------------------------------------ request


def decode_infer_request(
    body: Body,
    header_length: int | None,
    *,
    model: str,
    version: str = "",
    limits: RequestLimits = RequestLimits(),  # noqa: B008  (immutable)
) -> RestRequest:
    """Decode the body of an inference request; the arrays are views of it where the tensors are binary data.

    `header_length` is the value of Inference-Header-Content-Length, None without it.

    Raises:
        RequestTooLarge: If the JSON is longer than the limits allow.
        InvalidArgument: If the body is anything else than a request.
    """
    header, binary = _parts(body, header_length)
    if len(header) > limits.max_header_bytes:
        raise RequestTooLarge(
            f"the request's JSON has {len(header)} bytes; at most {limits.max_header_bytes} are allowed:"
            " send tensors as binary data"
        )
    try:
        decoded = _decoder.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"the body is not an inference request in JSON: {error}") from error
    require_unique("input", (entry.name for entry in decoded.inputs))
    require_unique("output", (entry.name for entry in decoded.outputs))
    parts: list[_RequestJson | _InputJson | _OutputJson] = [decoded, *decoded.inputs, *decoded.outputs]
    for part in parts:
        require_no_other_extension(part.parameters)
    request = InferRequest(
        model=model,
        version=version,
        id=decoded.id,
        inputs=_inputs(decoded.inputs, binary),
        outputs=tuple(entry.name for entry in decoded.outputs),
        timeout_s=timeout_s(decoded.parameters),
    )
    return RestRequest(request, _formats(decoded))


def _parts(body: Body, header_length: int | None) -> tuple[memoryview, memoryview]:
    """Return the JSON and the binary data of a body."""
    whole = memoryview(body)
    if header_length is None:
        return whole, whole[:0]
    if not 0 <= header_length <= len(whole):
        raise InvalidArgument(f"Inference-Header-Content-Length is {header_length}; the body has {len(whole)} bytes")
    return whole[:header_length], whole[header_length:]


def _inputs(entries: Iterable[_InputJson], binary: memoryview) -> dict[str, Array]:
    """Return the arrays of the inputs; those of binary data follow each other in the body without gaps."""
    arrays, offset = dict[str, Array](), 0
    for entry in entries:
        has_json, length = bool(memoryview(entry.data)), size(entry.parameters, "binary_data_size")
        if has_json == (length is not None):
            raise InvalidArgument(
                f"input {quoted(entry.name)} must have either `data` or the parameter `binary_data_size`"
            )
        dtype = dtype_of(entry.datatype)
        if length is None and entry.datatype == BFLOAT16:
            raise InvalidArgument(f"input {quoted(entry.name)} is {BFLOAT16}, which only binary data can have")
        if length is None:
            arrays[entry.name] = array_from_json(entry.name, dtype, entry.shape, entry.data)
        else:
            part = binary[offset : offset + length]
            arrays[entry.name] = tensor_view(entry.name, dtype, entry.shape, part)
            offset += length
    if offset != len(binary):
        raise InvalidArgument(f"the body has {len(binary)} bytes after its JSON; the inputs have {offset}")
    return arrays


def _widened(array: Array) -> Array:
    """Return the float32 values of bfloat16, whose bits are the upper halves of theirs."""
    return (array.astype(np.uint32) << 16).view(np.float32)


def _formats(decoded: _RequestJson) -> OutputFormats:
    default = boolean(decoded.parameters, "binary_data_output") or False
    chosen = {entry.name: boolean(entry.parameters, "binary_data") for entry in decoded.outputs}
    return OutputFormats(default, {name: value for name, value in chosen.items() if value is not None})


# ------------------------------------------------------------------------------------------------ response


def encode_infer_response(response: InferResponse, formats: OutputFormats) -> RestResponse:
    """Return the body of a response, with each output in the format that the client wants.

    Raises:
        InvalidArgument: If an output has a value or a dtype that the protocol does not have.
    """
    binary, entries = list[memoryview](), list[dict[str, Any]]()
    for name, array in response.outputs.items():
        datatype = datatype_of(response.dtype_of(name))
        entry: dict[str, Any] = {"name": name, "datatype": datatype, "shape": array.shape}
        if formats.is_binary(name):
            data = tensor_bytes(array)
            entry["parameters"] = {"binary_data_size": len(data)}
            binary.append(data)
        else:
            entry["data"] = json_values(name, _widened(array) if datatype == BFLOAT16 else array)
        entries.append(entry)
    fields: dict[str, Any] = {"model_name": response.model, "model_version": response.version, "outputs": entries}
    header = msgspec.json.encode({**fields, "id": response.id} if response.id else fields)
    has_binary = any("parameters" in entry for entry in entries)
    return RestResponse(b"".join([header, *binary]), len(header) if has_binary else None)


# ----------------------------------------------------------------------------------------------------------------------
# InferenceApp: the Open Inference Protocol over HTTP, as an ASGI application for any server that runs one.


ServiceOpener: TypeAlias = Callable[[], AbstractAsyncContextManager[InferenceService]]
MetricsReader: TypeAlias = Callable[[], tuple[bytes, str]]
"""Returns metrics in the text format of Prometheus, and their content type; blocks."""

_HEADER_LENGTH = b"inference-header-content-length"
_EXTENSION = "binary_tensor_data"
_WITHOUT_TOKEN = (RestEndpoint.SERVER_LIVE, RestEndpoint.SERVER_READY)
_LARGE_JSON_BYTES = 1 << 18  # takes 0.7 to 2.6 ms, and a thread for it 0.2 ms


class _IndexRequest(msgspec.Struct):
    ready: bool = False


class InferenceApp:
    """An ASGI application over an InferenceService.

    Pass the service, or with `opened_by` a function that opens it: the server then opens it in each of its processes
    when it starts, on the event loop that serves requests, and closes it when it ends. With `tokens`, all requests need
    one but those for the health of the server. `metrics` is called on a thread for `GET /metrics`.
    """

    def __init__(
        self,
        service: InferenceService | None = None,
        *,
        limits: RequestLimits | None = None,
        tokens: BearerTokens | None = None,
        metrics: MetricsReader | None = None,
    ) -> None:
        self._service, self._tokens, self._metrics = service, tokens, metrics
        self._limits = limits or RequestLimits()
        self._memory = BodyMemory(self._limits.max_total_bytes)
        self._open: ServiceOpener | None = None
        self._large_json = asyncio.Lock()  # one at a time: parsing takes up to thirty times as much memory as the text

    @classmethod
    def opened_by(
        cls, opener: ServiceOpener, *, limits: RequestLimits | None = None, tokens: BearerTokens | None = None
    ) -> InferenceApp:
        """Return an application whose service is opened at the start of the server."""
        app = cls(limits=limits, tokens=tokens)
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
        if self._tokens is not None and (route is None or route.endpoint not in _WITHOUT_TOKEN):
            self._tokens.require(header(scope, b"authorization"))
        if route is None:
            raise EndpointMissing(f"this server has no {quoted(path)}")
        allowed = route.endpoint.method
        if scope["method"] != allowed:
            raise MethodNotAllowed(f"{quoted(path)} takes {allowed} only", allowed)
        if route.endpoint is RestEndpoint.METRICS:
            return await self._metrics_reply()
        if self._service is None:
            raise DeviceUnavailable("the server is starting")
        if allowed == "GET":
            return await _get(self._service, route)
        encoding = header(scope, b"content-encoding") or "identity"
        if encoding != "identity":
            raise CompressedBody(f"the body's encoding is {quoted(encoding)}; only uncompressed bodies are read")
        with self._memory.of_request() as take:
            body = await read_body(scope, receive, self._limits, self._memory, take)
            if route.endpoint is RestEndpoint.REPOSITORY_INDEX:
                return await _index(self._service, body)
            return await self._infer(self._service, route, body, _header_length(scope))

    async def _metrics_reply(self) -> HttpReply:
        if self._metrics is None:
            raise EndpointMissing("this server has no metrics; `nnfmq metrics` has those of its driver")
        body, content_type = await asyncio.to_thread(self._metrics)
        return HttpReply(200, body, ((b"content-type", content_type.encode("latin-1")),))

    async def _infer(self, service: InferenceService, route: Route, body: Body, header_length: int | None) -> HttpReply:
        request, formats = await self._decoded(route, body, header_length)
        encoded = encode_infer_response(await service.infer(request), formats)
        if encoded.header_length is None:
            return HttpReply(200, encoded.body)
        length = str(encoded.header_length).encode()
        return HttpReply(200, encoded.body, ((b"content-type", b"application/octet-stream"), (_HEADER_LENGTH, length)))

    async def _decoded(self, route: Route, body: Body, header_length: int | None) -> RestRequest:
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
    if route.endpoint is RestEndpoint.MODEL_CONFIGURATION:
        return json_reply(model_configuration(await service.model_metadata(route.model, route.version)))
    if route.endpoint is RestEndpoint.MODEL_STATISTICS:
        return json_reply(await listed_statistics(service, route.model, route.version))
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


async def _index(service: InferenceService, body: Body) -> HttpReply:
    try:
        wanted = msgspec.json.decode(body, type=_IndexRequest) if body.strip() else _IndexRequest()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"the body is not a repository index request in JSON: {error}") from error
    return json_reply(await listed_models(service, ready=wanted.ready))
