"""The repository's connections: replies, notifications, and clients that break the rules. In this process."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.drivers import short_folder, until
from support.model_folders import RepositoryPeer

import nnfmq
from nnfmq.base.accounts import ServedUsers
from nnfmq.base.channel import Channel, Listener
from nnfmq.base.file_memory import FileMemory
from nnfmq.base.memory import Memory, sealed_size
from nnfmq.base.paths import models_socket
from nnfmq.hal.errors import ErrorStatus
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import Protection
from nnfmq.repository.server import RepositoryServer
from nnfmq.serialize import repository_protocol
from nnfmq.serialize.messages.common import MemoryData
from nnfmq.serialize.repository_protocol import (
    ListModels,
    ModelDescription,
    ModelEntry,
    ModelOpened,
    ModelState,
    OpenModel,
    RepositoryRole,
    VersionChanged,
)

INVALID, UNAVAILABLE = ErrorStatus.INVALID_ARGUMENT, ErrorStatus.DEVICE_UNAVAILABLE
X = (TensorInfo("x", (1,), "float32"),)


def description(name: str, version: int) -> ModelDescription:
    return ModelDescription(name, version, "reference", 1, 1, 1, False, b"model", (MemoryData(8, 0, 1),), X, X)


def memory(content: int) -> FileMemory:
    """Return sealed memory of eight equal bytes."""
    with Memory.create_constant(8, lambda fd: os.pwrite(fd, bytes([content % 256] * 8), 0), "test") as made:
        return FileMemory.from_fd(made.fileno(), 8, protection=Protection.READ)


def entry(name: str, state: ModelState, failed_version: int = 0, reason: str = "") -> ModelEntry:
    return ModelEntry(name, state, int(state is ModelState.READY), "reference", failed_version, reason, 0.0)


@pytest.fixture
def path() -> Iterator[Path]:
    """Return the path of a driver's socket; there is no driver."""
    with short_folder() as folder:
        yield folder / "d.sock"


@pytest.fixture
def server(path: Path) -> Iterator[RepositoryServer]:
    """Return a server that has started, as a process that has adopted its socket."""
    with Listener.create(models_socket(path)) as listener:
        made = RepositoryServer(Listener.adopt(os.dup(listener.fileno())), heartbeat_fd=-1)
        made.start()
        yield made
        made.close()
        made.close()
        assert models_socket(path).exists()  # it belongs to the driver


def publish(server: RepositoryServer, name: str, version: int) -> None:
    made = description(name, version)
    server.publish(made, [memory(version)], [ModelEntry(name, ModelState.READY, version, "reference", 0, "", 0.0)])


def test_a_model_comes_with_its_memory(server: RepositoryServer, path: Path) -> None:
    publish(server, "m", 3)
    with RepositoryPeer(path) as peer:
        for wanted in (0, 3):
            peer.send(OpenModel(7, "m", wanted))
            with peer.channel.receive(time.monotonic_ns() + 10**10) as frame:
                reply = repository_protocol.decode(frame.data, sender=RepositoryRole.REPOSITORY, fds=len(frame.fds))
                assert reply == ModelOpened(7, ErrorStatus.NONE, "", description("m", 3))
                assert sealed_size(frame.fds[0]) == 8
                assert os.pread(frame.fds[0], 9, 0) == b"\3" * 8
        reply = peer.open("m", 2)
        assert (reply.status, reply.message) == (INVALID, "version 2 of model 'm' is not served; version 3 is")


