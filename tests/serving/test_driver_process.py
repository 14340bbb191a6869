"""DriverProcess: it owns a driver, starts it again, and neither outlives the process that made it."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from support.drivers import LIMIT_S, Process, Program, at_least_once, opened, until

import nnfmq
from nnfmq.base import processes
from nnfmq.hal.errors import DeviceUnavailable, MissedDeadlineTransient
from nnfmq.serving import driver_process
from nnfmq.serving.driver_process import DriverPhase, DriverProcess

OWNER = """
import json, sys
from pathlib import Path
from nnfmq.serving.driver_process import DriverProcess
driver = DriverProcess(Path(sys.argv[1]))
print(driver.wait_until_running().pid, flush=True)
input()
"""


def test_a_client_reaches_the_driver_and_nothing_of_it_is_left(folder: Path) -> None:
    with DriverProcess(folder / "d.sock") as driver:
        state = driver.wait_until_running(LIMIT_S)
        assert (state.phase, state.starts, state.reason) == (DriverPhase.RUNNING, 1, "")
        with nnfmq.connect(folder / "d.sock") as client:
            assert client.driver_pid == state.pid
        with Process(state.pid) as process:
            children = process.descendants()
            driver.close()
            assert process.has_exited()
        assert not list(opened(children))
    driver.close()
    assert (driver.state.phase, driver.state.pid) == (DriverPhase.STOPPED, 0)
    assert not (folder / "d.sock").exists()
    with pytest.raises(DeviceUnavailable, match="stopped"):
        driver.wait_until_running()


def test_a_killed_driver_is_started_again_at_the_same_socket_within_a_second(folder: Path) -> None:
    def starts_again() -> bool:
        with DriverProcess(folder / "d.sock") as driver:
            first = driver.wait_until_running(LIMIT_S)
            with nnfmq.connect(folder / "d.sock", recover=True) as client:
                with Process(first.pid) as process, Process(client.worker_pid) as worker:
                    killed_ns = process.kill()
                    worker.kill()
                until(lambda: driver.state.starts == 2, "another driver starts")
                started_ns = time.monotonic_ns()
                second = driver.wait_until_running(LIMIT_S)
                assert (second.reason, second.pid != first.pid) == ("killed by SIGKILL", True)
                assert [info.name for info in client.devices()]
                assert client.driver_pid == second.pid
                return started_ns - killed_ns < 1_000_000_000

    at_least_once(starts_again, "another driver starts within a second")


def test_a_driver_that_ends_by_itself_is_started_again(folder: Path) -> None:
    with DriverProcess(folder / "d.sock") as driver:
        with Process(driver.wait_until_running(LIMIT_S).pid) as process:
            process.send(signal.SIGTERM)
        until(lambda: driver.state.starts == 2, "another driver starts")
        assert driver.wait_until_running(LIMIT_S).reason == "exit status 0"


def test_a_driver_that_cannot_start_is_tried_again_with_pauses_and_named(folder: Path) -> None:
    with DriverProcess(folder / "missing" / "d.sock") as driver:
        until(lambda: driver.state.starts == 2, "a second attempt")
        with pytest.raises(MissedDeadlineTransient, match="reason='exit status 1'"):
            driver.wait_until_running(0)


def test_a_driver_that_starts_is_ended_by_close(folder: Path) -> None:
    driver = DriverProcess(folder / "d.sock")
    until(lambda: driver.state.starts == 1, "the process starts")
    driver.close()
    assert driver.state.phase is DriverPhase.STOPPED


def test_options_and_variables_reach_the_driver(folder: Path) -> None:
    options = ("--memory", "64")
    with DriverProcess(folder / "d.sock", options=options, environment={"NNFMQ_CLIENT_MEMORY_MIB": "7"}) as driver:
        driver.wait_until_running(LIMIT_S)
        with nnfmq.connect(folder / "d.sock") as client:
            statistics = client.statistics()
    assert statistics.memory_limit_bytes == 64 << 20
    assert [client.quota_bytes for client in statistics.clients] == [7 << 20]


def test_the_models_of_a_directory_are_served(folder: Path) -> None:
    version = folder / "models" / "digits" / "1"
    version.mkdir(parents=True)
    (version / "model.tflite").write_bytes(Path(nnfmq.example_path("digits.tflite")).read_bytes())
    with DriverProcess(folder / "d.sock", folder / "models") as driver:
        driver.wait_until_running(LIMIT_S)
        with nnfmq.connect(folder / "d.sock") as client, client.model("digits", timeout=LIMIT_S) as model:
            assert model.version == 1


def test_the_driver_ends_with_the_process_that_owns_it_however_that_ends(folder: Path) -> None:
    with (
        Program.start(["-P", "-c", OWNER, folder / "d.sock"]) as owner,
        Process(json.loads(owner.line())) as driver,
        nnfmq.connect(folder / "d.sock") as client,
    ):
        owner.popen.kill()
        driver.wait_for_end()
        until(lambda: not client.connection.is_open, "its clients know")
    assert not (folder / "d.sock").exists()


def test_a_driver_exits_only_with_its_own_parent(folder: Path) -> None:
    arguments = ["-P", "-m", "nnfmq", "serve", "--socket", folder / "d.sock", "--exit-with"]
    for pid, message in (("1", "not with 1"), (str(2**22), "cannot exit with process 4194304")):
        with Program.start([*arguments, pid]) as program:
            assert program.wait() == 1
            assert message in program.errors()


def run_instead(monkeypatch: pytest.MonkeyPatch, code: str) -> list[subprocess.Popen[bytes]]:
    """Let the driver be a program of the test that SIGKILL does not end; return its processes."""
    start, started = subprocess.Popen, list[subprocess.Popen[bytes]]()

    def unkillable(words: list[str], **options: Any) -> subprocess.Popen[bytes]:
        started.append(process := start([words[0], "-P", "-c", code], **options))
        process.kill = lambda: None  # type: ignore[method-assign]
        return process

    monkeypatch.setattr(driver_process.subprocess, "Popen", unkillable)
    monkeypatch.setattr(driver_process, "_STOP_S", 0.1)
    monkeypatch.setattr(processes, "KILLED_S", 0.1)
    return started


def end(started: list[subprocess.Popen[bytes]]) -> None:
    for process in started:
        process.send_signal(signal.SIGKILL)
        process.wait()


def test_a_driver_that_a_kill_does_not_end_is_waited_for_with_a_limit(
    monkeypatch: pytest.MonkeyPatch, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('listening', flush=True); signal.pause()"
    )
    started = run_instead(monkeypatch, code)
    driver = DriverProcess(folder / "d.sock")
    driver.wait_until_running(LIMIT_S)
    driver.close()
    assert started[0].returncode is None
    assert f"process {started[0].pid} has been killed and does not end" in caplog.text
    end(started)


def test_a_driver_that_closes_its_output_and_stays_is_replaced(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    started = run_instead(monkeypatch, "import os, signal; os.close(1); signal.pause()")
    with DriverProcess(folder / "d.sock") as driver:
        until(lambda: driver.state.starts == 2, "another driver is started")
        assert driver.state.reason == "it closed its output and stayed"
    end(started)
