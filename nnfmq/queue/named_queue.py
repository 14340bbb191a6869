"""Named queues: message queues in POSIX shared memory, for programs of one user that trust each other.

A peer needs only the name. The memory ends with a trailer (`descriptor_formats.to_trailer`) that contains the layout.
Its magic number is stored last, so a queue that its creator has not finished is never attached to. A name exists until
`remove_named`, also after all its users have exited.

The driver does not use named queues, because such memory cannot be sealed: any process that may open it can make the
others die by SIGBUS. Peer death is not detected. docs/c has a reader and writer in C.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nnfmq.base import posix_shm
from nnfmq.hal.errors import InvalidArgument, NnfmqError
from nnfmq.queue import descriptor_formats, layout
from nnfmq.queue.core import ACTIVE_CORE, Core
from nnfmq.queue.event_flag import EventFlag
from nnfmq.queue.layout import SYNCHRONIZED, MQDescriptor
from nnfmq.queue.message_queue import MessageQueue, Overflow

if TYPE_CHECKING:
    from nnfmq.queue.event_flag import PeerDeathFlag


def create_named(
    name: str, quantum: int, count: int, *, flavor: int = SYNCHRONIZED, overflow: Overflow = Overflow.SKIP_ALL,
    core: Core = ACTIVE_CORE,
) -> MessageQueue:  # fmt: skip
    """Create an empty queue of `count` records of `quantum` bytes under `name`, which begins with a slash.

    If it fails, the name does not exist afterwards.

    Raises:
        InvalidArgument: If the name exists or is not valid, or a descriptor cannot express the sizes.
        ResourceExhaustedTransient: If there is not enough space in /dev/shm.
    """
    queue_layout = layout.compute_named_layout(quantum, count)
    descriptor = layout.to_descriptor(queue_layout, flavor)
    memory = posix_shm.create(name, queue_layout.region_bytes)
    try:
        queue = MessageQueue.attach(
            descriptor, memory, flavor=flavor, reset_pointers=False, overflow=overflow, core=core
        )
        try:
            _publish(memory.view, descriptor_formats.to_trailer(descriptor), core)
        except BaseException:
            queue.close()
            raise
    except BaseException:
        posix_shm.unlink(name)
        raise
    return queue


def open_named(
    name: str, *, quantum: int | None = None, overflow: Overflow = Overflow.SKIP_ALL,
    peer_death: PeerDeathFlag | None = None, core: Core = ACTIVE_CORE,
) -> MessageQueue:  # fmt: skip
    """Attach to the queue `name`, which keeps its counters and its flavor.

    An unsynchronized queue that this user may only read is mapped read-only.

    Raises:
        InvalidArgument: If there is no such queue, or its creator has not finished it.
        PermissionError: If this user may not open it.
        QueueCorrupted: If its trailer is invalid, or its records are not of `quantum` bytes.
    """
    # The trailer is validated before anything is mapped, because the name may be that of any program's memory.
    size_bytes, descriptor = _read_descriptor(name)
    memory = posix_shm.open_existing(name)
    try:
        if memory.size_bytes != size_bytes:
            raise InvalidArgument(
                f"{name} has {memory.size_bytes} bytes and had {size_bytes} before: somebody changes it"
            )
        if descriptor.flags == SYNCHRONIZED and not memory.is_writable:
            raise InvalidArgument(f"{name} may only be read by this user: both sides of a synchronized queue write")
    except BaseException:
        memory.close()
        raise
    return MessageQueue.attach(
        descriptor, memory, flavor=descriptor.flags, reset_pointers=False, overflow=overflow, peer_death=peer_death,
        quantum=quantum, core=core,
    )  # fmt: skip


def remove_named(name: str) -> None:
    """Remove a name. Processes that are attached stay so; the memory is freed after the last of them has closed it.

    Raises:
        InvalidArgument: If the name does not exist or is not valid.
        PermissionError: If it belongs to another user.
    """
    posix_shm.unlink(name)


def named_queues() -> list[str]:
    """Return the names of all queues that this user may read, sorted."""
    return [name for name in posix_shm.names() if _is_queue(name)]


def _publish(view: memoryview, trailer: bytes, core: Core) -> None:
    start = layout.trailer_offset(len(view))
    view[start + 4 : start + len(trailer)] = trailer[4:]
    # The magic number is ORed into zeroed memory by the core's atomic read-modify-write. That orders it after all
    # earlier stores, which ordinary stores in Python would not on AArch64.
    with EventFlag.from_buffer(view, start, core=core) as magic:
        magic.wake(descriptor_formats.TRAILER_MAGIC)


def _read_descriptor(name: str) -> tuple[int, MQDescriptor]:
    """Return the size of the memory, and the validated descriptor from its trailer."""
    size_bytes, trailer = posix_shm.read_end(name, layout.TRAILER_BYTES)
    if size_bytes == 0:
        raise InvalidArgument(f"shared memory {name} has no bytes: its creator is at work, or ended there")
    start = layout.trailer_offset(size_bytes)
    if start < 0 or len(trailer) < layout.TRAILER_BYTES:
        raise InvalidArgument(f"{name} is no queue of nnfmq: {size_bytes} bytes are too few for its trailer")
    magic = int.from_bytes(trailer[:4], "little")
    # Without libatomic, the kernel ORs the magic number bit by bit: a subset of its bits means "not finished".
    if magic != descriptor_formats.TRAILER_MAGIC and magic & ~descriptor_formats.TRAILER_MAGIC == 0:
        raise InvalidArgument(
            f"{name} is no queue of nnfmq, or not ready: its creator is at work, or ended there "
            f"(then `nnfmq queue remove {name}`)"
        )
    descriptor = descriptor_formats.from_trailer(trailer)
    layout.resolve(descriptor, start, flavor=descriptor.flags)  # all parts must be before the trailer
    return size_bytes, descriptor


def _is_queue(name: str) -> bool:
    try:
        _read_descriptor(name)
    except (NnfmqError, OSError):
        return False
    return True
