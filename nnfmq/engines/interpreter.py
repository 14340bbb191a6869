"""The interpreter: the reference engine, a loop over prepared operations and a frame of operand values.

`prepare` does everything that can be done before an execution: it copies constants to private memory, infers shapes,
and binds each operation to its shapes, weights and attributes (`operations.prepare`). An operation whose shapes or
attributes come with the request is bound during the execution; the binding is reused while they stay the same. Per
execution, one call per operation remains. The model must have passed `validation.validate_model`.

Executions of one Program may run concurrently: each has its own frame, and bindings are immutable. Inputs are read in
place and may be memory that another process can write to, so attributes among them are copied before they are used.
Subgraphs of IF and WHILE are programs that are prepared once (`control_flow` has their steps).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import numpy as np

from nnfmq.engines.control_flow import callee_indexes, control_flow_step
from nnfmq.engines.execution import (
    DEFAULT_RUN_OPTIONS,
    BoundSteps,
    DirectWriter,
    ExecutionFrame,
    InputSpec,
    OutputWriter,
    RunOptions,
    StepFunction,
    are_separate,
    dtype_of,
    fit_outputs,
    known_shape,
    output_writer,
    run_options,
    run_steps,
)
from nnfmq.hal.errors import GeneralFailure, InvalidArgument, ResourceExhaustedTransient
from nnfmq.hal.types import LifeTime, Model, Operand, OperandType, Operation, OutputShape, Subgraph
from nnfmq.operations import REGISTRY
from nnfmq.operations.if_while import FIRST_OUTER_INPUT
from nnfmq.operations.prepacked import PrepackedWeights
from nnfmq.operations.prepare import ShapedOp, infer_shapes, tensor_of
from nnfmq.operations.shapes import DATA_DEPENDENT, require_max_rank
from nnfmq.operations.signature import NUMPY_TYPES, Array, Match, Parameter, Role, Run, Shape, Tensor, match

__all__ = [
    "ExecutionStep",
    "Program",
    "ResolvedOp",
    "SubgraphPreparation",
    "load_constant",
    "prepare",
    "prepare_with",
    "supports",
]

T = TypeVar("T")
_CONSTANTS = (LifeTime.CONSTANT_COPY, LifeTime.CONSTANT_REFERENCE)


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
        ResourceExhaustedTransient: If memory runs out or subgraphs are nested too deep.
    """
    return prepare_with(SubgraphPreparation, model, prepacked)


def prepare_with(
    preparation: Callable[[Model, Subgraph, dict[int, Program]], SubgraphPreparation],
    model: Model,
    prepacked: Sequence[tuple[Array, ...]] | None = None,
) -> Program:
    """Return a Program as `prepare` does, with another engine's `preparation` for the main subgraph."""
    weights = PrepackedWeights(prepacked)
    try:
        with np.errstate(all="ignore"), weights.in_use():
            program = preparation(model, model.main, {}).program()
    except (MemoryError, RecursionError) as error:
        raise ResourceExhaustedTransient(f"out of memory while preparing the model: {error}") from error
    program.prepacked = (*program.prepacked, *weights.groups)
    return program


@dataclass(frozen=True, slots=True)
class ExecutionStep:
    """A step of a program, the number of its last operation, and the temporaries that no later step reads."""

    function: StepFunction
    last_operation: int
    dead_after: tuple[int, ...]

    def releasing_function(self) -> StepFunction:
        """Return `function` followed by the release of dead temporaries, whose memory is then reused while in cache."""
        if not self.dead_after:
            return self.function
        function, dead_after = self.function, self.dead_after

        def run_and_release(frame: ExecutionFrame) -> None:
            function(frame)
            for index in dead_after:
                frame[index] = None

        return run_and_release


