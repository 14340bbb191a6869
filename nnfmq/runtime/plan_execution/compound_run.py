"""CompoundRun: the rules of one execution of a plan, for every execution mode; it decides, and calls no driver.

The mode asks for the next call, makes it, and reports the result or the error, until no call is left:

    a step succeeds                  the shapes of its outputs are noted, the next step follows
    an output has too little memory  if all that lack some can grow: they grow, and the step is repeated
                                     otherwise OutputInsufficientSize, with the shapes known so far
    a step fails otherwise           the same step on the CPU; if it fails there, too, the whole model on the CPU
    a result that another step
    needs has no elements            the whole model on the CPU
    a loop exceeds its time          MissedDeadlineTransient
    the deadline passes              MissedDeadline, from the driver whose step runs, or before the next step

Without a fallback the first failure is the result; InvalidArgument always is, because it is the application's error.
The model's inputs are intact after each of these: no driver can write to them, and no value shares their memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from nnfmq.hal.errors import GeneralFailure, NnfmqError, OutputInsufficientSize
from nnfmq.hal.timing import NO_TIMING
from nnfmq.hal.types import ExecutionConfig, HalExecutionMode, OutputShape, Request
from nnfmq.observe.trace_points import TRACING, recorded
from nnfmq.runtime.execution_result import ExecutionResult
from nnfmq.runtime.plan_execution.bound_plan import BoundCall
from nnfmq.runtime.plan_execution.controller import Controller
from nnfmq.runtime.plan_execution.execution_limits import require_time_left
from nnfmq.runtime.plan_execution.execution_memory import ExecutionMemory
from nnfmq.runtime.plan_execution.plan_handle import PlanHandle
from nnfmq.runtime.plan_execution.run_observation import (
    INTERPRETATION_SLICE,
    PLAN_SLICE,
    RunObservation,
    log_step,
    step_slice,
)
from nnfmq.runtime.plan_execution.value_locations import array_at, step_request
from nnfmq.runtime.prepared_model import PreparedModel
from nnfmq.runtime.sync_execution import execute_arrays, execute_request
from nnfmq.verbose_log import vlog, vlog_is_on

__all__ = ["CompoundRun", "PlanCall", "run_synchronously"]

_log = logging.getLogger("nnfmq.runtime")


@dataclass(frozen=True, slots=True)
class PlanCall:
    """A call that the execution mode makes next: a step of the plan, or the whole model (`step` is None) on the CPU."""

    run: CompoundRun
    step: BoundCall | None
    is_on_cpu: bool
    """Whether the fallback executes it. `model` then blocks while the CPU's driver starts and prepares the model."""

    def model(self) -> PreparedModel:
        """Return the prepared model to execute. Raises NnfmqError if it must be prepared first, and that fails."""
        return self.run.model_of(self)

    def request(self, model: PreparedModel) -> Request:
        """Return the request to execute."""
        return self.run.request_of(self, model)

    def execute(self) -> Sequence[OutputShape]:
        """Execute over the control channel and return the reported shapes; blocks. Raises NnfmqError if that fails."""
        model = self.model()
        return execute_request(model.handle, self.request(model), self.run.config, self.run.deadline_ns).shapes

    def execute_copies(self) -> Sequence[OutputShape]:
        """As `execute`, with copies of the values.

        An execution that a signal handler interrupts continues in the driver: it must not write to memory that the next
        one uses.
        """
        return self.run.execute_copies_of(self)


