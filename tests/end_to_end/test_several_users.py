"""A driver that serves several users: real processes under real uids, which only root can start."""

from __future__ import annotations

import ctypes
import fcntl
import os
import pwd
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support import other_users
from support.core_page import opened_page
from support.drivers import LIMIT_S, Daemon, Process, short_folder, until
from support.model_folders import add_version, adder
from support.other_users import UserProcess, as_system_driver, needs_root
from support.places import ROOT
from support.sandbox_probe import add_probe

import nnfmq

pytestmark = needs_root()

ACCOUNT = "nobody"  # of the driver; every system has it
ANN, BEN, EVE = 21001, 21002, 21003  # Ann is listed, Ben is in a group that is, Eve is neither
GROUP = 22001
WORKERS = range(23000, 23064)
SERVED = ["--allow-user", str(ANN), "--allow-group", str(GROUP)]
OPTIONS = ["--user", ACCOUNT, "--worker-uids", f"{WORKERS[0]}-{WORKERS[-1]}", *SERVED]
CONNECT = "nnfmq.connect('/run/nnfmq/nnfmq.sock', embedded=False, recover=False)"
PREPARE = "c.device('compiled').prepare(add_model())"
ADDED = "[x.tolist() for x in m.execute(np.ones(4, np.float32), np.ones(4, np.float32))]"
PLACES, MODELS, THREADS = 4, 12, 8  # of each user
SET_IDS = 1 << 6 | 1 << 7
PIDFD_GETFD = 438


class Place:
    """Folders of a system driver: `run`, which is /run/nnfmq, and its home. Its account owns both."""

    def __init__(self, folder: Path) -> None:
        self.run, self.home = folder / "run", folder / "home"
        self.temporary, self.models, site = folder / "tmp", folder / "models", folder / "site"
        account = pwd.getpwnam(ACCOUNT)
        for made in (self.run, self.home, self.temporary, self.models, site):
            made.mkdir()
            made.chmod(0o755)
        for made in (self.run, self.home):
            os.chown(made, account.pw_uid, account.pw_gid)
        self.temporary.chmod(0o1777)
        folder.chmod(0o755)
        add_probe(site, "has_private_folder=True")
        self.environment = {
            "XDG_STATE_HOME": str(self.home / "state"),
            "XDG_CACHE_HOME": str(self.home / "cache"),
            "TMPDIR": str(self.temporary),
            "PYTHONPATH": f"{site}{os.pathsep}{ROOT / 'tests' / 'lib'}",
            "NNFMQ_RUNTIMES": "",
            "NNFMQ_USER_CLIENTS": str(PLACES),
            "NNFMQ_USER_MEMORY_MIB": "160",
            "NNFMQ_USER_MODELS": str(MODELS),
            "NNFMQ_USER_THREADS": str(THREADS),
            "NNFMQ_CLIENT_THREADS": str(THREADS - 2),
        }

    def cached(self, uid: int) -> list[str]:
        """Return the names of the programs that clients of a uid have in the cache."""
        folder = self.home / "cache" / "nnfmq" / "users" / str(uid) / "nnfmq"
        return sorted(path.name for path in folder.iterdir() if path.is_file()) if folder.exists() else []


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with short_folder() as folder:
        yield Place(folder)


@pytest.fixture(scope="module")
def driver(place: Place) -> Iterator[Daemon]:
    add_version(place.models, "add", 1, adder(1))
    options = [*OPTIONS, "--models", place.models]
    with as_system_driver(place.run, options=options, environment=place.environment) as daemon:
        yield daemon


def user(place: Place, uid: int, *groups: int) -> UserProcess:
    """Return a process of a user that can connect."""
    process = UserProcess(place.run, uid, groups)
    process.send("import ctypes, os, signal, nnfmq, numpy as np; from support.models import *")
    return process


@pytest.fixture(scope="module")
def users(place: Place, driver: Daemon) -> Iterator[dict[int, UserProcess]]:
    """Yield processes of the three users, which are started at the same time."""
    del driver
    with user(place, ANN) as ann, user(place, BEN, GROUP) as ben, user(place, EVE) as eve:
        for each in (ann, ben, eve):
            assert each.receive() is None
        yield {ANN: ann, BEN: ben, EVE: eve}


@pytest.fixture
def ann(users: dict[int, UserProcess]) -> Iterator[UserProcess]:
    with connected(users[ANN]) as process:
        yield process


