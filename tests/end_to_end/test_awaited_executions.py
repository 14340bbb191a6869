"""Executions that tasks of asyncio await, on a real driver: several tasks and loops, cancellation, death."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest
from support.drivers import LIMIT_S, InThread, Process, one

import nnfmq
from nnfmq.queue import aio


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine on a new loop; hangs become errors."""

    async def limited() -> Any:
        async with asyncio.timeout(LIMIT_S):
            return await main

    return asyncio.run(limited())


def threads() -> set[str]:
    """Return the names of this process's threads, without the waiter of queues."""
    return {thread.name for thread in threading.enumerate() if thread.name != aio.THREAD_NAME}


# ------------------------------------------------------------------------------------------------ execute_async


def test_API_9_a_task_awaits_an_asynchronous_execution(model: nnfmq.PreparedModel) -> None:
    async def main() -> tuple[Any, ...]:
        return await model.execute_async(one(3))

    assert run(main()) == (one(3),)


def test_API_9_many_tasks_wait_without_a_thread_for_each(model: nnfmq.PreparedModel) -> None:
    before = threads()

    async def main() -> list[Any]:
        pending = [model.execute_async(one(i)) for i in range(50)]
        results = asyncio.gather(*(asyncio.ensure_future(_await(execution)) for execution in pending))
        await asyncio.sleep(0)
        assert threads() == before
        return await results

    assert run(main()) == [(one(i),) for i in range(50)]


async def _await(pending: nnfmq.PendingExecution[Any]) -> Any:
    return await pending


def test_API_9_several_tasks_and_a_thread_wait_for_one_execution(
    model: nnfmq.PreparedModel, client: nnfmq.Client
) -> None:
    async def main() -> list[Any]:
        with Process(client.worker_pid) as worker, worker.stopped():
            pending = model.execute_async(one(4))
            thread = InThread.start(pending.result)
            tasks = [asyncio.create_task(_await(pending)) for _ in range(3)]
            thread.wait_until_asleep()
            await asyncio.sleep(0)
            assert not any(task.done() for task in tasks)
        results = await asyncio.gather(*tasks)
        return [*results, await asyncio.to_thread(lambda: thread.wait().value), await pending]

    assert run(main()) == [(one(4),)] * 5


def test_API_9_loops_of_two_threads_wait_for_one_execution(model: nnfmq.PreparedModel, client: nnfmq.Client) -> None:
    with Process(client.worker_pid) as worker, worker.stopped():
        pending = model.execute_async(one(5))
        loops = [InThread.start(lambda: run(_await(pending))) for _ in range(2)]
        for loop in loops:
            loop.wait_until_asleep()
    assert [loop.wait().value for loop in loops] == [(one(5),)] * 2


def test_API_9_a_failed_execution_raises_in_every_task(client: nnfmq.Client) -> None:
    with client.device("reference").prepare(nnfmq.load(nnfmq.example_path("digits.tflite"))) as model:

        async def main() -> list[Any]:
            pending = model.execute_async(np.zeros((1, 8, 8, 1), np.float32), timeout=0)
            return await asyncio.gather(_await(pending), _await(pending), return_exceptions=True)

        assert [isinstance(error, nnfmq.MissedDeadline) for error in run(main())] == [True, True]


def test_LIFE_4_the_driver_s_death_wakes_a_task(model: nnfmq.PreparedModel, client: nnfmq.Client) -> None:
    async def main() -> None:
        with Process(client.worker_pid) as worker:
            worker.stop()
            task = asyncio.create_task(_await(model.execute_async(one(1))))
            await asyncio.sleep(0)
            worker.kill()
            with pytest.raises(nnfmq.DeadObject):
                await task

    run(main())


def test_API_9_a_task_that_is_cancelled_leaves_the_execution_to_others(
    model: nnfmq.PreparedModel, client: nnfmq.Client
) -> None:
    async def main() -> Any:
        with Process(client.worker_pid) as worker, worker.stopped():
            pending = model.execute_async(one(6))
            task = asyncio.create_task(_await(pending))
            await asyncio.sleep(0)
            assert len(pending._future._waiters) == 1
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not pending._future._waiters
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await pending
        return await pending

    assert run(main()) == (one(6),)


def test_API_9_a_result_that_comes_after_the_loop_is_closed_is_discarded(
    model: nnfmq.PreparedModel, client: nnfmq.Client
) -> None:
    loop = asyncio.new_event_loop()
    with Process(client.worker_pid) as worker, worker.stopped():
        pending = model.execute_async(one(7))
        task = loop.create_task(_await(pending))
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
    assert pending.result(LIMIT_S) == (one(7),)
    assert model.execute(one(8)) == (one(8),)  # the watcher has survived it
    task.get_coro().close()  # type: ignore[union-attr]
    task._log_destroy_pending = False  # type: ignore[attr-defined]
