"""Models by name: a driver with `--models`, its repository process, and what either survives.

Some versions have a file `kill`, `hang` or `stop`, on which the process that imports them does that to itself; and a
worker kills itself while it prepares the model of the name `deadly`.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from support.drivers import Daemon, Process, opened, running_daemon, short_folder, until
from support.model_folders import (
    RepositoryPeer,
    add_version,
    adder,
    running_repository,
)
from support.plugins import path_with
from support.tflite_files import Tensor, single

import nnfmq
from nnfmq.base import settings
from nnfmq.base.paths import models_socket
from nnfmq.base.scheduling import BATCH, FOREGROUND_NICE, scheduling_of
from nnfmq.hal.errors import ErrorStatus
from nnfmq.serialize.repository_protocol import ListModels, ModelState, OpenModel, VersionChanged

X = np.array([[0, 1, 2, 3]], np.float32)
READY, LOADING, UNAVAILABLE = ModelState.READY, ModelState.LOADING, ModelState.UNAVAILABLE

ORDERS = """
import ctypes, os, signal, sys
if "--import" in sys.orig_argv:
    from nnfmq.repository import version_import
    def import_version(folder, socket, real=version_import.import_version):
        orders = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
        names = os.listdir(folder)
        ctypes.CDLL(None).prctl(15, b"importing", 0, 0, 0)  # PR_SET_NAME: its sandbox writes no files
        for name in names:
            if name in orders:
                os.kill(os.getpid(), orders[name])
            if name == "hang":
                signal.pause()
        return real(folder, socket)
    version_import.import_version = import_version
if "--serve" in sys.orig_argv:
    from nnfmq.repository import repository
    repository.LOOK_S, repository.RESTORE_PAUSE_S, repository.SLOW_LOAD_S = 0.1, 0.5, 1.0
if "serve" in sys.orig_argv:
    from nnfmq.driver.session import model_calls
    def prepare(session, message, *rest, real=model_calls._prepare_and_call_back):
        if message.name == "deadly":
            os.kill(os.getpid(), signal.SIGKILL)
        real(session, message, *rest)
    model_calls._prepare_and_call_back = prepare
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment of a driver whose processes follow `ORDERS`, and that hosts no runtime."""
    site = tmp_path_factory.mktemp("site")
    (site / "sitecustomize.py").write_text(ORDERS)
    return {**path_with(site), settings.RUNTIMES.variable: ""}


@pytest.fixture(scope="module")
def shared_driver(environment: dict[str, str]) -> Iterator[Daemon]:
    """Return a driver for the tests in which neither it nor its repository ends."""
    with short_folder() as folder:
        (folder / "models").mkdir()
        with running_daemon(folder / "d.sock", models=folder / "models", environment=environment) as daemon:
            yield daemon


@pytest.fixture
def own_driver(folder: Path, environment: dict[str, str]) -> Iterator[Daemon]:
    """Return a driver for one test."""
    (folder / "models").mkdir()
    with running_daemon(folder / "d.sock", models=folder / "models", environment=environment) as daemon:
        yield daemon


needs_own_driver = pytest.mark.usefixtures("own_driver")


@pytest.fixture
def driver(request: pytest.FixtureRequest, shared_driver: Daemon) -> Daemon:
    """Return a driver with a repository: its own for a test that is marked, otherwise the shared one."""
    has_own = "own_driver" in request.fixturenames
    found: Daemon = request.getfixturevalue("own_driver") if has_own else shared_driver
    return found


@pytest.fixture
def models(driver: Daemon, tmp_path: Path) -> Path:
    """Return the driver's directory for models. It is empty, and the repository has seen that."""
    directory = driver.path.with_name("models")
    for entry in list(directory.iterdir()):
        shutil.move(entry, tmp_path / entry.name)
    with RepositoryPeer(driver.path) as peer:
        until(lambda: not peer.entries(), "the models of the test before are gone")
    return directory


@pytest.fixture
def logged(driver: Daemon) -> Callable[[], str]:
    """Return a function that returns what the driver has logged since the test began."""
    begin = len(driver.program.errors())
    return lambda: driver.program.errors()[begin:]