class Program:
    """A prepared model, made by `prepare`. Thread-safe. Holds no file descriptor, mapping or thread.

    `prepacked` has the arrays that preparation computed from constants, for a compilation cache. `compiled_ops` are the
    numbers of the operations that another engine has compiled. `steps` and `shapes` (of the operands, None if a shape
    comes with the request) are for the profiler.
    """

    prepacked: tuple[tuple[Array, ...], ...] = ()
    compiled_ops: frozenset[int] = frozenset()

    def __init__(
        self,
        subgraph: Subgraph,
        frame: ExecutionFrame,
        steps: tuple[ExecutionStep, ...],
        optional_inputs: frozenset[int],
        shapes: tuple[Shape | None, ...],
    ) -> None:
        self.steps = steps
        self.shapes = shapes
        self._frame = frame
        self._functions = tuple(step.releasing_function() for step in steps)
        functions: list[object] = [step.function for step in steps]
        self._direct_writers = [f for f in functions if isinstance(f, DirectWriter) and f.direct_outputs]
        self._inputs = tuple(
            InputSpec.of(subgraph, index, index in optional_inputs) for index in subgraph.input_indexes
        )
        self._outputs = subgraph.output_indexes
        self._output_dtypes = tuple(dtype_of(subgraph.operands[index]) for index in subgraph.output_indexes)
        output_shapes = [shapes[index] for index in subgraph.output_indexes]
        known = tuple(OutputShape(shape) for shape in output_shapes if shape is not None)
        self._output_shapes = known if len(known) == len(output_shapes) else None

    def execute(
        self,
        inputs: Sequence[Array | None],
        outputs: Sequence[Any],
        *,
        deadline_ns: int | None = None,
        is_cancelled: Callable[[], bool] | None = None,
        loop_timeout_ns: int | None = None,
    ) -> tuple[OutputShape, ...]:
        """Run once: read `inputs`, fill `outputs`, and return the shape of each output. Blocks.

        `inputs` are arrays with the operands' dtypes and shapes (None: omitted). `outputs` are arrays of the right
        dtype and shape, writable buffers of at least the output's bytes, or `DynamicOutput` (None: not wanted); they
        must not overlap the inputs. Deadline and cancellation are checked between operations. Each WHILE ends after
        `loop_timeout_ns` (None: LoopTimeoutDurationNs.DEFAULT).

        Raises:
            InvalidArgument: If an input does not fit the model, or the timeout is above the maximum.
            OutputInsufficientSize: If a buffer is too small; it has all shapes, and nothing was written.
            MissedDeadlineTransient: If the deadline or a WHILE's timeout passed.
            ResourceExhaustedTransient: If memory runs out.
            GeneralFailure: If an operation rejects its data, or the execution was cancelled.
        """
        options = run_options(deadline_ns, is_cancelled, loop_timeout_ns)
        with np.errstate(all="ignore"):
            return self.bind(inputs, outputs).run(options)

    def bind(self, inputs: Sequence[Array | None], outputs: Sequence[Any]) -> BoundSteps:
        """Check `inputs` and return the program bound to these buffers, which are as for `execute`."""
        outputs = tuple(outputs)
        write_outputs = output_writer(self._outputs, outputs, self._output_dtypes, self._output_shapes)
        write_directly = partial(self._write_directly, outputs) if self._direct_writers else None
        return BoundSteps(self._bind_inputs(inputs), self._functions, write_outputs, write_directly)

    def _write_directly(self, outputs: Sequence[Any], frame: ExecutionFrame) -> OutputWriter:
        """Let steps write to `outputs` where that is possible, and return the writer of the others.

        A step may begin to write while it or a later step still reads inputs. So no output may overlap an input.
        """
        arrays: dict[int, Array] = {}
        inputs = [frame[spec.index] for spec in self._inputs if frame[spec.index] is not None]
        if fit_outputs(outputs, self._output_dtypes, self._output_shapes) and are_separate([*inputs, *outputs]):
            arrays = {i: out for i, out in zip(self._outputs, outputs, strict=True) if out.flags.carray}
        for step in self._direct_writers:
            step.write_directly(frame, arrays)
        written = arrays.keys() & {index for step in self._direct_writers for index in step.direct_outputs}
        return output_writer(self._outputs, outputs, self._output_dtypes, self._output_shapes, written)

    def call(self, inputs: Sequence[Array | None], options: RunOptions) -> list[Array]:
        """Run a subgraph for IF or WHILE and return the outputs, which may be views of inputs."""
        frame = self._bind_inputs(inputs)
        run_steps(self._functions, frame, options)
        return [frame[index] for index in self._outputs]

    def _bind_inputs(self, inputs: Sequence[Array | None]) -> ExecutionFrame:
        """Return a new frame with the constants and the inputs."""
        frame = self._frame.copy()
        if len(inputs) != len(self._inputs):
            raise InvalidArgument(f"{len(inputs)} inputs given, the model has {len(self._inputs)}")
        for expected, array in zip(self._inputs, inputs, strict=True):
            if array is None or array.dtype != expected.dtype or array.shape != expected.shape:
                expected.check(array)
            frame[expected.index] = array
        return frame


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

    def program(self) -> Program:
        """Bind all operations and return the program."""
        functions = [self.prepare_step(number, operation) for number, operation in enumerate(self.subgraph.operations)]
        steps = _with_dead_operands(self.subgraph, self.group_steps(functions))
        optional_inputs = frozenset(self.subgraph.input_indexes) - self._required
        # Constants that a binding has packed and that no step reads again are not kept.
        values = [value if index in self._read else None for index, value in enumerate(self._constants_frame)]
        frame = [*values, *[None] * self.extra_slots, DEFAULT_RUN_OPTIONS]
        return Program(self.subgraph, frame, steps, optional_inputs, tuple(self._shapes))

    def load_constants(self) -> ExecutionFrame:
        """Return the value of each constant operand, None for others."""
        return [load_constant(self._model, operand) for operand in self.subgraph.operands]

    def group_steps(self, functions: Sequence[StepFunction]) -> list[tuple[int, StepFunction]]:
        """Return each step with the number of its last operation; other engines merge operations into one step."""
        return list(enumerate(functions))

    def static_step(self, op: ResolvedOp, arguments: Sequence[Tensor | None], shaped: ShapedOp) -> StepFunction:
        """Return the step of an operation whose shapes, weights and attributes are all known."""
        return op.step(op.bind(shaped))

    def prepare_step(self, number: int, operation: Operation) -> StepFunction:
        """Return the step of an operation."""
        label = f"operation {number} ({operation.type.name})"
        if operation.type in FIRST_OUTER_INPUT:
            self._read.update(operation.inputs)
            self._required.update(operation.inputs[: FIRST_OUTER_INPUT[operation.type]])
            callees = [self._program_of(label, index) for index in callee_indexes(self.subgraph, operation)]
            outputs = [self.subgraph.operands[index] for index in operation.outputs]
            return control_flow_step(label, operation, callees, outputs)
        found = _find_match(self.subgraph, operation)
        if found is None:
            raise GeneralFailure(f"{label} is not supported with these operand types")
        op = ResolvedOp(label, found, operation, tuple(self.subgraph.operands[i] for i in operation.outputs))
        self._required.update(op.required())
        if not self._is_static(op):
            self._read.update(operation.inputs)
            return _DynamicStep(op, self.subgraph.operands, self._constants_frame)
        arguments = [self._argument(index) for index in operation.inputs]
        shaped = op.infer_shapes(arguments)
        self._read.update(op.data_indexes())
        for index, shape in zip(operation.outputs, shaped.shapes, strict=True):
            declared = known_shape(self.subgraph.operands[index])
            self._shapes[index] = declared if DATA_DEPENDENT in shape else shape
        return self.static_step(op, arguments, shaped)

    def _program_of(self, label: str, index: int) -> Program:
        if index not in self._programs:
            try:
                program = SubgraphPreparation(self._model, self._model.referenced[index], self._programs).program()
            except GeneralFailure as error:
                raise _with_label(label, error) from error
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

    The value is copied to private memory: another process may be able to write to a memory pool.
    """
    if operand.lifetime not in _CONSTANTS:
        return None
    require_max_rank(operand.dimensions, "a constant")
    location = operand.location
    is_inline = operand.lifetime == LifeTime.CONSTANT_COPY
    source = memoryview(model.operand_values) if is_inline else model.pools[location.pool_index].view
    data = bytearray(source[location.offset : location.offset + location.length])
    return np.frombuffer(data, dtype_of(operand)).reshape(operand.dimensions)


@dataclass(frozen=True, slots=True)
class ResolvedOp:
    """An operation of the model with its matched declaration. `label` names it in error messages."""

    label: str
    match: Match
    operation: Operation
    outputs: tuple[Operand, ...]

    def arguments(self) -> Iterator[tuple[Parameter, int]]:
        """Yield each parameter with its operand's index."""
        return zip(self.match.parameters, self.operation.inputs, strict=True)

    def data_indexes(self) -> tuple[int, ...]:
        """Return the operands that the kernel reads at each execution."""
        return tuple(index for parameter, index in self.arguments() if parameter.role is Role.DATA)

    def required(self) -> Iterator[int]:
        """Yield the operands that may not be omitted."""
        return (index for parameter, index in self.arguments() if not parameter.optional)

    def infer_shapes(self, arguments: Sequence[Tensor | None]) -> ShapedOp:
        """Infer the outputs' shapes.

        Raises:
            GeneralFailure: If a constraint is violated; the message names the operation.
        """
        return self._labelled(lambda: infer_shapes(self.match, arguments, self.outputs))

    def bind(self, shaped: ShapedOp) -> Run:
        """Bind to the arguments of `infer_shapes`. Raises as that."""
        return self._labelled(shaped.bind)

    def step(self, run: Run) -> StepFunction:
        """Return the step that calls `run`."""
        return _static_step(self.label, run, self.data_indexes(), self.operation.outputs)

    def _labelled(self, act: Callable[[], T]) -> T:
        try:
            return act()
        except GeneralFailure as error:
            raise _with_label(self.label, error) from error


