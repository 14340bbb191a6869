"""Connections of HTTP are limited in number and in time, whatever clients send or do not send."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("uvicorn", reason="uvicorn is not installed")
pytest.importorskip("grpc", reason="grpcio is not installed")

from support.inference_services import ListingService, served

from nnfmq.base import settings
from nnfmq.serving.inference_protocol.http import InferenceApp
from nnfmq.serving.inference_protocol.tensors import RequestLimits

LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n"
INFER = b"POST /v2/models/add/infer HTTP/1.1\r\nHost: x\r\n"
HEADER_S = 0.2


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    monkeypatch.setenv(settings.HTTP_HEADER_S.variable, str(HEADER_S))
    monkeypatch.setenv(settings.HTTP_CONNECTIONS.variable, "2")
    service = ListingService()
    with served(InferenceApp(service, limits=RequestLimits(max_upload_s=HEADER_S)), service) as addresses:
        host, _, port = addresses.http.partition(":")
        yield host, int(port)


def rest(connection: socket.socket) -> bytes:
    """Return what arrives until the end of the connection."""
    received = b""
    try:
        while part := connection.recv(65536):
            received += part
    except ConnectionResetError:
        pass
    return received


@pytest.mark.parametrize(
    ("sent", "reply"),
    [
        (b"", b""),
        (LIVE, b""),
        (LIVE + b"Content-Length: 0\r\n\r\n" + LIVE, b"HTTP/1.1 200"),
        (INFER + b"Content-Length: 9\r\n\r\n1", b"HTTP/1.1 408"),
    ],
    ids=["nothing", "half a header", "half a header after a request", "half a body"],
)
def test_a_connection_without_a_whole_request_is_closed(address: tuple[str, int], sent: bytes, reply: bytes) -> None:
    begin = time.monotonic()  # the server's time begins when it accepts the connection
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(sent)
        received = rest(connection)
    assert received[: len(reply)] == reply and (reply or not received)
    assert time.monotonic() - begin >= HEADER_S


def test_a_connection_whose_client_reads_no_response_leaves_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.HTTP_HEADER_S.variable, str(HEADER_S))
    monkeypatch.setenv(settings.HTTP_CONNECTIONS.variable, "1")
    service, large = ListingService(), bytes(16 << 20)
    with served(InferenceApp(service, metrics=lambda: (large, "text/plain")), service) as addresses:
        host, _, port = addresses.http.partition(":")
        request, received = b"GET /metrics HTTP/1.1\r\nHost: x\r\n", b""
        with socket.create_connection((host, int(port)), timeout=60) as silent:
            silent.sendall(request + b"\r\n")
            while not received.endswith(large):  # one that reads it all, when the first one has been closed
                with socket.create_connection((host, int(port)), timeout=60) as connection:
                    connection.sendall(request + b"Connection: close\r\n\r\n")
                    received = rest(connection)


def test_a_server_that_ends_does_not_wait_for_the_rest_of_a_body() -> None:
    service = ListingService()
    with socket.socket() as connection:
        with served(InferenceApp(service), service) as addresses:
            host, _, port = addresses.http.partition(":")
            connection.settimeout(60)
            connection.connect((host, int(port)))
            connection.sendall(INFER + b"Content-Length: 9\r\nExpect: 100-continue\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 100")  # it waits for the body
            begin = time.monotonic()
        assert time.monotonic() - begin < RequestLimits().max_upload_s / 2


def test_beyond_the_limit_a_connection_is_refused_until_another_one_ends(address: tuple[str, int]) -> None:
    with socket.create_connection(address), socket.create_connection(address):
        with socket.create_connection(address, timeout=60) as surplus:
            refused = rest(surplus)
        assert refused.startswith(b"HTTP/1.1 503") and b"the limit that $NNFMQ_HTTP_CONNECTIONS sets" in refused
    served = b""
    while not served.startswith(b"HTTP/1.1 200"):  # the server may not have noticed yet that the two have ended
        with socket.create_connection(address, timeout=60) as connection:
            connection.sendall(LIVE + b"Connection: close\r\n\r\n")
            served = rest(connection)