@pytest.fixture
def peer(driver: Daemon) -> Iterator[RepositoryPeer]:
    """Return a client of the repository."""
    with RepositoryPeer(driver.path) as made:
        yield made


def added(driver: Daemon, name: str) -> float:
    """Return what a model adds, as a new client computes it."""
    with RepositoryPeer(driver.path) as peer, driver.connect() as client, peer.prepared(client, name) as model:
        (result,) = model.execute(X)
    assert (result - X == result[0, 0]).all()
    return float(result[0, 0])


def importing(repository: Process) -> Process:
    """Return the process that imports a version, once it waits for ever, or is stopped."""
    found: list[Process] = []

    def runs() -> bool:
        if not found:
            found.extend(opened(repository.children()[:1]))
        return bool(found) and hangs(found[0])

    until(runs, "a version is imported")
    return found[0]


def hangs(importer: Process) -> bool:
    """Return whether a process has begun to import a version, and waits for ever, or is stopped."""
    name = Path(f"/proc/{importer.pid}/comm").read_text()
    return name == "importing\n" and set(importer.states()) in ({"S"}, {"T"})


# ---------------------------------------------------------------------------------------------------------- versions


def test_a_new_version_replaces_the_old_one_and_those_who_opened_the_model_are_told(
    models: Path, driver: Daemon, peer: RepositoryPeer
) -> None:
    add_version(models, "adder", 1, adder(1))
    peer.wait_for("adder", version=1, state=READY, device="compiled")
    assert added(driver, "adder") == 1
    first = peer.open("adder").description
    add_version(models, "adder", 2, adder(2))
    assert peer.receive(VersionChanged) == VersionChanged("adder", 2)
    second = peer.open("adder").description
    assert first is not None and second is not None
    assert (first.version, second.version) == (1, 2)
    assert added(driver, "adder") == 2
    assert peer.open("adder", 2).status is ErrorStatus.NONE


def test_the_newest_version_is_served_when_a_driver_starts(folder: Path, environment: dict[str, str]) -> None:
    models = folder / "models"
    models.mkdir()
    for version in (1, 2, 10):
        add_version(models, "adder", version, adder(version))
    with running_daemon(folder / "d.sock", models=models, environment=environment) as driver:
        with RepositoryPeer(driver.path) as peer:
            peer.wait_for("adder", version=10)
        assert added(driver, "adder") == 10


@pytest.mark.parametrize(
    ("content", "options", "reason"),
    [
        (b"this is no model at all", "", "model.tflite: "),
        (adder(2)[:-100], "", "model.tflite: "),
        (single("RFFT2D", [Tensor("x", (1, 4)), Tensor("y", (1, 3), "COMPLEX64")]), "", "RFFT2D"),
        (adder(2), "device = 3", "model.toml: device is 3; allowed: the name of a device of the driver"),
        (adder(2), "device = 'gpu'", "there is no device 'gpu'; this driver has: compiled, "),
        (
            adder(2),
            "thread = 3",
            "model.toml: there is no key 'thread'; allowed: device, preference, priority, batch, ",
        ),
        (adder(2), "signature = 'serve'", "there is no signature 'serve'"),
    ],
    ids=["no model", "truncated", "unsupported", "wrong value", "no such device", "unknown key", "no such signature"],
)
def test_a_broken_version_leaves_the_old_one_serving_and_the_reason_is_known(
    models: Path,
    driver: Daemon,
    peer: RepositoryPeer,
    content: bytes,
    options: str,
    reason: str,
    logged: Callable[[], str],
) -> None:
    add_version(models, "adder", 1, adder(1))
    peer.wait_for("adder", version=1, failed_version=0)
    broken = add_version(models, "adder", 2, content, options=options)
    entry = peer.wait_for("adder", failed_version=2)
    assert (entry.state, entry.version) == (READY, 1)
    assert reason in entry.reason and str(models) not in entry.reason
    assert added(driver, "adder") == 1
    log = logged()
    assert "version 2 of model adder is not served: " in log and "version 1 is served" in log
    (broken / "model.tflite").write_bytes(adder(3))
    (broken / "model.toml").write_text("")
    peer.wait_for("adder", version=2, failed_version=0, reason="")
    assert added(driver, "adder") == 3


