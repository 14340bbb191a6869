"""The first message of a client: what a Hello must be for a session to begin.

A daemon's supervisor reads and checks it before it starts a worker; an embedded driver checks it in its session.
"""

from __future__ import annotations

from nnfmq.channel import Frame
from nnfmq.hal.errors import InvalidArgument, ProtocolError
from nnfmq.hal.feature_levels import interface_level
from nnfmq.serialize import control_protocol, messages
from nnfmq.serialize.control_protocol import PeerRole

__all__ = ["check_hello", "decode_hello"]


def decode_hello(frame: Frame) -> messages.Hello:
    """Return the Hello in a connection's first frame.

    Raises:
        ProtocolError: If it is anything else.
    """
    if frame.fds or frame.fds_truncated:
        raise ProtocolError("a connection's first frame came with file descriptors")
    message = control_protocol.decode(frame.data, sender=PeerRole.CLIENT)
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
