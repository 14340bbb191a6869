"""LimitedConnection: connections of uvicorn whose number is limited, and that are closed if no request arrives.

uvicorn waits for the header of a request for as long as the client likes, and for any number of clients. Pass the class
as its `http` option: `uvicorn.run(app, http=LimitedConnection)`. Another server, such as nginx before this one, has
such limits of its own.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from nnfmq.base import settings
from nnfmq.base.logs import rate_limited

__all__ = ["LimitedConnection"]

_BODY = b'{"error": "this server has %d connections already, the limit that $%s sets; try again later"}'
_HEADER = b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
_HEADER_END = b"retry-after: 1\r\nconnection: close\r\n\r\n"
_IPPROTO_TCP, _TCP_INFO = 6, 11  # this module opens no sockets
_TCP_INFO_BYTES, _BYTES_ACKED_AT = 192, 120  # struct tcp_info of Linux 4.1
_log = rate_limited("nnfmq.serving")


class LimitedConnection(H11Protocol):
    """A connection of HTTP/1.1.

    With $NNFMQ_HTTP_CONNECTIONS open ones, the next is answered with 503 and closed. One on which no request is served
    is closed if the header of the next request is not complete $NNFMQ_HTTP_HEADER_S after its first byte, or after the
    beginning of the connection. One whose client reads nothing of a response for that long is closed, too: the response
    is in memory until it is sent. `InferenceApp` limits the bodies.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._header_timer: asyncio.TimerHandle | None = None
        self._reading_timer: asyncio.TimerHandle | None = None
        self._header_s = settings.HTTP_HEADER_S.value()
        self._connections_max = settings.HTTP_CONNECTIONS.value()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn does
        """Begin to wait for the first request, unless there are too many connections."""
        is_surplus = len(self.connections) >= self._connections_max
        super().connection_made(transport)
        if is_surplus:
            _log.warning("a connection is closed: this server has %d already", self._connections_max)
            self._refuse()
        else:
            self._limit_wait(self._header_s)

    def _refuse(self) -> None:
        body = _BODY % (self._connections_max, settings.HTTP_CONNECTIONS.variable.encode())
        self.transport.write(_HEADER % len(body) + _HEADER_END + body)
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Handle what has arrived; the time for a header begins with its first byte."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._end_limit()
        else:
            self._limit_wait(self._header_s)

    def on_response_complete(self) -> None:
        """Wait for the next request, or the rest of a body that is not wanted; uvicorn limits the wait for nothing."""
        super().on_response_complete()
        has_begun = self.conn.their_state is not h11.IDLE or bool(self.conn.trailing_data[0])
        if self.cycle.response_complete and has_begun:
            self._limit_wait(self._header_s)
        self._expect_reading()

    def pause_writing(self) -> None:
        """Wait until the client has read some of the response."""
        super().pause_writing()
        self._expect_reading()

    def _expect_reading(self) -> None:
        """Close the connection if its client reads nothing while there is something to send. Idempotent."""
        received = self._received_bytes()
        if self._reading_timer is None and self._has_unsent() and received is not None:
            self._reading_timer = self.loop.call_later(self._header_s, self._look, received)

    def _has_unsent(self) -> bool:
        return bool(self.flow.write_paused or self.transport.get_write_buffer_size())

    def _received_bytes(self) -> int | None:
        """Return how much the client's kernel has received of what this connection has sent; None if it is no TCP."""
        try:
            info = self.transport.get_extra_info("socket").getsockopt(_IPPROTO_TCP, _TCP_INFO, _TCP_INFO_BYTES)
        except OSError:
            return None
        return int.from_bytes(info[_BYTES_ACKED_AT:][:8], sys.byteorder)

    def _look(self, before: int) -> None:
        self._reading_timer = None
        if self._has_unsent() and self._received_bytes() == before:
            self.transport.abort()
        else:
            self._expect_reading()

    def shutdown(self) -> None:
        """End the connection as soon as its request has a response; at once if that has not arrived as a whole."""
        super().shutdown()
        if self.conn.their_state is h11.SEND_BODY:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._end_limit()
        if self._reading_timer is not None:
            self._reading_timer.cancel()
        super().connection_lost(exc)

    def _limit_wait(self, seconds: float) -> None:
        """Close the connection unless a request arrives in time. No effect if it waits already."""
        if self._header_timer is None and not self.transport.is_closing():
            self._header_timer = self.loop.call_later(seconds, self._close_late)

    def _end_limit(self) -> None:
        timer, self._header_timer = self._header_timer, None
        if timer is not None:
            timer.cancel()

    def _close_late(self) -> None:
        self._header_timer = None
        self.transport.abort()
