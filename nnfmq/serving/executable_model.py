"""ExecutableModel: a model that a server executes, with its bursts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Self

from nnfmq.deadlines import remaining_s
from nnfmq.hal.errors import InvalidArgument
from nnfmq.runtime.blocking_wait import BlockingWait
from nnfmq.serving.batching import RowBatcher
from nnfmq.serving.burst_lanes import BurstLanes
from nnfmq.serving.inference_service import Array, InferenceModelMetadata, InferRequest, InferResponse
from nnfmq.serving.model_providers import ProvidedModel
from nnfmq.serving.request_arrays import RequestArrays

__all__ = ["ExecutableModel"]


class ExecutableModel:
    """A model and its bursts. `open` and `close` block; all else runs on one event loop, without blocking it."""

    def __init__(
        self,
        name: str,
        model: ProvidedModel,
        lanes: BurstLanes,
        batcher: RowBatcher | None,
        blocking: BlockingWait | None,
    ) -> None:
        self.name = name
        self._blocking = blocking
        self._model, self._lanes, self._batcher = model, lanes, batcher
        self._inputs = model.prepared.inputs
        self._arrays = RequestArrays(self._inputs, model.prepared.outputs, model.batch)
        self._resources = ExitStack()

    @classmethod
    def open(
        cls,
        name: str,
        model: ProvidedModel,
        lanes: int,
        max_waiting: int,
        max_batch_wait_s: float,
        blocking: BlockingWait | None,
    ) -> Self:
        """Configure the bursts; blocks. Takes ownership of the model, also if that fails.

        `blocking` decides when a request may wait on the event loop's thread; None = never.

        Raises:
            InvalidArgument: If a shape is not fully known.
            NnfmqError: The error of the driver's reply.
        """
        with ExitStack() as resources:
            resources.callback(model.prepared.close)
            bursts = [resources.enter_context(model.prepared.burst()) for _ in range(lanes)]
            batcher = None
            if model.batch > 1:
                if model.prepared.states:
                    raise InvalidArgument(f"model {name!r} has states, so its rows are not independent: no batches")
                shared = BurstLanes(bursts, 1)  # for the batcher's dispatcher
                batcher = RowBatcher(model, shared, max_waiting, max_batch_wait_s)
            else:
                shared = BurstLanes(bursts, max_waiting)
            opened = cls(name, model, shared, batcher, blocking)
            opened._resources = resources.pop_all()
        return opened

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names of the inputs, in the model's order."""
        return tuple([info.name for info in self._inputs])

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a burst."""
        return self._lanes.waiting if self._batcher is None else self._batcher.waiting

    @property
    def busy(self) -> int:
        """The number of bursts that execute."""
        return self._lanes.busy

    def metadata(self, versions: tuple[str, ...]) -> InferenceModelMetadata:
        """Return what the model's inputs and outputs are."""
        return InferenceModelMetadata(self.name, versions, *self._arrays.metadata())

    async def infer(self, request: InferRequest, deadline_ns: int | None) -> InferResponse:
        """Execute a request, once. Raises as `InferenceService.infer`."""
        arrays = self._arrays.ordered(request.inputs)
        wanted = self._arrays.output_indexes(request.outputs)
        if self._batcher is not None:
            outputs, version = await self._batcher.execute(arrays, deadline_ns)
        else:
            outputs, version = await self._execute(arrays, deadline_ns)
        named = {name: outputs[index] for name, index in wanted.items()}
        return InferResponse(request.model, str(version), named, request.id)

    async def _execute(self, arrays: Sequence[Array], deadline_ns: int | None) -> tuple[tuple[Array, ...], int]:
        burst = await self._lanes.take(deadline_ns)
        is_late = True  # if this task is cancelled
        try:
            outputs = await burst.execute_async(*arrays, timeout=remaining_s(deadline_ns), blocking=self._blocking)
            is_late = False
            return outputs, self._model.version_of(burst)
        finally:
            self._lanes.put_back(burst, is_late=is_late)

    async def drain(self) -> None:
        """Reject new requests, and return when none is executed any more."""
        await self._lanes.drain()

    def close(self) -> None:
        """Close the bursts and the model; blocks. Idempotent."""
        self._resources.close()
