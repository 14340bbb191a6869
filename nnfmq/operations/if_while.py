"""IF and WHILE: their argument lists. They have no kernel; engines execute the subgraphs.

    IF     condition (BOOL8, one element), then-model, else-model, inputs of the branches → outputs of the branches
    WHILE  condition model, body model, m input-outputs, k states, n inputs → the m after the last iteration

`validation.subgraph_boundaries` checks that the operands match those of the subgraphs.
"""

from __future__ import annotations

from typing import Any, NoReturn

from nnfmq.hal.types import OperandType, OperationType
from nnfmq.operations.signature import ANY, B8, V1_3, Declaration, Overload, Parameter, Variant, data

FIRST_OUTER_INPUT = {OperationType.IF: 3, OperationType.WHILE: 2}
"""Position of the first argument that is passed to the subgraphs. The keys are all operations that call subgraphs."""


def no_shape_rule(*shapes: Any, **attributes: Any) -> NoReturn:
    """Raise AssertionError: the shapes are those of a subgraph's outputs."""
    raise AssertionError("control flow has no shape rule")


def _model(name: str) -> Parameter:
    return data(name, OperandType.SUBGRAPH)


def _control_flow_declaration(code: OperationType, *parameters: Parameter) -> Declaration:
    outer_inputs = data("outer_inputs", ANY, optional=True, repeated=True)
    return Declaration(
        code,
        since=V1_3,
        overloads=(Overload((*parameters, outer_inputs), {3: V1_3}),),
        variants=(Variant({}, V1_3),),
        shape=no_shape_rule,
        outputs=(ANY,),
        repeated_outputs=True,
    )


DECLARATIONS = (
    _control_flow_declaration(OperationType.IF, data("condition", B8), _model("then_model"), _model("else_model")),
    _control_flow_declaration(OperationType.WHILE, _model("condition_model"), _model("body_model")),
)
