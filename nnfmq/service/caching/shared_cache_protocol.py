"""What supervisor and workers say to each other about programs that workers share: the table, and its bytes.

    worker     Wanted    number, name          is there such a program? The number is of what the worker will hold then
    supervisor Here      number, + its memory  yes
    supervisor Absent    number                no
    worker     Offered   number, name, + memory  one for all; not answered
    worker     Left      number                what was held is not used any more
    worker     Spoilt    number                it is not what its name says: nobody else should have it

A program's name is a digest; a number is the worker's own, given once. Whatever is not in the table is refused with
ProtocolError. The meaning is `shared_cache_server`'s (supervisor) and `shared_cache_client`'s (worker).
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from nnfmq.hal.errors import ProtocolError
from nnfmq.serialize.control_protocol import require_fd_count

__all__ = ["Absent", "Here", "Left", "Message", "Offered", "Role", "Spoilt", "Wanted", "decode", "encode", "fd_count"]

ProgramName: TypeAlias = Annotated[str, Meta(pattern=r"^[0-9a-f]*\Z", min_length=64, max_length=64)]
Number: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Role(Enum):
    """Who sent a message."""

    WORKER = "worker"
    SUPERVISOR = "supervisor"


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """Any of them."""

    number: Number


class Wanted(Message, frozen=True):
    """Answered by Here or Absent of the same number."""

    name: ProgramName


class Offered(Message, frozen=True):
    """With a descriptor of memory that is sealed against writing."""

    name: ProgramName


class Left(Message, frozen=True):
    """Of a number that was Wanted or Offered; others mean nothing."""


class Spoilt(Message, frozen=True):
    """Of a number that is held."""


class Here(Message, frozen=True):
    """With the descriptor."""


class Absent(Message, frozen=True):
    """Nobody shares it, or no more of them may be held."""


_FDS: dict[type[Message], int] = {Offered: 1, Here: 1}
_encoder = msgspec.msgpack.Encoder()
_decoders: dict[Role, msgspec.msgpack.Decoder[Message]] = {
    Role.WORKER: msgspec.msgpack.Decoder(Wanted | Offered | Left | Spoilt),
    Role.SUPERVISOR: msgspec.msgpack.Decoder(Here | Absent),
}
_NOT_A_MESSAGE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def fd_count(message: Message) -> int:
    """Return how many descriptors come beside `message`."""
    return _FDS.get(type(message), 0)


def encode(message: Message) -> bytes:
    """Return the bytes of `message`."""
    return _encoder.encode(message)


def decode(data: bytes | bytearray, *, sender: Role, fds: int | None) -> Message:
    """Return the message in `data`, which came from `sender` with `fds` descriptors; None: as many as it needs.

    Raises ProtocolError for whatever `sender` may not send.
    """
    try:
        message = _decoders[sender].decode(data)
    except _NOT_A_MESSAGE as error:
        raise ProtocolError(f"the {sender.value} may not send these {len(data)} bytes: {error}") from error
    require_fd_count(message, fds, fd_count(message))
    return message
