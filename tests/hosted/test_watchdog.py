"""The watchdog: who is told to stop, when the process ends, when the thread wakes. Times are the test's, but in two."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from support.drivers import until

from nnfmq.driver.execution import watchdog
from nnfmq.driver.execution.watchdog import GRACE_S, STALL_S, Watchdog, cannot_abort

LATE_NS = 5_000_000
GRACE_NS = int(GRACE_S * 1e9)
FAR_NS = 10**18
NEVER = 2**63 - 1


class Recorder:
    """What a watchdog has done: ends of the process, timers, wake-ups; its thread never runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ends: list[str] = []
        self.timers: list[float] = []
        self.aborted: list[str] = []
        self.starts: list[str] = []
        monkeypatch.setattr(watchdog, "start_daemon", self.start)
        self.dog = Watchdog(lambda: self.ends.append("end"), self.timers.append)

    def start(self, _run: object, name: str) -> Recorder:
        self.starts.append(name)
        return self

    def abort(self, name: str) -> Callable[[], object]:
        return lambda: self.aborted.append(name)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def test_what_is_late_is_told_to_stop_once_and_then_has_its_grace(made: Recorder) -> None:
    token = made.dog.begin(FAR_NS, made.abort("a"))
    assert made.dog.look(FAR_NS + LATE_NS - 1) == FAR_NS + LATE_NS
    assert made.aborted == []
    told_ns = FAR_NS + LATE_NS
    assert made.dog.look(told_ns) == told_ns + GRACE_NS
    assert made.dog.look(told_ns + GRACE_NS - 1) == told_ns + GRACE_NS
    assert (made.aborted, made.ends) == (["a"], [])
    made.dog.end(token)
    assert made.dog.look(told_ns + GRACE_NS) == NEVER
    assert made.ends == []


def test_the_process_ends_when_the_grace_is_over(made: Recorder, caplog: pytest.LogCaptureFixture) -> None:
    made.dog.begin(FAR_NS, cannot_abort)
    made.dog.look(FAR_NS + LATE_NS)
    made.dog.look(FAR_NS + LATE_NS + GRACE_NS)
    assert made.ends == ["end"]
    assert "a runtime has not stopped in time after its deadline, so this worker exits" in caplog.text


def test_the_grace_begins_when_it_was_told_to_stop_not_while_the_process_was_stopped(made: Recorder) -> None:
    made.dog.begin(FAR_NS, made.abort("a"))
    continued_ns = FAR_NS + 10 * GRACE_NS
    made.dog.look(continued_ns)
    made.dog.look(continued_ns + GRACE_NS - 1)
    assert (made.aborted, made.ends) == (["a"], [])
    made.dog.look(continued_ns + GRACE_NS)
    assert made.ends == ["end"]


def test_nothing_is_told_to_stop_after_its_end(made: Recorder) -> None:
    made.dog.end(made.dog.begin(FAR_NS, made.abort("a")))
    made.dog.begin(FAR_NS + 1, made.abort("b"))
    made.dog.look(FAR_NS + LATE_NS)
    assert made.aborted == []


def test_each_of_several_has_a_grace_of_its_own(made: Recorder) -> None:
    made.dog.begin(FAR_NS, made.abort("long"), grace_s=60)
    first = made.dog.begin(FAR_NS, made.abort("a"))
    made.dog.begin(FAR_NS + GRACE_NS, made.abort("b"))
    assert made.dog.look(FAR_NS + LATE_NS) == FAR_NS + LATE_NS + GRACE_NS
    assert sorted(made.aborted) == ["a", "long"]
    made.dog.end(first)
    made.dog.look(FAR_NS + LATE_NS + GRACE_NS)
    assert made.aborted[-1] == "b"
    assert made.ends == []


def test_an_error_of_the_runtime_s_function_does_not_end_the_watch(made: Recorder) -> None:
    made.dog.begin(FAR_NS, lambda: 1 // 0 > 0)
    made.dog.begin(FAR_NS, made.abort("b"))
    assert made.dog.look(FAR_NS + LATE_NS) == FAR_NS + LATE_NS + GRACE_NS
    assert made.aborted == ["b"]


def test_only_a_deadline_before_the_next_look_wakes_the_thread(made: Recorder) -> None:
    """The timer that `begin` sets shows that it has woken the thread."""
    made.dog.end(made.dog.begin(FAR_NS, cannot_abort))
    assert (made.starts, len(made.timers)) == (["nnfmq-watchdog"], 1)
    made.dog.begin(FAR_NS, cannot_abort)
    made.dog.look(0)
    for later in range(100):
        made.dog.end(made.dog.begin(FAR_NS + later, cannot_abort))
    assert len(made.timers) == 2
    made.dog.begin(FAR_NS - 1, cannot_abort)
    assert len(made.timers) == 3
    assert min(made.timers) > STALL_S


# ----------------------------------------------------------------------------------------------------------------------
# With the thread.


@pytest.fixture
def running() -> Iterator[tuple[Watchdog, list[str], list[float]]]:
    ends: list[str] = []
    timers: list[float] = []
    dog = Watchdog(lambda: ends.append("end"), timers.append)
    yield dog, ends, timers
    dog.stop()


Running = tuple[Watchdog, list[str], list[float]]


def soon_ns(seconds: float = 0.001) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


def test_the_thread_tells_what_is_late_to_stop_and_ends_the_process_and_then_sleeps(running: Running) -> None:
    dog, ends, timers = running
    told = threading.Event()
    far = dog.begin(soon_ns(1000), cannot_abort)
    dog.begin(soon_ns(), told.set, grace_s=0.01)
    assert told.wait(10)
    until(lambda: ends == ["end"], "the process ends")
    dog.end(far)
    dog.end(dog.begin(soon_ns(), cannot_abort))
    until(lambda: timers[-1] == 0, "nothing is watched, and no timer runs")


def test_nothing_is_told_to_stop_after_its_end_has_returned(running: Running) -> None:
    """Executions that end at their deadlines, one after the other, while the thread looks again and again."""
    dog = running[0]
    ended = [False]
    wrong: list[int] = []
    for number in range(200):
        ended[0] = False

        def abort(number: int = number) -> None:
            if ended[0]:
                wrong.append(number)

        late_ns = time.monotonic_ns()
        token = dog.begin(late_ns - LATE_NS + 50_000, abort)
        while time.monotonic_ns() < late_ns + 40_000 + 100 * number:
            pass
        dog.end(token)
        ended[0] = True
    assert wrong == []
