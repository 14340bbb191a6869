"""A driver that comes late, and a client that goes on after its driver has died."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.drivers import LIMIT_S, Daemon, InThread, Process, one, running_daemon, until
from support.models import null_model

import nnfmq
from nnfmq.hal.types import DeviceStatus


@pytest.fixture
def path(folder: Path) -> Path:
    return folder / "d.sock"


@pytest.fixture
def client(daemon: Daemon) -> Iterator[nnfmq.Client]:
    with daemon.connect() as client:
        yield client


def kill(client: nnfmq.Client) -> None:
    """Kill the process that serves a client, and return when the client knows."""
    with Process(client.worker_pid) as worker:
        worker.kill()
        worker.wait_for_end()
    until(lambda: not client._connection.is_open, "the client knows")


def executes(client: nnfmq.Client) -> bool:
    with client.device("reference").prepare(null_model()) as model, model.burst() as burst:
        return bool(model.execute(one(3)) == burst.execute(one(3)) == (one(3),))


def only(folder: Path, name: str) -> dict[str, str]:
    """Return the environment of a driver whose only device has this name."""
    (folder / "devices.toml").write_text(f'[[device]]\nname = "{name}"\n')
    return {**os.environ, "NNFMQ_DEVICES": str(folder / "devices.toml")}


# ------------------------------------------------------------------------------------------------ late


def test_DEV_11_connect_waits_for_a_driver_that_does_not_listen_yet(path: Path) -> None:
    connecting = InThread.start(lambda: nnfmq.connect(path, wait=True, timeout=LIMIT_S))
    connecting.wait_until_asleep()
    with running_daemon(path), connecting.wait().value as client:
        assert not client.is_embedded
        assert executes(client)


def test_DEV_11_no_driver_within_the_timeout_raises_unavailable(path: Path) -> None:
    with pytest.raises(nnfmq.DeviceUnavailable, match=f"no driver listens at {path}"):
        nnfmq.connect(path, wait=True, timeout=0.05)


def test_DEV_11_a_waiting_connect_starts_no_embedded_driver(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.delenv("NNFMQ_SOCKET", raising=False)
    with pytest.raises(nnfmq.DeviceUnavailable):
        nnfmq.connect(wait=True, timeout=0.05)
    with pytest.raises(nnfmq.InvalidArgument):
        nnfmq.connect(embedded=True, wait=True)


# ------------------------------------------------------------------------------------------------ again


def test_LIFE_6_a_client_whose_worker_was_killed_reconnects_and_continues(client: nnfmq.Client) -> None:
    before = client.worker_pid
    assert executes(client)
    kill(client)
    client.reconnect(timeout=LIMIT_S)
    assert client.worker_pid != before
    assert executes(client)


def test_LIFE_6_earlier_models_bursts_and_devices_stay_dead_after_a_reconnect(client: nnfmq.Client) -> None:
    device = client.device("reference")
    model = device.prepare(null_model())
    burst = model.burst()
    kill(client)
    client.reconnect(timeout=LIMIT_S)
    again = client.device("reference").prepare(null_model())  # it may well have the dead one's number
    for call in (lambda: model.execute(one(1)), lambda: burst.execute(one(1)), device.capabilities, model.burst):
        with pytest.raises(nnfmq.DeadObject, match="gone"):
            call()
    model.close()
    burst.close()
    assert again.execute(one(2)) == (one(2),)
    again.close()


def test_LIFE_6_an_embedded_driver_is_replaced_by_another_and_the_dead_one_reaped() -> None:
    with nnfmq.connect(embedded=True) as client:
        assert executes(client)
        kill(client)
        client.reconnect(timeout=LIMIT_S)
        assert client.is_embedded
        assert executes(client)


def test_LIFE_6_a_client_waits_for_the_next_daemon(path: Path) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(running_daemon(path))
        client = stack.enter_context(first.connect())
        assert executes(client)
        first.end()
        until(lambda: not client._connection.is_open, "the client knows")
        reconnecting = InThread.start(lambda: client.reconnect(timeout=LIMIT_S))
        reconnecting.wait_until_asleep()
        stack.enter_context(running_daemon(path))
        assert reconnecting.wait().error is None
        assert executes(client)


def test_LIFE_6_a_device_that_the_next_driver_lacks_stays_unavailable(folder: Path, path: Path) -> None:
    with running_daemon(path) as first:
        client = first.connect()
        client.device("reference")
        client.device("sample-quant")
        first.end()
    until(lambda: not client._connection.is_open, "the client knows")
    with running_daemon(path, environment=only(folder, "reference")) as second:
        client.reconnect(timeout=LIMIT_S)
        assert executes(client)
        with pytest.raises(nnfmq.DeviceUnavailable, match="'sample-quant' has changed"):
            client.device("sample-quant")
        second.end()
    until(lambda: not client._connection.is_open, "the client knows")
    with running_daemon(path):
        client.reconnect(timeout=LIMIT_S)
        with pytest.raises(nnfmq.DeviceUnavailable, match="'sample-quant' has changed"):
            client.device("sample-quant")
        with nnfmq.connect(path) as second:
            second.device("sample-quant")
        client.close()


def test_LIFE_6_a_device_with_another_status_is_the_same_device(daemon: Daemon, client: nnfmq.Client) -> None:
    client.device("sample-partial")
    with daemon.connect() as administrator:
        administrator.set_device_status("sample-partial", DeviceStatus.BUSY)
        kill(client)
        client.reconnect(timeout=LIMIT_S)
        assert client.device("sample-partial").info.status is DeviceStatus.BUSY
        administrator.set_device_status("sample-partial", DeviceStatus.AVAILABLE)


def test_LIFE_6_reconnecting_to_a_living_driver_does_nothing(client: nnfmq.Client) -> None:
    model = client.device("reference").prepare(null_model())
    before = client.worker_pid
    client.reconnect()
    assert client.worker_pid == before
    assert model.execute(one(1)) == (one(1),)
    model.close()


def test_LIFE_6_without_a_driver_the_client_stays_dead_and_may_try_again(path: Path) -> None:
    with running_daemon(path) as daemon:
        client = daemon.connect()
        daemon.end()
    until(lambda: not client._connection.is_open, "the client knows")
    for _ in range(2):
        with pytest.raises(nnfmq.DeviceUnavailable, match="no driver listens"):
            client.reconnect(timeout=0.05)
        with pytest.raises(nnfmq.DeadObject):
            client.devices()
    client.close()
    with pytest.raises(nnfmq.InvalidArgument, match="closed"):
        client.reconnect()


def test_LIFE_6_several_threads_reconnect_once(client: nnfmq.Client) -> None:
    kill(client)
    threads = [InThread.start(lambda: (client.reconnect(timeout=LIMIT_S), client.worker_pid)[1]) for _ in range(4)]
    assert {thread.wait().value for thread in threads} == {client.worker_pid}


def test_LIFE_6_a_client_that_is_closed_while_it_reconnects_keeps_no_driver() -> None:
    client = nnfmq.connect(embedded=True)
    kill(client)
    started, go, again = threading.Event(), threading.Event(), client._connect_again
    assert again is not None

    def slowly(deadline_ns: int | None) -> nnfmq.Client:
        fresh = again(deadline_ns)
        started.set()
        go.wait(LIMIT_S)
        return fresh

    client._connect_again = slowly
    reconnecting = InThread.start(lambda: client.reconnect(timeout=LIMIT_S))
    assert started.wait(LIMIT_S)
    client.close()
    go.set()
    assert isinstance(reconnecting.wait().error, nnfmq.InvalidArgument)
    assert not client._connection.is_open
    assert client._process is None  # and the leak check finds none
