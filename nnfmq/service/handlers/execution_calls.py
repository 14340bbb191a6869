"""Calls that execute a prepared model once, synchronously or asynchronously (`IPreparedModel`)."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TypeVar

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
    execution_options,
    raise_if_deadline_passed,
    run_bound,
)
from nnfmq.service.handlers.base import BlockingHandler, InlineHandler, error_as_executed, reply
from nnfmq.service.session_context import SessionContext

ResultT = TypeVar("ResultT", Executed, ExecutionFinished)
CallWithRequest = Execute | ExecuteAsynchronously | ExecuteFenced | CreateExecution


def receive_request(
    context: SessionContext, message: CallWithRequest, fds: list[int], resources: ExitStack
) -> tuple[DriverPreparedModel, Request, ExecutionConfig]:
    """Return the model, the request and the configuration of a call.

    Takes ownership of `fds`; the request's memory stays open until `resources` is closed.

    Raises:
        InvalidArgument: If a memory is invalid, or the model's id is unknown.
    """
    pools = context.quota.adopt_all(fds, message.memories)
    for pool in pools:
        resources.callback(pool.close)
    prepared = context.models.lookup(message.model_id)
    return prepared, request_from_data(message.request, pools), config_from_data(message.config)


def result_message(kind: type[ResultT], call: int, result: ExecutionReply) -> ResultT:
    """Return the message that carries the result of an execution."""
    timing = result.timing
    shapes = shapes_to_data(result.output_shapes)
    return kind(call, result.status, result.message, shapes, timing.time_on_device_ns, timing.time_in_driver_ns)


def _execute(context: SessionContext, message: Execute, fds: list[int], received_ns: int) -> None:
    with ExitStack() as resources:
        prepared, request, config = receive_request(context, message, fds, resources)
        with prepared.counted_on_error(request):
            deadline_ns = from_limit_field(message.deadline_ns)
        result = prepared.execute_synchronously(request, config, deadline_ns, received_ns)
    context.send(result_message(Executed, message.call, result))


def _model_priority(context: SessionContext, message: CallWithRequest) -> int:
    prepared = context.models.get(message.model_id)
    return Priority.MEDIUM if prepared is None else prepared.priority


def _execute_asynchronously(
    context: SessionContext, message: ExecuteAsynchronously, fds: list[int], received_ns: int
) -> bool:
    """Launch an execution, with messages in the HAL's order.

    If the arguments are invalid, the callback comes first and then a reply with the same status (`_launch_error`);
    otherwise the reply NONE comes first and then the callback.
    """
    with ExitStack() as undo:
        prepared, request, config = receive_request(context, message, fds, undo)
        with prepared.counted_on_error(request):
            deadline_ns = from_limit_field(message.deadline_ns)
            options = execution_options(config, deadline_ns)
            bound = prepared.bind(request)
            raise_if_deadline_passed(deadline_ns)
        resources = undo.pop_all()
    context.send(reply(message.call))
    context.submit_rest(
        _run_and_call_back, message.call, bound, config, options, received_ns, resources, priority=prepared.priority
    )
    return True  # it counts once until the callback is sent


def _run_and_call_back(
    context: SessionContext,
    call: int,
    bound: BoundExecution,
    config: ExecutionConfig,
    options: RunOptions,
    received_ns: int,
    resources: ExitStack,
) -> None:
    with resources:
        result = run_bound(bound, config.measure, received_ns, options)
    context.send(result_message(ExecutionFinished, call, result))


def _launch_error(call: int, status: ErrorStatus, text: str) -> tuple[Message, ...]:
    return ExecutionFinished(call, status, text), Reply(call, status, text)


HANDLERS: dict[type[Message], InlineHandler | BlockingHandler] = {
    Execute: BlockingHandler(_execute, error_as_executed, _model_priority),
    ExecuteAsynchronously: BlockingHandler(_execute_asynchronously, _launch_error, is_launch=True),
}
