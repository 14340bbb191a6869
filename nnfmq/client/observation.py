"""Reports of this process's preparations and executions to observers: recordings, telemetry, an application's own.

`observe.executions` has the form of what they get. The settings `NNFMQ_RECORD` and `telemetry` are read when a process
prepares its first model, so that an application may set them itself. A forked child reads them again, because it has
no observers. A model that nothing observed when it was prepared has no `ObservedModel`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from nnfmq.base import settings
from nnfmq.client.model.arrays import Array, ExecutionResult, callers_shape, size_bytes
from nnfmq.hal.errors import BadState, ErrorStatus, InvalidArgument, NnfmqError
from nnfmq.hal.preparation import DeviceChoice
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.timing import NO_TIME, NO_TIMING, Timing
from nnfmq.hal.types import BufferToken, HalExecutionMode, Model, OutputShape, Pool, Request, RequestArgument
from nnfmq.observe.executions import (
    CapturedTensor,
    ModelObserver,
    ObservedExecution,
    ObservedPreparation,
    PreparationObserver,
    observers,
)

__all__ = [
    "BurstObservation",
    "ObservedModel",
    "Preparation",
    "RequestObservation",
    "begin_preparation",
    "current_observers",
]

_readers: set[int] = set()  # the processes that have read their environment: this one, and those it was forked from


def current_observers() -> tuple[PreparationObserver, ...]:
    """Return the observers of this process; the first time with those that its environment asks for.

    Raises:
        InvalidArgument: If a variable has no valid value, or a configuration file is not valid.
        OSError: If the file of a variable cannot be created.
    """
    if os.getpid() not in _readers:
        _readers.add(os.getpid())
        if recording := settings.RECORD.value():
            from nnfmq.recording.writer import record_from_environment  # few applications are recorded

            record_from_environment(recording)
        if sink := settings.TELEMETRY.value():
            from nnfmq.telemetry.logger import report_from_environment  # few have telemetry

            report_from_environment(sink)
    return observers()


# ----------------------------------------------------------------------------------------------------------------------
# Preparation: one preparation of a model, on one device or on several.


class Preparation:
    """A preparation in progress. Exactly one of the methods tells the observers how it has ended."""

    def __init__(self, observers: Sequence[PreparationObserver], event: ObservedPreparation) -> None:
        self._observers = observers
        self._event = event

    def finish(self, inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo]) -> ObservedModel | None:
        """Report success; return the observers of the model's executions, None if there are none.

        `inputs` and `outputs` are those of the HAL's model: with the states.
        """
        found = self._tell(ErrorStatus.NONE)
        return ObservedModel(found, inputs, outputs) if found else None

    def fail(self, error: BaseException) -> None:
        """Report the error of nnfmq with which the preparation ended; others, such as KeyboardInterrupt, are none."""
        if isinstance(error, NnfmqError):
            self._tell(error.status)

    def _tell(self, status: ErrorStatus) -> Sequence[ModelObserver]:
        event = replace(self._event, status=status, end_ns=time.monotonic_ns())
        found = [observer.prepared(event) for observer in self._observers]
        return [observer for observer in found if observer is not None]


def begin_preparation(
    model: object,
    inputs: Sequence[TensorInfo],
    outputs: Sequence[TensorInfo],
    state_count: int,
    choice: DeviceChoice,
    options: tuple[int, int],
    is_cached: bool,
    *,
    device: tuple[str, str] = ("", ""),
    plan_devices: Sequence[tuple[str, str]] = (),
) -> Preparation | None:
    """Return the preparation that begins now, for the observers of this process; None if there are none.

    `options` are the preference and the priority, `device` and `plan_devices` names and versions; the other arguments
    are those of an `ObservedPreparation`. Raises as `current_observers`.
    """
    found = current_observers()
    if not found:
        return None
    hal_model = model if isinstance(model, Model) else getattr(model, "model", None)
    event = ObservedPreparation(
        hal_model if isinstance(hal_model, Model) else None,
        tuple(inputs), tuple(outputs), state_count, *device, *options, choice, is_cached,
        ErrorStatus.NONE, time.monotonic_ns(), 0, tuple(plan_devices),
    )  # fmt: skip
    return Preparation(found, event)


# ----------------------------------------------------------------------------------------------------------------------
# RequestObservation: one execution of an observed model, from its call to its end.


Tensors = tuple[CapturedTensor, ...]
Shape = tuple[int, ...]


class ObservedModel:
    """The observers of one prepared model."""

    __slots__ = ("_observers", "inputs", "needs_tensors", "outputs")

    def __init__(
        self, observers: Sequence[ModelObserver], inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo]
    ) -> None:
        self._observers = tuple(observers)
        self.needs_tensors = any(observer.needs_tensors for observer in self._observers)
        self.inputs = inputs
        self.outputs = outputs

    def report(self, execution: ObservedExecution) -> None:
        """Show an execution to all observers. Does not block."""
        for observer in self._observers:
            observer.executed(execution)

    def begin(self, request: Request, mode: HalExecutionMode, deadline_ns: int | None) -> RequestObservation:
        """Return the observation of an execution that begins now."""
        return RequestObservation(self, request, mode, deadline_ns)


class RequestObservation:
    """An execution of a request. Copies the inputs when it is made, and the outputs when the execution has succeeded.

    Exactly one of the methods reports the execution; later calls do nothing. Keeps the request, and thus its memory
    pools, until then.
    """

    def __init__(
        self, observed: ObservedModel, request: Request, mode: HalExecutionMode, deadline_ns: int | None
    ) -> None:
        self._intended_ns = time.monotonic_ns()
        self._observed = observed
        self._request: Request | None = request
        self._mode = mode
        self._deadline_ns = deadline_ns
        self._inputs = captured_inputs(observed.inputs, request) if observed.needs_tensors else None
        self._begin_ns = time.monotonic_ns()

    def finish(self, shapes: Sequence[OutputShape], timing: Timing) -> None:
        """Report success. The end is now, or for a fenced execution when the driver measured it, if it did."""
        end_ns, request = time.monotonic_ns(), self._request
        if request is None:
            return
        if self._mode is HalExecutionMode.FENCED and timing.time_in_driver_ns != NO_TIME:
            end_ns = min(end_ns, self._begin_ns + max(timing.time_in_driver_ns, 0))
        outputs = None
        if self._observed.needs_tensors:
            outputs = captured_outputs(self._observed.outputs, request, shapes)
        self._report(ErrorStatus.NONE, end_ns, timing, outputs)

    def fail(self, error: NnfmqError) -> None:
        """Report an error; one of this library, which has sent nothing, included."""
        self._report(error.status, time.monotonic_ns(), NO_TIMING, None)

    def _report(self, status: int, end_ns: int, timing: Timing, outputs: Tensors | None) -> None:
        if self._request is None:
            return
        self._request = None
        self._observed.report(
            ObservedExecution(
                self._mode, status, self._intended_ns, self._begin_ns, end_ns, self._deadline_ns,
                timing.time_on_device_ns, timing.time_in_driver_ns, self._inputs, outputs,
            )
        )  # fmt: skip


def captured_inputs(infos: Sequence[TensorInfo], request: Request) -> Tensors | None:
    """Return copies of a request's inputs; None if one is omitted, in a managed buffer, or in a closed memory."""
    return _captured(infos, request.inputs, request.pools, [a.dimensions for a in request.inputs])


