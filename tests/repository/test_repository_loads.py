"""Loads of versions, in every order and with every error. Driver, clients and import processes are doubles."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.drivers import until

import nnfmq
from nnfmq.repository import repository
from nnfmq.repository.models import ModelDirectory, VersionState
from nnfmq.repository.repository import LOADS_MAX, ModelRepository
from nnfmq.repository.version_import import (
    ImportCancellation,
    ImportCrashed,
    ImportedModel,
    ImportedVersion,
    VersionOptions,
)
from nnfmq.serialize.repository_protocol import ModelDescription, ModelEntry, ModelState


class FakeMemory:
    """A memory of a model."""

    closed = False

    def close(self) -> None:
        self.closed = True


class FakePrepared(FakeMemory):
    """A prepared model."""

    device = "reference"

    def __init__(self) -> None:
        self.connection = SimpleNamespace(is_open=True)


class FakeDriver:
    """Prepares every model, unless `error` is set."""

    socket = Path("/no/driver")

    def __init__(self) -> None:
        self.prepared: list[tuple[str, FakePrepared]] = []
        self.error: Exception | None = None

    def prepare(self, name: str, _version: int, _imported: ImportedModel, _memories: object) -> FakePrepared:
        if self.error is not None:
            raise self.error
        self.prepared.append((name, FakePrepared()))
        return self.prepared[-1][1]


class FakeServer:
    """Keeps what it is told to serve."""

    def __init__(self) -> None:
        self.published: list[ModelDescription] = []
        self.entries: dict[str, ModelEntry] = {}

    def publish(self, description: ModelDescription, _memories: object, entries: Iterable[ModelEntry]) -> None:
        self.published.append(description)
        self.set_entries(entries)
        assert self.entries[description.name].version == description.version

    def withdraw(self, name: str) -> None:
        self.published = [each for each in self.published if each.name != name]

    def set_entries(self, entries: Iterable[ModelEntry]) -> None:
        self.entries = {entry.name: entry for entry in entries}

    @property
    def versions(self) -> list[tuple[str, int]]:
        """The names and versions that it was told to serve, in order."""
        return [(each.name, each.version) for each in self.published]


class Setup:
    """A repository of a directory. Each import waits until the test lets it end with a result or an error."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.driver, self.server = FakeDriver(), FakeServer()
        self.memories: list[FakeMemory] = []
        self._lock = threading.Condition()
        self._ended: dict[str, Exception | None] = {}
        self.running: list[str] = []
        self.killed: list[str] = []
        monkeypatch.setattr(repository, "import_in_process", self._import)
        directory = ModelDirectory(path)
        self.directory = directory
        self.repository = ModelRepository(directory, self.driver, self.server)  # type: ignore[arg-type]

    def _import(self, folder: Path, socket: Path, cancellation: ImportCancellation) -> ImportedVersion:
        assert socket == self.driver.socket
        key = f"{folder.parent.name}/{folder.name}"
        cancellation.started(SimpleNamespace(pid=os.getpid(), kill=partial(self.killed.append, key)))  # type: ignore[arg-type]
        with self._lock:
            self.running.append(key)
            self._lock.wait_for(lambda: key in self._ended, 30)
            self.running.remove(key)
            error = self._ended.pop(key)
        if error is not None:
            raise error
        self.memories.append(FakeMemory())
        model = ImportedModel(VersionOptions(), b"model", (), (), (), ())
        return ImportedVersion(model, (self.memories[-1],))  # type: ignore[arg-type]

    def add(self, name: str, version: int) -> Path:
        """Add a version, which seems to have been there for long."""
        folder = self.path / name / str(version)
        folder.mkdir(parents=True)
        (folder / "model.tflite").write_bytes(b"")
        return folder

    def look(self) -> None:
        """Look twice, so that new versions count as complete."""
        for _ in range(2):
            self.repository.note(self.directory.look())

    def restore(self) -> None:
        """Look, and wait until each of the two models has been prepared again, or that has failed."""
        self.look()
        for _ in range(2):
            self.repository.handle_event(30)

    def wait_for_imports(self, *expected: str) -> None:
        """Wait until exactly these versions are being imported."""
        until(lambda: sorted(self.running) == sorted(expected), f"{expected} are imported, not {self.running}")

    def end(self, key: str, error: Exception | None = None) -> None:
        """Let an import end, and handle its result."""
        with self._lock:
            self._ended[key] = error
            self._lock.notify_all()
        self.repository.handle_event(30)


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setup]:
    made = Setup(tmp_path, monkeypatch)
    yield made
    while made.running:
        made.end(made.running[0], nnfmq.InvalidArgument("the test ends"))


