"""Models whose operations are moved into subgraphs: the same results as before, computed by IF and WHILE."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from nnfmq.hal.types import DataLocation, LifeTime, Model, Operand, Operation, OperationType, Subgraph, operand_bytes
from support.control_flow_models import COUNT, TRUTH, named
from support.planned import Array
from support.small_models import scalar

_NOT_ENTERING = (LifeTime.CONSTANT_COPY, LifeTime.CONSTANT_REFERENCE, LifeTime.NO_VALUE, LifeTime.SUBGRAPH)
_ROUNDS_MAX = 2


def with_control_flow(
    model: Model, inputs: Sequence[Array | None], rng: random.Random
) -> tuple[Model, list[Array | None]]:
    """Return a model without subgraphs with one to three IFs or WHILEs that compute parts of it, and its inputs.

    A part that contains an IF or WHILE is nested around it.
    """
    given = list(inputs)
    for _ in range(rng.randint(1, 3)):
        count = len(model.main.operations)
        first = rng.randrange(count)
        part = _part(model.main, first, rng.randint(first + 1, min(count, first + 12)))
        if part is None:
            continue
        if rng.random() < 0.5:
            model = _with_branch(model, part)
            given.append(np.array([rng.random() < 0.5], np.uint8))
        else:
            model = _with_loop(model, part)
            given.append(np.array([rng.randint(1, _ROUNDS_MAX)], np.int32))
    return model, given


@dataclass(frozen=True)
class _Part:
    """Adjacent operations of a main subgraph, and the operands that enter and leave them."""

    first: int
    end: int
    entering: tuple[int, ...]
    leaving: tuple[int, ...]


def _part(main: Subgraph, first: int, end: int) -> _Part | None:
    """Return the operations from `first` up to `end`; None if nothing enters or leaves."""
    inside, rest = main.operations[first:end], (*main.operations[:first], *main.operations[end:])
    written = {index for operation in inside for index in operation.outputs}
    read = dict.fromkeys(index for operation in inside for index in operation.inputs)
    entering = tuple(i for i in read if i not in written and main.operands[i].lifetime not in _NOT_ENTERING)
    read_outside = {index for operation in rest for index in operation.inputs}
    is_output = set(main.output_indexes)
    leaving = tuple(index for index in sorted(written) if index in read_outside or index in is_output)
    return _Part(first, end, entering, leaving) if entering and leaving else None


def _with_branch(model: Model, part: _Part) -> Model:
    """Replace a part by an IF with it as both branches; the condition is the last input."""
    main, count = model.main, len(model.main.operands)
    branch = _compact(main, main.operations[part.first : part.end], part.entering, part.leaving)
    new = [replace(TRUTH, lifetime=LifeTime.SUBGRAPH_INPUT), *[named(len(model.referenced))] * 2]
    call = Operation(OperationType.IF, (count, count + 1, count + 2, *part.entering), part.leaving)
    return replace(model, main=_calling(main, part, new, call, count), referenced=(*model.referenced, branch))


def _with_loop(model: Model, part: _Part) -> Model:
    """Replace a part by a WHILE with it in the body; the number of rounds is the last input.

    The loop's values are the results, zero at first, and a counter; then come the number of rounds and what enters.
    """
    main, count, called = model.main, len(model.main.operands), len(model.referenced)
    results = [replace(main.operands[index], lifetime=LifeTime.TEMPORARY_VARIABLE) for index in part.leaving]
    values, constant = _Constants(model.operand_values), len(results)
    zeros = [values.add(operand, bytes(operand_bytes(operand))) for operand in (*results, COUNT)]
    one, none = values.add(COUNT, b"\1\0\0\0"), values.add(*scalar(0))
    rounds = replace(COUNT, lifetime=LifeTime.SUBGRAPH_INPUT)
    passed = [*results, COUNT, COUNT, *(main.operands[index] for index in part.entering)]
    new = [rounds, named(called), named(called + 1), *zeros]
    first_zero = count + 3
    arguments = (count + 1, count + 2, *range(first_zero, first_zero + constant + 1), count, *part.entering)
    call = Operation(OperationType.WHILE, arguments, part.leaving)
    referenced = (*model.referenced, _less(passed, constant), _body(main, part, passed, one, none))
    main = _calling(main, part, new, call, count)
    return replace(model, main=main, referenced=referenced, operand_values=bytes(values.content))


class _Constants:
    """The operand values of a model, to which constants are added."""

    def __init__(self, content: bytes) -> None:
        self.content = bytearray(content)

    def add(self, operand: Operand, raw: bytes) -> Operand:
        self.content += bytes(-len(self.content) % 4)
        place = DataLocation(0, len(self.content), len(raw))
        self.content += raw
        return replace(operand, lifetime=LifeTime.CONSTANT_COPY, location=place)


def _less(passed: Sequence[Operand], counter: int) -> Subgraph:
    """Return the condition: the counter is less than the number of rounds."""
    operands = [replace(operand, lifetime=LifeTime.SUBGRAPH_INPUT) for operand in passed]
    result = replace(TRUTH, lifetime=LifeTime.SUBGRAPH_OUTPUT)
    operation = Operation(OperationType.LESS, (counter, counter + 1), (len(passed),))
    return Subgraph((*operands, result), (operation,), tuple(range(len(passed))), (len(passed),))


def _body(main: Subgraph, part: _Part, passed: Sequence[Operand], one: Operand, none: Operand) -> Subgraph:
    """Return the body: the part's operations, and one that counts."""
    count, counter = len(main.operands), len(part.leaving)
    state = (*passed[: counter + 2], one, none, COUNT)
    inputs = (*range(count, count + counter + 2), *part.entering)
    counting = Operation(OperationType.ADD, tuple(count + counter + i for i in (0, 2, 3)), (count + counter + 4,))
    operations = (*main.operations[part.first : part.end], counting)
    graph = replace(main, operands=(*main.operands, *state))
    return _compact(graph, operations, inputs, (*part.leaving, count + counter + 4))


def _calling(main: Subgraph, part: _Part, new: Sequence[Operand], call: Operation, new_input: int) -> Subgraph:
    """Return the main subgraph with the call in place of the part, and `new` operands."""
    operations = (*main.operations[: part.first], call, *main.operations[part.end :])
    graph = replace(main, operands=(*main.operands, *new))
    return _compact(graph, operations, (*main.input_indexes, new_input), main.output_indexes)


def _compact(
    graph: Subgraph, operations: Sequence[Operation], inputs: Sequence[int], outputs: Sequence[int]
) -> Subgraph:
    """Return a subgraph with these operations and only the operands that it needs."""
    used = {index for operation in operations for index in (*operation.inputs, *operation.outputs)}
    place = {index: position for position, index in enumerate(sorted(used.union(inputs, outputs)))}
    lifetimes = dict.fromkeys(inputs, LifeTime.SUBGRAPH_INPUT) | dict.fromkeys(outputs, LifeTime.SUBGRAPH_OUTPUT)

    def placed(indexes: Sequence[int]) -> tuple[int, ...]:
        return tuple(place[index] for index in indexes)

    return Subgraph(
        tuple(replace(graph.operands[i], lifetime=lifetimes.get(i, graph.operands[i].lifetime)) for i in place),
        tuple(Operation(o.type, placed(o.inputs), placed(o.outputs)) for o in operations),
        placed(inputs),
        placed(outputs),
    )