@pytest.fixture
def ben(users: dict[int, UserProcess]) -> Iterator[UserProcess]:
    with connected(users[BEN]) as process:
        yield process


class connected:
    """Lets a process have a client `c` in the block."""

    def __init__(self, process: UserProcess) -> None:
        self._process = process

    def __enter__(self) -> UserProcess:
        # The workers of clients that have closed may still exit, and have their places.
        until(lambda: self._process.run(f"c = {CONNECT}") is None, "the user has a place")
        return self._process

    def __exit__(self, *_: object) -> None:
        assert self._process.run("c.close()") is None


def words_of(pid: int) -> dict[str, list[str]]:
    """Return the lines of /proc/PID/status, by name, as words."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.split() for name, _, value in (line.partition(":") for line in lines)}


def capabilities(pid: int) -> list[int]:
    """Return the capabilities that a process has, may use, may get back, and hands to programs that it starts."""
    words = words_of(pid)
    return [int(words[kind][0], 16) for kind in ("CapPrm", "CapEff", "CapInh", "CapAmb")]


# ----------------------------------------------------------------------------------------------------------------------
# Who is served.


def test_listed_users_and_members_of_listed_groups_are_served(ann: UserProcess, ben: UserProcess) -> None:
    for process in (ann, ben):
        assert "reference" in process.run("[info.name for info in c.devices()]")


def test_a_driver_whose_workers_could_not_read_what_they_import_does_not_start(place: Place, tmp_path: Path) -> None:
    """The test's folder is for root only, as the installation of a driver in root's home would be."""
    (tmp_path / "sitecustomize.py").write_text("")
    tmp_path.chmod(0o700)
    environment = {**os.environ, **place.environment, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'tests' / 'lib'}"}
    words = [sys.executable, "-P", other_users.__file__, place.run, "0", "-P", "-m", "nnfmq", "serve"]
    done = subprocess.run(
        [*words, "--socket", "/run/nnfmq/other.sock", *OPTIONS], env=environment, capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert f"uid {WORKERS[0]} of $NNFMQ_WORKER_UIDS cannot read {tmp_path}/sitecustomize.py" in done.stderr
    assert "--worker-start fork" in done.stderr


def test_another_user_is_refused_with_what_to_do(users: dict[int, UserProcess]) -> None:
    refusal = users[EVE].run(CONNECT)
    assert f"this driver does not serve uid {EVE}" in refusal
    assert "--allow-user" in refusal and "--allow-group" in refusal


def test_a_user_finds_and_trusts_the_driver_of_the_system(users: dict[int, UserProcess]) -> None:
    assert users[ANN].run("with nnfmq.connect(embedded=False) as found: devices = found.devices()") is None
    assert "reference" in str(users[ANN].run("devices"))


def test_models_by_name_are_for_the_users_that_are_served(users: dict[int, UserProcess], ann: UserProcess) -> None:
    assert ann.run("[entry.name for entry in c.models(timeout=30)]") == ["add"]
    users[EVE].run("from nnfmq.base.channel import Channel; from pathlib import Path")
    assert "DeadObject" in users[EVE].run("Channel.connect(Path('/run/nnfmq/nnfmq.sock.models')).receive()")


def test_only_the_drivers_account_and_root_may_replace_it(users: dict[int, UserProcess], driver: Daemon) -> None:
    users[ANN].run("from nnfmq.driver.process.hand_over import Predecessor; from pathlib import Path")
    assert "DeviceUnavailable" in users[ANN].run("Predecessor.request(Path('/run/nnfmq/nnfmq.sock'))")
    users[ANN].run(
        "from nnfmq.base.channel import Channel; s = Channel.connect(Path('/run/nnfmq/nnfmq.sock'));"
        "s.send(b'nnfmq: hand over')"
    )
    assert "DeadObject" in users[ANN].run("s.receive()")
    assert not driver.process.has_exited()


# ----------------------------------------------------------------------------------------------------------------------
# Uids and capabilities.


def test_the_supervisor_keeps_two_capabilities_and_no_other_process_has_any(driver: Daemon, ann: UserProcess) -> None:
    ann.run("m = c.device('compiled').prepare(relu_model((77,)))")  # which nobody has compiled before
    assert capabilities(driver.program.pid) == [SET_IDS, SET_IDS, 0, 0]
    assert int(words_of(driver.program.pid)["CapBnd"][0], 16) == SET_IDS

    def have_none() -> bool:
        found: dict[str, list[int]] = {}
        for pid in driver.process.children():
            with suppress(FileNotFoundError, ProcessLookupError):  # the worker of a client that has just left
                found.setdefault(words_of(pid)["Name"][0], []).extend(capabilities(pid))
        return {"nnfmq-compilers", "nnfmq-worker"} <= found.keys() and not any(map(any, found.values()))

    until(have_none, "the supervisor's children, also one that it has just forked, have dropped its capabilities")


def test_each_worker_has_a_uid_of_its_own(ann: UserProcess, ben: UserProcess, driver: Daemon) -> None:
    account = pwd.getpwnam(ACCOUNT).pw_uid
    assert words_of(driver.program.pid)["Uid"] == [str(account)] * 4
    uids = []
    for process in (ann, ben):
        words = words_of(process.run("c.worker_pid"))
        assert words["Uid"] == words["Gid"] == [words["Uid"][0]] * 4
        assert words["Groups"] == []
        uids.append(int(words["Uid"][0]))
    assert len(set(uids)) == 2 and set(uids) <= set(WORKERS)


@pytest.mark.parametrize(
    "act",
    [
        "os.kill({pid}, signal.SIGTERM)",
        "os.kill({pid}, 0)",
        "signal.pidfd_send_signal(os.pidfd_open({pid}), signal.SIGKILL)",
        "open('/proc/{pid}/mem', 'rb+')",
        "os.listdir('/proc/{pid}/fd')",
        "open('/proc/{pid}/environ').read()",
        "os.setpriority(os.PRIO_PROCESS, {pid}, 19)",
        "os.sched_setaffinity({pid}, [0])",
        "libc.ptrace(0x4206, {pid}, 0, 0) and (_ for _ in ()).throw(OSError(ctypes.get_errno(), 'ptrace'))",
    ],
)
def test_a_client_cannot_signal_trace_or_slow_its_worker(act: str, ann: UserProcess) -> None:
    ann.run("libc = ctypes.CDLL(None, use_errno=True)")
    error = ann.run(act.format(pid=ann.run("c.worker_pid")))
    assert str(error).startswith(("PermissionError(1,", "PermissionError(13,")), error
    assert "reference" in ann.run("[info.name for info in c.devices()]")


def test_a_worker_cannot_signal_or_trace_another_or_the_supervisor(
    place: Place, driver: Daemon, ann: UserProcess, ben: UserProcess
) -> None:
    """A process under the uid of Ann's worker, without its sandbox: the uid alone keeps it from the others."""
    ann.run(PREPARE)
    own, other = ann.run("c.worker_pid"), ben.run("c.worker_pid")
    targets = [driver.program.pid, other, *driver.compile_servers()]
    with user(place, int(words_of(own)["Uid"][0])) as compromised:
        compromised.receive()
        compromised.run("libc = ctypes.CDLL(None, use_errno=True)")
        for pid in targets:
            assert "PermissionError(1," in str(compromised.run(f"os.kill({pid}, 9)")), pid
            assert compromised.run(f"libc.ptrace(0x4206, {pid}, 0, 0)") == -1
            assert "PermissionError" in str(compromised.run(f"open('/proc/{pid}/mem', 'rb+')"))


