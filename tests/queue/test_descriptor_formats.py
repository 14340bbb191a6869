"""Descriptors as they travel: HIDL's bytes, AIDL's fields, JSON; and queues handed over as fds on a channel."""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from nnfmq.base.channel import Channel
from nnfmq.base.memory import Memory
from nnfmq.hal.errors import InvalidArgument, QueueCorrupted
from nnfmq.queue import SYNCHRONIZED, UNSYNCHRONIZED, Grantor, MessageQueue, MQDescriptor, descriptor_formats
from nnfmq.queue.core import Core

MakeQueue = Callable[..., MessageQueue]

DESCRIPTOR = MQDescriptor((Grantor(0, 0, 8), Grantor(0, 8, 8), Grantor(1, 0, 24576), Grantor(0, 16, 4)), 24, 1)

# Written by hand from the offsets of libfmq's HIDL MQDescriptor: vector (pointer, size, owner), handle, quantum, flags;
# then the grantors with flags at 0, fdIndex at 4, offset at 8, extent at 16.
HIDL = bytes.fromhex(
    "0000000000000000 04000000 00 000000 0000000000000000 18000000 01000000"
    "00000000 00000000 00000000 00000000 0800000000000000"
    "00000000 00000000 08000000 00000000 0800000000000000"
    "00000000 01000000 00000000 00000000 0060000000000000"
    "00000000 00000000 10000000 00000000 0400000000000000"
)
AIDL: dict[str, Any] = {
    "grantors": [
        {"fdIndex": 0, "offset": 0, "extent": 8}, {"fdIndex": 0, "offset": 8, "extent": 8},
        {"fdIndex": 1, "offset": 0, "extent": 24576}, {"fdIndex": 0, "offset": 16, "extent": 4},
    ],
    "quantum": 24,
    "flags": 1,
}  # fmt: skip


# ---- HIDL ----


def test_the_hidl_form_has_libfmq_s_layout() -> None:
    assert descriptor_formats.to_hidl(DESCRIPTOR) == HIDL


def test_the_hidl_form_is_read_back() -> None:
    assert descriptor_formats.from_hidl(HIDL) == DESCRIPTOR


def test_pointers_and_flags_of_another_process_are_ignored() -> None:
    data = bytearray(HIDL)
    data[0:8] = data[16:24] = b"\xff" * 8
    data[12], data[32] = 1, 9
    assert descriptor_formats.from_hidl(bytes(data)) == DESCRIPTOR


@pytest.mark.parametrize("length", [*range(len(HIDL)), len(HIDL) + 1, len(HIDL) + 24])
def test_a_hidl_form_that_is_cut_short_or_too_long_is_rejected(length: int) -> None:
    with pytest.raises(QueueCorrupted, match="bytes"):
        descriptor_formats.from_hidl((HIDL + bytes(24))[:length])


@pytest.mark.parametrize("count", [17, 2**32 - 1])
def test_too_many_grantors_are_rejected(count: int) -> None:
    with pytest.raises(QueueCorrupted, match="grantors"):
        descriptor_formats.from_hidl(struct.pack("<QIB3xQII", 0, count, 0, 0, 24, 1) + bytes(24 * 17))


@pytest.mark.parametrize(
    "descriptor",
    [
        replace(DESCRIPTOR, quantum=-1), replace(DESCRIPTOR, quantum=2**32), replace(DESCRIPTOR, flags=2**32),
        replace(DESCRIPTOR, grantors=(Grantor(-1, 0, 8),)), replace(DESCRIPTOR, grantors=(Grantor(0, 2**32, 8),)),
        replace(DESCRIPTOR, grantors=(Grantor(0, 0, 2**64),)), replace(DESCRIPTOR, grantors=(Grantor(0, 0, 8),) * 17),
    ],
)  # fmt: skip
def test_a_descriptor_that_hidl_cannot_express_is_rejected(descriptor: MQDescriptor) -> None:
    with pytest.raises(QueueCorrupted):
        descriptor_formats.to_hidl(descriptor)


