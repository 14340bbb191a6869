"""The forms in which a queue's descriptor travels: HIDL's bytes, AIDL's fields, JSON, and a named queue's record.

`MQDescriptor` is what all of them say. HIDL has unsigned fields in a C structure, AIDL signed ones with names; so a
value can be legal in one and negative in the other, and is refused there, as libfmq refuses it. JSON is the AIDL form
as text. File descriptors travel beside each of them and appear only as indices. Whether what a descriptor says is
possible, is `layout.resolve`'s question. Every complaint is a QueueCorrupted: these bytes come from a peer.
FMQ_FACTS 1.2 and 1.10.

    HIDL, 32 bytes                                        then, for each grantor, 24 bytes
    0       8      12   13    16      24      28          0      4        8       12   16
    +-------+------+----+-----+-------+-------+-------+   +------+--------+-------+----+--------+
    | 0     | count| 0  |     | 0     |quantum| flags |   | 0    |fd index| offset|    | extent |
    +-------+------+----+-----+-------+-------+-------+   +------+--------+-------+----+--------+
    pointer   u32   u8        pointer   u32     u32         u32     u32      u32         u64

    Record of a named queue, 128 bytes: offset and extent of read counter, write counter, ring and event word (extent
    0: it has none), all in the one memory; the magic number is written last, when everything else is there
    0       4        8        12        16      24      32      40                      88        128
    +-------+--------+--------+---------+-------+-------+-------+--- .. three more .. ---+---------+
    | magic | version| flavour| quantum | count | offset| extent|                        | 0       |
    +-------+--------+--------+---------+-------+-------+-------+------------------------+---------+
      u32     u32      u32      u32       u64     u64     u64
"""

from __future__ import annotations

import struct
from typing import Any, TypedDict

from nnfmq.hal.errors import QueueCorrupted
from nnfmq.queue.layout import SYNCHRONIZED, TRAILER_BYTES, UNSYNCHRONIZED, Grantor, MQDescriptor

GRANTORS_MAX = 16  # 4 mean something

HIDL_HEAD = struct.Struct("<QIB3xQII")  # the pointers mean nothing elsewhere; they are 0 here
HIDL_GRANTOR = struct.Struct("<III4xQ")  # flags (always 0), fd index, offset, extent

TRAILER = struct.Struct(f"<IIIIQ8Q{TRAILER_BYTES - 88}x")
TRAILER_MAGIC = int.from_bytes(b"nfmq", "little")
TRAILER_VERSION = 1

_U32, _U64 = 2**32 - 1, 2**64 - 1
_INT32, _INT64 = 2**31 - 1, 2**63 - 1


class AidlGrantor(TypedDict):
    """GrantorDescriptor of AIDL: int32, int32, int64."""

    fdIndex: int
    offset: int
    extent: int


class AidlMQDescriptor(TypedDict):
    """MQDescriptor of AIDL, without its handle: the fds travel beside it."""

    grantors: list[AidlGrantor]
    quantum: int
    flags: int


# ---- HIDL ----


def to_hidl(descriptor: MQDescriptor) -> bytes:
    """Return the HIDL form. Raises QueueCorrupted for what its fields cannot hold."""
    _check_descriptor(descriptor, _U32, _U64)
    head = HIDL_HEAD.pack(0, len(descriptor.grantors), 0, 0, descriptor.quantum, descriptor.flags)
    grantors = (HIDL_GRANTOR.pack(0, g.fd_index, g.offset, g.extent) for g in descriptor.grantors)
    return head + b"".join(grantors)


def from_hidl(data: bytes) -> MQDescriptor:
    """Read the HIDL form. Raises QueueCorrupted where the bytes are none."""
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
    """Return the AIDL form. Raises QueueCorrupted for what would be negative in its signed fields."""
    _check_descriptor(descriptor, _INT32, _INT64)
    grantors = [AidlGrantor(fdIndex=g.fd_index, offset=g.offset, extent=g.extent) for g in descriptor.grantors]
    return AidlMQDescriptor(grantors=grantors, quantum=descriptor.quantum, flags=descriptor.flags)


