"""The steps of the interpreter, one for each operation: bound when prepared or executed, and those of IF and WHILE.

A `ResolvedOp` is an operation with its declaration. Its step calls what the declaration's plan returned for shapes,
weights and attributes; if these come with the request, a `DynamicStep` binds the operation during the execution.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from typing import Any, TypeVar

from msgspec import Struct

from nnfmq.engines.execution import RunOptions, dtype_of, is_compatible_shape
from nnfmq.engines.program import LEDGER_SLOT, ExecutionFrame, Program, StepFunction
from nnfmq.hal.errors import GeneralFailure, InvalidArgument, MissedDeadlineTransient
from nnfmq.hal.types import Operand, Operation, OperationType, is_scalar
from nnfmq.operations.control_flow import FIRST_OUTER_INPUT
from nnfmq.operations.declaration import Array, Match, Parameter, Role, Run, Tensor
from nnfmq.operations.preparation import ShapedOp, infer_shapes, tensor_of
from nnfmq.operations.shapes import DATA_DEPENDENT, require

__all__ = ["DynamicStep", "ResolvedOp", "control_flow_step", "with_label"]

T = TypeVar("T")


class ResolvedOp(Struct, frozen=True):
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
            raise with_label(self.label, error) from error


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
                raise with_label(label, error) from error
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
                raise with_label(label, error) from error

        return step_of_one

    def step(frame: ExecutionFrame) -> None:
        try:
            frame[output] = run(*[frame[i] for i in inputs])
        except GeneralFailure as error:
            raise with_label(label, error) from error

    return step


def with_label(label: str, error: GeneralFailure) -> GeneralFailure:
    """Return the error with the name of an operation before its text."""
    return GeneralFailure(f"{label}: {error}")


class DynamicStep:
    """An operation that is bound when its shapes and attributes are known. The last binding is reused if they recur.

    An operation that can be computed without a binding (`Declaration.unbound`) is bound once for the same shapes, to
    check them.
    """

    def __init__(
        self, op: ResolvedOp, operands: Sequence[Operand], constants: ExecutionFrame, counted: Collection[int]
    ) -> None:
        self._op = op
        self._operands = operands
        # The outputs whose size comes with the request; the program has counted the others.
        self._uncounted = [(n, i) for n, i in enumerate(op.operation.outputs) if i not in counted]
        # The cache key does not contain weights, so a binding is reusable only if they are constants.
        weights = [index for parameter, index in op.arguments() if parameter.role is Role.WEIGHT]
        self._is_reusable = all(constants[index] is not None for index in weights)
        self._unbound = self._unbound_step(constants)
        self._last: tuple[Any, StepFunction, tuple[tuple[int, int], ...]] | None = None

    def _unbound_step(self, constants: ExecutionFrame) -> StepFunction | None:
        """Return the step without a binding; None if a scalar, which may be an axis, comes with the request."""
        operation, run = self._op.operation, self._op.match.declaration.unbound
        scalars = [index for index in operation.inputs if is_scalar(self._operands[index].type)]
        if run is None or any(constants[index] is None for index in scalars):
            return None
        return _static_step(self._op.label, run, operation.inputs, operation.outputs)

    def __call__(self, frame: ExecutionFrame) -> None:
        """Bind the operation if that is necessary, count its outputs' memory, and compute them."""
        last = self._last  # read once: a concurrent execution may replace it
        if self._unbound is None:
            arguments = self._arguments(frame)
            key = [_binding_key(p, a) for p, a in zip(self._op.match.parameters, arguments, strict=True)]
        else:
            key = [frame[index].shape for index in self._op.operation.inputs]
        if last is None or last[0] != key:
            op = self._op
            shaped = op.infer_shapes(self._arguments(frame) if self._unbound else arguments)
            last = (key, self._unbound or op.step(op.bind(shaped)), self._sizes(shaped))
            self._last = last if self._is_reusable else None
        for index, size in last[2]:
            frame[LEDGER_SLOT].record(index, size)
        last[1](frame)

    def _sizes(self, shaped: ShapedOp) -> tuple[tuple[int, int], ...]:
        """Return the operands to count, with their sizes in bytes. One that depends on the data is not counted."""
        found = []
        for number, index in self._uncounted:
            shape = shaped.shapes[number]
            if DATA_DEPENDENT not in shape:
                found.append((index, math.prod(shape) * dtype_of(self._operands[index]).itemsize))
        return tuple(found)

    def _arguments(self, frame: ExecutionFrame) -> list[Tensor | None]:
        return [self._argument(frame, parameter, index) for parameter, index in self._op.arguments()]

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


