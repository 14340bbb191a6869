"""BoundPlan: a plan whose steps name their values by numbers, one for each piece of storage.

An operand key is not enough to find a value: two operations may call the same subgraph, with other operands. So the
steps are visited in the order of calls, each branch and loop with the values that its caller binds:

- an IF's branch uses the values of the operation's inputs and outputs themselves,
- the condition and the body of a WHILE read the loop's values, and the body writes the next ones, which the WhileStep
  copies. So every step always has its values in the same locations: its request never changes, and its burst and its
  reusable execution remain bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from nnfmq.execution_plan.plan import (
    MAIN,
    ExecutionPlan,
    ExecutionStep,
    GotoStep,
    IfStep,
    LogicalStep,
    OperandKey,
    WhileStep,
)
from nnfmq.hal.errors import GeneralFailure
from nnfmq.hal.types import LifeTime, Operand

__all__ = ["BoundCall", "BoundIf", "BoundPlan", "BoundStep", "BoundWhile", "PlanValue", "ValueSource", "bind_plan"]


class ValueSource(Enum):
    """The owner of a value's memory."""

    INPUT = "input"
    """The application: an input of the model."""
    OUTPUT = "output"
    """The application: an output of the model."""
    CONSTANT = "constant"
    """The runtime, once for all executions."""
    OMITTED = "omitted"
    """Nobody: the operand has no value, and the operations that get it do without."""
    TEMPORARY = "temporary"
    """The runtime, for each execution in progress."""


_FIXED_SOURCES = {
    LifeTime.CONSTANT_COPY: ValueSource.CONSTANT,
    LifeTime.CONSTANT_REFERENCE: ValueSource.CONSTANT,
    LifeTime.NO_VALUE: ValueSource.OMITTED,
}


@dataclass(frozen=True, slots=True)
class PlanValue:
    """A value with storage of its own: its operand, and the owner of its memory.

    `position` is that among the model's inputs or outputs, if it is one of them.
    """

    operand: Operand
    source: ValueSource
    position: int = 0


@dataclass(frozen=True, slots=True)
class BoundCall:
    """An ExecutionStep with the numbers of its values; `index` is its number among the execution steps."""

    index: int
    step: ExecutionStep
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BoundIf:
    """An IfStep: it reads `condition` and continues with one of two steps."""

    condition: int
    then_step: int
    else_step: int


@dataclass(frozen=True, slots=True)
class BoundWhile:
    """A WhileStep with the numbers of its values.

    It copies `initial` to `current` first, `next` to `current` after each round, and the first of `current` to
    `outputs` at the end.
    """

    condition: int
    initial: tuple[int, ...]
    current: tuple[int, ...]
    next: tuple[int, ...]
    outputs: tuple[int, ...]
    condition_step: int
    body_step: int
    exit_step: int


BoundStep: TypeAlias = BoundCall | BoundIf | BoundWhile | GotoStep


