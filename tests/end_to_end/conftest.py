"""A daemon for all tests of this folder; each must leave its resources unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.drivers import Daemon, running_daemon, shared_memory_names, short_folder, until
from support.models import null_model

import nnfmq

STATUS = ("--allow-device-status",)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return an empty folder whose path is short enough for a socket."""
    with short_folder() as made:
        yield made


@pytest.fixture(scope="session")
def _daemon() -> Iterator[Daemon]:
    with short_folder() as made, running_daemon(made / "d.sock", options=STATUS) as daemon:
        yield daemon


def holdings(daemon: Daemon) -> tuple[list[str], list[int], list[str]]:
    """Return the daemon's resources: fds, processes, shared memory. Without its compile server, which ends later."""
    fds, processes = daemon.process.descriptors(), daemon.process.descendants()
    for server in daemon.compile_servers():
        processes.remove(server)
        fds.remove("socket")
        fds.remove("pidfd" if "pidfd" in fds else "anon_inode")  # before Linux 6.9
    return fds, processes, daemon.process.shared_mappings()


@pytest.fixture
def daemon(_daemon: Daemon) -> Iterator[Daemon]:
    """Return a running daemon, which must hold the same resources afterwards, and have logged no errors."""
    before, names = holdings(_daemon), shared_memory_names()
    yield _daemon
    until(lambda: holdings(_daemon) == before, f"the daemon holds what it held before the test: {before}")
    until(lambda: shared_memory_names() <= names, "no shared memory has a name that had none before")


@pytest.fixture
def client(daemon: Daemon) -> Iterator[nnfmq.Client]:
    """Return a client of the daemon."""
    with daemon.connect() as made:
        yield made


@pytest.fixture
def model(client: nnfmq.Client) -> Iterator[nnfmq.PreparedModel]:
    """Return a prepared null model, which returns its input, one float."""
    with client.device("reference").prepare(null_model()) as made:
        yield made
