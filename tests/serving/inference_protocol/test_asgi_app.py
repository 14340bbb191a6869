"""InferenceApp without a server: routes, errors, limits of bodies, and the lifetime of the service."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from support.asgi_calls import ask, ask_async
from support.drivers import LIMIT_S
from support.inference_services import ComputingService, ListingService

from nnfmq.hal.errors import DeadObject, NnfmqError, ResourceExhaustedTransient
from nnfmq.serving.inference_protocol import http
from nnfmq.serving.inference_protocol.http import InferenceApp, RestRequest, decode_infer_request
from nnfmq.serving.inference_protocol.tensors import RequestLimits
from nnfmq.serving.inference_service import InferenceService

INFER = "/v2/models/add/infer"
BODY = b'{"id": "9", "inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "data": [1, 2.5]}]}'


@pytest.fixture
def service() -> ListingService:
    return ListingService()


@pytest.fixture
def app(service: ListingService) -> InferenceApp:
    return InferenceApp(service)


# ------------------------------------------------------------------------------------------------ endpoints


@pytest.mark.parametrize(
    ("path", "when_ready", "otherwise"),
    [
        ("/v2/health/live", {"live": True}, {"live": False}),
        ("/v2/health/ready", {"ready": True}, {"ready": False}),
        ("/v2/models/add/ready", {"name": "add", "ready": True}, {"name": "add", "ready": False}),
        ("/v2/models/add/versions/3/ready", {"name": "add", "ready": True}, {"name": "add", "ready": False}),
    ],
)
def test_health_is_200_or_503(
    app: InferenceApp, service: ListingService, path: str, when_ready: object, otherwise: object
) -> None:
    response = ask(app, "GET", path)
    assert (response.status, response.json) == (200, when_ready)
    service.ready = False
    response = ask(app, "GET", path)
    assert (response.status, response.json) == (503, otherwise)


@pytest.mark.parametrize("path", ["/v2/models/other/ready", "/v2/models/add/versions/4/ready"])
def test_a_model_that_does_not_exist_is_not_ready(app: InferenceApp, path: str) -> None:
    assert ask(app, "GET", path).status == 503


@pytest.mark.parametrize("path", ["/v2", "/v2/"])
def test_the_server_s_metadata(app: InferenceApp, path: str) -> None:
    expected = {"name": "nnfmq", "version": "1.2.3", "extensions": ["statistics", "binary_tensor_data"]}
    assert ask(app, "GET", path).json == expected


@pytest.mark.parametrize("path", ["/v2/models/add", "/v2/models/add/versions/3"])
def test_a_model_s_metadata_has_the_quantization(app: InferenceApp, path: str) -> None:
    assert ask(app, "GET", path).json == {
        "name": "add",
        "versions": ["3"],
        "platform": "nnfmq",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}],
        "outputs": [
            {"name": "y", "datatype": "UINT8", "shape": [-1, 3], "parameters": {"scale": 0.5, "zero_point": 7}}
        ],
    }


def test_an_inference_in_json(app: InferenceApp, service: ListingService) -> None:
    response = ask(app, "POST", "/v2/models/add/versions/3/infer", BODY)
    assert (response.status, response.headers["content-type"]) == (200, "application/json")
    output = {"name": "y", "datatype": "FP32", "shape": [2], "data": [2.0, 3.5]}
    assert response.json == {"model_name": "add", "model_version": "3", "id": "9", "outputs": [output]}
    assert [(request.model, request.version, request.id) for request in service.requests] == [("add", "3", "9")]


def test_an_inference_in_binary_data(app: InferenceApp) -> None:
    tensor = {"name": "x", "datatype": "INT16", "shape": [2], "parameters": {"binary_data_size": 4}}
    header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    lengths = [(b"inference-header-content-length", str(len(header)).encode())]
    response = ask(app, "POST", INFER, header + np.array([7, 8], "<i2").tobytes(), lengths)
    length = int(response.headers["inference-header-content-length"])
    assert response.headers["content-type"] == "application/octet-stream"
    assert json.loads(response.body[:length])["outputs"][0]["parameters"] == {"binary_data_size": 4}
    assert response.body[length:] == np.array([8, 9], "<i2").tobytes()


class Decoding:
    """Stands for the decoder: each body waits until the test lets it go on."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.may_end = threading.Semaphore(0)

    def __call__(self, body: bytes, header_length: int | None, **options: Any) -> RestRequest:
        self.threads.append(threading.current_thread())
        if threading.current_thread() is not threading.main_thread():
            assert self.may_end.acquire(timeout=LIMIT_S)
        return decode_infer_request(body, header_length, **options)


