"""Execution plans written by hand, and their sub-models: for tests of what executes plans.

`step_of` cuts some operations out of a subgraph. The order of the steps, and the steps of IF and WHILE, are the test's.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from nnfmq.hal.types import LifeTime, Model, Operation, Subgraph
from nnfmq.planning.plan import (
    MAIN,
    ExecutionPlan,
    ExecutionStep,
    GotoStep,
    IfStep,
    LogicalStep,
    OperandKey,
    WhileStep,
    subgraph_of,
)

_FROM_OUTSIDE = (LifeTime.TEMPORARY_VARIABLE, LifeTime.SUBGRAPH_INPUT, LifeTime.SUBGRAPH_OUTPUT)


def step_of(model: Model, operations: Sequence[int], device: int = 0, subgraph: int = MAIN) -> ExecutionStep:
    """Return the step that executes these operations of a subgraph."""
    graph = subgraph_of(model, subgraph)
    chosen = [graph.operations[index] for index in operations]
    others = [operation for index, operation in enumerate(graph.operations) if index not in operations]
    written = [index for operation in chosen for index in operation.outputs]
    needed = {index for operation in others for index in operation.inputs} | set(graph.output_indexes)
    read = dict.fromkeys(index for operation in chosen for index in operation.inputs)
    inputs = [i for i in read if i not in written and graph.operands[i].lifetime in _FROM_OUTSIDE]
    outputs = [index for index in written if index in needed]
    return ExecutionStep(
        device,
        subgraph,
        tuple(operations),
        _cut(model, graph, chosen, inputs, outputs),
        tuple(OperandKey(subgraph, index) for index in inputs),
        tuple(OperandKey(subgraph, index) for index in outputs),
    )


def _cut(
    model: Model, graph: Subgraph, operations: Sequence[Operation], inputs: Sequence[int], outputs: Sequence[int]
) -> Model:
    used = dict.fromkeys(index for operation in operations for index in (*operation.inputs, *operation.outputs))
    new = {index: position for position, index in enumerate(used)}
    operands = []
    for index in used:
        lifetime = graph.operands[index].lifetime
        if lifetime in _FROM_OUTSIDE:
            lifetime = LifeTime.TEMPORARY_VARIABLE
        lifetime = LifeTime.SUBGRAPH_INPUT if index in inputs else lifetime
        lifetime = LifeTime.SUBGRAPH_OUTPUT if index in outputs else lifetime
        operands.append(replace(graph.operands[index], lifetime=lifetime))
    renumbered = [
        replace(one, inputs=tuple(new[i] for i in one.inputs), outputs=tuple(new[i] for i in one.outputs))
        for one in operations
    ]
    main = Subgraph(tuple(operands), tuple(renumbered), tuple(new[i] for i in inputs), tuple(new[i] for i in outputs))
    return replace(model, main=main, referenced=model.referenced)


def plan_of(model: Model, steps: Sequence[LogicalStep], devices: Sequence[str] = ("first", "second")) -> ExecutionPlan:
    """Return the plan with these steps."""
    return ExecutionPlan(model, tuple(devices), tuple(steps))


def linear_plan(model: Model, *groups: Sequence[int], devices: Sequence[str] = ("first", "second")) -> ExecutionPlan:
    """Return a plan whose steps execute groups of operations of the main subgraph, on the devices in turn."""
    steps = [step_of(model, group, number % len(devices)) for number, group in enumerate(groups)]
    return plan_of(model, steps, devices)


def keys(subgraph: int, operands: Sequence[int]) -> tuple[OperandKey, ...]:
    """Return the keys of operands of a subgraph."""
    return tuple(OperandKey(subgraph, operand) for operand in operands)


def control_flow_plan(model: Model) -> ExecutionPlan:
    """Return the plan of a model whose only operation is an IF or a WHILE, which the runtime interprets.

    Every operation of a branch, a condition or a body is a step of its own, on the first device and the second in turn.
    """
    operation = model.main.operations[0]
    callees = [model.main.operands[i].location.offset + 1 for i in operation.inputs
               if model.main.operands[i].lifetime is LifeTime.SUBGRAPH]  # fmt: skip
    values = [i for i in operation.inputs if model.main.operands[i].lifetime is not LifeTime.SUBGRAPH]
    first, second = (_steps_of(model, callee) for callee in callees)
    starts = 1, 1 + len(first) + 1
    end = starts[1] + len(second) + 1
    is_loop = operation.type.name == "WHILE"
    goto = GotoStep(0 if is_loop else end)
    a, b = (subgraph_of(model, callee) for callee in callees)
    head: LogicalStep
    if is_loop:
        head = WhileStep(
            MAIN, 0, OperandKey(callees[0], a.output_indexes[0]), starts[0], starts[1], end,
            keys(MAIN, values), keys(MAIN, operation.outputs), keys(callees[0], a.input_indexes),
            keys(callees[1], b.input_indexes), keys(callees[1], b.output_indexes),
        )  # fmt: skip
    else:
        head = IfStep(
            MAIN, 0, OperandKey(MAIN, values[0]), *starts, keys(MAIN, values[1:]), keys(MAIN, operation.outputs),
            keys(callees[0], a.input_indexes), keys(callees[0], a.output_indexes),
            keys(callees[1], b.input_indexes), keys(callees[1], b.output_indexes),
        )  # fmt: skip
    return plan_of(model, [head, *first, goto, *second, goto])


def _steps_of(model: Model, subgraph: int) -> list[LogicalStep]:
    count = len(subgraph_of(model, subgraph).operations)
    return [step_of(model, [index], index % 2, subgraph) for index in range(count)]
