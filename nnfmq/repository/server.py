"""RepositoryServer: the repository's end of its clients' connections, on the watcher thread.

Nothing here blocks. A client that breaks the protocol, sends file descriptors, or does not read its replies loses its
connection; it has no effect on others. Models change on the main thread.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from nnfmq.base import watcher
from nnfmq.base.accounts import ServedUsers
from nnfmq.base.channel import NO_WAIT, Channel, Credentials, Listener
from nnfmq.base.file_memory import FileMemory
from nnfmq.base.logs import about, rate_limited
from nnfmq.base.ownership import Uncopyable
from nnfmq.hal.errors import DeadObject, ErrorStatus, MissedDeadlineTransient, NnfmqError
from nnfmq.serialize import repository_protocol
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
)

__all__ = ["CONNECTIONS_MAX", "PROCESS_MAX", "RepositoryServer"]

CONNECTIONS_MAX = 512
PROCESS_MAX = 64  # a driver has no more clients
_SHORTAGES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
_PAUSE_NS = 100_000_000
_log = rate_limited("nnfmq.repository.clients")


class _Published(NamedTuple):
    description: ModelDescription
    memories: tuple[FileMemory, ...]


class _Peer:
    """A client: its connection, its process and user, and the models that it has opened."""

    def __init__(self, channel: Channel, client: Credentials) -> None:
        self.channel = channel
        self.pid = client.pid
        self.uid = client.uid
        self.opened: set[str] = set()
        self.watch: watcher.ReaderHandle | None = None


class RepositoryServer(Uncopyable):
    """Serves models to the clients of `listener`, which it owns, from `start` to `close`.

    `heartbeat_fd` is the pipe by which the supervisor learns that this process answers. Borrowed.
    """

    def __init__(self, listener: Listener, heartbeat_fd: int) -> None:
        self._listener = listener
        self._listener.refuse_fds()  # a close of them may block, see `Channel.receive`
        self._heartbeat_fd = heartbeat_fd
        # Held while a model changes and while a request is handled: a client either gets the new version, or is told.
        self._lock = threading.Lock()
        self._models: dict[str, _Published] = {}
        self._entries: dict[str, ModelEntry] = {}
        self._peers: set[_Peer] = set()
        self._is_closed = False
        self._served = ServedUsers.of_settings()  # numbers, as the driver has exported them
        self._accepting: watcher.ReaderHandle | None = None

    def start(self) -> None:
        """Accept clients from now on. Until then they wait. Idempotent."""
        with self._lock:
            if not self._is_closed and self._accepting is None:
                self._accepting = watcher.add_reader(self._listener.fileno(), self._accept, _give_up)

    def show_life(self) -> None:
        """Show the supervisor that the calling thread goes on, as soon as the one that serves clients does, too."""
        watcher.call_at(time.monotonic_ns(), self._send_heartbeat)

    def _send_heartbeat(self) -> None:
        with self._lock, suppress(OSError):  # without the lock no client is served; the supervisor may be stopped
            os.write(self._heartbeat_fd, b"\0")

    # -- models, on the main thread ------------------------------------------------------------------------------------

    def publish(
        self, description: ModelDescription, memories: Sequence[FileMemory], entries: Iterable[ModelEntry]
    ) -> None:
        """Serve a version from now on, instead of an older one; tell the clients that have opened the model.

        Takes ownership of the memories. `entries` is the list of models with this version: a client that was told of
        it finds it there.
        """
        with self._lock:
            self._replace_entries(entries)
            previous = self._models.get(description.name)
            self._models[description.name] = _Published(description, tuple(memories))
            _close(previous)
            changed = VersionChanged(description.name, description.version)
            for peer in [peer for peer in self._peers if description.name in peer.opened]:
                self._send(peer, changed)

    def withdraw(self, name: str) -> None:
        """Serve this model no longer. Clients that have opened it keep what they have. Idempotent."""
        with self._lock:
            _close(self._models.pop(name, None))

    def set_entries(self, entries: Iterable[ModelEntry]) -> None:
        """Replace the list of models."""
        with self._lock:
            self._replace_entries(entries)

    def _replace_entries(self, entries: Iterable[ModelEntry]) -> None:
        self._entries = {entry.name: entry for entry in sorted(entries, key=lambda entry: entry.name)}

    def close(self) -> None:
        """Close all connections and memories. Idempotent."""
        with self._lock:
            self._is_closed = True
            if self._accepting is not None:
                watcher.remove_reader(self._accepting)
            self._listener.close()
            for peer in list(self._peers):
                self._drop(peer)
            for published in self._models.values():
                _close(published)
            self._models.clear()

    # -- clients, on the watcher thread --------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            channel = self._listener.accept()
        except OSError as shortage:
            if shortage.errno not in _SHORTAGES:
                raise
            # The waiting client would end every poll of the socket immediately.
            _log.warning("cannot accept a client now: %s", shortage.strerror)
            with self._lock:
                if self._accepting is not None:
                    watcher.remove_reader(self._accepting)
                    self._accepting = None
            watcher.call_at(time.monotonic_ns() + _PAUSE_NS, self.start)
            return
        if channel is not None:
            self._add(channel)

    def _add(self, channel: Channel) -> None:
        credentials = channel.peer()
        problem = self._served.refusal(channel) or self._problem(credentials)
        if problem:
            _log.warning("client rejected: %s", problem, extra=about(credentials.logged()))
            channel.close()
            return
        peer = _Peer(channel, credentials)
        with self._lock:
            self._peers.add(peer)
            try:
                receive = partial(self._receive, peer)
                peer.watch = watcher.add_reader(channel.fileno(), receive, lambda _error: self._end(peer))
            except OSError as error:
                _log.warning("client rejected: %s", error, extra=about(credentials.logged()))
                self._drop(peer)

    def _problem(self, client: Credentials) -> str:
        """Return why a client is rejected, or nothing."""
        pid, uid = client.pid, client.uid
        if len(self._peers) >= CONNECTIONS_MAX:
            return f"there are {CONNECTIONS_MAX} clients already"
        if Counter(peer.pid for peer in self._peers)[pid] >= PROCESS_MAX:
            return f"process {pid} has {PROCESS_MAX} connections already"
        if self._served.are_several and Counter(peer.uid for peer in self._peers)[uid] >= CONNECTIONS_MAX // 2:
            return f"uid {uid} has {CONNECTIONS_MAX // 2} connections already, half of all"
        return ""

    def _receive(self, peer: _Peer) -> None:
        """Handle one frame of a client; its next one after those of other clients."""
        try:
            with peer.channel.receive(NO_WAIT, body_bytes_max=0, takes_fds=False) as frame:
                message = repository_protocol.decode(frame.data, sender=RepositoryRole.CLIENT, fds=frame.fd_count)
        except MissedDeadlineTransient:
            return
        except DeadObject:
            self._end(peer)
        except (NnfmqError, OSError) as error:
            _log.warning("the connection of process %s is closed: %s", peer.pid, error)
            self._end(peer)
        else:
            self._handle(peer, message)

    def _handle(self, peer: _Peer, message: RepositoryMessage) -> None:
        with self._lock:
            if isinstance(message, ListModels):
                self._send(peer, ModelList(message.call, tuple(self._entries.values())))
            elif isinstance(message, OpenModel):
                self._open(peer, message)

    def _open(self, peer: _Peer, request: OpenModel) -> None:
        published = self._models.get(request.name)
        if published is None:
            status, text = self._absence(request.name)
            self._send(peer, ModelOpened(request.call, status, text))
            return
        version = published.description.version
        if request.version not in (0, version):
            text = f"version {request.version} of model {request.name!r} is not served; version {version} is"
            self._send(peer, ModelOpened(request.call, ErrorStatus.INVALID_ARGUMENT, text))
            return
        reply = ModelOpened(request.call, ErrorStatus.NONE, "", published.description)
        peer.opened.add(request.name)
        self._send(peer, reply, [memory.fileno() for memory in published.memories])

    def _absence(self, name: str) -> tuple[ErrorStatus, str]:
        """Return why a model is not served."""
        entry = self._entries.get(name)
        if entry is None:
            known = ", ".join(self._entries) or "none"
            return ErrorStatus.INVALID_ARGUMENT, f"there is no model {name!r}; those of this driver: {known}"[:1000]
        if entry.state is ModelState.UNAVAILABLE and not entry.failed_version:
            return ErrorStatus.INVALID_ARGUMENT, f"model {name!r} has no version"
        reason = f": version {entry.failed_version}: {entry.reason}" if entry.reason else ""
        what = "is still being prepared" if entry.state is ModelState.LOADING else "has no version that can be prepared"
        return ErrorStatus.DEVICE_UNAVAILABLE, f"model {name!r} {what}{reason}"

    def _send(self, peer: _Peer, message: RepositoryMessage, fds: Sequence[int] = ()) -> None:
        """Send without blocking; if that is not possible, close the connection. `_lock` is held."""
        try:
            peer.channel.send(repository_protocol.encode(message), fds, NO_WAIT)
        except DeadObject:
            self._drop(peer)
        except (NnfmqError, OSError) as error:  # OSError: too many fds are on their way to clients of this user
            _log.warning("process %s does not read its replies; its connection is closed: %s", peer.pid, error)
            self._drop(peer)

    def _end(self, peer: _Peer) -> None:
        with self._lock:
            self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        """Close a client's connection. Idempotent. `_lock` is held."""
        self._peers.discard(peer)
        if peer.watch is not None:
            watcher.remove_reader(peer.watch)
            peer.watch = None
        peer.channel.close()


def _give_up(_error: Exception) -> None:
    """End the process after a bug, which the watcher has logged. The driver starts another one."""
    os._exit(1)


def _close(published: _Published | None) -> None:
    for memory in () if published is None else published.memories:
        memory.close()
