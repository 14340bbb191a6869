"""Executions of a plan: the rules of one, for every execution mode.

CompoundRun decides, and calls no driver. The mode asks for the next call, makes it, and reports the result or the
error, until no call is left:

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
import time
from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct

from nnfmq.base.deadlines import has_passed
from nnfmq.base.verbose_log import vlog, vlog_is_on
from nnfmq.client.execution import synchronous
from nnfmq.client.model.arrays import ExecutionResult
from nnfmq.client.model.handle import ModelHandle
from nnfmq.client.observation import ObservedModel
from nnfmq.client.partitioned.controller import Controller
from nnfmq.client.partitioned.handle import PlanHandle
from nnfmq.client.partitioned.memory import ExecutionMemory
from nnfmq.client.partitioned.plan import BoundCall, array_at, step_request
from nnfmq.hal.errors import (
    ErrorStatus,
    GeneralFailure,
    InvalidArgument,
    MissedDeadlinePersistent,
    MissedDeadlineTransient,
    NnfmqError,
    OutputInsufficientSize,
)
from nnfmq.hal.timing import NO_TIME, NO_TIMING
from nnfmq.hal.types import ExecutionConfig, HalExecutionMode, OutputShape, Request
from nnfmq.observe.executions import ObservedExecution
from nnfmq.observe.trace_points import TRACING, recorded

__all__ = [
    "INTERPRETATION_SLICE",
    "PLAN_SLICE",
    "CompoundRun",
    "PlanCall",
    "RunObservation",
    "call_slice",
    "log_call",
    "require_time_left",
    "require_unmeasured",
    "run_synchronously",
]


# ----------------------------------------------------------------------------------------------------------------------
# The limits of an execution on several devices: its deadline holds for all steps, and times are not measured.


def require_unmeasured(measure: bool) -> None:
    """Raise InvalidArgument if an execution on several devices is to be measured (TIM-1)."""
    if measure:
        raise InvalidArgument(
            "`measure` needs a model on one device, and this one is on several: prepare it on a device that you "
            "choose, with client.device(name).prepare(model), or leave `measure` out"
        )


def require_time_left(deadline_ns: int | None, *, has_begun: bool) -> None:
    """Raise MissedDeadline if an execution's deadline has passed (QOS-2, QOS-3).

    Raises:
        MissedDeadlinePersistent: If the execution has not begun.
        MissedDeadlineTransient: If it has.
    """
    if not has_passed(deadline_ns):
        return
    if has_begun:
        raise MissedDeadlineTransient("the deadline passed between two steps of the model")
    raise MissedDeadlinePersistent("the deadline had passed before the execution began")


# ----------------------------------------------------------------------------------------------------------------------
# What observers, the trace and the verbose log are told of an execution of a plan (OBS-2, OBS-5, OBS-7).
#
# The trace has a slice of the layer LR around each execution on the caller's thread, in it one for each step, and one
# for what the runtime does itself between two steps: it interprets IF and WHILE, and copies the values of loops.
# Executions that are continued on the watcher thread have none, because their slices would not nest.


PLAN_SLICE = "[NN_LR_PE]plan"
INTERPRETATION_SLICE = "[NN_LR_PCO]interpretation"


class RunObservation:
    """One execution of a plan, for the observers of its model; `observed` is None if there are none.

    The first of `finish` and `fail` reports the execution; later calls do nothing. Times are those of the whole
    execution; a plan has no measured ones, and its tensors are not shown.
    """

    __slots__ = ("_begin_ns", "_mode", "_observed")

    def __init__(self, observed: ObservedModel | None, mode: HalExecutionMode) -> None:
        self._observed = observed
        self._mode = mode
        self._begin_ns = time.monotonic_ns() if observed is not None else 0

    def finish(self) -> None:
        """Report success."""
        self._report(ErrorStatus.NONE)

    def fail(self, error: NnfmqError) -> None:
        """Report an error."""
        self._report(error.status)

    def _report(self, status: ErrorStatus) -> None:
        observed, self._observed = self._observed, None
        if observed is not None:
            observed.report(
                ObservedExecution(
                    self._mode, status, self._begin_ns, self._begin_ns, time.monotonic_ns(), None,
                    NO_TIME, NO_TIME, None, None,
                )
            )  # fmt: skip


def call_slice(call: PlanCall) -> str:
    """Return the name of a call's slice in a trace."""
    if call.step is None:
        return "[NN_LR_PE]fallback: whole model"
    index = call.step.index
    return f"[NN_LR_PE]fallback: step {index}" if call.is_on_cpu else f"[NN_LR_PE]step {index} on {call.device}"


