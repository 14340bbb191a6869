"""Requests of every execution mode: their values on the wire, their run, and the validation of replies."""

from __future__ import annotations

import logging
from collections.abc import Container, Sequence
from time import monotonic_ns
from typing import TYPE_CHECKING, cast

from msgspec.structs import replace

from nnfmq.base.verbose_log import vlog
from nnfmq.client.connection.connection import Connection
from nnfmq.client.model.arrays import ExecutionResult, check_fits, check_reported_shapes
from nnfmq.client.model.buffers import OutputBuffers
from nnfmq.client.model.handle import ModelHandle, ModelLocation
from nnfmq.hal.errors import ErrorStatus, InvalidArgument, OutputInsufficientSize, ProtocolError, error_for_status
from nnfmq.hal.extensions import extension_prefix
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.timing import NO_TIME, NO_TIMING, Timing, from_seconds, to_limit_field
from nnfmq.hal.types import (
    BufferToken,
    ExecutionConfig,
    ExtensionNameAndPrefix,
    HalExecutionMode,
    LoopTimeoutDurationNs,
    MeasureTiming,
    OutputShape,
    Pool,
    Request,
    RequestArgument,
    SharedPool,
    TokenValuePair,
)
from nnfmq.serialize import messages

if TYPE_CHECKING:
    from nnfmq.client.observation import RequestObservation
    from nnfmq.queue import MessageQueue

__all__ = [
    "RequestRun",
    "ResultValidator",
    "count_call",
    "fenced_times",
    "make_execution_config",
    "memory_fds",
    "raise_if_fenced_failed",
    "require_supported_hints",
    "to_wire_config",
    "to_wire_deadline",
    "to_wire_descriptor",
    "validate_result",
]


# ----------------------------------------------------------------------------------------------------------------------
# Validation of a driver's reply to an execution, in every execution mode, before any of it is used (VAL-7).
#
# The driver is not trusted: a reply that violates the HAL's contract raises ProtocolError, whose status is
# GENERAL_FAILURE. Shapes and times that come with an error status are not checked unless they are used.
#
#     SHP-2  Success: one shape for each output, or none at all if all are known; every output buffer was large enough.
#     SHP-4  OUTPUT_INSUFFICIENT_SIZE: one shape for each output, of which at least one was too large for its buffer.
#     TIM-3  Times only if measuring was requested and the execution succeeded; -1 or more.
#     TIM-4  The time in the driver includes the time on the device.
#     TIM-7  Fenced execution: the time from the launch includes the time from the last fence.
#     EXE-9  A fenced execution never replies OUTPUT_INSUFFICIENT_SIZE.
#     FEN-7  A fenced execution has no output of unknown shape.


Shape = tuple[int, ...]


class ResultValidator:
    """Validates driver replies to one request, for any number of executions.

    Keeps no reference to the request's memory pools. `outputs` are the model's outputs; the dimensions in the request
    replace their unknown ones.
    """

    def __init__(self, outputs: Sequence[TensorInfo], request: Request, config: ExecutionConfig) -> None:
        self._outputs = outputs
        self._arguments = request.outputs
        self._is_measured = config.measure is MeasureTiming.YES

    def validate(self, reply: messages.Executed | messages.ExecutionFinished) -> ExecutionResult:
        """Return the result that a reply contains.

        Raises:
            ProtocolError: If the reply is invalid.
            NnfmqError: The error of the reply's status, unless that is NONE.
        """
        shapes = messages.shapes_from_data(reply.shapes)
        timing = Timing(reply.time_on_device_ns, reply.time_in_driver_ns)
        validate_result(self._outputs, self._arguments, reply.status, shapes, timing, self._is_measured)
        if reply.status is ErrorStatus.OUTPUT_INSUFFICIENT_SIZE:
            raise OutputInsufficientSize(reply.message, shapes)
        if reply.status is not ErrorStatus.NONE:
            raise error_for_status(reply.status, reply.message)
        return ExecutionResult(shapes, timing)

    def expected_shapes(self) -> list[Shape]:
        """Return the shapes of the outputs as the model and the request specify them, 0 for an unknown dimension."""
        return [info.shape for info in _expected_outputs(self._outputs, self._arguments)]

    def validate_launch(self) -> None:
        """Raise ProtocolError if the driver has launched a fenced execution with an output of unknown shape."""
        expected = _expected_outputs(self._outputs, self._arguments)
        unknown = [
            info.name
            for info, argument in zip(expected, self._arguments, strict=True)
            if info.has_unknown_shape and not argument.has_no_value
        ]
        if unknown:
            raise ProtocolError(f"the driver launched an execution with outputs of unknown shape: {unknown} (FEN-7)")

    def validate_fenced(self, reply: messages.FencedExecutionInfo) -> tuple[Timing, Timing]:
        """Return the times of a fenced execution: from its launch, and from the last fence.

        Raises:
            ProtocolError: If the reply is invalid.
            NnfmqError: The error of the reply's status, unless that is NONE.
        """
        times = fenced_times(reply)
        for timing in times:
            _check_timing(timing, self._is_measured)
        launched_ns, fenced_ns = (timing.time_in_driver_ns for timing in times)
        if launched_ns != NO_TIME and fenced_ns > launched_ns:
            raise ProtocolError(
                f"the driver reports {fenced_ns} ns from the last fence, but {launched_ns} ns in total (TIM-7)"
            )
        return times


