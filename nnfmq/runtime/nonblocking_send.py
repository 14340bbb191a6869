"""send_nonblocking: send on the watcher thread, which must not wait for a peer that does not read."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

from nnfmq.channel import NO_WAIT, Channel, close_all
from nnfmq.hal.errors import MissedDeadlineTransient, NnfmqError

__all__ = ["send_nonblocking"]


def send_nonblocking(channel: Channel, data: bytes, fds: Sequence[int], on_error: Callable[[Exception], None]) -> None:
    """Send a frame without blocking. If the socket is full, a new thread sends copies. Borrows `fds`.

    `on_error` is called on that thread with what its send raises.

    Raises:
        DeadObject: If the peer has closed the connection.
    """
    try:
        channel.send(data, fds, NO_WAIT)
    except MissedDeadlineTransient:
        copies = [os.dup(fd) for fd in fds]  # the caller may close its fds before the thread sends them
        arguments = (channel, data, copies, on_error)
        threading.Thread(target=_send_late, args=arguments, name="nnfmq-late", daemon=True).start()


def _send_late(channel: Channel, data: bytes, fds: Sequence[int], on_error: Callable[[Exception], None]) -> None:
    try:
        channel.send(data, fds)  # returns at the latest when the channel is closed
    except (NnfmqError, OSError) as error:
        on_error(error)
    finally:
        close_all(fds)