def from_aidl(data: Any) -> MQDescriptor:
    """Read the AIDL form. Raises QueueCorrupted where a field is negative, too large, missing, unknown or no number."""
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
    """Convert; QueueCorrupted also where the descriptor is not of `flavor`, as in libfmq."""
    return to_aidl(_of_flavor(from_hidl(data), flavor))


def aidl_to_hidl(data: Any, flavor: int) -> bytes:
    """Convert; QueueCorrupted also where the descriptor is not of `flavor`."""
    return to_hidl(_of_flavor(from_aidl(data), flavor))


# ---- JSON ----


def to_json(descriptor: MQDescriptor) -> str:
    """Return the AIDL form as JSON."""
    import json  # costs a millisecond that `import nnfmq` need not pay

    return json.dumps(to_aidl(descriptor), separators=(",", ":"))


def from_json(text: str | bytes) -> MQDescriptor:
    """Read the AIDL form from JSON. Raises QueueCorrupted where it is none."""
    import json

    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise QueueCorrupted(f"queue descriptor: no JSON ({error})") from None
    return from_aidl(data)


# ---- the record of a named queue ----


def to_trailer(descriptor: MQDescriptor) -> bytes:
    """Return the record of a queue in one memory. Its first 4 bytes, the magic number, are to be written last."""
    count = descriptor.grantors[2].extent // descriptor.quantum
    parts = [number for grantor in descriptor.grantors for number in (grantor.offset, grantor.extent)]
    parts += [0] * (8 - len(parts))
    return TRAILER.pack(TRAILER_MAGIC, TRAILER_VERSION, descriptor.flags, descriptor.quantum, count, *parts)


def from_trailer(data: bytes) -> MQDescriptor:
    """Read a record. Raises QueueCorrupted where it is none, of another version, or contradicts itself."""
    magic, version, flavor, quantum, count, *parts = TRAILER.unpack(data)
    if magic != TRAILER_MAGIC:
        raise QueueCorrupted(f"record of a named queue: begins with {magic:#x}, expected is {TRAILER_MAGIC:#x}")
    if version != TRAILER_VERSION:
        raise QueueCorrupted(f"record of a named queue: version {version}; this nnfmq reads version {TRAILER_VERSION}")
    if flavor not in (SYNCHRONIZED, UNSYNCHRONIZED):
        raise QueueCorrupted(f"record of a named queue: flavour is {flavor}; allowed are 1 and 2")
    if parts[5] != quantum * count:
        raise QueueCorrupted(f"record of a named queue: {count} records of {quantum} bytes in {parts[5]} bytes of ring")
    grantors = [Grantor(0, offset, extent) for offset, extent in zip(parts[::2], parts[1::2], strict=True)]
    return MQDescriptor(tuple(grantors if grantors[3].extent else grantors[:3]), quantum, flavor)


# ---- checks ----


def _of_flavor(descriptor: MQDescriptor, flavor: int) -> MQDescriptor:
    if descriptor.flags != flavor:
        raise QueueCorrupted(f"queue descriptor: flavour is {descriptor.flags}; expected is {flavor}")
    return descriptor


def _check_fields(what: str, data: Any, form: type) -> None:
    wanted = set(form.__annotations__)
    if not isinstance(data, dict) or set(data) != wanted:
        raise QueueCorrupted(f"queue descriptor: {what} is {data!r:.60}; it needs exactly {', '.join(sorted(wanted))}")


def _check_descriptor(descriptor: MQDescriptor, small: int, large: int) -> None:
    if len(descriptor.grantors) > GRANTORS_MAX:
        raise QueueCorrupted(f"queue descriptor: {len(descriptor.grantors)} grantors; at most {GRANTORS_MAX} fit")
    _check_number("quantum", descriptor.quantum, small)
    _check_number("flags", descriptor.flags, small)
    for i, grantor in enumerate(descriptor.grantors):
        _check_number(f"fd index of grantor {i}", grantor.fd_index, small)
        _check_number(f"offset of grantor {i}", grantor.offset, small)
        _check_number(f"extent of grantor {i}", grantor.extent, large)


def _check_number(name: str, value: Any, most: int) -> None:
    if type(value) is not int or not 0 <= value <= most:  # a bool is no number here
        raise QueueCorrupted(f"queue descriptor: {name} is {value!r:.40}; allowed are 0 to {most}")
