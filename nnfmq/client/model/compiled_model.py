"""CompiledModel: a model on one device or several that can be executed, with a method for each execution mode.

`execute` is synchronous: any shapes, deadlines and number of threads. It sends a message over the control channel, some
hundred µs, or a packet over a burst of the model's own if it is called often, some tens of µs. `execute_async` returns
immediately; `execute_fenced` waits for fences in the driver; `create_reusable_execution` makes the driver validate and
bind a request once; `burst` is the fastest. Each mode also exists for HAL requests over the caller's memory.

The public methods check what is the same for all models, and turn timeouts into deadlines once. A PreparedModel and a
PartitionedModel implement the methods with an underscore.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, overload

import numpy as np

from nnfmq.base.deadlines import deadline_after
from nnfmq.base.ownership import Claims, Closable, exclusive
from nnfmq.client.connection.defaults import DEFAULT_TIMEOUT_S
from nnfmq.client.execution.requests import make_execution_config
from nnfmq.client.model.array_request import check_targets
from nnfmq.client.model.arrays import (
    ALIGNMENT,
    Array,
    ExecutionResult,
    InputValue,
    MemoryPreference,
    Outputs,
    check_count,
    check_index,
    in_order,
    names_of,
    outputs_type,
)
from nnfmq.client.model.buffers import Buffer
from nnfmq.client.model.handle import CompiledHandle, HasState, StateValues, require_no_state
from nnfmq.hal.errors import BadState
from nnfmq.hal.summaries import clipped, html_tables
from nnfmq.hal.tensor_info import StateInfo, TensorInfo
from nnfmq.hal.timing import Timing
from nnfmq.hal.types import ExecutionConfig, Request

if TYPE_CHECKING:
    from nnfmq.base.fence import HasFileno
    from nnfmq.client.burst.aidl import AidlBurst
    from nnfmq.client.burst.burst import ModelBurst
    from nnfmq.client.burst.pool import BurstPool
    from nnfmq.client.execution.asynchronous import PendingExecution
    from nnfmq.client.execution.fenced import FencedExecution, FencedTiming, FenceLimits
    from nnfmq.client.execution.reusable import BoundRequest, Execution
    from nnfmq.importers.loaded_model import ModelMetadata
    from nnfmq.planning.plan import ExecutionPlan

__all__ = ["CompiledModel"]


class CompiledModel(Closable, HasState, ABC):
    """A model on one device or several. Close it, or use `with`; closing the client closes it too. Thread-safe.

    `inputs` and `outputs` describe its arrays: name, shape, dtype, scale, zero point. `device` has the names of its
    devices. `last_timing` is that of the last execution to end, in any thread; a model on several devices has none.

    If the model has states, those of `execute` are its own, and one thread executes at a time. Each burst and each
    execution has its own. HAL requests contain the states as inputs and outputs, after all others.
    """

    handle: CompiledHandle
    """The model as the execution modes use it."""
    metadata: ModelMetadata | None = None
    """What the author of the model's file says of it; None if the file says nothing, or the model is no file's."""
    data_files: tuple[str, ...] = ()
    """Other files of the model file's folder that belong to it, as `nnfmq.load` names them."""

    def __init__(
        self,
        inputs: tuple[TensorInfo, ...],
        outputs: tuple[TensorInfo, ...],
        device: str,
        states: tuple[StateInfo, ...],
    ) -> None:
        self.inputs, self.outputs, self.device = inputs, outputs, device
        self.last_timing = Timing()
        self.is_synchronous = False
        """Whether asynchronous executions are done when the call returns: $NNFMQ_SYNC_EXEC_RUNTIME."""
        self._state = StateValues(states) if states else None
        self._claims: Claims = {}
        self._outputs_type = outputs_type(names_of(outputs))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} on {self._place()}: {self.handle.signature}>"

    def _place(self) -> str:
        state = self.handle.state
        return f"{clipped(repr(self.device))}{f', {state}' if state else ''}"

    def _repr_html_(self) -> str:
        """Return a table of inputs and outputs, for notebooks."""
        return html_tables(f"{type(self).__name__} on {self._place()}", self.inputs, self.outputs)

    @property
    @abstractmethod
    def plan(self) -> ExecutionPlan | None:
        """The device of each operation; None if the application chose the device."""

    @property
    def cpu_executions(self) -> int:
        """The number of executions of the model, or of steps of its plan, by the CPU because a device failed."""
        fallback = self.handle.fallback
        return 0 if fallback is None else fallback.executions

    def memory_preference(self, kind: Literal["input", "output"], index: int) -> MemoryPreference:
        """Return the placement of one input or output in the application's memory that is fastest (MEM-6).

        A driver may read the padding of an input. It never writes that of an output. HIDL requests cannot state a
        padding: with its interface versions it is 1, and for a model on several devices as well.

        Raises:
            InvalidArgument: If there is no such input or output.
        """
        check_index(kind, self.inputs if kind == "input" else self.outputs, index)
        return MemoryPreference(ALIGNMENT, self._padding)

    # ------------------------------------------------------------------------------------------------ arrays

    def __call__(self, *inputs: InputValue, timeout: float | None = None) -> Outputs:
        """Run the model once and return its outputs, as `execute`; blocks."""
        return self.execute(*inputs, timeout=timeout)

    @overload
    def execute(
        self,
        *inputs: InputValue | Buffer,
        out: Sequence[Array] | None = None,
        measure: bool = False,
        timeout: float | None = None,
        loop_timeout: float | None = None,
    ) -> Outputs: ...

    @overload
    def execute(
        self,
        *inputs: InputValue | Buffer,
        out: Sequence[Array | Buffer],
        measure: bool = False,
        timeout: float | None = None,
        loop_timeout: float | None = None,
    ) -> tuple[Array | Buffer, ...]: ...

    def execute(
        self,
        *inputs: InputValue | Buffer,
        out: Sequence[Array | Buffer] | None = None,
        measure: bool = False,
        timeout: float | None = None,
        loop_timeout: float | None = None,
    ) -> tuple[Array | Buffer, ...]:
        """Run the model once and return its outputs; blocks.

        Args:
            inputs: For each input, in order, an array of its shape and dtype, or a Buffer; on several devices one in
                shared memory. Or one mapping with all of them by name: `model.execute({"image": image})`.
            out: For each output, an array to fill or a Buffer; returned. None = return new arrays.
            measure: Whether to measure the times in ns; see `last_timing`. For one device only (TIM-1).
            timeout: In seconds; also the execution's deadline. None = no limit, 0 = has passed.
            loop_timeout: Limit of each WHILE loop, in seconds: 2 by default, at most 15.

        Raises:
            InvalidArgument: If an argument's shape, dtype, number or name is wrong, or `measure` is given and the model
                is on several devices.
            BadState: If the model is closed, or it has states, and another thread is executing.
            MissedDeadline: If a limit passes.
            ProtocolError: If a driver's reply is invalid.
            DeadObject: If a driver exits.
            NnfmqError: The error that the driver replied.
        """
        config, deadline_ns = self._config(measure, loop_timeout), deadline_after(timeout)
        self.handle.require_open()
        if self._state is not None:
            results = self._execute_with_state(in_order(self.inputs, inputs), out, config, deadline_ns)
        else:
            results = self._execute_arrays(inputs, out, config, deadline_ns)
        return self._outputs_type(results)  # type: ignore[arg-type]  # Buffers are among them if they are in `out`

    def _config(self, measure: bool, loop_timeout: float | None) -> ExecutionConfig:
        config = make_execution_config(measure, loop_timeout)
        self._check_config(config)
        return config

    @exclusive
    def _execute_with_state(
        self,
        inputs: Sequence[InputValue | Buffer],
        out: Sequence[Array | Buffer] | None,
        config: ExecutionConfig,
        deadline_ns: int | None,
    ) -> tuple[Array | Buffer, ...]:
        assert isinstance(self._state, StateValues)
        check_count("input", self.inputs, len(inputs))
        if out is not None:
            check_targets(self.outputs, out)
        before = self._state.get()
        all_out = None if out is None else [*out, *map(np.empty_like, before)]
        results = self._execute_arrays((*inputs, *before), all_out, config, deadline_ns)
        self._state.set([result for result in results[len(self.outputs) :] if not isinstance(result, Buffer)])
        return results[: len(self.outputs)]

    def _busy_error(self) -> Exception:
        return BadState("another thread executes this model, which has states; make a burst for each thread")

    def execute_async(
        self,
        *inputs: InputValue,
        measure: bool = False,
        timeout: float | None = None,
        loop_timeout: float | None = None,
    ) -> PendingExecution[Outputs]:
        """Start to run the model and return the pending execution immediately.

        Arguments as for `execute`; the inputs are copied before this returns.

        Raises:
            InvalidArgument: As `execute`, or the model has states.
            BadState: If the model is closed.
            DeadObject: If the driver has exited. `PendingExecution.result` raises all other errors.
        """
        from nnfmq.client.execution.asynchronous import started  # at the first such call, as below

        config, deadline_ns = self._config(measure, loop_timeout), deadline_after(timeout)
        self.handle.require_open()
        require_no_state(self.states, "execute")
        return started(self._start_arrays(inputs, config, deadline_ns), self.is_synchronous)

    def execute_fenced(
        self,
        *inputs: InputValue,
        wait_for: Sequence[HasFileno | int] = (),
        measure: bool = False,
        timeout: float | None = None,
        duration: float | None = None,
        loop_timeout: float | None = None,
    ) -> FencedExecution[Outputs]:
        """Run the model once when all fences of `wait_for` are signaled; blocks until it is launched.

        The caller closes the result.

        Args:
            inputs: As for `execute`; copied before this returns.
            wait_for: Fences of nnfmq (for example of other executions), eventfds or sync_files. Borrowed.
            measure: Whether to measure the times in ns; see `FencedExecution.info`. For one device only (TIM-1).
            timeout: In seconds from the launch; None = no limit.
            duration: In seconds from the last fence; None = no limit.
            loop_timeout: As for `execute`.

        Raises:
            InvalidArgument: As `execute`, or a fence is invalid or in error, or an output's shape is unknown.
            MissedDeadline: If the timeout passes before the launch.
            DeadObject: If the driver exits.
            NnfmqError: The error that the driver replied.
        """
        from nnfmq.client.execution.fenced import FenceLimits  # at the first such call

        config = self._config(measure, loop_timeout)
        require_no_state(self.states, "execute")
        return self._launch_arrays(inputs, config, FenceLimits(wait_for, timeout, duration))

    def create_reusable_execution(
        self, *, measure: bool = False, loop_timeout: float | None = None, timeout: float | None = DEFAULT_TIMEOUT_S
    ) -> Execution:
        """Return an execution with its own arrays that can be computed many times; blocks. The caller closes it.

        If the model leaves shapes open, it binds a request for those of each new combination of arrays, for which this
        model must not be closed. It outlives this model, unless the interface version is older than AIDL v4: each
        computation then sends the request. `loop_timeout` as for `execute`. `timeout` (seconds; None = no limit) bounds
        each binding, the first of which is made here, and no computation.

        Raises:
            InvalidArgument: If a shape is not fully known, and the model is on several devices.
            BadState: If the model is closed.
            DeadObject: If the driver exits.
        """
        return self._create_execution(self._config(measure, loop_timeout), timeout, is_reusable=True)

    def create_execution(self, *, measure: bool = False, loop_timeout: float | None = None) -> Execution:
        """Return an execution that can be computed once; a second time raises BadState. The caller closes it.

        As `create_reusable_execution`, but nothing is sent to the driver before the computation, and this model must
        not be closed until then.
        """
        return self._create_execution(self._config(measure, loop_timeout), None, is_reusable=False)

    def _create_execution(self, config: ExecutionConfig, timeout: float | None, *, is_reusable: bool) -> Execution:
        from nnfmq.client.execution.reusable import Execution  # at the first such call

        self.handle.require_open()

        def bind(request: Request) -> BoundRequest:
            return self._bind(request, config, deadline_after(timeout), is_reusable)

        return Execution.create(self.handle, bind, is_reusable)

    @abstractmethod
    def burst(self, *, polling_window_us: float | None = None, timeout: float | None = DEFAULT_TIMEOUT_S) -> ModelBurst:
        """Configure a burst: queues and memory for the arrays, for a series of fast executions. Blocks.

        The caller closes it. On several devices it is a burst for each step, over memory that they share. If the model
        leaves shapes open, executions with other shapes lay out the memory again, and one with an output that is larger
        than its memory executes the model twice.

        Args:
            polling_window_us: How long a call polls before it sleeps, in µs; 0 = sleep immediately. The default is
                $NNFMQ_BURST_CONTROLLER_POLLING_WINDOW or 50.
            timeout: In seconds, of the configuration alone; None = no limit.
        """

    def burst_pool(
        self, count: int, *, polling_window_us: float | None = None, timeout: float | None = DEFAULT_TIMEOUT_S
    ) -> BurstPool:
        """Configure `count` bursts that threads share; blocks. The caller closes the pool.

        Each burst has a thread in the driver. Arguments as for `burst`.

        Raises:
            InvalidArgument: If `count` is less than 1, or as `burst`.
        """
        from nnfmq.client.burst.pool import BurstPool  # few applications

        configure = partial(self._configure_burst, polling_window_us, deadline_after(timeout))
        return BurstPool.configure(self.handle, count, configure)

    # ------------------------------------------------------------------------------------------------ HAL requests

    def execute_request(
        self,
        request: Request,
        config: ExecutionConfig = ExecutionConfig(),  # noqa: B008  frozen
        *,
        timeout: float | None = None,
    ) -> ExecutionResult:
        """Execute a HAL request and return the reported shapes and the timing; blocks. Borrows the request's pools.

        The pools are nnfmq memories. The driver validates the request. Raises as `execute`.
        """
        self._check_config(config)
        return self._execute_request(request, config, deadline_after(timeout))

    def execute_request_async(
        self,
        request: Request,
        config: ExecutionConfig = ExecutionConfig(),  # noqa: B008  frozen
        *,
        timeout: float | None = None,
    ) -> PendingExecution[ExecutionResult]:
        """Start to execute a HAL request and return the pending execution immediately.

        The request's pools must not be closed before it is done.

        Raises:
            DeadObject: If the driver has exited.
            InvalidArgument: If no message can carry the request. `PendingExecution.result` raises all other errors.
        """
        from nnfmq.client.execution.asynchronous import started  # at the first such call, as below

        self._check_config(config)
        return started(self._start_request(request, config, deadline_after(timeout)), self.is_synchronous)

    def execute_request_fenced(
        self,
        request: Request,
        config: ExecutionConfig = ExecutionConfig(),  # noqa: B008  frozen
        *,
        wait_for: Sequence[HasFileno | int] = (),
        timeout: float | None = None,
        duration: float | None = None,
    ) -> FencedExecution[FencedTiming]:
        """Execute a HAL request when all fences of `wait_for` are signaled; otherwise as `execute_fenced`."""
        from nnfmq.client.execution.fenced import FenceLimits  # at the first such call

        self._check_config(config)
        return self._launch_request(request, config, FenceLimits(wait_for, timeout, duration))

    def create_reusable_request(
        self,
        request: Request,
        config: ExecutionConfig = ExecutionConfig(),  # noqa: B008  frozen
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
    ) -> BoundRequest:
        """Return a HAL request that the driver has validated and bound, to be executed many times; blocks.

        The caller closes it. Borrows the request's pools. With an interface version older than AIDL v4 each computation
        sends the request.
        """
        self._check_config(config)
        return self._bind(request, config, deadline_after(timeout), is_reusable=True)

    @abstractmethod
    def request_burst(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> ModelBurst:
        """Configure a burst that only has `execute_request`: without its own memory.

        Blocks up to `timeout` seconds (None = no limit). The caller closes the burst.
        """

    @abstractmethod
    def aidl_burst(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> AidlBurst:
        """Configure an AIDL burst: without queues, over the control channel, with tokens for memories.

        Blocks up to `timeout` seconds (None = no limit). The caller closes the burst.

        Raises:
            InvalidArgument: If the model is on several devices: a token is known to one driver.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the model in its drivers; its bursts remain usable. Idempotent. Blocks up to 1 s for each driver."""

    # ------------------------------------------------------------------------------------------------ of each kind

    @property
    @abstractmethod
    def _padding(self) -> int:
        """The padding of `memory_preference`."""

    @abstractmethod
    def _check_config(self, config: ExecutionConfig) -> None:
        """Raise InvalidArgument if the model cannot be executed in that way."""

    @abstractmethod
    def _execute_arrays(
        self,
        inputs: Sequence[InputValue | Buffer],
        out: Sequence[Array | Buffer] | None,
        config: ExecutionConfig,
        deadline_ns: int | None,
    ) -> tuple[Array | Buffer, ...]:
        """Execute with arrays of inputs, outputs and states; return the outputs and the new states. Blocks."""

    @abstractmethod
    def _start_arrays(
        self, inputs: Sequence[InputValue], config: ExecutionConfig, deadline_ns: int | None
    ) -> PendingExecution[Outputs]: ...

    @abstractmethod
    def _launch_arrays(
        self, inputs: Sequence[InputValue], config: ExecutionConfig, limits: FenceLimits
    ) -> FencedExecution[Outputs]: ...

    @abstractmethod
    def _configure_burst(
        self, polling_window_us: float | None, deadline_ns: int | None, *, with_memory: bool = True
    ) -> ModelBurst: ...

    @abstractmethod
    def _execute_request(
        self, request: Request, config: ExecutionConfig, deadline_ns: int | None
    ) -> ExecutionResult: ...

    @abstractmethod
    def _start_request(
        self, request: Request, config: ExecutionConfig, deadline_ns: int | None
    ) -> PendingExecution[ExecutionResult]: ...

    @abstractmethod
    def _launch_request(
        self, request: Request, config: ExecutionConfig, limits: FenceLimits
    ) -> FencedExecution[FencedTiming]: ...

    @abstractmethod
    def _bind(
        self, request: Request, config: ExecutionConfig, deadline_ns: int | None, is_reusable: bool
    ) -> BoundRequest:
        """Return a request that is executed many times; the drivers bind it now if `is_reusable`. Blocks."""
