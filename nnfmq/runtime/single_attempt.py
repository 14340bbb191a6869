"""SingleAttempt: of several threads that need the same work done, one does it, and the others wait for its result.

The claim is a `dict.setdefault`, which is atomic, and is found by its identity afterwards, as in `exclusive_use`: a
signal handler may raise between any two steps, and must not leave a claim behind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from nnfmq.deadlines import has_passed
from nnfmq.hal.errors import MissedDeadline, MissedDeadlineTransient, NnfmqError
from nnfmq.runtime.future import Future

__all__ = ["SingleAttempt"]

_CLAIM = 0

ResultT = TypeVar("ResultT")


class SingleAttempt(Generic[ResultT]):
    """Runs one attempt at a time. Thread-safe."""

    def __init__(self) -> None:
        self._running: dict[int, Future[ResultT]] = {}

    def run(self, attempt: Callable[[], ResultT], deadline_ns: int | None) -> ResultT:
        """Return the result of `attempt`, or of the attempt that another thread makes meanwhile; blocks.

        If the other thread's deadline passes before this one's, or it is interrupted, this thread makes the attempt.

        Raises:
            MissedDeadline: If `deadline_ns` passes while another thread makes the attempt.
            NnfmqError: The error of the attempt.
        """
        while True:
            own: Future[ResultT] = Future()
            try:
                running = self._running.setdefault(_CLAIM, own)
                if running is own:
                    result = attempt()
                    own.set_result(result)
                    return result
            except NnfmqError as error:
                own.set_exception(error)
                raise
            finally:
                if self._running.get(_CLAIM) is own:
                    del self._running[_CLAIM]
                own.set_exception(MissedDeadlineTransient("the thread that made the attempt was interrupted"))
            try:
                return running.result(deadline_ns)
            except MissedDeadline:
                if has_passed(deadline_ns):
                    raise
