"""One end of a control channel that sends and receives single messages, as client or as driver.

It keeps no state and checks no order, so a test can send messages that no nnfmq peer sends. It decodes received
messages as those of the other role.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeVar

from nnfmq.base.channel import NO_WAIT, Channel
from nnfmq.hal.errors import DeadObject, MissedDeadlineTransient
from nnfmq.serialize import control_protocol
from nnfmq.serialize.control_protocol import PeerRole
from nnfmq.serialize.messages import Message

LIMIT_NS = 20_000_000_000

MessageT = TypeVar("MessageT", bound=Message)


class ProtocolPeer:
    """One end of a control channel. Owns it; close it, or use `with`."""

    def __init__(self, channel: Channel, role: PeerRole) -> None:
        self.channel = channel
        self._role = role

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send a message. Borrows `fds`."""
        self.channel.send(control_protocol.encode(message), fds, time.monotonic_ns() + LIMIT_NS)

    def send_bytes(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send bytes that need not be a message. Borrows `fds`."""
        self.channel.send(data, fds, time.monotonic_ns() + LIMIT_NS)

    def receive_any(self) -> Message:
        """Return the next message; close the fds that arrive with it."""
        with self.channel.receive(time.monotonic_ns() + LIMIT_NS) as frame:
            return control_protocol.decode(frame.data, sender=self._role.peer, fds=len(frame.fds))

    def receive(self, kind: type[MessageT]) -> MessageT:
        """Return the next message, which must be a `kind`."""
        message = self.receive_any()
        assert isinstance(message, kind), f"expected {kind.__name__}, received {message}"
        return message

    def receive_with_fds(self, kind: type[MessageT]) -> tuple[MessageT, list[int]]:
        """Return the next message, which must be a `kind`, and its fds, which the caller owns."""
        with self.channel.receive(time.monotonic_ns() + LIMIT_NS) as frame:
            message = control_protocol.decode(frame.data, sender=self._role.peer, fds=len(frame.fds))
            assert isinstance(message, kind), f"expected {kind.__name__}, received {message}"
            return message, frame.detach_fds()

    def has_no_message(self) -> bool:
        """Return True if no message has arrived. Does not block."""
        try:
            self.channel.receive(NO_WAIT).close()
        except MissedDeadlineTransient:
            return True
        return False

    def is_hung_up(self) -> bool:
        """Return True if the peer closes the connection instead of sending a message."""
        try:
            self.receive_any()
        except DeadObject:
            return True
        return False

    def close(self) -> None:
        """Close the connection."""
        self.channel.close()

    def __enter__(self) -> ProtocolPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
