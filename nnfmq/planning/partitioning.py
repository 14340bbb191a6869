"""make_plan: the execution plan of a model for a list of devices.

If one device takes all operations, the plan is simple. Otherwise the operations of each subgraph are collected into
steps as in Android's NNAPI runtime: an operation is ready when all that it reads has been written; IF and WHILE that
the runtime interprets come first, then the devices in reverse order, so that earlier ones, which are preferred, have
more operations ready for one step. A step takes all ready operations of its device, and those that become ready by it.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator, Sequence

from msgspec import Struct, field

from nnfmq.hal.errors import GeneralFailure, InvalidArgument
from nnfmq.hal.feature_levels import FeatureLevel, interface_name
from nnfmq.hal.types import (
    DEFAULT_PREFERENCE,
    ExecutionPreference,
    LifeTime,
    Model,
    Operation,
    OperationType,
    Priority,
    Subgraph,
)
from nnfmq.operations.control_flow import FIRST_OUTER_INPUT, callee_indexes
from nnfmq.planning.device_assignment import INTERPRETED, DeviceAssignment, PlanOptions
from nnfmq.planning.plan import (
    MAIN,
    ExecutionPlan,
    ExecutionStep,
    GotoStep,
    IfStep,
    LogicalStep,
    OperandKey,
    PlanningDevice,
    WhileStep,
    subgraph_of,
)
from nnfmq.planning.sub_models import extract_model, has_unknown_size

__all__ = ["STEPS_MAX", "PlanOptions", "make_plan", "step_token"]

STEPS_MAX = 10_000
"""A plan has a copy of a subgraph's steps for each call, so a small model could have a plan of any size."""

_CONSTANTS = (LifeTime.CONSTANT_COPY, LifeTime.CONSTANT_REFERENCE)
_WRITTEN = (LifeTime.TEMPORARY_VARIABLE, LifeTime.SUBGRAPH_OUTPUT)


def make_plan(model: Model, devices: Sequence[PlanningDevice], options: PlanOptions | None = None) -> ExecutionPlan:
    """Return the plan that executes `model` on `devices`; blocks while the devices are asked what they support.

    Args:
        model: A valid model, its operations in an order in which they can be executed.
        devices: Preferred ones first; with the CPU device among them, every operation of the HAL has a device.
        options: See `PlanOptions`.

    Raises:
        InvalidArgument: If no device can execute an operation, or there is no device or two of one name.
        GeneralFailure: If the model cannot be divided: a step would have no input or no output, a value of unknown size
            would enter or leave a device whose interface is older than HAL 1.2, or there are too many steps.
    """
    names = tuple(device.name for device in devices)
    if not names or len(set(names)) < len(names):
        raise InvalidArgument(f"devices {list(names)}: at least one is required, each with a name of its own")
    choice = DeviceAssignment(model, devices, options or PlanOptions())
    chosen = set(choice.of(MAIN))
    if len(chosen) == 1 and INTERPRETED not in chosen:
        return ExecutionPlan(model, names, (_whole_model(model, chosen.pop()),))
    partition = _Partition(model, devices, choice)
    partition.add_subgraph(MAIN)
    return partition.plan(names)


def _whole_model(model: Model, device: int) -> ExecutionStep:
    main = model.main
    operations = tuple(range(len(main.operations)))
    return ExecutionStep(
        device, MAIN, operations, model, _keys(MAIN, main.input_indexes), _keys(MAIN, main.output_indexes)
    )


def _keys(subgraph: int, indexes: Sequence[int]) -> tuple[OperandKey, ...]:
    return tuple(OperandKey(subgraph, index) for index in indexes)


