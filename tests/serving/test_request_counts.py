"""The waits and failures of requests that a ModelServer counts, over a real driver whose worker is stopped at times."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
from support.drivers import Process
from support.served_models import ModelsInMemory, TestModel, positive, request, run, x

import nnfmq
from nnfmq.hal.errors import InvalidArgument, MissedDeadline, ModelNotFound
from nnfmq.serving.request_counts import VersionCounts
from nnfmq.serving.server import ModelServer, ServerOptions

MODELS = {"positive": TestModel(positive()), "rows": TestModel(positive((4, 3)), 4)}
VERSION = 2


def test_a_request_that_waits_for_a_burst_counts_its_wait(client: nnfmq.Client) -> None:
    async def test() -> None:
        async with ModelServer(client, ModelsInMemory(client, MODELS), ServerOptions(lanes=1)) as server:
            await server.infer(request("positive", x(1, 2, 3)))
            alone = server.counts.of("positive", VERSION).wait_ns
            with Process(client.worker_pid) as worker, worker.stopped():
                tasks = [asyncio.create_task(server.infer(request("positive", x(1, 2, 3)))) for _ in range(2)]
                while not server.load()["waiting"]:
                    await asyncio.sleep(0)
                begin_ns = time.monotonic_ns()
                while (waited_ns := time.monotonic_ns() - begin_ns) < 20_000_000:
                    await asyncio.sleep(0)
            await asyncio.gather(*tasks)
            counts = server.counts.of("positive", VERSION)
            assert counts.successes == counts.rows == 3
            assert counts.wait_ns - alone >= waited_ns
            assert counts.success_ns >= counts.wait_ns + waited_ns  # the other one waited for its result

    run(test())


def test_a_request_that_waits_for_others_in_its_batch_counts_its_wait_and_rows(client: nnfmq.Client) -> None:
    async def test() -> None:
        options = ServerOptions(max_batch_wait_s=0.03)
        async with ModelServer(client, ModelsInMemory(client, MODELS), options) as server:
            await server.infer(request("rows", {"x": np.zeros((2, 3), np.float32)}))
            counts = server.counts.of("rows", VERSION)
            assert (counts.successes, counts.rows) == (1, 2)
            assert counts.wait_ns >= 30_000_000

    run(test())


def test_requests_that_fail_count_for_their_model_if_there_is_one(client: nnfmq.Client) -> None:
    async def test() -> None:
        async with ModelServer(client, ModelsInMemory(client, MODELS)) as server:
            for model, inputs, error in (("positive", {}, InvalidArgument), ("other", x(1), ModelNotFound)):
                with pytest.raises(error):
                    await server.infer(request(model, inputs))
            with Process(client.worker_pid) as worker, worker.stopped(), pytest.raises(MissedDeadline):
                await server.infer(request("positive", x(1, 2, 3), timeout_s=0.01))
            counts = server.counts.of("positive", VERSION)
            assert (counts.successes, counts.failures) == (0, 2) and counts.failure_ns >= 10_000_000
            assert server.counts.keys() == [("positive", VERSION)]
            assert server.counts.of("other", 1) == VersionCounts()

    run(test())
