"""Write a .tflite file from plain descriptions of tensors and operators, with the builders of the `tflite` package.

`example_models.py` and `quantize.py` write models with it, and so do the tests of the importer, invalid ones included:
nothing is checked here. A file has buffers aligned to 16 bytes as the schema requires, and one operator
code for each operator and version. Options have the schema's field names (``{"Padding": 0}``).
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import flatbuffers
import tflite

IDENTIFIER = b"TFL3"
_ALIGNMENT = 16  # of buffers
_PLACEHOLDER = 0x5BAD_0FF5_E700_0000  # of the offset of a buffer after the FlatBuffer, plus its number
_FIRST_VERSIONS = {"BROADCAST_TO": 2}  # all other operators start at version 1
OperatorVersion = tuple[str, int]
"""Name and version of an operator, for which the file has an operator code."""


@dataclass(frozen=True)
class Sparsity:
    """The levels of a sparse tensor, in traversal order: a size if dense, else segments and indexes."""

    order: Sequence[int]
    levels: Sequence[int | tuple[Sequence[int], Sequence[int]]]
    blocks: Sequence[int] = ()


@dataclass(frozen=True)
class Tensor:
    """A tensor, constant if it has `data`. `extra` has further scalar fields of the schema, such as IsVariable.

    `signature` is the shape with -1 for each dimension that is not known.
    """

    name: str
    shape: Sequence[int]
    type: str = "FLOAT32"
    data: bytes | None = None
    scales: Sequence[float] = ()
    zero_points: Sequence[int] = ()
    dimension: int = 0
    extra: Mapping[str, int] = field(default_factory=dict)
    sparsity: Sparsity | None = None
    signature: Sequence[int] = ()


@dataclass(frozen=True)
class Operator:
    """An operator, with its name in BuiltinOperator and its options' type, for example Conv2DOptions, as `table`.

    A name that is not in BuiltinOperator makes a custom operator; its options are the bytes `custom`. `inputs`,
    `outputs` and `intermediates` are tensor indexes.
    """

    name: str
    inputs: Sequence[int]
    outputs: Sequence[int]
    table: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    custom: bytes = b""
    intermediates: Sequence[int] = ()
    version: int = 1


@dataclass(frozen=True)
class Subgraph:
    """A further subgraph of a file. `inputs` and `outputs` are tensor indexes."""

    tensors: Sequence[Tensor]
    operators: Sequence[Operator]
    inputs: Sequence[int]
    outputs: Sequence[int]


@dataclass(frozen=True)
class Signature:
    """A signature: tensor indexes of a subgraph's inputs and outputs by their names."""

    key: str
    inputs: Mapping[str, int]
    outputs: Mapping[str, int]
    subgraph: int = 0


def write(
    tensors: Sequence[Tensor],
    operators: Sequence[Operator],
    inputs: Sequence[int],
    outputs: Sequence[int],
    description: str = "",
    more: Sequence[Subgraph] | None = (),
    metadata: bytes = b"",
    signatures: Sequence[Signature] = (),
    constants_follow: bool = False,
) -> bytes:
    """Return the content of the file. `inputs` and `outputs` are tensor indexes.

    `more` has the subgraphs after the first; None leaves that out, too. `metadata` is a FlatBuffer. If
    `constants_follow`, those of 16 bytes or more are after the FlatBuffer, as LiteRT's quantizer writes them.
    """
    builder = flatbuffers.Builder(1024)
    subgraphs = [] if more is None else [Subgraph(tensors, operators, inputs, outputs), *more]
    codes = list(dict.fromkeys(_operator_version(operator) for graph in subgraphs for operator in graph.operators))
    constants = [tensor.data for graph in subgraphs for tensor in graph.tensors if tensor.data is not None]
    contents = (b"", *constants, *([metadata] if metadata else []))
    following = {n: data for n, data in enumerate(contents) if constants_follow and len(data) >= _ALIGNMENT}
    buffers = [_buffer(builder, data, n if n in following else None) for n, data in enumerate(contents)]
    buffer_numbers = itertools.count(1)  # buffer 0 is empty; those of constants follow in the order of the tensors
    graphs = [_subgraph(builder, graph, codes, buffer_numbers) for graph in subgraphs]
    fields = {
        "Version": 3,
        "OperatorCodes": _offsets(builder, [_operator_code(builder, *code) for code in codes]),
        "Subgraphs": _offsets(builder, graphs),
        "Description": builder.CreateString(description),
        "Buffers": _offsets(builder, buffers),
    }
    if metadata:
        entry = {"Name": builder.CreateString("TFLITE_METADATA"), "Buffer": len(buffers) - 1}
        fields["Metadata"] = _offsets(builder, [_table(builder, "Metadata", entry)])
    if signatures:
        fields["SignatureDefs"] = _offsets(builder, [_signature(builder, signature) for signature in signatures])
    builder.Finish(_table(builder, "Model", fields), IDENTIFIER)
    return _with_following(bytes(builder.Output()), following)


