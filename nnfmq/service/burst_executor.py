"""Executor of a burst's requests: the burst's memory slots, and the binding of requests to their memory.

The client chooses the slot ids and reuses them: after a slot was freed, the same id may name other memory. Therefore
every change of a slot increments `version`, and what was derived from the slots is valid only for the version at which
it was derived. A freed memory is closed immediately; an execution that still uses it keeps its mapping through the
arrays (BUR-12, BUR-21).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from nnfmq.engines.execution import DEFAULT_RUN_OPTIONS, RunOptions
from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.types import OutputShape, Request
from nnfmq.observe.recorder_core import ModelRecorder
from nnfmq.serialize.burst_deadline import DeadlineWord
from nnfmq.serialize.packets import RequestPacket
from nnfmq.service.driver_prepared_model import BoundExecution, DriverPreparedModel, raise_if_deadline_passed
from nnfmq.service.memory_quota import ReceivedMemory

CACHED_PACKET_BYTES_MAX = 4096
"""Larger packets are not cached, because the client chooses their size."""


class BurstExecutor(Protocol):
    """Binds a burst's requests and caches the memory of its slots (`IBurstExecutorWithCache`).

    `add_cache_entry` and `bind` are called by the listener thread, `remove_cache_entry` by any thread.
    """

    version: int
    """Incremented by each change of a slot."""

    def unknown_slots(self, slots: Sequence[int]) -> list[int]:
        """Return the distinct ones of `slots` that have no cache entry, in ascending order."""
        ...

    def add_cache_entry(self, memory: ReceivedMemory, slot: int) -> None:
        """Make `memory` the memory of `slot`. Takes ownership of it."""
        ...

    def remove_cache_entry(self, slot: int) -> None:
        """Forget a slot and close its memory. Does nothing if the slot is unknown (N-REQ-4)."""
        ...

    def bind(self, request: RequestPacket) -> tuple[int, BoundExecution]:
        """Bind a request to the memory of its slots, and return the `version` of the slots that were used.

        Raises:
            InvalidArgument: If a slot is unknown or the request is invalid.
            NnfmqError: If the engine cannot bind the request.
        """
        ...

    def close(self) -> None:
        """Close all memory. Idempotent."""
        ...


class CachingBurstExecutor:
    """The `BurstExecutor` of a prepared model. Thread-safe."""

    def __init__(self, prepared: DriverPreparedModel) -> None:
        self._prepared = replace(prepared, wakes_next=False)  # the burst server does, after its reply
        self._lock = threading.Lock()
        self._memories: dict[int, ReceivedMemory] = {}
        self.version = 0

    def unknown_slots(self, slots: Sequence[int]) -> list[int]:
        """See `BurstExecutor.unknown_slots`."""
        memories = self._memories  # without the lock: a dict lookup is atomic, and `bind` checks again
        return sorted({slot for slot in slots if slot not in memories})

    def add_cache_entry(self, memory: ReceivedMemory, slot: int) -> None:
        """See `BurstExecutor.add_cache_entry`. Closes the slot's previous memory."""
        with self._lock:
            previous = self._memories.pop(slot, None)
            self._memories[slot] = memory
            self.version += 1
        if previous is not None:
            previous.close()

    def remove_cache_entry(self, slot: int) -> None:
        """See `BurstExecutor.remove_cache_entry`."""
        with self._lock:
            memory = self._memories.pop(slot, None)
            self.version += 1
        if memory is not None:
            memory.close()

    def bind(self, request: RequestPacket) -> tuple[int, BoundExecution]:
        """See `BurstExecutor.bind`."""
        version, memories = self.memories(request.slots)
        return version, self._prepared.bind(Request(request.inputs, request.outputs, memories))

    def memories(self, slots: Sequence[int]) -> tuple[int, tuple[ReceivedMemory, ...]]:
        """Return the version, and the memories of `slots` at that version.

        Raises:
            InvalidArgument: If a slot is unknown.
        """
        with self._lock:
            for slot in slots:
                if slot not in self._memories:
                    raise InvalidArgument(f"memory slot {slot} is unknown: it was freed, or never given")
            return self.version, tuple(self._memories[slot] for slot in slots)

    def close(self) -> None:
        """See `BurstExecutor.close`."""
        with self._lock:
            memories, self._memories = self._memories, {}
            self.version += 1
        for memory in memories.values():
            memory.close()


class DeadlineExecution:
    """A `BoundExecution` of a request with a deadline, which the client stores in `word` before each run (BUR-18)."""

    __slots__ = ("_bound", "_options", "_word")

    def __init__(self, bound: BoundExecution, word: DeadlineWord) -> None:
        self._bound = bound
        self._word = word
        self._options = RunOptions()  # one object: creating one for each run costs more than a small model

    @property
    def recorder(self) -> ModelRecorder:
        """See `BoundExecution`."""
        return self._bound.recorder

    @property
    def engine_begin_ns(self) -> int:
        """See `BoundExecution`."""
        return self._bound.engine_begin_ns

    @property
    def engine_end_ns(self) -> int:
        """See `BoundExecution`."""
        return self._bound.engine_end_ns

    def run(self, options: RunOptions = DEFAULT_RUN_OPTIONS) -> tuple[OutputShape, ...]:
        """See `BoundExecution.run`. The options are those of the deadline.

        Raises:
            MissedDeadlinePersistent: If the deadline has passed already.
            MissedDeadlineTransient: If it passes meanwhile.
        """
        deadline_ns = self._word.load()
        raise_if_deadline_passed(deadline_ns)
        self._options.deadline_ns = deadline_ns
        return self._bound.run(self._options)

    def abort(self) -> None:
        """See `BoundExecution.abort`."""
        self._bound.abort()


class CachedExecution(Struct):
    """The last request of a burst, bound to its memory; valid while the packet and the slots stay the same.

    Attributes:
        packet: The raw request packet: the cache key.
        version: The executor's version at which the request was bound: the other part of the key.
        is_measured: Whether the client asks for times.
        bound: The bound request.
        shapes: The output shapes of the last success, None before the first. A program whose shapes are known returns
            the same tuple from each run.
        reply: The encoded result packet for `shapes` without times.
    """

    packet: bytes
    version: int
    is_measured: bool
    bound: BoundExecution
    shapes: tuple[OutputShape, ...] | None = None
    reply: bytes = b""
