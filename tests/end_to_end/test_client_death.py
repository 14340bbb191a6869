"""The application is killed: its worker exits, and all their shared resources are released."""

from __future__ import annotations

import pytest
from support.drivers import Daemon, Process, app, one, until

import nnfmq

WAITS = ["burst", "preparation", "execution", "nothing"]


@pytest.mark.parametrize("wait", WAITS)
def test_LIFE_3_N_BUX_4_SIGKILL_of_a_waiting_client_ends_its_worker(daemon: Daemon, wait: str) -> None:
    with app("waits", daemon.path, wait) as client, Process(int(client.line())) as worker:
        with worker.stopped():
            client.tell()
            assert client.line() == "waiting"
            client.popen.kill()
            client.wait()
        worker.wait_for_end()


def test_SIGKILL_of_a_client_ends_its_worker_during_a_computation(daemon: Daemon) -> None:
    with app("waits", daemon.path, "computation") as client, Process(int(client.line())) as worker:
        client.tell()
        assert client.line() == "waiting"
        until(lambda: "R" in worker.states(), "the worker computes")
        client.popen.kill()
        worker.wait_for_end()


@pytest.mark.parametrize("way", ["large", "fenced"], ids=["it copies a large pool", "it waits for the client's fence"])
def test_LIFE_3_SIGKILL_of_a_client_ends_its_worker_while(way: str, daemon: Daemon) -> None:
    with app("waits", daemon.path, way) as client, Process(int(client.line())) as worker:
        client.tell()
        assert client.line() == "waiting"
        client.popen.kill()
        worker.wait_for_end()


def test_SIGKILL_of_a_client_does_not_affect_other_clients(daemon: Daemon, model: nnfmq.PreparedModel) -> None:
    with app("waits", daemon.path, "nothing") as client, Process(int(client.line())) as worker:
        client.popen.kill()
        worker.wait_for_end()
    assert model.execute(one(3)) == (one(3),)


def test_a_stopped_client_keeps_its_worker(daemon: Daemon) -> None:
    with app("waits", daemon.path, "nothing") as client, Process(int(client.line())) as worker:
        with Process(client.pid) as process, process.stopped():
            assert not worker.has_exited()
        client.tell()
        assert client.line() == "waiting"


def test_a_client_that_closes_its_connection_ends_its_worker(daemon: Daemon) -> None:
    client = daemon.connect()
    with Process(client.worker_pid) as worker:
        client.close()
        worker.wait_for_end()
