"""TFLite operators → NNAPI operations: RULES, the table of all of them, one small function for each family of form.

A rule reads an operator's options and adds one operation, rarely more. It checks only what NNAPI's form cannot express
or what would be misread; whether the result is a valid model is `validation`'s business. Messages need not name the
operator, `translate` does. Forms: the operation documents of the HAL 1.0 to 1.3 and of AIDL.
"""

from __future__ import annotations

from nnfmq.hal.errors import InvalidArgument
from nnfmq.importers.tflite_file import Operator
from nnfmq.importers.tflite_operators import (
    data_movement_ops,
    elementwise_ops,
    image_ops,
    recurrent_ops,
    reduction_ops,
    slicing_ops,
    weighted_ops,
)
from nnfmq.importers.tflite_operators.conversion import Rule, Translation
from nnfmq.importers.tflite_operators.pruning import needed

__all__ = ["RULES", "Rule", "Translation", "needed", "translate"]

_FAMILIES = (elementwise_ops, image_ops, data_movement_ops, slicing_ops, weighted_ops, recurrent_ops, reduction_ops)

RULES: dict[str, Rule] = {name: rule for family in _FAMILIES for name, rule in family.RULES.items()}


def translate(graph: Translation, operator: Operator) -> None:
    """Add the operations that stand for `operator`. Raises InvalidArgument, naming the operator."""
    rule = RULES.get(operator.name)
    if rule is None:
        raise InvalidArgument(f"{operator} is not supported; it writes {_written(graph, operator)}")
    try:
        _check_form(rule, operator)
        rule.apply(graph, operator)
    except InvalidArgument as error:
        raise InvalidArgument(f"{operator}: {error}") from None


def _written(graph: Translation, operator: Operator) -> str:
    try:
        return str(graph.file.tensor(operator.outputs[0])) if operator.outputs else "no tensor"
    except InvalidArgument as error:
        return str(error)


def _check_form(rule: Rule, operator: Operator) -> None:
    _check_count("inputs", rule.input_counts, len(operator.inputs))
    _check_count("outputs", rule.output_counts, len(operator.outputs))
    if operator.options is None:
        if rule.needs_options:
            raise InvalidArgument(f"has no {rule.options}")
    elif operator.options_name != rule.options:
        raise InvalidArgument(f"has {operator.options_name} instead of {rule.options or 'no options'}")


def _check_count(what: str, counts: range, given: int) -> None:
    if given not in counts:
        allowed = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
        raise InvalidArgument(f"{given} {what}: {allowed} are allowed")
