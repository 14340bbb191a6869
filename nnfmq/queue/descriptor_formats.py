"""Encodings of a queue's descriptor: HIDL bytes, AIDL fields, JSON, and the trailer of a named queue.

All of them encode an `MQDescriptor`. HIDL has unsigned fields in a C structure, AIDL signed ones with names, so a value
may be valid in HIDL and negative in AIDL; the conversion rejects it, as libfmq does. JSON is the AIDL fields as text.
File descriptors are passed beside each encoding, and appear in it only as indices.

The functions check that a value can be decoded; `layout.resolve` checks that the descriptor is possible. All errors are
QueueCorrupted, because the bytes come from a peer.

    HIDL, 32 bytes                                        then, for each grantor, 24 bytes
    0       8      12   13    16      24      28          0      4        8       12   16
    +-------+------+----+-----+-------+-------+-------+   +------+--------+-------+----+--------+
    | 0     | count| 0  |     | 0     |quantum| flags |   | 0    |fd index| offset|    | extent |
    +-------+------+----+-----+-------+-------+-------+   +------+--------+-------+----+--------+
    pointer   u32   u8        pointer   u32     u32         u32     u32      u32         u64

    Trailer of a named queue, 128 bytes. It has offset and extent of read counter, write counter, ring and event flag
    word (extent 0: none), all in the same memory. The magic number is stored last, after everything else.
    0       4        8        12        16      24      32      40                      88        128
    +-------+--------+--------+---------+-------+-------+-------+--- .. three more .. ---+---------+
    | magic | version| flavor | quantum | count | offset| extent|                        | 0       |
    +-------+--------+--------+---------+-------+-------+-------+------------------------+---------+
      u32     u32      u32      u32       u64     u64     u64
"""

from __future__ import annotations

import struct
from typing import Any, TypedDict

from nnfmq.hal.errors import QueueCorrupted
from nnfmq.queue.layout import SYNCHRONIZED, TRAILER_BYTES, UNSYNCHRONIZED, Grantor, MQDescriptor

GRANTORS_MAX = 16  # of which 4 are used

HIDL_HEAD = struct.Struct("<QIB3xQII")  # the pointers are meaningless in another process; they are 0 here
HIDL_GRANTOR = struct.Struct("<III4xQ")  # flags (always 0), fd index, offset, extent

TRAILER = struct.Struct(f"<IIIIQ8Q{TRAILER_BYTES - 88}x")
TRAILER_MAGIC = int.from_bytes(b"nfmq", "little")
TRAILER_VERSION = 1

_U32, _U64 = 2**32 - 1, 2**64 - 1
_INT32, _INT64 = 2**31 - 1, 2**63 - 1


class AidlGrantor(TypedDict):
    """AIDL's GrantorDescriptor: int32, int32, int64."""

    fdIndex: int
    offset: int
    extent: int


class AidlMQDescriptor(TypedDict):
    """AIDL's MQDescriptor without its handle: the fds are passed beside it."""

    grantors: list[AidlGrantor]
    quantum: int
    flags: int


# ---- HIDL ----


def to_hidl(descriptor: MQDescriptor) -> bytes:
    """Return the HIDL encoding.

    Raises:
        QueueCorrupted: If a value does not fit into its field.
    """
    _check_descriptor(descriptor, _U32, _U64)
    head = HIDL_HEAD.pack(0, len(descriptor.grantors), 0, 0, descriptor.quantum, descriptor.flags)
    grantors = (HIDL_GRANTOR.pack(0, g.fd_index, g.offset, g.extent) for g in descriptor.grantors)
    return head + b"".join(grantors)


def from_hidl(data: bytes) -> MQDescriptor:
    """Decode HIDL bytes.

    Raises:
        QueueCorrupted: If the size is wrong, or there are too many grantors.
    """
    if len(data) < HIDL_HEAD.size:
        raise QueueCorrupted(f"queue descriptor: {len(data)} bytes; a HIDL descriptor has at least {HIDL_HEAD.size}")
    _, count, _, _, quantum, flags = HIDL_HEAD.unpack_from(data)
    wanted = HIDL_HEAD.size + count * HIDL_GRANTOR.size
    if count > GRANTORS_MAX or len(data) != wanted:
        raise QueueCorrupted(
            f"queue descriptor: {len(data)} bytes; {count} grantors need {wanted}, {GRANTORS_MAX} are allowed"
        )
    parts = HIDL_GRANTOR.iter_unpack(data[HIDL_HEAD.size :])
    grantors = tuple(Grantor(fd_index, offset, extent) for _, fd_index, offset, extent in parts)
    return MQDescriptor(grantors, quantum, flags)


# ---- AIDL ----


def to_aidl(descriptor: MQDescriptor) -> AidlMQDescriptor:
    """Return the AIDL encoding.

    Raises:
        QueueCorrupted: If a value would be negative in its signed field.
    """
    _check_descriptor(descriptor, _INT32, _INT64)
    grantors = [AidlGrantor(fdIndex=g.fd_index, offset=g.offset, extent=g.extent) for g in descriptor.grantors]
    return AidlMQDescriptor(grantors=grantors, quantum=descriptor.quantum, flags=descriptor.flags)


