"""Triton's clients, the protocols, a ModelServer and a real driver, which is killed in the middle of requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("grpc", reason="grpcio is not installed")
pytest.importorskip("google.protobuf", reason="protobuf is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")
pytest.importorskip("aiohttp", reason="tritonclient[http] is not installed")
pytest.importorskip("tritonclient.grpc.aio", reason="tritonclient[grpc] is not installed")

import tritonclient.grpc.aio as rpc
import tritonclient.http.aio as http
from support.drivers import Daemon, Process, running_daemon
from support.inference_services import protocol_servers
from support.served_models import ModelsInMemory, TestModel, positive, run
from tritonclient.utils import InferenceServerException

import nnfmq
from nnfmq.serving.inference_protocol.http import InferenceApp
from nnfmq.serving.server import ModelServer, ServerOptions

VALUES = np.array([1, -2, 3], np.float32)


def tensors(protocol: Any, values: Any = VALUES) -> list[Any]:
    tensor = protocol.InferInput("x", list(values.shape), "FP32")
    tensor.set_data_from_numpy(values)
    return [tensor]


@asynccontextmanager
async def triton_clients(client: nnfmq.Client, **options: Any) -> AsyncIterator[list[tuple[Any, Any, ModelServer]]]:
    """Yield a client of each protocol with its module and the server, all over one client of the driver."""
    provider = ModelsInMemory(client, {"positive": TestModel(positive())})
    async with (
        ModelServer(client, provider, ServerOptions(**options)) as server,
        protocol_servers(InferenceApp(server), server) as addresses,
        http.InferenceServerClient(addresses.http) as over_http,
        rpc.InferenceServerClient(addresses.grpc) as over_grpc,
    ):
        yield [(over_http, http, server), (over_grpc, rpc, server)]


async def infers(triton: Any, protocol: Any) -> None:
    """Check one inference."""
    result = await triton.infer("positive", tensors(protocol))
    np.testing.assert_array_equal(result.as_numpy("y"), [1, 0, 3])


def test_models_of_a_driver_are_served_over_both_protocols(client: nnfmq.Client) -> None:
    async def test() -> None:
        async with triton_clients(client) as clients:
            for triton, protocol, _ in clients:
                assert await triton.is_server_ready()
                assert await triton.is_model_ready("positive", "2")
                await infers(triton, protocol)
            (over_http, _, _), (over_grpc, _, _) = clients
            metadata = await over_http.get_model_metadata("positive")
            assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [3]}]
            index = (await over_grpc.get_model_repository_index()).models
            assert [(entry.name, entry.version, entry.state) for entry in index] == [("positive", "2", "READY")]

    run(test())


@pytest.mark.parametrize(
    ("model", "values", "http_status", "grpc_code"),
    [("other", VALUES, "404", "NOT_FOUND"), ("positive", VALUES[:2], "400", "INVALID_ARGUMENT")],
)
def test_errors_of_requests_have_their_status(
    client: nnfmq.Client, model: str, values: Any, http_status: str, grpc_code: str
) -> None:
    async def test() -> None:
        async with triton_clients(client) as clients:
            for (triton, protocol, _), status in zip(clients, (http_status, f"StatusCode.{grpc_code}"), strict=True):
                with pytest.raises(InferenceServerException) as raised:
                    await triton.infer(model, tensors(protocol, values))
                assert raised.value.status() == status

    run(test())


def test_requests_of_a_killed_driver_are_unavailable_and_later_ones_are_served(client: nnfmq.Client) -> None:
    async def test() -> None:
        async with triton_clients(client) as clients:
            for (triton, protocol, server), status in zip(clients, ("503", "StatusCode.UNAVAILABLE"), strict=True):
                await infers(triton, protocol)
                with Process(client.worker_pid) as worker:
                    worker.stop()
                    in_flight = asyncio.create_task(triton.infer("positive", tensors(protocol)))
                    while not server.load()["busy"]:
                        await asyncio.sleep(0)
                    worker.kill()
                    with pytest.raises(InferenceServerException) as raised:
                        await in_flight
                assert raised.value.status() == status
                await infers(triton, protocol)

    run(test())


def test_without_a_driver_requests_are_unavailable_at_once_and_health_and_metadata_are_served(folder: Path) -> None:
    path = folder / "d.sock"

    async def test(client: nnfmq.Client, daemon: Daemon) -> None:
        async with triton_clients(client) as clients:
            for triton, protocol, _ in clients:
                await infers(triton, protocol)
                await triton.get_model_metadata("positive")
            with Process(client.worker_pid) as worker:
                daemon.kill()
                worker.kill()
                await asyncio.to_thread(worker.wait_for_end)
            for (triton, protocol, _), status in zip(clients, ("503", "StatusCode.UNAVAILABLE"), strict=True):
                with pytest.raises(
                    InferenceServerException, match=r"no driver listens|the (driver )?process .*is gone"
                ) as no:
                    await triton.infer("positive", tensors(protocol))
                assert no.value.status() == status
                assert await triton.is_server_live()
                assert not await triton.is_server_ready()
                assert not await triton.is_model_ready("positive")
                assert await triton.get_model_metadata("positive")
            with running_daemon(path):
                for triton, protocol, _ in clients:
                    await infers(triton, protocol)
                client.close()

    with Daemon.start(path) as daemon, nnfmq.connect(path, recover=True) as client:
        run(test(client, daemon))


def test_requests_beyond_those_that_may_wait_are_refused(client: nnfmq.Client) -> None:
    async def test() -> None:
        async with triton_clients(client, lanes=1, max_waiting=1) as clients:
            for (triton, protocol, server), status in zip(
                clients, ("429", "StatusCode.RESOURCE_EXHAUSTED"), strict=True
            ):
                await infers(triton, protocol)
                with Process(client.worker_pid) as worker, worker.stopped():
                    accepted = [asyncio.create_task(triton.infer("positive", tensors(protocol))) for _ in range(2)]
                    while not server.load()["waiting"]:
                        await asyncio.sleep(0)
                    with pytest.raises(InferenceServerException) as raised:
                        await triton.infer("positive", tensors(protocol))
                    assert raised.value.status() == status
                for result in await asyncio.gather(*accepted):
                    np.testing.assert_array_equal(result.as_numpy("y"), [1, 0, 3])

    run(test())


def test_a_timeout_ends_a_request_that_waits(client: nnfmq.Client) -> None:
    async def test() -> None:
        async with triton_clients(client) as clients:
            for (triton, protocol, _), status in zip(clients, ("504", "StatusCode.DEADLINE_EXCEEDED"), strict=True):
                await infers(triton, protocol)
                with Process(client.worker_pid) as worker, worker.stopped():
                    with pytest.raises(InferenceServerException) as raised:
                        await triton.infer("positive", tensors(protocol), timeout=20_000)
                    assert raised.value.status() == status
                await infers(triton, protocol)

    run(test())