def test_the_supervisor_ends_a_worker_that_is_stopped_when_its_client_dies(place: Place, driver: Daemon) -> None:
    with user(place, ANN) as process:
        process.receive()
        process.run(f"c = {CONNECT}")
        with Process(process.run("c.worker_pid")) as worker:
            worker.stop()
            process.program.popen.kill()
            worker.wait_for_end()
    assert not driver.process.has_exited()


def test_the_worker_of_a_killed_driver_keeps_its_uid_and_a_driver_leaves_nothing_behind() -> None:
    with short_folder() as folder:
        place = Place(folder)
        options = [*OPTIONS[:3], "23000-23001", *SERVED]
        with user(place, ANN) as process:
            process.receive()
            with as_system_driver(place.run, options=options, environment=place.environment) as first:
                process.run(f"c = {CONNECT}")
                with Process(process.run("c.worker_pid")) as worker:
                    first.kill()
                    give_up_lock(worker.pid)  # as a compromised worker may
                    uid = pwd.getpwnam(ACCOUNT).pw_uid  # as systemd starts a driver
                    with as_system_driver(
                        place.run,
                        options=options[2:],
                        environment=place.environment,
                        ambient=uid,
                    ) as second:
                        assert capabilities(second.program.pid) == [SET_IDS, SET_IDS, 0, 0]
                        assert process.run(f"d = {CONNECT}") is None
                        uids = [words_of(pid)["Uid"][0] for pid in (worker.pid, process.run("d.worker_pid"))]
                        assert sorted(uids) == ["23000", "23001"]
                        assert "all uids of $NNFMQ_WORKER_UIDS are in use" in process.run(CONNECT)
                        process.run("c.close()")
                        worker.wait_for_end()
                        assert process.run(f"{CONNECT}.close()") is None
            assert sorted(path.name for path in place.run.iterdir()) == ["nnfmq.sock.lock", "nnfmq.sock.uids"]


