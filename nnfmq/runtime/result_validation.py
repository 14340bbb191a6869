"""What a driver answers to an execution is judged before anything of it is used (VAL-7), on every path.

`validate_result` checks an answer against the model and the request; a `ResultValidator` has what is needed for that,
and tells the driver's buffers among the outputs what they hold. Bursts call the former alone.

The application trusts no driver: an answer that no honest one gives is a ProtocolError, which is a GENERAL_FAILURE to
whoever looks at the status. Shapes and times beside an error must not be, but nobody looks at them. Times are compared
here and not by `validation`, for whose import every application would wait.

    SHP-2 success: a shape for every output, or none at all if all are known; each buffer sufficed
    SHP-4 OUTPUT_INSUFFICIENT_SIZE: a shape for every output, and one that did not suffice at least
    TIM-3 times only if they were asked for and all went well, -1 at least
    TIM-4 the time in the driver includes the time on the device
    TIM-7 of a fenced execution, the time from the launch on includes that from the last fence on
    EXE-9 a fenced execution has no output that is too small, and FEN-7 none whose shape is unknown
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nnfmq.hal.errors import ErrorStatus, OutputInsufficientSize, ProtocolError, error_for_status
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.timing import NO_TIME, NO_TIMING, Timing
from nnfmq.hal.types import BufferToken, ExecutionConfig, MeasureTiming, OutputShape, Request, RequestArgument
from nnfmq.runtime.connection import Connection
from nnfmq.runtime.execution_result import ExecutionResult
from nnfmq.runtime.managed_buffer import Buffer
from nnfmq.runtime.tensor_layout import check_fits, check_reported_shapes, is_open
from nnfmq.serialize import messages


class ResultValidator:
    """What is known here of an execution that is asked for, by which its answer is judged; for one run after another.

    It keeps none of the request's memories. `infos` are the model's outputs.
    """

    def __init__(
        self, connection: Connection, infos: Sequence[TensorInfo], request: Request, config: ExecutionConfig
    ) -> None:
        self._infos = infos
        self._places = request.outputs
        self._is_measured = config.measure is MeasureTiming.YES
        self._buffers = _buffers_of(connection, request)

    def begin(self) -> None:
        """The driver is asked now: nobody knows what the outputs hold, until an answer says so."""
        for _, buffer in self._buffers:
            buffer.begin_write(self)

    def outcome(self, answer: messages.Executed | messages.ExecutionFinished) -> ExecutionResult:
        """Return what an answer says, or raise the error that its status stands for.

        Raises ProtocolError for an answer that no honest driver gives.
        """
        shapes = messages.shapes_from_data(answer.shapes)
        timing = Timing(answer.time_on_device_ns, answer.time_in_driver_ns)
        validate_result(self._infos, self._places, answer.status, shapes, timing, self._is_measured)
        if answer.status is ErrorStatus.OUTPUT_INSUFFICIENT_SIZE:
            raise OutputInsufficientSize(answer.message, shapes)
        if answer.status is not ErrorStatus.NONE:
            raise error_for_status(answer.status, answer.message)
        self._written([shape.dimensions for shape in shapes])
        return ExecutionResult(shapes, timing)

    def launched(self) -> None:
        """A fenced execution was launched: its outputs will have the shapes that were asked for.

        Raises ProtocolError where the driver has launched what has none.
        """
        wanted = _asked(self._infos, self._places)
        unknown = [
            info.name
            for info, place in zip(wanted, self._places, strict=True)
            if is_open(info) and not place.has_no_value
        ]
        if unknown:
            raise ProtocolError(f"FEN-7: the driver has launched an execution whose outputs {unknown} have no shape")
        self._written([])

    def fenced_end(self, answer: messages.FencedExecutionInfo, is_over: bool) -> tuple[Timing, Timing]:
        """Return the times of a fenced execution: from its launch on, and from the last fence on.

        Raises the error that its status stands for, which means a failure if it `is_over`, ProtocolError for an answer
        that no honest driver gives.
        """
        if is_over and answer.status is not ErrorStatus.NONE:
            self._failed()
        times = fenced_times(answer)
        for timing in times:
            _check_timing(timing, self._is_measured)
        launched, fenced = (timing.time_in_driver_ns for timing in times)
        if launched != NO_TIME and fenced > launched:
            raise ProtocolError(f"TIM-7: the driver states {fenced} ns from the last fence on, of {launched} in all")
        return times

    def _written(self, stated: Sequence[tuple[int, ...]]) -> None:
        shapes = stated or [info.shape for info in _asked(self._infos, self._places)]
        for index, buffer in self._buffers:
            buffer.end_write(self, shapes[index])

    def _failed(self) -> None:
        for _, buffer in self._buffers:
            buffer.end_write(self, None)


def fenced_times(answer: messages.FencedExecutionInfo) -> tuple[Timing, Timing]:
    """Return the two times of an answer, or raise the error that its status stands for."""
    raise_if_fenced_failed(answer)
    launched = Timing(answer.launched_on_device_ns, answer.launched_in_driver_ns)
    return launched, Timing(answer.fenced_on_device_ns, answer.fenced_in_driver_ns)


def raise_if_fenced_failed(answer: messages.FencedLaunched | messages.FencedExecutionInfo) -> None:
    """Raise the error that the status of an answer about a fenced execution stands for, if it is one."""
    if answer.status is ErrorStatus.OUTPUT_INSUFFICIENT_SIZE:
        raise ProtocolError("EXE-9: the driver says that an output of a fenced execution is too small")
    if answer.status is not ErrorStatus.NONE:
        raise error_for_status(answer.status, answer.message)


def _buffers_of(connection: Connection, request: Request) -> list[tuple[int, Buffer]]:
    """Return the buffers that are outputs of a request, with the outputs' numbers."""
    found = []
    for number, place in enumerate(request.outputs):
        index = place.location.pool_index
        pool = request.pools[index] if not place.has_no_value and index < len(request.pools) else None
        buffer = connection.buffers.get(pool.token) if isinstance(pool, BufferToken) else None
        if buffer is not None:
            found.append((number, buffer))
    return found


