"""A model repository that is a thread of the test: it serves models of the HAL, and can violate the protocol.

It speaks `serialize.repository_protocol` over real sockets, and prepares nothing. Tests of the client use it, because
they decide when a version changes, and what a bad repository sends.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from nnfmq.base.channel import NO_WAIT, Channel, Listener
from nnfmq.base.paths import models_socket
from nnfmq.hal.errors import DeadObject, ErrorStatus, ModelNotFound, NnfmqError
from nnfmq.hal.tensor_info import TensorInfo, operand_info
from nnfmq.hal.types import ExecutionPreference, Model, Priority
from nnfmq.serialize.messages import memory_to_data
from nnfmq.serialize.models import encode_model
from nnfmq.serialize.repository_protocol import (
    ListModels,
    ModelDescription,
    ModelEntry,
    ModelList,
    ModelOpened,
    ModelState,
    OpenModel,
    RepositoryMessage,
    RepositoryRole,
    VersionChanged,
    decode,
    encode,
)
from support.drivers import Daemon

Answer = Callable[["FakeRepository", Channel, RepositoryMessage], bool]
"""Handles a message instead of the repository; returns False if it did not."""


def describe(name: str, version: int, model: Model, device: str = "reference", **changes: Any) -> ModelDescription:
    """Return the description of a model; `changes` replaces fields of it."""
    main = model.main
    data, pools = encode_model(model)
    described = ModelDescription(
        name, version, device, ExecutionPreference.SUSTAINED_SPEED, Priority.MEDIUM, 1, False, data,
        tuple(map(memory_to_data, pools)),
        _infos(model, main.input_indexes, "input"),
        _infos(model, main.output_indexes, "output"),
    )  # fmt: skip
    return replace(described, **changes)


def _infos(model: Model, indexes: Sequence[int], kind: str) -> tuple[TensorInfo, ...]:
    return tuple(operand_info(model.main.operands[index], f"{kind} {i}") for i, index in enumerate(indexes))


class FakeRepository:
    """A repository at a socket. Use `serving` or `with`; `answer` handles messages instead of it."""

    def __init__(self, socket_path: Path) -> None:
        self.answer: Answer | None = None
        self.opened = 0
        """How many models were sent."""
        self.connections = 0
        """How many clients have connected."""
        self._models: dict[str, dict[int, tuple[ModelDescription, Model]]] = {}
        self._states: dict[str, ModelState] = {}
        self._lock = threading.Lock()
        self._channels: dict[int, Channel] = {}
        self._interested: dict[str, set[int]] = {}
        self._listener = Listener.create(socket_path)
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="fake repository")
        self._thread.start()

    # -- what the test decides --

    def publish(self, name: str, version: int, model: Model, **changes: Any) -> None:
        """Serve a version, and announce it if it is the newest one. `changes` as of `describe`."""
        with self._lock:
            self._models.setdefault(name, {})[version] = describe(name, version, model, **changes), model
            self._states[name] = ModelState.READY
        if version == max(self._models[name]):
            self.announce(name, version)

    def withdraw(self, name: str, version: int) -> None:
        """Serve a version no longer. Announces nothing."""
        with self._lock:
            del self._models[name][version]

    def set_state(self, name: str, state: ModelState) -> None:
        """Let a model that has no version be in this state."""
        with self._lock:
            self._models.setdefault(name, {})
            self._states[name] = state

    def announce(self, name: str, version: int) -> None:
        """Tell all clients that have opened the model of a version."""
        for fd in list(self._interested.get(name, ())):
            channel = self._channels.get(fd)
            if channel is not None:
                self.send(channel, VersionChanged(name, version))

    def hang_up(self) -> None:
        """End all connections, and go on listening."""
        for channel in list(self._channels.values()):
            channel.hang_up()

    def send(self, channel: Channel, message: RepositoryMessage, fds: Sequence[int] = ()) -> None:
        """Send a message; a client that has exited is no error."""
        try:
            channel.send(encode(message), fds)
        except DeadObject:
            pass

    # -- serving --

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._listener.fileno(), select.POLLIN)
        poll.register(self._stop, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self._stop:
                    return
                if fd == self._listener.fileno():
                    self._accept(poll)
                elif not self._serve(fd):
                    poll.unregister(fd)
                    self._channels.pop(fd).close()

    def _accept(self, poll: select.poll) -> None:
        channel = self._listener.accept()
        if channel is not None:
            self.connections += 1
            self._channels[channel.fileno()] = channel
            poll.register(channel.fileno(), select.POLLIN)

    def _serve(self, fd: int) -> bool:
        channel = self._channels[fd]
        try:
            with channel.receive(NO_WAIT) as frame:
                message = decode(frame.data, sender=RepositoryRole.CLIENT, fds=len(frame.fds))
        except NnfmqError:
            return False
        if channel.fileno() < 0:
            return False
        if self.answer is None or not self.answer(self, channel, message):
            self.reply(channel, message)
        return channel.fileno() >= 0

    def reply(self, channel: Channel, message: RepositoryMessage) -> None:
        """Reply as a repository does."""
        if isinstance(message, ListModels):
            self.send(channel, ModelList(message.call, self._entries()))
            return
        assert isinstance(message, OpenModel)
        self._interested.setdefault(message.name, set()).add(channel.fileno())
        try:
            description, model = self._find(message)
        except NnfmqError as error:
            self.send(channel, ModelOpened(message.call, error.status, str(error)))
            return
        self.opened += 1
        fds = [pool.fileno() for pool in model.pools]  # type: ignore[attr-defined]
        self.send(channel, ModelOpened(message.call, ErrorStatus.NONE, "", description), fds)

    def _find(self, message: OpenModel) -> tuple[ModelDescription, Model]:
        with self._lock:
            if message.name not in self._models:
                raise ModelNotFound(f"no model {message.name}")
            versions = self._models[message.name]
            if not versions and not message.version:
                raise UnavailableModel(f"{message.name} is {self._states[message.name].value}")
            version = message.version or max(versions)
            if version not in versions:
                raise ModelNotFound(f"it has {sorted(versions)}")
            return versions[version]

    def _entries(self) -> tuple[ModelEntry, ...]:
        with self._lock:
            return tuple(
                ModelEntry(name, self._states[name], max(versions, default=0), "reference", 0, "", time.time())
                for name, versions in sorted(self._models.items())
            )

    def close(self) -> None:
        """End the thread, the connections and the socket. Idempotent."""
        if self._stop < 0:
            return
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        os.close(self._stop)
        self._stop = -1
        for channel in self._channels.values():
            channel.close()
        self._listener.close()

    def __enter__(self) -> FakeRepository:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class UnavailableModel(NnfmqError):
    """No version of a model is served."""

    status = ErrorStatus.DEVICE_UNAVAILABLE


@contextmanager
def serving(daemon: Daemon) -> Iterator[FakeRepository]:
    """Give a repository of this daemon."""
    with FakeRepository(models_socket(daemon.path)) as repository:
        try:
            yield repository
        finally:
            repository.close()
            models_socket(daemon.path).with_name(models_socket(daemon.path).name + ".lock").unlink()
