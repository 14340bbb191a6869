"""Validation of IF and WHILE against the subgraphs that they call: operand counts, and operands that match.

`validation.model_validation` has validated all subgraphs before, so indexes and subgraph references are valid here. Two
operands match if type, scale, zero point, per-channel scales, extension data and dimensions are equal. The HAL requires
all dimensions at a boundary to be known. An omitted outer operand (NO_VALUE) needs no known size.

    N-VAL-18 IF: counts, condition, operands of a branch
    N-VAL-19 WHILE: counts, the condition model's output, operands of condition and body
    N-VAL-20 an operand at a boundary has an unknown size
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct

from nnfmq.hal.extension_codes import is_extension
from nnfmq.hal.types import (
    LifeTime,
    Model,
    Operand,
    OperandType,
    Operation,
    OperationType,
    Subgraph,
    element_bytes,
    has_unspecified_dimensions,
)
from nnfmq.operations.if_while import FIRST_OUTER_INPUT
from nnfmq.validation.rules import require

_RULES = {OperationType.IF: "N-VAL-18", OperationType.WHILE: "N-VAL-19"}


def require_counts(operation: Operation, where: str) -> None:
    """Require that an IF or WHILE has at least 3 inputs and 1 output. Accept every other operation."""
    rule = _RULES.get(operation.type)
    if rule is not None:
        counts = len(operation.inputs), len(operation.outputs)
        require(counts[0] >= 3, rule, f"{where}: {counts[0]} inputs, at least 3 are required")
        require(counts[1] >= 1, rule, f"{where}: no output, at least 1 is required")


def validate_boundaries(model: Model, allow_unspecified: bool) -> None:
    """Validate every IF and WHILE against the subgraphs that it calls.

    Args:
        allow_unspecified: Accept operands of unknown size at a boundary.

    Raises:
        InvalidArgument: If an IF or WHILE does not match its subgraphs.
    """
    for index, subgraph in enumerate((model.main, *model.referenced)):
        graph = "" if index == 0 else f"referenced subgraph {index - 1}, "
        for position, operation in enumerate(subgraph.operations):
            if operation.type in _RULES:
                where = f"{graph}operation {position} ({operation.type.name})"
                _validate(model, subgraph, operation, where, allow_unspecified)


def _validate(model: Model, subgraph: Subgraph, operation: Operation, where: str, allow_unspecified: bool) -> None:
    arguments = [subgraph.operands[index] for index in operation.inputs]
    first = FIRST_OUTER_INPUT[operation.type]
    callees = [model.referenced[operand.location.offset] for operand in arguments[first - 2 : first]]
    outputs = [subgraph.operands[index] for index in operation.outputs]
    boundary = _Boundary(_RULES[operation.type], where, allow_unspecified)
    if operation.type == OperationType.IF:
        boundary.check_if(arguments[0], callees, arguments[first:], outputs)
    else:
        boundary.check_while(callees, arguments[first:], outputs)


class _Boundary(Struct, frozen=True):
    """Checks of one IF or WHILE: the rule's id, the operation's name in messages, whether sizes may be unknown."""

    rule: str
    where: str
    allow_unspecified: bool

    def check_if(
        self, condition: Operand, branches: Sequence[Subgraph], inputs: Sequence[Operand], outputs: Sequence[Operand]
    ) -> None:
        """Require that both branches take all outer inputs and return all outer outputs."""
        self._check_condition(condition, "the condition")
        for name, branch in zip(("then", "else"), branches, strict=True):
            self._check_pairs(f"{name}-model, input", inputs, _inputs(branch))
            self._check_pairs(f"{name}-model, output", outputs, _outputs(branch))

    def check_while(self, callees: Sequence[Subgraph], inputs: Sequence[Operand], outputs: Sequence[Operand]) -> None:
        """Require that condition and body take all outer inputs, and that the outputs match the loop's state.

        The body's outputs replace the first outer inputs in the next iteration; the WHILE's outputs are the first of
        the body's outputs.
        """
        condition, body = callees
        self._check_pairs("condition model, input", inputs, _inputs(condition))
        self._check_pairs("body model, input", inputs, _inputs(body))
        condition_outputs, body_outputs = _outputs(condition), _outputs(body)
        count = len(condition_outputs)
        self._require(count == 1, f"the condition model has {count} outputs, exactly 1 is required")
        self._check_condition(condition_outputs[0], "the condition model's output")
        self._require(
            len(inputs) >= len(body_outputs) >= len(outputs),
            f"{len(inputs)} inputs, {len(body_outputs)} outputs of the body model, {len(outputs)} outputs; "
            "each count may be at most the one before it",
        )
        self._check_pairs("body model, output", inputs[: len(body_outputs)], body_outputs)
        self._check_pairs("body model, output", outputs, body_outputs[: len(outputs)])

    def _require(self, condition: bool, message: str) -> None:
        require(condition, self.rule, f"{self.where}: {message}")

    def _check_condition(self, operand: Operand, name: str) -> None:
        self._require(
            operand.type == OperandType.TENSOR_BOOL8, f"{name} is {operand.type.name}, TENSOR_BOOL8 is required"
        )
        self._check_size(operand, name)
        known = bool(operand.dimensions) and 0 not in operand.dimensions
        one = not known or math.prod(operand.dimensions) == 1
        self._require(one, f"{name} has dimensions {operand.dimensions}, exactly 1 element is required")

    def _check_pairs(self, name: str, outer: Sequence[Operand], inner: Sequence[Operand]) -> None:
        counts = f"{len(inner)} in the subgraph, {len(outer)} outside"
        self._require(len(outer) == len(inner), f"{name}s: {counts}")
        for index, (operand, other) in enumerate(zip(outer, inner, strict=True)):
            self._check_size(operand, f"the outer operand of {name} {index}")
            self._check_size(other, f"{name} {index}")
            self._require(_match(operand, other), f"{name} {index} is {_kind(other)}, outside it is {_kind(operand)}")

    def _check_size(self, operand: Operand, name: str) -> None:
        if self.allow_unspecified or operand.lifetime == LifeTime.NO_VALUE:
            return
        if is_extension(operand.type) and not element_bytes(operand.type):
            return  # an unknown extension: only its vendor knows whether the type is a scalar
        require(
            not has_unspecified_dimensions(operand.type, operand.dimensions),
            "N-VAL-20",
            f"{self.where}: {name} has dimensions {operand.dimensions}, all must be known at boundaries",
        )


def _inputs(subgraph: Subgraph) -> list[Operand]:
    return [subgraph.operands[index] for index in subgraph.input_indexes]


def _outputs(subgraph: Subgraph) -> list[Operand]:
    return [subgraph.operands[index] for index in subgraph.output_indexes]


def _kind(operand: Operand) -> str:
    channels = "" if operand.channel_quant is None else f", {operand.channel_quant}"
    scale = f"scale {operand.scale}, zero point {operand.zero_point}"
    return f"{operand.type.name} {operand.dimensions} ({scale}{channels})"


def _match(first: Operand, second: Operand) -> bool:
    """Return True if types and quantization are equal, and dimensions too as far as both are known."""
    same = (first.type, first.scale, first.zero_point, first.channel_quant, first.extension_data)
    if same != (second.type, second.scale, second.zero_point, second.channel_quant, second.extension_data):
        return False
    if not first.dimensions or not second.dimensions:
        return True
    pairs = zip(first.dimensions, second.dimensions, strict=False)
    return len(first.dimensions) == len(second.dimensions) and all(a == b or 0 in (a, b) for a, b in pairs)
