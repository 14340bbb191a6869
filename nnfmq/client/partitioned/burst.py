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
from typing import Self

from nnfmq.base.deadlines import deadline_after, remaining_s
from nnfmq.base.ownership import CLAIM, exclusive
from nnfmq.base.watcher import Wakeable
from nnfmq.client.burst.configuration import configure_burst
from nnfmq.client.burst.controller import Burst
from nnfmq.client.burst.model_burst import ModelBurst
from nnfmq.client.connection.garbage import ClosedWhenDropped
from nnfmq.client.model.array_request import MappedArrays
from nnfmq.client.model.arrays import Array, ExecutionInfo, ExecutionResult, InputValue, Outputs
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
from nnfmq.hal.errors import BadState, GeneralFailure, InvalidArgument, MissedDeadline, NnfmqError
from nnfmq.hal.summaries import clipped
from nnfmq.hal.timing import NO_TIMING
from nnfmq.hal.types import ExecutionConfig, HalExecutionMode, MeasureTiming, OutputShape, Pool, Request
from nnfmq.observe.trace_points import TRACING
from nnfmq.validation.requests import validate_request

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


# ----------------------------------------------------------------------------------------------------------------------
# CompoundBurst: a burst for each step of a plan, over memory that the steps share (PART-10).


_CONFIG = ExecutionConfig()
_MODE = HalExecutionMode.BURST


