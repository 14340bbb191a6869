"""The HTTP endpoint of `nnfmq metrics`, on a loopback address or a unix socket: GET /metrics, and nothing else.

It serves one request after the other, and gives a client REQUEST_TIMEOUT_S. It is the only HTTP in nnfmq, and runs in a
process of its own, never in the driver.
"""

from __future__ import annotations

import argparse
import errno
import ipaddress
import os
import socket
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

__all__ = ["Endpoint", "ListenAddress", "listen_address"]

REQUEST_TIMEOUT_S = 5.0
_UNIX = "unix:"


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """Where to listen: a unix socket's `path`, or a loopback `host` and a `port` (0 = any free one)."""

    host: str = ""
    port: int = 0
    path: Path | None = None


def listen_address(text: str) -> ListenAddress:
    """Argparse type: unix:PATH, or HOST:PORT with a loopback address."""
    if text.startswith(_UNIX) and len(text) > len(_UNIX):
        return ListenAddress(path=Path(text.removeprefix(_UNIX)))
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    host = "127.0.0.1" if host == "localhost" else host
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither unix:PATH nor a loopback address with a port, such as 127.0.0.1:9464"
        )
    return ListenAddress(host, int(port))


class _MetricsServer(HTTPServer):
    """An HTTP server that looks up no names."""

    def __init__(self, address: ListenAddress, handler: type[BaseHTTPRequestHandler]) -> None:
        unix = address.path is not None
        self.address_family = socket.AF_UNIX if unix else socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self.allow_reuse_address = not unix
        target: Any = os.fspath(address.path) if address.path is not None else (address.host, address.port)
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

    `render` returns the text of the metrics and its content type.

    Raises:
        OSError: If the address is in use, or cannot be bound.
    """

    def __init__(self, address: ListenAddress, render: Callable[[], tuple[bytes, str]]) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = REQUEST_TIMEOUT_S
            server_version, sys_version = "nnfmq", ""

            def do_GET(self) -> None:
                if self.path.partition("?")[0] != "/metrics":
                    self.send_error(HTTPStatus.NOT_FOUND, "the metrics are at /metrics")
                    return
                body, content_type = render()
                self.send_response(HTTPStatus.OK)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Log no request."""

        self._path = address.path
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
