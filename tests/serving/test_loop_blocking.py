"""Which requests of a server wait on the event loop's thread, and that those differ from others in nothing but time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from support.drivers import LIMIT_S, InThread, Process
from support.served_models import ModelsInMemory, TestModel, positive, request, run, x

import nnfmq
from nnfmq.hal.errors import DeadObject
from nnfmq.queue import aio
from nnfmq.serving import loop_blocking
from nnfmq.serving.loop_blocking import LoopBlocking, ModelBlocking
from nnfmq.serving.server import ModelServer, ServerOptions

LIMIT_NS = 10**9


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return how the waits that blocked have ended: with the result, or at the limit."""
    found: list[bool] = []
    end = ModelBlocking.end

    def recorded(self: ModelBlocking, has_result: bool) -> None:
        found.append(has_result)
        end(self, has_result)

    monkeypatch.setattr(ModelBlocking, "end", recorded)
    return found


def served(client: nnfmq.Client, test: Callable[[ModelServer], Awaitable[Any]], max_blocking_s: float) -> None:
    async def main() -> None:
        models = ModelsInMemory(client, {"positive": TestModel(positive())})
        async with ModelServer(client, models, ServerOptions(max_blocking_s=max_blocking_s)) as server:
            await server.open_model("positive")
            await test(server)

    run(main())


async def answered(server: ModelServer, value: int, **options: Any) -> None:
    response = await server.infer(request("positive", x(value, -value, 1), **options))
    assert response.outputs["y"].tolist() == [value, 0, 1]


# ------------------------------------------------------------------------------------------------ a server


def test_a_request_alone_blocks_and_needs_no_other_thread(
    client: nnfmq.Client, ended: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aio, "retry_until_done", None)  # what a wait beside other tasks calls

    async def test(server: ModelServer) -> None:
        for value in range(1, 4):
            await answered(server, value)
        assert ended == [True] * 3

    served(client, test, LIMIT_S)


def test_requests_at_a_time_do_not_block_and_execute_at_a_time(client: nnfmq.Client, ended: list[bool]) -> None:
    async def test(server: ModelServer) -> None:
        with Process(client.worker_pid) as worker, worker.stopped():
            tasks = [asyncio.create_task(answered(server, value)) for value in range(1, 7)]
            for _ in range(10):
                await asyncio.sleep(0)
            assert (server.load(), ended) == ({"waiting": 4, "busy": 2, "lanes": 2}, [])
        await asyncio.gather(*tasks)

    served(client, test, LIMIT_S)


def test_a_server_may_be_told_never_to_block(client: nnfmq.Client, ended: list[bool]) -> None:
    async def test(server: ModelServer) -> None:
        await answered(server, 1)
        assert not ended

    served(client, test, 0)


def test_other_tasks_run_after_the_limit(client: nnfmq.Client, ended: list[bool]) -> None:
    async def test(server: ModelServer) -> None:
        with Process(client.worker_pid) as worker, worker.stopped():
            task = asyncio.create_task(answered(server, 5))
            while not ended:
                await asyncio.sleep(0)
            assert not task.done()
        await task
        await answered(server, 6)
        assert ended == [False]

    served(client, test, 1e-6)


def test_a_request_that_is_cancelled_before_it_blocks_leaves_nothing(client: nnfmq.Client, ended: list[bool]) -> None:
    async def test(server: ModelServer) -> None:
        for value in range(1, 4):
            task = asyncio.create_task(answered(server, value))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert (server.load()["busy"], ended) == (0, [])
        for value in range(4, 7):
            await answered(server, value)
        assert ended == [True] * 3

    served(client, test, LIMIT_S)


