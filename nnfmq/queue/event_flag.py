"""EventFlag: 32 bits in shared memory by which threads of several processes wait for and wake each other.

This is libfmq's EventFlag. `wake` sets bits; `wait` blocks for bits and clears them. The word is its own futex, so no
wake-up is lost. A bit stays set until a thread waits for it, so callers check their condition again after each wait.
Each bit may have one waiter.

Unlike libfmq's, `wait` never returns without a bit before the deadline, and a deadline of 0 has passed; it does not
mean "no limit".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from nnfmq.base.ownership import Closable
from nnfmq.hal.errors import InvalidArgument
from nnfmq.queue.core import ACTIVE_CORE, Core

if TYPE_CHECKING:
    from nnfmq.queue._pycore import EventFlagWord

__all__ = ["EventFlag", "PeerDeathFlag", "checked_mask"]


# ----------------------------------------------------------------------------------------------------------------------
# The flag that cancels a queue's waits once the peer process has died.


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


# ----------------------------------------------------------------------------------------------------------------------
# EventFlag: 32 bits in shared memory by which threads of several processes wait for and wake each other.


NOT_FULL = 0x1
NOT_EMPTY = 0x2


class EventFlag(Closable):
    """An event flag: that of a queue, or one over any aligned word (`from_buffer`). Thread-safe."""

    __slots__ = ("_word",)

    def __init__(self, word: EventFlagWord) -> None:
        self._word = word

    @classmethod
    def from_buffer(
        cls, view: memoryview, offset: int = 0, *, peer_death: PeerDeathFlag | None = None, core: Core = ACTIVE_CORE
    ) -> Self:
        """Return an event flag over the 4 bytes at `offset` of `view`, which must be writable.

        The view is in use until `close`.

        Raises:
            InvalidArgument: If the bytes are not aligned, or not in the view.
        """
        return cls(core.EventFlagWord(view, offset, (peer_death or PeerDeathFlag()).buffer))

    @property
    def waiters(self) -> int:
        """Number of threads of this process in `wait`, or in a blocking call of the queue."""
        return self._word.waiters

    def wake(self, mask: int) -> int:
        """Set the bits of `mask` and wake the threads that wait for one of them; return how many slept.

        Does nothing if `mask` is 0. Does not block.

        Raises:
            BadState: If the flag is closed.
            InvalidArgument: If `mask` has more than 32 bits.
        """
        return self._word.wake(checked_mask(mask))

    def wait(self, mask: int, deadline_ns: int | None = None) -> int:
        """Block until a bit of `mask` is set; clear and return those that are set, or 0 at the deadline.

        `deadline_ns` is in ns of the monotonic clock; None means no limit.

        Raises:
            BadState: If the flag is closed, also during the wait.
            InvalidArgument: If `mask` is 0 or has more than 32 bits.
            DeadObject: If the peer death flag is set.
            Exception: Any error that a signal handler raises.
        """
        return self._word.wait(checked_mask(mask), deadline_ns)

    def wake_all(self) -> int:
        """Set all bits and wake all waiters; return how many slept. Called after the peer death flag was set."""
        return self._word.wake_all()

    def close(self) -> None:
        """End all waits with BadState and release the memory. Idempotent. Not for the event flag of a queue."""
        self._word.close()


def checked_mask(mask: int) -> int:
    """Return `mask`; raise InvalidArgument if it does not fit into 32 bits."""
    if not 0 <= mask <= 0xFFFFFFFF:
        raise InvalidArgument(f"event flag mask is {mask:#x}; allowed are 32 bits")
    return mask
