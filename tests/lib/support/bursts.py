"""A minimal burst client: two queues, memories in slots, and packets as bytes, well-formed or not.

It does not use `nnfmq.client`, so it can send packets that no client library sends. The server's ends are attached
through separate mappings, as in another process.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Self

from nnfmq.base.memory import Memory
from nnfmq.hal.types import MeasureTiming, Model, Request
from nnfmq.queue import MessageQueue
from nnfmq.serialize.codec import decode_result, encode_request
from nnfmq.serialize.packets import ResultPacket
from support import models

RECORD_BYTES = 24
LIMIT_NS = 20_000_000_000

# One bad record of each kind, as VTS' ValidateBurst makes them, by the specification's layout.
BAD_RECORDS = (
    struct.pack("<B3xIIII4x", 0, 10, 10, 10, 10),
    struct.pack("<B3xB3xIIII", 1, 0, 0, 0, 0, 10),
    struct.pack("<B3xI16x", 2, 0),
    struct.pack("<B3xB3xIIII", 3, 0, 0, 0, 0, 10),
    struct.pack("<B3xI16x", 4, 0),
    struct.pack("<B3xi16x", 5, 2**31 - 1),
    struct.pack("<B3xi16x", 6, 1),
)


def split(packet: bytes) -> list[bytes]:
    """Return a packet's records."""
    return [packet[start : start + RECORD_BYTES] for start in range(0, len(packet), RECORD_BYTES)]


def duplicate(memory: Memory) -> Memory:
    """Return another mapping of the same memory, as a peer gets one."""
    return Memory.adopt(os.dup(memory.fileno()))


def server_end(queue: MessageQueue) -> MessageQueue:
    """Attach to a queue as the driver does."""
    return MessageQueue.attach(queue.descriptor, duplicate(queue.memory))


class BurstClient:
    """The application's end of a burst, with its implementation of `get_memories`. Close it, or use `with`."""

    def __init__(self, requests: MessageQueue, results: MessageQueue) -> None:
        self.requests = requests
        self.results = results
        self.memories: dict[int, Memory] = {}
        self.requested_slots: list[list[int]] = []
        self.memories_requested = threading.Event()
        self.on_get_memories: Callable[[Sequence[int]], list[Memory]] = self.known
        self._resources = ExitStack()

    @classmethod
    def create(cls, request_records: int = 1024, result_records: int = 1024) -> Self:
        """Create both queues."""
        return cls(
            MessageQueue.create(RECORD_BYTES, request_records, label="requests"),
            MessageQueue.create(RECORD_BYTES, result_records, label="results"),
        )

    def server_ends(self) -> tuple[MessageQueue, MessageQueue]:
        """Attach to both queues as the driver does; the caller owns what it gets."""
        return server_end(self.requests), server_end(self.results)

    # ------------------------------------------------------------------------------------------------ memories

    def give(self, slot: int, size_bytes: int, *, one_writer: bool = False) -> Memory:
        """Create a memory and assign it to `slot`. The client closes it."""
        memory = self._resources.enter_context(Memory.create(size_bytes, "burst", one_writer=one_writer))
        self.memories[slot] = memory
        return memory

    def known(self, slots: Sequence[int]) -> list[Memory]:
        """Return a separate mapping for each slot."""
        return [duplicate(self.memories[slot]) for slot in slots]

    def get_memories(self, slots: Sequence[int]) -> list[Memory]:
        """Return the memories of slots that the server requests (IBurstCallback), and record the slots."""
        self.requested_slots.append(list(slots))
        self.memories_requested.set()
        return self.on_get_memories(slots)

    # ------------------------------------------------------------------------------------------------ packets

    def call(self, packet: bytes) -> bytes:
        """Send a packet, malformed or not, and return the result's bytes."""
        assert self.requests.send(packet)
        return self.receive()

    def receive(self) -> bytes:
        """Return the next result's bytes."""
        result = self.results.receive(time.monotonic_ns() + LIMIT_NS, 0)
        assert result is not None, "the server sent no result"
        return result

    def execute(self, packet: bytes) -> ResultPacket:
        """Send a packet and return the decoded result."""
        return decode_result(self.call(packet))

    # ------------------------------------------------------------------------------------------------ the end

    def close(self) -> None:
        """Close the memories and both queues."""
        self._resources.close()
        self.requests.close()
        self.results.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def packet_for(model: Model, slots: tuple[int, int] = (0, 1), measure: MeasureTiming = MeasureTiming.NO) -> bytes:
    """Return the request packet that reads `model`'s inputs from the first slot and writes to the second."""
    request: Request = models.request_for(model, ())
    return encode_request(request.inputs, request.outputs, slots, measure)


def give_pools(client: BurstClient, model: Model, slots: tuple[int, int] = (0, 1)) -> tuple[Memory, Memory]:
    """Create memories of the sizes that `packet_for` needs, in its slots."""
    inputs, outputs = models.pool_bytes(model)
    return client.give(slots[0], inputs), client.give(slots[1], outputs)
