"""RowBatcher: which requests are executed together, and that each gets its own rows or its own error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from support.served_models import run

from nnfmq.base.deadlines import deadline_after
from nnfmq.hal.errors import DeadObject, GeneralFailure, MissedDeadlineTransient, ResourceExhaustedTransient
from nnfmq.serving.burst_lanes import BurstLanes
from nnfmq.serving.providers import ProvidedModel
from nnfmq.serving.row_batcher import RowBatcher

Array = Any


class DoublingBurst:
    """Stands for a burst of batch 4 over two inputs of two columns: its output is twice the sum. Records its calls."""

    def __init__(self, ready: asyncio.Event | None = None, error: BaseException | None = None) -> None:
        self.inputs = (np.full((4, 2), 9, np.float32), np.full((4, 2), 9, np.float32))
        self.outputs = (np.zeros((4, 2), np.float32),)
        self.executed: list[Array] = []
        self.timeouts: list[float | None] = []
        self._ready, self._error = ready, error

    def discard_inputs(self) -> None:
        """Do nothing."""

    async def execute_async(self, *, out: Sequence[Array], timeout: float | None) -> Sequence[Array]:
        assert out is self.outputs
        self.executed.append(self.inputs[0].copy())
        self.timeouts.append(timeout)
        if self._ready is not None:
            await self._ready.wait()
        if self._error is not None:
            raise self._error
        self.outputs[0][:] = 2 * (self.inputs[0] + self.inputs[1])
        return self.outputs


def batcher(*bursts: Any, max_waiting: int = 16, max_wait_s: float = 0.0) -> RowBatcher:
    model: Any = ProvidedModel(None, 4, lambda _burst: 7)  # type: ignore[arg-type]
    return RowBatcher(model, BurstLanes(bursts, 1), max_waiting, max_wait_s)


def rows(*values: float) -> tuple[Array, Array]:
    """Return both inputs of a request: the first has these rows, the second ones."""
    first = np.repeat(np.array(values, np.float32)[:, np.newaxis], 2, axis=1)
    return first, np.ones_like(first)


def doubled(*values: float) -> list[list[float]]:
    return [[2 * (value + 1)] * 2 for value in values]


async def started(*calls: Any) -> list[asyncio.Task[Any]]:
    tasks = [asyncio.create_task(call) for call in calls]
    await asyncio.sleep(0)
    return tasks


def settled(count: int = 10) -> Callable[[], Any]:
    async def wait() -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    return wait


def test_requests_that_arrive_together_are_one_execution_and_the_rest_of_the_memory_is_zero() -> None:
    async def main() -> None:
        burst = DoublingBurst()
        executor = batcher(burst)
        results = await asyncio.gather(executor.execute(rows(1), None), executor.execute(rows(2, 3), None))
        assert [(outputs[0].tolist(), version) for outputs, version, _wait_ns in results] == [
            (doubled(1), 7),
            (doubled(2, 3), 7),
        ]
        assert [call[:, 0].tolist() for call in burst.executed] == [[1, 2, 3, 0]]

    run(main())


def test_results_are_copies_that_the_next_execution_does_not_change() -> None:
    async def main() -> None:
        executor = batcher(DoublingBurst())
        (first,), *_ = await executor.execute(rows(1), None)
        await executor.execute(rows(5), None)
        assert first.tolist() == doubled(1)

    run(main())


def test_a_request_that_does_not_fit_begins_the_next_execution_in_order() -> None:
    async def main() -> None:
        burst = DoublingBurst()
        executor = batcher(burst)
        results = await asyncio.gather(*(executor.execute(rows(*given), None) for given in ((1, 2, 3), (4, 5), (6,))))
        assert [outputs[0].tolist() for outputs, *_ in results] == [doubled(1, 2, 3), doubled(4, 5), doubled(6)]
        assert [call[:, 0].tolist() for call in burst.executed] == [[1, 2, 3, 0], [4, 5, 6, 0]]

    run(main())


def test_a_batch_that_is_not_full_waits_for_more_rows_while_a_burst_is_free() -> None:
    async def main() -> None:
        burst = DoublingBurst()
        executor = batcher(burst, max_wait_s=1000)
        (first,) = await started(executor.execute(rows(1, 2), None))
        await settled()()
        assert not burst.executed
        await executor.execute(rows(3, 4), None)
        assert (await first)[0][0].tolist() == doubled(1, 2)
        assert [call[:, 0].tolist() for call in burst.executed] == [[1, 2, 3, 4]]

    run(main())


def test_a_batch_that_is_not_full_is_executed_when_its_oldest_request_has_waited_long_enough() -> None:
    async def main() -> None:
        (outputs, *_) = await batcher(DoublingBurst(), max_wait_s=0.001).execute(rows(1), None)
        assert outputs[0].tolist() == doubled(1)

    run(main())


def test_requests_that_arrive_while_all_bursts_are_busy_are_executed_together() -> None:
    async def main() -> None:
        ready = asyncio.Event()
        burst = DoublingBurst(ready)
        executor = batcher(burst)
        tasks = await started(executor.execute(rows(1), None))
        await settled()()
        tasks += await started(executor.execute(rows(2), None), executor.execute(rows(3), None))
        await settled()()
        assert (len(burst.executed), executor.waiting) == (1, 2)
        ready.set()
        assert [(await task)[0][0].tolist() for task in tasks] == [doubled(1), doubled(2), doubled(3)]
        assert [call[:, 0].tolist() for call in burst.executed] == [[1, 0, 0, 0], [2, 3, 0, 0]]

    run(main())


def test_one_request_too_many_is_rejected_immediately() -> None:
    async def main() -> None:
        ready = asyncio.Event()
        executor = batcher(DoublingBurst(ready), max_waiting=1)
        tasks = await started(executor.execute(rows(1), None))
        await settled()()
        tasks += await started(executor.execute(rows(2), None))
        with pytest.raises(ResourceExhaustedTransient, match="1 requests wait already"):
            await executor.execute(rows(3), None)
        ready.set()
        await asyncio.gather(*tasks)

    run(main())


def test_a_request_that_is_cancelled_or_late_before_its_execution_is_left_out() -> None:
    async def main() -> None:
        ready = asyncio.Event()
        burst = DoublingBurst(ready)
        executor = batcher(burst)
        (first,) = await started(executor.execute(rows(1), None))
        await settled()()
        cancelled, late, kept = await started(
            executor.execute(rows(2), None),
            executor.execute(rows(3), deadline_after(0)),
            executor.execute(rows(4), None),
        )
        cancelled.cancel()
        with pytest.raises(MissedDeadlineTransient, match="before the result of the batch"):
            await late
        ready.set()
        await asyncio.gather(first, kept)
        assert [call[:, 0].tolist() for call in burst.executed] == [[1, 0, 0, 0], [4, 0, 0, 0]]
        assert cancelled.cancelled()

    run(main())


def test_a_request_that_is_cancelled_during_its_execution_concerns_no_other_one() -> None:
    async def main() -> None:
        ready = asyncio.Event()
        executor = batcher(DoublingBurst(ready))
        first, second = await started(executor.execute(rows(1), None), executor.execute(rows(2), None))
        await settled()()
        first.cancel()
        ready.set()
        assert (await second)[0][0].tolist() == doubled(2)

    run(main())


def test_an_execution_has_the_latest_deadline_of_its_requests_and_none_if_one_has_none() -> None:
    async def main() -> None:
        burst = DoublingBurst()
        executor = batcher(burst)
        await asyncio.gather(*(executor.execute(rows(1), deadline_after(limit)) for limit in (50, 100)))
        await asyncio.gather(*(executor.execute(rows(1), deadline_after(limit)) for limit in (50, None)))
        assert burst.timeouts[0] == pytest.approx(100, abs=10)
        assert burst.timeouts[1] is None

    run(main())


def test_a_failed_execution_fails_for_all_its_requests_and_not_for_the_next_ones() -> None:
    async def main() -> None:
        burst = DoublingBurst(error=DeadObject("gone"))
        executor = batcher(burst)
        results = await asyncio.gather(*(executor.execute(rows(i), None) for i in (1, 2)), return_exceptions=True)
        assert [type(result) for result in results] == [DeadObject, DeadObject]
        burst._error = None
        assert (await executor.execute(rows(3), None))[0][0].tolist() == doubled(3)
        assert len(burst.executed) == 2

    run(main())


def test_a_bug_in_an_execution_becomes_an_error_of_its_requests() -> None:
    async def main() -> None:
        reported: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: reported.append(context["exception"]))
        executor = batcher(DoublingBurst(error=ZeroDivisionError()))
        with pytest.raises(GeneralFailure, match="ZeroDivisionError"):
            await executor.execute(rows(1), None)
        await settled()()

    run(main())


def test_requests_of_a_model_that_is_being_closed_fail() -> None:
    async def main() -> None:
        lanes = BurstLanes([DoublingBurst()], 1)  # type: ignore[list-item]
        executor = RowBatcher(ProvidedModel(None, 4, lambda _burst: 1), lanes, 8, 0.0)  # type: ignore[arg-type]
        await lanes.drain()
        with pytest.raises(DeadObject, match="being closed"):
            await executor.execute(rows(1), None)

    run(main())
