"""DroppedConnection: the end of a connection that the application has dropped, and of its embedded driver."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from nnfmq.channel import Channel
from nnfmq.runtime.garbage import ClosedWhenDropped, CloserUse

__all__ = ["DroppedConnection"]


class DroppedConnection(ClosedWhenDropped):
    """The base of Connection. `end_process` ends an embedded driver after a dropped connection is closed.

    It is told whether the driver has started.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.end_process: Callable[[bool], object] | None = None
        self._thread_use = CloserUse()

    @property
    @abstractmethod
    def has_started(self) -> bool:
        """Whether the driver has accepted this client."""

    @abstractmethod
    def close(self) -> None:
        """Hang up. Idempotent."""

    def __repr__(self) -> str:
        return f"<Client or Connection of {'a driver' if self.end_process is None else 'an embedded driver'}>"

    def _is_left_open(self) -> bool:
        return self._channel.fileno() >= 0

    def _is_of_process(self) -> bool:
        return True

    def _close_dropped(self) -> None:
        has_started = self.has_started
        self.close()
        if self.end_process is not None:
            self.end_process(has_started)
