"""A driver that a service manager has started: its sockets, what it tells the manager, and restarts under load."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from support import tiers
from support.drivers import LIMIT_S, Daemon, InThread, Program, one, running_daemon, until
from support.model_folders import RepositoryPeer, add_version, adder
from support.models import null_model
from support.service_manager import Manager

import nnfmq

RESTARTS = 100 if tiers.IS_DEEP else 2


@pytest.fixture
def path(folder: Path) -> Path:
    return folder / "d.sock"


@pytest.fixture
def manager(path: Path) -> Iterator[Manager]:
    with Manager(path) as found:
        yield found


@contextmanager
def driver_of(manager: Manager, *options: str | Path, environment: dict[str, str] | None = None) -> Iterator[Daemon]:
    """Run a driver that has told that it is ready."""
    daemon = manager.started(*options, environment=environment)
    try:
        yield daemon
        stop(daemon)
    finally:
        daemon.close()


def stop(daemon: Daemon) -> None:
    """End a driver as the manager would, unless it has ended."""
    if not daemon.process.has_exited():
        daemon.process.send(signal.SIGTERM)
    assert (daemon.program.wait(), "Traceback" in daemon.program.errors()) == (0, False)


def executes(client: nnfmq.Client, value: float) -> bool:
    with client.device("reference").prepare(null_model()) as model, model.burst() as burst:
        return burst.execute(one(value)) == (one(value),)


# ----------------------------------------------------------------------------------------------------------------------
# Sockets.


def test_a_client_that_connects_before_the_driver_starts_waits_for_it(manager: Manager) -> None:
    call = InThread.start(lambda: nnfmq.connect(manager.path, timeout=LIMIT_S))
    call.wait_until_asleep()
    with driver_of(manager), call.wait().value as client:
        assert executes(client, 1)
        client.close()


@contextmanager
def connecting(manager: Manager, *, is_read: bool) -> Iterator[InThread]:
    """Yield a call of `connect` whose connection a driver has closed that ended, before or after it read the Hello."""
    call = InThread.start(lambda: nnfmq.connect(manager.path, timeout=LIMIT_S))
    accepted, _ = manager.listeners[0].accept()
    with accepted:
        if is_read:
            assert accepted.recv(65536)
    yield call


def test_a_client_whose_Hello_a_driver_had_not_read_when_it_ended_gets_the_next_one(manager: Manager) -> None:
    with connecting(manager, is_read=False) as call, driver_of(manager), call.wait().value as client:
        assert executes(client, 1)
        client.close()


def test_a_driver_that_ends_after_it_has_read_a_Hello_is_an_error_immediately(manager: Manager) -> None:
    """As when a worker crashes: another attempt could let the next one crash as well."""
    with connecting(manager, is_read=True) as call:
        error = call.wait().error
        assert isinstance(error, nnfmq.DeviceUnavailable) and "exited before it replied" in str(error)


@pytest.mark.parametrize("is_entered", [True, False], ids=["in async with", "at its first call"])
@pytest.mark.parametrize("recovers", [True, False], ids=["recovers", "does not"])
def test_a_task_whose_Hello_a_driver_had_not_read_when_it_ended_gets_the_next_one(
    manager: Manager, recovers: bool, is_entered: bool
) -> None:
    async def connect() -> None:
        # It returns while the driver may still start.
        connection = nnfmq.connect(manager.path, timeout=LIMIT_S, recover=recovers)
        manager.listeners[0].accept()[0].close()
        with driver_of(manager):
            if is_entered:
                await connection.__aenter__()
            assert executes(connection, 1)
            assert connection.recovery == (0, 0)  # no driver that has accepted it has died
            await connection.__aexit__(None, None, None)

    asyncio.run(connect())


def test_a_driver_leaves_the_socket_to_the_manager_when_it_ends(manager: Manager) -> None:
    for _ in range(2):
        with driver_of(manager) as daemon:
            assert daemon.program.line() == f"nnfmq: listening on {manager.path}"
            with daemon.connect() as client:
                assert executes(client, 1)
        assert manager.path.is_socket()


def test_the_variables_of_the_manager_are_for_the_driver_alone(folder: Path, path: Path) -> None:
    (folder / "models").mkdir()
    with (
        Manager(path, has_models=True) as manager,
        driver_of(manager, "--models", folder / "models", environment={"WATCHDOG_USEC": "60000000"}) as daemon,
    ):
        until(lambda: bool(daemon.process.children()), "the model repository is forked")
        (repository,) = daemon.process.children()
        command = Path(f"/proc/{repository}/cmdline")
        until(lambda: b"nnfmq.repository" in command.read_bytes(), "it has its own environment")
        names = {
            variable.split(b"=")[0].decode()
            for variable in Path(f"/proc/{repository}/environ").read_bytes().split(b"\0")
        }
        assert "PATH" in names
        assert not {name for name in names if name.startswith(("LISTEN_", "NOTIFY_", "WATCHDOG_"))}


def test_models_by_name_outlive_the_driver_with_a_socket_of_their_own(folder: Path, path: Path) -> None:
    (folder / "models").mkdir()
    add_version(folder / "models", "adder", 1, adder(1))
    with Manager(path, has_models=True) as manager:
        with driver_of(manager, "--models", folder / "models") as daemon:
            client = daemon.connect(recover=True)
            model = client.model("adder", timeout=LIMIT_S)
            stop(daemon)
        with driver_of(manager, "--models", folder / "models"):
            with RepositoryPeer(path) as peer:
                peer.wait_for("adder", version=1)
            found = model.execute([np.array([1, 2, 3, 4], np.float32)], timeout=LIMIT_S)
            assert found[0].tolist() == [[2, 3, 4, 5]]
            model.close()
            client.close()


def test_another_driver_does_not_take_the_path_of_the_manager(manager: Manager) -> None:
    arguments = ["-P", "-m", "nnfmq", "serve", "--socket", manager.path]
    with Program.start(arguments) as program:  # while no driver runs
        assert program.wait() == 1
        assert f"nnfmq: error: another driver already listens at {manager.path}: " in program.errors()
    with driver_of(manager) as daemon, Program.start([*arguments, "--replace"]) as program:
        assert program.wait() == 1
        assert "its service manager restarts it" in program.errors()
        with daemon.connect() as client:
            assert executes(client, 1)


def test_a_driver_does_not_remove_the_socket_that_has_replaced_its_own(path: Path) -> None:
    """As when nnfmq.socket is started while a driver runs that was started by hand: systemd binds again."""
    with running_daemon(path) as daemon:
        path.unlink()
        with Manager(path) as manager:
            stop(daemon)
            assert path.is_socket()
            with driver_of(manager) as second, second.connect() as client:
                assert executes(client, 1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--replace"], "a driver that a service manager starts with its socket replaces no other"),
        (["--socket", "/run/other.sock"], "--socket names /run/other.sock: leave out --socket"),
    ],
)
def test_options_that_contradict_the_manager_are_refused(manager: Manager, options: list[str], text: str) -> None:
    with manager.start(*options) as program:
        assert program.wait() == 1
        assert text in program.errors()
    assert manager.path.is_socket()


# ----------------------------------------------------------------------------------------------------------------------
# What it tells.


def test_the_manager_is_told_each_state_and_the_clients(manager: Manager, folder: Path) -> None:
    file = folder / "nnfmq.toml"
    file.write_text("process_clients = 5\n")
    environment = {"NNFMQ_CONFIG": str(file), "NNFMQ_DRAIN_S": "3", "NNFMQ_LOG_LEVEL": "error"}
    with driver_of(manager, environment=environment) as daemon:
        manager.wait_for(STATUS="0 of 62 clients")
        with daemon.connect():
            manager.wait_for(STATUS="1 of 62 clients")
        manager.wait_for(STATUS="0 of 62 clients")
        before_us = time.monotonic_ns() // 1000
        daemon.process.send(signal.SIGHUP)
        reloading = manager.wait_for(RELOADING="1")
        assert before_us <= int(reloading["MONOTONIC_USEC"]) <= time.monotonic_ns() // 1000
        assert manager.message() == {"READY": "1"}
        daemon.process.send(signal.SIGTERM)
        ending = manager.wait_for(STOPPING="1")
        assert int(ending["EXTEND_TIMEOUT_USEC"]) == 13_000_000
        assert daemon.program.wait() == 0


def test_the_watchdog_hears_of_a_supervisor_that_works_and_not_of_one_that_does_not(manager: Manager) -> None:
    with driver_of(manager, environment={"WATCHDOG_USEC": "20000"}) as daemon:
        for _ in range(5):
            manager.wait_for(WATCHDOG="1")
        with daemon.process.stopped():
            while manager.message(0):
                pass
            assert manager.message(0.1) == {}
        manager.wait_for(WATCHDOG="1")


def test_a_driver_without_sockets_of_the_manager_tells_it_too(manager: Manager, folder: Path) -> None:
    with running_daemon(folder / "own.sock", environment=manager.environment):
        manager.wait_for(READY="1")
    manager.wait_for(STOPPING="1")


# ----------------------------------------------------------------------------------------------------------------------
# Restarts.


@contextmanager
def under_load(path: Path) -> Iterator[Callable[[], None]]:
    """Execute again and again in the block, and check that no execution fails. Yield what waits for the next one."""
    ended, counts = threading.Event(), [0]

    def execute() -> None:
        with (
            nnfmq.connect(path, timeout=LIMIT_S) as client,
            client.device("reference").prepare(null_model()) as model,
            model.burst() as burst,
        ):
            while not ended.is_set():
                counts[0] += burst.execute(one(counts[0])) == (one(counts[0]),)

    def wait_for_next() -> None:
        before = counts[0]
        until(lambda: counts[0] > before or not thread.is_running, "an execution")
        assert thread.is_running, thread.error

    thread = InThread.start(execute)
    try:
        yield wait_for_next
    finally:
        ended.set()
    assert thread.wait().error is None


def test_restarts_lose_no_request(manager: Manager) -> None:
    with ExitStack() as last, under_load(manager.path) as wait_for_next:
        for _ in range(RESTARTS):
            with driver_of(manager):
                wait_for_next()
        last.enter_context(driver_of(manager))
        wait_for_next()


@pytest.mark.skipif(shutil.which("systemd-socket-activate") is None, reason="there is no systemd-socket-activate")
def test_systemd_starts_a_driver_when_a_client_connects(path: Path) -> None:
    command = ["systemd-socket-activate", "--seqpacket", "-l", str(path)]
    with subprocess.Popen(
        [*command, sys.executable, "-P", "-m", "nnfmq", "serve"], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    ) as systemd:
        try:
            until(path.is_socket, "systemd listens")
            with nnfmq.connect(path, timeout=LIMIT_S) as client:
                assert executes(client, 1)
                assert client.driver_pid == systemd.pid  # it has become the driver
            systemd.terminate()
            assert systemd.wait(LIMIT_S) == 0
        finally:
            systemd.kill()
    assert path.is_socket()  # which systemd would have removed
