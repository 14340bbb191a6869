"""ModelBurst: a series of fast executions of one model, on one device (Burst) or several (CompoundBurst)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from nnfmq.base.ownership import CLAIM
from nnfmq.client.model.array_request import MappedArrays
from nnfmq.client.model.arrays import Array, InputValue, Outputs, no_inputs_error
from nnfmq.client.model.handle import HasState
from nnfmq.hal.types import ExecutionConfig, Pool, Request

if TYPE_CHECKING:
    from nnfmq.client.model.arrays import ExecutionInfo, ExecutionResult

__all__ = ["ModelBurst"]


class ModelBurst(HasState, ABC):
    """A burst. Close it, or use `with`. One execution at a time: a second thread's call is rejected, not queued.

    `inputs` and `outputs` are arrays over the shared memory itself: write the inputs, call `execute()` without
    arguments, and read the outputs, and nothing is copied. Do not write the inputs or use the outputs while an
    execution runs, nor after a call that ended early until the next call has returned. Without arguments `execute`
    needs inputs: from an earlier call, or because the application has accessed `inputs`. The states of a model with
    states are this burst's own; a call that raises does not change them.
    """

    _arrays: MappedArrays | None
    _claims: dict[int, object]
    _has_inputs: bool
    _inputs: tuple[Array, ...]
    outputs: Outputs

    @property
    def inputs(self) -> tuple[Array, ...]:
        """The input arrays over the shared memory; empty without own memory, and once closed."""
        self._has_inputs = True  # what the application does with the arrays cannot be seen from here
        return self._inputs

    def discard_inputs(self) -> None:
        """Require new inputs for the next `execute`, and begin it with the initial states. For a burst's next user."""
        self._has_inputs = False
        self.reset_state()

    @abstractmethod
    def execute(
        self,
        *inputs: InputValue,
        out: Sequence[Array] | None = None,
        measure: bool = False,
        timeout: float | None = None,
    ) -> Outputs:
        """Run the model once and return its outputs; blocks.

        Args:
            inputs: One array for each input, of its shape and dtype; or none at all, if `self.inputs` were filled.
            out: Arrays to fill and return. With `burst.outputs` nothing is copied. None = return new arrays.
            measure: Whether to measure the HAL's times; see `last`. For one device only (TIM-1).
            timeout: In seconds; also the execution's deadline. None = no limit, 0 = has passed.

        Raises:
            InvalidArgument: If an array, a name or the number of arrays is wrong, there are no inputs yet, or `measure`
                is given and the model is on several devices.
            BadState: If another thread is executing, or the burst or its client is closed.
            MissedDeadline: If the timeout passes. The driver ends the execution at its next check; the next call
                first waits for that. If the interface version has no deadlines, the execution continues.
            DeadObject: If a driver exits.
            NnfmqError: The error that the driver replied.
        """

    @abstractmethod
    async def execute_async(
        self,
        *inputs: InputValue,
        out: Sequence[Array] | None = None,
        measure: bool = False,
        timeout: float | None = None,
    ) -> Outputs:
        """Run the model once and return its outputs; other tasks of the event loop run meanwhile.

        Arguments and errors as for `execute`. A task that is cancelled abandons the execution: the next call first
        waits for it to end, and discards its result.
        """

    @abstractmethod
    def execute_request(
        self,
        request: Request,
        config: ExecutionConfig = ExecutionConfig(),  # noqa: B008  frozen
        *,
        timeout: float | None = None,
    ) -> ExecutionResult:
        """Execute a HAL request and return the reported shapes and the timing; blocks. Borrows the request's pools.

        A pool gets a slot, which it keeps until `free_memory`, or until it is closed or garbage-collected. A request
        that a packet cannot carry (a loop timeout, hints, managed buffers) is executed over the control channel
        (BUR-18). The driver validates the request. Raises as `execute`.
        """

    @abstractmethod
    def free_memory(self, memory: Pool, *, timeout: float | None = 10.0) -> None:
        """Make the drivers unmap a memory that was a pool of `execute_request`; blocks. Idempotent.

        Raises:
            BadState: If another thread is executing, or the burst is closed.
            MissedDeadlineTransient: If `timeout` (seconds; None = no limit) passes.
            DeadObject: If a driver exits.
        """

    @property
    @abstractmethod
    def last(self) -> ExecutionInfo:
        """The durations of the last execution in any mode, `execute_request` included, that had a result.

        An execution that the driver has failed has one. After a call that ended early the driver's durations of the
        execution before it may be 0. Raises GeneralFailure before the first.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the burst here and in its drivers; waits up to 5 s for an execution in progress. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------ both kinds

    @abstractmethod
    def _no_memory_error(self) -> Exception:
        """Return the error of a call that needs arrays: the burst is closed, or has none."""

    def _checked_arrays(self, inputs: Sequence[InputValue], out: Sequence[Array] | None) -> MappedArrays:
        """Return the burst's arrays. Raises InvalidArgument if there are none, or no inputs, or `out` is wrong."""
        arrays = self._arrays
        if arrays is None:
            raise self._no_memory_error()
        if not inputs and not self._has_inputs and arrays.inputs:
            raise no_inputs_error(arrays.input_infos, "burst.execute")
        arrays.check_out(out)
        return arrays

    def _write_inputs(self, arrays: MappedArrays, inputs: Sequence[InputValue]) -> None:
        """Write the inputs, none at all leaves them as they are, and the states."""
        arrays.copy_in(inputs)
        self._has_inputs |= bool(inputs)
        if arrays.state is not None:
            arrays.state.begin()

    def _release_claim(self, claim: object) -> None:
        if self._claims.get(CLAIM) is claim:
            del self._claims[CLAIM]
