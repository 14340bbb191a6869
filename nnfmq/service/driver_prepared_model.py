"""A prepared model: a program, the model it was made from, and the ways to execute it.

An execution has two halves. `bind` checks a request against the model and makes arrays over its memory, once; `run`
executes what was bound, any number of times. The ordinary path does both for each call; a burst binds a packet once.
Arrays keep the mappings that they look at alive, so memory may be freed while an execution uses it (BUR-21, LIFE-2).
What lies in files or in buffers of the driver's is staged, for each run anew: `arguments`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nnfmq.engines.execution import DEFAULT_RUN_OPTIONS, BoundProgram, PreparedProgram, RunOptions, run_options
from nnfmq.hal.errors import (
    ErrorStatus,
    GeneralFailure,
    MissedDeadlinePersistent,
    NnfmqError,
    OutputInsufficientSize,
    status_for_error,
)
from nnfmq.hal.timing import NO_TIMING, Timing, from_limit_field
from nnfmq.hal.types import ExecutionConfig, MeasureTiming, Model, OutputShape, Priority, Request
from nnfmq.service.device_status import ALWAYS, UNAVAILABLE, require_available
from nnfmq.service.error_translation import RECOVERABLE_ERRORS, errors_to_status
from nnfmq.service.io_binding import (
    ConstantRange,
    InputBinding,
    OutputBinding,
    Staging,
    input_array,
    needs_staging,
    output_buffer,
    require_no_constant_overlap,
)
from nnfmq.service.managed_buffers import ManagedBuffers
from nnfmq.service.memory_quota import QuotaCharge
from nnfmq.validation import validate_request

Array = NDArray[np.generic]

_YES = MeasureTiming.YES  # an attribute of an enum costs more than a record through the ring
_log = logging.getLogger("nnfmq.execution")


@dataclass(slots=True)
class ExecutionReply:
    """What an execution answers: shapes with NONE or OUTPUT_INSUFFICIENT_SIZE only, timing with NONE and if asked."""

    status: ErrorStatus
    output_shapes: tuple[OutputShape, ...] = ()
    timing: Timing = NO_TIMING
    message: str = ""
    engine_begin_ns: int = 0
    engine_end_ns: int = 0


def error_reply(error: NnfmqError) -> ExecutionReply:
    """Return the answer that stands for an error: its status and text, shapes only for an insufficient output.

    DEAD_OBJECT, which a plug-in's code may raise as well, is no status of an execution (EXE-9): this driver lives.
    """
    shapes = error.output_shapes if isinstance(error, OutputInsufficientSize) else ()
    status = status_for_error(error)
    if status is ErrorStatus.DEAD_OBJECT:
        status = ErrorStatus.GENERAL_FAILURE
    return ExecutionReply(status, tuple(shapes), message=str(error))


def _unavailable() -> ExecutionReply:
    return ExecutionReply(ErrorStatus.DEVICE_UNAVAILABLE, message=UNAVAILABLE)


def execution_limits(config: ExecutionConfig, deadline_ns: int | None) -> RunOptions:
    """Return what ends an execution early. Raises InvalidArgument for a loop timeout that is out of range."""
    # -1 stands for none in a loop timeout, as it does in a deadline.
    return run_options(deadline_ns, loop_timeout_ns=from_limit_field(config.loop_timeout_ns))


def raise_if_deadline_passed(deadline_ns: int | None) -> None:
    """Raise MissedDeadlinePersistent where the deadline has passed before anything was done (QOS-2)."""
    if deadline_ns is not None and monotonic_ns() >= deadline_ns:
        raise MissedDeadlinePersistent("the deadline had passed before the execution began")


class BoundExecution:
    """A request that was checked and bound to memory. `run` may be called again and again, one call at a time."""

    __slots__ = ("_execution", "_result", "_status_byte")

    def __init__(self, execution: BoundProgram, status_byte: memoryview) -> None:
        self._execution = execution
        self._status_byte = status_byte
        self._result = ExecutionReply(ErrorStatus.NONE)

    def run(self, measure: MeasureTiming, begin_ns: int, limits: RunOptions = DEFAULT_RUN_OPTIONS) -> ExecutionReply:
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
            return error_reply(error)
        except RECOVERABLE_ERRORS as error:
            _log.exception("a kernel failed")
            return error_reply(GeneralFailure(f"a kernel failed: {error!r}"))
        result = self._result
        result.engine_begin_ns, result.engine_end_ns = engine_begin, monotonic_ns()
        result.output_shapes, result.timing = shapes, NO_TIMING
        if measure is _YES:
            result.timing = Timing(result.engine_end_ns - engine_begin, monotonic_ns() - begin_ns)
        return result

    def fail(self) -> None:
        """It will not be run: nothing is lost by that."""


class StagedExecution:
    """As a BoundExecution, of a request with arguments in files or in buffers of the driver's."""

    __slots__ = ("_bound", "_given", "_program", "_sinks", "_sources", "_status_byte")

    def __init__(
        self,
        program: PreparedProgram,
        sources: Sequence[InputBinding],
        sinks: Sequence[OutputBinding],
        status_byte: memoryview,
    ) -> None:
        self._program = program
        self._status_byte = status_byte
        self._sources = sources
        self._sinks = sinks
        self._given: list[Any] = []  # what is bound
        self._bound: BoundExecution | None = None

    def run(self, measure: MeasureTiming, begin_ns: int, limits: RunOptions = DEFAULT_RUN_OPTIONS) -> ExecutionReply:
        """As `BoundExecution.run`; may block for a file as long as that does."""
        try:
            result = self._run(measure, begin_ns, limits)
        except NnfmqError as error:
            result = error_reply(error)
        if result.status is not ErrorStatus.NONE:
            self.fail()
        return result

    def fail(self) -> None:
        """It has failed, or will not be run: its outputs in buffers of the driver's are lost (DOM-7)."""
        for sink in self._sinks:
            sink.fail()

    def _run(self, measure: MeasureTiming, begin_ns: int, limits: RunOptions) -> ExecutionReply:
        inputs = [source.array() for source in self._sources]
        outputs = [sink.begin() for sink in self._sinks]
        result = self._bound_to(inputs, outputs).run(measure, begin_ns, limits)
        if result.status is ErrorStatus.NONE:
            for sink, shape in zip(self._sinks, result.output_shapes, strict=True):
                sink.end(shape.dimensions)
            if measure is _YES:
                result.timing = Timing(result.timing.time_on_device_ns, monotonic_ns() - begin_ns)
        return result

    def _bound_to(self, inputs: list[Any], outputs: list[Any]) -> BoundExecution:
        given = inputs + outputs
        is_same = len(given) == len(self._given) and all(a is b for a, b in zip(given, self._given, strict=True))
        if self._bound is None or not is_same:
            self._bound = BoundExecution(self._program.bind(inputs, outputs), self._status_byte)
            self._given = given
        return self._bound