def test_a_model_without_a_version_that_can_be_prepared_is_unavailable(models: Path, peer: RepositoryPeer) -> None:
    folder = add_version(models, "both", 1, adder(1))
    (folder / "model.onnx").write_bytes(b"")
    add_version(models, "neither", 1, adder(1), file="other.tflite")
    (models / "nothing").mkdir()
    peer.wait_for("both", state=UNAVAILABLE, version=0, failed_version=1)
    peer.wait_for("neither", state=UNAVAILABLE, version=0, failed_version=1)
    peer.wait_for("nothing", state=UNAVAILABLE, failed_version=0, reason="there is no version of it")
    both, neither, nothing = (peer.open(name) for name in ("both", "neither", "nothing"))
    assert (both.status, neither.status) == (ErrorStatus.DEVICE_UNAVAILABLE,) * 2
    assert "version 1: the version has both model.tflite and model.onnx; it needs one file" in both.message
    assert "version 1: the version has no model; it needs one file, model.tflite or model.onnx" in neither.message
    assert (nothing.status, nothing.message) == (ErrorStatus.INVALID_ARGUMENT, "model 'nothing' has no version")


def test_other_folders_and_files_are_ignored(models: Path, peer: RepositoryPeer) -> None:
    add_version(models, "adder", 1, adder(1))
    for name in ("02", "0", "-3", "latest", "4.5", ".5", "99999999999"):
        (models / "adder" / name).mkdir()
    (models / "adder" / "9").write_text("a file")
    (models / ".git" / "1").mkdir(parents=True)
    (models / "with space").mkdir()
    (models / "README.md").write_text("a file")
    peer.wait_for("adder", version=1, failed_version=0)
    assert list(peer.entries()) == ["adder"]


def test_an_older_version_takes_the_place_of_one_that_is_removed(
    models: Path, driver: Daemon, peer: RepositoryPeer
) -> None:
    add_version(models, "adder", 1, adder(1))
    newer = add_version(models, "adder", 2, adder(2))
    peer.wait_for("adder", version=2)
    peer.open("adder")
    os.rename(newer, models / ".removed")
    assert peer.receive(VersionChanged) == VersionChanged("adder", 1)
    assert added(driver, "adder") == 1


def test_an_open_model_moves_to_newer_versions_and_keeps_one_that_is_removed(
    models: Path, driver: Daemon, peer: RepositoryPeer
) -> None:
    add_version(models, "adder", 1, adder(1))
    peer.wait_for("adder", version=1)
    with driver.connect() as client, client.model("adder") as model, model.burst() as burst:
        for value in (1, 2, 3):
            if value > 1:
                add_version(models, "adder", value, adder(value))
            until(lambda value=value: (burst.execute(X)[0] == X + value).all(), f"version {value} computes")  # type: ignore[misc]
            assert (model.execute(X)[0] == X + value).all()
        os.rename(models / "adder" / "3", models / ".removed")
        until(lambda: [entry.version for entry in client.models()] == [2], "version 2 is served")
        assert (burst.execute(X)[0] == X + 3).all()
        with client.model("adder") as older:
            assert (older.execute(X)[0] == X + 2).all()
        with pytest.raises(nnfmq.ModelNotFound, match="version 1"):
            client.model("adder", 1)


def test_a_model_that_is_removed_is_no_longer_served_but_goes_on_where_it_is_open(
    models: Path, driver: Daemon, peer: RepositoryPeer
) -> None:
    add_version(models, "adder", 1, adder(1))
    add_version(models, "other", 1, adder(7))
    peer.wait_for("adder", version=1)
    peer.wait_for("other", version=1)
    with driver.connect() as client, peer.prepared(client, "adder") as model:
        os.rename(models / "adder", models / ".removed")
        until(lambda: "adder" not in peer.entries(), "the model is gone")
        reply = peer.open("adder")
        assert (reply.status, reply.message) == (
            ErrorStatus.INVALID_ARGUMENT,
            "there is no model 'adder'; those of this driver: other",
        )
        assert (model.execute(X)[0] == X + 1).all()
    assert added(driver, "other") == 7


