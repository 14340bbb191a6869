"""replay: execute the executions of a recording again, at their times, and compare their outputs.

Latencies are measured as the recorder measures them, by an observer of the same executions, so that both are of the
same stretch of code. To a latency is added how late the call was: the lane was still busy at the intended start.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple, TypeAlias

import numpy as np

from nnfmq.execution_observers import ObservedExecution
from nnfmq.hal.errors import DeadObject, DeviceUnavailable, ErrorStatus, InvalidArgument, NnfmqError
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import HalExecutionMode
from nnfmq.recording.recording_format import TensorContent
from nnfmq.recording.recording_reader import RecordedExecution, RecordingFile
from nnfmq.replaying.output_comparison import DEFAULT_TOLERANCE, OutputDifference, Tolerance, compare_output
from nnfmq.replaying.recorded_model import load_recorded_model, tensor_infos
from nnfmq.replaying.replay_calls import Arrays, ExecutionCall, execution_call
from nnfmq.replaying.replay_schedule import ORIGINAL_SPEED, ReplaySpeed, ScheduledExecution, schedule_lanes
from nnfmq.runtime.client import Client
from nnfmq.runtime.prepared_model import PreparedModel
from nnfmq.runtime.request_observation import ObservedModel
from nnfmq.runtime.tensor_layout import has_unknown_shape

__all__ = ["ReplayOptions", "ReplayOutcome", "ReplayProgress", "ReplayedExecution", "replay", "replayable"]

_LEAD_NS = 20_000_000  # from the moment when all lanes are ready to the first execution
_POLL_NS = 150_000  # a sleep may end this late; the rest of a wait is polled
_PROGRESS_S = 1.0  # seldom, because drawing takes the interpreter's lock from the lanes
_SLEEP_MAX_S = 0.5  # so that a lane notices the end of the replay


class ReplayOptions(NamedTuple):
    """How to replay: `device` None = that of the recording."""

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
    """What was replayed, in no particular order, and the error that ended the replay early, if any."""

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
        threads = [threading.Thread(target=lane.run, name=f"nnfmq-replay-{i}") for i, lane in enumerate(lanes)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(None if progress is None else _PROGRESS_S)
                    if progress is not None:
                        progress(sum(len(lane.done) for lane in lanes), len(executions))
        except BaseException:  # Ctrl-C
            run.is_over.set()
            client.close()  # ends the executions in progress
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            raise
    return ReplayOutcome(tuple(done for lane in lanes for done in lane.done), run.error)


def _prepare(
    client: Client, recording: RecordingFile, number: int, device: str | None, resources: ExitStack
) -> PreparedModel:
    row = recording.models[number]
    model = load_recorded_model(recording, number, resources)
    if not recording.session.has_tensors and any(map(has_unknown_shape, model.inputs)):
        raise InvalidArgument(
            f"{recording.path}: inputs were not recorded, and those of model {number} have no fixed shape"
        )
    target = client.device(row.device if device is None else device)
    return resources.enter_context(target.prepare(model))


class _ReplayRun:
    """What all lanes share."""

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
