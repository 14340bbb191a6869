"""EventFlag: 32 bits in shared memory on which threads of several processes wait and wake each other.

`wake` sets bits, `wait` consumes them; the word is its own futex, so no wake-up is ever lost and no other flag is
needed. A bit stays set until somebody waits for it: callers test their own condition again after each wait. One waiter
per bit. Left out: libfmq's non-retrying form (here a wait never ends spuriously) and its 0 = for ever. FMQ_FACTS 1.7.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

from nnfmq.hal.errors import InvalidArgument
from nnfmq.queue import core
from nnfmq.queue.peer_death import PeerDeathFlag

if TYPE_CHECKING:
    from nnfmq.queue._pycore import EventFlagWord

NOT_FULL = 0x1
NOT_EMPTY = 0x2


class EventFlag:
    """An event flag over a word of shared memory: a queue's own, or any aligned 4 bytes (`over`)."""

    __slots__ = ("_word",)

    def __init__(self, word: EventFlagWord) -> None:
        self._word = word

    @classmethod
    def over(
        cls,
        view: memoryview,
        offset: int = 0,
        *,
        peer_death: PeerDeathFlag | None = None,
        using: core.Core = core.active,
    ) -> Self:
        """Make an event flag of the 4 bytes at `offset` of `view`, which must be writable and aligned.

        The view stays in use until `close`; `using` chooses another core.
        """
        return cls(using.EventFlagWord(view, offset, (peer_death or PeerDeathFlag()).buffer))

    @property
    def waiters(self) -> int:
        """Return how many threads of this process are in `wait` (or in a blocking call of the queue)."""
        return self._word.waiters

    def wake(self, mask: int) -> int:
        """Set the bits of `mask` and wake who waits for one of them; return how many slept. Mask 0 does nothing."""
        return self._word.wake(_checked(mask))

    def wait(self, mask: int, deadline_ns: int | None = None) -> int:
        """Wait for any bit of `mask`; return those that came, cleared, or 0 once `deadline_ns` has passed.

        Blocks without limit where `deadline_ns` is None. Raises DeadObject once the dead flag is up, and what signal
        handlers raise.
        """
        return self._word.wait(_checked(mask), deadline_ns)

    def wake_all(self) -> int:
        """Set all bits and wake everybody, for the watcher after it raised the dead flag; return how many slept."""
        return self._word.wake_all()

    def close(self) -> None:
        """End all waits with InvalidArgument and let go of the memory. Not for the event flag of a queue."""
        self._word.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _checked(mask: int) -> int:
    if not 0 <= mask <= 0xFFFFFFFF:
        raise InvalidArgument(f"event flag mask is {mask:#x}; allowed are 32 bits")
    return mask