class CompoundRun:
    """One execution of a plan. `memory` has the model's inputs and outputs, and is used by nothing else meanwhile.

    `result` tells the model's observers of a success; the mode tells `observation` of an error. Each step gets what is
    left of the time until `deadline_ns`.
    """

    def __init__(
        self,
        handle: PlanHandle,
        memory: ExecutionMemory,
        config: ExecutionConfig,
        mode: HalExecutionMode,
        deadline_ns: int | None = None,
    ) -> None:
        self.config, self.deadline_ns = config, deadline_ns
        self.observation = RunObservation(handle.observed, mode)
        if vlog_is_on("execution"):
            vlog("execution", "%s execution of a plan on %s", mode.name, handle.device)
        self._handle = handle
        self.memory = memory
        self._controller = Controller(memory, config.loop_timeout_ns)
        self._call: PlanCall | None = None
        self._is_repeated = False
        memory.reset()

    def next_call(self) -> PlanCall | None:
        """Return the next call; None if the execution is done.

        Raises:
            MissedDeadline: If the deadline has passed, and a call would follow.
            NnfmqError: If the execution has failed between two steps.
        """
        has_begun = self._call is not None
        if self._is_repeated:
            self._is_repeated = False
        elif self._call is not None and self._call.step is None:  # the whole model was executed
            return None
        else:
            step = self._controller.next()
            self._call = None if step is None else PlanCall(self, step, is_on_cpu=False)
        if self._call is None:
            return None
        require_time_left(self.deadline_ns, has_begun=has_begun)
        if vlog_is_on("execution"):
            log_step(*self._description_of(self._call))
        return self._call

    def repeat_call(self) -> None:
        """Let the next call be the last one again, which was not made."""
        self._is_repeated = True

    def _description_of(self, call: PlanCall) -> tuple[int | None, str, bool]:
        """Return the number of a call's step (None = the whole model), its device, and whether the CPU executes it."""
        if call.step is None:
            return None, "", True
        return call.step.index, self._handle.steps[call.step.index].device, call.is_on_cpu

    def slice_of(self, call: PlanCall) -> str:
        """Return the name of a call's slice in a trace."""
        return step_slice(*self._description_of(call))

    @property
    def is_interpreted(self) -> bool:
        """Whether the runtime interprets IF and WHILE between steps."""
        bound = self._handle.bound
        return len(bound.calls) < len(bound.steps)

    def model_of(self, call: PlanCall) -> PreparedModel:
        """Return the prepared model of a call. See `PlanCall.model`."""
        fallback = self._handle.fallback
        if not call.is_on_cpu or fallback is None:
            assert call.step is not None  # only the fallback has the whole model
            return self._handle.steps[call.step.index]
        if call.step is None:
            return fallback.whole_model(self.deadline_ns)
        return fallback.step_model(call.step.index, self.deadline_ns)

    def request_of(self, call: PlanCall, model: PreparedModel) -> Request:
        """Return the request of a call."""
        inputs, outputs = self._values_of(call)
        return step_request(self.memory.locations, inputs, outputs, (model.handle.inputs, model.handle.outputs))

    def execute_copies_of(self, call: PlanCall) -> Sequence[OutputShape]:
        """Execute a call with copies. See `PlanCall.execute_copies`."""
        model, (inputs, outputs) = call.model().handle, self._values_of(call)
        arrays = [array_at(self.memory.locations[i], info) for i, info in zip(inputs, model.inputs, strict=True)]
        results, _ = execute_arrays(model, arrays, None, self.config, self.deadline_ns)
        shapes = []
        for number, result in zip(outputs, results, strict=True):
            if isinstance(result, np.ndarray):
                self.memory.write(number, result)
                shapes.append(OutputShape(result.shape))
        return shapes

    def _values_of(self, call: PlanCall) -> tuple[Sequence[int], Sequence[int]]:
        source = self.memory.plan if call.step is None else call.step
        return source.inputs, source.outputs

    def succeed(self, shapes: Sequence[OutputShape]) -> None:
        """Report that the last call has succeeded, with the shapes that its driver reported.

        Raises:
            GeneralFailure: If another step needs a result without elements, and there is no fallback.
        """
        assert self._call is not None
        outputs = self._values_of(self._call)[1]
        for number, shape in zip(outputs, shapes, strict=bool(shapes)):
            self.memory.locations[number].dimensions = shape.dimensions
        if self._call.step is not None:
            empty = [n for n in outputs if n in self._handle.step_inputs and 0 in self.memory.locations[n].dimensions]
            if empty:
                self.execute_whole_model(GeneralFailure("a result that another step needs has no elements"))

    def fail(self, error: NnfmqError) -> None:
        """Report that the last call has failed; returns if another call follows.

        Raises:
            NnfmqError: The error of the execution, if none follows.
        """
        assert self._call is not None
        if isinstance(error, OutputInsufficientSize):
            self._grow(self._call, error)
            self._is_repeated = True
            return
        try:
            if self._call.step is None:
                raise error
            if self._call.is_on_cpu or self._handle.is_cpu_step(self._call.step.index):
                self.execute_whole_model(error)
                return
            self._require_fallback(error)
            index = self._call.step.index
            device = self._handle.steps[index].device
            _log.warning("step %d failed on %s, executing it on the CPU: %s", index, device, str(error))
        finally:
            del error  # this frame, to which it refers, would keep it
        self._repeat(PlanCall(self, self._call.step, is_on_cpu=True))

    def execute_whole_model(self, error: NnfmqError) -> None:
        """Let the whole model on the CPU be the next call, because of `error`; raise that if there is no fallback."""
        try:
            self._require_fallback(error)
            _log.warning("executing the whole model on the CPU: %s", str(error))  # a record would keep its frames
        finally:
            del error  # as above
        self.memory.reset()
        self._repeat(PlanCall(self, None, is_on_cpu=True))

    def _require_fallback(self, error: NnfmqError) -> None:
        fallback = self._handle.fallback
        try:
            if fallback is None or not fallback.applies_to(error, self.deadline_ns):
                raise error
        finally:
            del error  # as above

    def _repeat(self, call: PlanCall) -> None:
        self._call, self._is_repeated = call, True

    def _grow(self, call: PlanCall, error: OutputInsufficientSize) -> None:
        """Enlarge the memory of outputs that lack some; raise OutputInsufficientSize if that is not possible."""
        locations, has_grown, lacks_memory = self.memory.locations, False, set()
        for number, shape in zip(self._values_of(call)[1], error.output_shapes, strict=False):
            location = locations[number]
            location.dimensions = shape.dimensions
            if 0 not in shape.dimensions:
                has_grown |= self.memory.grow(number, location.size_of(shape.dimensions))
            if not (shape.is_sufficient or location.is_growable):
                lacks_memory.add(number)
        if lacks_memory or not has_grown:
            shapes = [OutputShape(locations[n].dimensions, n not in lacks_memory) for n in self.memory.plan.outputs]
            raise OutputInsufficientSize(str(error), tuple(shapes)) from error

    def result(self) -> ExecutionResult:
        """Return the result of an execution that is done: the shapes of all outputs, if not all were known."""
        self.observation.finish()
        locations = [self.memory.locations[number] for number in self.memory.plan.outputs]
        shapes = tuple(OutputShape(location.dimensions) for location in locations)
        return ExecutionResult(shapes if self._handle.has_unknown_outputs else (), NO_TIMING)


