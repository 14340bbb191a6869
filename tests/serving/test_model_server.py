"""ModelServer over a real driver: requests, errors, overload, cancellation, batches, and the driver's death."""

from __future__ import annotations

import asyncio
import importlib.metadata
import threading
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.drivers import LIMIT_S, Daemon, Process, running_daemon, until
from support.models import unsized_relu_model
from support.served_models import ModelsInMemory, TestModel, adding, named, positive, request, run, x
from support.stateful_models import stream

import nnfmq
from nnfmq.client.connection.prepare_arguments import FinishedModel
from nnfmq.hal.errors import (
    DeadObject,
    DeviceUnavailable,
    InvalidArgument,
    MissedDeadlineTransient,
    ModelNotFound,
    ResourceExhaustedTransient,
)
from nnfmq.queue import aio
from nnfmq.serving.inference_service import InferenceTensorMetadata, InferResponse, ModelIndexEntry, ServerMetadata
from nnfmq.serving.providers import ProvidedModel
from nnfmq.serving.server import ModelServer, ServerOptions

MODELS = {"positive": TestModel(positive()), "adding": TestModel(adding()), "rows": TestModel(positive((4, 3)), 4)}


@asynccontextmanager
async def serving(client: nnfmq.Client, models: Any = None, **options: Any) -> AsyncIterator[ModelServer]:
    async with ModelServer(client, models or ModelsInMemory(client, MODELS), ServerOptions(**options)) as server:
        yield server


def served(client: nnfmq.Client, test: Callable[[ModelServer], Awaitable[Any]], **options: Any) -> Any:
    """Run a test over a server."""

    async def main() -> Any:
        async with serving(client, **options) as server:
            return await test(server)

    return run(main())


def stateful() -> FinishedModel:
    """Return a model that adds its inputs up."""
    return FinishedModel.of(nnfmq.load(stream()))


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def values(response: InferResponse) -> list[Any]:
    return [output.tolist() for output in response.outputs.values()]


# ------------------------------------------------------------------------------------------------ requests


def test_a_request_has_its_outputs_by_name_and_the_version_that_computed_them(client: nnfmq.Client) -> None:
    async def test(server: ModelServer) -> None:
        response = await server.infer(request("positive", x(1, -2, 3), id="7"))
        assert (response.model, response.version, response.id) == ("positive", "2", "7")
        assert {name: output.tolist() for name, output in response.outputs.items()} == {"y": [1, 0, 3]}

    served(client, test)


def test_inputs_are_found_by_name_whatever_their_order(client: nnfmq.Client) -> None:
    async def test(server: ModelServer) -> None:
        a, b = np.full((2, 3), 5, np.float32), np.arange(6, dtype=np.float32).reshape(2, 3)
        response = await server.infer(request("adding", {"b": b, "a": a}, outputs=("sum",)))
        assert values(response) == [(a + b).tolist()]

    served(client, test)


def test_many_requests_at_a_time_take_no_thread_each_and_get_their_own_results(client: nnfmq.Client) -> None:
    async def test(server: ModelServer) -> None:
        await server.open_model("positive")
        before = {thread.name for thread in threading.enumerate()} | {aio.THREAD_NAME}
        tasks = [asyncio.create_task(server.infer(request("positive", x(i, -i, 1)))) for i in range(60)]
        await settled()
        assert {thread.name for thread in threading.enumerate()} <= before
        assert [values(await task) for task in tasks] == [[[i, 0, 1]] for i in range(60)]

    served(client, test)


def test_each_request_to_a_model_with_states_begins_with_the_initial_ones(client: nnfmq.Client) -> None:
    models = ModelsInMemory(client, {"stream": TestModel(stateful())})

    async def test(server: ModelServer) -> None:
        (info,) = (await server.model_metadata("stream")).inputs
        given = {info.name: np.ones(info.shape, info.dtype)}
        results = [values(await server.infer(request("stream", given))) for _ in range(4)]
        assert results == results[:1] * 4

    served(client, test, models=models)


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        ("positive", {}, "the model has the inputs 'x'; given were none"),
        ("positive", {"z": np.zeros(3, np.float32)}, "the inputs 'x'; given were 'z'"),
        ("positive", {"x": np.zeros(3, np.float32), "z": 1}, "given were 'x', 'z'"),
        ("positive", {"x": [1.0, 2.0, 3.0]}, "must be a NumPy array, not list"),
        ("positive", {"x": np.zeros(3)}, "holds float32; the given array is float64"),
        ("positive", {"x": np.zeros(4, np.float32)}, r"the shape \[3\]; the given array has \[4\]"),
        ("rows", {"x": np.zeros((0, 3), np.float32)}, r"1 to 4 rows of shape \[3\]"),
        ("rows", {"x": np.zeros((5, 3), np.float32)}, r"1 to 4 rows"),
        ("rows", {"x": np.zeros(3, np.float32)}, r"1 to 4 rows"),
    ],
)
def test_inputs_that_do_not_fit_are_rejected_by_name(
    client: nnfmq.Client, model: str, inputs: dict[str, Any], message: str
) -> None:
    async def test(server: ModelServer) -> None:
        with pytest.raises(InvalidArgument, match=message):
            await server.infer(request(model, inputs))

    served(client, test)


