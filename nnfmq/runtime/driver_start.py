"""DriverStart: the driver's reply to Hello, for which the first call waits."""

from __future__ import annotations

from nnfmq.hal.errors import DeviceUnavailable, NnfmqError
from nnfmq.runtime.future import Future
from nnfmq.serialize.messages import HelloReply
from nnfmq.verbose_log import vlog

__all__ = ["DriverStart"]


class DriverStart:
    """The start of a driver, as a client sees it: until the reply to Hello arrives, or the error that replaces it.

    `reply` is None until then; `deadline_ns` ends every wait (monotonic clock; None = no limit). Thread-safe.
    """

    def __init__(self, deadline_ns: int | None) -> None:
        self.reply: HelloReply | None = None
        self._deadline_ns = deadline_ns
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

    def fail_with_exit(self, reason: str) -> None:
        """Fail because of the driver's exit, unless the start has ended or failed before. Does not block."""
        if not self._has_exited:
            self._has_exited = True
            vlog("manager", "the connection has ended: %s", reason)
        self.fail(DeviceUnavailable(f"the driver exited before it replied: {reason}"))

    def wait(self, deadline_ns: int | None) -> HelloReply:
        """Return the reply; block until it arrives.

        Raises:
            MissedDeadlineTransient: If this deadline passes, or that of the start.
            NnfmqError: The error with which the start failed.
        """
        if self.reply is None:
            deadlines = [at for at in (deadline_ns, self._deadline_ns) if at is not None]
            return self._future.result(min(deadlines, default=None))
        return self.reply


def _identity(reply: HelloReply) -> tuple[str, int, int, str]:
    return reply.driver_name, reply.driver_pid, reply.worker_pid, reply.interface
