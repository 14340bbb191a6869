"""Reading the driver's statistics: their memory comes over the control channel, and is mapped for reading only."""

from __future__ import annotations

from nnfmq.base.channel import close_all
from nnfmq.base.memory import Memory
from nnfmq.client.connection.connection import Connection
from nnfmq.hal.errors import ProtocolError
from nnfmq.hal.types import Protection
from nnfmq.observe.driver_statistics import DriverStatistics, client_calls, read_statistics
from nnfmq.serialize import messages


def driver_statistics(connection: Connection, deadline_ns: int | None) -> DriverStatistics:
    """Return what the driver's statistics contain now; blocks.

    Raises:
        GeneralFailure: If the driver does not let this user read them.
        ProtocolError: If the driver sent something else.
    """
    with _mapped(connection, deadline_ns) as memory:
        try:
            return read_statistics(memory.view)
        except ValueError as error:  # also an InvalidArgument: it is the driver that sent it
            raise _unreadable(error) from error


def statistics_memory(connection: Connection, deadline_ns: int | None) -> Memory:
    """Return the memory of the statistics, which are readable; the caller closes it. Blocks.

    Raises:
        GeneralFailure: If the driver does not let this user read them.
        ProtocolError: If the driver sent something else.
    """
    memory = _mapped(connection, deadline_ns)
    try:
        client_calls(memory.view)
    except ValueError as error:
        memory.close()
        raise _unreadable(error) from error
    return memory


def _mapped(connection: Connection, deadline_ns: int | None) -> Memory:
    fds: list[int] = []
    message = messages.GetStatistics(connection.next_call_id())
    try:
        connection.call(message, messages.StatisticsMemory, (), deadline_ns, on_fds=fds.extend)
        if len(fds) != 1:
            raise ProtocolError(f"the driver sent its statistics in {len(fds)} memories instead of one")
        return _adopted(fds.pop())
    finally:
        close_all(fds)


def _adopted(fd: int) -> Memory:
    try:
        return Memory.adopt(fd, protection=Protection.READ)
    except ValueError as error:  # an InvalidArgument
        raise _unreadable(error) from error


def _unreadable(error: ValueError) -> ProtocolError:
    return ProtocolError(f"the driver's statistics cannot be read: {error}")
