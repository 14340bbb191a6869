"""The reference engine: a loop over prepared operations and a scope that holds their values.

`prepare` does all that can be known before an execution: it copies constants into private memory, infers shapes,
and binds each operation to its shapes, weights and controls (`operations.prepare`). An operation whose shapes or
controls come only with the request is bound during the execution, and its binding kept while they stay the same.
What remains is one call per operation. The model must have passed `validation.validate_model`.

Executions of one Program may run at the same time: each has its own scope, and bindings are never changed.
Inputs are read in place and may be another process's memory; controls among them are copied before they are used.
Subgraphs of IF and WHILE are programs of their own, each prepared once (`control_flow` has the two steps).
Semantics: the HAL's operations as `operations` declares them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import numpy as np

from nnfmq.engines.control_flow import callee_indexes, control_flow_step, is_compatible_shape
from nnfmq.engines.execution import (
    DEFAULT_RUN_OPTIONS,
    BoundSteps,
    ExecutionFrame,
    OutputWriter,
    RunOptions,
    StepFunction,
    run_options,
    run_steps,
)
from nnfmq.engines.storing import is_array_of, store, storing_in_place
from nnfmq.hal.errors import GeneralFailure, InvalidArgument, ResourceExhaustedTransient
from nnfmq.hal.types import LifeTime, Model, Operand, OperandType, Operation, OutputShape, Subgraph, is_scalar
from nnfmq.operations import REGISTRY
from nnfmq.operations.if_while import FIRST_OUTER_INPUT
from nnfmq.operations.prepacked import PrepackedWeights
from nnfmq.operations.prepare import ShapedOp, infer_shapes, tensor_of
from nnfmq.operations.shapes import DATA_DEPENDENT, require_max_rank
from nnfmq.operations.signature import NUMPY_TYPES, Array, Match, Parameter, Role, Run, Shape, Tensor, match

__all__ = [
    "ExecutionStep",
    "InputSpec",
    "Program",
    "ResolvedOp",
    "SubgraphPreparation",
    "constant",
    "prepare",
    "prepare_with",
    "supports",
]

T = TypeVar("T")
_CONSTANTS = (LifeTime.CONSTANT_COPY, LifeTime.CONSTANT_REFERENCE)


def supports(subgraph: Subgraph, operation: Operation) -> bool:
    """Return True for an operation that `prepare` can bind, as far as its operands' types tell.

    Whether it can bind what IF and WHILE call is another question.
    """
    if operation.type in FIRST_OUTER_INPUT:
        return all(_has_elements(subgraph.operands[index]) for index in (*operation.inputs, *operation.outputs))
    return _find(subgraph, operation) is not None


def _has_elements(operand: Operand) -> bool:
    """Return True if arrays can be made of an operand, or it is a subgraph: IF and WHILE hand on whatever they get."""
    return operand.type in NUMPY_TYPES or operand.type == OperandType.SUBGRAPH


def prepare(model: Model, packed: Sequence[tuple[Array, ...]] | None = None) -> Program:
    """Return a Program that executes `model`'s main subgraph.

    `packed` are an earlier Program's of the same model, which are used instead of being made again.
    Raises GeneralFailure naming the first operation that is not supported or whose arguments violate one of its
    constraints, as far as they are known; ResourceExhaustedTransient when memory runs out, or subgraphs nest too deep.
    """
    return prepare_with(SubgraphPreparation, model, packed)


def prepare_with(
    kind: Callable[[Model, Subgraph, dict[int, Program]], SubgraphPreparation],
    model: Model,
    packed: Sequence[tuple[Array, ...]] | None = None,
) -> Program:
    """Return a Program as `prepare`, made by `kind`: how an engine of its own shares the interpreter's way."""
    packing = PrepackedWeights(packed)
    try:
        with np.errstate(all="ignore"), packing.in_use():
            program = kind(model, model.main, {}).program()
    except (MemoryError, RecursionError) as error:
        raise ResourceExhaustedTransient(f"out of memory while preparing the model: {error}") from error
    program.packed = (*program.packed, *packing.groups)
    return program