def _static_step(
    label: str, run: Callable[..., Any], inputs: tuple[int, ...], outputs: tuple[int, ...]
) -> StepFunction:
    """Return the step that calls `run` on the operands `inputs`.

    Errors are labelled by `try`, which costs nothing if none is raised. One input and one output is the most frequent
    case: its step has no argument lists.
    """
    if len(outputs) > 1:

        def step_of_many(frame: ExecutionFrame) -> None:
            try:
                results = run(*[frame[i] for i in inputs])
            except GeneralFailure as error:
                raise _with_label(label, error) from error
            for index, result in zip(outputs, results, strict=True):
                frame[index] = result

        return step_of_many
    output = outputs[0]
    if len(inputs) == 1:
        input = inputs[0]

        def step_of_one(frame: ExecutionFrame) -> None:
            try:
                frame[output] = run(frame[input])
            except GeneralFailure as error:
                raise _with_label(label, error) from error

        return step_of_one

    def step(frame: ExecutionFrame) -> None:
        try:
            frame[output] = run(*[frame[i] for i in inputs])
        except GeneralFailure as error:
            raise _with_label(label, error) from error

    return step


def _with_label(label: str, error: GeneralFailure) -> GeneralFailure:
    return GeneralFailure(f"{label}: {error}")


class _DynamicStep:
    """An operation that is bound when its shapes and attributes are known. The last binding is reused if they recur."""

    def __init__(self, op: ResolvedOp, operands: Sequence[Operand], constants: ExecutionFrame) -> None:
        self._op = op
        self._operands = operands
        # The cache key does not contain weights, so a binding is reusable only if they are constants.
        weights = [index for parameter, index in op.arguments() if parameter.role is Role.WEIGHT]
        self._is_reusable = all(constants[index] is not None for index in weights)
        self._last: tuple[Any, StepFunction] | None = None

    def __call__(self, frame: ExecutionFrame) -> None:
        arguments = [self._argument(frame, parameter, index) for parameter, index in self._op.arguments()]
        key = [_binding_key(p, a) for p, a in zip(self._op.match.parameters, arguments, strict=True)]
        last = self._last  # read once: a concurrent execution may replace it
        if last is None or last[0] != key:
            op = self._op
            last = (key, op.step(op.bind(op.infer_shapes(arguments))))
            self._last = last if self._is_reusable else None
        last[1](frame)

    def _argument(self, frame: ExecutionFrame, parameter: Parameter, index: int) -> Tensor | None:
        array = frame[index]
        if array is None:
            return None
        value = None if parameter.role is Role.DATA else array
        if parameter.role is Role.ATTRIBUTE:
            # An attribute decides addresses. Copy it before it is checked: another process may be able to write to it.
            value = array.copy()
        return tensor_of(self._operands[index], array.shape, value)


def _binding_key(parameter: Parameter, argument: Tensor | None) -> Any:
    """Return the part of an argument that a binding depends on: the shape and, for attributes, the bytes."""
    if argument is None or parameter.role is not Role.ATTRIBUTE:
        return None if argument is None else argument.shape
    return argument.shape, argument.array.tobytes()


def _with_dead_operands(subgraph: Subgraph, functions: Sequence[tuple[int, StepFunction]]) -> tuple[ExecutionStep, ...]:
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
        steps.append(ExecutionStep(function, last, tuple(chain.from_iterable(dead_after[first : last + 1]))))
        first = last + 1
    return tuple(steps)
