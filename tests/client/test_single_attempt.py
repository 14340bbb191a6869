"""One attempt of several threads: results, errors, deadlines, and interruptions by a signal handler."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from support.executors import LIMIT_S, until

from nnfmq.client.waiting import SingleAttempt
from nnfmq.hal.errors import DeviceUnavailable, MissedDeadline, MissedDeadlineTransient

Start = Callable[..., Future[Any]]


class Held:
    """An attempt that waits until it may end, and how often it has begun."""

    def __init__(self, result: Any = None, error: BaseException | None = None) -> None:
        self.result, self.error = result, error
        self.begun = 0
        self.may_end = threading.Event()

    def __call__(self) -> Any:
        self.begun += 1
        assert self.may_end.wait(LIMIT_S)
        if self.error is not None:
            raise self.error
        return self.result


def waiting(attempt: SingleAttempt[Any]) -> int:
    """Return how many threads wait for the attempt of another one."""
    return sum(len(future._waiters) for future in attempt._claims.values())


def test_one_thread_makes_the_attempt_and_all_get_its_result(start: Start) -> None:
    attempt, held = SingleAttempt[int](), Held(7)
    threads = [start(attempt.run, held, None) for _ in range(5)]
    until(lambda: waiting(attempt) == 4)
    held.may_end.set()
    assert [thread.result(LIMIT_S) for thread in threads] == [7] * 5
    assert held.begun == 1


def test_the_next_attempt_is_another_one() -> None:
    attempt = SingleAttempt[int]()
    results = iter((1, 2))
    assert [attempt.run(lambda: next(results), None) for _ in range(2)] == [1, 2]


def test_all_get_the_error_of_the_attempt(start: Start) -> None:
    attempt, held = SingleAttempt[int](), Held(error=DeviceUnavailable("no driver"))
    threads = [start(attempt.run, held, None) for _ in range(3)]
    until(lambda: waiting(attempt) == 2)
    held.may_end.set()
    for thread in threads:
        with pytest.raises(DeviceUnavailable, match="no driver"):
            thread.result(LIMIT_S)
    assert held.begun == 1
    assert attempt.run(lambda: 3, None) == 3


def test_a_thread_waits_until_its_deadline_at_most(start: Start) -> None:
    attempt, held = SingleAttempt[int](), Held(1)
    first = start(attempt.run, held, None)
    until(lambda: held.begun)
    with pytest.raises(MissedDeadline):
        attempt.run(lambda: 2, time.monotonic_ns())
    held.may_end.set()
    assert first.result(LIMIT_S) == 1


@pytest.mark.parametrize("error", [MissedDeadlineTransient("too late"), KeyboardInterrupt()])
def test_another_thread_makes_the_attempt_if_the_first_was_interrupted(error: BaseException, start: Start) -> None:
    attempt, held = SingleAttempt[int](), Held(error=error)
    first = start(attempt.run, held, None)
    until(lambda: held.begun)
    second = start(attempt.run, lambda: 2, None)
    until(lambda: waiting(attempt) == 1)
    held.may_end.set()
    assert isinstance(first.exception(LIMIT_S), type(error))
    assert second.result(LIMIT_S) == 2


@pytest.mark.parametrize("waits", [False, True])
def test_an_attempt_that_waits_less_long_for_a_driver_decides_nothing_for_others(waits: bool, start: Start) -> None:
    """The first thread's deadline passes while it makes the attempt, or it waits for no driver that does not listen."""
    attempt, held = SingleAttempt[int](), Held(error=DeviceUnavailable("no driver"))
    first = start(attempt.run, held, time.monotonic_ns() if waits else None, waits=waits)
    until(lambda: held.begun)
    second = start(attempt.run, lambda: 2, None)
    until(lambda: waiting(attempt) == 1)
    held.may_end.set()
    assert isinstance(first.exception(LIMIT_S), DeviceUnavailable)
    assert second.result(LIMIT_S) == 2
