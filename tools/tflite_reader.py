"""Read a float .tflite file into the descriptions that `tflite_writer` takes, so that tools can modify a model.

The importer's reader (`nnfmq.importers.tflite_file`) verifies the file, so a corrupt file is rejected as by
`nnfmq.load`. The result has the operators with their options, and the tensors that they use. Metadata, descriptions and
operator versions are dropped. Quantized tensors are rejected, because no tool needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import tflite_writer
from tflite_writer import Operator, Tensor

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.types import OperandType
from nnfmq.importers import tflite_file, tflite_schema
from nnfmq.importers.flatbuffer_verifier import Table, Vector

OMITTED = -1  # the index of an omitted optional input
_TYPES = {
    OperandType.TENSOR_FLOAT32: "FLOAT32",
    OperandType.TENSOR_FLOAT16: "FLOAT16",
    OperandType.TENSOR_INT32: "INT32",
    OperandType.TENSOR_BOOL8: "BOOL",
}


@dataclass(frozen=True)
class Graph:
    """A model with one subgraph: `inputs` and `outputs` are indexes of `tensors`; operators are in execution order."""

    tensors: tuple[Tensor, ...]
    operators: tuple[Operator, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def to_bytes(self, description: str = "") -> bytes:
        """Return the content of a .tflite file with this model."""
        return tflite_writer.write(self.tensors, self.operators, self.inputs, self.outputs, description)

    def without_unused_tensors(self) -> Graph:
        """Return the same model without unused tensors; the others keep their order."""
        kept = _used_tensors(self.operators, self.inputs, self.outputs)
        return _renumber_tensors([self.tensors[index] for index in kept], kept, self)


def read(data: bytes) -> Graph:
    """Return the model in the .tflite file `data`.

    Raises:
        InvalidArgument: If the file is corrupt or has a tensor of an unsupported type.
    """
    file = tflite_file.read(data)
    if file.subgraph_count != 1:
        raise InvalidArgument(f"{file.subgraph_count} subgraphs: only models of exactly one are supported")
    tables = {table.name: table for table in tflite_schema.OPTIONS.values()}
    operators = tuple(_operator(operator, tables) for operator in file.operators())
    kept = _used_tensors(operators, file.inputs, file.outputs)
    tensors = [_tensor(file.tensor(index)) for index in kept]
    return _renumber_tensors(tensors, kept, Graph((), operators, file.inputs, file.outputs))


def _used_tensors(operators: Sequence[Operator], inputs: Sequence[int], outputs: Sequence[int]) -> list[int]:
    used = {*inputs, *outputs}
    for operator in operators:
        used.update(operator.inputs, operator.outputs)
    return sorted(used - {OMITTED})


def _renumber_tensors(tensors: Sequence[Tensor], kept: Sequence[int], graph: Graph) -> Graph:
    """Return `graph` with `tensors`, which have the indexes `kept` in it."""
    new_indexes = {old: new for new, old in enumerate(kept)} | {OMITTED: OMITTED}

    def renumber(indexes: Sequence[int]) -> tuple[int, ...]:
        return tuple(new_indexes[index] for index in indexes)

    operators = [replace(o, inputs=renumber(o.inputs), outputs=renumber(o.outputs)) for o in graph.operators]
    return Graph(tuple(tensors), tuple(operators), renumber(graph.inputs), renumber(graph.outputs))


def _tensor(tensor: tflite_file.TfliteTensor) -> Tensor:
    if tensor.type not in _TYPES:
        raise InvalidArgument(f"{tensor} is {tensor.type.name}: only {', '.join(_TYPES.values())} are supported")
    return Tensor(tensor.name, tensor.shape, _TYPES[tensor.type], None if tensor.data is None else bytes(tensor.data))


def _operator(operator: tflite_file.TfliteOperator, tables: dict[str, Table]) -> Operator:
    if operator.options is None:
        return Operator(operator.name, operator.inputs, operator.outputs)
    options = {name: value for name, value in _options(operator.options, tables[operator.options_name]) if value != []}
    return Operator(operator.name, operator.inputs, operator.outputs, operator.options_name, options)


def _options(options: Any, table: Table) -> list[tuple[str, Any]]:
    """Return the fields of a generated options object and their values; vectors as lists."""
    return [(field.name, _value(options, field.name, isinstance(field.kind, Vector))) for field in table.fields]


def _value(options: Any, name: str, is_vector: bool) -> Any:
    if not is_vector:
        return getattr(options, name)()
    return getattr(options, f"{name}AsNumpy")().tolist() if getattr(options, f"{name}Length")() else []
