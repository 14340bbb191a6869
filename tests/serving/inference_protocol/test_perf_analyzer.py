"""The requests of Triton's perf_analyzer, in its order, over a real driver; and what it computes from the replies.

Source: perf_analyzer.cc, model_parser.cc, inference_profiler.cc and triton_client_backend.cc of perf_analyzer, which
cannot be installed here. Its two clients are those of tritonclient in C++; here are those in Python.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("grpc", reason="grpcio is not installed")
pytest.importorskip("google.protobuf", reason="protobuf is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")
pytest.importorskip("aiohttp", reason="tritonclient[http] is not installed")
pytest.importorskip("tritonclient.grpc.aio", reason="tritonclient[grpc] is not installed")

import tritonclient.grpc.aio as rpc
import tritonclient.http.aio as http
from support.inference_services import protocol_servers
from support.served_models import ModelsInMemory, TestModel, positive, run
from tritonclient.utils import InferenceServerException

import nnfmq
from nnfmq.observe.driver_statistics import ModelCounts
from nnfmq.serving.inference_protocol.http import InferenceApp
from nnfmq.serving.server import ModelServer

MODELS = {"positive": TestModel(positive()), "rows": TestModel(positive((4, 3)), 4)}
COUNTED = ("success", "queue", "compute_input", "compute_infer", "compute_output")


class Reading(NamedTuple):
    """What perf_analyzer takes from the statistics of one version: counts, and times in nanoseconds."""

    inferences: int
    executions: int
    counts: Counter[str]
    times: Counter[str]


class Analyzer:
    """The part of perf_analyzer that talks to a server, for one protocol."""

    def __init__(self, triton: Any, protocol: Any, model: str) -> None:
        self._triton, self._protocol, self._model = triton, protocol, model
        self._json = {} if protocol is http else {"as_json": True}

    async def prepare(self) -> None:
        """Read metadata and configuration, as `CreateAnalyzerObjects`, and the server's extensions."""
        metadata = await self._triton.get_model_metadata(self._model, **self._json)
        config = await self._triton.get_model_config(self._model, **self._json)
        config = config.get("config", config)
        self.max_batch = int(config.get("max_batch_size", 0))
        assert {each["name"] for each in config["input"]} == {each["name"] for each in metadata["inputs"]}
        self._inputs = {
            each["name"]: ([int(size) for size in each["shape"]][1 if self.max_batch else 0 :], each["datatype"])
            for each in metadata["inputs"]
        }
        server = await self._triton.get_server_metadata(**self._json)
        assert "statistics" in server["extensions"]

    async def read(self) -> Reading:
        """Return the statistics of the model's only version."""
        found = await self._triton.get_inference_statistics(self._model, **self._json)
        (row,) = found["model_stats"]
        stats = {name: each for name, each in row["inference_stats"].items() if name in COUNTED}
        assert {"cache_hit", "cache_miss"} <= row["inference_stats"].keys()
        counts, times = (
            Counter({name: int(each.get(unit, 0)) for name, each in stats.items()}) for unit in ("count", "ns")
        )
        return Reading(int(row.get("inference_count", 0)), int(row.get("execution_count", 0)), counts, times)

    async def load(self, requests: int, batch: int, concurrency: int) -> None:
        """Execute requests, so many at a time."""
        remaining = iter(range(requests))

        async def one_after_the_other() -> None:
            for _ in remaining:
                await self._triton.infer(self._model, self._tensors(batch))

        await asyncio.gather(*(one_after_the_other() for _ in range(concurrency)))

    def _tensors(self, batch: int) -> list[Any]:
        found = []
        for name, (shape, datatype) in self._inputs.items():
            sizes = [batch, *shape] if self.max_batch else shape
            tensor = self._protocol.InferInput(name, sizes, datatype)
            tensor.set_data_from_numpy(np.ones(sizes, np.float32))
            found.append(tensor)
        return found

    async def fail(self) -> None:
        """Send a request that does not fit the model."""
        tensor = self._protocol.InferInput("x", [1], "FP32")
        tensor.set_data_from_numpy(np.ones(1, np.float32))
        with pytest.raises(InferenceServerException):
            await self._triton.infer(self._model, [tensor])


def in_driver(client: nnfmq.Client, model: str) -> ModelCounts:
    """Return what the driver has counted for a model, as `nnfmq status` shows it."""
    totals = client.statistics().totals()
    return sum((counts for key, counts in totals.items() if key.name == model), ModelCounts())


@pytest.mark.parametrize(("model", "batch"), [("positive", 1), ("rows", 2)])
def test_perf_analyzer_gets_what_it_asks_for(client: nnfmq.Client, model: str, batch: int) -> None:
    async def test() -> None:
        async with (
            ModelServer(client, ModelsInMemory(client, MODELS)) as server,
            protocol_servers(InferenceApp(server), server) as addresses,
            http.InferenceServerClient(addresses.http) as over_http,
            rpc.InferenceServerClient(addresses.grpc) as over_grpc,
        ):
            for triton, protocol in ((over_http, http), (over_grpc, rpc)):
                analyzer = Analyzer(triton, protocol, model)
                await analyzer.prepare()
                driver_before, before = in_driver(client, model), await analyzer.read()
                await analyzer.load(20, batch, 4)
                driver_after, after = in_driver(client, model), await analyzer.read()
                check(before, after, 20, batch)
                executed = driver_after.since(driver_before)
                assert executed.executions == after.executions - before.executions
                assert executed.engine_ns == after.times["compute_infer"] - before.times["compute_infer"]
                if model == "positive":
                    assert executed.executions == 20
            await analyzer.fail()
            (found,) = await server.model_statistics(model)
            assert (found.fail.count, found.success.count) == (1, 40)
            assert found.fail.ns > 0 and found.last_request_ms > 1e12

    run(test())


def check(before: Reading, after: Reading, requests: int, batch: int) -> None:
    """As `SummarizeServerStatsHelper` and `ReportServerSideStats`, which reject other statistics."""
    counts, times = after.counts - before.counts, after.times - before.times
    assert counts["success"] == counts["queue"] == requests
    assert counts["compute_input"] == counts["compute_infer"] == counts["compute_output"]
    executions = after.executions - before.executions
    assert counts["compute_infer"] == executions and requests / 4 <= executions <= requests
    assert after.inferences - before.inferences == requests * batch
    assert times["success"] / requests >= times["compute_infer"] / executions > 0
    assert times["queue"] > 0


def test_a_model_that_was_never_requested_has_counts_of_zero_and_others_do_not_exist(client: nnfmq.Client) -> None:
    async def test() -> None:
        async with ModelServer(client, ModelsInMemory(client, {"unused": MODELS["positive"]})) as server:
            (found,) = await server.model_statistics("unused")
            assert (found.version, found.success.count, found.executions) == ("2", 0, 0)
            assert await server.model_statistics() == []
            for model, version in (("other", ""), ("unused", "3")):
                with pytest.raises(nnfmq.ModelNotFound, match=f"no statistics of a model '{model}'"):
                    await server.model_statistics(model, version)

    run(test())
