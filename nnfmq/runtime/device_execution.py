"""One synchronous execution on the device that prepared the model, over the control channel, without a fallback."""

from __future__ import annotations

from collections.abc import Sequence

from nnfmq.hal.errors import NnfmqError
from nnfmq.hal.types import ExecutionConfig, HalExecutionMode, Request
from nnfmq.runtime.connection import Connection
from nnfmq.runtime.execution_result import ExecutionResult
from nnfmq.runtime.model_handle import ModelHandle
from nnfmq.runtime.request_run import RequestRun
from nnfmq.runtime.wire_values import memory_fds, to_wire_config, to_wire_deadline
from nnfmq.serialize import messages

__all__ = ["exchange_execution", "execute_on_device"]


def execute_on_device(
    model: ModelHandle, request: Request, config: ExecutionConfig, deadline_ns: int | None
) -> ExecutionResult:
    """Execute a request and return its validated result; blocks. Borrows the request's pools.

    Raises:
        ProtocolError: If the driver's reply is invalid.
        MissedDeadline: If the deadline passes.
        DeadObject: If the driver exits.
        NnfmqError: The error of the reply's status.
    """
    location = model.location
    connection, model_id = location.connection, location.require_id()
    message = messages.Execute(
        connection.next_call_id(),
        model_id,
        messages.request_to_data(request),
        to_wire_config(model, config),
        to_wire_deadline(connection, deadline_ns),
    )
    run = RequestRun(model, request, config)
    fds, mode = memory_fds(request.pools), HalExecutionMode.SYNCHRONOUS
    return exchange_execution(connection, message, run, fds, deadline_ns, mode)


def exchange_execution(
    connection: Connection,
    message: messages.Call,
    run: RequestRun,
    fds: Sequence[int],
    deadline_ns: int | None,
    mode: HalExecutionMode,
) -> ExecutionResult:
    """Send a call whose reply is Executed, and return the validated result; blocks. Raises as `execute_on_device`."""
    observation = run.begin(mode, deadline_ns)
    try:
        result = run.finish(connection.exchange(message, messages.Executed, fds, deadline_ns))
    except NnfmqError as error:
        if observation is not None:
            observation.fail(error)
        raise
    if observation is not None:
        observation.finish(result.shapes, result.timing)
    return result
