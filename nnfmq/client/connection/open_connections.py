"""The end of connections: their errors, and a forked child, which closes its copies of all control sockets.

The driver sees a client's exit as a hang-up of its socket, and the kernel reports that only when the last copy is
closed. A forked child must therefore close its copies immediately.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

from nnfmq.hal.errors import BadState, DeadObject, DeviceUnavailable, NnfmqError

CLOSED = "this client is closed"
"""Why a connection has ended that this process has closed."""


class ForkAware(Protocol):
    """An object with a socket that a forked child must not keep."""

    def disown_in_child(self) -> None:
        """Close the child's copies of all fds and make every later call raise. Runs in the child after fork(2)."""
        ...


class DriverEnding(DeadObject):
    """The driver has asked the client to leave, and has not executed the call: its successor may execute it."""


class NotAccepted(DeviceUnavailable):
    """A driver that listened has ended before it read this client's Hello: its successor may serve the client."""


def closed_error(reason: str) -> NnfmqError:
    """Return the error of a call on a connection that has ended: BadState if it is closed, otherwise DeadObject."""
    return (BadState if reason == CLOSED else DeadObject)(reason)


_connections: weakref.WeakSet[ForkAware] = weakref.WeakSet()


def add(connection: ForkAware) -> None:
    """Register an open connection. Keeps only a weak reference."""
    _connections.add(connection)


def discard(connection: ForkAware) -> None:
    """Unregister a closed connection. Idempotent."""
    _connections.discard(connection)


def _disown_all() -> None:
    for connection in list(_connections):
        connection.disown_in_child()


os.register_at_fork(after_in_child=_disown_all)
