"""What IF and WHILE hand to their subgraphs, and get back: counts, and operands that match one another.

All subgraphs have passed the rules of `validation.model` before; so indexes and references are good. Two operands match
when type, scale, zero point, per-channel scales and extension data are equal, and their dimensions are; at the HAL's
level all of them are known. An omitted outer operand (NO_VALUE) has a size no more than it has a value.

    N-VAL-18 IF: counts, condition, operands of a branch
    N-VAL-19 WHILE: counts, the condition model's output, operands of condition and body
    N-VAL-20 an operand at a boundary has an unknown size
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nnfmq.hal.errors import InvalidArgument
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
    is_scalar,
)
from nnfmq.operations.if_while import FIRST_OUTER_INPUT

_RULES = {OperationType.IF: "N-VAL-18", OperationType.WHILE: "N-VAL-19"}


def _require(condition: bool, rule: str, message: str) -> None:
    if not condition:
        raise InvalidArgument(f"{rule}: {message}")


def require_counts(operation: Operation, where: str) -> None:
    """Require that an IF or WHILE has at least 3 inputs and an output; of others, nothing."""
    rule = _RULES.get(operation.type)
    if rule is not None:
        counts = len(operation.inputs), len(operation.outputs)
        _require(counts[0] >= 3, rule, f"{where}: {counts[0]} inputs, needed are 3 or more")
        _require(counts[1] >= 1, rule, f"{where}: no output")


def validate_boundaries(model: Model, allow_unspecified: bool) -> None:
    """Raise InvalidArgument unless every IF and WHILE fits the subgraphs that it names."""
    for number, subgraph in enumerate((model.main, *model.referenced)):
        graph = "" if number == 0 else f"referenced subgraph {number - 1}, "
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


@dataclass(frozen=True, slots=True)
class _Boundary:
    """One IF or WHILE: its rule's id, what to call it in messages, and whether sizes may be unknown."""

    rule: str
    where: str
    allow_unspecified: bool

    def check_if(
        self, condition: Operand, branches: Sequence[Subgraph], inputs: Sequence[Operand], outputs: Sequence[Operand]
    ) -> None:
        """Both branches take all outer inputs and give all outer outputs."""
        self._check_condition(condition, "the condition")
        for name, branch in zip(("then", "else"), branches, strict=True):
            self._check_pairs(f"{name}-model, input", inputs, _inputs(branch))
            self._check_pairs(f"{name}-model, output", outputs, _outputs(branch))

    def check_while(self, callees: Sequence[Subgraph], inputs: Sequence[Operand], outputs: Sequence[Operand]) -> None:
        """Both models take all outer inputs; the body gives the first of them anew, the WHILE the first of those."""
        condition, body = callees
        self._check_pairs("condition model, input", inputs, _inputs(condition))
        self._check_pairs("body model, input", inputs, _inputs(body))
        answers, results = _outputs(condition), _outputs(body)
        self._require(len(answers) == 1, f"the condition model has {len(answers)} outputs, needed is 1")
        self._check_condition(answers[0], "the condition model's output")
        counts = f"{len(inputs)} inputs, {len(results)} outputs of the body model, {len(outputs)} outputs"
        self._require(len(inputs) >= len(results) >= len(outputs), f"{counts}; each may be as many as the one before")
        self._check_pairs("body model, output", inputs[: len(results)], results)
        self._check_pairs("body model, output", outputs, results[: len(outputs)])

    def _require(self, condition: bool, message: str) -> None:
        _require(condition, self.rule, f"{self.where}: {message}")

    def _check_condition(self, operand: Operand, name: str) -> None:
        self._require(operand.type == OperandType.TENSOR_BOOL8, f"{name} is {operand.type.name}, not TENSOR_BOOL8")
        self._check_size(operand, name)
        known = bool(operand.dimensions) and 0 not in operand.dimensions
        one = not known or math.prod(operand.dimensions) == 1
        self._require(one, f"{name} has dimensions {operand.dimensions}, needed is one element")

    def _check_pairs(self, name: str, outer: Sequence[Operand], inner: Sequence[Operand]) -> None:
        self._require(len(outer) == len(inner), f"{name}s: {len(inner)} there, {len(outer)} outside")
        for number, (operand, other) in enumerate(zip(outer, inner, strict=True)):
            self._check_size(operand, f"what goes with {name} {number}")
            self._check_size(other, f"{name} {number}")
            self._require(_match(operand, other), f"{name} {number} is {_kind(other)}, outside it is {_kind(operand)}")

    def _check_size(self, operand: Operand, name: str) -> None:
        if self.allow_unspecified or is_scalar(operand.type) or operand.lifetime == LifeTime.NO_VALUE:
            return
        if is_extension(operand.type) and not element_bytes(operand.type):
            return  # whether it is a scalar is known to its extension alone
        known = bool(operand.dimensions) and 0 not in operand.dimensions
        _require(known, "N-VAL-20", f"{self.where}: {name} has dimensions {operand.dimensions}")


def _inputs(subgraph: Subgraph) -> list[Operand]:
    return [subgraph.operands[index] for index in subgraph.input_indexes]


def _outputs(subgraph: Subgraph) -> list[Operand]:
    return [subgraph.operands[index] for index in subgraph.output_indexes]


def _kind(operand: Operand) -> str:
    channels = "" if operand.channel_quant is None else f", {operand.channel_quant}"
    scale = f"scale {operand.scale}, zero point {operand.zero_point}"
    return f"{operand.type.name} {operand.dimensions} ({scale}{channels})"


def _match(first: Operand, second: Operand) -> bool:
    """Return True if two operands are of one kind, and their dimensions agree where both are known."""
    same = (first.type, first.scale, first.zero_point, first.channel_quant, first.extension_data)
    if same != (second.type, second.scale, second.zero_point, second.channel_quant, second.extension_data):
        return False
    mine, theirs = first.dimensions, second.dimensions
    if not mine or not theirs:
        return True
    return len(mine) == len(theirs) and all(a == b or 0 in (a, b) for a, b in zip(mine, theirs, strict=True))