def test_a_request_that_blocks_when_the_driver_dies_raises_and_the_next_is_executed(
    client: nnfmq.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, begin = threading.Event(), ModelBlocking.begin

    async def announced(self: ModelBlocking) -> int:
        limit_ns = await begin(self)
        begun.set()
        return limit_ns

    async def test(server: ModelServer) -> None:
        with Process(client.worker_pid) as worker:

            def kill() -> None:
                begun.wait(LIMIT_S)
                worker.kill()

            worker.stop()
            killing = InThread.start(kill)
            with pytest.raises(DeadObject):
                await answered(server, 1)
            killing.wait()
        await answered(server, 2)

    monkeypatch.setattr(ModelBlocking, "begin", announced)
    served(client, test, LIMIT_S)


# ------------------------------------------------------------------------------------------------ the decisions


@pytest.fixture
def idle_ns(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Return how long the loop's thread has not run: what the test writes there."""
    value = [0]
    monkeypatch.setattr(loop_blocking, "_thread_idle_ns", lambda: value[0])
    return value


async def blocks(loop: LoopBlocking, model: ModelBlocking, has_result: bool = True) -> bool:
    """Make a request; return whether it may block. If so, it does."""
    loop.enter()
    try:
        limit_ns = await model.begin()
        if limit_ns:
            model.end(has_result)
    finally:
        loop.leave()
    return limit_ns > 0


def test_after_late_results_in_a_row_twice_as_many_requests_do_not_block_up_to_a_limit() -> None:
    async def main() -> None:
        loop = LoopBlocking()
        model = ModelBlocking(loop, LIMIT_NS)
        for paused in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1024):
            assert await blocks(loop, model, has_result=False)
            assert [await blocks(loop, model) for _ in range(paused)] == [False] * paused
        assert [await blocks(loop, model) for _ in range(3)] == [True] * 3
        assert await blocks(loop, model, has_result=False)
        assert [await blocks(loop, model) for _ in range(3)] == [False, False, True]

    run(main())


def test_a_late_result_of_one_model_concerns_no_other_one() -> None:
    async def main() -> None:
        loop = LoopBlocking()
        late, other = ModelBlocking(loop, LIMIT_NS), ModelBlocking(loop, LIMIT_NS)
        assert await blocks(loop, late, has_result=False)
        assert (await blocks(loop, late), await blocks(loop, other)) == (False, True)

    run(main())


def test_a_request_that_arrives_before_another_one_blocks_keeps_it_from_that() -> None:
    async def main() -> None:
        loop = LoopBlocking()
        model = ModelBlocking(loop, LIMIT_NS)
        first = asyncio.create_task(blocks(loop, model))
        await asyncio.sleep(0)  # it lets others run before it blocks
        loop.enter()
        assert not await first
        assert not await blocks(loop, model)
        loop.leave()
        assert await blocks(loop, model)

    run(main())


def test_after_a_request_was_held_up_some_do_not_block(idle_ns: list[int]) -> None:
    async def main() -> None:
        loop = LoopBlocking()
        model = ModelBlocking(loop, LIMIT_NS)
        assert await asyncio.create_task(blocks(loop, model))
        found = [await asyncio.create_task(blocks(loop, model)) for _ in range(65)]
        assert found == [False] * 64 + [True]

    run(main())


def test_a_loop_that_has_slept_since_the_last_request_held_up_none(idle_ns: list[int]) -> None:
    async def main() -> None:
        loop = LoopBlocking()
        model = ModelBlocking(loop, LIMIT_NS)
        for _ in range(3):
            assert await asyncio.create_task(blocks(loop, model))
            idle_ns[0] += 20_000

    run(main())


def test_a_task_that_sends_one_request_after_the_other_holds_up_none(idle_ns: list[int]) -> None:
    async def main() -> None:
        loop = LoopBlocking()
        model = ModelBlocking(loop, LIMIT_NS)
        assert [await blocks(loop, model) for _ in range(3)] == [True] * 3

    run(main())


def test_the_time_that_a_thread_waits_counts_as_idle(client: nnfmq.Client) -> None:
    before = loop_blocking._thread_idle_ns()
    client.devices()  # waits for a reply that another thread receives
    assert loop_blocking._thread_idle_ns() > before
