"""IF and WHILE in the interpreter: steps that call the prepared programs of subgraphs.

A subgraph is a program like the main one; it is called with arrays instead of a request. Its step passes the
execution's `RunOptions` on, from the last slot of the frame, so deadline and cancellation are checked before every
operation at every depth, and thereby between the iterations of a loop. Each WHILE has a timeout: it starts with its
first condition, is checked after each condition that was true, and restarts for a nested WHILE. Shapes may change with
each iteration.

    C1 the condition has one element          C2 an operand of the subgraph does not fit its argument
    C3 an output of a WHILE without iterations is an argument that was omitted
    R4 the declared dimensions of an output are those that the subgraph returned, if known
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from typing import Any, Protocol

from nnfmq.engines.execution import LEDGER_SLOT, ExecutionFrame, RunOptions, StepFunction, is_compatible_shape
from nnfmq.hal.errors import GeneralFailure, InvalidArgument, MissedDeadlineTransient
from nnfmq.hal.types import Operand, Operation, OperationType, is_scalar
from nnfmq.operations.if_while import FIRST_OUTER_INPUT
from nnfmq.operations.shapes import require
from nnfmq.operations.signature import Array


class Callee(Protocol):
    """A prepared subgraph."""

    def call(self, inputs: Sequence[Array | None], options: RunOptions) -> list[Array]:
        """Compute the outputs.

        Raises:
            InvalidArgument: If an input does not fit the subgraph.
        """
        ...

    def new_frame(self) -> ExecutionFrame:
        """Return a frame for `call_in`."""
        ...

    def call_in(self, frame: ExecutionFrame, inputs: Sequence[Array | None], options: RunOptions) -> list[Array]:
        """Compute the outputs as `call` does; they are valid until the frame is used again."""
        ...

    def detached(self, outputs: list[Array]) -> list[Array]:
        """Return outputs of `call_in` so that they stay valid without the frame."""
        ...


class RepeatedCall:
    """The calls of one subgraph by one loop, one after the other, in two frames in turn.

    So nothing that a call computes is copied, and each frame's compiled partitions find the inputs in the same places
    as before. The outputs of a call are valid until the call after the next one.
    """

    def __init__(self, callee: Callee) -> None:
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


def control_flow_step(
    label: str,
    operation: Operation,
    callees: Sequence[Callee],
    outputs: Sequence[Operand],
    counted: Container[int] = (),
) -> StepFunction:
    """Return the step of an IF (callees: then, else) or WHILE (callees: condition, body).

    The program has counted the memory of the outputs in `counted`; the step counts the others in the frame's ledger.
    """
    outer_inputs = operation.inputs[FIRST_OUTER_INPUT[operation.type] :]
    run = _if(operation.inputs[0], *callees) if operation.type == OperationType.IF else _while(*callees)
    count = len(operation.outputs)

    def step(frame: ExecutionFrame) -> None:
        try:
            results = run(frame, [frame[index] for index in outer_inputs])
            for index, operand, result in zip(operation.outputs, outputs, results[:count], strict=True):
                require(result is not None, "C3", "an output would be an argument that was omitted")
                fits = is_scalar(operand.type) or is_compatible_shape(operand.dimensions, result.shape)
                require(fits, "R4", f"an output has shape {result.shape}, declared is {operand.dimensions}")
                if index not in counted:
                    frame[LEDGER_SLOT].record(index, result.nbytes)
                frame[index] = result
        except GeneralFailure as error:
            raise GeneralFailure(f"{label}: {error}") from error
        except InvalidArgument as error:
            raise GeneralFailure(f"{label}: {error} (C2)") from error

    return step


def _if(condition: int, then: Callee, otherwise: Callee) -> Callable[[ExecutionFrame, list[Any]], list[Any]]:
    def run(frame: ExecutionFrame, values: list[Any]) -> list[Any]:
        return (then if _is_true(frame[condition]) else otherwise).call(values, frame[-1])

    return run


def _while(condition: Callee, body: Callee) -> Callable[[ExecutionFrame, list[Any]], list[Any]]:
    def run(frame: ExecutionFrame, values: list[Any]) -> list[Any]:
        options: RunOptions = frame[-1]
        end_ns = time.monotonic_ns() + options.loop_timeout_ns
        continues, iterate, results = RepeatedCall(condition), RepeatedCall(body), values[:0]
        while _is_true(*continues(values, options)):
            if time.monotonic_ns() >= end_ns:
                raise MissedDeadlineTransient(f"a loop was still running after {options.loop_timeout_ns} ns")
            results = iterate(values, options)
            values[: len(results)] = results
        values[: len(results)] = iterate.detached(results)
        return values

    return run


def _is_true(condition: Array) -> bool:
    """Read a condition, once: another process may be able to write to it."""
    require(condition.size == 1, "C1", f"the condition has shape {condition.shape}")
    return bool(condition.item())
