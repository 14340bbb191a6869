"""LateSends: what the watcher thread of a client sends, which must not wait for a peer that does not read."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

from nnfmq.base.channel import NO_WAIT, Channel, close_all
from nnfmq.base.threads import Thread
from nnfmq.hal.errors import MissedDeadlineTransient, NnfmqError, ProtocolError

__all__ = ["LATE_MAX", "LateSends"]

LATE_MAX = 64


class LateSends:
    """Sends frames without blocking: a thread for each sends those that do not fit into the socket, LATE_MAX at most.

    `on_error` is called on such a thread with what its send raises.
    """

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        self._on_error = on_error
        self._places = threading.Semaphore(LATE_MAX)

    def send(self, channel: Channel, data: bytes, fds: Sequence[int]) -> None:
        """Send a frame, or let a thread send copies of the fds. Borrows `fds`.

        Raises:
            DeadObject: If the peer has closed the connection.
            ProtocolError: If the peer has not read what LATE_MAX threads send.
        """
        try:
            channel.send(data, fds, NO_WAIT)
        except MissedDeadlineTransient:
            if not self._places.acquire(blocking=False):
                raise ProtocolError(f"the driver does not read: {LATE_MAX} messages wait for it") from None
            copies = [os.dup(fd) for fd in fds]  # the caller may close its fds before the thread sends them
            Thread(target=self._send_late, args=(channel, data, copies), name="nnfmq-late", daemon=True).start()

    def _send_late(self, channel: Channel, data: bytes, fds: Sequence[int]) -> None:
        try:
            channel.send(data, fds)  # returns at the latest when the channel is closed
        except (NnfmqError, OSError) as error:
            self._on_error(error)
        finally:
            close_all(fds)
            self._places.release()
