"""ExecutableModel: a model that a server executes, its bursts, batches and arrays."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

import numpy as np

from nnfmq.base.deadlines import has_passed, remaining_s
from nnfmq.client.model.arrays import require_fixed_shapes
from nnfmq.client.waiting import BlockingWait
from nnfmq.hal.errors import (
    DeadObject,
    GeneralFailure,
    InvalidArgument,
    MissedDeadlineTransient,
    NnfmqError,
    ResourceExhaustedTransient,
)
from nnfmq.hal.summaries import clipped
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.serving.inference_service import (
    Array,
    InferenceModelMetadata,
    InferenceTensorMetadata,
    InferRequest,
    InferResponse,
)
from nnfmq.serving.providers import ProvidedModel

if TYPE_CHECKING:
    from nnfmq.client.burst.burst import Burst

__all__ = ["BurstLanes", "ExecutableModel", "LoopBlocking", "ModelBlocking", "RequestArrays", "RowBatcher"]


# ----------------------------------------------------------------------------------------------------------------------
# BurstLanes: bursts of one model that the tasks of one event loop share.
#
# A burst executes one request at a time. A task that finds no free burst waits in the order of arrival, as long as its
# deadline allows; if too many wait already, it is rejected immediately. No thread waits for a burst or for its result.


class BurstLanes:
    """Gives each of `bursts` to one task at a time. One event loop. Borrows the bursts.

    At most `max_waiting` tasks wait for a burst.
    """

    def __init__(self, bursts: Sequence[Burst], max_waiting: int) -> None:
        self.count = len(bursts)
        self._free = deque(bursts)
        self._waiting: deque[asyncio.Future[Burst]] = deque()
        self._max_waiting = max_waiting
        self._is_closing = False
        self._all_free = asyncio.Event()  # set while they are being closed only

    @property
    def waiting(self) -> int:
        """The number of tasks that wait for a burst."""
        return len(self._waiting)

    @property
    def busy(self) -> int:
        """The number of bursts that tasks have."""
        return self.count - len(self._free)

    async def take(self, deadline_ns: int | None) -> Burst:
        """Wait for a free burst and return it; the caller puts it back.

        Raises:
            ResourceExhaustedTransient: If as many tasks wait as may.
            MissedDeadlineTransient: If the deadline passes first.
            DeadObject: If the bursts are being closed.
        """
        if self._is_closing:
            raise DeadObject("this model is being closed")
        if self._free:
            return self._free.popleft()
        if len(self._waiting) >= self._max_waiting:
            raise ResourceExhaustedTransient(
                f"{len(self._waiting)} requests wait already for the {self.count} bursts of this model; retry later"
            )
        return await self._wait(deadline_ns)

    async def _wait(self, deadline_ns: int | None) -> Burst:
        turn: asyncio.Future[Burst] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(remaining_s(deadline_ns)):
                return await turn
        except BaseException as error:
            self._leave(turn)
            if isinstance(error, TimeoutError):
                raise MissedDeadlineTransient(f"none of the {self.count} bursts of this model became free") from None
            raise

    def _leave(self, turn: asyncio.Future[Burst]) -> None:
        """End a wait. A burst that a task got in the moment that it was cancelled goes to the next one."""
        if turn in self._waiting:
            self._waiting.remove(turn)
        if turn.done() and not turn.cancelled() and turn.exception() is None:
            self.put_back(turn.result(), is_late=False)

    def put_back(self, burst: Burst, *, is_late: bool) -> None:
        """Return a burst. If `is_late`, its execution may not have ended: then all others are given first."""
        burst.discard_inputs()
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(burst)
                return
        if is_late:
            self._free.append(burst)
        else:
            self._free.appendleft(burst)
        if self._is_closing:
            self._set_if_all_free()

    def _set_if_all_free(self) -> None:
        if len(self._free) == self.count:
            self._all_free.set()

    async def drain(self) -> None:
        """Reject new tasks, and return when all others have returned their bursts."""
        self._is_closing = True
        self._set_if_all_free()
        await self._all_free.wait()


# ----------------------------------------------------------------------------------------------------------------------
# RowBatcher: requests of several tasks, executed together by a model that computes batches.
#
#     tasks → rows waiting → one burst's input memory → one execution → rows of the outputs → tasks
#
# A model of batch N has N independent rows in each input and output. The rows of several requests are copied into the
# burst's memory, one behind the other, and the rest is filled with zeros. An execution begins when a burst is free, and
# the batch is full or its oldest request has waited for `max_wait_s`. Each request is checked before it waits, so an
# invalid one concerns nobody else; an execution that fails, fails for all its requests. None is executed twice.


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


# ----------------------------------------------------------------------------------------------------------------------
# RequestArrays: the arrays of a model's requests, checked against its inputs and outputs, and the metadata of both.
#
# A server is strict: an input has exactly the model's name, dtype and shape, so that a client's mistake is an error
# instead of another result. Of a model that computes batches, the first dimension is the number of rows, from 1 to the
# batch, and the same in all inputs.


class RequestArrays:
    """Checks the requests to one model of the given inputs and outputs. `batch` is its number of independent rows."""

    def __init__(self, inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo], batch: int) -> None:
        self._inputs, self._outputs, self._batch = tuple(inputs), tuple(outputs), batch
        self._expected = [(info.name, np.dtype(info.dtype), info.shape) for info in inputs]
        self._output_indexes = {info.name: index for index, info in enumerate(outputs)}

    def ordered(self, inputs: Mapping[str, Any]) -> Sequence[Array]:
        """Return the arrays of a request in the order of the model's inputs.

        Raises:
            InvalidArgument: If an input is missing, unknown, no array, or of another shape or dtype.
        """
        arrays = list[Array]()
        for name, dtype, shape in self._expected:
            array = inputs.get(name)
            if type(array) is not np.ndarray or array.shape != shape or array.dtype != dtype:
                break  # perhaps another number of rows, or of a subclass
            arrays.append(array)
        if len(arrays) == len(inputs) == len(self._expected):
            return arrays
        return _ordered_arrays(self._inputs, inputs, self._batch)

    def output_indexes(self, wanted: Sequence[str]) -> Mapping[str, int]:
        """Return the indexes of the outputs of a request by name, in the order that it asks for; all if it names none.

        Raises:
            InvalidArgument: If there is no such output.
        """
        if not wanted:
            return self._output_indexes
        unknown = [name for name in wanted if name not in self._output_indexes]
        if unknown:
            raise InvalidArgument(
                f"the model has the outputs {_names(self._outputs)}; asked for were {_quoted(unknown)}"
            )
        return {name: self._output_indexes[name] for name in wanted}

    def metadata(self) -> tuple[tuple[InferenceTensorMetadata, ...], tuple[InferenceTensorMetadata, ...]]:
        """Return the metadata of the inputs and of the outputs."""
        inputs = tuple(_tensor_metadata(info, self._batch) for info in self._inputs)
        return inputs, tuple(_tensor_metadata(info, self._batch) for info in self._outputs)


def _ordered_arrays(infos: Sequence[TensorInfo], inputs: Mapping[str, Any], batch: int) -> tuple[Array, ...]:
    """As `RequestArrays.ordered`, with all that a request may have."""
    if len(inputs) != len(infos) or any(info.name not in inputs for info in infos):
        raise InvalidArgument(f"the model has the inputs {_names(infos)}; given were {_quoted(inputs)}")
    arrays = tuple(_checked(info, inputs[info.name], batch) for info in infos)
    if batch > 1 and len({len(array) for array in arrays}) > 1:
        rows = ", ".join(f"{info.name!r} {len(array)}" for info, array in zip(infos, arrays, strict=True))
        raise InvalidArgument(f"all inputs must have the same number of rows: {rows}")
    return arrays


def _checked(info: TensorInfo, array: Any, batch: int) -> Array:
    if not isinstance(array, np.ndarray):
        raise InvalidArgument(f"input {info.name!r} must be a NumPy array, not {type(array).__name__}")
    if array.dtype != info.dtype:
        raise InvalidArgument(f"input {info.name!r} holds {info.dtype}; the given array is {array.dtype}")
    if batch > 1:
        fits = array.ndim == len(info.shape) and 1 <= len(array) <= batch and array.shape[1:] == info.shape[1:]
        wanted = f"1 to {batch} rows of shape {list(info.shape[1:])}"
    else:
        fits, wanted = array.shape == info.shape or _is_case(array.shape, info), f"the shape {_served_shape(info)}"
    if not fits:
        raise InvalidArgument(f"input {info.name!r} has {wanted}; the given array has {list(array.shape)}")
    return array


def _is_case(shape: tuple[int, ...], info: TensorInfo) -> bool:
    """Return whether a shape is that of a tensor of open sizes, or of open rank."""
    if not info.has_unknown_shape:
        return False
    pairs = zip(shape, info.shape, strict=False)
    return not info.shape or (len(shape) == len(info.shape) and all(known in (0, size) for size, known in pairs))


def _served_shape(info: TensorInfo) -> list[int]:
    """Return a shape with -1 for a size that each request decides; [-1] for any rank."""
    if not info.has_unknown_shape:
        return list(info.shape)
    return [size or -1 for size in info.shape] or [-1]


def _tensor_metadata(info: TensorInfo, batch: int) -> InferenceTensorMetadata:
    """Return the metadata of an input or output. Its first dimension is -1 if the model computes batches."""
    shape = _served_shape(info) if batch == 1 else [-1, *info.shape[1:]]
    quantization = {"scale": info.scale, "zero_point": info.zero_point} if info.scale else {}
    dtype = "bfloat16" if info.is_bfloat16 else info.dtype
    return InferenceTensorMetadata(info.name, dtype, tuple(shape), quantization)


def _names(infos: Sequence[TensorInfo]) -> str:
    return clipped(", ".join(repr(info.name) for info in infos), 500)


def _quoted(names: Any) -> str:
    return clipped(", ".join(map(repr, names)) or "none", 500)


# ----------------------------------------------------------------------------------------------------------------------
# ExecutableModel: a model that a server executes, with its bursts.


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


# ----------------------------------------------------------------------------------------------------------------------
# LoopBlocking: when a request of a ModelServer waits for its result on the event loop's thread, so that no task runs.
#
# A short wait that blocks the thread costs less than the two wake-ups of one that does not. It must not hold up other
# requests, nor lose the parallel execution of several. So a request blocks only
#
# * if it is the only one of its server, also after all tasks that were ready have run,
# * for a limited time, and not at all for a while if the model's results came later than that,
# * not at all for a while if another request had arrived while one blocked.


_PAUSE_MAX = 1024  # requests between two attempts with a model whose results come late
_OVERLAP_PAUSE = 64  # requests that do not block after one that held up another
_IDLE_NS = 20_000  # a loop that has slept in its selector did so for longer


class LoopBlocking:
    """The requests of one server, which share an event loop."""

    def __init__(self) -> None:
        self.requests = 0
        self._pause = 0  # requests that do not block from now on
        self._last_task: weakref.ref[asyncio.Task[Any]] | None = None  # that has blocked, until the next request
        self._idle_ns = 0

    @property
    def is_allowed(self) -> bool:
        """Whether the request in progress is the only one, and none was held up lately."""
        return self.requests == 1 and not self._pause

    def enter(self) -> None:
        """Count a request that begins, in its task. Call `leave` when it ends."""
        self.requests += 1
        if self._pause:
            self._pause -= 1
        elif self._last_task is not None:
            if self._is_overlap():
                self._pause = _OVERLAP_PAUSE
            self._last_task = None

    def leave(self) -> None:
        """Count a request that ends."""
        self.requests -= 1

    def on_blocked(self) -> None:
        """Remember which task has just blocked the loop."""
        task = asyncio.current_task()
        self._last_task = None if task is None else weakref.ref(task)
        self._idle_ns = _thread_idle_ns()

    def _is_overlap(self) -> bool:
        """Return whether the request that begins had arrived while the last one blocked.

        Then the loop did not sleep in between. A task that sends one request after the other does not let it either.
        """
        assert self._last_task is not None
        return _thread_idle_ns() - self._idle_ns < _IDLE_NS and self._last_task() is not asyncio.current_task()


class ModelBlocking:
    """Decides for the requests of one model (a `BlockingWait`). Each wait blocks for at most `limit_ns`."""

    def __init__(self, loop: LoopBlocking, limit_ns: int) -> None:
        self._loop, self._limit_ns = loop, limit_ns
        self._pause = self._next_pause = 0

    async def begin(self) -> int:
        """Return until when a wait may block; 0 = not at all. Tasks that are ready run first."""
        if self._pause:
            self._pause -= 1
            return 0
        if not self._loop.is_allowed:
            return 0
        await asyncio.sleep(0)
        return time.monotonic_ns() + self._limit_ns if self._loop.is_allowed else 0

    def end(self, has_result: bool) -> None:
        """Learn how a wait has ended. After each late result in a row twice as many requests do not block."""
        self._loop.on_blocked()
        self._next_pause = 0 if has_result else min(2 * self._next_pause or 2, _PAUSE_MAX)
        self._pause = self._next_pause


def _thread_idle_ns() -> int:
    """Return for how long this thread has not run, from a point in the past."""
    return time.monotonic_ns() - time.thread_time_ns()
