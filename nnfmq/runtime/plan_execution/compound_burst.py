"""CompoundBurst: a burst for each step of a plan, over memory that the steps share (PART-10).

The bursts are configured over the locations of the plan's values: what one driver writes, the next one reads there, and
nothing is copied between them. Each step sends the same packet every time, so its driver's burst server finds its
cached execution. If a temporary has no fixed size, the steps' requests are encoded again for each execution instead.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from types import TracebackType
from typing import Self

from numpy.typing import ArrayLike

from nnfmq.hal.errors import BadState, GeneralFailure, InvalidArgument, NnfmqError
from nnfmq.hal.summaries import clipped
from nnfmq.hal.timing import NO_TIMING
from nnfmq.hal.types import ExecutionConfig, HalExecutionMode, MeasureTiming, OutputShape, Pool, Request
from nnfmq.observe.trace_points import TRACING
from nnfmq.runtime.array_checks import check_out, no_inputs_error
from nnfmq.runtime.burst_configuration import configure_burst
from nnfmq.runtime.burst_controller import Burst
from nnfmq.runtime.exclusive_use import CLAIM, exclusive
from nnfmq.runtime.execution_result import ExecutionInfo, ExecutionResult
from nnfmq.runtime.mapped_arrays import MappedArrays
from nnfmq.runtime.model_state import HasState
from nnfmq.runtime.plan_execution.bound_plan import BoundCall
from nnfmq.runtime.plan_execution.compound_run import CompoundRun, PlanCall, run_synchronously
from nnfmq.runtime.plan_execution.one_device import require_no_time_limits
from nnfmq.runtime.plan_execution.plan_handle import PlanHandle
from nnfmq.runtime.plan_execution.value_locations import step_request
from nnfmq.runtime.tensor_layout import Array
from nnfmq.uncopyable import Uncopyable
from nnfmq.watcher import Wakeable

__all__ = ["CompoundBurst"]

_CONFIG = ExecutionConfig()
_MODE = HalExecutionMode.BURST


class _StepPeers:
    """The drivers of all steps, whose death wakes what waits for the burst."""

    def __init__(self, bursts: Sequence[Burst | None]) -> None:
        self._bursts = bursts

    def add(self, *queues: Wakeable) -> None:
        """Add queues whose waits end when one of the drivers dies."""
        for burst in self._bursts:
            if burst is not None:
                burst.peer.add(*queues)


class CompoundBurst(Uncopyable, HasState):
    """A burst of a model on several devices, used as a Burst. Close it, or use `with`. One execution at a time.

    `inputs` and `outputs` are arrays over the shared memory itself, under the rules of a Burst.
    """

    def __init__(self, handle: PlanHandle) -> None:
        self._handle = handle
        self._resources = ExitStack()
        self._claims: dict[int, object] = {}  # see `exclusive_use`
        handle.add_user()
        self._resources.callback(handle.remove_user)
        self._pid = os.getpid()
        self._is_idle = True  # False after a call that was interrupted: its step may still be executing
        self._arrays: MappedArrays | None = None
        self._bursts: list[Burst | None] = []
        self._sequence: list[tuple[Callable[..., object], tuple[Array, ...]]] = []  # see `_note_sequence`
        self._memory = handle.new_memory()
        self._resources.callback(self._memory.close)
        self._inputs: tuple[Array, ...] = ()
        self._has_inputs = False
        self._latency_ns = 0
        self._has_durations = False  # whether each step's burst has executed the last time
        self._info: ExecutionInfo | None = None
        self.outputs: tuple[Array, ...] = ()

    @classmethod
    def configure(cls, handle: PlanHandle, polling_window_us: float | None, deadline_ns: int | None) -> Self:
        """Create the memory, and configure a burst for each step; blocks.

        A step whose driver fails has no burst, if there is a fallback.

        Raises:
            InvalidArgument: If the shape of an input or output is not fully known, or the model is closed.
            NnfmqError: The error of a driver.
        """
        burst = cls(handle)
        try:
            burst._arrays = arrays = MappedArrays.create(handle, burst._resources, "a burst")
            burst._inputs, burst.outputs, burst._state = arrays.inputs, arrays.outputs, arrays.state
            burst._memory.bind(arrays.request)
            for call in handle.bound.calls:
                burst._bursts.append(burst._configure_step(call, polling_window_us, deadline_ns))
            burst._note_sequence()
        except BaseException:
            burst.close()
            raise
        return burst

    def _configure_step(self, call: BoundCall, window_us: float | None, deadline_ns: int | None) -> Burst | None:
        model = self._handle.steps[call.index].handle
        arrays = None
        if not self._handle.has_dynamic_temporaries:
            infos = model.inputs, model.outputs
            arrays = MappedArrays.over(model, step_request(self._memory.locations, call.inputs, call.outputs, infos))
        try:
            burst = configure_burst(model, window_us, deadline_ns, with_memory=arrays is not None, arrays=arrays)
        except NnfmqError as error:
            if self._handle.fallback is None or not self._handle.fallback.applies_to(error, deadline_ns):
                raise
            return None
        self._resources.callback(burst.close)
        _ = burst.inputs  # the burst may execute without arguments
        return burst

    def _note_sequence(self) -> None:
        """Note `execute` and outputs of each step's burst, if the plan is a sequence of bursts with fixed memory.

        Executions that are observed or traced take the way of all other plans.
        """
        bursts = [burst for burst in self._bursts if burst is not None]
        is_sequence = len(bursts) == len(self._handle.bound.steps) and not self._handle.has_dynamic_temporaries
        is_sequence = is_sequence and self._handle.observed is None
        self._sequence = [(burst.execute, burst.outputs) for burst in bursts] if is_sequence else []

    def __repr__(self) -> str:
        state = ", closed" if self._arrays is None else ""
        return f"<CompoundBurst on {clipped(repr(self._handle.device))}{state}: {self._handle.signature}>"

    @property
    def peer(self) -> _StepPeers:
        """The drivers of the steps."""
        return _StepPeers(self._bursts)

    @property
    def inputs(self) -> tuple[Array, ...]:
        """The input arrays over the shared memory; empty once closed."""
        self._has_inputs = True  # what the application does with the arrays cannot be seen from here
        return self._inputs

    def discard_inputs(self) -> None:
        """Require new inputs for the next `execute`, and begin it with the initial states. For a burst's next user."""
        self._has_inputs = False
        self.reset_state()

    # ------------------------------------------------------------------------------------------------ executing

    @exclusive
    def execute(
        self,
        *inputs: ArrayLike,
        out: Sequence[Array] | None = None,
        measure: bool = False,
        timeout: float | None = None,
    ) -> tuple[Array, ...]:
        """Run the model once and return its outputs; blocks. Arguments as for `Burst.execute`.

        Raises:
            InvalidArgument: If `measure` or `timeout` is given, an array or their number is wrong, there are no inputs
                yet, or the burst is closed.
            BadState: If another thread is executing.
            MissedDeadlineTransient: If a loop exceeds its time.
            NnfmqError: The error of a step, if there is no fallback for it; otherwise that of the fallback.
        """
        arrays = self._checked_arrays(inputs, out, measure, timeout)
        if not self._is_idle:
            self._finish_interrupted()
        begin_ns = self._begin(arrays, inputs)
        self._has_durations = is_sequence = bool(self._sequence) and TRACING.recorder is None
        if is_sequence:
            self._execute_sequence()
        else:
            run_synchronously(CompoundRun(self._handle, self._memory, _CONFIG, _MODE), self._execute_step)
        return self._end(arrays, out, begin_ns)

    def _checked_arrays(
        self, inputs: Sequence[ArrayLike], out: Sequence[Array] | None, measure: bool, timeout: float | None
    ) -> MappedArrays:
        """Return the burst's arrays. Raises InvalidArgument if the call has invalid arguments."""
        if measure or timeout is not None:
            require_no_time_limits(measure, timeout)
        arrays = self._arrays
        if arrays is None or os.getpid() != self._pid:  # in a forked child: the parent uses the memory
            raise InvalidArgument("this burst is closed")
        if not inputs and not self._has_inputs and arrays.inputs:
            raise no_inputs_error(arrays.input_infos, "burst.execute")
        if out is not None and out is not arrays.outputs:
            check_out(arrays.output_infos, out)
        return arrays

    def _begin(self, arrays: MappedArrays, inputs: Sequence[ArrayLike]) -> int:
        """Write the inputs and the states; return the time."""
        if inputs:
            arrays.copy_in(inputs)
            self._has_inputs = True
        if arrays.state is not None:
            arrays.state.begin()
        self._is_idle = False
        return time.monotonic_ns()

    def _end(self, arrays: MappedArrays, out: Sequence[Array] | None, begin_ns: int) -> tuple[Array, ...]:
        """Return the outputs of an execution that has succeeded."""
        self._is_idle, self._latency_ns, self._info = True, time.monotonic_ns() - begin_ns, None
        if arrays.state is not None:
            arrays.state.advance()
        return arrays.outputs if out is arrays.outputs else arrays.copy_out(out)

    def _execute_sequence(self) -> None:
        done = 0
        try:
            for execute, outputs in self._sequence:
                execute(out=outputs)
                done += 1
        except NnfmqError as error:
            self._continue_after(done, error)

    def _continue_after(self, done: int, error: NnfmqError) -> None:
        """Continue an execution whose step `done` has failed. Raises NnfmqError if that is its result."""
        self._has_durations = False
        run = CompoundRun(self._handle, self._memory, _CONFIG, _MODE)
        for _ in range(done + 1):
            run.next_call()
        run.fail(error)
        run_synchronously(run, self._execute_step)

    def _burst_of(self, call: PlanCall) -> Burst | None:
        """Return the burst that executes a call; None if the control channel does."""
        return None if call.is_on_cpu or call.step is None else self._bursts[call.step.index]

    def _execute_step(self, call: PlanCall) -> Sequence[OutputShape]:
        burst = self._burst_of(call)
        if burst is None:
            return call.execute_copies()
        if self._handle.has_dynamic_temporaries:
            return burst.execute_request(call.request(call.model())).shapes
        burst.execute(out=burst.outputs)
        return ()

    # ------------------------------------------------------------------------------------------------ tasks of asyncio

    async def execute_async(
        self,
        *inputs: ArrayLike,
        out: Sequence[Array] | None = None,
        measure: bool = False,
        timeout: float | None = None,
    ) -> tuple[Array, ...]:
        """Run the model once and return its outputs; other tasks of the event loop run meanwhile.

        Arguments and errors as for `execute`. A task that is cancelled abandons the execution: the next call first
        waits for the step in progress.
        """
        claims, claim = self._claims, object()
        try:
            if claims.setdefault(CLAIM, claim) is not claim:
                raise self._busy_error()
            return await self._execute_in_task(self._checked_arrays(inputs, out, measure, timeout), inputs, out)
        finally:
            self._release_claim(claim)

    async def _execute_in_task(
        self, arrays: MappedArrays, inputs: Sequence[ArrayLike], out: Sequence[Array] | None
    ) -> tuple[Array, ...]:
        if not self._is_idle:
            for late in self._bursts:
                if late is not None:
                    with suppress(NnfmqError):  # a driver that has exited writes nothing any more
                        await late.drain_in_task(None)
        begin_ns = self._begin(arrays, inputs)
        self._has_durations = bool(self._sequence)
        run = CompoundRun(self._handle, self._memory, _CONFIG, _MODE)
        end = partial(self._end, arrays, out, begin_ns)
        try:
            if await self._make_calls_in_task(run):
                run.result()
                return end()
        except NnfmqError as error:
            run.observation.fail(error)
            raise
        return await self._continue_on_fallback_thread(run, end)

    async def _make_calls_in_task(self, run: CompoundRun) -> bool:
        """Make all calls of an execution; return False before one that blocks. Raises NnfmqError if it fails."""
        while (call := run.next_call()) is not None:
            burst = self._burst_of(call)
            if burst is None or self._handle.has_dynamic_temporaries:
                return False
            try:
                await burst.execute_async(out=burst.outputs)
            except NnfmqError as error:
                run.fail(error)
            else:
                run.succeed(())
        return True

    async def _continue_on_fallback_thread(
        self, run: CompoundRun, end: Callable[[], tuple[Array, ...]]
    ) -> tuple[Array, ...]:
        """Make the last call, which blocks, and all that follow on the fallback thread, also if the task is cancelled.

        The burst is in use until then.
        """
        from nnfmq.runtime.task_waiting import run_on_fallback_thread

        self._has_durations = False
        self._claims[CLAIM] = claim = object()  # of the fallback thread

        def execute() -> tuple[Array, ...]:
            run.repeat_call()
            run_synchronously(run, self._execute_step)
            return end()

        return await run_on_fallback_thread(execute, partial(self._release_claim, claim))

    def _release_claim(self, claim: object) -> None:
        if self._claims.get(CLAIM) is claim:
            del self._claims[CLAIM]

    def _finish_interrupted(self) -> None:
        """Wait for the step that an interrupted call has left in progress, and discard its result."""
        for burst in self._bursts:
            if burst is not None:
                with suppress(NnfmqError):  # a driver that has exited writes nothing any more
                    burst.drain_late_result(None)
        self._is_idle = True

    def _busy_error(self) -> Exception:
        if self._arrays is None:
            return InvalidArgument("this burst is closed")
        return BadState("this burst is executing in another thread; make one burst for each")  # BUR-16

    @exclusive
    def execute_request(
        self,
        request: Request,
        config: ExecutionConfig = ExecutionConfig(),  # noqa: B008  frozen
        *,
        timeout: float | None = None,
    ) -> ExecutionResult:
        """Execute a HAL request over the bursts of the steps, and return the shapes of the outputs; blocks.

        Borrows the request's pools, each of which has a slot in the steps' bursts until `free_memory`. Raises as
        `execute`.
        """
        from nnfmq.validation.request import validate_request  # few applications make requests

        require_no_time_limits(config.measure is MeasureTiming.YES, timeout)
        if self._arrays is None:
            raise InvalidArgument("this burst is closed")
        validate_request(self._handle.plan.model, request)
        if not self._is_idle:
            self._finish_interrupted()

        def execute(call: PlanCall) -> Sequence[OutputShape]:
            burst = self._burst_of(call)
            if burst is None:
                return call.execute()
            return burst.execute_request(call.request(call.model()), config).shapes

        memory = self._handle.new_memory()
        try:
            memory.bind(request)
            return run_synchronously(CompoundRun(self._handle, memory, config, _MODE), execute)
        finally:
            memory.close()

    def free_memory(self, memory: Pool, *, timeout: float | None = 10.0) -> None:
        """Make the drivers unmap a memory that was a pool of `execute_request`; as `Burst.free_memory`."""
        for burst in self._bursts:
            if burst is not None:
                burst.free_memory(memory, timeout=timeout)

    # ------------------------------------------------------------------------------------------------ durations, end

    @property
    def last(self) -> ExecutionInfo:
        """The durations of the last `execute`: sums over the steps, if the bursts of all steps have executed once.

        Raises:
            GeneralFailure: Before the first.
        """
        if not self._latency_ns:
            raise GeneralFailure("nothing was executed on this burst yet")
        if self._info is None:
            parts = [burst.last for burst in self._bursts if burst is not None] if self._has_durations else []
            driver_ns = sum(part.driver_ns + part.engine_ns for part in parts)
            engine_ns = sum(part.engine_ns for part in parts)
            self._info = ExecutionInfo.within(self._latency_ns, driver_ns, engine_ns, NO_TIMING)
        return self._info

    def close(self) -> None:
        """Close the bursts of the steps; waits up to 5 s for an execution in progress. Idempotent."""
        if self._latency_ns:
            _ = self.last  # for `last` after closing
        self._inputs = self.outputs = ()
        self._detach_state()
        self._arrays = None  # its arrays would keep the memory mapped
        self._sequence = []
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
