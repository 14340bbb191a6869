"""PartitionedModel: a model whose plan has several steps.

The runtime keeps the values between the steps in shared memory, which the drivers map, and interprets the IF and WHILE
that no device takes. If a step fails it may execute on the CPU instead; see docs/explanation/runtime.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, NoReturn, Self, TypeVar

from nnfmq.base.deadlines import deadline_after, remaining_s
from nnfmq.base.ownership import Claims, exclusive
from nnfmq.client.connection.connection import ResultHandler
from nnfmq.client.connection.defaults import DEFAULT_TIMEOUT_S
from nnfmq.client.execution.asynchronous import PendingExecution
from nnfmq.client.execution.fenced import FencedExecution, FencedTiming, FenceLimits
from nnfmq.client.execution.reusable import BoundRequest, RequestExecution
from nnfmq.client.model.arrays import Array, ExecutionResult, InputValue, Outputs
from nnfmq.client.model.buffers import Buffer
from nnfmq.client.model.compiled_model import CompiledModel
from nnfmq.client.model.handle import ModelFallback
from nnfmq.client.model.prepared_model import PreparedModel
from nnfmq.client.partitioned import asynchronous, fenced, synchronous
from nnfmq.client.partitioned.asynchronous import AsyncRun
from nnfmq.client.partitioned.executions import CompoundRun, PlanCall, require_unmeasured, run_synchronously
from nnfmq.client.partitioned.fenced import launch_compound_fenced
from nnfmq.client.partitioned.handle import PlanHandle
from nnfmq.client.partitioned.plan import BoundCall, step_request
from nnfmq.hal.errors import BadState, InvalidArgument, MissedDeadline, NnfmqError
from nnfmq.hal.tensor_info import StateInfo, TensorInfo
from nnfmq.hal.timing import NO_TIMING
from nnfmq.hal.types import ExecutionConfig, HalExecutionMode, MeasureTiming, OutputShape, Request
from nnfmq.planning.plan import ExecutionPlan
from nnfmq.validation.requests import validate_request

if TYPE_CHECKING:
    from nnfmq.client.partitioned.burst import CompoundBurst

__all__ = ["CompoundRequest", "PartitionedModel"]


class PartitionedModel(CompiledModel):
    """A model on several devices, whose names are `device`. Close it, or use `with`. Thread-safe.

    Timeouts hold for the whole model: each step gets the time that is left. Times cannot be measured, because those are
    for one device: `measure` raises InvalidArgument. To use it, prepare the model on a device that you choose.

    Args:
        plan: A compound plan.
        steps: A prepared model for each of its execution steps. This object owns them.
        fallback: Executes on the CPU what fails elsewhere; None = the first failure is the result. Owned, too.
        inputs: The model's inputs, without its states.
        outputs: The model's outputs, without its states.
        states: The model's states.
    """

    handle: PlanHandle

    def __init__(
        self,
        plan: ExecutionPlan,
        steps: Sequence[PreparedModel],
        fallback: ModelFallback | None,
        inputs: tuple[TensorInfo, ...],
        outputs: tuple[TensorInfo, ...],
        states: tuple[StateInfo, ...] = (),
    ) -> None:
        self.steps = tuple(steps)
        """The prepared models of the plan's execution steps."""
        handles, devices = [step.handle for step in steps], [step.device for step in steps]
        self.handle = PlanHandle(plan, handles, devices, fallback, inputs, outputs, states)
        super().__init__(inputs, outputs, self.handle.device, states)

    @property
    def plan(self) -> ExecutionPlan:
        """The device of each operation."""
        return self.handle.plan

    @property
    def _padding(self) -> int:
        return 1  # every device accepts it

    def _check_config(self, config: ExecutionConfig) -> None:
        require_unmeasured(config.measure is MeasureTiming.YES)

    # ------------------------------------------------------------------------------------------------ arrays

    def _execute_arrays(
        self,
        inputs: Sequence[InputValue | Buffer],
        out: Sequence[Array | Buffer] | None,
        config: ExecutionConfig,
        deadline_ns: int | None,
    ) -> tuple[Array | Buffer, ...]:
        return synchronous.execute_arrays(self.handle, inputs, out, config, deadline_ns)

    def _start_arrays(
        self, inputs: Sequence[InputValue], config: ExecutionConfig, deadline_ns: int | None
    ) -> PendingExecution[Outputs]:
        return asynchronous.start_arrays(self.handle, inputs, config, deadline_ns)

    def _launch_arrays(
        self, inputs: Sequence[InputValue], config: ExecutionConfig, limits: FenceLimits
    ) -> FencedExecution[Outputs]:
        return fenced.launch_arrays(self.handle, inputs, config, limits)

    def burst(
        self, *, polling_window_us: float | None = None, timeout: float | None = DEFAULT_TIMEOUT_S
    ) -> CompoundBurst:
        """Configure a burst for each step, over memory that they share, as `CompiledModel.burst`. Blocks."""
        return self._configure_burst(polling_window_us, deadline_after(timeout))

    def _configure_burst(
        self, polling_window_us: float | None, deadline_ns: int | None, *, with_memory: bool = True
    ) -> CompoundBurst:
        from nnfmq.client.partitioned.burst import CompoundBurst  # with the queues' core, when it is first used

        return CompoundBurst.configure(self.handle, polling_window_us, deadline_ns, with_memory=with_memory)

    # ------------------------------------------------------------------------------------------------ HAL requests

    def _execute_request(self, request: Request, config: ExecutionConfig, deadline_ns: int | None) -> ExecutionResult:
        return synchronous.execute_request(self.handle, request, config, deadline_ns)

    def _start_request(
        self, request: Request, config: ExecutionConfig, deadline_ns: int | None
    ) -> PendingExecution[ExecutionResult]:
        return asynchronous.start_request(self.handle, request, config, deadline_ns)

    def _launch_request(
        self, request: Request, config: ExecutionConfig, limits: FenceLimits
    ) -> FencedExecution[FencedTiming]:
        return fenced.launch_request(self.handle, request, config, limits)

    def _bind(
        self, request: Request, config: ExecutionConfig, deadline_ns: int | None, is_reusable: bool
    ) -> BoundRequest:

        return CompoundRequest.create(self.handle, request, config, deadline_ns, is_reusable)

    def request_burst(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> CompoundBurst:
        """Configure a burst for each step, which only have `execute_request`. Blocks. See `CompiledModel`."""
        return self._configure_burst(None, deadline_after(timeout), with_memory=False)

    def aidl_burst(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> NoReturn:
        """Raise InvalidArgument: an AIDL burst is of one driver, which knows the tokens of its memories."""
        raise InvalidArgument(
            f"an AIDL burst needs a model on one device, and this one is on {self.device}: use request_burst(), which "
            "has a burst for each step, or prepare the model with client.device(name).prepare(model)"
        )

    def close(self) -> None:
        """Release the steps in their drivers after the executions in progress; bursts remain usable. Idempotent."""
        self.handle.close()


# ----------------------------------------------------------------------------------------------------------------------
# CompoundRequest: a request of a plan that is bound once and computed many times, with an execution for each step.
#
# The drivers of the steps validate and bind their requests once. Steps whose values change their size, and steps of
# drivers without reusable executions, are sent for each computation.


ResultT = TypeVar("ResultT")


class CompoundRequest(BoundRequest):
    """A request of a model on several devices, which it outlives.

    After a computation that a signal handler has interrupted, or that has missed its deadline in a step whose driver
    has not bound it, there is none any more: the step may still write to the memories.
    """

    def __init__(self, handle: PlanHandle, config: ExecutionConfig) -> None:
        super().__init__()
        self._handle, self._config = handle, config
        self._was_interrupted = self._was_sent = self._is_closed = False
        self._fenced_runs: list[object] = []  # at most one, while it runs
        self._claims: Claims = {}
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
        model, fallback = self._handle.steps[call.index], self._handle.fallback
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
        self.late.wait(deadline_ns)
        self._was_interrupted, self._was_sent = True, False
        run = self._new_run(HalExecutionMode.REUSABLE, deadline_ns)
        try:
            result = run_synchronously(run, self._execute_step)
        except NnfmqError as error:
            # `late` is a step that its driver has bound: nothing is executed before it has ended.
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
        return step.compute_until(call.run.deadline_ns, self.late).shapes

    @exclusive
    def launch(self, limits: FenceLimits, collect: Callable[[FencedTiming], ResultT]) -> FencedExecution[ResultT]:
        """Launch once, behind fences; blocks until launched. See `BoundRequest.launch`.

        `collect` is called when the execution is done.
        """
        self._require_computable()
        deadline_ns = deadline_after(limits.timeout)
        self.late.wait(deadline_ns)
        limits = limits._replace(timeout=remaining_s(deadline_ns))

        def new_run(completion: ResultHandler[ResultT]) -> AsyncRun[ResultT]:
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
        self.late.close()
        self._resources.close()
