"""DriverStart: the driver's reply to Hello, for which the first call waits."""

from __future__ import annotations

from nnfmq.base.verbose_log import vlog
from nnfmq.client.connection import open_connections
from nnfmq.client.waiting import Future
from nnfmq.hal.errors import DeviceUnavailable, NnfmqError
from nnfmq.serialize.messages import HelloReply

__all__ = ["DriverStart"]


class DriverStart:
    """The start of a driver, as a client sees it: until the reply to Hello arrives, or the error that replaces it.

    `reply` is None until then; `deadline_ns` ends every wait (monotonic clock; None = no limit). Thread-safe.
    `was_not_accepted`: the driver has ended before it has read this client's Hello.
    """

    def __init__(self, deadline_ns: int | None) -> None:
        self.reply: HelloReply | None = None
        self.deadline_ns = deadline_ns
        self.was_not_accepted = False
        self._has_exited = False
        self._future: Future[HelloReply] = Future()

    def set_reply(self, reply: HelloReply) -> None:
        """End the start. Does not block."""
        self.reply = reply
        vlog("manager", "connected to driver %r, pid %d, worker %d, %s", *_identity(reply))
        self._future.set_result(reply)

    def fail(self, error: NnfmqError) -> None:
        """Let every wait raise `error`, unless the start has ended or failed before. Does not block."""
        self._future.set_exception(error)

    def fail_with_exit(self, reason: str, *, has_successor: bool) -> None:
        """Fail because of the driver's exit, unless the start has ended or failed before. Does not block.

        `has_successor`: another driver may serve the client, whose Hello this one has not read.
        """
        if not self._has_exited:
            self._has_exited = True
            vlog("manager", "the connection has ended: %s", reason)
        kind = open_connections.NotAccepted if has_successor else DeviceUnavailable
        self.was_not_accepted = has_successor and self.reply is None
        self.fail(kind(f"the driver exited before it replied: {reason}"))

    def wait(self, deadline_ns: int | None) -> HelloReply:
        """Return the reply; block until it arrives.

        Raises:
            MissedDeadlineTransient: If this deadline passes, or that of the start.
            NnfmqError: The error with which the start failed.
        """
        if self.reply is None:
            deadlines = [at for at in (deadline_ns, self.deadline_ns) if at is not None]
            return self._future.result(min(deadlines, default=None))
        return self.reply


def _identity(reply: HelloReply) -> tuple[str, int, int, str]:
    return reply.driver_name, reply.driver_pid, reply.worker_pid, reply.interface
