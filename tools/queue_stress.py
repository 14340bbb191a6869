"""Send millions of records with checksums through one queue between two processes, on each pair of cores.

Every record has its number, the complement of it, and a product of both with the seed. The reader checks each record,
and both sides compute a CRC of all bytes, so that a lost, repeated, torn or displaced record is detected. Batches and
reads have random sizes, and blocking and non-blocking calls alternate at random. All waits have a limit. This is not a
benchmark: the rates only show how much was tried.

    python tools/queue_stress.py                            # 10 million for each pair: half an hour
    python tools/queue_stress.py --pairs python-compiled --count 100000000 --json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

import numpy as np
from bench_support import positive

from nnfmq.lab.child_processes import BenchmarkFailed, started_child
from nnfmq.queue import MessageQueue
from nnfmq.queue import core as cores

PAIRS = ("compiled-compiled", "compiled-python", "python-compiled", "python-python")
QUANTUM, COUNT = 24, 257  # a ring that batches never fill evenly
WINDOWS_NS = (0, 0, 1_000, 50_000)
MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class SideResult:
    """Result of one process."""

    core: str
    records: int
    calls: int
    crc: int
    seconds: float


def main(argv: Sequence[str] | None = None) -> int:
    """Run the pairs and print the results; return 0 for success, 1 for a failure, 2 for usage, 130 if interrupted."""
    arguments = _parser().parse_args(argv)
    try:
        reports = [run(pair, arguments.count, arguments.seed, arguments.limit) for pair in arguments.pairs]
    except BenchmarkFailed as error:
        print(f"queue_stress: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(json.dumps(reports, indent=2) if arguments.json else "\n".join(map(_line, reports)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=_possible(), help="writer-reader (default: all)")
    parser.add_argument("--count", type=positive, default=10_000_000, help="records (default: 10 million)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=positive, default=3600, metavar="S", help="time limit of a pair in seconds")
    parser.add_argument("--json", action="store_true")
    return parser


def _possible() -> list[str]:
    return [pair for pair in PAIRS if set(pair.split("-")) <= set(cores.CORES.available())]


def _line(report: dict[str, Any]) -> str:
    rate = report["records"] / report["seconds"] / 1e6
    return (
        f"{report['pair']:18} {report['records']:12,} records, {report['calls']:10,} calls, crc {report['crc']:08x}, "
        f"{report['seconds']:7.1f} s, {rate:6.2f} million/s"
    )


# ---- the parent ----


def run(pair: str, records: int, seed: int, limit_s: int) -> dict[str, Any]:
    """Send `records` from one new process to another.

    Raises:
        BenchmarkFailed: If a record was wrong, or a process failed or exceeded the limit.
    """
    with MessageQueue.create(QUANTUM, COUNT, label="queue-stress") as queue, ExitStack() as stack:
        shared = f"/proc/{os.getpid()}/fd/{queue.memory.fileno()}", queue.to_json()
        sides = [
            stack.enter_context(
                started_child(side, *shared, records, seed, limit_s, name=role, environment={"NNFMQ_CORE": core})
            )
            for role, side, core in zip(("writer", "reader"), (_write_all, _read_all), pair.split("-"), strict=True)
        ]
        wrote, read = [side.receive(limit_s + 10) for side in sides]
    if (wrote.records, wrote.crc) != (read.records, read.crc):
        raise BenchmarkFailed(f"{pair}: {wrote} was written, {read} was read")
    return {"pair": pair, "writer_core": wrote.core, **asdict(read), "calls": wrote.calls + read.calls, "seed": seed}


# ---- the two child processes ----


@contextmanager
def _adopted(memory: str, descriptor: str, limit_s: int) -> Iterator[tuple[MessageQueue, int]]:
    """Yield the parent's queue, of which `memory` is the file, and the deadline."""
    fd = os.open(memory, os.O_RDWR | os.O_CLOEXEC)
    with MessageQueue.adopt([fd], descriptor, reset_pointers=False) as queue:
        yield queue, time.monotonic_ns() + limit_s * 10**9


def batch(first: int, n: int, seed: int) -> bytes:
    """Return the bytes of the records `first` to `first + n - 1`."""
    fields = np.empty((n, 3), "<u8")
    fields[:, 0] = np.arange(first, first + n, dtype=np.uint64)
    fields[:, 1] = ~fields[:, 0]
    fields[:, 2] = (fields[:, 0] + np.uint64(seed)) * MIX ^ fields[:, 1] >> np.uint64(7)
    return fields.tobytes()


def _size(random: Random) -> int:
    """Return a number of records, at most half of the ring: with more, both sides could wait for each other."""
    return (1 << random.randrange(8)) - random.randrange(2) or 1


def _write_all(connection: Any, memory: str, descriptor: str, records: int, seed: int, limit_s: int) -> None:
    random, start, crc, calls, sent = Random(seed), time.perf_counter(), 0, 0, 0
    with _adopted(memory, descriptor, limit_s) as (queue, deadline_ns):
        while sent < records:
            data = batch(sent, min(_size(random), records - sent), seed)
            calls += 1
            if not (random.random() < 0.5 and queue.send(data)) and not queue.write_blocking(data, deadline_ns):
                raise BenchmarkFailed(f"no space for record {sent} within the limit")
            crc = zlib.crc32(data, crc)
            sent += len(data) // QUANTUM
    connection.send(SideResult(cores.core_name, sent, calls, crc, time.perf_counter() - start))


def _read_all(connection: Any, memory: str, descriptor: str, records: int, seed: int, limit_s: int) -> None:
    random, start, crc, calls, got = Random(~seed), time.perf_counter(), 0, 0, 0
    with _adopted(memory, descriptor, limit_s) as (queue, deadline_ns):
        while got < records:
            data = _read_some(queue, random, records - got, deadline_ns)
            calls += 1
            if not data:
                raise BenchmarkFailed(f"record {got} did not arrive within the limit")
            n = len(data) // QUANTUM
            if data != batch(got, n, seed):
                raise BenchmarkFailed(f"a wrong record among {got} to {got + n - 1}")
            crc = zlib.crc32(data, crc)
            got += n
    connection.send(SideResult(cores.core_name, got, calls, crc, time.perf_counter() - start))


def _read_some(queue: MessageQueue, random: Random, left: int, deadline_ns: int) -> bytes | None:
    if random.random() < 0.5:
        return queue.receive(deadline_ns, random.choice(WINDOWS_NS))
    return queue.read_blocking(min(_size(random), left), deadline_ns)


if __name__ == "__main__":
    import queue_stress  # by its name, by which child processes import it

    sys.exit(queue_stress.main())