@dataclass(frozen=True, slots=True)
class BoundPlan:
    """The steps of a plan, at the same indexes, and its values. `inputs` and `outputs` are those of the model."""

    steps: tuple[BoundStep, ...]
    values: tuple[PlanValue, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def calls(self) -> tuple[BoundCall, ...]:
        """The steps that devices execute, in order."""
        return tuple(step for step in self.steps if isinstance(step, BoundCall))


def bind_plan(plan: ExecutionPlan) -> BoundPlan:
    """Return `plan` with numbered values.

    Raises:
        GeneralFailure: If the plan is not well-formed: it is a defect of the planner.
    """
    return _Binder(plan).bind()


_Scope: TypeAlias = dict[OperandKey, int]
"""The numbers of the values of one call of a subgraph, and of those that its caller binds."""


class _Binder:
    def __init__(self, plan: ExecutionPlan) -> None:
        self._plan = plan
        self._values: list[PlanValue] = []
        self._fixed: _Scope = {}
        self._steps: list[BoundStep | None] = [None] * len(plan.steps)

    def bind(self) -> BoundPlan:
        main, scope = self._plan.model.main, _Scope()
        inputs = self._add_arguments(scope, main.input_indexes, ValueSource.INPUT)
        outputs = self._add_arguments(scope, main.output_indexes, ValueSource.OUTPUT)
        end = self._bind_from(0, scope)
        if end != len(self._steps) or None in self._steps:
            raise GeneralFailure(f"the plan ends at step {end} of {len(self._steps)}, or has steps that none leads to")
        self._number_calls()
        steps = tuple(step for step in self._steps if step is not None)
        return BoundPlan(steps, tuple(self._values), inputs, outputs)

    def _number_calls(self) -> None:
        """Number the execution steps in the order of the plan, which is not that in which they were visited."""
        index = 0
        for position, step in enumerate(self._steps):
            if isinstance(step, BoundCall):
                self._steps[position] = BoundCall(index, step.step, step.inputs, step.outputs)
                index += 1

    def _add_arguments(self, scope: _Scope, operands: tuple[int, ...], source: ValueSource) -> tuple[int, ...]:
        numbers = []
        for position, operand in enumerate(operands):
            key = OperandKey(MAIN, operand)
            scope[key] = self._add(PlanValue(self._plan.operand(key), source, position))
            numbers.append(scope[key])
        return tuple(numbers)

    def _add(self, value: PlanValue) -> int:
        self._values.append(value)
        return len(self._values) - 1

    def _find(self, scope: _Scope, key: OperandKey) -> int:
        """Return the value of `key`, a new one if no step has named it yet."""
        operand = self._plan.operand(key)
        source = _FIXED_SOURCES.get(operand.lifetime)
        if source is not None:
            if key not in self._fixed:
                self._fixed[key] = self._add(PlanValue(operand, source))
            return self._fixed[key]
        if key not in scope:
            scope[key] = self._add(PlanValue(operand, ValueSource.TEMPORARY))
        return scope[key]

    def _find_all(self, scope: _Scope, keys: tuple[OperandKey, ...]) -> tuple[int, ...]:
        return tuple(self._find(scope, key) for key in keys)

    def _bind_from(self, position: int, scope: _Scope) -> int:
        """Bind the steps from `position` to the end of the branch or the loop; return the step that follows it."""
        while position < len(self._steps):
            if self._steps[position] is not None:
                raise GeneralFailure(f"two ways lead to step {position} of the plan")
            step = self._plan.steps[position]
            if isinstance(step, GotoStep):
                self._steps[position] = step
                return step.target
            position = self._bind_step(position, step, scope)
        return position

    def _bind_step(self, position: int, step: LogicalStep, scope: _Scope) -> int:
        """Bind a step and those that it calls; return the step that follows."""
        if isinstance(step, IfStep):
            return self._bind_if(position, step, scope)
        if isinstance(step, WhileStep):
            return self._bind_while(position, step, scope)
        assert isinstance(step, ExecutionStep)
        inputs, outputs = self._find_all(scope, step.inputs), self._find_all(scope, step.outputs)
        self._steps[position] = BoundCall(0, step, inputs, outputs)
        return position + 1

    def _bind_if(self, position: int, step: IfStep, scope: _Scope) -> int:
        inputs, outputs = self._find_all(scope, step.inputs), self._find_all(scope, step.outputs)
        self._steps[position] = BoundIf(self._find(scope, step.condition), step.then_step, step.else_step)
        ends = set()
        for first, arguments, results in (
            (step.then_step, step.then_inputs, step.then_outputs),
            (step.else_step, step.else_inputs, step.else_outputs),
        ):
            inner = dict(zip((*arguments, *results), (*inputs, *outputs), strict=True))
            ends.add(self._bind_from(first, inner))
        if len(ends) > 1:
            raise GeneralFailure(f"the branches of step {position} of the plan end at different steps")
        return ends.pop()

    def _bind_while(self, position: int, step: WhileStep, scope: _Scope) -> int:
        inputs, outputs = self._find_all(scope, step.inputs), self._find_all(scope, step.outputs)
        changing = len(step.body_outputs)
        inner: _Scope = {}
        current = tuple(self._find(inner, key) for key in step.body_inputs[:changing])
        following = self._find_all(inner, step.body_outputs)
        arguments = (*current, *inputs[changing:])
        inner |= zip(step.body_inputs, arguments, strict=True)
        inner |= zip(step.condition_inputs, arguments, strict=True)
        self._steps[position] = BoundWhile(
            self._find(inner, step.condition), inputs[:changing], current, following, outputs,
            step.condition_step, step.body_step, step.exit_step,
        )  # fmt: skip
        for first in (step.condition_step, step.body_step):
            if self._bind_from(first, inner) != position:
                raise GeneralFailure(f"the loop of step {position} of the plan does not return to it")
        return step.exit_step
