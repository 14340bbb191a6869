"""What the data leaves out because AOSP derives it when it runs: three more kinds of test from a test model.

unknown_output_shapes  all extents of main's outputs 0, rank kept; the shapes have to be reported
insufficient_output    the same, and the first output's buffer one byte short
int8_coupling          uint8 operands made int8: 128 taken from the zero point and from each value; a device has both
                       models or neither, and the outputs of both are the same, 128 apart
"""

from __future__ import annotations

import base64
from dataclasses import replace

from nnfmq.conformance.testmodels import Line, TestModel, operation_types
from nnfmq.hal.types import Model, OperationType

UNKNOWN_OUTPUT_SHAPES = "unknown_output_shapes"
INT8_COUPLING = "int8_coupling"
INSUFFICIENT_OUTPUT = "insufficient_output"
KINDS = (UNKNOWN_OUTPUT_SHAPES, INT8_COUPLING, INSUFFICIENT_OUTPUT)

_UNSIGNED, _SIGNED = "TENSOR_QUANT8_ASYMM", "TENSOR_QUANT8_ASYMM_SIGNED"
_NOT_COUPLED = {"HASHTABLE_LOOKUP", "LSH_PROJECTION", "PAD_V2", "CAST", "QUANTIZED_16BIT_LSTM"}
_SHAPES_STAY = {OperationType.RANK, OperationType.IF, OperationType.WHILE}


def kinds_of(test: TestModel) -> list[str]:
    """Return the kinds that are derived from a test model."""
    return [kind for kind, applies in zip(KINDS, _applicable(test), strict=True) if applies]


def _applicable(test: TestModel) -> tuple[bool, bool, bool]:
    is_dynamic = not test.must_fail and not operation_types(test.line) & _SHAPES_STAY
    has_room_to_lose = bool(test.expected) and test.expected[0].nbytes > 1
    return is_dynamic, is_coupled(test.line), is_dynamic and has_room_to_lose


def with_unknown_output_shapes(model: Model) -> Model:
    """Return the model with all extents of its outputs unknown; the rank is kept."""
    operands = list(model.main.operands)
    for i in model.main.output_indexes:
        operands[i] = replace(operands[i], dimensions=(0,) * len(operands[i].dimensions))
    return replace(model, main=replace(model.main, operands=tuple(operands)))


def is_unsigned(operand: Line) -> bool:
    """Return True for an operand that `signed` moves by 128."""
    return bool(operand["type"] == _UNSIGNED)


def is_coupled(line: Line) -> bool:
    """Return True for test models that AOSP also runs with int8 in place of uint8."""
    graph = line["main"]
    one = len(graph["operations"]) == 1 and graph["operations"][0]["type"] not in _NOT_COUPLED
    return one and not line["expectFailure"] and any(o["type"] == _UNSIGNED for o in graph["operands"])


def signed(line: Line) -> Line:
    """Return the line with int8 in place of uint8: 128 is taken from zero points and values."""
    main, *referenced = map(_signed_subgraph, (line["main"], *line["referenced"]))
    criteria = {_SIGNED if type == _UNSIGNED else type: rule for type, rule in line.get("criteria", {}).items()}
    return {**line, "main": main, "referenced": referenced, "criteria": criteria}


def _signed_subgraph(graph: Line) -> Line:
    return {**graph, "operands": [_signed_operand(operand) for operand in graph["operands"]]}


def _signed_operand(operand: Line) -> Line:
    if operand["type"] != _UNSIGNED:
        return operand
    data = operand["data"]
    if data:
        data = base64.b64encode(bytes(byte ^ 0x80 for byte in base64.b64decode(data))).decode()
    return {**operand, "type": _SIGNED, "zeroPoint": operand["zeroPoint"] - 128, "data": data}
