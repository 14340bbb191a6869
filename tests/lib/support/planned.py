"""Execution plans in tests: devices that exist only for planning, and the execution of a plan in the interpreter."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from nnfmq.engines import interpreter
from nnfmq.engines.execution import RunOptions
from nnfmq.hal.capabilities import CPU_PERFORMANCE, Capabilities, PerformanceInfo, uniform_capabilities
from nnfmq.hal.types import Model, Operation, OperationType, Subgraph
from nnfmq.operations.control_flow import reachable_subgraphs
from nnfmq.planning.plan import MAIN, ExecutionPlan, ExecutionStep, GotoStep, IfStep, LogicalStep, OperandKey, WhileStep
from nnfmq.validation import validate_model

Array = npt.NDArray[Any]
Supports = Callable[[Subgraph, Operation], bool]
Runner = Callable[[ExecutionStep, Sequence[Array | None]], Sequence[Array]]
_ROUNDS_MAX = 1000


@dataclass
class FakeDevice:
    """A device that supports some operations, and records the models that it was asked about.

    As the HAL requires, it supports an IF or WHILE only if it supports what these call, and accepts only valid models
    of its feature level.
    """

    name: str
    supports: Supports = lambda _graph, _operation: True
    feature_level: int = 8
    capabilities: Capabilities = field(default_factory=lambda: figures(0.5))
    is_cpu: bool = False
    version_string: str = "1"
    asked: list[Model] = field(default_factory=list)

    def supported_operations(self, model: Model) -> Sequence[bool]:
        self.asked.append(model)
        assert validate_model(model) <= self.feature_level
        whole = [all(self.supports(graph, operation) for operation in graph.operations) for graph in model.referenced]
        return [
            self.supports(model.main, operation) and all(whole[i] for i in reachable_subgraphs(model, operation))
            for operation in model.main.operations
        ]


def figures(exec_time: float, power_usage: float | None = None) -> Capabilities:
    """Return the same performance figures for everything."""
    return uniform_capabilities(PerformanceInfo(exec_time, exec_time if power_usage is None else power_usage))


def cpu(**fields: Any) -> FakeDevice:
    """Return the runtime's CPU device."""
    capabilities = uniform_capabilities(CPU_PERFORMANCE)
    return FakeDevice("nnapi-reference", **{"capabilities": capabilities, "is_cpu": True, **fields})


def only(*codes: OperationType) -> Supports:
    """Return what a device supports that has these operations alone."""
    return lambda _graph, operation: operation.type in codes


def random_devices(rng: random.Random) -> list[FakeDevice]:
    """Return one to three devices that support random subsets of the operations, and the CPU device."""
    devices = []
    for number in range(rng.randint(1, 3)):
        share, salt = rng.choice((0.2, 0.5, 0.9)), rng.random()

        def supports(_graph: Subgraph, operation: Operation, share: float = share, salt: float = salt) -> bool:
            return random.Random(f"{salt} {operation.type} {len(operation.inputs)}").random() < share

        capabilities = figures(rng.choice((0.5, 1.0, 2.0)))
        devices.append(FakeDevice(f"fake-{number}", supports, rng.randint(1, 8), capabilities))
    return [*devices, cpu()]


def run_whole(model: Model, inputs: Sequence[Array | None]) -> list[Array]:
    """Return the outputs of a model, computed by the interpreter."""
    program = interpreter.prepare(model)
    with np.errstate(all="ignore"):
        return program.call_in(program.new_frame(), inputs, RunOptions())


def in_the_interpreter(step: ExecutionStep, inputs: Sequence[Array | None]) -> Sequence[Array]:
    """Run a step in this process."""
    validate_model(step.model)
    return run_whole(step.model, inputs)


def run_plan(plan: ExecutionPlan, inputs: Sequence[Array | None], run_step: Runner = in_the_interpreter) -> list[Array]:
    """Return the outputs of the main subgraph: the steps run one after the other.

    Raises:
        KeyError: If a step reads a value that none has written.
    """
    return _Run(plan, inputs, run_step).outputs()


class _Run:
    """One execution of a plan: the values so far, and for each loop that runs its next inputs."""

    def __init__(self, plan: ExecutionPlan, inputs: Sequence[Array | None], run_step: Runner) -> None:
        self._plan, self._run_step = plan, run_step
        keys = (OperandKey(MAIN, index) for index in plan.model.main.input_indexes)
        self._values: dict[OperandKey, Array | None] = dict(zip(keys, inputs, strict=True))
        self._aliases: dict[OperandKey, tuple[OperandKey, ...]] = {}
        self._looping: dict[int, int] = {}  # rounds of the loops that have begun
        for key in plan.constants:
            self._values[key] = interpreter.load_constant(plan.model, plan.operand(key))

    def outputs(self) -> list[Array]:
        index = 0
        while index < len(self._plan.steps):
            index = self._next(index, self._plan.steps[index])
        found = [self._values[OperandKey(MAIN, index)] for index in self._plan.model.main.output_indexes]
        return [np.asarray(array) for array in found]

    def _next(self, index: int, step: LogicalStep) -> int:
        match step:
            case GotoStep():
                return step.target
            case ExecutionStep():
                self._execute(step)
                return index + 1
            case IfStep():
                return self._branch(step)
            case WhileStep():
                return self._loop(index, step)

    def _execute(self, step: ExecutionStep) -> None:
        results = self._run_step(step, [self._value(key) for key in step.inputs])
        for key, array in zip(step.outputs, results, strict=True):
            self._write(key, array)

    def _write(self, key: OperandKey, array: Array | None) -> None:
        self._values[key] = array
        for alias in self._aliases.get(key, ()):
            self._write(alias, array)

    def _value(self, key: OperandKey) -> Array | None:
        omitted = self._plan.operand(key).lifetime.name == "NO_VALUE"
        return None if omitted else self._values[key]

    def _branch(self, step: IfStep) -> int:
        condition = self._value(step.condition)
        assert condition is not None
        is_true = bool(condition.item())
        inputs = step.then_inputs if is_true else step.else_inputs
        outputs = step.then_outputs if is_true else step.else_outputs
        self._bind(inputs, step.inputs)
        for inner, outer in zip(outputs, step.outputs, strict=True):
            self._aliases[inner] = (outer,)
        return step.then_step if is_true else step.else_step

    def _loop(self, index: int, step: WhileStep) -> int:
        if index not in self._looping:
            self._looping[index] = 0
            self._aliases.update(dict.fromkeys((step.condition, *step.body_outputs), ()))
            self._bind(step.condition_inputs, step.inputs)
            self._bind(step.body_inputs, step.inputs)
            return step.condition_step
        if self._looping[index] % 2:  # the body has run
            count = len(step.body_outputs)
            self._bind(step.condition_inputs[:count], step.body_outputs)
            self._bind(step.body_inputs[:count], step.body_outputs)
            self._looping[index] += 1
            return step.condition_step
        self._looping[index] += 1
        assert self._looping[index] < 2 * _ROUNDS_MAX, "a loop of a test model does not end"
        condition = self._value(step.condition)
        assert condition is not None
        if condition.item():
            return step.body_step
        for key, value in zip(step.outputs, step.body_inputs, strict=False):
            self._write(key, self._values[value])
        del self._looping[index]
        return step.exit_step

    def _bind(self, inner: Sequence[OperandKey], outer: Sequence[OperandKey]) -> None:
        values = [self._value(key) for key in outer]
        self._values.update(zip(inner, values, strict=True))
