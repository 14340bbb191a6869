"""Exclusive use: a concurrent second call is rejected, atomically and even if a signal handler raises."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from nnfmq.base.ownership import CLAIM, Claims, exclusive, release
from nnfmq.client.burst.burst import Inputs, ModelBurst, Targets
from nnfmq.client.model.arrays import ExecutionInfo, ExecutionResult, Outputs
from nnfmq.client.waiting import SingleAttempt
from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.types import ExecutionConfig, Pool, Request

THREADS = 8
ROUNDS = 300
STORM_S = 1.0


class Counter:
    """Counts the calls that run concurrently."""

    def __init__(self) -> None:
        self._claims: Claims = {}
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


def test_a_claim_is_released_by_its_owner_only() -> None:
    claim = object()
    claims: Claims = {CLAIM: claim}
    assert not release(claims, object())
    assert claims == {CLAIM: claim}
    assert release(claims, claim)
    assert not release(claims, claim)
    assert claims == {}


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


class NullBurst(ModelBurst):
    """A burst whose executions do nothing."""

    def _execute(self, inputs: Inputs, out: Targets, measure: bool, deadline_ns: int | None) -> Outputs:
        return self.outputs

    async def _execute_in_task(
        self, inputs: Inputs, out: Targets, measure: bool, deadline_ns: int | None, blocking: object
    ) -> Outputs:
        raise NotImplementedError

    def _execute_request(self, request: Request, config: ExecutionConfig, deadline_ns: int | None) -> ExecutionResult:
        raise NotImplementedError

    def free_memory(self, memory: Pool, *, timeout: float | None = 10.0) -> None:
        raise NotImplementedError

    def _read_info(self) -> ExecutionInfo:
        raise NotImplementedError

    def _require_open(self) -> None:
        pass

    def close(self) -> None:
        pass


def exclusive_method() -> tuple[Callable[[], object], Claims]:
    counter = Counter()
    return counter.run, counter._claims


def single_attempt() -> tuple[Callable[[], object], Claims]:
    attempt = SingleAttempt[int]()
    return (lambda: attempt.run(lambda: 1, None)), attempt._claims


def burst_execution() -> tuple[Callable[[], object], Claims]:
    burst = NullBurst()
    return burst.execute, burst._claims


@pytest.mark.parametrize("use", [exclusive_method, single_attempt, burst_execution], ids=lambda use: use.__name__)
def test_an_exception_of_a_signal_handler_never_leaves_the_object_claimed(
    use: Callable[[], tuple[Callable[[], object], Claims]],
) -> None:
    """A timer fires at all steps of a call, and its handler raises there."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise Interrupted

    call, claims = use()
    interruptions = 0
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        end = time.monotonic() + STORM_S
        while time.monotonic() < end:
            try:
                signal.setitimer(signal.ITIMER_REAL, 2e-5)
                for _ in range(1000):
                    call()
            except Interrupted:
                interruptions += 1
                assert claims == {}, "an interrupted call has left the object claimed"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert interruptions > 100
    assert claims == {}