def _with_following(content: bytes, buffers: Mapping[int, bytes]) -> bytes:
    """Return a file with buffers after the FlatBuffer, whose offsets replace their placeholders."""
    for number, data in buffers.items():
        content += bytes(-len(content) % _ALIGNMENT)
        content = content.replace(_placeholder(number), struct.pack("<Q", len(content))) + data
    return content


def _placeholder(number: int) -> bytes:
    return struct.pack("<Q", _PLACEHOLDER + number)


def _table(builder: Any, name: str, fields: Mapping[str, Any]) -> int:
    getattr(tflite, f"{name}Start")(builder)
    for key, value in fields.items():
        getattr(tflite, f"{name}Add{key}")(builder, value)
    end: int = getattr(tflite, f"{name}End")(builder)
    return end


def _offsets(builder: Any, offsets: Sequence[int]) -> int:
    builder.StartVector(4, len(offsets), 4)
    for offset in reversed(offsets):
        builder.PrependUOffsetTRelative(offset)
    end: int = builder.EndVector()
    return end


def _vector(builder: Any, values: Sequence[Any], kind: str) -> int:
    size_bytes = 8 if kind == "Int64" else 4
    builder.StartVector(size_bytes, len(values), size_bytes)
    for value in reversed(values):
        getattr(builder, f"Prepend{kind}")(value)
    end: int = builder.EndVector()
    return end


def _buffer(builder: Any, data: bytes, number: int | None = None) -> int:
    """Add a buffer, or if it has a number, where it will be after the FlatBuffer."""
    if not data:
        return _table(builder, "Buffer", {})
    if number is not None:
        return _table(builder, "Buffer", {"Offset": _PLACEHOLDER + number, "Size": len(data)})
    builder.Prep(_ALIGNMENT, len(data))
    return _table(builder, "Buffer", {"Data": builder.CreateByteVector(data)})


def _operator_version(operator: Operator) -> OperatorVersion:
    return operator.name, max(operator.version, _FIRST_VERSIONS.get(operator.name, 1))


def _operator_code(builder: Any, name: str, version: int) -> int:
    code = getattr(tflite.BuiltinOperator, name, tflite.BuiltinOperator.CUSTOM)
    # Old readers use the byte DeprecatedBuiltinCode, which is 127 if the code does not fit; new ones use BuiltinCode.
    fields = {"DeprecatedBuiltinCode": min(code, 127), "BuiltinCode": code, "Version": version}
    if code == tflite.BuiltinOperator.CUSTOM:
        fields["CustomCode"] = builder.CreateString(name)
    return _table(builder, "OperatorCode", fields)


def _subgraph(builder: Any, graph: Subgraph, codes: Sequence[OperatorVersion], buffer_numbers: Iterator[int]) -> int:
    buffers = [0 if tensor.data is None else next(buffer_numbers) for tensor in graph.tensors]
    fields = {
        "Tensors": _offsets(builder, [_tensor(builder, *pair) for pair in zip(graph.tensors, buffers, strict=True)]),
        "Inputs": _vector(builder, graph.inputs, "Int32"),
        "Outputs": _vector(builder, graph.outputs, "Int32"),
        "Operators": _offsets(builder, [_operator(builder, operator, codes) for operator in graph.operators]),
    }
    return _table(builder, "SubGraph", fields)


