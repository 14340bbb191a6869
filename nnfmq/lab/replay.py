"""Replays: the executions of a recording, run again at their times, and compared with the recorded outputs.

Latencies are measured as the recorder measures them, by an observer of the same executions, so that both are of the
same stretch of code. To a latency is added how late the call was: the lane was still busy at the intended start.
"""

from __future__ import annotations

import heapq
import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nnfmq.base.memory import Memory
from nnfmq.client.connection.client import Client
from nnfmq.client.model.array_request import ArrayRequest, has_unknown_shapes
from nnfmq.client.model.prepared_model import PreparedModel
from nnfmq.client.observation import ObservedModel
from nnfmq.hal.errors import DeadObject, DeviceUnavailable, ErrorStatus, InvalidArgument, NnfmqError
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import HalExecutionMode, Model
from nnfmq.observe.executions import ObservedExecution
from nnfmq.recording.format import NO_DATA, TensorContent, TensorFormat
from nnfmq.recording.reader import RecordedExecution, RecordingFile
from nnfmq.serialize.models import decode_model

__all__ = [
    "DEFAULT_TOLERANCE",
    "LANES_MAX",
    "ORIGINAL_SPEED",
    "Arrays",
    "ExecutionCall",
    "OutputDifference",
    "RecordedModel",
    "ReplayOptions",
    "ReplayOutcome",
    "ReplayProgress",
    "ReplaySpeed",
    "ReplayedExecution",
    "ScheduledExecution",
    "Tolerance",
    "compare_output",
    "execution_call",
    "load_recorded_model",
    "parse_speed",
    "parse_tolerance",
    "replay",
    "replayable",
    "schedule_lanes",
    "tensor_infos",
]


# ----------------------------------------------------------------------------------------------------------------------
# Calls of a prepared model in each execution mode, all with arrays, for the lanes of a replay.


Arrays: TypeAlias = tuple[NDArray[Any], ...]
ExecutionCall: TypeAlias = Callable[[Sequence[NDArray[Any]], float | None], Arrays]
"""Inputs, and a timeout in seconds (None = no limit), to outputs; blocks."""


def execution_call(model: PreparedModel, mode: HalExecutionMode, resources: ExitStack) -> ExecutionCall:
    """Return a function that executes the model in a mode; `resources` closes what it needs.

    An AIDL burst is replaced by the synchronous mode if a shape of the model is unknown: its requests are made once.
    """
    if mode is HalExecutionMode.AIDL_BURST and has_unknown_shapes(model.handle):
        mode = HalExecutionMode.SYNCHRONOUS
    if mode is HalExecutionMode.BURST:
        burst = resources.enter_context(model.burst())
        return lambda inputs, timeout: burst.execute(*inputs, timeout=timeout)
    if mode is HalExecutionMode.REUSABLE:
        execution = resources.enter_context(model.create_reusable_execution())
        return lambda inputs, timeout: execution.compute(*inputs, timeout=timeout)
    if mode is HalExecutionMode.AIDL_BURST:
        return _aidl_burst_call(model, resources)
    if mode is HalExecutionMode.ASYNCHRONOUS:
        return lambda inputs, timeout: model.execute_async(*inputs, timeout=timeout).result()
    if mode is HalExecutionMode.FENCED:
        return lambda inputs, timeout: _execute_fenced(model, inputs, timeout)
    return lambda inputs, timeout: model.execute(*inputs, timeout=timeout)


def _aidl_burst_call(model: PreparedModel, resources: ExitStack) -> ExecutionCall:
    burst = resources.enter_context(model.aidl_burst())

    def call(inputs: Sequence[NDArray[Any]], timeout: float | None) -> Arrays:
        with ArrayRequest.create(model.handle, inputs) as request:
            return request.arrays(burst.execute_synchronously(request.request, timeout=timeout).shapes)

    return call


def _execute_fenced(model: PreparedModel, inputs: Sequence[NDArray[Any]], timeout: float | None) -> Arrays:
    with model.execute_fenced(*inputs, timeout=timeout) as launched:
        return launched.result()


# ----------------------------------------------------------------------------------------------------------------------
# Schedules of replays: when each execution is intended to start, and in which lane.
#
# A lane executes one after the other, on a thread of its own. Executions that overlapped in the recording are in
# different lanes, so a replay has as much concurrency as the application had. An execution is intended to start at its
# time even if the one before it in its lane is late (open loop): its latency then includes the wait.


LANES_MAX = 64
"""Executions of more lanes wait in these."""


