"""An administrator makes a device busy or offline: every client is notified, and continues afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.drivers import LIMIT_S, Daemon, Process, Program, one, running_daemon, until
from support.models import null_model

import nnfmq
from nnfmq.hal.types import DeviceStatus

UNAVAILABLE = [DeviceStatus.BUSY, DeviceStatus.OFFLINE]


@pytest.fixture
def administrator(daemon: Daemon) -> Iterator[nnfmq.Client]:
    """Another client, which makes the device available again when the test is over."""
    with daemon.connect() as connected:
        yield connected
        connected.set_device_status("reference", DeviceStatus.AVAILABLE)


def outcome(method: Callable[[], Any]) -> type[Exception] | None:
    try:
        made = method()
    except nnfmq.NnfmqError as error:
        return type(error)
    if isinstance(made, nnfmq.PreparedModel | nnfmq.Burst):
        made.close()
    return None


def status(client: nnfmq.Client) -> DeviceStatus:
    return DeviceStatus(client.device("reference").info.status)


@pytest.mark.parametrize("made", UNAVAILABLE, ids=lambda made: made.name)
def test_N_BAS_5_DEV_14_every_method_fails_while_a_device_is_unavailable_and_works_again_afterwards(
    client: nnfmq.Client, administrator: nnfmq.Client, made: DeviceStatus
) -> None:
    assert status(client) is DeviceStatus.AVAILABLE
    device = client.device("reference")
    with device.prepare(null_model()) as model, model.burst() as burst:
        assert burst.execute(one(3))[0].tolist() == [3]
        methods: dict[str, Callable[[], Any]] = {
            "getCapabilities": device.capabilities,
            "getSupportedOperations": lambda: device.supported_operations(null_model()),
            "prepareModel": lambda: device.prepare(null_model()),
            "executeSynchronously": lambda: model.execute(one(4)),
            "configureExecutionBurst": model.burst,
            "burst": lambda: burst.execute(one(4)),
        }
        administrator.set_device_status("reference", made)
        assert status(client) is made
        for name, method in methods.items():
            assert outcome(method) is nnfmq.DeviceUnavailable, name
        administrator.set_device_status("reference", DeviceStatus.AVAILABLE)
        assert status(client) is DeviceStatus.AVAILABLE
        assert burst.execute(one(5))[0].tolist() == [5]
        assert model.execute(one(6))[0].tolist() == [6]


def test_DEV_14_other_devices_are_not_affected(client: nnfmq.Client, administrator: nnfmq.Client) -> None:
    administrator.set_device_status("reference", DeviceStatus.OFFLINE)
    with client.device("sample-float_fast").prepare(null_model()) as model:
        assert model.execute(one(7))[0].tolist() == [7]


def test_DEV_14_a_client_that_connects_later_gets_the_current_status(
    daemon: Daemon, administrator: nnfmq.Client
) -> None:
    administrator.set_device_status("reference", DeviceStatus.BUSY)
    with daemon.connect() as later:
        assert status(later) is DeviceStatus.BUSY
        with pytest.raises(nnfmq.DeviceUnavailable, match="BUSY"):
            later.device("reference").prepare(null_model())


@pytest.mark.parametrize("keep", [False, True])
def test_DEV_14_the_status_ends_with_its_client_unless_it_is_kept(
    daemon: Daemon, administrator: nnfmq.Client, keep: bool
) -> None:
    with daemon.connect() as other, Process(other.worker_pid) as worker:
        other.set_device_status("reference", DeviceStatus.OFFLINE, keep=keep)
        assert status(administrator) is DeviceStatus.OFFLINE
        other.close()
        worker.wait_for_end()
    assert status(administrator) is (DeviceStatus.OFFLINE if keep else DeviceStatus.AVAILABLE)


@pytest.mark.parametrize("keep", [False, True])
def test_DEV_14_the_status_ends_with_a_worker_that_is_killed_unless_it_is_kept(
    daemon: Daemon, administrator: nnfmq.Client, keep: bool
) -> None:
    administrator.set_device_status("reference", DeviceStatus.BUSY, keep=True)
    with daemon.connect() as killed, Process(killed.worker_pid) as worker:
        killed.set_device_status("reference", DeviceStatus.OFFLINE, keep=keep)
        worker.kill()
        worker.wait_for_end()
    if keep:
        with daemon.connect():  # the supervisor has seen the worker's exit, or is about to
            assert status(administrator) is DeviceStatus.OFFLINE
    else:
        until(lambda: status(administrator) is DeviceStatus.BUSY, "the kept status is restored")


def test_DEV_14_a_driver_that_was_not_started_for_it_lets_no_client_set_the_status(folder: Path) -> None:
    with running_daemon(folder / "strict.sock") as strict, strict.connect() as client:
        with pytest.raises(nnfmq.GeneralFailure, match="nnfmq serve --allow-device-status"):
            client.set_device_status("reference", DeviceStatus.OFFLINE)
        assert status(client) is DeviceStatus.AVAILABLE
        done = command("devices", "--connect", strict.path, "--set", "reference=OFFLINE", "--keep")
        assert (done.returncode, "--allow-device-status" in done.stderr) == (1, True)


def test_DEV_14_the_command_holds_a_status_until_it_ends(daemon: Daemon, administrator: nnfmq.Client) -> None:
    words = ["-P", "-m", "nnfmq", "devices", "--connect", daemon.path, "--set", "reference=OFFLINE"]
    with Program.start(words) as program:
        until(lambda: "held until Ctrl-C" in program.errors(), "the command holds the status")
        assert status(administrator) is DeviceStatus.OFFLINE
        program.interrupt()
        assert program.wait() == 0
    until(lambda: status(administrator) is DeviceStatus.AVAILABLE, "the status ends with the command")


def test_DEV_14_the_command_keeps_a_status(daemon: Daemon, administrator: nnfmq.Client) -> None:
    where = ("devices", "--connect", daemon.path, "--set")
    assert command(*where, "reference=BUSY", "--keep").returncode == 0
    assert status(administrator) is DeviceStatus.BUSY
    assert command(*where, "reference=AVAILABLE").returncode == 0
    assert status(administrator) is DeviceStatus.AVAILABLE


def test_setting_a_status_without_a_driver_is_an_error(folder: Path) -> None:
    done = command("devices", "--set", "reference=OFFLINE", environment={"NNFMQ_SOCKET": str(folder / "none.sock")})
    assert (done.returncode, done.stdout) == (1, "")
    assert "--set needs the option --allow-device-status of it" in done.stderr


def command(*words: str | Path, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-P", "-m", "nnfmq", *map(str, words)]
    environment = {**os.environ, **(environment or {})}
    return subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def test_DEV_14_an_embedded_driver_has_its_own_status(administrator: nnfmq.Client) -> None:
    with nnfmq.connect(embedded=True) as private:
        private.set_device_status("reference", DeviceStatus.BUSY)
        assert status(administrator) is DeviceStatus.AVAILABLE
        with pytest.raises(nnfmq.DeviceUnavailable):
            private.device("reference").prepare(null_model())
        private.set_device_status("reference", DeviceStatus.AVAILABLE)
        with private.device("reference").prepare(null_model()) as model:
            assert np.array_equal(model.execute(one(1))[0], one(1))


def test_CAP_1_a_client_reads_the_capabilities_of_every_device(client: nnfmq.Client) -> None:
    for info in client.devices():
        capabilities = client.device(info.name).capabilities()
        assert capabilities.operand_performance
        assert all(
            entry.info.exec_time > 0 and entry.info.power_usage > 0 for entry in capabilities.operand_performance
        )
