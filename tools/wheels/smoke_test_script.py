"""What an installed nnfmq does, as JSON: `smoke_test_script.py RECORDS`, run by the interpreter under trial.

Two processes exchange records over a queue: a forked one attaches as a foreign one would, from descriptors and their
JSON. (Forked and not started, so that the same program runs under an emulator, whose child is one too.)
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from hashlib import sha256

from nnfmq.queue import MessageQueue
from nnfmq.queue.core import core_name, core_path
from nnfmq.serialize.codec import codec_name

QUANTUM, COUNT = 24, 16


def record(number: int) -> bytes:
    """Return 24 bytes that no other number has."""
    return sha256(number.to_bytes(8, "little")).digest()[:QUANTUM]


def send_all(fds: tuple[int, ...], text: str, records: int) -> None:
    """Attach and write that many records."""
    deadline_ns = time.monotonic_ns() + 60 * 10**9
    with MessageQueue.adopt([os.dup(fd) for fd in fds], text, reset_pointers=False) as queue:
        for number in range(records):
            assert queue.write_blocking(record(number), deadline_ns)


def exchange(records: int) -> int:
    """Return how many records came from the other process as they were sent."""
    deadline_ns = time.monotonic_ns() + 60 * 10**9
    with MessageQueue.create(QUANTUM, COUNT) as queue:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                send_all(queue.fds(), queue.to_json(), records)
                status = 0
            finally:
                os._exit(status)
        good = sum(queue.read_blocking(1, deadline_ns) == record(number) for number in range(records))
        return good if os.waitpid(child, 0)[1] == 0 else -1


if __name__ == "__main__":
    done = {"records": exchange(int(sys.argv[1])), "machine": platform.machine()}
    print(json.dumps(done | {"core": core_name, "codec": codec_name, "path": core_path}))
