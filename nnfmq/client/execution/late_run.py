"""LateRun: a run for which its caller no longer waits, because its deadline has passed or a signal handler has raised.

The driver may still read and write the memory of the request, and rejects another run of a reusable execution (RUX-3).
So the next run of the same request first waits until the driver has ended this one, within its own deadline, before
anything is written or sent.
"""

from __future__ import annotations

import os

from nnfmq.base.deadlines import remaining_s
from nnfmq.base.fence import Fence
from nnfmq.client.connection.connection import PendingCall
from nnfmq.client.waiting import Future
from nnfmq.hal.errors import MissedDeadlineTransient, NnfmqError
from nnfmq.hal.types import FenceState
from nnfmq.serialize import messages

_MISSED = "the deadline passed before the driver had ended the run before, which is late"


class LateRun:
    """The late run of a request, of which there is at most one: call `wait` before the next run. Close it."""

    def __init__(self) -> None:
        self._reply: Future[messages.Call] | None = None
        self._pid = 0
        self._fences: list[Fence] = []  # of a run that the driver has launched; list.pop is atomic

    def begin(self) -> PendingCall:
        """Return what receives the reply of a call whose caller no longer waits; for `Connection.exchange`."""
        self._reply, self._pid = Future(), os.getpid()
        return PendingCall(self._reply, on_fds=self._keep_fences, is_late=True)

    def _keep_fences(self, fds: list[int]) -> None:
        self._fences.extend(map(Fence.adopt, fds))
        if self._reply is None:  # `close` was called
            self._close_fences()

    def wait(self, deadline_ns: int | None) -> None:
        """Block until the driver has ended the run, or has exited; return immediately if there is none.

        Raises:
            MissedDeadlineTransient: If the deadline passes first.
        """
        reply = self._reply
        if reply is None or self._pid != os.getpid():  # a forked child gets no replies
            return
        try:
            reply.result(deadline_ns)
        except NnfmqError:
            if not reply.done():
                raise MissedDeadlineTransient(_MISSED) from None
        for fence in self._fences:
            if fence.wait(remaining_s(deadline_ns)) is FenceState.ACTIVE:
                raise MissedDeadlineTransient(_MISSED)
        self._reply = None
        self._close_fences()

    def close(self) -> None:
        """Wait for nothing any more; the run continues. Idempotent."""
        self._reply = None
        self._close_fences()

    def _close_fences(self) -> None:
        while self._fences:
            self._fences.pop().close()