def fenced_times(reply: messages.FencedExecutionInfo) -> tuple[Timing, Timing]:
    """Return the times from the launch and from the last fence, unchecked. Raises as `raise_if_fenced_failed`."""
    raise_if_fenced_failed(reply)
    launched = Timing(reply.launched_on_device_ns, reply.launched_in_driver_ns)
    return launched, Timing(reply.fenced_on_device_ns, reply.fenced_in_driver_ns)


def raise_if_fenced_failed(reply: messages.FencedLaunched | messages.FencedExecutionInfo) -> None:
    """Raise the error of the status of a reply about a fenced execution, unless that is NONE."""
    if reply.status is ErrorStatus.OUTPUT_INSUFFICIENT_SIZE:
        raise ProtocolError("the driver reports that an output of a fenced execution is too small (EXE-9)")
    if reply.status is not ErrorStatus.NONE:
        raise error_for_status(reply.status, reply.message)


def validate_result(
    outputs: Sequence[TensorInfo],
    arguments: Sequence[RequestArgument],
    status: ErrorStatus,
    shapes: Sequence[OutputShape],
    timing: Timing,
    is_measured: bool,
) -> None:
    """Raise ProtocolError if a driver's result violates the HAL's contract.

    Args:
        outputs: The model's outputs.
        arguments: The request's outputs.
        status: The status of the execution.
        shapes: The reported shapes.
        timing: The reported times.
        is_measured: Whether the request asked for times.
    """
    if status is ErrorStatus.NONE:
        _check_success_shapes(outputs, arguments, shapes)
        _check_timing(timing, is_measured)
    elif status is ErrorStatus.OUTPUT_INSUFFICIENT_SIZE:
        check_reported_shapes(_expected_outputs(outputs, arguments), [shape.dimensions for shape in shapes])
        if all(shape.is_sufficient for shape in shapes):
            raise ProtocolError("the driver reports that an output is too small, and that each is sufficient (SHP-4)")


def _check_success_shapes(
    outputs: Sequence[TensorInfo], arguments: Sequence[RequestArgument], shapes: Sequence[OutputShape]
) -> None:
    expected = _expected_outputs(outputs, arguments)
    if not shapes:
        unknown = [info.name for info in expected if info.has_unknown_shape]
        if unknown:
            raise ProtocolError(f"the driver reports no shapes, but those of the outputs {unknown} are unknown (SHP-2)")
        return
    reported = [shape.dimensions for shape in shapes]
    check_reported_shapes(expected, reported)
    # The argument of a managed buffer has the length 0: only the driver knows the buffer's size.
    sized = [triple for triple in zip(expected, arguments, reported, strict=True) if triple[1].location.length]
    check_fits([info for info, _, _ in sized], [argument for _, argument, _ in sized], [shape for _, _, shape in sized])
    if not all(shape.is_sufficient for shape in shapes):
        raise ProtocolError("the driver reports success, and that an output was too small (SHP-2)")


