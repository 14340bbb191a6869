"""Models whose operations are moved into subgraphs: the same results as before, computed in branches of IF."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from support.control_flow_models import TRUTH, named
from support.planned import Array

from nnfmq.hal.types import LifeTime, Model, Operation, OperationType, Subgraph

_CONSTANTS = (LifeTime.CONSTANT_COPY, LifeTime.CONSTANT_REFERENCE, LifeTime.NO_VALUE)


def with_branches(model: Model, inputs: Sequence[Array | None], rng: random.Random) -> tuple[Model, list[Array | None]]:
    """Return a model without subgraphs with one to three IFs that compute parts of it, and inputs with conditions."""
    given = list(inputs)
    for _ in range(rng.randint(1, 3)):
        count = len(model.main.operations)
        first = rng.randrange(count)
        moved = _outlined(model, first, rng.randint(first + 1, min(count, first + 12)))
        if moved is not None:
            model, condition = moved, np.array([rng.random() < 0.5], np.uint8)
            given.append(condition)
    return model, given


def _outlined(model: Model, first: int, end: int) -> Model | None:
    """Replace the operations from `first` up to `end` by an IF whose branches both are these; None if it has no input.

    Sub-branches come first: an IF that is moved is nested in the new one.
    """
    main = model.main
    inside, rest = main.operations[first:end], (*main.operations[:first], *main.operations[end:])
    written = {index for operation in inside for index in operation.outputs}
    read = dict.fromkeys(index for operation in inside for index in operation.inputs)
    entering = [
        i for i in read if i not in written and main.operands[i].lifetime not in (*_CONSTANTS, LifeTime.SUBGRAPH)
    ]
    read_outside = {index for operation in rest for index in operation.inputs}
    leaving = [i for i in sorted(written) if i in read_outside or main.operands[i].lifetime == LifeTime.SUBGRAPH_OUTPUT]
    if not entering or not leaving:
        return None
    branch = _subgraph(main, inside, entering, leaving)
    called = len(model.referenced)
    return replace(
        model, main=_caller(main, first, end, called, entering, leaving), referenced=(*model.referenced, branch)
    )


def _subgraph(main: Subgraph, operations: Sequence[Operation], inputs: list[int], outputs: list[int]) -> Subgraph:
    used = sorted({i for operation in operations for i in (*operation.inputs, *operation.outputs)})
    place = {index: position for position, index in enumerate(used)}
    lifetimes = dict.fromkeys(inputs, LifeTime.SUBGRAPH_INPUT) | dict.fromkeys(outputs, LifeTime.SUBGRAPH_OUTPUT)
    return Subgraph(
        tuple(replace(main.operands[i], lifetime=lifetimes.get(i, main.operands[i].lifetime)) for i in used),
        tuple(
            Operation(o.type, tuple(place[i] for i in o.inputs), tuple(place[i] for i in o.outputs)) for o in operations
        ),
        tuple(place[i] for i in inputs),
        tuple(place[i] for i in outputs),
    )


def _caller(main: Subgraph, first: int, end: int, called: int, inputs: list[int], outputs: list[int]) -> Subgraph:
    """Return the main subgraph with the IF, without the operands that only the branches use."""
    count = len(main.operands)
    operands = (*main.operands, replace(TRUTH, lifetime=LifeTime.SUBGRAPH_INPUT), named(called), named(called))
    call = Operation(OperationType.IF, (count, count + 1, count + 2, *inputs), tuple(outputs))
    operations = (*main.operations[:first], call, *main.operations[end:])
    changed = replace(main, operands=operands, operations=operations, input_indexes=(*main.input_indexes, count))
    used = {i for operation in operations for i in (*operation.inputs, *operation.outputs)} | {*changed.input_indexes}
    place = {index: position for position, index in enumerate(sorted(used))}
    return Subgraph(
        tuple(operands[index] for index in place),
        tuple(
            Operation(o.type, tuple(place[i] for i in o.inputs), tuple(place[i] for i in o.outputs)) for o in operations
        ),
        tuple(place[index] for index in changed.input_indexes),
        tuple(place[index] for index in changed.output_indexes),
    )
