"""StepBursts: the bursts of a plan's steps, as one burst of the whole model uses them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from nnfmq.hal.errors import MissedDeadline, NnfmqError
from nnfmq.hal.types import Pool
from nnfmq.runtime.burst_configuration import configure_burst
from nnfmq.runtime.burst_controller import Burst
from nnfmq.runtime.mapped_arrays import MappedArrays
from nnfmq.runtime.plan_execution.bound_plan import BoundCall
from nnfmq.runtime.plan_execution.compound_run import PlanCall
from nnfmq.runtime.plan_execution.execution_memory import ExecutionMemory
from nnfmq.runtime.plan_execution.plan_handle import PlanHandle
from nnfmq.runtime.plan_execution.value_locations import step_request
from nnfmq.watcher import Wakeable

__all__ = ["StepBursts"]


class StepBursts:
    """A burst for each step, or None for a step whose driver has failed: the control channel executes that.

    `resources` owns the bursts.
    """

    def __init__(self, handle: PlanHandle, resources: ExitStack) -> None:
        self._handle, self._resources = handle, resources
        self._bursts: list[Burst | None] = []

    def configure(self, memory: ExecutionMemory | None, window_us: float | None, deadline_ns: int | None) -> None:
        """Configure a burst for each step, over its values in `memory`; blocks. None = bursts without memory.

        Raises:
            NnfmqError: The error of a driver, if there is no fallback.
        """
        for call in self._handle.bound.calls:
            self._bursts.append(self._configure_step(call, memory, window_us, deadline_ns))

    def _configure_step(
        self, call: BoundCall, memory: ExecutionMemory | None, window_us: float | None, deadline_ns: int | None
    ) -> Burst | None:
        model, fallback = self._handle.steps[call.index].handle, self._handle.fallback
        arrays = None
        if memory is not None and not self._handle.has_dynamic_temporaries:
            infos = model.inputs, model.outputs
            arrays = MappedArrays.over(model, step_request(memory.locations, call.inputs, call.outputs, infos))
        try:
            burst = configure_burst(model, window_us, deadline_ns, with_memory=arrays is not None, arrays=arrays)
        except NnfmqError as error:
            if fallback is None or not fallback.applies_to(error, deadline_ns):
                raise
            return None
        self._resources.callback(burst.close)
        _ = burst.inputs  # the burst may execute without arguments
        return burst

    def __iter__(self) -> Iterator[Burst]:
        return (burst for burst in self._bursts if burst is not None)

    def of(self, call: PlanCall) -> Burst | None:
        """Return the burst that executes a call; None if the control channel does."""
        return None if call.is_on_cpu or call.step is None else self._bursts[call.step.index]

    def add(self, *queues: Wakeable) -> None:
        """Add queues whose waits end when one of the drivers dies."""
        for burst in self:
            burst.peer.add(*queues)

    def free_memory(self, memory: Pool, timeout: float | None) -> None:
        """Make the drivers unmap a memory; blocks. Raises as `Burst.free_memory`."""
        for burst in self:
            burst.free_memory(memory, timeout=timeout)

    def drain(self, deadline_ns: int | None) -> None:
        """Wait for the step that an abandoned execution has left in progress, and discard its result.

        Raises:
            MissedDeadlineTransient: If it does not end before the deadline.
        """
        for burst in self:
            with _unless_dead():
                burst.drain_late_result(deadline_ns)

    async def drain_in_task(self, deadline_ns: int | None) -> None:
        """As `drain`; other tasks run while this one waits."""
        for burst in self:
            with _unless_dead():
                await burst.drain_in_task(deadline_ns)


@contextmanager
def _unless_dead() -> Iterator[None]:
    """Ignore the error of a driver that has exited, or breaks the rules: nothing can be waited for."""
    try:
        yield
    except MissedDeadline:
        raise
    except NnfmqError:
        pass
