"""ModelServer: an InferenceService over one client of a driver.

Every request is a task of one event loop and executes over one of a model's bursts; no thread waits for it. What
blocks, to open and to close models, runs on a thread for each model beside the loop: a model that its repository is
still preparing delays no other one.

A request is executed once or not at all. If the driver dies, requests in flight raise DeadObject, because nobody knows
how far they came. The client then connects to the driver's successor, and later requests are executed there; while no
driver listens, also before the first one, they raise DeviceUnavailable at once. Whether the driver lives is the
kernel's word: its connection hangs up; no execution probes it. Health and metadata come from what the server knows, and
wait for no driver.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from msgspec import Struct

from nnfmq.base.deadlines import deadline_after, remaining_s
from nnfmq.base.packages import installed_version
from nnfmq.client.connection.connect import connect
from nnfmq.hal.errors import (
    DeadObject,
    DeviceUnavailable,
    InvalidArgument,
    MissedDeadline,
    MissedDeadlineTransient,
    ModelNotFound,
    NnfmqError,
)
from nnfmq.hal.summaries import clipped
from nnfmq.observe.driver_statistics import DriverStatistics, ModelCounts
from nnfmq.serving.execution import ExecutableModel
from nnfmq.serving.inference_service import (
    CountedTime,
    InferenceModelMetadata,
    InferenceStatistics,
    InferRequest,
    InferResponse,
    ModelIndexEntry,
    ServerMetadata,
)
from nnfmq.serving.loop_blocking import LoopBlocking, ModelBlocking
from nnfmq.serving.providers import ModelProvider, RepositoryModels, to_version
from nnfmq.serving.request_counts import RequestCounts, VersionCounts

if TYPE_CHECKING:
    from nnfmq.client.connection.client import Client

__all__ = ["ModelServer", "ServerOptions", "open_server"]

ResultT = TypeVar("ResultT")
_CURRENT = 0  # as a version: the one that the repository serves
_INDEX_S = 0.5  # for so long health and metadata of a model that is known wait for the model repository
_THREADS_MAX = 64  # that open and close models; each exists from the first time that it is needed


class ServerOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """The options of a ModelServer.

    Args:
        lanes: The bursts of each model: how many of its requests the driver executes at a time.
        max_blocking_s: How long a request that is the only one may wait for its result on the event loop's thread,
            which no other task can use then; see `execution`. 0 = it never does.
        max_waiting: How many requests of each model may wait for a burst.
        max_batch_wait_s: How long a request of a model that computes batches waits at most for others, if a burst is
            free.
        open_timeout_s: How long the preparation of a model may take.
    """

    lanes: int = 2
    max_blocking_s: float = 0.0005
    max_waiting: int = 64
    max_batch_wait_s: float = 0.002
    open_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        durations = self.max_blocking_s, self.max_batch_wait_s
        if self.lanes < 1 or self.max_waiting < 1 or self.open_timeout_s <= 0 or not all(x >= 0 for x in durations):
            raise InvalidArgument(
                f"max_blocking_s and max_batch_wait_s must be 0 or more, and the other options positive: {self}"
            )


class ModelServer:
    """Serves the models of a provider over a client. Close it with `await close()`, or use `async with`.

    One event loop, which must run when it is made. Borrows the client and the provider. A model is opened by the first
    request for it and stays open until `close_model`; if a newer version replaces it in the repository, its bursts
    execute that one. A request for another version opens that beside it.
    """

    def __init__(self, client: Client, provider: ModelProvider, options: ServerOptions | None = None) -> None:
        self._client, self._provider = client, provider
        self._options = options or ServerOptions()
        self._blocking = LoopBlocking()
        self.counts = RequestCounts()
        """The requests that this server has served."""
        self._executor = ThreadPoolExecutor(_THREADS_MAX, thread_name_prefix="nnfmq-server")
        self._models: dict[tuple[str, int], asyncio.Task[ExecutableModel]] = {}
        self._versions: dict[str, int] = {}  # that the provider served when it was last asked, by model
        self._reconnection: asyncio.Task[None] | None = None
        self._listing: asyncio.Task[list[ModelIndexEntry]] | None = None
        self._listing_since_ns = 0
        self._is_closed = False
        self._closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # ------------------------------------------------------------------------------------------------ health

    async def is_live(self) -> bool:
        """Return True until the server is closed."""
        return not self._is_closed

    async def is_ready(self) -> bool:
        """Return whether the driver lives, as the kernel says. If it has died, begin to connect to its successor."""
        if self._is_closed:
            return False
        if self._client.is_connected:
            return True
        self._begin_to_reconnect()
        return False

    def _begin_to_reconnect(self) -> asyncio.Task[None]:
        """Return the attempt to connect to the driver's successor, which all requests share."""
        if self._reconnection is None:
            self._reconnection = asyncio.create_task(self._reconnect())
            self._reconnection.add_done_callback(_retrieve_error)  # nobody may wait for it
        return self._reconnection

    async def _reconnect(self) -> None:
        try:
            await asyncio.to_thread(self._client.require_driver, timeout=self._options.open_timeout_s)
        finally:
            self._reconnection = None

    async def _require_driver(self, deadline_ns: int | None) -> None:
        """Return at once while the driver lives; else connect to its successor, if that listens already.

        Raises:
            DeviceUnavailable: If no driver listens.
            MissedDeadlineTransient: If the deadline passes first.
            DeadObject: If the client does not recover.
        """
        if self._client.is_connected:
            return
        try:
            async with asyncio.timeout(remaining_s(deadline_ns)) as limit:
                await asyncio.shield(self._begin_to_reconnect())
        except TimeoutError:
            if not limit.expired():
                raise
            raise MissedDeadlineTransient("the timeout passed while the server connected to the next driver") from None

    async def is_model_ready(self, model: str, version: str = "") -> bool:
        """Return whether a model, or this version of it, is served; False while there is no driver."""
        if not await self.is_ready():
            return False
        try:
            number = to_version(version)
            current = await self._current_version(model)
        except NnfmqError:
            return False
        is_open = bool(number) and (model, number) in self._models and self._models[model, number].done()
        return is_open or (current > 0 and number in (_CURRENT, current))

    async def model_index(self) -> list[ModelIndexEntry]:
        """Return all models of the provider, served or not; for the protocol's list of models.

        Raises:
            DeviceUnavailable: If no driver listens.
            NnfmqError: If the model repository does not reply.
        """
        await self._require_driver(deadline_after(self._options.open_timeout_s))
        return await asyncio.shield(self._begin_to_list())

    def _begin_to_list(self) -> asyncio.Task[list[ModelIndexEntry]]:
        """Return the question to the provider, which all requests share."""
        if self._listing is None:
            self._listing_since_ns = time.monotonic_ns()
            self._listing = asyncio.create_task(self._list())
            self._listing.add_done_callback(_retrieve_error)  # nobody may wait for it
        return self._listing

    async def _list(self) -> list[ModelIndexEntry]:
        try:
            entries = await asyncio.to_thread(self._provider.entries)
            self._versions = {entry.name: to_version(entry.version) for entry in entries}
        finally:
            self._listing = None
        return entries

    async def _require_reply(self, deadline_ns: int | None) -> None:
        """Return when the provider has replied to a question, or the server is closed.

        Raises:
            DeviceUnavailable: If it has not replied within its own timeout.
            MissedDeadlineTransient: If the deadline passes first.
            NnfmqError: What the provider has raised.
        """
        listing = self._begin_to_list()
        awaited: set[asyncio.Future[Any]] = {listing, self._closing}
        await asyncio.wait(awaited, timeout=remaining_s(deadline_ns), return_when=asyncio.FIRST_COMPLETED)
        if self._closing.done():
            return
        if not listing.done():
            raise MissedDeadlineTransient("the timeout passed while the model repository was asked for its models")
        try:
            listing.result()
        except MissedDeadline as error:
            raise DeviceUnavailable(f"the model repository does not reply: {error}") from None

    async def _current_version(self, model: str) -> int:
        """Return the version of a model that is served, or that was when the provider last replied; 0: there is none.

        The repository may be dead although this client's worker lives: then the last reply counts, after a short wait.
        """
        if not self._client.is_connected:
            return self._versions.get(model, _CURRENT)
        listing = self._begin_to_list()
        if model in self._versions:
            await asyncio.wait([listing], timeout=remaining_s(self._listing_since_ns + int(_INDEX_S * 1e9)))
            if not listing.done():
                return self._versions[model]
        await asyncio.shield(listing)
        return self._versions.get(model, _CURRENT)

    def open_names(self) -> set[str]:
        """Return the names of the models that are open, or are being opened."""
        return {name for name, _ in self._models}

    def load(self) -> dict[str, int]:
        """Return the numbers of requests that wait for a burst, of bursts that execute, and of all bursts.

        Only models that are in use count, but at least the bursts of one model.
        """
        used = [model for model in self._opened() if model.busy or model.waiting]
        return {
            "waiting": sum(model.waiting for model in used),
            "busy": sum(model.busy for model in used),
            "lanes": self._options.lanes * max(1, len(used)),
        }

    def _opened(self) -> Iterable[ExecutableModel]:
        for task in self._models.values():
            if task.done() and not task.cancelled() and task.exception() is None:
                yield task.result()

    # ------------------------------------------------------------------------------------------------ metadata

    async def server_metadata(self) -> ServerMetadata:
        """Return the server's name, release and extensions.

        Triton's `model_repository` is not among these: it requires to load and unload models, beside `model_index`.
        """
        return ServerMetadata("nnfmq", installed_version("nnfmq") or "", ("model_configuration", "statistics"))

    async def model_metadata(self, model: str, version: str = "") -> InferenceModelMetadata:
        """Return a model's versions, inputs and outputs. Opens the model; one that is open needs no driver.

        Raises:
            ModelNotFound: If there is no such model or version.
            DeviceUnavailable: If the model is not open, and no driver listens.
            NnfmqError: The error of its preparation.
        """
        opened = await self._open_model(model, version, deadline_after(self._options.open_timeout_s))
        current = await self._current_version(model)
        versions = sorted({number for number in (current, to_version(version)) if number})
        return opened.metadata(tuple(map(str, versions)))

    async def input_names(self, model: str, version: str = "") -> tuple[str, ...]:
        """Return the names of a model's inputs, in order. Opens the model; raises as `model_metadata`."""
        opened = await self._open_model(model, version, deadline_after(self._options.open_timeout_s))
        return opened.input_names

    # ------------------------------------------------------------------------------------------------ statistics

    async def model_statistics(self, model: str = "", version: str = "") -> list[InferenceStatistics]:
        """Return the requests and executions of each version of a model; without a name of all that had requests.

        Requests are those of this server since it was made. Executions and their times are the driver's since it
        started, of all clients whose program has the name of this one.

        Raises:
            ModelNotFound: If there is no such model or version.
            DeviceUnavailable: If no driver listens.
            GeneralFailure: If this process's user may not read the driver's statistics.
        """
        await self._require_driver(deadline_after(self._options.open_timeout_s))
        keys = await self._counted_versions(model, to_version(version)) if model else self.counts.keys()
        statistics = await asyncio.to_thread(self._client.statistics)
        program = _program_of(statistics, self._client.worker_pid)
        return [
            _statistics_of(name, number, self.counts.of(name, number), _executions(statistics, program, name, number))
            for name, number in sorted(keys)
        ]

    async def _counted_versions(self, model: str, version: int) -> set[tuple[str, int]]:
        """Return the versions of a model that had requests, and the one that is served; only `version` if it is one."""
        found = {key for key in self.counts.keys() if key[0] == model}  # noqa: SIM118  (no mapping)
        if current := await self._current_version(model):
            found.add((model, current))
        wanted = {key for key in found if version in (_CURRENT, key[1])}
        if not wanted:
            text = f" of version {version}" if version else ""
            raise ModelNotFound(f"there are no statistics of a model {clipped(repr(model))}{text}")
        return wanted

    # ------------------------------------------------------------------------------------------------ requests

    async def infer(self, request: InferRequest) -> InferResponse:
        """Execute a request, once. `timeout_s` limits its wait and its execution together.

        Raises:
            ModelNotFound: If there is no such model or version.
            InvalidArgument: If an input is missing, unknown, or of another shape or dtype.
            ResourceExhaustedTransient: If too many requests wait already.
            MissedDeadline: If the request's time is over.
            DeviceUnavailable: If no driver listens.
            DeadObject: If the driver dies, or the server is closed.
            NnfmqError: The error of the execution.
        """
        begin_ns, deadline_ns = time.monotonic_ns(), deadline_after(request.timeout_s)
        model = None
        self._blocking.enter()
        try:
            model = await self._open_model(request.model, request.version, deadline_ns)
            response = await model.infer(request, deadline_ns)
        except BaseException:
            if model is not None:
                self.counts.add_failure(request.model, model.version, begin_ns)
            raise
        finally:
            self._blocking.leave()
        self.counts.add_success(request.model, model.version, begin_ns, response.wait_ns, response.rows)
        return response

    async def infer_all(self, requests: Sequence[InferRequest]) -> list[InferResponse | NnfmqError]:
        """Execute requests, each once, and return for each its result or its error.

        Those for one model that computes batches are executed together. A request that fails concerns no other one.
        """
        return list(await asyncio.gather(*map(self._result_or_error, requests)))

    async def _result_or_error(self, request: InferRequest) -> InferResponse | NnfmqError:
        try:
            return await self.infer(request)
        except NnfmqError as error:
            return error

    # ------------------------------------------------------------------------------------------------ models

    async def open_model(self, model: str, version: str = "") -> None:
        """Open a model before the first request for it. Raises as `model_metadata`."""
        await self._open_model(model, version, deadline_after(self._options.open_timeout_s))

    async def close_model(self, model: str) -> None:
        """Close a model, all versions of it, after the requests that are executed. Does nothing if it is not open."""
        keys = [key for key in self._models if key[0] == model]
        tasks = [self._models.pop(key) for key in keys]
        for task in tasks:
            await self._close_opened(task)

    async def _close_opened(self, opening: asyncio.Task[ExecutableModel]) -> None:
        try:
            model = await opening
        except (NnfmqError, OSError):
            return  # it was never open
        await model.drain()
        await self._in_thread(model.close)

    async def _open_model(self, model: str, version: str, deadline_ns: int | None) -> ExecutableModel:
        """Return a model, opened by the first request for it; the others wait for that, each within its deadline."""
        if self._is_closed:
            raise DeadObject("this server is closed")
        key = model, to_version(version)
        opening = self._models.get(key)
        if opening is None:
            await self._require_driver(deadline_ns)
            await self._require_reply(deadline_ns)
            opening = self._models.get(key)  # another request may have begun meanwhile
        if opening is None:
            opening = self._models[key] = asyncio.create_task(self._open(*key))
            opening.add_done_callback(partial(self._forget_failure, key))
        if opening.done():
            return opening.result()
        try:
            async with asyncio.timeout(remaining_s(deadline_ns)) as limit:
                return await asyncio.shield(opening)
        except TimeoutError:
            if not limit.expired():
                raise
            raise MissedDeadlineTransient(f"the timeout passed while model {model!r} was being opened") from None

    def _forget_failure(self, key: tuple[str, int], opening: asyncio.Task[ExecutableModel]) -> None:
        """Let the next request try again."""
        if (opening.cancelled() or opening.exception() is not None) and self._models.get(key) is opening:
            del self._models[key]

    async def _open(self, name: str, version: int) -> ExecutableModel:
        """Open a model; raises DeadObject as soon as the server is closed. The thread then closes what it opens."""
        opening = asyncio.ensure_future(self._in_thread(partial(self._open_blocking, name, version)))
        awaited: set[asyncio.Future[Any]] = {opening, self._closing}
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        if not opening.done():
            opening.cancel()
            raise DeadObject("this server is closed")
        return opening.result()

    def _open_blocking(self, name: str, version: int) -> ExecutableModel:
        options = self._options
        model = self._provider.open(name, version, options.open_timeout_s)
        limit_ns = round(options.max_blocking_s * 1e9)
        blocking = ModelBlocking(self._blocking, limit_ns) if limit_ns else None
        opened = ExecutableModel.open(
            name, model, options.lanes, options.max_waiting, options.max_batch_wait_s, blocking, self._require_driver
        )
        if self._is_closed:
            opened.close()
            raise DeadObject("this server is closed")
        return opened

    async def _in_thread(self, function: Callable[[], ResultT]) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    # ------------------------------------------------------------------------------------------------ end

    async def close(self) -> None:
        """Reject new requests, wait for those that are executed, and close all models. Idempotent.

        Models that are being opened are not waited for: closing the client ends that.
        """
        self._is_closed = True
        if not self._closing.done():
            self._closing.set_result(None)
        for name in {name for name, _ in self._models}:
            await self.close_model(name)
        if self._reconnection is not None:
            await asyncio.wait([self._reconnection])
        self._executor.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _program_of(statistics: DriverStatistics, worker_pid: int) -> str | None:
    """Return the name that the driver has for the program of a worker's client; None if it does not know the worker."""
    return next((each.program for each in statistics.clients if each.worker_pid == worker_pid), None)