def test_other_requests_are_served_while_large_json_is_decoded_one_body_at_a_time(
    app: InferenceApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = BODY + b" " * http._LARGE_JSON_BYTES
    decoding = Decoding()
    monkeypatch.setattr(http, "decode_infer_request", decoding)

    async def main() -> None:
        tasks = [asyncio.create_task(ask_async(app, "POST", INFER, large)) for _ in range(2)]
        while not decoding.threads:
            await asyncio.sleep(0)
        response = await ask_async(app, "POST", INFER, BODY)
        assert response is not None and response.status == 200
        assert [thread is threading.main_thread() for thread in decoding.threads] == [False, True]
        decoding.may_end.release(2)
        for response in await asyncio.gather(*tasks):
            assert response is not None and response.json["outputs"][0]["data"] == [2.0, 3.5]
        assert len(decoding.threads) == 3

    asyncio.run(main())


def test_large_json_that_is_no_request_is_an_error_and_the_next_one_is_served(app: InferenceApp) -> None:
    blank = b" " * http._LARGE_JSON_BYTES
    assert ask(app, "POST", INFER, b"{" + blank).status == 400
    assert ask(app, "POST", INFER, BODY + blank).status == 200


def test_the_length_of_binary_data_does_not_matter(app: InferenceApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio, "to_thread", None)
    data = np.zeros(http._LARGE_JSON_BYTES, np.uint8)
    tensor = {"name": "x", "datatype": "UINT8", "shape": data.shape, "parameters": {"binary_data_size": data.nbytes}}
    header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    lengths = [(b"inference-header-content-length", str(len(header)).encode())]
    assert ask(app, "POST", INFER, header + data.tobytes(), lengths).body[-data.nbytes :] == (data + 1).tobytes()


@pytest.mark.parametrize(
    ("body", "names"),
    [(b"", ["add", "new", "broken"]), (b"{}", ["add", "new", "broken"]), (b' {"ready": true} ', ["add"])],
)
def test_the_list_of_models(app: InferenceApp, body: bytes, names: list[str]) -> None:
    models = ask(app, "POST", "/v2/repository/index", body).json
    assert [model["name"] for model in models] == names
    assert models[0] == {"name": "add", "version": "3", "state": "READY", "reason": ""}


def test_a_path_below_a_prefix_of_the_server(app: InferenceApp) -> None:
    assert ask(app, "GET", "/models/v2/health/live", root_path="/models").status == 200


# ------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v1",
        "/v2/health",
        "/v2/models",
        "/v2/models/",
        "/v2/models/add/other",
        "/v2/models//infer",
        "/v2/models/add/versions",
        "/v2/models/add/versions//infer",
        "/v2/models/add/infer/more",
        "/v2/logging",
        "/v2/repository/models/add/load",
    ],
)
def test_other_paths_are_404(app: InferenceApp, path: str) -> None:
    response = ask(app, "POST", path)
    assert (response.status, response.json) == (404, {"error": f"this server has no {path!r}"})


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", INFER, "POST"), ("PUT", INFER, "POST"), ("POST", "/v2/health/live", "GET"), ("HEAD", "/v2", "GET")],
)
def test_other_methods_are_405(app: InferenceApp, method: str, path: str, allowed: str) -> None:
    response = ask(app, method, path)
    assert (response.status, response.headers["allow"]) == (405, allowed)


def test_a_service_that_cannot_list_its_models_has_no_list() -> None:
    response = ask(InferenceApp(ComputingService()), "POST", "/v2/repository/index")
    assert (response.status, response.json) == (404, {"error": "this server cannot list its models"})


@pytest.mark.parametrize("body", [b"[", b"[]", b'{"ready": 1}', b"\xff"])
def test_other_bodies_for_the_list_are_400(app: InferenceApp, body: bytes) -> None:
    assert ask(app, "POST", "/v2/repository/index", body).status == 400