def captured_outputs(infos: Sequence[TensorInfo], request: Request, reported: Sequence[OutputShape]) -> Tensors | None:
    """Return copies of a request's outputs, in the reported shapes if there are any; otherwise as `captured_inputs`."""
    shapes = [shape.dimensions for shape in reported] or [a.dimensions for a in request.outputs]
    return _captured(infos, request.outputs, request.pools, shapes)


def _captured(
    infos: Sequence[TensorInfo],
    arguments: Sequence[RequestArgument],
    pools: Sequence[Pool | BufferToken],
    shapes: Sequence[Shape],
) -> Tensors | None:
    if not len(infos) == len(arguments) == len(shapes):
        return None  # the driver rejects the request
    found = []
    for info, argument, shape in zip(infos, arguments, shapes, strict=True):
        seen = callers_shape(info, shape)
        data = _content(argument, pools, size_bytes(info, seen))
        if data is None:
            return None
        found.append(CapturedTensor(seen, data))
    return tuple(found)


def _content(argument: RequestArgument, pools: Sequence[Pool | BufferToken], size: int) -> bytes | None:
    """Return `size` bytes of an argument; None if this process cannot read them, or there are fewer."""
    location = argument.location
    if argument.has_no_value or not 0 <= location.pool_index < len(pools) or size > location.length:
        return None
    pool = pools[location.pool_index]
    if isinstance(pool, BufferToken):
        return None
    try:
        data = bytes(pool.view[location.offset : location.offset + size])
    except (InvalidArgument, ValueError):  # closed, or a file that may not be read
        return None
    return data if len(data) == size else None


