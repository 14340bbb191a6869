"""NamedModels: the models that a client has opened by name, and its connection to the driver's model repository.

The connection is made when it is first needed. If the repository dies, models that are open go on; the connection is
made again at the next call, or in the background, because a version may have changed meanwhile.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import msgspec
from msgspec.structs import replace

from nnfmq.base import watcher
from nnfmq.base.channel import NO_WAIT, Channel
from nnfmq.base.deadlines import deadline_after, has_passed, remaining_s
from nnfmq.base.threads import Thread
from nnfmq.client.connection.connection import Connection
from nnfmq.client.connection.defaults import DEFAULT_TIMEOUT_S
from nnfmq.client.connection.device import Device
from nnfmq.client.connection.open_connections import CLOSED
from nnfmq.client.connection.prepare_arguments import FinishedModel, ModelSignature
from nnfmq.client.model.handle import DeviceOf, ModelHandle, ModelLocation, PrepareAgain, release_in_driver
from nnfmq.client.model.prepared_model import PreparedModel
from nnfmq.client.named.repository import ReceivedModel, RepositoryConnection, difference
from nnfmq.client.observation import current_observers
from nnfmq.client.waiting import SingleAttempt
from nnfmq.hal.errors import (
    BadState,
    DeadObject,
    DeviceUnavailable,
    InvalidArgument,
    MissedDeadline,
    ModelNotFound,
    NnfmqError,
)
from nnfmq.hal.summaries import clipped, nearest
from nnfmq.hal.types import ExecutionPreference, Priority
from nnfmq.serialize.models import decode_model
from nnfmq.serialize.repository_protocol import (
    ModelDescription,
    ModelEntry,
    ModelName,
    ModelState,
    Version,
    VersionChanged,
)

__all__ = ["ConnectRepository", "NamedModels", "ServedModel", "VersionUpdates"]


# ----------------------------------------------------------------------------------------------------------------------
# VersionUpdates: the thread of a client that prepares new versions of its models, and releases old ones.
#
# It starts when the repository serves another version, or has died, and ends when nothing is left to do. Events come
# from the watcher thread, which must not block, and from the garbage collector: when the last call that has read the
# location of an old version ends, the version is released. `SimpleQueue.put` may be called anywhere.


_THREAD_NAME = "nnfmq-versions"
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.02, 1.0  # between attempts to reach a repository that does not listen
_END_S = 5.0  # releasing a model takes up to 1 s


class _Retired(NamedTuple):
    """A version that was replaced: its location, which calls may still have, and what to release then."""

    location: weakref.ref[ModelLocation]
    connection: Connection
    model_id: int | None


class VersionUpdates:
    """Runs `update(name)` for each model of which the repository serves another version.

    `update` returns whether the repository has replied. `reconnect` connects to a repository that has died, and returns
    whether that is done, or is no longer wanted; then it requests an update of each model that is open.
    """

    def __init__(self, update: Callable[[str], bool], reconnect: Callable[[], bool]) -> None:
        self._update, self._reconnect = update, reconnect
        self._lock = threading.Lock()  # held for a few assignments and a thread's start
        self._events: SimpleQueue[str | None] = SimpleQueue()  # the name of a model; None = look at the rest
        self._retired: list[_Retired] = []  # of the thread
        self._is_lost = False
        self._pause_s, self._next_attempt_ns = _FIRST_PAUSE_S, 0  # of attempts to connect again
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def request(self, name: str) -> None:
        """Request an update. Does not block. On the watcher thread only, whose signal mask a new thread gets."""
        self._events.put(name)
        self._ensure_started()

    def repository_was_lost(self) -> None:
        """Connect to the repository again. Does not block. On the watcher thread only."""
        self._is_lost = True
        self._events.put(None)
        self._ensure_started()

    def retire(self, location: ModelLocation) -> None:
        """Release a replaced version when nothing has its location any more. On this thread only, from `update`."""
        events = self._events
        reference = weakref.ref(location, lambda _reference: events.put(None))
        self._retired.append(_Retired(reference, location.connection, location.model_id))

    def _ensure_started(self) -> None:
        with self._lock:
            if self._thread is None and not self._is_closed:
                self._thread = Thread(target=self._run, name=_THREAD_NAME, daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while not self._is_done():
            try:
                name = self._events.get(timeout=remaining_s(self._next_attempt_ns) if self._is_lost else None)
            except Empty:
                name = None
            if self._is_closed:
                break
            if name is not None:
                self._update_one(name)
            if self._is_lost and has_passed(self._next_attempt_ns):
                self._reconnect_once()
            self._release_unused()

    def _is_done(self) -> bool:
        """Return whether the thread must end: then the next event starts another one."""
        with self._lock:
            if not self._is_closed and (self._is_lost or self._retired or not self._events.empty()):
                return False
            self._thread = None if not self._is_closed else self._thread
            return True

    def _update_one(self, name: str) -> None:
        try:
            if self._update(name):
                self._pause_s = _FIRST_PAUSE_S
        except Exception:  # noqa: BLE001  a bug of one update must not end the thread that the others need
            _log.exception("the update of model %r failed", name)

    def _reconnect_once(self) -> None:
        self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)  # until the repository replies
        self._next_attempt_ns = time.monotonic_ns() + int(self._pause_s * 1e9)
        self._is_lost = False  # before, because the new connection may be lost immediately
        if not self._reconnect():
            self._is_lost = True

    def _release_unused(self) -> None:
        retired, self._retired = self._retired, []
        for one in retired:
            if one.location() is None:
                release_in_driver(ModelLocation(one.connection, one.model_id))
            else:
                self._retired.append(one)

    def end(self) -> None:
        """Let the thread end after what it does. Idempotent. Does not block."""
        self._is_closed = True
        self._events.put(None)

    def join(self) -> None:
        """Wait until the thread has ended. Call `end` first, and close the connections that it may wait for."""
        if os.getpid() != self._pid:
            return  # the thread, and perhaps the holder of the lock, are the parent's
        with self._lock:  # a thread that is being started cannot be joined
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_END_S)


# ----------------------------------------------------------------------------------------------------------------------
# ServedModel: a model of the driver's model repository, which executes the version that the repository serves.


class ServedModel(PreparedModel):
    """A prepared model that the driver's model repository serves under a name.

    Unless it was opened with a version, it moves when the repository serves a newer one: executions that have begun end
    on the old version, and later ones run on the new one, also over bursts that exist: these move at their next
    execution. `inputs`, `outputs` and `batch`
    never change: a version with others is not used. AIDL bursts and reusable executions stay with the version with
    which they were made; buffers of the driver can be used with that one only.

    `name` is the model's name, and `batch` the size of the first dimension of each input and output, whose rows are
    independent of each other; 1 = the model does not compute batches. `device` prepared the first version.
    """

    def __init__(self, prepared: PreparedModel, description: ModelDescription) -> None:
        handle = prepared.handle
        super().__init__(
            handle.connection, None, prepared.inputs, prepared.outputs, prepared.device, handle.extensions,
            description.states,
        )  # fmt: skip
        self.handle = handle
        self.name = description.name
        self.batch = description.batch

    def __repr__(self) -> str:
        return (
            f"<ServedModel {self.name!r} version {self.version} on {self._place()}: {clipped(self.handle.signature)}>"
        )

    @property
    def version(self) -> int:
        """The version that the next execution runs on; a burst has its own `version`."""
        return self.handle.location.version


# ----------------------------------------------------------------------------------------------------------------------
# NamedModels: the models that a client has opened by name, and its connection to the driver's model repository.


ConnectRepository: TypeAlias = Callable[[int | None, Callable[[], bool], bool], Channel]
"""Connects to the repository before a deadline, and until a function returns True; waits for one that had listened.