def log_call(call: PlanCall) -> None:
    """Log which step is executed next, and where."""
    if call.step is None:
        vlog("execution", "the CPU executes the whole model")
    else:
        vlog("execution", "step %d on %s", call.step.index, "the CPU" if call.is_on_cpu else call.device)


# ----------------------------------------------------------------------------------------------------------------------
# CompoundRun: the rules of one execution of a plan, for every execution mode; it decides, and calls no driver.


_log = logging.getLogger("nnfmq.runtime")


class PlanCall(Struct, frozen=True):
    """A call that the execution mode makes next: a step of the plan, or the whole model (`step` is None) on the CPU."""

    run: CompoundRun
    step: BoundCall | None
    is_on_cpu: bool
    """Whether the fallback executes it. `model` then blocks while the CPU's driver starts and prepares the model."""

    @property
    def values(self) -> tuple[Sequence[int], Sequence[int]]:
        """The numbers of the values that the call reads, and of those that it writes."""
        source = self.run.memory.plan if self.step is None else self.step
        return source.inputs, source.outputs

    @property
    def device(self) -> str:
        """The name of the step's device; "" for the whole model."""
        return "" if self.step is None else self.run.handle.step_devices[self.step.index]

    def model(self) -> ModelHandle:
        """Return the prepared model to execute. Raises NnfmqError if it must be prepared first, and that fails."""
        handle, fallback, deadline_ns = self.run.handle, self.run.handle.fallback, self.run.deadline_ns
        if not self.is_on_cpu or fallback is None:
            assert self.step is not None  # only the fallback has the whole model
            return handle.steps[self.step.index]
        if self.step is None:
            return fallback.whole_model(deadline_ns)
        return fallback.step_model(self.step.index, deadline_ns)

    def request(self, model: ModelHandle) -> Request:
        """Return the request to execute."""
        inputs, outputs = self.values
        return step_request(self.run.memory.locations, inputs, outputs, (model.inputs, model.outputs))

    def execute(self) -> Sequence[OutputShape]:
        """Execute over the control channel and return the reported shapes; blocks. Raises NnfmqError if that fails."""
        model, run = self.model(), self.run
        return synchronous.execute_request(model, self.request(model), run.config, run.deadline_ns).shapes

    def execute_copies(self) -> Sequence[OutputShape]:
        """As `execute`, with copies of the values.

        An execution that a signal handler interrupts continues in the driver: it must not write to memory that the next
        one uses.
        """
        model, memory, (inputs, outputs) = self.model(), self.run.memory, self.values
        arrays = [array_at(memory.locations[i], info) for i, info in zip(inputs, model.inputs, strict=True)]
        results, _ = synchronous.execute_arrays(model, arrays, None, self.run.config, self.run.deadline_ns)
        shapes = []
        for number, result in zip(outputs, results, strict=True):
            if isinstance(result, np.ndarray):
                memory.write(number, result)
                shapes.append(OutputShape(result.shape))
        return shapes


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
        self.handle = handle
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
            log_call(self._call)
        return self._call

    def repeat_call(self) -> None:
        """Let the next call be the last one again, which was not made."""
        self._is_repeated = True

    @property
    def is_interpreted(self) -> bool:
        """Whether the runtime interprets IF and WHILE between steps."""
        bound = self.handle.bound
        return len(bound.calls) < len(bound.steps)

    def succeed(self, shapes: Sequence[OutputShape]) -> None:
        """Report that the last call has succeeded, with the shapes that its driver reported.

        Raises:
            GeneralFailure: If another step needs a result without elements, and there is no fallback.
        """
        assert self._call is not None
        outputs = self._call.values[1]
        for number, shape in zip(outputs, shapes, strict=bool(shapes)):
            self.memory.locations[number].dimensions = shape.dimensions
        if self._call.step is not None:
            empty = [n for n in outputs if n in self.handle.step_inputs and 0 in self.memory.locations[n].dimensions]
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
            if self._call.is_on_cpu or self.handle.is_cpu_step(self._call.step.index):
                self.execute_whole_model(error)
                return
            self._require_fallback(error)
            index = self._call.step.index
            _log.warning("step %d failed on %s, executing it on the CPU: %s", index, self._call.device, str(error))
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
        fallback = self.handle.fallback
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
        for number, shape in zip(call.values[1], error.output_shapes, strict=False):
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
        return ExecutionResult(shapes if self.handle.has_unknown_outputs else (), NO_TIMING)


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
        with recorded(call_slice(call)):
            return execute(call)

    with recorded(PLAN_SLICE):
        return _make_calls(run, next_call, execute_recorded)
