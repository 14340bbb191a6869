"""The order of one client's executions, with a double in the place of the worker's turns."""

from __future__ import annotations

import threading
import time

import pytest
from support.drivers import InThread, until

from nnfmq.driver.execution.order import ClientOrder, RunTimes
from nnfmq.hal.types import Priority

LONG_NS = 3600 * 10**9  # nobody gives up waiting
LOW, MEDIUM, HIGH = Priority.LOW, Priority.MEDIUM, Priority.HIGH


class Turns:
    """As `CoreTurns`: turns that the test gives, on `cores` cores."""

    def __init__(self, cores: int = 1) -> None:
        self.cores, self.are_taken = cores, True
        self.given = threading.Semaphore(0)
        self.requested: list[int] = []
        self.hurried: list[int] = []
        self.released = 0

    def others(self) -> int:
        return 0

    def take(self, due_ns: int, has_deadline: bool, expected_ns: int) -> None:
        self.requested.append(due_ns)
        assert self.given.acquire(timeout=30)

    def begin(self, expected_ns: int) -> None:
        raise AssertionError("turns are taken")

    def hurry(self, due_ns: int, has_deadline: bool) -> None:
        self.hurried.append(due_ns)

    def release(self) -> None:
        self.released += 1

    def wake_chosen(self) -> None:
        pass


@pytest.fixture
def turns() -> Turns:
    return Turns()


class Executions:
    """Executions of one client, each on its own thread, by name; `began` has their order."""

    def __init__(self, turns: Turns) -> None:
        self.order = ClientOrder(turns)  # type: ignore[arg-type]
        self.began: list[str] = []
        self._threads: list[InThread] = []

    def submit(self, name: str, priority: Priority, deadline_ns: int | None = None, expected_ns: int = LONG_NS) -> None:
        """Let an execution wait or run."""
        before = len(self.order._queue), self.order._active
        self._threads.append(InThread.start(lambda: self._run(name, priority, deadline_ns, expected_ns)))
        until(lambda: (len(self.order._queue), self.order._active) != before, f"{name} waits or runs")

    def _run(self, name: str, priority: Priority, deadline_ns: int | None, expected_ns: int) -> None:
        self.order.enter(priority, deadline_ns, expected_ns)
        self.began.append(name)

    def end_each(self, turns: Turns) -> None:
        """Give turns to all that wait for the cores, one after the other."""
        for number, _ in enumerate(self._threads):
            turns.given.release()
            until(lambda number=number: len(self.began) > number, "the next one begins")  # type: ignore[misc]
            self.order.leave()
        for thread in self._threads:
            thread.wait()


def test_QOS_1_higher_priorities_go_first_and_within_one_priority_the_earliest_deadline(turns: Turns) -> None:
    executions, now = Executions(turns), time.monotonic_ns()
    executions.submit("first", HIGH)
    far = now + LONG_NS
    executions.submit("low, soon", LOW, far)
    executions.submit("medium, late", MEDIUM, far + 2)
    executions.submit("medium, soon", MEDIUM, far + 1)
    executions.submit("high", HIGH, far + 3)
    executions.submit("medium, none", MEDIUM)
    executions.end_each(turns)
    assert executions.began == ["first", "high", "medium, none", "medium, soon", "medium, late", "low, soon"]
    assert turns.released == 6


def test_a_better_execution_takes_the_turn_for_which_another_one_waits(turns: Turns) -> None:
    executions = Executions(turns)
    executions.submit("low", LOW)
    until(lambda: len(turns.requested) == 1, "it waits for the worker's turn")
    executions.submit("high", HIGH, time.monotonic_ns() + LONG_NS)
    assert len(turns.hurried) == 1
    executions.end_each(turns)
    assert executions.began == ["high", "low"]


def test_an_execution_runs_beside_another_one_as_long_as_a_core_is_free() -> None:
    turns = Turns(cores=2)
    executions = Executions(turns)
    turns.given.release()
    executions.submit("one", MEDIUM)
    until(lambda: executions.began == ["one"], "it runs")
    executions.submit("two", LOW)
    until(lambda: executions.began == ["one", "two"], "both run")
    executions.submit("three", MEDIUM)
    assert executions.began == ["one", "two"]
    executions.order.leave()
    assert turns.released == 0
    executions.order.leave()
    assert turns.released == 1
    turns.given.release()
    until(lambda: executions.began == ["one", "two", "three"], "the third one runs")
    executions.order.leave()


def test_a_short_execution_does_not_wait_for_long_ones_of_its_client(turns: Turns) -> None:
    executions = Executions(turns)
    turns.given.release()
    executions.submit("long", HIGH)
    until(lambda: executions.began == ["long"], "it runs")
    executions.submit("short", LOW, expected_ns=1_000_000)
    until(lambda: executions.began == ["long", "short"], "it does not wait")
    executions.order.leave()
    executions.order.leave()
    assert turns.released == 1


def test_an_execution_does_not_wait_beyond_its_deadline(turns: Turns) -> None:
    executions = Executions(turns)
    turns.given.release()
    executions.submit("long", HIGH)
    executions.submit("late", HIGH, time.monotonic_ns() + 10_000_000)
    until(lambda: executions.began == ["long", "late"], "it does not wait")
    executions.order.leave()
    executions.order.leave()


def test_the_estimate_follows_the_runs() -> None:
    times = RunTimes()
    times.add(8_000_000)
    assert times.expected_ns == 8_000_000
    for _ in range(50):
        times.add(2_000_000)
    assert 2_000_000 <= times.expected_ns < 2_000_010
