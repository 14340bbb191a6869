"""The protocol's gRPC messages, as protobuf classes of this module's own.

The classes are built at the first use from a table, in a descriptor pool of their own: a client library in the same
process registers messages of the same names in the default pool, which allows each name once.

Source: the field names and numbers are those of the Open Inference Protocol v2 and of Triton's extensions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

__all__ = ["PACKAGE", "message_classes"]

PACKAGE = "inference"
_FILE = "nnfmq_open_inference.proto"
_ONEOF = "parameter_choice"

# Each field is "number name type": type* is repeated, type{} a map from strings, type| a member of the message's oneof.
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
}
_FIELD = re.compile(r"(?P<number>\d) (?P<name>\w+) (?P<type>\w+)(?P<mark>\*|\{\}|\||)")


@cache
def message_classes() -> Mapping[str, Any]:
    """Return the class of each message, by name without the package."""
    pool = descriptor_pool.DescriptorPool()
    file = descriptor_pb2.FileDescriptorProto(name=_FILE, package=PACKAGE, syntax="proto3")
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
        elif kind in _MESSAGES:
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
