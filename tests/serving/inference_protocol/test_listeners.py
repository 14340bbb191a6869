"""Servers at addresses: those that are in use, calls at a time, and requests in progress when a server ends."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

pytest.importorskip("grpc", reason="grpcio is not installed")
pytest.importorskip("google.protobuf", reason="protobuf is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")
pytest.importorskip("tritonclient.grpc.aio", reason="tritonclient[grpc] is not installed")

import tritonclient.grpc.aio as rpc
from support.inference_services import ListingService
from support.served_models import run
from tritonclient.utils import InferenceServerException

from nnfmq.serving.inference_protocol.http import InferenceApp
from nnfmq.serving.inference_protocol.listeners import grpc_server, http_server
from nnfmq.serving.inference_protocol.tensors import RequestLimits
from nnfmq.serving.inference_service import InferRequest, InferResponse


class WaitingService(ListingService):
    """A service whose requests wait until the test lets them go on."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting, self.go_on = 0, asyncio.Event()

    async def infer(self, request: InferRequest) -> InferResponse:
        self.waiting += 1
        await self.go_on.wait()
        return await super().infer(request)


def request(client: Any) -> asyncio.Task[Any]:
    tensor = rpc.InferInput("x", [1, 3], "FP32")
    tensor.set_data_from_numpy(np.zeros((1, 3), np.float32))
    return asyncio.create_task(client.infer("add", [tensor]))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "203.0.113.7"])
def test_an_address_that_cannot_be_had_is_named(host: str) -> None:
    """The third one is of no machine (RFC 5737); gRPC would share a port with another server."""

    async def test() -> None:
        service = ListingService()
        made = (
            lambda port: http_server(InferenceApp(service), host, port),
            lambda port: grpc_server(service, host, port),
        )
        shown = f"[{host}]" if ":" in host else host
        if host == "203.0.113.7":
            for make in made:
                with pytest.raises(OSError) as raised:
                    await make(8000).__aenter__()
                assert raised.value.filename == f"{shown}:8000"
            return
        for first in made:
            async with first(0) as port:
                for second in made:
                    with pytest.raises(OSError) as raised:
                        await second(port).__aenter__()
                    assert raised.value.filename == f"{shown}:{port}"

    run(test())


def test_calls_beyond_those_at_a_time_are_rejected_without_their_messages() -> None:
    async def test() -> None:
        service = WaitingService()
        limits = RequestLimits(max_calls=2)
        async with (
            grpc_server(service, "127.0.0.1", 0, limits=limits) as port,
            rpc.InferenceServerClient(f"127.0.0.1:{port}") as first,
            rpc.InferenceServerClient(f"127.0.0.1:{port}", channel_args=[("test", 2)]) as second,  # another connection
        ):
            accepted = [request(first), request(second)]
            while service.waiting < 2:
                await asyncio.sleep(0)
            with pytest.raises(InferenceServerException) as raised:
                await request(second)
            assert raised.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
            service.go_on.set()
            for result in await asyncio.gather(*accepted):
                np.testing.assert_array_equal(result.as_numpy("y"), np.ones((1, 3)))
            await request(second)

    run(test())


def test_a_server_that_ends_lets_calls_in_progress_end() -> None:
    async def test() -> None:
        service = WaitingService()
        async with grpc_server(service, "127.0.0.1", 0) as port:
            client = rpc.InferenceServerClient(f"127.0.0.1:{port}")
            accepted = request(client)
            while not service.waiting:
                await asyncio.sleep(0)
            asyncio.get_running_loop().call_later(0.05, service.go_on.set)
        np.testing.assert_array_equal((await accepted).as_numpy("y"), np.ones((1, 3)))
        await client.close()

    run(test())
