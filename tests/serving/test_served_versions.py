"""A ModelServer over a model repository: versions, their change under load, and the list of models."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cluster_load import SIZE, version_model
from support.drivers import LIMIT_S, Process
from support.served_models import request, run

from nnfmq.hal.errors import DeadObject, DeviceUnavailable, ModelNotFound
from nnfmq.serving.driver_process import DriverProcess
from nnfmq.serving.server import ModelServer, ServerOptions, open_server

GIVEN = {"x": np.zeros((1, SIZE), np.float32)}


def add(models: Path, version: int, options: str = "") -> None:
    """Write a version elsewhere, and rename it."""
    incoming = models.parent / "incoming"
    incoming.mkdir()
    (incoming / "model.tflite").write_bytes(version_model(version))
    if options:
        (incoming / "model.toml").write_text(options)
    (models / "adder").mkdir(parents=True, exist_ok=True)
    incoming.rename(models / "adder" / str(version))


@pytest.fixture
def models(folder: Path) -> Path:
    add(folder / "models", 1)
    return folder / "models"


@pytest.fixture
def socket(folder: Path, models: Path) -> Iterator[Path]:
    with DriverProcess(folder / "d.sock", models) as driver:
        driver.wait_until_running(LIMIT_S)
        yield folder / "d.sock"


async def version_of(server: ModelServer, **options: Any) -> int:
    """Return the version of a response, which its output must show, too."""
    response = await server.infer(request("adder", GIVEN, **options))
    (output,) = response.outputs.values()
    assert output.ravel().tolist() == [int(response.version)] * SIZE
    return int(response.version)


async def version_of_successor(server: ModelServer) -> int:
    """Return the version of the first response after the next driver listens; until then requests are rejected."""
    while True:
        try:
            return await version_of(server, timeout_s=LIMIT_S)
        except DeviceUnavailable:
            await asyncio.sleep(0)


def test_requests_move_to_a_new_version_without_losing_one(socket: Path, models: Path) -> None:
    async def main() -> None:
        async with open_server(socket, ServerOptions(lanes=3)) as server:
            seen = [await version_of(server)]

            async def ask() -> None:
                while seen[-1] != 2:
                    seen.append(await version_of(server))

            tasks = [asyncio.create_task(ask()) for _ in range(6)]
            await asyncio.to_thread(add, models, 2)
            await asyncio.gather(*tasks)
            assert set(seen) == {1, 2}
            assert await version_of(server) == 2
            assert (await server.model_metadata("adder")).versions == ("2",)
            assert await server.is_model_ready("adder", "2")
            assert not await server.is_model_ready("adder", "1")

    run(main())


def test_a_version_that_was_asked_for_stays(socket: Path, models: Path) -> None:
    async def main() -> None:
        async with open_server(socket) as server:
            assert await version_of(server, version="1") == 1
            await asyncio.to_thread(add, models, 2)
            while await version_of(server) != 2:
                pass
            assert await version_of(server, version="1") == 1
            with pytest.raises(ModelNotFound, match="no version 3"):
                await version_of(server, version="3")

    run(main())


def test_a_repository_with_batches_is_served_in_batches(folder: Path) -> None:
    add(folder / "models", 1, "batch = 4\n")

    async def main() -> None:
        async with open_server(folder / "d.sock", ServerOptions(max_batch_wait_s=0.2)) as server:
            given = [{"x": np.full((rows, SIZE), rows, np.float32)} for rows in (1, 3)]
            assert (await server.model_metadata("adder")).inputs[0].shape == (-1, SIZE)
            responses = await asyncio.gather(*(server.infer(request("adder", each)) for each in given))
            assert [response.outputs["y"].tolist() for response in responses] == [
                [[rows + 1] * SIZE] * rows for rows in (1, 3)
            ]

    with DriverProcess(folder / "d.sock", folder / "models") as driver:
        driver.wait_until_running(LIMIT_S)
        run(main())


def test_the_list_of_models_has_states_and_reasons(socket: Path, models: Path) -> None:
    (models / "broken" / "1").mkdir(parents=True)
    (models / "broken" / "1" / "model.tflite").write_bytes(b"not a model")

    async def main() -> None:
        async with open_server(socket) as server:
            await version_of(server)
            while not (found := {entry.name: entry for entry in await server.model_index()}).get("broken") or (
                found["broken"].state == "LOADING"
            ):
                pass
            assert (found["adder"].version, found["adder"].state) == ("1", "READY")
            assert (found["broken"].version, found["broken"].state) == ("", "UNAVAILABLE")
            assert found["broken"].reason
            assert not await server.is_model_ready("broken")

    run(main())


def test_a_named_model_is_executed_by_the_successor_of_its_driver(folder: Path, models: Path) -> None:
    async def main(driver: DriverProcess) -> None:
        async with open_server(folder / "d.sock", ServerOptions(lanes=1)) as server:
            await version_of(server)
            with Process(server._client.worker_pid) as worker, Process(driver.state.pid) as supervisor:
                worker.stop()
                lost = asyncio.create_task(version_of(server))
                for _ in range(10):
                    await asyncio.sleep(0)
                worker.kill()  # first: a stopped worker whose supervisor exits continues
                supervisor.kill()
                with pytest.raises(DeadObject):
                    await lost
            assert await version_of_successor(server) == 1

    with DriverProcess(folder / "d.sock", models) as driver:
        driver.wait_until_running(LIMIT_S)
        run(main(driver))