@pytest.mark.parametrize(
    ("known", "status", "message"),
    [
        (entry("other", ModelState.READY), INVALID, "there is no model 'm'; those of this driver: other"),
        (None, INVALID, "there is no model 'm'; those of this driver: none"),
        (entry("m", ModelState.LOADING), UNAVAILABLE, "model 'm' is still being prepared"),
        (
            entry("m", ModelState.LOADING, 4, "no memory"),
            UNAVAILABLE,
            "model 'm' is still being prepared: version 4: no memory",
        ),
        (
            entry("m", ModelState.UNAVAILABLE, 4, "bad file"),
            UNAVAILABLE,
            "model 'm' has no version that can be prepared: version 4: bad file",
        ),
        (entry("m", ModelState.UNAVAILABLE, 0, "there is no version of it"), INVALID, "model 'm' has no version"),
    ],
    ids=["other", "none", "loading", "waiting", "failed", "no version"],
)
def test_a_model_that_is_not_served_has_a_status_and_a_reason(
    server: RepositoryServer, path: Path, known: ModelEntry | None, status: ErrorStatus, message: str
) -> None:
    server.set_entries([] if known is None else [known])
    with RepositoryPeer(path) as peer:
        reply = peer.open("m")
        assert (reply.status, reply.message) == (status, message)


def test_the_list_is_sorted_by_name(server: RepositoryServer, path: Path) -> None:
    entries = [entry(name, ModelState.READY) for name in ("c", "a", "b")]
    server.set_entries(entries)
    with RepositoryPeer(path) as peer:
        assert list(peer.entries()) == ["a", "b", "c"]


def test_a_list_that_does_not_fit_into_a_socket_arrives(server: RepositoryServer, path: Path) -> None:
    server.set_entries([entry(f"m{number}", ModelState.UNAVAILABLE, 1, "r" * 1000) for number in range(300)])
    with RepositoryPeer(path) as peer:
        assert len(peer.entries()) == 300


def test_only_those_who_opened_a_model_are_told_of_its_versions(server: RepositoryServer, path: Path) -> None:
    publish(server, "m", 1)
    publish(server, "n", 1)
    with RepositoryPeer(path) as peer, RepositoryPeer(path) as other:
        peer.open("m")
        other.open("n")
        publish(server, "m", 2)
        publish(server, "n", 5)
        assert peer.receive(VersionChanged) == VersionChanged("m", 2)
        assert other.receive(VersionChanged) == VersionChanged("n", 5)
        assert peer.open("m").status is ErrorStatus.NONE  # nothing came in between


def test_a_version_of_which_clients_are_told_is_in_the_list(server: RepositoryServer, path: Path) -> None:
    publish(server, "m", 1)
    with RepositoryPeer(path) as peer:
        peer.open("m")
        publish(server, "m", 2)
        assert peer.receive(VersionChanged) == VersionChanged("m", 2)
        assert peer.entries()["m"].version == 2


def test_a_withdrawn_model_is_not_there_and_its_memory_is_closed(server: RepositoryServer, path: Path) -> None:
    first, second = memory(1), memory(2)
    server.publish(description("m", 1), [first], [])
    server.publish(description("m", 2), [second], [])
    assert (first.closed, second.closed) == (True, False)
    server.withdraw("m")
    server.withdraw("m")
    assert second.closed
    with RepositoryPeer(path) as peer:
        assert peer.open("m").status is INVALID


# ---------------------------------------------------------------------------------------------------------- bad clients