def test_a_version_is_prepared_and_published(setup: Setup) -> None:
    setup.add("m", 1)
    setup.look()
    setup.wait_for_imports("m/1")
    assert setup.server.entries["m"].state is ModelState.LOADING
    setup.end("m/1")
    assert setup.server.versions == [("m", 1)]
    assert (setup.server.published[0].device, setup.server.published[0].model) == ("reference", b"model")
    assert setup.server.entries["m"].state is ModelState.READY
    assert not setup.memories[0].closed


def test_the_model_that_was_prepared_before_is_released(setup: Setup) -> None:
    setup.add("m", 1)
    setup.look()
    setup.end("m/1")
    setup.add("m", 2)
    setup.look()
    setup.end("m/2")
    assert setup.server.versions == [("m", 1), ("m", 2)]
    assert [prepared.closed for _, prepared in setup.driver.prepared] == [True, False]


@pytest.mark.parametrize("is_seen", [False, True], ids=["at the end of the load", "by a look"])
def test_a_version_that_changes_while_it_is_loaded_is_loaded_again(setup: Setup, is_seen: bool) -> None:
    folder = setup.add("m", 1)
    setup.look()
    setup.wait_for_imports("m/1")
    (folder / "model.tflite").write_bytes(b"changed")
    if is_seen:
        setup.look()
    setup.end("m/1")
    assert setup.server.versions == []
    assert setup.memories[0].closed and setup.driver.prepared[0][1].closed
    setup.wait_for_imports(*(["m/1"] if is_seen else []))
    setup.look()
    setup.wait_for_imports("m/1")
    setup.end("m/1")
    assert setup.server.versions == [("m", 1)]


