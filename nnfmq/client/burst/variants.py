"""Bursts that observers see, and bursts that move to new versions of their model.

A class of its own, so that the executions of an ordinary burst cost nothing more.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from nnfmq.client.burst.controller import Burst, Inputs, Targets
from nnfmq.client.model.arrays import Array, ExecutionResult, InputValue, Outputs
from nnfmq.client.model.handle import ModelHandle, ModelLocation
from nnfmq.client.observation import RequestObservation, Tensors
from nnfmq.hal.errors import BadState, ErrorStatus, NnfmqError
from nnfmq.hal.timing import NO_TIMING
from nnfmq.hal.types import HalExecutionMode, MeasureTiming, Pool, Request
from nnfmq.observe.executions import CapturedTensor, ObservedExecution

if TYPE_CHECKING:
    from nnfmq.client.waiting import BlockingWait

__all__ = ["MovingBurst", "ObservedBurst", "ObservedMovingBurst"]


class ObservedBurst(Burst):
    """A burst of a model that is observed.

    An execution that falls back to the control channel is reported from there, as a synchronous one.
    """

    def __init__(self, model: ModelHandle, window_ns: int) -> None:
        super().__init__(model, window_ns)
        assert model.observed is not None  # `configuration` has checked it
        self._observed = model.observed
        self._intended_ns = 0  # when the application has called
        self._begin_ns = 0  # when the last request was sent; 0 = it was not
        self._deadline_then: int | None = None

    def execute(
        self,
        *inputs: InputValue,
        out: Sequence[Array] | None = None,
        measure: bool = False,
        timeout: float | None = None,
    ) -> Outputs:
        """Run the model once, as `Burst.execute`, and report it."""
        self._intended_ns = time.monotonic_ns()
        return super().execute(*inputs, out=out, measure=measure, timeout=timeout)

    async def execute_async(
        self,
        *inputs: InputValue,
        out: Sequence[Array] | None = None,
        measure: bool = False,
        timeout: float | None = None,
        blocking: BlockingWait | None = None,
    ) -> Outputs:
        """Run the model once, as `Burst.execute_async`, and report it."""
        self._intended_ns = time.monotonic_ns()
        return await super().execute_async(*inputs, out=out, measure=measure, timeout=timeout, blocking=blocking)

    def _execute(self, inputs: Inputs, out: Targets, kind: int, deadline_ns: int | None) -> Outputs:
        with self._reporting():
            return super()._execute(inputs, out, kind, deadline_ns)

    async def _execute_in_task(
        self, inputs: Inputs, out: Targets, kind: int, deadline_ns: int | None, blocking: BlockingWait | None
    ) -> Outputs:
        with self._reporting():
            return await super()._execute_in_task(inputs, out, kind, deadline_ns, blocking)

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Report the execution of the block when it ends."""
        intended_ns = self._intended_ns
        self._begin_ns = 0
        before = self.state if self._observed.needs_tensors else ()
        try:
            yield
        except NnfmqError as error:
            self._report(intended_ns, before, error.status)
            raise
        self._report(intended_ns, before, ErrorStatus.NONE)

    def _exchange(self, packet: bytes, deadline_ns: int | None) -> bytes | None:
        self._begin_ns, self._deadline_then = time.monotonic_ns(), deadline_ns
        reply = super()._exchange(packet, deadline_ns)
        if reply is None:
            self._begin_ns = 0
        return reply

    async def _exchange_in_task(
        self, packet: bytes, deadline_ns: int | None, blocking: BlockingWait | None
    ) -> bytes | None:
        self._begin_ns, self._deadline_then = time.monotonic_ns(), deadline_ns
        reply = await super()._exchange_in_task(packet, deadline_ns, blocking)
        if reply is None:
            self._begin_ns = 0
        return reply

    def _report(self, intended_ns: int, states: Sequence[Array], status: ErrorStatus) -> None:
        """Report the execution, unless nothing was sent. `states` are those that it began with."""
        end_ns, arrays = time.monotonic_ns(), self._arrays
        if not self._begin_ns:
            return
        inputs = outputs = None
        is_successful = status is ErrorStatus.NONE
        if arrays is not None and self._observed.needs_tensors:
            inputs = _copies((*arrays.inputs, *states))
            outputs = _copies(arrays.all_outputs) if is_successful else None
        timing = self._timing if is_successful else NO_TIMING
        self._observed.report(
            ObservedExecution(
                HalExecutionMode.BURST, status, intended_ns, self._begin_ns, end_ns, self._deadline_then,
                timing.time_on_device_ns, timing.time_in_driver_ns, inputs, outputs,
            )
        )  # fmt: skip

    def _execute_packet(
        self, request: Request, memories: Sequence[Pool], measure: MeasureTiming, deadline_ns: int | None
    ) -> ExecutionResult | None:
        observation = RequestObservation(self._observed, request, HalExecutionMode.BURST, deadline_ns)
        try:
            result = super()._execute_packet(request, memories, measure, deadline_ns)
        except BadState:  # another thread executes
            raise
        except NnfmqError as error:
            observation.fail(error)
            raise
        if result is not None:
            observation.finish(result.shapes, result.timing)
        return result


