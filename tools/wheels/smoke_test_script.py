"""Use an installed nnfmq and print the result as JSON: `smoke_test_script.py RECORDS`, run with the tested interpreter.

Two processes exchange records over a queue. The second attaches from the descriptors and the queue's JSON, as an
unrelated process would. It is forked, not started, because a child of an emulated process is then emulated too.
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
    """Return 24 bytes that are different for each number."""
    return sha256(number.to_bytes(8, "little")).digest()[:QUANTUM]


def send_all(fds: tuple[int, ...], text: str, records: int) -> None:
    """Attach to the queue and write `records` records."""
    deadline_ns = time.monotonic_ns() + 60 * 10**9
    with MessageQueue.adopt([os.dup(fd) for fd in fds], text, reset_pointers=False) as queue:
        for number in range(records):
            assert queue.write_blocking(record(number), deadline_ns)


def exchange(records: int) -> int:
    """Return the number of records that arrived unchanged from the other process, or -1 if that failed."""
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
        intact = sum(queue.read_blocking(1, deadline_ns) == record(number) for number in range(records))
        return intact if os.waitpid(child, 0)[1] == 0 else -1


if __name__ == "__main__":
    done = {"records": exchange(int(sys.argv[1])), "machine": platform.machine()}
    print(json.dumps(done | {"core": core_name, "codec": codec_name, "path": core_path}))