def give_up_lock(worker: int) -> None:
    """Let a worker give up the lock of its uid, whose file is the only one of the folder that it has open."""
    folder = Path(f"/proc/{worker}/fd")
    (found,) = (entry for entry in folder.iterdir() if ".uids/" in os.readlink(entry))
    libc, pidfd = ctypes.CDLL(None, use_errno=True), os.pidfd_open(worker)
    fd = libc.syscall(PIDFD_GETFD, pidfd, int(found.name), 0)
    os.close(pidfd)
    assert fd >= 0, os.strerror(ctypes.get_errno())
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def test_a_worker_that_is_an_interpreter_of_its_own_has_its_uid_and_key_and_no_capability() -> None:
    with short_folder() as folder:
        place = Place(folder)
        with (
            as_system_driver(place.run, options=OPTIONS, environment=place.environment) as driver,
            user(place, ANN) as ann,
            user(place, BEN, GROUP) as ben,
        ):
            uids, libraries = set(), {first_library(driver.program.pid)}
            for process in (ann, ben):
                process.receive()
                assert process.run(f"c = {CONNECT}") is None
                pid = process.run("c.worker_pid")
                words = words_of(pid)
                assert words["Uid"] == words["Gid"] == [words["Uid"][0]] * 4 and words["Groups"] == []
                assert capabilities(pid) == [0, 0, 0, 0]
                uids.add(int(words["Uid"][0]))
                libraries.add(first_library(pid))
                assert process.run(f"m = {PREPARE}") is None
                assert process.run(ADDED) == [[2.0] * 4]
                assert process.run("len(c.statistics().clients)") == 1
            assert len(uids) == 2 and uids <= set(WORKERS)
            assert len(libraries) == 3
            until(lambda: bool(place.cached(ANN) and place.cached(BEN)), "each user's program is in his cache")
            before = stored(place)
            ann.run("c.close()")
            with connected(ann) as again:
                assert again.run(f"m = {PREPARE}") is None
                assert again.run(ADDED) == [[2.0] * 4]
                assert [info.st_ino for info in stored(place).values()] == [info.st_ino for info in before.values()]
                with Process(again.run("c.worker_pid")) as worker:
                    worker.kill()
                    assert "DeadObject" in again.run("c.devices()")
            with Process(ben.run("c.worker_pid")) as worker:
                ben.program.popen.kill()
                worker.wait_for_end()


