"""Named queues: attaching by name, rejected names and memory, and the remains of a crash."""

from __future__ import annotations

import errno
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from support.named import fresh_name

from nnfmq.base import posix_shm
from nnfmq.hal.errors import InvalidArgument, QueueCorrupted, ResourceExhaustedTransient
from nnfmq.queue import (
    SYNCHRONIZED,
    UNSYNCHRONIZED,
    Grantor,
    MessageQueue,
    MQDescriptor,
    Overflow,
    _pycore,
    create_named,
    layout,
    named_queues,
    open_named,
    remove_named,
)
from nnfmq.queue import core as cores
from nnfmq.queue.futex import KernelAtomic

# A queue of 4 records of 8 bytes as the drawings in layout.py and forms.py have it, written down by hand.
TRAILER_AT = 4096 - 128
TRAILER = (
    b"nfmq" + struct.pack("<IIIQ", 1, 1, 8, 4) + struct.pack("<8Q", 0, 8, 8, 8, 16, 32, 48, 4) + bytes(40)
)  # fmt: skip


@pytest.fixture
def name() -> Iterator[str]:
    with fresh_name() as made:
        yield made


@pytest.fixture
def keep() -> Iterator[Callable[..., MessageQueue]]:
    """Keep queues until the test is over; closes them."""
    with ExitStack() as stack:
        yield lambda queue: stack.enter_context(closing(queue))


def is_there(name: str) -> bool:
    return Path("/dev/shm", name[1:]).exists()


def forged(name: str, record: bytes, size_bytes: int = 4096) -> None:
    """Leave shared memory that ends with `record`."""
    with posix_shm.create(name, size_bytes) as memory:
        memory.view[size_bytes - len(record) :] = record


def changed(at: int, form: str, *values: int) -> bytes:
    data = bytearray(TRAILER)
    struct.pack_into(form, data, at, *values)
    return bytes(data)


# ---- attaching ----


def test_the_name_is_enough_to_attach(name: str, core_pair: tuple[cores.Core, cores.Core], keep: Any) -> None:
    writer = keep(create_named(name, 8, 4, core=core_pair[0]))
    reader = keep(open_named(name, core=core_pair[1]))
    assert (reader.quantum, reader.count, reader.flavor) == (8, 4, SYNCHRONIZED)
    assert reader.descriptor == writer.descriptor
    assert writer.send(b"12345678")
    assert reader.receive(None, 0) == b"12345678"


def test_an_unsynchronized_queue_keeps_its_flavor(name: str, core: cores.Core, keep: Any) -> None:
    writer = keep(create_named(name, 8, 4, flavor=UNSYNCHRONIZED, core=core))
    readers = [keep(open_named(name, core=core, overflow=Overflow.KEEP_HALF)) for _ in range(2)]
    assert writer.write(b"12345678")
    assert [reader.flavor for reader in readers] == [UNSYNCHRONIZED, UNSYNCHRONIZED]
    assert [reader.read(1) for reader in readers] == [b"12345678"] * 2


def test_attaching_does_not_change_the_counters(name: str, core: cores.Core, keep: Any) -> None:
    keep(create_named(name, 8, 4, core=core)).write(bytes(16))
    assert keep(open_named(name, core=core)).counters() == (16, 0)


@pytest.mark.parametrize(("quantum", "count"), [(1, 1), (24, 1024), (7, 4095), (4096, 1)])
def test_the_layout_is_libfmq_s_and_the_record_is_behind_the_stage_slots(
    name: str, quantum: int, count: int, keep: Any
) -> None:
    queue = keep(create_named(name, quantum, count))
    place = layout.compute_layout(quantum, count)
    assert queue.descriptor == layout.to_descriptor(place)
    assert queue.stats_view is not None and place.stats is not None
    assert place.stats + layout.STATS_BYTES <= queue.memory.size_bytes - 128
    queue.stats_view.release()


def test_the_record_is_as_documented(name: str, keep: Any) -> None:
    queue = keep(create_named(name, 8, 4))
    assert bytes(queue.memory.view[TRAILER_AT:]) == TRAILER


def test_a_record_written_by_hand_is_attached_to(name: str, keep: Any) -> None:
    forged(name, TRAILER)
    queue = keep(open_named(name))
    assert queue.descriptor == MQDescriptor(
        (Grantor(0, 0, 8), Grantor(0, 8, 8), Grantor(0, 16, 32), Grantor(0, 48, 4)), 8, 1
    )


def test_a_queue_without_event_flag_word_cannot_wait(name: str, keep: Any) -> None:
    forged(name, changed(80, "<Q", 0))
    queue = keep(open_named(name))
    assert queue.event_flag is None
    assert queue.write(bytes(8))


