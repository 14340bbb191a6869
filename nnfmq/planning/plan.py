"""ExecutionPlan: the steps that execute a model on its devices, in the form of Android's NNAPI runtime.

A simple plan has one ExecutionStep with the whole model. A compound plan has a flat list of steps. After an
ExecutionStep the next one of the list follows. IF and WHILE that no device takes are steps as well, which the runtime
interprets: an IfStep continues with the first step of a branch, a WhileStep with the first step of its condition, of
its body, or after the loop. The last step of a branch, a condition or a body is a GotoStep.

A subgraph that is called in several places has steps for each of them, but its operands have one OperandKey: the calls
never overlap, because no subgraph calls itself.

A value is named by an OperandKey: an operand of a subgraph of the source model. No step copies a value from one key to
another, except an IfStep and a WhileStep, which bind the operands of the subgraphs that they call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

from msgspec import Struct

from nnfmq.hal.capabilities import Capabilities
from nnfmq.hal.types import Model, Operand, Subgraph

__all__ = [
    "MAIN",
    "ExecutionPlan",
    "ExecutionStep",
    "GotoStep",
    "IfStep",
    "LogicalStep",
    "OperandKey",
    "PlanningDevice",
    "WhileStep",
    "simple_plan",
    "subgraph_of",
]

MAIN = 0  # subgraph 0 is the main one, subgraph i + 1 is `Model.referenced[i]`


class OperandKey(NamedTuple):
    """An operand of the source model."""

    subgraph: int
    operand: int


class PlanningDevice(Protocol):
    """The properties of a device that planning needs."""

    @property
    def name(self) -> str:
        """The name, unique among the devices of a plan."""
        ...

    @property
    def version_string(self) -> str:
        """The version, which caching tokens depend on."""
        ...

    @property
    def feature_level(self) -> int:
        """The highest feature level (1 to 8) whose models the device understands."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """The speed and the power of the device, relative to the CPU."""
        ...

    @property
    def is_cpu(self) -> bool:
        """Whether this is the runtime's CPU device, `nnapi-reference`."""
        ...

    def supported_operations(self, model: Model) -> Sequence[bool]:
        """Return for each operation of the main subgraph whether the device can execute it; blocks.

        Raises:
            NnfmqError: If the device fails. Planning then takes it for a device that supports nothing.
        """
        ...


class ExecutionStep(Struct, frozen=True):
    """Operations of one subgraph that one device executes together, as a model of their own.

    `device` is an index of `ExecutionPlan.devices`. `inputs` and `outputs` name the values of the inputs and outputs of
    `model`, in order.
    """

    device: int
    subgraph: int
    operations: tuple[int, ...]
    model: Model
    inputs: tuple[OperandKey, ...]
    outputs: tuple[OperandKey, ...]


class IfStep(Struct, frozen=True):
    """An interpreted IF: binds the operands of one branch to those of the operation, and continues there.

    `then_inputs[i]` and `else_inputs[i]` get the value of `inputs[i]`, which may be a constant, or an omitted operand
    (NO_VALUE); `then_outputs[i]` and `else_outputs[i]` share the storage of `outputs[i]`.
    """

    subgraph: int
    operation: int
    condition: OperandKey
    then_step: int
    else_step: int
    inputs: tuple[OperandKey, ...]
    outputs: tuple[OperandKey, ...]
    then_inputs: tuple[OperandKey, ...]
    then_outputs: tuple[OperandKey, ...]
    else_inputs: tuple[OperandKey, ...]
    else_outputs: tuple[OperandKey, ...]


class WhileStep(Struct, frozen=True):
    """An interpreted WHILE, to which the condition and the body return.

    `condition_inputs` and `body_inputs` get the values of `inputs` at first. After each round of the body the first
    `len(body_outputs)` of them get the values of `body_outputs`. `outputs` get the first `len(outputs)` values when
    `condition` is false. A value of the loop has two buffers, in turn read and written by the body.
    """

    subgraph: int
    operation: int
    condition: OperandKey
    condition_step: int
    body_step: int
    exit_step: int
    inputs: tuple[OperandKey, ...]
    outputs: tuple[OperandKey, ...]
    condition_inputs: tuple[OperandKey, ...]
    body_inputs: tuple[OperandKey, ...]
    body_outputs: tuple[OperandKey, ...]


class GotoStep(Struct, frozen=True):
    """Continues with another step: after an IF, or back at a WhileStep."""

    target: int


LogicalStep: TypeAlias = ExecutionStep | IfStep | WhileStep | GotoStep


class ExecutionPlan(Struct, frozen=True):
    """The steps that execute `model` on `devices` (names).

    `temporaries` are all values that steps write, except outputs of the main subgraph and of the branches of an IfStep,
    which share other storage: the runtime owns their memory. The conditions and the body's outputs of WhileSteps are
    among them, also if an IfStep calls the same subgraph. `constants` are constant operands that an IfStep or a
    WhileStep reads or binds.
    """

    model: Model
    devices: tuple[str, ...]
    steps: tuple[LogicalStep, ...]
    temporaries: tuple[OperandKey, ...] = ()
    constants: tuple[OperandKey, ...] = ()

    @property
    def is_simple(self) -> bool:
        """Whether one device executes the whole model."""
        return len(self.steps) == 1 and isinstance(self.steps[0], ExecutionStep) and self.steps[0].model is self.model

    @property
    def execution_steps(self) -> tuple[ExecutionStep, ...]:
        """The steps that devices execute, in the order of `steps`."""
        return tuple(step for step in self.steps if isinstance(step, ExecutionStep))

    def operand(self, key: OperandKey) -> Operand:
        """Return the operand that `key` names."""
        return subgraph_of(self.model, key.subgraph).operands[key.operand]


def subgraph_of(model: Model, subgraph: int) -> Subgraph:
    """Return the main subgraph for MAIN, otherwise the referenced subgraph `subgraph - 1`."""
    return model.main if subgraph == MAIN else model.referenced[subgraph - 1]


# ----------------------------------------------------------------------------------------------------------------------
# simple_plan: the plan of a model that one device executes whole.


def simple_plan(model: Model, device: str) -> ExecutionPlan:
    """Return the plan of one step, all of `model` on the device of that name."""
    main = model.main
    inputs, outputs = (
        tuple(OperandKey(MAIN, index) for index in indexes) for indexes in (main.input_indexes, main.output_indexes)
    )
    step = ExecutionStep(0, MAIN, tuple(range(len(main.operations))), model, inputs, outputs)
    return ExecutionPlan(model, (device,), (step,))
