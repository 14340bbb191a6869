"""`connect` returns while the embedded driver starts; the first call waits for it and raises the errors of its start.

The driver reads its devices from a FIFO, so it starts when the test writes them, and not before.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.drivers import Process, app, opened, until
from support.forking import fork

import nnfmq
from nnfmq.driver.devices import configuration

PACKAGED = Path(configuration.__file__).with_name("devices.toml")


class Gate:
    """The FIFO, at which a driver waits in its start."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._path = path
        self._fd = -1

    def wait_until_reached(self) -> None:
        """Wait until the driver reads its devices."""
        until(self._is_read, "the driver reads its devices")

    def _is_read(self) -> bool:
        try:
            self._fd = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.ENXIO:  # nobody reads
                raise
        return self._fd >= 0

    def open(self, devices: bytes) -> None:
        """Let the driver read these devices."""
        self.wait_until_reached()
        os.write(self._fd, devices)
        self.close()

    def close(self) -> None:
        """End the driver's read, if it has begun."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Yield the gate of the drivers that the test starts."""
    gate = Gate(tmp_path / "devices")
    monkeypatch.setenv("NNFMQ_DEVICES", str(tmp_path / "devices"))
    yield gate
    gate.close()


@contextmanager
def starting(timeout: float | None = 10.0, *, recover: bool = False) -> Iterator[tuple[nnfmq.Client, Process]]:
    """Yield a client and its embedded driver, which has not passed the gate. Closes both."""
    with Process(os.getpid()) as this:
        others = set(this.children())  # a daemon of other tests may run
        with nnfmq.connect(embedded=True, timeout=timeout, recover=recover) as client:
            (pid,) = set(this.children()) - others
            with Process(pid) as driver:
                yield client, driver


def test_connect_returns_while_the_driver_starts(gate: Gate) -> None:
    with starting() as (client, driver):
        assert repr(client) == f"<Client of embedded driver {driver.pid}, AIDL v4, starting>"
        with pytest.raises(nnfmq.MissedDeadlineTransient):
            client.devices(timeout=0)
        gate.open(PACKAGED.read_bytes())
        assert {"compiled", "reference"} <= {info.name for info in client.devices()}
        assert repr(client) == f"<Client of embedded driver {driver.pid}, AIDL v4>"
        assert client.driver_pid == driver.pid


def test_a_model_file_is_loaded_while_the_driver_starts(gate: Gate) -> None:
    with nnfmq.connect(embedded=True) as client, pytest.raises(FileNotFoundError):
        client.prepare("/nowhere/model.tflite")


def test_the_first_call_raises_at_once_if_the_driver_dies_in_its_start(gate: Gate) -> None:
    with starting(timeout=None) as (client, driver):
        gate.wait_until_reached()
        driver.kill()
        for _ in range(2):
            with pytest.raises(nnfmq.DeviceUnavailable, match=r"exited before it replied: .* is gone"):
                client.devices(timeout=None)


def test_a_driver_that_died_in_its_start_is_replaced_if_the_client_recovers(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    with starting(recover=True) as (client, driver):
        driver.kill()
        until(lambda: not client.connection.is_open, "the client knows")
        monkeypatch.setenv("NNFMQ_DEVICES", str(PACKAGED))
        assert client.devices() and client.driver_pid != driver.pid


def test_a_list_of_devices_that_cannot_be_read_is_named_with_its_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NNFMQ_DEVICES", str(tmp_path / "devices.toml"))
    with (
        nnfmq.connect(embedded=True) as client,
        pytest.raises(nnfmq.GeneralFailure, match=r"No such file.*NNFMQ_DEVICES names it.*devices\.toml"),
    ):
        client.devices()


@pytest.mark.parametrize("wait_ready", [False, True])
def test_an_error_of_the_start_is_raised_by_the_first_call_or_by_connect(
    wait_ready: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    listed = tmp_path / "devices.toml"
    listed.write_text('[[device]]\nname = "test-a"\ncolour = 1\n')
    monkeypatch.setenv("NNFMQ_DEVICES", str(listed))
    error = pytest.raises(nnfmq.GeneralFailure, match=r"devices\.toml cannot be used: .*colour")
    if wait_ready:
        with error:
            nnfmq.connect(embedded=True, wait_ready=True)
    else:
        with nnfmq.connect(embedded=True) as client, error:
            client.devices()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("is_reached", [False, True])
def test_closing_a_client_ends_a_driver_that_starts(gate: Gate, is_reached: bool) -> None:
    """`leaks.watch`, around each test, finds what else the client leaves."""
    with starting() as (client, driver):
        if is_reached:
            gate.wait_until_reached()
        others = list(opened(driver.descendants()))
        client.close()
        assert driver.has_exited()
        end_all(others)
        with pytest.raises(nnfmq.BadState, match="this client is closed"):
            client.devices()


def test_a_driver_that_starts_ends_with_a_killed_client(gate: Gate) -> None:
    with app("starting") as script, Process(int(script.line())) as driver:
        gate.wait_until_reached()
        others = list(opened(driver.descendants()))
        script.popen.kill()
        assert script.wait() == -signal.SIGKILL
        gate.close()
        driver.wait_for_end()
        end_all(others)


def test_a_forked_child_cannot_use_a_driver_that_starts(gate: Gate) -> None:
    reading, writing = os.pipe()
    with nnfmq.connect(embedded=True) as client, os.fdopen(reading) as answer:
        pid = fork()
        if pid == 0:
            os.write(writing, outcome(client).encode())
            os._exit(0)
        os.close(writing)
        assert "which forked; connect again in the child" in answer.read()
        os.waitpid(pid, 0)


def outcome(client: nnfmq.Client) -> str:
    """Return how a call ends."""
    try:
        client.devices()
    except BaseException as error:  # noqa: BLE001  the child must reach its end
        return f"{type(error).__name__}: {error}"
    return "no error"


def end_all(processes: list[Process]) -> None:
    """Wait until all have exited."""
    for process in processes:
        with process:
            process.wait_for_end()
