"""One operation of a model in the interpreter: its declaration, its binding to shapes, and its step in a program."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeVar

from msgspec import Struct

from nnfmq.engines.execution import dtype_of
from nnfmq.engines.program import LEDGER_SLOT, ExecutionFrame, StepFunction
from nnfmq.hal.errors import GeneralFailure
from nnfmq.hal.types import Operand, Operation, is_scalar
from nnfmq.operations.declaration import Match, Parameter, Role, Run, Tensor
from nnfmq.operations.preparation import ShapedOp, infer_shapes, tensor_of
from nnfmq.operations.shapes import DATA_DEPENDENT

__all__ = ["DynamicStep", "ResolvedOp", "with_label"]

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