def test_records_of_another_size_than_expected_are_rejected(name: str, keep: Any) -> None:
    keep(create_named(name, 8, 4))
    with pytest.raises(QueueCorrupted, match="quantum is 8, expected are 24"):
        open_named(name, quantum=24)


# ---- rejected names and memory ----


@pytest.mark.parametrize("bad", ["frames", "/", "/a/b", "/.", "/..", "", "/" + "x" * 255, "/a\0b"])
def test_a_name_is_a_slash_and_a_component(bad: str) -> None:
    with pytest.raises(InvalidArgument, match="such as /frames"):
        create_named(bad, 8, 4)
    with pytest.raises(InvalidArgument, match="such as /frames"):
        open_named(bad)


def test_the_longest_name_is_accepted(keep: Any) -> None:
    with fresh_name() as name:
        name = name.ljust(255, "x")
        keep(create_named(name, 8, 4))
        assert keep(open_named(name)).count == 4
        remove_named(name)


def test_a_name_in_use_is_rejected_and_its_queue_is_unchanged(name: str, keep: Any) -> None:
    keep(create_named(name, 8, 4)).write(b"12345678")
    with pytest.raises(InvalidArgument, match=r"already.*queue remove"):
        create_named(name, 16, 2)
    assert keep(open_named(name)).read(1) == b"12345678"


@pytest.mark.parametrize("call", [open_named, remove_named])
def test_the_error_for_a_missing_queue_contains_the_remedy(name: str, call: Callable[[str], object]) -> None:
    with pytest.raises(InvalidArgument, match=r"there is no.*queue list.*queue create"):
        call(name)


@pytest.mark.parametrize(("quantum", "count", "flavor"), [(0, 1, 1), (8, 0, 1), (1, 2**31, 1), (8, 4, 3)])
def test_a_creation_that_is_rejected_leaves_no_name(name: str, quantum: int, count: int, flavor: int) -> None:
    with pytest.raises(InvalidArgument):
        create_named(name, quantum, count, flavor=flavor)
    assert not is_there(name)


def test_a_creation_without_space_leaves_no_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ResourceExhaustedTransient, match="not enough memory for 4096 bytes"):
        create_named(name, 8, 4)
    assert not is_there(name)


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        pytest.param(changed(0, "<I", 0x12345678), "begins with 0x12345678", id="magic"),
        pytest.param(changed(4, "<I", 2), "version 2", id="version"),
        pytest.param(changed(8, "<I", 3), "flavor is 3", id="flavor"),
        pytest.param(changed(12, "<I", 0), "0 bytes in 32", id="quantum"),
        pytest.param(changed(16, "<Q", 5), "5 records of 8 bytes in 32", id="count"),
        pytest.param(changed(16, "<Q", 2**64 - 1), "in 32 bytes", id="count huge"),
        pytest.param(changed(24, "<Q", 8), "overlaps", id="read counter upon write counter"),
        pytest.param(changed(40, "<Q", 12), "multiple of 8", id="write counter misaligned"),
        pytest.param(changed(48, "<Q", 4), "extent 4", id="write counter short"),
        pytest.param(changed(56, "<Q", 2**63), "ring at offset", id="ring far away"),
        pytest.param(changed(56, "<Q", TRAILER_AT - 24), "ring ends at byte", id="ring upon record"),
        pytest.param(changed(72, "<Q", TRAILER_AT), "event flag word ends", id="event flag word upon record"),
        pytest.param(changed(72, "<Q", 16), "overlaps", id="event flag word upon ring"),
    ],
)
def test_an_impossible_record_is_rejected(name: str, record: bytes, complaint: str) -> None:
    forged(name, record)
    with pytest.raises(QueueCorrupted, match=complaint):
        open_named(name)
    assert name not in named_queues()


@pytest.mark.parametrize("begin", [b"\0\0\0\0", b"nf\0\0", b"\0\0\0q"])
def test_a_record_with_a_partial_magic_number_is_not_ready(name: str, begin: bytes) -> None:
    forged(name, begin + TRAILER[4:])
    with pytest.raises(InvalidArgument, match="not ready"):
        open_named(name)


def test_the_magic_number_is_written_atomically_without_libatomic_too(
    name: str, keep: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_pycore, "_atomics", KernelAtomic())
    queue = keep(create_named(name, 8, 4, core=cores.CORES.load("python")))
    assert bytes(queue.memory.view[TRAILER_AT:]) == TRAILER


@pytest.mark.parametrize("size_bytes", [1, 127, 4095])
def test_memory_too_small_for_a_record_is_no_queue(name: str, size_bytes: int) -> None:
    posix_shm.create(name, size_bytes).close()
    with pytest.raises(InvalidArgument, match="no queue of nnfmq"):
        open_named(name)


