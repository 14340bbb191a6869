"""MovingBurst: a burst that goes on in a new version of its model.

A class of its own, so that executions of an ordinary burst cost nothing more. The burst keeps its memory, its slots,
and the states of a model with states; its queues are closed, and new ones are configured for the version. That happens
at the beginning of an execution, before a request is sent: each request goes to one version.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from nnfmq.hal.types import MeasureTiming, Pool, Request
from nnfmq.runtime.burst_controller import Burst, Inputs, Targets
from nnfmq.runtime.execution_result import ExecutionResult
from nnfmq.runtime.model_handle import ModelLocation

if TYPE_CHECKING:
    from nnfmq.runtime.blocking_wait import BlockingWait
from nnfmq.runtime.outputs import Outputs

__all__ = ["MovingBurst"]


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
            from nnfmq.runtime.task_waiting import run_to_its_end

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
