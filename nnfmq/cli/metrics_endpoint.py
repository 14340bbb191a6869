"""The HTTP endpoint of `nnfmq metrics`, on a loopback address or a unix socket: GET /metrics, and nothing else.

It serves one request after the other, and gives a client REQUEST_TIMEOUT_S for its request, and again for taking the
response, however it splits them. It is the only HTTP in nnfmq, and runs in a
process of its own, never in the driver.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, TypeAlias

from nnfmq.base import watcher

__all__ = ["Endpoint"]

Address: TypeAlias = Path | tuple[str, int]

REQUEST_TIMEOUT_S = 5.0


class _MetricsServer(HTTPServer):
    """An HTTP server that looks up no names."""

    def __init__(self, address: Address, handler: type[BaseHTTPRequestHandler]) -> None:
        self.allow_reuse_address = not isinstance(address, Path)
        target: Any = address
        if isinstance(address, Path):
            self.address_family, target = socket.AF_UNIX, os.fspath(address)
        elif ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(target, handler)

    def server_bind(self) -> None:
        if self.allow_reuse_address:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        mask = os.umask(0o177)  # a unix socket is the user's only
        try:
            self.socket.bind(self.server_address)
        finally:
            os.umask(mask)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = "localhost", 0

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a client that hangs up or is too slow."""


class Endpoint:
    """A listening endpoint. Close it, or use `with`.

    `address` is the path of a unix socket, or a loopback host and a port (0 = any free one). `render` returns the text
    of the metrics and its content type.

    Raises:
        OSError: If the address is in use, or cannot be bound.
    """

    def __init__(self, address: Address, render: Callable[[], tuple[bytes, str]]) -> None:
        class Handler(BaseHTTPRequestHandler):
            server_version, sys_version = "nnfmq", ""

            def handle(self) -> None:
                self._begin_limit()
                try:
                    super().handle()
                finally:
                    self._end_limit()

            def _begin_limit(self) -> None:
                at_ns = time.monotonic_ns() + int(REQUEST_TIMEOUT_S * 1e9)
                self._timer = watcher.call_at(at_ns, self._hang_up)

            def _end_limit(self) -> None:
                watcher.cancel_timer(self._timer)

            def _hang_up(self) -> None:
                with suppress(OSError):  # the client has hung up already
                    self.connection.shutdown(socket.SHUT_RDWR)

            def do_GET(self) -> None:
                if self.path.partition("?")[0] != "/metrics":
                    self.send_error(HTTPStatus.NOT_FOUND, "the metrics are at /metrics")
                    return
                self._end_limit()
                body, content_type = render()
                self._begin_limit()
                self.send_response(HTTPStatus.OK)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Log no request."""

        self._path = address if isinstance(address, Path) else None
        if self._path is not None:
            _remove_stale_socket(self._path)
        self._server = _MetricsServer(address, Handler)
        self._inode = None if self._path is None else self._path.stat().st_ino

    @property
    def url(self) -> str:
        """Where the metrics are."""
        if self._path is not None:
            return f"unix:{self._path}, /metrics"
        host, port = self._server.server_address[:2]
        name = f"[{host!s}]" if ":" in str(host) else str(host)
        return f"http://{name}:{port}/metrics"

    def serve(self) -> None:
        """Serve requests, one after the other, until an exception of a signal handler. Blocks."""
        while True:
            self._server.handle_request()

    def close(self) -> None:
        """Stop listening; a unix socket is removed unless another program has replaced it. Idempotent."""
        self._server.server_close()
        if self._path is not None:
            with suppress(OSError):
                if self._path.lstat().st_ino == self._inode:
                    self._path.unlink()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _remove_stale_socket(path: Path) -> None:
    """Remove a socket that nobody listens on.

    Raises:
        OSError: If a program listens, or the path is no socket.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, "is there and is no socket; give another path", os.fspath(path))
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(REQUEST_TIMEOUT_S)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise OSError(errno.EADDRINUSE, "another program listens there", os.fspath(path))
