"""The layout of a queue in shared memory, and the descriptor from which a peer attaches. Pure arithmetic.

A synchronized queue of N records of Q bytes, as libfmq's MessageQueueBase lays it out (all integers little-endian):

    byte 0        8        16                    E = align8(16 + N*Q)   S = align64(E + 8)      S + 256
         +--------+--------+---------- .. -------+------+------+--------+-------- .. ----------+
         | read   | write  | ring: N records     | event| CPU  | unused | stats: 32 words of   | to page end
         | counter| counter| of Q bytes          | flag | hint |        | 64 bits              |
         +--------+--------+---------- .. -------+------+------+--------+-------- .. ----------+
          u64      u64                            u32    u16 at +6        nnfmq only

* The counters count bytes and only increase. The position in the ring is the counter modulo the ring's size.
* libfmq's queue ends after the event flag word. What follows is nnfmq's, in the same region, which is rounded up to
  pages anyway; libfmq does not access it.
* An unsynchronized queue has the same layout. libfmq does not use its read counter; nnfmq stores the reserved counter
  there, up to which the writer is about to write.
* If the ring has its own file descriptor, it starts at byte 0 there, and the event flag word follows the counters.
* The memory of a named queue ends with a trailer of 128 bytes (`descriptor_formats.to_trailer`).

No other module computes offsets.
"""

from __future__ import annotations

import os
from itertools import pairwise

from msgspec import Struct
from msgspec.structs import replace

from nnfmq.hal.errors import InvalidArgument, QueueCorrupted

SYNCHRONIZED = 1
UNSYNCHRONIZED = 2

READ_COUNTER, WRITE_COUNTER, RING, EVENT_FLAG = range(4)  # positions in MQDescriptor.grantors

COUNTER_BYTES = 8
EVENT_FLAG_BYTES = 4
RING_OFFSET = 2 * COUNTER_BYTES
WORD_ALIGNMENT = 8  # libfmq's "word boundary" is 64 bits, not 64 bytes
CPU_HINT_BYTES = 4  # between the event flag word and the next multiple of 8
WRITER_CPU = 6  # event flag word + 6: u16, number + 1 of the CPU from which the writer sent last (0 = unknown)

STATS_WORDS = 32
STATS_BYTES = STATS_WORDS * 8
STATS_ALIGNMENT = 64  # in its own cache line: the words are written while the peer polls the counters

TRAILER_BYTES = 128  # the last bytes of a named queue's memory, so that its size alone determines the offset

PAGE_BYTES = os.sysconf("SC_PAGESIZE")

MAX_QUANTUM = 2**31 - 1  # int32 in AIDL
MAX_EXTENT = 2**31 - 1 - PAGE_BYTES  # libfmq's own limit for one grantor
MAX_OFFSET = 2**31 - 1  # int32 in AIDL


class Grantor(Struct, frozen=True):
    """A byte range in one of the queue's file descriptors."""

    fd_index: int
    offset: int
    extent: int


class MQDescriptor(Struct, frozen=True):
    """libfmq's MQDescriptor without its fds. Grantors: read counter, write counter, ring, and event flag if any."""

    grantors: tuple[Grantor, ...]
    quantum: int
    flags: int = SYNCHRONIZED


class QueueLayout(Struct, frozen=True):
    """Validated offsets of one queue. `event_flag`, `stats` and `writer_cpu` are None if the memory has no such part.

    `fds` has the index of the file descriptor of each of the four grantors; the stats are in file descriptor 0.
    """

    read_counter: int
    write_counter: int
    ring: int
    ring_bytes: int
    quantum: int
    event_flag: int | None
    stats: int | None
    region_bytes: int
    fds: tuple[int, int, int, int] = (0, 0, 0, 0)

    @property
    def writer_cpu(self) -> int | None:
        """Offset of the writer's CPU hint. Like the stats, it exists only in a layout that nnfmq has computed."""
        return None if self.stats is None or self.event_flag is None else self.event_flag + WRITER_CPU

    @property
    def count(self) -> int:
        """Capacity in records."""
        return self.ring_bytes // self.quantum


