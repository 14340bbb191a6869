"""The priority thread pool: order and concurrency of work, and that none is lost or kept alive."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
from support.executors import LIMIT_S, until

from nnfmq.driver.execution.order import PriorityThreadPool
from nnfmq.hal.types import Priority

LOW, MEDIUM, HIGH = Priority


@pytest.fixture
def one() -> Iterator[PriorityThreadPool]:
    scheduler = PriorityThreadPool(1, "one")
    yield scheduler
    scheduler.shutdown()


class Gate:
    """Work that occupies a thread until it is opened."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.go.wait(LIMIT_S)


def writing(order: list[str], word: str) -> Callable[[], None]:
    return lambda: order.append(word)


def test_QOS_1_higher_priorities_run_first_and_equal_ones_in_order(one: PriorityThreadPool) -> None:
    gate, order = Gate(), list[str]()
    one.submit(gate, LOW)
    assert gate.begun.wait(LIMIT_S)
    for number in range(3):
        for priority in (LOW, HIGH, MEDIUM):
            one.submit(writing(order, f"{priority.name} {number}"), priority)
    gate.go.set()
    until(lambda: len(order) == 9)
    assert order == [f"{name} {number}" for name in ("HIGH", "MEDIUM", "LOW") for number in range(3)]


def test_QOS_1_low_priority_work_runs_when_higher_priority_load_ends(one: PriorityThreadPool) -> None:
    gate, order = Gate(), list[str]()

    def load(left: int) -> None:
        """Each piece of work submits the next one."""
        order.append("high")
        if left > 1:
            one.submit(lambda: load(left - 1), HIGH)

    one.submit(gate, HIGH)
    assert gate.begun.wait(LIMIT_S)
    one.submit(writing(order, "low"), LOW)
    one.submit(lambda: load(50), HIGH)
    gate.go.set()
    until(lambda: len(order) == 51)
    assert order == ["high"] * 50 + ["low"]


def test_as_many_tasks_run_concurrently_as_there_are_threads() -> None:
    scheduler, gates = PriorityThreadPool(3, "three"), [Gate() for _ in range(4)]
    for gate in gates:
        scheduler.submit(gate)
    assert all(gate.begun.wait(LIMIT_S) for gate in gates[:3])
    assert not gates[3].begun.is_set()
    gates[1].go.set()
    assert gates[3].begun.wait(LIMIT_S)
    for gate in gates:
        gate.go.set()
    scheduler.shutdown()


def test_threads_start_on_demand_and_are_reused() -> None:
    scheduler, threads = PriorityThreadPool(4, "four"), list[str]()
    for number in range(5):
        scheduler.submit(lambda: threads.append(threading.current_thread().name))
        until(lambda number=number: len(threads) == number + 1 and scheduler._idle == 1)
    assert set(threads) == {"four-0"}
    scheduler.shutdown()


def test_an_idle_thread_keeps_nothing_of_its_last_work_alive(one: PriorityThreadPool) -> None:
    class Thing:
        def __call__(self) -> None:
            pass

    thing = Thing()
    reference = weakref.ref(thing)
    one.submit(thing)
    del thing

    def is_gone() -> bool:
        gc.collect()
        return reference() is None

    until(is_gone)


def test_waiting_work_is_done_before_the_threads_end() -> None:
    scheduler, order = PriorityThreadPool(1, "one"), list[str]()
    for number in range(100):
        scheduler.submit(writing(order, str(number)))
    scheduler.shutdown()
    assert order == [str(number) for number in range(100)]