def test_rows_must_be_as_many_in_all_inputs(client: nnfmq.Client) -> None:
    models = ModelsInMemory(client, {"adding": TestModel(adding(), 2)})

    async def test(server: ModelServer) -> None:
        with pytest.raises(InvalidArgument, match="same number of rows: 'a' 1, 'b' 2"):
            await server.infer(request("adding", {"a": np.ones((1, 3), np.float32), "b": np.ones((2, 3), np.float32)}))

    served(client, test, models=models)


def test_an_output_that_does_not_exist_is_rejected(client: nnfmq.Client) -> None:
    async def test(server: ModelServer) -> None:
        with pytest.raises(InvalidArgument, match="the model has the outputs 'y'; asked for were 'z'"):
            await server.infer(request("positive", x(1, 2, 3), outputs=("z",)))

    served(client, test)


@pytest.mark.parametrize("version", ["0", "-1", "x", "1.0", "²", "2147483648", "99999999999"])
def test_versions_are_positive_decimal_numbers(client: nnfmq.Client, version: str) -> None:
    async def test(server: ModelServer) -> None:
        with pytest.raises(InvalidArgument, match="a version is a positive decimal number"):
            await server.infer(request("positive", x(1, 2, 3), version=version))
        assert not await server.is_model_ready("positive", version)

    served(client, test)


# ------------------------------------------------------------------------------------------------ models


def test_a_model_is_opened_once_for_all_requests_that_wait_for_it(client: nnfmq.Client) -> None:
    models = ModelsInMemory(client, MODELS)

    async def test(server: ModelServer) -> None:
        await asyncio.gather(*(server.infer(request("positive", x(1, 2, 3))) for _ in range(8)))
        assert models.opened == [("positive", 0)]
        assert (await server.infer(request("positive", x(1, 2, 3), version="1"))).version == "1"
        assert models.opened == [("positive", 0), ("positive", 1)]

    served(client, test, models=models)


class SlowToOpen(ModelsInMemory):
    """Models of which those named `slow` open when the test says so."""

    def __init__(self, client: nnfmq.Client, models: Mapping[str, TestModel]) -> None:
        super().__init__(client, models)
        self.may_open = threading.Event()
        self.begun: list[str] = []

    def open(self, name: str, version: int, timeout: float | None) -> ProvidedModel:
        if name.startswith("slow"):
            self.begun.append(name)
            assert self.may_open.wait(LIMIT_S)
        return super().open(name, version, timeout)


def test_models_that_take_long_to_open_delay_no_other_model_and_not_the_end(client: nnfmq.Client) -> None:
    models = SlowToOpen(client, {**MODELS, **{f"slow {i}": TestModel(positive()) for i in range(8)}})

    async def main() -> None:
        async with serving(client, models) as server:
            slow = [asyncio.create_task(server.infer(request(f"slow {i}", x(1, 2, 3)))) for i in range(8)]
            assert values(await server.infer(request("positive", x(1, -2, 3)))) == [[1, 0, 3]]
            until(lambda: len(models.begun) == 8, "each has a thread")  # a thread that starts later opens nothing
        for task in slow:
            with pytest.raises(DeadObject, match="this server is closed"):
                await task

    run(main())
    models.may_open.set()
    until(lambda: len(models.opened) == 9, "the threads have opened what nobody needs")
    until(lambda: not any(each.models for each in client.statistics().clients), "and closed it")


def test_a_model_that_does_not_exist_is_not_remembered(client: nnfmq.Client) -> None:
    models = ModelsInMemory(client, MODELS)

    async def test(server: ModelServer) -> None:
        for _ in range(2):
            with pytest.raises(ModelNotFound):
                await server.infer(request("missing", {}))
        assert len(models.opened) == 2
        assert server.open_names() == set()

    served(client, test, models=models)


