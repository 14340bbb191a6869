"""Models by name: a driver with `--models`, its repository process, and what either survives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.drivers import Daemon, running_daemon
from support.model_folders import RepositoryPeer, add_version, adder

from nnfmq.hal.errors import ErrorStatus
from nnfmq.serialize.repository_protocol import ModelState, VersionChanged


@pytest.fixture
def models(folder: Path) -> Path:
    """Return an empty directory for models."""
    (folder / "models").mkdir()
    return folder / "models"


@pytest.fixture
def driver(folder: Path, models: Path) -> Iterator[Daemon]:
    """Return a driver that serves the models of `models`."""
    with running_daemon(folder / "d.sock", models=models) as daemon:
        yield daemon


@pytest.fixture
def peer(driver: Daemon) -> Iterator[RepositoryPeer]:
    """Return a client of the repository."""
    with RepositoryPeer(driver.path) as made:
        yield made


def test_a_new_version_replaces_the_old_one_and_those_who_opened_the_model_are_told(
    models: Path, peer: RepositoryPeer
) -> None:
    add_version(models, "adder", 1, adder(1))
    peer.wait_for("adder", version=1, state=ModelState.READY, device="compiled")
    first = peer.open("adder")
    add_version(models, "adder", 2, adder(2))
    assert peer.receive(VersionChanged) == VersionChanged("adder", 2)
    second = peer.open("adder")
    assert first.description is not None and second.description is not None
    assert (first.description.version, second.description.version) == (1, 2)
    assert peer.open("adder", 1).status is ErrorStatus.INVALID_ARGUMENT
    assert peer.open("nothing").status is ErrorStatus.INVALID_ARGUMENT
