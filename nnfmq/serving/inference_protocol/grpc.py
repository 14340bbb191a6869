"""The protocol's gRPC service, for a server of grpc.aio and for Ray Serve's gRPC proxies.

Requests arrive as bytes: a proxy of Ray then passes them on unparsed, and tensors are not copied out of messages.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import grpc
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from google.protobuf.message import DecodeError

from nnfmq.hal.errors import InvalidArgument
from nnfmq.serving.inference_protocol.access import BearerTokens
from nnfmq.serving.inference_protocol.errors import (
    RequestTooLarge,
    Unauthenticated,
    error_text,
    listed_models,
    protocol_status,
    quoted,
)
from nnfmq.serving.inference_protocol.model_details import listed_statistics, model_configuration
from nnfmq.serving.inference_protocol.tensors import (
    DATATYPES,
    MAX_TENSORS,
    DType,
    Parameters,
    RequestLimits,
    datatype_of,
    dtype_of,
    element_count,
    require_no_other_extension,
    require_unique,
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
    ModelIndexEntry,
    ServerMetadata,
)

__all__ = [
    "PACKAGE",
    "SERVICE",
    "GrpcInferenceService",
    "Separated",
    "SerializedMessage",
    "TokenInterceptor",
    "add_to_server",
    "bytes_field",
    "decode_infer_message",
    "encode_infer_message",
    "encode_model_index",
    "encode_model_metadata",
    "encode_server_metadata",
    "message_classes",
    "parsed_message",
    "separate_bytes_field",
    "server_options",
]


# ----------------------------------------------------------------------------------------------------------------------
# The protocol's gRPC messages, as protobuf classes of this module's own.
#
# The classes are built at the first use from a table, in a descriptor pool of their own: a client library in the same
# process registers messages of the same names in the default pool, which allows each name once.
#
# Source: the field names and numbers are those of the Open Inference Protocol v2 and of Triton's extensions.


PACKAGE = "inference"
_FILE = "nnfmq_open_inference.proto"
_ONEOF = "parameter_choice"

# Each field is "number name type": type* is repeated, type{} a map from strings, type| a member of the message's oneof.
# DataType is Triton's enumeration. Of its ModelConfig and ModelStatistics here is what this server has.
_PARAMETERS = "parameters InferParameter{}"
_MESSAGES: Mapping[str, str] = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "1 live bool",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "1 ready bool",
    "ModelReadyRequest": "1 name string, 2 version string",
    "ModelReadyResponse": "1 ready bool",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "1 name string, 2 version string, 3 extensions string*",
    "ModelMetadataRequest": "1 name string, 2 version string",
    "ModelMetadataResponse": "1 name string, 2 versions string*, 3 platform string, 4 inputs TensorMetadata*,"
    "5 outputs TensorMetadata*",
    "TensorMetadata": "1 name string, 2 datatype string, 3 shape int64*",
    "InferParameter": "1 bool_param bool|, 2 int64_param int64|, 3 string_param string|, 4 double_param double|,"
    "5 uint64_param uint64|",
    "InferTensorContents": "1 bool_contents bool*, 2 int_contents int32*, 3 int64_contents int64*,"
    "4 uint_contents uint32*, 5 uint64_contents uint64*, 6 fp32_contents float*, 7 fp64_contents double*,"
    "8 bytes_contents bytes*",
    "InferInputTensor": f"1 name string, 2 datatype string, 3 shape int64*, 4 {_PARAMETERS},"
    "5 contents InferTensorContents",
    "InferRequestedOutputTensor": f"1 name string, 2 {_PARAMETERS}",
    "ModelInferRequest": f"1 model_name string, 2 model_version string, 3 id string, 4 {_PARAMETERS},"
    "5 inputs InferInputTensor*, 6 outputs InferRequestedOutputTensor*, 7 raw_input_contents bytes*",
    "InferOutputTensor": f"1 name string, 2 datatype string, 3 shape int64*, 4 {_PARAMETERS},"
    "5 contents InferTensorContents",
    "ModelInferResponse": f"1 model_name string, 2 model_version string, 3 id string, 4 {_PARAMETERS},"
    "5 outputs InferOutputTensor*, 6 raw_output_contents bytes*",
    "ModelStreamInferResponse": "1 error_message string, 2 infer_response ModelInferResponse",
    "RepositoryIndexRequest": "1 repository_name string, 2 ready bool",
    "RepositoryIndexResponse": "1 models ModelIndex*",
    "ModelIndex": "1 name string, 2 version string, 3 state string, 4 reason string",
    "ModelConfigRequest": "1 name string, 2 version string",
    "ModelConfigResponse": "1 config ModelConfig",
    "ModelConfig": "1 name string, 2 platform string, 4 max_batch_size int32, 5 input ModelInput*,"
    "6 output ModelOutput*, 11 dynamic_batching ModelDynamicBatching, 17 backend string",
    "ModelInput": "1 name string, 2 data_type DataType, 4 dims int64*",
    "ModelOutput": "1 name string, 2 data_type DataType, 3 dims int64*",
    "ModelDynamicBatching": "2 max_queue_delay_microseconds uint64",
    "ModelStatisticsRequest": "1 name string, 2 version string",
    "ModelStatisticsResponse": "1 model_stats ModelStatistics*",
    "ModelStatistics": "1 name string, 2 version string, 3 last_inference uint64, 4 inference_count uint64,"
    "5 execution_count uint64, 6 inference_stats InferStatistics",
    "InferStatistics": "1 success StatisticDuration, 2 fail StatisticDuration, 3 queue StatisticDuration,"
    "4 compute_input StatisticDuration, 5 compute_infer StatisticDuration, 6 compute_output StatisticDuration,"
    "7 cache_hit StatisticDuration, 8 cache_miss StatisticDuration",
    "StatisticDuration": "1 count uint64, 2 ns uint64",
}
_ENUM = "DataType"
_ENUM_NAMES = (
    "INVALID", "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64",
    "STRING", "BF16",
)  # fmt: skip
_FIELD = re.compile(r"(?P<number>\d+) (?P<name>\w+) (?P<type>\w+)(?P<mark>\*|\{\}|\||)")


@cache
def message_classes() -> Mapping[str, Any]:
    """Return the class of each message, by name without the package."""
    pool = descriptor_pool.DescriptorPool()
    file = descriptor_pb2.FileDescriptorProto(name=_FILE, package=PACKAGE, syntax="proto3")
    enum = file.enum_type.add(name=_ENUM)
    for number, name in enumerate(_ENUM_NAMES):
        enum.value.add(name=f"TYPE_{name}", number=number)
    for name, fields in _MESSAGES.items():
        _describe(file.message_type.add(name=name), fields)
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in _MESSAGES
    }


def _describe(message: Any, fields: str) -> None:
    """Add the fields to a message's descriptor."""
    for number, name, kind, mark in _parsed(fields):
        repeated = mark in ("*", "{}")
        field = message.field.add(name=name, number=number, label=3 if repeated else 1)
        if mark == "{}":
            entry = "".join(part.capitalize() for part in name.split("_")) + "Entry"
            _describe_entry(message.nested_type.add(name=entry), kind)
            field.type_name = f".{PACKAGE}.{message.name}.{entry}"
        elif kind in _MESSAGES or kind == _ENUM:
            field.type_name = f".{PACKAGE}.{kind}"
        else:
            field.type = getattr(descriptor_pb2.FieldDescriptorProto, f"TYPE_{kind.upper()}")
        if mark == "|":
            if not message.oneof_decl:
                message.oneof_decl.add(name=_ONEOF)
            field.oneof_index = 0


