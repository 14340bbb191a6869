"""Executions that tasks of asyncio await, on a real driver: several tasks and loops, cancellation, death."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.drivers import LIMIT_S, InThread, Process, one, until
from support.models import gather_model, null_model
from support.stateful_models import stream

import nnfmq
from nnfmq.base.fence import Fence
from nnfmq.hal.types import HalExecutionMode
from nnfmq.queue import aio
from nnfmq.recording.reader import RecordingFile
from nnfmq.recording.writer import ExecutionRecorder


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine on a new loop; hangs become errors."""

    async def limited() -> Any:
        async with asyncio.timeout(LIMIT_S):
            return await main

    return asyncio.run(limited())


def threads() -> Counter[str]:
    """Return how many threads of each name this process has, without the waiter of queues."""
    return Counter(thread.name for thread in threading.enumerate() if thread.name != aio.THREAD_NAME)


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
        assert threads() - before <= Counter({"nnfmq-own-burst": 1})  # that of the model
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


# ------------------------------------------------------------------------------------------------ bursts


def test_BUR_1_a_task_executes_over_a_burst(model: nnfmq.PreparedModel) -> None:
    async def main() -> None:
        with model.burst() as burst:
            for value in range(20):
                assert await burst.execute_async(one(value)) == (one(value),)
            out = [np.zeros(1, np.float32)]
            assert (await burst.execute_async(one(30), out=out))[0] is out[0]
            assert out == [one(30)]
            burst.inputs[0][...] = 31
            assert await burst.execute_async(out=burst.outputs) is burst.outputs
            assert burst.outputs == (one(31),)
            await burst.execute_async(measure=True, timeout=LIMIT_S)
            assert burst.last.timing.time_in_driver_ns > 0
            assert burst.last.driver_ns > 0
            assert burst.execute(one(32)) == (one(32),)

    run(main())


def test_BUR_4_other_tasks_run_while_one_waits_for_a_burst(model: nnfmq.PreparedModel, client: nnfmq.Client) -> None:
    before = threads()

    async def main() -> None:
        with model.burst() as burst, Process(client.worker_pid) as worker:
            with worker.stopped():
                task = asyncio.create_task(burst.execute_async(one(1)))
                for _ in range(5):
                    await asyncio.sleep(0)
                assert not task.done()
                assert threads() == before
                with pytest.raises(nnfmq.BadState):
                    await burst.execute_async(one(2))
                with pytest.raises(nnfmq.BadState):
                    burst.execute(one(2))
            assert await task == (one(1),)

    run(main())


def test_BUR_4_bursts_of_many_tasks_share_one_waiting_thread(model: nnfmq.PreparedModel) -> None:
    before = threads()

    async def main() -> list[Any]:
        with ExitStack() as stack:
            bursts = [stack.enter_context(model.burst()) for _ in range(8)]
            waiting = asyncio.gather(*(burst.execute_async(one(i)) for i, burst in enumerate(bursts)))
            await asyncio.sleep(0)
            assert threads() == before
            assert sum(thread.name == aio.THREAD_NAME for thread in threading.enumerate()) <= 1
            return await waiting

    assert run(main()) == [(one(i),) for i in range(8)]


@pytest.mark.parametrize("way", ["cancel", "timeout of the loop", "timeout of the call"])
@pytest.mark.parametrize("is_async", [False, True])
def test_BUR_17_after_an_abandoned_execution_the_late_result_is_discarded(
    way: str, is_async: bool, model: nnfmq.PreparedModel, client: nnfmq.Client
) -> None:
    async def main() -> None:
        with model.burst() as burst, Process(client.worker_pid) as worker:
            for value in (10, 20):
                with worker.stopped():
                    await abandon(burst.execute_async(one(value), timeout=0.01 if way.endswith("call") else None), way)
                result = await burst.execute_async(one(value + 1)) if is_async else burst.execute(one(value + 1))
                assert result == (one(value + 1),)

    run(main())


async def abandon(execution: Coroutine[Any, Any, Any], way: str) -> None:
    if way == "cancel":
        task = asyncio.create_task(execution)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    elif way == "timeout of the loop":
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await execution
    else:
        with pytest.raises(nnfmq.MissedDeadline):
            await execution


def test_BUR_17_a_call_waits_in_its_task_for_the_late_result_and_at_most_until_its_deadline(
    model: nnfmq.PreparedModel, client: nnfmq.Client
) -> None:
    async def main() -> None:
        with model.burst() as burst, Process(client.worker_pid) as worker:
            with worker.stopped():
                await abandon(burst.execute_async(one(1)), "cancel")
                with pytest.raises(nnfmq.MissedDeadline):
                    await burst.execute_async(one(2), timeout=0.01)
                task = asyncio.create_task(burst.execute_async(one(3)))
                await asyncio.sleep(0)
                assert not task.done()
            assert await task == (one(3),)

    run(main())


