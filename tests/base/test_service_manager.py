"""What a process takes from its service manager, and what it tells it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.drivers import short_folder

from nnfmq.base.service_manager import ServiceManager, take_passed_fds
from nnfmq.hal.errors import InvalidArgument

VARIABLES = (
    "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _no_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


def passed(monkeypatch: pytest.MonkeyPatch, count: str, pid: int | None = None) -> list[int]:
    """Call the function in a process to which a manager says that it has passed `count` sockets."""
    monkeypatch.setenv("LISTEN_PID", str(os.getpid() if pid is None else pid))
    monkeypatch.setenv("LISTEN_FDS", count)
    monkeypatch.setenv("LISTEN_FDNAMES", "nnfmq.socket")
    return take_passed_fds()


@pytest.mark.parametrize("count", ["0", "-1", "two", "", "1025", "9" * 400])
def test_a_count_that_no_manager_sets_is_invalid(count: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgument, match=r"\$LISTEN_FDS is .*; allowed: 1 to 1024"):
        passed(monkeypatch, count)


def test_a_process_does_not_take_what_was_passed_to_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert passed(monkeypatch, "1", os.getppid()) == []
    assert not set(VARIABLES) & set(os.environ)  # nor does a child of it


def test_without_a_manager_nothing_is_passed_and_nobody_is_told() -> None:
    assert take_passed_fds() == []
    manager = ServiceManager.take()
    assert manager == ServiceManager()
    manager.tell(READY=1)


@pytest.mark.parametrize("is_abstract", [False, True])
def test_a_manager_gets_the_variables_one_on_each_line(
    is_abstract: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"@nnfmq-test-{os.getpid()}" if is_abstract else str(folder / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as received:
        received.bind(f"\0{address[1:]}" if is_abstract else address)
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        manager = ServiceManager.take()
        manager.tell(READY=1, STATUS="two\nlines")
        assert received.recv(4096) == b"READY=1\nSTATUS=two lines\n"
        assert "NOTIFY_SOCKET" not in os.environ


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 30_000_000),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 30_000_000),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, 0),
        ({"WATCHDOG_USEC": "soon"}, 0),
        ({}, 0),
    ],
)
def test_the_watchdog_is_for_the_process_that_it_names(
    variables: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ({"NOTIFY_SOCKET": "/run/systemd/notify"} | variables).items():
        monkeypatch.setenv(name, value)
    assert ServiceManager.take().watchdog_us == expected


def test_a_manager_that_is_gone_or_does_not_read_costs_its_messages(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = ServiceManager(str(folder / "notify"))
    manager.tell(READY=1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as received:
        received.bind(manager.address)
        for _ in range(1000):
            manager.tell(STATUS="x" * 1000)
        assert received.recv(4096) == b"STATUS=" + b"x" * 1000 + b"\n"
    reasons = [message.rpartition(": ")[2] for message in caplog.messages]
    assert reasons[0] == "No such file or directory"
    assert set(reasons[1:]) == {"Resource temporarily unavailable"}
