"""Requests and responses of HTTP as the messages of ASGI: bodies within limits, headers, errors as JSON."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NamedTuple, TypeAlias

import msgspec

from nnfmq.hal.errors import InvalidArgument
from nnfmq.serving.inference_protocol.request_errors import ClientLeft, MethodNotAllowed, RequestTooLarge
from nnfmq.serving.inference_protocol.status_mapping import error_text, protocol_status

__all__ = ["HttpReply", "Receive", "Scope", "Send", "error_reply", "header", "json_reply", "read_body"]

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]


class HttpReply(NamedTuple):
    """A response: its status, body and headers; Content-Length is added when it is sent."""

    status: int
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ((b"content-type", b"application/json"),)

    async def send(self, send: Send) -> None:
        """Send the response."""
        headers = [*self.headers, (b"content-length", str(len(self.body)).encode())]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


def json_reply(value: object, status: int = 200) -> HttpReply:
    """Return a reply of JSON."""
    return HttpReply(status, msgspec.json.encode(value))


def error_reply(error: BaseException) -> HttpReply:
    """Return the reply for an error: `{"error": text}`, and Retry-After if the same request may succeed later."""
    status = protocol_status(error)
    reply = json_reply({"error": error_text(error)}, status.http)
    if status.retry_after_s is not None:
        return reply._replace(headers=(*reply.headers, (b"retry-after", str(status.retry_after_s).encode())))
    if isinstance(error, MethodNotAllowed):
        return reply._replace(headers=(*reply.headers, (b"allow", error.allowed.encode())))
    return reply


def header(scope: Scope, name: bytes) -> str | None:
    """Return a header of the request; None without it. ASGI has names in lower case.

    Raises:
        InvalidArgument: If the request has it more than once.
    """
    found = [value for key, value in scope["headers"] if key == name]
    if len(found) > 1:
        raise InvalidArgument(f"header {name.decode()} is given {len(found)} times")
    return found[0].decode("latin-1").strip() if found else None


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """Return the body of a request.

    Raises:
        RequestTooLarge: If it is larger than `limit` bytes; the rest is not read.
        ClientLeft: If the client closed the connection.
    """
    announced = header(scope, b"content-length") or "0"
    if announced.isdecimal() and (len(announced) > 18 or int(announced) > limit):
        raise RequestTooLarge(f"the request's body has {announced[:20]} bytes; at most {limit} are allowed")
    parts, length = list[bytes](), 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        part = message.get("body", b"")
        length += len(part)
        if length > limit:
            raise RequestTooLarge(f"the request's body has more than the {limit} bytes that are allowed")
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)
