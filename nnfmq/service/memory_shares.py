"""What all clients of one driver may have together: a shared page with one word for each worker.

Each worker writes only the word of its own slot, with the bytes that it has charged to its client; the sum of all words
is the total. So nothing has to be added atomically, and a worker that dies at any instruction leaves no wrong count:
the supervisor sets its word to 0 when it has exited. Two workers that charge at the same time both write before they
read the sum, so both may be refused where one would fit.

The page is trusted: only the supervisor and its workers have it (see docs/explanation/security-model.md).
"""

from __future__ import annotations

from typing import Self

from nnfmq.memory import Memory

_WORD_BYTES = 8


class MemoryShares:
    """The supervisor's side: it gives each worker a slot. Owns its memory; close it, or use `with`.

    Forked children do not inherit the mapping; workers map the memory themselves.
    """

    def __init__(self, limit: int, slots: int) -> None:
        self.memory = Memory.create((1 + slots) * _WORD_BYTES, "nnfmq-shares")
        self._words = self.memory.view.cast("q")
        self.memory.keep_from_children()
        self._words[0] = limit
        self._free = list(range(slots, 0, -1))

    def take(self) -> int:
        """Return a slot that no worker has.

        Raises:
            IndexError: If all are taken.
        """
        return self._free.pop()

    def release(self, slot: int) -> None:
        """Take back the slot of a worker that has exited, or was never started."""
        self._words[slot] = 0
        self._free.append(slot)

    def close(self) -> None:
        """Release the memory. Idempotent."""
        self._words = memoryview(bytes(_WORD_BYTES)).cast("q")
        self.memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MemoryShare:
    """A worker's side: its own slot. Takes ownership of `memory`, which it keeps as long as the process lives.

    `limit` is how many bytes all clients may have together.
    """

    def __init__(self, memory: Memory, slot: int) -> None:
        self._memory = memory
        self._words = memory.view.cast("q")
        self._slot = slot
        self.limit = self._words[0]

    def publish(self, charged: int) -> None:
        """Tell the other workers how many bytes this one has charged."""
        self._words[self._slot] = charged  # one aligned store of 8 bytes

    def total(self) -> int:
        """Return the sum of what all workers have charged."""
        return sum(self._words[1:])
