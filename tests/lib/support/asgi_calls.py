"""Requests to an ASGI application without a server: the messages that one would send, and the response put together."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple


class AsgiResponse(NamedTuple):
    """A response: its status, headers by lower-case name, and body."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


async def ask_async(
    app: Any,
    method: str,
    path: str,
    body: bytes | Sequence[bytes] = b"",
    headers: Iterable[tuple[bytes, bytes]] = (),
    *,
    leaves: bool = False,
    root_path: str = "",
) -> AsgiResponse | None:
    """Return the response to one request, None if there was none.

    A sequence of bytes comes in that many messages. If the client `leaves`, it does so after them.
    """
    parts = [body] if isinstance(body, bytes) else list(body)
    incoming: list[dict[str, Any]] = [
        {"type": "http.request", "body": part, "more_body": leaves or index + 1 < len(parts)}
        for index, part in enumerate(parts)
    ]
    incoming.append({"type": "http.disconnect"})
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return incoming.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "root_path": root_path, "headers": list(headers)}
    await app(scope, receive, send)
    if not sent:
        return None
    start, end = sent
    found = {name.decode(): value.decode() for name, value in start["headers"]}
    assert int(found["content-length"]) == len(end["body"])
    return AsgiResponse(start["status"], found, end["body"])


def ask(app: Any, method: str, path: str, *args: Any, **options: Any) -> AsgiResponse:
    """Return the response to one request."""
    response = asyncio.run(ask_async(app, method, path, *args, **options))
    assert response is not None, "no response"
    return response
