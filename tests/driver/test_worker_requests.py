"""What a supervisor writes for workers, which are not trusted. The writing processes are doubles."""

from __future__ import annotations

from typing import Any

import pytest

from nnfmq.base import settings
from nnfmq.driver.process import worker_requests
from nnfmq.driver.process.event_loop import EventLoop
from nnfmq.driver.process.worker_requests import DriverRequests


class WritingProcess:
    """A process that has not ended until the test says so."""

    pid = 1

    def __init__(self, started: list[WritingProcess]) -> None:
        started.append(self)

    def fileno(self) -> int:
        return 0

    def is_stopped(self) -> bool:
        return False

    def send(self, _number: object) -> None:
        pass

    def reap(self) -> int:
        return 0


class Loop(EventLoop):
    """A loop that waits for nothing."""

    def add_reader(self, fd: int, callback: Any) -> None:
        if fd == 0:
            self.on_exit = callback
        else:
            super().add_reader(fd, callback)


def test_no_more_bytes_are_being_written_than_the_cache_may_have(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started: list[WritingProcess] = []
    monkeypatch.setattr(worker_requests, "fork_child", lambda *_, **_options: WritingProcess(started))
    monkeypatch.setenv(settings.CACHE_MIB.variable, "1")
    name, mib = "0" * 64, 1 << 20
    with Loop() as loop:
        requests = DriverRequests(loop, statistics=None, set_class=lambda *_: "")  # type: ignore[arg-type]
        requests.store([(name, mib - 1)], 0, 0)
        requests.store([(name, 2)], 0, 0)
        assert len(started) == 1
        assert f"a program is not added to the cache: 1 of {mib - 1} bytes are being written" in caplog.text
        loop.on_exit()
        requests.store([(name, mib)], 0, 0)
        assert len(started) == 2
        loop.on_exit()