Raises DeviceUnavailable if there is none.
"""

_ATTEMPTS = 3  # of one call, if the repository dies each time
_RETRY_S = 0.02  # between two requests for a model that is being loaded
_NAMES_MAX = 20  # in an error's text
_log = logging.getLogger("nnfmq.client")
ResultT = TypeVar("ResultT")


class DeviceOwner(Protocol):
    """The client, as `Client`."""

    def device(self, name: str, *, timeout: float | None) -> Device:
        """Return a device of the driver; blocks."""
        ...

    @property
    def recovers(self) -> bool:
        """Whether the client connects again after the driver has died."""
        ...

    def follow(self, model: ModelHandle) -> None:
        """Prepare a model ahead of a move to another driver, while it is open."""
        ...

    def require_usable(self) -> None:
        """Raise DeadObject if the client is closed, or its driver has died and it does not recover."""
        ...


class _Followed(NamedTuple):
    """A model that moves to new versions, and the description of the version with which it was opened."""

    description: ModelDescription
    handle: weakref.ref[ModelHandle]
    was_warned: list[str]


class NamedModels:
    """Opens models by name, and moves them to new versions. Thread-safe. The client closes it: `end`, then `join`."""

    def __init__(self, client: DeviceOwner, connect: ConnectRepository) -> None:
        self._client = client
        self._connect = connect
        self._connection: RepositoryConnection | None = None
        self._attempt: SingleAttempt[RepositoryConnection] = SingleAttempt()
        self._is_closed = False
        self._followed: list[_Followed] = []
        self._announced: dict[str, int] = {}  # the version that the repository has announced last
        self._updates = VersionUpdates(self._update, self._reconnect)

    # ------------------------------------------------------------------------------------------------ opening

    def open(self, name: str, version: int, deadline_ns: int | None) -> ServedModel:
        """Return a model that is prepared in the client's worker; blocks. Errors of `Client.model`."""
        _check_arguments(name, version)
        with self._receive(name, version, deadline_ns) as received:
            prepared, description = self._prepare(received, deadline_ns), received.description
        handle, opened = prepared.handle, replace(description, model=b"", pools=())  # without the large parts
        if self._client.recovers:
            handle.prepare_again = _PrepareAgain(self, opened, version)
            self._client.follow(handle)
        if not version:
            self._follow(opened, handle)
        return ServedModel(prepared, description)

    def entries(self, deadline_ns: int | None) -> list[ModelEntry]:
        """Return all models of the repository; blocks. Errors of `Client.models`."""
        return list(self._call(lambda connection: connection.list_models(deadline_ns), deadline_ns))

    def _receive(self, name: str, version: int, deadline_ns: int | None) -> ReceivedModel:
        """Return the model that the repository sends; blocks, also while the first version is being loaded."""
        loading = ""  # the text of the last error: the error would keep this frame, to which it refers
        while True:
            try:
                return self._call(lambda connection: connection.open_model(name, version, deadline_ns), deadline_ns)
            except ModelNotFound as error:
                raise self._not_found(name, version, error, deadline_ns) from None
            except MissedDeadline as error:
                if not loading:
                    raise
                late = f"{loading}, and the timeout has passed: give a longer one, `timeout=60`"
                raise type(error)(late) from None
            except DeviceUnavailable as error:
                loading = str(error)
                if not self._is_loading(name, deadline_ns):
                    raise
            time.sleep(_RETRY_S)
            if self._is_closed:
                raise BadState(CLOSED)

    def _is_loading(self, name: str, deadline_ns: int | None) -> bool:
        try:
            states = {entry.name: entry.state for entry in self.entries(deadline_ns)}
        except MissedDeadline:
            return True  # as far as is known: the next attempt raises it
        except NnfmqError:
            return False
        return states.get(name) in (ModelState.LOADING, ModelState.READY)  # or it has become ready since

    def _not_found(self, name: str, version: int, error: ModelNotFound, deadline_ns: int | None) -> ModelNotFound:
        names = [entry.name for entry in self.entries(deadline_ns)]
        if name in names:
            return ModelNotFound(f"model {name!r} has no version {version} in the model repository: {error}")
        more = ", ..." if len(names) > _NAMES_MAX else ""
        found = ", ".join(names[:_NAMES_MAX]) + more or "no models at all"
        return ModelNotFound(
            f"there is no model {name!r} in the model repository; it has: {found}{nearest(name, names)}"
        )

    def _prepare(
        self, received: ReceivedModel, deadline_ns: int | None, device_of: DeviceOf | None = None
    ) -> PreparedModel:
        """Return the model, prepared on its device in the client's worker, or another driver's; blocks."""
        description = received.description
        device: Device = (device_of or self.devices(deadline_ns))(description.device)
        prepared = device.prepare_encoded(
            _signature(received, device),
            description.model,
            received.pools,
            preference=ExecutionPreference(description.preference),
            priority=Priority(description.priority),
            deterministic=description.deterministic,
            deadline_ns=deadline_ns,
            name=description.name,
            version=description.version,
        )
        handle = prepared.handle
        handle.location = replace(handle.location, version=description.version)  # nobody else has it yet
        return prepared

    def devices(self, deadline_ns: int | None) -> DeviceOf:
        """Return a function that returns a device of the driver that the client is connected to then."""
        return lambda name: self._client.device(name, timeout=remaining_s(deadline_ns))

    def prepare_again(
        self, opened: ModelDescription, version: int, device_of: DeviceOf, deadline_ns: int | None
    ) -> ModelHandle:
        """Return a model that was opened before, prepared in the driver that has these devices; blocks."""
        limit_ns = deadline_after(DEFAULT_TIMEOUT_S) if deadline_ns is None else deadline_ns
        with self._receive(opened.name, version, limit_ns) as received:
            differs = difference(opened, received.description)
            if not differs:
                return self._prepare(received, limit_ns, device_of).handle
        if version:
            raise DeviceUnavailable(f"version {version} of model {opened.name!r} has changed: {differs}")
        with self._receive(opened.name, opened.version, limit_ns) as received:
            return self._prepare(received, limit_ns, device_of).handle

    # ------------------------------------------------------------------------------------------------ the connection

    def _call(self, function: Callable[[RepositoryConnection], ResultT], deadline_ns: int | None) -> ResultT:
        """Return `function(connection)`; again if the repository has died meanwhile: it is started again."""
        for _ in range(_ATTEMPTS):
            self._client.require_usable()
            connection = self._connected(deadline_ns)
            try:
                return function(connection)
            except DeadObject as error:
                _log.info("a call of the model repository is repeated: %s", error)
        raise DeviceUnavailable(
            f"the model repository has ended {_ATTEMPTS} connections; the driver's log has a reason"
        )

    def _connected(self, deadline_ns: int | None) -> RepositoryConnection:
        """Return the connection; blocks while it is made. Raises DeviceUnavailable if there is no repository."""
        connection = self._connection
        if connection is not None and connection.is_open:
            return connection
        return self._attempt.run(lambda: self._connect_again(deadline_ns), deadline_ns)

    def _connect_again(self, deadline_ns: int | None) -> RepositoryConnection:
        before = self._connection
        if before is not None and before.is_open:
            return before
        channel = self._connect(deadline_ns, lambda: self._is_closed, before is not None)
        self._connection = connection = RepositoryConnection.start(channel, self._on_change, self._on_lost)
        if self._is_closed:  # by another thread, meanwhile
            connection.close()
        return connection

    # ------------------------------------------------------------------------------------------------ new versions

    def _follow(self, description: ModelDescription, handle: ModelHandle) -> None:
        self._followed.append(_Followed(description, weakref.ref(handle), []))
        if self._announced.get(description.name, 0) > description.version:  # while the model was prepared
            watcher.call_at(NO_WAIT, partial(self._updates.request, description.name))

    def _open_models(self) -> list[_Followed]:
        """Return the models that follow new versions, and forget those that are closed."""
        for followed in list(self._followed):
            handle = followed.handle()
            if handle is None or handle.location.model_id is None:
                self._followed.remove(followed)
        return list(self._followed)

    def _on_change(self, message: VersionChanged) -> None:
        """Prepare a version that the repository serves now. On the watcher thread."""
        self._announced[message.name] = message.version
        if any(followed.description.name == message.name for followed in self._followed):
            self._updates.request(message.name)

    def _on_lost(self) -> None:
        """Connect again, if models are open. On the watcher thread."""
        if self._followed and not self._is_closed:
            self._updates.repository_was_lost()

    def _reconnect(self) -> bool:
        """See `VersionUpdates`."""
        names = {followed.description.name for followed in self._open_models()}
        try:
            self._client.require_usable()
        except (BadState, DeadObject):
            return True
        try:
            if names:
                self._connected(NO_WAIT)
        except NnfmqError:
            return False
        for name in names:
            watcher.call_at(NO_WAIT, partial(self._updates.request, name))
        return True

    def _update(self, name: str) -> bool:
        """Move the open models of this name to the version that the repository serves. See `VersionUpdates`."""
        found = [followed for followed in self._open_models() if followed.description.name == name]
        if not found:
            return True
        try:
            with self._receive(name, 0, None) as received:
                for followed in found:
                    self._move(followed, received)
            return True
        except NnfmqError as error:
            if not self._is_closed:
                _log.warning("model %r keeps its version: %s", name, error)
            return False

    def _move(self, followed: _Followed, received: ReceivedModel) -> None:
        """Prepare a newer version beside the one that is open, and let the model execute it from now on."""
        handle, description = followed.handle(), received.description
        if handle is None or handle.location.version >= description.version:
            return
        differs = difference(followed.description, description)
        if differs:
            self._warn_once(followed, f"version {description.version} is not used, because {differs}")
            return
        prepared = self._prepare(received, None)
        self._updates.retire(handle.move_to(prepared.handle))
        _log.info("model %r executes version %d", description.name, description.version)

    @staticmethod
    def _warn_once(followed: _Followed, text: str) -> None:
        if not followed.was_warned:
            followed.was_warned.append(text)
            _log.warning(
                "model %r keeps its version (open it again to use the new one): %s", followed.description.name, text
            )

    # ------------------------------------------------------------------------------------------------ end

    def end(self) -> None:
        """Hang up, and let the thread of the updates end. Idempotent, also in a forked child. Does not block."""
        self._is_closed = True
        self._updates.end()
        if self._connection is not None:
            self._connection.close()

    def join(self) -> None:
        """Wait until the thread has ended. Call `end` first, and close the client's connection to its driver."""
        self._updates.join()


