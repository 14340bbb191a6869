"""A model repository that hangs without being stopped: its driver replaces it, or it goes on without what hangs.

The processes of the driver do what they find in the directory of models: a thread of the repository that finds its
order removes it, and waits at a FIFO, in a system call that nothing ends, or computes without end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.drivers import Daemon, running_daemon, until
from support.model_folders import RepositoryPeer, add_version, adder, running_repository
from support.plugins import path_with

import nnfmq
from nnfmq.base import settings
from nnfmq.serialize.repository_protocol import ListModels, VersionChanged

ORDERS = """
import os, sys
if "--serve" in sys.orig_argv:
    from nnfmq.repository import models, repository, server
    repository.LOOK_S, repository.SLOW_LOOK_S = 0.1, 1.0
    folder = os.path.dirname(sys.orig_argv[-1])
    def ordered(word):
        try:
            os.unlink(f"{folder}/{word}")
        except FileNotFoundError:
            return False
        return True
    def hanging(real, word):
        def run(*arguments):
            if ordered(f"{word} waits"):
                open(f"{folder}/fifo").close()
            while ordered(f"{word} computes"):
                while True:
                    pass
            return real(*arguments)
        return run
    for holder, name, word in (
        (models.ModelDirectory, "names", "look"),
        (repository.ModelRepository, "_go_on", "main"),
        (server.RepositoryServer, "_handle", "service"),
    ):
        setattr(holder, name, hanging(getattr(holder, name), word))
elif "serve" in sys.orig_argv:
    from nnfmq.driver.process import workers
    workers.HEARTBEAT_CHECK_S = 0.5
"""


@pytest.fixture
def models(folder: Path) -> Path:
    """Return a directory with a model."""
    (folder / "models").mkdir()
    add_version(folder / "models", "adder", 1, adder(1))
    os.mkfifo(folder / "fifo")
    return folder / "models"


@pytest.fixture
def driver(folder: Path, models: Path) -> Iterator[Daemon]:
    """Return a driver whose repository serves the model, and follows `ORDERS`."""
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(ORDERS)
    environment = {**path_with(folder / "site"), settings.RUNTIMES.variable: ""}
    with running_daemon(folder / "d.sock", models=models, environment=environment) as daemon:
        with RepositoryPeer(daemon.path) as peer:
            peer.wait_for("adder", version=1)
        yield daemon


@pytest.mark.parametrize("order", ["main computes", "service waits"])
def test_a_repository_that_does_not_answer_is_replaced(folder: Path, driver: Daemon, order: str) -> None:
    with running_repository(driver) as repository, RepositoryPeer(driver.path) as peer:
        (folder / order).touch()
        if order.startswith("service"):
            peer.send(ListModels(77))
        with pytest.raises(nnfmq.DeadObject):
            peer.channel.receive(time.monotonic_ns() + 20 * 10**9)
        repository.wait_for_end()
    with RepositoryPeer(driver.path) as later:
        later.wait_for("adder", version=1)
    assert "the model repository has not answered for 1.5 s: it is replaced" in driver.program.errors()


def test_while_the_file_system_does_not_answer_models_are_served_and_later_changes_are_seen(
    folder: Path, models: Path, driver: Daemon
) -> None:
    with running_repository(driver) as repository, RepositoryPeer(driver.path) as peer:
        (folder / "look waits").touch()
        until(
            lambda: f"{models} has not answered for 1 s" in driver.program.errors(), "the log says that a look is slow"
        )
        assert peer.open("adder").description is not None
        add_version(models, "adder", 2, adder(2))  # another thread sees it, while the first one still waits
        assert peer.receive(VersionChanged) == VersionChanged("adder", 2)
        assert not repository.has_exited()
