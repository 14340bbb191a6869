"""Calls that execute a prepared model once: the ordinary one, and the one with a callback (IPreparedModel)."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from nnfmq.engines.execution import RunOptions
from nnfmq.hal.errors import ErrorStatus
from nnfmq.hal.timing import from_limit_field
from nnfmq.hal.types import ExecutionConfig, Priority, Request
from nnfmq.serialize.messages import (
    CreateExecution,
    Execute,
    ExecuteAsynchronously,
    Executed,
    ExecuteFenced,
    ExecutionFinished,
    Message,
    Reply,
    config_from_data,
    request_from_data,
    shapes_to_data,
)
from nnfmq.service.driver_prepared_model import (
    BoundExecution,
    DriverPreparedModel,
    ExecutionReply,
    StagedExecution,
    execution_limits,
    raise_if_deadline_passed,
)
from nnfmq.service.handlers.base import BlockingHandler, InlineHandler, error_as_executed, reply

if TYPE_CHECKING:
    from nnfmq.service.session import Session

ResultT = TypeVar("ResultT", Executed, ExecutionFinished)
WithRequest = Execute | ExecuteAsynchronously | ExecuteFenced | CreateExecution


def received(
    session: Session, message: WithRequest, fds: list[int], held: ExitStack
) -> tuple[DriverPreparedModel, Request, ExecutionConfig]:
    """Return what a call is about; the memories that came with it stay open until `held` is closed."""
    pools = session.quota.adopt_all(fds, message.memories)
    for pool in pools:
        held.callback(pool.close)
    prepared = session.models.find(message.model_id)
    return prepared, request_from_data(message.request, pools), config_from_data(message.config)


def result_message(kind: type[ResultT], call: int, result: ExecutionReply) -> ResultT:
    """Return the answer that says how an execution went."""
    timing = result.timing
    shapes = shapes_to_data(result.output_shapes)
    return kind(call, result.status, result.message, shapes, timing.time_on_device_ns, timing.time_in_driver_ns)


def model_priority(session: Session, message: WithRequest) -> int:
    """Return the priority of the model that a call is about."""
    prepared = session.models.get(message.model_id)
    return Priority.MEDIUM if prepared is None else prepared.priority


def _execute(session: Session, message: Execute, fds: list[int], received_ns: int) -> None:
    with ExitStack() as held:
        prepared, request, config = received(session, message, fds, held)
        with prepared.uninitialize_outputs_on_error(request):
            deadline_ns = from_limit_field(message.deadline_ns)
        result = prepared.execute_synchronously(request, config, deadline_ns, received_ns)
    session.send(result_message(Executed, message.call, result))


def _execute_asynchronously(session: Session, message: ExecuteAsynchronously, fds: list[int], received_ns: int) -> None:
    """Answer as the HAL orders it: bad arguments → callback, then the same status; else NONE, then the callback."""
    with ExitStack() as undo:
        prepared, request, config = received(session, message, fds, undo)
        with prepared.uninitialize_outputs_on_error(request):
            deadline_ns = from_limit_field(message.deadline_ns)
            limits = execution_limits(config, deadline_ns)
            bound = prepared.bind(request)
            raise_if_deadline_passed(deadline_ns)
        held = undo.pop_all()
    session.send(reply(message.call))
    session.submit(_finish, message.call, bound, config, limits, received_ns, held, priority=prepared.priority)


def _finish(
    session: Session,
    call: int,
    bound: BoundExecution | StagedExecution,
    config: ExecutionConfig,
    limits: RunOptions,
    received_ns: int,
    held: ExitStack,
) -> None:
    with held, np.errstate(all="ignore"):
        result = bound.run(config.measure, received_ns, limits)
    session.send(result_message(ExecutionFinished, call, result))


def _refuse_asynchronous(call: int, status: ErrorStatus, text: str) -> tuple[Message, ...]:
    return ExecutionFinished(call, status, text), Reply(call, status, text)


HANDLERS: dict[type[Message], InlineHandler | BlockingHandler] = {
    Execute: BlockingHandler(_execute, error_as_executed, model_priority),
    ExecuteAsynchronously: BlockingHandler(_execute_asynchronously, _refuse_asynchronous, is_launch=True),
}
