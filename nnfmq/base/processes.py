"""Processes that nnfmq starts and that it looks at: environment, end with the parent, CPUs, and what /proc tells."""

from __future__ import annotations

import ctypes
import os
import re
import select
import signal
import site
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import NamedTuple, Protocol

__all__ = [
    "ONE_THREAD",
    "ProcessUsage",
    "StartedProcess",
    "allowed_cores",
    "allowed_cpus",
    "child_environment",
    "children",
    "command_name",
    "container_ends_with_this",
    "cpu_quota",
    "cpus_by_core",
    "descendants",
    "environment",
    "exits_within",
    "is_child_stopped",
    "kill_and_reap",
    "pid_namespace",
    "process_usage",
    "raise_in_thread",
    "request_signal_at_parent_exit",
    "set_default_variables",
    "shown_name",
    "use_one_blas_thread",
]

ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables that are 1 in a child process, because idle threads of BLAS spin."""
_NONE: Mapping[str, str] = MappingProxyType({})


def use_one_blas_thread() -> None:
    """Let BLAS start no threads in this process. Call it before NumPy is imported, and with it BLAS."""
    os.environ.update(dict.fromkeys(ONE_THREAD, "1"))


def set_default_variables(variables: Mapping[str, str]) -> None:
    """Set those variables of this process's environment that are not set. Libraries read them when they are loaded."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def environment() -> dict[str, str]:
    """Return the environment of this process, as it is now."""
    return dict(os.environ)


