"""RowBatcher: requests of several tasks, executed together by a model that computes batches.

    tasks → rows waiting → one burst's input memory → one execution → rows of the outputs → tasks

A model of batch N has N independent rows in each input and output. The rows of several requests are copied into the
burst's memory, one behind the other, and the rest is filled with zeros. An execution begins when a burst is free, and
the batch is full or its oldest request has waited for `max_wait_s`. Each request is checked before it waits, so an
invalid one concerns nobody else; an execution that fails, fails for all its requests. None is executed twice.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from nnfmq.base.deadlines import has_passed, remaining_s
from nnfmq.hal.errors import DeadObject, GeneralFailure, MissedDeadlineTransient, NnfmqError, ResourceExhaustedTransient
from nnfmq.serving.burst_lanes import BurstLanes
from nnfmq.serving.inference_service import Array
from nnfmq.serving.providers import ProvidedModel

if TYPE_CHECKING:
    from nnfmq.client.burst.burst import Burst

__all__ = ["RequireDriver", "Result", "RowBatcher"]


RequireDriver: TypeAlias = Callable[[int | None], Awaitable[None]]
"""Returns when there is a driver to execute; raises DeviceUnavailable at once if none listens. Takes a deadline."""


async def _any_driver(_deadline_ns: int | None) -> None:
    """Leave it to the burst whether its driver lives."""


class Result(NamedTuple):
    """The outputs of a request, the version of the model that computed them, and the wait until that began."""

    outputs: tuple[Array, ...]
    version: int
    wait_ns: int


@dataclass(frozen=True, slots=True, eq=False)
class _WaitingRequest:
    arrays: Sequence[Array]
    rows: int
    deadline_ns: int | None
    arrived_ns: int
    result: asyncio.Future[Result]


class RowBatcher:
    """Stacks requests for one model. One event loop; `lanes` are used by nothing else. Borrows its arguments."""

    def __init__(
        self,
        model: ProvidedModel,
        lanes: BurstLanes,
        max_waiting: int,
        max_wait_s: float,
        require_driver: RequireDriver = _any_driver,
    ) -> None:
        self._model, self._lanes, self._require_driver = model, lanes, require_driver
        self._max_waiting, self._max_wait_s = max_waiting, max_wait_s
        self._waiting: deque[_WaitingRequest] = deque()
        self._arrival = asyncio.Event()
        self._dispatcher: asyncio.Task[None] | None = None
        self._executions: set[asyncio.Task[None]] = set()

    @property
    def waiting(self) -> int:
        """The number of requests whose execution has not begun."""
        return len(self._waiting)

    async def execute(self, arrays: Sequence[Array], deadline_ns: int | None) -> Result:
        """Return the outputs for the rows of `arrays`, which are valid and at most the model's batch.

        Raises:
            ResourceExhaustedTransient: If as many requests wait as may.
            MissedDeadlineTransient: If the deadline passes.
            NnfmqError: The error of the execution.
        """
        if len(self._waiting) >= self._max_waiting:
            raise ResourceExhaustedTransient(f"{len(self._waiting)} requests wait already for this model; retry later")
        result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        request = _WaitingRequest(arrays, len(arrays[0]), deadline_ns, time.monotonic_ns(), result)
        self._waiting.append(request)
        self._arrival.set()
        if self._dispatcher is None:
            self._dispatcher = asyncio.create_task(self._dispatch())
        try:
            async with asyncio.timeout(remaining_s(deadline_ns)):
                return await result
        except TimeoutError as error:
            if isinstance(error, NnfmqError):  # MissedDeadline is one, too
                raise
            raise MissedDeadlineTransient("the timeout passed before the result of the batch was there") from None
        finally:
            if request in self._waiting:
                self._waiting.remove(request)

    async def _dispatch(self) -> None:
        """Begin executions until nothing waits."""
        try:
            while self._waiting:
                burst = await self._lanes.take(None)
                await self._wait_for_rows()
                requests = self._next_batch()
                if requests:
                    task = asyncio.create_task(self._execute(burst, requests))
                    self._executions.add(task)
                    task.add_done_callback(self._executions.discard)
                else:
                    self._lanes.put_back(burst, is_late=False)
        except NnfmqError as error:
            _fail(self._waiting, error)
        except BaseException:
            _fail(self._waiting, DeadObject("this model is being closed"))
            raise
        finally:
            self._dispatcher = None

    async def _wait_for_rows(self) -> None:
        """Wait until the batch is full, or its oldest request has waited long enough."""
        while self._waiting and sum(request.rows for request in self._waiting) < self._model.batch:
            left_s = (self._waiting[0].arrived_ns - time.monotonic_ns()) / 1e9 + self._max_wait_s
            if left_s <= 0:
                return
            self._arrival.clear()
            try:
                async with asyncio.timeout(left_s):
                    await self._arrival.wait()
            except TimeoutError:
                return

    def _next_batch(self) -> list[_WaitingRequest]:
        """Remove the oldest requests that fit into one batch. Those whose deadline has passed are dropped."""
        taken: list[_WaitingRequest] = []
        rows = 0
        while self._waiting and rows + self._waiting[0].rows <= self._model.batch:
            request = self._waiting.popleft()
            if not has_passed(request.deadline_ns):
                taken.append(request)
                rows += request.rows
        return taken

    async def _execute(self, burst: Burst, requests: Sequence[_WaitingRequest]) -> None:
        is_late = True
        try:
            await self._require_driver(_latest_ns(requests))
            begin_ns = time.monotonic_ns()
            self._copy_in(burst, requests)
            outputs = await burst.execute_async(out=burst.outputs, timeout=remaining_s(_latest_ns(requests)))
            is_late = False
            self._copy_out(outputs, requests, self._model.version_of(burst), begin_ns)
        except NnfmqError as error:
            _fail(requests, error)
        except BaseException as bug:
            _fail(requests, GeneralFailure(f"internal error: {bug!r}"))
            raise
        finally:
            self._lanes.put_back(burst, is_late=is_late)

    def _copy_in(self, burst: Burst, requests: Sequence[_WaitingRequest]) -> None:
        for index, target in enumerate(burst.inputs):
            begin = 0
            for request in requests:
                target[begin : begin + request.rows] = request.arrays[index]
                begin += request.rows
            target[begin:] = 0

    def _copy_out(
        self, outputs: Sequence[Array], requests: Sequence[_WaitingRequest], version: int, begin_ns: int
    ) -> None:
        begin = 0
        for request in requests:
            end = begin + request.rows
            if not request.result.done():
                rows = tuple([output[begin:end].copy() for output in outputs])
                request.result.set_result(Result(rows, version, begin_ns - request.arrived_ns))
            begin = end


def _fail(requests: Iterable[_WaitingRequest], error: NnfmqError) -> None:
    for request in requests:
        if not request.result.done():
            request.result.set_exception(error)


def _latest_ns(requests: Sequence[_WaitingRequest]) -> int | None:
    """Return the latest deadline of the requests; None if one has none."""
    deadlines = [request.deadline_ns for request in requests]
    limits = [deadline_ns for deadline_ns in deadlines if deadline_ns is not None]
    return None if len(limits) < len(deadlines) else max(limits)