# ---- AIDL ----


def test_the_aidl_form_has_the_parcelable_s_fields() -> None:
    assert descriptor_formats.to_aidl(DESCRIPTOR) == AIDL


def test_the_aidl_form_is_read_back() -> None:
    assert descriptor_formats.from_aidl(AIDL) == DESCRIPTOR


def changed(path: tuple[str | int, ...], value: Any) -> Any:
    """Return the AIDL form with one place changed."""
    data = json.loads(json.dumps(AIDL))
    place = data
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return data


@pytest.mark.parametrize("path", [("quantum",), ("flags",), *(("grantors", 2, f) for f in AIDL["grantors"][0])])
@pytest.mark.parametrize("value", [-1, -10, -(2**63), 2**63, 1.0, "8", None, True, [8]])
def test_an_aidl_field_that_is_negative_too_large_or_no_number_is_rejected(
    path: tuple[str | int, ...], value: Any
) -> None:
    with pytest.raises(QueueCorrupted, match="allowed are 0 to"):
        descriptor_formats.from_aidl(changed(path, value))


@pytest.mark.parametrize("path", [("quantum",), ("flags",), ("grantors", 0, "fdIndex"), ("grantors", 0, "offset")])
def test_int32_fields_end_at_2_to_the_31(path: tuple[str | int, ...]) -> None:
    descriptor_formats.from_aidl(changed(path, 2**31 - 1))
    with pytest.raises(QueueCorrupted, match="allowed are 0 to 2147483647"):
        descriptor_formats.from_aidl(changed(path, 2**31))


@pytest.mark.parametrize(
    "data",
    [None, [], "text", {}, {**AIDL, "more": 1}, {"grantors": [], "quantum": 1}, {**AIDL, "grantors": None},
     {**AIDL, "grantors": [[0, 0, 8]]}, {**AIDL, "grantors": [{}]}, {**AIDL, "grantors": AIDL["grantors"] * 5}],
)  # fmt: skip
def test_values_that_are_not_aidl_descriptors_are_rejected(data: Any) -> None:
    with pytest.raises(QueueCorrupted):
        descriptor_formats.from_aidl(data)


# ---- conversions ----


def test_hidl_and_aidl_convert_into_each_other() -> None:
    assert descriptor_formats.hidl_to_aidl(HIDL, SYNCHRONIZED) == AIDL
    assert descriptor_formats.aidl_to_hidl(AIDL, SYNCHRONIZED) == HIDL


def test_a_conversion_rejects_the_other_flavor() -> None:
    with pytest.raises(QueueCorrupted, match="flavor is 1; expected is 2"):
        descriptor_formats.hidl_to_aidl(HIDL, UNSYNCHRONIZED)
    with pytest.raises(QueueCorrupted, match="flavor is 1; expected is 2"):
        descriptor_formats.aidl_to_hidl(AIDL, UNSYNCHRONIZED)


@pytest.mark.parametrize(
    "descriptor",
    [
        replace(DESCRIPTOR, quantum=2**31), replace(DESCRIPTOR, grantors=(Grantor(2**31, 0, 8),)),
        replace(DESCRIPTOR, grantors=(Grantor(0, 2**32 - 8, 8),)),
        replace(DESCRIPTOR, grantors=(Grantor(0, 0, 2**63),)),
    ],
)  # fmt: skip
def test_a_conversion_rejects_numbers_that_would_become_negative(descriptor: MQDescriptor) -> None:
    hidl = descriptor_formats.to_hidl(descriptor)
    with pytest.raises(QueueCorrupted, match="allowed are 0 to"):
        descriptor_formats.hidl_to_aidl(hidl, SYNCHRONIZED)


# ---- JSON ----


def test_json_is_the_aidl_form_as_text() -> None:
    assert json.loads(descriptor_formats.to_json(DESCRIPTOR)) == AIDL
    assert descriptor_formats.from_json(json.dumps(AIDL).encode()) == DESCRIPTOR


