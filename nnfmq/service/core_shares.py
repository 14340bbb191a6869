"""How the workers of one driver divide the cores: a shared page in which each worker shows that it computes.

The page has a busy byte for each worker, which only that worker writes: 1 while its thread pool runs a model. Each pool
counts them before each launch, and uses no more than its share of the cores (`engines.compiled.thread_pool`). A worker
that dies at any instruction leaves at most its own byte, which the supervisor clears when the worker has exited.

The page is trusted: only the supervisor and its workers have it (see docs/explanation/security-model.md).
"""

from __future__ import annotations

from typing import Self

import numpy as np

from nnfmq.engines.compiled.thread_pool import CoreDivision, divide_cores
from nnfmq.memory import Memory

_WORD_BYTES = 8


class CoreShares:
    """The supervisor's side, for workers with the slots 1 to `slots`. Owns its memory; close it, or use `with`.

    Forked children do not inherit the mapping; workers map the memory themselves.
    """

    def __init__(self, slots: int) -> None:
        self.memory = Memory.create(-(-slots // _WORD_BYTES) * _WORD_BYTES, "nnfmq-cores")
        self._busy = self.memory.view
        self.memory.keep_from_children()

    def release(self, slot: int) -> None:
        """Take back what a worker that has exited has of the cores."""
        self._busy[slot - 1] = 0

    def close(self) -> None:
        """Release the memory. Idempotent."""
        self._busy = memoryview(bytearray(len(self._busy)))
        self.memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def join_division(memory: Memory, slot: int) -> None:
    """Let this worker, which has the slot `slot`, divide the cores with the others. Takes ownership of `memory`.

    The mapping stays as long as the process lives.
    """
    with memory:
        divide_cores(CoreDivision(np.frombuffer(memory.view, np.uint8), slot - 1))
