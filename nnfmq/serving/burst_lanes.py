"""BurstLanes: bursts of one model that the tasks of one event loop share.

A burst executes one request at a time. A task that finds no free burst waits in the order of arrival, as long as its
deadline allows; if too many wait already, it is rejected immediately. No thread waits for a burst or for its result.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nnfmq.base.deadlines import remaining_s
from nnfmq.hal.errors import DeadObject, MissedDeadlineTransient, ResourceExhaustedTransient

if TYPE_CHECKING:
    from nnfmq.client.burst.burst import Burst

__all__ = ["BurstLanes"]


class BurstLanes:
    """Gives each of `bursts` to one task at a time. One event loop. Borrows the bursts.

    At most `max_waiting` tasks wait for a burst.
    """

    def __init__(self, bursts: Sequence[Burst], max_waiting: int) -> None:
        self.count = len(bursts)
        self._free = deque(bursts)
        self._waiting: deque[asyncio.Future[Burst]] = deque()
        self._max_waiting = max_waiting
        self._is_closing = False
        self._all_free = asyncio.Event()  # set while they are being closed only

    @property
    def waiting(self) -> int:
        """The number of tasks that wait for a burst."""
        return len(self._waiting)

    @property
    def busy(self) -> int:
        """The number of bursts that tasks have."""
        return self.count - len(self._free)

    async def take(self, deadline_ns: int | None) -> Burst:
        """Wait for a free burst and return it; the caller puts it back.

        Raises:
            ResourceExhaustedTransient: If as many tasks wait as may.
            MissedDeadlineTransient: If the deadline passes first.
            DeadObject: If the bursts are being closed.
        """
        if self._is_closing:
            raise DeadObject("this model is being closed")
        if self._free:
            return self._free.popleft()
        if len(self._waiting) >= self._max_waiting:
            raise ResourceExhaustedTransient(
                f"{len(self._waiting)} requests wait already for the {self.count} bursts of this model; retry later"
            )
        return await self._wait(deadline_ns)

    async def _wait(self, deadline_ns: int | None) -> Burst:
        turn: asyncio.Future[Burst] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(remaining_s(deadline_ns)):
                return await turn
        except BaseException as error:
            self._leave(turn)
            if isinstance(error, TimeoutError):
                raise MissedDeadlineTransient(f"none of the {self.count} bursts of this model became free") from None
            raise

    def _leave(self, turn: asyncio.Future[Burst]) -> None:
        """End a wait. A burst that a task got in the moment that it was cancelled goes to the next one."""
        if turn in self._waiting:
            self._waiting.remove(turn)
        if turn.done() and not turn.cancelled() and turn.exception() is None:
            self.put_back(turn.result(), is_late=False)

    def put_back(self, burst: Burst, *, is_late: bool) -> None:
        """Return a burst. If `is_late`, its execution may not have ended: then all others are given first."""
        burst.discard_inputs()
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(burst)
                return
        if is_late:
            self._free.append(burst)
        else:
            self._free.appendleft(burst)
        if self._is_closing:
            self._set_if_all_free()

    def _set_if_all_free(self) -> None:
        if len(self._free) == self.count:
            self._all_free.set()

    async def drain(self) -> None:
        """Reject new tasks, and return when all others have returned their bursts."""
        self._is_closing = True
        self._set_if_all_free()
        await self._all_free.wait()
