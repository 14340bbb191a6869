"""Messages of gRPC to requests, and responses to messages.

Tensors in `raw_input_contents` become arrays over the message's bytes. Responses always have `raw_output_contents`, as
Triton's have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from nnfmq.hal.errors import InvalidArgument
from nnfmq.serving.inference_protocol.datatypes import DATATYPES, DType, datatype_of, dtype_of
from nnfmq.serving.inference_protocol.grpc_messages import message_classes
from nnfmq.serving.inference_protocol.protobuf_wire import SerializedMessage, bytes_field, separate_bytes_field
from nnfmq.serving.inference_protocol.request_errors import RequestTooLarge, quoted
from nnfmq.serving.inference_protocol.request_parameters import Parameters, require_no_other_extension, timeout_s
from nnfmq.serving.inference_protocol.wire_tensors import (
    MAX_TENSORS,
    RequestLimits,
    element_count,
    require_unique,
    tensor_bytes,
    tensor_view,
)
from nnfmq.serving.inference_service import (
    Array,
    InferenceModelMetadata,
    InferenceTensorMetadata,
    InferRequest,
    InferResponse,
    ModelIndexEntry,
    ServerMetadata,
)

__all__ = [
    "decode_infer_message",
    "encode_infer_message",
    "encode_model_index",
    "encode_model_metadata",
    "encode_server_metadata",
    "parsed_message",
]

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
        message.outputs.add(name=name, datatype=datatype_of(array.dtype), shape=array.shape)
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
