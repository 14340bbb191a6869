"""IPreparedModel: synchronous, asynchronous and fenced executions, and bursts (EXE-15, TIM-2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nnfmq.fence import Fence, HasFileno
from nnfmq.hal.errors import DeadObject, ErrorStatus, InvalidArgument, NnfmqError, status_for_error
from nnfmq.hal.feature_levels import FeatureLevel
from nnfmq.hal.timing import to_limit_field
from nnfmq.hal.types import LoopTimeoutDurationNs, MeasureTiming, OutputShape, Request
from nnfmq.runtime.connection import Connection
from nnfmq.runtime.fenced_execution import DeviceFencedExecution, FencedExecution, FencedTiming, fence_fds
from nnfmq.runtime.future import Future
from nnfmq.runtime.hidl.iburst_context import configure_burst
from nnfmq.runtime.hidl.methods import (
    INVALID,
    NO_HIDL_TIMING,
    NONE,
    V1_0,
    V1_2,
    V1_3,
    HidlTiming,
    Method,
    VersionedObject,
    notify_when_done,
    reject,
    status_at,
)
from nnfmq.runtime.wire_values import memory_fds
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
    """Return the fields that all calls with a request have, and the fds.

    Raises:
        InvalidArgument: If no method of this level can carry the request: before 1.3, one with a managed buffer.
    """
    convert_to(request, level)
    timeout_ns = LoopTimeoutDurationNs.DEFAULT if loop_timeout is None else loop_timeout
    fields = {
        "call": model.connection.next_call_id(),
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
) -> tuple[ErrorStatus, list[OutputShape], HidlTiming]:
    try:
        fields, fds = _execution(model, level, request, measure, deadline, loop_timeout)
        reply = model.connection.exchange(messages.Execute(**fields), messages.Executed, fds)
    except InvalidArgument:
        return INVALID, [], NO_HIDL_TIMING
    return status_at(level, reply.status), list(messages.shapes_from_data(reply.shapes)), _timing(reply)


def _timing(reply: messages.Executed | messages.ExecutionFinished) -> HidlTiming:
    return HidlTiming.from_ns(reply.time_on_device_ns, reply.time_in_driver_ns)


_EXECUTE: dict[FeatureLevel, tuple[str, ...]] = {  # the parameters after the request
    V1_0: ("callback",),
    V1_2: ("measure", "callback"),
    V1_3: ("measure", "deadline", "loopTimeoutDuration", "callback"),
}
_NO_RESULT: dict[FeatureLevel, tuple[Any, ...]] = {V1_0: (), V1_2: ([], NO_HIDL_TIMING), V1_3: ([], NO_HIDL_TIMING)}


def _execute(model: IPreparedModel, level: FeatureLevel, request: Request, *arguments: Any) -> ErrorStatus:
    args = dict(zip(_EXECUTE[level], arguments, strict=True))
    measure, callback = args.get("measure", MeasureTiming.NO), args["callback"]
    limits = args.get("deadline"), args.get("loopTimeoutDuration")
    if callback is None:
        return INVALID

    def notify(reply: messages.ExecutionFinished | None) -> None:
        status = ErrorStatus.GENERAL_FAILURE if reply is None else status_at(level, reply.status)
        if reply is None or level < V1_2:
            callback(status, *_NO_RESULT[level])
        else:
            callback(status, list(messages.shapes_from_data(reply.shapes)), _timing(reply))

    future: Future[messages.ExecutionFinished] = Future()
    try:
        fields, fds = _execution(model, level, request, measure, *limits)
        message = messages.ExecuteAsynchronously(**fields)
        reply = model.connection.call_with_callback(message, messages.ExecutionFinished, future, fds)
    except InvalidArgument:
        return reject(callback, *_NO_RESULT[level])
    notify_when_done(reply, future, notify)
    return status_at(level, reply.status)


class FencedCallback:
    """IFencedExecutionCallback. Owns the fence that came with it. Close it."""

    def __init__(self, execution: FencedExecution[FencedTiming]) -> None:
        self._execution = execution

    def getExecutionInfo(self) -> tuple[ErrorStatus, HidlTiming, HidlTiming]:
        """Return the status, the times from the launch, and the times from the last fence."""
        try:
            times = self._execution.info()
        except DeadObject:
            raise
        except NnfmqError as error:
            return status_for_error(error), NO_HIDL_TIMING, NO_HIDL_TIMING
        launched, fenced = (HidlTiming.from_ns(timing.time_on_device_ns, timing.time_in_driver_ns) for timing in times)
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
    """A handle without an fd is None, which is INVALID_ARGUMENT (N-REQ-3)."""
    fences = [fence for fence in wait_for if fence is not None]
    if len(fences) < len(wait_for):
        return INVALID, None, None
    try:
        fields, fds = _execution(model, level, request, measure, deadline, loop_timeout)
        message = messages.ExecuteFenced(**fields, duration_ns=to_limit_field(duration), fence_count=len(fences))
        launched = DeviceFencedExecution.launch(
            model.connection, message, [*fds, *fence_fds(fences)], None, lambda times: times
        )
    except DeadObject:
        raise
    except NnfmqError as error:
        return status_at(level, status_for_error(error)), None, None
    return NONE, launched.fence, FencedCallback(launched)


PREPARED_MODEL: dict[str, Method] = {
    "execute": Method(V1_0, _execute),
    "execute_1_2": Method(V1_2, _execute),
    "execute_1_3": Method(V1_3, _execute),
    "executeFenced": Method(V1_3, _execute_fenced),
    "executeSynchronously": Method(V1_2, _execute_synchronously),
    "executeSynchronously_1_3": Method(V1_3, _execute_synchronously),
    "configureExecutionBurst": Method(V1_2, configure_burst),
}


class IPreparedModel(VersionedObject):
    """A prepared model with the methods of the connection's HIDL version, which are in PREPARED_MODEL. Close it."""

    methods = PREPARED_MODEL

    def __init__(self, connection: Connection, model_id: int) -> None:
        self.connection = connection
        self.model_id = model_id

    def close(self) -> None:
        """Drop the reference: the driver releases the model."""
        if self.connection.is_open:
            self.connection.exchange(
                messages.ReleaseModel(self.connection.next_call_id(), self.model_id), messages.Reply
            )
