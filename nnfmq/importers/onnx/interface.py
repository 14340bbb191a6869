"""The interface of an ONNX model without its import: inputs, outputs, symbolic dimensions, the author's description.

Shapes of outputs that the file does not declare are inferred by the package `onnx`, if it can.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from nnfmq.base.onnx_fields import without_initializers
from nnfmq.importers.file_format import ModelSource
from nnfmq.importers.onnx.file import inference_errors

__all__ = ["OnnxInterface", "OnnxValueType", "read_interface", "without_defaults"]

_ELEMENTS = (
    "undefined", "float", "uint8", "int8", "uint16", "int16", "int32", "int64", "string", "bool", "float16", "double",
    "uint32", "uint64", "complex64", "complex128", "bfloat16", "float8e4m3fn", "float8e4m3fnuz", "float8e5m2",
    "float8e5m2fnuz", "uint4", "int4", "float4e2m1",
)  # fmt: skip
"""ONNX Runtime's names of the element types of TensorProto, by number."""
_FIRST_WITH_DEFAULTS = 4  # ir_version
_MAX_INFERENCE_BYTES = 1 << 28  # what `onnx` copies to infer shapes; a larger model keeps what it declares


@dataclass(frozen=True, slots=True)
class OnnxValueType:
    """An input or output: its type as ONNX Runtime writes it, "tensor(float)", and its shape.

    A dimension is a size, the name of a symbol, or None if it has neither. `shape` is None if it is not known, or if
    this is no tensor.
    """

    name: str
    type: str
    shape: tuple[int | str | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class OnnxInterface:
    """Inputs, outputs and metadata of a model. `overridable` are inputs that have a default value in the file."""

    inputs: tuple[OnnxValueType, ...]
    outputs: tuple[OnnxValueType, ...]
    overridable: tuple[OnnxValueType, ...] = ()
    producer_name: str = ""
    graph_name: str = ""
    domain: str = ""
    description: str = ""
    graph_description: str = ""
    version: int | None = None
    properties: dict[str, str] = field(default_factory=dict)


def read_interface(proto: Any) -> OnnxInterface:
    """Return the interface of a parsed ONNX file, an onnx.ModelProto.

    In files of a version below 4 all initializers are inputs, too, and cannot be overridden.
    """
    graph = proto.graph
    given = {tensor.name for tensor in graph.initializer} | {sparse.values.name for sparse in graph.sparse_initializer}
    return OnnxInterface(
        _types(info for info in graph.input if info.name not in given),
        _types(_inferred_outputs(proto)),
        _types(info for info in graph.input if info.name in given and proto.ir_version >= _FIRST_WITH_DEFAULTS),
        proto.producer_name,
        graph.name,
        proto.domain,
        proto.doc_string,
        graph.doc_string,
        proto.model_version if proto.HasField("model_version") else None,
        {entry.key: entry.value for entry in proto.metadata_props},
    )


def without_defaults(file: ModelSource, names: Container[str]) -> ModelSource:
    """Return a file in which these inputs have no default value."""
    return replace(file, data=without_initializers(memoryview(file.data), names), parsed=None)


def _inferred_outputs(proto: Any) -> list[Any]:
    """Return the outputs, with types and shapes that the file leaves out as far as `onnx` can infer them."""
    declared = list(proto.graph.output)
    if all(_is_complete(info) for info in declared) or proto.ByteSize() > _MAX_INFERENCE_BYTES:
        return declared
    from onnx import shape_inference

    try:
        inferred = shape_inference.infer_shapes(proto, data_prop=True)
    except inference_errors():
        return declared  # a node of another domain, or one that is wrong: the import says so
    values = [*proto.graph.input, *declared]
    known = {dimension.dim_param for info in values for dimension in info.type.tensor_type.shape.dim}
    for info in inferred.graph.output:
        for dimension in info.type.tensor_type.shape.dim:
            if dimension.dim_param not in known:  # a symbol that the inference has made up
                dimension.ClearField("dim_param")
    return list(inferred.graph.output)


def _is_complete(info: Any) -> bool:
    kind, value = info.type.tensor_type, info.type.WhichOneof("value")
    if value != "tensor_type":
        return value is not None
    return bool(kind.elem_type and kind.HasField("shape"))


def _types(infos: Iterable[Any]) -> tuple[OnnxValueType, ...]:
    return tuple(OnnxValueType(info.name, _type_name(info.type), _shape(info.type)) for info in infos)


def _type_name(kind: Any) -> str:
    value = kind.WhichOneof("value")
    if value == "tensor_type":
        return f"tensor({_element_name(kind.tensor_type.elem_type)})"
    if value == "sparse_tensor_type":
        return f"sparse_tensor({_element_name(kind.sparse_tensor_type.elem_type)})"
    if value == "sequence_type":
        return f"seq({_type_name(kind.sequence_type.elem_type)})"
    if value == "optional_type":
        return f"optional({_type_name(kind.optional_type.elem_type)})"
    if value == "map_type":
        return f"map({_element_name(kind.map_type.key_type)},{_type_name(kind.map_type.value_type)})"
    return "unknown"


def _element_name(number: int) -> str:
    return _ELEMENTS[number] if number < len(_ELEMENTS) else f"type {number}"


def _shape(kind: Any) -> tuple[int | str | None, ...] | None:
    if kind.WhichOneof("value") != "tensor_type" or not kind.tensor_type.HasField("shape"):
        return None
    return tuple(
        dimension.dim_param
        or (dimension.dim_value if dimension.HasField("dim_value") and dimension.dim_value >= 0 else None)
        for dimension in kind.tensor_type.shape.dim
    )
