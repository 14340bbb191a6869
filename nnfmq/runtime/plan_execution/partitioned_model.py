"""PartitionedModel: a model whose plan has several steps, with the methods of a PreparedModel.

The runtime keeps the values between the steps in shared memory, which the drivers map, and interprets the IF and WHILE
that no device takes. If a step fails it may execute on the CPU instead; see docs/explanation/runtime.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike

from nnfmq.deadlines import deadline_after
from nnfmq.execution_plan.plan import ExecutionPlan
from nnfmq.hal.errors import BadState, InvalidArgument
from nnfmq.hal.summaries import clipped, html_tables
from nnfmq.hal.tensor_info import StateInfo, TensorInfo
from nnfmq.hal.timing import Timing
from nnfmq.hal.types import ExecutionConfig, MeasureTiming, Request
from nnfmq.runtime.array_checks import check_count
from nnfmq.runtime.cpu_fallback import CpuFallback
from nnfmq.runtime.defaults import DEFAULT_TIMEOUT_S
from nnfmq.runtime.exclusive_use import exclusive
from nnfmq.runtime.execution_result import ExecutionResult
from nnfmq.runtime.managed_buffer import Buffer
from nnfmq.runtime.model_state import HasState, StateValues, require_no_state
from nnfmq.runtime.plan_execution import compound_sync
from nnfmq.runtime.plan_execution.one_device import require_no_time_limits
from nnfmq.runtime.plan_execution.plan_handle import PlanHandle
from nnfmq.runtime.prepared_model import PreparedModel
from nnfmq.runtime.sync_execution import check_out
from nnfmq.runtime.tensor_layout import ALIGNMENT, Array, MemoryPreference
from nnfmq.runtime.wire_values import make_execution_config
from nnfmq.uncopyable import Uncopyable

if TYPE_CHECKING:
    from nnfmq.fence import HasFileno
    from nnfmq.runtime.async_execution import PendingExecution
    from nnfmq.runtime.burst_pool import BurstPool
    from nnfmq.runtime.fenced_execution import FencedTiming
    from nnfmq.runtime.plan_execution.compound_burst import CompoundBurst
    from nnfmq.runtime.plan_execution.compound_execution import CompoundExecution
    from nnfmq.runtime.plan_execution.compound_fenced import CompoundFencedExecution

__all__ = ["PartitionedModel"]


class PartitionedModel(Uncopyable, HasState):
    """A model on several devices. Close it, or use `with`. Thread-safe.

    It executes as a PreparedModel does, in every mode. Times cannot be measured, and there are no deadlines, because
    those are for one device: `measure` and `timeout` raise InvalidArgument. To use them, prepare the model on a device
    that you choose.

    Args:
        plan: A compound plan.
        steps: A prepared model for each of its execution steps. This object owns them.
        fallback: Executes on the CPU what fails elsewhere; None = the first failure is the result. Owned, too.
        inputs: The model's inputs, without its states.
        outputs: The model's outputs, without its states.
        states: The model's states.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        steps: Sequence[PreparedModel],
        fallback: CpuFallback | None,
        inputs: tuple[TensorInfo, ...],
        outputs: tuple[TensorInfo, ...],
        states: tuple[StateInfo, ...] = (),
    ) -> None:
        self.handle = PlanHandle(plan, steps, fallback, inputs, outputs, states)
        """The model as the execution modes use it."""
        self.plan = plan
        self.inputs = inputs
        self.outputs = outputs
        self.device = self.handle.device
        self.is_synchronous = False
        """Whether asynchronous executions are done when the call returns: $NNFMQ_SYNC_EXEC_RUNTIME."""
        self.last_timing = Timing()
        """Always empty: see above."""
        self._state = StateValues(states) if states else None
        self._claims: dict[int, object] = {}  # see `exclusive_use`

    def __repr__(self) -> str:
        return f"<PartitionedModel on {self._devices_text()}: {self.handle.signature}>"

    def _devices_text(self) -> str:
        return f"{clipped(repr(self.device))}{'' if self.handle.is_open else ', closed'}"

    def _repr_html_(self) -> str:
        """Return a table of inputs and outputs, for notebooks."""
        return html_tables(f"PartitionedModel on {self._devices_text()}", self.inputs, self.outputs)

    @property
    def steps(self) -> tuple[PreparedModel, ...]:
        """The prepared models of the plan's execution steps."""
        return self.handle.steps

    def memory_preference(self, kind: Literal["input", "output"], index: int) -> MemoryPreference:
        """Return the placement of one input or output in the application's memory that every device accepts.

        Raises:
            InvalidArgument: If there is no such input or output.
        """
        count = len(self.inputs if kind == "input" else self.outputs)
        if not 0 <= index < count:
            raise InvalidArgument(f"the model has {count} {kind}s, there is no {kind} {index}")
        return MemoryPreference(ALIGNMENT, 1)

    def execute(
        self,
        *inputs: ArrayLike | Buffer,
        out: Sequence[Array | Buffer] | None = None,
        measure: bool = False,
        timeout: float | None = None,
        loop_timeout: float | None = None,
    ) -> tuple[Any, ...]:
        """Run the model once and return its outputs; blocks.

        Arguments as for `PreparedModel.execute`, but buffers must be in shared memory.

        Raises:
            InvalidArgument: If `measure` or `timeout` is given, an argument's shape, dtype or number is wrong, or the
                model is closed.
            BadState: If the model has states, and another thread is executing.
            MissedDeadlineTransient: If a loop exceeds its time.
            NnfmqError: The error of a step, if there is no fallback for it; otherwise that of the fallback.
        """
        require_no_time_limits(measure, timeout)
        self.handle.require_open()
        config = make_execution_config(False, loop_timeout)
        if self.handle.states:
            return self._execute_with_state(inputs, out, config)
        return compound_sync.execute_arrays(self.handle, inputs, out, config)

    @exclusive
    def _execute_with_state(
        self, inputs: Sequence[ArrayLike | Buffer], out: Sequence[Array | Buffer] | None, config: ExecutionConfig
    ) -> tuple[Array | Buffer, ...]:
        assert isinstance(self._state, StateValues)
        check_count("input", self.inputs, len(inputs))
        if out is not None:
            check_out(self.outputs, out)
        before = self._state.get()
        all_out = None if out is None else [*out, *map(np.empty_like, before)]
        results = compound_sync.execute_arrays(self.handle, (*inputs, *before), all_out, config)
        self._state.set([result for result in results[len(self.outputs) :] if not isinstance(result, Buffer)])
        return results[: len(self.outputs)]

    def _busy_error(self) -> Exception:
        return BadState("another thread executes this model, which has states; make a burst for each thread")

    def execute_async(
        self,
        *inputs: ArrayLike,
        measure: bool = False,
        timeout: float | None = None,
        loop_timeout: float | None = None,
    ) -> PendingExecution[tuple[Array, ...]]:
        """Start to run the model and return the pending execution immediately.

        Arguments as for `execute`; the inputs are copied before this returns.

        Raises:
            InvalidArgument: As `execute`, or the model has states. `PendingExecution.result` raises all other errors.
        """
        from nnfmq.runtime.async_execution import started
        from nnfmq.runtime.plan_execution.compound_async import start_arrays

        require_no_time_limits(measure, timeout)
        config = make_execution_config(False, loop_timeout)
        require_no_state(self.states, "execute")
        return started(start_arrays(self.handle, inputs, config), self.is_synchronous)

    def execute_fenced(
        self,
        *inputs: ArrayLike,
        wait_for: Sequence[HasFileno | int] = (),
        measure: bool = False,
        timeout: float | None = None,
        duration: float | None = None,
        loop_timeout: float | None = None,
    ) -> CompoundFencedExecution[tuple[Array, ...]]:
        """Run the model once when all fences of `wait_for` are signaled; blocks until it is launched.

        The caller closes the result. Arguments as for `PreparedModel.execute_fenced`, without times.

        Raises:
            InvalidArgument: As `execute`, or a fence is invalid or in error, or an output's shape is unknown.
            NnfmqError: If the first step cannot be launched, and there is no fallback.
        """
        from nnfmq.runtime.plan_execution.compound_fenced import launch_arrays

        require_no_time_limits(measure, timeout, duration)
        config = make_execution_config(False, loop_timeout)
        require_no_state(self.states, "execute")
        return launch_arrays(self.handle, inputs, config, wait_for)

    def create_reusable_execution(
        self, *, measure: bool = False, loop_timeout: float | None = None, timeout: float | None = DEFAULT_TIMEOUT_S
    ) -> CompoundExecution:
        """Return an execution with its own arrays that can be computed many times; blocks. The caller closes it.

        As `PreparedModel.create_reusable_execution`, without times.
        """
        from nnfmq.runtime.plan_execution.compound_execution import CompoundExecution

        require_no_time_limits(measure, None)
        config = make_execution_config(False, loop_timeout)
        return CompoundExecution.create(self.handle, config, deadline_after(timeout), reusable=True)

    def create_execution(self, *, measure: bool = False, loop_timeout: float | None = None) -> CompoundExecution:
        """Return an execution that can be computed once; a second time raises BadState. The caller closes it.

        As `create_reusable_execution`, but nothing is sent to a driver before the computation.
        """
        from nnfmq.runtime.plan_execution.compound_execution import CompoundExecution

        require_no_time_limits(measure, None)
        return CompoundExecution.create(self.handle, make_execution_config(False, loop_timeout), None, reusable=False)

    def burst(
        self, *, polling_window_us: float | None = None, timeout: float | None = DEFAULT_TIMEOUT_S
    ) -> CompoundBurst:
        """Configure a burst for each step, over memory that they share, for a series of fast executions. Blocks.

        The caller closes it. Arguments as for `PreparedModel.burst`; `timeout` is that of the configuration alone.
        """
        from nnfmq.runtime.plan_execution.compound_burst import CompoundBurst

        return CompoundBurst.configure(self.handle, polling_window_us, deadline_after(timeout))

    def burst_pool(
        self, count: int, *, polling_window_us: float | None = None, timeout: float | None = DEFAULT_TIMEOUT_S
    ) -> BurstPool:
        """Configure `count` bursts that threads share; blocks. The caller closes the pool.

        Arguments as for `burst`. Raises InvalidArgument if `count` is less than 1, or as `burst`.
        """
        from nnfmq.runtime.burst_pool import BurstPool
        from nnfmq.runtime.plan_execution.compound_burst import CompoundBurst

        configure = partial(CompoundBurst.configure, self.handle, polling_window_us, deadline_after(timeout))
        return BurstPool.configure(self.handle, count, configure)

    # ------------------------------------------------------------------------------------------------ HAL requests

    def execute_request(
        self,
        request: Request,
        config: ExecutionConfig = ExecutionConfig(),  # noqa: B008  frozen
        *,
        timeout: float | None = None,
    ) -> ExecutionResult:
        """Execute a HAL request and return the shapes of the outputs; blocks. Borrows the request's pools.

        The pools are nnfmq memories; the drivers of the steps map them. Raises as `execute`.
        """
        require_no_time_limits(config.measure is MeasureTiming.YES, timeout)
        return compound_sync.execute_request(self.handle, request, config)

    def execute_request_async(
        self,
        request: Request,
        config: ExecutionConfig = ExecutionConfig(),  # noqa: B008  frozen
        *,
        timeout: float | None = None,
    ) -> PendingExecution[ExecutionResult]:
        """Start to execute a HAL request and return the pending execution immediately.

        The request's pools must not be closed before it is done. Raises as `execute_async`.
        """
        from nnfmq.runtime.async_execution import started
        from nnfmq.runtime.plan_execution.compound_async import start_request

        require_no_time_limits(config.measure is MeasureTiming.YES, timeout)
        return started(start_request(self.handle, request, config), self.is_synchronous)

    def execute_request_fenced(
        self,
        request: Request,
        config: ExecutionConfig = ExecutionConfig(),  # noqa: B008  frozen
        *,
        wait_for: Sequence[HasFileno | int] = (),
        timeout: float | None = None,
        duration: float | None = None,
    ) -> CompoundFencedExecution[FencedTiming]:
        """Execute a HAL request when all fences of `wait_for` are signaled; otherwise as `execute_fenced`."""
        from nnfmq.runtime.plan_execution.compound_fenced import launch_request

        require_no_time_limits(config.measure is MeasureTiming.YES, timeout, duration)
        return launch_request(self.handle, request, config, wait_for)

    def close(self) -> None:
        """Release the steps in their drivers after the executions in progress; bursts remain usable. Idempotent."""
        self.handle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
