"""Messages between workers and their supervisor about shared programs, and their encoding.

    sender      message      fields             file descriptor   meaning
    worker      Lookup       ref_id, name       -                 request the entry; replied to with Found or NotFound
    supervisor  Found        ref_id             the memory        the worker now has a reference to the entry
    supervisor  NotFound     ref_id             -                 there is no such entry
    worker      Publish      ref_id, name       the memory        add an entry; not replied to
    worker      Release      ref_id             -                 drop the reference
    worker      Invalidate   ref_id             -                 the content does not match the name: remove the entry

The name of an entry is a SHA-256 digest in hexadecimal. A `ref_id` identifies one reference of one worker to an entry;
the worker chooses it and uses it once. Both ends are one build of nnfmq, so messages have no version.
`shared_cache_server` (supervisor) and `shared_cache_client` (worker) implement the two ends.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from nnfmq.serialize.control_protocol import decode_with, require_fd_count

__all__ = [
    "Found",
    "Invalidate",
    "Lookup",
    "NotFound",
    "Publish",
    "Release",
    "Sender",
    "SharedCacheMessage",
    "decode",
    "encode",
    "fd_count",
]

EntryName: TypeAlias = Annotated[str, Meta(pattern=r"^[0-9a-f]*\Z", min_length=64, max_length=64)]
RefId: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Sender(Enum):
    """The two ends of a connection."""

    WORKER = "worker"
    SUPERVISOR = "supervisor"


class SharedCacheMessage(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """Base class of the messages."""

    ref_id: RefId


class Lookup(SharedCacheMessage, frozen=True):
    """Request for an entry. The reply is Found or NotFound with the same `ref_id`."""

    name: EntryName


class Publish(SharedCacheMessage, frozen=True):
    """A new entry, with an fd of memory that is sealed against writing and resizing."""

    name: EntryName


class Release(SharedCacheMessage, frozen=True):
    """The worker drops a reference. An unknown `ref_id` is ignored: its Publish or Lookup may have been rejected."""


class Invalidate(SharedCacheMessage, frozen=True):
    """The memory of a reference does not contain the entry; the worker drops the reference as well."""


class Found(SharedCacheMessage, frozen=True):
    """Reply to Lookup, with an fd of the entry's memory."""


class NotFound(SharedCacheMessage, frozen=True):
    """Reply to Lookup: there is no such entry, or the worker already has the maximum number of references."""


_FD_COUNTS: dict[type[SharedCacheMessage], int] = {Publish: 1, Found: 1}
_encoder = msgspec.msgpack.Encoder()
_decoders: dict[Sender, msgspec.msgpack.Decoder[SharedCacheMessage]] = {
    Sender.WORKER: msgspec.msgpack.Decoder(Lookup | Publish | Release | Invalidate),
    Sender.SUPERVISOR: msgspec.msgpack.Decoder(Found | NotFound),
}


def fd_count(message: SharedCacheMessage) -> int:
    """Return the number of file descriptors that accompany `message`."""
    return _FD_COUNTS.get(type(message), 0)


def encode(message: SharedCacheMessage) -> bytes:
    """Return `message` in MessagePack."""
    return _encoder.encode(message)


def decode(data: bytes | bytearray, *, sender: Sender, fds: int | None) -> SharedCacheMessage:
    """Decode a message that `sender` sent with `fds` file descriptors.

    Pass None for `fds` to skip the check of their number, for a frame some of whose fds could not be received.

    Raises:
        ProtocolError: If `data` is not a message that `sender` may send, or the number of fds is wrong.
    """
    message = decode_with(_decoders[sender], data, sender.value)
    require_fd_count(message, fds, fd_count(message))
    return message
