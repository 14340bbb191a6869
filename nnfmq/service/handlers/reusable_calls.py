"""Calls about reusable executions: creating, running, releasing (createReusableExecution, IExecution).

Their fenced runs are in `fenced`, with the other fenced executions.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np

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
from nnfmq.service.driver_prepared_model import execution_limits, raise_if_deadline_passed
from nnfmq.service.handle_table import NO_ID
from nnfmq.service.handlers.base import BlockingHandler, InlineHandler, reply
from nnfmq.service.handlers.execution_calls import received, result_message

if TYPE_CHECKING:
    from nnfmq.service.session import Session


def cancel_all(session: Session) -> None:
    """Give back what the executions of a session hold whose client is gone."""
    for execution in session.executions.take_all():
        execution.release()


def _create(session: Session, message: CreateExecution, fds: list[int], _seen_ns: int) -> None:
    with ExitStack() as undo:
        prepared, request, config = received(session, message, fds, undo)
        session.executions.require_capacity()
        execution = DriverExecution.create(prepared, request, config, undo)
    session.send(ExecutionCreated(message.call, ErrorStatus.NONE, "", session.executions.add(execution)))


def _refuse_create(call: int, status: ErrorStatus, text: str) -> tuple[Message, ...]:
    return (ExecutionCreated(call, status, text, NO_ID),)


def _run(session: Session, message: RunExecution, _fds: list[int], received_ns: int) -> None:
    execution = session.executions.find(message.execution_id)
    with execution.exclusive_run(), np.errstate(all="ignore"):
        with execution.uninitialize_outputs_on_error():
            deadline_ns = from_limit_field(message.deadline_ns)
            limits = execution_limits(execution.config, deadline_ns)
            raise_if_deadline_passed(deadline_ns)
        result = execution.bound.run(execution.config.measure, received_ns, limits)
        answer = result_message(Executed, message.call, result)
    session.send(answer)  # now that the next run may begin


def _refuse_run(call: int, status: ErrorStatus, text: str) -> tuple[Message, ...]:
    return (Executed(call, status, text),)


def _priority(session: Session, message: RunExecution) -> int:
    execution = session.executions.get(message.execution_id)
    return Priority.MEDIUM if execution is None else execution.priority


def _release(session: Session, message: ReleaseExecution, _fds: list[int]) -> None:
    try:
        execution = session.executions.take(message.execution_id)
    except InvalidArgument as error:
        session.send(reply(message.call, error))
    else:
        execution.release()
        session.send(reply(message.call))


HANDLERS: dict[type[Message], InlineHandler | BlockingHandler] = {
    CreateExecution: BlockingHandler(_create, _refuse_create, is_launch=True),
    RunExecution: BlockingHandler(_run, _refuse_run, _priority),
    ReleaseExecution: _release,
}