@dataclass(frozen=True, slots=True)
class ExecutionStep:
    """A step of a program, the number of its last operation, and the temporaries that no later part reads."""

    step: StepFunction
    last: int
    dropped: tuple[int, ...]

    def releasing(self) -> StepFunction:
        """Return the step that also drops those temporaries, so that their memory is reused while warm."""
        if not self.dropped:
            return self.step
        step, dropped = self.step, self.dropped

        def releasing(scope: ExecutionFrame) -> None:
            step(scope)
            for index in dropped:
                scope[index] = None

        return releasing


class Program:
    """A prepared model; made by `prepare`. Holds no file descriptor, mapping or thread.

    `packed` is what its plans made of constants, for a cache; `generated` are the numbers of the operations for which
    another engine has code of its own. `parts` are its steps, and `shapes` those of its operands, None where they come
    with the request: for who looks into it.
    """

    packed: tuple[tuple[Array, ...], ...] = ()
    compiled_ops: frozenset[int] = frozenset()

    def __init__(
        self,
        subgraph: Subgraph,
        scope: ExecutionFrame,
        parts: tuple[ExecutionStep, ...],
        omittable: frozenset[int],
        shapes: tuple[Shape | None, ...],
    ) -> None:
        self.parts = parts
        self.shapes = shapes
        self._scope = scope
        self._steps = tuple(part.releasing() for part in parts)
        self._inputs = tuple(InputSpec.of(subgraph, index, index in omittable) for index in subgraph.input_indexes)
        self._outputs = subgraph.output_indexes
        self._output_dtypes = tuple(_dtype(subgraph.operands[index]) for index in subgraph.output_indexes)
        self._output_shapes = _all_known([shapes[index] for index in subgraph.output_indexes])

    def execute(
        self,
        inputs: Sequence[Array | None],
        outputs: Sequence[Any],
        *,
        deadline_ns: int | None = None,
        is_cancelled: Callable[[], bool] | None = None,
        loop_timeout_ns: int | None = None,
    ) -> tuple[OutputShape, ...]:
        """Run once: read `inputs`, fill `outputs`, and return the shape of each output.

        `inputs` are arrays with the operands' dtypes and shapes (None: omitted). `outputs` are arrays of the right
        dtype and shape, writable buffers of at least the output's bytes, or Growing (None: not wanted); they must not
        overlap the inputs. Deadline and cancellation are looked at between operations, and each WHILE ends after
        `loop_timeout_ns` (None: LoopTimeoutDurationNs.DEFAULT). Raises InvalidArgument for inputs that do not fit the
        model and for a timeout above the maximum, OutputInsufficientSize (with all shapes; nothing was written),
        MissedDeadlineTransient, ResourceExhaustedTransient, and GeneralFailure for what an operation refuses or when
        cancelled.
        """
        limits = run_options(deadline_ns, is_cancelled, loop_timeout_ns)
        with np.errstate(all="ignore"):
            return self.bind(inputs, outputs).run(limits)

    def bind(self, inputs: Sequence[Array | None], outputs: Sequence[Any]) -> BoundSteps:
        """Check `inputs` and return an Execution over these buffers, which are as for `execute`."""
        return BoundSteps(self._bound_scope(inputs), self._steps, self._store_into(tuple(outputs)))

    def call(self, inputs: Sequence[Array | None], limits: RunOptions) -> list[Array]:
        """Run once and return the outputs, which may be views of inputs: how IF and WHILE use a subgraph."""
        scope = self._bound_scope(inputs)
        run_steps(self._steps, scope, limits)
        return [scope[index] for index in self._outputs]

    def _store_into(self, outputs: tuple[Any, ...]) -> OutputWriter:
        shapes, dtypes = self._output_shapes, self._output_dtypes
        if shapes is not None and len(outputs) == len(shapes) and all(map(is_array_of, outputs, dtypes, shapes)):
            return storing_in_place(self._outputs, outputs, shapes)
        return lambda scope: store([scope[index] for index in self._outputs], outputs)

    def _bound_scope(self, inputs: Sequence[Array | None]) -> ExecutionFrame:
        scope = self._scope.copy()
        self._bind(inputs, scope)
        return scope

    def _bind(self, inputs: Sequence[Array | None], scope: ExecutionFrame) -> None:
        if len(inputs) != len(self._inputs):
            raise InvalidArgument(f"{len(inputs)} inputs given, the model has {len(self._inputs)}")
        for expected, array in zip(self._inputs, inputs, strict=True):
            if array is None or array.dtype != expected.dtype or array.shape != expected.shape:
                expected.check(array)
            scope[expected.index] = array


