"""Read a TFLite file of plain types as what `tflite_writer` takes, so that a tool can change a model and write it.

The importer's own reader does the checking (`nnfmq.importers.tflite_file`), so a corrupt file is refused here as it is
by `nnfmq.load`. Kept: what the importer reads of a file, that is tensors that something uses, operators and those
options. Dropped: metadata, descriptions, versions of operators. Refused: quantized tensors; nobody needs them here.
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

OMITTED = -1  # the index that stands for an optional input left out
_TYPES = {
    OperandType.TENSOR_FLOAT32: "FLOAT32",
    OperandType.TENSOR_FLOAT16: "FLOAT16",
    OperandType.TENSOR_INT32: "INT32",
    OperandType.TENSOR_BOOL8: "BOOL",
}


@dataclass(frozen=True)
class Graph:
    """A model: all indexes are places in `tensors`, and operators stand in the order of execution."""

    tensors: tuple[Tensor, ...]
    operators: tuple[Operator, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def written(self, description: str = "") -> bytes:
        """Return the file."""
        return tflite_writer.write(self.tensors, self.operators, self.inputs, self.outputs, description)

    def compacted(self) -> Graph:
        """Return the same model without the tensors that nothing uses; the others keep their order."""
        kept = _used(self.operators, self.inputs, self.outputs)
        return _renumbered([self.tensors[index] for index in kept], kept, self)


def read(data: bytes) -> Graph:
    """Return the model in a .tflite file. Raises InvalidArgument for a corrupt file, and for quantized types."""
    file = tflite_file.read(data)
    tables = {table.name: table for table in tflite_schema.OPTIONS.values()}
    operators = tuple(_operator(operator, tables) for operator in file.operators())
    kept = _used(operators, file.inputs, file.outputs)
    tensors = [_tensor(file.tensor(index)) for index in kept]
    return _renumbered(tensors, kept, Graph((), operators, file.inputs, file.outputs))


def _used(operators: Sequence[Operator], inputs: Sequence[int], outputs: Sequence[int]) -> list[int]:
    used = {*inputs, *outputs}
    for operator in operators:
        used.update(operator.inputs, operator.outputs)
    return sorted(used - {OMITTED})


def _renumbered(tensors: Sequence[Tensor], kept: Sequence[int], graph: Graph) -> Graph:
    places = {old: new for new, old in enumerate(kept)} | {OMITTED: OMITTED}

    def moved(indexes: Sequence[int]) -> tuple[int, ...]:
        return tuple(places[index] for index in indexes)

    operators = [replace(o, inputs=moved(o.inputs), outputs=moved(o.outputs)) for o in graph.operators]
    return Graph(tuple(tensors), tuple(operators), moved(graph.inputs), moved(graph.outputs))


def _tensor(tensor: tflite_file.TfliteTensor) -> Tensor:
    if tensor.type not in _TYPES:
        raise InvalidArgument(f"{tensor} is {tensor.type.name}: only {', '.join(_TYPES.values())} are read here")
    return Tensor(tensor.name, tensor.shape, _TYPES[tensor.type], None if tensor.data is None else bytes(tensor.data))


def _operator(operator: tflite_file.TfliteOperator, tables: dict[str, Table]) -> Operator:
    if operator.options is None:
        return Operator(operator.name, operator.inputs, operator.outputs)
    options = {name: value for name, value in _options(operator.options, tables[operator.options_name]) if value != []}
    return Operator(operator.name, operator.inputs, operator.outputs, operator.options_name, options)


def _options(options: Any, table: Table) -> list[tuple[str, Any]]:
    """Return each field of a generated options object with its value; vectors as lists."""
    return [(field.name, _value(options, field.name, isinstance(field.kind, Vector))) for field in table.fields]


def _value(options: Any, name: str, is_vector: bool) -> Any:
    if not is_vector:
        return getattr(options, name)()
    return getattr(options, f"{name}AsNumpy")().tolist() if getattr(options, f"{name}Length")() else []