class ReplaySpeed(NamedTuple):
    """The recorded intervals divided by `value` (factor); `value` executions per s (rate); or without waiting (max)."""

    kind: Literal["factor", "rate", "max"]
    value: float = 1.0


ORIGINAL_SPEED = ReplaySpeed("factor")


class ScheduledExecution(NamedTuple):
    """An execution, and its intended start in ns from the start of the replay; None = after the one before it."""

    execution: RecordedExecution
    offset_ns: int | None


def parse_speed(text: str) -> ReplaySpeed:
    """Return the speed that a text gives: `original`, `max`, or a factor.

    Raises:
        InvalidArgument: If it gives none.
    """
    if text == "original":
        return ORIGINAL_SPEED
    if text == "max":
        return ReplaySpeed("max")
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not 1e-6 <= factor <= 1e6:  # written so that NaN is rejected as well
        raise InvalidArgument(f"speed {text!r}: give `original`, `max`, or a factor such as 2 (from 1e-6 to 1e6)")
    return ReplaySpeed("factor", factor)


def schedule_lanes(executions: Sequence[RecordedExecution], speed: ReplaySpeed) -> list[list[ScheduledExecution]]:
    """Return the lanes of a replay, each in the order of its intended starts."""
    ordered = sorted(executions, key=lambda execution: execution.row.intended_ns)
    first_ns = ordered[0].row.intended_ns if ordered else 0
    lanes: list[list[ScheduledExecution]] = []
    free: list[tuple[int, int]] = []  # the end of each lane's last execution in the recording, and the lane
    for index, execution in enumerate(ordered):
        scheduled = ScheduledExecution(execution, _offset_ns(speed, execution.row.intended_ns - first_ns, index))
        if free and (free[0][0] <= execution.row.intended_ns or len(lanes) == LANES_MAX):
            lane = heapq.heappop(free)[1]
        else:
            lane = len(lanes)
            lanes.append([])
        lanes[lane].append(scheduled)
        heapq.heappush(free, (execution.row.end_ns, lane))
    return lanes


def _offset_ns(speed: ReplaySpeed, recorded_ns: int, index: int) -> int | None:
    if speed.kind == "max":
        return None
    return round(recorded_ns / speed.value) if speed.kind == "factor" else round(index * 1e9 / speed.value)


# ----------------------------------------------------------------------------------------------------------------------
# RecordedModel: a model of a recording, in the form in which a device prepares it.
#
# The states of a model are inputs and outputs of it here, as they are for the driver, so that each execution stands for
# itself. The driver validates the model; what is checked here is that its bytes can be decoded.


class RecordedModel(NamedTuple):
    """A model, and its inputs and outputs."""

    model: Model
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]


def load_recorded_model(recording: RecordingFile, number: int, resources: ExitStack) -> RecordedModel:
    """Return model `number` of a recording; `resources` closes its memories.

    Raises:
        InvalidArgument: If the recording has only its signature, or its bytes are no model.
    """
    row = recording.models[number]
    if row.data == NO_DATA:
        raise InvalidArgument(
            f"{recording.path}: model {number} was prepared from a cache, so the recording does not contain it"
        )
    try:
        pools = [_memory(recording.read(pool), resources) for pool in row.pools]
        model = decode_model(recording.read(row.data), pools)
    except NnfmqError as error:
        raise InvalidArgument(f"{recording.path}: model {number} cannot be read: {error}") from error
    return RecordedModel(model, tensor_infos(row.inputs), tensor_infos(row.outputs))


def _memory(content: bytes, resources: ExitStack) -> Memory:
    memory = resources.enter_context(Memory.create(len(content), "nnfmq-recorded"))
    memory.view[: len(content)] = content
    return memory


def tensor_infos(formats: Sequence[TensorFormat]) -> tuple[TensorInfo, ...]:
    """Return the descriptions of inputs or outputs."""
    return tuple(TensorInfo(f.name, f.shape, f.dtype, f.scale, f.zero_point, f.is_scalar, f.is_empty) for f in formats)


# ----------------------------------------------------------------------------------------------------------------------
# Comparison of an output with the recorded one: integers exactly, floats within a tolerance.
#
# Two floats are equal if both are NaN, or the same infinity. Otherwise they differ by some absolute amount, which a
# relative tolerance measures in parts of the largest finite magnitude of the recorded output, and by some number of
# representable values between them (ULP, units in the last place).


Array = NDArray[Any]


class Tolerance(NamedTuple):
    """The difference that a float may have, in parts of the largest magnitude, or in ULP if `is_ulp`. 0 = no bit."""

    limit: float
    is_ulp: bool = False


DEFAULT_TOLERANCE = Tolerance(1e-5)


