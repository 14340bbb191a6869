"""Calls that execute a prepared model: once, fenced, or as a reusable execution."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

from nnfmq.base.channel import close_all, open_fence_pair
from nnfmq.driver.execution.fenced import DriverFencedExecution, FencedRequest, check_fences
from nnfmq.driver.execution.prepared_model import (
    BoundExecution,
    DriverPreparedModel,
    ExecutionReply,
    execution_options,
    raise_if_deadline_passed,
    run_bound,
)
from nnfmq.driver.execution.reusable import DriverExecution
from nnfmq.driver.session.calls import BlockingHandler, InlineHandler, SessionContext, error_as_executed, reply
from nnfmq.driver.session.handle_table import NO_ID
from nnfmq.engines.execution import RunOptions
from nnfmq.hal.errors import DeadObject, ErrorStatus, InvalidArgument
from nnfmq.hal.timing import from_limit_field
from nnfmq.hal.types import ExecutionConfig, Priority, Request
from nnfmq.serialize.messages import (
    CreateExecution,
    Execute,
    ExecuteAsynchronously,
    Executed,
    ExecuteFenced,
    ExecutionCreated,
    ExecutionFinished,
    FencedExecutionInfo,
    FencedLaunched,
    GetExecutionInfo,
    Message,
    ReleaseCallback,
    ReleaseExecution,
    Reply,
    RunExecution,
    RunExecutionFenced,
    config_from_data,
    request_from_data,
    shapes_to_data,
)

__all__ = ["HANDLERS", "cancel_fenced", "cancel_reusable", "receive_request", "result_message"]

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


_EXECUTION_HANDLERS: dict[type[Message], InlineHandler | BlockingHandler] = {
    Execute: BlockingHandler(_execute, error_as_executed, _model_priority),
    ExecuteAsynchronously: BlockingHandler(_execute_asynchronously, _launch_error, is_launch=True),
}


# ----------------------------------------------------------------------------------------------------------------------
# Calls about fenced executions: launching, info, releasing (`executeFenced`, `IFencedExecutionCallback`).


def cancel_fenced(context: SessionContext) -> None:
    """Put the fences of all incomplete executions into the state ERROR, because the session ends."""
    for execution in list(context.launched):
        execution.fail(DeadObject("the client has exited"))


def _execute_fenced(context: SessionContext, message: ExecuteFenced, fds: list[int], received_ns: int) -> None:
    memory_count = len(message.memories)
    with ExitStack() as undo:
        fences = fds[memory_count:]
        undo.callback(close_all, fences)
        prepared, request, config = receive_request(context, message, fds[:memory_count], undo)
        with prepared.counted_on_error(request):
            deadline_ns, duration_ns = _deadline_and_duration(message)
            execution_options(config, deadline_ns)  # rejects an invalid loop timeout now, not after the launch
            bound = prepared.bind(request, is_fenced=True)
            fenced_request = FencedRequest(bound, config, deadline_ns, duration_ns, received_ns)
            _launch(context, message.call, fenced_request, fences, undo, prepared.priority)


def _run_execution_fenced(
    context: SessionContext, message: RunExecutionFenced, fds: list[int], received_ns: int
) -> None:
    with ExitStack() as undo:
        undo.callback(close_all, fds)
        execution = context.executions.lookup(message.execution_id)
        undo.enter_context(execution.exclusive_run())
        with execution.counted_on_error():
            deadline_ns, duration_ns = _deadline_and_duration(message)
            execution.require_fenceable()
            fenced_request = FencedRequest(execution.bound, execution.config, deadline_ns, duration_ns, received_ns)
            _launch(context, message.call, fenced_request, fds, undo, execution.priority)


def _deadline_and_duration(message: ExecuteFenced | RunExecutionFenced) -> tuple[int | None, int | None]:
    return from_limit_field(message.deadline_ns), from_limit_field(message.duration_ns)


def _launch(
    context: SessionContext, call: int, request: FencedRequest, fences: list[int], undo: ExitStack, priority: int
) -> None:
    """Reply with a fence and begin to wait for `fences`. The execution takes ownership of what `undo` would release."""
    unsignaled = check_fences(fences)
    raise_if_deadline_passed(request.deadline_ns)
    context.fenced_callbacks.require_capacity()

    def submit(run: Callable[[], None]) -> None:
        context.submit(lambda _context: run(), priority=priority)

    sender, fence = open_fence_pair()
    execution = DriverFencedExecution(request, sender, undo.pop_all(), submit, context.launched.discard)
    context.launched.add(execution)
    try:
        callback_id = context.fenced_callbacks.insert(execution)
        context.send(FencedLaunched(call, ErrorStatus.NONE, "", callback_id, 1), [fence])
    except DeadObject as error:
        execution.fail(error)
        raise
    finally:
        os.close(fence)
    execution.launch(unsignaled)
    if context.is_closed:  # `cancel_all` may have run before the execution was in `launched`
        execution.fail(DeadObject("the client has exited"))


def _fenced_launch_error(call: int, status: ErrorStatus, text: str) -> tuple[Message, ...]:
    return (FencedLaunched(call, status, text, NO_ID),)


def _get_execution_info(context: SessionContext, message: GetExecutionInfo, _fds: list[int]) -> None:
    try:
        info = context.fenced_callbacks.lookup(message.callback_id).info
    except InvalidArgument as error:
        context.send(FencedExecutionInfo(message.call, error.status, str(error)))
        return
    times = (
        time for timing in (info.launched, info.fenced) for time in (timing.time_on_device_ns, timing.time_in_driver_ns)
    )
    context.send(FencedExecutionInfo(message.call, info.status, info.message, *times))


def _release_callback(context: SessionContext, message: ReleaseCallback, _fds: list[int]) -> None:
    try:
        context.fenced_callbacks.pop(message.callback_id)
    except InvalidArgument as error:
        context.send(reply(message.call, error))
    else:
        context.send(reply(message.call))


_FENCED_HANDLERS: dict[type[Message], InlineHandler | BlockingHandler] = {
    ExecuteFenced: BlockingHandler(_execute_fenced, _fenced_launch_error, is_launch=True),
    RunExecutionFenced: BlockingHandler(_run_execution_fenced, _fenced_launch_error, is_launch=True),
    GetExecutionInfo: _get_execution_info,
    ReleaseCallback: _release_callback,
}


# ----------------------------------------------------------------------------------------------------------------------
# Calls about reusable executions: creating, running, releasing (`createReusableExecution`, `IExecution`).
#
# Their fenced runs are above.


def cancel_reusable(context: SessionContext) -> None:
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


_REUSABLE_HANDLERS: dict[type[Message], InlineHandler | BlockingHandler] = {
    CreateExecution: BlockingHandler(_create, _create_error, is_launch=True),
    RunExecution: BlockingHandler(_run, error_as_executed, _priority),
    ReleaseExecution: _release,
}

HANDLERS: dict[type[Message], InlineHandler | BlockingHandler] = {
    **_EXECUTION_HANDLERS,
    **_FENCED_HANDLERS,
    **_REUSABLE_HANDLERS,
}
