"""The place of an event of `tools/chaos.py`: a driver with the hooks of `chaos_steps`, and its neighbour.

A `Place` has a supervisor with a model repository, a directory of models, a cache, which is a small file system of its
own if this process may mount one, and a neighbour: another client, whose executions no event may disturb. `traces` are
what the driver has at a time, so that what an event leaves behind is a difference.
"""

from __future__ import annotations

import faulthandler
import os
import pwd
import re
import select
import shutil
import signal
import subprocess
import time
from collections import Counter
from contextlib import ExitStack, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from bench_support import has_exited
from chaos_clients import CALL_S, SURPLUS, Account, Times, add_version, run_neighbour
from chaos_program import PROGRAM_VARIABLE, write_program
from chaos_steps import PAGE_VARIABLE, Page, Role

from nnfmq.base import settings
from nnfmq.base.processes import child_environment
from nnfmq.lab.child_processes import BenchmarkFailed

START_S = 120.0
LATE_S = 2.0
"""A call that ends so long after its deadline has hung."""
SETTLE_S = 20.0
"""What is still there so long after the end of the client was left behind."""
AFTER_EXIT_S = 2.0
"""Of an unfinished compilation, which may go on without its client."""
_CALM_S = 0.4
"""The repository looks at its directory several times meanwhile."""
_STACKS_S = 0.5
DISK_BYTES = 16 << 20
_STAYING = {"supervisor": 1, "repository": 1, "worker": 2}
"""The processes of a place at rest; the workers are the neighbour's and the repository's."""
GONE = (FileNotFoundError, ProcessLookupError)

# ----------------------------------------------------------------------------------------------------------------------
# The processes


class Fork:
    """A fork of the tool, with a connection to it. The tool has one thread, so a fork is a whole process."""

    def __init__(self, pid: int, connection: Connection) -> None:
        self.pid = pid
        self.connection = connection
        self.pidfd = os.pidfd_open(pid)

    def has_exited(self, wait_s: float = 0.0) -> bool:
        """Wait for the exit; return whether it has exited."""
        return has_exited(self.pidfd, wait_s)

    def end(self) -> None:
        """Kill it if it still runs, and reap it."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.connection.close()
        os.close(self.pidfd)


def fork(run: Any, page: Page, log: Path, uid: int | None = None) -> Fork:
    """Fork a client, which calls `run(connection)` under `uid`, None: this process's.

    Its traceback comes to `log` at SIGUSR1.
    """
    parent_end, child_end = Pipe()
    pid = os.fork()
    if pid == 0:
        _run_fork(run, child_end, page, log, uid)
    child_end.close()
    return Fork(pid, parent_end)


def _run_fork(run: Any, connection: Connection, page: Page, log: Path, uid: int | None) -> NoReturn:
    status = 1
    try:
        os.closerange(3, connection.fileno())
        os.closerange(connection.fileno() + 1, 1 << 14)
        errors = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(errors, 2)
        faulthandler.register(signal.SIGUSR1)
        if uid is not None:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        page.report_role(Role.CLIENT)
        run(connection)
        status = 0
    except EOFError:
        status = 0  # the tool has closed its end
    except BaseException:  # noqa: BLE001  the last frame of this process
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)


class Traces(NamedTuple):
    """What a driver has: its processes by role, and the descriptors and shared mappings of those that stay."""

    processes: dict[str, int]
    resources: dict[str, Counter[str]]

    @property
    def serves_models(self) -> bool:
        """Whether the repository is connected to the driver: it has memory for its calls."""
        return any("nnfmq-calls" in name for name in self.resources.get("repository", ()))

    def differences(self, other: Traces) -> list[str]:
        """Return what this has and `other` has not, and the reverse, in words."""
        found = [
            f"{count} {name} processes instead of {other.processes.get(name, 0)}"
            for name, count in {**dict.fromkeys(other.processes, 0), **self.processes}.items()
            if count != other.processes.get(name, 0)
        ]
        for name, counts in self.resources.items():
            before = other.resources.get(name, Counter())
            more, fewer = counts - before, before - counts
            if more or fewer:
                found.append(f"the {name} has more: {dict(more)}, fewer: {dict(fewer)}")
        return found


def resources_of(pid: int) -> Counter[str]:
    """Count what a process has open, by the kinds of files, and its shared mappings."""
    found: Counter[str] = Counter()
    with suppress(*GONE):
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with suppress(*GONE):
                found[re.sub(r":\[.*", "", os.readlink(f"/proc/{pid}/fd/{entry}"))] += 1
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "/memfd:" in line:
                found[f"mapping of {line.split('/memfd:')[1]}"] += 1
    return found


def environment_of(pid: int) -> bytes:
    """Return the variables with which a process was started; empty if it has exited, or is starting a program."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