def first_library(pid: int) -> str:
    """Return where the C library begins in a process."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return next(line.partition("-")[0] for line in lines if line.endswith("/libc.so.6"))


def test_a_client_moves_to_the_driver_that_replaces_its_own(users: dict[int, UserProcess]) -> None:
    del users  # they have started before
    with short_folder() as folder:
        place = Place(folder)
        with (
            user(place, ANN) as process,
            as_system_driver(place.run, options=OPTIONS, environment=place.environment) as first,
        ):
            process.receive()
            process.run("c = nnfmq.connect(embedded=False)")
            before = process.run("c.worker_pid")
            options = [*OPTIONS, "--replace"]
            with as_system_driver(place.run, options=options, environment=place.environment) as second:
                until(lambda: process.run("c.devices() and c.worker_pid") != before, "the client moves")
                assert process.run("c.worker_pid") in second.process.children()
                first.process.wait_for_end()
                process.run("c.close()")


@pytest.mark.usefixtures("orphans")
def test_the_successor_that_a_driver_starts_serves_several_users_too(users: dict[int, UserProcess]) -> None:
    del users
    with short_folder() as folder:
        place = Place(folder)
        with (
            user(place, ANN) as process,
            as_system_driver(place.run, options=OPTIONS, environment=place.environment) as first,
        ):
            process.receive()
            process.run("c = nnfmq.connect(embedded=False)")
            first.process.send(signal.SIGUSR2)
            assert first.program.line() == "nnfmq: listening on /run/nnfmq/nnfmq.sock"
            until(lambda: process.run("c.devices() and c.driver_pid") != first.process.pid, "the client moves")
            with Process(process.run("c.driver_pid")) as second:
                assert capabilities(second.pid) == [SET_IDS, SET_IDS, 0, 0]
                assert int(words_of(process.run("c.worker_pid"))["Uid"][0]) in WORKERS
                assert capabilities(process.run("c.worker_pid")) == [0, 0, 0, 0]
                first.process.wait_for_end()
                process.run("c.close()")
                second.send(signal.SIGTERM)
                second.wait_for_end()


def test_the_private_folder_of_a_worker_is_its_own_and_is_removed(place: Place, users: dict[int, UserProcess]) -> None:
    with connected(users[ANN]) as process:
        pid = process.run("c.worker_pid")
        (folder,) = place.temporary.glob(f"nnfmq-*-work/{pid}")
        assert str(folder.stat().st_uid) == words_of(pid)["Uid"][0]
        assert folder.parent.stat().st_mode & 0o777 == folder.stat().st_mode & 0o777 == 0o700
    until(lambda: not folder.exists(), "the folder is removed")


# ----------------------------------------------------------------------------------------------------------------------
# What the settings say.


def test_a_driver_without_capabilities_serves_one_user_and_says_so(place: Place, users: dict[int, UserProcess]) -> None:
    serve = ["-P", "-m", "nnfmq", "serve", "--socket", "/run/nnfmq/one.sock", "--worker-uids", "23000-23063"]
    account = pwd.getpwnam(ACCOUNT)
    with UserProcess(place.run, account.pw_uid, environment=place.environment) as process:
        process.run("import os, subprocess, sys")
        process.run(f"serve = [sys.executable, *{[*serve, *SERVED]}, '--exit-with', str(os.getpid())]")
        process.run("p = subprocess.Popen(serve, stdout=-1, stderr=-1, text=True)")
        assert process.run("p.stdout.readline()") == "nnfmq: listening on /run/nnfmq/one.sock\n"
        refusal = users[ANN].run(CONNECT.replace("nnfmq.sock", "one.sock"))
        process.run("import os, nnfmq; from nnfmq.cli import doctor, statistics, statistics_tables as tables")
        process.run("os.environ['NNFMQ_SOCKET'] = '/run/nnfmq/one.sock'")
        process.run("with nnfmq.connect() as c: lines = dict(tables.driver_lines(statistics.take_sample(c)))")
        said = [process.run("lines['users']"), process.run("[found.value for found in doctor._driver()]")]
        process.run("p.terminate()")
        errors = process.run("p.communicate()[1]")
    assert f"this driver serves uid {account.pw_uid} only: without CAP_SETUID and CAP_SETGID" in errors
    assert said[0] == "one: it lacks CAP_SETUID and CAP_SETGID to serve several"
    assert "one: no CAP_SETUID and CAP_SETGID for several" in said[1]
    assert "Permission denied" in refusal  # it is nobody else's socket


# ----------------------------------------------------------------------------------------------------------------------
# What each user may take.


def test_one_user_has_some_of_the_places_and_another_his_own(ann: UserProcess, users: dict[int, UserProcess]) -> None:
    ann.run(f"many = [{CONNECT} for _ in range({PLACES - 1})]")
    refusal = ann.run(CONNECT)
    assert f"uid {ANN} has {PLACES} clients already, the limit that $NNFMQ_USER_CLIENTS of the driver sets" in refusal
    with connected(users[BEN]):
        pass
    ann.run("[each.close() for each in many]")


def test_the_clients_of_one_user_share_his_memory_and_leave_that_of_another(ann: UserProcess, ben: UserProcess) -> None:
    large = "device('reference').prepare(weighty_model(side=4096))"  # 64 MiB, and twice that meanwhile
    until(lambda: ann.run(f"second = {CONNECT}") is None, "the user has a second place")
    assert ann.run(f"m = c.{large}") is None
    refusal = ann.run(f"second.{large}")
    assert "of this user's memory in the driver" in refusal and "$NNFMQ_USER_MEMORY_MIB" in refusal
    assert ben.run(f"m = c.{large}") is None
    ann.run("second.close()")


def test_the_clients_of_one_user_have_so_many_models_and_threads_together(ann: UserProcess, ben: UserProcess) -> None:
    one_more = "device('reference').prepare(null_model())"
    until(lambda: ann.run(f"second = {CONNECT}") is None, "the user has a second place")
    assert ann.run(f"models = [c.{one_more} for _ in range({MODELS - 1})] + [second.{one_more}]") is None
    refusal = ann.run(f"second.{one_more}")
    assert f"the clients of this user have {MODELS} models already" in refusal
    assert "the limit that $NNFMQ_USER_MODELS of the driver sets" in refusal
    assert ann.run(f"bursts = [models[0].burst() for _ in range({THREADS - 2})]") is None
    refusal = ann.run("models[0].burst()")
    assert "than 6, the limit that $NNFMQ_CLIENT_THREADS of the driver sets" in refusal
    assert ann.run("bursts += [models[-1].burst() for _ in range(2)]") is None
    assert "the limit that $NNFMQ_USER_THREADS of the driver sets" in ann.run("models[-1].burst()")
    assert ben.run(f"b = c.{one_more}.burst()") is None
    assert ann.run("bursts[0].close(); models[1].close(); b = models[-1].burst()") is None
    assert ann.run(f"m = second.{one_more}") is None
    assert ann.run("second.close()") is None


def test_the_kernel_limits_the_threads_of_a_worker(ann: UserProcess) -> None:
    worker = ann.run("c.worker_pid")
    line = next(line for line in Path(f"/proc/{worker}/limits").read_text().splitlines() if "Max processes" in line)
    soft, hard, _ = line.removeprefix("Max processes").split()
    assert THREADS < int(soft) == int(hard) < 2000


def test_the_clients_of_one_user_have_one_share_of_the_cores(
    ann: UserProcess, ben: UserProcess, driver: Daemon
) -> None:
    until(lambda: ann.run(f"second = {CONNECT}") is None, "the user has a second place")
    with opened_page(driver) as page:
        until(lambda: sorted(Counter(filter(None, page.users)).values())[-2:] == [1, 2], "others have left")
    ann.run("second.close()")


# ----------------------------------------------------------------------------------------------------------------------
# What a user sees.


def test_a_user_sees_his_own_clients_and_root_all(ann: UserProcess, ben: UserProcess, place: Place) -> None:
    for process in (ann, ben):
        process.run("m = c.device('reference').prepare(add_model(), name='secret')")
        process.run(ADDED)
        process.run("s = c.statistics()")
    for process in (ann, ben):
        assert process.run("[(client.uid, client.executions) for client in s.clients]") == [[process.uid, 1]]
        assert process.run("[s.past, s.rejected_clients, s.cache.lookups, s.compile_requests]") == [[], 0, 0, 0]
        assert process.run("[s.serves_several, s.clients_max, s.memory_limit_bytes >> 20]") == [True, PLACES, 160]
    with nnfmq.connect(place.run / "nnfmq.sock", server_uid=pwd.getpwnam(ACCOUNT).pw_uid) as root:
        seen = root.statistics()
        assert {client.uid for client in seen.clients} >= {0, ANN, BEN}
        names = [model.name for client in seen.clients for model in client.models if client.uid in (ANN, BEN)]
        assert names == ["secret", "secret"]
        assert (seen.clients_max, seen.serves_several) == (62, True)


def test_a_user_does_not_trace_the_driver(ann: UserProcess) -> None:
    ann.run("from nnfmq.client.connection.client import *; from nnfmq.serialize import messages")
    call = "c.connection.call(messages.TraceDriver(c.connection.next_call_id()), messages.DriverTraced, (), None)"
    assert f"uid {ANN} does not administer this driver" in ann.run(call)


def test_workers_of_two_users_share_no_memory_that_tells_what_others_do(ann: UserProcess, ben: UserProcess) -> None:
    told = ("nnfmq-statistics", "nnfmq-trace", "nnfmq-calls", "nnfmq-program")
    held = []
    for process in (ann, ben):
        process.run(PREPARE)
        pid = process.run("c.worker_pid")
        maps = [line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
        found = {(words[5].split()[0], words[4]) for words in maps if len(words) > 5 and "/memfd:" in words[5]}
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(fd).removesuffix(" (deleted)")
            if target.startswith("/memfd:"):
                found.add((target, str(fd.stat().st_ino)))
        held.append({each for each in found if each[0].removeprefix("/memfd:") in told})
    assert all(held)
    assert not held[0] & held[1]


# ----------------------------------------------------------------------------------------------------------------------
# Caches.


def test_what_one_user_has_compiled_is_in_no_cache_of_another(
    place: Place, ann: UserProcess, ben: UserProcess, driver: Daemon
) -> None:
    prepare, execute = (
        "m = c.device('compiled').prepare(relu_model())",
        "m.execute(np.full(4, 3, np.float32))[0].tolist()",
    )
    before = set(place.cached(ANN))
    assert ann.run(prepare) is None
    assert ann.run(execute) == [3.0] * 4
    (name,) = set(place.cached(ANN)) - before
    assert name not in place.cached(BEN)
    assert ben.run(prepare) is None
    assert ben.run(execute) == [3.0] * 4
    assert name in place.cached(BEN)  # it says what is compiled; the keys differ
    folders = [place.home / "cache/nnfmq/users" / str(uid) / "nnfmq" for uid in (ANN, BEN)]
    one, other = ((folder / name).read_bytes() for folder in folders)
    assert one[32:64] != other[32:64]
    assert one[64:] == other[64:]
    assert not {"Traceback", "not added", "not used"} & set(driver.program.errors().split())


def test_kernels_that_one_user_has_compiled_are_compiled_again_for_another(
    place: Place, ann: UserProcess, ben: UserProcess, driver: Daemon
) -> None:
    """A user's own next model has none to compile but the new one."""
    for process, uid, count, compiled in ((ann, ANN, 3, 3), (ann, ANN, 4, 1), (ben, BEN, 3, 3), (ben, BEN, 4, 1)):
        process.run("totals = [0]; count = lambda _, total: totals.append(total)")
        before = set(kernels_of(place, uid))
        process.run(f"c.device('compiled').prepare(logistics_model({count}), progress=count).close()")
        assert process.run("totals[-1]") == compiled
        until(lambda: len(kernels_of(place, uid).keys() - before) == compiled, "they are stored")  # noqa: B023  it is called here
    one, other = kernels_of(place, ANN), kernels_of(place, BEN)
    common = one.keys() & other.keys()
    assert len(common) >= 4 and all(one[name][32:64] != other[name][32:64] for name in common)
    assert all(one[name][64:] == other[name][64:] for name in common)
    assert not {"Traceback", "not added", "not used"} & set(driver.program.errors().split())