def without_permission(monkeypatch: pytest.MonkeyPatch, *rejected: bool) -> None:
    """Make the system reject opening shared memory: for writing (False), for reading (True), or both."""
    import posix_ipc

    opened = posix_ipc.SharedMemory

    def open_or_reject(name: str, flags: int, mode: int, read_only: bool) -> Any:
        if read_only in rejected:
            raise posix_ipc.PermissionsError("No permission")
        return opened(name, flags, mode=mode, read_only=read_only)

    monkeypatch.setattr(posix_ipc, "SharedMemory", open_or_reject)


def test_a_permission_error_names_the_file(name: str, keep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(create_named(name, 8, 4))
    without_permission(monkeypatch, False, True)
    with pytest.raises(PermissionError, match=f"no permission.*/dev/shm{name}"):
        open_named(name)


def test_a_synchronized_queue_that_may_only_be_read_is_rejected(
    name: str, keep: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(create_named(name, 8, 4))
    without_permission(monkeypatch, False)
    with pytest.raises(InvalidArgument, match="both sides of a synchronized queue write"):
        open_named(name)


def test_an_unsynchronized_queue_that_may_only_be_read_is_read(
    name: str, core: cores.Core, keep: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(create_named(name, 8, 4, flavor=UNSYNCHRONIZED, core=core)).write(b"12345678")
    without_permission(monkeypatch, False)
    reader = keep(open_named(name, core=core))
    assert reader.read(1) == b"12345678"
    with pytest.raises(InvalidArgument, match="for reading only"):
        reader.write(bytes(8))


def test_shared_memory_is_accessible_to_its_user_only(name: str, keep: Any) -> None:
    keep(create_named(name, 8, 4))
    assert Path("/dev/shm", name[1:]).stat().st_mode & 0o777 == 0o600


# ---- names and their end ----


def test_only_queues_are_listed(name: str, keep: Any) -> None:
    keep(create_named(name, 8, 4))
    posix_shm.create(f"{name}-other", 4096).close()
    mine = [found for found in named_queues() if found.startswith(name)]
    posix_shm.unlink(f"{name}-other")
    assert mine == [name]


def test_an_attached_process_keeps_a_removed_queue(name: str, core: cores.Core, keep: Any) -> None:
    writer, reader = keep(create_named(name, 8, 4, core=core)), keep(open_named(name, core=core))
    remove_named(name)
    assert not is_there(name)
    assert writer.send(b"12345678")
    assert reader.receive(None, 0) == b"12345678"


def test_a_removed_name_can_be_used_again(name: str, keep: Any) -> None:
    keep(create_named(name, 8, 4))
    remove_named(name)
    keep(create_named(name, 16, 2))
    assert keep(open_named(name)).quantum == 16


def test_closing_leaves_the_name_and_the_records(name: str, keep: Any) -> None:
    with create_named(name, 8, 4) as queue:
        queue.write(b"12345678")
    assert keep(open_named(name)).read(1) == b"12345678"


CREATOR = """
import sys
from nnfmq.queue import create_named
from nnfmq.queue import named_queue
from nnfmq.base.memory import Memory

def wait_here(*_, **__):
    print("here", flush=True)
    sys.stdin.read()

if sys.argv[2] == "before its pages":
    import os
    os.posix_fallocate = wait_here
if sys.argv[2] == "before its trailer":
    named_queue._publish = wait_here
if sys.argv[2] == "before the magic number":
    named_queue.EventFlag.from_buffer = wait_here
create_named(sys.argv[1], 8, 4)
"""


@pytest.mark.parametrize("where", ["before its pages", "before its trailer", "before the magic number"])
def test_memory_left_by_a_killed_creator_is_no_queue_and_can_be_removed(name: str, where: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CREATOR, name, where], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as creator:
        assert creator.stdout is not None
        assert creator.stdout.readline() == "here\n"
        creator.send_signal(signal.SIGKILL)
    with pytest.raises(InvalidArgument, match="at work, or ended there"):
        open_named(name)
    assert name not in named_queues()
    remove_named(name)
    assert not is_there(name)


def test_listing_queues_maps_no_memory(name: str) -> None:
    path = Path("/dev/shm", name[1:])
    with path.open("xb") as file:
        file.truncate(1 << 20)  # all hole: a mapping's access would allocate it, or raise SIGBUS if no memory is left
    try:
        assert name not in named_queues()
        with pytest.raises(InvalidArgument, match="no queue"):
            open_named(name)
        assert path.stat().st_blocks == 0
    finally:
        path.unlink()