def hangs_up(peer: RepositoryPeer) -> bool:
    """Return whether the server closes the connection."""
    try:
        peer.channel.receive(time.monotonic_ns() + 10**10).close()
    except nnfmq.DeadObject:
        return True
    return False


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no message",
        repository_protocol.encode(ModelOpened(1, ErrorStatus.NONE, "")),
        repository_protocol.encode(VersionChanged("m", 1)),
        b"x" * 100_000,
    ],
    ids=["empty", "garbage", "reply", "notification", "large"],
)
def test_a_client_that_breaks_the_protocol_loses_its_connection_alone(
    server: RepositoryServer, path: Path, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with RepositoryPeer(path) as peer, RepositoryPeer(path) as bad:
        peer.entries()
        with caplog.at_level(logging.WARNING):
            try:
                bad.channel.send(data)
            except PermissionError:  # the kernel refuses descriptors, with which a large message comes
                return
            assert hangs_up(bad)
        assert f"the connection of process {os.getpid()} is closed: " in caplog.text
        assert peer.entries() == {}


def test_a_client_that_does_not_read_loses_its_connection_when_its_socket_is_full(
    server: RepositoryServer, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publish(server, "m", 1)
    with RepositoryPeer(path) as peer, RepositoryPeer(path) as bad, caplog.at_level(logging.WARNING):
        bad.open("m")
        for version in range(2, 2000):
            publish(server, "m", version)
        assert "does not read its replies" in caplog.text
        assert peer.open("m").status is ErrorStatus.NONE


def test_a_client_that_hangs_up_is_forgotten(server: RepositoryServer, path: Path) -> None:
    with RepositoryPeer(path) as peer:
        peer.open("m")
        assert len(server._peers) == 1
    until(lambda: not server._peers, "the server has no client")


def test_a_process_has_a_limited_number_of_connections(
    server: RepositoryServer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nnfmq.repository.server.PROCESS_MAX", 2)
    with RepositoryPeer(path) as first, RepositoryPeer(path) as second:
        first.entries()
        second.entries()
        with RepositoryPeer(path) as third:
            assert hangs_up(third)
        second.close()
        until(lambda: len(server._peers) == 1, "the second is forgotten")
        with RepositoryPeer(path) as fourth:
            fourth.entries()


def test_one_user_has_half_of_the_connections_if_several_are_served(
    server: RepositoryServer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nnfmq.repository.server.CONNECTIONS_MAX", 4)
    monkeypatch.setattr(server, "_served", ServedUsers(is_open=True))
    with RepositoryPeer(path) as first, RepositoryPeer(path) as second:
        first.entries()
        second.entries()
        with RepositoryPeer(path) as third:
            assert hangs_up(third)
    monkeypatch.setattr(server, "_served", ServedUsers())
    until(lambda: not server._peers, "both are forgotten")
    with RepositoryPeer(path) as first, RepositoryPeer(path) as second, RepositoryPeer(path) as third:
        for peer in (first, second, third):
            peer.entries()


def test_all_processes_together_have_a_limited_number_of_connections(
    server: RepositoryServer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nnfmq.repository.server.CONNECTIONS_MAX", 1)
    with RepositoryPeer(path) as first, RepositoryPeer(path) as second:
        first.entries()
        assert hangs_up(second)


def test_other_users_are_rejected(server: RepositoryServer, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nnfmq.base.channel import Credentials

    monkeypatch.setattr(Channel, "peer", lambda _self: Credentials(1, os.getuid() + 1, 0))
    with RepositoryPeer(path) as peer:
        assert hangs_up(peer)


def test_a_shortage_at_accepting_is_tried_again(
    server: RepositoryServer, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shortages = [OSError(errno.EMFILE, "Too many open files")]

    def accept(self: Listener, real: object = Listener.accept) -> Channel | None:
        if shortages:
            raise shortages.pop()
        return real(self)  # type: ignore[operator, no-any-return]

    monkeypatch.setattr(Listener, "accept", accept)
    with RepositoryPeer(path) as peer, caplog.at_level(logging.WARNING):
        assert peer.entries() == {}
    assert "cannot accept a client now: Too many open files" in caplog.text


def test_a_bug_while_a_client_is_served_costs_its_connection(
    server: RepositoryServer, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def handle(*_: object) -> None:
        raise KeyError("a bug")

    with RepositoryPeer(path) as bad, RepositoryPeer(path) as peer:
        peer.entries()
        with monkeypatch.context() as patch:
            patch.setattr(server, "_handle", handle)
            bad.send(ListModels(1))
            assert hangs_up(bad)
        assert peer.entries() == {}
    assert "a bug" in caplog.text
    caplog.clear()


def test_a_bug_while_a_client_is_accepted_ends_the_process(
    server: RepositoryServer, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)

    def add(channel: Channel) -> None:
        channel.close()
        raise KeyError("a bug")

    monkeypatch.setattr(server, "_add", add)
    with RepositoryPeer(path):
        until(lambda: statuses == [1], "the process ends")
    caplog.clear()
