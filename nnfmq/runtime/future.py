"""Future: an answer that threads wait for and another gives.

`concurrent.futures` would do, but for signals: its condition is entered by Python code, and an exception from a signal
handler at the wrong instruction leaves the lock behind it held for ever, with the giver, the watcher's thread, waiting
for it. `SimpleQueue` is C: it has no such instruction, and giving never blocks. Each waiter has one of his own; the two
lists are only appended to, which is atomic, and whoever waits looks at the answer after he has put his name down.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from nnfmq.hal.errors import MissedDeadlineTransient, NnfmqError

AnswerT = TypeVar("AnswerT")


class Future(Generic[AnswerT]):
    """One answer, or the error that stands for it. Whoever gives first wins; later ones are never looked at."""

    __slots__ = ("_given", "_waiters")

    def __init__(self) -> None:
        self._given: list[AnswerT | NnfmqError] = []
        self._waiters: list[SimpleQueue[Any]] = []

    def give(self, answer: AnswerT | NnfmqError) -> None:
        """Give the answer; never blocks."""
        self._given.append(answer)
        for waiter in list(self._waiters):
            waiter.put(None)

    def tell(self, notice: object) -> None:
        """Tell those who wait now something that is not the answer; never blocks."""
        for waiter in list(self._waiters):
            waiter.put(notice)

    @property
    def is_given(self) -> bool:
        """Return True once there is an answer."""
        return bool(self._given)

    def wait(self, deadline_ns: int | None, on_notice: Callable[[Any], None] = lambda _notice: None) -> AnswerT:
        """Return the answer or raise the error that was given; blocks. Raises MissedDeadlineTransient.

        `on_notice` is called on this thread with what is told meanwhile; what it raises ends the wait.
        """
        if not self._given:
            self._sleep(deadline_ns, on_notice)
        answer = self._given[0]
        if isinstance(answer, NnfmqError):
            raise answer
        return answer

    def _sleep(self, deadline_ns: int | None, on_notice: Callable[[Any], None]) -> None:
        waiter: SimpleQueue[Any] = SimpleQueue()
        self._waiters.append(waiter)
        if self._given:
            return
        while True:
            left = None if deadline_ns is None else max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)
            try:
                notice = waiter.get(timeout=left)
            except Empty:
                if self._given:
                    return
                raise MissedDeadlineTransient("the deadline passed before the driver answered") from None
            if notice is None:
                return
            on_notice(notice)
