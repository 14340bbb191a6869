"""The interpreter: the reference engine, which prepares a model as a sequence of steps, one for each operation.

`prepare` does everything that can be done before an execution: it copies constants to private memory, infers shapes,
and binds each operation to its shapes, weights and attributes (`operations.preparation`). An operation whose shapes or
attributes come with the request is bound during the execution; the binding is reused while they stay the same. Per
execution, one call per operation remains. The model must have passed `validation.models.validate_model`.

Executions of one Program may run concurrently: each has its own frame, and bindings are immutable. Inputs are read in
place and may be memory that another process can write to, so attributes among them are copied before they are used.
Subgraphs of IF and WHILE are programs that are prepared once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np

from nnfmq.engines.execution import DEFAULT_RUN_OPTIONS, dtype_of, known_shape
from nnfmq.engines.program import ExecutionFrame, Program, ProgramStep, StepFunction
from nnfmq.engines.steps import DynamicStep, ResolvedOp, control_flow_step, with_label
from nnfmq.hal.errors import GeneralFailure, InvalidArgument, ResourceExhaustedTransient
from nnfmq.hal.types import LifeTime, Model, Operand, OperandType, Operation, OperationType, Subgraph
from nnfmq.operations import REGISTRY
from nnfmq.operations.control_flow import FIRST_OUTER_INPUT, callee_indexes, require_nesting
from nnfmq.operations.declaration import NUMPY_TYPES, Array, Match, Role, Shape, Tensor, match
from nnfmq.operations.preparation import PrepackedWeights, ShapedOp, tensor_of
from nnfmq.operations.shapes import DATA_DEPENDENT, require_max_rank

__all__ = ["SubgraphPreparation", "load_constant", "prepare", "prepare_with", "supports"]

_CONSTANTS = (LifeTime.CONSTANT_COPY, LifeTime.CONSTANT_REFERENCE)
_COPIED_BYTES = 1 << 12  # of a constant that is copied rather than viewed


def supports(subgraph: Subgraph, operation: Operation) -> bool:
    """Return True if `prepare` can bind an operation, as far as its operands' types show.

    The operations in the subgraphs that IF and WHILE call are not checked.
    """
    if operation.type in FIRST_OUTER_INPUT:
        operands = (subgraph.operands[index] for index in (*operation.inputs, *operation.outputs))
        return all(operand.type in NUMPY_TYPES or operand.type == OperandType.SUBGRAPH for operand in operands)
    return _find_match(subgraph, operation) is not None


def prepare(model: Model, prepacked: Sequence[tuple[Array, ...]] | None = None) -> Program:
    """Return a Program that executes `model`'s main subgraph.

    `prepacked` is `Program.prepacked` of an earlier preparation of the same model by the same code: these arrays are
    used instead of being computed again.

    Raises:
        GeneralFailure: If an operation is not supported or its arguments violate a constraint; the message names the
            first one. Constraints on arguments that come with the request are checked by the execution.
        InvalidArgument: If IF and WHILE are nested too deep.
        ResourceExhaustedTransient: If memory runs out.
    """
    return prepare_with(SubgraphPreparation, model, prepacked)


def prepare_with(
    preparation: Callable[[Model, Subgraph, dict[int, Program]], SubgraphPreparation],
    model: Model,
    prepacked: Sequence[tuple[Array, ...]] | None = None,
) -> Program:
    """Return a Program as `prepare` does, with another engine's `preparation`."""
    require_nesting(model)
    weights = PrepackedWeights(prepacked)
    try:
        with np.errstate(all="ignore"), weights.in_use():
            program = preparation(model, model.main, {}).program()
    except MemoryError as error:
        raise ResourceExhaustedTransient(f"out of memory while preparing the model: {error}") from error
    program.prepacked = (*program.prepacked, *weights.groups)
    return program


def _find_match(subgraph: Subgraph, operation: Operation) -> Match | None:
    """Return the match of an operation, or None if no kernel computes it."""
    declaration = REGISTRY.get(operation.type)
    if declaration is None:
        return None
    operands = subgraph.operands
    try:
        found = match(declaration, [operands[i] for i in operation.inputs], [operands[i] for i in operation.outputs])
    except InvalidArgument:
        return None
    return found if found.variant.plan is not None else None


