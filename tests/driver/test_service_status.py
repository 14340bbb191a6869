"""A supervisor tells its manager that it works while its event loop turns, and new texts at most each second."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.drivers import short_folder

from nnfmq.base.service_manager import ServiceManager
from nnfmq.driver.process import service_status
from nnfmq.driver.process.event_loop import EventLoop
from nnfmq.driver.process.service_status import ServiceStatus

PERIOD_US = 20_000


@pytest.fixture
def manager() -> Iterator[socket.socket]:
    with short_folder() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as received:
        received.bind(str(folder / "notify"))
        received.setblocking(False)
        yield received


def messages(manager: socket.socket) -> list[str]:
    """Return what has been told since the last call."""
    found = []
    while True:
        try:
            found.append(manager.recv(4096).decode().strip())
        except BlockingIOError:
            return found


def told_by(loop: EventLoop, manager: socket.socket, watchdog_us: int = 0) -> ServiceStatus:
    return ServiceStatus(loop, ServiceManager(str(Path(manager.getsockname())), watchdog_us))


def test_the_watchdog_hears_of_a_loop_that_turns_and_of_no_other(manager: socket.socket) -> None:
    with EventLoop() as loop:
        told_by(loop, manager, PERIOD_US).ready()
        assert messages(manager) == ["READY=1", "WATCHDOG=1"]
        end_s = time.monotonic() + 3 * PERIOD_US / 1e6
        while time.monotonic() < end_s:  # as a callback that does not return
            assert messages(manager) == []
        loop.run_once()
        assert messages(manager) == ["WATCHDOG=1"]
        begin_s = time.monotonic()
        loop.run_once()
        assert messages(manager) == ["WATCHDOG=1"]
        assert time.monotonic() - begin_s >= 0.4 * PERIOD_US / 1e6


def test_without_a_watchdog_the_loop_sleeps(manager: socket.socket) -> None:
    with EventLoop() as loop:
        told_by(loop, manager).ready()
        assert messages(manager) == ["READY=1"]
        assert loop._timeout_s(None) == -1


def test_texts_that_change_fast_are_told_once_a_second(manager: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_status, "_INTERVAL_S", 0.05)
    with EventLoop() as loop:
        status = told_by(loop, manager)
        for number in range(3):
            status.update(f"{number} clients")
        begin_s = time.monotonic()
        loop.run_once()
        assert messages(manager) == ["STATUS=2 clients"]
        status.update("3 clients")
        status.update("2 clients")
        status.update("4 clients")
        loop.run_once()
        assert messages(manager) == ["STATUS=4 clients"]
        assert time.monotonic() - begin_s >= 0.05
        status.update("4 clients")
        assert loop._timeout_s(None) == -1
