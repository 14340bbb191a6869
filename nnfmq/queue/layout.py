"""Where the parts of a queue lie in its memory, and how that is told to a peer. Pure arithmetic.

A synchronized queue of N records of Q bytes, as libfmq lays it out (everything little-endian):

    byte 0        8        16                    E = align8(16 + N*Q)   S = align64(E + 8)      S + 256
         +--------+--------+---------- .. -------+------+------+--------+-------- .. ----------+
         | read   | write  | ring: N records     | event| CPU  | unused | 32 stats words (u64) | to page end
         | counter| counter| of Q bytes          | word | hint |        |                      |
         +--------+--------+---------- .. -------+------+------+--------+-------- .. ----------+
          u64      u64                            u32    u16 at +6        nnfmq's own

The counters count bytes, only grow, and index the ring modulo its size. libfmq ends after the event word; what lies
behind it is ours, in the same page-rounded region, and no libfmq peer looks there. An unsynchronized queue has the same
layout; libfmq does not use its read counter, ours says there how far the writer is about to write. A ring may have a
file descriptor of its own: then it begins at byte 0 there, and the event word follows the counters. A named queue's
memory ends with a record of 128 bytes that says all this (`forms.to_trailer`). Nothing here opens, maps or logs; no
offset is computed anywhere else.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from itertools import pairwise

from nnfmq.hal.errors import InvalidArgument, QueueCorrupted

SYNCHRONIZED = 1
UNSYNCHRONIZED = 2

READ_COUNTER, WRITE_COUNTER, RING, EVENT_WORD = range(4)  # positions in MQDescriptor.grantors

COUNTER_BYTES = 8
EVENT_WORD_BYTES = 4
RING_OFFSET = 2 * COUNTER_BYTES
WORD_ALIGNMENT = 8  # libfmq's "word boundary" is 64 bits, not 64 bytes
CPU_HINT_BYTES = 4  # behind the event word, up to the next one that libfmq could know of
WRITER_CPU = 6  # event word + 6: u16, the CPU from which the writer sent last, + 1 (0 = unknown)

STATS_WORDS = 32
STATS_BYTES = STATS_WORDS * 8
STATS_ALIGNMENT = 64  # a cache line of its own: the slots are written while the peer spins on the counters

TRAILER_BYTES = 128  # of a named queue: the last of the memory, so that its size alone says where

PAGE_BYTES = os.sysconf("SC_PAGESIZE")

MAX_QUANTUM = 2**31 - 1  # int32 in AIDL
MAX_EXTENT = 2**31 - 1 - PAGE_BYTES  # libfmq's own limit for one grantor
MAX_OFFSET = 2**31 - 1  # int32 in AIDL


@dataclass(frozen=True, slots=True)
class Grantor:
    """A byte range in one of the queue's descriptors."""

    fd_index: int
    offset: int
    extent: int


@dataclass(frozen=True, slots=True)
class MQDescriptor:
    """What a peer needs to attach: read counter, write counter, ring and (if any) event word, in this order."""

    grantors: tuple[Grantor, ...]
    quantum: int
    flags: int = SYNCHRONIZED


@dataclass(frozen=True, slots=True)
class QueueLayout:
    """Checked offsets of one queue; `event_word`, `stats` and `writer_cpu` are None where the memory has none.

    `fds` says in which of the queue's file descriptors each of the four grantors lies; the stats words are in number 0.
    """

    read_counter: int
    write_counter: int
    ring: int
    ring_bytes: int
    quantum: int
    event_word: int | None
    stats: int | None
    region_bytes: int
    fds: tuple[int, int, int, int] = (0, 0, 0, 0)

    @property
    def writer_cpu(self) -> int | None:
        """Return the offset of the writer's CPU hint, which lies where the stats words do: only in a layout of ours."""
        return None if self.stats is None or self.event_word is None else self.event_word + WRITER_CPU

    @property
    def count(self) -> int:
        """Return the capacity in records."""
        return self.ring_bytes // self.quantum


