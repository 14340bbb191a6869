"""A running driver hands its listening sockets over to its successor, for instance `nnfmq serve --replace`.

    successor -> driver   REQUEST         instead of a Hello, on a connection to the driver's socket
    driver -> successor   LISTENING, fds  the socket, and the model repository's if it has one; each with its lock,
                                          unless it is the service manager's: then there is none
    successor -> driver   TAKEN           the successor accepts all clients from now on
    driver -> successor   (hangs up)      the service manager has been told

Until TAKEN both processes have the sockets, and the driver goes on accepting: if the successor exits before, nothing
has changed. Connections that wait in the sockets' backlogs pass to the successor with them, so none is rejected. After
it the driver owns neither path nor lock, asks its clients to leave, and exits when none is left.

Only the driver's user and root get this far: `pending_clients` checks the uid of each connection. A driver that a
service manager has started has only successors that it starts itself (`restart`), because the manager must learn from
that driver which process the service is now.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
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

REQUEST, LISTENING, TAKEN = b"nnfmq: hand over", b"nnfmq: listening ", b"nnfmq: taken"
_LOCKED, _UNLOCKED = b"L", b"-"
"""After LISTENING, for each socket: whether the fd of its lock follows its own."""
_REPLY_TIMEOUT_NS = 10_000_000_000
_TOLD_TIMEOUT_NS = 1_000_000_000


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
        marks = b"".join(_LOCKED if listener.is_owner else _UNLOCKED for listener in listeners)
        try:
            self._channel.send(LISTENING + marks, [fd for listener in listeners for fd in listener.fds()], NO_WAIT)
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
        if has_taken:
            self._on_taken()
        self.close()  # the successor waits for that

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

    def __init__(self, channel: Channel, path: Path, has_lock: Sequence[bool], fds: list[int]) -> None:
        self._channel = channel
        self._path = path
        left = iter(fds)
        found = [(Listener.adopt(next(left)), next(left) if locked else None) for locked in has_lock]
        self._locks = [lock for _, lock in found]
        self.listener = found[0][0]
        self.models = found[1][0] if len(found) > 1 else None

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
                    has_lock = _checked_reply(frame, path)
                    predecessor = cls(channel, path, has_lock, frame.detach_fds())
            except (TransportError, MissedDeadlineTransient) as error:
                raise DeviceUnavailable(
                    f"the driver at {path} does not hand over its socket: {error}; stop it (SIGTERM), and start another"
                ) from error
            undo.pop_all()
        return predecessor

    def confirm(self) -> None:
        """Own the paths and their locks, and let the driver accept no more clients. Call it when this process does.

        Blocks until the driver has told its service manager; for a second at most.
        """
        paths = (self._path, models_socket(self._path))
        locks, self._locks = self._locks, []
        for listener, path, lock in zip((self.listener, self.models), paths, locks, strict=False):
            if listener is not None and lock is not None:
                listener.own(path, lock)
        with suppress(DeadObject, MissedDeadlineTransient):  # it has just exited: nobody else listens
            self._channel.send(TAKEN, (), NO_WAIT)
            self._channel.receive(time.monotonic_ns() + _TOLD_TIMEOUT_NS, body_bytes_max=0).close()
        self.close()

    def close(self) -> None:
        """Close the connection and the locks. Idempotent."""
        self._channel.close()
        close_all([lock for lock in self._locks if lock is not None])
        self._locks = []


def _checked_reply(frame: Frame, path: Path) -> list[bool]:
    """Return for each socket in a driver's reply whether its lock follows.

    Raises:
        DeviceUnavailable: If the driver refuses.
        ProtocolError: If it is another message.
    """
    if not frame.data.startswith(LISTENING):
        reply = control_protocol.decode(frame.data, sender=PeerRole.DRIVER, fds=frame.fd_count)
        if isinstance(reply, messages.Refused):
            raise DeviceUnavailable(f"the driver at {path} does not hand over its socket: {reply.message}")
        raise ProtocolError(f"it replied with {type(reply).__name__}")
    marks = frame.data.removeprefix(LISTENING)
    if len(marks) not in (1, 2) or set(marks) - set(_LOCKED + _UNLOCKED):
        raise ProtocolError("it replied with a list of sockets that is not valid")
    has_lock = [mark == _LOCKED[0] for mark in marks]
    if len(frame.fds) != len(has_lock) + sum(has_lock):
        raise ProtocolError(f"{len(frame.fds)} fds came for {len(has_lock)} sockets with {sum(has_lock)} locks")
    return has_lock
