"""Calls about fenced executions: launching, info, releasing (`executeFenced`, `IFencedExecutionCallback`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack

from nnfmq.channel import close_all, open_fence_pair
from nnfmq.hal.errors import DeadObject, ErrorStatus, InvalidArgument
from nnfmq.hal.timing import from_limit_field
from nnfmq.serialize.messages import (
    ExecuteFenced,
    FencedExecutionInfo,
    FencedLaunched,
    GetExecutionInfo,
    Message,
    ReleaseCallback,
    RunExecutionFenced,
)
from nnfmq.service.driver_fenced_execution import DriverFencedExecution, FencedRequest, check_fences
from nnfmq.service.driver_prepared_model import execution_options, raise_if_deadline_passed
from nnfmq.service.handle_table import NO_ID
from nnfmq.service.handlers.base import BlockingHandler, InlineHandler, reply
from nnfmq.service.handlers.execution_calls import receive_request
from nnfmq.service.session_context import SessionContext


def cancel_all(context: SessionContext) -> None:
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


def _launch_error(call: int, status: ErrorStatus, text: str) -> tuple[Message, ...]:
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


HANDLERS: dict[type[Message], InlineHandler | BlockingHandler] = {
    ExecuteFenced: BlockingHandler(_execute_fenced, _launch_error, is_launch=True),
    RunExecutionFenced: BlockingHandler(_run_execution_fenced, _launch_error, is_launch=True),
    GetExecutionInfo: _get_execution_info,
    ReleaseCallback: _release_callback,
}
