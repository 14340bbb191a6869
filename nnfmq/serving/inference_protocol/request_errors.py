"""Errors of a request that only a network protocol has; each has its own status in `status_mapping`."""

from __future__ import annotations

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.summaries import clipped

__all__ = ["ClientLeft", "CompressedBody", "EndpointMissing", "MethodNotAllowed", "RequestTooLarge", "quoted"]


class RequestTooLarge(InvalidArgument):
    """A request is larger than the server's limits allow."""


class EndpointMissing(InvalidArgument):
    """The server does not have the endpoint."""


class MethodNotAllowed(InvalidArgument):
    """The endpoint does not take this method of HTTP; `allowed` is the one that it takes."""

    def __init__(self, message: str, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed


class CompressedBody(InvalidArgument):
    """The body is compressed, and the server does not decompress bodies: a few bytes could become gigabytes."""


class ClientLeft(Exception):
    """The client closed the connection before it had sent its whole request."""


_SHOWN = 100  # characters


def quoted(text: str) -> str:
    """Return a client's text for a message: quoted, characters that are not printable escaped, long text cut."""
    return repr(clipped(text, _SHOWN))