@pytest.mark.parametrize("error", [None, nnfmq.InvalidArgument("its files are gone")])
def test_a_model_that_is_removed_while_it_is_loaded_is_forgotten(
    setup: Setup, error: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    setup.add("m", 1)
    setup.look()
    setup.wait_for_imports("m/1")
    os.rename(setup.path / "m", setup.path / ".removed")
    assert setup.killed == []
    setup.look()
    assert setup.killed == ["m/1", "m/1"], "at each of both looks"
    setup.end("m/1", error)
    assert (setup.server.versions, setup.server.entries) == ([], {})
    assert all(memory.closed for memory in setup.memories)
    assert caplog.text == ""


def test_if_the_files_cannot_be_examined_after_a_load_the_next_look_tells(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup.add("m", 1)
    setup.look()
    setup.wait_for_imports("m/1")
    monkeypatch.setattr(ModelDirectory, "state", fail_with(OSError(errno.ESTALE, "Stale file handle")))
    setup.end("m/1")
    assert setup.server.versions == [("m", 1)]


def fail_with(error: Exception) -> Callable[..., Any]:
    def fail(*_: object) -> None:
        raise error

    return fail


def test_at_most_two_versions_are_loaded_at_a_time(setup: Setup) -> None:
    assert LOADS_MAX == 2
    for name in ("a", "b", "c"):
        setup.add(name, 1)
    setup.look()
    setup.wait_for_imports("a/1", "b/1")
    setup.end("a/1")
    setup.wait_for_imports("b/1", "c/1")


def test_loads_that_take_long_leave_their_places_to_others_up_to_a_limit(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repository, "SLOW_LOAD_S", 0.0)
    monkeypatch.setattr(repository, "SLOW_LOADS_MAX", 2)
    for name in ("a", "b", "c", "d", "e"):
        setup.add(name, 1)
    for _ in range(4):
        setup.look()
    setup.wait_for_imports("a/1", "b/1", "c/1", "d/1")


def test_an_older_version_is_loaded_if_the_newest_one_takes_long_and_none_is_served(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup.add("m", 1)
    setup.add("m", 2)
    setup.look()
    setup.wait_for_imports("m/2")
    setup.look()
    setup.wait_for_imports("m/2")
    monkeypatch.setattr(repository, "SLOW_LOAD_S", 0.0)
    setup.look()
    setup.wait_for_imports("m/1", "m/2")
    assert setup.killed == []
    setup.end("m/2")
    assert (setup.server.versions, setup.killed) == ([("m", 2)], ["m/1"])
    setup.end("m/1")  # although it was killed
    assert setup.server.versions == [("m", 2)]
    assert [memory.closed for memory in setup.memories] == [False, True]


def test_while_a_version_is_served_only_one_is_loaded(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repository, "SLOW_LOAD_S", 0.0)
    setup.add("m", 1)
    setup.look()
    setup.end("m/1")
    setup.add("m", 2)
    setup.add("m", 3)
    setup.look()
    setup.wait_for_imports("m/3")
    setup.look()
    setup.wait_for_imports("m/3")


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        (nnfmq.InvalidArgument("bad\n  operator"), ModelState.UNAVAILABLE, "bad; operator"),
        (nnfmq.GeneralFailure("declined"), ModelState.UNAVAILABLE, "declined"),
        (KeyError("a bug"), ModelState.UNAVAILABLE, "KeyError('a bug')"),
        (ImportCrashed("killed"), ModelState.LOADING, "killed"),
        (nnfmq.DeviceUnavailable("busy"), ModelState.LOADING, "busy"),
        (nnfmq.ResourceExhaustedTransient("memory"), ModelState.LOADING, "memory"),
        (nnfmq.ResourceExhaustedPersistent("quota"), ModelState.LOADING, "quota"),
        (OSError(errno.EAGAIN, "no process"), ModelState.LOADING, "[Errno 11] no process"),
        (MemoryError(), ModelState.LOADING, "there is not enough memory"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_an_error_fails_the_version_or_is_tried_again(
    setup: Setup, error: Exception, state: ModelState, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    setup.add("m", 1)
    setup.look()
    setup.end("m/1", error)
    entry = setup.server.entries["m"]
    assert (entry.state, entry.failed_version, entry.reason) == (state, 1, reason)
    assert f"version 1 of model m is not served: {reason}; no version is served; it is tried again" in caplog.text
    assert ("when its files change" in caplog.text) == (state is ModelState.UNAVAILABLE)
    caplog.clear()


def test_the_memories_of_a_version_that_cannot_be_prepared_are_closed(setup: Setup) -> None:
    setup.driver.error = nnfmq.DeadObject("the worker has died")
    setup.add("m", 1)
    setup.look()
    setup.end("m/1")
    assert setup.memories[0].closed
    assert (setup.server.entries["m"].state, setup.server.entries["m"].reason) == (
        ModelState.LOADING,
        "the worker has died",
    )


def test_one_model_that_cannot_be_read_stays_as_it_is_and_does_not_affect_others(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    setup.add("a", 1)
    setup.look()
    setup.end("a/1")

    def state(self: ModelDirectory, name: str, version: int, real: Any = ModelDirectory.state) -> VersionState:
        if name == "a":
            raise OSError(errno.EIO, "Input/output error", str(self.path / name))
        found: VersionState = real(self, name, version)
        return found

    monkeypatch.setattr(ModelDirectory, "state", state)
    setup.add("b", 1)
    setup.look()
    setup.end("b/1")
    assert setup.server.versions == [("a", 1), ("b", 1)]
    assert caplog.messages == [f"the models remain those of the last look: {setup.path / 'a'}: Input/output error"]


def test_models_are_prepared_again_after_the_worker_has_died_but_not_all_the_time(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b"):
        setup.add(name, 1)
        setup.look()
        setup.end(f"{name}/1")
    for _, lost in setup.driver.prepared:
        lost.connection.is_open = False
    setup.driver.error = nnfmq.DeadObject("the worker has died again")
    with caplog.at_level(logging.WARNING):
        setup.restore()
        setup.look()
    assert caplog.messages == [
        "the worker that kept the models has died: they are prepared again",
        "model a is not prepared in advance: the worker has died again",
        "model b is not prepared in advance: the worker has died again",
    ]
    setup.driver.error = None
    setup.repository._restore_at_s -= repository.RESTORE_PAUSE_S
    setup.restore()
    assert [name for name, _ in setup.driver.prepared] == ["a", "b", "a", "b"]
    assert [prepared.closed for _, prepared in setup.driver.prepared] == [True, True, False, False]


def test_a_model_is_prepared_again_although_a_load_has_connected_to_another_worker(setup: Setup) -> None:
    for name in ("a", "b"):
        setup.add(name, 1)
        setup.look()
        setup.end(f"{name}/1")
    (_, lost), (_, kept) = setup.driver.prepared
    lost.connection.is_open = False
    setup.look()
    setup.repository.handle_event(30)
    assert [name for name, _ in setup.driver.prepared] == ["a", "b", "a"]
    assert (lost.closed, kept.closed) == (True, False)
