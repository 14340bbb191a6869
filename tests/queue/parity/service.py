"""The service of libfmq's msgq_test_client: `service.py FD`, asked over a SEQPACKET socket by JSON, fds beside it.

Each message is a function's name and arguments, and the reply is its result. Runs on the core in $NNFMQ_CORE.
It validates the records that it reads: it returns whether they had the expected pattern.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time
from itertools import count
from typing import Any

from nnfmq.base.memory import Memory
from nnfmq.queue import UNSYNCHRONIZED, MessageQueue

LIMIT_NS = 20 * 10**9
QUANTUM = 4
CUSTOM = {"read_notification": 2, "write_notification": 1}  # libfmq's tests number them the other way round


def pattern(n: int) -> bytes:
    return b"".join(i.to_bytes(QUANTUM, "little") for i in range(n))


class Service:
    """The queues of one test, and what the client may ask for."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.sync: MessageQueue | None = None
        self.unsync: MessageQueue | None = None

    def end(self, fds: list[int]) -> None:
        for queue in (self.sync, self.unsync):
            if queue is not None:
                queue.close()
        self.sync = self.unsync = None

    def configure_sync(self, fds: list[int], text: str) -> None:
        self.sync = MessageQueue.adopt(fds, text)

    def attach_unsync(self, fds: list[int], text: str) -> None:
        self.unsync = MessageQueue.adopt(fds, text, flavor=UNSYNCHRONIZED, reset_pointers=False)

    def get_unsync(self, fds: list[int], place: str, records: int) -> str:
        """Create the unsynchronized queue; its fds are sent with the reply."""
        ring = Memory.create(QUANTUM * records, one_writer=True) if place == "two_fds" else None
        self.unsync = MessageQueue.create(QUANTUM, records, flavor=UNSYNCHRONIZED, one_writer=True, ring_memory=ring)
        return self.unsync.to_json()

    def write_sync(self, fds: list[int], n: int) -> bool:
        assert self.sync is not None
        return self.sync.write(pattern(n))

    def read_sync(self, fds: list[int], n: int) -> bool:
        assert self.sync is not None
        return self.sync.read(n) == pattern(n)

    def write_unsync(self, fds: list[int], n: int) -> bool:
        assert self.unsync is not None
        return self.unsync.write(pattern(n))

    def stream_unsync(self, fds: list[int], batch: int) -> None:
        """Write records 0, 1, 2..., each twice its number in 16 bits, `batch` at a time until asked again."""
        assert self.unsync is not None
        for first in count(0, batch):
            if select.select([self.connection], [], [], 0)[0]:
                break
            self.unsync.write(b"".join((i % 2**16).to_bytes(2, "little") * 2 for i in range(first, first + batch)))

    def stop(self, fds: list[int]) -> None:
        """Do nothing: that the request came has ended the stream."""

    def read_unsync(self, fds: list[int], n: int) -> bool | None:
        """Return None if the read was rejected."""
        assert self.unsync is not None
        data = self.unsync.read(n)
        return None if data is None else data == pattern(n)

    def blocking_read(self, fds: list[int], n: int, times: int, custom: bool) -> bool:
        """Read `n` records `times` times; they are many writes of the pattern of 64."""
        assert self.sync is not None
        bits = CUSTOM if custom else {}
        limit = time.monotonic_ns() + LIMIT_NS
        parts = [self.sync.read_blocking(n, limit, **bits) or b"(deadline)" for _ in range(times)]
        return b"".join(parts) == pattern(64) * (n * times // 64)


def main() -> None:
    """Serve until the client hangs up."""
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        service = Service(connection)
        while True:
            data, fds, _, _ = socket.recv_fds(connection, 65536, 8)
            if not data:
                break
            name, *arguments = json.loads(data)
            result: Any = getattr(service, name)(list(fds), *arguments)
            fds_to_send = service.unsync.fds() if name == "get_unsync" and service.unsync is not None else ()
            socket.send_fds(connection, [json.dumps(result).encode()], fds_to_send)
        service.end([])


main()