def validate_result(
    infos: Sequence[TensorInfo],
    outputs: Sequence[RequestArgument],
    status: ErrorStatus,
    shapes: Sequence[OutputShape],
    timing: Timing,
    is_measured: bool,
) -> None:
    """Raise ProtocolError where a driver cannot have meant its answer.

    `infos` are the model's outputs, `outputs` where the request has them.
    """
    if status is ErrorStatus.NONE:
        _check_success(infos, outputs, shapes)
        _check_timing(timing, is_measured)
    elif status is ErrorStatus.OUTPUT_INSUFFICIENT_SIZE:
        check_reported_shapes(_asked(infos, outputs), [shape.dimensions for shape in shapes])
        if all(shape.is_sufficient for shape in shapes):
            raise ProtocolError("SHP-4: the driver says that an output is too small, and that each one suffices")


def _check_success(
    infos: Sequence[TensorInfo], outputs: Sequence[RequestArgument], shapes: Sequence[OutputShape]
) -> None:
    wanted = _asked(infos, outputs)
    if not shapes:
        unknown = [info.name for info in wanted if is_open(info)]
        if unknown:
            raise ProtocolError(f"SHP-2: the driver states no shape for the outputs {unknown}, which have none")
        return
    stated = [shape.dimensions for shape in shapes]
    check_reported_shapes(wanted, stated)
    # A buffer of the driver's has no length here: how large it is, is the driver's own affair.
    given = [triple for triple in zip(wanted, outputs, stated, strict=True) if triple[1].location.length]
    check_fits([info for info, _, _ in given], [place for _, place, _ in given], [shape for _, _, shape in given])
    if not all(shape.is_sufficient for shape in shapes):
        raise ProtocolError("SHP-2: the driver says that all went well, and that an output did not suffice")


def _asked(infos: Sequence[TensorInfo], outputs: Sequence[RequestArgument]) -> list[TensorInfo]:
    """Return the outputs with what the request fills in of their dimensions."""
    if len(outputs) != len(infos):
        raise ProtocolError(f"the driver executed {len(outputs)} outputs of a model that has {len(infos)}")
    return [_filled_in(info, place.dimensions) for info, place in zip(infos, outputs, strict=True)]


def _filled_in(info: TensorInfo, given: tuple[int, ...]) -> TensorInfo:
    if not given:
        return info
    if not info.shape:
        return replace(info, shape=given)
    if len(given) != len(info.shape):
        raise ProtocolError(f"the driver executed output {info.name!r} of shape {info.shape} with shape {given}")
    return replace(info, shape=tuple(known or asked for known, asked in zip(info.shape, given, strict=True)))


def _check_timing(timing: Timing, is_measured: bool) -> None:
    if timing == NO_TIMING:
        return
    if not is_measured:
        raise ProtocolError(f"TIM-3: the driver states {timing}, which was not asked for")
    device, driver = timing.time_on_device_ns, timing.time_in_driver_ns
    is_ordered = NO_TIME in (device, driver) or device <= driver
    if min(device, driver) < NO_TIME or not is_ordered:
        raise ProtocolError(f"TIM-4: the driver states impossible times: {timing}")