@dataclass(frozen=True, slots=True)
class InputSpec:
    """What the model says of one of its inputs; `shape` None = not fully known."""

    index: int
    dtype: np.dtype[Any]
    shape: Shape | None
    dimensions: Shape
    omittable: bool

    @classmethod
    def of(cls, subgraph: Subgraph, index: int, omittable: bool) -> InputSpec:
        """Return what `subgraph` says of operand `index`. Raises GeneralFailure for a type that nobody computes."""
        operand = subgraph.operands[index]
        return cls(index, _dtype(operand), _known_shape(operand), operand.dimensions, omittable)

    def check(self, array: Array | None) -> None:
        """Raise InvalidArgument unless `array` fits."""
        if array is None:
            fits = self.omittable
        elif self.shape is not None:
            fits = array.dtype == self.dtype and array.shape == self.shape
        else:
            fits = array.dtype == self.dtype and is_compatible_shape(self.dimensions, array.shape)
        if not fits:
            given = "nothing" if array is None else f"{array.dtype} {array.shape}"
            raise InvalidArgument(f"input operand {self.index} is {self.dtype} {self.dimensions}, given is {given}")


def _all_known(shapes: Sequence[Shape | None]) -> tuple[OutputShape, ...] | None:
    return None if None in shapes else tuple(OutputShape(shape) for shape in shapes if shape is not None)


def _dtype(operand: Operand) -> np.dtype[Any]:
    dtype = NUMPY_TYPES.get(operand.type)
    if dtype is None:
        raise GeneralFailure(f"operands of type {operand.type.name} are not supported")
    return dtype


def _known_shape(operand: Operand) -> Shape | None:
    if is_scalar(operand.type):
        return ()
    return operand.dimensions if operand.dimensions and 0 not in operand.dimensions else None


