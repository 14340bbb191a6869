"""ClientPage: the memory in which a client counts its executions, and in which the driver tells it its class."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from nnfmq.base.memory import Memory
from nnfmq.base.ownership import Closable
from nnfmq.hal.client_class import ClientClass
from nnfmq.hal.errors import BadState, ResourceExhaustedTransient
from nnfmq.observe.statistics_layout import CALLS_BYTES, MODELS_MAX, PAGE_BYTES

if TYPE_CHECKING:
    from nnfmq.observe.recorder_core import Calls

__all__ = ["ClientPage"]


class ClientPage(Closable):
    """The page of one connection, once the driver has sent it. Thread-safe. Close it."""

    def __init__(self) -> None:
        self._memory: Memory | None = None
        self._given_class: ClientClass | None = None

    def map(self, fds: Sequence[int]) -> None:
        """Map the page that came with the driver's reply to Hello, if it did. Takes ownership of `fds`.

        Nothing is counted here if no memory is left.

        Raises:
            InvalidArgument: If it may not be mapped.
        """
        with suppress(ResourceExhaustedTransient):
            for fd in fds:
                self._memory = Memory.adopt(fd, PAGE_BYTES)

    def calls_of(self, row: int) -> Calls:
        """Return the counts of a model's executions as this client sees them, in a row of the page.

        Nobody reads the counts if there is no page, or no such row, or it is closed.
        """
        from nnfmq.observe.recorder_core import Calls  # a client that prepares no model needs none

        memory, size = self._memory, CALLS_BYTES // MODELS_MAX
        if memory is None or memory.closed or row >= MODELS_MAX:
            return Calls(bytearray(size))
        return Calls(memory.view[row * size : (row + 1) * size])

    @property
    def given_class(self) -> ClientClass | None:
        """The class that the client was given after it had connected; None if it has that of its start."""
        memory = self._memory
        if memory is not None and not memory.closed:
            with suppress(ValueError, BadState):  # it says 0, or anything; or it was closed meanwhile
                self._given_class = ClientClass(int.from_bytes(memory.view[CALLS_BYTES:PAGE_BYTES], "little"))
        return self._given_class

    def close(self) -> None:
        """Unmap the page; the class is still known. Idempotent."""
        self._given_class = self.given_class
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()
