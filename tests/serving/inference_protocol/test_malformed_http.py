"""Malformed requests over sockets: a real server sends an error as JSON or closes the connection, and serves on."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

pytest.importorskip("uvicorn", reason="uvicorn is not installed")
pytest.importorskip("grpc", reason="grpcio is not installed")
pytest.importorskip("google.protobuf", reason="protobuf is not installed")

from support.inference_services import ListingService, served

from nnfmq.serving.inference_protocol.http import InferenceApp
from nnfmq.serving.inference_protocol.tensors import RequestLimits

BODY = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}]}'
LIMITS = RequestLimits(max_body_bytes=1000)


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    service = ListingService()
    with served(InferenceApp(service, limits=LIMITS), service) as addresses:
        host, _, port = addresses.http.partition(":")
        yield host, int(port)
        assert exchange((host, int(port)), request(BODY))[0] == 200


def request(body: bytes, *headers: bytes, length: int | None = None) -> bytes:
    lines = [
        b"POST /v2/models/add/infer HTTP/1.1",
        b"Host: localhost",
        b"Connection: close",
        b"Content-Length: %d" % (len(body) if length is None else length),
        *headers,
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def exchange(address: tuple[str, int], data: bytes) -> tuple[int, bytes]:
    """Send bytes, and return the status and body of the response; 0 if the connection was closed without one."""
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = received.partition(b"\r\n\r\n")
    return (int(head.split(b" ")[1]) if head else 0), body


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (request(b"{}"), 400),
        (request(b"[" * 900), 400),
        (request(BODY, b"Inference-Header-Content-Length: 9999"), 400),
        (request(BODY, b"Inference-Header-Content-Length: 5", b"Inference-Header-Content-Length: 5"), 400),
        (request(BODY, b"Content-Encoding: gzip"), 415),
        (request(b" " * 1001), 413),
        (request(b"", length=10**15), 413),
        (request(BODY).replace(b"POST", b"DELETE"), 405),
        (request(BODY).replace(b"/v2/models/add/infer", b"/%2e%2e/etc/passwd"), 404),
        (request(BODY).replace(b"models/add", b"models/%00%ff"), 404),
    ],
)
def test_the_error_is_json(address: tuple[str, int], data: bytes, status: int) -> None:
    found, body = exchange(address, data)
    assert (found, list(json.loads(body))) == (status, ["error"])


def test_a_chunked_body_has_the_limit_too(address: tuple[str, int]) -> None:
    chunked = request(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    chunks = b"%x\r\n%s\r\n0\r\n\r\n"
    assert exchange(address, chunked + chunks % (len(BODY), BODY))[0] == 200
    assert exchange(address, chunked + chunks % (1001, b" " * 1001))[0] == 413


@pytest.mark.parametrize("data", [request(BODY, length=len(BODY) + 5), request(BODY)[:40], b""])
def test_a_client_that_leaves_early_is_forgotten(address: tuple[str, int], data: bytes) -> None:
    assert exchange(address, data)[0] in (0, 400)


@pytest.mark.parametrize(
    "data", [b"\x16\x03\x01\x02\x00" * 20 + b"\r\n\r\n", b"GET / HTTP/9\r\n\r\n", request(BODY, b"a b: c")]
)
def test_other_protocols_are_refused(address: tuple[str, int], data: bytes) -> None:
    assert exchange(address, data)[0] in (0, 400)


def test_the_http_side_needs_no_package_beyond_the_base_install() -> None:
    program = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['grpc', 'google', 'uvicorn', 'starlette', 'ray']))\n"
        "from nnfmq.serving.inference_protocol import errors, http\n"
        "print('runtime' if any(name.startswith('nnfmq.client') for name in sys.modules) else 'alone')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("alone\n", "")
