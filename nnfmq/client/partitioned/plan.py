"""BoundPlan: a plan whose steps name their values by numbers, one for each piece of storage.

An operand key is not enough to find a value: two operations may call the same subgraph, with other operands. So the
steps are visited in the order of calls, each branch and loop with the values that its caller binds:

- an IF's branch uses the values of the operation's inputs and outputs themselves,
- the condition and the body of a WHILE read the loop's values, and the body writes the next ones, which the WhileStep
  copies. So every step always has its values in the same locations: its request never changes, and its burst and its
  reusable execution remain bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import TypeAlias

import numpy as np
from msgspec import Struct

from nnfmq.base.file_memory import FileMemory
from nnfmq.client.model.arrays import Array, callers_shape, size_bytes
from nnfmq.hal.errors import GeneralFailure
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import DataLocation, LifeTime, Operand, Pool, Request, RequestArgument
from nnfmq.planning.plan import MAIN, ExecutionPlan, ExecutionStep, GotoStep, IfStep, LogicalStep, OperandKey, WhileStep

__all__ = [
    "BoundCall",
    "BoundIf",
    "BoundPlan",
    "BoundStep",
    "BoundWhile",
    "PlanValue",
    "Shape",
    "ValueLocation",
    "ValueSource",
    "array_at",
    "bind_plan",
    "copy_content",
    "read_condition",
    "step_request",
]


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


class PlanValue(Struct, frozen=True):
    """A value with storage of its own: its operand, and the owner of its memory.

    `position` is that among the model's inputs or outputs, if it is one of them.
    """

    operand: Operand
    source: ValueSource
    position: int = 0


class BoundCall(Struct, frozen=True):
    """An ExecutionStep with the numbers of its values; `index` is its number among the execution steps."""

    index: int
    step: ExecutionStep
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class BoundIf(Struct, frozen=True):
    """An IfStep: it reads `condition` and continues with one of two steps."""

    condition: int
    then_step: int
    else_step: int


class BoundWhile(Struct, frozen=True):
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


class BoundPlan(Struct, frozen=True):
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


# ----------------------------------------------------------------------------------------------------------------------
# ValueLocation: the memory of one value of a plan, and its dimensions, which an execution may learn from a driver.


Shape = tuple[int, ...]


class ValueLocation(Struct):
    """The memory of a value: `length_bytes` of `pool` from `offset` on; no pool if the argument was omitted.

    `dimensions` are those of the content: 0 = unknown, () = a scalar or unknown rank. `is_growable` says that the
    runtime may replace the memory by a larger one. `padding` is that of the application's own request.
    """

    element_bytes: int
    is_scalar: bool
    dimensions: Shape
    pool: Pool | None = None
    offset: int = 0
    length_bytes: int = 0
    is_growable: bool = False
    padding: int = 0

    @property
    def is_known(self) -> bool:
        """Whether the dimensions specify the size of the content."""
        return 0 not in self.dimensions and (bool(self.dimensions) or self.is_scalar)

    @property
    def content_bytes(self) -> int:
        """The size of the content; 0 if it is not known."""
        return self.size_of(self.dimensions) if self.is_known else 0

    def size_of(self, dimensions: Shape) -> int:
        """Return the size of a value of this type with other dimensions, in bytes."""
        return math.prod(dimensions) * self.element_bytes


def step_request(
    locations: Sequence[ValueLocation],
    inputs: Sequence[int],
    outputs: Sequence[int],
    infos: tuple[Sequence[TensorInfo], Sequence[TensorInfo]],
) -> Request:
    """Return the request of a step whose values `inputs` and `outputs` are in `locations`.

    `infos` describes the inputs and the outputs of the step's model. Dimensions that the model leaves unknown are part
    of the request, except those of an output that can grow: its driver reports them.
    """
    pools: list[Pool] = []
    read = [_argument(locations[i], info, pools, is_output=False) for i, info in zip(inputs, infos[0], strict=True)]
    written = [_argument(locations[i], info, pools, is_output=True) for i, info in zip(outputs, infos[1], strict=True)]
    return Request(tuple(read), tuple(written), tuple(pools))


def _argument(location: ValueLocation, info: TensorInfo, pools: list[Pool], *, is_output: bool) -> RequestArgument:
    if location.pool is None:
        return RequestArgument(has_no_value=True)
    index = next((i for i, pool in enumerate(pools) if pool is location.pool), len(pools))
    if index == len(pools):  # a memory listed twice would hide overlapping arguments
        pools.append(location.pool)
    dimensions, length = location.dimensions, location.length_bytes
    if location.is_growable and is_output:
        dimensions = ()
    elif location.is_growable:
        length = max(location.content_bytes, 1)  # the content may be smaller than its memory
    if not info.has_unknown_shape:
        dimensions = ()
    return RequestArgument(
        location=DataLocation(index, location.offset, length, location.padding), dimensions=dimensions
    )


def array_at(location: ValueLocation, info: TensorInfo) -> Array:
    """Return an array over the content of a value. Raises GeneralFailure if it was omitted."""
    if location.pool is None:
        raise GeneralFailure("a value of the plan was omitted")
    shape = callers_shape(info, location.dimensions)
    content = location.pool.view[location.offset : location.offset + size_bytes(info, shape)]
    return np.frombuffer(content, info.dtype).reshape(shape)


def read_condition(location: ValueLocation) -> bool:
    """Return the condition of an IF or a WHILE. It is read once: another process may be able to write to it.

    Raises:
        GeneralFailure: If it was omitted.
    """
    if location.pool is None:
        raise GeneralFailure("the condition of an IF or a WHILE was omitted")
    return bool(location.pool.view[location.offset])


def copy_content(source: ValueLocation, target: ValueLocation) -> None:
    """Copy a value, with its dimensions, to memory that is large enough.

    Raises:
        GeneralFailure: If either was omitted, or the target is too small.
    """
    if source.pool is None or target.pool is None:
        raise GeneralFailure("a value of a WHILE was omitted; a loop that the runtime executes needs all of them")
    size = source.content_bytes
    if size > target.length_bytes:
        raise GeneralFailure(f"a value of a WHILE has {size} bytes, its location {target.length_bytes}")
    content = source.pool.view[source.offset : source.offset + size]
    if isinstance(target.pool, FileMemory):
        target.pool.range(target.offset, size).write_from(content)
    else:
        target.pool.view[target.offset : target.offset + size] = content
    target.dimensions = source.dimensions