def test_LIFE_4_the_driver_s_death_wakes_a_task_that_waits_for_a_burst(
    model: nnfmq.PreparedModel, client: nnfmq.Client
) -> None:
    async def main() -> None:
        with model.burst() as burst, Process(client.worker_pid) as worker:
            worker.stop()
            task = asyncio.create_task(burst.execute_async(one(1)))
            await asyncio.sleep(0)
            worker.kill()
            with pytest.raises(nnfmq.DeadObject):
                await task
            with pytest.raises(nnfmq.DeadObject):
                await burst.execute_async(one(1))

    run(main())


class Allowed:
    """Lets a wait block the event loop for `limit_s`, and keeps how it ended."""

    def __init__(self, limit_s: float = LIMIT_S, steps: int = 0) -> None:
        self._limit_s, self._steps = limit_s, steps
        self.ended: list[bool] = []

    async def begin(self) -> int:
        for _ in range(self._steps):
            await asyncio.sleep(0)
        return time.monotonic_ns() + round(self._limit_s * 1e9) if self._limit_s else 0

    def end(self, has_result: bool) -> None:
        self.ended.append(has_result)


def test_BUR_4_a_wait_that_may_block_gets_its_result_before_another_task_runs(model: nnfmq.PreparedModel) -> None:
    async def main() -> None:
        with model.burst() as burst:
            other = asyncio.create_task(asyncio.sleep(0))
            for value in range(3):
                allowed = Allowed()
                assert await burst.execute_async(one(value), blocking=allowed) == (one(value),)
                assert (allowed.ended, other.done()) == ([True], False)
            await other

    run(main())


@pytest.mark.parametrize(("limit_s", "ended"), [(0, []), (1e-9, [False])])
def test_BUR_4_other_tasks_run_when_a_wait_may_block_no_longer(
    limit_s: float, ended: list[bool], model: nnfmq.PreparedModel, client: nnfmq.Client
) -> None:
    async def main() -> None:
        with model.burst() as burst, Process(client.worker_pid) as worker:
            with worker.stopped():
                allowed = Allowed(limit_s)
                task = asyncio.create_task(burst.execute_async(one(1), blocking=allowed))
                for _ in range(5):
                    await asyncio.sleep(0)
                assert (allowed.ended, task.done()) == (ended, False)
            assert await task == (one(1),)

    run(main())


def test_BUR_17_a_wait_that_may_block_ends_at_its_deadline_and_its_late_result_is_discarded(
    model: nnfmq.PreparedModel, client: nnfmq.Client
) -> None:
    async def main() -> None:
        with model.burst() as burst, Process(client.worker_pid) as worker:
            with worker.stopped():
                allowed = Allowed()
                with pytest.raises(nnfmq.MissedDeadline):
                    await burst.execute_async(one(1), timeout=0.01, blocking=allowed)
                assert allowed.ended == [False]
            assert await burst.execute_async(one(2), blocking=Allowed()) == (one(2),)

    run(main())


def test_BUR_17_a_task_that_is_cancelled_before_its_wait_blocks_leaves_a_late_result(
    model: nnfmq.PreparedModel,
) -> None:
    async def main() -> None:
        with model.burst() as burst:
            await abandon(burst.execute_async(one(1), blocking=Allowed(steps=2)), "cancel")
            assert await burst.execute_async(one(2), blocking=Allowed()) == (one(2),)

    run(main())


def test_LIFE_4_the_driver_s_death_ends_a_wait_that_blocks(model: nnfmq.PreparedModel, client: nnfmq.Client) -> None:
    async def main() -> None:
        with model.burst() as burst, Process(client.worker_pid) as worker:

            def kill() -> None:
                until(lambda: burst.channel.results.waiters > 0, "the task blocks")
                worker.kill()

            worker.stop()
            killing, allowed = InThread.start(kill), Allowed()
            with pytest.raises(nnfmq.DeadObject):
                await burst.execute_async(one(1), blocking=allowed)
            assert not allowed.ended
            killing.wait()

    run(main())


def test_BUR_17_a_packet_that_cannot_be_sent_is_executed_over_the_control_channel(
    model: nnfmq.PreparedModel,
) -> None:
    async def main() -> None:
        with model.burst() as burst:
            burst.channel.requests.send = lambda _packet: False
            sent = burst.channel.requests.counters()
            assert await burst.execute_async(one(5), measure=True) == (one(5),)
            assert burst.channel.requests.counters() == sent
            assert burst.last.driver_ns == 0 < burst.last.timing.time_in_driver_ns

    run(main())


