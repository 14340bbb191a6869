"""Queues with a name, in POSIX shared memory: for foreign programs that this one trusts. Never for the driver.

The name is all that a peer needs: the memory ends with a record (`forms.to_trailer`) that says where everything lies.
The record's magic number is published last, so what a creator left half-made is never taken for a queue. Names stay
until `remove_named`, also when all their users are gone. Left out: the promise that no peer can make us die by SIGBUS
(such memory cannot be sealed), and any knowledge of who is attached or alive. docs/c has the same in C.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nnfmq import posix_shm
from nnfmq.hal.errors import InvalidArgument, NnfmqError
from nnfmq.memory import Memory
from nnfmq.queue import core, descriptor_formats, layout
from nnfmq.queue.event_flag import EventFlag
from nnfmq.queue.layout import SYNCHRONIZED, MQDescriptor
from nnfmq.queue.message_queue import MessageQueue, Overflow

if TYPE_CHECKING:
    from nnfmq.queue.peer_death import PeerDeathFlag


def create_named(
    name: str, quantum: int, count: int, *, flavor: int = SYNCHRONIZED, overflow: Overflow = Overflow.SKIP_ALL,
    using: core.Core = core.active,
) -> MessageQueue:  # fmt: skip
    """Create an empty queue of `count` records of `quantum` bytes under `name`, which begins with a slash.

    Raises InvalidArgument where the name is taken or the sizes are impossible, ResourceExhaustedTransient where
    /dev/shm has no room; then nothing is left there.
    """
    place = layout.compute_named_layout(quantum, count)
    descriptor = layout.to_descriptor(place, flavor)
    memory = posix_shm.create(name, place.region_bytes)
    try:
        queue = MessageQueue.attach(
            descriptor, memory, flavor=flavor, reset_pointers=False, overflow=overflow, using=using
        )
        try:
            _publish(memory.view, descriptor_formats.to_trailer(descriptor), using)
        except BaseException:
            queue.close()
            raise
    except BaseException:
        posix_shm.unlink(name)
        raise
    return queue


def open_named(
    name: str, *, quantum: int | None = None, overflow: Overflow = Overflow.SKIP_ALL,
    peer_death: PeerDeathFlag | None = None, using: core.Core = core.active,
) -> MessageQueue:  # fmt: skip
    """Attach to the queue that somebody created under `name`; its counters stay as they are, its flavour is its own.

    An unsynchronized queue that may only be read is mapped so. Raises InvalidArgument where there is none or its
    creator has not finished it, PermissionError, and QueueCorrupted where its record is impossible or its records are
    not of `quantum` bytes.
    """
    size_bytes, descriptor = _described(name)  # before anything is mapped: it may be anybody's memory
    memory = posix_shm.open_existing(name)
    try:
        _check_mapping(name, memory, size_bytes, descriptor)
    except BaseException:
        memory.close()
        raise
    return MessageQueue.attach(
        descriptor, memory, flavor=descriptor.flags, reset_pointers=False, overflow=overflow, peer_death=peer_death,
        quantum=quantum, using=using,
    )  # fmt: skip


def remove_named(name: str) -> None:
    """Remove the name. Who is attached stays so; the memory goes with the last of them. Raises as `memory.unlink`."""
    posix_shm.unlink(name)


def named_queues() -> list[str]:
    """Return the names of all queues that this user may read, sorted."""
    return [name for name in posix_shm.names() if _is_queue(name)]


def _publish(view: memoryview, record: bytes, using: core.Core) -> None:
    at = layout.trailer_offset(len(view))
    view[at + 4 : at + len(record)] = record[4:]
    # The core's read-modify-write orders this after every store before it, which plain Python cannot on Arm.
    with EventFlag.over(view, at, using=using) as magic:
        magic.wake(descriptor_formats.TRAILER_MAGIC)


def _described(name: str) -> tuple[int, MQDescriptor]:
    """Return the size of the memory and what its record says, which was checked."""
    size_bytes, end = posix_shm.read_end(name, layout.TRAILER_BYTES)
    if size_bytes == 0:
        raise InvalidArgument(f"shared memory {name} has no bytes: its creator is at work, or ended there")
    at = layout.trailer_offset(size_bytes)
    if at < 0 or len(end) < layout.TRAILER_BYTES:
        raise InvalidArgument(f"{name} is no queue of nnfmq: {size_bytes} bytes have no room for its record")
    magic = int.from_bytes(end[:4], "little")
    if (
        magic != descriptor_formats.TRAILER_MAGIC and magic & ~descriptor_formats.TRAILER_MAGIC == 0
    ):  # without libatomic it comes bit by bit
        raise InvalidArgument(
            f"{name} is no queue of nnfmq, or not ready: its creator is at work, or ended there "
            f"(then `nnfmq queue remove {name}`)"
        )
    descriptor = descriptor_formats.from_trailer(end)
    layout.resolve(descriptor, at, flavor=descriptor.flags)  # all parts lie before the record
    return size_bytes, descriptor


def _check_mapping(name: str, memory: Memory, size_bytes: int, descriptor: MQDescriptor) -> None:
    if memory.size_bytes != size_bytes:
        raise InvalidArgument(f"{name} has {memory.size_bytes} bytes and had {size_bytes} before: somebody changes it")
    if descriptor.flags == SYNCHRONIZED and not memory.is_writable:
        raise InvalidArgument(f"{name} may only be read by this user: both sides of a synchronized queue write")


def _is_queue(name: str) -> bool:
    try:
        _described(name)
    except (NnfmqError, OSError):
        return False
    return True
