"""BurstLanes: which task gets which burst, when, and what happens to those that do not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.served_models import run

from nnfmq.base.deadlines import deadline_after
from nnfmq.hal.errors import DeadObject, MissedDeadlineTransient, ResourceExhaustedTransient
from nnfmq.serving.burst_lanes import BurstLanes


class Lent:
    """Stands for a burst; counts its users."""

    def __init__(self) -> None:
        self.discarded = 0

    def discard_inputs(self) -> None:
        self.discarded += 1


def lanes_of(count: int, max_waiting: int = 10) -> tuple[BurstLanes, list[Any]]:
    bursts: list[Any] = [Lent() for _ in range(count)]
    return BurstLanes(bursts, max_waiting), bursts


async def waiting(lanes: BurstLanes, count: int = 1) -> list[asyncio.Task[Any]]:
    """Start tasks that wait for a burst, one after the other."""
    tasks = []
    for _ in range(count):
        tasks.append(asyncio.create_task(lanes.take(None)))
        await asyncio.sleep(0)
    return tasks


def test_the_burst_that_was_returned_last_is_lent_first_without_the_last_user_s_inputs() -> None:
    async def main() -> None:
        lanes, _ = lanes_of(3)
        first, second = await lanes.take(None), await lanes.take(None)
        lanes.put_back(second, is_late=False)
        lanes.put_back(first, is_late=False)
        assert (await lanes.take(None), await lanes.take(None)) == (first, second)
        assert (first.discarded, second.discarded) == (1, 1)

    run(main())


def test_a_burst_whose_execution_was_abandoned_is_lent_last() -> None:
    async def main() -> None:
        lanes, bursts = lanes_of(2)
        abandoned = await lanes.take(None)
        lanes.put_back(abandoned, is_late=True)
        order = [await lanes.take(None), await lanes.take(None)]
        assert order == [next(burst for burst in bursts if burst is not abandoned), abandoned]

    run(main())


def test_tasks_get_bursts_in_the_order_of_their_arrival() -> None:
    async def main() -> None:
        lanes, (burst,) = lanes_of(1)
        await lanes.take(None)
        first, second = await waiting(lanes, 2)
        assert (lanes.waiting, lanes.busy) == (2, 1)
        lanes.put_back(burst, is_late=False)
        await asyncio.sleep(0)
        assert (first.done(), second.done(), lanes.waiting, lanes.busy) == (True, False, 1, 1)
        lanes.put_back(burst, is_late=False)
        assert await second is burst

    run(main())


def test_one_task_too_many_is_rejected_immediately_and_named_as_overload() -> None:
    async def main() -> None:
        lanes, (burst,) = lanes_of(1, max_waiting=1)
        await lanes.take(None)
        (task,) = await waiting(lanes)
        with pytest.raises(ResourceExhaustedTransient, match="1 requests wait already for the 1 bursts"):
            await lanes.take(None)
        lanes.put_back(burst, is_late=False)
        assert await task is burst

    run(main())


def test_a_task_whose_deadline_passes_leaves_the_queue() -> None:
    async def main() -> None:
        lanes, (burst,) = lanes_of(1)
        await lanes.take(None)
        with pytest.raises(MissedDeadlineTransient, match="none of the 1 bursts"):
            await lanes.take(deadline_after(0))
        assert lanes.waiting == 0
        lanes.put_back(burst, is_late=False)
        assert lanes.busy == 0

    run(main())


def test_a_burst_that_reaches_a_cancelled_task_goes_to_the_next_one() -> None:
    async def main() -> None:
        lanes, (burst,) = lanes_of(1)
        await lanes.take(None)
        first, second = await waiting(lanes, 2)
        lanes.put_back(burst, is_late=False)  # to the first task, which has not run since
        first.cancel()
        assert await second is burst
        assert first.cancelled()

    run(main())


def test_a_task_that_is_cancelled_while_it_waits_gets_no_burst() -> None:
    async def main() -> None:
        lanes, (burst,) = lanes_of(1)
        await lanes.take(None)
        (task,) = await waiting(lanes)
        task.cancel()
        lanes.put_back(burst, is_late=False)  # before the task has run
        await asyncio.sleep(0)
        assert (task.cancelled(), lanes.busy, lanes.waiting) == (True, 0, 0)

    run(main())


def test_draining_rejects_new_tasks_and_waits_for_all_others() -> None:
    async def main() -> None:
        lanes, (burst,) = lanes_of(1)
        await lanes.take(None)
        (queued,) = await waiting(lanes)
        draining = asyncio.create_task(lanes.drain())
        await asyncio.sleep(0)
        with pytest.raises(DeadObject, match="being closed"):
            await lanes.take(None)
        lanes.put_back(burst, is_late=False)
        assert await queued is burst
        await asyncio.sleep(0)
        assert not draining.done()
        lanes.put_back(burst, is_late=False)
        await draining

    run(main())


def test_draining_unused_bursts_ends_immediately() -> None:
    run(lanes_of(2)[0].drain())