def _executions(statistics: DriverStatistics, program: str | None, model: str, version: int) -> ModelCounts:
    """Return the executions of a version by a program's clients; a model that is no version of a repository has 0."""
    found = ModelCounts()
    for key, counts in statistics.totals().items():
        if (key.program, key.name) == (program, model) and key.version in (0, version):
            found = found + counts
    return found


def _statistics_of(model: str, version: int, requests: VersionCounts, executed: ModelCounts) -> InferenceStatistics:
    count, inside_ns = executed.executions, executed.driver_ns - executed.engine_ns
    return InferenceStatistics(
        model,
        str(version),
        rows=requests.rows,
        executions=count,
        success=CountedTime(requests.successes, requests.success_ns),
        fail=CountedTime(requests.failures, requests.failure_ns),
        queue=CountedTime(requests.successes, requests.wait_ns + executed.queue_ns),
        compute_input=CountedTime(count, max(inside_ns, 0)),
        compute_infer=CountedTime(count, executed.engine_ns),
        compute_output=CountedTime(count, 0),
        last_request_ms=requests.last_ms,
    )


def _retrieve_error(attempt: asyncio.Task[Any]) -> None:
    """Let asyncio log no error of a task for which no request waits."""
    if not attempt.cancelled():
        attempt.exception()


@asynccontextmanager
async def open_server(
    path: str | os.PathLike[str] | None = None, options: ServerOptions | None = None
) -> AsyncIterator[ModelServer]:
    """Serve the models of the driver at `path`, by default the user's, over a client that recovers.

    The driver must have a model repository, and may start later: until then the server is live and not ready, and
    requests raise DeviceUnavailable. For a network server: `InferenceApp.opened_by(open_server)`.
    """
    client = connect(path, embedded=False, wait=True, timeout=None)  # with an event loop this does not block
    try:
        async with ModelServer(client, RepositoryModels(client), options) as server:
            yield server
    finally:
        await asyncio.to_thread(client.close)