def _find(subgraph: Subgraph, operation: Operation) -> Match | None:
    """Return the match of an operation that can be computed, else None."""
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
    """The way from a subgraph to its Program: constants, then each operation in order, with the shapes known so far.

    `programs` are those of referenced subgraphs that were prepared already, by index. An engine of its own overrides
    some of the methods, and may ask for `extra_slots` behind the operands of a scope for states of its steps.
    """

    extra_slots = 0

    def __init__(self, model: Model, subgraph: Subgraph, programs: dict[int, Program]) -> None:
        self._model = model
        self.subgraph = subgraph
        self._programs = programs
        self._scope = self.constants()
        self._shapes = [_known_shape(operand) for operand in subgraph.operands]
        self._required: set[int] = set()  # operands that some operation may not go without
        self._read: set[int] = set()  # operands that steps read during an execution

    def program(self) -> Program:
        """Bind all operations."""
        steps = [self.prepared_step(number, operation) for number, operation in enumerate(self.subgraph.operations)]
        parts = _with_releases(self.subgraph, self.joined(steps))
        omittable = frozenset(self.subgraph.input_indexes) - self._required
        return Program(self.subgraph, self._runtime_scope(), parts, omittable, tuple(self._shapes))

    def constants(self) -> ExecutionFrame:
        """Return the value of each operand that has one already."""
        return [constant(self._model, operand) for operand in self.subgraph.operands]

    def joined(self, steps: Sequence[StepFunction]) -> list[tuple[int, StepFunction]]:
        """Return the steps, each with the number of its last operation; an engine may make one of several."""
        return list(enumerate(steps))

    def static_step(self, bound: ResolvedOp, arguments: Sequence[Tensor | None], fitted: ShapedOp) -> StepFunction:
        """Return the step of an operation of which everything is known."""
        return bound.step(bound.bind(fitted))

    def _runtime_scope(self) -> ExecutionFrame:
        """Return the scope without the constants that no step reads again, since a binding has packed them."""
        values = [value if index in self._read else None for index, value in enumerate(self._scope)]
        return [*values, *[None] * self.extra_slots, DEFAULT_RUN_OPTIONS]

    def prepared_step(self, number: int, operation: Operation) -> StepFunction:
        """Return an operation's step."""
        label = f"operation {number} ({operation.type.name})"
        if operation.type in FIRST_OUTER_INPUT:
            return self._control_flow_step(label, operation)
        found = _find(self.subgraph, operation)
        if found is None:
            raise GeneralFailure(f"{label} is not supported with these operand types")
        bound = ResolvedOp(label, found, operation, tuple(self.subgraph.operands[i] for i in operation.outputs))
        self._required.update(bound.required())
        step: StepFunction
        if self._is_static(bound):
            arguments = [self._argument(index) for index in operation.inputs]
            fitted = bound.infer_shapes(arguments)
            self._read.update(bound.data_indexes())
            self._learn(operation.outputs, fitted.shapes)
            step = self.static_step(bound, arguments, fitted)
        else:
            step = _DynamicStep(bound, self.subgraph.operands, self._scope)
            self._read.update(operation.inputs)
        return step

    def _control_flow_step(self, label: str, operation: Operation) -> StepFunction:
        self._read.update(operation.inputs)
        self._required.update(operation.inputs[: FIRST_OUTER_INPUT[operation.type]])
        callees = [self._program_of(label, index) for index in callee_indexes(self.subgraph, operation)]
        return control_flow_step(label, operation, callees, [self.subgraph.operands[i] for i in operation.outputs])

    def _program_of(self, label: str, index: int) -> Program:
        if index not in self._programs:
            try:
                program = SubgraphPreparation(self._model, self._model.referenced[index], self._programs).program()
            except GeneralFailure as error:
                raise _named(label, error) from error
            self._programs[index] = program
        return self._programs[index]

    def _learn(self, indexes: Iterable[int], shapes: Iterable[Shape]) -> None:
        for index, shape in zip(indexes, shapes, strict=True):
            declared = _known_shape(self.subgraph.operands[index])
            self._shapes[index] = declared if DATA_DEPENDENT in shape else shape

    def _argument(self, index: int) -> Tensor | None:
        operand, shape = self.subgraph.operands[index], self._shapes[index]
        if operand.lifetime == LifeTime.NO_VALUE:
            return None
        assert shape is not None, "_is_static asked for it"
        return tensor_of(operand, shape, self._scope[index])

    def _is_static(self, bound: ResolvedOp) -> bool:
        """Return True if nothing that the binding needs comes with the request."""
        for parameter, index in bound.arguments():
            operand = self.subgraph.operands[index]
            if operand.lifetime == LifeTime.NO_VALUE:
                continue
            from_request = operand.lifetime == LifeTime.SUBGRAPH_INPUT and parameter.optional
            needs_value = parameter.role is not Role.DATA and self._scope[index] is None
            if from_request or needs_value or self._shapes[index] is None:
                return False
        return True


def constant(model: Model, operand: Operand) -> Array | None:
    """Return a constant in private memory: pools may belong to another process."""
    if operand.lifetime not in _CONSTANTS:
        return None
    require_max_rank(operand.dimensions, "a constant")
    place = operand.location
    copied = operand.lifetime == LifeTime.CONSTANT_COPY
    source = memoryview(model.operand_values) if copied else model.pools[place.pool_index].view
    raw = bytearray(source[place.offset : place.offset + place.length])
    return np.frombuffer(raw, _dtype(operand)).reshape(operand.dimensions)