class OutputDifference(NamedTuple):
    """The difference of one output from the recorded one; `reason` is empty if it is within the tolerance.

    `relative` and `ulp` are the largest ones of its elements, 0 for integers; `elements` is the number of those beyond
    the tolerance.
    """

    reason: str
    relative: float = 0.0
    ulp: int = 0
    elements: int = 0


def parse_tolerance(text: str) -> Tolerance:
    """Return the tolerance that a text gives: `1e-5`, relative; `4ulp`; or `exact`.

    Raises:
        InvalidArgument: If it gives none.
    """
    if text == "exact":
        return Tolerance(0.0)
    ulp = re.fullmatch(r"(\d{1,9})\s*ulp", text)
    if ulp:
        return Tolerance(float(ulp[1]), is_ulp=True)
    if re.fullmatch(r"\d*\.?\d+(e-?\d+)?", text) and 0 <= float(text) < 1:
        return Tolerance(float(text))
    raise InvalidArgument(f"tolerance {text!r}: give a relative one from 0 to below 1 (1e-5), `4ulp`, or `exact`")


def compare_output(recorded: Array, output: Array, tolerance: Tolerance) -> OutputDifference:
    """Return the difference of `output` from `recorded`. Integers and booleans have to be equal."""
    if recorded.shape != output.shape or recorded.dtype != output.dtype:
        return OutputDifference(f"{output.dtype} {output.shape} instead of {recorded.dtype} {recorded.shape}")
    if recorded.tobytes() == output.tobytes():
        return OutputDifference("")
    if recorded.dtype.kind == "c":
        recorded, output = (array.view(array.real.dtype) for array in (_flat(recorded), _flat(output)))
    if recorded.dtype.kind != "f":
        elements = int(np.count_nonzero(recorded != output))
        return OutputDifference(f"{elements} of {recorded.size} elements differ" if elements else "", elements=elements)
    return _compare_floats(_flat(recorded), _flat(output), tolerance)


def _flat(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1)


def _compare_floats(recorded: Array, output: Array, tolerance: Tolerance) -> OutputDifference:
    same = (recorded == output) | (np.isnan(recorded) & np.isnan(output))
    finite = np.isfinite(recorded) & np.isfinite(output)
    beyond = ~same & ~finite
    a, b = recorded[finite].astype(np.float64), output[finite].astype(np.float64)
    magnitudes = np.abs(recorded[np.isfinite(recorded)].astype(np.float64))
    largest = float(magnitudes.max()) if magnitudes.size else 0.0
    with np.errstate(over="ignore"):
        parts = np.abs(a - b) / (largest or 1.0)
    steps = _steps(recorded[finite], output[finite])
    measured = steps if tolerance.is_ulp else parts
    elements = int(np.count_nonzero(beyond)) + int(np.count_nonzero(measured > tolerance.limit))
    reason = f"{elements} of {recorded.size} elements differ{_tolerance_text(tolerance)}"
    relative = float(parts.max()) if parts.size else 0.0
    return OutputDifference(reason if elements else "", relative, int(steps.max()) if steps.size else 0, elements)


def _tolerance_text(tolerance: Tolerance) -> str:
    if not tolerance.limit:
        return ""
    return f" by more than {tolerance.limit:g}{' ULP' if tolerance.is_ulp else ' of the largest'}"


def _steps(first: Array, second: Array) -> NDArray[np.float64]:
    """Return the number of representable values from each element of one array to that of the other."""
    return np.abs(_ordinals(first) - _ordinals(second))


def _ordinals(values: Array) -> NDArray[np.float64]:
    """Return the position of each float among all floats in order; both zeros have position 0.

    Positions of float64 values exceed what a float64 can count exactly: their differences are then approximate.
    """
    integers = values.view(np.dtype(f"i{values.dtype.itemsize}"))
    magnitudes = (integers & np.iinfo(integers.dtype).max).astype(np.float64)
    return np.where(integers < 0, -magnitudes, magnitudes)


# ----------------------------------------------------------------------------------------------------------------------
# replay: execute the executions of a recording again, at their times, and compare their outputs.


_LEAD_NS = 20_000_000  # from the moment when all lanes are ready to the first execution
_POLL_NS = 150_000  # a sleep may end this late; the rest of a wait is polled
_PROGRESS_S = 1.0  # seldom, because drawing takes the interpreter's lock from the lanes
_SLEEP_MAX_S = 0.5  # so that a lane notices the end of the replay