def test_while_the_directory_cannot_be_read_all_models_stay(
    models: Path, driver: Daemon, peer: RepositoryPeer, logged: Callable[[], str]
) -> None:
    add_version(models, "adder", 1, adder(1))
    peer.wait_for("adder", version=1)
    os.rename(models, models.with_name("away"))
    until(lambda: "the models remain those of the last look" in logged(), "it is logged")
    assert added(driver, "adder") == 1
    os.rename(models.with_name("away"), models)
    add_version(models, "adder", 2, adder(2))
    peer.wait_for("adder", version=2)
    assert logged().count("the models remain") == 1


@needs_own_driver
def test_the_memories_of_a_replaced_version_are_closed(models: Path, driver: Daemon, peer: RepositoryPeer) -> None:
    add_version(models, "adder", 1, adder(1))
    peer.wait_for("adder", version=1)
    with running_repository(driver) as repository:
        before = repository.descriptors()
        assert sum("nnfmq-constants" in file for file in before) == 1
        add_version(models, "adder", 2, adder(2))
        peer.wait_for("adder", version=2)
        until(lambda: repository.descriptors() == before, f"the repository has the same descriptors: {before}")


# ---------------------------------------------------------------------------------------------------------- crashes


def test_a_version_whose_import_is_killed_is_tried_three_times_while_others_are_served(
    models: Path, driver: Daemon, peer: RepositoryPeer, logged: Callable[[], str]
) -> None:
    add_version(models, "adder", 1, adder(1))
    peer.wait_for("adder", version=1)
    with running_repository(driver) as repository:
        broken = add_version(models, "adder", 2, adder(2), file="kill")
        until(lambda: logged().count("version 2 of model adder is not served") == 3, "three attempts")
        add_version(models, "other", 1, adder(5))
        peer.wait_for("other", version=1)
        entry = peer.entries()["adder"]
        assert (entry.version, entry.failed_version) == (1, 2)
        assert entry.reason == "the import process was killed by signal 9"
        log = logged()
        assert log.count("version 2 of model adder is not served") == 3
        assert "it is tried again when its files change" in log.splitlines()[-1]
        os.rename(broken / "kill", broken / "model.tflite")
        peer.wait_for("adder", version=2, failed_version=0)
        assert not repository.has_exited()
    assert added(driver, "adder") == 2


def test_an_import_that_hangs_delays_no_other_model(models: Path, driver: Daemon, peer: RepositoryPeer) -> None:
    add_version(models, "hanging", 1, adder(1), file="hang")
    with running_repository(driver) as repository, importing(repository) as child:
        assert scheduling_of(child.pid) == BATCH
        nice = [os.getpriority(os.PRIO_PROCESS, process.pid) for process in (repository, child)]
        assert nice[1] - nice[0] == FOREGROUND_NICE
        add_version(models, "adder", 1, adder(1))
        peer.wait_for("adder", version=1)
        assert peer.entries()["hanging"].state is LOADING
        reply = peer.open("hanging")
        assert (reply.status, reply.message) == (
            ErrorStatus.DEVICE_UNAVAILABLE,
            "model 'hanging' is still being prepared",
        )
        assert not child.has_exited()


def test_imports_that_hang_end_when_their_files_are_removed(
    models: Path, driver: Daemon, peer: RepositoryPeer, logged: Callable[[], str]
) -> None:
    for name in ("first", "second"):  # as many as are imported at a time
        add_version(models, name, 1, adder(1), file="hang")
    with running_repository(driver) as repository, ExitStack() as stack:
        until(lambda: len(repository.children()) == 2, "both are imported")
        imports = [stack.enter_context(process) for process in opened(repository.children())]
        until(lambda: all(map(hangs, imports)), "both hang")
        add_version(models, "adder", 1, adder(1))
        peer.wait_for("adder", state=LOADING)
        for name in ("first", "second"):  # at once: of a part of a model the repository would say that it is not served
            os.rename(models / name, models.parent / f"removed-{name}")
        peer.wait_for("adder", version=1)
        for process in imports:  # the repository may have looked between the two renames
            process.wait_for_end()
    assert "is not served" not in logged()


