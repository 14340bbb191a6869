"""IF and WHILE: their argument lists. They have no kernel; engines execute the subgraphs.

    IF     condition (BOOL8, one element), then-model, else-model, inputs of the branches → outputs of the branches
    WHILE  condition model, body model, m input-outputs, k states, n inputs → the m after the last iteration

`validation.models` checks that the operands match those of the subgraphs.
"""

from __future__ import annotations

from typing import Any, NoReturn

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.types import LifeTime, Model, OperandType, Operation, OperationType, Subgraph
from nnfmq.operations import declaration as op

__all__ = ["NESTING_MAX", "callee_indexes", "no_shape_rule", "reachable_subgraphs", "require_nesting"]

FIRST_OUTER_INPUT = {OperationType.IF: 3, OperationType.WHILE: 2}
"""Position of the first argument that is passed to the subgraphs. The keys are all operations that call subgraphs."""


def no_shape_rule(*shapes: Any, **attributes: Any) -> NoReturn:
    """Raise AssertionError: the shapes are those of a subgraph's outputs."""
    raise AssertionError("control flow has no shape rule")


def _model(name: str) -> op.Parameter:
    return op.data(name, OperandType.SUBGRAPH)


def _control_flow_declaration(code: OperationType, *parameters: op.Parameter) -> op.Declaration:
    outer_inputs = op.data("outer_inputs", op.ANY, optional=True, repeated=True)
    return op.Declaration(
        code,
        since=op.V1_3,
        overloads=(op.Overload((*parameters, outer_inputs), {3: op.V1_3}),),
        variants=(op.Variant({}, op.V1_3),),
        shape=no_shape_rule,
        outputs=(op.ANY,),
        repeated_outputs=True,
    )


DECLARATIONS = (
    _control_flow_declaration(
        OperationType.IF, op.data("condition", op.B8), _model("then_model"), _model("else_model")
    ),
    _control_flow_declaration(OperationType.WHILE, _model("condition_model"), _model("body_model")),
)


# ----------------------------------------------------------------------------------------------------------------------
# The subgraphs that IF and WHILE call: directly, at any depth, and how deep they are nested.


def callee_indexes(subgraph: Subgraph, operation: Operation) -> list[int]:
    """Return the indexes of the subgraphs that an operation calls, in the order of its arguments."""
    operands = (subgraph.operands[index] for index in operation.inputs)
    return [operand.location.offset for operand in operands if operand.lifetime == LifeTime.SUBGRAPH]


def reachable_subgraphs(model: Model, operation: Operation) -> set[int]:
    """Return the indexes of all subgraphs that an operation of the main subgraph calls, at any depth."""
    reached: set[int] = set()
    waiting = callee_indexes(model.main, operation)
    while waiting:
        index = waiting.pop()
        if index not in reached:
            reached.add(index)
            subgraph = model.referenced[index]
            waiting += [callee for inner in subgraph.operations for callee in callee_indexes(subgraph, inner)]
    return reached


NESTING_MAX = 64
"""How deep IF and WHILE may be nested. Each level takes some of Python's call stack, in preparing and in executing."""


def require_nesting(model: Model) -> None:
    """Require that IF and WHILE are not nested deeper than NESTING_MAX.

    Subgraphs do not call themselves (N-VAL-17). The search has an explicit stack, because the depth is not limited yet.

    Raises:
        InvalidArgument: If they are; the message names the limit.
    """
    depths: dict[int, int] = {}
    waiting = _callees(model, model.main)
    while waiting:
        callees = _callees(model, model.referenced[waiting[-1]])
        unknown = [index for index in callees if index not in depths]
        if unknown:
            waiting += unknown
        else:
            depths[waiting.pop()] = 1 + max((depths[index] for index in callees), default=0)
    depth = max(depths.values(), default=0)
    if depth > NESTING_MAX:
        raise InvalidArgument(f"IF and WHILE are nested {depth} deep; at most {NESTING_MAX} are possible")


def _callees(model: Model, subgraph: Subgraph) -> list[int]:
    return [index for operation in subgraph.operations for index in callee_indexes(subgraph, operation)]
