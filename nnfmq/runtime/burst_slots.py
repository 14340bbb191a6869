"""Ids by which a burst and its driver name memories: the slots of a HIDL burst, the tokens of an AIDL burst.

An allocator does not keep a memory alive. If its owner has closed or dropped it, its id is `expired`, and the burst
makes the driver forget the id. Freed slots are reused, last in, first out; tokens never are.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.types import Pool


class SlotAllocator:
    """Slots 0, 1, 2, ... of the memories of one burst. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memories: dict[int, weakref.ref[Pool]] = {}
        self._free: list[int] = []
        self._unused = itertools.count()

    def add(self, memory: Pool) -> int:
        """Return a new slot for `memory`. Keeps only a weak reference."""
        with self._lock:
            slot = self._free.pop() if self._free else next(self._unused)
            self._memories[slot] = weakref.ref(memory)
            return slot

    def find(self, memory: Pool) -> int | None:
        """Return the slot of `memory`, or None if it has none."""
        with self._lock:
            return next((slot for slot, reference in self._memories.items() if reference() is memory), None)

    def find_or_add(self, memory: Pool) -> int:
        """Return the slot of `memory`, a new one if it has none."""
        slot = self.find(memory)
        return self.add(memory) if slot is None else slot

    def free(self, slot: int) -> None:
        """Free a slot for reuse. Idempotent."""
        with self._lock:
            if self._memories.pop(slot, None) is not None:
                self._make_reusable(slot)

    def _make_reusable(self, slot: int) -> None:
        self._free.append(slot)

    def expired(self) -> list[int]:
        """Return the slots whose memory was closed or garbage-collected, and that are not freed yet."""
        with self._lock:
            found = [(slot, reference()) for slot, reference in self._memories.items()]
        return [slot for slot, memory in found if memory is None or getattr(memory, "closed", False)]

    def get_memories(self, slots: Sequence[int]) -> list[Pool]:
        """Return the memories of `slots`.

        Raises:
            InvalidArgument: If a slot was never used or is free, or its memory was garbage-collected.
        """
        with self._lock:
            found = [self._memories[slot]() if slot in self._memories else None for slot in slots]
        for slot, memory in zip(slots, found, strict=True):
            if memory is None:
                raise InvalidArgument(f"slot {slot} has no memory in this burst")
        return [memory for memory in found if memory is not None]


class TokenAllocator(SlotAllocator):
    """Tokens, which are never reused: a driver that missed a release cannot mistake one memory for another."""

    def _make_reusable(self, _token: int) -> None:
        pass
