"""LateClient: a client that `connect(wait=True)` returns where an event loop runs, before a driver listens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Self

from nnfmq.client.connection.client import Client, IsClosed
from nnfmq.client.connection.open_connections import CLOSED
from nnfmq.client.waiting import SingleAttempt
from nnfmq.hal.errors import BadState

__all__ = ["LateClient"]


class LateClient(Client):
    """A client that connects in `async with`, beside the event loop; or else at its first use, which blocks.

    Until then it has none of a client's attributes. Thread-safe.

    Args:
        connect: Waits for a driver and returns a client, whose attributes this one gets; blocks.
    """

    def __init__(self, connect: Callable[[IsClosed], Client]) -> None:
        self._connect = connect
        self._opening: SingleAttempt[None] = SingleAttempt()
        self._is_ended = False

    @property
    def _is_open(self) -> bool:
        return "_connection" in vars(self)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that a client has once it is connected."""
        if name.startswith("__") or self._is_open:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self._open()
        return getattr(self, name)

    def __repr__(self) -> str:
        state = "closed" if self._is_ended else "waits for a driver"
        return super().__repr__() if self._is_open else f"<Client, {state}>"

    def _open(self) -> None:
        self._opening.run(self._open_once, None)

    def _open_once(self) -> None:
        if self._is_open:
            return
        if self._is_ended:
            raise BadState(CLOSED)
        vars(self).update(vars(self._connect(lambda: self._is_ended)))
        self.follow_driver()
        if self._is_ended:  # by another thread, meanwhile
            super().close()
            raise BadState(CLOSED)

    def close(self) -> None:
        """As `Client.close`; ends the wait for a driver."""
        self._is_ended = True
        if self._is_open:
            super().close()

    async def __aenter__(self) -> Self:
        """As `Client.__aenter__`; waits for a driver first."""
        try:
            await asyncio.to_thread(self._open)
        except BaseException:
            self._is_ended = True
            raise
        return await super().__aenter__()