def align_up(value: int, alignment: int) -> int:
    """Return the smallest multiple of `alignment` that is not below `value`."""
    return -(-value // alignment) * alignment


def compute_layout(quantum: int, count: int, event_flag: bool = True, ring_fd: int = 0) -> QueueLayout:
    """Lay out a new queue, with its ring in memory of its own where `ring_fd` is 1.

    Raises InvalidArgument where libfmq's descriptor could not express it.
    """
    if not 1 <= quantum <= MAX_QUANTUM:
        raise InvalidArgument(f"quantum is {quantum}; allowed are 1 to {MAX_QUANTUM} bytes")
    if count < 1 or quantum * count > MAX_EXTENT:
        raise InvalidArgument(f"{count} records of {quantum} bytes; allowed are 1 to {MAX_EXTENT // quantum} records")
    event_word = RING_OFFSET if ring_fd else align_up(RING_OFFSET + quantum * count, WORD_ALIGNMENT)
    stats = align_up(event_word + EVENT_WORD_BYTES + CPU_HINT_BYTES, STATS_ALIGNMENT)
    return QueueLayout(
        read_counter=0,
        write_counter=COUNTER_BYTES,
        ring=0 if ring_fd else RING_OFFSET,
        ring_bytes=quantum * count,
        quantum=quantum,
        event_word=event_word if event_flag else None,
        stats=stats,
        region_bytes=align_up(stats + STATS_BYTES, PAGE_BYTES),
        fds=(0, 0, ring_fd, 0),
    )


def compute_named_layout(quantum: int, count: int) -> QueueLayout:
    """Lay out a new queue that has a name: the same, with room for its record at the end. Raises InvalidArgument."""
    place = compute_layout(quantum, count)
    used = STATS_BYTES + TRAILER_BYTES + (place.stats or 0)
    return replace(place, region_bytes=align_up(used, PAGE_BYTES))


def trailer_offset(memory_bytes: int) -> int:
    """Return where the record of a named queue lies in memory of this size; negative where there is no room for one."""
    return memory_bytes - TRAILER_BYTES if memory_bytes % WORD_ALIGNMENT == 0 else -1


def to_descriptor(layout: QueueLayout, flavor: int = SYNCHRONIZED) -> MQDescriptor:
    """Return the descriptor that tells a peer about `layout`."""
    grantors: tuple[Grantor, ...] = (
        Grantor(layout.fds[READ_COUNTER], layout.read_counter, COUNTER_BYTES),
        Grantor(layout.fds[WRITE_COUNTER], layout.write_counter, COUNTER_BYTES),
        Grantor(layout.fds[RING], layout.ring, layout.ring_bytes),
    )
    if layout.event_word is not None:
        grantors += (Grantor(layout.fds[EVENT_WORD], layout.event_word, EVENT_WORD_BYTES),)
    return MQDescriptor(grantors, layout.quantum, flavor)


def resolve(descriptor: MQDescriptor, *memory_bytes: int, flavor: int = SYNCHRONIZED) -> QueueLayout:
    """Check a peer's descriptor against memories of these sizes. Raises QueueCorrupted where it is impossible.

    Stricter than libfmq, which also takes overlapping ranges, ranges beyond the end of the file, another flavour and a
    ring that is no whole number of records. Grantors after the fourth are ignored, as there.
    """
    _check_kind(descriptor, flavor)
    grantors = descriptor.grantors[: EVENT_WORD + 1]
    for name, grantor, least in zip(_NAMES, grantors, _LEAST_BYTES, strict=False):
        _check_range(name, grantor, least, memory_bytes)
    _check_ring(grantors[RING], descriptor.quantum)
    _check_overlap(grantors)
    fds = tuple(grantor.fd_index for grantor in grantors)
    return QueueLayout(
        read_counter=grantors[READ_COUNTER].offset,
        write_counter=grantors[WRITE_COUNTER].offset,
        ring=grantors[RING].offset,
        ring_bytes=grantors[RING].extent,
        quantum=descriptor.quantum,
        event_word=grantors[EVENT_WORD].offset if len(grantors) > EVENT_WORD else None,
        stats=_stats_offset(grantors, descriptor.quantum, memory_bytes[0]),
        region_bytes=memory_bytes[0],
        fds=(fds[READ_COUNTER], fds[WRITE_COUNTER], fds[RING], fds[EVENT_WORD] if len(fds) > EVENT_WORD else 0),
    )


_NAMES = ("read counter", "write counter", "ring", "event word")
_LEAST_BYTES = (COUNTER_BYTES, COUNTER_BYTES, 1, EVENT_WORD_BYTES)


def _check_kind(descriptor: MQDescriptor, flavor: int) -> None:
    if descriptor.flags != flavor:
        raise QueueCorrupted(f"queue descriptor: flavour is {descriptor.flags}; expected is {flavor}")
    if not 1 <= descriptor.quantum <= MAX_QUANTUM:
        raise QueueCorrupted(f"queue descriptor: quantum is {descriptor.quantum}; allowed are 1 to {MAX_QUANTUM} bytes")
    if len(descriptor.grantors) <= RING:
        raise QueueCorrupted(f"queue descriptor: {len(descriptor.grantors)} grantors; at least 3 are needed")


def _check_range(name: str, grantor: Grantor, least: int, memory_bytes: tuple[int, ...]) -> None:
    if not 0 <= grantor.fd_index < len(memory_bytes):
        raise QueueCorrupted(
            f"queue descriptor: {name} is in descriptor {grantor.fd_index}; the last one is {len(memory_bytes) - 1}"
        )
    if not 0 <= grantor.offset <= MAX_OFFSET or grantor.offset % WORD_ALIGNMENT:
        raise QueueCorrupted(f"queue descriptor: {name} at offset {grantor.offset}, which is no multiple of 8 in range")
    if not least <= grantor.extent <= MAX_EXTENT:
        raise QueueCorrupted(
            f"queue descriptor: {name} has extent {grantor.extent}; allowed are {least} to {MAX_EXTENT} bytes"
        )
    end, size = grantor.offset + grantor.extent, memory_bytes[grantor.fd_index]
    if end > size:
        raise QueueCorrupted(f"queue descriptor: {name} ends at byte {end} of memory of {size} bytes")


def _check_ring(ring: Grantor, quantum: int) -> None:
    if ring.extent % quantum:
        raise QueueCorrupted(f"queue descriptor: ring of {ring.extent} bytes is no multiple of the quantum {quantum}")


def _check_overlap(grantors: tuple[Grantor, ...]) -> None:
    # Only the bytes in use count: libfmq itself allows a counter's extent to be larger than the counter.
    used = [grantor.extent if i == RING else _LEAST_BYTES[i] for i, grantor in enumerate(grantors)]
    spans = sorted((g.fd_index, g.offset, g.offset + used[i], _NAMES[i]) for i, g in enumerate(grantors))
    for (fd, _, end, first), (next_fd, start, _, second) in pairwise(spans):
        if fd == next_fd and start < end:
            raise QueueCorrupted(f"queue descriptor: {second} at byte {start} overlaps {first}, which ends at {end}")


def _stats_offset(grantors: tuple[Grantor, ...], quantum: int, memory_bytes: int) -> int | None:
    # Only behind the standard layout is the memory known to be nobody else's.
    standard = compute_layout(quantum, grantors[RING].extent // quantum, ring_fd=int(grantors[RING].fd_index == 1))
    places = tuple((grantor.fd_index, grantor.offset) for grantor in grantors)
    offsets = (standard.read_counter, standard.write_counter, standard.ring, standard.event_word)
    fits = standard.stats is not None and standard.stats + STATS_BYTES <= memory_bytes
    return standard.stats if places == tuple(zip(standard.fds, offsets, strict=True)) and fits else None