def _copies(arrays: Sequence[Array]) -> Tensors:
    return tuple(CapturedTensor(array.shape, array.tobytes()) for array in arrays)


# ----------------------------------------------------------------------------------------------------------------------
# MovingBurst: a burst that goes on in a new version of its model.
#
# A class of its own, so that executions of an ordinary burst cost nothing more. The burst keeps its memory, its slots,
# and the states of a model with states; its queues are closed, and new ones are configured for the version. That
# happens at the beginning of an execution, before a request is sent: each request goes to one version.


class MovingBurst(Burst):
    """A burst of a model of the model repository. Use it as any burst."""

    __slots__ = ("_version",)  # no further entry of the dict of attributes, see `BurstChannel`
    _version: int

    @property
    def version(self) -> int:
        """The version of the model that the last execution ran on; before the first, the one that is configured."""
        return self._version

    def _open_at(self, location: ModelLocation, deadline_ns: int | None) -> None:
        super()._open_at(location, deadline_ns)
        self._version = location.version

    def _execute(self, inputs: Inputs, out: Targets, kind: int, deadline_ns: int | None) -> Outputs:
        if self._model.location.version != self._version:
            self._move(deadline_ns)
        return super()._execute(inputs, out, kind, deadline_ns)

    async def _execute_in_task(
        self, inputs: Inputs, out: Targets, kind: int, deadline_ns: int | None, blocking: BlockingWait | None
    ) -> Outputs:
        if self._model.location.version != self._version:
            from nnfmq.client.task_waiting import run_to_its_end

            await run_to_its_end(partial(self._move, deadline_ns))
        return await super()._execute_in_task(inputs, out, kind, deadline_ns, blocking)

    def _send_request(
        self, request: Request, memories: Sequence[Pool], measure: MeasureTiming, deadline_ns: int | None
    ) -> ExecutionResult | None:
        if self._model.location.version != self._version:
            self._move(deadline_ns)
        return super()._send_request(request, memories, measure, deadline_ns)

    def _move(self, deadline_ns: int | None) -> None:
        """Configure the burst for the version that the model has now; blocks.

        A burst whose model is closed keeps its version. If this raises, the next execution tries it again.

        Raises:
            MissedDeadlineTransient: If the deadline passes, perhaps while an execution that was abandoned continues.
            DeadObject: If the driver exits.
            NnfmqError: The error that the driver replied.
        """
        location = self._model.location
        if self._is_closed or location.model_id is None:
            return
        location.connection.raise_if_closed()  # a forked child must not touch the queues, which the parent uses
        if self._in_flight and self._connection.is_open:
            self.drain_late_result(deadline_ns)
        self._replace_queues(deadline_ns)


# ----------------------------------------------------------------------------------------------------------------------
# ObservedMovingBurst: a burst that moves to new versions of its model, and shows its executions to observers.


class ObservedMovingBurst(MovingBurst, ObservedBurst):
    """A moving burst of a model that is observed; for its observers each version is a model of its own."""

    def _open_at(self, location: ModelLocation, deadline_ns: int | None) -> None:
        super()._open_at(location, deadline_ns)
        self._observed = self._model.observed or self._observed