@dataclass(frozen=True, slots=True)
class ResolvedOp:
    """An operation of the model, matched."""

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
        """Find the outputs' shapes; a violated constraint names the operation."""
        return self._naming(lambda: infer_shapes(self.match, arguments, self.outputs))

    def bind(self, fitted: ShapedOp) -> Run:
        """Bind to the arguments that were fitted; a violated constraint names the operation."""
        return self._naming(fitted.bind)

    def step(self, run: Run) -> StepFunction:
        """Return the step that calls `run`."""
        return _static_step(self.label, run, self.data_indexes(), self.operation.outputs)

    def _naming(self, act: Callable[[], T]) -> T:
        try:
            return act()
        except GeneralFailure as error:
            raise _named(self.label, error) from error


def _static_step(
    label: str, run: Callable[..., Any], inputs: tuple[int, ...], outputs: tuple[int, ...]
) -> StepFunction:
    """Return the step that calls `run`; what it refuses in the data names the operation, which costs no success."""
    if len(outputs) > 1:

        def step_of_many(scope: ExecutionFrame) -> None:
            try:
                results = run(*[scope[i] for i in inputs])
            except GeneralFailure as error:
                raise _named(label, error) from error
            for index, result in zip(outputs, results, strict=True):
                scope[index] = result

        return step_of_many
    output = outputs[0]
    if len(inputs) == 1:
        input = inputs[0]

        def step_of_one(scope: ExecutionFrame) -> None:
            try:
                scope[output] = run(scope[input])
            except GeneralFailure as error:
                raise _named(label, error) from error

        return step_of_one

    def step(scope: ExecutionFrame) -> None:
        try:
            scope[output] = run(*[scope[i] for i in inputs])
        except GeneralFailure as error:
            raise _named(label, error) from error

    return step


def _named(label: str, error: GeneralFailure) -> GeneralFailure:
    return GeneralFailure(f"{label}: {error}")


class _DynamicStep:
    """An operation that is bound when its shapes and controls are there; the last binding is kept."""

    def __init__(self, bound: ResolvedOp, operands: Sequence[Operand], constants: ExecutionFrame) -> None:
        self._bound = bound
        self._operands = operands
        weights = [index for parameter, index in bound.arguments() if parameter.role is Role.WEIGHT]
        self._may_keep = all(constants[index] is not None for index in weights)
        self._kept: tuple[Any, StepFunction] | None = None

    def __call__(self, scope: ExecutionFrame) -> None:
        arguments = [self._argument(scope, parameter, index) for parameter, index in self._bound.arguments()]
        key = [_identity(p, a) for p, a in zip(self._bound.match.parameters, arguments, strict=True)]
        kept = self._kept  # read once: another execution may replace it
        if kept is None or kept[0] != key:
            bound = self._bound
            kept = (key, bound.step(bound.bind(bound.infer_shapes(arguments))))
            self._kept = kept if self._may_keep else None
        kept[1](scope)

    def _argument(self, scope: ExecutionFrame, parameter: Parameter, index: int) -> Tensor | None:
        array = scope[index]
        if array is None:
            return None
        value = None if parameter.role is Role.DATA else array
        if parameter.role is Role.ATTRIBUTE:
            value = array.copy()  # it decides addresses and may lie in another process's memory
        return tensor_of(self._operands[index], array.shape, value)


def _identity(parameter: Parameter, argument: Tensor | None) -> Any:
    """Return what makes one binding differ from another: the shape and, for controls, the bytes."""
    if argument is None or parameter.role is not Role.ATTRIBUTE:
        return None if argument is None else argument.shape
    return argument.shape, argument.array.tobytes()


def _with_releases(subgraph: Subgraph, steps: Sequence[tuple[int, StepFunction]]) -> tuple[ExecutionStep, ...]:
    """Say for each step which temporaries no later one reads."""
    last_reader: dict[int, int] = {}
    for number, operation in enumerate(subgraph.operations):
        last_reader.update(dict.fromkeys((*operation.inputs, *operation.outputs), number))
    dropped: list[list[int]] = [[] for _ in subgraph.operations]
    for index, number in last_reader.items():
        if subgraph.operands[index].lifetime == LifeTime.TEMPORARY_VARIABLE:
            dropped[number].append(index)
    first, parts = 0, []
    for last, step in steps:
        parts.append(ExecutionStep(step, last, tuple(chain.from_iterable(dropped[first : last + 1]))))
        first = last + 1
    return tuple(parts)
