"""SIGUSR2 and `nnfmq serve --restart`: a driver starts its own command again, in a process that replaces it.

Also the driver of a service manager.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from support.drivers import LIMIT_S, Daemon, InThread, Process, Program, one, running_daemon, until
from support.model_folders import add_version, adder
from support.models import null_model
from support.service_manager import Manager

import nnfmq

pytestmark = pytest.mark.usefixtures("orphans")
STARTED = "is started to replace this driver"
FAILED = "the successor did not start, and this driver goes on"


@pytest.fixture
def path(folder: Path) -> Path:
    return folder / "d.sock"


@contextmanager
def successor_of(daemon: Daemon) -> Iterator[Process]:
    """Let a driver start its successor, and yield that when it has replaced the driver; end it after the block."""
    daemon.process.send(signal.SIGUSR2)
    assert daemon.program.line() == f"nnfmq: listening on {daemon.path}"
    with daemon.connect() as client:
        successor = Process(client.driver_pid)
    with successor:
        try:
            yield successor
        finally:
            with suppress(ProcessLookupError):  # it was replaced in turn
                successor.send(signal.SIGTERM)
            successor.wait_for_end()


def restart(path: Path, *options: str | Path, environment: dict[str, str] | None = None) -> Program:
    """Start the command that restarts the driver at `path`."""
    words = ["-P", "-m", "nnfmq", "serve", "--restart", "--socket", path, *options]
    return Program.start(words, environment)


def ends_well(daemon: Daemon) -> bool:
    return (daemon.program.wait(), "Traceback" in daemon.program.errors()) == (0, False)


# ----------------------------------------------------------------------------------------------------------------------
# A driver that was started by hand.


def test_clients_move_to_the_successor_and_lose_no_request(path: Path) -> None:
    with (
        running_daemon(path) as old,
        nnfmq.connect(path, timeout=LIMIT_S) as client,
        client.device("reference").prepare(null_model()) as model,
        model.burst() as burst,
        successor_of(old) as new,
    ):
        until(lambda: burst.execute(one(1)) == (one(1),) and client.driver_pid == new.pid, "the client moves")
        assert new.pid != old.process.pid
        assert ends_well(old)
        assert burst.execute(one(2)) == (one(2),)
    assert not path.exists()


def test_the_successor_reads_the_environment_and_the_configuration_of_the_start_again(path: Path, folder: Path) -> None:
    file = folder / "nnfmq.toml"
    file.write_text("memory_mib = 100\n")
    environment = {"NNFMQ_CONFIG": str(file), "NNFMQ_USER": ""}
    with running_daemon(path, environment=environment, options=["--extensions", "nnfmq.tflite"]) as old:
        with old.connect() as client:
            assert client.statistics().memory_limit_bytes == 100 << 20
        file.write_text("memory_mib = 200\n")
        with successor_of(old) as new, old.connect() as client:
            assert client.statistics().memory_limit_bytes == 200 << 20
            command = Path(f"/proc/{new.pid}/cmdline").read_bytes().split(b"\0")
            assert command[-6:-3] == [b"--extensions", b"nnfmq.tflite", b"--replace"]


def test_a_successor_can_be_replaced_in_turn(path: Path) -> None:
    with running_daemon(path) as first, successor_of(first) as second:
        assert ends_well(first)
        second.send(signal.SIGUSR2)
        assert first.program.line() == f"nnfmq: listening on {path}"  # they have one stdout
        with nnfmq.connect(path, timeout=LIMIT_S) as client, Process(client.driver_pid) as third:
            assert third.pid not in (first.process.pid, second.pid)
            client.close()
            second.wait_for_end()
            third.send(signal.SIGTERM)
            third.wait_for_end()


def test_the_driver_goes_on_if_its_successor_cannot_start(path: Path, folder: Path) -> None:
    file = folder / "nnfmq.toml"
    file.write_text("")
    with running_daemon(path, environment={"NNFMQ_CONFIG": str(file)}) as daemon, daemon.connect() as client:
        file.write_text("memory_mib = -1\n")
        daemon.process.send(signal.SIGUSR2)
        until(lambda: FAILED in daemon.program.errors(), "the successor fails")
        assert "memory_mib" in daemon.program.errors()
        assert client.devices()
        daemon.connect().close()
        file.write_text("")
        with successor_of(daemon):
            client.close()
            assert ends_well(daemon)


@pytest.fixture
def waiting(folder: Path) -> Iterator[tuple[dict[str, str], Path]]:
    """Yield an environment, and a file that lets drivers that start with it from then on wait before they begin."""
    pipe = folder / "go"
    os.mkfifo(pipe)
    library = folder / "library"
    library.mkdir()
    return {"PYTHONPATH": str(library), "NNFMQ_LOG_LEVEL": "info"}, library / "sitecustomize.py"


def start_waiting(daemon: Daemon, file: Path) -> Process:
    """Let a driver start a successor, which waits until it is killed; return it."""
    file.write_text(f"open({str(file.parent.parent / 'go')!r}).read()\n")
    daemon.process.send(signal.SIGUSR2)
    until(lambda: STARTED in daemon.program.errors(), "the successor is started")
    line = next(line for line in daemon.program.errors().splitlines() if STARTED in line)
    return Process(int(line.split("process ")[1].split()[0]))


def test_the_driver_goes_on_if_its_successor_is_killed(path: Path, waiting: tuple[dict[str, str], Path]) -> None:
    environment, file = waiting
    with running_daemon(path, environment=environment) as daemon, start_waiting(daemon, file) as successor:
        daemon.process.send(signal.SIGUSR2)
        until(lambda: "this driver has one already" in daemon.program.errors(), "a second signal is ignored")
        successor.kill()
        until(lambda: FAILED in daemon.program.errors(), "the successor's exit is noticed")
        daemon.connect().close()


def test_a_driver_that_ends_ends_the_successor_that_it_has_started(
    path: Path, waiting: tuple[dict[str, str], Path]
) -> None:
    environment, file = waiting
    with running_daemon(path, environment=environment) as daemon, start_waiting(daemon, file) as successor:
        daemon.end()
        successor.wait_for_end()


def test_a_driver_that_is_killed_leaves_its_place_to_the_successor(
    path: Path, waiting: tuple[dict[str, str], Path]
) -> None:
    environment, file = waiting
    with running_daemon(path, environment=environment) as daemon, start_waiting(daemon, file) as successor:
        daemon.kill()
        (file.parent.parent / "go").write_text("")
        call = InThread.start(lambda: nnfmq.connect(path, timeout=LIMIT_S, wait=True))
        with call.wait().value as client:
            assert client.driver_pid == successor.pid
        successor.send(signal.SIGTERM)
        successor.wait_for_end()


def test_a_driver_that_exits_with_its_parent_starts_no_successor(path: Path) -> None:
    with running_daemon(path, options=["--exit-with", str(os.getpid())]) as daemon:
        daemon.process.send(signal.SIGUSR2)
        until(lambda: "no successor is started" in daemon.program.errors(), "the signal is refused")
        daemon.connect().close()


WITHOUT_PIDFD = """
import errno, os, sys
from nnfmq import cli
from nnfmq.base import processes
from nnfmq.driver.process import children, restart