class SubgraphPreparation:
    """Prepares one subgraph: loads constants, then binds each operation in order with the shapes known so far.

    `programs` has the prepared programs of referenced subgraphs by index. Other engines override some of the methods,
    and may reserve `extra_slots` of the frame, after the operands, for steps that keep state.
    """

    extra_slots = 0

    def __init__(self, model: Model, subgraph: Subgraph, programs: dict[int, Program]) -> None:
        self._model = model
        self.subgraph = subgraph
        self._programs = programs
        self._constants_frame = self.load_constants()
        self._shapes = [known_shape(operand) for operand in subgraph.operands]
        self._required: set[int] = set()  # operands that are a required argument of some operation
        self._read: set[int] = set()  # operands that steps read during an execution
        # What each operation that the interpreter computes needs beside its operands; another engine removes its own.
        self._step_bytes: dict[int, int] = {}
        self._has_dynamic_values = False

    def program(self) -> Program:
        """Bind all operations and return the program."""
        functions = [self.prepare_step(number, operation) for number, operation in enumerate(self.subgraph.operations)]
        steps = _with_dead_operands(self.subgraph, self.group_steps(functions))
        optional_inputs = frozenset(self.subgraph.input_indexes) - self._required
        frame = [*self._kept_constants(), *[None] * self.extra_slots, None, DEFAULT_RUN_OPTIONS]
        working_bytes = self._working_bytes(steps)
        shapes = tuple(self._shapes)
        return Program(self.subgraph, frame, steps, optional_inputs, shapes, working_bytes, self._has_dynamic_values)

    def _kept_constants(self) -> ExecutionFrame:
        """Return the constants that steps read again: copies if they are few, for views keep the memory of all."""
        values = [value if index in self._read else None for index, value in enumerate(self._constants_frame)]
        kept_bytes = sum(value.nbytes for value in values if value is not None)
        all_bytes = len(self._model.operand_values) + sum(pool.size_bytes for pool in self._model.pools)
        if 2 * kept_bytes > all_bytes:
            return values
        return [None if value is None else value.copy() for value in values]

    def preparation_of(self, subgraph: Subgraph) -> SubgraphPreparation:
        """Return the preparation of a subgraph that IF or WHILE call; other engines return their own."""
        return SubgraphPreparation(self._model, subgraph, self._programs)

    def load_constants(self) -> ExecutionFrame:
        """Return the value of each constant operand, None for others."""
        return [load_constant(self._model, operand) for operand in self.subgraph.operands]

    def group_steps(self, functions: Sequence[StepFunction]) -> list[tuple[int, StepFunction]]:
        """Return each step with the number of its last operation; other engines merge operations into one step."""
        return list(enumerate(functions))

    def static_step(self, op: ResolvedOp, arguments: Sequence[Tensor | None], shaped: ShapedOp) -> StepFunction:
        """Return the step of an operation whose shapes, weights and attributes are all known."""
        return op.step(op.bind(shaped))

    def dynamic_step(self, op: ResolvedOp) -> StepFunction:
        """Return the step of an operation that is bound during the execution."""
        self._read.update(op.operation.inputs)
        self._has_dynamic_values = True
        return DynamicStep(op, self.subgraph.operands, self._constants_frame, set(self._values_of(op.operation)))

    def prepare_step(self, number: int, operation: Operation) -> StepFunction:
        """Return the step of an operation."""
        label = f"operation {number} ({operation.type.name})"
        if operation.type in FIRST_OUTER_INPUT:
            self._read.update(operation.inputs)
            self._required.update(operation.inputs[: FIRST_OUTER_INPUT[operation.type]])
            callees = [self._program_of(label, index) for index in callee_indexes(self.subgraph, operation)]
            outputs = [self.subgraph.operands[index] for index in operation.outputs]
            self._count_callees(number, operation, callees)
            return control_flow_step(label, operation, callees, outputs, set(self._values_of(operation)))
        found = _find_match(self.subgraph, operation)
        if found is None:
            raise GeneralFailure(f"{label} is not supported with these operand types")
        op = ResolvedOp(label, found, operation, tuple(self.subgraph.operands[i] for i in operation.outputs))
        self._required.update(op.required())
        self._step_bytes[number] = 0
        if not self._is_static(op):
            return self.dynamic_step(op)
        arguments = [self._argument(index) for index in operation.inputs]
        shaped = op.infer_shapes(arguments)
        self._set_known(op, op.data_indexes(), shaped.shapes)
        return self.static_step(op, arguments, shaped)

    def _set_known(self, op: ResolvedOp, read: Sequence[int], shapes: Sequence[Shape]) -> None:
        """Remember the operands that an operation reads during an execution, and the shapes of its outputs."""
        self._read.update(read)
        for index, shape in zip(op.operation.outputs, shapes, strict=True):
            declared = known_shape(self.subgraph.operands[index])
            self._shapes[index] = declared if DATA_DEPENDENT in shape else shape

    # -- the memory of operand values ---------------------------------------------------------------------------------

    def _values_of(self, operation: Operation) -> dict[int, int]:
        """Return the sizes in bytes of an operation's outputs, as far as their shapes are known."""
        known = {index: self._shapes[index] for index in operation.outputs}
        operands = self.subgraph.operands
        return {i: math.prod(s) * dtype_of(operands[i]).itemsize for i, s in known.items() if s is not None}

    def _count_callees(self, number: int, operation: Operation, callees: Sequence[Program]) -> None:
        """Count what IF or WHILE need for the subgraphs that they call: WHILE has two iterations' values at a time."""
        self._has_dynamic_values |= len(self._values_of(operation)) < len(set(operation.outputs))
        self._has_dynamic_values |= any(callee.has_dynamic_values for callee in callees)
        needed = [callee.working_bytes for callee in callees]
        self._step_bytes[number] = max(needed) if operation.type == OperationType.IF else 2 * sum(needed)

    def _working_bytes(self, steps: Sequence[ProgramStep]) -> int:
        """Return `Program.working_bytes`, of a run after the first: the last run's outputs exist until replaced."""
        operations = self.subgraph.operations
        by_operation = [self._values_of(o) if n in self._step_bytes else {} for n, o in enumerate(operations)]
        outputs = set(self.subgraph.output_indexes)
        sizes = {index: size for values in by_operation for index, size in values.items()}
        live = most = sum(size for index, size in sizes.items() if index in outputs)
        first = 0
        for step in steps:
            for number, values in enumerate(by_operation[first : step.last_operation + 1], first):
                live += sum(values.values())
                most = max(most, live + self._step_bytes.get(number, 0))
                live -= sum(size for index, size in values.items() if index in outputs)
            live -= sum(sizes.get(index, 0) for index in step.dead_after)
            first = step.last_operation + 1
        return most

    def _program_of(self, label: str, index: int) -> Program:
        if index not in self._programs:
            try:
                program = self.preparation_of(self._model.referenced[index]).program()
            except GeneralFailure as error:
                raise with_label(label, error) from error
            self._programs[index] = program
        return self._programs[index]

    def _argument(self, index: int) -> Tensor | None:
        operand, shape = self.subgraph.operands[index], self._shapes[index]
        if operand.lifetime == LifeTime.NO_VALUE:
            return None
        assert shape is not None, "_is_static has checked it"
        return tensor_of(operand, shape, self._constants_frame[index])

    def _is_static(self, op: ResolvedOp) -> bool:
        """Return True if nothing that the binding needs comes with the request."""
        for parameter, index in op.arguments():
            operand = self.subgraph.operands[index]
            if operand.lifetime == LifeTime.NO_VALUE:
                continue
            may_be_omitted = operand.lifetime == LifeTime.SUBGRAPH_INPUT and parameter.optional
            needs_value = parameter.role is not Role.DATA and self._constants_frame[index] is None
            if may_be_omitted or needs_value or self._shapes[index] is None:
                return False
        return True


