"""MessageCodec: the bytes of one protocol's messages, with the file descriptors that come with each.

A protocol is a table that does not know its side: which side may send which messages, and how many file descriptors
come with a message. The messages are msgspec structs, which have the fields and their ranges. Both ends encode and
decode with one codec. The protocols are those of the control channel, of the model repository, of its import processes,
and of the shared program cache.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, Generic, TypeVar

import msgspec

from nnfmq.hal.errors import ProtocolError
from nnfmq.serialize.packets import BytesLike

__all__ = ["DECODE_ERRORS", "MessageCodec"]

MessageT = TypeVar("MessageT", bound=msgspec.Struct)
DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What a msgspec decoder raises for bytes of a peer."""


def _size_text(data: BytesLike) -> str:
    return f"these {len(data)} bytes"


class MessageCodec(Generic[MessageT]):
    """The encoder and the decoders of one protocol.

    Args:
        senders: The messages that each side may send.
        fd_counts: How many file descriptors come with a message, if any: a number, or the name of the field or property
            that has it. If that is a list, its length counts.
        describe: Returns what bytes that are no message are called in an error.
    """

    def __init__(
        self,
        senders: Mapping[Any, Iterable[type[MessageT]]],
        fd_counts: Mapping[type[MessageT], int | str],
        describe: Callable[[BytesLike], str] = _size_text,
    ) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoders: dict[Enum, msgspec.msgpack.Decoder[MessageT]] = {
            sender: msgspec.msgpack.Decoder(functools.reduce(operator.or_, kinds)) for sender, kinds in senders.items()
        }
        self._fd_counts = fd_counts
        self._describe = describe

    def fd_count(self, message: MessageT) -> int:
        """Return how many file descriptors must come with `message`."""
        count = self._fd_counts.get(type(message), 0)
        if isinstance(count, str):
            value = getattr(message, count)
            return value if isinstance(value, int) else len(value)
        return count

    def encode(self, message: MessageT) -> bytes:
        """Return `message` in MessagePack."""
        return self._encoder.encode(message)

    def decode(self, data: BytesLike, *, sender: Enum, fds: int | None = 0) -> MessageT:
        """Return the message in `data`, which `sender` sent with `fds` file descriptors. What it contains is copied.

        If `fds` is None, because some could not be received, their number is not checked.

        Raises:
            ProtocolError: If `data` is not a message that `sender` may send, or has another number of descriptors.
        """
        try:
            message = self._decoders[sender].decode(data)
        except DECODE_ERRORS as error:
            raise ProtocolError(f"the {sender.value} may not send {self._describe(data)}: {error}") from error
        needed = self.fd_count(message)
        if fds is not None and fds != needed:
            raise ProtocolError(f"{type(message).__name__} came with {fds} file descriptors instead of {needed}")
        return message
