"""How the workers of one driver share the cores: a page in which each says that it computes, or waits for its turn.

The page has for each worker

* a busy byte, which only that worker writes: 1 while its thread pool runs a model. Each pool counts them before each
  launch, and uses no more than its share of the cores (`engines.compiled.thread_pool`);
* a claim byte, which only that worker writes: 1 while it has or awaits a turn. The pools count it like a busy byte;
* a turn, IDLE, WAITING or RUNNING, and what the choice of the next turn depends on (`turn_choice`). At most as many
  executions have a turn as there are cores; see `core_turns`, whose workers change the page under a file lock.

A worker that dies at any instruction leaves at most its own entries, which the supervisor clears when the worker has
exited. The kernel releases the lock.

The page is trusted: only the supervisor and its workers have it (see docs/explanation/security-model.md).
"""

from __future__ import annotations

from typing import Self

import numpy as np

from nnfmq.engines.compiled.thread_pool import CoreDivision
from nnfmq.memory import Memory
from nnfmq.queue.futex import ALL_BITS, futex_wake

__all__ = ["IDLE", "RUNNING", "SLOTS_MAX", "WAITING", "CorePage", "CoreShares"]

SLOTS_MAX = 64
IDLE, WAITING, RUNNING = 0, 1, 2
_CLAIMS, _TURNS, _WORDS, _TIMES = (SLOTS_MAX * number for number in (1, 2, 3, 7))
_FIELDS = 5
_VIRTUAL_NOW = _FIELDS * SLOTS_MAX
_PAGE_BYTES = _TIMES + 8 * (_VIRTUAL_NOW + 1)


class CorePage:
    """The page's fields, as arrays with an entry for each slot from 0 to SLOTS_MAX - 1. Borrows `memory`.

    Attributes:
        busy: The busy bytes.
        claims: The claim bytes.
        turns: IDLE, WAITING or RUNNING.
        words: Futex words, which change with each turn.
        due_ns: When the waiting execution is due.
        has_deadline: Whether that is its deadline.
        virtual_ns: The virtual time of the client.
        expected_ns: How long the execution will probably run.
        until_ns: Until when the running execution counts.
    """

    def __init__(self, memory: Memory) -> None:
        view = memory.view
        self.busy = np.frombuffer(view, np.uint8, SLOTS_MAX)
        self.claims = np.frombuffer(view, np.uint8, SLOTS_MAX, _CLAIMS)
        self.turns = view[_TURNS : _TURNS + SLOTS_MAX]
        self.words = view[_WORDS : _WORDS + 4 * SLOTS_MAX].cast("I")
        times = view[_TIMES:_PAGE_BYTES].cast("q")
        self.due_ns, self.has_deadline, self.virtual_ns, self.expected_ns, self.until_ns = (
            times[field * SLOTS_MAX : (field + 1) * SLOTS_MAX] for field in range(_FIELDS)
        )
        self._virtual_now = times[_VIRTUAL_NOW:]
        self._words_address = int(self.busy.ctypes.data) + _WORDS

    @property
    def virtual_now_ns(self) -> int:
        """The virtual time of the client that got a turn last."""
        return self._virtual_now[0]

    @virtual_now_ns.setter
    def virtual_now_ns(self, value: int) -> None:
        self._virtual_now[0] = value

    def word_address(self, slot: int) -> int:
        """Return the address of a futex word."""
        return self._words_address + 4 * slot

    def wake(self, slot: int) -> None:
        """Let the worker of `slot` look at its turn again."""
        self.words[slot] = (self.words[slot] + 1) % (1 << 32)
        futex_wake(self.word_address(slot), ALL_BITS)

    def division(self, slot: int) -> CoreDivision:
        """Return the busy bytes, for the pool of the worker with `slot`."""
        return CoreDivision(self.busy, self.claims, slot)

    def release(self) -> None:
        """Let the memory be unmapped. The object must not be used afterwards."""
        self.__dict__.clear()


class CoreShares:
    """The supervisor's side, for workers with the slots 1 to `slots`. Owns its memory; close it, or use `with`.

    Forked children do not inherit the mapping; workers map the memory themselves.
    """

    def __init__(self, slots: int) -> None:
        assert slots <= SLOTS_MAX
        self.memory = Memory.create(_PAGE_BYTES, "nnfmq-cores")
        self._page = CorePage(self.memory)
        self.memory.keep_from_children()

    def release(self, slot: int) -> None:
        """Take back what a worker that has exited has of the cores, and let those that wait choose the next turn."""
        page = self._page
        page.busy[slot - 1] = page.claims[slot - 1] = 0
        page.turns[slot - 1] = IDLE
        for waiting, turn in enumerate(bytes(page.turns)):
            if turn == WAITING:
                page.wake(waiting)

    def close(self) -> None:
        """Release the memory. Idempotent."""
        self._page.release()
        self.memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