def load_constant(model: Model, operand: Operand) -> Array | None:
    """Return a constant's value, or None for another operand.

    The value is copied to private memory, unless it is there already and aligned: another process may be able to write
    to a memory pool. A small one is copied in any case, because a view of it would keep all constants of the model.
    """
    if operand.lifetime not in _CONSTANTS:
        return None
    require_max_rank(operand.dimensions, "a constant")
    location = operand.location
    is_inline = operand.lifetime == LifeTime.CONSTANT_COPY
    source = memoryview(model.operand_values) if is_inline else model.pools[location.pool_index].view
    is_private = isinstance(source.obj, bytes) or (
        not is_inline and getattr(model.pools[location.pool_index], "is_private", False)
    )
    data = np.frombuffer(source[location.offset : location.offset + location.length], np.uint8)
    is_viewed = is_private and location.length > _COPIED_BYTES
    value = (data if is_viewed else data.copy()).view(dtype_of(operand)).reshape(operand.dimensions)
    return value if value.flags.aligned else value.copy()


def _with_dead_operands(subgraph: Subgraph, functions: Sequence[tuple[int, StepFunction]]) -> tuple[ProgramStep, ...]:
    """Return the steps, each with the temporaries that are dead after it."""
    last_use: dict[int, int] = {}
    for number, operation in enumerate(subgraph.operations):
        last_use.update(dict.fromkeys((*operation.inputs, *operation.outputs), number))
    dead_after: list[list[int]] = [[] for _ in subgraph.operations]
    for index, number in last_use.items():
        if subgraph.operands[index].lifetime == LifeTime.TEMPORARY_VARIABLE:
            dead_after[number].append(index)
    first, steps = 0, []
    for last, function in functions:
        steps.append(ProgramStep(function, last, tuple(chain.from_iterable(dead_after[first : last + 1]))))
        first = last + 1
    return tuple(steps)
