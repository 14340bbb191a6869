"""RequestObservation: one execution of an observed model, from its call to its end.

A model that nothing observed when it was prepared has no `ObservedModel`, and this module is not imported for it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from nnfmq.client.model.arrays import callers_shape, size_bytes
from nnfmq.hal.errors import ErrorStatus, InvalidArgument, NnfmqError
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.timing import NO_TIME, NO_TIMING, Timing
from nnfmq.hal.types import BufferToken, HalExecutionMode, OutputShape, Pool, Request, RequestArgument
from nnfmq.observe.executions import CapturedTensor, ModelObserver, ObservedExecution

__all__ = ["ObservedModel", "RequestObservation", "Tensors"]

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
