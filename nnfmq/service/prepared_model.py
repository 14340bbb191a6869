"""A prepared model: a program, the model it was made from, and the ways to execute it.

An execution has two halves. `bind` checks a request against the model and makes arrays over its memory, once; `run`
executes what was bound, any number of times. The ordinary path does both for each call; a burst binds a packet once.
Arrays keep the mappings that they look at alive, so memory may be freed while an execution uses it (BUR-21, LIFE-2).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nnfmq.engines.execution import NO_LIMITS, Bindable, Limits, Runnable, limits_of
from nnfmq.hal.errors import (
    DeviceUnavailable,
    ErrorStatus,
    GeneralFailure,
    InvalidArgument,
    NnfmqError,
    OutputInsufficientSize,
)
from nnfmq.hal.types import (
    NO_TIMING,
    DataLocation,
    ExecutionConfig,
    MeasureTiming,
    Model,
    Operand,
    OutputShape,
    Pool,
    Request,
    RequestArgument,
    Timing,
    operand_bytes,
)
from nnfmq.operations.shapes import require_countable
from nnfmq.operations.signature import NUMPY_TYPES
from nnfmq.service.accounts import Charge
from nnfmq.service.faults import FAULTS
from nnfmq.service.wire import deadline_of
from nnfmq.validation import validate_request

Array = NDArray[np.generic]

_YES = MeasureTiming.YES  # an attribute of an enum costs more than a record through the ring
_UNAVAILABLE = "the device is busy or offline"
_AVAILABLE = memoryview(bytes(1))
_log = logging.getLogger("nnfmq.execution")


@dataclass(slots=True)
class ExecutionResult:
    """What an execution answers: shapes with NONE or OUTPUT_INSUFFICIENT_SIZE only, timing with NONE and if asked."""

    status: ErrorStatus
    output_shapes: tuple[OutputShape, ...] = ()
    timing: Timing = NO_TIMING
    message: str = ""
    engine_begin_ns: int = 0
    engine_end_ns: int = 0


def result_of_error(error: NnfmqError) -> ExecutionResult:
    """Return the answer that stands for an error: its status and text, shapes only for an insufficient output."""
    shapes = error.output_shapes if isinstance(error, OutputInsufficientSize) else ()
    return ExecutionResult(error.status, tuple(shapes), message=str(error))


def _unavailable() -> ExecutionResult:
    return ExecutionResult(ErrorStatus.DEVICE_UNAVAILABLE, message=_UNAVAILABLE)


def _bytes_at(pools: Sequence[Pool], location: DataLocation) -> memoryview:
    return pools[location.pool_index].view[location.offset : location.offset + location.length]


def _dimensions(operand: Operand, argument: RequestArgument) -> tuple[int, ...]:
    """Return the request's dimensions, with the model's where the request leaves them open.

    Raises GeneralFailure where they are more than an array can have.
    """
    require_countable(argument.dimensions or operand.dimensions, "an argument")
    if not argument.dimensions or not operand.dimensions:
        return argument.dimensions or operand.dimensions
    return tuple(given or known for given, known in zip(argument.dimensions, operand.dimensions, strict=True))


def _input_array(operand: Operand, argument: RequestArgument, pools: Sequence[Pool]) -> Array | None:
    if argument.has_no_value:
        return None
    array = np.frombuffer(_bytes_at(pools, argument.location), NUMPY_TYPES[operand.type])
    return array.reshape(_dimensions(operand, argument))


def _output_buffer(index: int, operand: Operand, argument: RequestArgument, pools: Sequence[Pool]) -> Any:
    """Return where an output goes: an array where its shape is known, which is the engine's short way; else bytes."""
    if argument.has_no_value:
        return None
    data = _bytes_at(pools, argument.location)
    if data.readonly:
        raise InvalidArgument(f"output {index} lies in pool {argument.location.pool_index}, which is sealed read-only")
    dimensions = _dimensions(operand, argument)
    if operand_bytes(operand, dimensions) != len(data) or not dimensions:
        return data
    return np.frombuffer(data, NUMPY_TYPES[operand.type]).reshape(dimensions)