class ReplayOptions(NamedTuple):
    """The options of a replay: `device` None = that of the recording."""

    speed: ReplaySpeed = ORIGINAL_SPEED
    tolerance: Tolerance = DEFAULT_TOLERANCE
    device: str | None = None
    has_deadlines: bool = True


class ReplayedExecution(NamedTuple):
    """An execution that was replayed: `late_ns` is the part of the latency before the call.

    `differences` has one entry for each output, none if the execution failed, or outputs were not recorded.
    """

    recorded: RecordedExecution
    status: ErrorStatus
    message: str
    latency_ns: int
    late_ns: int
    differences: tuple[OutputDifference, ...]

    @property
    def is_equal(self) -> bool:
        """True if the execution succeeded, and no output differs by more than the tolerance."""
        return self.status is ErrorStatus.NONE and not any(difference.reason for difference in self.differences)


class ReplayOutcome(NamedTuple):
    """The replayed executions, in no particular order, and the error that ended the replay early, if any."""

    executions: tuple[ReplayedExecution, ...]
    error: NnfmqError | None


def replayable(recording: RecordingFile) -> list[RecordedExecution]:
    """Return the executions that can be replayed: successful, with inputs unless the recording has none at all."""
    has_tensors = recording.session.has_tensors
    return [
        execution
        for execution in recording.executions
        if execution.row.status is ErrorStatus.NONE and (execution.row.inputs is not None or not has_tensors)
    ]


ReplayProgress: TypeAlias = Callable[[int, int], None]
"""Called about once per second with the number of executions that are done, and of all."""


def replay(
    client: Client, recording: RecordingFile, options: ReplayOptions, progress: ReplayProgress | None = None
) -> ReplayOutcome:
    """Prepare the models of a recording, and execute; blocks until done, or until the driver dies.

    Without recorded inputs, the inputs are zeros. `progress` is called on this thread.

    Raises:
        InvalidArgument: If a model is not in the recording, or there is no such device, or a shape of a model without
            recorded inputs is unknown.
        NnfmqError: The error of a preparation.
    """
    executions = replayable(recording)
    with ExitStack() as resources:
        models = {
            number: _prepare(client, recording, number, options.device, resources)
            for number in sorted({execution.row.model for execution in executions})
        }
        run = _ReplayRun(recording, models, options)
        lanes = [_Lane(run, steps, resources) for steps in schedule_lanes(executions, options.speed)]
        for lane in lanes:
            lane.warm_up()
        run.start_ns = time.monotonic_ns() + _LEAD_NS
        _run_lanes(client, run, lanes, len(executions), progress)
    return ReplayOutcome(tuple(done for lane in lanes for done in lane.done), run.error)


