"""The flag that cancels a queue's waits once the peer process has died."""

from __future__ import annotations


class PeerDeathFlag:
    """A process-private flag: clear until the peer process is known to have exited, then set for good.

    The watcher sets it when the peer's socket or pidfd hangs up. Blocking calls check it in their polling loop, and
    after every return of the futex before they look at the ring. All queues to one peer may share one flag. `buffer`
    is the flag's word (4 bytes, native byte order), which the compiled core reads without the GIL.
    """

    __slots__ = ("buffer",)

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(4)).cast("I")

    def is_set(self) -> bool:
        """Return whether the peer is known to have exited."""
        return self.buffer[0] != 0

    def set(self) -> None:
        """Set the flag. Idempotent.

        Sleeping threads check the flag only after they are woken, so the caller calls `wake_all` of the queues next.
        """
        self.buffer[0] = 1  # SYNC dead
