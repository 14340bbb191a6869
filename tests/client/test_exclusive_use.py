"""Exclusive use: a concurrent second call is rejected, atomically and even if a signal handler raises."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

import pytest

from nnfmq.base.ownership import exclusive
from nnfmq.hal.errors import InvalidArgument

THREADS = 8
ROUNDS = 300
STORM_S = 1.0


class Counter:
    """Counts the calls that run concurrently."""

    def __init__(self) -> None:
        self._claims: dict[int, object] = {}
        self.running = 0
        self.most = 0
        self.calls = 0

    def _busy_error(self) -> Exception:
        return InvalidArgument("busy")

    @exclusive
    def run(self, *, seconds: float = 0.0) -> None:
        """Run once."""
        self.running += 1
        self.most = max(self.most, self.running)
        self.calls += 1
        time.sleep(seconds)
        self.running -= 1

    @exclusive
    def run_twice(self) -> None:
        self.run()

    @exclusive
    def fail(self) -> None:
        raise KeyError("of the call")


@pytest.fixture
def short_switch_interval() -> Iterator[None]:
    """Make threads switch as often as CPython can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_calls_after_each_other_run() -> None:
    counter = Counter()
    for _ in range(3):
        counter.run()
    assert (counter.calls, counter._claims) == (3, {})


def test_a_call_within_a_call_is_rejected_and_the_object_stays_usable() -> None:
    counter = Counter()
    with pytest.raises(InvalidArgument, match="busy"):
        counter.run_twice()
    counter.run()
    assert counter.calls == 1


def test_a_call_that_fails_releases_the_object() -> None:
    counter = Counter()
    with pytest.raises(KeyError, match="of the call"):
        counter.fail()
    counter.run()


def test_a_rejected_call_does_not_release_the_object_of_the_other() -> None:
    counter = Counter()
    thread = threading.Thread(target=counter.run, kwargs={"seconds": 0.2})
    thread.start()
    while not counter.running:
        time.sleep(0)
    for _ in range(3):
        with pytest.raises(InvalidArgument):
            counter.run()
    assert counter.running == 1
    thread.join()
    counter.run()


@pytest.mark.usefixtures("short_switch_interval")
def test_of_concurrent_calls_exactly_one_runs_at_a_time() -> None:
    counter, barrier, rejected = Counter(), threading.Barrier(THREADS), [0] * THREADS

    def call(index: int) -> None:
        for _ in range(ROUNDS):
            barrier.wait()
            try:
                counter.run(seconds=1e-5)
            except InvalidArgument:
                rejected[index] += 1

    threads = [threading.Thread(target=call, args=(index,)) for index in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.most == 1
    assert counter.calls >= ROUNDS  # at least one call of each round
    assert counter.calls + sum(rejected) == THREADS * ROUNDS
    assert counter._claims == {}


class Interrupted(Exception):
    """Raised by the signal handler."""


def test_an_exception_of_a_signal_handler_never_leaves_the_object_claimed() -> None:
    """A timer fires at all steps of a call, and its handler raises there."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise Interrupted

    counter, interruptions = Counter(), 0
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        end = time.monotonic() + STORM_S
        while time.monotonic() < end:
            try:
                signal.setitimer(signal.ITIMER_REAL, 2e-5)
                for _ in range(1000):
                    counter.run()
            except Interrupted:
                interruptions += 1
            except InvalidArgument:
                pytest.fail("an interrupted call has left the object claimed")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert interruptions > 100
    assert counter._claims == {}