def _expected_outputs(outputs: Sequence[TensorInfo], arguments: Sequence[RequestArgument]) -> list[TensorInfo]:
    """Return the outputs with unknown dimensions replaced by the request's."""
    if len(arguments) != len(outputs):
        raise ProtocolError(f"the driver executed {len(arguments)} outputs of a model that has {len(outputs)}")
    return [_merge_dimensions(info, argument.dimensions) for info, argument in zip(outputs, arguments, strict=True)]


def _merge_dimensions(info: TensorInfo, dimensions: Shape) -> TensorInfo:
    if not dimensions:
        return info
    if not info.shape:
        return replace(info, shape=dimensions)
    if len(dimensions) != len(info.shape):
        raise ProtocolError(f"the driver executed output {info.name!r} of shape {info.shape} with shape {dimensions}")
    return replace(info, shape=tuple(known or wanted for known, wanted in zip(info.shape, dimensions, strict=True)))


def _check_timing(timing: Timing, is_measured: bool) -> None:
    if timing == NO_TIMING:
        return
    if not is_measured:
        raise ProtocolError(f"the driver reports {timing}, which was not requested (TIM-3)")
    device_ns, driver_ns = timing.time_on_device_ns, timing.time_in_driver_ns
    is_ordered = NO_TIME in (device_ns, driver_ns) or device_ns <= driver_ns
    if min(device_ns, driver_ns) < NO_TIME or not is_ordered:
        raise ProtocolError(f"the driver reports invalid times: {timing} (TIM-4)")


# ----------------------------------------------------------------------------------------------------------------------
# RequestRun: one request, as it is executed: validates replies and records what the managed buffers contain.


class RequestRun:
    """The client's state of one request, for any number of executions.

    Call `begin` before a request is sent, and one of the other methods with each reply. Keeps a reference to the
    request, and thus to its memory pools, only if the model is observed.
    """

    def __init__(self, model: ModelHandle, request: Request, config: ExecutionConfig) -> None:
        self._validator = ResultValidator(model.outputs, request, config)
        self._buffers = OutputBuffers(model.connection, request)
        self._device = model.device
        self._observed = model.observed
        self._request = None if model.observed is None else request

    def begin(self, mode: HalExecutionMode, deadline_ns: int | None) -> RequestObservation | None:
        """Mark the content of the output buffers unknown until a reply reports it.

        Returns the observation of this execution, to which the caller reports its end; None if nothing observes it.
        """
        self._buffers.begin_write()
        vlog("execution", "%s execution on %s", mode.name, self._device)
        if self._observed is None or self._request is None:
            return None
        return self._observed.begin(self._request, mode, deadline_ns)

    def discard_outputs(self) -> None:
        """Mark the content of the output buffers unknown: the driver has rejected the request (DOM-7)."""
        self._buffers.begin_write()

    def finish(self, reply: messages.Executed | messages.ExecutionFinished) -> ExecutionResult:
        """Return the validated result of a synchronous or asynchronous execution.

        Raises:
            ProtocolError: If the reply is invalid.
            NnfmqError: The error of the reply's status, unless that is NONE.
        """
        result = self._validator.validate(reply)
        reported = [shape.dimensions for shape in result.shapes]
        self._buffers.end_write(reported or self._validator.expected_shapes())
        return result

    def finish_launch(self) -> None:
        """Record that a fenced execution was launched: its outputs will have the expected shapes.

        Raises:
            ProtocolError: If an output's shape is unknown.
        """
        self._validator.validate_launch()
        self._buffers.end_write(self._validator.expected_shapes())

    def finish_fenced(self, reply: messages.FencedExecutionInfo, is_done: bool) -> tuple[Timing, Timing]:
        """Return the validated times of a fenced execution: from its launch, and from the last fence.

        `is_done` says that the fence is no longer active: an error status then means that the execution failed.

        Raises:
            ProtocolError: If the reply is invalid.
            NnfmqError: The error of the reply's status, unless that is NONE.
        """
        if is_done and reply.status is not ErrorStatus.NONE:
            self._buffers.end_write(None)
        return self._validator.validate_fenced(reply)


