"""CompoundExecution: a plan bound once to its own arrays and computed many times, with an execution for each step.

The drivers of the steps validate and bind their requests once. Steps whose values change their size, and steps of
drivers without reusable executions, are sent for each computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from numpy.typing import ArrayLike

from nnfmq.fence import HasFileno
from nnfmq.hal.errors import BadState, InvalidArgument, NnfmqError
from nnfmq.hal.timing import Timing
from nnfmq.hal.types import ExecutionConfig, HalExecutionMode, OutputShape
from nnfmq.runtime.array_checks import no_inputs_error
from nnfmq.runtime.exclusive_use import exclusive
from nnfmq.runtime.execution_result import ExecutionResult
from nnfmq.runtime.fenced_execution import fence_fds
from nnfmq.runtime.mapped_arrays import MappedArrays
from nnfmq.runtime.model_state import HasState, MappedState, require_no_state
from nnfmq.runtime.plan_execution.bound_plan import BoundCall
from nnfmq.runtime.plan_execution.compound_async import AsyncRun, Completion
from nnfmq.runtime.plan_execution.compound_fenced import CompoundFencedExecution, launch_compound_fenced
from nnfmq.runtime.plan_execution.compound_run import CompoundRun, PlanCall, run_synchronously
from nnfmq.runtime.plan_execution.one_device import require_no_time_limits
from nnfmq.runtime.plan_execution.plan_handle import PlanHandle
from nnfmq.runtime.plan_execution.value_locations import step_request
from nnfmq.runtime.reusable_execution import RequestExecution
from nnfmq.runtime.tensor_layout import Array
from nnfmq.uncopyable import Uncopyable

__all__ = ["CompoundExecution"]


class CompoundExecution(Uncopyable, HasState):
    """An execution of a model on several devices, used as an Execution. Close it, or use `with`.

    One computation at a time. After one that a signal handler has interrupted, there is none any more: its step may
    still write to the arrays.
    """

    def __init__(self, handle: PlanHandle, config: ExecutionConfig, is_reusable: bool) -> None:
        self.is_reusable = is_reusable
        self.last_timing = Timing()
        self._handle, self._config = handle, config
        self._was_computed = self._was_interrupted = False
        self._fenced_runs: list[object] = []  # at most one, while it runs
        self._claims: dict[int, object] = {}  # see `exclusive_use`
        self._resources = ExitStack()
        handle.add_user()
        self._resources.callback(handle.remove_user)
        self._memory = handle.new_memory()
        self._resources.callback(self._memory.close)
        self._steps: list[RequestExecution | None] = []
        self._arrays: MappedArrays | None = None
        self._inputs: tuple[Array, ...] = ()
        self._has_inputs = False
        self.outputs: tuple[Array, ...] = ()

    @classmethod
    def create(cls, handle: PlanHandle, config: ExecutionConfig, deadline_ns: int | None, reusable: bool) -> Self:
        """Allocate the arrays and, if reusable, make the drivers bind them; blocks.

        Raises:
            InvalidArgument: If a shape of an input or output is not fully known, or the model is closed.
            NnfmqError: The error of a driver.
        """
        execution = cls(handle, config, reusable)
        try:
            execution._arrays = arrays = MappedArrays.create(handle, execution._resources, "a reusable execution")
            execution._inputs, execution.outputs = arrays.inputs, arrays.outputs
            execution._state = arrays.state
            execution._memory.bind(arrays.request)
            for call in handle.bound.calls:
                execution._steps.append(execution._create_step(call, deadline_ns))
        except BaseException:
            execution.close()
            raise
        return execution

    def _create_step(self, call: BoundCall, deadline_ns: int | None) -> RequestExecution | None:
        model, fallback = self._handle.steps[call.index].handle, self._handle.fallback
        is_fixed = not self._handle.has_dynamic_temporaries and model.connection.has_reusable_executions
        if not (self.is_reusable and is_fixed):
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

    def __repr__(self) -> str:
        kind = "reusable" if self.is_reusable else "computable once"
        return f"<CompoundExecution, {kind}: {self._handle.signature if self._arrays is not None else 'closed'}>"

    @property
    def inputs(self) -> tuple[Array, ...]:
        """The input arrays over the shared memory; empty once closed."""
        self._has_inputs = True  # what the application does with the arrays cannot be seen from here
        return self._inputs

    @exclusive
    def compute(
        self, *inputs: ArrayLike, out: Sequence[Array] | None = None, timeout: float | None = None
    ) -> tuple[Array, ...]:
        """Compute once and return the outputs; blocks. Arguments as for `Execution.compute`.

        Raises:
            BadState: If a computation is in progress or was interrupted, or this one was computed and is not reusable.
            InvalidArgument: If `timeout` is given, an array's shape, dtype or number is wrong, or there are no inputs.
            NnfmqError: The error of a step, if there is no fallback for it; otherwise that of the fallback.
        """
        require_no_time_limits(False, timeout)
        self._require_computable()
        self._open_arrays.check_out(out)
        self._copy_in(inputs)
        if isinstance(self._state, MappedState):
            self._state.begin()
        self._was_interrupted = True
        try:
            run_synchronously(self._new_compound_run(HalExecutionMode.REUSABLE), self._execute_step)
        except NnfmqError:
            self._was_interrupted = False
            raise
        self._was_interrupted = False
        if isinstance(self._state, MappedState):
            self._state.advance()
        return self._open_arrays.copy_out(out)

    def _execute_step(self, call: PlanCall) -> Sequence[OutputShape]:
        step = None if call.is_on_cpu or call.step is None else self._steps[call.step.index]
        return call.execute() if step is None else step.compute().shapes

    @exclusive
    def compute_fenced(
        self,
        *inputs: ArrayLike,
        wait_for: Sequence[HasFileno | int] = (),
        timeout: float | None = None,
        duration: float | None = None,
    ) -> CompoundFencedExecution[tuple[Array, ...]]:
        """Compute once when all fences of `wait_for` are signaled; blocks until launched. The caller closes the result.

        Arguments as for `Execution.compute_fenced`. Raises as `compute`.
        """
        require_no_time_limits(False, timeout, duration)
        self._require_computable()
        require_no_state(self.states, "compute")
        self._copy_in(inputs)
        return launch_compound_fenced(self._handle, fence_fds(wait_for), self._new_run)

    def _new_run(self, completion: Completion[tuple[Array, ...]]) -> AsyncRun[tuple[Array, ...]]:
        self._handle.add_user()
        self._fenced_runs.append(completion)
        run = self._new_compound_run(HalExecutionMode.FENCED)
        return AsyncRun(self._handle, run, self._copies, lambda _is_successful: self._fenced_runs.clear(), completion)

    def _new_compound_run(self, mode: HalExecutionMode) -> CompoundRun:
        return CompoundRun(self._handle, self._memory, self._config, mode)

    def _copies(self, _result: ExecutionResult) -> tuple[Array, ...]:
        return self._open_arrays.copy_out(None)

    def _copy_in(self, inputs: Sequence[ArrayLike]) -> None:
        if not inputs and not self._has_inputs and self._open_arrays.input_infos:
            raise no_inputs_error(self._open_arrays.input_infos, "execution.compute")
        self._open_arrays.copy_in(inputs)
        self._has_inputs = self._was_computed = True

    @property
    def _open_arrays(self) -> MappedArrays:
        # Not kept in local variables: frames of an exception's traceback would keep the memory mapped after `close`.
        if self._arrays is None:
            raise InvalidArgument("this execution is closed")
        return self._arrays

    def _busy_error(self) -> Exception:
        return BadState("this execution is running; one run at a time, or make one for each thread")

    def _require_computable(self) -> None:
        if self._fenced_runs:
            raise self._busy_error()
        if self._was_interrupted:
            raise BadState("this execution was interrupted, and its step may still be running; make a new one")
        if self._was_computed and not self.is_reusable:
            raise BadState("this execution was computed and is not reusable; see create_reusable_execution")

    def close(self) -> None:
        """Release the execution here and in the drivers; a computation in progress continues. Idempotent."""
        self._inputs = self.outputs = ()
        self._detach_state()
        self._arrays = None  # its arrays would keep the memory mapped
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
