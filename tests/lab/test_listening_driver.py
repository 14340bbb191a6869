"""The listening driver of benchmarks: it starts, or its log says why not, and it does not outlive its parent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.drivers import Process, Program, short_folder, until

import nnfmq
from nnfmq.lab.child_processes import BenchmarkFailed, started_child
from nnfmq.lab.listening_driver import kept_daemon, kept_folder, started_daemon


def test_clients_connect_until_the_block_ends(tmp_path: Path) -> None:
    with started_daemon(tmp_path) as daemon, nnfmq.connect(daemon.socket, embedded=False) as client:
        assert client.driver_pid == daemon.pid
    assert not Path(f"/proc/{daemon.pid}").exists()


def test_the_log_of_a_driver_that_does_not_start_is_the_reason(tmp_path: Path) -> None:
    (tmp_path / "driver.sock").write_text("in the way")
    with (
        pytest.raises(BenchmarkFailed, match=r"the driver did not start: .*driver\.sock"),
        started_daemon(tmp_path),
    ):
        pass


def test_the_driver_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    def hold_driver(connection: Any) -> None:
        with started_daemon(tmp_path) as daemon:
            connection.send(daemon.pid)
            connection.recv()

    with started_child(hold_driver) as child, Process(child.receive(60.0)) as driver:
        child.kill()
        driver.wait_for_end()


def test_nothing_remains_of_a_driver_with_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with short_folder() as folder:
        monkeypatch.setenv("TMPDIR", str(folder))
        with kept_daemon() as daemon, nnfmq.connect(daemon.socket, embedded=False) as client:
            assert client.driver_pid == daemon.pid and Path(daemon.socket).is_relative_to(folder)
        assert not Path(f"/proc/{daemon.pid}").exists()
        assert list(folder.iterdir()) == []


def test_nothing_remains_of_a_folder_with_files(monkeypatch: pytest.MonkeyPatch) -> None:
    with short_folder() as folder:
        monkeypatch.setenv("TMPDIR", str(folder))
        with kept_folder() as kept:
            assert kept.parent == folder
            (kept / "file").write_text("content")
        assert list(folder.iterdir()) == []


def test_nothing_remains_of_a_stress_test_that_is_killed() -> None:
    model = nnfmq.example_path("digits.tflite")
    arguments = ["-P", "-m", "nnfmq", "stress", model, "--load", "none", "--duration", "60"]
    with short_folder() as folder:
        with Program.start(arguments, {"TMPDIR": str(folder)}) as program:
            until(lambda: any(folder.rglob("driver.sock")), "its driver listens")
            program.popen.kill()
        until(lambda: not any(folder.iterdir()), "the folder is removed")


def test_nothing_remains_of_it_when_its_parent_is_killed() -> None:
    def hold_driver(connection: Any) -> None:
        with kept_daemon() as daemon:
            connection.send(daemon.pid)
            connection.recv()

    with short_folder() as folder:
        with (
            started_child(hold_driver, environment={"TMPDIR": str(folder)}) as child,
            Process(child.receive(60.0)) as driver,
        ):
            assert any(folder.iterdir())
            child.kill()
            driver.wait_for_end()
        until(lambda: not any(folder.iterdir()), "the folder is removed")