@dataclass(frozen=True, slots=True)
class DriverPreparedModel:
    """A model that is ready to run. Any number of threads may execute it at once.

    `charge` is what it costs its client: off the quota when the last burst or execution has dropped the model. While
    the device is BUSY or OFFLINE, which `status_byte` says, every execution is DEVICE_UNAVAILABLE (DEV-14). Before HAL
    1.2 outputs must be fully specified: `takes_unspecified` is False. `buffers` are its client's, `device` is what
    prepared it, and `key` stands for it in the roles of buffers.
    """

    model: Model
    program: PreparedProgram
    charge: QuotaCharge | None = None
    status_byte: memoryview = ALWAYS
    takes_unspecified: bool = True
    device: str = ""
    buffers: ManagedBuffers | None = None
    constants: tuple[ConstantRange, ...] = ()
    key: object = field(default_factory=object)
    priority: int = Priority.MEDIUM

    def require_available(self) -> None:
        """Raise DeviceUnavailable while the device is BUSY or OFFLINE."""
        require_available(self.status_byte)

    def bind(self, request: Request, *, is_fenced: bool = False) -> BoundExecution | StagedExecution:
        """Check `request` and make arrays over its pools. Raises InvalidArgument that names the argument.

        Where that fails, the buffers of the driver's that are outputs of the request are uninitialized (DOM-7). The
        outputs of a fenced execution must be fully specified (FEN-7).
        """
        try:
            with errors_to_status("binding the request"):
                return self._bind(request, is_fenced)
        except NnfmqError:
            self.mark_outputs_uninitialized(request)
            raise

    def _bind(self, request: Request, is_fenced: bool) -> BoundExecution | StagedExecution:
        self.require_available()  # before anything that the request may have wrong
        allows_unspecified = self.takes_unspecified and not is_fenced
        validate_request(self.model, request, allow_unspecified_output=allows_unspecified)
        if self.constants:
            require_no_constant_overlap(self.constants, request)
        main = self.model.main
        taken = [main.operands[index] for index in main.input_indexes]
        made = [main.operands[index] for index in main.output_indexes]
        if needs_staging(request):
            staging = Staging(self.key, request, self.buffers)
            return StagedExecution(self.program, staging.sources(taken), staging.sinks(made), self.status_byte)
        sources, sinks = zip(taken, request.inputs, strict=True), zip(made, request.outputs, strict=True)
        inputs = tuple(input_array(operand, argument, request.pools) for operand, argument in sources)
        outputs = tuple(output_buffer(i, *sink, request.pools) for i, sink in enumerate(sinks))
        return BoundExecution(self.program.bind(inputs, outputs), self.status_byte)

    @contextmanager
    def uninitialize_outputs_on_error(self, request: Request) -> Iterator[None]:
        """Lose the outputs of `request` in the driver's buffers where an error keeps it from being executed (DOM-7)."""
        try:
            yield
        except NnfmqError:
            self.mark_outputs_uninitialized(request)
            raise

    def mark_outputs_uninitialized(self, request: Request) -> None:
        """An execution of `request` failed before it was bound: its outputs in buffers of the driver's are lost."""
        if self.buffers is not None:
            self.buffers.mark_outputs_uninitialized(request)

    def execute_synchronously(
        self,
        request: Request,
        config: ExecutionConfig = ExecutionConfig(),  # noqa: B008  frozen
        deadline_ns: int | None = None,
        begin_ns: int | None = None,
    ) -> ExecutionReply:
        """Execute `request` and return when it is done (executeSynchronously). Never raises NnfmqError.

        `begin_ns` is when the driver saw the request, where that was before the call (TIM-6).
        """
        begin_ns = monotonic_ns() if begin_ns is None else begin_ns
        try:
            limits = execution_limits(config, deadline_ns)
            bound = self.bind(request)
            raise_if_deadline_passed(deadline_ns)
        except NnfmqError as error:
            self.mark_outputs_uninitialized(request)
            return error_reply(error)
        with np.errstate(all="ignore"):
            return bound.run(config.measure, begin_ns, limits)
