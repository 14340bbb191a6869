"""The driver's prepared model: a compiled program, the model that it was compiled from, and how requests run on it.

An execution has two steps. `DriverPreparedModel.bind` validates a request and creates arrays over its memory; `run`
executes what was bound, any number of times. A synchronous call does both; a burst binds each distinct packet once.
Arrays keep their mappings alive, so memory may be freed while an execution uses it (BUR-21, LIFE-2).
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from time import monotonic_ns
from typing import Any, Protocol

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from nnfmq.base.logs import rate_limited
from nnfmq.driver.devices.configuration import ALWAYS_AVAILABLE, UNAVAILABLE_MESSAGE, require_available
from nnfmq.driver.execution.binding import (
    ConstantRange,
    InputBinding,
    OutputBinding,
    RequestBinder,
    input_array,
    needs_staging,
    output_buffer,
    require_no_constant_overlap,
)
from nnfmq.driver.execution.order import LONG_NS, ClientOrder, RunTimes
from nnfmq.driver.memory.buffers import ManagedBuffers
from nnfmq.driver.memory.quota import QuotaCharge
from nnfmq.driver.session.error_translation import RECOVERABLE_ERRORS, errors_to_status
from nnfmq.engines.compiled.thread_pool import default_thread_pool
from nnfmq.engines.execution import DEFAULT_RUN_OPTIONS, BoundProgram, PreparedProgram, RunOptions, run_options
from nnfmq.hal.errors import (
    DeadObject,
    DeviceUnavailable,
    ErrorStatus,
    GeneralFailure,
    MissedDeadlinePersistent,
    NnfmqError,
    OutputInsufficientSize,
    status_for_error,
)
from nnfmq.hal.preparation import ProgramKind
from nnfmq.hal.timing import NO_TIMING, Timing, from_limit_field
from nnfmq.hal.types import ExecutionConfig, MeasureTiming, Model, OutputShape, Priority, Request
from nnfmq.observe.recorder_core import ModelRecorder
from nnfmq.observe.statistics_writer import UNPUBLISHED
from nnfmq.observe.trace_points import TRACING
from nnfmq.validation import validate_request

_log = rate_limited("nnfmq.execution")


class ExecutionReply(Struct, frozen=True):
    """Result of an execution, as sent to the client.

    Attributes:
        status: The HAL status.
        output_shapes: One shape for each output if the status is NONE or OUTPUT_INSUFFICIENT_SIZE, else empty.
        timing: The measured times if the status is NONE and the client asked for them, else NO_TIMING.
        message: The text of the error.
        driver_ns: The time from receiving the request to the result, -1 after an error.
    """

    status: ErrorStatus
    output_shapes: tuple[OutputShape, ...] = ()
    timing: Timing = NO_TIMING
    message: str = ""
    driver_ns: int = -1


def error_reply(error: NnfmqError) -> ExecutionReply:
    """Return the reply that reports `error`, with the output shapes of an OutputInsufficientSize."""
    shapes = error.output_shapes if isinstance(error, OutputInsufficientSize) else ()
    return ExecutionReply(status_for_error(error), tuple(shapes), message=str(error))


def execution_options(config: ExecutionConfig, deadline_ns: int | None) -> RunOptions:
    """Return the engine's options for one run.

    Raises:
        InvalidArgument: If the loop timeout is out of range.
    """
    # On the wire, -1 stands for "none" in a loop timeout as it does in a deadline.
    return run_options(deadline_ns, loop_timeout_ns=from_limit_field(config.loop_timeout_ns))


def raise_if_deadline_passed(deadline_ns: int | None) -> None:
    """Check the deadline before an execution begins (QOS-2).

    Raises:
        MissedDeadlinePersistent: If the deadline has passed.
    """
    if deadline_ns is not None and monotonic_ns() >= deadline_ns:
        raise MissedDeadlinePersistent("the deadline had passed before the execution began")


class BoundExecution(Protocol):
    """A validated request, bound to its memory. Can run any number of times, one run at a time.

    `engine_begin_ns` and `engine_end_ns` are the times at which the engine began and ended the last successful run.
    `recorder` counts its runs: whoever calls `run` adds to it.
    """

    @property
    def recorder(self) -> ModelRecorder: ...  # noqa: D102  documented above

    @property
    def engine_begin_ns(self) -> int: ...  # noqa: D102

    @property
    def engine_end_ns(self) -> int: ...  # noqa: D102

    def run(self, options: RunOptions = DEFAULT_RUN_OPTIONS) -> tuple[OutputShape, ...]:
        """Execute once and return one shape for each output.

        The caller must have silenced NumPy's warnings (`np.errstate(all="ignore")`): silencing them for each run costs
        more than a small model.

        Raises:
            NnfmqError: If the execution fails.
        """
        ...

    def abort(self) -> None:
        """Mark the outputs in managed buffers as uninitialized: the request will not run (DOM-7)."""
        ...


class MappedExecution:
    """A `BoundExecution` whose arguments are all in mapped memory: it reads and writes there without copies."""

    __slots__ = ("__weakref__", "_program", "_status_byte", "engine_begin_ns", "engine_end_ns", "recorder")

    def __init__(self, program: BoundProgram, status_byte: memoryview, recorder: ModelRecorder = UNPUBLISHED) -> None:
        self._program = program
        self._status_byte = status_byte
        self.recorder = recorder
        self.engine_begin_ns = self.engine_end_ns = 0
        _bound.add(self)

    def run(self, options: RunOptions = DEFAULT_RUN_OPTIONS) -> tuple[OutputShape, ...]:
        """See `BoundExecution.run`."""
        if self._status_byte[0]:  # `require_available`, inlined: this is the hot path
            raise DeviceUnavailable(UNAVAILABLE_MESSAGE)
        self.engine_begin_ns = monotonic_ns()
        try:
            shapes = self._program.run(options)
        except DeadObject as error:  # of another driver, whose client a plug-in is: this driver lives (EXE-9)
            raise GeneralFailure(str(error)) from error
        except NnfmqError:  # before the next clause: InvalidArgument is a ValueError
            raise
        except RECOVERABLE_ERRORS as error:
            _log.exception("a kernel failed")
            raise GeneralFailure(f"a kernel failed: {error!r}") from error
        finally:
            self.engine_end_ns = monotonic_ns()
        return shapes

    def abort(self) -> None:
        """Do nothing: no argument is in a managed buffer."""


_bound: weakref.WeakSet[MappedExecution] = weakref.WeakSet()  # of this process
_ATTEMPTS = 10


def runs_in_progress() -> set[tuple[int, int]]:
    """Return a pair for each run of an engine that is in progress in this process, another one for each run."""
    for _ in range(_ATTEMPTS):
        with suppress(RuntimeError):  # another thread has bound a request meanwhile
            return {(id(each), each.engine_begin_ns) for each in _bound if each.engine_begin_ns > each.engine_end_ns}
    return set()


class OrderedExecution(MappedExecution):
    """A `MappedExecution` that waits for its turn at the cores if it is long."""

    __slots__ = ("_order", "_priority", "_times", "_wakes_next")

    def __init__(self, program: BoundProgram, prepared: DriverPreparedModel, order: ClientOrder) -> None:
        super().__init__(program, prepared.status_byte, prepared.recorder)
        self._order = order
        self._priority = prepared.priority
        self._times = prepared.times
        self._wakes_next = prepared.wakes_next

    def run(self, options: RunOptions = DEFAULT_RUN_OPTIONS) -> tuple[OutputShape, ...]:
        """See `BoundExecution.run`. Blocks while other executions have their turns, at most until the deadline."""
        times = self._times
        if times.expected_ns < LONG_NS:
            shapes = MappedExecution.run(self, options)
            if self.engine_end_ns - self.engine_begin_ns >= LONG_NS:
                times.add(self.engine_end_ns - self.engine_begin_ns)
            return shapes
        self._order.enter(self._priority, options.deadline_ns, times.expected_ns)
        try:
            shapes = MappedExecution.run(self, options)
        finally:
            self._order.leave()
            if self._wakes_next:
                self._order.wake_next()
        times.add(self.engine_end_ns - self.engine_begin_ns)
        return shapes


class PausingExecution(OrderedExecution):
    """An `OrderedExecution` of code that does not look at other workers: all of it pauses for higher classes.

    `threads` is how many threads it uses.
    """

    __slots__ = ("_pool", "_threads")

    def __init__(self, program: BoundProgram, prepared: DriverPreparedModel, order: ClientOrder, threads: int) -> None:
        super().__init__(program, prepared, order)
        self._pool = default_thread_pool()
        self._threads = threads

    def run(self, options: RunOptions = DEFAULT_RUN_OPTIONS) -> tuple[OutputShape, ...]:
        """See `BoundExecution.run`. Blocks while clients of higher classes use all cores, at most until the deadline.

        That is a part of the client's time only (docs/explanation/scheduling.md).
        """
        pauses = self._pool.begin_work(options.deadline_ns)
        try:
            if pauses and TRACING.recorder is not None:
                TRACING.recorder.pauses(pauses)
            return OrderedExecution.run(self, options)  # `super` takes 0.1 µs
        finally:
            self._pool.end_work(self._threads)


class StagedExecution:
    """A `BoundExecution` with arguments in files or managed buffers, which it loads and stores in each run.

    The program is bound again only if a binding supplies another object than in the last run, as a managed buffer does
    after its shape has changed.
    """

    __slots__ = ("_bind", "_bound", "_bound_to", "_inputs", "_outputs", "recorder")

    def __init__(
        self,
        bind: Callable[[Sequence[Any], Sequence[Any]], MappedExecution],
        inputs: Sequence[InputBinding],
        outputs: Sequence[OutputBinding],
        recorder: ModelRecorder,
    ) -> None:
        self._bind = bind
        self.recorder = recorder
        self._inputs = inputs
        self._outputs = outputs
        self._bound_to: list[Any] = []  # the inputs and outputs of `_bound`: as many in each run
        self._bound: MappedExecution | None = None

    @property
    def engine_begin_ns(self) -> int:
        """See `BoundExecution`."""
        return self._bound.engine_begin_ns if self._bound is not None else 0

    @property
    def engine_end_ns(self) -> int:
        """See `BoundExecution`."""
        return self._bound.engine_end_ns if self._bound is not None else 0

    def run(self, options: RunOptions = DEFAULT_RUN_OPTIONS) -> tuple[OutputShape, ...]:
        """See `BoundExecution.run`. Blocks while files are read, until the deadline, and while they are written."""
        try:
            inputs = [binding.load(options.check) for binding in self._inputs]
            outputs = [binding.begin() for binding in self._outputs]
            arrays = inputs + outputs
            if self._bound is None or not all(map(operator.is_, arrays, self._bound_to)):
                self._bound = self._bind(inputs, outputs)
                self._bound_to = arrays
            shapes = self._bound.run(options)
            for binding, shape in zip(self._outputs, shapes, strict=True):
                binding.commit(shape.dimensions)
        except NnfmqError:
            self.abort()
            raise
        return shapes

    def abort(self) -> None:
        """See `BoundExecution.abort`."""
        for binding in self._outputs:
            binding.abort()


def run_bound(
    execution: BoundExecution,
    measure: MeasureTiming,
    received_ns: int,
    options: RunOptions = DEFAULT_RUN_OPTIONS,
) -> ExecutionReply:
    """Run a bound request, count it, and return the reply. Never raises NnfmqError.

    Args:
        execution: The bound request.
        measure: Whether the reply has times.
        received_ns: When the driver received the request: the beginning of the time in the driver.
        options: The engine's options.
    """
    try:
        with np.errstate(all="ignore"):
            shapes = execution.run(options)
    except NnfmqError as error:
        execution.recorder.add_failure()
        return error_reply(error)
    if TRACING.recorder is not None:
        TRACING.recorder.slice("[NN_LC_PE]engine", execution.engine_begin_ns, execution.engine_end_ns)
    timing = Timing(execution.engine_end_ns - execution.engine_begin_ns, monotonic_ns() - received_ns)
    execution.recorder.add(timing.time_in_driver_ns, timing.time_on_device_ns)
    reported = timing if measure is MeasureTiming.YES else NO_TIMING
    return ExecutionReply(ErrorStatus.NONE, shapes, reported, driver_ns=timing.time_in_driver_ns)


class DriverPreparedModel(Struct, frozen=True):
    """A model that is ready to execute. Thread-safe.

    Attributes:
        model: The model. `without_constants` removes what only its preparation needs.
        program: What the engine prepared.
        kind: What kind of program that is; a BASELINE is replaced later.
        charge: The cost of the model, which the client is charged until the last burst or execution has dropped it.
        status_byte: The status of its device. While that is BUSY or OFFLINE, every execution fails with
            DEVICE_UNAVAILABLE (DEV-14).
        takes_unspecified: Whether requests may leave output dimensions open: from HAL 1.2 on (VAL-3).
        device: The name of the device that prepared it.
        name: What its client calls it.
        buffers: The client's managed buffers.
        constants: The ranges of client memory that outputs must not overlap (EXE-10).
        key: Names the model in the roles of managed buffers.
        priority: The priority of its executions in this session.
        order: The order of the client's long executions; None: each begins at once.
        times: How long its executions run.
        wakes_next: Whether a long execution wakes those whose turn is next; otherwise its caller does.
        recorder: Counts its executions.
    """

    model: Model
    program: PreparedProgram
    kind: ProgramKind = ProgramKind.OTHER
    charge: QuotaCharge | None = None
    status_byte: memoryview = ALWAYS_AVAILABLE
    takes_unspecified: bool = True
    device: str = ""
    name: str = ""
    buffers: ManagedBuffers | None = None
    constants: tuple[ConstantRange, ...] = ()
    key: object = field(default_factory=object)
    priority: int = Priority.MEDIUM
    order: ClientOrder | None = None
    times: RunTimes = field(default_factory=RunTimes)
    wakes_next: bool = True
    recorder: ModelRecorder = UNPUBLISHED

    @property
    def compiled_operations(self) -> int:
        """The number of operations of the main subgraph that machine code executes."""
        return len(getattr(self.program, "compiled_ops", ()))

    def without_constants(self) -> DriverPreparedModel:
        """Return this prepared model without the values of the constants: `program` has those that it needs."""
        return replace(self, model=replace(self.model, operand_values=b"", pools=()))

    def require_available(self) -> None:
        """Check the device's status.

        Raises:
            DeviceUnavailable: If the device is BUSY or OFFLINE.
        """
        require_available(self.status_byte)

    def bind(self, request: Request, *, is_fenced: bool = False) -> BoundExecution:
        """Validate `request` and bind it to its memory. On failure its outputs in managed buffers are uninitialized.

        Args:
            request: The request.
            is_fenced: Whether it is for a fenced execution, whose outputs must be fully specified (FEN-7).

        Raises:
            InvalidArgument: If the request is invalid; the message names the argument.
            DeviceUnavailable: If the device is BUSY or OFFLINE.
            NnfmqError: If the engine cannot bind the request.
        """
        with self.uninitialize_outputs_on_error(request), errors_to_status("binding the request"):
            self.require_available()  # comes before errors of the request
            allow_unspecified = self.takes_unspecified and not is_fenced
            validate_request(self.model, request, allow_unspecified_output=allow_unspecified)
            if self.constants:
                require_no_constant_overlap(self.constants, request)
            main = self.model.main
            input_operands = [main.operands[index] for index in main.input_indexes]
            output_operands = [main.operands[index] for index in main.output_indexes]
            if needs_staging(request):
                binder = RequestBinder(self.key, request, self.buffers)
                inputs = binder.bind_inputs(input_operands)
                outputs_ = binder.bind_outputs(output_operands)
                return StagedExecution(self._bind_arrays, inputs, outputs_, self.recorder)
            arrays = tuple(
                input_array(operand, argument, request.pools)
                for operand, argument in zip(input_operands, request.inputs, strict=True)
            )
            outputs = tuple(
                output_buffer(index, operand, argument, request.pools)
                for index, (operand, argument) in enumerate(zip(output_operands, request.outputs, strict=True))
            )
            return self._bind_arrays(arrays, outputs)

    def _bind_arrays(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> MappedExecution:
        program = self.program.bind(inputs, outputs)
        if self.order is None:
            return MappedExecution(program, self.status_byte, self.recorder)
        if self.kind is ProgramKind.OTHER:
            return PausingExecution(program, self, self.order, getattr(self.program, "threads", 1))
        return OrderedExecution(program, self, self.order)

    @contextmanager
    def uninitialize_outputs_on_error(self, request: Request) -> Iterator[None]:
        """If the block raises NnfmqError, mark the outputs of `request` in managed buffers as uninitialized (DOM-7)."""
        try:
            yield
        except NnfmqError:
            if self.buffers is not None:
                self.buffers.mark_outputs_uninitialized(request)
            raise

    @contextmanager
    def counted_on_error(self, request: Request) -> Iterator[None]:
        """Prepare one execution of `request` in the block. If it raises NnfmqError, the execution counts as failed.

        Its outputs in managed buffers are then uninitialized (DOM-7).
        """
        try:
            with self.uninitialize_outputs_on_error(request):
                yield
        except NnfmqError:
            self.recorder.add_failure()
            raise

    def execute_synchronously(
        self,
        request: Request,
        config: ExecutionConfig = ExecutionConfig(),  # noqa: B008  frozen
        deadline_ns: int | None = None,
        received_ns: int | None = None,
    ) -> ExecutionReply:
        """Execute `request` and return the reply (`executeSynchronously`). Blocks. Never raises NnfmqError.

        `received_ns` is when the driver received the request, by default now (TIM-6).
        """
        received_ns = monotonic_ns() if received_ns is None else received_ns
        try:
            with self.counted_on_error(request):
                options = execution_options(config, deadline_ns)
                bound = self.bind(request)
                raise_if_deadline_passed(deadline_ns)
        except NnfmqError as error:
            return error_reply(error)
        return run_bound(bound, config.measure, received_ns, options)