class _Partition:
    """The steps of a compound plan under construction."""

    def __init__(self, model: Model, devices: Sequence[PlanningDevice], choice: DeviceAssignment) -> None:
        self._model, self._devices, self._choice = model, devices, choice
        self._steps: list[LogicalStep | None] = []  # None: a step whose targets are not known yet

    def plan(self, names: tuple[str, ...]) -> ExecutionPlan:
        """Return the plan of the steps added."""
        steps = tuple(step for step in self._steps if step is not None)
        return ExecutionPlan(
            self._model, names, steps, tuple(_temporaries(self._model, steps)), tuple(_constants(self._model, steps))
        )

    def add_subgraph(self, subgraph: int) -> None:
        """Append the steps that execute a subgraph."""
        source = _Source.of(self._model, subgraph)
        ready = _ReadyOperations(source.graph, self._choice.of(subgraph), len(self._devices))
        while (device := ready.next_device()) is not None:
            if device == INTERPRETED:
                self._add_interpreted(source, ready.take_one(device))
            else:
                self._add_execution(source, device, ready.take_all(device))

    def _add_execution(self, source: _Source, device: int, operations: Sequence[int]) -> None:
        inputs, outputs = source.boundary(operations)
        subgraph, name = source.subgraph, self._devices[device].name
        if not inputs or not outputs:
            side = "output" if inputs else "input"
            raise GeneralFailure(f"a step of {len(operations)} operations on device {name!r} would have no {side}")
        self._require_known_sizes(source.graph, device, (*inputs, *outputs))
        model = extract_model(self._model, subgraph, operations, inputs, outputs)
        step = ExecutionStep(
            device, subgraph, tuple(operations), model, _keys(subgraph, inputs), _keys(subgraph, outputs)
        )
        self._append(step)

    def _require_known_sizes(self, graph: Subgraph, device: int, operands: Sequence[int]) -> None:
        level = FeatureLevel(self._devices[device].feature_level)
        unknown = [index for index in operands if has_unknown_size(graph.operands[index])]
        if unknown and level < FeatureLevel.V1_2:
            names = self._devices[device].name, interface_name(level), interface_name(FeatureLevel.V1_2)
            problem = f"operand {unknown[0]}, whose size is unknown, would enter or leave device {names[0]!r}"
            raise GeneralFailure(f"{problem}; its interface is {names[1]}, that needs {names[2]}")

    def _add_interpreted(self, source: _Source, index: int) -> None:
        operation = source.graph.operations[index]
        add = self._add_if if operation.type == OperationType.IF else self._add_while
        outer = operation.inputs[FIRST_OUTER_INPUT[operation.type] :]
        first, second = (callee + 1 for callee in callee_indexes(source.graph, operation))
        add(source.subgraph, index, operation, outer, first, second)

    def _add_if(
        self, subgraph: int, index: int, operation: Operation, outer: tuple[int, ...], then: int, otherwise: int
    ) -> None:
        position = self._append(None)
        self.add_subgraph(then)
        end_of_then = self._append(None)
        self.add_subgraph(otherwise)
        end = self._append(None) + 1
        self._steps[end_of_then] = self._steps[end - 1] = GotoStep(end)
        self._steps[position] = IfStep(
            subgraph=subgraph,
            operation=index,
            condition=OperandKey(subgraph, operation.inputs[0]),
            then_step=position + 1,
            else_step=end_of_then + 1,
            inputs=_keys(subgraph, outer),
            outputs=_keys(subgraph, operation.outputs),
            then_inputs=self._inputs(then),
            then_outputs=self._outputs(then),
            else_inputs=self._inputs(otherwise),
            else_outputs=self._outputs(otherwise),
        )

    def _add_while(
        self, subgraph: int, index: int, operation: Operation, outer: tuple[int, ...], condition: int, body: int
    ) -> None:
        position = self._append(None)
        self.add_subgraph(condition)
        self._append(GotoStep(position))
        body_step = len(self._steps)
        self.add_subgraph(body)
        self._append(GotoStep(position))
        self._steps[position] = WhileStep(
            subgraph=subgraph,
            operation=index,
            condition=self._outputs(condition)[0],
            condition_step=position + 1,
            body_step=body_step,
            exit_step=len(self._steps),
            inputs=_keys(subgraph, outer),
            outputs=_keys(subgraph, operation.outputs),
            condition_inputs=self._inputs(condition),
            body_inputs=self._inputs(body),
            body_outputs=self._outputs(body),
        )

    def _inputs(self, subgraph: int) -> tuple[OperandKey, ...]:
        return _keys(subgraph, subgraph_of(self._model, subgraph).input_indexes)

    def _outputs(self, subgraph: int) -> tuple[OperandKey, ...]:
        return _keys(subgraph, subgraph_of(self._model, subgraph).output_indexes)

    def _append(self, step: LogicalStep | None) -> int:
        if len(self._steps) >= STEPS_MAX:
            raise GeneralFailure(f"the plan would have more than {STEPS_MAX} steps")
        self._steps.append(step)
        return len(self._steps) - 1


