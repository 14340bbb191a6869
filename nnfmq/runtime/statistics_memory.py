"""Reading the driver's statistics: their memory comes over the control channel, and is mapped for one reading."""

from __future__ import annotations

from nnfmq.channel import close_all
from nnfmq.hal.errors import ProtocolError
from nnfmq.hal.types import Protection
from nnfmq.memory import Memory
from nnfmq.observe.driver_statistics import DriverStatistics, read_statistics
from nnfmq.runtime.connection import Connection
from nnfmq.serialize import messages


def driver_statistics(connection: Connection, deadline_ns: int | None) -> DriverStatistics:
    """Return what the driver's statistics contain now; blocks.

    Raises:
        GeneralFailure: If the driver does not let this user read them.
        ProtocolError: If the driver sent something else.
    """
    fds: list[int] = []
    message = messages.GetStatistics(connection.next_call_id())
    try:
        connection.call(message, messages.StatisticsMemory, (), deadline_ns, on_fds=fds.extend)
        if len(fds) != 1:
            raise ProtocolError(f"the driver sent its statistics in {len(fds)} memories instead of one")
        return _read(fds.pop())
    finally:
        close_all(fds)


def _read(fd: int) -> DriverStatistics:
    try:
        with Memory.adopt(fd, protection=Protection.READ) as memory:
            return read_statistics(memory.view)
    except ValueError as error:  # also an InvalidArgument: it is the driver that sent it
        raise ProtocolError(f"the driver's statistics cannot be read: {error}") from error
