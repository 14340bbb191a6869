"""The values of a plan: one for each piece of storage, whatever the operands of the subgraphs are called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from support.control_flow_models import branching, counting
from support.plans import control_flow_plan, keys, linear_plan, plan_of, step_of
from support.small_models import two_adds

from nnfmq.client.partitioned.plan import BoundCall, BoundIf, BoundWhile, ValueSource, bind_plan
from nnfmq.hal.errors import GeneralFailure
from nnfmq.hal.types import Model
from nnfmq.planning.plan import MAIN, ExecutionPlan, GotoStep, IfStep, LogicalStep, OperandKey


def with_step(plan: ExecutionPlan, index: int, step: LogicalStep) -> ExecutionPlan:
    return replace(plan, steps=(*plan.steps[:index], step, *plan.steps[index + 1 :]))


def sources(plan: ExecutionPlan, numbers: Sequence[int]) -> list[ValueSource]:
    values = bind_plan(plan).values
    return [values[number].source for number in numbers]


def test_PART_5_a_value_between_two_steps_is_a_temporary() -> None:
    bound = bind_plan(linear_plan(two_adds(), [0], [1]))
    first, second = bound.calls
    assert (first.index, second.index) == (0, 1)
    assert first.inputs == bound.inputs
    assert second.inputs == (first.outputs[0], bound.inputs[1])
    assert second.outputs == bound.outputs
    assert [value.source for value in bound.values] == [
        ValueSource.INPUT,
        ValueSource.INPUT,
        ValueSource.OUTPUT,
        ValueSource.TEMPORARY,
    ]


def test_PART_4_both_branches_of_an_IF_share_the_values_of_the_operation() -> None:
    bound = bind_plan(control_flow_plan(branching()))
    condition, x, y = bound.inputs
    assert bound.steps[0] == BoundIf(condition, 1, 3)
    assert [(call.inputs, call.outputs) for call in bound.calls] == [((x, y), bound.outputs)] * 2
    assert len(bound.values) == 4


def test_PART_4_a_loop_has_two_values_for_each_that_changes_and_none_for_the_others() -> None:
    plan = control_flow_plan(counting())
    bound = bind_plan(plan)
    loop = bound.steps[0]
    assert isinstance(loop, BoundWhile)
    total, n, x = bound.inputs
    assert sources(plan, loop.initial) == [ValueSource.INPUT, ValueSource.CONSTANT]
    assert len({*loop.initial, *loop.current, *loop.next, loop.condition, *loop.outputs}) == 8
    condition, add, count = bound.calls
    assert condition.inputs == (loop.current[1], n)
    assert condition.outputs == (loop.condition,)
    assert (add.inputs, add.outputs) == ((loop.current[0], x), (loop.next[0],))
    assert (count.inputs, count.outputs) == ((loop.current[1],), (loop.next[1],))
    assert loop.initial[0] == total


def calling_twice() -> tuple[Model, Any]:
    """Return a model of one IF, and a plan in which two IfSteps call its first branch, with other operands."""
    model = branching()
    plan = control_flow_plan(model)
    first = plan.steps[0]
    assert isinstance(first, IfStep)
    then, otherwise = plan.steps[1], plan.steps[3]
    swapped = replace(first, then_step=6, else_step=8, inputs=keys(MAIN, (4, 3)))
    return model, plan_of(model, [first, then, GotoStep(5), otherwise, GotoStep(5), swapped, then, GotoStep(10),
                                  otherwise, GotoStep(10)])  # fmt: skip


def test_PART_4_a_subgraph_that_is_called_twice_has_other_values_in_each_call() -> None:
    _, plan = calling_twice()
    bound = bind_plan(plan)
    _, x, y = bound.inputs
    assert [call.inputs for call in bound.calls] == [(x, y), (x, y), (y, x), (y, x)]
    assert [call.index for call in bound.calls] == [0, 1, 2, 3]


LINEAR, IF, WHILE = linear_plan(two_adds(), [0], [1]), control_flow_plan(branching()), control_flow_plan(counting())
MALFORMED = {
    "a step that none leads to": replace(LINEAR, steps=(*LINEAR.steps, GotoStep(0))),
    "a jump in the main subgraph": with_step(LINEAR, 0, GotoStep(0)),
    "branches with other ends": with_step(IF, 2, GotoStep(4)),
    "a branch that joins the other": with_step(IF, 2, step_of(branching(), [0], 0, 1)),
    "a loop that does not return": with_step(WHILE, 2, GotoStep(1)),
}


@pytest.mark.parametrize("plan", MALFORMED.values(), ids=MALFORMED)
def test_a_plan_that_is_not_well_formed_is_rejected(plan: ExecutionPlan) -> None:
    with pytest.raises(GeneralFailure, match="plan"):
        bind_plan(plan)


def test_steps_of_a_bound_plan_are_at_the_indexes_of_the_plan() -> None:
    bound = bind_plan(WHILE)
    kinds = [type(step) for step in bound.steps]
    assert kinds == [BoundWhile, BoundCall, GotoStep, BoundCall, BoundCall, GotoStep]
    assert OperandKey(MAIN, 2) in WHILE.steps[0].inputs  # type: ignore[union-attr]
