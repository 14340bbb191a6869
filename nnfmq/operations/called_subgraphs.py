"""The subgraphs that IF and WHILE call: directly, at any depth, and how deep they are nested."""

from __future__ import annotations

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.types import LifeTime, Model, Operation, Subgraph

__all__ = ["NESTING_MAX", "callee_indexes", "reachable_subgraphs", "require_nesting"]


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
