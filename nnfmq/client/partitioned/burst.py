"""CompoundBurst: a burst for each step of a plan, over memory that the steps share (PART-10).

The bursts are configured over the locations of the plan's values: what one driver writes, the next one reads there, and
nothing is copied between them. Each step sends the same packet every time, so its driver's burst server finds its
cached execution. If a temporary has no fixed size, the steps' requests are encoded again for each execution instead.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Self

from nnfmq.base.deadlines import remaining_s
from nnfmq.base.ownership import exclusive
from nnfmq.base.watcher import Wakeable
from nnfmq.client.burst.burst import Burst, Inputs, ModelBurst, Targets
from nnfmq.client.burst.configuration import configure_burst
from nnfmq.client.model.array_request import MappedArrays
from nnfmq.client.model.arrays import ExecutionInfo, ExecutionResult, Outputs
from nnfmq.client.partitioned.executions import (
    CompoundRun,
    PlanCall,
    require_time_left,
    require_unmeasured,
    run_synchronously,
)
from nnfmq.client.partitioned.handle import PlanHandle
from nnfmq.client.partitioned.memory import ExecutionMemory
from nnfmq.client.partitioned.plan import BoundCall, step_request
from nnfmq.hal.errors import BadState, MissedDeadline, NnfmqError
from nnfmq.hal.summaries import clipped
from nnfmq.hal.timing import NO_TIMING
from nnfmq.hal.types import ExecutionConfig, HalExecutionMode, MeasureTiming, OutputShape, Pool, Request
from nnfmq.observe.trace_points import TRACING
from nnfmq.validation.requests import validate_request

if TYPE_CHECKING:
    from nnfmq.client.waiting import BlockingWait

__all__ = ["CompoundBurst", "StepBursts"]


# ----------------------------------------------------------------------------------------------------------------------
# StepBursts: the bursts of a plan's steps, as one burst of the whole model uses them.


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
        model, fallback = self._handle.steps[call.index], self._handle.fallback
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
                burst.channel.drain(deadline_ns)

    async def drain_in_task(self, deadline_ns: int | None) -> None:
        """As `drain`; other tasks run while this one waits."""
        for burst in self:
            with _unless_dead():
                await burst.channel.drain_in_task(deadline_ns)


@contextmanager
def _unless_dead() -> Iterator[None]:
    """Ignore the error of a driver that has exited, or breaks the rules: nothing can be waited for."""
    try:
        yield
    except MissedDeadline:
        raise
    except NnfmqError:
        pass


# ----------------------------------------------------------------------------------------------------------------------
# CompoundBurst: a burst for each step of a plan, over memory that the steps share (PART-10).


_CONFIG = ExecutionConfig()
_MODE = HalExecutionMode.BURST


class CompoundBurst(ModelBurst):
    """A burst of a model on several devices; otherwise as `ModelBurst` says."""

    def __init__(self, handle: PlanHandle) -> None:
        super().__init__()
        self._handle = handle
        handle.add_user()
        self._resources.callback(handle.remove_user)
        self._pid = os.getpid()
        self._is_closed = False
        self._is_idle = True  # False after a call that was interrupted: its step may still be executing
        self._sequence: list[tuple[Callable[..., object], Outputs]] = []  # see `_note_sequence`
        self._memory = handle.new_memory()
        self._resources.callback(self._memory.close)
        self._has_durations = False  # whether each step's burst has executed the last time
        self.peer = StepBursts(handle, self._resources)
        """The bursts of the steps."""

    @classmethod
    def configure(
        cls, handle: PlanHandle, polling_window_us: float | None, deadline_ns: int | None, *, with_memory: bool = True
    ) -> Self:
        """Create the memory, and configure a burst for each step; blocks. Without memory it only has `execute_request`.

        A step whose driver fails has no burst, if there is a fallback.

        Raises:
            InvalidArgument: If the burst needs memory, and a shape is not fully known, or the model is closed.
            NnfmqError: The error of a driver.
        """
        burst = cls(handle)
        try:
            if with_memory:
                burst._use_memory()
            burst.peer.configure(burst._memory if with_memory else None, polling_window_us, deadline_ns)
            burst._note_sequence()
        except BaseException:
            burst.close()
            raise
        return burst

    def _use_memory(self) -> None:
        arrays = MappedArrays.create(self._handle, self._resources, "a burst")
        self._take_arrays(arrays)
        self._memory.bind(arrays.request)

    def _note_sequence(self) -> None:
        """Note `execute` and outputs of each step's burst, if the plan is a sequence of bursts with fixed memory.

        Executions that are observed or traced take the way of all other plans.
        """
        bursts = list(self.peer)
        is_sequence = len(bursts) == len(self._handle.bound.steps) and not self._handle.has_dynamic_temporaries
        is_sequence = is_sequence and self._handle.observed is None and self._arrays is not None
        self._sequence = [(burst.execute, burst.outputs) for burst in bursts] if is_sequence else []

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "" if self._handle.state == "closed" else self._handle.state
        kind = "" if self._arrays is not None or self._is_closed else ", without memory"
        state = f", {state}" if state else ""
        return f"<CompoundBurst on {clipped(repr(self._handle.device))}{kind}{state}: {self._handle.signature}>"

    # ------------------------------------------------------------------------------------------------ executing

    def _execute(self, inputs: Inputs, out: Targets, measure: bool, deadline_ns: int | None) -> Outputs:
        arrays = self._usable_arrays(inputs, out, measure)
        if not self._is_idle:
            self.peer.drain(deadline_ns)
        begin_ns = self._begin(arrays, inputs)
        self._has_durations = is_sequence = bool(self._sequence) and TRACING.recorder is None
        if is_sequence:
            self._execute_sequence(deadline_ns)
        else:
            run_synchronously(self._new_run(self._memory, _CONFIG, deadline_ns), self._execute_step)
        return self._end(arrays, out, begin_ns)

    def _new_run(self, memory: ExecutionMemory, config: ExecutionConfig, deadline_ns: int | None) -> CompoundRun:
        return CompoundRun(self._handle, memory, config, _MODE, deadline_ns)

    def _usable_arrays(self, inputs: Inputs, out: Targets, measure: bool) -> MappedArrays:
        """Return the burst's arrays. Raises InvalidArgument if the call has invalid arguments."""
        if measure:
            require_unmeasured(measure)
        if os.getpid() != self._pid:  # in a forked child: the parent uses the memory
            raise BadState("this burst is closed")
        return self._checked_arrays(inputs, out)

    def _require_open(self) -> None:
        if self._is_closed:
            raise BadState("this burst is closed")

    def _begin(self, arrays: MappedArrays, inputs: Inputs) -> int:
        """Write the inputs and the states; return the time."""
        self._write_inputs(arrays, inputs)
        self._is_idle = False
        return time.monotonic_ns()

    def _end(self, arrays: MappedArrays, out: Targets, begin_ns: int) -> Outputs:
        """Return the outputs of an execution that has succeeded."""
        self._is_idle, self._latency_ns, self._info = True, time.monotonic_ns() - begin_ns, None
        if arrays.state is not None:
            arrays.state.advance()
        return arrays.outputs if out is arrays.outputs else arrays.copy_out(out)

    def _execute_sequence(self, deadline_ns: int | None) -> None:
        done = 0
        try:
            for execute, outputs in self._sequence:
                if deadline_ns is None:
                    execute(out=outputs)
                else:
                    require_time_left(deadline_ns, has_begun=done > 0)
                    execute(out=outputs, timeout=remaining_s(deadline_ns))
                done += 1
        except NnfmqError as error:
            self._continue_after(done, error, deadline_ns)

    def _continue_after(self, done: int, error: NnfmqError, deadline_ns: int | None) -> None:
        """Continue an execution whose step `done` has failed. Raises NnfmqError if that is its result."""
        self._has_durations = False
        run = self._new_run(self._memory, _CONFIG, None)
        for _ in range(done + 1):
            run.next_call()
        run.deadline_ns = deadline_ns
        run.fail(error)
        run_synchronously(run, self._execute_step)

    def _execute_step(self, call: PlanCall) -> Sequence[OutputShape]:
        burst = self.peer.of(call)
        if burst is None:
            return call.execute_copies()
        timeout = remaining_s(call.run.deadline_ns)
        if self._handle.has_dynamic_temporaries:
            return burst.execute_request(call.request(call.model()), timeout=timeout).shapes
        burst.execute(out=burst.outputs, timeout=timeout)
        return ()

    # ------------------------------------------------------------------------------------------------ tasks of asyncio

    async def _execute_in_task(
        self, inputs: Inputs, out: Targets, measure: bool, deadline_ns: int | None, blocking: BlockingWait | None
    ) -> Outputs:
        arrays = self._usable_arrays(inputs, out, measure)
        if not self._is_idle:
            await self.peer.drain_in_task(deadline_ns)
        begin_ns = self._begin(arrays, inputs)
        self._has_durations = bool(self._sequence)
        run = self._new_run(self._memory, _CONFIG, deadline_ns)
        end = partial(self._end, arrays, out, begin_ns)
        try:
            if await self._make_calls_in_task(run, blocking):
                run.result()
                return end()
        except NnfmqError as error:
            self._has_durations = False
            run.observation.fail(error)
            raise
        return await self._continue_on_fallback_thread(run, end)

    async def _make_calls_in_task(self, run: CompoundRun, blocking: BlockingWait | None) -> bool:
        """Make all calls of an execution; return False before one that blocks. Raises NnfmqError if it fails."""
        while (call := run.next_call()) is not None:
            burst = self.peer.of(call)
            if burst is None or self._handle.has_dynamic_temporaries:
                return False
            try:
                timeout = remaining_s(run.deadline_ns)
                await burst.execute_async(out=burst.outputs, timeout=timeout, blocking=blocking)
            except NnfmqError as error:
                run.fail(error)
            else:
                run.succeed(())
        return True

    async def _continue_on_fallback_thread(self, run: CompoundRun, end: Callable[[], Outputs]) -> Outputs:
        """Make the last call, which blocks, and all that follow on the fallback thread, also if the task is cancelled.

        The burst is in use until then.
        """
        self._has_durations = False

        def execute() -> Outputs:
            run.repeat_call()
            run_synchronously(run, self._execute_step)
            return end()

        return await self._on_fallback_thread(execute)

    # ------------------------------------------------------------------------------------------------ HAL requests

    @exclusive
    def _execute_request(self, request: Request, config: ExecutionConfig, deadline_ns: int | None) -> ExecutionResult:
        require_unmeasured(config.measure is MeasureTiming.YES)
        self._require_open()
        validate_request(self._handle.plan.model, request)
        if not self._is_idle:
            self.peer.drain(deadline_ns)
            self._is_idle = True

        is_over_bursts, parts = True, list[ExecutionInfo]()

        def execute(call: PlanCall) -> Sequence[OutputShape]:
            nonlocal is_over_bursts
            burst = self.peer.of(call)
            if burst is None:
                is_over_bursts = False
                return call.execute()
            result = burst.execute_request(call.request(call.model()), config, timeout=remaining_s(deadline_ns))
            parts.append(burst.last)
            return result.shapes

        self._keep_info()  # the steps' bursts are about to execute something else
        memory, begin_ns = self._handle.new_memory(), time.monotonic_ns()
        try:
            memory.bind(request)
            result = run_synchronously(self._new_run(memory, config, deadline_ns), execute)
        finally:
            memory.close()
        self._latency_ns = time.monotonic_ns() - begin_ns
        self._info = _sum_within(self._latency_ns, parts if is_over_bursts else [])
        return result

    def free_memory(self, memory: Pool, *, timeout: float | None = 10.0) -> None:
        """Make the drivers unmap a memory that was a pool of `execute_request`. See `ModelBurst.free_memory`."""
        self.peer.free_memory(memory, timeout)

    # ------------------------------------------------------------------------------------------------ durations, end

    def _read_info(self) -> ExecutionInfo:
        return _sum_within(self._latency_ns, [burst.last for burst in self.peer] if self._has_durations else [])

    def close(self) -> None:
        """Close the bursts of the steps; waits up to 5 s for an execution in progress. Idempotent."""
        self._keep_info()  # for `last` after closing
        self._is_closed = True
        self._sequence = []
        self._release()

    def _is_of_process(self) -> bool:
        return True


def _sum_within(latency_ns: int, parts: Sequence[ExecutionInfo]) -> ExecutionInfo:
    """Return the durations of an execution that consists of the steps `parts`."""
    driver_ns = sum(part.driver_ns + part.engine_ns for part in parts)
    engine_ns = sum(part.engine_ns for part in parts)
    return ExecutionInfo.within(latency_ns, driver_ns, engine_ns, NO_TIMING)
