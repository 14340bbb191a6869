"""Who may use a server: tokens and TLS, with Triton's clients over both protocols."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("grpc", reason="grpcio is not installed")
pytest.importorskip("google.protobuf", reason="protobuf is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")
pytest.importorskip("gevent", reason="tritonclient[http] is not installed")
pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed")

import gevent
import tritonclient.grpc as rpc
import tritonclient.http as http
from support.asgi_calls import ask
from support.certificates import self_signed
from support.inference_services import Addresses, ListingService, served
from tritonclient.utils import InferenceServerException

from nnfmq.hal.errors import InvalidArgument
from nnfmq.serving.inference_protocol.access import BearerTokens
from nnfmq.serving.inference_protocol.errors import Unauthenticated
from nnfmq.serving.inference_protocol.http import InferenceApp
from nnfmq.serving.inference_protocol.listeners import TlsFiles

OLD, NEW = "0123456789abcdef0123", "fedcba98-76543210~=="
VALUES = np.array([[1, 2.5, 3]], np.float32)


@pytest.fixture(autouse=True)
def _no_event_loop_of_gevent_is_left() -> Iterator[None]:
    yield
    gevent.get_hub().destroy(destroy_loop=True)


class Triton(NamedTuple):
    """A client of one protocol, and the status with which it is rejected."""

    client: Any
    module: Any
    status: str

    def infer(self, token: str | None) -> Any:
        """Return a result, for a request with a token or without one."""
        tensor = self.module.InferInput("x", list(VALUES.shape), "FP32")
        tensor.set_data_from_numpy(VALUES)
        headers = None if token is None else {"authorization": f"Bearer {token}"}
        return self.client.infer("add", [tensor], headers=headers).as_numpy("y")


def clients(addresses: Addresses) -> Iterator[Triton]:
    with http.InferenceServerClient(addresses.http) as client:
        yield Triton(client, http, "401")
    with rpc.InferenceServerClient(addresses.grpc) as client:
        yield Triton(client, rpc, "StatusCode.UNAUTHENTICATED")


def test_requests_need_one_of_the_tokens() -> None:
    service, tokens = ListingService(), BearerTokens([OLD, NEW])
    with served(InferenceApp(service, tokens=tokens), service, tokens=tokens) as addresses:
        for triton in clients(addresses):
            for token in (OLD, NEW):
                np.testing.assert_array_equal(triton.infer(token), VALUES + 1)
            for token in (None, "", OLD[:-1], OLD + "0", "x" * 20, "é" * 8):
                if token == "é" * 8 and triton.module is rpc:
                    continue  # no metadata of gRPC
                served_before = len(service.requests)
                with pytest.raises(InferenceServerException, match="token") as raised:
                    triton.infer(token)
                assert raised.value.status() == triton.status
                assert len(service.requests) == served_before


def test_only_the_health_of_a_server_is_told_without_a_token() -> None:
    service, tokens = ListingService(), BearerTokens([OLD])
    with served(InferenceApp(service, tokens=tokens), service, tokens=tokens) as addresses:
        for triton in clients(addresses):
            assert triton.client.is_server_live() and triton.client.is_server_ready()
            for call in ("get_server_metadata", "get_model_repository_index", "get_inference_statistics"):
                with pytest.raises(InferenceServerException) as raised:
                    getattr(triton.client, call)()
                assert raised.value.status() == triton.status


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/metrics"), ("GET", "/v2"), ("GET", "/v2/models/add/ready"), ("GET", "/none"), ("POST", "/v2/health/x")],
)
def test_every_other_path_of_http_needs_a_token_also_one_that_does_not_exist(method: str, path: str) -> None:
    app = InferenceApp(ListingService(), tokens=BearerTokens([OLD]), metrics=lambda: (b"up 1", "text/plain"))
    reply = ask(app, method, path)
    assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
    assert ask(app, method, path, b"", [(b"authorization", b"Bearer " + OLD.encode())]).status != 401


def test_a_body_without_a_token_is_not_read() -> None:
    """The application gets no message after the first one, which has no body."""
    app = InferenceApp(ListingService(), tokens=BearerTokens([OLD]))
    assert ask(app, "POST", "/v2/models/add/infer", leaves=True).status == 401


def test_metrics_are_those_of_the_reader() -> None:
    app = InferenceApp(metrics=lambda: (b"up 1", "text/plain; version=0.0.4"))
    reply = ask(app, "GET", "/metrics")
    assert (reply.status, reply.body, reply.headers["content-type"]) == (200, b"up 1", "text/plain; version=0.0.4")
    assert "nnfmq metrics" in ask(InferenceApp(), "GET", "/metrics").json["error"]


@pytest.mark.parametrize("header", ["bearer " + OLD, "BEARER  " + OLD + " "])
def test_the_scheme_is_found_whatever_its_case(header: str) -> None:
    BearerTokens([OLD]).require(header)


@pytest.mark.parametrize("header", [None, "", OLD, "Basic " + OLD, "Bearer", f"Bearer {OLD} {OLD}"])
def test_other_headers_have_no_token(header: str | None) -> None:
    with pytest.raises(Unauthenticated):
        BearerTokens([OLD]).require(header)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "there is no token"),
        (b" \n\n", "there is no token"),
        (f"{OLD}\nshort".encode(), "token 2 has 5 characters; needed are 16 or more"),
        (b"0123456789abcdef!", "token 1 has 17 characters"),
        (b"\xff" * 20, "it is no text"),
    ],
)
def test_a_file_without_valid_tokens_is_rejected_and_its_content_not_told(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "tokens").write_bytes(content)
    with pytest.raises(InvalidArgument, match=f"tokens: {message}") as raised:
        BearerTokens.read(tmp_path / "tokens")
    for word in content.decode("latin-1").split():
        assert word not in str(raised.value)


def test_the_tokens_of_a_file_are_in_lines(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(f"{OLD}\n{NEW}\n", encoding="utf-8")
    for token in (OLD, NEW):
        BearerTokens.read(tmp_path / "tokens").require(f"Bearer {token}")


# ------------------------------------------------------------------------------------------------ TLS


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return TlsFiles(*self_signed(tmp_path_factory.mktemp("tls")))


def test_a_server_with_a_certificate_serves_clients_that_trust_it(tls: TlsFiles) -> None:
    service, tokens = ListingService(), BearerTokens([OLD])
    with served(InferenceApp(service, tokens=tokens), service, tls=tls, tokens=tokens) as addresses:
        authority = {"ca_certs": str(tls.certificate)}
        with http.InferenceServerClient(addresses.http, ssl=True, ssl_options=authority) as client:
            np.testing.assert_array_equal(Triton(client, http, "").infer(OLD), VALUES + 1)
        with rpc.InferenceServerClient(addresses.grpc, ssl=True, root_certificates=str(tls.certificate)) as client:
            np.testing.assert_array_equal(Triton(client, rpc, "").infer(OLD), VALUES + 1)


def test_a_server_with_a_certificate_serves_no_others(tls: TlsFiles) -> None:
    service = ListingService()
    with served(InferenceApp(service), service, tls=tls) as addresses:
        for options in ({}, {"ssl": True}):
            with http.InferenceServerClient(addresses.http, **options) as client, pytest.raises(Exception):  # noqa: B017
                client.is_server_live()
            with rpc.InferenceServerClient(addresses.grpc, **options) as client:
                with pytest.raises(InferenceServerException) as raised:
                    client.is_server_live(client_timeout=20)
                assert raised.value.status() == "StatusCode.UNAVAILABLE"


def test_files_that_are_no_certificate_and_key_are_rejected(tls: TlsFiles, tmp_path: Path) -> None:
    _, other = self_signed(tmp_path)
    (tmp_path / "text").write_text("text", encoding="utf-8")
    for files in ((tls.certificate, other), (tls.key, tls.key), (tls.certificate, tmp_path / "text")):
        with pytest.raises(InvalidArgument, match="are not a certificate and its key in PEM"):
            TlsFiles(*files).require_valid()
    with pytest.raises(FileNotFoundError, match="none"):
        TlsFiles(tls.certificate, tmp_path / "none").require_valid()