def align_up(value: int, alignment: int) -> int:
    """Return the smallest multiple of `alignment` that is not less than `value`."""
    return -(-value // alignment) * alignment


def compute_layout(quantum: int, count: int, event_flag: bool = True, ring_fd: int = 0) -> QueueLayout:
    """Return the layout of a new queue. If `ring_fd` is 1, the ring is in its own memory.

    Raises:
        InvalidArgument: If libfmq's descriptor cannot express the sizes.
    """
    if not 1 <= quantum <= MAX_QUANTUM:
        raise InvalidArgument(f"quantum is {quantum}; allowed are 1 to {MAX_QUANTUM} bytes")
    if count < 1 or quantum * count > MAX_EXTENT:
        raise InvalidArgument(f"{count} records of {quantum} bytes; allowed are 1 to {MAX_EXTENT // quantum} records")
    word = RING_OFFSET if ring_fd else align_up(RING_OFFSET + quantum * count, WORD_ALIGNMENT)
    stats = align_up(word + EVENT_FLAG_BYTES + CPU_HINT_BYTES, STATS_ALIGNMENT)
    return QueueLayout(
        read_counter=0,
        write_counter=COUNTER_BYTES,
        ring=0 if ring_fd else RING_OFFSET,
        ring_bytes=quantum * count,
        quantum=quantum,
        event_flag=word if event_flag else None,
        stats=stats,
        region_bytes=align_up(stats + STATS_BYTES, PAGE_BYTES),
        fds=(0, 0, ring_fd, 0),
    )


def compute_named_layout(quantum: int, count: int) -> QueueLayout:
    """Return the layout of a new named queue: the same, with space for the trailer.

    Raises:
        InvalidArgument: If libfmq's descriptor cannot express the sizes.
    """
    queue_layout = compute_layout(quantum, count)
    used = (queue_layout.stats or 0) + STATS_BYTES + TRAILER_BYTES
    return replace(queue_layout, region_bytes=align_up(used, PAGE_BYTES))


def trailer_offset(memory_bytes: int) -> int:
    """Return the offset of the trailer in a named queue's memory of this size; negative if it has no space."""
    return memory_bytes - TRAILER_BYTES if memory_bytes % WORD_ALIGNMENT == 0 else -1


def to_descriptor(queue_layout: QueueLayout, flavor: int = SYNCHRONIZED) -> MQDescriptor:
    """Return the descriptor of a queue with this layout."""
    fds = queue_layout.fds
    grantors: tuple[Grantor, ...] = (
        Grantor(fds[READ_COUNTER], queue_layout.read_counter, COUNTER_BYTES),
        Grantor(fds[WRITE_COUNTER], queue_layout.write_counter, COUNTER_BYTES),
        Grantor(fds[RING], queue_layout.ring, queue_layout.ring_bytes),
    )
    if queue_layout.event_flag is not None:
        grantors += (Grantor(fds[EVENT_FLAG], queue_layout.event_flag, EVENT_FLAG_BYTES),)
    return MQDescriptor(grantors, queue_layout.quantum, flavor)


def resolve(descriptor: MQDescriptor, *memory_bytes: int, flavor: int = SYNCHRONIZED) -> QueueLayout:
    """Validate a peer's descriptor against memory regions of these sizes, and return the layout.

    Stricter than libfmq, which accepts ranges that overlap or extend beyond the end of the file (an access is then a
    SIGBUS), another flavor, and a ring that is not a multiple of the quantum. Like libfmq, ignores grantors after the
    fourth.

    Raises:
        QueueCorrupted: If the descriptor is invalid.
    """
    _check_kind(descriptor, flavor)
    grantors = descriptor.grantors[: EVENT_FLAG + 1]
    for name, grantor, min_bytes in zip(_NAMES, grantors, _MIN_BYTES, strict=False):
        _check_range(name, grantor, min_bytes, memory_bytes)
    ring, quantum = grantors[RING], descriptor.quantum
    if ring.extent % quantum:
        raise QueueCorrupted(f"queue descriptor: ring of {ring.extent} bytes is no multiple of the quantum {quantum}")
    _check_overlap(grantors)
    fds = tuple(grantor.fd_index for grantor in grantors)
    return QueueLayout(
        read_counter=grantors[READ_COUNTER].offset,
        write_counter=grantors[WRITE_COUNTER].offset,
        ring=ring.offset,
        ring_bytes=ring.extent,
        quantum=quantum,
        event_flag=grantors[EVENT_FLAG].offset if len(grantors) > EVENT_FLAG else None,
        stats=_stats_offset(grantors, quantum, memory_bytes[0]),
        region_bytes=memory_bytes[0],
        fds=(fds[READ_COUNTER], fds[WRITE_COUNTER], fds[RING], fds[EVENT_FLAG] if len(fds) > EVENT_FLAG else 0),
    )


_NAMES = ("read counter", "write counter", "ring", "event flag word")
_MIN_BYTES = (COUNTER_BYTES, COUNTER_BYTES, 1, EVENT_FLAG_BYTES)


def _check_kind(descriptor: MQDescriptor, flavor: int) -> None:
    if descriptor.flags != flavor:
        raise QueueCorrupted(f"queue descriptor: flavor is {descriptor.flags}; expected is {flavor}")
    if not 1 <= descriptor.quantum <= MAX_QUANTUM:
        raise QueueCorrupted(f"queue descriptor: quantum is {descriptor.quantum}; allowed are 1 to {MAX_QUANTUM} bytes")
    if len(descriptor.grantors) <= RING:
        raise QueueCorrupted(f"queue descriptor: {len(descriptor.grantors)} grantors; at least 3 are needed")


def _check_range(name: str, grantor: Grantor, min_bytes: int, memory_bytes: tuple[int, ...]) -> None:
    if not 0 <= grantor.fd_index < len(memory_bytes):
        raise QueueCorrupted(
            f"queue descriptor: {name} is in descriptor {grantor.fd_index}; the last one is {len(memory_bytes) - 1}"
        )
    if not 0 <= grantor.offset <= MAX_OFFSET or grantor.offset % WORD_ALIGNMENT:
        raise QueueCorrupted(f"queue descriptor: {name} at offset {grantor.offset}, which is no multiple of 8 in range")
    if not min_bytes <= grantor.extent <= MAX_EXTENT:
        raise QueueCorrupted(
            f"queue descriptor: {name} has extent {grantor.extent}; allowed are {min_bytes} to {MAX_EXTENT} bytes"
        )
    end, size = grantor.offset + grantor.extent, memory_bytes[grantor.fd_index]
    if end > size:
        raise QueueCorrupted(f"queue descriptor: {name} ends at byte {end} of memory of {size} bytes")


def _check_overlap(grantors: tuple[Grantor, ...]) -> None:
    # Only the bytes in use count: libfmq allows a counter's extent to be larger than the counter.
    used = [grantor.extent if i == RING else _MIN_BYTES[i] for i, grantor in enumerate(grantors)]
    ranges = sorted((g.fd_index, g.offset, g.offset + used[i], _NAMES[i]) for i, g in enumerate(grantors))
    for (fd, _, end, first), (next_fd, start, _, second) in pairwise(ranges):
        if fd == next_fd and start < end:
            raise QueueCorrupted(f"queue descriptor: {second} at byte {start} overlaps {first}, which ends at {end}")


def _stats_offset(grantors: tuple[Grantor, ...], quantum: int, memory_bytes: int) -> int | None:
    # Only if the peer used the standard layout, nothing else can be in the memory after it.
    standard = compute_layout(quantum, grantors[RING].extent // quantum, ring_fd=int(grantors[RING].fd_index == 1))
    expected = (standard.read_counter, standard.write_counter, standard.ring, standard.event_flag)
    actual = tuple((grantor.fd_index, grantor.offset) for grantor in grantors)
    fits = standard.stats is not None and standard.stats + STATS_BYTES <= memory_bytes
    return standard.stats if actual == tuple(zip(standard.fds, expected, strict=True)) and fits else None