def count_call(location: ModelLocation, begin_ns: int, driver_ns: int = NO_TIME) -> None:
    """Count an execution over the control channel that was begun at `begin_ns` and ends now, as its client sees it.

    `driver_ns` is the driver's part of the time, -1 if it is unknown: it may be anything.
    """
    if location.calls is not None:
        client_ns = monotonic_ns() - begin_ns
        location.calls.add(client_ns, NO_TIME if driver_ns == NO_TIME else max(client_ns - driver_ns, 0))


# ----------------------------------------------------------------------------------------------------------------------
# Conversion of execution options, queues and memories to the values that messages carry, for all execution modes.


_log = logging.getLogger("nnfmq.client")


def to_wire_deadline(connection: Connection, deadline_ns: int | None) -> int:
    """Return a deadline as messages carry it: no limit also if the interface version has no deadlines.

    With such a version the deadline only ends the client's wait.
    """
    return to_limit_field(deadline_ns if connection.has_deadlines else None)


def make_execution_config(measure: bool, loop_timeout: float | None) -> ExecutionConfig:
    """Return the configuration of an execution.

    `loop_timeout` is in seconds; None = the HAL's default. One above the HAL's maximum is reduced to it, with a warning
    (CF-5).

    Raises:
        InvalidArgument: If `loop_timeout` is negative or NaN.
    """
    measure_timing = MeasureTiming.YES if measure else MeasureTiming.NO
    loop_timeout_ns = from_seconds(loop_timeout, "a loop timeout")
    if loop_timeout_ns is None:
        return ExecutionConfig(measure_timing)
    maximum_ns = int(LoopTimeoutDurationNs.MAXIMUM)
    if loop_timeout_ns > maximum_ns:
        _log.warning("a loop timeout of %g s is reduced to the maximum of %g s", loop_timeout, maximum_ns / 1e9)
        loop_timeout_ns = maximum_ns
    return ExecutionConfig(measure_timing, loop_timeout_ns)


def to_wire_config(model: ModelHandle, config: ExecutionConfig) -> messages.ConfigData:
    """Return the configuration of an execution of `model` as messages carry it.

    Raises:
        InvalidArgument: If a hint is one of an extension that the model's device does not support.
    """
    require_supported_hints(model.device, model.extensions, config.hints, config.extensions)
    return messages.config_to_data(config)


def require_supported_hints(
    device: str, supported: Container[str], hints: Sequence[TokenValuePair], named: Sequence[ExtensionNameAndPrefix]
) -> None:
    """Require that `device` supports the extensions of `hints` (EXT-6). The driver validates everything else.

    The driver cannot check this, because the HAL makes it ignore hints that it does not know (PREP-10).

    Raises:
        InvalidArgument: If it does not support one.
    """
    if not hints:
        return
    prefixes = {extension_prefix(hint.token) for hint in hints}
    for extension in named:
        if extension.prefix in prefixes and extension.name not in supported:
            raise InvalidArgument(f"a hint of extension {extension.name!r}, which device {device} lacks (EXT-6)")


def to_wire_descriptor(queue: MessageQueue) -> messages.MQDescriptorData:
    """Return a queue's descriptor as messages carry it. The fd of its memory is sent beside the message."""
    descriptor = queue.descriptor
    grantors = tuple(messages.GrantorData(g.fd_index, g.offset, g.extent) for g in descriptor.grantors)
    return messages.MQDescriptorData(grantors, descriptor.quantum, descriptor.flags)


def memory_fds(pools: Sequence[Pool | BufferToken]) -> list[int]:
    """Return the fds of the memories among `pools`, in order. Borrows them from the memories.

    `messages.memory_to_data` has checked that each pool has one.
    """
    return [cast(SharedPool, pool).fileno() for pool in pools if not isinstance(pool, BufferToken)]