@needs_own_driver
def test_a_model_that_kills_the_worker_fails_and_the_others_are_prepared_again(
    models: Path, driver: Daemon, peer: RepositoryPeer
) -> None:
    add_version(models, "adder", 1, adder(1))
    peer.wait_for("adder", version=1)
    add_version(models, "deadly", 1, adder(2))
    until(lambda: driver.program.errors().count("version 1 of model deadly is not served") == 3, "three attempts")
    assert peer.entries()["deadly"].state is UNAVAILABLE
    assert prepared_by_repository(driver) == ["adder"]
    assert added(driver, "adder") == 1


def prepared_by_repository(driver: Daemon) -> list[str]:
    """Return the models that the repository has prepared in the driver, once there are any."""
    found: list[str] = []
    with running_repository(driver) as repository, driver.connect() as client:

        def has_some() -> bool:
            found[:] = [
                model.name
                for each in client.statistics().clients
                if each.pid == repository.pid
                for model in each.models
            ]
            return bool(found)

        until(has_some, "the repository has prepared models")
    return found


@needs_own_driver
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_if_the_repositorys_worker_is_killed_or_stopped_its_models_are_prepared_again(
    models: Path, driver: Daemon, peer: RepositoryPeer, number: signal.Signals
) -> None:
    add_version(models, "adder", 1, adder(1))
    peer.wait_for("adder", version=1)
    with running_repository(driver) as repository, driver.connect() as client:
        workers = [each.worker_pid for each in client.statistics().clients if each.pid == repository.pid]
        with Process(workers[0]) as worker:
            worker.send(number)
            worker.wait_for_end()
        assert prepared_by_repository(driver) == ["adder"]
        assert not repository.has_exited()
    until(lambda: "the worker that kept the models has died" in driver.program.errors(), "the log says so")
    assert added(driver, "adder") == 1


@needs_own_driver
def test_a_killed_repository_comes_back_and_costs_the_drivers_clients_nothing(
    models: Path, driver: Daemon, peer: RepositoryPeer
) -> None:
    add_version(models, "adder", 1, adder(1))
    peer.wait_for("adder", version=1)
    with driver.connect() as client, peer.prepared(client, "adder") as model, model.burst() as burst:
        for _ in range(2):
            with running_repository(driver) as repository, RepositoryPeer(driver.path) as other:
                other.entries()
                repository.kill()
                with pytest.raises(nnfmq.DeadObject):
                    other.channel.receive(time.monotonic_ns() + 10**10)
                with RepositoryPeer(driver.path) as early:  # connects before there is another one
                    early.wait_for("adder", version=1)
                assert repository.has_exited()
        assert (burst.execute(X)[0] == X + 1).all()
    assert added(driver, "adder") == 1
    assert "the model repository ended with status -9; it is started again" in driver.program.errors()


@needs_own_driver
def test_a_repository_that_is_stopped_is_replaced_and_the_driver_serves_its_clients(
    models: Path, driver: Daemon, peer: RepositoryPeer
) -> None:
    add_version(models, "adder", 1, adder(1))
    peer.wait_for("adder", version=1)
    with driver.connect() as client, peer.prepared(client, "adder") as model, running_repository(driver) as repository:
        repository.stop()
        peer.send(ListModels(77))
        assert (model.execute(X)[0] == X + 1).all()
        with pytest.raises(nnfmq.DeadObject):
            peer.channel.receive(time.monotonic_ns() + 10**10)
        with RepositoryPeer(driver.path) as later:
            later.wait_for("adder", version=1)
    assert "the model repository is stopped: it is replaced" in driver.program.errors()


def test_an_import_that_is_stopped_ends_and_leaves_its_place(
    models: Path, driver: Daemon, peer: RepositoryPeer
) -> None:
    add_version(models, "stopped", 1, adder(1), file="stop")
    peer.wait_for("stopped", failed_version=1)
    assert peer.entries()["stopped"].reason == "the import process was killed by signal 9"


# ---------------------------------------------------------------------------------------------------------- ends


@needs_own_driver
@pytest.mark.parametrize("order", ["hang", "stop"])
def test_sigterm_leaves_nothing_behind_also_while_a_version_is_imported(
    models: Path, driver: Daemon, peer: RepositoryPeer, order: str
) -> None:
    add_version(models, "adder", 1, adder(1))
    peer.wait_for("adder", version=1)
    add_version(models, "adder", 2, adder(1), file=order)
    with running_repository(driver) as repository, importing(repository) as child:
        driver.end()  # fails if a process or a socket is left
        child.wait_for_end()


