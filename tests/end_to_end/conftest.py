"""A daemon for all tests of this folder; each must leave its resources unchanged."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.device_zoo import SharedDrivers
from support.drivers import LIMIT_S, Daemon, Shared, one, running_daemon, shared_memory_names, short_folder, until
from support.fake_repository import FakeRepository, serving
from support.models import add_model, null_model, plus_model
from support.nnapi_objects import finished
from support.orphans import adopted
from support.partitioned import Runtime, three_drivers

import nnfmq
from nnfmq.nnapi import CompilationBuilder

STATUS = ("--allow-device-status",)


@pytest.fixture(scope="session")
def _daemon() -> Iterator[Daemon]:
    with short_folder() as made, running_daemon(made / "d.sock", options=STATUS) as daemon:
        yield daemon


Holdings = tuple[list[str], list[int], list[str]]


def holdings(daemon: Daemon) -> Holdings:
    """Return the daemon's resources: fds, processes, shared memory."""
    return daemon.process.descriptors(), daemon.process.descendants(), daemon.process.shared_mappings()


def settled_holdings(daemon: Daemon) -> Holdings:
    """Return the same, read twice, when the daemon has no processes but a compile server, which does not end.

    The fds of a process that ends, and the process, go one after the other.
    """
    found: list[Holdings] = []

    def is_settled() -> bool:
        found[:] = [holdings(daemon), *found[:1]]
        servers = daemon.compile_servers()
        return found.count(found[0]) == 2 and servers == found[0][1] and not any(map(is_ending, servers))

    until(is_settled, "the daemon has no processes but a compile server")
    return found[0]


def is_ending(pid: int) -> bool:
    """Return whether a process has exited or has been killed: it has no memory, or a SIGKILL is pending."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return True
    status = dict(line.split(":", 1) for line in lines)
    pending = int(status["SigPnd"], 16) | int(status["ShdPnd"], 16)
    return "VmSize" not in status or bool(pending >> (signal.SIGKILL - 1) & 1)


def without(held: Holdings, servers: set[int]) -> Holdings:
    """Return resources without those of compile servers, which end later."""
    fds, processes, mappings = held
    for server in servers & set(processes):
        processes = [pid for pid in processes if pid != server]
        for kind in ("socket", "pipe", "pidfd" if "pidfd" in fds else "anon_inode"):  # before Linux 6.9
            if kind in fds:  # the supervisor may have closed it already
                fds = [*fds[: fds.index(kind)], *fds[fds.index(kind) + 1 :]]
    return fds, processes, mappings


@pytest.fixture
def daemon(_daemon: Daemon) -> Iterator[Daemon]:
    """Return a running daemon, which must hold the same resources afterwards, and have logged no errors.

    A compile server that has just been forked has no session of its own yet, so it is recognized afterwards.
    """
    before, names = settled_holdings(_daemon), shared_memory_names()
    servers = set(_daemon.compile_servers())
    yield _daemon

    def holds_the_same() -> bool:
        now = holdings(_daemon)
        servers.update(_daemon.compile_servers(), set(before[1]) - set(now[1]))
        return without(now, servers) == without(before, servers)

    until(holds_the_same, f"the daemon holds what it held before the test: {before}")
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


@pytest.fixture
def orphans() -> Iterator[None]:
    """End what processes of the test leave: a successor is no child of the driver that has started it."""
    with adopted():
        yield


@pytest.fixture
def runtime_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory in which applications look for drivers, which is empty."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.delenv("NNFMQ_SOCKET", raising=False)
    made = folder / "nnfmq"
    made.mkdir(mode=0o700)
    return made


@pytest.fixture
def recovering(daemon: Daemon) -> Iterator[nnfmq.Client]:
    """Return a client of the daemon that connects again after a death."""
    with nnfmq.connect(daemon.path, timeout=LIMIT_S, recover=True) as made:
        yield made


@pytest.fixture
def device(client: nnfmq.Client) -> nnfmq.Device:
    """Return the reference device of the client's driver."""
    return client.device("reference")


@pytest.fixture
def burst(model: nnfmq.PreparedModel) -> Iterator[nnfmq.Burst]:
    """Return a burst of the null model that has executed once."""
    with model.burst() as made:
        made.execute(one(1))
        yield made


@pytest.fixture
def compilation(resources: ExitStack, device: nnfmq.Device) -> CompilationBuilder:
    """Return NNAPI's finished compilation of a model that adds two tensors of four floats."""
    return finished(resources, add_model(), device)


@pytest.fixture
def repository(daemon: Daemon) -> Iterator[FakeRepository]:
    """Return a fake repository of the daemon with version 1 of `plus`, which adds 1."""
    with serving(daemon) as made:
        made.publish("plus", 1, plus_model(1))
        yield made


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Daemon]]:
    """Return three drivers with devices that fail in each way."""
    with three_drivers(tmp_path_factory.mktemp("site")) as made:
        yield made


@pytest.fixture(scope="module")
def zoo(shared: Shared) -> SharedDrivers:
    """Return the drivers with devices of `support.device_zoo`."""
    return SharedDrivers(shared)


@pytest.fixture
def runtime(drivers: list[Daemon]) -> Iterator[Runtime]:
    """Return clients of the drivers, which prepare plans."""
    with ExitStack() as stack:
        yield Runtime(drivers, stack)
