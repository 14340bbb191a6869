"""The driver's end of a burst's memory slots: slot number → mapped memory.

The numbers are the client's and carry no generation: a freed number comes back with other memory behind it. So every
change here bumps `generation`, and whatever was derived from a slot is worth nothing once the generation has moved on.
A freed memory is closed at once; executions that still use it hold its mapping through their arrays. (BUR-12, BUR-21)
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from nnfmq.hal.errors import InvalidArgument
from nnfmq.service.memory_quota import Received


class MemoryCache:
    """Slots of one burst. Thread-safe: the listener adds and reads, the session removes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memories: dict[int, Received] = {}
        self.generation = 0

    def unknown(self, slots: Iterable[int]) -> list[int]:
        """Return the distinct slots that have no memory here, in ascending order."""
        memories = self._memories  # no lock: this runs for every request, and a look into a dict is atomic
        missing = {slot for slot in slots if slot not in memories}
        return sorted(missing) if missing else []

    def add(self, slot: int, memory: Received) -> None:
        """Take over `memory` as `slot`, in place of what was there."""
        with self._lock:
            old = self._memories.pop(slot, None)
            self._memories[slot] = memory
            self.generation += 1
        if old is not None:
            old.close()

    def remove(self, slot: int) -> None:
        """Forget `slot` and close its memory; an unknown slot is no error (N-REQ-4)."""
        with self._lock:
            memory = self._memories.pop(slot, None)
            self.generation += 1
        if memory is not None:
            memory.close()

    def memories(self, slots: Sequence[int]) -> tuple[int, tuple[Received, ...]]:
        """Return the generation and the memories of `slots`, in order. Raises InvalidArgument for an unknown slot."""
        with self._lock:
            missing = [slot for slot in slots if slot not in self._memories]
            if missing:
                raise InvalidArgument(f"memory slot {missing[0]} is unknown: it was freed, or never given")
            return self.generation, tuple(self._memories[slot] for slot in slots)

    def close(self) -> None:
        """Close every memory."""
        with self._lock:
            memories, self._memories = self._memories, {}
            self.generation += 1
        for memory in memories.values():
            memory.close()
