"""Calls about fenced executions: launching, asking, letting go (executeFenced, IFencedExecutionCallback)."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

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
from nnfmq.service.driver_prepared_model import execution_limits, raise_if_deadline_passed
from nnfmq.service.handle_table import NO_ID
from nnfmq.service.handlers.base import BlockingHandler, InlineHandler, reply
from nnfmq.service.handlers.execution_calls import received

if TYPE_CHECKING:
    from nnfmq.service.session import Session


def cancel_all(session: Session) -> None:
    """Put the fences of a session whose client is gone in error."""
    for execution in list(session.launched):
        execution.fail(DeadObject("the client is gone"))


def _execute_fenced(session: Session, message: ExecuteFenced, fds: list[int], received_ns: int) -> None:
    count = len(message.memories)
    with ExitStack() as undo:
        fences = fds[count:]
        undo.callback(close_all, fences)
        prepared, request, config = received(session, message, fds[:count], undo)
        with prepared.uninitialize_outputs_on_error(request):
            limits = _limits(message)
            execution_limits(config, limits[0])
            plan = FencedRequest(prepared.bind(request, is_fenced=True), config, *limits, received_ns)
            _launch(session, message.call, plan, fences, undo, prepared.priority)


def _run_fenced(session: Session, message: RunExecutionFenced, fds: list[int], received_ns: int) -> None:
    with ExitStack() as undo:
        undo.callback(close_all, fds)
        execution = session.executions.find(message.execution_id)
        undo.enter_context(execution.exclusive_run())
        with execution.uninitialize_outputs_on_error():
            limits = _limits(message)
            execution.require_fenceable()
            plan = FencedRequest(execution.bound, execution.config, *limits, received_ns)
            _launch(session, message.call, plan, fds, undo, execution.priority)


def _limits(message: ExecuteFenced | RunExecutionFenced) -> tuple[int | None, int | None]:
    """Return deadline and duration. Raises InvalidArgument below -1 (N-RQX-14)."""
    return from_limit_field(message.deadline_ns), from_limit_field(message.duration_ns)


def _launch(
    session: Session, call: int, plan: FencedRequest, fences: list[int], undo: ExitStack, priority: int
) -> None:
    """Answer with a fence, and begin to wait; from then on the execution has what `undo` would have given back."""
    active = check_fences(fences)
    raise_if_deadline_passed(plan.deadline_ns)
    session.fenced_callbacks.require_capacity()

    def submit(run: Callable[[], None]) -> None:
        session.submit(lambda _session: run(), priority=priority)

    sender, fence = open_fence_pair()
    execution = DriverFencedExecution(plan, sender, undo.pop_all(), submit, session.launched.discard)
    session.launched.add(execution)
    try:
        session.send(FencedLaunched(call, ErrorStatus.NONE, "", session.fenced_callbacks.add(execution), 1), [fence])
    except DeadObject as error:
        execution.fail(error)
        raise
    finally:
        os.close(fence)
    execution.launch(active)
    if session.is_closed:  # `cancel_all` may have looked before this
        execution.fail(DeadObject("the client is gone"))


def _refuse_launch(call: int, status: ErrorStatus, text: str) -> tuple[Message, ...]:
    return (FencedLaunched(call, status, text, NO_ID),)


def _execution_info(session: Session, message: GetExecutionInfo, _fds: list[int]) -> None:
    try:
        info = session.fenced_callbacks.find(message.callback_id).info
    except InvalidArgument as error:
        session.send(FencedExecutionInfo(message.call, error.status, str(error)))
        return
    times = (
        time for timing in (info.launched, info.fenced) for time in (timing.time_on_device_ns, timing.time_in_driver_ns)
    )
    session.send(FencedExecutionInfo(message.call, info.status, info.message, *times))


def _release_callback(session: Session, message: ReleaseCallback, _fds: list[int]) -> None:
    try:
        session.fenced_callbacks.take(message.callback_id)
    except InvalidArgument as error:
        session.send(reply(message.call, error))
    else:
        session.send(reply(message.call))


HANDLERS: dict[type[Message], InlineHandler | BlockingHandler] = {
    ExecuteFenced: BlockingHandler(_execute_fenced, _refuse_launch, is_launch=True),
    RunExecutionFenced: BlockingHandler(_run_fenced, _refuse_launch, is_launch=True),
    GetExecutionInfo: _execution_info,
    ReleaseCallback: _release_callback,
}
