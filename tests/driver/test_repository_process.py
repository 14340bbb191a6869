"""The process of the model repository: started, started again with growing pauses, ended. The process is a double."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nnfmq.base.channel import Listener
from nnfmq.driver.process import workers
from nnfmq.driver.process.event_loop import EventLoop, Timer
from nnfmq.driver.process.workers import (
    HEARTBEAT_CHECK_S,
    HEARTBEATS_MISSED_AT_START,
    HEARTBEATS_MISSED_MAX,
    PAUSE_MAX_S,
    PAUSE_S,
    STOP_TIMEOUT_S,
    RepositoryProcess,
)
from nnfmq.hal.errors import GeneralFailure


class FakeProcess:
    """A child that has exited already."""

    pid = 2**22 + 1  # above the kernel's limit

    def __init__(self) -> None:
        self._read_fd, write_fd = os.pipe()
        os.close(write_fd)  # so the other end is readable
        self.signals: list[signal.Signals] = []
        self.ends = True
        self.is_reaped = False

    def fileno(self) -> int:
        return self._read_fd

    def send(self, number: signal.Signals) -> None:
        self.signals.append(number)

    def has_exited(self, wait_s: float) -> bool:
        assert 0 < wait_s <= STOP_TIMEOUT_S
        return self.ends

    def reap(self) -> int:
        self.is_reaped = True
        os.close(self._read_fd)
        return 3


class Setup:
    """A repository process, and the pauses after which it is to be started again."""

    def __init__(self, loop: EventLoop, listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        self.pauses: list[float] = []
        self.started: list[FakeProcess] = []
        self.error: Exception | None = None
        monkeypatch.setattr(workers, "fork_child", self._fork)
        monkeypatch.setattr(workers.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(loop, "call_at", self._call_at)
        self.look: Callable[[], None] = lambda: None
        self.heartbeat_fd = -1
        self.loop = loop
        self.process = RepositoryProcess(loop, listener, Path("d.sock"), Path("/models"))

    def close(self) -> None:
        if self.heartbeat_fd >= 0:
            os.close(self.heartbeat_fd)
        self.heartbeat_fd = -1

    def _call_at(self, time_s: float, callback: Callable[[], None]) -> Timer:
        if callback == self.process.start:
            self.pauses.append(time_s - self.now_s)
        else:
            assert time_s - self.now_s == pytest.approx(HEARTBEAT_CHECK_S)
            self.look = callback
        return Timer(callback)

    def _fork(
        self, _run: Any, keep_fds: list[int], _name: str, *, at_parent_exit: signal.Signals, log_fd: int
    ) -> FakeProcess:
        assert at_parent_exit is signal.SIGKILL
        for fd in (*keep_fds, log_fd):
            os.fstat(fd)
        self.close()
        self.heartbeat_fd = os.dup(keep_fds[-1])
        if self.error is not None:
            raise self.error
        self.started.append(FakeProcess())
        return self.started[-1]


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setup]:
    with EventLoop() as loop, Listener.create(tmp_path / "socket") as listener:
        made = Setup(loop, listener, monkeypatch)
        yield made
        made.process.end()
        made.close()


def test_the_pause_before_the_next_start_doubles_up_to_a_limit(setup: Setup) -> None:
    for _ in range(12):
        setup.process.start()
        setup.now_s += 1
        setup.loop.run_once(time.monotonic())
    assert setup.pauses[:3] == pytest.approx([PAUSE_S, 2 * PAUSE_S, 4 * PAUSE_S])
    assert setup.pauses[-1] == pytest.approx(PAUSE_MAX_S)
    assert len(setup.started) == 12


def test_after_a_long_life_the_pause_is_short_again(setup: Setup) -> None:
    for life_s in (1, 1, 61):
        setup.process.start()
        setup.now_s += life_s
        setup.loop.run_once(time.monotonic())
    assert setup.pauses == pytest.approx([PAUSE_S, 2 * PAUSE_S, PAUSE_S])


@pytest.mark.parametrize("error", [OSError(12, "Cannot allocate memory"), GeneralFailure("several threads")])
def test_a_start_that_fails_is_tried_again(setup: Setup, error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    setup.error = error
    setup.process.start()
    assert "the model repository cannot be started" in caplog.text
    assert setup.pauses == pytest.approx([PAUSE_S])
    setup.error = None
    setup.process.start()
    assert len(setup.started) == 1


def test_a_process_that_does_not_end_is_waited_for_with_a_limit_and_reaped_later(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    setup.process.start()
    (process,) = setup.started
    process.ends = False
    setup.process.end()
    assert "the model repository does not end" in caplog.text
    assert (process.signals, process.is_reaped) == ([signal.SIGKILL], False)
    setup.loop.run_once(time.monotonic())  # it has ended now
    assert process.is_reaped


def test_a_process_without_a_beat_is_killed_after_some_looks_and_gets_more_of_them_at_its_start(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    setup.process.start()
    os.set_blocking(setup.heartbeat_fd, True)  # which is no reason for the supervisor to wait
    for _ in range(HEARTBEATS_MISSED_AT_START - 1):
        setup.look()
    assert setup.started[0].signals == []
    os.write(setup.heartbeat_fd, b"\0")
    for _ in range(HEARTBEATS_MISSED_MAX):
        setup.look()
        assert setup.started[0].signals == []
    setup.look()
    assert setup.started[0].signals == [signal.SIGKILL]
    assert "the model repository has not answered for 15 s: it is replaced" in caplog.text
    caplog.clear()


def test_after_the_end_it_is_not_started_again(setup: Setup) -> None:
    setup.process.start()
    setup.process.end()
    setup.process.end()
    setup.process.start()
    assert len(setup.started) == 1 and setup.started[0].signals == [signal.SIGKILL]
