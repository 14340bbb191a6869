"""A driver's statistics area: shared memory that workers write and clients read, or private memory if it is embedded.

Shared memory is sealed against new writable mappings (F_SEAL_FUTURE_WRITE) as soon as the supervisor has mapped it. So
whoever gets its fd can only read, also if they open the file again. Workers inherit the mapping instead of making one:
it is given to the forked child of `inherited`, and to no other. An embedded driver has one client; for each reading it
makes a constant copy. docs/reference/statistics.md describes the layout.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from contextlib import AbstractContextManager

from nnfmq.base.memory import Memory, write_all
from nnfmq.base.ownership import Closable
from nnfmq.observe import statistics_layout as layout
from nnfmq.observe.recorder_core import begin_change, end_change
from nnfmq.observe.statistics_layout import WORD_BYTES, text_to_words
from nnfmq.observe.statistics_writer import SlotWriter

__all__ = ["SharedStatistics", "StatisticsArea"]


class StatisticsArea:
    """The statistics of an embedded driver, which has one client. Slots count from 0."""

    def __init__(self) -> None:
        self._fill(memoryview(bytearray(layout.area_bytes(1))), 1)
        self._writer = SlotWriter(self._view, 0)

    def _fill(self, view: memoryview, slots: int) -> None:
        self._view = view
        self._header = view[: layout.HEADER_WORDS * WORD_BYTES].cast("Q")
        self._counts: Counter[int] = Counter()  # not read from the area: a worker that was taken over can write to it
        self.set(layout.HEADER_SLOTS, slots)
        self.set(layout.DRIVER_PID, os.getpid())
        self.set(layout.DRIVER_START, time.monotonic_ns())
        self.set(layout.HEADER_MAGIC, layout.MAGIC)

    def open_for_reading(self) -> tuple[int, int]:
        """Return an fd from which a client can map the statistics, and their size. The caller closes the fd.

        Raises:
            ResourceExhaustedTransient: If no memory or no fd is left.
        """
        data = self._writer.complete_copy(self._view)
        with Memory.create_constant(len(data), lambda fd: write_all(fd, data), layout.DRIVER_PAGE) as copy:
            return os.dup(copy.fileno()), copy.size_bytes

    def set(self, word: int, value: int) -> None:
        """Publish a word of the header."""
        self._header[word] = value

    def add(self, word: int) -> None:
        """Add 1 to a word of the header."""
        self._counts[word] += 1
        self._header[word] = self._counts[word]

    def set_client_class(self, slot: int, client_class: int) -> None:
        """Publish the class of the client that has a slot, or will have it."""
        begin = (layout.slot_at(slot) + layout.CLIENT_CLASS) * WORD_BYTES
        self._view[begin : begin + WORD_BYTES] = client_class.to_bytes(WORD_BYTES, "little")

    def writer(self, slot: int) -> SlotWriter:
        """Return the writer of a slot."""
        assert slot == 0, "an embedded driver has one client"
        return self._writer


class SharedStatistics(StatisticsArea, Closable):
    """The statistics of a supervisor and its workers, with a slot for each client. Close it, or use `with`.

    `version` is the driver's release, for display.
    """

    def __init__(self, slots: int, version: str, memory_limit_bytes: int) -> None:
        self._memory = Memory.create(layout.area_bytes(slots), layout.DRIVER_PAGE, one_writer=True)
        self._memory.keep_from_children()
        self._fill(self._memory.view, slots)
        text = text_to_words(version, layout.DRIVER_VERSION_WORDS)
        self._view[layout.DRIVER_VERSION * WORD_BYTES :][: len(text)] = text
        self.set(layout.MEMORY_LIMIT, memory_limit_bytes)

    def fileno(self) -> int:
        """Return the fd, which stays owned by this object."""
        return self._memory.fileno()

    def open_for_reading(self) -> tuple[int, int]:
        """See `StatisticsArea.open_for_reading`."""
        return os.dup(self.fileno()), self._memory.size_bytes

    def writer(self, slot: int) -> SlotWriter:
        """Return the writer of a slot, for the worker that has it."""
        return SlotWriter(self._view, slot)

    def release(self, slot: int) -> None:
        """Free the slot of a worker that has exited, however it ended."""
        begin = layout.slot_at(slot) * WORD_BYTES
        view = self._view[begin : begin + layout.SLOT_BYTES]
        begin_change(view)
        view[WORD_BYTES:] = bytes(layout.SLOT_BYTES - WORD_BYTES)  # all but CHANGE
        end_change(view)

    def inherited(self) -> AbstractContextManager[None]:
        """Let children that are forked in the block inherit the mapping."""
        return self._memory.inherited()

    def keep_from_children(self) -> None:
        """Do not let forked children inherit the mapping, as before `inherited`."""
        self._memory.keep_from_children()

    def close(self) -> None:
        """Release the memory. Idempotent."""
        self._view = self._header = memoryview(b"")
        self._memory.close()