def _describe_entry(entry: Any, value: str) -> None:
    """Make a message the entry of a map from strings to `value`."""
    entry.options.map_entry = True
    _describe(entry, f"1 key string, 2 value {value}")


def _parsed(fields: str) -> Iterator[tuple[int, str, str, str]]:
    for found in _FIELD.finditer(fields):
        yield int(found["number"]), found["name"], found["type"], found["mark"]


# ----------------------------------------------------------------------------------------------------------------------
# The outermost fields of a protobuf message, without copying large ones.
#
# A message with tensors is nearly all raw bytes. Taken out first, they stay views of the request, and what protobuf
# parses is small: parsing may take a hundred times as much memory as the bytes parsed.
#
# Source: the encoding is that of https://protobuf.dev/programming-guides/encoding/.


_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10


class Separated(NamedTuple):
    """The occurrences of one field as views, and the rest of the message."""

    values: list[memoryview]
    other_fields: bytes


class _Field(NamedTuple):
    tag: int
    start: int
    value_start: int
    end: int


class SerializedMessage(NamedTuple):
    """A message whose bytes are known already; with the method by which gRPC and Ray serialize messages."""

    data: bytes

    def SerializeToString(self) -> bytes:
        """Return the message's bytes."""
        return self.data


def separate_bytes_field(data: bytes, number: int, max_fields: int) -> Separated:
    """Return the values of a repeated field of bytes, and the message without it.

    Raises:
        InvalidArgument: If `data` is no message, or has more than `max_fields` outermost fields.
    """
    view, wanted = memoryview(data), number << 3 | _LENGTH
    values, others = list[memoryview](), list[memoryview]()
    for count, field in enumerate(_fields(view)):
        if count == max_fields:
            raise InvalidArgument(f"the message has more than {max_fields} fields")
        if field.tag == wanted:
            values.append(view[field.value_start : field.end])
        else:
            others.append(view[field.start : field.end])
    return Separated(values, b"".join(others))