def _run_lanes(
    client: Client, run: _ReplayRun, lanes: Sequence[_Lane], count: int, progress: ReplayProgress | None
) -> None:
    """Run each lane on a thread of its own until all `count` executions are done; blocks.

    If this thread is interrupted, the lanes end first.
    """
    threads = [threading.Thread(target=lane.run, name=f"nnfmq-replay-{i}") for i, lane in enumerate(lanes)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(None if progress is None else _PROGRESS_S)
                if progress is not None:
                    progress(sum(len(lane.done) for lane in lanes), count)
    except BaseException:  # Ctrl-C
        run.is_over.set()
        client.close()  # ends the executions in progress
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        raise


def _prepare(
    client: Client, recording: RecordingFile, number: int, device: str | None, resources: ExitStack
) -> PreparedModel:
    row = recording.models[number]
    model = load_recorded_model(recording, number, resources)
    if not recording.session.has_tensors and any(info.has_unknown_shape for info in model.inputs):
        raise InvalidArgument(
            f"{recording.path}: inputs were not recorded, and those of model {number} have no fixed shape"
        )
    target = client.device(row.device if device is None else device)
    return resources.enter_context(target.prepare(model))


class _ReplayRun:
    """The state that all lanes share."""

    def __init__(self, recording: RecordingFile, models: dict[int, PreparedModel], options: ReplayOptions) -> None:
        self.recording = recording
        self.models = models
        self.options = options
        self.start_ns = 0
        self.is_over = threading.Event()
        self.error: NnfmqError | None = None

    def stop(self, error: NnfmqError) -> None:
        """End all lanes, because nothing can be executed any more."""
        self.error = self.error or error
        self.is_over.set()

    def inputs(self, execution: RecordedExecution) -> Arrays:
        """Return the inputs of an execution: the recorded ones, or zeros."""
        formats = tensor_infos(self.recording.models[execution.row.model].inputs)
        if execution.row.inputs is None:
            return tuple(np.zeros(info.shape, info.dtype) for info in formats)
        return self._arrays(formats, execution.row.inputs)

    def differences(self, execution: RecordedExecution, outputs: Arrays) -> tuple[OutputDifference, ...]:
        """Return the difference of each output from the recorded one; none if none are recorded."""
        if execution.row.outputs is None:
            return ()
        formats = tensor_infos(self.recording.models[execution.row.model].outputs)
        recorded = self._arrays(formats, execution.row.outputs)
        pairs = zip(recorded, outputs, strict=True)
        return tuple(compare_output(before, now, self.options.tolerance) for before, now in pairs)

    def _arrays(self, formats: Sequence[TensorInfo], contents: Sequence[TensorContent]) -> Arrays:
        return tuple(
            np.frombuffer(self.recording.read(content.data), info.dtype).reshape(content.shape)
            for info, content in zip(formats, contents, strict=True)
        )


class _LastExecution:
    """The observer of one lane: keeps the execution that has ended last."""

    needs_tensors = False

    def __init__(self) -> None:
        self.latency_ns = 0

    def executed(self, execution: ObservedExecution) -> None:
        """Keep the latency of an execution."""
        self.latency_ns = execution.end_ns - execution.intended_ns


class _Lane:
    """Executes one after the other, on its thread. Everything is configured when it is made."""

    def __init__(self, run: _ReplayRun, steps: Sequence[ScheduledExecution], resources: ExitStack) -> None:
        self._run = run
        self._steps = steps
        self._last = _LastExecution()
        self._models = {number: self._observed(model) for number, model in run.models.items()}
        kinds = {(step.execution.row.model, step.execution.row.mode) for step in steps}
        self._calls: dict[tuple[int, HalExecutionMode], ExecutionCall] = {
            kind: execution_call(self._models[kind[0]], kind[1], resources) for kind in sorted(kinds)
        }
        self.done: list[ReplayedExecution] = []

    def _observed(self, model: PreparedModel) -> PreparedModel:
        """Return the same prepared model with this lane's observer. It is not closed: `model` owns the driver's."""
        view = PreparedModel(model.connection, model.model_id, model.inputs, model.outputs, model.device)
        view.handle.is_owner = False
        view.handle.observed = ObservedModel((self._last,), model.inputs, model.outputs)
        return view

    def warm_up(self) -> None:
        """Call everything once: otherwise the first execution, a slow one, would delay those after it."""
        first = {(s.execution.row.model, s.execution.row.mode): s.execution for s in reversed(self._steps)}
        for kind, call in self._calls.items():
            try:
                call(self._run.inputs(first[kind]), None)
            except (DeadObject, DeviceUnavailable):
                raise
            except NnfmqError:
                continue  # the replay will report it

    def run(self) -> None:
        """Execute all steps, or until the replay is over."""
        for step in self._steps:
            inputs = self._run.inputs(step.execution)
            intended_ns = self._wait_until(step.offset_ns)
            if self._run.is_over.is_set():
                return
            try:
                self._execute(step.execution, inputs, intended_ns)
            except (DeadObject, DeviceUnavailable) as error:
                self._run.stop(error)
                return

    def _wait_until(self, offset_ns: int | None) -> int:
        """Wait for an intended start, and return it; at most until the replay is over."""
        begin_ns = self._run.start_ns
        intended_ns = max(begin_ns, time.monotonic_ns()) if offset_ns is None else begin_ns + offset_ns
        while (left_ns := intended_ns - time.monotonic_ns()) > 0 and not self._run.is_over.is_set():
            if left_ns > _POLL_NS:
                self._run.is_over.wait(min(_SLEEP_MAX_S, (left_ns - _POLL_NS) / 1e9))
        return intended_ns

    def _execute(self, execution: RecordedExecution, inputs: Arrays, intended_ns: int) -> None:
        """Execute once, and add the result to `done`. Raises the errors after which nothing can be executed."""
        row, timeout = execution.row, None
        if self._run.options.has_deadlines and row.deadline_ns >= 0:
            timeout = max(0, row.deadline_ns - row.intended_ns) / 1e9
        late_ns = max(0, time.monotonic_ns() - intended_ns)
        try:
            outputs = self._calls[row.model, row.mode](inputs, timeout)
        except (DeadObject, DeviceUnavailable):
            raise
        except NnfmqError as error:
            self.done.append(ReplayedExecution(execution, error.status, str(error), 0, late_ns, ()))
            return
        latency_ns = late_ns + self._last.latency_ns
        differences = self._run.differences(execution, outputs)
        self.done.append(ReplayedExecution(execution, ErrorStatus.NONE, "", latency_ns, late_ns, differences))
