"""Servers of the Open Inference Protocol at addresses: uvicorn for HTTP, grpc.aio for gRPC, both with limits and TLS.

    async with (
        open_server() as service,
        http_server(InferenceApp(service), "127.0.0.1", 8000),
        grpc_server(service, "127.0.0.1", 8001),
    ):
        await asyncio.Event().wait()

Both need the extra `serving`. TLS is that of uvicorn and gRPC, from the same files.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import uvicorn

from nnfmq.hal.errors import InvalidArgument
from nnfmq.serving.inference_protocol.access import BearerTokens
from nnfmq.serving.inference_protocol.grpc import (
    GrpcInferenceService,
    TokenInterceptor,
    add_to_server,
    server_options,
)
from nnfmq.serving.inference_protocol.tensors import RequestLimits
from nnfmq.serving.inference_protocol.web_connections import LimitedConnection
from nnfmq.serving.inference_service import InferenceService

__all__ = ["TlsFiles", "grpc_server", "http_server"]

_END_S = 10  # for requests in progress when a server ends
_BACKLOG = 2048  # uvicorn's


class TlsFiles(NamedTuple):
    """The files of a server's certificate, with the chain to its authority, and of its private key, both as PEM."""

    certificate: Path
    key: Path

    def require_valid(self) -> None:
        """Check that both can be read and belong together.

        Raises:
            OSError: If a file cannot be read.
            InvalidArgument: If they are not a certificate and its key, or the key has a password.
        """
        for path in self:
            path.read_bytes()
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key, password="")
        except (ssl.SSLError, ValueError) as error:
            raise InvalidArgument(
                f"{self.certificate} and {self.key} are not a certificate and its key in PEM, without password: {error}"
            ) from error


@asynccontextmanager
async def http_server(app: Any, host: str, port: int, *, tls: TlsFiles | None = None) -> AsyncIterator[int]:
    """Serve an ASGI application until the block ends; yields the port. Port 0 takes any free one.

    Its connections are limited: see `LimitedConnection`. At the end requests in progress have 10 s.

    Raises:
        OSError: If the address is in use, or no address of this machine.
        InvalidArgument: If the files of `tls` are not valid.
    """
    if tls is not None:
        tls.require_valid()
    certificate, key = tls or (None, None)
    with _bound(host, port) as listener:
        config = uvicorn.Config(
            app,
            http=LimitedConnection,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=_END_S,
            ssl_certfile=certificate,
            ssl_keyfile=key,
        )
        server = _WebServer(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await asyncio.wait(
                [serving, started := asyncio.create_task(server.begun.wait())], return_when="FIRST_COMPLETED"
            )
            started.cancel()
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await serving


class _WebServer(uvicorn.Server):
    """A server that says when it listens, and leaves signals to its caller."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.begun = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.begun.set()

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address. The servers say less of what is wrong with one.

    Raises:
        OSError: With the address as file name.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise OSError(errno.EADDRNOTAVAIL, f"no address: {error.strerror}", _shown(host, port)) from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, os.strerror(error.errno or 0), _shown(host, port)) from None
    return listener


@asynccontextmanager
async def grpc_server(
    service: InferenceService,
    host: str,
    port: int,
    *,
    tls: TlsFiles | None = None,
    tokens: BearerTokens | None = None,
    limits: RequestLimits | None = None,
) -> AsyncIterator[int]:
    """Serve a service over gRPC until the block ends; yields the port. Port 0 takes any free one.

    Calls and their memory are limited: see `RequestLimits`. At the end calls in progress have 10 s.

    Raises:
        OSError: If the address is in use, or no address of this machine.
        InvalidArgument: If the files of `tls` are not valid.
    """
    found = limits or RequestLimits()
    if port:
        _bound(host, port).close()
    server = grpc.aio.server(
        interceptors=[TokenInterceptor(tokens)] if tokens is not None else [],
        options=server_options(found),
        maximum_concurrent_rpcs=found.max_calls,
    )
    add_to_server(GrpcInferenceService(service, limits=found), server)
    try:
        bound = _add_port(server, _shown(host, port), tls)
        await server.start()
        yield bound
    finally:
        await server.stop(_END_S)


def _add_port(server: Any, address: str, tls: TlsFiles | None) -> int:
    """Return the port at which a server listens. gRPC leaves threads if that fails."""
    credentials = None
    if tls is not None:
        tls.require_valid()
        credentials = grpc.ssl_server_credentials([(tls.key.read_bytes(), tls.certificate.read_bytes())])
    try:
        add = server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
    except RuntimeError as error:  # without the reason
        raise OSError(errno.EADDRINUSE, "in use, or no address of this machine", address) from error
    port: int = add
    return port


def _shown(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