def run_synchronously(run: CompoundRun, execute: Callable[[PlanCall], Sequence[OutputShape]]) -> ExecutionResult:
    """Make all calls of an execution on this thread, with `execute`, and return the result. Blocks.

    Raises:
        NnfmqError: The error of the execution.
    """
    try:
        if TRACING.recorder is None:
            return _make_calls(run, run.next_call, execute)
        return _make_recorded_calls(run, execute)
    except NnfmqError as error:
        run.observation.fail(error)
        raise


def _make_calls(
    run: CompoundRun, next_call: Callable[[], PlanCall | None], execute: Callable[[PlanCall], Sequence[OutputShape]]
) -> ExecutionResult:
    while (call := next_call()) is not None:
        try:
            shapes = execute(call)
        except NnfmqError as error:
            run.fail(error)
        else:
            run.succeed(shapes)
    return run.result()


def _make_recorded_calls(run: CompoundRun, execute: Callable[[PlanCall], Sequence[OutputShape]]) -> ExecutionResult:
    """Make all calls as `_make_calls`, with slices of the layer LR in this process's trace (OBS-7)."""

    def next_call() -> PlanCall | None:
        if not run.is_interpreted:
            return run.next_call()
        with recorded(INTERPRETATION_SLICE):
            return run.next_call()

    def execute_recorded(call: PlanCall) -> Sequence[OutputShape]:
        with recorded(run.slice_of(call)):
            return execute(call)

    with recorded(PLAN_SLICE):
        return _make_calls(run, next_call, execute_recorded)