class BoundExecution:
    """A request that was checked and bound to memory. `run` may be called again and again, one call at a time."""

    __slots__ = ("_execution", "_result", "_status_byte")

    def __init__(self, execution: Runnable, status_byte: memoryview) -> None:
        self._execution = execution
        self._status_byte = status_byte
        self._result = ExecutionResult(ErrorStatus.NONE)

    def run(self, measure: MeasureTiming, begin_ns: int, limits: Limits = NO_LIMITS) -> ExecutionResult:
        """Execute once; `begin_ns` is when the driver saw the request (time in driver). Never raises NnfmqError.

        The caller has silenced NumPy's warnings, which costs more than a small model; for the same reason the result of
        a success is the same object each time.
        """
        if self._status_byte[0]:
            return _unavailable()
        engine_begin = monotonic_ns()
        try:
            shapes = self._execution.run(limits)
        except NnfmqError as error:
            return result_of_error(error)
        except FAULTS as error:
            _log.exception("a kernel failed")
            return result_of_error(GeneralFailure(f"a kernel failed: {error!r}"))
        result = self._result
        result.engine_begin_ns, result.engine_end_ns = engine_begin, monotonic_ns()
        result.output_shapes, result.timing = shapes, NO_TIMING
        if measure is _YES:
            result.timing = Timing(result.engine_end_ns - engine_begin, monotonic_ns() - begin_ns)
        return result


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model that is ready to run. Any number of threads may execute it at once.

    `charge` is what it costs its client: off the account when the last burst or execution has dropped the model. While
    the device is BUSY or OFFLINE, which `status_byte` says, every execution is DEVICE_UNAVAILABLE (DEV-14). Before HAL
    1.2 outputs must be fully specified: `takes_unspecified` is False.
    """

    model: Model
    program: Bindable
    charge: Charge | None = None
    status_byte: memoryview = _AVAILABLE
    takes_unspecified: bool = True

    def require_available(self) -> None:
        """Raise DeviceUnavailable while the device is BUSY or OFFLINE."""
        if self.status_byte[0]:
            raise DeviceUnavailable(_UNAVAILABLE)

    def bind(self, request: Request) -> BoundExecution:
        """Check `request` and make arrays over its pools. Raises InvalidArgument that names the argument."""
        self.require_available()  # before anything that the request may have wrong
        validate_request(self.model, request, allow_unspecified_output=self.takes_unspecified)
        main = self.model.main
        sources = zip([main.operands[index] for index in main.input_indexes], request.inputs, strict=True)
        sinks = zip([main.operands[index] for index in main.output_indexes], request.outputs, strict=True)
        inputs = tuple(_input_array(operand, argument, request.pools) for operand, argument in sources)
        outputs = tuple(_output_buffer(i, *sink, request.pools) for i, sink in enumerate(sinks))
        return BoundExecution(self.program.bind(inputs, outputs), self.status_byte)

    def execute_synchronously(
        self,
        request: Request,
        config: ExecutionConfig = ExecutionConfig(),  # noqa: B008  frozen
        deadline_ns: int | None = None,
        begin_ns: int | None = None,
    ) -> ExecutionResult:
        """Execute `request` and return when it is done (executeSynchronously). Never raises NnfmqError.

        `begin_ns` is when the driver saw the request, where that was before the call (TIM-6).
        """
        begin_ns = monotonic_ns() if begin_ns is None else begin_ns
        try:
            # -1 stands for none in a loop timeout, as it does in a deadline.
            limits = limits_of(deadline_ns, loop_timeout_ns=deadline_of(config.loop_timeout_ns))
            bound = self.bind(request)
        except NnfmqError as error:
            return result_of_error(error)
        with np.errstate(all="ignore"):
            return bound.run(config.measure, begin_ns, limits)
