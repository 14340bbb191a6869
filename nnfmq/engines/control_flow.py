"""IF and WHILE in the interpreter: steps that call the prepared programs of subgraphs.

A subgraph is a program like the main one; it is called with arrays instead of a request. Its step passes the
execution's `RunOptions` on, from the last slot of the frame, so deadline and cancellation are checked before every
operation at every depth, and thereby between the iterations of a loop. Each WHILE has a timeout: it starts with its
first condition, is checked after each condition that was true, and restarts for a nested WHILE. Shapes may change with
each iteration.

    C1 the condition has one element          C2 an operand of the subgraph does not fit its argument
    R4 the declared dimensions of an output are those that the subgraph returned, if known
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from typing import Any, Protocol

from nnfmq.engines.execution import LEDGER_SLOT, ExecutionFrame, RunOptions, StepFunction, is_compatible_shape
from nnfmq.hal.errors import GeneralFailure, InvalidArgument, MissedDeadlineTransient
from nnfmq.hal.types import LifeTime, Model, Operand, Operation, OperationType, Subgraph, is_scalar
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


def callee_indexes(subgraph: Subgraph, operation: Operation) -> list[int]:
    """Return the indexes of the subgraphs that an operation calls, in the order of its arguments."""
    operands = (subgraph.operands[index] for index in operation.inputs)
    return [operand.location.offset for operand in operands if operand.lifetime == LifeTime.SUBGRAPH]


def reachable_subgraphs(model: Model, operation: Operation) -> set[int]:
    """Return the indexes of all subgraphs that an operation of the main subgraph calls, at any depth."""
    reached: set[int] = set()
    waiting = callee_indexes(model.main, operation)
    while waiting:
        index = waiting.pop()
        if index not in reached:
            reached.add(index)
            subgraph = model.referenced[index]
            waiting += [callee for inner in subgraph.operations for callee in callee_indexes(subgraph, inner)]
    return reached


NESTING_MAX = 64
"""How deep IF and WHILE may be nested. Each level takes some of Python's call stack, in preparing and in executing."""


def require_nesting(model: Model) -> None:
    """Require that IF and WHILE are not nested deeper than NESTING_MAX.

    Subgraphs do not call themselves (N-VAL-17). The search has an explicit stack, because the depth is not limited yet.

    Raises:
        InvalidArgument: If they are; the message names the limit.
    """
    depths: dict[int, int] = {}
    waiting = _callees(model, model.main)
    while waiting:
        callees = _callees(model, model.referenced[waiting[-1]])
        unknown = [index for index in callees if index not in depths]
        if unknown:
            waiting += unknown
        else:
            depths[waiting.pop()] = 1 + max((depths[index] for index in callees), default=0)
    depth = max(depths.values(), default=0)
    if depth > NESTING_MAX:
        raise InvalidArgument(f"IF and WHILE are nested {depth} deep; at most {NESTING_MAX} are possible")


def _callees(model: Model, subgraph: Subgraph) -> list[int]:
    return [index for operation in subgraph.operations for index in callee_indexes(subgraph, operation)]


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
        while _is_true(*condition.call(values, options)):
            if time.monotonic_ns() >= end_ns:
                raise MissedDeadlineTransient(f"a loop was still running after {options.loop_timeout_ns} ns")
            results = body.call(values, options)
            values[: len(results)] = results
        return values

    return run


def _is_true(condition: Array) -> bool:
    """Read a condition, once: another process may be able to write to it."""
    require(condition.size == 1, "C1", f"the condition has shape {condition.shape}")
    return bool(condition.item())