class _Source(Struct, frozen=True):
    """A subgraph of the source model, and the operations that read each operand."""

    subgraph: int
    graph: Subgraph
    readers: dict[int, list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Model, subgraph: int) -> _Source:
        """Return the description of a subgraph."""
        source = cls(subgraph, subgraph_of(model, subgraph))
        for position, operation in enumerate(source.graph.operations):
            for index in operation.inputs:
                source.readers.setdefault(index, []).append(position)
        return source

    def boundary(self, operations: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the operands that enter a step of `operations`, and those that leave it.

        Inputs of the subgraph come first, then temporaries, then outputs of the subgraph that other steps write; at the
        other side outputs of the subgraph, then temporaries.
        """
        inside, operands = set(operations), self.graph.operands
        written = [index for position in operations for index in self.graph.operations[position].outputs]
        is_written = set(written)
        read = dict.fromkeys(index for position in operations for index in self.graph.operations[position].inputs)
        inputs = [index for index in read if index not in is_written and operands[index].lifetime in _INPUT_ORDER]
        outputs = [
            index
            for index in written
            if operands[index].lifetime == LifeTime.SUBGRAPH_OUTPUT
            or not inside.issuperset(self.readers.get(index, ()))
        ]
        inputs.sort(key=lambda index: (_INPUT_ORDER[operands[index].lifetime], index))
        outputs.sort(key=lambda index: (operands[index].lifetime != LifeTime.SUBGRAPH_OUTPUT, index))
        return inputs, outputs


_INPUT_ORDER = {LifeTime.SUBGRAPH_INPUT: 0, LifeTime.TEMPORARY_VARIABLE: 1, LifeTime.SUBGRAPH_OUTPUT: 2}


class _ReadyOperations:
    """The operations of a subgraph whose inputs all have values, in a queue for each device and the interpreter."""

    def __init__(self, graph: Subgraph, chosen: Sequence[int], device_count: int) -> None:
        self._graph, self._chosen = graph, chosen
        self._queues: dict[int, deque[int]] = {
            device: deque() for device in (INTERPRETED, *reversed(range(device_count)))
        }
        self._waiting_for: list[int] = []
        self._readers: dict[int, list[int]] = {}
        for position, operation in enumerate(graph.operations):
            unwritten = {index for index in operation.inputs if graph.operands[index].lifetime in _WRITTEN}
            self._waiting_for.append(len(unwritten))
            for index in unwritten:
                self._readers.setdefault(index, []).append(position)
            if not unwritten:
                self._queues[chosen[position]].append(position)

    def next_device(self) -> int | None:
        """Return the device, or INTERPRETED, that executes something next; None if nothing is left."""
        return next((device for device, queue in self._queues.items() if queue), None)

    def take_one(self, device: int) -> int:
        """Remove and return the first ready operation of a device; others may become ready by it."""
        position = self._queues[device].popleft()
        for index in self._graph.operations[position].outputs:
            for reader in self._readers.get(index, ()):
                self._waiting_for[reader] -= 1
                if not self._waiting_for[reader]:
                    self._queues[self._chosen[reader]].append(reader)
        return position

    def take_all(self, device: int) -> list[int]:
        """Remove and return all ready operations of a device, and those that become ready by them, in source order."""
        taken = []
        while self._queues[device]:
            taken.append(self.take_one(device))
        return sorted(taken)


def _temporaries(model: Model, steps: Sequence[LogicalStep]) -> Iterator[OperandKey]:
    """Yield the values whose memory the runtime owns, each once, in the order in which steps write them."""
    written: dict[OperandKey, None] = {}
    of_branches: set[OperandKey] = set()
    of_loops: set[OperandKey] = set()
    for step in steps:
        if isinstance(step, IfStep):
            of_branches.update(step.then_outputs, step.else_outputs)
        if isinstance(step, WhileStep):
            of_loops.update((step.condition, *step.body_outputs))
        if not isinstance(step, GotoStep):
            written.update(dict.fromkeys(step.outputs))
    main_outputs = set(_keys(MAIN, model.main.output_indexes))
    excluded = (of_branches - of_loops) | main_outputs
    return (key for key in written if key not in excluded)


def _constants(model: Model, steps: Sequence[LogicalStep]) -> Iterator[OperandKey]:
    """Yield the constants that interpreted operations read or bind, each once."""
    read: dict[OperandKey, None] = {}
    for step in steps:
        if isinstance(step, IfStep):
            read[step.condition] = None
        if isinstance(step, IfStep | WhileStep):
            read.update(dict.fromkeys(step.inputs))
    return (key for key in read if subgraph_of(model, key.subgraph).operands[key.operand].lifetime in _CONSTANTS)


# ----------------------------------------------------------------------------------------------------------------------
# The caching token of a step: what tells its compilation apart from every other one of the same application.


def step_token(
    token: bytes,
    step: ExecutionStep,
    device: PlanningDevice,
    preference: ExecutionPreference = DEFAULT_PREFERENCE,
    priority: Priority = Priority.MEDIUM,
) -> bytes:
    """Return the token for a step's compilation, 32 bytes: a SHA-256.

    It differs with the application's token, with the name and version of the device, with preference and priority, and
    with the operations of the step, so another partition of the same model does not get this step's compilation. A
    step's operations decide its inputs and outputs as well.

    Args:
        token: The application's token, which identifies the source model.
        step: The step.
        device: The device of the step.
        preference: The preference of the compilation.
        priority: The priority of the compilation.
    """
    import hashlib  # it would add 3 ms to the start of every application, and few have tokens

    digest = hashlib.sha256()
    numbers = (preference, priority, step.subgraph, *step.operations)
    fields = token, device.name.encode(), device.version_string.encode(), struct.pack(f"<{len(numbers)}I", *numbers)
    for part in fields:  # each with its length: otherwise bytes could belong to either of two neighbours
        digest.update(struct.pack("<Q", len(part)) + part)
    return digest.digest()
