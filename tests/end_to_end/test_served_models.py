"""Models by name with a driver's own repository: what an application sees while files are added, broken and removed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from support.drivers import LIMIT_S, Daemon, InThread, Process, running_daemon, until
from support.model_folders import add_version, adder

import nnfmq
from nnfmq.serialize.repository_protocol import ModelState

X = np.zeros((1, 4), np.float32)


@pytest.fixture
def models(folder: Path) -> Path:
    """Return a directory with version 1 of the model `adder`."""
    (folder / "models").mkdir()
    add_version(folder / "models", "adder", 1, adder(1))
    return folder / "models"


@pytest.fixture
def driver(folder: Path, models: Path) -> Iterator[Daemon]:
    """Return a driver that serves the models of `models`."""
    with running_daemon(folder / "d.sock", models=models) as daemon:
        yield daemon


@pytest.fixture
def served(driver: Daemon) -> Iterator[nnfmq.Client]:
    """Return a client of that driver, which recovers."""
    with nnfmq.connect(driver.path, timeout=LIMIT_S, recover=True) as client:
        yield client


def repository_pid(driver: Daemon) -> int:
    """Return the pid of the driver's model repository."""
    for pid in driver.process.children():
        if b"nnfmq.repository" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise AssertionError("there is none")


def test_a_model_moves_when_a_version_is_added_and_not_when_that_is_broken(models: Path, served: nnfmq.Client) -> None:
    with served.model("adder") as model, model.burst() as burst:
        assert (model.version, model.device) == (1, "compiled")
        assert (burst.execute(X)[0] == 1).all()
        add_version(models, "adder", 2, b"no model")
        until(lambda: served.models()[0].failed_version == 2, "the repository has tried it")
        assert (burst.execute(X)[0] == 1).all()
        add_version(models, "adder", 3, adder(3))
        until(lambda: model.version == 3, "the model moves")
        assert (burst.execute(X)[0] == 3).all()
        assert (model.execute(X)[0] == 3).all()
        assert burst.version == 3


def test_a_removed_model_goes_on_until_it_is_closed(models: Path, served: nnfmq.Client) -> None:
    with served.model("adder") as model:
        shutil.rmtree(models / "adder")
        until(lambda: not served.models(), "the repository has noticed it")
        with pytest.raises(nnfmq.ModelNotFound, match="it has: no models at all"):
            served.model("adder")
        assert (model.execute(X)[0] == 1).all()


def test_a_model_that_is_loaded_when_the_client_connects_is_waited_for(models: Path, served: nnfmq.Client) -> None:
    add_version(models, "late", 1, adder(5))
    until(lambda: any(entry.name == "late" for entry in served.models()), "the repository has seen it")
    with served.model("late", timeout=LIMIT_S) as model:
        assert (model.execute(X)[0] == 5).all()


def test_models_go_on_when_the_repository_is_killed_and_see_what_changes_later(
    models: Path, driver: Daemon, served: nnfmq.Client
) -> None:
    with served.model("adder") as model, model.burst() as burst:
        with Process(repository_pid(driver)) as repository:
            repository.kill()
            repository.wait_for_end()
        assert (burst.execute(X)[0] == 1).all()
        assert [entry.name for entry in served.models(timeout=LIMIT_S)] == ["adder"]
        with served.model("adder", timeout=LIMIT_S) as again:
            assert (again.execute(X)[0] == 1).all()
        add_version(models, "adder", 2, adder(2))
        until(lambda: model.version == 2, "the model moves")
        assert (burst.execute(X)[0] == 2).all()


def test_a_model_goes_on_in_the_next_driver_and_moves_there(folder: Path, models: Path) -> None:
    path = folder / "d.sock"
    with ExitStack() as stack:
        with running_daemon(path, models=models):
            client = stack.enter_context(nnfmq.connect(path, recover=True, timeout=LIMIT_S))
            model = stack.enter_context(client.model("adder", timeout=LIMIT_S))
            burst = stack.enter_context(model.burst())
            assert (burst.execute(X)[0] == 1).all()
        add_version(models, "adder", 2, adder(2))
        executing = InThread.start(lambda: burst.execute(X, timeout=LIMIT_S))
        stack.enter_context(running_daemon(path, models=models))
        assert (executing.wait().value[0] == burst.version).all()
        until(lambda: model.version == 2, "the model moves, once the repository has looked twice")
        assert (burst.execute(X)[0] == 2).all()
        assert [entry.state for entry in client.models()] == [ModelState.READY]
        burst.close()
        client.close()