# ----------------------------------------------------------------------------------------------------------------------
# BurstObservation: the executions of a burst of an observed model.


class BurstObservation:
    """The executions of one burst, one at a time, each reported if it has sent a packet.

    One that falls back to the control channel is reported from there, as a synchronous one. `observed` may be replaced
    when the burst moves to another version of its model.
    """

    __slots__ = ("_called_ns", "_states", "observed")

    def __init__(self, observed: ObservedModel) -> None:
        self.observed = observed
        self._called_ns = 0  # when the application has called
        self._states: tuple[Array, ...] = ()

    def begin(self, states: tuple[Array, ...]) -> None:
        """Begin an execution with these states."""
        self._called_ns, self._states = time.monotonic_ns(), states

    def finish(
        self,
        sent_ns: int,
        deadline_ns: int | None,
        timing: Timing,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
    ) -> None:
        """Report success; nothing if `sent_ns`, when the burst sent its last packet, was before this execution."""
        self._report(ErrorStatus.NONE, sent_ns, deadline_ns, timing, inputs, outputs)

    def fail(self, sent_ns: int, deadline_ns: int | None, error: NnfmqError, inputs: Sequence[Array] | None) -> None:
        """As `finish`, for an execution that has failed; `inputs` are None if the burst has no arrays any more."""
        self._report(error.status, sent_ns, deadline_ns, NO_TIMING, inputs, None)

    def _report(
        self,
        status: int,
        sent_ns: int,
        deadline_ns: int | None,
        timing: Timing,
        inputs: Sequence[Array] | None,
        outputs: Sequence[Array] | None,
    ) -> None:
        end_ns, needs_tensors = time.monotonic_ns(), self.observed.needs_tensors
        if sent_ns < self._called_ns:
            return
        self.observed.report(
            ObservedExecution(
                HalExecutionMode.BURST, status, self._called_ns, sent_ns, end_ns, deadline_ns,
                timing.time_on_device_ns, timing.time_in_driver_ns,
                _copies((*inputs, *self._states)) if needs_tensors and inputs is not None else None,
                _copies(outputs) if needs_tensors and outputs is not None else None,
            )
        )  # fmt: skip

    def execute_packet(
        self, request: Request, deadline_ns: int | None, execute: Callable[[], ExecutionResult | None]
    ) -> ExecutionResult | None:
        """Return `execute()`, an execution of a HAL request over the queues; None, not reported, if it was not sent."""
        observation = RequestObservation(self.observed, request, HalExecutionMode.BURST, deadline_ns)
        try:
            result = execute()
        except BadState:  # another thread executes
            raise
        except NnfmqError as error:
            observation.fail(error)
            raise
        if result is not None:
            observation.finish(result.shapes, result.timing)
        return result


def _copies(arrays: Sequence[Array]) -> Tensors:
    return tuple(CapturedTensor(array.shape, array.tobytes()) for array in arrays)