def kernels_of(place: Place, uid: int) -> dict[str, bytes]:
    """Return the complete files of kernels that clients of a uid have in the cache, by name."""
    paths = (place.home / "cache" / "nnfmq" / "users" / str(uid) / "nnfmq").glob("kernels/*")
    return {path.name: path.read_bytes() for path in paths if not path.name.startswith(".")}


def test_a_second_client_of_a_user_reads_what_the_first_has_compiled(
    place: Place, users: dict[int, UserProcess]
) -> None:
    with connected(users[ANN]) as first:
        first.run(PREPARE)
    before = stored(place)
    with connected(users[ANN]) as second:
        assert second.run(f"m = {PREPARE}") is None
        assert second.run(ADDED) == [[2.0] * 4]
    after = stored(place)
    assert {path: info.st_ino for path, info in before.items()} == {path: info.st_ino for path, info in after.items()}
    assert sum(after[path].st_mtime_ns > before[path].st_mtime_ns for path in before) == 1


def stored(place: Place) -> dict[str, os.stat_result]:
    """Return what Ann's clients have in the cache."""
    folder = place.home / "cache" / "nnfmq" / "users" / str(ANN) / "nnfmq"
    return {name: (folder / name).stat() for name in place.cached(ANN)}


def test_no_worker_and_no_client_can_enter_the_caches(place: Place, ann: UserProcess) -> None:
    ann.run(PREPARE)
    uid = int(words_of(ann.run("c.worker_pid"))["Uid"][0])
    paths = [place.home / "cache/nnfmq", place.home / "state/nnfmq/cache.key", place.home / "state/nnfmq/users"]
    with user(place, uid) as compromised:
        compromised.receive()
        for path in paths:
            for process in (compromised, ann):
                assert "PermissionError(13," in str(process.run(f"os.open('{path}/x', os.O_RDONLY)")), path
