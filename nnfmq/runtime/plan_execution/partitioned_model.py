"""PartitionedModel: a model whose plan has several steps.

The runtime keeps the values between the steps in shared memory, which the drivers map, and interprets the IF and WHILE
that no device takes. If a step fails it may execute on the CPU instead; see docs/explanation/runtime.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from nnfmq.deadlines import deadline_after
from nnfmq.execution_plan.plan import ExecutionPlan
from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.tensor_info import StateInfo, TensorInfo
from nnfmq.hal.types import ExecutionConfig, MeasureTiming, Request
from nnfmq.runtime.compiled_model import CompiledModel
from nnfmq.runtime.cpu_fallback import CpuFallback
from nnfmq.runtime.defaults import DEFAULT_TIMEOUT_S
from nnfmq.runtime.execution_result import ExecutionResult
from nnfmq.runtime.managed_buffer import Buffer
from nnfmq.runtime.outputs import Outputs
from nnfmq.runtime.plan_execution import compound_sync
from nnfmq.runtime.plan_execution.execution_limits import require_unmeasured
from nnfmq.runtime.plan_execution.plan_handle import PlanHandle
from nnfmq.runtime.prepared_model import PreparedModel
from nnfmq.runtime.tensor_layout import Array, InputValue

if TYPE_CHECKING:
    from nnfmq.runtime.async_execution import PendingExecution
    from nnfmq.runtime.fenced_execution import FencedExecution, FencedTiming, FenceLimits
    from nnfmq.runtime.plan_execution.compound_burst import CompoundBurst
    from nnfmq.runtime.reusable_execution import BoundRequest

__all__ = ["PartitionedModel"]


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
        fallback: CpuFallback | None,
        inputs: tuple[TensorInfo, ...],
        outputs: tuple[TensorInfo, ...],
        states: tuple[StateInfo, ...] = (),
    ) -> None:
        self.handle = PlanHandle(plan, steps, fallback, inputs, outputs, states)
        super().__init__(inputs, outputs, self.handle.device, states)

    @property
    def plan(self) -> ExecutionPlan:
        """Which device executes which operations."""
        return self.handle.plan

    @property
    def steps(self) -> tuple[PreparedModel, ...]:
        """The prepared models of the plan's execution steps."""
        return self.handle.steps

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
        return compound_sync.execute_arrays(self.handle, inputs, out, config, deadline_ns)

    def _start_arrays(
        self, inputs: Sequence[InputValue], config: ExecutionConfig, deadline_ns: int | None
    ) -> PendingExecution[Outputs]:
        from nnfmq.runtime.plan_execution.compound_async import start_arrays

        return start_arrays(self.handle, inputs, config, deadline_ns)

    def _launch_arrays(
        self, inputs: Sequence[InputValue], config: ExecutionConfig, limits: FenceLimits
    ) -> FencedExecution[Outputs]:
        from nnfmq.runtime.plan_execution.compound_fenced import launch_arrays

        return launch_arrays(self.handle, inputs, config, limits)

    def burst(
        self, *, polling_window_us: float | None = None, timeout: float | None = DEFAULT_TIMEOUT_S
    ) -> CompoundBurst:
        """Configure a burst for each step, over memory that they share, as `CompiledModel.burst`. Blocks."""
        return self._configure_burst(polling_window_us, deadline_after(timeout))

    def _configure_burst(self, polling_window_us: float | None, deadline_ns: int | None) -> CompoundBurst:
        from nnfmq.runtime.plan_execution.compound_burst import CompoundBurst

        return CompoundBurst.configure(self.handle, polling_window_us, deadline_ns)

    # ------------------------------------------------------------------------------------------------ HAL requests

    def _execute_request(self, request: Request, config: ExecutionConfig, deadline_ns: int | None) -> ExecutionResult:
        return compound_sync.execute_request(self.handle, request, config, deadline_ns)

    def _start_request(
        self, request: Request, config: ExecutionConfig, deadline_ns: int | None
    ) -> PendingExecution[ExecutionResult]:
        from nnfmq.runtime.plan_execution.compound_async import start_request

        return start_request(self.handle, request, config, deadline_ns)

    def _launch_request(
        self, request: Request, config: ExecutionConfig, limits: FenceLimits
    ) -> FencedExecution[FencedTiming]:
        from nnfmq.runtime.plan_execution.compound_fenced import launch_request

        return launch_request(self.handle, request, config, limits)

    def _bind(
        self, request: Request, config: ExecutionConfig, deadline_ns: int | None, is_reusable: bool
    ) -> BoundRequest:
        from nnfmq.runtime.plan_execution.compound_request import CompoundRequest

        return CompoundRequest.create(self.handle, request, config, deadline_ns, is_reusable)

    def request_burst(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> CompoundBurst:
        """Configure a burst for each step, which only have `execute_request`. Blocks. See `CompiledModel`."""
        from nnfmq.runtime.plan_execution.compound_burst import CompoundBurst

        return CompoundBurst.configure(self.handle, None, deadline_after(timeout), with_memory=False)

    def aidl_burst(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> NoReturn:
        """Raise InvalidArgument: an AIDL burst is of one driver, which knows the tokens of its memories."""
        raise InvalidArgument(
            f"an AIDL burst needs a model on one device, and this one is on {self.device}: use request_burst(), which "
            "has a burst for each step, or prepare the model with client.device(name).prepare(model)"
        )

    def close(self) -> None:
        """Release the steps in their drivers after the executions in progress; bursts remain usable. Idempotent."""
        self.handle.close()
