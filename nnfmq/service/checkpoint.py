"""A check that long work for a client calls between its parts: it ends the work once nobody waits for the result."""

from __future__ import annotations

import time
from typing import NoReturn, Protocol

from nnfmq.hal.errors import DeadObject, MissedDeadlinePersistent, MissedDeadlineTransient
from nnfmq.hal.timing import NO_LIMIT
from nnfmq.uncopyable import Uncopyable

__all__ = ["Checkpoint"]

_LOOK_INTERVAL_NS = 5_000_000  # a look at the client's process takes 0.1 ms
_EXIT_S = 0.05


class _Session(Protocol):
    """What a checkpoint needs of the session."""

    @property
    def is_closed(self) -> bool: ...

    def client_was_killed(self) -> bool: ...

    def stop(self) -> None: ...


class Checkpoint(Uncopyable):
    """Call it often: a call takes microseconds. Used by one thread.

    Args:
        session: The session of the client that waits for the result.
        deadline_ns: The deadline on the monotonic clock; NO_LIMIT if there is none.
    """

    def __init__(self, session: _Session, deadline_ns: int = NO_LIMIT) -> None:
        self._session = session
        self._deadline_ns = deadline_ns
        begin_ns = time.monotonic_ns()
        self._had_passed = NO_LIMIT < deadline_ns <= begin_ns
        self._look_ns = begin_ns + _LOOK_INTERVAL_NS

    def __call__(self) -> None:
        """Return if the work must go on.

        Raises:
            DeadObject: If the session has ended, or the client has been killed, which ends the session.
            MissedDeadlinePersistent: If the deadline had passed when this checkpoint was made.
            MissedDeadlineTransient: If the deadline has passed since.
        """
        if self._session.is_closed:
            self._end("the client has exited")
        now_ns = time.monotonic_ns()
        if now_ns >= self._look_ns:
            self._look_ns = now_ns + _LOOK_INTERVAL_NS
            if self._session.client_was_killed():
                self._end("the client has been killed")
        if self._had_passed:
            raise MissedDeadlinePersistent("the deadline had passed before the model was received")
        if NO_LIMIT < self._deadline_ns <= now_ns:
            raise MissedDeadlineTransient("the deadline passed while the model was received")

    def _end(self, reason: str) -> NoReturn:
        """End the session, whose main thread exits the process, and raise DeadObject if that takes long."""
        self._session.stop()
        # Without this pause, this thread would free what it has made, perhaps millions of objects, and so keep the GIL
        # from the main thread.
        time.sleep(_EXIT_S)
        raise DeadObject(reason)