def test_a_model_that_does_not_exist_is_404(app: InferenceApp) -> None:
    for method, path, body in (("GET", "/v2/models/a", b""), ("POST", "/v2/models/a/infer", BODY)):
        response = ask(app, method, path, body)
        assert (response.status, response.json) == (404, {"error": "there is no model 'a'"})


@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [(ResourceExhaustedTransient("64 requests wait"), 429, "1"), (DeadObject("the driver died"), 503, "1")],
)
def test_an_error_says_when_to_try_again(
    app: InferenceApp, service: ListingService, error: NnfmqError, status: int, retry_after: str
) -> None:
    service.failure = error
    response = ask(app, "POST", "/v2/models/fail/infer", BODY)
    assert (response.status, response.headers["retry-after"], response.json) == (
        status,
        retry_after,
        {"error": str(error)},
    )


def test_a_defect_is_500_without_its_text(
    app: InferenceApp, service: ListingService, caplog: pytest.LogCaptureFixture
) -> None:
    service.failure = ZeroDivisionError("a secret")
    with caplog.at_level(logging.ERROR, "nnfmq.serving"):
        response = ask(app, "POST", "/v2/models/fail/infer", BODY)
    assert response.status == 500
    assert b"secret" not in response.body
    assert "a secret" in caplog.text


def test_an_invalid_request_does_not_reach_the_service(app: InferenceApp, service: ListingService) -> None:
    assert ask(app, "POST", INFER, b"{}").status == 400
    assert not service.requests


def test_a_cancelled_request_is_cancelled_in_the_service(app: InferenceApp, service: ListingService) -> None:
    service.failure = asyncio.CancelledError()
    with pytest.raises(asyncio.CancelledError):
        ask(app, "POST", "/v2/models/fail/infer", BODY)


# ------------------------------------------------------------------------------------------------ bodies and headers


def test_a_body_comes_in_pieces(app: InferenceApp) -> None:
    assert ask(app, "POST", INFER, [BODY[:10], b"", BODY[10:]]).json["outputs"][0]["data"] == [2.0, 3.5]


@pytest.mark.parametrize("parts", [[BODY], [BODY[:50], BODY[50:]]])
def test_a_body_beyond_the_limit_is_413(service: ListingService, parts: list[bytes]) -> None:
    assert ask(InferenceApp(service, limits=RequestLimits(len(BODY))), "POST", INFER, parts).status == 200
    response = ask(InferenceApp(service, limits=RequestLimits(len(BODY) - 1)), "POST", INFER, parts)
    assert response.status == 413
    assert f"more than the {len(BODY) - 1} bytes" in response.json["error"]


@pytest.mark.parametrize("length", [b"90", b"9" * 5000])
def test_a_body_that_is_announced_beyond_the_limit_is_not_read(service: ListingService, length: bytes) -> None:
    app = InferenceApp(service, limits=RequestLimits(89))
    response = ask(app, "POST", INFER, [], [(b"content-length", length)])
    assert (response.status, len(response.body) < 200) == (413, True)


def test_json_beyond_the_limit_is_413(service: ListingService) -> None:
    assert ask(InferenceApp(service, limits=RequestLimits(max_header_bytes=50)), "POST", INFER, BODY).status == 413


def upload(app: InferenceApp, received: list[bytes]) -> tuple[asyncio.Task[None], list[Any]]:
    """Begin a request whose body ends after these parts, or never if there is None; return it and what it is sent."""
    incoming, sent = list(received), list[Any]()

    async def receive() -> dict[str, Any]:
        if not incoming:
            await asyncio.get_running_loop().create_future()
        return {"type": "http.request", "body": incoming.pop(0), "more_body": True}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": INFER, "headers": []}
    return asyncio.create_task(app(scope, receive, send)), sent


def test_bodies_in_progress_take_limited_memory_together(service: ListingService) -> None:
    app = InferenceApp(service, limits=RequestLimits(max_total_bytes=len(BODY) + 50))

    async def check() -> None:
        unfinished, _ = upload(app, [b" " * 30, b" " * 30])
        await asyncio.sleep(0)
        refused = await ask_async(app, "POST", INFER, BODY)
        assert refused is not None and refused.status == 503 and refused.headers["retry-after"] == "1"
        assert "bodies of requests in progress have 60 bytes" in refused.json["error"]
        unfinished.cancel()
        await asyncio.wait([unfinished])
        accepted = await ask_async(app, "POST", INFER, BODY)
        assert accepted is not None and accepted.status == 200

    asyncio.run(check())


