"""Bursts that threads share: results go to the right thread, waiting ends, and no thread's end takes a burst along."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.drivers import InThread, Process, one, until
from support.models import null_model

import nnfmq

SIZE = 2
THREADS = 8
LIMIT_S = 20


@pytest.fixture
def pool(model: nnfmq.PreparedModel) -> Iterator[nnfmq.BurstPool]:
    with model.burst_pool(SIZE) as made:
        yield made


@pytest.fixture
def loans(pool: nnfmq.BurstPool) -> list[object]:
    """Borrow all bursts of the pool."""
    return [pool.acquire(timeout=0) for _ in range(SIZE)]


def test_each_of_many_threads_gets_its_own_results(pool: nnfmq.BurstPool) -> None:
    def results(number: int) -> list[float]:
        return [float(pool.execute(one(number * 1000 + i), timeout=LIMIT_S)[0][0]) for i in range(100)]

    with ThreadPoolExecutor(THREADS) as threads:
        found = list(threads.map(results, range(THREADS)))
    assert found == [[number * 1000 + i for i in range(100)] for number in range(THREADS)]
    assert repr(pool) == "<BurstPool, 2 of 2 bursts free: 'input 0' (float32 1) → 'output 0' (float32 1)>"


def test_threads_write_in_place_into_bursts_of_their_own(pool: nnfmq.BurstPool) -> None:
    def results(number: int) -> list[float]:
        found = []
        for i in range(50):
            with pool.acquire(timeout=LIMIT_S) as burst:
                burst.inputs[0][0] = number * 1000 + i
                burst.execute(out=burst.outputs)
                found.append(float(burst.outputs[0][0]))
        return found

    with ThreadPoolExecutor(THREADS) as threads:
        found = list(threads.map(results, range(THREADS)))
    assert found == [[number * 1000 + i for i in range(50)] for number in range(THREADS)]


def test_a_borrowed_burst_has_no_inputs_of_another_user(model: nnfmq.PreparedModel) -> None:
    with model.burst_pool(1) as pool:
        pool.execute(one(5))
        with pool.acquire() as burst, pytest.raises(nnfmq.InvalidArgument, match="never written"):
            burst.execute()


@pytest.mark.usefixtures("loans")
def test_waiting_for_a_burst_ends_at_the_timeout(pool: nnfmq.BurstPool) -> None:
    waits: list[Callable[[], object]] = [
        lambda: pool.acquire(timeout=0),
        lambda: pool.acquire(timeout=0.01),
        lambda: pool.execute(one(1), timeout=0.01),
    ]
    for wait in waits:
        with pytest.raises(nnfmq.MissedDeadline, match="none of the 2 bursts of this pool became free within"):
            wait()


def test_a_waiting_thread_gets_the_burst_that_another_returns(pool: nnfmq.BurstPool, loans: list[object]) -> None:
    waiting = InThread.start(lambda: pool.execute(one(3)))
    waiting.wait_until_asleep()
    loans.pop()
    assert waiting.wait().value[0].tolist() == [3]


def test_a_thread_that_ends_without_returning_its_burst_loses_none(pool: nnfmq.BurstPool) -> None:
    kept = threading.local()

    def keep() -> None:
        kept.loan = pool.acquire(timeout=LIMIT_S)

    def fail() -> None:
        kept.loan = pool.acquire(timeout=LIMIT_S)
        raise nnfmq.InvalidArgument("of this thread")

    calls = [InThread.start(call) for _ in range(2 * SIZE) for call in (keep, fail)]
    for call in calls:
        call.wait()
        call.error = None  # its traceback refers to the thread's frames
    with pool.acquire(timeout=LIMIT_S), pool.acquire(timeout=LIMIT_S):
        pass


def test_the_driver_s_death_ends_all_waits(client: nnfmq.Client) -> None:
    with (
        Process(client.worker_pid) as worker,
        client.device("reference").prepare(null_model()) as model,
        model.burst_pool(1) as pool,
        pool.acquire() as burst,
    ):
        waiting = [InThread.start(pool.acquire) for _ in range(3)]
        for call in waiting:
            call.wait_until_asleep()
        worker.kill()
        for call in waiting:
            assert isinstance(call.wait().error, nnfmq.DeadObject)
        for execute in (burst.execute, pool.execute):
            with pytest.raises(nnfmq.DeadObject):
                execute(one(1))


def test_closing_a_pool_ends_all_waits_and_closes_borrowed_bursts(model: nnfmq.PreparedModel) -> None:
    pool = model.burst_pool(1)
    with pool.acquire() as burst:
        waiting = [InThread.start(pool.acquire) for _ in range(3)]
        for call in waiting:
            call.wait_until_asleep()
        pool.close()
        for call in waiting:
            assert isinstance(call.wait().error, nnfmq.InvalidArgument)
        with pytest.raises(nnfmq.InvalidArgument, match="this burst is closed"):
            burst.execute(one(1))
    pool.close()
    with pytest.raises(nnfmq.InvalidArgument, match="this pool of bursts is closed"):
        pool.execute(one(1))
    assert "closed" in repr(pool)


def test_a_returned_burst_cannot_be_entered_again(pool: nnfmq.BurstPool) -> None:
    loan = pool.acquire()
    with loan:
        pass
    with pytest.raises(nnfmq.InvalidArgument, match="was returned to its pool"), loan:
        pass


@pytest.mark.parametrize("count", [0, -1])
def test_a_pool_has_at_least_one_burst(model: nnfmq.PreparedModel, count: int) -> None:
    with pytest.raises(nnfmq.InvalidArgument, match=f"1 burst or more, not {count}"):
        model.burst_pool(count)


def test_the_bursts_of_a_pool_that_cannot_be_completed_are_closed(model: nnfmq.PreparedModel) -> None:
    with pytest.raises(nnfmq.NnfmqError):
        model.burst_pool(1000)  # a client has at most 256
    with model.burst_pool(SIZE) as pool:
        until(lambda: pool.execute(one(1))[0].tolist() == [1], "the pool executes")