class _PrepareAgain(PrepareAgain):
    """Prepares a model of the repository again that was opened with `version`, 0 = none."""

    def __init__(self, models: NamedModels, opened: ModelDescription, version: int) -> None:
        super().__init__()
        self._models, self._opened, self._version = models, opened, version

    def _reach(self, deadline_ns: int | None, _wait: bool) -> tuple[Connection, DeviceOf]:
        limit_ns = deadline_after(DEFAULT_TIMEOUT_S) if deadline_ns is None else deadline_ns
        device_of = self._models.devices(limit_ns)
        return device_of(self._opened.device).connection, device_of

    def _prepare(self, device_of: DeviceOf, deadline_ns: int | None) -> ModelHandle:
        return self._models.prepare_again(self._opened, self._version, device_of, deadline_ns)


def _check_arguments(name: str, version: int) -> None:
    """Raise InvalidArgument unless a request for this model and version can be sent."""
    if not _is_a(ModelName, name):
        allowed = "letters, digits, `_`, `.` and `-`, at most 64 characters, no `.` or `-` at the beginning"
        raise InvalidArgument(f"{clipped(repr(name))} cannot be the name of a model: {allowed}")
    if not _is_a(Version, version):
        allowed = f"an integer from 1 to {2**31 - 1}, or 0 for the one that is served"
        raise InvalidArgument(f"{clipped(repr(version))} cannot be a version of a model: {allowed}")


def _is_a(type_: Any, value: object) -> bool:
    try:
        msgspec.convert(value, type_)
    except msgspec.ValidationError:
        return False
    return True


def _signature(received: ReceivedModel, device: Device) -> ModelSignature:
    """Return the argument of `Device.prepare_encoded`: with the model itself, if observers or HIDL need that."""
    description = received.description
    if device.is_aidl and not current_observers():
        return description
    model = decode_model(description.model, received.pools)
    return FinishedModel(model, description.inputs, description.outputs, description.states)
