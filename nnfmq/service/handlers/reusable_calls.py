"""Calls about reusable executions: creating, running, releasing (`createReusableExecution`, `IExecution`).

Their fenced runs are in `fenced_calls`.
"""

from __future__ import annotations

from contextlib import ExitStack

from nnfmq.hal.errors import ErrorStatus, InvalidArgument
from nnfmq.hal.timing import from_limit_field
from nnfmq.hal.types import Priority
from nnfmq.serialize.messages import (
    CreateExecution,
    Executed,
    ExecutionCreated,
    Message,
    ReleaseExecution,
    RunExecution,
)
from nnfmq.service.driver_execution import DriverExecution
from nnfmq.service.driver_prepared_model import execution_options, raise_if_deadline_passed, run_bound
from nnfmq.service.handle_table import NO_ID
from nnfmq.service.handlers.base import BlockingHandler, InlineHandler, error_as_executed, reply
from nnfmq.service.handlers.execution_calls import receive_request, result_message
from nnfmq.service.session_context import SessionContext


def cancel_all(context: SessionContext) -> None:
    """Release all reusable executions, because the session ends."""
    for execution in context.executions.pop_all():
        execution.release()


def _create(context: SessionContext, message: CreateExecution, fds: list[int], _received_ns: int) -> None:
    with ExitStack() as undo:
        prepared, request, config = receive_request(context, message, fds, undo)
        context.executions.require_capacity()
        execution = DriverExecution.create(prepared, request, config, undo)
    context.send(ExecutionCreated(message.call, ErrorStatus.NONE, "", context.executions.insert(execution)))


def _create_error(call: int, status: ErrorStatus, text: str) -> tuple[Message, ...]:
    return (ExecutionCreated(call, status, text, NO_ID),)


def _run(context: SessionContext, message: RunExecution, _fds: list[int], received_ns: int) -> None:
    execution = context.executions.lookup(message.execution_id)
    with execution.exclusive_run():
        with execution.counted_on_error():
            deadline_ns = from_limit_field(message.deadline_ns)
            options = execution_options(execution.config, deadline_ns)
            raise_if_deadline_passed(deadline_ns)
        result = run_bound(execution.bound, execution.config.measure, received_ns, options)
        executed = result_message(Executed, message.call, result)
    context.send(executed)  # after `exclusive_run`: the client may run it again as soon as it gets this


def _priority(context: SessionContext, message: RunExecution) -> int:
    execution = context.executions.get(message.execution_id)
    return Priority.MEDIUM if execution is None else execution.priority


def _release(context: SessionContext, message: ReleaseExecution, _fds: list[int]) -> None:
    try:
        execution = context.executions.pop(message.execution_id)
    except InvalidArgument as error:
        context.send(reply(message.call, error))
    else:
        execution.release()
        context.send(reply(message.call))


HANDLERS: dict[type[Message], InlineHandler | BlockingHandler] = {
    CreateExecution: BlockingHandler(_create, _create_error, is_launch=True),
    RunExecution: BlockingHandler(_run, error_as_executed, _priority),
    ReleaseExecution: _release,
}