def test_a_body_that_does_not_arrive_in_time_is_408(service: ListingService) -> None:
    app = InferenceApp(service, limits=RequestLimits(max_upload_s=0.01))

    async def check() -> None:
        unfinished, sent = upload(app, [b" "])
        await unfinished
        assert sent[0]["status"] == 408 and b"did not arrive within 0.01 s" in sent[1]["body"]

    asyncio.run(check())


def test_a_client_that_leaves_gets_no_response(app: InferenceApp, service: ListingService) -> None:
    assert asyncio.run(ask_async(app, "POST", INFER, [BODY[:20]], leaves=True)) is None
    assert not service.requests


@pytest.mark.parametrize("length", [b"-1", b"1.5", b"x", b"", b"\xb2", b"9" * 19, b"91"])
def test_another_header_length_is_400(app: InferenceApp, length: bytes) -> None:
    response = ask(app, "POST", INFER, BODY, [(b"inference-header-content-length", length)])
    assert (response.status, "Inference-Header-Content-Length" in response.json["error"]) == (400, True)


def test_a_header_may_be_given_once(app: InferenceApp) -> None:
    response = ask(app, "POST", INFER, BODY, [(b"inference-header-content-length", b"90")] * 2)
    assert (response.status, response.json["error"]) == (400, "header inference-header-content-length is given 2 times")


@pytest.mark.parametrize(("encoding", "status"), [(b"gzip", 415), (b"deflate", 415), (b"identity", 200), (b"", 200)])
def test_compressed_bodies_are_415(app: InferenceApp, encoding: bytes, status: int) -> None:
    assert ask(app, "POST", INFER, BODY, [(b"content-encoding", encoding)]).status == status


# ------------------------------------------------------------------------------------------------ lifetime


async def lifespan(app: InferenceApp, sent: list[dict[str, Any]], between: Any = None) -> None:
    """Start and end a server's lifetime, and await `between` while it runs."""
    steps = iter(["lifespan.startup", "lifespan.shutdown"])

    async def receive() -> dict[str, Any]:
        step = next(steps)
        if step == "lifespan.shutdown" and between is not None:
            await between()
        return {"type": step}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app({"type": "lifespan"}, receive, send)


def test_the_service_is_open_while_the_server_runs() -> None:
    steps = list[str]()

    @asynccontextmanager
    async def opened() -> AsyncIterator[InferenceService]:
        steps.append("opened")
        yield ListingService()
        steps.append("closed")

    app = InferenceApp.opened_by(opened)

    async def between() -> None:
        response = await ask_async(app, "POST", INFER, BODY)
        steps.append(f"served {response.status if response else None}")

    assert ask(app, "POST", INFER, BODY).json == {"error": "the server is starting"}
    sent = list[dict[str, Any]]()
    asyncio.run(lifespan(app, sent, between))
    assert steps == ["opened", "served 200", "closed"]
    assert [message["type"] for message in sent] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


def test_a_service_that_cannot_be_opened_ends_the_server() -> None:
    @asynccontextmanager
    async def opened() -> AsyncIterator[InferenceService]:
        raise DeadObject("no driver can be reached")
        yield

    sent = list[dict[str, Any]]()
    with pytest.raises(DeadObject):
        asyncio.run(lifespan(InferenceApp.opened_by(opened), sent))
    assert sent == [{"type": "lifespan.startup.failed", "message": "no driver can be reached"}]


def test_a_given_service_has_no_lifetime_of_the_server(app: InferenceApp) -> None:
    sent = list[dict[str, Any]]()
    asyncio.run(lifespan(app, sent))
    assert [message["type"] for message in sent] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


def test_websockets_are_refused(app: InferenceApp) -> None:
    sent = list[dict[str, Any]]()

    async def connect() -> None:
        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await app({"type": "websocket", "path": "/v2"}, asyncio.Event().wait, send)  # type: ignore[arg-type]

    asyncio.run(connect())
    assert sent == [{"type": "websocket.close", "code": 1003}]
