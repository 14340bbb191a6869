"""IF and WHILE in the interpreter: steps that call the prepared programs of subgraphs, and what ends them early.

A subgraph is a program like the main one, called with arrays instead of a request. Its step finds the execution's
Limits in the last slot of the scope, and hands them on: deadline and cancellation are looked at before every operation
at every depth, so between the rounds of a loop as well. Each WHILE has a timer of its own, started with its first
condition and looked at after a condition that was true; nested ones start anew. Shapes may change with each round.

    C1 the condition has one element          C2 an operand of the subgraph does not fit what is handed to it
    R4 the declared dimensions of an output are those that the subgraph gave, where known
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from nnfmq.engines.execution import ExecutionFrame, RunOptions, StepFunction
from nnfmq.hal.errors import GeneralFailure, InvalidArgument, MissedDeadlineTransient
from nnfmq.hal.types import (
    LifeTime,
    Model,
    Operand,
    Operation,
    OperationType,
    Subgraph,
    is_scalar,
)
from nnfmq.operations.if_while import FIRST_OUTER_INPUT
from nnfmq.operations.shapes import require
from nnfmq.operations.signature import Array, Shape


class Callee(Protocol):
    """A prepared subgraph."""

    def call(self, inputs: Sequence[Array | None], limits: RunOptions) -> list[Array]:
        """Compute the outputs; InvalidArgument for inputs that do not fit."""
        ...


def is_compatible_shape(dimensions: Shape, shape: Shape) -> bool:
    """Return True if `shape` fills in what `dimensions` leaves open."""
    if not dimensions:
        return True
    return len(dimensions) == len(shape) and all(d in (0, e) for d, e in zip(dimensions, shape, strict=True))


def callee_indexes(subgraph: Subgraph, operation: Operation) -> list[int]:
    """Return the indexes of the subgraphs that an operation names."""
    operands = (subgraph.operands[index] for index in operation.inputs)
    return [operand.location.offset for operand in operands if operand.lifetime == LifeTime.SUBGRAPH]


def reachable_subgraphs(model: Model, operation: Operation) -> set[int]:
    """Return all subgraphs that an operation of the main one calls, at any depth."""
    reached: set[int] = set()
    waiting = callee_indexes(model.main, operation)
    while waiting:
        index = waiting.pop()
        if index not in reached:
            reached.add(index)
            subgraph = model.referenced[index]
            waiting += [called for inner in subgraph.operations for called in callee_indexes(subgraph, inner)]
    return reached


def control_flow_step(
    label: str, operation: Operation, callees: Sequence[Callee], outputs: Sequence[Operand]
) -> StepFunction:
    """Return the step of an IF (callees: then, else) or WHILE (condition, body)."""
    outer = operation.inputs[FIRST_OUTER_INPUT[operation.type] :]
    run = _branching(operation.inputs[0], *callees) if operation.type == OperationType.IF else _looping(*callees)
    count = len(operation.outputs)

    def step(scope: ExecutionFrame) -> None:
        try:
            results = run(scope, [scope[index] for index in outer])
            for index, operand, result in zip(operation.outputs, outputs, results[:count], strict=True):
                scope[index] = _declared(operand, result)
        except GeneralFailure as error:
            raise GeneralFailure(f"{label}: {error}") from error
        except InvalidArgument as error:
            raise GeneralFailure(f"{label}: C2: {error}") from error

    return step


def _declared(operand: Operand, result: Array) -> Array:
    fits = is_scalar(operand.type) or is_compatible_shape(operand.dimensions, result.shape)
    require(fits, "R4", f"an output has shape {result.shape}, declared is {operand.dimensions}")
    return result


_Run: TypeAlias = Callable[[ExecutionFrame, list[Any]], list[Any]]


def _branching(condition: int, then: Callee, otherwise: Callee) -> _Run:
    def run(scope: ExecutionFrame, values: list[Any]) -> list[Any]:
        return (then if _truth(scope[condition]) else otherwise).call(values, scope[-1])

    return run


def _looping(condition: Callee, body: Callee) -> _Run:
    def run(scope: ExecutionFrame, values: list[Any]) -> list[Any]:
        limits: RunOptions = scope[-1]
        end_ns = time.monotonic_ns() + limits.loop_timeout_ns
        while _truth(*condition.call(values, limits)):
            if time.monotonic_ns() >= end_ns:
                raise MissedDeadlineTransient(f"a loop was still running after {limits.loop_timeout_ns} ns")
            results = body.call(values, limits)
            values[: len(results)] = results
        return values

    return run


def _truth(condition: Array) -> bool:
    """Read a condition once: it may lie in another process's memory."""
    require(condition.size == 1, "C1", f"the condition has shape {condition.shape}")
    return bool(condition.item())