@needs_own_driver
def test_sigterm_ends_a_stopped_repository(models: Path, driver: Daemon, peer: RepositoryPeer) -> None:
    add_version(models, "adder", 1, adder(1))
    peer.wait_for("adder", version=1)
    with running_repository(driver) as repository:
        repository.stop()
        driver.end()


@pytest.mark.parametrize("is_stopped", [False, True])
def test_if_the_driver_is_killed_the_repository_ends_and_the_next_driver_serves(
    folder: Path, environment: dict[str, str], is_stopped: bool
) -> None:
    models = folder / "models"
    models.mkdir()
    with running_daemon(folder / "d.sock", models=models, environment=environment) as driver, ExitStack() as stack:
        add_version(models, "adder", 1, adder(1))
        with RepositoryPeer(driver.path) as peer:
            peer.wait_for("adder", version=1)
        add_version(models, "adder", 2, adder(1), file="hang")
        repository = stack.enter_context(running_repository(driver))
        others = [
            stack.enter_context(process) for process in (importing(repository), *opened(driver.process.children()))
        ]
        if is_stopped:
            repository.stop()
        driver.kill()
        repository.wait_for_end()
        for process in others:
            process.wait_for_end()
    with running_daemon(folder / "d.sock", models=models, environment=environment) as driver:
        assert added_soon(driver, "adder") == 1


def test_a_driver_without_models_removes_the_socket_that_a_killed_one_with_models_has_left(
    folder: Path, tmp_path: Path
) -> None:
    with running_daemon(folder / "d.sock", models=tmp_path) as driver:
        driver.kill()
        assert models_socket(driver.path).exists()
    with running_daemon(folder / "d.sock") as driver, driver.connect() as client:
        assert not models_socket(driver.path).exists()
        with pytest.raises(nnfmq.DeviceUnavailable, match="has no model repository: start it with"):
            client.models()


def test_a_driver_without_models_leaves_another_driver_at_that_path_alone(folder: Path) -> None:
    with running_daemon(models_socket(folder / "d.sock")) as other:
        with running_daemon(folder / "d.sock") as driver:
            driver.process.send(signal.SIGTERM)
            assert driver.program.wait() == 0
        other.connect().close()


def added_soon(driver: Daemon, name: str) -> float:
    with RepositoryPeer(driver.path) as peer:
        peer.wait_for(name, state=READY)
    return added(driver, name)


# ---------------------------------------------------------------------------------------------------------- bad peers


def test_a_client_that_breaks_the_protocol_loses_its_connection_and_others_are_served(
    models: Path, driver: Daemon, peer: RepositoryPeer
) -> None:
    add_version(models, "adder", 1, adder(1))
    peer.wait_for("adder", version=1)
    with RepositoryPeer(driver.path) as bad:
        bad.channel.send(b"no message")
        with pytest.raises(nnfmq.DeadObject):
            bad.channel.receive(time.monotonic_ns() + 10**10)
    assert peer.entries()["adder"].state is READY


def ask_without_end(peer: RepositoryPeer) -> None:
    for call in itertools.count():
        peer.send(OpenModel(call, "adder"))


def test_a_client_that_does_not_read_loses_its_connection(models: Path, driver: Daemon, peer: RepositoryPeer) -> None:
    add_version(models, "adder", 1, adder(1))
    peer.wait_for("adder", version=1)
    with RepositoryPeer(driver.path) as bad:
        with pytest.raises(nnfmq.DeadObject):
            ask_without_end(bad)
        assert peer.entries()["adder"].state is READY
    with running_repository(driver) as repository:
        assert not repository.has_exited()


@needs_own_driver
def test_ctrl_c_ends_driver_and_repository(models: Path, driver: Daemon, peer: RepositoryPeer) -> None:
    peer.entries()
    with running_repository(driver) as repository:
        driver.program.interrupt()
        assert driver.program.wait() == 0
        repository.wait_for_end()
    assert driver.program.errors() == ""
