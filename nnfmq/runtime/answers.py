"""OneShot: an answer that one thread waits for and another gives.

`concurrent.futures` would do, but for signals: its condition is entered by Python code, and an exception from a signal
handler at the wrong instruction leaves the lock behind it held for ever, with the giver, the watcher's thread, waiting
for it. `SimpleQueue` is C: it has no such instruction, and giving never blocks.
"""

from __future__ import annotations

import time
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from nnfmq.hal.errors import MissedDeadlineTransient, NnfmqError

AnswerT = TypeVar("AnswerT")


class OneShot(Generic[AnswerT]):
    """One answer, or the error that stands for it. Whoever gives first wins; later ones are never looked at."""

    __slots__ = ("_given",)

    def __init__(self) -> None:
        self._given: SimpleQueue[AnswerT | NnfmqError] = SimpleQueue()

    def give(self, answer: AnswerT | NnfmqError) -> None:
        """Give the answer; never blocks."""
        self._given.put(answer)

    def wait(self, deadline_ns: int | None) -> AnswerT:
        """Return the answer or raise the error that was given; blocks. Raises MissedDeadlineTransient."""
        left = None if deadline_ns is None else max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)
        try:
            answer = self._given.get(timeout=left)
        except Empty:
            raise MissedDeadlineTransient("the deadline passed before the driver answered") from None
        if isinstance(answer, NnfmqError):
            raise answer
        return answer
