"""IPreparedModel: executions, with or without a callback, fenced ones, bursts (REQUIREMENTS EXE-15, TIM-2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nnfmq.fence import Fence, HasFileno
from nnfmq.hal.errors import DeadObject, ErrorStatus, InvalidArgument, NnfmqError, status_for_error
from nnfmq.hal.feature_levels import FeatureLevel
from nnfmq.hal.timing import to_limit_field
from nnfmq.hal.types import LoopTimeoutDurationNs, MeasureTiming, OutputShape, Request
from nnfmq.runtime.connection import Connection
from nnfmq.runtime.execution_result import memory_fds
from nnfmq.runtime.fenced_execution import FencedExecution, FencedTiming, fence_fds
from nnfmq.runtime.future import Future
from nnfmq.runtime.hidl.iburst_context import configure_burst
from nnfmq.runtime.hidl.methods import (
    INVALID,
    NO_TIMING,
    NONE,
    V1_0,
    V1_2,
    V1_3,
    Form,
    HasForms,
    Timing,
    call_back,
    refused,
    status_of,
)
from nnfmq.serialize import messages
from nnfmq.validation.interface_conversion import convert_to


def _execution(
    model: IPreparedModel,
    level: FeatureLevel,
    request: Request,
    measure: MeasureTiming,
    deadline: int | None,
    loop_timeout: int | None,
) -> tuple[dict[str, Any], list[int]]:
    """Return the fields that all calls with a request have, and the descriptors.

    Raises InvalidArgument for a request that no form of this level can say: with a buffer of the driver's before 1.3.
    """
    convert_to(request, level)
    timeout_ns = LoopTimeoutDurationNs.DEFAULT if loop_timeout is None else loop_timeout
    fields = {
        "call": model.connection.new_call(),
        "model_id": model.model_id,
        "request": messages.request_to_data(request),
        "config": messages.ConfigData(measure, timeout_ns),
        "deadline_ns": to_limit_field(deadline),
    }
    return fields, memory_fds(request.pools)


def _execute_synchronously(
    model: IPreparedModel,
    level: FeatureLevel,
    request: Request,
    measure: MeasureTiming,
    deadline: int | None = None,
    loop_timeout: int | None = None,
) -> tuple[ErrorStatus, list[OutputShape], Timing]:
    try:
        fields, fds = _execution(model, level, request, measure, deadline, loop_timeout)
        answer = model.connection.ask(messages.Execute(**fields), messages.Executed, fds)
    except InvalidArgument:
        return INVALID, [], NO_TIMING
    return status_of(answer.status, level), list(messages.shapes_from_data(answer.shapes)), _timing(answer)


def _timing(answer: messages.Executed | messages.ExecutionFinished) -> Timing:
    return Timing.of(answer.time_on_device_ns, answer.time_in_driver_ns)


_EXECUTE: dict[FeatureLevel, tuple[str, ...]] = {  # what comes after the request
    V1_0: ("callback",),
    V1_2: ("measure", "callback"),
    V1_3: ("measure", "deadline", "loopTimeoutDuration", "callback"),
}
_NO_RESULT: dict[FeatureLevel, tuple[Any, ...]] = {V1_0: (), V1_2: ([], NO_TIMING), V1_3: ([], NO_TIMING)}


def _execute(model: IPreparedModel, level: FeatureLevel, request: Request, *arguments: Any) -> ErrorStatus:
    given = dict(zip(_EXECUTE[level], arguments, strict=True))
    measure, callback = given.get("measure", MeasureTiming.NO), given["callback"]
    limits = given.get("deadline"), given.get("loopTimeoutDuration")
    if callback is None:
        return INVALID

    def notify(answer: messages.ExecutionFinished | None) -> None:
        status = ErrorStatus.GENERAL_FAILURE if answer is None else status_of(answer.status, level)
        if answer is None or level < V1_2:
            callback(status, *_NO_RESULT[level])
        else:
            callback(status, list(messages.shapes_from_data(answer.shapes)), _timing(answer))

    waiting: Future[messages.ExecutionFinished] = Future()
    try:
        fields, fds = _execution(model, level, request, measure, *limits)
        message = messages.ExecuteAsynchronously(**fields)
        reply = model.connection.launch(message, messages.ExecutionFinished, waiting, fds)
    except InvalidArgument:
        return refused(callback, *_NO_RESULT[level])
    call_back(reply, waiting, notify)
    return status_of(reply.status, level)


class FencedCallback:
    """IFencedExecutionCallback, and the owner of the fence that came with it. Close it."""

    def __init__(self, execution: FencedExecution[FencedTiming]) -> None:
        self._execution = execution

    def getExecutionInfo(self) -> tuple[ErrorStatus, Timing, Timing]:
        """Return the status and the times from the launch and from the last fence on."""
        try:
            times = self._execution.info()
        except DeadObject:
            raise
        except NnfmqError as error:
            return status_for_error(error), NO_TIMING, NO_TIMING
        launched, fenced = (Timing.of(timing.time_on_device_ns, timing.time_in_driver_ns) for timing in times)
        return NONE, launched, fenced

    def close(self) -> None:
        """Drop the reference, and close the fence."""
        self._execution.close()


def _execute_fenced(
    model: IPreparedModel,
    level: FeatureLevel,
    request: Request,
    wait_for: Sequence[HasFileno | int | None],
    measure: MeasureTiming,
    deadline: int | None,
    loop_timeout: int | None,
    duration: int | None,
) -> tuple[ErrorStatus, Fence | None, FencedCallback | None]:
    """A handle without a descriptor is None, which is INVALID_ARGUMENT (N-REQ-3)."""
    fences = [fence for fence in wait_for if fence is not None]
    if len(fences) < len(wait_for):
        return INVALID, None, None
    try:
        fields, fds = _execution(model, level, request, measure, deadline, loop_timeout)
        message = messages.ExecuteFenced(**fields, duration_ns=to_limit_field(duration), fence_count=len(fences))
        launched = FencedExecution.launch(
            model.connection, message, [*fds, *fence_fds(fences)], None, lambda times: times
        )
    except DeadObject:
        raise
    except NnfmqError as error:
        return status_of(status_for_error(error), level), None, None
    return NONE, launched.fence, FencedCallback(launched)


PREPARED_MODEL: dict[str, Form] = {
    "execute": Form(V1_0, _execute),
    "execute_1_2": Form(V1_2, _execute),
    "execute_1_3": Form(V1_3, _execute),
    "executeFenced": Form(V1_3, _execute_fenced),
    "executeSynchronously": Form(V1_2, _execute_synchronously),
    "executeSynchronously_1_3": Form(V1_3, _execute_synchronously),
    "configureExecutionBurst": Form(V1_2, configure_burst),
}


class IPreparedModel(HasForms):
    """A prepared model as the connection's HIDL interface has it; its methods are in PREPARED_MODEL. Close it."""

    forms = PREPARED_MODEL

    def __init__(self, connection: Connection, model_id: int) -> None:
        self.connection = connection
        self.model_id = model_id

    def close(self) -> None:
        """Drop the reference: the driver releases the model."""
        if self.connection.is_open:
            self.connection.ask(messages.ReleaseModel(self.connection.new_call(), self.model_id), messages.Reply)