def test_a_model_whose_shapes_are_unknown_computes_no_batches_and_leaves_nothing(client: nnfmq.Client) -> None:
    model = named(unsized_relu_model((3,)), {"x": (3,)}, {"y": (0,)})

    async def test(server: ModelServer) -> None:
        with pytest.raises(InvalidArgument, match="not fully known"):
            await server.open_model("unsized")
        (own,) = (each for each in client.statistics().clients if each.worker_pid == client.worker_pid)
        assert not own.models

    served(client, test, models=ModelsInMemory(client, {"unsized": TestModel(model, batch=3)}))


def test_a_closed_model_has_no_bursts_in_the_driver_and_is_opened_again(client: nnfmq.Client) -> None:
    async def test(server: ModelServer) -> None:
        await server.infer(request("positive", x(1, 2, 3)))
        await server.close_model("positive")
        (own,) = (each for each in client.statistics().clients if each.worker_pid == client.worker_pid)
        assert (own.models, own.bursts, server.open_names()) == ((), (), set())
        assert values(await server.infer(request("positive", x(1, -2, 3)))) == [[1, 0, 3]]

    served(client, test)


def test_a_closed_server_rejects_requests(client: nnfmq.Client) -> None:
    async def main() -> None:
        async with serving(client) as server:
            await server.infer(request("positive", x(1, 2, 3)))
        assert (await server.is_live(), await server.is_ready()) == (False, False)
        with pytest.raises(DeadObject, match="closed"):
            await server.infer(request("positive", x(1, 2, 3)))
        await server.close()

    run(main())


def test_metadata_name_the_tensors_with_their_quantization(client: nnfmq.Client) -> None:
    loaded = nnfmq.load(nnfmq.example_path("digits_quant.tflite"))
    models = ModelsInMemory(client, {"digits": TestModel(FinishedModel.of(loaded))})

    async def test(server: ModelServer) -> None:
        found = await server.model_metadata("digits")
        (info,) = loaded.inputs
        quantization = {"scale": info.scale, "zero_point": info.zero_point} if info.scale else {}
        assert found.inputs == (InferenceTensorMetadata(info.name, info.dtype, info.shape, quantization),)
        assert found.versions == ("2",)
        release = importlib.metadata.version("nnfmq")
        extensions = "model_configuration", "statistics"  # `model_repository` has more parts
        assert await server.server_metadata() == ServerMetadata("nnfmq", release, extensions)
        assert [(entry.name, entry.version, entry.state) for entry in await server.model_index()] == [
            ("digits", "2", "READY")
        ]
        with pytest.raises(ModelNotFound, match="there is no model 'other'"):
            await server.infer(request("other", {}))

    served(client, test, models=models)


def test_a_model_is_ready_if_its_version_is_served_or_open(client: nnfmq.Client) -> None:
    async def test(server: ModelServer) -> None:
        ready = server.is_model_ready
        assert (await ready("positive"), await ready("positive", "2"), await ready("missing")) == (True, True, False)
        assert not await ready("positive", "1")
        await server.open_model("positive", "1")
        assert await ready("positive", "1")
        assert (await server.model_metadata("positive", "1")).versions == ("1", "2")

    served(client, test)


@pytest.mark.parametrize(
    "options",
    [{"lanes": 0}, {"max_waiting": 0}, {"max_batch_wait_s": -1}, {"open_timeout_s": 0}, {"max_blocking_s": -1}],
)
def test_options_out_of_range_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="must be 0 or more, and the other options positive"):
        ServerOptions(**options)


# ------------------------------------------------------------------------------------------------ overload and time


def test_overload_is_rejected_immediately_and_all_others_are_answered(client: nnfmq.Client) -> None:
    async def test(server: ModelServer) -> None:
        await server.open_model("positive")
        with Process(client.worker_pid) as worker, worker.stopped():
            tasks = [asyncio.create_task(server.infer(request("positive", x(i, 0, 0)))) for i in range(5)]
            await settled()
            assert server.load() == {"waiting": 4, "busy": 1, "lanes": 1}
            with pytest.raises(ResourceExhaustedTransient, match="4 requests wait already"):
                await server.infer(request("positive", x(1, 2, 3)))
        assert [values(await task) for task in tasks] == [[[i, 0, 0]] for i in range(5)]
        assert server.load() == {"waiting": 0, "busy": 0, "lanes": 1}

    served(client, test, lanes=1, max_waiting=4)