class System:
    def __getattr__(self, name):
        return getattr(os, name)

    def pidfd_open(self, pid):
        if pid in processes.children(os.getpid()):
            return os.pidfd_open(pid)
        print(pid, flush=True)
        raise OSError(errno.EMFILE, "Too many open files")

def fork_orphan(run, name, real=children.fork_orphan):
    children.os = System()
    try:
        return real(run, name)
    finally:
        children.os = os

restart.fork_orphan = fork_orphan
sys.exit(cli.main(["serve", "--socket", sys.argv[1]]))
"""


def test_a_successor_that_cannot_be_watched_exits_before_it_begins(path: Path) -> None:
    with running_daemon(path, arguments=["-P", "-c", WITHOUT_PIDFD, path]) as daemon:
        daemon.process.send(signal.SIGUSR2)
        with Process(int(daemon.program.line())) as successor:
            successor.wait_for_end()
            assert os.waitpid(successor.pid, os.WNOHANG) == (successor.pid, 0)
        until(lambda: f"{FAILED}: [Errno 24] Too many open files" in daemon.program.errors(), "the driver goes on")
        daemon.connect().close()


# ----------------------------------------------------------------------------------------------------------------------
# `nnfmq serve --restart`: who asks learns what has become of it.


def test_who_asks_for_a_restart_waits_until_the_successor_listens(path: Path) -> None:
    with running_daemon(path) as old, restart(old.path) as command:
        assert old.program.line() == f"nnfmq: listening on {path}"
        with nnfmq.connect(path, timeout=LIMIT_S) as client, Process(client.driver_pid) as new:
            assert command.line() == f"nnfmq: process {new.pid} listens on {path}"
            assert command.wait() == 0
            assert ends_well(old)
            client.close()
            new.send(signal.SIGTERM)
            new.wait_for_end()


def test_who_asks_learns_that_the_successor_has_failed(path: Path, folder: Path) -> None:
    file = folder / "nnfmq.toml"
    file.write_text("")
    with running_daemon(path, environment={"NNFMQ_CONFIG": str(file)}) as daemon:
        file.write_text("memory_mib = -1\n")
        with restart(daemon.path) as command:  # which reads another configuration
            assert command.wait() == 1
            assert command.errors() == f"nnfmq: error: {FAILED}; the log has its reason\n"
        assert "memory_mib" in daemon.program.errors()
        daemon.connect().close()


def test_a_configuration_that_is_not_valid_is_an_error_before_the_driver_is_asked(path: Path, folder: Path) -> None:
    file = folder / "nnfmq.toml"
    file.write_text("memory_mib = -1\n")
    environment = {"NNFMQ_CONFIG": str(file), "NNFMQ_LOG_LEVEL": "info"}
    with running_daemon(path) as daemon, restart(daemon.path, environment=environment) as command:
        assert command.wait() == 1
        assert "memory_mib" in command.errors()
        assert STARTED not in daemon.program.errors()


def test_only_one_who_asks_gets_a_successor_and_all_hear_that_the_driver_ends(
    path: Path, waiting: tuple[dict[str, str], Path]
) -> None:
    environment, file = waiting
    with running_daemon(path, environment=environment) as daemon:
        file.write_text(
            f"import sys\n'--replace' in sys.orig_argv and open({str(file.parent.parent / 'go')!r}).read()\n"
        )
        with restart(daemon.path) as first, restart(daemon.path) as second:
            until(lambda: any(each.popen.poll() is not None for each in (first, second)), "one of them is refused")
            refused, waits = (first, second) if first.popen.poll() is not None else (second, first)
            assert (refused.wait(), "this driver has one already" in refused.errors()) == (1, True)
            daemon.end()
            assert (waits.wait(), "the driver ends" in waits.errors()) == (1, True)


def test_a_restart_needs_a_driver_and_no_other_option(path: Path) -> None:
    with running_daemon(path) as daemon, restart(daemon.path, "--memory", "100") as command:
        assert (command.wait(), "leave out --memory" in command.errors()) == (1, True)
    for missing in (path, path.parent / "no" / "d.sock"):
        with restart(missing) as command:
            assert (command.wait(), f"no driver listens at {missing}" in command.errors()) == (1, True)


def test_a_driver_that_starts_no_successor_says_so_to_who_asks(path: Path) -> None:
    with running_daemon(path, options=["--exit-with", str(os.getpid())]) as daemon, restart(daemon.path) as command:
        assert (command.wait(), "ends with its parent" in command.errors()) == (1, True)


# ----------------------------------------------------------------------------------------------------------------------
# A driver of a service manager: the manager's sockets pass to the successor, which becomes the service's main process.


def started_by(manager: Manager, *options: str | Path, environment: dict[str, str] | None = None) -> Daemon:
    """Return a driver that a manager has started, and that listens."""
    daemon = manager.started(*options, environment=environment)
    assert daemon.program.line() == f"nnfmq: listening on {manager.path}"
    return daemon


@pytest.mark.parametrize("passes_models", [False, True])
def test_the_manager_learns_which_process_the_service_is(folder: Path, *, passes_models: bool) -> None:
    models = folder / "models"
    add_version(models, "add", 1, adder(1))
    with Manager(folder / "d.sock", has_models=passes_models) as manager:
        old = started_by(manager, "--models", models)
        told = InThread.start(lambda: until_ready(manager))
        with old, successor_of(old) as new:
            names = [next(iter(message)) for message in told.wait().value if "STATUS" not in message]
            assert names == ["RELOADING", "MAINPID", "READY"]
            assert {"MAINPID": str(new.pid)} in told.value
            assert ends_well(old)
            with nnfmq.connect(manager.path, timeout=LIMIT_S) as client, client.model("add", timeout=LIMIT_S) as model:
                assert model.version == 1
                manager.wait_for(STATUS="1 of 62 clients")
        assert manager.path.is_socket()


def until_ready(manager: Manager) -> list[dict[str, str]]:
    """Return what a manager is told, up to the message that the service is ready."""
    return list(iter(manager.message, {"READY": "1"})) + [{"READY": "1"}]


def test_only_the_successor_tells_the_manager_anything(folder: Path) -> None:
    with (
        Manager(folder / "d.sock") as manager,
        started_by(manager, environment={"WATCHDOG_USEC": "20000"}) as old,
        old.connect() as staying,
    ):
        told = InThread.start(lambda: until_ready(manager))
        with successor_of(old) as new:
            assert {"MAINPID": str(new.pid)} in told.wait().value
            for _ in range(3):
                manager.wait_for(WATCHDOG="1")
            with new.stopped():
                while manager.message(0):
                    pass
                staying.close()
                assert ends_well(old)
                assert manager.message(0.1) == {}
            manager.wait_for(WATCHDOG="1")


def test_the_manager_learns_that_the_driver_goes_on(folder: Path) -> None:
    file = folder / "nnfmq.toml"
    file.write_text("")
    with Manager(folder / "d.sock") as manager, started_by(manager, environment={"NNFMQ_CONFIG": str(file)}) as daemon:
        file.write_text("memory_mib = -1\n")
        daemon.process.send(signal.SIGUSR2)
        manager.wait_for(RELOADING="1")
        assert manager.wait_for(READY="1") == {"READY": "1"}
        assert FAILED in daemon.program.errors()
        daemon.process.send(signal.SIGTERM)
        assert ends_well(daemon)


def test_a_command_restarts_the_driver_of_a_manager(folder: Path) -> None:
    with Manager(folder / "d.sock") as manager, started_by(manager) as old, restart(old.path) as command:
        assert command.wait() == 0, command.errors()
        pid = int(command.line().split()[2])
        with Process(pid) as new:
            assert manager.wait_for(MAINPID=str(pid))
            assert ends_well(old)
            new.send(signal.SIGTERM)
            new.wait_for_end()


def test_no_other_process_gets_the_sockets_of_the_manager(folder: Path) -> None:
    with Manager(folder / "d.sock") as manager, started_by(manager) as daemon:
        with daemon.program.start(["-P", "-m", "nnfmq", "serve", "--replace", "--socket", manager.path]) as other:
            assert other.wait() == 1
            assert "systemctl reload" in other.errors()
        daemon.process.send(signal.SIGTERM)
        assert ends_well(daemon)
