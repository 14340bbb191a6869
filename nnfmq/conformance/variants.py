"""Variants: three more kinds of test that are derived from a test model, as AOSP derives them at run time.

unknown_output_shapes  all dimensions of main's outputs are 0 (unknown), with the same rank; shapes must be reported
insufficient_output    the same, and the first output's buffer is one byte too small
int8_coupling          uint8 operands become int8: 128 is subtracted from zero points and values; a device supports both
                       models or neither, and their outputs differ by 128
"""

from __future__ import annotations

import base64

from msgspec.structs import replace

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
    """Return the kinds that apply to a test model."""
    return [kind for kind, applies in zip(KINDS, _applicable(test), strict=True) if applies]


def _applicable(test: TestModel) -> tuple[bool, bool, bool]:
    is_dynamic = not test.must_fail and not operation_types(test.line) & _SHAPES_STAY
    can_shrink = bool(test.expected) and test.expected[0].nbytes > 1
    return is_dynamic, is_coupled(test.line), is_dynamic and can_shrink


def with_unknown_output_shapes(model: Model) -> Model:
    """Return the model with all dimensions of its outputs unknown, and their rank unchanged."""
    operands = list(model.main.operands)
    for i in model.main.output_indexes:
        operands[i] = replace(operands[i], dimensions=(0,) * len(operands[i].dimensions))
    return replace(model, main=replace(model.main, operands=tuple(operands)))


def is_unsigned(operand: Line) -> bool:
    """Return whether `signed` converts an operand."""
    return bool(operand["type"] == _UNSIGNED)


def is_coupled(line: Line) -> bool:
    """Return whether AOSP also runs a test model with int8 in place of uint8."""
    graph = line["main"]
    one = len(graph["operations"]) == 1 and graph["operations"][0]["type"] not in _NOT_COUPLED
    return one and not line["expectFailure"] and any(o["type"] == _UNSIGNED for o in graph["operands"])


def signed(line: Line) -> Line:
    """Return the test model with int8 in place of uint8: 128 is subtracted from zero points and values."""
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