def test_a_timeout_includes_the_wait_for_a_burst_and_the_next_request_gets_its_own_result(
    client: nnfmq.Client,
) -> None:
    async def test(server: ModelServer) -> None:
        await server.open_model("positive")
        with Process(client.worker_pid) as worker, worker.stopped():
            executed, waiting = (
                asyncio.create_task(server.infer(request("positive", x(1, 1, 1), timeout_s=0.02))) for _ in range(2)
            )
            for task in (executed, waiting):
                with pytest.raises(nnfmq.MissedDeadline):
                    await task
        assert values(await server.infer(request("positive", x(5, -5, 5)))) == [[5, 0, 5]]

    served(client, test, lanes=1)


def test_a_timeout_ends_the_wait_for_a_model_that_is_being_opened(client: nnfmq.Client) -> None:
    async def test(server: ModelServer) -> None:
        await server.is_live()
        late = request("positive", x(1, 2, 3), timeout_s=0.02)
        expected = pytest.raises(MissedDeadlineTransient, match="while model 'positive' was being opened")
        with Process(client.worker_pid) as worker, worker.stopped(), expected:
            await server.infer(late)
        assert values(await server.infer(request("positive", x(1, -2, 3)))) == [[1, 0, 3]]

    served(client, test)


def test_a_cancelled_request_gives_its_burst_to_the_next_one(client: nnfmq.Client) -> None:
    async def test(server: ModelServer) -> None:
        await server.open_model("positive")
        with Process(client.worker_pid) as worker, worker.stopped():
            cancelled = asyncio.create_task(server.infer(request("positive", x(1, 1, 1))))
            waiting = asyncio.create_task(server.infer(request("positive", x(2, -2, 2))))
            await settled()
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
        assert values(await waiting) == [[2, 0, 2]]

    served(client, test, lanes=1)


# ------------------------------------------------------------------------------------------------ batches


def executions(client: nnfmq.Client) -> int:
    (own,) = (each for each in client.statistics().clients if each.worker_pid == client.worker_pid)
    return own.executions


def test_requests_for_rows_are_one_execution_of_the_driver(client: nnfmq.Client) -> None:
    async def test(server: ModelServer) -> None:
        assert (await server.model_metadata("rows")).inputs[0].shape == (-1, 3)
        given = [np.full((count, 3), number, np.float32) for number, count in ((-1, 1), (2, 2), (3, 1))]
        before = executions(client)
        responses = await server.infer_all([request("rows", {"x": array}) for array in given])
        assert [values(each) for each in responses if isinstance(each, InferResponse)] == [
            [np.maximum(array, 0).tolist()] for array in given
        ]
        assert executions(client) == before + 1

    served(client, test, max_batch_wait_s=0.5)


def test_an_invalid_request_of_several_fails_alone(client: nnfmq.Client) -> None:
    async def test(server: ModelServer) -> None:
        valid = {"x": np.ones((2, 3), np.float32)}
        good, bad, missing = await server.infer_all(
            [request("rows", valid), request("rows", {"x": np.ones((2, 4), np.float32)}), request("none", valid)]
        )
        assert isinstance(good, InferResponse) and values(good) == [np.ones((2, 3)).tolist()]
        assert (type(bad), type(missing)) == (InvalidArgument, ModelNotFound)

    served(client, test)


def test_a_model_with_states_computes_no_batches(client: nnfmq.Client) -> None:
    async def test(server: ModelServer) -> None:
        with pytest.raises(InvalidArgument, match="'stream' has states"):
            await server.open_model("stream")

    served(client, test, models=ModelsInMemory(client, {"stream": TestModel(stateful(), 2)}))


# ------------------------------------------------------------------------------------------------ the driver's death


def test_requests_in_flight_at_the_driver_s_death_raise_and_later_ones_are_executed(client: nnfmq.Client) -> None:
    async def test(server: ModelServer) -> None:
        await server.open_model("positive")
        with Process(client.worker_pid) as worker:
            worker.stop()
            tasks = [asyncio.create_task(server.infer(request("positive", x(i, i, i)))) for i in range(2)]
            await settled()
            worker.kill()
            for task in tasks:
                with pytest.raises(DeadObject):
                    await task
        assert values(await server.infer(request("positive", x(1, -2, 3)))) == [[1, 0, 3]]
        assert await server.is_ready()

    served(client, test, lanes=2)


def test_requests_that_waited_at_the_driver_s_death_are_executed_by_its_successor(client: nnfmq.Client) -> None:
    async def test(server: ModelServer) -> None:
        await server.open_model("positive")
        with Process(client.worker_pid) as worker:
            worker.stop()
            first, second = (asyncio.create_task(server.infer(request("positive", x(i, i, i)))) for i in (1, 2))
            await settled()
            worker.kill()
            with pytest.raises(DeadObject):
                await first
        assert values(await second) == [[2, 2, 2]]

    served(client, test, lanes=1)


