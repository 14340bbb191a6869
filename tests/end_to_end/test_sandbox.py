"""What a worker may not do, tried by a device of a plug-in inside a real worker: from Python, and from machine code."""

from __future__ import annotations

import os
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from support.drivers import Daemon, Process, running_daemon, short_folder, until
from support.models import add_model, logistics_model
from support.plugins import path_with
from support.sandbox_probe import DEADLY, DEVICE, LAWFUL, REFUSED, add_probe, attempt, attempts, write_arguments

import nnfmq
from nnfmq.base.sandbox.sandbox import missing_parts

pytestmark = pytest.mark.skipif(bool(missing_parts()), reason="this kernel lacks a part of the sandbox")

NO_RUNTIMES = {"NNFMQ_RUNTIMES": ""}
"""What an installed runtime declares, every worker may."""
_Words = dict[str, str]


def status_of(pid: int) -> _Words:
    """Return the lines of /proc/PID/status."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def homes(folder: Path) -> dict[str, str]:
    """Return the environment of a driver whose cache and key are in `folder`."""
    return {"XDG_STATE_HOME": str(folder / "state"), "XDG_CACHE_HOME": str(folder / "cache"), **NO_RUNTIMES}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with short_folder() as made:
        yield made


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("site")


@pytest.fixture(scope="module")
def driver(site: Path, folder: Path) -> Iterator[Daemon]:
    add_probe(site)
    with running_daemon(folder / "d.sock", environment={**path_with(site), **homes(folder)}) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def victim(driver: Daemon, site: Path, folder: Path) -> Iterator[nnfmq.Client]:
    """Yield another client, and tell the device what it may attack: its worker, a secret, and an abstract address."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    address = f"\0nnfmq-sandbox-test-{os.getpid()}"
    with listener, driver.connect() as client:
        listener.bind(address)
        listener.listen()
        (folder / "secret").write_text("nobody's business")
        with client.device("compiled").prepare(add_model()):
            pass
        cache, key = folder / "cache" / "nnfmq", folder / "state" / "nnfmq" / "cache.key"
        (cached,) = (path for path in cache.iterdir() if path.is_file())
        write_arguments(
            site, victim=client.worker_pid, secret=str(folder / "secret"), file=str(folder / "new"),
            cache=str(cache / ("0" * 64)), cached=str(cached), key=str(key), abstract=address,
        )  # fmt: skip
        yield client


@pytest.fixture
def client(driver: Daemon, victim: nnfmq.Client) -> Iterator[nnfmq.Client]:
    del victim
    with driver.connect() as client:
        yield client


@pytest.mark.parametrize("act", REFUSED)
def test_an_act_is_refused_and_the_worker_goes_on(act: str, client: nnfmq.Client, victim: nnfmq.Client) -> None:
    assert attempt(client, act) in ("refused with EPERM", "refused with EACCES")
    assert DEVICE in {info.name for info in victim.devices()}
    assert DEVICE in {info.name for info in client.devices()}


def test_nothing_was_written(client: nnfmq.Client, folder: Path) -> None:
    before = {path: path.stat() for path in folder.rglob("*") if path.is_file()}
    attempts(client, [act for act in REFUSED if act.startswith(("write", "remove", "change"))])
    after = {path: path.stat() for path in folder.rglob("*") if path.is_file()}
    assert [(path, info.st_size, info.st_mode) for path, info in before.items()] == [
        (path, info.st_size, info.st_mode) for path, info in after.items()
    ]


@pytest.mark.parametrize("act", DEADLY)
def test_an_act_that_no_worker_does_ends_it_and_the_driver_says_why(
    act: str, driver: Daemon, victim: nnfmq.Client
) -> None:
    with driver.connect() as client:
        pid = client.worker_pid
        with pytest.raises(nnfmq.DeadObject):
            attempt(client, act)
    until(lambda: f"worker {pid} ended with status -31: its sandbox" in driver.program.errors(), "the driver says why")
    assert DEVICE in {info.name for info in victim.devices()}


def test_what_devices_do_is_allowed(client: nnfmq.Client) -> None:
    assert attempts(client, LAWFUL) == {act: f"done: {act}" for act in LAWFUL}


def check_privileges(pid: int) -> None:
    words = status_of(pid)
    assert (words["NoNewPrivs"], words["Seccomp"], words["Seccomp_filters"]) == ("1", "2", "1")
    kinds = ("CapPrm", "CapEff", "CapAmb", *(("CapBnd",) if os.getuid() == 0 else ()))
    assert {kind: int(words[kind], 16) for kind in kinds} == dict.fromkeys(kinds, 0)
    assert int(Path(f"/proc/{pid}/oom_score_adj").read_text()) >= 200
    assert resource.prlimit(pid, resource.RLIMIT_CORE) == (0, 0)
    assert Path(f"/proc/{pid}/environ").stat().st_uid == 0  # not dumpable
    if os.getuid() == 0:  # others may not look at it
        streams = [os.readlink(f"/proc/{pid}/fd/{stream}").split(":")[0] for stream in range(3)]
        assert streams == ["/dev/null", "pipe", "pipe"]  # none of the driver's, which may be a terminal


def test_a_worker_has_given_up_privileges(client: nnfmq.Client) -> None:
    check_privileges(client.worker_pid)