# ----------------------------------------------------------------------------------------------------------------------
# The place


class Users(NamedTuple):
    """The uids of a driver for several users: its account's, the clients' and the neighbour's, and those of workers."""

    driver: int
    client: int
    neighbour: int
    workers: range

    @property
    def options(self) -> list[str]:
        """Return the options of such a driver."""
        account = pwd.getpwuid(self.driver).pw_name
        uids = f"{self.workers[0]}-{self.workers[-1]}"
        allowed = [str(self.client), str(self.neighbour)]
        return ["--user", account, "--worker-uids", uids, "--allow-user", *allowed]


def several_users() -> Users:
    """Return uids that no account has, and the account `nobody`, which every system has."""
    return Users(pwd.getpwnam("nobody").pw_uid, 21101, 21102, range(23100, 23164))


class Place:
    """A driver and its neighbour, in an empty folder. `stack` ends everything that it has.

    `users` is None if the driver serves one user, the tool's.
    """

    def __init__(self, folder: Path, page: Page, stack: ExitStack, users: Users | None = None) -> None:
        self.users = users
        self.account = None if users is None else Account(users.client, users.driver)
        self.folder = folder
        self.page = page
        self.models = folder / "models"
        self.cache = folder / "cache"
        self.log = folder / "driver.log"
        self.socket = str(folder / "driver.sock")
        self.repository_deaths = 0
        self._log_read = 0
        self._strangers: set[int] = set()  # processes of others
        self.state = folder / "state"
        for directory in (self.models, self.cache, self.state):
            directory.mkdir()
        self._add_model()
        self.has_own_disk = _mounted(self.cache, stack)
        write_program(folder / "program")
        if users is not None:
            self._give_away(users)
        self.daemon = self._start(stack)
        stack.callback(self._end)
        neighbour = None if users is None else Account(users.neighbour, users.driver)
        self.neighbour = fork(
            lambda connection: run_neighbour(connection, self.socket, neighbour),
            self.page,
            self.log,
            None if neighbour is None else neighbour.uid,
        )
        stack.callback(self.neighbour.end)
        self.neighbour_worker: int = self._receive(self.neighbour)

    def _give_away(self, users: Users) -> None:
        """Let the driver's account write where it must, clients change the models, and all enter the folders."""
        for path in (self.folder, self.cache, self.state):
            os.chown(path, users.driver, -1)
        for path in (self.folder.parent, self.folder, self.folder / "program"):
            path.chmod(0o755)
        self.models.chmod(0o777)
        self.page.path.chmod(0o666)

    def _add_model(self) -> None:
        """Add a model that stays, so that the repository has a worker."""
        add_version(self.models / "stays", 1)

    def _start(self, stack: ExitStack) -> subprocess.Popen[str]:
        program = str(self.folder / "program")
        words = ["serve", "--socket", self.socket, "--models", str(self.models), "--allow-device-status"]
        words += ["--exit-with", str(os.getpid()), *([] if self.users is None else self.users.options)]
        variables = {
            "XDG_CACHE_HOME": str(self.cache),
            "XDG_STATE_HOME": str(self.state),
            PAGE_VARIABLE: str(self.page.path),
            PROGRAM_VARIABLE: program,
            settings.PROCESS_CLIENTS.variable: str(SURPLUS),
            settings.COMPILE_AFTER_EXIT_S.variable: str(AFTER_EXIT_S),
            settings.CACHE_MIB.variable: "8",
            settings.RUNTIMES.variable: "",  # a broken model would be tried in each
        }
        log = stack.enter_context(self.log.open("a"))
        process = subprocess.Popen(
            [program, "-P", "-m", "nnfmq", *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
            text=True, env=child_environment(variables), start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], START_S)
        if not ready or "listening" not in process.stdout.readline():
            raise BenchmarkFailed(f"the driver did not start: {self.log.read_text(errors='replace')[-2000:]}")
        return process

    def _end(self) -> None:
        """End the driver with all its processes, whatever state they are in."""
        self.daemon.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.daemon.wait(5)
        for pid in (self.daemon.pid, *self.processes()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.daemon.wait()
        if self.daemon.stdout is not None:
            self.daemon.stdout.close()

    def _receive(self, fork: Fork) -> Any:
        if not fork.connection.poll(START_S):
            raise BenchmarkFailed("the neighbour does not reply")
        return fork.connection.recv()

    # -- processes ----------------------------------------------------------------------------------------------------

    def processes(self) -> list[int]:
        """Return the pids of all processes of the driver, also of those that have lost their parents.

        A process of others is looked at once: nobody but the driver's processes starts some of the driver.
        """
        text = f"{PAGE_VARIABLE}={self.page.path}\0".encode()
        pids = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        self._strangers &= pids
        own = []
        for pid in sorted(pids - self._strangers):
            found = environment_of(pid)
            if text in found:
                own.append(pid)
            elif found:  # it has none in the middle of execve(2)
                self._strangers.add(pid)
        return own

    def of_role(self, role: Role) -> list[int]:
        """Return the pids of the driver's processes with a role."""
        return [pid for pid in self.processes() if self.page.role_of(pid) is role]

    def traces(self) -> Traces:
        """Return what the driver has now. A compile server may stay, with what the supervisor has for it."""
        roles = {pid: self.page.role_of(pid) for pid in self.processes()}
        counts = Counter("unknown" if role is None else role.text for role in roles.values())
        staying = [("supervisor", self.daemon.pid), ("neighbour's worker", self.neighbour_worker)]
        staying += [("repository", pid) for pid, role in roles.items() if role is Role.REPOSITORY]
        resources = {name: resources_of(pid) for name, pid in staying}
        if counts.pop(Role.COMPILE_SERVER.text, 0):
            resources["supervisor"] -= Counter({"socket": 1, "anon_inode": 1, "pipe": 1})
        return Traces(dict(counts), resources)

    def baseline(self, calm_s: float = _CALM_S) -> Traces:
        """Return what the driver has as soon as only what stays is there, and nothing has changed for `calm_s`.

        The repository has connected by then: on a busy machine that may take longer.

        Raises:
            BenchmarkFailed: If that does not come within START_S.
        """
        end, since, found = time.monotonic() + START_S, time.monotonic(), self.traces()
        while found.processes != _STAYING or not found.serves_models or time.monotonic() < since + calm_s:
            time.sleep(0.02)
            now = self.traces()
            if now.differences(found):
                since, found = time.monotonic(), now
            if time.monotonic() > end:
                raise BenchmarkFailed(f"the driver does not come to rest: {found.processes}")
        return found

    def settle(self, wanted: Traces) -> list[str]:
        """Wait until the driver has what it had before; return what differs SETTLE_S later."""
        end = time.monotonic() + SETTLE_S
        while True:
            differences = self.traces().differences(wanted)
            if not differences or time.monotonic() > end:
                return differences
            time.sleep(0.01)

    def neighbour_report(self) -> tuple[Times, list[str]]:
        """Return the times of the neighbour's executions since the last report, and what was wrong."""
        with suppress(BrokenPipeError):
            self.neighbour.connection.send(None)
        if not self.neighbour.connection.poll(CALL_S + LATE_S):
            return {}, ["it does not reply"]
        try:
            times, wrong = self.neighbour.connection.recv()
        except EOFError:
            return {}, ["it has ended"]
        return times, wrong

    def new_log(self) -> str:
        """Return what the driver has logged since the last call."""
        with self.log.open("rb") as file:
            file.seek(self._log_read)
            data = file.read()
        self._log_read += len(data)
        return data.decode(errors="replace")

    def log_stacks(self) -> None:
        """Let all processes of the driver write to the log where each of their threads is."""
        for pid in self.processes():
            with suppress(*GONE):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(_STACKS_S)

    def remove_models(self) -> None:
        """Remove the models that killed clients have left."""
        for entry in self.models.iterdir():
            if entry.name != "stays":
                shutil.rmtree(entry, ignore_errors=True)


def _mounted(directory: Path, stack: ExitStack) -> bool:
    """Mount a small file system for the cache, if this process may; return whether it is there."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "nnfmq-chaos", str(directory)]
    try:
        is_mounted = subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0
    except FileNotFoundError:
        return False
    if is_mounted:
        stack.callback(lambda: subprocess.run(["umount", "-l", str(directory)], check=True))
    return is_mounted
