"""LateClient: a client that `connect(wait=True)` returns where an event loop runs, before a driver listens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Self

from nnfmq.base.deadlines import deadline_after, remaining_s
from nnfmq.client.connection.client import Client, IsClosed
from nnfmq.client.connection.defaults import DEFAULT_TIMEOUT_S
from nnfmq.client.connection.open_connections import CLOSED
from nnfmq.client.waiting import SingleAttempt
from nnfmq.hal.errors import BadState

__all__ = ["LateClient"]


class LateClient(Client):
    """A client that connects in `async with`, beside the event loop; or else at its first use, which blocks.

    Until then it has none of a client's attributes but `is_connected`, and `require_driver` waits for no driver.
    Thread-safe.

    Args:
        connect: Returns a client, whose attributes this one gets, before a deadline; blocks. Waits for a driver that
            does not listen yet, if its last argument says so.
        deadline_ns: The deadline of what waits for a driver.
    """

    def __init__(self, connect: Callable[[int | None, IsClosed, bool], Client], deadline_ns: int | None) -> None:
        self._connect, self._deadline_ns = connect, deadline_ns
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

    @property
    def is_connected(self) -> bool:
        """As `Client.is_connected`; False until this client has connected for the first time."""
        return self._is_open and super().is_connected

    def require_driver(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> None:
        """As `Client.require_driver`; connects for the first time, too."""
        deadline_ns = deadline_after(timeout)
        if not self._is_open:
            self._opening.run(lambda: self._open_once(deadline_ns, waits=False), deadline_ns)
        super().require_driver(timeout=remaining_s(deadline_ns))

    def _open(self) -> None:
        self._opening.run(lambda: self._open_once(self._deadline_ns, waits=True), None)

    def _open_once(self, deadline_ns: int | None, *, waits: bool) -> None:
        if self._is_open:
            return
        if self._is_ended:
            raise BadState(CLOSED)
        vars(self).update(vars(self._connect(deadline_ns, lambda: self._is_ended, waits)))
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