class CompoundBurst(ClosedWhenDropped, ModelBurst):
    """A burst of a model on several devices; otherwise as `ModelBurst` says."""

    def __init__(self, handle: PlanHandle) -> None:
        self._handle = handle
        self._resources = ExitStack()
        self._claims: dict[int, object] = {}  # see `nnfmq.base.ownership`
        handle.add_user()
        self._resources.callback(handle.remove_user)
        self._pid = os.getpid()
        self._is_closed = False
        self._is_idle = True  # False after a call that was interrupted: its step may still be executing
        self._arrays: MappedArrays | None = None
        self._sequence: list[tuple[Callable[..., object], Outputs]] = []  # see `_note_sequence`
        self._memory = handle.new_memory()
        self._resources.callback(self._memory.close)
        self._inputs: tuple[Array, ...] = ()
        self._has_inputs = False
        self._latency_ns = 0
        self._has_durations = False  # whether each step's burst has executed the last time
        self._info: ExecutionInfo | None = None
        self.outputs = Outputs()
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
        self._arrays = arrays = MappedArrays.create(self._handle, self._resources, "a burst")
        self._inputs, self.outputs, self._state = arrays.inputs, arrays.outputs, arrays.state
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

    @exclusive
    def execute(
        self,
        *inputs: InputValue,
        out: Sequence[Array] | None = None,
        measure: bool = False,
        timeout: float | None = None,
    ) -> Outputs:
        """Run the model once and return its outputs; blocks. See `ModelBurst.execute`."""
        deadline_ns = None if timeout is None else deadline_after(timeout)
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

    def _usable_arrays(self, inputs: Sequence[InputValue], out: Sequence[Array] | None, measure: bool) -> MappedArrays:
        """Return the burst's arrays. Raises InvalidArgument if the call has invalid arguments."""
        if measure:
            require_unmeasured(measure)
        if os.getpid() != self._pid:  # in a forked child: the parent uses the memory
            raise BadState("this burst is closed")
        return self._checked_arrays(inputs, out)

    def _no_memory_error(self) -> Exception:
        if self._is_closed:
            return BadState("this burst is closed")
        return InvalidArgument("this burst was configured without memory: it only has execute_request")

    def _begin(self, arrays: MappedArrays, inputs: Sequence[InputValue]) -> int:
        """Write the inputs and the states; return the time."""
        self._write_inputs(arrays, inputs)
        self._is_idle = False
        return time.monotonic_ns()

    def _end(self, arrays: MappedArrays, out: Sequence[Array] | None, begin_ns: int) -> Outputs:
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

    async def execute_async(
        self,
        *inputs: InputValue,
        out: Sequence[Array] | None = None,
        measure: bool = False,
        timeout: float | None = None,
    ) -> Outputs:
        """Run the model once and return its outputs. See `ModelBurst.execute_async`.

        After a task that is cancelled the next call first waits for the step in progress.
        """
        claims, claim = self._claims, object()
        deadline_ns = deadline_after(timeout)
        try:
            if claims.setdefault(CLAIM, claim) is not claim:
                raise self._busy_error()
            arrays = self._usable_arrays(inputs, out, measure)
            return await self._execute_in_task(arrays, inputs, out, deadline_ns)
        finally:
            self._release_claim(claim)

    async def _execute_in_task(
        self,
        arrays: MappedArrays,
        inputs: Sequence[InputValue],
        out: Sequence[Array] | None,
        deadline_ns: int | None,
    ) -> Outputs:
        if not self._is_idle:
            await self.peer.drain_in_task(deadline_ns)
        begin_ns = self._begin(arrays, inputs)
        self._has_durations = bool(self._sequence)
        run = self._new_run(self._memory, _CONFIG, deadline_ns)
        end = partial(self._end, arrays, out, begin_ns)
        try:
            if await self._make_calls_in_task(run):
                run.result()
                return end()
        except NnfmqError as error:
            self._has_durations = False
            run.observation.fail(error)
            raise
        return await self._continue_on_fallback_thread(run, end)

    async def _make_calls_in_task(self, run: CompoundRun) -> bool:
        """Make all calls of an execution; return False before one that blocks. Raises NnfmqError if it fails."""
        while (call := run.next_call()) is not None:
            burst = self.peer.of(call)
            if burst is None or self._handle.has_dynamic_temporaries:
                return False
            try:
                await burst.execute_async(out=burst.outputs, timeout=remaining_s(run.deadline_ns))
            except NnfmqError as error:
                run.fail(error)
            else:
                run.succeed(())
        return True

    async def _continue_on_fallback_thread(self, run: CompoundRun, end: Callable[[], Outputs]) -> Outputs:
        """Make the last call, which blocks, and all that follow on the fallback thread, also if the task is cancelled.

        The burst is in use until then.
        """
        from nnfmq.client.task_waiting import run_on_fallback_thread

        self._has_durations = False
        self._claims[CLAIM] = claim = object()  # of the fallback thread

        def execute() -> Outputs:
            run.repeat_call()
            run_synchronously(run, self._execute_step)
            return end()

        return await run_on_fallback_thread(execute, partial(self._release_claim, claim))

    def _busy_error(self) -> Exception:
        if self._is_closed:
            return BadState("this burst is closed")
        return BadState("this burst is executing in another thread; make one burst for each")  # BUR-16

    # ------------------------------------------------------------------------------------------------ HAL requests

    @exclusive
    def execute_request(
        self,
        request: Request,
        config: ExecutionConfig = ExecutionConfig(),  # noqa: B008  frozen
        *,
        timeout: float | None = None,
    ) -> ExecutionResult:
        """Execute a HAL request over the bursts of the steps, and return the shapes of the outputs; blocks.

        Each pool has a slot in the steps' bursts. See `ModelBurst.execute_request`.
        """
        deadline_ns = deadline_after(timeout)
        require_unmeasured(config.measure is MeasureTiming.YES)
        if self._is_closed:
            raise BadState("this burst is closed")
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

    @property
    def last(self) -> ExecutionInfo:
        """The durations of the last execution that has succeeded: sums over the steps, if their bursts executed all.

        Those of an `execute` are 0 if a loop is interpreted, or a temporary has no fixed size.

        Raises:
            GeneralFailure: Before the first.
        """
        if not self._latency_ns:
            raise GeneralFailure("nothing was executed on this burst yet")
        if self._info is None:
            parts = [burst.last for burst in self.peer] if self._has_durations else []
            self._info = _sum_within(self._latency_ns, parts)
        return self._info

    def _keep_info(self) -> None:
        if self._latency_ns:
            _ = self.last

    def close(self) -> None:
        """Close the bursts of the steps; waits up to 5 s for an execution in progress. Idempotent."""
        self._keep_info()  # for `last` after closing
        self._is_closed = True
        self._inputs, self.outputs = (), Outputs()
        self._detach_state()
        self._arrays = None  # its arrays would keep the memory mapped
        self._sequence = []
        self._resources.close()

    def _is_left_open(self) -> bool:
        return not self._is_closed

    def _is_of_process(self) -> bool:
        return True

    def _close_dropped(self) -> None:
        self.close()


def _sum_within(latency_ns: int, parts: Sequence[ExecutionInfo]) -> ExecutionInfo:
    """Return the durations of an execution that consists of the steps `parts`."""
    driver_ns = sum(part.driver_ns + part.engine_ns for part in parts)
    engine_ns = sum(part.engine_ns for part in parts)
    return ExecutionInfo.within(latency_ns, driver_ns, engine_ns, NO_TIMING)
