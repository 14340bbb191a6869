"""CompoundRequest: a request of a plan that is bound once and computed many times, with an execution for each step.

The drivers of the steps validate and bind their requests once. Steps whose values change their size, and steps of
drivers without reusable executions, are sent for each computation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Self, TypeVar

from nnfmq.deadlines import deadline_after
from nnfmq.hal.errors import BadState, InvalidArgument, MissedDeadline, NnfmqError
from nnfmq.hal.timing import NO_TIMING
from nnfmq.hal.types import ExecutionConfig, HalExecutionMode, OutputShape, Request
from nnfmq.runtime.exclusive_use import exclusive
from nnfmq.runtime.execution_result import ExecutionResult
from nnfmq.runtime.fenced_execution import FencedExecution, FencedTiming, FenceLimits
from nnfmq.runtime.plan_execution.bound_plan import BoundCall
from nnfmq.runtime.plan_execution.compound_async import AsyncRun, Completion
from nnfmq.runtime.plan_execution.compound_fenced import launch_compound_fenced
from nnfmq.runtime.plan_execution.compound_run import CompoundRun, PlanCall, run_synchronously
from nnfmq.runtime.plan_execution.plan_handle import PlanHandle
from nnfmq.runtime.plan_execution.value_locations import step_request
from nnfmq.runtime.reusable_execution import BoundRequest, RequestExecution

__all__ = ["CompoundRequest"]

ResultT = TypeVar("ResultT")


class CompoundRequest(BoundRequest):
    """A request of a model on several devices, which it outlives.

    After a computation that a signal handler has interrupted, or that has missed its deadline in a step whose driver
    has not bound it, there is none any more: the step may still write to the memories.
    """

    def __init__(self, handle: PlanHandle, config: ExecutionConfig) -> None:
        self._handle, self._config = handle, config
        self._was_interrupted = self._was_sent = self._is_closed = False
        self._fenced_runs: list[object] = []  # at most one, while it runs
        self._claims: dict[int, object] = {}  # see `exclusive_use`
        self._resources = ExitStack()
        handle.add_user()
        self._resources.callback(handle.remove_user)
        self._memory = handle.new_memory()
        self._resources.callback(self._memory.close)
        self._steps: list[RequestExecution | None] = []

    @classmethod
    def create(
        cls, handle: PlanHandle, request: Request, config: ExecutionConfig, deadline_ns: int | None, is_reusable: bool
    ) -> Self:
        """Return the request, which the drivers bind if it is reusable; blocks. Borrows its pools.

        Raises:
            InvalidArgument: If the request is invalid, or the model is closed.
            NnfmqError: The error of a driver.
        """
        from nnfmq.validation.request import validate_request  # few applications make requests

        validate_request(handle.plan.model, request)
        bound = cls(handle, config)
        try:
            bound._memory.bind(request)
            for call in handle.bound.calls:
                bound._steps.append(bound._create_step(call, deadline_ns) if is_reusable else None)
        except BaseException:
            bound.close()
            raise
        return bound

    def _create_step(self, call: BoundCall, deadline_ns: int | None) -> RequestExecution | None:
        model, fallback = self._handle.steps[call.index].handle, self._handle.fallback
        if self._handle.has_dynamic_temporaries or not model.connection.has_reusable_executions:
            return None
        request = step_request(self._memory.locations, call.inputs, call.outputs, (model.inputs, model.outputs))
        try:
            step = RequestExecution.create(model, request, self._config, deadline_ns)
        except NnfmqError as error:
            if fallback is None or not fallback.applies_to(error, deadline_ns):
                raise
            return None
        self._resources.callback(step.close)
        return step

    @exclusive
    def compute(self, *, timeout: float | None = None) -> ExecutionResult:
        """Execute once and return the shapes of the outputs; blocks. See `BoundRequest.compute`.

        Raises:
            BadState: If a computation was interrupted.
        """
        deadline_ns = deadline_after(timeout)
        self._require_computable()
        self._was_interrupted, self._was_sent = True, False
        run = self._new_run(HalExecutionMode.REUSABLE, deadline_ns)
        try:
            result = run_synchronously(run, self._execute_step)
        except NnfmqError as error:
            # A step that its driver has bound is not executed again before it has ended.
            is_late = isinstance(error, MissedDeadline) and deadline_ns is not None
            self._was_interrupted = is_late and self._was_sent
            raise
        self._was_interrupted = False
        return result

    def _execute_step(self, call: PlanCall) -> Sequence[OutputShape]:
        step = None if call.is_on_cpu or call.step is None else self._steps[call.step.index]
        if step is None:
            self._was_sent = True
            return call.execute()
        return step.compute_until(call.run.deadline_ns).shapes

    @exclusive
    def launch(self, limits: FenceLimits, collect: Callable[[FencedTiming], ResultT]) -> FencedExecution[ResultT]:
        """Launch once, behind fences; blocks until launched. See `BoundRequest.launch`.

        `collect` is called when the execution is done.
        """
        self._require_computable()

        def new_run(completion: Completion[ResultT]) -> AsyncRun[ResultT]:
            self._handle.add_user(is_used=True)  # this request may outlive its model
            self._fenced_runs.append(completion)
            run = self._new_run(HalExecutionMode.FENCED, None)
            times = FencedTiming(NO_TIMING, NO_TIMING)
            return AsyncRun(self._handle, run, lambda _result: collect(times), self._end_fenced_run, completion)

        return launch_compound_fenced(self._handle, limits, new_run)

    def _end_fenced_run(self, _is_successful: bool) -> None:
        self._fenced_runs.clear()

    def _new_run(self, mode: HalExecutionMode, deadline_ns: int | None) -> CompoundRun:
        return CompoundRun(self._handle, self._memory, self._config, mode, deadline_ns)

    def _busy_error(self) -> Exception:
        return InvalidArgument("this execution is running; one run at a time (RUX-3)")

    def _require_computable(self) -> None:
        if self._is_closed:
            raise BadState("this execution is closed")
        if self._fenced_runs:
            raise self._busy_error()
        if self._was_interrupted:
            raise BadState("this execution was interrupted, and its step may still be running; make a new one")

    def close(self) -> None:
        """Release the steps' executions in their drivers, and the memory; a computation in progress continues."""
        self._is_closed = True
        self._resources.close()