def test_a_server_is_ready_again_after_it_was_asked_and_without_a_request(client: nnfmq.Client) -> None:
    async def test(server: ModelServer) -> None:
        assert await server.is_ready()
        with Process(client.worker_pid) as worker:
            worker.kill()
            worker.wait_for_end()
        until(lambda: not client.connection.is_open, "the client knows")
        assert not await server.is_ready()
        while not await server.is_ready():
            await asyncio.sleep(0.001)

    served(client, test)


def test_a_server_whose_client_does_not_recover_stays_unready(daemon: Daemon) -> None:
    async def test(server: ModelServer) -> None:
        with Process(client.worker_pid) as worker:
            worker.kill()
            worker.wait_for_end()
        until(lambda: not client.connection.is_open, "the client knows")
        for _ in range(2):
            assert not await server.is_ready()
        with pytest.raises(DeadObject):
            await server.infer(request("positive", x(1, 2, 3)))

    with nnfmq.connect(daemon.path, timeout=LIMIT_S, recover=False) as client:
        served(client, test)


def test_while_no_driver_listens_requests_fail_at_once_and_health_and_metadata_do_not_wait(folder: Path) -> None:
    path = folder / "d.sock"

    async def main(client: nnfmq.Client, daemon: Daemon) -> None:
        async with serving(client) as server:
            for model in ("positive", "rows"):  # without and with batches
                await server.open_model(model)
            before = await server.model_metadata("positive")
            await asyncio.to_thread(daemon.end)
            for name, given in (("positive", x(4, -4, 4)), ("rows", {"x": np.ones((2, 3), np.float32)})):
                with pytest.raises(DeviceUnavailable, match="no driver listens"):
                    await server.infer(request(name, given))
            for unknown in (server.infer(request("adding", {})), server.model_metadata("adding"), server.model_index()):
                with pytest.raises(DeviceUnavailable, match="no driver listens"):
                    await unknown
            assert (await server.is_live(), await server.is_ready()) == (True, False)
            assert not await server.is_model_ready("positive")
            assert await server.model_metadata("positive") == before
            with running_daemon(path):
                assert values(await server.infer(request("positive", x(4, -4, 4)))) == [[4, 0, 4]]
                assert await server.is_ready() and await server.is_model_ready("positive")
                await server.close()
                client.close()

    with running_daemon(path) as daemon, nnfmq.connect(path, recover=True) as client:
        run(main(client, daemon))


# ------------------------------------------------------------------------------------------------ copies


def test_no_request_waits_long_for_a_repository_that_does_not_reply(
    client: nnfmq.Client,
) -> None:
    """As when the driver's supervisor was killed, whose workers go on."""
    hangs, replies, late = (threading.Event() for _ in range(3))

    class Models(ModelsInMemory):
        def entries(self) -> list[ModelIndexEntry]:
            if hangs.is_set():
                replies.wait()
            if late.is_set():
                raise MissedDeadlineTransient("10 s have passed")
            return super().entries()

    async def test() -> None:
        async with serving(client, Models(client, MODELS)) as server:
            before = await server.model_metadata("positive")
            hangs.set()
            index = asyncio.create_task(server.model_index())
            try:
                assert await server.model_metadata("positive") == before
                assert await server.is_model_ready("positive")
                assert values(await server.infer(request("positive", x(4, -4, 4)))) == [[4, 0, 4]]
                with pytest.raises(MissedDeadlineTransient, match="was asked for its models"):
                    await server.infer(replace(request("adding", x(4)), timeout_s=0.001))
                assert not index.done()
            finally:
                replies.set()
            assert {entry.name for entry in await index} == set(MODELS)
            late.set()
            with pytest.raises(DeviceUnavailable, match="does not reply: 10 s have passed"):
                await server.open_model("adding")

    run(test())


def test_an_input_is_copied_once_into_the_burst_s_memory(client: nnfmq.Client) -> None:
    shape = (1 << 20,)
    models = ModelsInMemory(client, {"large": TestModel(positive(shape))})

    async def test(server: ModelServer) -> int:
        array = np.full(shape, 2, np.float32)
        array.flags.writeable = False  # as an array in the memory of Ray's object store
        await server.infer(request("large", {"x": array}))
        tracemalloc.start()
        try:
            response = await server.infer(request("large", {"x": array}))
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert response.outputs["y"][-1] == 2
        return peak_bytes

    # The output is a new array of as many bytes; the burst's memory is none of Python's.
    assert served(client, test, models=models) < 1.1 * 4 * shape[0]