def _signature(builder: Any, signature: Signature) -> int:
    fields = {
        "SignatureKey": builder.CreateString(signature.key),
        "Inputs": _offsets(builder, [_tensor_map(builder, *pair) for pair in signature.inputs.items()]),
        "Outputs": _offsets(builder, [_tensor_map(builder, *pair) for pair in signature.outputs.items()]),
        "SubgraphIndex": signature.subgraph,
    }
    return _table(builder, "SignatureDef", fields)


def _tensor_map(builder: Any, name: str, index: int) -> int:
    return _table(builder, "TensorMap", {"Name": builder.CreateString(name), "TensorIndex": index})


def _tensor(builder: Any, tensor: Tensor, buffer: int) -> int:
    fields: dict[str, Any] = {
        "Shape": _vector(builder, tensor.shape, "Int32"),
        "Name": builder.CreateString(tensor.name),
        "Type": getattr(tflite.TensorType, tensor.type),
        "Buffer": buffer,
    }
    if tensor.scales:
        fields["Quantization"] = _quantization(builder, tensor)
    if tensor.signature:
        fields["ShapeSignature"] = _vector(builder, tensor.signature, "Int32")
    if tensor.sparsity is not None:
        fields["Sparsity"] = _sparsity(builder, tensor.sparsity)
    return _table(builder, "Tensor", fields | dict(tensor.extra))


def _sparsity(builder: Any, sparsity: Sparsity) -> int:
    levels = []
    for level in sparsity.levels:
        if isinstance(level, int):
            levels.append(_table(builder, "DimensionMetadata", {"Format": 0, "DenseSize": level}))
            continue
        segments, indexes = (_table(builder, "Int32Vector", {"Values": _vector(builder, v, "Int32")}) for v in level)
        fields = {"Format": 1, "ArraySegmentsType": 1, "ArraySegments": segments}
        fields |= {"ArrayIndicesType": 1, "ArrayIndices": indexes}
        levels.append(_table(builder, "DimensionMetadata", fields))
    vectors = {
        "TraversalOrder": _vector(builder, sparsity.order, "Int32"),
        "BlockMap": _vector(builder, sparsity.blocks, "Int32"),
        "DimMetadata": _offsets(builder, levels),
    }
    return _table(builder, "SparsityParameters", vectors)


def _quantization(builder: Any, tensor: Tensor) -> int:
    fields = {
        "Scale": _vector(builder, tensor.scales, "Float32"),
        "ZeroPoint": _vector(builder, tensor.zero_points, "Int64"),
        "QuantizedDimension": tensor.dimension,
    }
    return _table(builder, "QuantizationParameters", fields)


def _kind_of(values: Sequence[int] | Sequence[float]) -> str:
    return "Float32" if any(isinstance(value, float) for value in values) else "Int32"


def _option(builder: Any, value: Any) -> Any:
    if isinstance(value, str):
        return builder.CreateString(value)
    return _vector(builder, value, _kind_of(value)) if isinstance(value, list) else value


def _operator(builder: Any, operator: Operator, codes: Sequence[OperatorVersion]) -> int:
    fields: dict[str, Any] = {
        "OpcodeIndex": codes.index(_operator_version(operator)),
        "Inputs": _vector(builder, operator.inputs, "Int32"),
        "Outputs": _vector(builder, operator.outputs, "Int32"),
    }
    if operator.intermediates:
        fields["Intermediates"] = _vector(builder, operator.intermediates, "Int32")
    if operator.custom:
        fields["CustomOptions"] = builder.CreateByteVector(operator.custom)
    if operator.table:
        options = {key: _option(builder, value) for key, value in operator.options.items()}
        fields["BuiltinOptionsType"] = getattr(tflite.BuiltinOptions, operator.table)
        fields["BuiltinOptions"] = _table(builder, operator.table, options)
    return _table(builder, "Operator", fields)
