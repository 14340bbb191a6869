"""IF and WHILE: what their argument lists look like. They have no kernel: engines call the subgraphs they name.

    IF     condition (BOOL8, one element), then-model, else-model, inputs of the branches → outputs of the branches
    WHILE  condition model, body model, m input-outputs, k states, n inputs → the m, as the last round left them

Which operands of outer graph and subgraphs go together, and that they match, is `validation.subgraph_boundaries`'s.
"""

from __future__ import annotations

from typing import Any, NoReturn

from nnfmq.hal.types import OperandType, OperationType
from nnfmq.operations.signature import ANY, B8, V1_3, Declaration, Overload, Parameter, Variant, data

FIRST_OUTER_INPUT = {OperationType.IF: 3, OperationType.WHILE: 2}
"""Where the operands begin that are handed to the subgraphs; also: the operations that call subgraphs."""


def no_shape_rule(*shapes: Any, **attributes: Any) -> NoReturn:
    """Raise AssertionError: the shapes are those that a subgraph gives."""
    raise AssertionError("control flow has no shape rule")


def _model(name: str) -> Parameter:
    return data(name, OperandType.SUBGRAPH)


def _declared(code: OperationType, *parameters: Parameter) -> Declaration:
    handed_on = data("outer_inputs", ANY, optional=True, repeated=True)
    return Declaration(
        code,
        since=V1_3,
        overloads=(Overload((*parameters, handed_on), {3: V1_3}),),
        variants=(Variant({}, V1_3),),
        shape=no_shape_rule,
        outputs=(ANY,),
        repeated_outputs=True,
    )


DECLARATIONS = (
    _declared(OperationType.IF, data("condition", B8), _model("then_model"), _model("else_model")),
    _declared(OperationType.WHILE, _model("condition_model"), _model("body_model")),
)