def test_a_burst_s_error_has_the_driver_s_text_in_a_task(client: nnfmq.Client) -> None:
    async def main() -> None:
        with client.device("reference").prepare(gather_model()) as model, model.burst() as burst:
            given = [np.zeros(info.shape, info.dtype) for info in model.inputs]
            given[-1][...] = 1000  # no such element
            errors = []
            for _ in range(2):
                with pytest.raises(nnfmq.NnfmqError) as caught:
                    await burst.execute_async(*given)
                errors.append(str(caught.value))
            with pytest.raises(nnfmq.NnfmqError) as caught:
                burst.execute(*given)
            assert {*errors} == {str(caught.value)}

    run(main())


def test_a_burst_s_error_comes_without_text_if_the_driver_does_not_reply_in_time(client: nnfmq.Client) -> None:
    async def main() -> None:
        with client.device("reference").prepare(gather_model()) as model, model.burst() as burst:
            given = [np.zeros(info.shape, info.dtype) for info in model.inputs]
            given[-1][...] = 1000
            burst.channel.connection.start_call_nonblocking = lambda *_: None  # type: ignore[method-assign]
            with pytest.raises(nnfmq.NnfmqError, match=r"the driver replied|timeout passed"):
                await burst.execute_async(*given, timeout=0.3)
            del burst.channel.connection.start_call_nonblocking

    run(main())


def test_states_advance_with_the_executions_of_tasks(client: nnfmq.Client, tmp_path: Path) -> None:
    (tmp_path / "stream.tflite").write_bytes(stream())
    steps = np.random.default_rng(3).uniform(-1, 1, (4, 1, 3)).astype(np.float32)

    async def main() -> None:
        with client.device("reference").prepare(tmp_path / "stream.tflite") as model, model.burst() as burst:
            for step in steps:
                np.testing.assert_array_equal(await burst.execute_async(step), model.execute(step))

    run(main())


def test_executions_of_tasks_are_recorded(client: nnfmq.Client, tmp_path: Path) -> None:
    async def main() -> None:
        with client.device("reference").prepare(null_model()) as model, model.burst() as burst:
            assert await burst.execute_async(one(5)) == (one(5),)
            burst.channel.requests.send = lambda _packet: False
            assert await burst.execute_async(one(6)) == (one(6),)

    with ExecutionRecorder.start(tmp_path / "tasks.nnfmq"):
        run(main())
    with RecordingFile(tmp_path / "tasks.nnfmq") as recording:
        modes = [execution.row.mode for execution in recording.executions]
    assert modes == [HalExecutionMode.BURST, HalExecutionMode.ASYNCHRONOUS]


# ------------------------------------------------------------------------------------------------ fences


def test_API_9_tasks_await_fenced_executions(model: nnfmq.PreparedModel) -> None:
    before = threads()

    async def main() -> list[Any]:
        with (
            Fence.create() as begin,
            model.execute_fenced(one(1), wait_for=[begin]) as first,
            model.execute_fenced(one(2), wait_for=[first.fence]) as second,
        ):
            waiting = asyncio.gather(_await(second), _await(first), _await(second))
            for _ in range(5):
                await asyncio.sleep(0)
            assert not waiting.done()
            assert threads() == before
            begin.signal()
            return [*await waiting, await first]

    assert run(main()) == [(one(2),), (one(1),), (one(2),), (one(1),)]


def test_API_9_a_task_that_is_cancelled_leaves_the_fence_to_others(model: nnfmq.PreparedModel) -> None:
    async def main() -> Any:
        with Fence.create() as begin, model.execute_fenced(one(3), wait_for=[begin]) as launched:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await launched
            begin.signal()
            return await launched

    assert run(main()) == (one(3),)


def test_API_9_a_fence_in_error_raises_the_execution_s_error(model: nnfmq.PreparedModel) -> None:
    async def main() -> None:
        with Fence.create() as begin, model.execute_fenced(one(3), wait_for=[begin]) as launched:
            begin.fail()
            with pytest.raises(nnfmq.GeneralFailure) as awaited:
                await launched
            with pytest.raises(nnfmq.GeneralFailure) as waited:
                launched.result(LIMIT_S)
            assert str(awaited.value) == str(waited.value)

    run(main())


def test_LIFE_4_the_driver_s_death_wakes_a_task_that_waits_for_a_fence(
    model: nnfmq.PreparedModel, client: nnfmq.Client
) -> None:
    async def main() -> None:
        with Fence.create() as begin, model.execute_fenced(one(3), wait_for=[begin]) as launched:
            task = asyncio.create_task(_await(launched))
            await asyncio.sleep(0)
            with Process(client.worker_pid) as worker:
                worker.kill()
            with pytest.raises(nnfmq.DeadObject):
                await task

    run(main())