# ----------------------------------------------------------------------------------------------------------------------
# IF and WHILE: steps that call the prepared programs of subgraphs.
#
# A subgraph is a program like the main one; it is called with arrays instead of a request. Its step passes the
# execution's `RunOptions` on, from the last slot of the frame, so deadline and cancellation are checked before every
# operation at every depth, and thereby between the iterations of a loop. Each WHILE has a timeout: it starts with its
# first condition, is checked after each condition that was true, and restarts for a nested WHILE. Shapes may change
# with each iteration.
#
#     C1 the condition has one element          C2 an operand of the subgraph does not fit its argument
#     C3 an output of a WHILE without iterations is an argument that was omitted
#     R4 the declared dimensions of an output are those that the subgraph returned, if known


def control_flow_step(
    label: str,
    operation: Operation,
    callees: Sequence[Program],
    outputs: Sequence[Operand],
    counted: Container[int] = (),
) -> StepFunction:
    """Return the step of an IF (callees: then, else) or WHILE (callees: condition, body).

    The program has counted the memory of the outputs in `counted`; the step counts the others in the frame's ledger.
    """
    outer_inputs = operation.inputs[FIRST_OUTER_INPUT[operation.type] :]
    run = _if(operation.inputs[:3], *callees) if operation.type == OperationType.IF else _while(*callees)
    count = len(operation.outputs)

    def step(frame: ExecutionFrame) -> None:
        try:
            results = run(frame, [frame[index] for index in outer_inputs])
            for index, operand, result in zip(operation.outputs, outputs, results[:count], strict=True):
                require(result is not None, "C3", "an output would be an argument that was omitted")
                if result.shape != operand.dimensions:
                    fits = is_scalar(operand.type) or is_compatible_shape(operand.dimensions, result.shape)
                    require(fits, "R4", f"an output has shape {result.shape}, declared is {operand.dimensions}")
                if index not in counted:
                    frame[LEDGER_SLOT].record(index, result.nbytes)
                frame[index] = result
        except GeneralFailure as error:
            raise with_label(label, error) from error
        except InvalidArgument as error:
            raise GeneralFailure(f"{label}: {error} (C2)") from error

    return step


def _if(operands: Sequence[int], then: Program, otherwise: Program) -> Callable[[ExecutionFrame, list[Any]], list[Any]]:
    """Return a function that calls a subgraph; `operands` are the condition and the references to both.

    A reference has no value: its place in the frame keeps the frame of the subgraph, whose compiled partitions then
    find inputs where they were in the last run.
    """
    condition, *references = operands

    def run(frame: ExecutionFrame, values: list[Any]) -> list[Any]:
        is_true = _is_true(frame[condition])
        callee, place = (then, references[0]) if is_true else (otherwise, references[1])
        own = frame[place]
        if own is None:
            own = frame[place] = callee.new_frame()
        return callee.detached(callee.call_in(own, values, frame[-1]))

    return run


def _while(condition: Program, body: Program) -> Callable[[ExecutionFrame, list[Any]], list[Any]]:
    def run(frame: ExecutionFrame, values: list[Any]) -> list[Any]:
        options: RunOptions = frame[-1]
        end_ns = time.monotonic_ns() + options.loop_timeout_ns
        continues, iterate, results = _RepeatedCall(condition), _RepeatedCall(body), values[:0]
        while _is_true(*continues(values, options)):
            if time.monotonic_ns() >= end_ns:
                raise MissedDeadlineTransient(f"a loop was still running after {options.loop_timeout_ns} ns")
            results = iterate(values, options)
            values[: len(results)] = results
        values[: len(results)] = iterate.detached(results)
        return values

    return run


class _RepeatedCall:
    """The calls of one subgraph by one loop, one after the other, in two frames in turn.

    So nothing that a call computes is copied, and each frame's compiled partitions find the inputs in the same places
    as before. The outputs of a call are valid until the call after the next one.
    """

    def __init__(self, callee: Program) -> None:
        self._callee = callee
        self._frames = callee.new_frame(), callee.new_frame()
        self._owners: set[int] = set()  # ids of the arrays whose memory the last call's outputs are in

    def __call__(self, inputs: Sequence[Array | None], options: RunOptions) -> list[Array]:
        """Compute the outputs.

        One that is an input may be in the memory of the frame that is used next; such a one is copied.

        Raises:
            InvalidArgument: If an input does not fit the subgraph.
        """
        self._frames = self._frames[::-1]
        outputs = self._callee.call_in(self._frames[0], inputs, options)
        before, self._owners = self._owners, {id(array.base) for array in outputs if array.base is not None}
        if not before.isdisjoint(self._owners):
            outputs = [array.copy() if id(array.base) in before else array for array in outputs]
        return outputs

    def detached(self, outputs: list[Array]) -> list[Array]:
        """Return the outputs of the last call so that they stay valid without this object."""
        return self._callee.detached(outputs)


def _is_true(condition: Array) -> bool:
    """Read a condition, once: another process may be able to write to it."""
    require(condition.size == 1, "C1", f"the condition has shape {condition.shape}")
    return bool(condition.item())
