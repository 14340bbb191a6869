"""SIGHUP: a driver reads its configuration again, and says what has become of each change."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.drivers import Daemon, running_daemon, until

import nnfmq


@pytest.fixture
def file(folder: Path) -> Path:
    path = folder / "nnfmq.toml"
    path.write_text("process_clients = 1\nmemory_mib = 512\n")
    return path


@pytest.fixture
def configured(folder: Path, file: Path) -> Iterator[Daemon]:
    with running_daemon(folder / "d.sock", environment={"NNFMQ_CONFIG": str(file)}) as daemon:
        yield daemon


def admitted(daemon: Daemon) -> int:
    """Return how many clients of this process the driver serves, at most 3."""
    with ExitStack() as stack:
        for count in range(3):
            try:
                stack.enter_context(daemon.connect())
            except nnfmq.ResourceExhaustedTransient:
                return count
    return 3


def reload(daemon: Daemon, file: Path, text: str, logged: str) -> None:
    file.write_text(text)
    daemon.process.send(signal.SIGHUP)
    until(lambda: logged in daemon.program.errors(), f"the log has {logged!r}")
    until(lambda: not daemon.process.children(), "no worker is left")


def test_settings_that_can_change_do_so_and_the_others_are_named(configured: Daemon, file: Path) -> None:
    assert admitted(configured) == 1
    reload(configured, file, "process_clients = 2\nmemory_mib = 64\n", "process_clients is 2 instead of 1, at once")
    assert (
        "memory_mib stays 512 until the driver is restarted; the configuration says 64" in configured.program.errors()
    )
    assert admitted(configured) == 2


@pytest.mark.parametrize("text", ["process_clients = 0", "process_clients =", "process_cleints = 2"])
def test_an_invalid_file_changes_nothing_and_the_log_says_why(configured: Daemon, file: Path, text: str) -> None:
    assert admitted(configured) == 1
    reload(configured, file, text, "the configuration is not reloaded: ")
    assert str(file) in configured.program.errors()
    assert admitted(configured) == 1
    reload(configured, file, "process_clients = 2", "process_clients is 2 instead of 1, at once")
    assert admitted(configured) == 2


def test_clients_that_a_driver_serves_go_on(configured: Daemon, file: Path) -> None:
    with configured.connect() as client:
        file.write_text("process_clients = 2")
        configured.process.send(signal.SIGHUP)
        until(lambda: "process_clients is 2" in configured.program.errors(), "it is reloaded")
        assert client.devices()
