"""BlockingWait: when a task that awaits a burst's result may block its event loop instead of leaving the thread.

A wait beside other tasks costs two wake-ups: of the thread that waits for all queues, and of the event loop. The caller
of `Burst.execute_async` passes an object of this interface if its event loop may have nothing else to do.
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["BlockingWait"]


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
