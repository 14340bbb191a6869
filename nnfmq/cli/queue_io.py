"""`nnfmq queue write` and `read`: transfer records between a named queue and the command line, files or pipes.

Only complete records are transferred. A batch is published atomically and is never larger than the ring. stdin is
written as it arrives. The writer of an unsynchronized queue neither waits nor wakes readers, so `read` returns the
records that are available.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from nnfmq.hal.errors import InvalidArgument, MissedDeadlineTransient, QueueCorrupted
from nnfmq.queue import SYNCHRONIZED, MessageQueue, Overflow, open_named

_CHUNK_BYTES = 1 << 16


def _deadline(wait: float | None) -> int | None:
    return None if wait is None else time.monotonic_ns() + round(wait * 1e9)


# ---- write ----


def write(arguments: argparse.Namespace) -> int:
    """Write all records; return the exit status.

    Raises:
        InvalidArgument: If the bytes are not a multiple of the record size.
        MissedDeadlineTransient: If there is no space within the limit.
    """
    if arguments.data and arguments.file:
        raise InvalidArgument("DATA and --file were both given; give one of them")
    with open_named(arguments.name) as queue:
        ring_bytes = queue.count * queue.quantum
        for records in _records(arguments, queue.quantum):
            for start in range(0, len(records), ring_bytes):
                _put(queue, records[start : start + ring_bytes], arguments.wait)
    return 0


def _records(arguments: argparse.Namespace, quantum: int) -> Iterator[bytes]:
    """Yield complete records as they arrive."""
    if not arguments.data and not arguments.file:
        # `os.read` returns the available bytes, without waiting for more.
        chunks = iter(lambda: os.read(sys.stdin.fileno(), _CHUNK_BYTES), b"")
        yield from _whole_records(map(_from_hex, sys.stdin.buffer) if arguments.hex else chunks, quantum)
        return
    given = [Path(arguments.file).read_bytes()] if arguments.file else [os.fsencode(word) for word in arguments.data]
    data = b"".join(map(_from_hex, given) if arguments.hex else given)
    _check_whole(len(data), quantum, "nothing was written")
    yield data


def _from_hex(text: bytes) -> bytes:
    try:
        return bytes.fromhex(text.decode("ascii"))
    except ValueError:
        shown = text.decode(errors="replace").strip()
        raise InvalidArgument(f"{shown!r:.60} is not hexadecimal; give pairs of the digits 0-9 and a-f") from None


def _whole_records(chunks: Iterable[bytes], quantum: int) -> Iterator[bytes]:
    """Yield the chunks cut at record boundaries; raise InvalidArgument at the end if the last record is incomplete."""
    tail, total = b"", 0
    for chunk in chunks:
        tail, total = tail + chunk, total + len(chunk)
        complete = len(tail) // quantum * quantum
        if complete:
            yield tail[:complete]
        tail = tail[complete:]
    _check_whole(total, quantum, f"{len(tail)} were not written")


def _check_whole(total: int, quantum: int, otherwise: str) -> None:
    if total % quantum:
        raise InvalidArgument(
            f"got {total} bytes; records have {quantum} bytes, so give a multiple of {quantum} ({otherwise})"
        )


def _put(queue: MessageQueue, batch: bytes, wait: float | None) -> None:
    if queue.flavor != SYNCHRONIZED:
        if not queue.write(batch):
            raise QueueCorrupted(f"the write counter {queue.counters()[0]} is not a multiple of the record size")
    elif not queue.write_blocking(batch, _deadline(wait)):
        raise MissedDeadlineTransient(
            f"no space for {len(batch) // queue.quantum} records within {wait:g} s: "
            f"{queue.available_to_write()} of {queue.count} are free"
        )


# ---- read ----


def read(arguments: argparse.Namespace) -> int:
    """Print the requested records; return the exit status.

    Raises:
        MissedDeadlineTransient: If fewer records arrive within the limit.
    """
    wanted = None if arguments.follow else arguments.records
    is_hex = arguments.hex or (not arguments.raw and sys.stdout.isatty())
    with open_named(arguments.name, overflow=Overflow.KEEP_HALF) as queue:
        can_wait, size = queue.flavor == SYNCHRONIZED, queue.quantum
        count = 0
        for records in _read_records(queue, wanted, arguments):
            count += len(records) // size
            if is_hex:
                lines = (records[at : at + size].hex().encode() + b"\n" for at in range(0, len(records), size))
                records = b"".join(lines)
            sys.stdout.buffer.write(records)
            sys.stdout.buffer.flush()
    if count == 0 or (wanted is not None and count < wanted):
        found = "no record" if count == 0 else f"only {count} of {wanted} records"
        when = f"arrived within {arguments.wait or 0:g} s" if can_wait else "available"
        raise MissedDeadlineTransient(f"{found} {when}")
    return 0


def _read_records(queue: MessageQueue, wanted: int | None, arguments: argparse.Namespace) -> Iterator[bytes]:
    """Yield all available records at a time, until there are `wanted`, or, if that is None, until a wait times out."""
    if queue.flavor != SYNCHRONIZED:
        if arguments.follow or arguments.wait:
            raise InvalidArgument(
                f"{arguments.name} is unsynchronized: its writer wakes no reader, so `read` cannot wait; "
                "omit --follow and --wait"
            )
        yield from _read_available(queue, wanted or 1)
        return
    left = wanted
    while left is None or left > 0:
        first = queue.read_blocking(1, _deadline(arguments.wait))
        if first is None:
            return
        more = min(queue.available_to_read(), queue.count, queue.count if left is None else left - 1)
        records = first + (queue.read_blocking(more, 0) or b"")
        yield records
        left = None if left is None else left - len(records) // queue.quantum


def _read_available(queue: MessageQueue, wanted: int) -> Iterator[bytes]:
    written = queue.available_to_read()
    if written > queue.count and queue.read(1) is None:  # an overflow: the read moves to the oldest record that is left
        lost = written - queue.available_to_read()
        print(f"nnfmq: {lost} records were overwritten before this read", file=sys.stderr)
    records = queue.read(min(wanted, queue.available_to_read()))
    if records:
        yield records
