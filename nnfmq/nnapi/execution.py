"""ExecutionBuilder: NNAPI's execution, in its four modes, with the arguments and options set before."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from msgspec.structs import replace

from nnfmq.base.ownership import Closable, Uncopyable
from nnfmq.client.execution.requests import make_execution_config
from nnfmq.client.model.arrays import ExecutionResult, check_index
from nnfmq.client.model.buffers import AnyMemory
from nnfmq.hal.capabilities import DurationCode
from nnfmq.hal.errors import BadState, InvalidArgument, NnfmqError, OutputInsufficientSize
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import ExecutionConfig, LoopTimeoutDurationNs
from nnfmq.nnapi.arguments import (
    ApplicationBuffer,
    ArgumentSetting,
    AssembledRequest,
    PendingResult,
    RequestSender,
    array_setting,
    device_setting,
    memory_setting,
)
from nnfmq.nnapi.burst import BurstBuilder
from nnfmq.nnapi.checks import ExtensionAttributes, required
from nnfmq.nnapi.compilation import CompilationBuilder, SharedModel
from nnfmq.nnapi.event import Event, ExecutionOutcome, ExecutionProgress, RunningComputation
from nnfmq.nnapi.memory import DeviceMemory

__all__ = ["ExecutionBuilder", "ExecutionSetup", "get_default_loop_timeout", "get_maximum_loop_timeout"]


# ----------------------------------------------------------------------------------------------------------------------
# ExecutionSetup: the arguments and options of an execution, which are set before it is computed.


class ExecutionSetup(Uncopyable):
    """The setters of `ExecutionBuilder`. Each raises BadState once a computation was started."""

    def __init__(self, compilation: CompilationBuilder) -> None:
        self._compilation = required(compilation, "the compilation")
        self._shared: SharedModel = compilation.require_compiled("an execution")
        self._progress = ExecutionProgress()
        self._inputs: list[ArgumentSetting | None] = [None] * len(self._shared.inputs)
        self._outputs: list[ArgumentSetting | None] = [None] * len(self._shared.outputs)
        self._allows_padding = False
        self._is_measured = False
        self._timeout: float | None = None
        self._loop_timeout: float | None = None
        self._attributes = ExtensionAttributes()

    # ------------------------------------------------------------------------------------------------ arguments

    def set_input(self, index: int, buffer: ApplicationBuffer | None, dimensions: Sequence[int] | None = None) -> None:
        """Use the application's array or bytes as an input; None omits it. Each computation copies them.

        Args:
            index: The input.
            buffer: A contiguous array of the input's element type, or bytes. Only its size counts, not its shape.
            dimensions: The dimensions, if the model leaves some unknown. (Nothing else of NNAPI's operand type counts.)

        Raises:
            BadState: If the input was set before, or a computation was started.
            InvalidArgument: If there is no such input, or `buffer` or `dimensions` do not fit it.
        """
        info = self._argument("set_input", self._inputs, index)
        self._inputs[index] = array_setting(info, buffer, dimensions, is_output=False, padded=self._allows_padding)

    def set_output(self, index: int, buffer: ApplicationBuffer | None, dimensions: Sequence[int] | None = None) -> None:
        """Use the application's array or bytes as an output; None omits it. Otherwise as `set_input`.

        It is filled when the computation has succeeded; for an asynchronous one, when its event has been waited for.
        """
        info = self._argument("set_output", self._outputs, index)
        self._outputs[index] = array_setting(info, buffer, dimensions, is_output=True, padded=self._allows_padding)

    def set_input_from_memory(
        self,
        index: int,
        memory: AnyMemory | DeviceMemory,
        offset: int = 0,
        length: int = 0,
        dimensions: Sequence[int] | None = None,
    ) -> None:
        """Use `length` bytes of a memory from `offset` on as an input, or a whole device memory. Borrows the memory.

        The driver reads the memory itself. A memory must not be closed before the computation is started.

        Raises:
            BadState: If the input was set before, or a computation was started.
            InvalidArgument: If there is no such input, the part is not inside the memory or does not fit the input, or
                a device memory was not described for it, or is not used whole.
        """
        info = self._argument("set_input_from_memory", self._inputs, index)
        self._inputs[index] = self._in_memory(info, memory, (offset, length), dimensions, (index, False))

    def set_output_from_memory(
        self,
        index: int,
        memory: AnyMemory | DeviceMemory,
        offset: int = 0,
        length: int = 0,
        dimensions: Sequence[int] | None = None,
    ) -> None:
        """Use `length` bytes of a memory from `offset` on as an output, or a whole device memory. As for inputs."""
        info = self._argument("set_output_from_memory", self._outputs, index)
        self._outputs[index] = self._in_memory(info, memory, (offset, length), dimensions, (index, True))

    def _argument(self, function: str, settings: Sequence[ArgumentSetting | None], index: int) -> TensorInfo:
        """Return the description of an argument that may be set now."""
        self._progress.require_preparation(function)
        is_output = settings is self._outputs
        infos = self._shared.outputs if is_output else self._shared.inputs
        kind = "output" if is_output else "input"
        check_index(kind, infos, index)
        if settings[index] is not None:
            raise BadState(f"{function}: {kind} {index} was set before")
        return infos[index]

    def _in_memory(
        self,
        info: TensorInfo,
        memory: AnyMemory | DeviceMemory,
        span: tuple[int, int],
        dimensions: Sequence[int] | None,
        role: tuple[int, bool],
    ) -> ArgumentSetting:
        required(memory, "the memory")
        if isinstance(memory, DeviceMemory):
            memory.require_role((self._shared, *role))
            return device_setting(info, memory, span, dimensions)
        is_output = role[1]
        return memory_setting(info, memory, span, dimensions, is_output=is_output, padded=self._allows_padding)

    def enable_input_and_output_padding(self, enable: bool) -> None:
        """Let arguments have more bytes than their data: padding, which a driver may read, and never writes.

        Raises:
            BadState: If an argument was set, or a computation was started.
        """
        self._progress.require_preparation("enable_input_and_output_padding")
        if any(setting is not None for setting in (*self._inputs, *self._outputs)):
            raise BadState("enable_input_and_output_padding: an argument was set before; call this first")
        self._allows_padding = enable

    # ------------------------------------------------------------------------------------------------ options

    def set_timeout(self, timeout: float | None) -> None:
        """Limit each computation, in seconds; None = no limit.

        Raises:
            InvalidArgument: If the compilation is not for exactly one device, or `timeout` is negative.
            BadState: If a computation was started.
        """
        self._compilation.require_one_device("a timeout")
        self._progress.require_preparation("set_timeout")
        if timeout is not None and not timeout >= 0:  # written so that NaN is rejected as well
            raise InvalidArgument(f"a timeout is 0 or more seconds, or None for no limit; got {timeout}")
        self._timeout = timeout

    def set_loop_timeout(self, timeout: float | None) -> None:
        """Limit each WHILE loop, in seconds; None = the default. More than the maximum is reduced to it.

        Raises:
            BadState: If a computation was started.
            InvalidArgument: If `timeout` is negative.
        """
        self._progress.require_preparation("set_loop_timeout")
        make_execution_config(False, timeout)  # checks it
        self._loop_timeout = timeout

    def set_measure_timing(self, measure: bool) -> None:
        """Measure the durations of the computation, for `get_duration`.

        Raises:
            InvalidArgument: If the compilation is not for exactly one device.
            BadState: If a computation was started.
        """
        self._compilation.require_one_device("measuring times")
        self._progress.require_preparation("set_measure_timing")
        self._is_measured = measure

    def set_reusable(self, reusable: bool) -> None:
        """Allow any number of computations, one at a time.

        Raises:
            BadState: If a computation was started.
        """
        self._progress.require_preparation("set_reusable")
        self._progress.is_reusable = reusable

    def add_extension_attribute(self, extension_name: str, code: int, value: bytes) -> None:
        """Add a vendor's hint for the computations; the device ignores attributes that it does not know.

        Raises:
            InvalidArgument: If the compilation is not for exactly one device, which supports the extension.
            BadState: If a computation was started.
        """
        self._compilation.check_extension(extension_name)
        self._progress.require_preparation("add_extension_attribute")
        self._attributes.add(extension_name, code, value)

    # ------------------------------------------------------------------------------------------------ for computations

    def _settings(self, function: str) -> tuple[list[ArgumentSetting], list[ArgumentSetting]]:
        """Return the settings of all inputs and outputs. Raises InvalidArgument if one is missing."""
        found = []
        for kind, settings in (("input", self._inputs), ("output", self._outputs)):
            missing = [str(index) for index, setting in enumerate(settings) if setting is None]
            if missing:
                raise InvalidArgument(f"{function}: {kind} {', '.join(missing)} was not set")
            found.append([setting for setting in settings if setting is not None])
        return found[0], found[1]

    def _config(self) -> ExecutionConfig:
        config = make_execution_config(self._is_measured, self._loop_timeout)
        return replace(config, hints=self._attributes.hints, extensions=self._attributes.extensions)


# ----------------------------------------------------------------------------------------------------------------------
# ExecutionBuilder: NNAPI's execution, in its four modes.


_log = logging.getLogger("nnfmq.nnapi")


def get_default_loop_timeout() -> float:
    """Return the limit of a WHILE loop for which none is set, in seconds."""
    return LoopTimeoutDurationNs.DEFAULT / 1e9


def get_maximum_loop_timeout() -> float:
    """Return the longest limit of a WHILE loop, in seconds."""
    return LoopTimeoutDurationNs.MAXIMUM / 1e9


class ExecutionBuilder(ExecutionSetup, Closable):
    """An execution of a compilation: set its arguments, then compute it. Close it, or use `with`.

    It is computed once; after `set_reusable(True)` any number of times, one at a time. Memories and arrays must not be
    accessed during a computation. Not thread-safe until it is computed, then thread-safe.

    Raises:
        BadState: If the compilation is not finished, has failed or is closed.
    """

    def __init__(self, compilation: CompilationBuilder) -> None:
        super().__init__(compilation)
        self._shared.users.acquire()
        self._is_closed = False
        self._sender: RequestSender | None = None

    # ------------------------------------------------------------------------------------------------ computing

    def compute(self) -> None:
        """Compute the outputs; blocks.

        Raises:
            BadState: If a computation is in progress, or this was computed and is not reusable.
            InvalidArgument: If an argument was not set, or is invalid for the driver.
            GeneralFailure: If an input is an uninitialized device memory, or the device fails.
            OutputInsufficientSize: If an output does not have enough space; `get_output_operand_dimensions` tells more.
            MissedDeadline: If a limit passes.
            DeadObject: If the driver exits.
            NnfmqError: The error that the driver replied.
        """
        self._compute("compute", lambda sender: sender.execute(self._timeout))

    def burst_compute(self, burst: BurstBuilder) -> None:
        """Compute the outputs with a burst of the same compilation; blocks.

        Raises:
            InvalidArgument: If the burst is one of another compilation, or closed.
            BadState: If another computation uses the burst.
            NnfmqError: As `compute`.
        """
        required(burst, "the burst").require_model(self._shared)
        self._compute("burst_compute", lambda sender: sender.execute_in(burst, self._timeout))

    def _compute(self, function: str, execute: Callable[[RequestSender], ExecutionResult]) -> None:
        with self._claimed(function) as claim:
            sender = self._open_sender(function)
            try:
                sender.assembled.copy_in()
                result = execute(sender)
                shapes = sender.assembled.copy_out(result.shapes)
            except BadState:  # another thread uses the burst, so nothing was computed
                raise
            except NnfmqError as error:
                self._complete(claim, ExecutionOutcome.of_error(error))
                raise
            self._complete(claim, ExecutionOutcome.of_shapes(shapes, result.timing))

    def start_compute(self) -> Event:
        """Start to compute the outputs, and return the event of the end. The caller closes the event.

        Raises:
            BadState: If a computation is in progress, or this was computed and is not reusable.
            InvalidArgument: If an argument was not set.
            GeneralFailure: If an input is an uninitialized device memory in shared memory.
            DeadObject: If the driver has exited. `Event.wait` raises all other errors.
        """
        return self._start("start_compute", lambda sender: sender.start(self._timeout))

    def start_compute_with_dependencies(self, dependencies: Sequence[Event], duration: float | None = None) -> Event:
        """Compute the outputs when all events of `dependencies` have ended. The caller closes the returned event.

        The driver waits for events with fences; this call blocks until the others have ended. Over HIDL before 1.3 it
        blocks until the outputs are computed. All outputs must have fully known shapes.

        Args:
            dependencies: Events of other computations, and imported ones. Borrowed until this returns.
            duration: The limit from the last dependency on, in seconds; None = no limit.

        Raises:
            BadState: If a computation is in progress, or this was computed and is not reusable.
            InvalidArgument: If an argument was not set, a dependency is None or has failed, an output's shape is
                unknown, or there is a `duration`, and the compilation is not for exactly one device.
            NnfmqError: As `compute`, if the driver rejects the request.
        """
        events = [required(event, "a dependency") for event in required(dependencies, "the list of dependencies")]
        if duration is not None:
            self._compilation.require_one_device("a duration")

        def launch(sender: RequestSender) -> PendingResult:
            fences = [fence for event in events for fence in event.wait_for_dependency()]
            return sender.launch(fences, self._timeout, duration)

        return self._start("start_compute_with_dependencies", launch)

    def _start(self, function: str, start: Callable[[RequestSender], PendingResult]) -> Event:
        with self._claimed(function) as claim:
            sender = self._open_sender(function)
            try:
                sender.assembled.copy_in()
                pending = start(sender)
            except NnfmqError as error:
                self._complete(claim, ExecutionOutcome.of_error(error))
                raise
            running = RunningComputation(pending, lambda: self._collect(claim, sender, pending))
            self._progress.running = running
        return Event(running, pending.fence)

    def _collect(self, claim: object, sender: RequestSender, pending: PendingResult) -> ExecutionOutcome:
        """Complete the execution with the result of an asynchronous computation, which is done."""
        try:
            result = pending.result()
            shapes = sender.assembled.copy_out(result.shapes)
            outcome = ExecutionOutcome.of_shapes(shapes, result.launched, result.fenced)
        except NnfmqError as error:
            outcome = ExecutionOutcome.of_error(error)
        pending.close()
        return self._complete(claim, outcome)

    @contextmanager
    def _claimed(self, function: str) -> Iterator[object]:
        """Claim the execution for a computation. A block that raises, before it has completed, ends the claim."""
        claim = object()
        try:
            if self._is_closed:
                raise BadState(f"{function}: this execution is closed")
            self._progress.begin(function, claim)
            yield claim
        except BaseException:
            if self._progress.release(claim):
                self._close_sender()
            raise

    def _open_sender(self, function: str) -> RequestSender:
        if self._sender is None:
            inputs, outputs = self._settings(function)
            assembled = AssembledRequest(self._shared, inputs, outputs)
            model, is_reusable = self._shared.model, self._progress.is_reusable
            self._sender = RequestSender(model, assembled, self._config(), is_reusable)
        return self._sender

    def _complete(self, claim: object, outcome: ExecutionOutcome) -> ExecutionOutcome:
        """End a computation. After an error the driver may still write the request's memory: it is not used again."""
        if outcome.error is not None or not self._progress.is_reusable:
            self._close_sender()
        return self._progress.complete(claim, outcome)

    def _close_sender(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()

    # ------------------------------------------------------------------------------------------------ results, end

    def get_output_operand_rank(self, index: int) -> int:
        """Return the number of dimensions of an output, 0 if it is a scalar or unknown. Otherwise as for dimensions."""
        return len(self._output_shape("get_output_operand_rank", index))

    def get_output_operand_dimensions(self, index: int) -> tuple[int, ...]:
        """Return the dimensions of an output of the last computation.

        Raises:
            BadState: If no computation has completed, or the last one has failed.
            InvalidArgument: If there is no such output, or it is a scalar.
            OutputInsufficientSize: If the output did not have enough space: its `output_shapes` has what is known.
        """
        shape = self._output_shape("get_output_operand_dimensions", index)
        if not shape:
            raise InvalidArgument(f"output {index} has no dimensions: it is a scalar, or its rank is unknown")
        return shape

    def _output_shape(self, function: str, index: int) -> tuple[int, ...]:
        outcome = self._progress.require_completed(function)
        if outcome.error is not None and not isinstance(outcome.error, OutputInsufficientSize):
            raise BadState(f"{function}: the computation has failed: {outcome.error}") from outcome.error
        check_index("output", self._shared.outputs, index)
        shape = outcome.shapes[index]
        if not shape.is_sufficient:
            text = f"output {index} needs space for the dimensions {shape.dimensions} (0 = unknown)"
            raise OutputInsufficientSize(text, outcome.shapes)
        return shape.dimensions

    def get_duration(self, code: DurationCode) -> int:
        """Return a duration of the last computation in ns; -1 if the driver has not measured it.

        Raises:
            BadState: If no computation has completed, or the last one has failed or was not measured.
            InvalidArgument: If there is no such duration.
        """
        outcome = self._progress.require_completed("get_duration")
        if outcome.error is not None or not self._is_measured:
            reason = "it has failed" if outcome.error is not None else "set_measure_timing(True) was not called"
            raise BadState(f"get_duration: the computation has no durations: {reason}")
        try:
            found = DurationCode(code)
        except ValueError:
            raise InvalidArgument(f"there is no duration {code!r}; allowed are 0 to {max(DurationCode)}") from None
        is_fenced = found in (DurationCode.FENCED_ON_HARDWARE, DurationCode.FENCED_IN_DRIVER)
        timing = outcome.fenced if is_fenced else outcome.launched
        is_of_device = found in (DurationCode.ON_HARDWARE, DurationCode.FENCED_ON_HARDWARE)
        return timing.time_on_device_ns if is_of_device else timing.time_in_driver_ns

    def close(self) -> None:
        """Release the execution. Idempotent. While it is running this has no effect but a line in the log (API-16)."""
        if self._progress.is_running():
            _log.error("an execution that is running is not closed: wait for its event first")
            return
        was_closed, self._is_closed = self._is_closed, True
        self._close_sender()
        if not was_closed:
            self._shared.users.release()