def child_environment(variables: Mapping[str, str] = _NONE, *, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of this process, or `base`, with what a child needs, and with `variables`.

    The child is started with -P, so that it imports nothing from the working directory.
    """
    environment = {**(os.environ if base is None else base), **dict.fromkeys(ONE_THREAD, "1"), **variables}
    root = str(Path(__file__).parents[2])
    if root not in (*site.getsitepackages(), site.getusersitepackages()):
        inherited = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = root if not inherited else f"{root}{os.pathsep}{inherited}"
    return environment


class StartedProcess(Protocol):
    """A child process, as `subprocess.Popen` is."""

    pid: int

    def poll(self) -> int | None:
        """Return the exit status, and reap it; None if it still runs."""

    def wait(self) -> int:
        """Wait for the exit, and return the status."""
        ...

    def kill(self) -> None:
        """Send SIGKILL."""


def exits_within(process: StartedProcess, wait_s: float) -> bool:
    """Return whether a child process has exited, or does within a time, in seconds. Blocks for that at most.

    `Popen.wait` with a timeout would look for it at intervals of up to 50 ms.
    """
    if process.poll() is not None:
        return True
    pidfd = os.pidfd_open(process.pid)
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(wait_s * 1e3))
    finally:
        os.close(pidfd)


KILLED_S = 2.0


def kill_and_reap(process: StartedProcess) -> bool:
    """Kill a child process if it still runs, and reap it; return whether it has ended. Blocks for KILLED_S at most.

    If a system call that it makes does not return, it outlives its SIGKILL: then the log says so, and `subprocess`
    reaps it when this process starts another child.
    """
    process.kill()
    if exits_within(process, KILLED_S):
        process.wait()
        return True
    import logging  # this happens with a file system that does not answer

    text = "process %d has been killed and does not end: a system call that it makes does not return"
    logging.getLogger("nnfmq.processes").error(text, process.pid)
    return False


def is_child_stopped(kind: int, child: int) -> bool:
    """Return whether a child process, named as waitid(2) does, is stopped. It is not reaped if it has exited."""
    try:
        return os.waitid(kind, child, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # somebody has reaped it
        return False


def is_paused(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped a process. False if it has exited."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except _GONE:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")  # the name before may contain anything


# ----------------------------------------------------------------------------------------------------------------------
# What the kernel does with a process when its parent exits: PR_SET_PDEATHSIG of prctl(2).
#
# SIGKILL ends the process, also if it is stopped; SIGCONT only continues it, so that it can notice by itself whether to
# end. The kernel sends the signal when the *thread* exits that started the process, so that thread must live as long as
# the process should.


_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_prctl = ctypes.CDLL(None, use_errno=True).prctl
_prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]


_raise_in_thread = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_in_thread.argtypes = [ctypes.c_ulong, ctypes.py_object]


def raise_in_thread(thread: int, exception: type[BaseException]) -> None:
    """Let another thread raise an exception as soon as it executes Python code; `thread` is its `get_ident()`.

    The caller must know that the thread is in code that handles it.
    """
    _raise_in_thread(thread, exception)


_NAME_BYTES_MAX = 15


def set_name(name: str) -> None:
    """Give the calling thread a name for ps, top and debuggers, cut after 15 bytes; the main thread's is the process's.

    It tells the role: processes that were forked have their parent's command line. Never fails.
    """
    text = ctypes.create_string_buffer(name.encode()[:_NAME_BYTES_MAX])
    _prctl(_PR_SET_NAME, ctypes.addressof(text), 0, 0, 0)


def request_signal_at_parent_exit(number: signal.Signals) -> None:
    """Let the kernel send `number` to this process when its parent exits; nothing is sent if it has exited before.

    Raises:
        OSError: If the kernel refuses.
    """
    if _prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


# ----------------------------------------------------------------------------------------------------------------------
# How many CPUs and cores this process may use: by its affinity mask, and by the CPU quota of its control groups.
#
# A container with two CPUs of quota on a machine of sixteen sees all sixteen in its affinity mask. Sixteen threads use
# up the quota of a period in an eighth of it, and the kernel stops all of them until the next one, which is a delay of
# up to 100 ms. So as many threads run as there are whole CPUs of quota. This is the only module that reads the quota.
#
# CPUs that share a core (hyper-threads) also share its multipliers, which one thread of a kernel keeps busy: a second
# one brings only the cost of its synchronization. A hypervisor may hide from its guest which CPUs share a core: then
# each counts as a core.


_MEMBERSHIP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")
_UNIFIED = ("", "unified")  # where version 2 is mounted: alone, and beside version 1
_CPU_CONTROLLER = ("cpu,cpuacct", "cpu")  # where the controller of version 1 is mounted
_CPU_FOLDERS = Path("/sys/devices/system/cpu")


def allowed_cpus() -> int:
    """Return the number of CPUs that this process may use at the same time, at least 1."""
    return _within_quota(len(os.sched_getaffinity(0)))


def allowed_cores(folder: Path = _CPU_FOLDERS) -> int:
    """Return the number of cores that this process may use at the same time, at least 1: the default of threads.

    `folder` has a folder for each CPU, as sysfs. A CPU of which it does not tell the core counts as one.
    """
    return _within_quota(len(cpus_by_core(os.sched_getaffinity(0), folder)))


def cpus_by_core(cpus: Iterable[int], folder: Path = _CPU_FOLDERS) -> list[list[int]]:
    """Return `cpus` in ascending order, those that share a core in one list. Arguments as for `allowed_cores`."""
    found: dict[str, list[int]] = {}
    for cpu in sorted(cpus):
        siblings = _text(folder / f"cpu{cpu}/topology/thread_siblings_list").strip()
        found.setdefault(siblings or str(cpu), []).append(cpu)
    return list(found.values())


def _within_quota(count: int) -> int:
    quota = cpu_quota()
    return count if quota is None else max(1, min(count, int(quota)))


def cpu_quota(membership: Path = _MEMBERSHIP, cgroups: Path = _CGROUPS) -> float | None:
    """Return the CPU time per time that the process's groups allow, such as 1.5; None if there is no limit.

    A group's limit holds for the groups in it, so the smallest one on the way to the root counts. What cannot be read
    is no limit: in a container the names of outer groups need not exist in its file system.
    """
    return min(_quotas(membership, cgroups), default=None)


def _quotas(membership: Path, cgroups: Path) -> Iterator[float]:
    for line in _text(membership).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        is_unified = number == "0" and not controllers
        if not is_unified and "cpu" not in controllers.split(","):
            continue
        for mount in _UNIFIED if is_unified else _CPU_CONTROLLER:
            for group in _with_parents(name):
                folder = cgroups / mount / group
                yield from _unified_quota(folder) if is_unified else _controller_quota(folder)


def _with_parents(name: str) -> Iterator[str]:
    path = PurePosixPath("/", name)
    for group in (path, *path.parents):
        if ".." not in group.parts:  # a group outside of the namespace's root
            yield str(group).lstrip("/")


def _unified_quota(folder: Path) -> Iterator[float]:
    """Read `cpu.max`: quota, or "max", and period, in µs."""
    yield from _ratio(*_text(folder / "cpu.max").split()[:2])


def _controller_quota(folder: Path) -> Iterator[float]:
    """Read the files of version 1: a quota of -1 is no limit."""
    yield from _ratio(_text(folder / "cpu.cfs_quota_us").strip(), _text(folder / "cpu.cfs_period_us").strip())


def _ratio(quota: str = "", period: str = "") -> Iterator[float]:
    if quota.isdecimal() and period.isdecimal() and int(quota) and int(period):
        yield int(quota) / int(period)


def _text(path: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text("utf-8")
    return ""


# ----------------------------------------------------------------------------------------------------------------------
# CPU time, memory, name and children of a process, from /proc at the time of the call.


_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_EXITED = (FileNotFoundError, ProcessLookupError)
_GONE = (*_EXITED, PermissionError)


class ProcessUsage(NamedTuple):
    """The use of a process: CPU time of all its threads, resident memory, and the number of threads."""

    cpu_ns: int
    resident_bytes: int
    threads: int


def process_usage(pid: int) -> ProcessUsage | None:
    """Return the use of a process; None if it has exited, or is in another pid namespace."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except _GONE:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before may contain anything; proc(5) counts from 1
    user, system, threads, pages = (int(fields[number - 3]) for number in (14, 15, 20, 24))
    return ProcessUsage((user + system) * _TICK_NS, pages * _PAGE_BYTES, threads)


def command_name(pid: int) -> str:
    """Return a short name of a program: its file, or the script or module that Python runs; empty if it has exited.

    The kernel reads the memory of the process for this, and waits as long as that lets it wait: a process of the driver
    calls this for no client but its own application. Clients send the name of their program (`Hello`).
    """
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except _GONE:
        return ""
    name = os.path.basename(words[0])
    if name.startswith("python"):
        name = _script(words[1:]) or name
    return shown_name(name)


def shown_name(name: str) -> str:
    """Return a program's name, which a stranger chooses, as it is shown: 40 characters that can be printed."""
    return "".join(character if character.isprintable() else "�" for character in name[:40])


def _script(arguments: list[str]) -> str:
    """Return the script or module that Python runs with these arguments; empty for `-c`, and if there is none.

    Python's options may be joined (`-Bm module`), and the value of one may be joined to it (`-Werror`).
    """
    words = iter(arguments)
    for word in words:
        option = re.match(r"-[^-cmWX]*([cmWX]?)(.*)", word, re.DOTALL)
        if word == "-" or (option and option[1] == "c"):
            return ""
        if option and option[1] == "m":
            return option[2] or next(words, "")
        if word == "--check-hash-based-pycs" or (option and option[1] and not option[2]):
            next(words, None)  # its value
        elif word and not word.startswith("-"):
            return os.path.basename(word.rstrip("/")) or word
    return ""


def pid_namespace() -> int:
    """Return a number of this process's PID namespace, in which pids mean what they do here; 0 if /proc has none."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


_FIRST_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO of Linux


def container_ends_with_this() -> bool:
    """Return whether a container ends with this process: it is the first one, or that has started it (`--init`)."""
    is_in_container = pid_namespace() not in (0, _FIRST_PID_NAMESPACE)
    return os.getpid() == 1 or (os.getppid() == 1 and is_in_container)


def children(pid: int) -> list[int]:
    """Return the pids of a process's children; none if it has exited."""
    found: list[int] = []
    with suppress(*_EXITED):
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(*_EXITED):  # the thread has ended
                found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """Return the pids of all descendants of a process."""
    found = []
    for child in children(pid):
        found += [child, *descendants(child)]
    return found
