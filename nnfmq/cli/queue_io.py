"""`nnfmq queue write` and `read`: records between a named queue and the command line, files or pipes.

Whole records only, a batch is published at once, and a batch is never larger than the ring. stdin is written as it
comes. An unsynchronized queue never makes its writer wait and cannot wake a reader: `read` takes what there is.
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

_PIECE_BYTES = 1 << 16


def _deadline(wait: float | None) -> int | None:
    return None if wait is None else time.monotonic_ns() + round(wait * 1e9)


# ---- write ----


def write(arguments: argparse.Namespace) -> int:
    """Write all that was given. Raises MissedDeadlineTransient where there is no room in time."""
    if arguments.data and arguments.file:
        raise InvalidArgument("DATA and --file were given: records come from one of them")
    with open_named(arguments.name) as queue:
        for batch in _batches(_given(arguments, queue.quantum), queue):
            _put(queue, batch, arguments.wait)
    return 0


def _given(arguments: argparse.Namespace, quantum: int) -> Iterator[bytes]:
    """Yield whole records, as they come."""
    if not arguments.data and not arguments.file:
        yield from _whole_records(_from_stdin(arguments.hex), quantum)
        return
    given = [Path(arguments.file).read_bytes()] if arguments.file else [os.fsencode(word) for word in arguments.data]
    data = b"".join(map(_from_hex, given) if arguments.hex else given)
    _check_whole(len(data), quantum, "nothing was written")
    yield data


def _from_stdin(is_hex: bool) -> Iterator[bytes]:
    if is_hex:
        yield from map(_from_hex, sys.stdin.buffer)
        return
    while piece := os.read(sys.stdin.fileno(), _PIECE_BYTES):  # what is there, without waiting for more
        yield piece


def _from_hex(text: bytes) -> bytes:
    try:
        return bytes.fromhex(text.decode("ascii"))
    except ValueError:
        shown = text.decode(errors="replace").strip()
        raise InvalidArgument(f"{shown!r:.60} is not hexadecimal: give pairs of the digits 0-9 and a-f") from None


def _whole_records(pieces: Iterable[bytes], quantum: int) -> Iterator[bytes]:
    """Yield what makes whole records; raise InvalidArgument where the last one stays short."""
    rest, total = b"", 0
    for piece in pieces:
        rest, total = rest + piece, total + len(piece)
        whole = len(rest) // quantum * quantum
        if whole:
            yield rest[:whole]
        rest = rest[whole:]
    _check_whole(total, quantum, f"{len(rest)} left over")


def _check_whole(total: int, quantum: int, otherwise: str) -> None:
    if total % quantum:
        raise InvalidArgument(
            f"{total} bytes were given, a record has {quantum}: give a multiple of {quantum} bytes ({otherwise})"
        )


def _batches(pieces: Iterable[bytes], queue: MessageQueue) -> Iterator[bytes]:
    most = queue.count * queue.quantum
    for piece in pieces:
        for at in range(0, len(piece), most):
            yield piece[at : at + most]


def _put(queue: MessageQueue, batch: bytes, wait: float | None) -> None:
    if queue.flavor != SYNCHRONIZED:
        if not queue.write(batch):
            raise QueueCorrupted(f"the write counter {queue.counters()[0]} is within a record")
    elif not queue.write_blocking(batch, _deadline(wait)):
        raise MissedDeadlineTransient(
            f"no room for {len(batch) // queue.quantum} records within {wait:g} s: "
            f"{queue.available_to_write()} of {queue.count} are free"
        )


# ---- read ----


def read(arguments: argparse.Namespace) -> int:
    """Print the records asked for. Raises MissedDeadlineTransient where fewer came in time."""
    wanted = None if arguments.follow else arguments.records
    with open_named(arguments.name, overflow=Overflow.KEEP_HALF) as queue:
        count = 0
        for records in _taken(queue, wanted, arguments):
            _print(records, queue.quantum, _is_hex(arguments))
            count += len(records) // queue.quantum
    if count == 0 or (wanted is not None and count < wanted):
        _complain(count, wanted, queue.flavor == SYNCHRONIZED, arguments.wait)
    return 0


def _taken(queue: MessageQueue, wanted: int | None, arguments: argparse.Namespace) -> Iterator[bytes]:
    """Yield records until there are `wanted` (None: until the wait has passed), as many at a time as there are."""
    if queue.flavor != SYNCHRONIZED:
        if arguments.follow or arguments.wait:
            raise InvalidArgument(
                f"{arguments.name} is unsynchronized: its writer wakes nobody, so `read` takes what there is; "
                "leave out --follow and --wait"
            )
        yield from _taken_at_once(queue, wanted or 1)
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


def _taken_at_once(queue: MessageQueue, wanted: int) -> Iterator[bytes]:
    written = queue.available_to_read()
    if written > queue.count and queue.read(1) is None:  # which moves on to what is left
        lost = written - queue.available_to_read()
        print(f"nnfmq: {lost} records were overwritten before this read", file=sys.stderr)
    records = queue.read(min(wanted, queue.available_to_read()))
    if records:
        yield records


def _complain(count: int, wanted: int | None, can_wait: bool, wait: float | None) -> None:
    came = "no record" if count == 0 else f"{count} of {wanted} records"
    when = f"came within {wait or 0:g} s" if can_wait else "is there" if count == 0 else "were there"
    raise MissedDeadlineTransient(f"{came} {when}")


def _is_hex(arguments: argparse.Namespace) -> bool:
    return arguments.hex or (not arguments.raw and sys.stdout.isatty())


def _print(records: bytes, quantum: int, is_hex: bool) -> None:
    out = sys.stdout.buffer
    if is_hex:
        records = b"".join(records[at : at + quantum].hex().encode() + b"\n" for at in range(0, len(records), quantum))
    out.write(records)
    out.flush()
