"""The connection to a driver that all sessions and interpreters of `nnfmq.compat` share in this process.

The first use connects, as `nnfmq.connect()` does: to the driver of `$NNFMQ_SOCKET` if there is one, otherwise to an
embedded driver. The connection is closed when its last owner has been collected, and at exit. After the driver's death,
the next use connects again. A forked child has a connection of its own.

    share = DriverShare(session)
    share.connect_early(path)  # an embedded driver starts while the session imports its model
    model = share.adopt(share.client().prepare(path))  # closed when `session` is collected

The garbage collector may collect an owner at any instruction of any thread, the watcher's included, which must not wait
for the driver. So a finalizer only puts the share into a queue, and a thread closes what is in it. This thread runs as
long as the connection exists.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol, TypeVar

from nnfmq.client.connection.connect import connect
from nnfmq.hal.errors import NnfmqError

if TYPE_CHECKING:
    from nnfmq.client.connection.client import Client  # `connect` imports it while an embedded driver starts

__all__ = ["DriverShare"]

_EXIT_S = 10.0  # how long the exit of the process waits for the driver


class _Closeable(Protocol):
    def close(self) -> None: ...


ResourceT = TypeVar("ResourceT", bound=_Closeable)


class DriverShare:
    """One owner's use of the shared connection, and what it has in the driver. Thread-safe.

    The owner must not be reachable from the objects that it adopts.
    """

    def __init__(self, owner: object) -> None:
        self._adopted: dict[int, _Closeable] = {}  # by id, in the order of adoption
        self._finalizer = weakref.finalize(owner, _abandon, self)
        self._finalizer.atexit = False

    def connect_early(self, model: object) -> None:
        """Connect now, since `model` will be imported and prepared: an embedded driver starts meanwhile.

        `client` raises the error if that fails. No effect unless it is an existing file or bytes.
        """
        with suppress(NnfmqError):
            if isinstance(model, bytes) or (isinstance(model, (str, os.PathLike)) and os.path.isfile(model)):
                self.client()

    def client(self) -> Client:
        """Return the client, connected; blocks. Models of an earlier connection are dead if the driver has died.

        Raises:
            DeviceUnavailable: If no driver can be reached or started.
            MissedDeadlineTransient: If connecting takes more than 10 s.
        """
        return _process.connection.client_of(self)

    def adopt(self, resource: ResourceT) -> ResourceT:
        """Return `resource`, which is closed when the owner is collected, before those that were adopted earlier."""
        self._adopted[id(resource)] = resource
        return resource

    def discard(self, resource: _Closeable) -> None:
        """Close an adopted resource now; blocks. Idempotent."""
        self._adopted.pop(id(resource), None)
        resource.close()

    def abandon(self) -> None:
        """Have everything closed now, as when the owner is collected: an error may keep an owner that it refers to."""
        self._finalizer()

    def close(self) -> None:
        """Close all adopted resources; blocks. Idempotent."""
        while self._adopted:
            self._adopted.popitem()[1].close()


class _SharedConnection:
    """The client, its owners' shares, and the thread that closes what they leave."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held while connecting; finalizers do not take it
        self._client: Client | None = None
        self._shares: set[DriverShare] = set()
        self._closer: threading.Thread | None = None
        self.abandoned: SimpleQueue[DriverShare | None] = SimpleQueue()  # None ends the thread

    def client_of(self, share: DriverShare) -> Client:
        """Return the client, connected, and keep it until `share` is abandoned."""
        client = self._client
        if client is not None and share in self._shares:
            return client
        with self._lock:
            self._shares.add(share)
            if self._closer is None:
                self._closer = threading.Thread(target=self._close_abandoned, name="nnfmq-compat", daemon=True)
                self._closer.start()
            if self._client is None:
                self._client = connect()
            return self._client

    def _close_abandoned(self) -> None:
        """Close what the owners leave, and the client after the last one."""
        while True:
            share = self.abandoned.get()
            if share is not None:
                share.close()
            with self._lock:
                self._shares = self._shares - {share} if share is not None else set()
                if self._shares:
                    continue
                client, self._client, self._closer = self._client, None, None
            if client is not None:
                client.close()
            return

    def close_at_exit(self) -> None:
        """Close the client; blocks."""
        closer = self._closer
        if closer is not None:
            self.abandoned.put(None)
            closer.join(_EXIT_S)


class _Process:
    """The objects of which a process has one."""

    connection = _SharedConnection()


_process = _Process()


def _abandon(share: DriverShare) -> None:
    """Have a share closed soon. Does not block; takes no lock."""
    _process.connection.abandoned.put(share)


def _close_at_exit() -> None:
    _process.connection.close_at_exit()


def _forget_parent() -> None:
    """Leave the parent's connection to the parent. Runs in the child after fork(2)."""
    _process.connection = _SharedConnection()


atexit.register(_close_at_exit)
os.register_at_fork(after_in_child=_forget_parent)