def test_a_worker_that_is_an_interpreter_of_its_own_has_the_same_sandbox(
    site: Path, folder: Path, victim: nnfmq.Client
) -> None:
    """With the environment of the other driver: its victim, cache and key."""
    environment = {**path_with(site), **homes(folder)}
    options = ["--worker-start", "exec"]
    with running_daemon(folder / "e.sock", environment=environment, options=options) as driver:
        with driver.connect() as client:
            refused = attempts(client, REFUSED)
            assert set(refused.values()) <= {"refused with EPERM", "refused with EACCES"}, refused
            assert attempts(client, LAWFUL) == {act: f"done: {act}" for act in LAWFUL}
            check_privileges(client.worker_pid)
        for act in DEADLY:
            with driver.connect() as client, pytest.raises(nnfmq.DeadObject):
                attempt(client, act)
    assert DEVICE in {info.name for info in victim.devices()}


def test_the_sandbox_can_be_switched_off(site: Path, victim: nnfmq.Client) -> None:
    del victim  # it has written the arguments
    with short_folder() as made:
        daemon = running_daemon(made / "d.sock", environment=path_with(site), options=["--sandbox", "off"])
        with daemon as driver, driver.connect() as client:
            assert attempt(client, "socket") == "done: socket"
            assert status_of(client.worker_pid)["Seccomp"] == status_of(os.getpid())["Seccomp"]
            assert "workers have no sandbox: $NNFMQ_SANDBOX" in driver.program.errors()


def test_a_driver_with_a_required_sandbox_serves_where_the_kernel_has_every_part() -> None:
    with short_folder() as made, running_daemon(made / "d.sock", options=["--sandbox", "required"]) as driver:
        with driver.connect() as client:
            assert status_of(client.worker_pid)["Seccomp"] == "2"
        assert "sandbox" not in driver.program.errors()


def test_a_device_gets_what_it_declares_and_no_more(tmp_path: Path, victim: nnfmq.Client, folder: Path) -> None:
    del victim
    with short_folder() as made:
        add_probe(tmp_path, f"reads=({str(folder / 'secret')!r},), generates_code=True, has_private_folder=True")
        work = made / "tmp"
        work.mkdir()
        node = folder / "node"
        node.write_text("of an administrator's list")
        environment = {**path_with(tmp_path), **NO_RUNTIMES, "TMPDIR": str(work), "NNFMQ_SANDBOX_NODES": str(node)}
        with running_daemon(made / "d.sock", environment=environment) as driver:
            with driver.connect() as client:
                write_arguments(tmp_path, secret=str(node), file="", victim=1)
                assert attempt(client, "read a home file") == "done: read a home file"
                private = work / f"nnfmq-{os.getuid()}-work" / str(client.worker_pid)
                assert list(private.iterdir()) == []
                write_arguments(tmp_path, secret=str(folder / "secret"), file=str(private / "new"), victim=1)
                allowed = ["read a home file", "make memory executable", "write a file"]
                assert attempts(client, allowed) == {act: f"done: {act}" for act in allowed}
                assert (private / "new").read_text() == "written"
                write_arguments(tmp_path, secret=str(folder / "d.sock"), file=str(made / "new"), victim=1)
                assert attempt(client, "socket") == "refused with EPERM"
                assert attempt(client, "write a file") == "refused with EACCES"
            until(lambda: not private.exists(), "the folder of a worker that has exited is removed")


def test_the_folder_of_a_worker_whose_driver_was_killed_is_removed_by_the_next_worker(tmp_path: Path) -> None:
    """That of a worker that lives is not: it is locked."""
    with short_folder() as made:
        add_probe(tmp_path, "has_private_folder=True")
        (made / "tmp").mkdir()
        environment = {**path_with(tmp_path), **NO_RUNTIMES, "TMPDIR": str(made / "tmp")}
        work = made / "tmp" / f"nnfmq-{os.getuid()}-work"
        with ExitStack() as first, running_daemon(made / "e.sock", environment=environment) as other:
            with Daemon.start(made / "d.sock", environment=environment) as killed:
                client = first.enter_context(killed.connect())
                worker, folder = first.enter_context(Process(client.worker_pid)), work / str(client.worker_pid)
                (folder / "file").write_text("of a library")
                killed.kill()
            with other.connect() as second:
                assert {folder, work / str(second.worker_pid)} == set(work.iterdir())
            client.close()
            worker.wait_for_end()
            with other.connect() as second:
                assert list(work.iterdir()) == [work / str(second.worker_pid)]


def test_a_compile_process_has_a_sandbox(driver: Daemon, victim: nnfmq.Client) -> None:
    """It is watched while it compiles."""
    del victim
    found: list[_Words] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            for pid in driver.process.descendants():
                with suppress(FileNotFoundError, ProcessLookupError):
                    if os.getsid(pid) in driver.compile_servers() and os.getsid(pid) != pid:
                        found.append(status_of(pid))

    with driver.connect() as client:
        thread = threading.Thread(target=watch)
        thread.start()
        try:
            client.device("compiled").prepare(logistics_model(40)).close()
        finally:
            stop.set()
            thread.join()
    last = {words["Pid"]: words for words in found}
    assert last and {words["Seccomp"] for words in last.values()} == {"2"}
