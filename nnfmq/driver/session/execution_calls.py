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
from nnfmq.driver.session.session import Session
from nnfmq.engines.execution import RunOptions
from nnfmq.hal.errors import DeadObject, ErrorStatus
from nnfmq.hal.timing import from_limit_field
from nnfmq.hal.types import ExecutionConfig, Priority, Request
from nnfmq.serialize import messages

ResultT = TypeVar("ResultT", messages.Executed, messages.ExecutionFinished)
CallWithRequest = messages.Execute | messages.ExecuteAsynchronously | messages.ExecuteFenced | messages.CreateExecution


def receive_request(
    session: Session, message: CallWithRequest, fds: list[int], resources: ExitStack
) -> tuple[DriverPreparedModel, Request, ExecutionConfig]:
    """Return the model, the request and the configuration of a call.

    Takes ownership of `fds`; the request's memory stays open until `resources` is closed.

    Raises:
        InvalidArgument: If a memory is invalid, or the model's id is unknown.
    """
    pools = session.quota.adopt_all(fds, message.memories)
    for pool in pools:
        resources.callback(pool.close)
    prepared = session.models.lookup(message.model_id)
    return prepared, messages.request_from_data(message.request, pools), messages.config_from_data(message.config)


def result_message(kind: type[ResultT], call: int, result: ExecutionReply) -> ResultT:
    """Return the message that carries the result of an execution."""
    shapes, times = messages.shapes_to_data(result.output_shapes), result.timing
    reported = times.time_on_device_ns, times.time_in_driver_ns
    return kind(call, result.status, result.message, shapes, *reported, result.driver_ns)


def execute(session: Session, message: messages.Execute, fds: list[int], received_ns: int) -> None:
    """Run a request and send its result (`IPreparedModel::executeSynchronously`). Blocks."""
    with ExitStack() as resources:
        prepared, request, config = receive_request(session, message, fds, resources)
        with prepared.counted_on_error(request):
            deadline_ns = from_limit_field(message.deadline_ns)
        result = prepared.execute_synchronously(request, config, deadline_ns, received_ns)
    session.send(result_message(messages.Executed, message.call, result))


def model_priority(session: Session, message: CallWithRequest) -> int:
    """Return the priority of the model of a call; MEDIUM if the model is unknown, which the call rejects."""
    prepared = session.models.get(message.model_id)
    return Priority.MEDIUM if prepared is None else prepared.priority


def execute_asynchronously(
    session: Session, message: messages.ExecuteAsynchronously, fds: list[int], received_ns: int
) -> bool:
    """Launch an execution, with messages in the HAL's order (`execute_1_3`).

    If the arguments are invalid, the callback comes first and then a reply with the same status; otherwise the reply
    NONE comes first and then the callback.
    """
    with ExitStack() as undo:
        prepared, request, config = receive_request(session, message, fds, undo)
        with prepared.counted_on_error(request):
            deadline_ns = from_limit_field(message.deadline_ns)
            options = execution_options(config, deadline_ns)
            bound = prepared.bind(request)
            raise_if_deadline_passed(deadline_ns)
        resources = undo.pop_all()
    session.send_success(message.call)
    session.submit_rest(
        _run_and_call_back, message.call, bound, config, options, received_ns, resources, priority=prepared.priority
    )
    return True  # it counts once until the callback is sent


def _run_and_call_back(
    session: Session,
    call: int,
    bound: BoundExecution,
    config: ExecutionConfig,
    options: RunOptions,
    received_ns: int,
    resources: ExitStack,
) -> None:
    with resources:
        result = run_bound(bound, config.measure, received_ns, options)
    session.send(result_message(messages.ExecutionFinished, call, result))


# ----------------------------------------------------------------------------------------------------------------------
# Calls about fenced executions: launching, info, releasing (`executeFenced`, `IFencedExecutionCallback`).


def execute_fenced(session: Session, message: messages.ExecuteFenced, fds: list[int], received_ns: int) -> None:
    """Launch an execution that begins after fences, and send its own fence (`IPreparedModel::executeFenced`)."""
    memory_count = len(message.memories)
    with ExitStack() as undo:
        fences = fds[memory_count:]
        undo.callback(close_all, fences)
        prepared, request, config = receive_request(session, message, fds[:memory_count], undo)
        with prepared.counted_on_error(request):
            deadline_ns, duration_ns = _deadline_and_duration(message)
            execution_options(config, deadline_ns)  # rejects an invalid loop timeout now, not after the launch
            bound = prepared.bind(request, is_fenced=True)
            fenced_request = FencedRequest(bound, config, deadline_ns, duration_ns, received_ns)
            _launch(session, message.call, fenced_request, fences, undo, prepared.priority)


