"""Numbers by which a burst and its driver name memories: slots of a HIDL burst, tokens of an AIDL one.

A table does not keep a memory alive: one that its owner has closed or dropped is `gone`, and the burst then tells the
driver to forget its number. Freed slots come back last in, first out; tokens never do.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.types import Pool


class SlotAllocator:
    """Numbers 0, 1, 2, ... that stand for memories within a burst. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memories: dict[int, weakref.ref[Pool]] = {}
        self._free: list[int] = []
        self._new = itertools.count()

    def add(self, memory: Pool) -> int:
        """Return the number that stands for `memory` from now on; the memory stays the caller's."""
        with self._lock:
            number = self._free.pop() if self._free else next(self._new)
            self._memories[number] = weakref.ref(memory)
            return number

    def known(self, memory: Pool) -> int | None:
        """Return the number that stands for `memory`, None where there is none."""
        with self._lock:
            return next((number for number, other in self._memories.items() if other() is memory), None)

    def number_of(self, memory: Pool) -> int:
        """Return the number that stands for `memory`, a new one where there is none yet."""
        known = self.known(memory)
        return self.add(memory) if known is None else known

    def free(self, number: int) -> None:
        """Forget a number; an unknown one is no error."""
        with self._lock:
            if self._memories.pop(number, None) is not None:
                self._take_back(number)

    def _take_back(self, number: int) -> None:
        self._free.append(number)

    def gone(self) -> list[int]:
        """Return the numbers whose memory was closed or dropped, and that are not freed yet."""
        with self._lock:
            found = [(number, other()) for number, other in self._memories.items()]
        return [number for number, memory in found if memory is None or getattr(memory, "closed", False)]

    def get_memories(self, numbers: Sequence[int]) -> list[Pool]:
        """Return what the slots stand for. Raises InvalidArgument for one that is out of range, freed or dropped."""
        with self._lock:
            found = [self._memories[number]() if number in self._memories else None for number in numbers]
        for number, memory in zip(numbers, found, strict=True):
            if memory is None:
                raise InvalidArgument(f"slot {number} stands for no memory of this burst")
        return [memory for memory in found if memory is not None]


class TokenAllocator(SlotAllocator):
    """Numbers that never come back: a driver that missed a release cannot take one memory for another."""

    def _take_back(self, _number: int) -> None:
        pass
