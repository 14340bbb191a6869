"""Write a TFLite file from plain descriptions of tensors and operators, through the `tflite` package's builders.

`tools/train_digits.py` and `tools/quantize.py` write models with it and the importer's tests write theirs, broken ones
included: nothing is checked here. One subgraph; buffers aligned at 16 as the schema asks; every operator code once.
Options are named as in the schema (``{"Padding": 0}``) and found by that name in the package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import flatbuffers
import tflite

IDENTIFIER = b"TFL3"
_FIRST_VERSIONS = {"BROADCAST_TO": 2}  # of all others it is 1
Code = tuple[str, int]  # an operator's name and version


@dataclass(frozen=True)
class Tensor:
    """A tensor; `data` makes it a constant. `extra` adds further scalar fields of the table, such as IsVariable."""

    name: str
    shape: Sequence[int]
    type: str = "FLOAT32"
    data: bytes | None = None
    scales: Sequence[float] = ()
    zero_points: Sequence[int] = ()
    dimension: int = 0
    extra: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Operator:
    """An operator by its name in BuiltinOperator; `table` names its options, for example Conv2DOptions.

    Any other name is that of a custom operator, whose options are the bytes `custom`. `intermediates` are tensors.
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
) -> bytes:
    """Return the file. `inputs` and `outputs` are the model's, as indexes of tensors."""
    builder = flatbuffers.Builder(1024)
    codes = list(dict.fromkeys(map(_code, operators)))
    constants = [tensor.data for tensor in tensors if tensor.data is not None]
    buffers = [_buffer(builder, data) for data in (b"", *constants)]
    graph = _subgraph(builder, tensors, operators, codes, inputs, outputs)
    fields = {
        "Version": 3,
        "OperatorCodes": _offsets(builder, [_operator_code(builder, *code) for code in codes]),
        "Subgraphs": _offsets(builder, [graph] * subgraph_count),
        "Description": builder.CreateString(description),
        "Buffers": _offsets(builder, buffers),
    }
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


def _numbers(builder: Any, values: Sequence[Any], kind: str) -> int:
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


def _code(operator: Operator) -> Code:
    return operator.name, max(operator.version, _FIRST_VERSIONS.get(operator.name, 1))


def _operator_code(builder: Any, name: str, version: int) -> int:
    number = getattr(tflite.BuiltinOperator, name, tflite.BuiltinOperator.CUSTOM)
    # Readers of both generations: the byte holds what fits, the other field the whole code.
    fields = {"DeprecatedBuiltinCode": min(number, 127), "BuiltinCode": number, "Version": version}
    if number == tflite.BuiltinOperator.CUSTOM:
        fields["CustomCode"] = builder.CreateString(name)
    return _table(builder, "OperatorCode", fields)


def _subgraph(
    builder: Any,
    tensors: Sequence[Tensor],
    operators: Sequence[Operator],
    codes: Sequence[Code],
    inputs: Sequence[int],
    outputs: Sequence[int],
) -> int:
    numbers: list[int] = []
    for tensor in tensors:  # buffer 0 is the empty one; constants follow in the order of the tensors
        numbers.append(0 if tensor.data is None else max(numbers, default=0) + 1)
    fields = {
        "Tensors": _offsets(builder, [_tensor(builder, *pair) for pair in zip(tensors, numbers, strict=True)]),
        "Inputs": _numbers(builder, inputs, "Int32"),
        "Outputs": _numbers(builder, outputs, "Int32"),
        "Operators": _offsets(builder, [_operator(builder, operator, codes) for operator in operators]),
    }
    return _table(builder, "SubGraph", fields)


def _tensor(builder: Any, tensor: Tensor, buffer: int) -> int:
    fields: dict[str, Any] = {
        "Shape": _numbers(builder, tensor.shape, "Int32"),
        "Name": builder.CreateString(tensor.name),
        "Type": getattr(tflite.TensorType, tensor.type),
        "Buffer": buffer,
    }
    if tensor.scales:
        fields["Quantization"] = _quantization(builder, tensor)
    return _table(builder, "Tensor", fields | dict(tensor.extra))


def _quantization(builder: Any, tensor: Tensor) -> int:
    fields = {
        "Scale": _numbers(builder, tensor.scales, "Float32"),
        "ZeroPoint": _numbers(builder, tensor.zero_points, "Int64"),
        "QuantizedDimension": tensor.dimension,
    }
    return _table(builder, "QuantizationParameters", fields)


def _operator(builder: Any, operator: Operator, codes: Sequence[Code]) -> int:
    fields: dict[str, Any] = {
        "OpcodeIndex": codes.index(_code(operator)),
        "Inputs": _numbers(builder, operator.inputs, "Int32"),
        "Outputs": _numbers(builder, operator.outputs, "Int32"),
    }
    if operator.intermediates:
        fields["Intermediates"] = _numbers(builder, operator.intermediates, "Int32")
    if operator.custom:
        fields["CustomOptions"] = builder.CreateByteVector(operator.custom)
    if operator.table:
        options = {
            key: _numbers(builder, value, "Int32") if isinstance(value, list) else value
            for key, value in operator.options.items()
        }
        fields["BuiltinOptionsType"] = getattr(tflite.BuiltinOptions, operator.table)
        fields["BuiltinOptions"] = _table(builder, operator.table, options)
    return _table(builder, "Operator", fields)