@pytest.mark.parametrize(
    "text", ["", "{", "null", "[" * 100_000, b"\xff\xfe\xfd", '{"grantors":[],"quantum":NaN,"flags":1}', "1" * 5000]
)
def test_text_that_is_not_a_json_descriptor_is_rejected(text: str | bytes) -> None:
    with pytest.raises(QueueCorrupted):
        descriptor_formats.from_json(text)


# ---- handing over ----


@pytest.mark.parametrize("ring_fd", [False, True])
@pytest.mark.parametrize("flavor", [SYNCHRONIZED, UNSYNCHRONIZED])
def test_a_queue_goes_over_a_channel_as_json_and_fds(core: Core, flavor: int, ring_fd: bool, limit_ns: int) -> None:
    ring = Memory.create(4096) if ring_fd else None
    local, remote = Channel.pair()
    with MessageQueue.create(24, 64, flavor=flavor, ring_memory=ring, core=core) as queue, local, remote:
        local.send(queue.to_json().encode(), queue.fds())
        frame = remote.receive(limit_ns)
        assert frame is not None
        with MessageQueue.adopt(frame.detach_fds(), bytes(frame.data), flavor=flavor, core=core) as other:
            assert queue.write(b"d" * 24) and other.read(1) == b"d" * 24
            assert (other.descriptor, len(other.memories)) == (queue.descriptor, 1 + ring_fd)


def open_fds() -> list[str]:
    return os.listdir("/proc/self/fd")


@pytest.mark.parametrize("text", ["{}", json.dumps({**AIDL, "quantum": -10}), json.dumps({**AIDL, "flags": 2})])
def test_adopting_a_bad_descriptor_closes_all_fds(core: Core, text: str) -> None:
    before = open_fds()
    fds = [os.memfd_create("x", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC) for _ in range(3)]
    with pytest.raises((QueueCorrupted, InvalidArgument)):
        MessageQueue.adopt(fds, text, core=core)
    assert open_fds() == before


def test_adopting_memory_that_is_not_sealed_closes_all_fds(make_queue: MakeQueue, core: Core) -> None:
    queue = make_queue(24, 4)
    before = open_fds()
    fds = [os.dup(queue.memory.fileno()), os.memfd_create("x"), os.open("/dev/null", os.O_RDWR)]
    with pytest.raises(InvalidArgument, match=r"lacks the seals|no memfd"):
        MessageQueue.adopt(fds, queue.to_json(), core=core)
    assert open_fds() == before


def test_adopting_nothing_is_rejected(make_queue: MakeQueue, core: Core) -> None:
    with pytest.raises(InvalidArgument, match="no memory"):
        MessageQueue.adopt([], make_queue(24, 4).to_json(), core=core)


def test_a_short_second_memory_is_rejected(make_queue: MakeQueue, core: Core) -> None:
    queue = make_queue(8, 600, ring_memory=Memory.create(8192))
    memories = Memory.adopt(os.dup(queue.memory.fileno())), Memory.create(4096)
    with pytest.raises(QueueCorrupted, match="ring ends at byte 4800 of memory of 4096"):
        MessageQueue.attach(queue.descriptor, *memories, core=core)
    assert all(memory.closed for memory in memories)


def test_a_queue_with_its_ring_elsewhere_has_libfmq_s_layout(make_queue: MakeQueue) -> None:
    queue = make_queue(24, 1024, ring_memory=Memory.create(24576))
    assert queue.descriptor == DESCRIPTOR
    assert queue.send(b"r" * 24) and bytes(queue.memories[1].view[:24]) == b"r" * 24
    assert struct.unpack_from("<QQI", queue.memory.view) == (0, 24, 2)
    assert queue.stats_view is not None and queue.receive(time.monotonic_ns(), 0) == b"r" * 24


def test_closing_closes_both_memories(make_queue: MakeQueue) -> None:
    queue = make_queue(8, 4, ring_memory=Memory.create(32))
    queue.close()
    assert [memory.closed for memory in queue.memories] == [True, True]
