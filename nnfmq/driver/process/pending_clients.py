"""Connections to the supervisor whose client has not sent its Hello yet.

They have limits of their own, so that connections on which nothing is sent take no client's place: HELLO_TIMEOUT_S for
the Hello, PROCESS_MAX connections for each process (by the pid that the kernel recorded), PENDING_MAX for all. Beyond a
limit the oldest connection is rejected: of the process itself, or of the process that has the most, of the uid that has
the most.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

from nnfmq.base.accounts import ServedUsers
from nnfmq.base.channel import NO_WAIT, Channel, Credentials, Frame
from nnfmq.base.logs import about, rate_limited
from nnfmq.driver.process import hand_over, restart
from nnfmq.driver.process.event_loop import EventLoop, Timer
from nnfmq.hal.errors import (
    DeadObject,
    ErrorStatus,
    InvalidArgument,
    MissedDeadlineTransient,
    ProtocolError,
    TransportError,
)
from nnfmq.hal.feature_levels import interface_level
from nnfmq.serialize import control_protocol, messages
from nnfmq.serialize.control_protocol import PeerRole
from nnfmq.serialize.packets import BytesLike

__all__ = [
    "HELLO_TIMEOUT_S",
    "PENDING_MAX",
    "PROCESS_MAX",
    "PendingClients",
    "check_hello",
    "decode_greeting",
    "decode_hello",
    "refuse",
    "reject",
]


# ----------------------------------------------------------------------------------------------------------------------
# The first message of a client: what a Hello must be for a session to begin.
#
# A daemon's supervisor reads and checks it before it starts a worker; an embedded driver checks it in its session.


def decode_hello(frame: Frame) -> messages.Hello:
    """Return the Hello in a connection's first frame.

    Raises:
        ProtocolError: If it is anything else.
    """
    if frame.fds or frame.fds_truncated:
        raise ProtocolError("a connection's first frame came with file descriptors")
    return decode_greeting(frame.data)


def decode_greeting(data: BytesLike) -> messages.Hello:
    """Return the Hello in these bytes. Raises as `decode_hello`."""
    message = control_protocol.decode(data, sender=PeerRole.CLIENT)
    if not isinstance(message, messages.Hello):
        raise ProtocolError(f"a connection begins with Hello, not {type(message).__name__}")
    return message


def check_hello(hello: messages.Hello) -> str:
    """Return the reason why this driver does not serve the client, for the client; empty if it does."""
    if hello.protocol != control_protocol.PROTOCOL:
        return (
            f"this driver implements protocol {control_protocol.PROTOCOL}, the client {hello.protocol}: "
            "install the same nnfmq release on both sides"
        )
    try:
        interface_level(hello.interface)
    except InvalidArgument as error:
        return str(error)
    return ""


# ----------------------------------------------------------------------------------------------------------------------
# Connections to the supervisor whose client has not sent its Hello yet.


HELLO_TIMEOUT_S = 5.0
PROCESS_MAX = 32  # threads of a process that connect at once may all be accepted before one has sent its Hello
PENDING_MAX = 256  # one fd each
_log = rate_limited("nnfmq.supervisor")

OnHello = Callable[[Channel, bytes], None]
OnRequest = Callable[[Channel], None]


class _Pending(NamedTuple):
    channel: Channel
    pid: int
    uid: int
    deadline_s: float


class PendingClients:
    """Receives the first frame of each connection and passes the connection on. Used by one thread. Close it.

    `on_hello` is called with a connection, which it owns from then on, and the bytes of the client's Hello;
    `on_successor` with one over which another driver asks for the sockets (`hand_over`), and `on_restart` with one over
    which a command asks for a successor (`restart`). Other users' than those of `served` are rejected.
    """

    def __init__(
        self, loop: EventLoop, on_hello: OnHello, on_successor: OnRequest, on_restart: OnRequest, served: ServedUsers
    ) -> None:
        self._served = served
        self._loop = loop
        self._on_hello = on_hello
        self._on_request = {hand_over.REQUEST: on_successor, restart.REQUEST: on_restart}
        self._by_pid: dict[int, dict[int, _Pending]] = {}  # pid → fd → connection, oldest first
        self._all: dict[int, _Pending] = {}  # by fd, oldest first, so the first one's deadline is the next
        self._timer: Timer | None = None

    def add(self, channel: Channel) -> None:
        """Take ownership of an accepted connection."""
        refusal = self._served.refusal(channel)
        if refusal:
            reject(channel, ErrorStatus.DEVICE_UNAVAILABLE, refusal)
        elif not self._receive(channel):
            self._wait_for(channel, channel.peer())

    @property
    def count(self) -> int:
        """The number of connections that wait for their Hello."""
        return len(self._all)

    def close(self) -> None:
        """Close all connections."""
        for fd in list(self._all):
            self._remove(fd).channel.close()

    def _wait_for(self, channel: Channel, credentials: Credentials) -> None:
        fd, pid = channel.fileno(), credentials.pid
        self._loop.add_reader(fd, lambda: self._on_readable(fd))
        self._all[fd] = pending = _Pending(channel, pid, credentials.uid, time.monotonic() + HELLO_TIMEOUT_S)
        own = self._by_pid.setdefault(pid, {})
        own[fd] = pending
        if len(own) > PROCESS_MAX:
            self._reject_oldest(own, f"process {pid} has {PROCESS_MAX} connections without a Hello already")
        elif len(self._all) > PENDING_MAX:
            self._reject_oldest(self._of_most(), f"this driver has {PENDING_MAX} connections without a Hello already")
        self._set_timer()

    def _of_most(self) -> dict[int, _Pending]:
        """Return the connections of the process that has the most, of the uid that has the most."""
        of_uid = Counter(pending.uid for pending in self._all.values())
        return max(self._by_pid.values(), key=lambda own: (of_uid[next(iter(own.values())).uid], len(own)))

    def _on_readable(self, fd: int) -> None:
        pending = self._all[fd]
        self._remove(fd)  # before it is passed on: its owner may close or detach it
        if not self._receive(pending.channel):
            pending.channel.close()  # readable without a frame: nothing that a client does

    def _receive(self, channel: Channel) -> bool:
        """Handle the first frame; return False if it has not arrived."""
        try:
            frame = channel.receive(NO_WAIT, body_bytes_max=0, takes_fds=False)
        except MissedDeadlineTransient:
            return False
        except DeadObject:
            channel.close()
        except (TransportError, OSError) as error:
            _log.warning("a connection without a Hello is closed: %s", error)
            channel.close()
        else:
            with frame:
                self._handle(channel, frame)
        return True

    def _handle(self, channel: Channel, frame: Frame) -> None:
        on_request = self._on_request.get(bytes(frame.data))
        if on_request is not None and channel.peer().uid in (os.getuid(), 0):
            on_request(channel)
            return
        try:
            reason = check_hello(decode_hello(frame))
        except TransportError as error:
            _log.warning("a connection without a Hello is closed: %s", error)
            channel.close()
            return
        if reason:
            reject(channel, ErrorStatus.GENERAL_FAILURE, reason)
        else:
            self._on_hello(channel, bytes(frame.data))

    def _reject_oldest(self, connections: dict[int, _Pending], text: str) -> None:
        reject(self._remove(next(iter(connections))).channel, ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT, text)

    def _remove(self, fd: int) -> _Pending:
        self._loop.remove_reader(fd)
        pending = self._all.pop(fd)
        own = self._by_pid[pending.pid]
        del own[fd]
        if not own:
            del self._by_pid[pending.pid]
        return pending

    def _set_timer(self) -> None:
        if self._timer is None and self._all:
            self._timer = self._loop.call_at(next(iter(self._all.values())).deadline_s, self._reject_late)

    def _reject_late(self) -> None:
        self._timer = None
        now = time.monotonic()
        for fd in [fd for fd, pending in self._all.items() if pending.deadline_s <= now]:
            text = f"no Hello arrived within {HELLO_TIMEOUT_S:g} s"
            reject(self._remove(fd).channel, ErrorStatus.GENERAL_FAILURE, text)
        self._set_timer()


def reject(channel: Channel, status: ErrorStatus, text: str) -> None:
    """Log the reason, send it to the client and close the connection. Does not block."""
    with suppress(OSError):
        _log.warning("client rejected: %s", text, extra=about(channel.peer().logged()))
    refuse(channel, status, text)


def refuse(channel: Channel, status: ErrorStatus, text: str) -> None:
    """Send the reason to the client and close the connection. Does not block."""
    with channel, suppress(DeadObject, MissedDeadlineTransient, OSError):
        channel.send(_encoded_rejection(status, text), (), NO_WAIT)


@lru_cache(maxsize=16)
def _encoded_rejection(status: ErrorStatus, text: str) -> bytes:
    """Return the message, which thousands of connections of one process may get."""
    return control_protocol.encode(messages.Refused(status, text))
