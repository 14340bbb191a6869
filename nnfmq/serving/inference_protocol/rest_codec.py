"""Bodies of HTTP: JSON, and after it the bytes of tensors as the binary tensor data extension has them.

The arrays of a request are views of its body. A response is put together once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta, Struct

from nnfmq.hal.errors import InvalidArgument
from nnfmq.serving.inference_protocol.datatypes import datatype_of, dtype_of
from nnfmq.serving.inference_protocol.json_tensors import array_from_json, json_values
from nnfmq.serving.inference_protocol.request_errors import RequestTooLarge, quoted
from nnfmq.serving.inference_protocol.request_parameters import (
    Parameters,
    boolean,
    require_no_other_extension,
    size,
    timeout_s,
)
from nnfmq.serving.inference_protocol.wire_tensors import (
    MAX_DIMENSION,
    MAX_TENSORS,
    RequestLimits,
    require_unique,
    tensor_bytes,
    tensor_view,
)
from nnfmq.serving.inference_service import Array, InferRequest, InferResponse

__all__ = ["OutputFormats", "RestRequest", "RestResponse", "decode_infer_request", "encode_infer_response"]

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
    body: bytes,
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


def _parts(body: bytes, header_length: int | None) -> tuple[memoryview, memoryview]:
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
        if length is None:
            arrays[entry.name] = array_from_json(entry.name, dtype, entry.shape, entry.data)
        else:
            part = binary[offset : offset + length]
            arrays[entry.name] = tensor_view(entry.name, dtype, entry.shape, part)
            offset += length
    if offset != len(binary):
        raise InvalidArgument(f"the body has {len(binary)} bytes after its JSON; the inputs have {offset}")
    return arrays


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
        entry: dict[str, Any] = {"name": name, "datatype": datatype_of(array.dtype), "shape": array.shape}
        if formats.is_binary(name):
            data = tensor_bytes(array)
            entry["parameters"] = {"binary_data_size": len(data)}
            binary.append(data)
        else:
            entry["data"] = json_values(name, array)
        entries.append(entry)
    fields: dict[str, Any] = {"model_name": response.model, "model_version": response.version, "outputs": entries}
    header = msgspec.json.encode({**fields, "id": response.id} if response.id else fields)
    has_binary = any("parameters" in entry for entry in entries)
    return RestResponse(b"".join([header, *binary]), len(header) if has_binary else None)
