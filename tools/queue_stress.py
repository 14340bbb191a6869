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
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

import numpy as np
from bench_support import positive

from nnfmq.queue import MessageQueue
from nnfmq.queue import core as cores

PAIRS = ("compiled-compiled", "compiled-python", "python-compiled", "python-python")
QUANTUM, COUNT = 24, 257  # a ring that batches never fill evenly
WINDOWS_NS = (0, 0, 1_000, 50_000)
MIX = np.uint64(0x9E3779B97F4A7C15)


class Failed(Exception):
    """A record was wrong, or a process failed."""


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
        if arguments.role:
            return _run_role(arguments)
        reports = [run(pair, arguments.count, arguments.seed, arguments.limit) for pair in arguments.pairs]
    except Failed as error:
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
    for hidden in ("--role", "--descriptor"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--fd", type=int, help=argparse.SUPPRESS)
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
        Failed: If a record was wrong, or a process failed or exceeded the limit.
    """
    with MessageQueue.create(QUANTUM, COUNT, label="queue-stress") as queue:
        sides = [
            _started(role, core, queue, records, seed, limit_s)
            for role, core in zip(("writer", "reader"), pair.split("-"), strict=True)
        ]
        try:
            wrote, read = [_finished(side, limit_s) for side in sides]
        finally:
            for side in sides:
                side.kill()
                side.communicate()
    if (wrote.records, wrote.crc) != (read.records, read.crc):
        raise Failed(f"{pair}: {wrote} was written, {read} was read")
    return {"pair": pair, "writer_core": wrote.core, **asdict(read), "calls": wrote.calls + read.calls, "seed": seed}


def _started(role: str, core: str, queue: MessageQueue, records: int, seed: int, limit_s: int) -> subprocess.Popen[str]:
    fd = queue.memory.fileno()
    words = ["--role", role, "--fd", str(fd), "--descriptor", queue.to_json(), "--count", str(records)]
    return subprocess.Popen(
        [sys.executable, __file__, *words, "--seed", str(seed), "--limit", str(limit_s)],
        env={**os.environ, "NNFMQ_CORE": core}, pass_fds=(fd,), text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def _finished(side: subprocess.Popen[str], limit_s: int) -> SideResult:
    try:
        out, error = side.communicate(timeout=limit_s + 10)
    except subprocess.TimeoutExpired:
        raise Failed(f"a process did not end within {limit_s} seconds") from None
    if side.returncode:
        raise Failed(error.strip() or f"a process ended with status {side.returncode}")
    return SideResult(**json.loads(out))


# ---- the two child processes ----


def _run_role(arguments: argparse.Namespace) -> int:
    queue = MessageQueue.adopt([arguments.fd], arguments.descriptor, reset_pointers=False)
    role = {"writer": _write_all, "reader": _read_all}[arguments.role]
    with queue:
        deadline_ns = time.monotonic_ns() + arguments.limit * 10**9
        print(json.dumps(asdict(role(queue, arguments.count, arguments.seed, deadline_ns))))
    return 0


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


def _write_all(queue: MessageQueue, records: int, seed: int, deadline_ns: int) -> SideResult:
    random, start, crc, calls, sent = Random(seed), time.perf_counter(), 0, 0, 0
    while sent < records:
        data = batch(sent, min(_size(random), records - sent), seed)
        calls += 1
        if not (random.random() < 0.5 and queue.send(data)) and not queue.write_blocking(data, deadline_ns):
            raise Failed(f"writer: no space for record {sent} within the limit")
        crc = zlib.crc32(data, crc)
        sent += len(data) // QUANTUM
    return SideResult(cores.core_name, sent, calls, crc, time.perf_counter() - start)


def _read_all(queue: MessageQueue, records: int, seed: int, deadline_ns: int) -> SideResult:
    random, start, crc, calls, got = Random(~seed), time.perf_counter(), 0, 0, 0
    while got < records:
        data = _read_some(queue, random, records - got, deadline_ns)
        calls += 1
        if not data:
            raise Failed(f"reader: record {got} did not arrive within the limit")
        n = len(data) // QUANTUM
        if data != batch(got, n, seed):
            raise Failed(f"reader: a wrong record among {got} to {got + n - 1}")
        crc = zlib.crc32(data, crc)
        got += n
    return SideResult(cores.core_name, got, calls, crc, time.perf_counter() - start)


def _read_some(queue: MessageQueue, random: Random, left: int, deadline_ns: int) -> bytes | None:
    if random.random() < 0.5:
        return queue.receive(deadline_ns, random.choice(WINDOWS_NS))
    return queue.read_blocking(min(_size(random), left), deadline_ns)


if __name__ == "__main__":
    sys.exit(main())
