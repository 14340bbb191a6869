"""The other process of the queue tests: `peer_program.py ROLE`, with the queues as JSON on stdin.

It says "ready" when it has attached, does its part, and prints one JSON value. Runs on the core in $NNFMQ_CORE.
"""

from __future__ import annotations

import json
import sys
import time
from hashlib import sha256
from typing import Any

from nnfmq.base.memory import Memory
from nnfmq.queue import Grantor, MessageQueue, MQDescriptor

LIMIT_NS = 20 * 10**9


def attach(fd: int, grantors: list[list[int]], quantum: int, reset: bool) -> MessageQueue:
    descriptor = MQDescriptor(tuple(Grantor(*grantor) for grantor in grantors), quantum)
    return MessageQueue.attach(descriptor, Memory.adopt(fd), reset_pointers=reset)


def echo(requests: MessageQueue, results: MessageQueue, window_ns: int) -> int:
    """Send every packet back until an empty word comes; return how many."""
    limit, count = time.monotonic_ns() + LIMIT_NS, 0
    while (packet := requests.receive(limit, window_ns)) is not None and any(packet):
        assert results.send(packet)
        count += 1
    return count


def read_all(queue: MessageQueue, n: int, times: int) -> str:
    """Read `n` records `times` times; return the digest of all."""
    limit, digest = time.monotonic_ns() + LIMIT_NS, sha256()
    for _ in range(times):
        digest.update(queue.read_blocking(n, limit) or b"(deadline)")
    return digest.hexdigest()


def receive_all(queue: MessageQueue, size: int, window_ns: int) -> str:
    """Receive until `size` bytes came; return the digest of all."""
    limit, digest = time.monotonic_ns() + LIMIT_NS, sha256()
    while size > 0:
        packet = queue.receive(limit, window_ns) or b"(deadline)"
        digest.update(packet)
        size -= len(packet)
    return digest.hexdigest()


def write_now(queue: MessageQueue, size: int) -> bool:
    """Write `size` times the byte 7 and say whether that was possible."""
    return queue.write(b"\7" * size)


def write_numbers(queue: MessageQueue, count: int) -> int:
    """Write the numbers below `count`, one in each record, waiting for space."""
    limit = time.monotonic_ns() + LIMIT_NS
    return sum(queue.write_blocking(i.to_bytes(queue.quantum, "little"), limit) for i in range(count))


def wait_for_input(queue: MessageQueue) -> str:
    """Do nothing until there is a line to read."""
    return sys.stdin.readline()


def main() -> None:
    """Attach, run the function, and print its result."""
    job: dict[str, Any] = json.loads(sys.stdin.readline())
    queues = [attach(**place) for place in job["queues"]]
    print("ready", flush=True)
    print(json.dumps(globals()[sys.argv[1]](*queues, *job["options"])), flush=True)
    for queue in queues:
        queue.close()


main()