def run_execution_fenced(
    session: Session, message: messages.RunExecutionFenced, fds: list[int], received_ns: int
) -> None:
    """Launch a run of a reusable execution as `execute_fenced` does (`IExecution::executeFenced`)."""
    with ExitStack() as undo:
        undo.callback(close_all, fds)
        execution = session.executions.lookup(message.execution_id)
        undo.enter_context(execution.exclusive_run())
        with execution.counted_on_error():
            deadline_ns, duration_ns = _deadline_and_duration(message)
            execution.require_fenceable()
            fenced_request = FencedRequest(execution.bound, execution.config, deadline_ns, duration_ns, received_ns)
            _launch(session, message.call, fenced_request, fds, undo, execution.priority)


def _deadline_and_duration(
    message: messages.ExecuteFenced | messages.RunExecutionFenced,
) -> tuple[int | None, int | None]:
    return from_limit_field(message.deadline_ns), from_limit_field(message.duration_ns)


def _launch(
    session: Session, call: int, request: FencedRequest, fences: list[int], undo: ExitStack, priority: int
) -> None:
    """Reply with a fence and begin to wait for `fences`. The execution takes ownership of what `undo` would release."""
    unsignaled = check_fences(fences)
    raise_if_deadline_passed(request.deadline_ns)
    session.fenced_callbacks.require_capacity()

    def submit(run: Callable[[], None]) -> None:
        session.submit(lambda _session: run(), priority=priority)

    sender, fence = open_fence_pair()
    execution = DriverFencedExecution(request, sender, undo.pop_all(), submit, session.launched.discard)
    session.launched.add(execution)
    try:
        callback_id = session.fenced_callbacks.insert(execution)
        session.send(messages.FencedLaunched(call, ErrorStatus.NONE, "", callback_id, 1), [fence])
    except DeadObject as error:
        execution.fail(error)
        raise
    finally:
        os.close(fence)
    execution.launch(unsignaled)
    if session.is_closed:  # the session may have ended its executions before this one was in `launched`
        execution.fail(DeadObject("the client has exited"))


def get_execution_info(session: Session, message: messages.GetExecutionInfo, *_: object) -> None:
    """Send the status and the times of a fenced execution (`IFencedExecutionCallback::getExecutionInfo`)."""
    execution = session.fenced_callbacks.lookup(message.callback_id)
    info = execution.info
    times = (
        time for timing in (info.launched, info.fenced) for time in (timing.time_on_device_ns, timing.time_in_driver_ns)
    )
    session.send(messages.FencedExecutionInfo(message.call, info.status, info.message, *times))
    execution.is_collected = True


def release_callback(session: Session, message: messages.ReleaseCallback, *_: object) -> None:
    """Forget the callback of a fenced execution, which goes on."""
    session.fenced_callbacks.pop(message.callback_id)
    session.send_success(message.call)


# ----------------------------------------------------------------------------------------------------------------------
# Calls about reusable executions: creating, running, releasing (`createReusableExecution`, `IExecution`).
#
# Their fenced runs are above.


def create_execution(session: Session, message: messages.CreateExecution, fds: list[int], _received_ns: int) -> None:
    """Bind a request that will run often (`IPreparedModel::createReusableExecution`)."""
    with ExitStack() as undo:
        prepared, request, config = receive_request(session, message, fds, undo)
        session.executions.require_capacity()
        execution = DriverExecution.create(prepared, request, config, undo)
    session.send(messages.ExecutionCreated(message.call, ErrorStatus.NONE, "", session.executions.insert(execution)))


def run_execution(session: Session, message: messages.RunExecution, _fds: list[int], received_ns: int) -> None:
    """Run a reusable execution and send its result (`IExecution::executeSynchronously`). Blocks."""
    execution = session.executions.lookup(message.execution_id)
    with execution.exclusive_run():
        with execution.counted_on_error():
            deadline_ns = from_limit_field(message.deadline_ns)
            options = execution_options(execution.config, deadline_ns)
            raise_if_deadline_passed(deadline_ns)
        result = run_bound(execution.bound, execution.config.measure, received_ns, options)
        executed = result_message(messages.Executed, message.call, result)
    session.send(executed)  # after `exclusive_run`: the client may run it again as soon as it gets this


def execution_priority(session: Session, message: messages.RunExecution) -> int:
    """Return the priority of a reusable execution; MEDIUM if it is unknown, which the call rejects."""
    execution = session.executions.get(message.execution_id)
    return Priority.MEDIUM if execution is None else execution.priority


def release_execution(session: Session, message: messages.ReleaseExecution, *_: object) -> None:
    """Release a reusable execution and its memory."""
    session.executions.pop(message.execution_id).release()
    session.send_success(message.call)
