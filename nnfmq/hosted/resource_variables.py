"""Access to the resource variables of a .tflite file, for which LiteRT's interface has no functions.

`with_access` adds two subgraphs to the file, one that reads all variables and one that assigns them. Variables belong
to an interpreter, not to a subgraph, so whoever invokes these gets and sets what the model's own subgraphs use, which
stay as they are.
"""

from __future__ import annotations

from copy import copy
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from nnfmq.hal.errors import InvalidArgument

__all__ = ["initialize", "with_access"]


class _Variable(NamedTuple):
    """The operator that gives the handle, and the tensors of handle and value."""

    opened: Any
    handle: Any
    value: Any


def with_access(content: bytes, file: Any, schema: Any) -> tuple[bytes, list[str]]:
    """Return a file with two more subgraphs, and the names of the variables that they read and assign.

    The first one initializes all variables, unless that was done, and its outputs are their values; the inputs of the
    second one are what it assigns to them. In both, tensor 2i is the handle of variable i, and 2i + 1 its value.
    Those that CALL_ONCE initializes come first, as in nnfmq's importer. Without variables the file remains as it is.

    Args:
        content: The file, which LiteRT has verified.
        file: Its `Model`.
        schema: The module `ai_edge_litert.schema_py_generated`.

    Raises:
        InvalidArgument: If the file has parts that its FlatBuffer does not contain, or a variable of unknown type.
    """
    codes = map(file.OperatorCodes, range(file.OperatorCodesLength()))
    if all(code.BuiltinCode() != schema.BuiltinOperator.VAR_HANDLE for code in codes):
        return content, []
    import flatbuffers

    model = schema.ModelT.InitFromPackedBuf(content)
    code = partial(_code, model, schema)
    once = [op for graph in model.subgraphs for op in graph.operators if op.opcodeIndex == code("CALL_ONCE")]
    initial = {op.builtinOptions.initSubgraphIndex for op in once}
    variables: dict[tuple[bytes, bytes], _Variable] = {}
    for number in sorted(range(len(model.subgraphs)), key=lambda number: number not in initial):
        graph = model.subgraphs[number]
        found = _used(graph, code("VAR_HANDLE"), code("READ_VARIABLE"), code("ASSIGN_VARIABLE"))
        variables |= {key: variable for key, variable in found.items() if key not in variables}
    if any(buffer.offset for buffer in model.buffers):
        raise InvalidArgument("resource variables in a file with buffers outside its FlatBuffer are not supported")
    model.subgraphs += _subgraphs([*variables.values()], once, code, schema)
    builder = flatbuffers.Builder(len(content))
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output()), [name.decode("utf-8", "replace") for _, name in variables]


def initialize(calls: Any, reader: int, count: int) -> None:
    """Compute the first values of all variables, zeros unless the file has others, and allocate memory for new ones.

    Args:
        calls: The functions of an interpreter of a file that `with_access` made.
        reader: The first subgraph that was added; its outputs are the first values.
        count: How many variables there are.
    """
    writer, values = reader + 1, range(1, 2 * count, 2)
    calls.AllocateTensors(writer)
    for value in values:
        zeros = np.zeros_like(calls.GetTensor(value, writer))
        calls.SetTensor(value, zeros, writer)  # LiteRT reads what was not assigned from memory that is not set
    calls.Invoke(writer)
    calls.AllocateTensors(reader)
    calls.Invoke(reader)
    for value in values:
        calls.ResizeInputTensor(value, calls.TensorSize(value, reader), False, writer)
    calls.AllocateTensors(writer)


def _code(model: Any, schema: Any, name: str) -> int:
    """Return the index of an operator's code in a file, to which it is added if it is not there."""
    number = getattr(schema.BuiltinOperator, name)
    for index, code in enumerate(model.operatorCodes):
        if code.builtinCode == number:
            return index
    added = schema.OperatorCodeT()
    added.builtinCode, added.deprecatedBuiltinCode, added.version = number, 127, 1
    model.operatorCodes.append(added)
    return len(model.operatorCodes) - 1


def _used(graph: Any, var_handle: int, read: int, assign: int) -> dict[tuple[bytes, bytes], _Variable]:
    """Return the variables whose handles a subgraph makes, by container and name.

    Raises:
        InvalidArgument: If the subgraph itself neither reads nor assigns one: its type would have to be followed.
    """
    values = {op.outputs[0]: None for op in graph.operators if op.opcodeIndex == var_handle}
    for op in graph.operators:
        if op.opcodeIndex in (read, assign) and op.inputs[0] in values:
            values[op.inputs[0]] = graph.tensors[op.outputs[0] if op.opcodeIndex == read else op.inputs[1]]
    found: dict[tuple[bytes, bytes], _Variable] = {}
    for op in graph.operators:
        if op.opcodeIndex == var_handle:
            options, value = op.builtinOptions, copy(values[op.outputs[0]])
            name = options.sharedName or b""
            if value is None:
                raise InvalidArgument(f"the variable {name!r} is neither read nor assigned where its handle is made")
            value.buffer, value.isVariable = 0, False  # neither a constant nor a variable tensor
            found[options.container or b"", name] = _Variable(op, graph.tensors[op.outputs[0]], value)
    return found


def _subgraphs(variables: list[_Variable], once: list[Any], code: Any, schema: Any) -> list[Any]:
    reader, writer = schema.SubGraphT(), schema.SubGraphT()
    reader.tensors = writer.tensors = [tensor for variable in variables for tensor in variable[1:]]
    reader.inputs, writer.outputs = [], []
    reader.outputs = writer.inputs = [2 * position + 1 for position in range(len(variables))]
    reader.operators, writer.operators = list(once), []
    for position, variable in enumerate(variables):
        opened, handle, value = copy(variable.opened), 2 * position, 2 * position + 1
        opened.outputs = [handle]
        reader.operators += [opened, _operator(schema, code("READ_VARIABLE"), [handle], [value])]
        writer.operators += [opened, _operator(schema, code("ASSIGN_VARIABLE"), [handle, value], [])]
    return [reader, writer]


def _operator(schema: Any, code: int, inputs: list[int], outputs: list[int]) -> Any:
    operator = schema.OperatorT()
    operator.opcodeIndex, operator.inputs, operator.outputs = code, inputs, outputs
    return operator
