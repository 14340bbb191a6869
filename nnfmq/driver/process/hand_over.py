"""A running driver hands its listening sockets over to its successor: `nnfmq serve --replace`.

    successor -> driver   REQUEST               instead of a Hello, on a connection to the driver's socket
    driver -> successor   LISTENING, 2 or 4 fds the socket and its lock; those of the model repository, if it has one
    successor -> driver   TAKEN                 the successor accepts all clients from now on

Until TAKEN both processes have the sockets, and the driver goes on accepting: if the successor exits before, nothing
has changed. Connections that wait in the sockets' backlogs pass to the successor with them, so none is rejected. After
it the driver owns neither path nor lock, asks its clients to leave, and exits when none is left.

Only the driver's user and root get this far: `pending_clients` checks the uid of each connection.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from nnfmq.base.channel import NO_WAIT, Channel, Frame, Listener, close_all
from nnfmq.base.ownership import Closable
from nnfmq.base.paths import models_socket
from nnfmq.driver.process.event_loop import EventLoop
from nnfmq.hal.errors import DeadObject, DeviceUnavailable, MissedDeadlineTransient, ProtocolError, TransportError
from nnfmq.serialize import control_protocol, messages
from nnfmq.serialize.control_protocol import PeerRole

__all__ = ["REQUEST", "Predecessor", "Successor"]

REQUEST, LISTENING, TAKEN = b"nnfmq: hand over", b"nnfmq: listening", b"nnfmq: taken"
_REPLY_TIMEOUT_NS = 10_000_000_000
_PER_SOCKET = 2  # fds: the socket and its lock


class Successor(Closable):
    """The connection to the next driver, as the running one has it. Used by one thread. Close it.

    Takes ownership of `channel`, and borrows the rest. `on_taken` is called when the successor accepts clients.
    """

    def __init__(self, loop: EventLoop, channel: Channel, on_taken: Callable[[], None]) -> None:
        self._loop = loop
        self._channel = channel
        self._on_taken = on_taken
        loop.add_reader(channel.fileno(), self._receive)

    def send(self, *listeners: Listener) -> None:
        """Send the sockets and their locks. Does not block; if it fails, the successor sees the connection's end."""
        try:
            self._channel.send(LISTENING, [fd for listener in listeners for fd in listener.fds()], NO_WAIT)
        except (DeadObject, MissedDeadlineTransient, OSError):
            self.close()

    def _receive(self) -> None:
        try:
            with self._channel.receive(NO_WAIT, body_bytes_max=0) as frame:
                has_taken = frame.data == TAKEN
        except MissedDeadlineTransient:
            return
        except (TransportError, OSError):
            has_taken = False
        self.close()
        if has_taken:
            self._on_taken()

    @property
    def is_open(self) -> bool:
        """Whether the successor may still confirm that it accepts clients."""
        return self._channel.fileno() >= 0

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if self.is_open:
            self._loop.remove_reader(self._channel.fileno())
            self._channel.close()


class Predecessor(Closable):
    """The running driver, as the one has it that replaces it. Owns the locks until `confirm`. Close it.

    `listener` is that of the driver's socket, and `models` that of its model repository's, None if it has none. The
    caller closes both; they own neither the path nor the lock before `confirm`.
    """

    def __init__(self, channel: Channel, path: Path, fds: list[int]) -> None:
        self._channel = channel
        self._path = path
        self._locks = fds[1::_PER_SOCKET]
        found = [Listener.adopt(fd) for fd in fds[::_PER_SOCKET]]
        self.listener = found[0]
        self.models = found[1] if len(found) > 1 else None

    @classmethod
    def request(cls, path: Path) -> Self | None:
        """Return the driver that listens at `path`, after it has sent its sockets; None if none listens. Blocks.

        Raises:
            DeviceUnavailable: If the driver cannot hand over, or does not reply within 10 s.
        """
        deadline_ns = time.monotonic_ns() + _REPLY_TIMEOUT_NS
        try:
            channel = Channel.connect(path, deadline_ns)
        except DeviceUnavailable:
            return None
        with ExitStack() as undo:
            undo.callback(channel.close)
            if channel.peer().uid not in (os.getuid(), 0):
                raise DeviceUnavailable(f"the driver at {path} runs as uid {channel.peer().uid}, not as {os.getuid()}")
            try:
                channel.send(REQUEST, (), deadline_ns)
                with channel.receive(deadline_ns, body_bytes_max=0) as frame:
                    predecessor = cls(channel, path, _listening_fds(frame, path))
            except (TransportError, MissedDeadlineTransient) as error:
                raise DeviceUnavailable(
                    f"the driver at {path} does not hand over its socket: {error}; stop it (SIGTERM), and start another"
                ) from error
            undo.pop_all()
        return predecessor

    def confirm(self) -> None:
        """Own the paths and their locks, and let the driver accept no more clients. Call it when this process does."""
        paths = (self._path, models_socket(self._path))
        locks, self._locks = self._locks, []
        for listener, path, lock in zip((self.listener, self.models), paths, locks, strict=False):
            assert listener is not None  # each came with its lock
            listener.own(path, lock)
        try:
            self._channel.send(TAKEN, (), NO_WAIT)
        except (DeadObject, MissedDeadlineTransient):
            pass  # it has just exited: nobody else listens
        self.close()

    def close(self) -> None:
        """Close the connection and the locks. Idempotent."""
        self._channel.close()
        close_all(self._locks)
        self._locks = []


def _listening_fds(frame: Frame, path: Path) -> list[int]:
    """Return the fds of a driver's reply, which the caller owns.

    Raises:
        DeviceUnavailable: If the driver refuses.
        ProtocolError: If it is another message.
    """
    if frame.data != LISTENING:
        reply = control_protocol.decode(frame.data, sender=PeerRole.DRIVER, fds=frame.fd_count)
        if isinstance(reply, messages.Refused):
            raise DeviceUnavailable(f"the driver at {path} does not hand over its socket: {reply.message}")
        raise ProtocolError(f"it replied with {type(reply).__name__}")
    if len(frame.fds) not in (_PER_SOCKET, 2 * _PER_SOCKET):
        raise ProtocolError(f"{len(frame.fds)} fds came instead of those of one or two sockets")
    return frame.detach_fds()
