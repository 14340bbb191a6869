"""Synchronous executions of a plan: each step over the control channel of its driver, on the caller's thread."""

from __future__ import annotations

from collections.abc import Sequence

from nnfmq.hal.types import ExecutionConfig, HalExecutionMode, Request
from nnfmq.runtime.array_request import checked_arguments
from nnfmq.runtime.execution_result import ExecutionResult
from nnfmq.runtime.managed_buffer import Buffer
from nnfmq.runtime.plan_execution.array_arguments import ArrayArguments
from nnfmq.runtime.plan_execution.compound_run import CompoundRun, PlanCall, run_synchronously
from nnfmq.runtime.plan_execution.plan_handle import PlanHandle
from nnfmq.runtime.sync_execution import check_out, copy_out
from nnfmq.runtime.tensor_layout import Array, InputValue

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
    from nnfmq.validation.request import validate_request  # few applications make requests

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
    checked = checked_arguments(handle.inputs, inputs)
    if out is not None:
        check_out(handle.outputs, out)
    targets: Sequence[object] = out if out is not None else [None] * len(handle.outputs)
    writer = object()
    _check_roles(handle, checked, targets, writer)
    with handle.in_use():
        arguments = handle.take_arguments()
        try:
            arguments.write(checked, targets)
            run_synchronously(_new_run(handle, arguments, config, deadline_ns), PlanCall.execute)
            outputs = arguments.results(targets)
        except BaseException:
            arguments.close()
            raise
        handle.return_arguments(arguments)
    for target in targets:
        if isinstance(target, Buffer):
            target.mark_written(writer)
    return outputs if out is None else copy_out(out, outputs)


def _new_run(
    handle: PlanHandle, arguments: ArrayArguments, config: ExecutionConfig, deadline_ns: int | None
) -> CompoundRun:
    return CompoundRun(handle, arguments.memory, config, HalExecutionMode.SYNCHRONOUS, deadline_ns)


def _check_roles(handle: PlanHandle, inputs: Sequence[object], targets: Sequence[object], writer: object) -> None:
    for values, is_output in ((inputs, False), (targets, True)):
        for index, value in enumerate(values):
            if isinstance(value, Buffer):
                value.check_role((handle, index, is_output), writer)
