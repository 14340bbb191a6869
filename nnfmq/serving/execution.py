"""ExecutableModel: a model that a server executes, its bursts, batches and arrays."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Self

from nnfmq.base.deadlines import remaining_s
from nnfmq.client.model.arrays import require_fixed_shapes
from nnfmq.client.waiting import BlockingWait
from nnfmq.hal.errors import InvalidArgument
from nnfmq.serving.burst_lanes import BurstLanes
from nnfmq.serving.inference_service import Array, InferenceModelMetadata, InferRequest, InferResponse
from nnfmq.serving.providers import ProvidedModel
from nnfmq.serving.request_arrays import RequestArrays
from nnfmq.serving.row_batcher import RequireDriver, Result, RowBatcher

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
        require_driver: RequireDriver,
        max_batch_wait_s: float,
    ) -> None:
        self.name = name
        self._require_driver = require_driver
        self._blocking = blocking
        self._model, self._lanes, self._batcher = model, lanes, batcher
        self._inputs = model.prepared.inputs
        self._arrays = RequestArrays(self._inputs, model.prepared.outputs, model.batch)
        self._bfloat16 = frozenset(info.name for info in model.prepared.outputs if info.is_bfloat16)
        self._max_batch_wait_s = max_batch_wait_s
        self.version = 0
        """The version that the last request executed; before the first one that which was opened."""
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
        require_driver: RequireDriver,
    ) -> Self:
        """Configure the bursts; blocks. Takes ownership of the model, also if that fails.

        `blocking` decides when a request may wait on the event loop's thread; None = never. `require_driver` is awaited
        before each execution.

        Raises:
            InvalidArgument: If the model computes batches, and has states, or a shape is not fully known.
            NnfmqError: The error of the driver's reply.
        """
        with ExitStack() as resources:
            resources.callback(model.prepared.close)
            if model.batch > 1:
                require_fixed_shapes("input", model.prepared.inputs, "a model that computes batches")
                require_fixed_shapes("output", model.prepared.outputs, "a model that computes batches")
            bursts = [resources.enter_context(model.prepared.burst()) for _ in range(lanes)]
            batcher = None
            if model.batch > 1:
                if model.prepared.states:
                    raise InvalidArgument(f"model {name!r} has states, so its rows are not independent: no batches")
                shared = BurstLanes(bursts, 1)  # for the batcher's dispatcher
                batcher = RowBatcher(model, shared, max_waiting, max_batch_wait_s, require_driver)
            else:
                shared = BurstLanes(bursts, max_waiting)
            opened = cls(name, model, shared, batcher, blocking, require_driver, max_batch_wait_s)
            opened.version = model.version_of(bursts[0])
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
        """Return the description of the model's inputs and outputs."""
        inputs, outputs = self._arrays.metadata()
        if self._batcher is None:
            return InferenceModelMetadata(self.name, versions, inputs, outputs)
        batch = self._model.batch
        return InferenceModelMetadata(
            self.name, versions, inputs, outputs, max_batch=batch, max_batch_wait_s=self._max_batch_wait_s
        )

    async def infer(self, request: InferRequest, deadline_ns: int | None) -> InferResponse:
        """Execute a request, once. Raises as `InferenceService.infer`."""
        arrays = self._arrays.ordered(request.inputs)
        wanted = self._arrays.output_indexes(request.outputs)
        if self._batcher is not None:
            result, rows = await self._batcher.execute(arrays, deadline_ns), len(arrays[0])
        else:
            result, rows = await self._execute(arrays, deadline_ns), 1
        self.version = result.version
        named = {name: result.outputs[index] for name, index in wanted.items()}
        return InferResponse(
            request.model, str(result.version), named, request.id, self._bfloat16, rows, result.wait_ns
        )

    async def _execute(self, arrays: Sequence[Array], deadline_ns: int | None) -> Result:
        arrived_ns = time.monotonic_ns()
        burst = await self._lanes.take(deadline_ns)
        is_late = True  # if this task is cancelled
        try:
            await self._require_driver(deadline_ns)
            wait_ns = time.monotonic_ns() - arrived_ns
            outputs = await burst.execute_async(*arrays, timeout=remaining_s(deadline_ns), blocking=self._blocking)
            is_late = False
            return Result(outputs, self._model.version_of(burst), wait_ns)
        finally:
            self._lanes.put_back(burst, is_late=is_late)

    async def drain(self) -> None:
        """Reject new requests, and return when none is executed any more."""
        await self._lanes.drain()

    def close(self) -> None:
        """Close the bursts and the model; blocks. Idempotent."""
        self._resources.close()