def _fields(data: memoryview) -> Iterator[_Field]:
    start = 0
    while start < len(data):
        tag, value_start = _varint(data, start)
        kind = tag & 7
        if kind == _VARINT:
            _, end = _varint(data, value_start)
        elif kind == _LENGTH:
            length, value_start = _varint(data, value_start)
            end = value_start + length
        elif kind in (_FIXED64, _FIXED32):
            end = value_start + (8 if kind == _FIXED64 else 4)
        else:
            raise InvalidArgument(f"the message has a field of wire type {kind} at byte {start}")
        if end > len(data):
            raise InvalidArgument(f"the message ends within the field at byte {start}")
        yield _Field(tag, start, value_start, end)
        start = end


def _varint(data: memoryview, start: int) -> tuple[int, int]:
    """Return a number, and the offset behind it."""
    value = 0
    for index, byte in enumerate(data[start : start + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, start + index + 1
    raise InvalidArgument(f"the message has no complete number at byte {start}")


def bytes_field(number: int, value: memoryview) -> Sequence[bytes | memoryview]:
    """Return the pieces of a field of bytes, to be joined."""
    length, prefix = len(value), bytearray([number << 3 | _LENGTH])
    while length >= 0x80:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    prefix.append(length)
    return bytes(prefix), value


# ----------------------------------------------------------------------------------------------------------------------
# Messages of gRPC to requests, and responses to messages.
#
# Tensors in `raw_input_contents` become arrays over the message's bytes. Responses always have `raw_output_contents`,
# as Triton's have.


_RAW_INPUTS = 7
_RAW_OUTPUTS = 6
_MAX_FIELDS = 4 * MAX_TENSORS
_TYPED_DTYPES: Mapping[str, str] = {"int_contents": "int32", "uint_contents": "uint32"}
"""Typed fields whose values have another type than the tensor."""


def parsed_message(name: str, data: bytes, limit: int) -> Any:
    """Return a message of gRPC.

    Raises:
        RequestTooLarge: If it has more than `limit` bytes.
        InvalidArgument: If `data` is no such message.
    """
    if len(data) > limit:
        raise RequestTooLarge(
            f"the message has {len(data)} bytes without raw contents; at most {limit} are allowed:"
            " send tensors as raw contents"
        )
    try:
        return message_classes()[name].FromString(data)
    except DecodeError as error:
        raise InvalidArgument(f"the bytes are not a message {name}") from error


# ------------------------------------------------------------------------------------------------ request


def decode_infer_message(
    data: bytes,
    limits: RequestLimits = RequestLimits(),  # noqa: B008  (immutable)
    time_left_s: float | None = None,
) -> InferRequest:
    """Return the request in the bytes of a ModelInferRequest; its arrays are views of them where contents are raw.

    `time_left_s` is the time until the call's deadline; the parameter `timeout` can only shorten it.

    Raises:
        RequestTooLarge: If the message without raw contents is larger than the limits allow.
        InvalidArgument: If the bytes are anything else than a request.
    """
    raw, others = separate_bytes_field(data, _RAW_INPUTS, _MAX_FIELDS)
    message = parsed_message("ModelInferRequest", others, limits.max_header_bytes)
    for kind, tensors in (("input", message.inputs), ("output", message.outputs)):
        if len(tensors) > MAX_TENSORS:
            raise InvalidArgument(f"the request has {len(tensors)} {kind}s; at most {MAX_TENSORS} are allowed")
        require_unique(kind, (tensor.name for tensor in tensors))
    parameters = _parameters(message.parameters)
    require_no_other_extension(parameters)
    for tensor in (*message.inputs, *message.outputs):
        require_no_other_extension(tensor.parameters)
    return InferRequest(
        model=message.model_name,
        version=message.model_version,
        id=message.id,
        inputs=_inputs(message.inputs, raw),
        outputs=tuple(tensor.name for tensor in message.outputs),
        timeout_s=min((limit for limit in (timeout_s(parameters), time_left_s) if limit is not None), default=None),
    )


def _parameters(entries: Mapping[str, Any]) -> Parameters:
    chosen = {name: value.WhichOneof("parameter_choice") for name, value in entries.items()}
    return {name: getattr(entries[name], choice) for name, choice in chosen.items() if choice}


def _inputs(tensors: Sequence[Any], raw: Sequence[memoryview]) -> dict[str, Array]:
    """Return the arrays of the inputs, all from raw contents or all from typed contents."""
    if not raw:
        return {tensor.name: _typed_array(tensor) for tensor in tensors}
    if len(raw) != len(tensors):
        raise InvalidArgument(f"the request has {len(tensors)} inputs and {len(raw)} raw_input_contents")
    for tensor in tensors:
        if tensor.HasField("contents"):
            raise InvalidArgument(f"input {quoted(tensor.name)} has `contents` beside raw_input_contents")
    return {
        tensor.name: tensor_view(tensor.name, dtype_of(tensor.datatype), tuple(tensor.shape), data)
        for tensor, data in zip(tensors, raw, strict=True)
    }


def _typed_array(tensor: Any) -> Array:
    """Return an input from its typed contents."""
    dtype, shown = dtype_of(tensor.datatype), quoted(tensor.name)
    count, field = element_count(tensor.name, tuple(tensor.shape)), DATATYPES[tensor.datatype].typed_field
    if not field:
        raise InvalidArgument(f"input {shown} is {tensor.datatype}, which only raw_input_contents can have")
    counts = {kind.name: len(values) for kind, values in tensor.contents.ListFields()}
    if counts != ({field: count} if count else {}):
        raise InvalidArgument(f"input {shown} has contents {counts}; {count} values in {field} are needed")
    values = np.fromiter(getattr(tensor.contents, field), _TYPED_DTYPES.get(field, dtype), count)
    return _narrowed(shown, values, dtype).reshape(tuple(tensor.shape))


def _narrowed(name: str, values: Array, dtype: DType) -> Array:
    """Return integers in the dtype of the tensor.

    Raises:
        InvalidArgument: If one is out of its range.
    """
    if values.dtype == dtype:
        return values
    limits = np.iinfo(dtype)
    if values.size and not (limits.min <= values.min() and values.max() <= limits.max):
        raise InvalidArgument(f"input {name} has a value outside of {limits.min} to {limits.max}")
    return values.astype(dtype)


# ------------------------------------------------------------------------------------------------ response


def encode_infer_message(response: InferResponse) -> SerializedMessage:
    """Return the bytes of a ModelInferResponse; the outputs are copied once.

    Raises:
        InvalidArgument: If an output has a dtype that the protocol does not have.
    """
    message = message_classes()["ModelInferResponse"](
        model_name=response.model, model_version=response.version, id=response.id
    )
    pieces = list[bytes | memoryview]()
    for name, array in response.outputs.items():
        message.outputs.add(name=name, datatype=datatype_of(response.dtype_of(name)), shape=array.shape)
        pieces += bytes_field(_RAW_OUTPUTS, tensor_bytes(array))
    return SerializedMessage(b"".join([message.SerializeToString(), *pieces]))


def encode_server_metadata(server: ServerMetadata) -> Any:
    """Return a ServerMetadataResponse."""
    return message_classes()["ServerMetadataResponse"](
        name=server.name, version=server.version, extensions=server.extensions
    )


def encode_model_metadata(model: InferenceModelMetadata) -> Any:
    """Return a ModelMetadataResponse."""
    return message_classes()["ModelMetadataResponse"](
        name=model.name,
        versions=model.versions,
        platform=model.platform,
        inputs=[_metadata(tensor) for tensor in model.inputs],
        outputs=[_metadata(tensor) for tensor in model.outputs],
    )


def _metadata(tensor: InferenceTensorMetadata) -> Any:
    return message_classes()["TensorMetadata"](name=tensor.name, datatype=datatype_of(tensor.dtype), shape=tensor.shape)


def encode_model_index(entries: Sequence[ModelIndexEntry]) -> Any:
    """Return a RepositoryIndexResponse."""
    kind = message_classes()["ModelIndex"]
    models = [kind(name=e.name, version=e.version, state=e.state, reason=e.reason) for e in entries]
    return message_classes()["RepositoryIndexResponse"](models=models)


def _message_of(name: str, values: Mapping[str, Any]) -> Any:
    """Return a message with values in the form of JSON."""
    return json_format.ParseDict(values, message_classes()[name]())


# ----------------------------------------------------------------------------------------------------------------------
# The protocol's gRPC service, for a server of grpc.aio and for Ray Serve's gRPC proxies.


SERVICE = f"{PACKAGE}.GRPCInferenceService"
_LONGEST_S = 10_000_000
"""gRPC gives a call without a deadline one that is centuries away."""
_UNARY = (
    "ServerLive",
    "ServerReady",
    "ModelReady",
    "ServerMetadata",
    "ModelMetadata",
    "ModelConfig",
    "ModelStatistics",
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

    async def ModelConfig(self, request: bytes, grpc_context: Any) -> Any:
        """Return a model's configuration, as Triton has it."""
        return await _response_or_code(grpc_context, "ModelConfigResponse", self._model_config(request))

    async def ModelStatistics(self, request: bytes, grpc_context: Any) -> Any:
        """Return how many requests and executions of a model there were, and how long they took."""
        return await _response_or_code(grpc_context, "ModelStatisticsResponse", self._model_statistics(request))

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

    async def _model_config(self, data: bytes) -> Any:
        wanted = self._parsed("ModelConfigRequest", data)
        config = model_configuration(await self._service.model_metadata(wanted.name, wanted.version))
        return _message_of("ModelConfigResponse", {"config": config})

    async def _model_statistics(self, data: bytes) -> Any:
        wanted = self._parsed("ModelStatisticsRequest", data)
        return _message_of(
            "ModelStatisticsResponse", await listed_statistics(self._service, wanted.name, wanted.version)
        )

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


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # untyped
    """Ends calls that have none of the tokens before their messages are received, but those for the server's health."""

    def __init__(self, tokens: BearerTokens) -> None:
        self._tokens = tokens

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Return the handler of a call, or one that ends it with UNAUTHENTICATED."""
        if handler_call_details.method not in _WITHOUT_TOKEN:
            metadata = handler_call_details.invocation_metadata or ()
            given = [value for key, value in metadata if key == "authorization"]
            try:
                self._tokens.require(given[0] if len(given) == 1 else None)
            except Unauthenticated as error:
                return _ending_handler(protocol_status(error).grpc, error_text(error))
        return await continuation(handler_call_details)


_WITHOUT_TOKEN = (f"/{SERVICE}/ServerLive", f"/{SERVICE}/ServerReady")


def _ending_handler(code: str, details: str) -> Any:
    """Return a handler that ends a call of any kind. It reads no message."""

    async def end(_requests: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode[code], details)

    return grpc.stream_stream_rpc_method_handler(end)


_IDLE_MS, _HANDSHAKE_MS = 300_000, 10_000


def server_options(limits: RequestLimits | None = None) -> list[tuple[str, int]]:
    """Return the options of a server of grpc.aio for these limits: gRPC's own limit of a message is 4 MiB.

    gRPC receives a message before anybody can reject it. So a message may have the share of one call in the memory of
    all; the server needs `maximum_concurrent_rpcs=limits.max_calls` beside the options. One port has one server: with
    gRPC's default, SO_REUSEPORT, a second one would get half of the connections.
    """
    found = limits or RequestLimits()
    return [
        ("grpc.max_concurrent_streams", found.max_calls),
        ("grpc.max_connection_idle_ms", _IDLE_MS),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        ("grpc.max_receive_message_length", found.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),
    ]
