"""The driver's statistics: their memory comes over the control channel, and is mapped for reading only."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

from nnfmq.base.channel import close_all
from nnfmq.base.memory import Memory
from nnfmq.client.connection.connection import Connection
from nnfmq.hal.errors import ProtocolError
from nnfmq.hal.types import Protection
from nnfmq.observe.driver_statistics import DriverStatistics, client_calls, read_statistics
from nnfmq.serialize import messages

__all__ = ["driver_statistics", "statistics_memory"]

ResultT = TypeVar("ResultT")


def driver_statistics(connection: Connection, deadline_ns: int | None) -> DriverStatistics:
    """Return the driver's statistics of now; blocks.

    Raises:
        GeneralFailure: If the driver does not let this user read them.
        ProtocolError: If the driver sent something else.
    """
    memory, found = _read_statistics(connection, deadline_ns, read_statistics)
    memory.close()
    return found


def statistics_memory(connection: Connection, deadline_ns: int | None) -> Memory:
    """Return the memory of the statistics, which are readable; the caller closes it. Blocks. As `driver_statistics`."""
    return _read_statistics(connection, deadline_ns, client_calls)[0]


def _read_statistics(
    connection: Connection, deadline_ns: int | None, read: Callable[[memoryview], ResultT]
) -> tuple[Memory, ResultT]:
    """Return the statistics' memory, which the caller closes, and what `read` makes of it; blocks."""
    fds: list[int] = []
    message = messages.GetStatistics(connection.next_call_id())
    with ExitStack() as undo:
        undo.callback(close_all, fds)
        connection.call(message, messages.StatisticsMemory, (), deadline_ns, on_fds=fds.extend)
        if len(fds) != 1:
            raise ProtocolError(f"the driver sent its statistics in {len(fds)} memories instead of one")
        try:
            memory = undo.enter_context(Memory.adopt(fds.pop(), protection=Protection.READ))
            found = read(memory.view)
        except ValueError as error:  # also an InvalidArgument: it is the driver that sent it
            raise ProtocolError(f"the driver's statistics cannot be read: {error}") from error
        undo.pop_all()
    return memory, found
