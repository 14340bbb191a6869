"""Synchronous executions of a plan: each step over the control channel of its driver, on the caller's thread."""

from __future__ import annotations

from collections.abc import Sequence

from nnfmq.client.model.array_request import CallArguments
from nnfmq.client.model.arrays import Array, ExecutionResult, InputValue
from nnfmq.client.model.buffers import Buffer
from nnfmq.client.partitioned.executions import CompoundRun, PlanCall, run_synchronously
from nnfmq.client.partitioned.handle import PlanHandle
from nnfmq.client.partitioned.memory import ArrayArguments
from nnfmq.hal.types import ExecutionConfig, HalExecutionMode, Request
from nnfmq.validation.requests import validate_request

__all__ = ["execute_arrays", "execute_request"]


def execute_request(
    handle: PlanHandle, request: Request, config: ExecutionConfig, deadline_ns: int | None
) -> ExecutionResult:
    """Execute a request of the application; blocks. Borrows its pools.

    Raises:
        InvalidArgument: If the request is invalid, or the model is closed.
        MissedDeadline: If the deadline passes.
        NnfmqError: The error of the execution.
    """
    with handle.in_use():
        validate_request(handle.plan.model, request)
        arguments = handle.take_arguments()
        try:
            arguments.memory.bind(request)
            result = run_synchronously(_new_run(handle, arguments, config, deadline_ns), PlanCall.execute)
        except BaseException:
            arguments.close()
            raise
        handle.return_arguments(arguments)
        return result


def execute_arrays(
    handle: PlanHandle,
    inputs: Sequence[InputValue | Buffer],
    out: Sequence[Array | Buffer] | None,
    config: ExecutionConfig,
    deadline_ns: int | None,
) -> tuple[Array | Buffer, ...]:
    """Execute the model with arrays and shared buffers, and return the outputs; blocks.

    The outputs are new arrays if `out` is None, else the filled arrays and the buffers of `out`.

    Raises:
        InvalidArgument: If an argument's shape, dtype or number is wrong, or the model is closed.
        MissedDeadline: If the deadline passes.
        NnfmqError: The error of the execution.
    """
    call = CallArguments(handle, inputs, out)
    with handle.in_use():
        arguments = handle.take_arguments()
        try:
            arguments.write(call.inputs, call.targets)
            run_synchronously(_new_run(handle, arguments, config, deadline_ns), PlanCall.execute)
            outputs = arguments.results(call.targets)
        except BaseException:
            arguments.close()
            raise
        handle.return_arguments(arguments)
    return call.finish(outputs)


def _new_run(
    handle: PlanHandle, arguments: ArrayArguments, config: ExecutionConfig, deadline_ns: int | None
) -> CompoundRun:
    return CompoundRun(handle, arguments.memory, config, HalExecutionMode.SYNCHRONOUS, deadline_ns)
