"""Waits of threads: a Future, one attempt for several threads, and bursts that may block their event loop.

`concurrent.futures.Future` is not: its Condition is acquired in Python code, so an exception that a signal handler
raises at the wrong instruction leaves the lock held, and the watcher thread then blocks in `set_result` forever. Here
each waiting thread blocks on its own `queue.SimpleQueue`, which is implemented in C, and setting never blocks. A
waiting thread registers its queue first and checks for a result second, so no wake-up is lost. `list.append` and
`list.remove` are atomic in CPython with and without the GIL.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from nnfmq.base.channel import NO_WAIT
from nnfmq.base.deadlines import has_passed
from nnfmq.base.ownership import Claims, claimed
from nnfmq.hal.errors import DeviceUnavailable, MissedDeadline, MissedDeadlineTransient, NnfmqError

__all__ = ["BlockingWait", "Future", "ResultWaiter", "SingleAttempt"]

ResultT = TypeVar("ResultT")


class _Completion(NamedTuple):
    result: Any
    error: NnfmqError | None


class ResultWaiter(Protocol):
    """A receiver of the results of a Future: the queue of a thread, or the waiter of an asyncio task."""

    def put(self, notification: Any, /) -> None:
        """Receive a notification, or None if there is a result. Must not block or raise. Called on any thread."""
        ...


class Future(Generic[ResultT]):
    """One result, or the error that replaces it. The first one set is final; later ones are ignored. Thread-safe.

    It keeps a copy of the error, without traceback, context and cause, and raises copies: the frames of a traceback
    mostly refer to the future, a cycle that would keep them and all that their callers refer to.
    """

    __slots__ = ("_completions", "_waiters", "keeps")

    def __init__(self, keeps: object = None) -> None:
        self.keeps = keeps  # what must not be collected before there is a result: the connection that receives it
        self._completions: list[_Completion] = []
        self._waiters: list[ResultWaiter] = []

    def set_result(self, result: ResultT) -> None:
        """Complete with a result and wake the waiting threads. Does not block."""
        self._complete(_Completion(result, None))

    def set_exception(self, error: NnfmqError) -> None:
        """Complete with an error, which `result` raises, and wake the waiting threads. Does not block."""
        self._complete(_Completion(None, copy(error)))

    def _complete(self, completion: _Completion) -> None:
        self._completions.append(completion)
        self.keeps = None
        for waiter in list(self._waiters):
            waiter.put(None)

    def notify(self, notification: object) -> None:
        """Pass `notification` (not None) to the `on_notification` of every waiting thread. Does not block."""
        for waiter in list(self._waiters):
            waiter.put(notification)

    def add_waiter(self, waiter: ResultWaiter) -> None:
        """Call `waiter.put(None)` when there is a result, now if there is one; perhaps twice."""
        self._waiters.append(waiter)
        if self._completions:  # perhaps set before the waiter was registered
            waiter.put(None)

    def discard_waiter(self, waiter: ResultWaiter) -> None:
        """Keep nothing of a waiter. Idempotent."""
        with suppress(ValueError):
            self._waiters.remove(waiter)

    def done(self) -> bool:
        """Return True once a result or an error is set."""
        return bool(self._completions)

    def result(
        self, deadline_ns: int | None, on_notification: Callable[[Any], None] = lambda _notification: None
    ) -> ResultT:
        """Block until complete and return the result.

        `on_notification` is called on this thread with each notification that arrives meanwhile. An exception that it
        raises ends the wait.

        Raises:
            NnfmqError: The error that was set.
            MissedDeadlineTransient: If `deadline_ns` (monotonic clock, ns; None = no limit) passes first.
        """
        if not self._completions:
            self._wait(deadline_ns, on_notification)
        result, error = self._completions[0]
        if error is not None:
            raise copy(error)
        return result  # type: ignore[no-any-return]

    def _wait(self, deadline_ns: int | None, on_notification: Callable[[Any], None]) -> None:
        waiter: SimpleQueue[Any] = SimpleQueue()
        self._waiters.append(waiter)
        if self._completions:  # set before the queue was registered: nothing is put into it
            return
        while True:
            seconds_left = None if deadline_ns is None else max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)
            try:
                notification = waiter.get(timeout=seconds_left)
            except Empty:
                if self._completions:
                    return
                raise MissedDeadlineTransient("the deadline passed before the driver replied") from None
            if notification is None:
                return
            on_notification(notification)


# ----------------------------------------------------------------------------------------------------------------------
# BlockingWait: when a task that awaits a burst's result may block its event loop instead of leaving the thread.
#
# A wait beside other tasks costs two wake-ups: of the thread that waits for all queues, and of the event loop. The
# caller of `Burst.execute_async` passes an object of this interface if its event loop may have nothing else to do.


class BlockingWait(Protocol):
    """Decides for each wait. Used by tasks of one event loop."""

    async def begin(self) -> int:
        """Return until when the wait may block, in ns of the monotonic clock; 0 = not at all.

        Called when the request is with the driver, so other tasks may run while this one decides.
        """
        ...

    def end(self, has_result: bool) -> None:
        """Learn that a wait has blocked, and whether it ended with the result. Not called if the driver has died."""
        ...


# ----------------------------------------------------------------------------------------------------------------------
# SingleAttempt: of several threads that need the same work done, one does it, and the others wait for its result.
#
# The attempt's Future is its claim: see `nnfmq.base.ownership`.


class _Attempt(Future[ResultT]):
    """An attempt of one thread, and until when it waits for a peer that cannot be reached."""

    __slots__ = ("limit_ns",)

    def __init__(self, limit_ns: int | None) -> None:
        super().__init__()
        self.limit_ns = limit_ns


class SingleAttempt(Generic[ResultT]):
    """Runs one attempt at a time. Thread-safe."""

    def __init__(self) -> None:
        self._claims: Claims = {}

    def run(self, attempt: Callable[[], ResultT], deadline_ns: int | None, *, waits: bool = True) -> ResultT:
        """Return the result of `attempt`, or of the attempt that another thread makes meanwhile; blocks.

        If the other thread's deadline passes before this one's, or it is interrupted, this thread makes the attempt.
        `waits`: whether `attempt` waits until `deadline_ns` for a peer that cannot be reached. An attempt that does not
        wait, or only for a shorter time, decides nothing for a thread that does.

        Raises:
            MissedDeadline: If `deadline_ns` passes while another thread makes the attempt.
            NnfmqError: The error of the attempt.
        """
        while True:
            own: _Attempt[ResultT] = _Attempt(deadline_ns if waits else NO_WAIT)
            try:
                running: _Attempt[ResultT] = claimed(
                    self._claims, own, partial(_complete, own, attempt), lambda other: other
                )
            finally:
                own.set_exception(MissedDeadlineTransient("the thread that made the attempt was interrupted"))
            try:
                return running.result(deadline_ns)
            except MissedDeadline:
                if has_passed(deadline_ns):
                    raise
            except DeviceUnavailable:
                if not waits or has_passed(deadline_ns) or not has_passed(running.limit_ns):
                    raise


def _complete(future: _Attempt[ResultT], attempt: Callable[[], ResultT]) -> _Attempt[ResultT]:
    """Return the future with the result of an attempt, which this thread makes."""
    try:
        future.set_result(attempt())
    except NnfmqError as error:
        future.set_exception(error)
        raise
    return future