def from_aidl(data: Any) -> MQDescriptor:
    """Decode AIDL fields.

    Raises:
        QueueCorrupted: If a field is negative, too large, missing, unknown, or not an integer.
    """
    _check_fields("descriptor", data, AidlMQDescriptor)
    if not isinstance(data["grantors"], list | tuple):
        raise QueueCorrupted(f"queue descriptor: grantors are {data['grantors']!r:.40}; a list is needed")
    for grantor in data["grantors"]:
        _check_fields("grantor", grantor, AidlGrantor)
    grantors = tuple(Grantor(g["fdIndex"], g["offset"], g["extent"]) for g in data["grantors"])
    descriptor = MQDescriptor(grantors, data["quantum"], data["flags"])
    _check_descriptor(descriptor, _INT32, _INT64)
    return descriptor


def hidl_to_aidl(data: bytes, flavor: int) -> AidlMQDescriptor:
    """Convert from HIDL to AIDL.

    Raises:
        QueueCorrupted: If the descriptor is invalid, does not fit, or (as in libfmq) is not of `flavor`.
    """
    return to_aidl(_of_flavor(from_hidl(data), flavor))


def aidl_to_hidl(data: Any, flavor: int) -> bytes:
    """Convert from AIDL to HIDL.

    Raises:
        QueueCorrupted: If the descriptor is invalid or is not of `flavor`.
    """
    return to_hidl(_of_flavor(from_aidl(data), flavor))


# ---- JSON ----


def to_json(descriptor: MQDescriptor) -> str:
    """Return the AIDL encoding as JSON.

    Raises:
        QueueCorrupted: If a value would be negative in its signed field.
    """
    import json  # late, because it takes a millisecond to import

    return json.dumps(to_aidl(descriptor), separators=(",", ":"))


def from_json(text: str | bytes) -> MQDescriptor:
    """Decode JSON.

    Raises:
        QueueCorrupted: If the text is not JSON, or not a valid descriptor.
    """
    import json

    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise QueueCorrupted(f"queue descriptor: no JSON ({error})") from None
    return from_aidl(data)


# ---- the trailer of a named queue ----


def to_trailer(descriptor: MQDescriptor) -> bytes:
    """Return the trailer of a queue in one memory region. Its first 4 bytes, the magic number, must be stored last."""
    count = descriptor.grantors[2].extent // descriptor.quantum
    parts = [value for grantor in descriptor.grantors for value in (grantor.offset, grantor.extent)]
    parts += [0] * (8 - len(parts))
    return TRAILER.pack(TRAILER_MAGIC, TRAILER_VERSION, descriptor.flags, descriptor.quantum, count, *parts)


def from_trailer(data: bytes) -> MQDescriptor:
    """Decode a trailer.

    Raises:
        QueueCorrupted: If it has another magic number or version, or contradicts itself.
    """
    magic, version, flavor, quantum, count, *parts = TRAILER.unpack(data)
    if magic != TRAILER_MAGIC:
        raise QueueCorrupted(f"record of a named queue: begins with {magic:#x}, expected is {TRAILER_MAGIC:#x}")
    if version != TRAILER_VERSION:
        raise QueueCorrupted(f"record of a named queue: version {version}; this nnfmq reads version {TRAILER_VERSION}")
    if flavor not in (SYNCHRONIZED, UNSYNCHRONIZED):
        raise QueueCorrupted(f"record of a named queue: flavor is {flavor}; allowed are 1 and 2")
    if parts[5] != quantum * count:
        raise QueueCorrupted(f"record of a named queue: {count} records of {quantum} bytes in {parts[5]} bytes of ring")
    grantors = [Grantor(0, offset, extent) for offset, extent in zip(parts[::2], parts[1::2], strict=True)]
    return MQDescriptor(tuple(grantors if grantors[3].extent else grantors[:3]), quantum, flavor)


# ---- checks ----


def _of_flavor(descriptor: MQDescriptor, flavor: int) -> MQDescriptor:
    if descriptor.flags != flavor:
        raise QueueCorrupted(f"queue descriptor: flavor is {descriptor.flags}; expected is {flavor}")
    return descriptor


def _check_fields(what: str, data: Any, fields: type) -> None:
    wanted = set(fields.__annotations__)
    if not isinstance(data, dict) or set(data) != wanted:
        raise QueueCorrupted(f"queue descriptor: {what} is {data!r:.60}; it needs exactly {', '.join(sorted(wanted))}")


def _check_descriptor(descriptor: MQDescriptor, max_32: int, max_64: int) -> None:
    if len(descriptor.grantors) > GRANTORS_MAX:
        raise QueueCorrupted(f"queue descriptor: {len(descriptor.grantors)} grantors; at most {GRANTORS_MAX} fit")
    _check_integer("quantum", descriptor.quantum, max_32)
    _check_integer("flags", descriptor.flags, max_32)
    for i, grantor in enumerate(descriptor.grantors):
        _check_integer(f"fd index of grantor {i}", grantor.fd_index, max_32)
        _check_integer(f"offset of grantor {i}", grantor.offset, max_32)
        _check_integer(f"extent of grantor {i}", grantor.extent, max_64)


def _check_integer(name: str, value: Any, max_value: int) -> None:
    if type(value) is not int or not 0 <= value <= max_value:  # not isinstance: a bool is not an integer here
        raise QueueCorrupted(f"queue descriptor: {name} is {value!r:.40}; allowed are 0 to {max_value}")
