"""Messages about traces: a client gives its worker a ring to record in, or reads what all workers record."""

from nnfmq.serialize.messages.common import Call, FdCount, StatusReply

__all__ = ["DriverTraced", "StartTrace", "TraceDriver"]


class StartTrace(Call, frozen=True):
    """Record what the worker does for this client in a trace ring, the memory that comes with the message."""


class TraceDriver(Call, frozen=True):
    """Record what all workers do, until this client ends."""


class DriverTraced(StatusReply, frozen=True):
    """The trace area with the rings of all workers, whose fd comes with the message; none after an error."""

    fd_count: FdCount = 0
