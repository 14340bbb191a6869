"""ModelServer: an InferenceService over one client of a driver.

Every request is a task of one event loop and executes over one of a model's bursts; no thread waits for it. What
blocks, to open and to close models, runs on one thread beside the loop.

A request is executed once or not at all. If the driver dies, requests in flight raise DeadObject, because nobody knows
how far they came. The client then connects to the driver's successor, and later requests are executed there. Whether
the driver lives is the kernel's word: its connection hangs up; no execution probes it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar

from msgspec import Struct

from nnfmq.base.deadlines import deadline_after, remaining_s
from nnfmq.base.packages import installed_version
from nnfmq.client.connection.connect import connect
from nnfmq.hal.errors import DeadObject, InvalidArgument, MissedDeadlineTransient, NnfmqError
from nnfmq.serving.execution import ExecutableModel, LoopBlocking, ModelBlocking
from nnfmq.serving.inference_service import (
    InferenceModelMetadata,
    InferRequest,
    InferResponse,
    ModelIndexEntry,
    ServerMetadata,
)
from nnfmq.serving.providers import ModelProvider, RepositoryModels, to_version

if TYPE_CHECKING:
    from nnfmq.client.connection.client import Client

__all__ = ["ModelServer", "ServerOptions", "open_server"]

ResultT = TypeVar("ResultT")
_CURRENT = 0  # as a version: the one that the repository serves


class ServerOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """How a ModelServer serves.

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
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="nnfmq-server")
        self._models: dict[tuple[str, int], asyncio.Task[ExecutableModel]] = {}
        self._recovery: asyncio.Task[None] | None = None
        self._is_closed = False

    # ------------------------------------------------------------------------------------------------ health

    async def is_live(self) -> bool:
        """Return True until the server is closed."""
        return not self._is_closed

    async def is_ready(self) -> bool:
        """Return whether the driver lives, as the kernel says. If it has died, begin to connect to its successor."""
        if self._is_closed:
            return False
        if self._client.connection.is_open:
            return True
        if self._recovery is None:
            self._recovery = asyncio.create_task(self._recover())
        return False

    async def _recover(self) -> None:
        """Connect again, if the client recovers: a call does that."""
        try:
            await asyncio.to_thread(self._client.devices, timeout=self._options.open_timeout_s)
        except NnfmqError:
            pass  # the next request, or the next question whether the server is ready, tries again
        finally:
            self._recovery = None

    async def is_model_ready(self, model: str, version: str = "") -> bool:
        """Return whether a model, or this version of it, is served."""
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
            NnfmqError: If the model repository does not reply.
        """
        return await asyncio.to_thread(self._provider.entries)

    async def _current_version(self, model: str) -> int:
        """Return the version of a model that is served; 0 if there is none."""
        return next((to_version(entry.version) for entry in await self.model_index() if entry.name == model), _CURRENT)

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
        """Return the server's name and release.

        It has no extension: Triton's `model_repository` requires to load and unload models, beside `model_index`.
        """
        return ServerMetadata("nnfmq", installed_version("nnfmq") or "")

    async def model_metadata(self, model: str, version: str = "") -> InferenceModelMetadata:
        """Return a model's versions, inputs and outputs. Opens the model.

        Raises:
            ModelNotFound: If there is no such model or version.
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

    # ------------------------------------------------------------------------------------------------ requests

    async def infer(self, request: InferRequest) -> InferResponse:
        """Execute a request, once. `timeout_s` limits its wait and its execution together.

        Raises:
            ModelNotFound: If there is no such model or version.
            InvalidArgument: If an input is missing, unknown, or of another shape or dtype.
            ResourceExhaustedTransient: If too many requests wait already.
            MissedDeadline: If the request's time is over.
            DeadObject: If the driver dies, or the server is closed.
            NnfmqError: The error of the execution.
        """
        deadline_ns = deadline_after(request.timeout_s)
        self._blocking.enter()
        try:
            model = await self._open_model(request.model, request.version, deadline_ns)
            return await model.infer(request, deadline_ns)
        finally:
            self._blocking.leave()

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
        return await self._in_thread(partial(self._open_blocking, name, version))

    def _open_blocking(self, name: str, version: int) -> ExecutableModel:
        options = self._options
        model = self._provider.open(name, version, options.open_timeout_s)
        limit_ns = round(options.max_blocking_s * 1e9)
        blocking = ModelBlocking(self._blocking, limit_ns) if limit_ns else None
        return ExecutableModel.open(name, model, options.lanes, options.max_waiting, options.max_batch_wait_s, blocking)

    async def _in_thread(self, function: Callable[[], ResultT]) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    # ------------------------------------------------------------------------------------------------ end

    async def close(self) -> None:
        """Reject new requests, wait for those that are executed, and close all models. Idempotent."""
        self._is_closed = True
        for name in {name for name, _ in self._models}:
            await self.close_model(name)
        if self._recovery is not None:
            await self._recovery
        self._executor.shutdown(wait=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


@asynccontextmanager
async def open_server(
    path: str | os.PathLike[str] | None = None, options: ServerOptions | None = None
) -> AsyncIterator[ModelServer]:
    """Serve the models of the driver at `path`, by default the user's, over a client that recovers.

    The driver must have a model repository. For a network server: `InferenceApp.opened_by(open_server)`.

    Raises:
        DeviceUnavailable: If no driver listens there.
    """
    client = await asyncio.to_thread(connect, path, embedded=False)
    try:
        async with ModelServer(client, RepositoryModels(client), options) as server:
            yield server
    finally:
        await asyncio.to_thread(client.close)
