"""Write a .tflite file from plain descriptions of tensors and operators, with the builders of the `tflite` package.

`train_digits.py` and `quantize.py` write models with it, and so do the tests of the importer, invalid ones included:
nothing is checked here. A file has one subgraph, buffers aligned to 16 bytes as the schema requires, and one operator
code for each operator and version. Options have the schema's field names (``{"Padding": 0}``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import flatbuffers
import tflite

IDENTIFIER = b"TFL3"
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
    """A tensor, constant if it has `data`. `extra` has further scalar fields of the schema, such as IsVariable."""

    name: str
    shape: Sequence[int]
    type: str = "FLOAT32"
    data: bytes | None = None
    scales: Sequence[float] = ()
    zero_points: Sequence[int] = ()
    dimension: int = 0
    extra: Mapping[str, int] = field(default_factory=dict)
    sparsity: Sparsity | None = None


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


def write(
    tensors: Sequence[Tensor],
    operators: Sequence[Operator],
    inputs: Sequence[int],
    outputs: Sequence[int],
    description: str = "",
    subgraph_count: int = 1,
    metadata: bytes = b"",
) -> bytes:
    """Return the content of the file. `inputs` and `outputs` are tensor indexes.

    The file has `subgraph_count` copies of the subgraph, for tests of models with several. `metadata` is a FlatBuffer.
    """
    builder = flatbuffers.Builder(1024)
    codes = list(dict.fromkeys(map(_operator_version, operators)))
    constants = [tensor.data for tensor in tensors if tensor.data is not None]
    buffers = [_buffer(builder, data) for data in (b"", *constants, *([metadata] if metadata else []))]
    graph = _subgraph(builder, tensors, operators, codes, inputs, outputs)
    fields = {
        "Version": 3,
        "OperatorCodes": _offsets(builder, [_operator_code(builder, *code) for code in codes]),
        "Subgraphs": _offsets(builder, [graph] * subgraph_count),
        "Description": builder.CreateString(description),
        "Buffers": _offsets(builder, buffers),
    }
    if metadata:
        entry = {"Name": builder.CreateString("TFLITE_METADATA"), "Buffer": len(buffers) - 1}
        fields["Metadata"] = _offsets(builder, [_table(builder, "Metadata", entry)])
    builder.Finish(_table(builder, "Model", fields), IDENTIFIER)
    return bytes(builder.Output())


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


def _buffer(builder: Any, data: bytes) -> int:
    if not data:
        return _table(builder, "Buffer", {})
    builder.Prep(16, len(data))
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


def _subgraph(
    builder: Any,
    tensors: Sequence[Tensor],
    operators: Sequence[Operator],
    codes: Sequence[OperatorVersion],
    inputs: Sequence[int],
    outputs: Sequence[int],
) -> int:
    buffers: list[int] = []
    for tensor in tensors:  # buffer 0 is empty; those of constants follow in the order of the tensors
        buffers.append(0 if tensor.data is None else max(buffers, default=0) + 1)
    fields = {
        "Tensors": _offsets(builder, [_tensor(builder, *pair) for pair in zip(tensors, buffers, strict=True)]),
        "Inputs": _vector(builder, inputs, "Int32"),
        "Outputs": _vector(builder, outputs, "Int32"),
        "Operators": _offsets(builder, [_operator(builder, operator, codes) for operator in operators]),
    }
    return _table(builder, "SubGraph", fields)


def _tensor(builder: Any, tensor: Tensor, buffer: int) -> int:
    fields: dict[str, Any] = {
        "Shape": _vector(builder, tensor.shape, "Int32"),
        "Name": builder.CreateString(tensor.name),
        "Type": getattr(tflite.TensorType, tensor.type),
        "Buffer": buffer,
    }
    if tensor.scales:
        fields["Quantization"] = _quantization(builder, tensor)
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
        options = {
            key: _vector(builder, value, _kind_of(value)) if isinstance(value, list) else value
            for key, value in operator.options.items()
        }
        fields["BuiltinOptionsType"] = getattr(tflite.BuiltinOptions, operator.table)
        fields["BuiltinOptions"] = _table(builder, operator.table, options)
    return _table(builder, "Operator", fields)
