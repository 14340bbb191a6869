"""A driver of a real systemd: the commands of the page, reloads and restarts under load, and the watchdog."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.drivers import LIMIT_S, Process, one, until
from support.models import null_model
from support.page_blocks import blocks
from support.places import ROOT
from support.systemd import UserManager, needs_systemd, running_manager

import nnfmq

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("orphans")]
PAGE = ROOT / "docs" / "how-to" / "systemd.md"


@pytest.fixture(autouse=True)
def _with_systemd() -> None:
    needs_systemd()


@pytest.fixture
def manager(folder: Path) -> Iterator[UserManager]:
    """Return a manager that has listened and started a driver by the commands of the page."""
    with running_manager(folder) as found:
        (commands,) = (block.code for block in blocks(PAGE) if "systemctl --user enable" in block.code)
        done = found.run(commands)
        assert done.returncode == 0, done.stderr
        assert "0 of 62" in done.stdout
        yield found


@pytest.fixture
def client(manager: UserManager) -> Iterator[nnfmq.Client]:
    with nnfmq.connect(manager.runtime_directory / "nnfmq" / "nnfmq.sock", timeout=LIMIT_S) as made:
        yield made


def main_pid(manager: UserManager) -> int:
    return int(manager.property("MainPID"))


def test_systemd_shows_the_driver_and_its_clients(manager: UserManager, client: nnfmq.Client) -> None:
    assert main_pid(manager) == client.driver_pid
    assert manager.property("ActiveState") == "active"
    until(lambda: manager.property("StatusText") == "1 of 62 clients", "the driver tells its clients")


@pytest.mark.parametrize("command", ["reload", "restart"])
def test_reloads_and_restarts_lose_no_request(manager: UserManager, client: nnfmq.Client, command: str) -> None:
    with client.device("reference").prepare(null_model()) as model, model.burst() as burst:

        def has_moved() -> bool:
            return burst.execute(one(1)) == (one(1),) and client.driver_pid == main_pid(manager)

        for _ in range(2):
            before = client.driver_pid
            done = manager.run(f"systemctl --user {command} nnfmq")
            assert (done.returncode, done.stderr) == (0, "")
            assert main_pid(manager) != before
            until(has_moved, "the client moves")
    assert manager.property("NRestarts") == "0"


def test_a_reload_fails_if_the_successor_does_not_start_and_the_driver_goes_on(
    manager: UserManager, client: nnfmq.Client
) -> None:
    file = manager.folder / ".config" / "nnfmq" / "nnfmq.toml"
    file.parent.mkdir()
    file.write_text("memory_mib = -1\n")
    done = manager.run("systemctl --user reload nnfmq")
    assert (done.returncode, "Job for nnfmq.service failed" in done.stderr) == (1, True)
    assert (manager.property("ActiveState"), main_pid(manager)) == ("active", client.driver_pid)
    file.write_text("memory_mib = 100\n")
    assert manager.run("systemctl --user reload nnfmq").returncode == 0
    until(lambda: client.statistics().memory_limit_bytes == 100 << 20, "the client moves to the successor")


def test_a_driver_that_hangs_is_started_again(manager: UserManager, client: nnfmq.Client) -> None:
    folder = manager.folder / ".config" / "systemd" / "user" / "nnfmq.service.d"
    folder.mkdir()
    (folder / "soon.conf").write_text("[Service]\nWatchdogSec=1\nRestartSec=0\n")
    assert manager.run("systemctl --user daemon-reload; systemctl --user restart nnfmq").returncode == 0
    with Process(main_pid(manager)) as hanging:
        hanging.send(signal.SIGSTOP)
        hanging.wait_for_end()
        until(lambda: main_pid(manager) not in (0, hanging.pid), "systemd starts the next driver")
    assert manager.property("NRestarts") == "1"
    until(lambda: bool(client.devices()) and client.driver_pid == main_pid(manager), "the client connects to it")


def test_systemd_keeps_the_socket_of_a_driver_that_is_stopped(manager: UserManager, client: nnfmq.Client) -> None:
    assert manager.run("systemctl --user stop nnfmq").returncode == 0
    assert client.devices()  # which starts the next one
    assert manager.property("ActiveState") == "active"
